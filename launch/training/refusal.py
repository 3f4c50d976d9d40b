"""A user's mistake: the exception, the end of the program, and checks. Needs the standard library alone."""

import os
import sys
from pathlib import Path
from typing import NoReturn


class Refusal(ValueError):
    """A user's mistake. The program prints it in one line and exits with status 2."""


def fail(message: str) -> NoReturn:
    """Prints the message in one line and exits with status 2."""
    # A path in the message may hold line ends, or a terminal's control characters.
    print("error:", "".join(c if c.isprintable() else ascii(c)[1:-1] for c in message), file=sys.stderr)
    sys.exit(2)


def check_folder(name: str, folder: str | Path) -> None:
    """Makes the folder. Raises a Refusal if it cannot be made, or not written to."""
    try:
        Path(folder).mkdir(parents=True, exist_ok=True)
    except (OSError, ValueError) as error:
        raise Refusal(f"{name}={folder} cannot be made a folder: {getattr(error, 'strerror', None) or error}") from None
    if not os.access(folder, os.W_OK | os.X_OK):
        raise Refusal(f"{name}={folder} is a folder that cannot be written to")
