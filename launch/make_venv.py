"""Makes the repository's .venv, unless it exists and is up to date: BASE launch/make_venv.py BASE, where BASE is the
Python that .venv is made with. env.sh runs this.

Needs the standard library alone. Exits with 2 if .venv cannot be made here, with 1 if the installation fails.
"""

import contextlib
import fcntl
import hashlib
import os
import platform
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
VENV = Path(os.path.realpath(ROOT / ".venv"))  # .venv may be a link to another disk
PYTHON = VENV / "bin" / "python"
STAMP = VENV / "stamp"
INSTALL = ["-m", "pip", "install", "-qq", "--disable-pip-version-check", "-c", "constraints.txt", "-e", ".[test]"]


def stamp() -> bytes:
    """Identifies the requirements and the Python version. When either changes, .venv is made again."""
    files = b"\0".join((ROOT / name).read_bytes() for name in ("pyproject.toml", "constraints.txt"))
    version = "{}.{}".format(*sys.version_info)
    return f"{hashlib.sha256(files).hexdigest()} {version}\n".encode()


def is_made() -> bool:
    try:  # not exists() first: another start, perhaps on another host, may remove the stamp in between
        made = STAMP.read_bytes()
    except OSError:
        return False
    return made == stamp() and os.access(PYTHON, os.X_OK)


def main(base: str) -> None:
    if is_made():
        return
    # The lock file lies beside .venv, whose content is cleared. The file remains; the lock ends with its process.
    # Without the lock, two first starts at the same time, perhaps on two hosts, would clear each other's .venv. lockf
    # works on NFS. On a file system without locks the start goes on without one.
    with open(f"{VENV}.lock", "w") as lock:
        with contextlib.suppress(OSError):
            fcntl.lockf(lock, fcntl.LOCK_EX)
        if not is_made():
            make(base)


def make(base: str) -> None:
    told = f"parallel_lce: installing into {VENV} with Python {platform.python_version()}, once"
    print(f"{told}; this takes a minute or more", file=sys.stderr)
    STAMP.unlink(missing_ok=True)
    made = subprocess.run([base, "-m", "venv", "--clear", str(VENV)], cwd=ROOT, capture_output=True, text=True)
    if made.returncode:  # such as on systems whose Python has no ensurepip
        fail(2, f"cannot make {VENV}: {' '.join((made.stdout + made.stderr).split())}")
    if subprocess.run([PYTHON, *INSTALL], cwd=ROOT).returncode:
        fail(1, f"the installation into {VENV} failed; the next start tries again")
    STAMP.write_bytes(stamp())  # last: an interrupted installation has no stamp


def fail(status: int, message: str) -> None:
    print(f"error: {message}", file=sys.stderr)
    sys.exit(status)


if __name__ == "__main__":
    try:
        main(sys.argv[1])
    except OSError as error:
        fail(2, f"cannot write {error.filename}: {error.strerror}; PARALLEL_LCE_PYTHON=... is used as it is")
    except KeyboardInterrupt:
        sys.exit(130)
