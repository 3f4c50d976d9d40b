"""Kernels as GPUs are given them: that they compile for one where there is none, and where they run."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
import warnings
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

import parallel_lce
from measures import error
from releases import folder_of, installed
from tools import chosen_backend, small

HERE = Path(__file__).parent
KERNELS = {
    name
    for file in (HERE.parent / "kernels").rglob("*.py")
    for name in re.findall(r"\blce_(?:forward|backward)_\w+", file.read_text())
}
TRITON = ("3.6.0", "3.7.1", "3.8.0", "3.9.0")
"""The releases of Triton that every launch compiles on, beside the installed one."""

# Shared memory of a block: of Hopper and Blackwell, and the least of any device since Ampere.
SHARED = {80: 99 << 10, 90: 227 << 10, 100: 227 << 10}
# Kernels that spill registers where they are asked for everything at once, by capability.
SPILLS = {
    80: set(),
    90: {"lce_backward_projection", "lce_forward_projection"},
    100: {"lce_backward_projection", "lce_forward_merge_ranks", "lce_forward_projection"},
}
# What else is spilled, a few registers of releases beside the usual ones. For the windows of a single token, which lie
# side by side, Triton lets a thread load 16 at once.
FEW = {(version, gpu, "lce_forward_merge_windows") for version in ("3.8.0", "3.9.0") for gpu in (80, 90)}
FEW |= {(version, gpu, "lce_backward_token_gradients") for version in ("3.8.0", "3.9.0") for gpu in (90, 100)}
FEW.add(("3.7.1", 80, "lce_backward_scan"))
FEW_BYTES = 16


def compiled(capability: int, cache: Path, release: str | None, few: bool = False, **variables: str) -> list[dict]:
    """What tests/compile_kernels.py finds with that release of Triton, or with the installed one, and with these
    environment variables."""
    triton = pytest.importorskip("triton", reason="needs triton")
    environment = {k: v for k, v in os.environ.items() if k not in ("TRITON_INTERPRET", "TRITON_DEFAULT_FP_FUSION")}
    paths = [str(HERE.parent), *([str(folder_of("triton", release))] if release else [])]
    environment |= {"TRITON_CACHE_DIR": str(cache), "PYTHONPATH": os.pathsep.join(paths)} | variables
    done = subprocess.run(
        [sys.executable, str(HERE / "compile_kernels.py"), str(capability), *["few"] * few],
        env=environment,
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    assert "UserWarning" not in done.stderr
    found = json.loads(done.stdout)
    assert found["triton"] == (release or triton.__version__)
    return found["kernels"]


@pytest.mark.parametrize(
    ("capability", "release", "few"),
    [
        (90, None, True),
        *(
            pytest.param(capability, release, False, marks=pytest.mark.slow)
            for release in (None, *(v for v in TRITON if v != installed("triton")))
            for capability in SHARED
        ),
    ],
)
def test_every_launch_compiles(capability, release, few, tmp_path):
    """With the mainloop of the architecture, within its shared memory and its registers: accumulators that are spilled
    cost many times what they are for."""
    found = compiled(capability, tmp_path, release, few)
    assert {kernel["name"] for kernel in found} == KERNELS
    version = release or installed("triton")
    if capability != 90 or version in TRITON:
        assert any(kernel["hopper"] for kernel in found) == (capability == 90)
    for kernel in found:
        name = kernel["name"]
        assert kernel["shared"] <= SHARED[capability], kernel
        spills = name in SPILLS[capability] and not kernel["plain"]
        few = FEW_BYTES if (version, capability, name) in FEW else 0
        assert kernel["stack"] <= few or spills, kernel


@pytest.mark.slow
@pytest.mark.parametrize("release", [None, TRITON[-1]])
def test_machine_code_does_not_depend_on_the_default_of_fp_fusion(release, tmp_path):
    """Triton 3.10 changes the default."""
    one, other = (compiled(90, tmp_path / value, release, TRITON_DEFAULT_FP_FUSION=value) for value in ("0", "1"))
    assert one == other


@pytest.mark.parametrize(
    ("version", "runs"),
    [
        *((version, True) for version in ("3.6.0", "3.7.1", "3.8.0+git1a2b3c", "3.9.0")),
        *((version, False) for version in ("3.5.1", "3.10.0", "4.0.0+git1a2b3c", "3.9.0 without a name")),
    ],
)
def test_which_mainloop_runs_on_hopper(version, runs, monkeypatch):
    """With a Triton that it is not for, the plain one; which is said once."""
    pytest.importorskip("triton", reason="needs triton")
    from parallel_lce.kernels import tuning

    version, _, lacks = version.partition(" without ")
    if lacks:
        monkeypatch.setitem(sys.modules, "parallel_lce.kernels.hopper", None)  # its import raises
    monkeypatch.setattr(tuning, "_capability", lambda device: 90)
    monkeypatch.setattr(tuning, "interpreted", lambda: False)
    monkeypatch.setattr(tuning, "triton", SimpleNamespace(__version__=version))
    weight = torch.empty(8, 8, dtype=torch.bfloat16)
    tuning._has_gluon.cache_clear()
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        for _ in range(2):
            assert tuning.tile_of(weight, tma=True).warp_specialized == runs
    tuning._has_gluon.cache_clear()
    words = [re.findall(r"Triton [\d.]+[+\w]*|plain mainloop|up to \d+ % longer", str(w.message)) for w in caught]
    assert words == ([] if runs else [[f"Triton {version}", "plain mainloop", "Triton 3.6", "up to 8 % longer"]])


@pytest.mark.gpu
def test_on_a_device_that_is_not_the_current_one():
    """Triton launches on the current device unless it is told."""
    if torch.cuda.device_count() < 2:
        pytest.skip(f"needs 2 GPUs, and there are {torch.cuda.device_count()}")
    found = []
    for device in ("cuda:0", "cuda:1"):
        t = small(device, dtype="bf16")
        with torch.cuda.device(0), chosen_backend("triton"):
            loss = parallel_lce.linear_cross_entropy(t.x, t.weight, t.target)
            found.append([g.cpu() for g in (loss, *torch.autograd.grad(loss, [t.x, t.weight]))])
    for a, b in zip(*found):
        assert error(b, a.double()) < 1e-3
