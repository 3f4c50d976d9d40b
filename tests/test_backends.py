"""Which backend a weight gets."""

from types import SimpleNamespace

import pytest
import torch

import parallel_lce
from cases import DTYPES
from parallel_lce import backends, vocab_parallel
from parallel_lce.backends import backend_of


def choose(monkeypatch, value: str, installed: bool = True, interpret: str = "0") -> None:
    monkeypatch.setenv("PARALLEL_LCE_BACKEND", value)
    monkeypatch.setenv("TRITON_INTERPRET", interpret)
    monkeypatch.setattr(backends, "_triton_installed", lambda: installed)


# Device, what is asked for, dtype, capability, whether Triton is installed, and what weights and logits get.
CHOICES = [
    *(("cpu", "", dtype, None, True, "torch", "torch") for dtype in DTYPES.values()),
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


@pytest.mark.parametrize("choice", CHOICES, ids=str)
def test_weights_and_logits_get_their_backend(choice, monkeypatch):
    pytest.importorskip("triton", reason="needs triton")
    kind, value, dtype, capability, installed, of_weights, of_logits = choice
    choose(monkeypatch, value, installed, interpret="1")
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: capability)
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
def test_a_choice_is_refused_in_words(value, installed, words, monkeypatch):
    x, weight, target = torch.ones(1, 2), torch.ones(2, 2), torch.zeros(1, dtype=torch.long)
    choose(monkeypatch, "torch")
    parallel_lce.linear_cross_entropy(x, weight, target)
    choose(monkeypatch, value, installed)
    with pytest.raises(ValueError, match=words):
        parallel_lce.linear_cross_entropy(x, weight, target)
    with pytest.raises(ValueError, match=words):
        parallel_lce.vocab_parallel_cross_entropy(x, target)


def test_rocm_has_no_kernels(monkeypatch):
    """Its devices are named cuda, too."""
    monkeypatch.setattr(torch.version, "hip", "7.0")
    choose(monkeypatch, "")
    assert backends._name(torch.device("cuda"), torch.bfloat16, (torch.bfloat16,)) == "torch"
    choose(monkeypatch, "triton")
    with pytest.raises(ValueError, match="triton on cuda: kernels run on CUDA devices"):
        backends._name(torch.device("cuda"), torch.bfloat16, (torch.bfloat16,))
