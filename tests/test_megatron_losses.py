"""Losses that Megatron's configuration does not have, z-loss, label smoothing, the true vocabulary and those of counted
tokens alone, and metrics of their tokens; of deferred logits, also beside a use of them."""

import pytest
import torch
import torch.nn.functional as F

pytest.importorskip("megatron.core", reason="needs megatron-core")

from megatron.core.tensor_parallel.mappings import gather_from_tensor_model_parallel_region
from torch.utils.checkpoint import checkpoint

from measures import assert_close
from megatron_models import VOCAB, Model, batch, build
from megatron_training import in_ddp, switched
from parallel_lce.backends import backend_of
from parallel_lce.megatron import fuse, patch, token_log_probs, token_loss, token_metrics
from tools import counted_forwards, on_ranks

OPTIONS = {
    "z-loss": dict(z_loss=1e-2),
    "smoothing": dict(label_smoothing=0.1),
    "vocabulary": dict(vocab_size=VOCAB - 7),
    "all": dict(z_loss=1e-2, label_smoothing=0.1, vocab_size=VOCAB - 57, skip_masked=True),
}
# What computes the loss: alone, with metrics, and with these beside a hook that looks at the logits.
CASES = [("z-loss", "alone"), ("smoothing", "metrics"), ("vocabulary", "hook"), ("all", "alone"), ("all", "metrics")]


def _truth(logits, target, training: bool, ignored: bool, z_loss=0.0, label_smoothing=0.0, vocab_size=VOCAB):
    """Losses, cross-entropies, squared log-sums and whether the label is the largest, ``[b, s]``."""
    logits, eps = logits.double()[..., :vocab_size], label_smoothing * training
    lse, outside = logits.logsumexp(-1), (target < 0) | (target >= vocab_size)
    label = logits.gather(-1, target.clamp(0, vocab_size - 1).unsqueeze(-1)).squeeze(-1)
    entropy = lse - torch.where(outside, logits.detach().amax(-1), label)
    losses = (1 - eps) * entropy - eps * F.log_softmax(logits, -1).mean(-1) + training * z_loss * lse.square()
    found = losses, entropy, z_loss * lse.square(), logits.argmax(-1) == target
    return [value.masked_fill(target == -100, 0) if ignored else value for value in found]


@pytest.mark.parametrize("training", [True, False])
@pytest.mark.parametrize(("options", "how"), CASES)
@on_ranks(2)
def test_losses_with_all_settings_are_those_of_the_formula(member, options, how, training):
    given = OPTIONS[options]
    spec = Model(ranks=member.ranks, sequence_parallel=True)
    model, data = build(member, spec, switched(spec)).double(), batch(0, spec, member.device)
    with torch.no_grad():  # the losses differ clearly
        model.output_layer.weight.mul_(20)
    inputs, labels = (data.tokens, data.positions, data.mask), data.labels
    labels[1, :3] = torch.tensor([VOCAB - 1, VOCAB + 3, 0])
    model.output_layer.train(training)  # whose mode says whether there are a z-loss and smoothing
    logits = gather_from_tensor_model_parallel_region(model(*inputs))
    formula = {name: value for name, value in given.items() if name != "skip_masked"}
    truth = _truth(logits, labels, training, given.get("skip_masked", False), **formula)
    weights = torch.linspace(-1.0, 2.0, labels.numel(), device=member.device).view(labels.shape)
    expected = torch.autograd.grad((truth[0] * weights).sum(), [*model.parameters()])
    patch(token_metrics=how != "alone", **given)
    if how == "hook":
        model.output_layer.register_forward_hook(lambda layer, inputs, output: (output[0].sum(), None)[1])
    losses = model(*inputs, labels=labels)
    assert_close(losses, truth[0], 1e-12)
    for found, value in zip(torch.autograd.grad((losses * weights).sum(), [*model.parameters()]), expected):
        assert_close(found, value, 1e-12, 1e-14)
    if how == "alone":
        with pytest.raises(ValueError, match="model has no token metrics: call patch"):
            token_metrics(model)
        return
    metrics = token_metrics(torch.nn.Sequential(model))
    assert not any(value.requires_grad for value in metrics)
    for found, value in zip(metrics[:2], truth[1:]):
        assert_close(found, value.detach(), 1e-12, 1e-14)
    assert torch.equal(metrics.correct, truth[3])


@on_ranks(1)
def test_metrics_are_those_of_the_main_head(member):
    spec = Model(mtp=1)
    patch(token_metrics=True, skip_masked=True)
    model, data = build(member, spec, switched(spec)), batch(0, spec, member.device)
    ddp = in_ddp(model.config, model)
    losses = ddp(data.tokens[:1], data.positions[:1], data.mask, labels=data.labels[:1])
    expected = losses.detach().clone()
    losses.sum().backward()
    losses.detach().zero_()  # as Megatron's schedules free its memory
    assert torch.equal(token_metrics(ddp).cross_entropy, expected) and expected.any()
    kept = token_metrics(model)
    with torch.no_grad():
        token_log_probs(model, data.tokens, data.positions, data.mask, data.labels)  # its heads have losses, too
    assert token_metrics([model]) is kept


