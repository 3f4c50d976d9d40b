"""The programs around a training: python launch/program.py COMMAND [TORCHRUN'S ARGUMENTS --] [ARGUMENTS]."""

import importlib
import os
import shlex
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING

from training.packages import require
from training.refusal import Refusal, check_file, check_folder, fail

if TYPE_CHECKING:
    from training.config import Config

BENCHMARKS = "parallel_lce.bench"  # the package of the reports on snapshots
PACKAGES = ("yaml", "pydantic", "rich", "tokenizers", "numpy", "torch", "megatron.core", "matplotlib", "safetensors")


def train(argv: list[str]) -> int:
    """Trains stock Megatron-core's GPTModel with either loss. Starts itself under torchrun if torchrun did not start
    it.

    torchrun's own arguments may come first, ended by `--`; without them all processes run on this host.
    """
    from training.config import parse_command_line
    from training.torchrun import split_arguments, started_by_torchrun

    torchrun, arguments = split_arguments(argv)
    config = parse_command_line(train.__doc__, arguments)
    if not started_by_torchrun():
        _prepare(config, torchrun)
        return _run(config, torchrun, arguments)
    from torch.distributed.elastic.multiprocessing.errors import record

    record(_train_here)(config)  # lets torchrun show the error of the rank that failed first
    return 0


def demo(argv: list[str]) -> int:
    """Trains the same model from one seed with Megatron's stock loss and with parallel_lce, and compares the two.

    With `compare.yardstick=true` stock also trains with its samples in reverse order, as the measure of rounding. Exits
    with 1 if a run fails or the loss curves part. torchrun's own arguments may come first, ended by `--`.
    """
    from training.config import parse_command_line
    from training.torchrun import processes_of, split_arguments

    torchrun, arguments = split_arguments(argv)
    config = parse_command_line(demo.__doc__, arguments)
    _prepare(config, torchrun)

    from training.comparison import RUNS, runs_of
    from training.results import remove_results

    folders = runs_of(config)
    for folder in folders.values():  # all before the first run: if it fails, the others' earlier results must not stay
        remove_results(str(folder))
    for name, folder in folders.items():
        if code := _run(config, torchrun, [*arguments, *RUNS[name], f"output={folder}"]):
            print(f"FAILED: the run {name!r} ended with exit code {code}", file=sys.stderr)
            return 1
    missing = [folder for folder in folders.values() if not (folder / "metrics.json").exists()]
    if missing and torchrun and processes_of(torchrun)[0] > 1:
        print("another host has the results")  # rank 0 writes them, on its own host
        return 0
    return _compare(config, argv)


def compare(argv: list[str]) -> int:
    """Compares runs that the demo left in the output folder, perhaps on another machine. Takes the demo's arguments.

    Exits with 1 if the loss curves part.
    """
    from training.config import parse_command_line
    from training.torchrun import split_arguments

    return _compare(parse_command_line(compare.__doc__, split_arguments(argv)[1]), argv)


def snapshots(argv: list[str]) -> int:
    """Trains a small GPT on one GPU or CPU, and writes what its output layer sees at chosen steps.

    Each snapshot is a safetensors file in the output folder: hidden states and next tokens of held-out text, and the
    output weight. Without --config: configs/snapshots.yaml where there is a GPU, else configs/snapshots-cpu.yaml.
    """
    config, arguments = _snapshot_config(snapshots.__doc__, argv)
    _prepare(config, [])
    return _run(config, [], arguments)


def parity(argv: list[str]) -> int:
    """Trains a small GPT, unless its snapshots are in the output folder, and reports how exact log-probabilities are on
    it.

    Arguments of the training, those of snapshots.py, may come first, ended by `--`; the others go to the report.
    """
    return _report_on_snapshots("parity", parity.__doc__, argv)


