"""Which backend a weight gets, and what both backends have."""

import inspect
from types import SimpleNamespace

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

import parallel_lce
from cases import DTYPES
from parallel_lce import backends, vocab_parallel
from parallel_lce.backends import backend_of
from parallel_lce.backends.interface import Backend


@pytest.fixture
def choose(monkeypatch):
    """``choose(value)`` sets PARALLEL_LCE_BACKEND; ``installed`` says whether Triton counts as there."""

    def set_to(value: str, installed: bool = True, interpret: str = "0") -> None:
        monkeypatch.setenv("PARALLEL_LCE_BACKEND", value)
        monkeypatch.setenv("TRITON_INTERPRET", interpret)
        monkeypatch.setattr(backends, "_triton_installed", lambda: installed)

    return set_to


# Device, what is asked for, dtype, capability, whether Triton is installed, and what weights and logits get.
CHOICES = [
    *(("cpu", value, dtype, None, True, "torch", "torch") for value in ("", "torch") for dtype in DTYPES.values()),
    ("cpu", "triton", torch.float64, None, True, "torch", "torch"),
    ("cpu", "triton", torch.float32, None, True, "triton", "triton"),
    ("cuda", "torch", torch.bfloat16, (9, 0), True, "torch", "torch"),
    ("cuda", "", torch.bfloat16, (8, 0), True, "triton", "triton"),
    ("cuda", "", torch.float16, (7, 5), True, "torch", "torch"),
    ("cuda", "", torch.bfloat16, (9, 0), False, "torch", "torch"),
    ("cuda", "", torch.float32, (9, 0), True, "torch", "triton"),
    ("cuda", "", torch.float32, (7, 5), True, "torch", "torch"),
    ("cuda", "", torch.float64, (9, 0), True, "torch", "torch"),
]


@pytest.mark.parametrize(
    ("kind", "value", "dtype", "capability", "installed", "of_weights", "of_logits"), CHOICES, ids=str
)
def test_the_choice(kind, value, dtype, capability, installed, of_weights, of_logits, choose, monkeypatch):
    pytest.importorskip("triton", reason="needs triton")
    choose(value, installed, interpret="1")
    monkeypatch.setattr(backends, "_capability", lambda device: capability)
    matrix = SimpleNamespace(device=torch.device(kind), dtype=dtype, is_meta=False, shape=(2, 2))
    assert backend_of(matrix).NAME == of_weights
    assert backend_of(matrix, vocab_parallel._SUITABLE).NAME == of_logits


@pytest.mark.parametrize(
    ("value", "installed", "words"),
    [
        ("nonsense", True, "PARALLEL_LCE_BACKEND='nonsense' is none of 'torch', 'triton'"),
        ("triton", True, "triton on cpu: .* TRITON_INTERPRET=1"),
        ("triton", False, "not installed"),
    ],
)
def test_a_choice_is_refused_in_words(value, installed, words, choose):
    """At each call, of each function."""
    x, weight, target = torch.ones(1, 2), torch.ones(2, 2), torch.zeros(1, dtype=torch.long)
    choose("torch")
    parallel_lce.linear_cross_entropy(x, weight, target)
    choose(value, installed)
    with pytest.raises(ValueError, match=words):
        parallel_lce.linear_cross_entropy(x, weight, target)
    with pytest.raises(ValueError, match=words):
        parallel_lce.vocab_parallel_cross_entropy(x, target)


class _LargeOperations(TorchDispatchMode):
    """Names operations on tensors of at least ``size`` elements, but for views and allocations."""

    def __init__(self, size: int) -> None:
        super().__init__()
        self.size, self.found = size, []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        result = func(*args, **(kwargs or {}))
        touched = [t.numel() for t in (*args, *(kwargs or {}).values(), result) if isinstance(t, torch.Tensor)]
        works = not func.is_view and "empty" not in str(func) and "detach" not in str(func)
        if works and max(touched, default=0) >= self.size:
            self.found.append(str(func))
        return result


def test_rocm_has_no_kernels(choose, monkeypatch):
    """Its devices are named cuda, too."""
    monkeypatch.setattr(torch.version, "hip", "7.0")
    choose("")
    assert backends._name(torch.device("cuda"), torch.bfloat16, (torch.bfloat16,)) == "torch"
    choose("triton")
    with pytest.raises(ValueError, match="triton on cuda: kernels run on CUDA devices"):
        backends._name(torch.device("cuda"), torch.bfloat16, (torch.bfloat16,))


@pytest.mark.parametrize(("budget", "reduction", "most"), [(None, "mean", 12), (None, "none", 12), (0, "none", 17)])
def test_logits_that_fit_take_few_operations(budget, reduction, most, choose):
    """On a CPU each waits for the slowest thread, which beside a busy process may not be running: many small ones took
    ten times as long there. 32768 elements are shared among threads."""
    choose("torch")
    # No token is sure of an entry: of such ones a recomputed tile finds the largest, too.
    x, weight = torch.randn(512, 4, requires_grad=True), (torch.randn(20000, 4) / 10).requires_grad_()
    options = dict(reduction=reduction, logits_budget=budget)
    with _LargeOperations(32768 + 4 * 20000) as mode:
        loss = parallel_lce.linear_cross_entropy(x, weight, torch.arange(512), **options)
        torch.autograd.grad(loss.sum(), [x, weight])
    assert len(mode.found) <= most, mode.found


@pytest.mark.parametrize("name", ["torch", "triton"])
def test_a_backend_has_the_names_of_the_protocol(name):
    if name == "triton":
        pytest.importorskip("triton", reason="needs triton")
    backend = backends.named(name)
    functions = {name: function for name, function in vars(Backend).items() if inspect.isfunction(function)}
    functions = {name: function for name, function in functions.items() if not name.startswith("_")}
    assert {*backend.__all__} == {*functions, *Backend.__annotations__} and len(functions) > 10
    for name, function in functions.items():
        assert (
            list(inspect.signature(getattr(backend, name)).parameters)
            == list(inspect.signature(function).parameters)[1:]
        )
    assert all(hasattr(backend, name) for name in Backend.__annotations__)
