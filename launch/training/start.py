"""Starts a training on this host: checks the host, prepares the text once, then makes torchrun's command."""

import os
import sys
from pathlib import Path

from training.config import Config, check_for_cpu
from training.refusal import Refusal, check_folder
from training.torchrun import processes_of

PROGRAM = Path(__file__).resolve().parents[1] / "program.py"


def check_host(config: Config, torchrun: list[str]) -> None:
    """Raises a Refusal for a run that cannot work, before its processes start.

    The number of processes that torchrun starts with the arguments `torchrun` must be that of the configuration, the
    host must have the GPUs for them, and the output and cache folders must be writable.
    """
    here = config.parallel.processes
    if torchrun:
        nodes, here = processes_of(torchrun)
        check_processes(config, nodes * here)
    uses_cuda(config, here)
    for name, folder in (("output", config.output), ("text.cache", config.text.cache)):
        check_folder(name, folder)


def check_processes(config: Config, started: int) -> None:
    parallel = config.parallel
    if started != parallel.processes:
        sizes = f"parallel.tensor={parallel.tensor} * pipeline={parallel.pipeline} * data={parallel.data}"
        raise Refusal(f"{sizes} needs {parallel.processes} processes, torchrun started {started}")


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


def prepare_text(config: Config) -> None:
    """Tokenizes the text into this host's cache before any rank starts, so that the ranks only read it.

    Raises a Refusal if there is no text, or too little.
    """
    from rich.console import Console

    from training.text import load_text

    console = Console(soft_wrap=True, highlight=False)
    text = load_text(config.text, say=lambda line: console.print(line, markup=False))
    needed = (config.held_out_samples + 1) * (config.train.sequence + 1)
    if len(text.tokens) < needed:
        raise Refusal(f"{text.source} has {len(text.tokens)} tokens, fewer than the {needed} of the samples")
    used = f"{text.entries:,} of the {config.vocab_size:,} entries of the vocabulary stand for text"
    console.print(f"{text.source}: {len(text.tokens):,} tokens; {used}", markup=False)


def torchrun_command(config: Config, torchrun: list[str], arguments: list[str]) -> list[str]:
    """The command line that trains with `arguments`.

    `torchrun` are torchrun's own arguments. If they are empty, all processes run on this host.
    """
    if not torchrun:
        torchrun = ["--standalone", "--nproc-per-node", str(config.parallel.processes)]
    # -P: without it a file signal.py in the current folder would be imported in place of Python's own.
    return [sys.executable, "-P", "-m", "torch.distributed.run", *torchrun, str(PROGRAM), "train", *arguments]


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
