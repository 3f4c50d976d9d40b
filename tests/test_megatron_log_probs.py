"""token_log_probs equals the log-softmax of a stock Megatron-core model's logits: values and all gradients."""

from contextlib import nullcontext
from dataclasses import replace
from functools import partial
from itertools import cycle
from types import SimpleNamespace
from typing import NamedTuple
from unittest import mock

import pytest
import torch
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import fully_shard

pytest.importorskip("megatron.core", reason="needs megatron-core")

from megatron.core.tensor_parallel import gather_from_tensor_model_parallel_region
from megatron.core.transformer.module import Float16Module

from megatron_models import VOCAB, Batch, Model, batch, build, of_other_releases, path_of, specs
from megatron_training import Trained, compare, in_ddp, side_by_side, tolerance_of
from parallel_lce.megatron import TokenLogProbs, output_layer, token_log_probs, token_loss
from parallel_lce.megatron.lazy_logits import LazyLogits
from test_megatron_habits import CHANGES, PATCHES, patched
from tools import arguments_to, debug_mode, on_ranks
from world import Member


class Scoring(NamedTuple):
    """What is asked of the labels. ``temperature`` "tensor": one of each token. ``switched``: whether the model is
    built for this package's loss."""

    temperature: float | str = 1.0
    entropy: bool = True
    switched: bool = False

    def temperatures(self, labels: torch.Tensor) -> float | torch.Tensor:
        if self.temperature != "tensor":
            return self.temperature
        return 0.5 + torch.rand(labels.shape, generator=torch.Generator().manual_seed(3)).to(labels.device)


def scored(ours: bool, model: torch.nn.Module, data: Batch, scoring: Scoring, **arguments):
    """By token_log_probs, or of the model's own gathered logits in float64; of another pipeline stage its output."""
    inner, temperature, caught = model, scoring.temperatures(data.labels), []
    while hasattr(inner, "module"):
        inner = inner.module
    last, given = getattr(inner, "post_process", True), (data.tokens, data.positions, data.mask)
    if ours:
        arguments |= dict(temperature=temperature, entropy=scoring.entropy)
        return token_log_probs(model, *given, data.labels if last else None, **arguments)
    if not last:
        return model(*given, labels=data.labels, **arguments)
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


def policy_loss(found: TokenLogProbs, entropy: bool = True) -> torch.Tensor:
    """Of both, with another factor for each token. One has no label."""
    log_probs = found.log_probs
    factors = torch.randn(2, *log_probs.shape, generator=torch.Generator().manual_seed(4)).to(log_probs.device)
    loss = (factors[0] * log_probs.exp() + 0.1 * log_probs).sum()
    return loss - 0.3 * (factors[1] * found.entropy).sum() if entropy else loss


def forward_step(ours: bool, scoring: Scoring, spec: Model, device, done: Trained, numbers, model):
    data = batch(next(numbers), spec, device)
    mask = {"loss_mask": (data.labels >= 0).float()} if spec.mtp else {}
    output = scored(ours, model, data, scoring, **mask)

    def loss_function(found: TokenLogProbs):
        assert isinstance(found, TokenLogProbs)
        if ours:
            assert all(v is None or v.dtype is torch.float32 for v in found)
            assert (found.entropy is not None) == scoring.entropy
        done.losses += [v.detach().float().cpu() for v in found[: 1 + scoring.entropy]]
        total = policy_loss(found, scoring.entropy).float()
        return total, torch.tensor(data.labels.numel(), dtype=torch.int32, device=device), {"loss": total.detach()}

    return output, loss_function


def _compare(member: Member, spec: Model, scoring: Scoring) -> None:
    steps = tuple(partial(forward_step, ours, scoring) for ours in (False, True))
    compare(member, spec, "output_layer" if scoring.switched else None, steps)


SCORINGS = Scoring(), Scoring(0.7, switched=True), Scoring("tensor"), Scoring("tensor", entropy=False), Scoring(2)


def _cases(models: list[Model]) -> list[tuple]:
    models = [m if m.optimizer else replace(m, steps=1) for m in models if m.family in ("gpt", "mamba")]
    return [*zip(models, cycle(SCORINGS))]


@pytest.mark.parametrize(("spec", "scoring"), _cases([*specs(1), *specs(2)]), ids=str)
@pytest.mark.thinned
def test_equal_to_stock_logits(spec, scoring, worlds):
    worlds(spec.ranks).run(_compare, spec, scoring)


@pytest.mark.parametrize(("release", "spec", "scoring"), of_other_releases(_cases(specs(2, tp_of_pairs=1))), ids=str)
def test_other_releases(release, spec, scoring, worlds):
    worlds(spec.ranks, path_of(release)).run(_compare, spec, scoring)


