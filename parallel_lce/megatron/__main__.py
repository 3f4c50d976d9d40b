"""Run an unedited Megatron training script that can choose this package's loss.

    torchrun ... -m parallel_lce.megatron SCRIPT.py \\
        --cross-entropy-loss-fusion --cross-entropy-fusion-impl parallel_lce ...

``-m PACKAGE.MODULE`` in place of ``SCRIPT.py`` runs a module. This program's options are arguments of ``patch()``, and
may stand anywhere; all others go to the script, whose ``--cross-entropy-fusion-impl parallel_lce`` becomes ``native``,
which it knows. Megatron is imported and patched before the script starts.
"""

from __future__ import annotations

import argparse
import os
import runpy
import sys
from pathlib import Path
from typing import Any

from parallel_lce.megatron import switch

_OPTIONS = {
    "logits_budget": int,
    "gradient_filter": float,
    "cross_entropy": str,
    "skip_masked": lambda text: bool(int(text)),
    "z_loss": float,
    "label_smoothing": float,
    "vocab_size": int,
}


def main(arguments: list[str]) -> None:
    settings, module, sys.argv, switch.fuses_native = _parsed(arguments)
    if not module:
        # As `python SCRIPT` does; `python -m` put the current folder first.
        if sys.path and sys.path[0] in ("", os.getcwd()):
            del sys.path[0]
        sys.path.insert(0, str(Path(sys.argv[0]).resolve().parent))
    try:
        switch.patch(**settings)
    except ValueError as refusal:
        sys.exit(f"error: {refusal}")
    if module:
        runpy.run_module(sys.argv[0], run_name="__main__", alter_sys=True)
    else:
        runpy.run_path(sys.argv[0], run_name="__main__")


def _parsed(arguments: list[str]) -> tuple[dict[str, Any], bool, list[str], bool]:
    """The arguments of ``patch``; whether a module is run instead of a script; its name or the script's path, with its
    arguments; and whether these chose this package."""
    usage = "%(prog)s [OPTIONS] {SCRIPT.py | -m MODULE} [the script's arguments]"
    parser = argparse.ArgumentParser(
        "python -m parallel_lce.megatron", usage, __doc__, allow_abbrev=False, add_help=False
    )
    parser.formatter_class = argparse.RawDescriptionHelpFormatter
    for name, kind in _OPTIONS.items():
        option = "--parallel-lce-" + name.replace("_", "-")
        parser.add_argument(option, dest=name, type=kind, default=argparse.SUPPRESS, help=f"{name} of patch()")
    settings, script = parser.parse_known_args(arguments)
    if not script or script[0] in ("-h", "--help"):
        parser.print_help()
        sys.exit(0)
    module = script[0] == "-m"
    script = script[module:]
    if not script or script[0].startswith("-"):
        parser.error(f"expected a script or -m MODULE, got {' '.join(arguments)!r}")
    if not module and not Path(script[0]).is_file():
        parser.error(f"no such script: {script[0]}")
    option, ours = "--cross-entropy-fusion-impl", switch.IMPLEMENTATION
    theirs = [f"{option}=native" if word == f"{option}={ours}" else word for word in script]
    for i, word in enumerate(theirs[:-1]):
        if word == option and theirs[i + 1] == ours:
            theirs[i + 1] = "native"
    return vars(settings), module, theirs, theirs != script


if __name__ == "__main__":
    main(sys.argv[1:])
