"""Lazy logits and what autograd knows of tensors alone: a Function, a checkpoint."""

from __future__ import annotations

import warnings

import pytest
import torch
from torch.utils.checkpoint import checkpoint

pytest.importorskip("megatron.core", reason="needs megatron-core")

import parallel_lce.megatron
from measures import assert_close
from megatron_models import Model, batch
from megatron_training import output_layers
from tools import words_of_error
from world import Member


class _Square(torch.autograd.Function):
    @staticmethod
    def forward(ctx, z):
        ctx.save_for_backward(z[...])
        return z * z

    @staticmethod
    def backward(ctx, upstream):
        return 2 * ctx.saved_tensors[0] * upstream


class _Doubled(torch.autograd.Function):
    @staticmethod
    def forward(ctx, z):
        return (2 * z)[...]


class _WithGradients(torch.autograd.Function):
    """As a loss in tiles does, it differentiates by itself."""

    @staticmethod
    def forward(ctx, z):
        with torch.enable_grad():
            return z.square().sum().detach()


class _SetUp(torch.autograd.Function):
    """Its forward has no context."""

    @staticmethod
    def forward(z):
        return z * z

    @staticmethod
    def setup_context(ctx, inputs, output):
        pass


class _Decorated(torch.autograd.Function):
    @staticmethod
    @torch.amp.custom_fwd(device_type="cuda")
    def forward(ctx, z):
        return z * z


class _Calling(torch.autograd.Function):
    """Its forward uses what it is not given."""

    @staticmethod
    def forward(ctx, function):
        return function()


def _untracked(member: Member) -> None:
    """A torch.autograd.Function that gets no tensor returns none with a gradient: refused, or a tensor's."""
    from megatron.core import tensor_parallel

    stock, ours, hidden, _ = output_layers(member, Model(ranks=member.ranks))
    ours.output_layer.training = False  # no warnings
    labels = batch(0, Model(ranks=member.ranks), member.device).labels
    target, leaf = labels.transpose(0, 1).contiguous(), hidden.clone().requires_grad_()
    loss_of = ours.compute_language_model_loss
    uses = [
        _Square.apply,
        _Doubled.apply,
        _WithGradients.apply,
        _SetUp.apply,
        _Decorated.apply,
        lambda z: _Calling.apply(lambda: z * z),
        lambda z: tensor_parallel.vocab_parallel_cross_entropy(z, target),
        lambda z: checkpoint(torch.square, z, use_reentrant=True),
        lambda z: checkpoint(loss_of, labels, z, use_reentrant=True),
        lambda z: (z.add_(0), _Square.apply(z))[1],  # with real logits, too
    ]
    for number, use in enumerate(uses):
        z = ours.output_layer(leaf)[0]
        assert "give it `logits[...]`" in words_of_error(lambda: use(z)), number
        with torch.no_grad():  # where stock's has no gradient either
            assert not use(ours.output_layer(leaf)[0]).requires_grad
    found = []
    for model in (stock, ours):
        leaf = hidden.clone().requires_grad_()
        z = model.output_layer(leaf)[0]
        losses = tensor_parallel.vocab_parallel_cross_entropy(z[...], target)
        losses.mean().backward()
        found.append((losses.detach(), leaf.grad))
    for truth, mine in zip(*found):
        assert_close(mine, truth, 1e-5)
    # The loss, recomputed in backward, and a checkpoint within which logits are made for the first time.
    leaf = hidden.clone().requires_grad_()
    checkpoint(loss_of, labels, ours.output_layer(leaf)[0], use_reentrant=False).transpose(0, 1).mean().backward()
    assert_close(found[0][1], leaf.grad, 1e-5)
    squares = checkpoint(torch.square, ours.output_layer(leaf)[0], use_reentrant=False)
    assert "different number of tensors was saved" in words_of_error(squares.sum().backward)
    parallel_lce.megatron.uninstall()


def test_autograd_functions_get_no_lazy_logits(worlds):
    worlds(2).run(_untracked)


def _within_a_checkpoint(member: Member, sequence_parallel: bool) -> None:
    """The output layer within a reentrant checkpoint, alone or with its loss, and a loss of something else."""
    from megatron.core import tensor_parallel

    spec = Model(ranks=member.ranks, sequence_parallel=sequence_parallel)
    stock, ours, hidden, _ = output_layers(member, spec)
    labels = batch(0, spec, member.device).labels
    kinds = {
        "reentrant": lambda run, x: checkpoint(run, x, use_reentrant=True),
        "not reentrant": lambda run, x: checkpoint(run, x, use_reentrant=False),
        "Megatron's": lambda run, x: tensor_parallel.random.checkpoint(run, False, x),
    }
    for kind, checkpointed in kinds.items():
        for with_loss in (False, True):
            found = []
            for model in (stock, ours):
                model.zero_grad()
                leaf = hidden.clone().requires_grad_()

                def layer(x, model=model):
                    return model.output_layer(x)[0]

                def real_logits(x, model=model):
                    return model.output_layer(x)[0][...]

                def layer_and_loss(x, model=model):
                    return model.compute_language_model_loss(labels, model.output_layer(x)[0])

                with warnings.catch_warnings():
                    warnings.filterwarnings("ignore", message="parallel_lce")
                    if with_loss:
                        losses = checkpointed(layer_and_loss, leaf)
                    elif model is ours and kind != "not reentrant":
                        z = checkpointed(layer, leaf)
                        for use in (lambda: model.compute_language_model_loss(labels, z), lambda: z.float()):
                            assert "let it return `logits[...]`" in words_of_error(use), kind
                        with torch.no_grad():  # where stock's has no gradient either
                            assert torch.equal(checkpointed(layer, leaf)[...], model.output_layer(leaf)[0][...])
                        losses = model.compute_language_model_loss(labels, checkpointed(real_logits, leaf))
                    else:
                        losses = model.compute_language_model_loss(labels, checkpointed(layer, leaf))
                    (losses.mean() + leaf.square().mean() + model.output_layer.weight.square().mean()).backward()
                found.append((losses.detach(), leaf.grad, model.output_layer.weight.grad.clone()))
            for truth, mine in zip(*found):
                assert_close(mine, truth, 1e-5, name=(kind, with_loss))
    parallel_lce.megatron.uninstall()


@pytest.mark.parametrize("sequence_parallel", [False, True])
def test_the_output_layer_within_a_checkpoint(sequence_parallel, worlds):
    worlds(2).run(_within_a_checkpoint, sequence_parallel)