@on_ranks(1)
def test_a_setting_that_the_loss_cannot_keep_is_refused_by_its_name(member):
    """Of real logits, and of deferred ones that are changed."""
    model, data = build(member, Model(), switched(Model())), batch(0, Model(), member.device)
    given = data.tokens, data.positions, data.mask
    patch(z_loss=0.1)
    for change, reason in (lambda z: z + 1, "the loss gets real"), (lambda z: z.tanh().tanh(), "the loss takes more"):
        hook = model.output_layer.register_forward_hook(lambda layer, inputs, output: (change(output[0]), None))
        with pytest.raises(RuntimeError, match=f"z_loss=0.1 needs a fused loss, and this one is not: {reason}"):
            model(*given, labels=data.labels)
        hook.remove()
    model(*given)  # as RL calls a model whose MTP heads have losses, from 0.19 on
    with torch.no_grad():  # evaluation has no z-loss
        model.eval().compute_language_model_loss(data.labels, torch.zeros(16, 2, 96, device=member.device))
    model.train().forward(*given, labels=data.labels)  # fused, though the last call had no labels
    own = model.forward
    model.forward = lambda three, ids: own(*three, labels=ids)
    model(given, data.labels)  # so is that of a forward that came after fuse()


@pytest.mark.parametrize("scored", [False, True])
@on_ranks(1)
def test_logits_can_be_made_until_the_backward_of_their_loss(member, scored):
    """DistributedDataParallel and its optimizers may change the weight from then on."""
    model, data = build(member, Model(), switched(Model())), batch(0, Model(), member.device)
    given, kept = (data.tokens, data.positions, data.mask), []
    model.output_layer.register_forward_hook(lambda layer, inputs, output: kept.append(output[0]))
    for _ in range(2):
        found = token_log_probs(model, *given, data.labels).log_probs if scored else model(*given, labels=data.labels)
    made = kept[0].sum()
    found.sum().backward()
    assert torch.equal(kept[0].sum(), made)  # of the call that has had no backward
    with pytest.raises(RuntimeError, match="are wanted after the backward of their loss"):
        kept[1].sum()


@on_ranks(1)
def test_masked_tokens_have_no_loss(member):
    """Whatever names the mask. Others have the very losses of before."""
    model, data = build(member, Model(), switched(Model())), batch(0, Model(masked=True), member.device)
    given, mask = (data.tokens, data.positions, data.mask), data.counted
    whole = model(*given, labels=data.labels)
    assert whole[0, 3] != 0
    marked, compiled = data.labels.masked_fill(mask == 0, -100), torch.compile(model, backend="eager")
    patch(skip_masked=True)
    calls = (
        lambda: model(*given, None, data.labels, loss_mask=mask),
        lambda: model(*given, labels=data.labels, loss_mask=mask.bool()),
        lambda: model(*given, labels=marked),
        # On GPUs Dynamo and Megatron's random numbers wait for each other.
        lambda: (model if mask.is_cuda else compiled)(*given, labels=data.labels, loss_mask=mask),
    )
    with pytest.raises(ValueError, match=r"loss_mask must have the labels' shape \[2, 16\], got \[1, 16\]"):
        model(*given, labels=data.labels, loss_mask=mask[:1])
    for call in calls:
        with counted_forwards(backend_of(model.output_layer.weight)) as rows:
            found = call()
        torch.testing.assert_close(found, whole * mask)
        assert sum(rows) == int(mask.sum())
    ending = model._postprocess  # each of the two calls finds its count again
    model._postprocess = lambda hidden_states, **named: checkpoint(
        lambda hidden: ending(hidden_states=hidden, **named), hidden_states, use_reentrant=False
    )
    halves = [model(*given, labels=half).sum() for half in torch.cat([marked, marked.flip(1)]).split(len(marked))]
    sum(halves).backward()  # a count each, though they share memory
    (calls[0]().sum() + calls[2]().sum() + 0 * torch.no_grad()(lambda: model(*given).sum())()).backward()
    with pytest.warns(match="the model gets no labels"):
        model(*given).sum().backward()  # of real logits, both times
    model.output_layer.register_forward_hook(lambda layer, inputs, output: (output[0].add_(0), None))
    with pytest.warns(match="'add_' of the output layer's result"):
        found = calls[0]()
    torch.testing.assert_close(found, whole * mask)
    own, of_labels = model.forward, whole.masked_fill(data.labels == -100, 0)
    said = "skip_masked skips labels of -100 alone, and no loss_mask: the forward of GPTModel is not"
    for name, forward in (  # of a program: what it makes of labels and masks is its own
        ("labels", lambda input_ids, /, *others, labels=None, **named: own(input_ids, *others, labels=labels, **named)),
        ("labels", lambda *given, **named: own(*given, **named)),
        ("targets", lambda *given, targets, **named: own(*given, labels=targets, **named)),
    ):
        model.forward = forward
        fuse(model)
        with pytest.warns(match=said):
            torch.testing.assert_close(model(*given, **{name: data.labels}, loss_mask=mask), of_labels)
    model.forward = lambda *given, **named: own(*given, **named)
    assert type(torch.no_grad()(model)(*given)) is torch.Tensor


@on_ranks(1)
def test_scores_of_the_counted_labels(member):
    model, data = build(member, Model(mtp=1), switched(Model())), batch(0, Model(masked=True), member.device)
    labels = data.labels.masked_fill(data.counted == 0, -100)
    given, mask = (data.tokens, data.positions, data.mask, labels), {"loss_mask": torch.ones_like(labels)}

    def scores() -> list[torch.Tensor]:
        total, metrics = token_loss(model, *given, lambda t: (-t.target_log_prob, {"p": t.target_log_prob}), **mask)
        found = token_log_probs(model, *given, entropy=True, **mask)
        return [total, metrics["p"], found.log_probs, found.entropy * data.counted]

    whole = scores()
    patch(skip_masked=True)
    with counted_forwards(backend_of(model.output_layer.weight)) as rows:
        found = scores()
    assert sum(rows) == 2 * int(data.counted.sum()) + 2 * labels.numel()  # MTP has other labels
    torch.testing.assert_close(found, whole)
    assert not token_log_probs(model, *given, entropy=True, **mask).entropy[labels < 0].any()
