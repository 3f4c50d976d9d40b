"""The releases of megatron-core that the tests run on, beside each other."""

from __future__ import annotations

import functools
import importlib.metadata
import os
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
SUPPORTED = ("0.14.0", "0.15.3", "0.16.1")

# Folders that hold megatron/core, such as checkouts of Megatron-LM, to run the same tests on.
CHECKOUTS = [Path(p) for p in os.environ.get("PARALLEL_LCE_TEST_MEGATRON", "").split(os.pathsep) if p]


def installed() -> str | None:
    try:
        return importlib.metadata.version("megatron-core")
    except importlib.metadata.PackageNotFoundError:
        return None


OTHERS = [v for v in SUPPORTED if v != installed()] + [p.name for p in CHECKOUTS]
# As parameters of a test. Whoever names a checkout asks for it.
OTHER_RELEASES = [pytest.param(v, marks=pytest.mark.slow if v in SUPPORTED else ()) for v in OTHERS]


@functools.cache
def path_of(release: str) -> str:
    """A folder to import that release from: a checkout, or what pip installs, once.

    Where pip has no index, as on a machine without a network, the test is skipped in pip's words;
    in an environment that launch/env.sh has just installed it fails.
    """
    for checkout in CHECKOUTS:
        if checkout.name == release:
            return str(checkout)
    folder = ROOT / "outputs" / "megatron-core" / f"{release}-{sys.implementation.cache_tag}"
    if not folder.exists():
        folder.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(dir=folder.parent) as unfinished:
            pip = [sys.executable, "-m", "pip", "install", "-q", "--disable-pip-version-check"]
            done = subprocess.run(
                [*pip, "--no-deps", "--target", unfinished, f"megatron-core=={release}"], capture_output=True, text=True
            )
            if done.returncode:
                reason = f"pip cannot install megatron-core {release}: {done.stderr.strip()[-300:]}"
                fresh = Path(sys.prefix).resolve() == ROOT / ".venv"
                pytest.fail(reason) if fresh else pytest.skip(reason)
            if not folder.exists():  # another worker of pytest-xdist may have been faster
                shutil.move(unfinished, folder)
                Path(unfinished).mkdir()  # for its context to remove
    return str(folder)
