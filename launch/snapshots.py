"""Trains a small GPT in plain PyTorch on one GPU or CPU, and writes what its output layer sees at chosen steps.

Each snapshot is a safetensors file in the output folder: hidden states and next tokens of held-out text, and the
output weight. Without --config: configs/snapshots.yaml where there is a GPU, else configs/snapshots-cpu.yaml.
"""

import sys

from training.packages import require
from training.refusal import Refusal, fail

PACKAGES = ("omegaconf", "pydantic", "rich", "tokenizers", "numpy", "torch", "safetensors")


def main(argv: list[str]) -> None:
    require(*PACKAGES)
    from training.snapshot_config import parse_snapshots

    config = parse_snapshots(__doc__, argv)

    from training.snapshot_run import run

    run(config)


if __name__ == "__main__":
    try:
        main(sys.argv[1:])
    except Refusal as refusal:
        fail(str(refusal))
