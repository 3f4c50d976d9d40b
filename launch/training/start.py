"""Starts a training on this host: checks the host, prepares the text once, then starts torchrun."""

import os
import subprocess
import sys
from functools import cached_property
from pathlib import Path

from training.config import Config, check_for_cpu
from training.refusal import Refusal, check_folder
from training.torchrun import processes_of

PROGRAM = Path(__file__).resolve().parents[1] / "program.py"


class Training:
    """A training with `arguments` on the command line, those of torchrun apart.

    If `torchrun` has none, all processes run on this host.
    """

    def __init__(self, config: Config, torchrun: list[str], arguments: list[str]):
        self.config, self.arguments = config, arguments
        self.torchrun = torchrun or ["--standalone", "--nproc-per-node", str(config.parallel.processes)]

    @cached_property
    def _processes(self) -> tuple[int, int]:
        return processes_of(self.torchrun)

    @property
    def hosts(self) -> int:
        return self._processes[0]

    def prepare(self) -> None:
        """Raises a Refusal for a training that cannot work. Tokenizes the text into this host's cache, so that the
        ranks only read it."""
        hosts, here = self._processes
        check_processes(self.config, hosts * here)
        uses_cuda(self.config, here)
        config = self.config
        folders = {"output": config.output, "text.cache": config.text.cache, "compare.report": config.compare.report}
        for name, folder in folders.items():
            if folder is not None:
                check_folder(name, folder)
        _prepare_text(config)

    def run(self, *overrides: str) -> int:
        """Trains, with these arguments too; the exit status."""
        return subprocess.run(self.command(*overrides), env=self.environment()).returncode

    def command(self, *overrides: str) -> list[str]:
        # -P: without it a file signal.py in the current folder would be imported in place of Python's own.
        torchrun = [sys.executable, "-P", "-m", "torch.distributed.run", *self.torchrun]
        return [*torchrun, str(PROGRAM), "train", *self.arguments, *overrides]

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


def check_processes(config: Config, started: int) -> None:
    parallel = config.parallel
    if started != parallel.processes:
        raise Refusal(f"{parallel.layout} needs {parallel.processes} processes, torchrun started {started}")


def uses_cuda(config: Config, here: int) -> bool:
    """Whether this host's `here` processes train on GPUs. Raises a Refusal if its devices cannot train this."""
    device = config.parallel.device
    if device == "cpu":
        return False
    import torch  # it loads for seconds

    gpus = torch.cuda.device_count()
    if device == "cuda" and gpus < here:
        raise Refusal(f"parallel.device=cuda needs a GPU for each of this host's {here} processes, found {gpus}")
    if gpus < here:
        check_for_cpu(config)
    return gpus >= here


def _prepare_text(config: Config) -> None:
    from training.text import load_text

    text = load_text(config.text, say=lambda line: print(line, flush=True))
    needed = ((config.train.held_out_samples or 0) + 1) * (config.train.sequence + 1)
    if len(text.tokens) < needed:
        raise Refusal(f"{text.source} has {len(text.tokens)} tokens, fewer than the {needed} of the samples")
    used = f"{text.entries:,} of the {config.vocab_size:,} entries of the vocabulary stand for text"
    print(f"{text.source}: {len(text.tokens):,} tokens; {used}", flush=True)
