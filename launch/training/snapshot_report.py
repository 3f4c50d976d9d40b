"""What programs share that train a small GPT, unless its snapshots are in the output folder, and report on them."""

import os
import sys
from argparse import Namespace
from collections.abc import Callable

from training.refusal import check_file
from training.snapshot_config import parse_snapshots
from training.torchrun import split_arguments


def report(description: str | None, argv: list[str], name: str, parse: Callable[[list[str], str], Namespace]) -> None:
    """Trains, then becomes `python -m benchmarks.NAME`, whose command line `parse` checks.

    The arguments of the training may come first, ended by `--`; the others go to the report. Raises a Refusal for a
    user's mistake.
    """
    training, arguments = split_arguments(argv)
    options = vars(parse(arguments, f"./launch/{name}.sh"))
    for written in ("json", "plot"):
        if path := options.get(written):
            check_file(f"--{written}", path)
    config = parse_snapshots(description, training)

    from training.snapshot_run import is_trained, run, snapshots_in

    if not is_trained(config):
        run(config)
    # Another process, since this one still holds memory of the device. No file in the user's folder stands in for a
    # module of it.
    command = [sys.executable, "-P", "-m", f"benchmarks.{name}", *map(str, snapshots_in(config.output))]
    os.execve(command[0], [*command, *arguments], os.environ | {"PYTHONSAFEPATH": "1"})
