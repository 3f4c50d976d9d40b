"""token_log_probs equals the log-softmax of a stock Megatron-core model's logits: values and all gradients."""

from __future__ import annotations

import os
from dataclasses import dataclass, replace
from functools import partial
from itertools import cycle
from unittest import mock

import pytest
import torch
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import fully_shard

pytest.importorskip("megatron.core", reason="needs megatron-core")

import parallel_lce.megatron
from megatron_models import BATCH, SEQUENCE, VOCAB, Batch, Model, batch, build, losses_of, specs
from megatron_releases import OTHER_RELEASES, path_of
from megatron_training import Trained, assert_equal, side_by_side, switched, tolerance_of, train, train_quietly
from on_ranks import on_ranks
from parallel_lce.core.budget import default_budget
from parallel_lce.megatron import TokenLogProbs, log_probs, output_layer, token_log_probs
from tools import arguments_to
from world import Member


@dataclass(frozen=True)
class Scoring:
    """What is asked of the labels."""

    temperature: float | str = 1.0  # "tensor": one of each token
    entropy: bool = True
    switched: bool = False  # the model is built for this package's loss

    def temperatures(self, labels: torch.Tensor) -> float | torch.Tensor:
        if self.temperature != "tensor":
            return self.temperature
        return 0.5 + torch.rand(labels.shape, generator=torch.Generator().manual_seed(3)).to(labels.device)


def unwrapped(model: torch.nn.Module) -> torch.nn.Module:
    while hasattr(model, "module"):
        model = model.module
    return model


def scored(ours: bool, model: torch.nn.Module, data: Batch, scoring: Scoring, **arguments):
    """By token_log_probs, or from the model's own logits; of another pipeline stage its output."""
    if not ours:
        return of_stock(model, data, scoring.temperatures(data.labels), **arguments)
    return token_log_probs(
        model,
        data.tokens,
        data.positions,
        data.mask,
        data.labels if getattr(unwrapped(model), "post_process", True) else None,
        temperature=scoring.temperatures(data.labels),
        entropy=scoring.entropy,
        **arguments,
    )


def of_stock(model: torch.nn.Module, data: Batch, temperature: float | torch.Tensor, **arguments):
    """Of the gathered logits, in float64."""
    from megatron.core.tensor_parallel import gather_from_tensor_model_parallel_region

    inner, caught = unwrapped(model), []
    layer = inner.output_layer if inner.post_process else None
    # Stock's loss changes its logits in place. The main head's call comes last.
    hook = layer and layer.register_forward_hook(lambda module, inputs, output: caught.append(output[0].clone()))
    output = model(data.tokens, data.positions, data.mask, labels=data.labels, **arguments)
    if hook is None:
        return output
    hook.remove()
    logits = getattr(inner, "_scale_logits", lambda z: z)(caught[-1])
    logits = gather_from_tensor_model_parallel_region(logits).transpose(0, 1).double()
    temperature = temperature[..., None] if isinstance(temperature, torch.Tensor) else temperature
    log_p = (logits / temperature).log_softmax(-1)
    inside = (data.labels >= 0) & (data.labels < VOCAB)
    picked = log_p.gather(-1, data.labels.clamp(0, VOCAB - 1)[..., None]).squeeze(-1)
    minus_lse = -(logits / temperature).logsumexp(-1)
    # Wrappers put hooks on the model's own output.
    log_p_of_labels = torch.where(inside, picked, minus_lse) + 0.0 * output
    return TokenLogProbs(log_p_of_labels, -(log_p.exp() * log_p).sum(-1))


def policy_loss(found: TokenLogProbs, labels: torch.Tensor, entropy: bool) -> torch.Tensor:
    """Group-relative policy optimization's: a clipped ratio, with an entropy bonus. A token outside counts, too."""
    generator = torch.Generator().manual_seed(4)
    advantage, old = (torch.randn(labels.shape, generator=generator).to(labels.device) for _ in range(2))
    ratio = (found.log_probs - (0.2 * old - 4.5)).exp()
    loss = -torch.minimum(ratio * advantage, ratio.clamp(0.8, 1.2) * advantage)
    loss = loss + 0.1 * found.log_probs
    return (loss - 0.3 * found.entropy if entropy else loss).sum()


