"""Trains the same model twice from one seed, with Megatron's stock loss and with parallel_lce, and compares the two.

Exits with 1 if a run fails or the loss curves part by more than compare.tolerance.
"""

import subprocess
import sys
from pathlib import Path

from training.config import LossImpl, parse_command_line
from training.launch import environment, prepare_text, torchrun_command


def main() -> int:
    arguments = sys.argv[1:]
    config = parse_command_line(__doc__, arguments)
    prepare_text(config)
    folders = {impl: Path(config.output) / impl.name for impl in LossImpl}
    for impl, folder in folders.items():
        chosen = [*arguments, f"loss.impl={impl.name}", f"output={folder}"]
        code = subprocess.run(torchrun_command(config, chosen), env=environment(config)).returncode
        if code:
            print(f"FAILED: the run with the {impl.name} loss ended with exit code {code}", file=sys.stderr)
            return 1

    from training.compare import compare  # after the runs: it loads PyTorch and Matplotlib

    stock, ours = folders[LossImpl.stock], folders[LossImpl.parallel_lce]
    return 0 if compare(stock, ours, Path(config.output), config.compare.tolerance) else 1


if __name__ == "__main__":
    sys.exit(main())
