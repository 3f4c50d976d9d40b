"""The code is as ruff and pyright, configured in pyproject.toml, want it."""

from __future__ import annotations

import importlib.util
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent


@pytest.mark.parametrize("command", [["check"], ["format", "--check"]], ids=" ".join)
def test_ruff_is_content(command):
    done = subprocess.run([sys.executable, "-m", "ruff", *command, "."], cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr


@pytest.mark.slow
@pytest.mark.skipif(not importlib.util.find_spec("pyright"), reason="needs pyright: pip install '.[dev]'")
def test_pyright_is_content():
    command = [sys.executable, "-m", "pyright", "--pythonpath", sys.executable]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr


@pytest.mark.parametrize("folder", ["parallel_lce", "kernels", "benchmarks"])
def test_no_file_is_long(folder):
    lengths = {str(file): len(file.read_text().splitlines()) for file in (ROOT / folder).rglob("*.py")}
    assert {name: lines for name, lines in lengths.items() if lines > 700} == {}