def forward_step(ours: bool, scoring: Scoring, spec: Model, device, done: Trained, numbers, model):
    data = batch(next(numbers), spec, device)
    mask = {"loss_mask": (data.labels >= 0).float()} if spec.mtp else {}
    output = scored(ours, model, data, scoring, **mask)

    def loss_function(found: TokenLogProbs):
        assert isinstance(found, TokenLogProbs)
        if ours:
            assert all(v is None or v.dtype is torch.float32 for v in found)
            assert (found.entropy is not None) == scoring.entropy
        done.losses += [v.detach().float().cpu() for v in (found[:2] if scoring.entropy else found[:1])]
        total = policy_loss(found, data.labels, scoring.entropy).float()
        return total, torch.tensor(data.labels.numel(), dtype=torch.int32, device=device), {"loss": total.detach()}

    return output, loss_function


def _compare(member: Member, spec: Model, scoring: Scoring, options: dict | None = None) -> None:
    options = options or {}
    stock = train(member, spec, options, partial(forward_step, False, scoring))
    asked_for = options | (switched(spec) if scoring.switched else {})
    assert_equal(
        train_quietly(member, spec, asked_for, partial(forward_step, True, scoring)), stock, tolerance_of(spec)
    )


SCORINGS = Scoring(), Scoring(0.7, switched=True), Scoring("tensor"), Scoring("tensor", entropy=False), Scoring(2)


def _cases(models: list[Model]) -> list[tuple]:
    # With fused accumulation stock drops the MTP embedding's gradient where PP > 1 and weights are tied.
    models = [m for m in models if m.family in ("gpt", "mamba") and not (m.fusion and m.pipeline > 1)]
    return [(replace(model, steps=1), scoring) for model, scoring in zip(models, cycle(SCORINGS))]


@pytest.mark.parametrize(("spec", "scoring"), _cases([*specs(1), *specs(2)]), ids=str)
@pytest.mark.thinned
def test_equal_to_stock_logits(spec, scoring, worlds):
    worlds(spec.ranks).run(_compare, spec, scoring)


@pytest.mark.parametrize(("spec", "scoring"), _cases(specs(2, tp_of_pairs=1)), ids=str)
@pytest.mark.parametrize("release", OTHER_RELEASES)
def test_other_releases(release, spec, scoring, worlds):
    worlds(spec.ranks, path_of(release)).run(_compare, spec, scoring)


@pytest.mark.slow
@pytest.mark.parametrize("release", ["0.17.1", "0.18.2", "0.19.2"])
def test_width_scaled_logits(release, worlds):
    """MuP multiplies the logits after the output layer."""
    options = dict(use_mup=True, mup_output_mult=0.4)
    spec = Model(ranks=2, sequence_parallel=True, mtp=1, steps=1)
    worlds(2, path_of(release)).run(_compare, spec, Scoring("tensor"), options)


class _PackedAttention(torch.nn.Module):
    """Causal attention within each of the packed sequences."""

    def forward(self, query, key, value, *others, packed_seq_params, **more):
        lengths = packed_seq_params.cu_seqlens_q.diff().tolist()
        parts = zip(*(t.transpose(0, 1).split(lengths, 1) for t in (query, key, value)))
        attend = torch.nn.functional.scaled_dot_product_attention
        outputs = [attend(*part, is_causal=True).transpose(0, 1).flatten(1) for part in parts]
        return torch.cat(outputs)


