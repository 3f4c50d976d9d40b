"""Run an unedited Megatron training script that can choose this package's loss.

    torchrun ... -m parallel_lce.megatron SCRIPT.py \\
        --cross-entropy-loss-fusion --cross-entropy-fusion-impl parallel_lce ...

``-m PACKAGE.MODULE`` in place of ``SCRIPT.py`` runs a module. This program's options may stand anywhere; all other
arguments go to the script. Each option sets an environment variable. Megatron is patched right after the script has
imported its ``LanguageModule``.
"""

from __future__ import annotations

import argparse
import functools
import itertools
import os
import runpy
import sys
import time
from pathlib import Path

from parallel_lce.backends import check_choice
from parallel_lce.megatron.settings import CROSS_ENTROPIES, resolve
from parallel_lce.megatron.switch import IMPLEMENTATION, patch
from parallel_lce.patching import AfterImport

_LANGUAGE_MODULE = "megatron.core.models.common.language_module.language_module"

_OPTIONS = {
    "logits-budget": {"metavar": "BYTES"},
    "gradient-filter": {"metavar": "PROBABILITY"},
    "cross-entropy": {"choices": CROSS_ENTROPIES},
    "skip-masked": {"choices": ("0", "1")},
    "z-loss": {"metavar": "FACTOR"},
    "label-smoothing": {"metavar": "SHARE"},
    "vocab-size": {"metavar": "ENTRIES"},
    "backend": {"choices": ("torch", "triton")},
    "debug": {"choices": ("0", "1")},
}


def main(arguments: list[str]) -> None:
    module, target, rest = _parse(arguments)
    sys.argv = [target, *rest]
    if not module:
        # As `python SCRIPT` does; `python -m` put the current folder first.
        if sys.path and sys.path[0] in ("", os.getcwd()):
            del sys.path[0]
        sys.path.insert(0, str(Path(target).resolve().parent))
    try:  # before anything is imported
        resolve()
        check_choice()
    except ValueError as refusal:
        if os.environ.get("LOCAL_RANK", "0") == "0":  # one line per host
            print(f"error: {refusal}", file=sys.stderr)
        else:
            # torchrun ends all ranks when one has ended. Rank 0 may be slower and must print first.
            time.sleep(10)
        sys.exit(2)
    allow_implementation(argparse._ActionsContainer)
    AfterImport([_LANGUAGE_MODULE], lambda module: patch())
    if module:
        runpy.run_module(target, run_name="__main__", alter_sys=True)
    else:
        runpy.run_path(target, run_name="__main__")


def _parse(arguments: list[str]) -> tuple[bool, str, list[str]]:
    """Whether a module is run instead of a script, its name or the script's path, and its arguments."""
    usage = "%(prog)s [OPTIONS] {SCRIPT.py | -m MODULE} [the script's arguments]"
    parser = argparse.ArgumentParser("python -m parallel_lce.megatron", usage, __doc__, allow_abbrev=False)
    parser.formatter_class = argparse.RawDescriptionHelpFormatter
    for name, settings in _OPTIONS.items():
        variable = f"PARALLEL_LCE_{name.replace('-', '_').upper()}"
        parser.add_argument(f"--parallel-lce-{name}", dest=variable, help=f"sets {variable}", **settings)
    ours, theirs = [], []
    remaining = iter(arguments)
    for argument in remaining:
        mine = argument.startswith("--parallel-lce-")
        (ours if mine else theirs).append(argument)
        if mine and "=" not in argument:
            ours.extend(itertools.islice(remaining, 1))
    if not theirs or theirs[0] in ("-h", "--help"):
        ours = ["--help"]
    for name, value in vars(parser.parse_args(ours)).items():
        if value is not None:
            os.environ[name] = value
    module = theirs[0] == "-m"
    theirs = theirs[module:]
    if not theirs or theirs[0].startswith("-"):
        parser.error(f"expected a script or -m MODULE, got {' '.join(arguments)!r}")
    if not module and not Path(theirs[0]).is_file():
        parser.error(f"no such script: {theirs[0]}")
    return module, theirs[0], theirs[1:]


def allow_implementation(container: type) -> None:
    """Make every argument parser's ``--cross-entropy-fusion-impl`` accept this package's name."""
    add_argument = container.add_argument

    @functools.wraps(add_argument)
    def widened(self, *names, **settings):
        choices = settings.get("choices")
        ours = any(name.replace("_", "-") == "--cross-entropy-fusion-impl" for name in names)
        if ours and choices is not None:
            settings["choices"] = (*choices, IMPLEMENTATION)
        return add_argument(self, *names, **settings)

    container.add_argument = widened


if __name__ == "__main__":
    main(sys.argv[1:])
