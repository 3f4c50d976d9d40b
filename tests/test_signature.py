"""Calls of one signature are checked once, and nothing that the checks refuse passes as one that they have seen."""

from __future__ import annotations

from unittest import mock

import numpy as np
import pytest
import torch

import parallel_lce
from parallel_lce.call import prepare

N, D, V = 6, 4, 9


def arguments(**changed) -> dict:
    generator = torch.Generator().manual_seed(0)
    given = dict(
        input=torch.randn(N, D, generator=generator),
        linear_weight=torch.randn(V, D, generator=generator),
        target=torch.arange(N),
        linear_bias=torch.zeros(V),
        token_weight=torch.ones(N),
        ignore_index=1,
        label_smoothing=0.0,
        logit_scale=1.0,
        logit_softcap=1.0,
        vocab_size=V,
        logits_budget=1,
        z_loss=1.0,
    )
    return given | changed


def called(given: dict):
    given = dict(given)
    return parallel_lce.linear_cross_entropy(
        given.pop("input"), given.pop("linear_weight"), given.pop("target"), **given
    )


@pytest.fixture(autouse=True)
def nothing_known():
    prepare.KNOWN.clear()


def test_checks_run_once():
    with mock.patch.object(prepare, "check_tensors", wraps=prepare.check_tensors) as check:
        first = called(arguments())
        again = called(arguments())
        assert check.call_count == 1 and torch.equal(first, again)
        called(arguments(logit_scale=2.0))
        called(arguments(input=torch.randn(N, D, requires_grad=True)))
        with torch.autocast("cpu"):
            assert called(arguments()).dtype == torch.float32
        assert check.call_count == 4


def test_a_group_of_other_ranks_is_planned_again():
    with mock.patch.object(prepare, "check_tensors", wraps=prepare.check_tensors) as check:
        for calls, traits in enumerate([(2, 0, "gloo"), (2, 1, "gloo"), (4, 1, "gloo"), (4, 1, "nccl")], 1):
            with mock.patch.object(prepare, "_group_traits", return_value=traits):
                called(arguments())
                called(arguments())
            assert check.call_count == calls


REFUSED = {
    "another shape": dict(target=torch.arange(N + 1)),
    "another dtype": dict(linear_weight=torch.zeros(V, D, dtype=torch.float64)),
    "a bias of another size": dict(linear_bias=torch.zeros(V + 1)),
    "no integer": dict(target=torch.zeros(N)),
    "True for 1": dict(vocab_size=True),
    "a float for an id": dict(ignore_index=1.0),
    "True for a number": dict(logit_scale=True),
    "True for a temperature": dict(temperature=True),
    "a tensor for a temperature": dict(temperature=torch.ones(2)),
    "text for a reduction": dict(reduce_hidden_grad="no"),
    "True for a cap": dict(logit_softcap=True),
    "a float budget": dict(logits_budget=1.0),
    "True for a budget": dict(logits_budget=True),
    "NaN": dict(z_loss=float("nan")),
    "a list": dict(reduction=["mean"]),
    "text for a switch": dict(sequence_parallel="no"),
    "a tensor": dict(logit_scale=torch.ones(2)),
    "sparse": dict(linear_weight=torch.zeros(V, D).to_sparse()),
    "another device": dict(linear_weight=torch.zeros(V, D, device="meta")),
}


@pytest.mark.parametrize("change", REFUSED.values(), ids=REFUSED)
def test_what_is_refused_at_first_is_refused_after_a_good_call(change):
    for value in (1, 1.0):
        # Good calls whose numbers are equal to the wrong ones.
        called(arguments(z_loss=float(value), logit_scale=float(value), vocab_size=V))
    for _ in range(2):
        with pytest.raises(ValueError):
            called(arguments(**change))


def test_numbers_of_other_libraries_are_taken_each_time():
    expected = called(arguments(logit_scale=0.5))
    for _ in range(2):
        assert torch.equal(called(arguments(logit_scale=np.float64(0.5), logits_budget=np.int64(1))), expected)


def test_a_tangent_is_refused_after_a_good_call():
    given = arguments()
    called(given)
    with torch.autograd.forward_ad.dual_level():
        given["input"] = torch.autograd.forward_ad.make_dual(given["input"], torch.ones(N, D))
        with pytest.raises(NotImplementedError, match="input has a tangent"):
            called(given)


def test_a_negated_view_has_its_own_values():
    x = torch.randn(N, D, dtype=torch.complex64)
    negated = x.conj().imag
    assert negated.is_neg()
    expected = called(arguments(input=negated.resolve_neg()))
    for _ in range(2):
        assert torch.equal(called(arguments(input=negated)), expected)


def test_the_backend_is_chosen_at_each_call(monkeypatch):
    called(arguments())
    monkeypatch.setenv("PARALLEL_LCE_BACKEND", "other")
    with pytest.raises(ValueError, match="PARALLEL_LCE_BACKEND='other'"):
        called(arguments())


def test_the_number_of_signatures_is_bounded(monkeypatch):
    monkeypatch.setattr(prepare, "_MOST_KNOWN", 3)
    for budget in range(10):
        called(arguments(logits_budget=budget))
        assert len(prepare.KNOWN) <= 3
