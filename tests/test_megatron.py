"""Training stock Megatron-core models with the switch equals training them without: also where the output weight is
fully sharded, detached, or used elsewhere, and where its main_grad is replaced."""

from __future__ import annotations

import warnings

import pytest
import torch
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import fully_shard

pytest.importorskip("megatron.core", reason="needs megatron-core")

import megatron.core

from megatron_models import BATCH, HIDDEN, OTHER_RELEASES, SEQUENCE, Model, losses_of, path_of, specs
from megatron_training import compare, in_ddp, side_by_side, train_quietly
from on_ranks import on_ranks
from tools import words_of_error
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


@pytest.mark.parametrize("of_model", [True, False])
@on_ranks(2)
def test_fully_sharded_weights(member, of_model):
    """On its own, the output layer's weight may be gone when the loss is due; the model's is whole."""
    spec = Model(ranks=member.ranks, data=member.ranks)

    def gradients(model, data, ours):
        mesh = DeviceMesh.from_group(member.group, member.device.type)
        if of_model:
            warnings.filterwarnings("error", message="parallel_lce")
        else:
            fully_shard(model.output_layer, mesh=mesh)
        fully_shard(model, mesh=mesh)
        losses_of(model, spec, data).mean().backward()
        return [p.grad.full_tensor() for p in model.parameters()]

    side_by_side(member, spec, gradients)


@pytest.mark.parametrize("sharded", [False, True])
@on_ranks(2)
def test_detached_weights(member, sharded):
    """As of mtp_detach_heads from 0.18 on: no dW, and none in main_grad."""

    def gradients(model, data, ours):
        layer = model.output_layer
        layer.weight.main_grad = torch.zeros_like(layer.weight)
        layer.weight.grad_added_to_main_grad = False
        if sharded:  # the layer's weight is, whatever is passed
            layer.weight.__fsdp_param__ = True
        hidden = torch.randn(SEQUENCE, BATCH, HIDDEN, generator=torch.Generator().manual_seed(2))
        hidden = hidden.to(member.device).requires_grad_()
        logits, _ = layer(hidden, weight=layer.weight.detach())
        assert isinstance(logits, torch.Tensor) == (sharded or not ours)
        model.compute_language_model_loss(data.labels, logits).mean().backward()
        assert not layer.weight.main_grad.any() and layer.weight.grad is None
        return [hidden.grad]

    side_by_side(member, Model(ranks=member.ranks), gradients)


@pytest.mark.parametrize("use", ["weight", "logits"])
@on_ranks(2)
def test_other_uses_of_the_weight(member, use):
    """Beside the fused loss they lose no gradient under DDP."""
    spec = Model(ranks=member.ranks)

    def gradient(model, data, ours):
        ddp, layer = in_ddp(model.config, model), model.output_layer
        hidden = torch.randn(SEQUENCE, BATCH, HIDDEN, generator=torch.Generator().manual_seed(1)).to(member.device)
        # With fused accumulation, which stock has through Apex alone, only real logits mark the weight.
        model.config.gradient_accumulation_fusion = ours and use == "logits"
        loss = losses_of(model, spec, data).mean()
        model.config.gradient_accumulation_fusion = False
        other = layer.weight.square().sum() if use == "weight" else layer(hidden)[0][0].square().mean()
        (loss + other).backward()
        ddp.finish_grad_sync()
        return [layer.weight.main_grad]

    side_by_side(member, spec, gradient)


@pytest.mark.parametrize("tied", [False, True])
@pytest.mark.parametrize("fusion", [False, True])
@on_ranks(2)
def test_a_main_grad_that_was_replaced_since_forward(member, fusion, tied):
    """As stock does: with gradient_accumulation_fusion the weight gets back the one of the forward."""
    spec = Model(ranks=member.ranks, fusion=fusion, tied=tied)

    def gradients(model, data, ours):
        in_ddp(model.config, model)
        weight = model.shared_embedding_or_output_weight() if tied else model.output_layer.weight
        loss = losses_of(model, spec, data).mean()
        before, after = weight.main_grad, torch.full_like(weight.main_grad, 0.5)
        weight.main_grad = after
        loss.backward()
        assert weight.main_grad is (before if fusion else after)
        found = before.clone(), after.clone()
        if ours and not fusion:
            loss = losses_of(model, spec, data).mean()
            weight.main_grad = after.bfloat16()
            assert "main_grad was torch.float32 [" in words_of_error(loss.backward)
        return found

    side_by_side(member, spec, gradients)
