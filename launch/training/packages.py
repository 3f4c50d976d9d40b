"""Checks that the interpreter has a program's packages: python -m training.packages EXTRA PACKAGE ...

Needs the standard library alone.
"""

import importlib.util
import sys

from training.refusal import fail


def require(*packages: str, extra: str = "demo") -> None:
    """Ends the program with one line and exit status 2 if a package is missing. `extra` of pyproject.toml lists it."""
    found = importlib.util.find_spec
    missing = [name for name in packages if not all(map(found, (name.partition(".")[0], name)))]
    if missing:
        fail(f"{sys.executable} has no {', '.join(missing)}: pip install '.[{extra}]' in the repository installs them")


if __name__ == "__main__":
    require(*sys.argv[2:], extra=sys.argv[1])
