"""The output weight under the switch: fully sharded, detached, with other uses, in checkpoints."""

from __future__ import annotations

import warnings

import pytest
import torch
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import fully_shard

pytest.importorskip("megatron.core", reason="needs megatron-core")

import parallel_lce.megatron
from measures import assert_close, largest_error
from megatron_models import BATCH, HIDDEN, SEQUENCE, Model, batch, build, losses_of
from megatron_training import switched
from tools import words_of_error
from world import Member


class _Resharded:
    """Has a weight exist within its layer's forward alone, as fully sharded data parallelism does."""

    def __init__(self, layer: torch.nn.Module) -> None:
        self.whole = layer.weight.data.clone()
        layer.weight.__fsdp_param__ = True
        layer.register_forward_pre_hook(lambda module, inputs: self.fill(module))
        layer.register_forward_hook(lambda module, inputs, outputs: self.empty(module))
        layer.register_full_backward_pre_hook(lambda module, upstream: self.fill(module))
        self.empty(layer)

    def fill(self, layer) -> None:
        layer.weight.untyped_storage().resize_(self.whole.untyped_storage().nbytes())
        layer.weight.data.copy_(self.whole)  # unseen by version counters

    def empty(self, layer) -> None:
        layer.weight.untyped_storage().resize_(0)


def _fully_sharded(member: Member) -> None:
    """The loss of a weight that is gone when it is due."""
    spec = Model(ranks=member.ranks)
    gradients = []
    for options in ({}, switched(spec)):
        model = build(member, spec, options)
        if options:
            _Resharded(model.output_layer)
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", message="parallel_lce")
            losses_of(model, spec, batch(0, spec, member.device)).mean().backward()
        gradients.append({n: p.grad for n, p in model.named_parameters()})
    parallel_lce.megatron.uninstall()
    for name, truth in gradients[0].items():
        assert_close(gradients[1][name], truth, 1e-5, name=name)


def test_fully_sharded_weights(worlds):
    worlds(2).run(_fully_sharded)


def _torch_fsdp(member: Member, output_layer_too: bool) -> None:
    spec = Model(ranks=member.ranks, data=member.ranks)
    gradients = []
    for options in ({}, switched(spec)):
        model = build(member, spec, options)
        mesh = DeviceMesh.from_group(member.group, member.device.type)
        for module in (model.output_layer, model) if output_layer_too else (model,):
            fully_shard(module, mesh=mesh)
        with warnings.catch_warnings():
            # Where the output layer is sharded alone its weight is gone when the loss is due.
            action = "ignore" if output_layer_too else "error"
            warnings.filterwarnings(action, message="parallel_lce")
            losses_of(model, spec, batch(0, spec, member.device)).mean().backward()
        gradients.append({n: p.grad.full_tensor() for n, p in model.named_parameters()})
    parallel_lce.megatron.uninstall()
    for name, truth in gradients[0].items():
        assert_close(gradients[1][name], truth, 1e-5, name=name)


def _detached(member: Member, sharded: bool) -> None:
    """A detached weight, as of mtp_detach_heads from 0.18 on: no dW, and none in main_grad."""
    spec = Model(ranks=member.ranks)
    found = []
    for options in ({}, switched(spec)):
        model = build(member, spec, options)
        layer, labels = model.output_layer, batch(0, spec, member.device).labels
        layer.weight.main_grad = torch.zeros_like(layer.weight)
        layer.weight.grad_added_to_main_grad = False
        if options and sharded:
            _Resharded(layer)
        hidden = torch.randn(SEQUENCE, BATCH, HIDDEN, generator=torch.Generator().manual_seed(2))
        hidden = hidden.to(member.device).requires_grad_()
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", message="parallel_lce")
            logits, _ = layer(hidden, weight=layer.weight.detach())
            model.compute_language_model_loss(labels, logits).mean().backward()
        found.append((hidden.grad, layer.weight.main_grad, layer.weight.grad))
    parallel_lce.megatron.uninstall()
    assert_close(found[1][0], found[0][0], 1e-5)
    for _, main_grad, gradient in found:
        assert not main_grad.any() and gradient is None


@pytest.mark.parametrize("sharded", [False, True])
def test_detached_weights(sharded, worlds):
    worlds(2).run(_detached, sharded)


@pytest.mark.parametrize("output_layer_too", [False, True])
def test_torchs_fully_sharded_data_parallel(output_layer_too, worlds):
    worlds(2).run(_torch_fsdp, output_layer_too)


