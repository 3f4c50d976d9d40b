"""Kernels as GPUs are given them: that they compile for one where there is none, which launches take one that was
compiled for another, and where they run."""

import json
import os
import re
import subprocess
import sys
import time
import warnings
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from torch.testing._internal.two_tensor import TwoTensor

pytest.importorskip("triton", reason="needs triton")

import triton

import kernel_calls
import parallel_lce
from measures import error
from parallel_lce.kernels import launch, product
from parallel_lce.kernels.launch import Relaunched
from releases import folder_of, installed
from tools import chosen_backend, small

HERE = Path(__file__).parent
TRITON = ("3.6.0", "3.7.1", "3.8.0", "3.9.0")
"""Releases of Triton that have the mainloop for Hopper."""

# Shared memory of a block: of Hopper and Blackwell, and the least of any device since Ampere.
SHARED = {80: 99 << 10, 90: 227 << 10, 100: 227 << 10}
# Beside the installed release for Hopper. Each kernel is compiled for one call; compile_kernels.py alone compiles all.
SLOW = [(80, TRITON[0]), (90, TRITON[-1]), (100, TRITON[-1])]
# Kernels of the filter, which gives exact gradients before Hopper.
FILTER = {f"lce_backward_{name}" for name in ("scan", "active_tile_lists", "centroids", "sparse_product")}
HOPPER = {"lce_backward_projection", "lce_forward_projection"}
# Bytes of spilled registers, over both warpgroups on Hopper: of the kernels that spill where they are asked for
# everything at once; of one that adds to dX, whose tile is in registers beside the sum; of others, in some releases.
SPILLED = {"_projection": 2048, "_merge_ranks": 2048, "_sparse_product": 256, "": 16}


def compiled(capability: int, release: str | None) -> list[dict]:
    """What tests/compile_kernels.py finds with that release of Triton, or with the installed one. Kernels that are in
    Triton's cache, of whatever checkout, are not compiled again."""
    environment = {k: v for k, v in os.environ.items() if k != "TRITON_INTERPRET"}
    paths = [str(HERE.parent), *([str(folder_of("triton", release))] if release else [])]
    environment["PYTHONPATH"] = os.pathsep.join(paths)
    done = subprocess.run(
        [sys.executable, str(HERE / "compile_kernels.py"), str(capability), "once"],
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
    ("capability", "release"), [(90, None), *(pytest.param(*each, marks=pytest.mark.slow) for each in SLOW)]
)
def test_every_launch_compiles(capability, release):
    """With the architecture's mainloop, within its shared memory and registers: spilled accumulators cost much."""
    found = compiled(capability, release)
    expected = kernel_calls.NAMES if capability >= 90 else kernel_calls.NAMES - FILTER
    assert {kernel["name"] for kernel in found} == expected
    version = release or installed("triton")
    if capability != 90 or version in TRITON:
        of_hopper = {kernel["name"] for kernel in found if kernel["hopper"]}
        assert of_hopper == (HOPPER if capability == 90 else set())
    for kernel in found:
        assert kernel["shared"] <= SHARED[capability], kernel
        most = [most for end, most in SPILLED.items() if kernel["name"].endswith(end)]
        assert kernel["stack"] <= most[-1 if kernel["plain"] and most[0] == 2048 else 0], kernel


@pytest.mark.parametrize(
    ("version", "runs"),
    [
        *((version, True) for version in ("3.6.0", "3.7.1", "3.8.0+git1a2b3c", "3.9.0")),
        *((version, False) for version in ("3.10.0", "4.0.0+git1a2b3c")),
    ],
)
def test_which_mainloop_runs_on_hopper(version, runs, monkeypatch):
    """With a Triton that it is not for, the plain one; which is said once."""
    monkeypatch.setattr(product, "interpreted", lambda: False)
    monkeypatch.setattr(product, "triton", SimpleNamespace(__version__=version))
    weight = torch.empty(8, 8, dtype=torch.bfloat16)
    product._has_gluon.cache_clear()
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        for _ in range(2):
            assert product.tile_of(weight, tma=True).mainloop == ("hopper" if runs else "plain")
    product._has_gluon.cache_clear()
    words = [re.findall(r"Triton [\d.]+[+\w]*|plain mainloop|up to \d+ % longer", str(w.message)) for w in caught]
    assert words == ([] if runs else [[f"Triton {version}", "plain mainloop", "Triton 3.6", "up to 10 % longer"]])


class Recorder:
    """A jit function, and what it compiles to, each of whose launches is recorded."""

    arg_names = ["x", "number", "scale", "bias", "BLOCK"]
    function, packed_metadata, metadata = "function", "metadata", None
    src = SimpleNamespace(signature=dict(x="tensordesc<fp32[8]>"))  # so that Triton's launcher runs it

    def __init__(self) -> None:
        self.compiled, self.again, self.kernel = 0, [], Relaunched(self)

    def warmup(self, *arguments, grid, BLOCK, num_warps, enable_fp_fusion):
        assert enable_fp_fusion, "whatever Triton's default is"
        self.compiled += 1
        return self

    def run(self, x, y, z, stream, function, metadata, launch_metadata, on_entry, on_exit, *arguments):
        """As Triton's driver is called, in the order of Triton 3.6 to 3.9."""
        assert (stream, function, metadata) == ("stream of device -1", "function", "metadata")
        assert launch_metadata is on_entry is on_exit is None
        self.again.append(((x, y, z), arguments))


