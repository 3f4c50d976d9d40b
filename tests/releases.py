"""Releases of a package beside the installed one, each in a folder to import it from."""

import functools
import importlib.metadata
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent


def installed(package: str) -> str | None:
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return None


@functools.cache
def folder_of(package: str, version: str, python: tuple[int, int] = (3, 11), others: tuple[str, ...] = ()) -> Path:
    """What pip installs of that release, and of ``others``, alone, once. An older Python than ``python`` gets the wheel
    for that one, whose compiled modules it cannot import. Without an index the test is skipped, but fails where
    launch/env.sh has just installed its environment."""
    folder = ROOT / "outputs" / package / f"{version}-{sys.implementation.cache_tag}"
    if not folder.exists():
        folder.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(dir=folder.parent) as unfinished:
            pip = [sys.executable, "-m", "pip", "install", "-q", "--disable-pip-version-check"]
            pip += ["--no-deps", "--target", unfinished]
            if sys.version_info < python:
                pip += ["--ignore-requires-python", "--only-binary=:all:", "--python-version", "{}.{}".format(*python)]
            done = subprocess.run([*pip, f"{package}=={version}", *others], capture_output=True, text=True)
            if done.returncode:
                reason = f"pip cannot install {package} {version}: {done.stderr.strip()[-300:]}"
                fresh = Path(sys.prefix).resolve() == ROOT / ".venv"
                pytest.fail(reason) if fresh else pytest.skip(reason)
            if not folder.exists():  # another worker of pytest-xdist may have been faster
                shutil.move(unfinished, folder)
                Path(unfinished).mkdir()  # for its context to remove
    return folder
