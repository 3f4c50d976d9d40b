"""Which backend a weight gets, and the scratch memory that it is handed."""

from __future__ import annotations

import subprocess
import sys
from types import SimpleNamespace

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

import parallel_lce
from parallel_lce import backends, vocab_parallel
from parallel_lce.backends import backend_of, torch_backend
from parallel_lce.backends.interface import Scratch


@pytest.fixture
def choose(monkeypatch):
    """``choose(value)`` sets PARALLEL_LCE_BACKEND; ``installed`` says whether Triton counts as there."""

    def set_to(value: str | None, installed: bool = True, interpret: str = "0") -> None:
        if value is None:
            monkeypatch.delenv("PARALLEL_LCE_BACKEND", raising=False)
        else:
            monkeypatch.setenv("PARALLEL_LCE_BACKEND", value)
        monkeypatch.setenv("TRITON_INTERPRET", interpret)
        monkeypatch.setattr(backends, "_triton_installed", lambda: installed)

    return set_to


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16, torch.float64])
@pytest.mark.parametrize("value", [None, "", "torch"])
def test_the_torch_backend_serves_a_cpu(value, dtype, choose):
    choose(value, interpret="1")
    assert backend_of(torch.empty(2, 2, dtype=dtype)) is torch_backend


class _LargeOperations(TorchDispatchMode):
    """Counts operations on tensors of at least ``size`` elements, but for views and allocations."""

    def __init__(self, size: int) -> None:
        super().__init__()
        self.size, self.found = size, []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        result = func(*args, **(kwargs or {}))
        touched = [t for t in (*args, *(kwargs or {}).values(), result) if isinstance(t, torch.Tensor)]
        works = not func.is_view and "empty" not in str(func) and "detach" not in str(func)
        if works and max((t.numel() for t in touched), default=0) >= self.size:
            self.found.append(str(func))
        return result


@pytest.mark.parametrize(("budget", "reduction", "most"), [(None, "mean", 11), (None, "none", 11), (0, "none", 16)])
def test_logits_that_fit_take_few_operations(budget, reduction, most, choose):
    """On a CPU each waits for the slowest thread, which beside a busy process may not be running: many small ones took
    ten times as long there. 32768 elements are shared among threads."""
    choose("torch")
    # No token is sure of an entry: of such ones a recomputed tile finds the largest, too.
    x, weight = torch.randn(512, 4, requires_grad=True), (torch.randn(20000, 4) / 10).requires_grad_()
    with _LargeOperations(32768 + 4 * 20000) as mode:
        loss = parallel_lce.linear_cross_entropy(
            x, weight, torch.arange(512), reduction=reduction, logits_budget=budget
        )
        torch.autograd.grad(loss.sum(), [x, weight])
    assert len(mode.found) <= most, mode.found


def test_the_choice_is_read_at_each_call(choose):
    weight = torch.empty(2, 2)
    choose("nonsense")
    with pytest.raises(ValueError, match="PARALLEL_LCE_BACKEND='nonsense' is none of 'torch', 'triton'"):
        backend_of(weight)
    with pytest.raises(ValueError, match="nonsense"):
        parallel_lce.linear_cross_entropy(torch.ones(1, 2), weight, torch.zeros(1, dtype=torch.long))
    choose("torch")
    assert backend_of(weight) is torch_backend


def test_triton_on_a_cpu_is_refused_in_words(choose):
    choose("triton")
    with pytest.raises(ValueError, match="triton on cpu: .* TRITON_INTERPRET=1"):
        backend_of(torch.empty(2, 2))


def test_triton_that_is_missing_is_refused_in_words(choose):
    choose("triton", installed=False, interpret="1")
    with pytest.raises(ValueError, match="not installed"):
        backend_of(torch.empty(2, 2))


def test_float64_is_torch_s_whatever_is_asked_for(choose):
    choose("triton")
    assert backend_of(torch.empty(2, 2, dtype=torch.float64)) is torch_backend