@on_ranks(2)
def test_without_gradients(member):
    """Nothing is saved; and losses of other heads are computed where the model records them, in training, alone."""
    spec = Model(ranks=member.ranks, sequence_parallel=True, mtp=2)

    def values(model, data, ours):
        found = []
        for training in (True, False):
            model.train(training)
            with torch.no_grad(), arguments_to(output_layer, "fused_loss") as others:
                found += scored(ours, model, data, Scoring(0.7))
            assert len(others) == (spec.mtp if training and ours else 0)
        assert not any(value.requires_grad for value in found)
        return found

    side_by_side(member, spec, values, options={})


def _half(member: Member, model):
    return in_ddp(model.config, Float16Module(model.config, model))


def _sharded(member: Member, model):
    """Where the model begins: the output weight is whole within the model's forward."""
    fully_shard(model, mesh=DeviceMesh.from_group(member.group, member.device.type))
    return model


def _sharded_layer(member: Member, model):
    """Whole within the layer's own call."""
    fully_shard(model.output_layer, mesh=DeviceMesh.from_group(member.group, member.device.type))
    return _sharded(member, model)


def _scaled(member: Member, model):
    """As MuP multiplies logits from 0.17 on."""
    model.output_layer.register_forward_hook(lambda module, inputs, output: (output[0] * 0.4, output[1]))
    return model


def _gathering(member: Member, model):
    """As a model that is built to gather its logits."""
    model.output_layer.gather_output = True
    return model


def _compiled(member: Member, model):
    """Only what is around the layers, which have nothing to do with the loss."""
    model.decoder.forward = torch.compiler.disable(model.decoder.forward)
    return torch.compile(model, backend="eager")


WRAPPED = {
    "half": (_half, dict(dtype=torch.bfloat16)),
    "sharded": (_sharded, dict(data=2)),
    "sharded layer": (_sharded_layer, dict(data=2)),
    "scaled": (_scaled, {}),
    "gathering": (_gathering, {}),
    "compiled": (_compiled, dict(ranks=1)),
}


@pytest.mark.parametrize(("ranks", "how"), [(spec.get("ranks", 2), how) for how, (_, spec) in WRAPPED.items()])
@on_ranks()
def test_models_in_wrappers(member, how):
    wrap, changes = WRAPPED[how]
    spec = Model(**dict(ranks=member.ranks) | changes)

    def values(model, data, ours):
        # Of a stock model that gathers, or that is compiled, the logits could not be caught.
        wrapped = wrap(member, model) if ours or how in ("half", "sharded", "sharded layer", "scaled") else model
        for _ in range(2):
            model.zero_grad()
            output = scored(ours, wrapped, data, Scoring(0.7))
            policy_loss(output).backward()
        assert not ours or all(value.dtype is torch.float32 for value in output)
        found = [p.main_grad if hasattr(p, "main_grad") else p.grad for p in model.parameters()]
        return *output, *(g.full_tensor() if hasattr(g, "full_tensor") else g for g in found)

    side_by_side(member, spec, values, tolerance_of(spec), options={})
    if how == "compiled":
        torch._dynamo.reset()


def _ppo(statistics, old, advantage):
    ratio = (statistics.target_log_prob - old).exp()
    gain = torch.minimum(ratio * advantage, ratio.clamp(0.8, 1.2) * advantage)
    return -gain - 0.1 * statistics.entropy, {"ratio": ratio, "clipped": (ratio - 1).abs() > 0.2}


@pytest.mark.parametrize("how", ["half", "plain", "sharded layer"])
@on_ranks(2)
def test_a_loss_of_ones_own(member, how):
    """Of Megatron's DistributedDataParallel the gradients are those in main_grad."""
    wrap, changes = WRAPPED.get(how, (lambda member, model: model, {}))
    spec = Model(ranks=member.ranks, sequence_parallel="data" not in changes, **changes)

    def values(model, data, ours):
        wrapped, scoring = wrap(member, model), Scoring("tensor")
        per_token = torch.randn(2, *data.labels.shape, generator=torch.Generator().manual_seed(4)).to(member.device)
        per_token[0] -= 4
        if ours:
            given = data.tokens, data.positions, data.mask, data.labels, _ppo, *per_token
            total, metrics = token_loss(wrapped, *given, temperature=scoring.temperatures(data.labels), entropy=True)
        else:
            found = scored(False, wrapped, data, scoring)
            losses, metrics = _ppo(SimpleNamespace(target_log_prob=found.log_probs, entropy=found.entropy), *per_token)
            total = losses.where(data.labels != -100, 0.0).sum()
            metrics = {name: metric.masked_fill(data.labels == -100, 0) for name, metric in metrics.items()}
        (0.5 * total).backward()
        found = [p.main_grad if hasattr(p, "main_grad") else p.grad for p in model.parameters()]
        found = [g.full_tensor() if hasattr(g, "full_tensor") else g for g in found]
        return total, metrics["ratio"], metrics["clipped"].float(), *found

    side_by_side(member, spec, values, tolerance_of(spec), options={})


@on_ranks(2)
def test_another_pipeline_stage_gives_the_models_output(member):
    spec = Model(ranks=member.ranks)
    model, data = build(member, spec, {}), batch(0, spec, member.device)
    model.post_process = False
    with mock.patch.object(type(model), "__call__", return_value="hidden states"):
        assert token_loss(model, data.tokens, data.positions, data.mask, None, _ppo) == "hidden states"


