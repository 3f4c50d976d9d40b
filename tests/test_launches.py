"""Kernels as GPUs are given them: that they compile for one where there is none, and where they run."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

import parallel_lce
from measures import error
from tools import chosen_backend, small

HERE = Path(__file__).parent
KERNELS = {
    "lce_backward_add_targets",
    "lce_backward_find_shared_targets",
    "lce_backward_scale_and_add_targets",
    "lce_backward_from_saved",
    "lce_backward_logits",
    "lce_backward_mark_targets",
    "lce_backward_place_targets",
    "lce_backward_projection",
    "lce_backward_target_gradients",
    "lce_forward_logits_partials",
    "lce_forward_losses",
    "lce_forward_merge_ranks",
    "lce_forward_merge_windows",
    "lce_forward_projection",
    "lce_forward_softmax_shift",
    "lce_forward_target_logits",
}


# Shared memory of a block: of Hopper, and the least of any device since Ampere.
@pytest.mark.parametrize(
    ("capability", "hopper", "shared"),
    [(90, True, 227 << 10), pytest.param(80, False, 99 << 10, marks=pytest.mark.slow)],
)
def test_every_launch_compiles(capability, hopper, shared, tmp_path):
    """With the mainloop of the architecture, within its shared memory and its registers: accumulators that are spilled
    cost many times what they are for."""
    triton = pytest.importorskip("triton", reason="needs triton")
    version = tuple(map(int, triton.__version__.split(".")[:2]))
    if hopper and not (3, 6) <= version <= (3, 9):
        pytest.skip(f"Hopper's mainloop is for Triton 3.6 to 3.9, and this is {triton.__version__}")
    environment = {k: v for k, v in os.environ.items() if k != "TRITON_INTERPRET"}
    environment |= {"TRITON_CACHE_DIR": str(tmp_path), "PYTHONPATH": str(HERE.parent)}
    done = subprocess.run(
        [sys.executable, str(HERE / "compile_kernels.py"), str(capability)],
        env=environment,
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    found = json.loads(done.stdout)
    assert {kernel["name"] for kernel in found} == KERNELS
    assert any(kernel["hopper"] for kernel in found) == hopper
    for kernel in found:
        assert kernel["shared"] <= shared, kernel
        assert kernel["stack"] == 0 or not kernel["plain"], kernel


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
