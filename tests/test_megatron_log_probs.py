"""token_log_probs equals the log-softmax of a stock Megatron-core model's logits: values and all gradients."""

import itertools
from concurrent.futures import ThreadPoolExecutor
from types import SimpleNamespace
from unittest import mock

import pytest
import torch

pytest.importorskip("megatron.core", reason="needs megatron-core")

from megatron.core.tensor_parallel import gather_from_tensor_model_parallel_region
from megatron.core.transformer.module import Float16Module

from megatron_models import VOCAB, Batch, Model, batch, build, of_other_releases, path_of
from megatron_training import in_ddp, side_by_side, switched, tolerance_of
from parallel_lce.deferred import Source
from parallel_lce.megatron import TokenLogProbs, fuse, heads, loss, patch, token_log_probs, token_loss
from test_megatron_habits import CHANGES
from tools import debug_mode, on_ranks
from world import Member


def scored(ours: bool, model: torch.nn.Module, data: Batch, temperature: float | torch.Tensor = 1.0, **arguments):
    """By token_log_probs, or of the model's own gathered logits in float64."""
    inner, caught, given = model, [], (data.tokens, data.positions, data.mask)
    while hasattr(inner, "module"):
        inner = inner.module
    if ours:
        return token_log_probs(model, *given, data.labels, temperature=temperature, entropy=True, **arguments)
    # Stock's loss changes its logits in place. The main head's call comes last.
    hook = inner.output_layer.register_forward_hook(lambda module, inputs, output: caught.append(output[0].clone()))
    output = model(*given, labels=data.labels, **arguments)
    hook.remove()
    logits = gather_from_tensor_model_parallel_region(caught[-1]).transpose(0, 1).double()
    z = logits / (temperature[..., None] if isinstance(temperature, torch.Tensor) else temperature)
    log_p, labels = z.log_softmax(-1), data.labels
    picked = log_p.gather(-1, labels.clamp(0, VOCAB - 1)[..., None]).squeeze(-1)
    of_labels = picked.where(labels != -100, 0.0)
    # Wrappers put hooks on the model's own output.
    return TokenLogProbs(of_labels + 0.0 * output, -(log_p.exp() * log_p).sum(-1))


def policy_loss(statistics, old, advantage):
    ratio = (statistics.target_log_prob - old).exp()
    gain = torch.minimum(ratio * advantage, ratio.clamp(0.8, 1.2) * advantage)
    return -gain - 0.1 * statistics.entropy, {"ratio": ratio, "clipped": (ratio - 1).abs() > 0.2}


def _compiled(model):
    """Only what is around the layers, which have nothing to do with the loss."""
    model.decoder.forward = torch.compiler.disable(model.decoder.forward)
    return torch.compile(model, backend="eager")


WRAPPED = {
    "plain": (None, dict(sequence_parallel=True)),
    "tied": (None, dict(tied=True, mtp=1, sequence_parallel=True)),
    "mamba": (None, dict(family="mamba", sequence_parallel=True)),
    "context": (None, dict(context=2, mtp=1)),
    "half": (lambda model: in_ddp(model.config, Float16Module(model.config, model)), dict(dtype=torch.bfloat16)),
    "compiled": (_compiled, dict(ranks=1)),
}


def _compare(member: Member, how: str, by: str = "token_log_probs", switch: bool = False) -> None:
    wrap, changes = WRAPPED[how]
    spec = Model(**dict(ranks=member.ranks) | changes)

    def values(model, data, ours):
        # Of a stock model that is compiled the logits could not be caught.
        wrapped = model if wrap is None or (how == "compiled" and not ours) else wrap(model)
        mask = {"loss_mask": (data.labels >= 0).float()} if spec.mtp else {}
        per_token = torch.randn(2, *data.labels.shape, generator=torch.Generator().manual_seed(4)).to(member.device)
        per_token[0] -= 4
        of_each_token = 0.5 + per_token[1].sigmoid()
        for temperature in (0.7, of_each_token):
            model.zero_grad()
            if ours and by == "token_loss":
                given = data.tokens, data.positions, data.mask, data.labels, policy_loss, *per_token
                total, metrics = token_loss(wrapped, *given, temperature=temperature, entropy=True, **mask)
            else:
                found = scored(ours, wrapped, data, temperature, **mask)
                assert not ours or all(value.dtype is torch.float32 for value in found)
                statistics = SimpleNamespace(target_log_prob=found.log_probs, entropy=found.entropy)
                losses, metrics = policy_loss(statistics, *per_token)
                total = losses.where(data.labels != -100, 0.0).sum()
                metrics = {name: metric.masked_fill(data.labels == -100, 0) for name, metric in metrics.items()}
            (0.5 * total).backward()
        gradients = [p.main_grad if hasattr(p, "main_grad") else p.grad for p in model.parameters()]
        return total, metrics["ratio"], metrics["clipped"].float(), *(g for g in gradients if g is not None)

    side_by_side(member, spec, values, tolerance_of(spec), options=None if switch else {})
    if how == "compiled":
        torch._dynamo.reset()


@pytest.mark.parametrize("switch", [False, True])
@pytest.mark.parametrize("by", ["token_log_probs", "token_loss"])
@pytest.mark.parametrize(("ranks", "how"), [(spec.get("ranks", 2), how) for how, (_, spec) in WRAPPED.items()])
@pytest.mark.thinned
@on_ranks()
def test_log_probs_losses_and_gradients_are_those_of_stock_logits(member, how, by, switch):
    _compare(member, how, by, switch)


