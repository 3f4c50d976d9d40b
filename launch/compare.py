"""Compares runs that demo.py left in the output folder, perhaps on another machine. Takes the arguments of demo.py.

Exits with 1 if the loss curves part.
"""

import shlex
import sys
from pathlib import Path

from training.packages import require
from training.refusal import Refusal, check_folder, fail

require("omegaconf", "pydantic", "rich", "torch", "matplotlib")

from rich.console import Console  # noqa: E402

from training.compare import compare  # noqa: E402
from training.config import Config, parse_command_line  # noqa: E402
from training.report import show, write  # noqa: E402
from training.torchrun import split_arguments  # noqa: E402


def report(config: Config, argv: list[str]) -> int:
    """Prints and writes the report; 0 if the loss curves agree. `argv` are the arguments that demo.py was given."""
    console = Console()
    comparison = compare(config)
    show(comparison, console)
    folder = Path(config.compare.report or config.output)
    check_folder("compare.report", str(folder))
    try:
        write(comparison, folder, config.compare.tolerance, shlex.join(["./launch/demo.sh", *argv]))
    except OSError as error:
        raise Refusal(f"the report cannot be written: {error}") from None
    console.print(f"report: {folder / 'report.md'}", soft_wrap=True)
    console.print(comparison.verdict, style="bold green" if comparison.agree else "bold red", soft_wrap=True)
    return 0 if comparison.agree else 1


if __name__ == "__main__":
    argv = sys.argv[1:]
    try:
        sys.exit(report(parse_command_line(__doc__, split_arguments(argv)[1]), argv))
    except Refusal as refusal:
        fail(str(refusal))
