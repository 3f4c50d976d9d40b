"""Starting a run: each host prepares the text once, then torchrun starts its processes."""

import os
import sys
from pathlib import Path

from rich.console import Console

from training.config import Config
from training.refusal import Refusal
from training.text import load_text

PROGRAM = Path(__file__).resolve().parents[1] / "train.py"


def prepare_text(config: Config) -> None:
    """Fills this host's cache of tokens before any rank starts, so that the ranks only read it.

    Raises a Refusal if there is no text, or too little.
    """
    console = Console(soft_wrap=True)
    try:
        load_text(config.text, config.train.sequence + 1, say=console.print)
    except (OSError, ValueError) as error:
        raise Refusal(str(error)) from None


def torchrun_command(config: Config, torchrun: list[str], arguments: list[str]) -> list[str]:
    """The command line that trains with `arguments`, those of train.py, on this host or as `torchrun` says."""
    if not torchrun:
        torchrun = ["--standalone", "--nproc-per-node", str(config.parallel.processes)]
    # -P: no file in the user's folder stands in for a module.
    return [sys.executable, "-P", "-m", "torch.distributed.run", *torchrun, str(PROGRAM), *arguments]


def environment(config: Config) -> dict[str, str]:
    """This process's environment, with defaults that a training run wants where nothing is set."""
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    defaults = {
        # Ranks on one CPU share its cores; past a few, threads of a small model only wait for one another.
        "OMP_NUM_THREADS": str(min(4, max(1, cores // config.parallel.processes))),
        "CUDA_DEVICE_MAX_CONNECTIONS": "1",  # Megatron's order of collectives and GEMMs
        "CUBLAS_WORKSPACE_CONFIG": ":4096:8",  # deterministic cuBLAS
    }
    return defaults | os.environ
