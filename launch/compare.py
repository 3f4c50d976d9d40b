"""Compares runs that demo.py left in the output folder, perhaps on another machine. Takes the arguments of demo.py.

Exits with 1 if the loss curves part.
"""

import sys

from training.packages import require
from training.refusal import Refusal, fail


def main(argv: list[str]) -> int:
    require("omegaconf", "pydantic", "rich", "torch", "matplotlib")
    from training.config import parse_command_line
    from training.torchrun import split_arguments

    config = parse_command_line(__doc__, split_arguments(argv)[1])

    from training.comparison_report import report  # PyTorch and matplotlib load for seconds

    return report(config, argv)


if __name__ == "__main__":
    try:
        sys.exit(main(sys.argv[1:]))
    except Refusal as refusal:
        fail(str(refusal))
