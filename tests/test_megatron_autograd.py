"""Lazy logits and what autograd knows of tensors alone: a Function, a checkpoint."""

from __future__ import annotations

import pytest
import torch
from torch.utils.checkpoint import checkpoint

pytest.importorskip("megatron.core", reason="needs megatron-core")

from megatron_models import Model, batch
from megatron_training import output_layers, side_by_side
from on_ranks import on_ranks
from tools import words_of_error


class _Square(torch.autograd.Function):
    @staticmethod
    def forward(ctx, z):
        ctx.save_for_backward(z[...])
        return z * z

    @staticmethod
    def backward(ctx, upstream):
        return 2 * ctx.saved_tensors[0] * upstream


class _Calling(torch.autograd.Function):
    """Its forward uses what it is not given."""

    @staticmethod
    def forward(ctx, function):
        return function()


def _with_gradients(z):
    """As a loss in tiles does, it differentiates by itself."""
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


@on_ranks(2)
def test_autograd_functions_get_no_lazy_logits(member):
    """A torch.autograd.Function that gets no tensor returns none with a gradient: refused, or a tensor's."""
    from megatron.core import tensor_parallel

    _, ours, hidden, _ = output_layers(member, Model(ranks=member.ranks))
    ours.output_layer.training = False  # no warnings
    labels = batch(0, Model(ranks=member.ranks), member.device).labels
    target, leaf = labels.transpose(0, 1).contiguous(), hidden.clone().requires_grad_()
    loss_of = ours.compute_language_model_loss
    uses = [
        _Square.apply,
        _SetUp.apply,
        lambda z: _Calling.apply(lambda: (2 * z)[...]),
        lambda z: _Calling.apply(lambda: _with_gradients(z)),
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
    # A checkpoint within which logits are made for the first time.
    squares = checkpoint(torch.square, ours.output_layer(leaf)[0], use_reentrant=False)
    assert "different number of tensors was saved" in words_of_error(squares.sum().backward)

    def of_tensors(model, data, ours):
        """The remedy, and a loss that is recomputed in backward."""
        leaf, found = hidden.clone().requires_grad_(), []
        # Stock's loss changes fp32 logits.
        loss = lambda z: model.compute_language_model_loss(data.labels, z if ours else z.clone())  # noqa: E731
        recomputed = lambda z: checkpoint(loss, z, use_reentrant=False)  # noqa: E731
        for losses_of in (lambda z: tensor_parallel.vocab_parallel_cross_entropy(z[...], target), recomputed):
            losses = losses_of(model.output_layer(leaf)[0])
            found += [losses, torch.autograd.grad(losses.mean(), leaf)[0]]
        return found

    side_by_side(member, Model(ranks=member.ranks), of_tensors)


def _megatrons(run, x):
    from megatron.core import tensor_parallel

    return tensor_parallel.random.checkpoint(run, False, x)


CHECKPOINTS = {
    "reentrant": lambda run, x: checkpoint(run, x, use_reentrant=True),
    "not reentrant": lambda run, x: checkpoint(run, x, use_reentrant=False),
    "Megatron's": _megatrons,
}


@pytest.mark.parametrize("with_loss", [False, True])
@pytest.mark.parametrize("kind", CHECKPOINTS)
@pytest.mark.parametrize("sequence_parallel", [False, True])
@on_ranks(2)
def test_the_output_layer_within_a_checkpoint(member, sequence_parallel, kind, with_loss):
    """Alone or with its loss, and a loss of something else."""
    spec, checkpointed = Model(ranks=member.ranks, sequence_parallel=sequence_parallel), CHECKPOINTS[kind]
    _, _, hidden, _ = output_layers(member, spec)

    def gradients(model, data, ours):
        leaf, labels = hidden.clone().requires_grad_(), data.labels
        layer = lambda x: model.output_layer(x)[0]  # noqa: E731
        loss_of = model.compute_language_model_loss
        if with_loss:
            losses = checkpointed(lambda x: loss_of(labels, layer(x)), leaf)
        elif ours and kind != "not reentrant":
            z = checkpointed(layer, leaf)
            for use in (lambda: loss_of(labels, z), lambda: z.float()):
                assert "let it return `logits[...]`" in words_of_error(use)
            with torch.no_grad():  # where stock's has no gradient either
                assert torch.equal(checkpointed(layer, leaf)[...], layer(leaf)[...])
            losses = loss_of(labels, checkpointed(lambda x: layer(x)[...], leaf))
        else:
            losses = loss_of(labels, checkpointed(layer, leaf))
        (losses.mean() + leaf.square().mean() + model.output_layer.weight.square().mean()).backward()
        return losses, leaf.grad, model.output_layer.weight.grad

    side_by_side(member, spec, gradients)
