"""Starts processes on this host through torchrun, after checks of its arguments, the host and the text."""

import contextlib
import io
import logging
import os
import subprocess
import sys
from pathlib import Path
from typing import TYPE_CHECKING
from unittest import mock

from training.refusal import Refusal, check_folder

if TYPE_CHECKING:
    from training.config import Config

PROGRAM = str(Path(__file__).resolve().parents[1] / "program.py")


def processes_of(torchrun: list[str]) -> tuple[int, int]:
    """The number of nodes that torchrun starts with these arguments (of an elastic range the largest), and the number
    of processes on each node. Raises a Refusal if torchrun refuses the arguments, or if they name a program: the caller
    adds the program."""
    from torch.distributed import run

    said = io.StringIO()
    logging.disable(logging.WARNING)
    try:
        with contextlib.redirect_stderr(said), mock.patch.dict(os.environ):  # torchrun's parser changes it
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
    finally:
        logging.disable(logging.NOTSET)


class Training:
    """A training. `torchrun`: torchrun's own arguments; if there are none, all processes run on this host. `arguments`:
    the other arguments of the command line."""

    def __init__(self, config: "Config", torchrun: list[str], arguments: list[str]):
        self.config, self.arguments = config, arguments
        self.torchrun = torchrun or ["--standalone", "--nproc-per-node", str(config.parallel.processes)]
        self.hosts, self.here = processes_of(self.torchrun)
        check_processes(config, self.hosts * self.here)

    def prepare(self) -> None:
        """Raises a Refusal for a training that cannot work. Tokenizes the text into this host's cache, so that the
        ranks only read it."""
        from training.text import load_text

        config = self.config
        uses_cuda(config, self.here)
        folders = {"output": config.output, "text.cache": config.text.cache, "compare.report": config.compare.report}
        for name, folder in folders.items():
            if folder is not None:
                check_folder(name, folder)
        text = load_text(config.text, say=lambda line: print(line, flush=True))
        needed = ((config.train.held_out_samples or 0) + 1) * (config.train.sequence + 1)
        if len(text.tokens) < needed:
            raise Refusal(f"{text.source} has {len(text.tokens)} tokens, fewer than the {needed} of the samples")
        used = f"{text.entries:,} of the {config.vocab_size:,} entries of the vocabulary stand for text"
        print(f"{text.source}: {len(text.tokens):,} tokens; {used}", flush=True)

    def run(self, *overrides: str) -> int:
        """Trains, with these arguments too; the exit status."""
        return subprocess.run(self.command(*overrides), env=self.environment()).returncode

    def command(self, *overrides: str) -> list[str]:
        # -P: without it a file signal.py in the current folder would be imported in place of Python's own.
        torchrun = [sys.executable, "-P", "-m", "torch.distributed.run", *self.torchrun]
        return [*torchrun, PROGRAM, "train", *self.arguments, *overrides]

    def environment(self) -> dict[str, str]:
        """This process's environment, and defaults for the variables that it does not set."""
        cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
        defaults = {
            # The ranks of a host share its cores. More than four threads do not make a small model faster.
            "OMP_NUM_THREADS": str(min(4, max(1, cores // self.config.parallel.processes))),
            "CUDA_DEVICE_MAX_CONNECTIONS": "1",  # collectives then start in the order of launch, ahead of GEMMs
            "CUBLAS_WORKSPACE_CONFIG": ":4096:8",  # deterministic cuBLAS
        }
        return defaults | os.environ


def check_processes(config: "Config", started: int) -> None:
    parallel = config.parallel
    if started != parallel.processes:
        raise Refusal(f"{parallel.layout} needs {parallel.processes} processes, torchrun started {started}")


def uses_cuda(config: "Config", here: int) -> bool:
    """Whether this host's `here` processes train on GPUs. Raises a Refusal if its devices cannot train this."""
    device = config.parallel.device
    if device == "cpu":
        return False
    import torch

    from training.config import check_for_cpu

    gpus = torch.cuda.device_count()
    if device == "cuda" and gpus < here:
        raise Refusal(f"parallel.device=cuda needs a GPU for each of this host's {here} processes, found {gpus}")
    if gpus < here:
        check_for_cpu(config)
    return gpus >= here
