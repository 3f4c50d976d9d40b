"""Training stock Megatron-core models with the switch equals training them without."""

from __future__ import annotations

import pytest
import torch

pytest.importorskip("megatron.core", reason="needs megatron-core")

import megatron.core

from megatron_models import OTHER_RELEASES, Model, path_of, specs
from megatron_training import compare, train_quietly
from on_ranks import on_ranks
from world import Member

SPECS = [*specs(1), *specs(2), *(pytest.param(spec, marks=pytest.mark.slow) for spec in specs(4))]


@pytest.mark.parametrize("spec", SPECS, ids=str)
@pytest.mark.thinned
def test_training_equals_stock(spec, worlds):
    worlds(spec.ranks).run(compare, spec)


def _compare_on(member: Member, release: str, spec: Model) -> None:
    # From 0.18 on it adds the commit of the repository that it lies in.
    assert not release[0].isdigit() or megatron.core.__version__.partition("+")[0] == release
    compare(member, spec)


@pytest.mark.parametrize("spec", specs(2, tp_of_pairs=1), ids=str)
@pytest.mark.parametrize("release", OTHER_RELEASES)
def test_other_releases(release, spec, worlds):
    worlds(spec.ranks, path_of(release)).run(_compare_on, release, spec)


@pytest.mark.parametrize(
    ("ranks", "spec"),
    [(1, Model()), (2, Model(ranks=2, sequence_parallel=True, ddp="fp32", tied=True, mtp=1))],
    ids=str,
)
@on_ranks()
def test_training_on_logits_equals_stock(member, spec):
    compare(member, spec, "logits")


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
