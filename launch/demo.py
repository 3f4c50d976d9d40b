"""Trains the same model from one seed with Megatron's stock loss and with parallel_lce, and compares the two.

With `compare.yardstick=true` stock also trains with its samples in reverse order, as the measure of rounding. Exits
with 1 if a run fails or the loss curves part. torchrun's own arguments may come first, ended by `--`.
"""

import subprocess
import sys
from pathlib import Path

from training.packages import require
from training.refusal import Refusal, check_folder, fail


def main() -> int:
    require("omegaconf", "pydantic", "rich", "tokenizers", "numpy", "torch", "megatron.core", "matplotlib")
    from training.config import parse_command_line
    from training.host import check_host
    from training.runs import remove_results, runs_of
    from training.start import environment, prepare_text, torchrun_command
    from training.torchrun import processes_of, split_arguments

    torchrun, arguments = split_arguments(sys.argv[1:])
    config = parse_command_line(__doc__, arguments)
    check_host(config, torchrun)
    if config.compare.report is not None:
        check_folder("compare.report", config.compare.report)
    prepare_text(config)
    runs = runs_of(config)
    folders = {name: Path(config.output) / name for name in runs}
    for folder in folders.values():  # all before the first run: if it fails, the others' earlier results must not stay
        check_folder("output", str(folder))
        remove_results(str(folder))
    for name, overrides in runs.items():
        command = torchrun_command(config, torchrun, [*arguments, *overrides, f"output={folders[name]}"])
        code = subprocess.run(command, env=environment(config)).returncode
        if code:
            print(f"FAILED: the run {name!r} ended with exit code {code}", file=sys.stderr)
            return 1
    missing = [folder for folder in folders.values() if not (folder / "metrics.json").exists()]
    if missing and torchrun and processes_of(torchrun)[0] > 1:
        print("another host has the results")  # rank 0 writes them, on its own host
        return 0
    if missing:
        print(f"FAILED: the run left no results in {missing[0]}", file=sys.stderr)
        return 1

    from training.comparison_report import report  # PyTorch and matplotlib load for seconds

    return report(config, sys.argv[1:])


if __name__ == "__main__":
    try:
        sys.exit(main())
    except Refusal as refusal:
        fail(str(refusal))
