"""Measures over tensor-parallel ranks. Checks the whole command line once, so that no rank has to; starts torchrun.

torchrun's own arguments may come first, ended by `--`; without them there is a process for each GPU of this host, or
two where there is none.
"""

import os
import sys
from argparse import Namespace

from training.packages import require
from training.refusal import Refusal, check_file, check_folder, fail
from training.torchrun import processes_of, split_arguments

require("torch", "rich", extra="bench")


def main(argv: list[str]) -> None:
    torchrun, arguments = split_arguments(argv)
    if "--" not in argv:
        torchrun = ["--standalone", "--nproc-per-node", str(_processes_here())]
    nodes, here = processes_of(torchrun)

    from benchmarks.options import parse_arguments

    _check_files(parse_arguments(arguments, nodes * here, here))
    # No file in the user's folder stands in for a module: not in torchrun, nor in the ranks, which it starts with -m.
    command = [sys.executable, "-P", "-m", "torch.distributed.run", *torchrun, "-m", "benchmarks"]
    os.execve(command[0], [*command, *arguments], os.environ | {"PYTHONSAFEPATH": "1"})


def _processes_here() -> int:
    import torch

    return torch.cuda.device_count() or 2


def _check_files(options: Namespace) -> None:
    if options.plot:
        check_file("--plot", options.plot)
    if options.json:
        check_file("--json", options.json)
    if options.trace:
        check_folder("--trace", options.trace)


if __name__ == "__main__":
    try:
        main(sys.argv[1:])
    except Refusal as refusal:
        fail(str(refusal))
