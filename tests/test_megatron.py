"""Training stock Megatron-core models with the switch equals training them without."""

from __future__ import annotations

from dataclasses import replace
from unittest import mock

import pytest
import torch

pytest.importorskip("megatron.core", reason="needs megatron-core")

from megatron_models import Model, specs
from megatron_releases import OTHER_RELEASES, path_of
from megatron_training import assert_equal, switched, tolerance_of, train, train_quietly
from on_ranks import on_ranks
from parallel_lce.megatron.lazy_logits import LazyLogits
from world import Member


def _compare(member: Member, spec: Model) -> None:
    # With fused accumulation stock drops the MTP embedding's gradient where PP > 1 and weights are tied.
    drops = spec.fusion and spec.tied and spec.mtp and spec.pipeline > 1
    stock = train(member, replace(spec, fusion=False) if drops else spec, {})
    assert_equal(train_quietly(member, spec), stock, tolerance_of(spec))


SPECS = [*specs(1), *specs(2), *(pytest.param(spec, marks=pytest.mark.slow) for spec in specs(4))]


@pytest.mark.parametrize("spec", SPECS, ids=str)
@pytest.mark.thinned
def test_training_equals_stock(spec, worlds):
    worlds(spec.ranks).run(_compare, spec)


@pytest.mark.parametrize("spec", specs(2, tp_of_pairs=1), ids=str)
@pytest.mark.parametrize("release", OTHER_RELEASES)
def test_other_releases(release, spec, worlds):
    worlds(spec.ranks, path_of(release)).run(_compare, spec)


def _release(member: Member) -> str:
    import megatron.core

    return megatron.core.__version__


@pytest.mark.parametrize("release", OTHER_RELEASES)
def test_other_releases_are_what_is_imported(release, worlds):
    path = path_of(release)
    (found,) = set(worlds(2, path).run(_release))
    # From 0.18 on it adds the commit of the repository that it lies in.
    assert not release[0].isdigit() or found.partition("+")[0] == release


class _Faulty(torch.autograd.Function):
    """The identity with a gradient that is wrong by 0.1 %."""

    @staticmethod
    def forward(ctx, tensor):
        return tensor.view_as(tensor)

    @staticmethod
    def backward(ctx, upstream):
        return upstream * 1.001


@pytest.mark.parametrize("where", ["hidden", "weight"])
@on_ranks(2)
def test_a_fault_of_a_thousandth_fails(member, where):
    spec, check = Model(ranks=member.ranks), LazyLogits.check

    def faulty(logits) -> None:
        """The loss checks its logits before it takes their hidden states and weight."""
        check(logits)
        setattr(logits, where, _Faulty.apply(getattr(logits, where)))

    stock = train(member, spec, {})
    with mock.patch.object(LazyLogits, "check", faulty):
        ours = train_quietly(member, spec)
    with pytest.raises(AssertionError):
        assert_equal(ours, stock, tolerance_of(spec))


@pytest.mark.parametrize(
    ("ranks", "spec"),
    [(1, Model()), (2, Model(ranks=2, sequence_parallel=True, ddp="fp32", tied=True, mtp=1))],
    ids=str,
)
@on_ranks()
def test_training_on_logits_equals_stock(member, spec):
    stock = train(member, spec, {})
    assert_equal(train_quietly(member, spec, switched(spec, "logits")), stock, tolerance_of(spec))


@pytest.mark.parametrize("ranks", [1, 2])
@on_ranks()
def test_deterministic_mode_repeats_every_bit(member):
    several = member.ranks > 1
    spec = Model(ranks=member.ranks, sequence_parallel=several, deterministic=True, ddp="fp32", dtype=torch.bfloat16)
    first, second = (train_quietly(member, spec) for _ in range(2))
    for a, b in zip(first.losses, second.losses, strict=True):
        assert torch.equal(a, b)
    for name, value in first.parameters.items():
        assert torch.equal(value, second.parameters[name]), name