@pytest.fixture
def driver(monkeypatch):
    fake = SimpleNamespace(get_current_stream=lambda device: f"stream of device {device}", get_current_device=lambda: 0)
    monkeypatch.setattr(type(triton.runtime.driver), "active", fake)
    monkeypatch.setattr(launch, "interpreted", lambda: False)


X, OTHER = torch.zeros(8), torch.ones(24)


def launched(recorder, x=X, number=7, scale=1.5, bias=None, **constants):
    recorder.kernel.launch((4,), x, number, scale, bias, **constants or dict(BLOCK=128, num_warps=4))


@pytest.mark.parametrize(
    ("first", "second", "arguments"),
    [
        ({}, dict(x=OTHER, number=9, scale=2.5), (OTHER.data_ptr(), 9, 2.5, None)),
        (dict(bias=(X, None)), dict(bias=(OTHER, None)), (X.data_ptr(), 7, 1.5, (OTHER.data_ptr(), None))),
    ],
)
def test_a_launch_of_the_same_kind_is_not_described_to_triton_again(first, second, arguments, driver):
    recorder = Recorder()
    launched(recorder, **first)
    launched(recorder, **second)
    assert (recorder.compiled, recorder.again[1]) == (1, ((4, 1, 1), (*arguments, 128)))


@pytest.mark.parametrize(
    ("first", "second"),
    [
        ({}, dict(x=torch.zeros(9)[1:])),
        ({}, dict(x=torch.zeros(8, dtype=torch.bfloat16))),
        ({}, dict(number=1)),
        ({}, dict(number=16)),
        ({}, dict(number=2**31 + 1)),
        ({}, dict(bias=torch.zeros(8))),
        (dict(bias=(X, None)), dict(bias=(None, X))),
        ({}, dict(BLOCK=64, num_warps=4)),
        ({}, dict(BLOCK=128, num_warps=8)),
        (dict(BLOCK=4, num_warps=8), dict(num_warps=4, BLOCK=8)),
    ],
    ids=str,
)
def test_a_launch_for_which_triton_compiles_anew_is_not_taken_for_the_same(first, second, driver):
    recorder = Recorder()
    launched(recorder, **first)
    launched(recorder, **second)
    assert recorder.compiled == 2


def test_plain_tensors_alone_are_passed_as_addresses(driver):
    recorder = Recorder()
    launched(recorder)
    launched(recorder, torch.nn.Parameter(torch.ones(8)))
    assert (recorder.compiled, len(recorder.again)) == (1, 2)
    with pytest.raises(ValueError, match="no kernel can read a TwoTensor"):
        launched(recorder, TwoTensor(X, X))


def test_triton_launches_in_one_thread_at_a_time_and_its_kernel_is_held(driver):
    """Triton unloads a compiled kernel when it is freed, and a second thread would find it before it is loaded."""

    class Slow(Recorder):
        within = 0

        def warmup(self, *arguments, **constants):
            self.within += 1
            time.sleep(0.02)
            assert self.within == 1
            self.within = 0
            return super().warmup(*arguments, **constants)

    recorder = Slow()
    with ThreadPoolExecutor(4) as threads:
        assert [*threads.map(launched, [recorder] * 4)] == [None] * 4
    assert len(recorder.again) == 4
    (known,) = recorder.kernel._compiled.values()
    assert recorder in [cell.cell_contents for cell in known.__closure__]


@pytest.mark.parametrize("loaded", [(7, 32, 0), ("module", 7, 32, 0)], ids=["2.11", "2.13"])
def test_pytorchs_launcher_gets_the_function_and_what_is_no_constant(loaded, driver, monkeypatch):
    recorder, passed = Recorder(), []
    fake = SimpleNamespace(_load_kernel=lambda *given: loaded, _launch_kernel=lambda *given: passed.append(given))
    monkeypatch.setattr(launch, "torch_launcher", fake)
    types = dict(x="*fp32", number="i32", scale="fp32", bias=("*bf16", "constexpr"), BLOCK="constexpr")
    recorder.src, recorder.metadata_group = SimpleNamespace(signature=types), {"kernel.cubin": "path"}
    recorder.metadata = SimpleNamespace(name="kernel", num_warps=4, shared=64)
    launched(recorder, bias=(OTHER, None))
    arguments = (X.data_ptr(), 7, 1.5, OTHER.data_ptr(), None, None)
    assert passed == [(7, 4, 1, 1, 4, 64, "OifOOO", arguments, "stream of device -1")]


@pytest.mark.gpu
def test_a_call_runs_on_a_device_that_is_not_the_current_one():
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