@pytest.mark.parametrize("mtp", [None, 1])
@on_ranks(2)
def test_packed_sequences(member, mtp):
    from megatron.core.packed_seq_params import PackedSeqParams

    starts = torch.tensor([0, 5, 16, 22, 32], dtype=torch.int32, device=member.device)
    packing = PackedSeqParams("thd", starts, starts, max_seqlen_q=11, max_seqlen_kv=11)

    def values(model, rows, ours):
        data = Batch(*(t.reshape(1, -1) for t in (rows.tokens, rows.labels, rows.positions)), None)
        for module in model.modules():
            if hasattr(module, "core_attention"):
                module.core_attention = _PackedAttention()
        mask = (data.labels >= 0).float()
        output = scored(ours, model, data, Scoring("tensor"), packed_seq_params=packing, loss_mask=mask)
        assert output.log_probs.shape == (1, BATCH * SEQUENCE)
        policy_loss(output, data.labels, True).backward()
        return *output, *(p.grad for p in model.parameters())

    side_by_side(member, Model(ranks=member.ranks, sequence_parallel=True, mtp=mtp), values, options={})


@on_ranks(2)
def test_without_gradients(member):
    """Nothing is saved; and losses of other heads are computed where the model records them, in training, alone."""
    spec = Model(ranks=member.ranks, sequence_parallel=True, mtp=2)

    def values(model, data, ours):
        found = []
        for training in (True, False):
            model.train(training)
            with torch.no_grad(), mock.patch.object(log_probs, "token_losses", wraps=log_probs.token_losses) as others:
                output = scored(ours, model, data, Scoring(0.7))
            assert others.call_count == (spec.mtp if training and ours else 0)
            assert not any(value.requires_grad for value in output)
            found += output
        # In evaluation mode with gradients.
        policy_loss(scored(ours, model, data, Scoring(0.7)), data.labels, True).backward()
        return *found, *(p.grad for p in model.parameters())

    side_by_side(member, spec, values, options={})


@on_ranks(2)
def test_parameters_that_hooks_gather(member):
    """DistributedDataParallel gathers a step's parameters in pre-hooks of the forwards, of the output layer's too."""
    from megatron.core.distributed import DistributedDataParallel, DistributedDataParallelConfig
    from megatron.core.optimizer import OptimizerConfig, get_megatron_optimizer

    from training.megatron_cpu import pass_as_cuda

    spec, both = Model(ranks=member.ranks, data=member.ranks), dict(use_distributed_optimizer=True)
    both["overlap_param_gather"] = True

    def values(model, data, ours):
        options = dict(grad_reduce_in_fp32=True, overlap_grad_reduce=True, bucket_size=1)
        ddp = DistributedDataParallel(model.config, DistributedDataParallelConfig(**options, **both), model)
        if member.device.type == "cpu":
            pass_as_cuda(model.parameters())
        step = OptimizerConfig(optimizer="adam", lr=0.1, adam_eps=0.1, clip_grad=0.0, **both)
        optimizer, found = get_megatron_optimizer(step, [ddp]), []
        for number in range(3):
            ddp.zero_grad_buffer()
            data = batch(number, spec, member.device)
            output = scored(ours, ddp, data, Scoring(0.7))
            policy_loss(output, data.labels, True).backward()
            ddp.finish_grad_sync()
            found += [v.detach() for v in output]
            optimizer.step()
            optimizer.zero_grad()
        return found

    side_by_side(member, spec, values, options={})


def _half(member: Member, model):
    from megatron.core.distributed import DistributedDataParallel, DistributedDataParallelConfig
    from megatron.core.transformer.module import Float16Module

    half = Float16Module(model.config, model)
    ddp = DistributedDataParallel(model.config, DistributedDataParallelConfig(grad_reduce_in_fp32=True), half)
    ddp.zero_grad_buffer()
    return ddp


def _sharded(member: Member, model):
    """Where the model begins: the output weight is whole within the model's forward."""
    fully_shard(model, mesh=DeviceMesh.from_group(member.group, member.device.type))
    return model


def _gathering(member: Member, model):
    """As a model that is built to gather its logits."""
    model.output_layer.gather_output = True
    return model


WRAPPED = {
    "half": (_half, dict(dtype=torch.bfloat16)),
    "sharded": (_sharded, dict(data=2)),
    "gathering": (_gathering, {}),
    "compiled": (lambda member, model: torch.compile(model, backend="eager"), dict(ranks=1)),
}


