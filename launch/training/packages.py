"""Whether the interpreter has what a program needs. Imported before anything that it may lack."""

import importlib.util
import sys


def require(*packages: str) -> None:
    """Ends the program with one line and exit status 2 if a package is missing."""
    missing = [name for name in packages if not _found(name)]
    if missing:
        fail(f"{sys.executable} has no {', '.join(missing)}: pip install '.[demo]' in the repository installs them")


def _found(name: str) -> bool:
    try:
        return importlib.util.find_spec(name) is not None
    except ModuleNotFoundError:  # of the package that it is a part of
        return False


def fail(message: str) -> None:
    """The end of a program that was asked for what it cannot do."""
    print(f"error: {message}", file=sys.stderr)
    sys.exit(2)


if __name__ == "__main__":
    require(*sys.argv[1:])
