"""The programs around a training: python launch/program.py COMMAND [TORCHRUN'S ARGUMENTS --] [ARGUMENTS]."""

import importlib
import os
import shlex
import sys
from pathlib import Path
from typing import TYPE_CHECKING, NoReturn

from training.packages import require
from training.refusal import Refusal, check_file, check_folder, fail

if TYPE_CHECKING:
    from training.config import Config
    from training.start import Training

BENCHMARKS = "benchmarks"  # the package of the reports on snapshots
PACKAGES = ("yaml", "pydantic", "rich", "tokenizers", "numpy", "torch", "megatron.core", "matplotlib", "safetensors")

ARGUMENTS = "torchrun's own arguments may come first, ended by `--`; without them all processes run on this host."
TRAINED = "Arguments of the training, as of snapshots.py, may come first, ended by `--`; the others go to the report."
DESCRIPTIONS = {
    "train": f"Trains stock Megatron-core's GPTModel with either loss. {ARGUMENTS}",
    "demo": "Trains the same model from one seed with Megatron's stock loss and with parallel_lce, and compares the "
    f"two. Exits with 1 if a run fails or the loss curves part. {ARGUMENTS}",
    "compare": "Compares runs that the demo left in the output folder, perhaps on another machine. Takes the demo's "
    "arguments. Exits with 1 if the loss curves part.",
    "snapshots": "Trains a small GPT on one GPU or CPU, and writes what its output layer sees at chosen steps. Without "
    "--config: configs/snapshots.yaml where there is a GPU, else configs/snapshots-cpu.yaml.",
    "parity": "Trains a small GPT, unless its snapshots are in the output folder, and reports how exact "
    f"log-probabilities are on it. {TRAINED}",
    "gradient_filter": "Trains a small GPT, unless its snapshots are in the output folder, and reports what "
    f"gradient_filter does on it. {TRAINED}",
}


def run(name: str, argv: list[str]) -> int:
    """Runs a command; its exit status. Raises a Refusal for a user's mistake."""
    from training.config import DEFAULT_CONFIG, parse_command_line
    from training.start import Training
    from training.torchrun import split_arguments, started_by_torchrun

    torchrun, arguments = split_arguments(argv)
    report, default = [], DEFAULT_CONFIG
    if name in ("parity", "gradient_filter"):
        torchrun, arguments, report = [], torchrun, _checked_report(name, arguments)
    if name in ("snapshots", "parity", "gradient_filter"):
        import torch

        default = DEFAULT_CONFIG.with_name("snapshots.yaml" if torch.cuda.is_available() else "snapshots-cpu.yaml")
    config = parse_command_line(DESCRIPTIONS[name], arguments, default)
    training = Training(config, torchrun, ["--config", str(default), *arguments])
    if name == "demo":
        return _demo(training) or _compare(config, argv)
    if name == "compare":
        return _compare(config, argv)
    if report:
        return _report_on_snapshots(training, report)
    if not started_by_torchrun():
        training.prepare()
        _become(training.command(), training.environment())
    from training.worker import run_rank

    run_rank(config)
    return 0


def _demo(training: "Training") -> int:
    """Trains all runs; 1 if one fails. Ends the program where another host has their results."""
    from training.comparison import RUNS, folders_of
    from training.results import remove_results

    training.prepare()
    folders = folders_of(training.config)
    for folder in folders.values():  # all before the first run: if it fails, the others' earlier results must not stay
        remove_results(str(folder))
    for name, folder in folders.items():
        if code := training.run(*RUNS[name], f"output={folder}"):
            print(f"FAILED: the run {name!r} ended with exit code {code}", file=sys.stderr)
            return 1
    if training.hosts > 1 and not (folders["stock"] / "metrics.json").exists():
        print("another host has the results")  # rank 0 writes them, on its own host
        sys.exit(0)
    return 0


def _compare(config: "Config", argv: list[str]) -> int:
    """Prints and writes the report of finished runs; 0 if their curves agree, else 1."""
    from training.comparison import compare
    from training.report import description, step_table, summary_table, write_report

    comparison, folder = compare(config), Path(config.compare.report or config.output)
    check_folder("compare.report", str(folder))
    write_report(comparison, folder, config.compare.tolerance, shlex.join(["./launch/demo.sh", *argv]))
    print("", step_table(comparison), description(comparison.runs["stock"]), summary_table(comparison), sep="\n\n")
    print(f"\nreport: {folder / 'report.md'}\n{comparison.verdict}")
    return 0 if comparison.agree else 1


def _checked_report(name: str, arguments: list[str]) -> list[str]:
    """The report's command line without its files, checked before a training starts."""
    options = importlib.import_module(f"{BENCHMARKS}.{name}").parse_arguments(arguments, f"./launch/{name}.sh")
    for written in ("json", "plot"):
        if path := getattr(options, written, None):
            check_file(f"--{written}", path)
    return [f"{BENCHMARKS}.{name}", *arguments]


def _report_on_snapshots(training: "Training", report: list[str]) -> int:
    """Trains unless that is done, then becomes the report."""
    from training.results import is_trained, snapshots_in

    if not is_trained(training.config):
        training.prepare()
        if code := training.run():
            return code
    module, *options = report
    # No file in the user's folder stands in for a module of the report.
    command = [sys.executable, "-P", "-m", module, *map(str, snapshots_in(training.config.output)), *options]
    _become(command, os.environ | {"PYTHONSAFEPATH": "1"})


def _become(command: list[str], environment: dict[str, str]) -> NoReturn:
    os.execve(command[0], command, environment)


def main(name: str, argv: list[str]) -> NoReturn:
    require(*PACKAGES)
    try:
        sys.exit(run(name, argv))
    except Refusal as refusal:
        fail(str(refusal))


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2:])