@pytest.mark.parametrize(
    ("dtype", "capability", "installed", "of_weights", "of_logits"),
    [
        (torch.bfloat16, (9, 0), True, "triton", "triton"),
        (torch.float16, (8, 0), True, "triton", "triton"),
        (torch.float16, (7, 5), True, "torch", "torch"),
        (torch.bfloat16, (9, 0), False, "torch", "torch"),
        (torch.float32, (9, 0), True, "torch", "triton"),
        (torch.float32, (7, 5), True, "torch", "torch"),
        (torch.float64, (9, 0), True, "torch", "torch"),
    ],
)
def test_the_default_on_cuda(dtype, capability, installed, of_weights, of_logits, choose, monkeypatch):
    choose(None, installed=installed)
    monkeypatch.setattr(backends, "_capability", lambda device: capability)
    matrix = SimpleNamespace(device=torch.device("cuda", 0), dtype=dtype, is_meta=False, shape=(2, 2))
    assert backend_of(matrix).NAME == of_weights
    assert backend_of(matrix, vocab_parallel._SUITABLE).NAME == of_logits


@pytest.mark.parametrize("value", ["torch", "triton"])
def test_logits_that_exist_follow_the_choice(value, device, choose, monkeypatch):
    """Kernels reduce them if triton is asked for, and only then."""
    kernels = pytest.importorskip("parallel_lce.backends.triton")
    choose(value, interpret="1")
    launched, names = [], ["logits_partial", "logits_gradient"]
    for name in names:
        original = getattr(kernels, name)
        noted = lambda *given, name=name, original=original: launched.append(name) or original(*given)  # noqa: E731
        monkeypatch.setattr(kernels, name, noted)
    logits = torch.randn(5, 7, device=device, requires_grad=True)
    target = torch.arange(5, device=device)
    loss = parallel_lce.vocab_parallel_cross_entropy(logits, target)
    loss.sum().backward()
    assert launched == (names if value == "triton" else [])
    true = torch.nn.functional.cross_entropy(logits.double(), target, reduction="none")
    torch.testing.assert_close(loss, true.float())


def test_a_backend_that_logits_cannot_have_is_refused(choose):
    choose("nonsense")
    with pytest.raises(ValueError, match="PARALLEL_LCE_BACKEND='nonsense' is none of 'torch', 'triton'"):
        parallel_lce.vocab_parallel_cross_entropy(torch.zeros(2, 3), torch.zeros(2, dtype=torch.long))


def test_importing_the_package_imports_no_backend_of_kernels():
    code = (
        "import parallel_lce, sys; assert not [m for m in sys.modules if m.split('.')[0] == 'triton'"
        " or m == 'parallel_lce.backends.triton']"
    )
    # torch itself may import triton: only what it does not is the package's.
    bare = "import torch, sys; print('triton' in sys.modules)"
    if subprocess.run([sys.executable, "-c", bare], capture_output=True, text=True).stdout.strip() == "True":
        pytest.skip("torch imports triton by itself")
    subprocess.run([sys.executable, "-c", code], check=True)


# --- scratch ---------------------------------------------------------------------------------------


def test_scratch_is_allocated_at_first_use_and_once(device):
    scratch = Scratch(1000, device)
    assert scratch.limit == 1000 and scratch.capacity(torch.float32) == 250
    first = scratch.borrow(250, torch.float32)
    assert first.shape == (250,) and first.dtype == torch.float32 and first.device.type == device
    assert scratch.borrow(3, torch.bfloat16).data_ptr() == first.data_ptr()


def test_scratch_adopts_what_is_larger(device):
    scratch = Scratch(1000, device)
    scratch.adopt(torch.empty(100, 2, dtype=torch.bfloat16, device=device))
    assert scratch.capacity(torch.uint8) == 1000
    large = torch.empty(30, 40, dtype=torch.bfloat16, device=device)
    scratch.adopt(large.t())
    assert scratch.capacity(torch.uint8) == 1000, "not in one piece"
    scratch.adopt(large)
    assert scratch.limit == 1000 and scratch.capacity(torch.float32) == 600
    assert scratch.borrow(600, torch.float32).data_ptr() == large.data_ptr()
    scratch.adopt(torch.empty(600, dtype=torch.bfloat16, device=device))
    assert scratch.borrow(1, torch.float32).data_ptr() == large.data_ptr()
