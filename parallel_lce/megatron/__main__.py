"""Run an unedited Megatron training script that can choose this package's loss.

    torchrun ... -m parallel_lce.megatron SCRIPT.py \\
        --cross-entropy-loss-fusion --cross-entropy-fusion-impl parallel_lce ...

``-m PACKAGE.MODULE`` in place of ``SCRIPT.py`` runs a module. This program's options may stand anywhere; all other
arguments go to the script, whose ``--cross-entropy-fusion-impl parallel_lce`` becomes ``native``, which it knows. Each
option is the argument of this name of ``patch()``. Megatron is patched right after the script has imported its
``LanguageModule``.
"""

from __future__ import annotations

import argparse
import itertools
import os
import runpy
import sys
import time
from pathlib import Path
from typing import Any

from parallel_lce.backends import check_choice
from parallel_lce.megatron import switch
from parallel_lce.megatron.settings import CROSS_ENTROPIES, Settings, resolve
from parallel_lce.patching import AfterImport

_LANGUAGE_MODULE = "megatron.core.models.common.language_module.language_module"

_OPTIONS: dict[str, dict[str, Any]] = {
    "logits-budget": {"type": int, "metavar": "BYTES"},
    "gradient-filter": {"type": float, "metavar": "PROBABILITY"},
    "cross-entropy": {"choices": CROSS_ENTROPIES},
    "skip-masked": {"type": int, "choices": (0, 1)},
    "z-loss": {"type": float, "metavar": "FACTOR"},
    "label-smoothing": {"type": float, "metavar": "SHARE"},
    "vocab-size": {"type": int, "metavar": "ENTRIES"},
}


def main(arguments: list[str]) -> None:
    settings, module, target, rest = _parse(arguments)
    rest, chosen = _without_choice(rest)
    sys.argv = [target, *rest]
    if not module:
        # As `python SCRIPT` does; `python -m` put the current folder first.
        if sys.path and sys.path[0] in ("", os.getcwd()):
            del sys.path[0]
        sys.path.insert(0, str(Path(target).resolve().parent))
    try:  # before anything is imported
        resolve(Settings(), settings)
        check_choice()
    except ValueError as refusal:
        if os.environ.get("LOCAL_RANK", "0") == "0":  # one line per host
            print(f"error: {refusal}", file=sys.stderr)
        else:
            # torchrun ends all ranks when one has ended. Rank 0 may be slower and must print first.
            time.sleep(10)
        sys.exit(2)
    switch.fuses_native = chosen
    AfterImport(_LANGUAGE_MODULE, lambda: switch.patch(**settings))
    if module:
        runpy.run_module(target, run_name="__main__", alter_sys=True)
    else:
        runpy.run_path(target, run_name="__main__")


def _parse(arguments: list[str]) -> tuple[dict[str, Any], bool, str, list[str]]:
    """The arguments of ``patch``; whether a module is run instead of a script; its name or the script's path; and its
    arguments."""
    usage = "%(prog)s [OPTIONS] {SCRIPT.py | -m MODULE} [the script's arguments]"
    parser = argparse.ArgumentParser("python -m parallel_lce.megatron", usage, __doc__, allow_abbrev=False)
    parser.formatter_class = argparse.RawDescriptionHelpFormatter
    for option, settings in _OPTIONS.items():
        name = option.replace("-", "_")
        parser.add_argument(f"--parallel-lce-{option}", dest=name, help=f"{name} of patch()", **settings)
    ours, theirs = [], []
    remaining = iter(arguments)
    for argument in remaining:
        mine = argument.startswith("--parallel-lce-")
        (ours if mine else theirs).append(argument)
        if mine and "=" not in argument:
            ours.extend(itertools.islice(remaining, 1))
    if not theirs or theirs[0] in ("-h", "--help"):
        ours = ["--help"]
    given = {name: value for name, value in vars(parser.parse_args(ours)).items() if value is not None}
    if "skip_masked" in given:
        given["skip_masked"] = bool(given["skip_masked"])
    module = theirs[0] == "-m"
    theirs = theirs[module:]
    if not theirs or theirs[0].startswith("-"):
        parser.error(f"expected a script or -m MODULE, got {' '.join(arguments)!r}")
    if not module and not Path(theirs[0]).is_file():
        parser.error(f"no such script: {theirs[0]}")
    return given, module, theirs[0], theirs[1:]


def _without_choice(arguments: list[str]) -> tuple[list[str], bool]:
    """The script's arguments with "native" for this package's name, and whether that was there."""
    option, ours = "--cross-entropy-fusion-impl", switch.IMPLEMENTATION
    found = []
    for before, argument in zip(["", *arguments], arguments):
        chosen = argument == f"{option}={ours}" or (argument == ours and before == option)
        found.append(argument.replace(ours, "native") if chosen else argument)
    return found, found != arguments


if __name__ == "__main__":
    main(sys.argv[1:])