def gradient_filter(argv: list[str]) -> int:
    """Trains a small GPT, unless its snapshots are in the output folder, and reports what gradient_filter does on it.

    Arguments of the training, those of snapshots.py, may come first, ended by `--`; the others go to the report.
    """
    return _report_on_snapshots("gradient_filter", gradient_filter.__doc__, argv)


def _prepare(config: "Config", torchrun: list[str]) -> None:
    from training.start import check_host, prepare_text

    check_host(config, torchrun)
    if config.compare.report is not None:
        check_folder("compare.report", config.compare.report)
    prepare_text(config)


def _run(config: "Config", torchrun: list[str], arguments: list[str]) -> int:
    """Trains under torchrun; its exit status."""
    from training.start import environment, torchrun_command

    return subprocess.run(torchrun_command(config, torchrun, arguments), env=environment(config)).returncode


def _train_here(config: "Config") -> None:
    """Trains on this rank. Its refusals end here, since `record` would print their traceback."""
    from training.worker import run

    try:
        run(config)
    except Refusal as refusal:
        _end(refusal)


def _compare(config: "Config", argv: list[str]) -> int:
    """Prints and writes the report of finished runs; 0 if their curves agree, else 1."""
    from rich.console import Console

    from training.comparison import compare
    from training.report import print_report, write_report

    comparison, folder = compare(config), Path(config.compare.report or config.output)
    check_folder("compare.report", str(folder))
    try:
        write_report(comparison, folder, config.compare.tolerance, shlex.join(["./launch/demo.sh", *argv]))
    except OSError as error:
        raise Refusal(f"the report cannot be written: {error}") from None
    console = Console()
    console.print(f"report: {folder / 'report.md'}", soft_wrap=True)
    print_report(console, comparison)
    return 0 if comparison.agree else 1


def _snapshot_config(description: str | None, argv: list[str]) -> tuple["Config", list[str]]:
    """The configuration, and the arguments that tell a rank of it."""
    import torch

    from training.config import ROOT, parse_command_line

    default = ROOT / "configs" / ("snapshots.yaml" if torch.cuda.is_available() else "snapshots-cpu.yaml")
    config = parse_command_line(description, argv, default)
    if config.snapshots is None:
        raise Refusal("snapshots=None: the report needs some, as configs/snapshots.yaml has them")
    return config, ["--config", str(default), *argv]


def _report_on_snapshots(name: str, description: str | None, argv: list[str]) -> int:
    """Trains unless that is done, then becomes the report, whose command line it checks first."""
    from training.torchrun import split_arguments

    training, arguments = split_arguments(argv)
    parse = importlib.import_module(f"{BENCHMARKS}.{name}").parse_arguments
    options = vars(parse(arguments, f"./launch/{name}.sh"))
    for written in ("json", "plot"):
        if path := options.get(written):
            check_file(f"--{written}", path)
    config, training = _snapshot_config(description, training)

    from training.results import is_trained, snapshots_in

    if not is_trained(config):
        _prepare(config, [])
        if code := _run(config, [], training):
            return code
    # No file in the user's folder stands in for a module of the report.
    command = [sys.executable, "-P", "-m", f"{BENCHMARKS}.{name}", *map(str, snapshots_in(config.output)), *arguments]
    return subprocess.run(command, env=os.environ | {"PYTHONSAFEPATH": "1"}).returncode


def _end(refusal: Refusal) -> None:
    if os.environ.get("LOCAL_RANK", "0") != "0":  # one line per host
        # torchrun ends every rank once one has ended. Rank 0 may be slower, and must have spoken.
        time.sleep(10)
        sys.exit(2)
    fail(str(refusal))


COMMANDS: dict[str, Callable[[list[str]], int]] = {
    command.__name__: command for command in (train, demo, compare, snapshots, parity, gradient_filter)
}


def main(name: str, argv: list[str]) -> None:
    require(*PACKAGES)
    try:
        sys.exit(COMMANDS[name](argv))
    except Refusal as refusal:
        _end(refusal)


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2:])