SHAPE = r"\[2, 16\]"
# What changes of a call with labels [b, s], and what its refusal says.
REFUSED = [
    (lambda y: dict(labels=None), "of an integer dtype, got NoneType$"),
    (lambda y: dict(labels=y[:, :3]), rf"input_ids' shape {SHAPE}, got \[2, 3\]"),
    (lambda y: dict(temperature=0), "temperature must be a number > 0"),
    (lambda y: dict(temperature=torch.ones(16)), rf"of labels' shape {SHAPE}, got \[16\]"),
    (lambda y: dict(temperature=torch.ones(y.shape, requires_grad=True)), "none flows to it"),
    (lambda y: dict(temperature=torch.ones(y.shape, device="meta")), "is on meta"),
    (lambda y: dict(entropy=1), "entropy must be True or False, got 1"),
    (lambda y: dict(runtime_gather_output=True), "takes no runtime_gather_output"),
    (lambda y: dict(model=[y]), "HybridModel, alone or in wrappers, got list"),
]


@on_ranks(1)
def test_refusals(member):
    """Before the model is called, which is always left as it was."""
    spec = Model(ranks=member.ranks)
    model, data = build(member, spec, {}), batch(0, spec, member.device)
    layer = model.output_layer
    before = type(layer), {*vars(layer)}, {*vars(model)}
    given = dict(model=model, input_ids=data.tokens, position_ids=data.positions, attention_mask=data.mask)

    def refused(message: str, kind: type = ValueError, **changed) -> None:
        with pytest.raises(kind, match=message):
            token_log_probs(**{**given, "labels": data.labels, **changed})
        assert before == (type(layer), {*vars(layer)}, {*vars(model)})

    with uncalled(model):
        for changes, message in REFUSED:
            refused(message, **changes(data.labels))
        bert = build(member, Model(ranks=member.ranks, family="bert"), {})
        refused("HybridModel, alone or in wrappers, got BertModel", model=bert)
    token_log_probs(**given, labels=data.labels)
    refused("unexpected keyword argument 'unknown'", TypeError, unknown=1)
    model.register_forward_hook(lambda module, inputs, output: output[0])
    refused("GPTModel's forward must return compute_language_model_loss", RuntimeError)


def uncalled(model):
    return mock.patch.object(type(model), "__call__", side_effect=AssertionError("the model was called"))


@on_ranks(2)
def test_what_one_rank_refuses_every_rank_raises(member):
    """In debug mode, before the model's own collectives."""
    spec = Model(ranks=member.ranks)
    model, data = build(member, spec, {}), batch(0, spec, member.device)
    given = dict(model=model, input_ids=data.tokens, position_ids=data.positions, attention_mask=data.mask)
    given["labels"] = data.labels
    with debug_mode():
        with uncalled(model):
            for changes, message in REFUSED[:-1]:
                said = message if member.rank else rf"^rank\(s\) \[1\] of process_group refused .*{message}"
                with pytest.raises(ValueError, match=said):
                    token_log_probs(**given | (changes(data.labels) if member.rank else {}))
        token_log_probs(**given)


def _hook(hook):
    return lambda model: model.output_layer.register_forward_hook(hook)


# Changes of test_megatron_habits.py and other hooks, and what the refusal says: of the first three without a call.
MAKES = "token_log_probs makes no logits: "
WOULD_MAKE_LOGITS = [
    ("adapter", MAKES + "the output layer is a _Adapter"),
    ("forward", MAKES + "the output layer's forward was replaced"),
    ("deferred", MAKES + "defer_embedding_wgrad_compute keeps"),
    ("backward hook", MAKES + "the output layer has backward hooks"),
    ("sharded", MAKES + "the output weight is fully sharded"),
    (_hook(lambda module, inputs, output: (output[0].mean(), None)[1]), MAKES + "attribute 'mean'"),
    (_hook(lambda *_: (torch.zeros(1), None)), "replaced the output layer's result, by one of type Tensor"),
]


@pytest.mark.parametrize("training", [True, False])
@on_ranks(1)
def test_what_would_make_logits_is_refused(member, training):
    """And none are made."""
    spec = Model(ranks=member.ranks)
    for number, (change, message) in enumerate(WOULD_MAKE_LOGITS):
        model = build(member, spec, {}).train(training)
        (CHANGES[change][0] if isinstance(change, str) else change)(model)
        with mock.patch.object(LazyLogits, "_make", side_effect=AssertionError("the logits were made")):
            with (
                uncalled(model) if number < 3 else nullcontext(),
                pytest.raises((RuntimeError, ValueError), match=message),
            ):
                scored(True, model, batch(0, spec, member.device), Scoring())
    with (
        patched(*PATCHES["forward"]),
        pytest.raises(ValueError, match="ColumnParallelLinear.forward is not Megatron's own"),
    ):
        scored(True, build(member, spec, {}), batch(0, spec, member.device), Scoring())
