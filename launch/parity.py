"""Trains a small GPT, unless its snapshots are in the output folder, and reports how exact log-probabilities are on it.

Arguments of the training, those of snapshots.py, may come first, ended by `--`; the others go to the report.
"""

import os
import sys

from training.packages import require
from training.refusal import Refusal, check_file, fail


def main(argv: list[str]) -> None:
    require("omegaconf", "pydantic", "rich", "tokenizers", "numpy", "torch", "safetensors")
    from parallel_lce.bench.parity import parse_arguments
    from training.snapshot_config import parse_snapshots
    from training.torchrun import split_arguments

    training, arguments = split_arguments(argv)
    options = parse_arguments(arguments, "./launch/parity.sh")
    if options.json:
        check_file("--json", options.json)
    config = parse_snapshots(__doc__, training)

    from training.snapshot_run import is_trained, run, snapshots_in

    if not is_trained(config):
        run(config)
    # Another process, since this one still holds memory of the device. No file in the user's folder stands in for a
    # module of it.
    command = [sys.executable, "-P", "-m", "parallel_lce.bench.parity", *map(str, snapshots_in(config.output))]
    os.execve(command[0], [*command, *arguments], os.environ | {"PYTHONSAFEPATH": "1"})


if __name__ == "__main__":
    try:
        main(sys.argv[1:])
    except Refusal as refusal:
        fail(str(refusal))
