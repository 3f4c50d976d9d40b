"""Starts a run on this host: prepares the text once, then makes torchrun's command and environment."""

import os
import sys
from pathlib import Path

from rich.console import Console

from training.config import Config
from training.refusal import Refusal
from training.text import load_text

PROGRAM = Path(__file__).resolve().parents[1] / "train.py"


def prepare_text(config: Config) -> None:
    """Tokenizes the text into this host's cache before any rank starts, so that the ranks only read it.

    Raises a Refusal if there is no text, or too little.
    """
    console = Console(soft_wrap=True)
    try:
        load_text(config.text, config.train.sequence + 1, say=console.print)
    except (OSError, ValueError) as error:
        raise Refusal(str(error)) from None


def torchrun_command(config: Config, torchrun: list[str], arguments: list[str]) -> list[str]:
    """The command line that trains with `arguments`, those of train.py.

    `torchrun` are torchrun's own arguments. If they are empty, all processes run on this host.
    """
    if not torchrun:
        torchrun = ["--standalone", "--nproc-per-node", str(config.parallel.processes)]
    # -P: without it a file signal.py in the current folder would be imported in place of Python's own.
    return [sys.executable, "-P", "-m", "torch.distributed.run", *torchrun, str(PROGRAM), *arguments]


def environment(config: Config) -> dict[str, str]:
    """This process's environment, and defaults for the variables that it does not set."""
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    defaults = {
        # The ranks of a host share its cores. More than four threads do not make a small model faster.
        "OMP_NUM_THREADS": str(min(4, max(1, cores // config.parallel.processes))),
        "CUDA_DEVICE_MAX_CONNECTIONS": "1",  # collectives then start in the order of launch, ahead of GEMMs
        "CUBLAS_WORKSPACE_CONFIG": ":4096:8",  # deterministic cuBLAS
    }
    return defaults | os.environ
