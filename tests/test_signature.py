"""Calls of one signature are checked once, and nothing that the checks refuse passes as one that they have seen."""

from __future__ import annotations

from unittest import mock

import pytest
import torch

from parallel_lce.call import prepare
from tools import D, N, V, call, good


def called(**changed):
    ones = dict(logit_scale=1.0, logit_softcap=1.0, vocab_size=V, logits_budget=1, z_loss=1.0, ignore_index=1)
    tensors = dict(linear_bias=torch.zeros(V), token_weight=torch.ones(N))
    return call(good() | ones | tensors | changed)


@pytest.fixture(autouse=True)
def nothing_known():
    prepare.KNOWN.clear()


def test_checks_run_once_for_each_signature():
    with mock.patch.object(prepare, "check_tensors", wraps=prepare.check_tensors) as check:
        assert torch.equal(called(), called()) and check.call_count == 1
        called(logit_scale=2.0)
        called(input=torch.randn(N, D, requires_grad=True))
        with torch.autocast("cpu"):
            assert called().dtype == torch.float32
        assert check.call_count == 4
        for known, traits in enumerate([(2, 0, "gloo"), (2, 1, "gloo"), (4, 1, "gloo"), (4, 1, "nccl")], 5):
            with mock.patch.object(prepare, "_group_traits", return_value=traits):
                called()
                called()
            assert check.call_count == known


REFUSED = [
    dict(target=torch.arange(N + 1)),
    dict(linear_weight=torch.zeros(V, D, dtype=torch.float64)),
    dict(linear_bias=torch.zeros(V + 1)),
    dict(target=torch.zeros(N)),
    dict(linear_weight=torch.zeros(V, D).to_sparse()),
    dict(linear_weight=torch.zeros(V, D, device="meta")),
    # Equal, as keys, to what is taken.
    dict(vocab_size=True),
    dict(ignore_index=1.0),
    *(dict([(name, True)]) for name in ("logit_scale", "temperature", "logit_softcap", "logits_budget")),
    dict(logits_budget=1.0),
    # Not to be hashed, or not equal to themselves.
    *(dict([(name, torch.ones(2))]) for name in ("logit_scale", "temperature")),
    dict(z_loss=float("nan")),
    dict(reduction=["mean"]),
    dict(sequence_parallel="no"),
]


@pytest.mark.parametrize("change", REFUSED, ids=lambda change: "".join(f"{n}={v}"[:40] for n, v in change.items()))
def test_a_bad_call_is_refused_after_a_good_one(change):
    for value in (1, 1.0):
        called(z_loss=value, logit_scale=value)
    for _ in range(2):
        with pytest.raises(ValueError):
            called(**change)


def test_a_tangent_and_another_backend_are_refused_after_a_good_call(monkeypatch):
    called()
    with torch.autograd.forward_ad.dual_level():
        dual = torch.autograd.forward_ad.make_dual(good()["input"], torch.ones(N, D))
        with pytest.raises(NotImplementedError, match="input has a tangent"):
            called(input=dual)
    monkeypatch.setenv("PARALLEL_LCE_BACKEND", "other")
    with pytest.raises(ValueError, match="PARALLEL_LCE_BACKEND='other'"):
        called()


def test_the_number_of_signatures_is_bounded(monkeypatch):
    monkeypatch.setattr(prepare, "_MOST_KNOWN", 3)
    for budget in range(10):
        called(logits_budget=budget)
        assert len(prepare.KNOWN) <= 3
