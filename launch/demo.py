"""Trains the same model from one seed with Megatron's stock loss and with parallel_lce, and compares the two.

With `compare.yardstick=true` stock also trains with its samples in reverse order, as the measure of rounding. Exits
with 1 if a run fails or the loss curves part. torchrun's own arguments may come first, ended by `--`.
"""

import subprocess
import sys
from pathlib import Path

from training.config import parse_command_line
from training.launch import environment, prepare_text, split_arguments, torchrun_command


def main() -> int:
    torchrun, arguments = split_arguments(sys.argv[1:])
    config = parse_command_line(__doc__, arguments)
    prepare_text(config)

    from training.compare import runs_of  # it loads PyTorch

    for name, chosen in runs_of(config).items():
        folder = Path(config.output) / name
        metrics = folder / "metrics.json"
        metrics.unlink(missing_ok=True)
        command = torchrun_command(config, torchrun, [*arguments, *chosen, f"output={folder}"])
        code = subprocess.run(command, env=environment(config)).returncode
        if code:
            print(f"FAILED: the run {name!r} ended with exit code {code}", file=sys.stderr)
            return 1
    if not metrics.exists():  # the host of rank 0 has it
        print("another host has the results")
        return 0

    from compare import report

    return report(config, sys.argv[1:])


if __name__ == "__main__":
    sys.exit(main())
