"""torchrun's arguments, and the environment variables that it sets for its processes."""

import contextlib
import io
import logging
import os

from training.refusal import Refusal

PROGRAM = "the program"  # a placeholder: torchrun's parser requires a program after its own arguments
TORCHRUN_SETS = ("RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")


def split_arguments(argv: list[str]) -> tuple[list[str], list[str]]:
    """Splits a command line at the first `--`: torchrun's own arguments, and the program's."""
    if "--" not in argv:
        return [], argv
    end = argv.index("--")
    return argv[:end], argv[end + 1 :]


def processes_of(torchrun: list[str]) -> tuple[int, int]:
    """The number of nodes, and of processes on each, that torchrun starts with these arguments.

    For an elastic range, the largest number of nodes. Raises a Refusal for arguments that torchrun refuses, and for
    those that name a program, since the caller adds its own.
    """
    from torch.distributed import run

    said, before = io.StringIO(), os.environ.copy()
    logging.disable(logging.WARNING)
    try:
        with contextlib.redirect_stderr(said):
            arguments = run.get_args_parser().parse_args([*torchrun, PROGRAM])
        if (arguments.training_script, arguments.training_script_args) != (PROGRAM, []):
            raise ValueError(f"{arguments.training_script!r} in front of -- is none of torchrun's own arguments")
        if arguments.module or arguments.no_python or arguments.run_path:
            raise ValueError("--module, --no-python and --run-path say how to start another program")
        config, *_ = run.config_from_args(arguments)
        return config.max_nodes, config.nproc_per_node
    except (Exception, SystemExit) as error:
        if isinstance(error, SystemExit) and not error.code:  # --help
            raise
        message = said.getvalue() if isinstance(error, SystemExit) else str(error) or type(error).__name__
        raise Refusal(f"torchrun: {message.splitlines()[-1]}") from None
    finally:  # config_from_args changes the environment
        logging.disable(logging.NOTSET)
        os.environ.clear()
        os.environ.update(before)


def started_by_torchrun() -> bool:
    return all(os.environ.get(name) for name in TORCHRUN_SETS)
