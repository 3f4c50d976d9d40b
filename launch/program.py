"""The programs behind the scripts: python launch/program.py COMMAND [TORCHRUN'S ARGUMENTS --] [ARGUMENTS]."""

import os
import shlex
import subprocess
import sys
from pathlib import Path
from typing import TYPE_CHECKING, NoReturn
from unittest import mock

from training.refusal import Refusal, check_file, check_folder, check_packages, fail

if TYPE_CHECKING:
    from training.config import Config

ROOT = Path(__file__).resolve().parents[1]
sys.path.append(str(ROOT))  # benchmarks/, which is not installed
# The packages that a command needs, by the name of their extra in pyproject.toml. Commands without an entry need the
# packages of the demo.
PACKAGES = {
    "test": ("torch", "pytest", "xdist"),
    "bench": ("torch", "rich"),
    "demo": ("yaml", "pydantic", "rich", "tokenizers", "numpy", "torch", "megatron.core", "matplotlib", "safetensors"),
}
ARGUMENTS = "torchrun's own arguments may come first, ended by `--`; without them all processes run on this host."
# glibc keeps freed memory for the next tensors. Otherwise a seventh of the tests' time goes to the system, which clears
# new pages for every large tensor.
KEPT_MEMORY = dict.fromkeys(("MALLOC_MMAP_THRESHOLD_", "MALLOC_TRIM_THRESHOLD_"), str(1 << 30))
DESCRIPTIONS = {
    "train": f"Trains stock Megatron-core's GPTModel with either loss. {ARGUMENTS}",
    "demo": "Trains the same model from one seed with Megatron's unfused loss and with parallel_lce, and compares the "
    f"two. Exits with 1 if a run fails or the loss curves part. {ARGUMENTS}",
    "compare": "Compares runs that the demo left in the output folder, perhaps on another machine. Takes the demo's "
    "arguments. Exits with 1 if the loss curves part.",
}


def run(name: str, argv: list[str]) -> int:
    """Runs a command; its exit status. Raises a Refusal for a user's mistake."""
    if name == "test":
        os.chdir(ROOT)
        _become([sys.executable, "-m", "pytest", "-n", "auto", "--dist", "worksteal", *argv], KEPT_MEMORY | os.environ)
    first, last = (argv[: argv.index("--")], argv[argv.index("--") + 1 :]) if "--" in argv else (None, argv)
    if name == "bench":
        return _bench(first, last)
    from training.config import parse_command_line

    config = parse_command_line(DESCRIPTIONS[name], last)
    if name == "compare":
        return _compare(config, argv)
    if name == "train" and "TORCHELASTIC_RUN_ID" in os.environ:  # torchrun has started this process
        from training.loop import run_rank

        run_rank(config)
        return 0
    training = Training(config, first or [], last)
    if name == "demo":
        return _demo(training) or _compare(config, argv)
    training.prepare()
    _become(training.command(), training.environment())


def _bench(torchrun: list[str] | None, arguments: list[str]) -> NoReturn:
    """Checks the command line once, so that no rank has to, and becomes the benchmark over ranks: by default one for
    each GPU of this host, or two where there is none."""
    import torch

    from benchmarks.engine.options import parse_arguments

    if torchrun is None:
        torchrun = ["--standalone", "--nproc-per-node", str(torch.cuda.device_count() or 2)]
    nodes, here = processes_of(torchrun)
    check_file("--json", parse_arguments(arguments, nodes * here, here).json)
    # -P and PYTHONSAFEPATH: no file of the user's folder is imported in place of a module, here or in a child process.
    command = [sys.executable, "-P", "-m", "torch.distributed.run", *torchrun, "-m", "benchmarks", *arguments]
    _become(command, {"PYTHONSAFEPATH": "1"})


def _demo(training: "Training") -> int:
    """Trains all runs; 1 if one fails, else 0. Exits with 0 on a host without rank 0, which has the results."""
    from training.report import RUNS, folders_of, remove_results

    training.prepare()
    folders = folders_of(training.config)
    for folder in folders.values():  # all before the first run: if it fails, the others' earlier results must not stay
        remove_results(folder)
    for name, folder in folders.items():
        command = training.command(*RUNS[name], f"output={folder}")
        if code := subprocess.run(command, env=training.environment()).returncode:
            print(f"FAILED: the run {name!r} ended with exit code {code}", file=sys.stderr)
            return 1
    if training.hosts > 1 and not (folders["stock"] / "metrics.json").exists():
        print("another host has the results")  # rank 0 writes them, on its own host
        sys.exit(0)
    return 0


def _compare(config: "Config", argv: list[str]) -> int:
    """Prints and writes the report of finished runs; 0 if their curves agree, else 1."""
    from training.report import compare, write_report

    comparison, folder = compare(config), Path(config.compare.report or config.output)
    check_folder("compare.report", folder)
    print(f"\n{write_report(comparison, folder, config.compare.tolerance, shlex.join(['./launch/demo.sh', *argv]))}")
    print(f"\nreport: {folder / 'report.md'}\n{comparison.verdict}")
    return 0 if comparison.agree else 1


def _become(command: list[str], environment: dict[str, str]) -> NoReturn:
    os.execve(command[0], command, os.environ | environment)


def processes_of(torchrun: list[str]) -> tuple[int, int]:
    """The number of nodes that torchrun starts with these arguments (of an elastic range the largest), and the number
    of processes on each node. Raises a Refusal if torchrun refuses the arguments, or if they name a program: the caller
    adds the program."""
    from torch.distributed import run

    try:
        # torchrun changes the environment, and warns where this variable is not set.
        with mock.patch.dict(os.environ, {"OMP_NUM_THREADS": "1"}):
            arguments = run.get_args_parser().parse_args([*torchrun, __file__])
            config, *_ = run.config_from_args(arguments)
    except (AssertionError, RuntimeError, ValueError) as error:
        raise Refusal(f"torchrun: {type(error).__name__}: {error}") from None
    if (arguments.training_script, arguments.training_script_args) != (__file__, []):
        raise Refusal(f"torchrun: {arguments.training_script!r} in front of -- is none of torchrun's own arguments")
    return config.max_nodes, config.nproc_per_node


class Training:
    """A training. `torchrun`: torchrun's own arguments; if there are none, all processes run on this host. `arguments`:
    the other arguments of the command line."""

    def __init__(self, config: "Config", torchrun: list[str], arguments: list[str]):
        self.config, self.arguments = config, arguments
        self.torchrun = torchrun or ["--standalone", "--nproc-per-node", str(config.parallel.processes)]
        self.hosts, self.here = processes_of(self.torchrun)
        config.check_processes(self.hosts * self.here)

    def prepare(self) -> None:
        """Raises a Refusal for a training that cannot work. Tokenizes the text into this host's cache, so that the
        ranks only read it."""
        from training.text import load_text

        config = self.config
        config.uses_cuda(self.here)
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

    def command(self, *overrides: str) -> list[str]:
        """Trains, with these arguments too."""
        # -P: without it a file signal.py in the current folder would be imported in place of Python's own.
        torchrun = [sys.executable, "-P", "-m", "torch.distributed.run", *self.torchrun]
        return [*torchrun, str(ROOT / "launch" / "program.py"), "train", *self.arguments, *overrides]

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


def main(name: str, argv: list[str] | None = None) -> NoReturn:
    try:
        extra = name if name in PACKAGES else "demo"
        check_packages(extra, PACKAGES[extra])
        sys.exit(run(name, sys.argv[1:] if argv is None else argv))
    except Refusal as refusal:
        fail(str(refusal))


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2:])
