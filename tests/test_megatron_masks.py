"""Masked tokens cost nothing under ``patch(skip_masked=True)``, and training is that of the stock loss."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

pytest.importorskip("megatron.core", reason="needs megatron-core")

import megatron.core

from blocks import counted_forwards
from megatron_models import BATCH, OTHER_RELEASES, SEQUENCE, Model, batch, build, losses_of, path_of
from megatron_training import compare, side_by_side, switched
from parallel_lce.backends import backend_of
from parallel_lce.megatron import patch, token_log_probs, unpatch
from tools import on_ranks
from world import Member


@pytest.fixture(autouse=True)
def _unpatched():
    yield
    unpatch()


def _mask(labels: torch.Tensor) -> torch.Tensor:
    """A prompt, and what Megatron's data sets mask."""
    counted = (labels >= 0).float()
    counted[:, : labels.shape[1] // 2] = 0
    return counted


def _forward_step(spec: Model, device, done, numbers, model):
    """As Megatron-LM's: the model gets the loss mask, and the losses are multiplied by it."""
    data = batch(next(numbers), spec, device)
    mask = _mask(data.labels)
    if spec.family == "gpt":
        output = model(data.tokens, data.positions, data.mask, labels=data.labels, loss_mask=mask)
    else:  # whose forwards take no mask
        output = losses_of(model, spec, replace(data, labels=data.labels.masked_fill(mask == 0, -100)))

    def loss_function(losses: torch.Tensor):
        done.losses.append((losses.detach() * mask).float().cpu())
        total, tokens = (losses * mask).sum(), mask.sum().int()
        return total, tokens, {"loss": total.detach()}

    return output, loss_function


SPECS = [
    Model(),
    Model(ranks=2, sequence_parallel=True, ddp="fp32", mtp=1, fusion=True),
    Model(ranks=2, context=2, ddp="fp32", mtp=2, per_token=True),
    Model(ranks=2, pipeline=2, ddp="fp32", tied=True, microbatches=3),
    Model(family="mamba"),
    Model(family="bert", tied=True),
    Model(family="t5", tied=True),
]


def _compare(member: Member, spec: Model) -> None:
    patch(skip_masked=True)
    with counted_forwards(backend_of(torch.zeros(1, 1, device=member.device))) as rows:
        compare(member, spec, forward_step=_forward_step)
    tokens = BATCH * SEQUENCE // spec.context * spec.steps * spec.microbatches
    last = member.rank >= member.ranks - member.ranks // spec.pipeline
    # Half of the tokens do not count. MTP has other labels.
    heads = 1 + (spec.mtp or 0)
    if tuple(map(int, megatron.core.__version__.split(".")[:2])) >= (0, 19):
        heads += spec.mtp or 0  # whose acceptance is of the largest logits of all tokens
    assert sum(rows) <= (tokens * (heads - 0.5) if last else 0), rows
    assert bool(rows) == last


@pytest.mark.parametrize("spec", SPECS, ids=str)
def test_training_equals_stock(spec, worlds):
    worlds(spec.ranks).run(_compare, spec)


@pytest.mark.parametrize("release", OTHER_RELEASES)
def test_other_releases(release, worlds):
    """Those from 0.17 on make the losses of MTP in a function of their own."""
    worlds(2, path_of(release)).run(_compare, SPECS[1])


@on_ranks(1)
def test_masked_tokens_have_no_loss(member):
    """Whatever names the mask. Others have the very losses of before."""
    spec = Model()
    model, data = build(member, spec, switched(spec)), batch(0, spec, member.device)
    mask = _mask(data.labels)
    given = data.tokens, data.positions, data.mask
    whole = model(*given, labels=data.labels)
    assert whole[0, 3] != 0
    marked = data.labels.masked_fill(mask == 0, -100)
    patch(skip_masked=True)
    calls = (
        lambda: model(*given, None, data.labels, loss_mask=mask),
        lambda: model(*given, labels=data.labels, loss_mask=mask.bool()),
        lambda: model(*given, labels=marked),
    )
    for call in calls:
        with counted_forwards(backend_of(model.output_layer.weight)) as rows:
            found = call()
        torch.testing.assert_close(found, whole * mask)
        assert sum(rows) == int(mask.sum())
    hook = model.output_layer.register_forward_hook(lambda layer, inputs, output: (output[0].add_(0), None))
    with pytest.warns(match="'add_' of the output layer's result"):
        found = calls[0]()
    torch.testing.assert_close(found, whole * mask)
    hook.remove()


@on_ranks(1)
def test_a_loss_that_makes_other_labels(member):
    spec = Model(mtp=1)
    patch(skip_masked=True)

    def results(model, data, ours):
        own = model.compute_language_model_loss
        model.compute_language_model_loss = lambda labels, logits: own(labels.clamp(min=0), logits)
        labels = data.labels.masked_fill(_mask(data.labels) == 0, -100)
        losses = model(data.tokens, data.positions, data.mask, labels=labels)
        return [losses, *torch.autograd.grad(losses.sum(), [*model.parameters()])]

    side_by_side(member, spec, results)


@pytest.mark.parametrize("entropy", [False, True])
@on_ranks(1)
def test_log_probs_of_the_counted_labels(member, entropy):
    spec = Model(mtp=1)
    model, data = build(member, spec, switched(spec)), batch(0, spec, member.device)
    labels = data.labels.masked_fill(_mask(data.labels) == 0, -100)
    given = data.tokens, data.positions, data.mask, labels
    whole = token_log_probs(model, *given, entropy=entropy, loss_mask=torch.ones_like(labels))
    patch(skip_masked=True)
    with counted_forwards(backend_of(model.output_layer.weight)) as rows:
        found = token_log_probs(model, *given, entropy=entropy, loss_mask=torch.ones_like(labels))
    assert sum(rows) == int((labels >= 0).sum()) + labels.numel()  # MTP has other labels
    torch.testing.assert_close(found.log_probs, whole.log_probs)
    if entropy:
        torch.testing.assert_close(found.entropy, whole.entropy.masked_fill(labels < 0, 0.0))
