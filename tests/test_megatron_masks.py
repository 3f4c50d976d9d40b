"""Masked tokens cost nothing under ``patch(skip_masked=True)``, and training is that of the stock loss."""

from __future__ import annotations

import pytest
import torch

pytest.importorskip("megatron.core", reason="needs megatron-core")

from blocks import counted_forwards
from megatron_models import OTHER_RELEASES, Model, batch, build, path_of
from megatron_training import compare, side_by_side, switched
from parallel_lce.backends import backend_of
from parallel_lce.megatron import patch, token_log_probs, token_loss
from tools import on_ranks

SPECS = [
    Model(masked=True),
    Model(masked=True, ranks=2, sequence_parallel=True, ddp="fp32", mtp=1, fusion=True),
    Model(masked=True, ranks=2, context=2, ddp="fp32", mtp=2, per_token=True),
    Model(masked=True, ranks=2, pipeline=2, ddp="fp32", tied=True, microbatches=3),
    Model(masked=True, family="mamba"),
    Model(masked=True, family="bert", tied=True),
    Model(masked=True, family="t5", tied=True),
]


@pytest.mark.parametrize("spec", SPECS, ids=str)
def test_training_equals_stock(spec, worlds):
    worlds(spec.ranks).run(compare, spec)


@pytest.mark.parametrize("release", OTHER_RELEASES)
def test_other_releases(release, worlds):
    """Those from 0.17 on make the losses of MTP in a function of their own."""
    worlds(2, path_of(release)).run(compare, SPECS[1])


@on_ranks(1)
def test_masked_tokens_have_no_loss(member):
    """Whatever names the mask. Others have the very losses of before."""
    model, data = build(member, Model(), switched(Model())), batch(0, Model(masked=True), member.device)
    given, mask = (data.tokens, data.positions, data.mask), data.counted
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
    model.output_layer.register_forward_hook(lambda layer, inputs, output: (output[0].add_(0), None))
    with pytest.warns(match="'add_' of the output layer's result"):
        found = calls[0]()
    torch.testing.assert_close(found, whole * mask)


@on_ranks(1)
def test_a_loss_that_makes_other_labels(member):
    patch(skip_masked=True)

    def results(model, data, ours):
        own = model.compute_language_model_loss
        model.compute_language_model_loss = lambda labels, logits: own(labels.clamp(min=0), logits)
        labels = data.labels.masked_fill(torch.arange(data.labels.shape[1], device=member.device) < 8, -100)
        losses = model(data.tokens, data.positions, data.mask, labels=labels)
        return [losses, *torch.autograd.grad(losses.sum(), [*model.parameters()])]

    side_by_side(member, Model(mtp=1), results)


@pytest.mark.parametrize("entropy", [False, True])
@on_ranks(1)
def test_scores_of_the_counted_labels(member, entropy):
    model, data = build(member, Model(mtp=1), switched(Model())), batch(0, Model(masked=True), member.device)
    labels = data.labels.masked_fill(data.counted == 0, -100)
    given, mask = (data.tokens, data.positions, data.mask, labels), {"loss_mask": torch.ones_like(labels)}

    def scores() -> list[torch.Tensor]:
        total, metrics = token_loss(model, *given, lambda t: (-t.target_log_prob, {"p": t.target_log_prob}), **mask)
        found = token_log_probs(model, *given, entropy=entropy, **mask)
        return [total, metrics["p"], found.log_probs, *([found.entropy * data.counted] if entropy else [])]

    whole = scores()
    patch(skip_masked=True)
    with counted_forwards(backend_of(model.output_layer.weight)) as rows:
        found = scores()
    assert sum(rows) == 2 * int(data.counted.sum()) + 2 * labels.numel()  # MTP has other labels
    torch.testing.assert_close(found, whole)
    assert not entropy or not token_log_probs(model, *given, entropy=True, **mask).entropy[labels < 0].any()
