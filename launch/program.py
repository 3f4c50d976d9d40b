"""The programs behind the scripts: python launch/program.py COMMAND [TORCHRUN'S ARGUMENTS --] [ARGUMENTS]."""

import os
import shlex
import subprocess
import sys
from pathlib import Path
from typing import TYPE_CHECKING, NoReturn
from unittest import mock

from training.refusal import Refusal, check_folder, fail

if TYPE_CHECKING:
    from training.config import Config

ROOT = Path(__file__).resolve().parents[1]
sys.path.append(str(ROOT))  # benchmarks/, which is not installed
# glibc keeps freed memory for the next tensors. Otherwise a seventh of the tests' time goes to the system, which clears
# new pages for every large tensor.
KEPT_MEMORY = dict.fromkeys(("MALLOC_MMAP_THRESHOLD_", "MALLOC_TRIM_THRESHOLD_"), str(1 << 30))
ARGUMENTS = " torchrun's own arguments may come first, ended by `--`; without them all processes run on this host."
DESCRIPTIONS = {
    "train": "Trains stock Megatron-core's GPTModel with either loss." + ARGUMENTS,
    "demo": "Trains one model with Megatron's loss and with parallel_lce. Exits with 1 if losses part." + ARGUMENTS,
}


def run(name: str, argv: list[str]) -> int:
    """Runs a command; its exit status. Raises a Refusal for a user's mistake."""
    if name == "test":
        os.chdir(ROOT)
        _become([sys.executable, "-m", "pytest", "-n", "auto", "--dist", "worksteal", *argv], KEPT_MEMORY | os.environ)
    torchrun, arguments = (argv[: argv.index("--")], argv[argv.index("--") + 1 :]) if "--" in argv else (None, argv)
    if name == "bench":
        return _bench(torchrun, arguments)
    from training.config import parse_command_line

    config = parse_command_line(DESCRIPTIONS[name], arguments)
    if name == "train" and "TORCHELASTIC_RUN_ID" in os.environ:  # torchrun has started this process
        from training.loop import run_rank

        run_rank(config)
        return 0
    torchrun = torchrun or ["--standalone", "--nproc-per-node", str(config.parallel.processes)]
    hosts = _prepare(config, torchrun)
    # -P: without it a file signal.py in the current folder would be imported in place of Python's own.
    command = [sys.executable, "-P", "-m", "torch.distributed.run", *torchrun]
    command += [str(ROOT / "launch" / "program.py"), "train", *arguments]
    if name == "train":
        _become(command, _environment(config))
    return _demo(config, command, hosts, shlex.join(["./launch/demo.sh", *argv]))


def _bench(torchrun: list[str] | None, arguments: list[str]) -> NoReturn:
    """Checks the command line once, so that no rank has to, and becomes the benchmark over ranks: by default one for
    each GPU of this host, or two where there is none."""
    import torch

    from benchmarks.engine.options import parse_arguments

    if torchrun is None:
        torchrun = ["--standalone", "--nproc-per-node", str(torch.cuda.device_count() or 2)]
    nodes, here = processes_of(torchrun)
    parse_arguments(arguments, nodes * here, here)
    # -P and PYTHONSAFEPATH: no file of the user's folder is imported in place of a module, here or in a child process.
    command = [sys.executable, "-P", "-m", "torch.distributed.run", *torchrun, "-m", "benchmarks", *arguments]
    _become(command, {"PYTHONSAFEPATH": "1"})


def _prepare(config: "Config", torchrun: list[str]) -> int:
    """Raises a Refusal for a training that cannot work. Tokenizes the text, so that the ranks only read the cache, and
    removes earlier results, which must not stay if a run fails. Returns the number of hosts."""
    import megatron.core  # noqa: F401  missing here rather than on every rank

    from training.report import folders_of
    from training.text import load_text

    hosts, here = processes_of(torchrun)
    if hosts * here != config.parallel.processes:
        layout = f"parallel.tensor={config.parallel.tensor} * data={config.parallel.data}"
        raise Refusal(f"{layout} needs {config.parallel.processes} processes, torchrun started {hosts * here}")
    config.uses_cuda(here)
    check_folder("output", config.output)
    check_folder("text.cache", config.text.cache)
    text = load_text(config.text)
    needed = ((config.train.held_out_samples or 0) + 1) * (config.train.sequence + 1)
    if len(text.tokens) < needed:
        raise Refusal(f"{text.source} has {len(text.tokens)} tokens, fewer than the {needed} of the samples")
    print(f"{text.source}: {len(text.tokens):,} tokens", flush=True)
    for folder in (Path(config.output), *folders_of(config).values()):
        (folder / "metrics.json").unlink(missing_ok=True)
    return hosts


def _demo(config: "Config", command: list[str], hosts: int, words: str) -> int:
    """Trains all runs, and prints and writes their report, with the user's `words`. Returns 0 if the curves agree, or
    on a host without rank 0, which has the results; 1 if they part or a run fails."""
    from training.report import RUNS, compare, folders_of, write_report

    folders = folders_of(config)
    for name, folder in folders.items():
        check_folder("output", folder)
        its = [*command, *RUNS[name], f"output={folder}"]
        if code := subprocess.run(its, env=os.environ | _environment(config)).returncode:
            print(f"FAILED: the run {name!r} ended with exit code {code}", file=sys.stderr)
            return 1
    if hosts > 1 and not (folders["stock"] / "metrics.json").exists():
        print("another host has the results")  # rank 0 writes them, on its own host
        return 0
    comparison, folder = compare(config), Path(config.output)
    print(f"\n{write_report(comparison, folder, words)}")
    print(f"\nreport: {folder / 'report.md'}\n{comparison.verdict}")
    return 0 if comparison.agree else 1


def _environment(config: "Config") -> dict[str, str]:
    """Variables of a training, with defaults for those that this process's environment does not set."""
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    defaults = {
        # The ranks of a host share its cores. More than four threads do not make a small model faster.
        "OMP_NUM_THREADS": str(min(4, max(1, cores // config.parallel.processes))),
        "CUDA_DEVICE_MAX_CONNECTIONS": "1",  # collectives then start in the order of launch, ahead of GEMMs
        "CUBLAS_WORKSPACE_CONFIG": ":4096:8",  # deterministic cuBLAS
    }
    return {name: os.environ.get(name, value) for name, value in defaults.items()}


def _become(command: list[str], environment: dict[str, str]) -> NoReturn:
    os.execve(command[0], command, os.environ | environment)


def processes_of(torchrun: list[str]) -> tuple[int, int]:
    """The number of nodes that torchrun starts with these arguments (of an elastic range the largest), and the number
    of processes on each node. Raises a Refusal if torchrun refuses the arguments."""
    from torch.distributed import run

    try:
        # torchrun changes the environment, and warns where this variable is not set.
        with mock.patch.dict(os.environ, {"OMP_NUM_THREADS": "1"}):
            config, *_ = run.config_from_args(run.get_args_parser().parse_args([*torchrun, __file__]))
    except (AssertionError, RuntimeError, ValueError) as error:
        raise Refusal(f"torchrun: {type(error).__name__}: {error}") from None
    return config.max_nodes, config.nproc_per_node


def main(name: str, argv: list[str] | None = None) -> NoReturn:
    try:
        sys.exit(run(name, sys.argv[1:] if argv is None else argv))
    except ImportError as error:
        fail(f"{sys.executable} has no {error.name}: pip install '.[test]' in the repository installs it")
    except Refusal as refusal:
        fail(str(refusal))


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2:])
