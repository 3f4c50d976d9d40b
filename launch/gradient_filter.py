"""Trains a small GPT, unless its snapshots are in the output folder, and reports what gradient_filter does on it.

Arguments of the training, those of snapshots.py, may come first, ended by `--`; the others go to the report.
"""

import sys

from training.packages import require
from training.refusal import Refusal, fail


def main(argv: list[str]) -> None:
    require("omegaconf", "pydantic", "rich", "tokenizers", "numpy", "torch", "safetensors")
    from benchmarks.gradient_filter import parse_arguments
    from training.snapshot_report import report

    report(__doc__, argv, "gradient_filter", parse_arguments)


if __name__ == "__main__":
    try:
        main(sys.argv[1:])
    except Refusal as refusal:
        fail(str(refusal))
