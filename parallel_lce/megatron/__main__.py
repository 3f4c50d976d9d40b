"""Run an unedited Megatron training script that can choose this package's loss.

    torchrun ... -m parallel_lce.megatron SCRIPT.py \\
        --cross-entropy-loss-fusion --cross-entropy-fusion-impl parallel_lce ...

This program's options are arguments of ``patch()``, and may stand anywhere; all others go to the script, whose
``--cross-entropy-fusion-impl parallel_lce`` becomes ``native``, which it knows.
"""

from __future__ import annotations

import argparse
import sys
import types
from pathlib import Path
from typing import Any

from parallel_lce.backends import check_choice
from parallel_lce.megatron import switch


def _flag(text: str) -> bool:
    if text not in ("0", "1"):
        raise argparse.ArgumentTypeError(f"must be 0 or 1, got {text!r}")
    return text == "1"


_OPTIONS = {
    "logits-budget": int,
    "gradient-filter": float,
    "cross-entropy": str,
    "skip-masked": _flag,
    "z-loss": float,
    "label-smoothing": float,
    "vocab-size": int,
}


def main(arguments: list[str]) -> None:
    settings, sys.argv, switch.fuses_native = _parsed(arguments)
    script = Path(sys.argv[0])
    if not script.exists():
        sys.exit(f"error: no such script: {script}")
    if not sys.flags.safe_path:  # as `python SCRIPT` does; `python -m` put the current folder there
        sys.path[0] = str(script.resolve().parent)
    try:
        check_choice()
        switch.patch(**settings)
    except ValueError as refusal:
        sys.exit(f"error: {refusal}")
    # As `python SCRIPT`: what the script pickles, and processes that it spawns, look for this module.
    module = sys.modules["__main__"] = sys.modules["__mp_main__"] = types.ModuleType("__main__")
    module.__file__ = str(script.absolute())
    exec(compile(script.read_bytes(), script, "exec", dont_inherit=True), vars(module))


def _parsed(arguments: list[str]) -> tuple[dict[str, Any], list[str], bool]:
    """The arguments of ``patch``; the script's path with its arguments; and whether these chose this package."""
    usage = "python -m parallel_lce.megatron [OPTIONS] SCRIPT.py [the script's arguments]"
    parser = argparse.ArgumentParser(usage=usage, allow_abbrev=False, add_help=False)
    for name, kind in _OPTIONS.items():
        dest = name.replace("-", "_")
        parser.add_argument(f"--parallel-lce-{name}", dest=dest, type=kind, default=argparse.SUPPRESS)
    settings, script = parser.parse_known_args(arguments)
    if not script or script[0].startswith("-"):
        sys.exit(f"{parser.format_help()}\nerror: a script's path is expected, got {script[0] if script else 'none'}")
    option, ours = "--cross-entropy-fusion-impl", switch.IMPLEMENTATION
    theirs = [f"{option}=native" if word == f"{option}={ours}" else word for word in script]
    for i, word in enumerate(theirs[:-1]):
        if word == option and theirs[i + 1] == ours:
            theirs[i + 1] = "native"
    return vars(settings), theirs, theirs != script


if __name__ == "__main__":
    main(sys.argv[1:])
