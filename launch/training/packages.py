"""Checks that the interpreter has a program's packages. Needs the standard library alone.

python -m training.packages EXTRA PACKAGE ...
"""

import importlib.util
import sys

from training.refusal import fail


def require(*packages: str, extra: str = "demo") -> None:
    """Ends the program with one line and exit status 2 if a package is missing. `extra` of pyproject.toml lists it."""
    missing = [name for name in packages if not _found(name)]
    if missing:
        fail(f"{sys.executable} has no {', '.join(missing)}: pip install '.[{extra}]' in the repository installs them")


def _found(name: str) -> bool:
    try:
        return importlib.util.find_spec(name) is not None
    except ModuleNotFoundError:  # the parent package is missing
        return False


if __name__ == "__main__":
    require(*sys.argv[2:], extra=sys.argv[1])
