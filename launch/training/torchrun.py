"""torchrun's arguments, and what it sets for the processes that it starts."""

import contextlib
import io
import os

from training.refusal import Refusal

TORCHRUN_SETS = ("RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")


def split_arguments(argv: list[str]) -> tuple[list[str], list[str]]:
    """torchrun's own arguments, those in front of a `--` if there is one, and the program's."""
    if "--" not in argv:
        return [], argv
    end = argv.index("--")
    return argv[:end], argv[end + 1 :]


def processes_of(torchrun: list[str]) -> tuple[int, int]:
    """The nodes, and the processes on each, that torchrun starts with these arguments.

    Of an elastic range the most. Raises a Refusal for arguments that torchrun refuses.
    """
    from torch.distributed import run

    said = io.StringIO()
    try:
        with contextlib.redirect_stderr(said):
            # torchrun's parser wants a program behind its own arguments.
            arguments = run.get_args_parser().parse_args([*torchrun, "train.py"])
        nodes = run.parse_min_max_nnodes(arguments.nnodes)[1]
        return nodes, run.determine_local_world_size(arguments.nproc_per_node)
    except SystemExit:
        raise Refusal(f"torchrun: {(said.getvalue().splitlines() or ['--help'])[-1]}") from None
    except (RuntimeError, ValueError) as error:
        raise Refusal(f"torchrun: {error}") from None


def started_by_torchrun() -> bool:
    """Whether torchrun started this process. Raises a Refusal if somebody set a part of what it sets."""
    if "LOCAL_RANK" not in os.environ:
        return False
    missing = [name for name in TORCHRUN_SETS if not os.environ.get(name)]
    if missing:
        raise Refusal(f"LOCAL_RANK is set as torchrun does, but not {', '.join(missing)}: unset it, or use torchrun")
    for name in set(TORCHRUN_SETS) - {"MASTER_ADDR"}:
        if not os.environ[name].isdecimal():
            raise Refusal(f"{name}={os.environ[name]!r} is no number: unset it, or use torchrun")
    return True