@on_ranks(2)
def test_scoring_without_gradients_saves_nothing(member):
    """Nothing is saved; and losses of other heads are computed where the model records them, in training, alone."""
    spec = Model(ranks=member.ranks, sequence_parallel=True, mtp=2)

    def values(model, data, ours):
        found = []
        for training in (True, False):
            model.train(training)
            with torch.no_grad(), mock.patch.object(loss, "fused_loss", wraps=loss.fused_loss) as others:
                found += scored(ours, model, data, 0.7)
            assert others.call_count == (spec.mtp if training and ours else 0)
        assert not any(value.requires_grad for value in found)
        return found

    side_by_side(member, spec, values, options={})


@pytest.mark.parametrize(("release", "how"), of_other_releases([("tied",), ("mamba",), ("half",), ("context",)]))
def test_other_releases_score_as_stock(release, how, worlds):
    worlds(2, path_of(release)).run(_compare, how)


@on_ranks(1)
def test_a_model_that_runs_within_a_scored_one_has_losses_and_logits(member):
    """Such as a teacher in a hook, of the same labels."""
    student, teacher = [build(member, Model(), switched(Model())) for _ in range(2)]
    data, found = batch(0, Model(), member.device), []
    given = data.tokens, data.positions, data.mask
    calls = lambda: teacher(*given).softmax(-1), lambda: teacher(*given, labels=data.labels)
    student.decoder.register_forward_pre_hook(lambda *_: found.extend(call() for call in calls))
    patch(skip_masked=True)  # one label is -100
    expected = token_log_probs(teacher, *given, data.labels, entropy=True)
    torch.testing.assert_close(token_log_probs(student, *given, data.labels, entropy=True), expected)
    assert expected.device == data.tokens.device  # of which Megatron's schedules ask
    torch.testing.assert_close(found, [call() for call in calls])
    fuse(student, logits_budget=1 << 20)  # without skip_masked, which is the teacher's
    losses = student(*given, labels=data.labels)
    assert (losses > 0).all()
    # The same model, called in another thread and scored by a model around it.
    around, pool = torch.nn.Module(), ThreadPoolExecutor(1)

    def forward(*given, **named):
        found[:] = token_log_probs(student, *given, data.labels), pool.submit(student, *given, **named).result()
        return student(*given, **named)

    around.module, around.forward = student, forward
    scores = token_log_probs(around, *given, data.labels)
    torch.testing.assert_close(found[:2], [scores, losses])


@on_ranks(1)
def test_another_pipeline_stage_gives_the_models_output(member):
    model, data = build(member, Model(), {}), batch(0, Model(), member.device)
    model.post_process = False
    with mock.patch.object(type(model), "__call__", return_value="hidden states"):
        assert token_loss(model, data.tokens, data.positions, data.mask, None, policy_loss) == "hidden states"


@on_ranks(2)
def test_what_one_rank_refuses_every_rank_raises(member):
    """In debug mode, instead of waiting: before the model runs, and after it."""
    spec = Model(ranks=member.ranks)
    model, data = build(member, spec, {}), batch(0, spec, member.device)
    too_few = data.labels[:, :3]
    refusals = (None, "an integer dtype, got NoneType$"), (too_few, r"shape \[16, 2\] .*, got \[3, 2\]")
    with debug_mode():
        for (labels, message), loss in itertools.product(refusals, ([], [lambda found: -found.lse])):
            said = message if member.rank else rf"^rank\(s\) \[1\] of process_group refused .*{message}"
            function, labels = token_loss if loss else token_log_probs, labels if member.rank else data.labels
            with pytest.raises(ValueError, match=said):
                function(model, data.tokens, data.positions, data.mask, labels, *loss)


@on_ranks(1)
def test_models_that_cannot_be_scored_are_refused(member):
    model, data = build(member, Model(), {}), batch(0, Model(), member.device)
    given = data.tokens, data.positions, data.mask, data.labels
    bert = build(member, Model(family="bert"), {})
    for other, name in (bert, "HybridModel, got BertModel"), (torch.nn.Linear(2, 2), "of Megatron's, .* got Linear"):
        with pytest.raises(ValueError, match=name):
            token_log_probs(other, *given)
    with pytest.raises(ValueError, match=r"temperature must be .* one per label \[2, 16\], got \[16, 2\]$"):
        token_log_probs(model, *given, temperature=torch.ones(16, 2))
    assert fuse(model) == ["fused"]
    with mock.patch.object(model, "compute_language_model_loss", torch.no_grad()(model.compute_language_model_loss)):
        with pytest.raises(RuntimeError, match="the loss of the labels is in a checkpoint"):
            token_log_probs(model, *given)
    with mock.patch.object(model, "forward", torch.no_grad()(model.forward)):
        assert not token_log_probs(model, *given).log_probs.requires_grad
    model.register_forward_hook(lambda module, inputs, output: output[0])
    with pytest.raises(RuntimeError, match="GPTModel's forward must return compute_language_model_loss"):
        token_log_probs(model, *given)


# Changes of test_megatron_habits.py, and what the refusal says.
WOULD_MAKE_LOGITS = {
    "adapter": "the output layer is a _Adapter",
    "forward": "the loss gets real logits, or another layer's: leave the output layer's forward in place",
    "parametrization": "the output layer has no parameter named weight",
    "hook of rank 0": "'abs' of the output layer's result",
}


def _made(*_):
    raise AssertionError("the logits were made")


@on_ranks(1)
def test_what_would_make_logits_is_refused_and_none_are_made(member):
    for name, reason in WOULD_MAKE_LOGITS.items():
        model, (change, _) = build(member, Model(), {}).eval(), CHANGES[name]
        change(model)
        with mock.patch.object(heads, "Source", lambda *a, **named: Source(*a[:4], _made, *a[5:], **named)):
            with pytest.raises((RuntimeError, ValueError), match="token_log_probs makes no logits: " + reason):
                scored(True, model, batch(0, Model(), member.device))