def _mixed_uses(member: Member, use: str) -> None:
    """Other uses of the weight beside the fused loss lose no gradient of it under DDP."""

    def gradient(options: dict) -> torch.Tensor:
        from megatron.core.distributed import DistributedDataParallel, DistributedDataParallelConfig

        spec = Model(ranks=member.ranks)
        model = build(member, spec, options)
        ddp_config = DistributedDataParallelConfig(grad_reduce_in_fp32=True)
        ddp = DistributedDataParallel(model.config, ddp_config, model)
        ddp.zero_grad_buffer()
        hidden = torch.randn(SEQUENCE, BATCH, HIDDEN, generator=torch.Generator().manual_seed(1))
        weight = model.output_layer.weight
        # With fused accumulation, which stock has through Apex alone, only real logits mark the weight.
        model.config.gradient_accumulation_fusion = bool(options) and use == "logits"
        loss = losses_of(model, spec, batch(0, spec, member.device)).mean()
        model.config.gradient_accumulation_fusion = False
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            if use == "weight":
                loss = loss + weight.square().sum()
            else:
                loss = loss + model.output_layer(hidden.to(member.device))[0][0].square().mean()
        loss.backward()
        ddp.finish_grad_sync()
        return model.output_layer.weight.main_grad.clone()

    stock = gradient({})
    ours = gradient(switched(Model()))
    parallel_lce.megatron.uninstall()
    assert_close(ours, stock, 1e-5)


@pytest.mark.parametrize("use", ["weight", "logits"])
def test_other_uses_of_the_weight(use, worlds):
    worlds(2).run(_mixed_uses, use)


def _replaced(member: Member, fusion: bool, tied: bool) -> None:
    """Somebody gives the weight another main_grad between forward and backward."""
    from megatron.core.distributed import DistributedDataParallel, DistributedDataParallelConfig

    spec, found = Model(ranks=member.ranks, fusion=fusion, tied=tied), []
    for options in ({}, switched(spec)):
        model = build(member, spec, options)
        ddp = DistributedDataParallel(model.config, DistributedDataParallelConfig(grad_reduce_in_fp32=True), model)
        ddp.zero_grad_buffer()
        weight = model.shared_embedding_or_output_weight() if tied else model.output_layer.weight
        loss = losses_of(model, spec, batch(0, spec, member.device)).mean()
        before, after = weight.main_grad, torch.full_like(weight.main_grad, 0.5)
        weight.main_grad = after
        loss.backward()
        assert weight.main_grad is (before if fusion else after)
        found.append((before.clone(), after.clone()))
    if not fusion:
        loss = losses_of(model, spec, batch(0, spec, member.device)).mean()
        weight.main_grad = after.bfloat16()
        assert "main_grad was torch.float32 [" in words_of_error(loss.backward)
    parallel_lce.megatron.uninstall()
    for truth, mine in zip(*found, strict=True):
        assert_close(mine, truth, 1e-5)


@pytest.mark.parametrize("tied", [False, True])
@pytest.mark.parametrize("fusion", [False, True])
def test_a_main_grad_that_was_replaced_since_forward(fusion, tied, worlds):
    """As stock does: with gradient_accumulation_fusion the weight gets back the one of the forward."""
    worlds(2).run(_replaced, fusion, tied)


def _checkpointed(member: Member, folder: str, tied: bool) -> None:
    """Stock saves, ours loads and saves, stock loads; sharded state dicts are compared in every training."""
    spec = Model(ranks=member.ranks, sequence_parallel=True, tied=tied)
    stock = build(member, spec, {})
    with torch.no_grad():
        for parameter in stock.parameters():
            parameter.add_(torch.randn_like(parameter))
    ours = build(member, spec, switched(spec))
    path = f"{folder}/{member.rank}.pt"

    def copy(source, destination) -> None:
        torch.save(source.state_dict(), path)
        destination.load_state_dict(torch.load(path, weights_only=True))

    copy(stock, ours)
    data = batch(0, spec, member.device)
    assert largest_error(losses_of(ours, spec, data), losses_of(stock, spec, data)) <= 1e-5
    with torch.no_grad():
        for parameter in ours.parameters():
            parameter.mul_(0.5)
    copy(ours, stock)
    parallel_lce.megatron.uninstall()
    for (name, a), (other, b) in zip(ours.named_parameters(), stock.named_parameters(), strict=True):
        assert name == other and torch.equal(a, b), name


@pytest.mark.parametrize("tied", [False, True])
def test_checkpoints_go_both_ways(tied, worlds, tmp_path):
    worlds(2).run(_checkpointed, str(tmp_path), tied)