@pytest.mark.parametrize(("ranks", "how"), [(spec.get("ranks", 2), how) for how, (_, spec) in WRAPPED.items()])
@on_ranks()
def test_models_in_wrappers(member, how):
    wrap, changes = WRAPPED[how]
    spec = Model(**dict(ranks=member.ranks) | changes)

    def values(model, data, ours):
        # Of a stock model that gathers, or that is compiled, the logits could not be caught.
        wrapped = wrap(member, model) if ours or how in ("half", "sharded") else model
        for _ in range(2):
            model.zero_grad()
            output = scored(ours, wrapped, data, Scoring(0.7))
            policy_loss(output, data.labels, True).backward()
        assert not ours or all(value.dtype is torch.float32 for value in output)
        found = [p.main_grad if hasattr(p, "main_grad") else p.grad for p in model.parameters()]
        return *output, *(g.full_tensor() if hasattr(g, "full_tensor") else g for g in found)

    side_by_side(member, spec, values, tolerance_of(spec), options={})
    if how == "compiled":
        torch._dynamo.reset()


@on_ranks(2)
def test_hooks_of_the_output_layer_run(member):
    model, data = build(member, Model(ranks=member.ranks), {}), batch(0, Model(ranks=member.ranks), member.device)
    calls = []
    model.output_layer.register_forward_pre_hook(lambda module, inputs: calls.append("before"))
    model.output_layer.register_forward_hook(lambda module, inputs, output: calls.append(list(output[0].shape)))
    scored(True, model, data, Scoring())
    assert calls == ["before", [SEQUENCE, BATCH, VOCAB // member.ranks]]


@pytest.mark.parametrize("mtp", [None, 1])
@on_ranks(2)
def test_budgets(member, mtp):
    """The budget of each call, by default and as installed; and the filter, which is not for entropies."""
    spec = Model(ranks=member.ranks, mtp=mtp)
    model, data = build(member, spec, {}), batch(0, spec, member.device)
    with arguments_to(output_layer, "fused_statistics") as given:
        scored(True, model, data, Scoring())
        with mock.patch.dict(os.environ, PARALLEL_LCE_LOGITS_BUDGET="345"):
            scored(True, model, data, Scoring())
        parallel_lce.megatron.install(logits_budget=12345, reduce_dtype=torch.float32, gradient_filter=0.25)
        scored(True, model, data, Scoring())
        scored(True, model, data, Scoring(entropy=False))
    default = None if mtp is None else default_budget(member.device) // (1 + mtp)
    installed = 12345, torch.float32
    found = [(options.logits_budget, options.reduce_dtype, options.gradient_filter) for options, *_ in given]
    assert found == [(default, None, None), (345, None, None), (*installed, None), (*installed, 0.25)]


SHAPE = rf"\[{BATCH}, {SEQUENCE}\]"
# What changes of a call with labels [b, s], and what its refusal says.
REFUSED = [
    (lambda y: dict(labels=None), "of an integer dtype, got NoneType$"),
    (lambda y: dict(labels=y.float()), f"got {SHAPE} of torch.float32$"),
    (lambda y: dict(labels=y[0]), rf"got \[{SEQUENCE}\] of torch.int64$"),
    (lambda y: dict(labels=y[:, :3]), rf"input_ids' shape {SHAPE}, got \[{BATCH}, 3\]"),
    *(
        (lambda y, t=t: dict(temperature=t), "temperature must be a number > 0")
        for t in (0, -1.0, torch.nan, "1", True)
    ),
    (lambda y: dict(temperature=torch.ones(SEQUENCE)), rf"of labels' shape {SHAPE}, got \[{SEQUENCE}\]"),
    (lambda y: dict(temperature=torch.ones(y.shape, requires_grad=True)), "none flows to it"),
    (lambda y: dict(temperature=torch.ones(y.shape, device="meta")), "is on meta"),
    (lambda y: dict(temperature=torch.ones(y.shape, dtype=torch.complex64, device=y.device)), "real ones"),
    (lambda y: dict(entropy=1), "entropy must be True or False, got 1"),
    (lambda y: dict(runtime_gather_output=True), "takes no runtime_gather_output"),
    (lambda y: dict(inference_context=object()), "takes no inference_context"),
    (lambda y: dict(model=[y]), "HybridModel, alone or in wrappers, got list"),
]


@on_ranks(1)
def test_refusals(member):
    """Before the model is called, which stays as it was."""
    spec = Model(ranks=member.ranks)
    model, data = build(member, spec, {}), batch(0, spec, member.device)
    layer = model.output_layer
    before = type(layer), {*vars(layer)}, {*vars(model)}
    given = dict(model=model, input_ids=data.tokens, position_ids=data.positions, attention_mask=data.mask)

    def refused(message: str, kind: type = ValueError, **changed) -> None:
        with pytest.raises(kind, match=message):
            token_log_probs(**{**given, "labels": data.labels, **changed})
        assert before == (type(layer), {*vars(layer)}, {*vars(model)})

    def never(*arguments):
        raise AssertionError("the model was called")

    guard = model.register_forward_pre_hook(never)
    for changes, message in REFUSED:
        refused(message, **changes(data.labels))
    bert = build(member, Model(ranks=member.ranks, family="bert"), {})
    refused("HybridModel, alone or in wrappers, got BertModel", model=bert)
    model.config.defer_embedding_wgrad_compute = True
    refused("token_log_probs does not support defer_embedding_wgrad_compute=True")
    model.config.defer_embedding_wgrad_compute = False
    with mock.patch.object(output_layer, "_KNOWN", ()):
        refused("does not know the forward of the output layer ColumnParallelLinear")
    guard.remove()
    refused("unexpected keyword argument 'unknown'", TypeError, unknown=1)
    handle = model.register_forward_hook(lambda module, inputs, output: output[0])
    refused("GPTModel's forward must return compute_language_model_loss", RuntimeError)
    handle.remove()


HOOKS = {
    "token_log_probs makes no logits: attribute 'mean'": lambda module, inputs, output: (output[0].mean(), None)[1],
    "token_log_probs makes no logits: operator '__add__'": lambda module, inputs, output: (output[0] + 0, None),
    "replaced the output layer's result, by one of type Tensor": lambda module, inputs, output: (torch.zeros(1), None),
}


@on_ranks(1)
def test_what_would_make_logits_is_refused(member):
    """And none are made."""
    spec = Model(ranks=member.ranks)
    model, data = build(member, spec, {}), batch(0, spec, member.device)
    layer = model.output_layer

    def refused(message: str) -> None:
        with pytest.raises(RuntimeError, match=message):
            scored(True, model, data, Scoring())

    forward = type(layer).forward

    def watched(self, *arguments, **options):
        assert self is not layer, "the logits were made"
        return forward(self, *arguments, **options)

    with mock.patch.object(type(layer), "forward", watched):
        for training in (True, False):
            model.train(training)
            for message, hook in HOOKS.items():
                handle = layer.register_forward_hook(hook)
                refused(message)
                handle.remove()
        handle = layer.register_full_backward_hook(lambda *arguments: None)
        refused("makes no logits: the output layer has backward hooks")
        handle.remove()
        layer.weight.__fsdp_param__ = True
        refused("makes no logits: the output weight is fully sharded")
        del layer.weight.__fsdp_param__
        scored(True, model, data, Scoring())


@on_ranks(2)
def test_the_model_is_as_before(member):
    """It computes its own loss, and logits."""
    spec = Model(ranks=member.ranks)
    for options in ({}, switched(spec)):
        model, data = build(member, spec, options), batch(0, spec, member.device)
        before = losses_of(model, spec, data)
        scored(True, model, data, Scoring())
        assert torch.equal(losses_of(model, spec, data), before)
        logits = model(data.tokens, data.positions, data.mask)
        assert logits.shape == (BATCH, SEQUENCE, VOCAB // member.ranks)
