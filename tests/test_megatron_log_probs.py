"""token_log_probs equals the log-softmax of a stock Megatron-core model's logits: values and all gradients."""

from __future__ import annotations

import os
import warnings
from dataclasses import dataclass
from functools import partial
from unittest import mock

import pytest
import torch
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import fully_shard

pytest.importorskip("megatron.core", reason="needs megatron-core")

import parallel_lce.megatron
from measures import assert_close
from megatron_models import BATCH, SEQUENCE, VOCAB, Batch, Model, batch, build, losses_of
from megatron_releases import OTHER_RELEASES, path_of
from megatron_training import Trained, assert_equal, switched, train
from parallel_lce.core.budget import default_budget
from parallel_lce.megatron import TokenLogProbs, log_probs, output_layer, token_log_probs
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


def of_stock(model: torch.nn.Module, data: Batch, temperature: float | torch.Tensor, **arguments):
    """From the model's own logits, gathered, in float64; of another pipeline stage its output."""
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


def of_ours(model: torch.nn.Module, data: Batch, scoring: Scoring, **arguments):
    return token_log_probs(
        model,
        data.tokens,
        data.positions,
        data.mask,
        data.labels if unwrapped(model).post_process else None,
        temperature=scoring.temperatures(data.labels),
        entropy=scoring.entropy,
        **arguments,
    )


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
    if ours:
        output = of_ours(model, data, scoring, **mask)
    else:
        output = of_stock(model, data, scoring.temperatures(data.labels), **mask)

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
    stock = train(member, spec, options or {}, partial(forward_step, False, scoring))
    try:
        asked_for = switched(spec) if scoring.switched else {}
        with warnings.catch_warnings():
            warnings.filterwarnings("error", message="parallel_lce")
            ours = train(member, spec, {**(options or {}), **asked_for}, partial(forward_step, True, scoring))
    finally:
        parallel_lce.megatron.uninstall()
    assert_equal(ours, stock, 1e-5 if spec.dtype == torch.float32 and spec.ddp != "bf16" else 2e-2)


def _cases(tp: int) -> list:
    one = dict(ranks=tp, sequence_parallel=tp > 1)
    return [
        (Model(ranks=tp), Scoring()),
        (Model(**one, tied=True, mtp=1, budget=0, steps=1), Scoring(0.7, switched=True)),
        (Model(**one, ddp="fp32", tied=True, mtp=1, per_token=True), Scoring("tensor")),
        (Model(**one, ddp="fp32", mtp=2, overlap=True, fusion=True, steps=1), Scoring("tensor", entropy=False)),
        (Model(ranks=tp, ddp="fp32", frozen=True, steps=1), Scoring(2)),
        (Model(**one, ddp="bf16", dtype=torch.bfloat16, steps=1), Scoring(0.7)),
        (Model(**one, family="mamba", ddp="fp32", tied=True, steps=1), Scoring("tensor")),
    ]


def _pairs(tp: int) -> list:
    two = dict(ranks=2 * tp, sequence_parallel=tp > 1, ddp="fp32")
    return [
        (Model(**two, data=2, tied=True, overlap=True, optimizer="distributed"), Scoring(0.7)),
        (Model(**two, pipeline=2, tied=True, mtp=1, microbatches=3, steps=1), Scoring("tensor")),
        (Model(**two, pipeline=2, chunks=2, overlap=True, steps=1), Scoring(0.7, switched=True)),
        (Model(**two, context=2, mtp=1, steps=1), Scoring("tensor")),
    ]


CASES = [*_cases(2), *_pairs(1)]
MORE = [pytest.param(*case, marks=pytest.mark.slow) for case in [*_cases(1), *_pairs(2)]]


@pytest.mark.parametrize(("spec", "scoring"), [*CASES, *MORE], ids=str)
def test_equal_to_stock_logits(spec, scoring, worlds):
    worlds(spec.ranks).run(_compare, spec, scoring)


@pytest.mark.parametrize(("spec", "scoring"), CASES, ids=str)
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


def _packed(member: Member, spec: Model) -> None:
    from megatron.core.packed_seq_params import PackedSeqParams

    starts = torch.tensor([0, 5, 16, 22, 32], dtype=torch.int32, device=member.device)
    packing = PackedSeqParams("thd", starts, starts, max_seqlen_q=11, max_seqlen_kv=11)
    scoring, found = Scoring("tensor"), []
    for ours in (False, True):
        model, rows = build(member, spec, {}), batch(0, spec, member.device)
        data = Batch(*(t.reshape(1, -1) for t in (rows.tokens, rows.labels, rows.positions)), None)
        for module in model.modules():
            if hasattr(module, "core_attention"):
                module.core_attention = _PackedAttention()
        more = dict(packed_seq_params=packing, loss_mask=(data.labels >= 0).float())
        output = (
            of_ours(model, data, scoring, **more)
            if ours
            else of_stock(model, data, scoring.temperatures(data.labels), **more)
        )
        assert output.log_probs.shape == (1, BATCH * SEQUENCE)
        policy_loss(output, data.labels, True).backward()
        found.append((*output, *(p.grad for p in model.parameters())))
    for truth, mine in zip(*found, strict=True):
        assert_close(mine, truth, 1e-5)


@pytest.mark.parametrize("mtp", [None, 1])
def test_packed_sequences(mtp, worlds):
    worlds(2).run(_packed, Model(ranks=2, sequence_parallel=True, mtp=mtp))


def _without_gradients(member: Member, spec: Model) -> None:
    """Nothing is saved; and losses of other heads are computed where the model records them, in training, alone."""
    model, data = build(member, spec, {}), batch(0, spec, member.device)
    expected = of_stock(model, data, 0.7)
    for training in (True, False):
        model.train(training)
        with torch.no_grad(), mock.patch.object(log_probs, "token_losses", wraps=log_probs.token_losses) as others:
            found = of_ours(model, data, Scoring(0.7))
        assert others.call_count == (spec.mtp if training else 0)
        assert_close(found.log_probs, expected.log_probs, 1e-5)
        assert_close(found.entropy, expected.entropy, 1e-5)
        assert not found.log_probs.requires_grad and not found.entropy.requires_grad
    found = of_ours(model, data, Scoring(0.7))  # in evaluation mode with gradients
    model.zero_grad()
    policy_loss(found, data.labels, True).backward()
    gradients = [p.grad for p in model.parameters()]
    model.zero_grad()
    policy_loss(expected, data.labels, True).backward()
    for mine, parameter in zip(gradients, model.parameters(), strict=True):
        assert_close(mine, parameter.grad, 1e-5)


def test_without_gradients(worlds):
    worlds(2).run(_without_gradients, Model(ranks=2, sequence_parallel=True, mtp=2))


def _gathered_by_hooks(member: Member) -> None:
    """DistributedDataParallel gathers a step's parameters in pre-hooks of the forwards, of the output layer's too."""
    from megatron.core.distributed import DistributedDataParallel, DistributedDataParallelConfig
    from megatron.core.optimizer import OptimizerConfig, get_megatron_optimizer

    from training.megatron_cpu import pass_as_cuda

    spec, found = Model(ranks=member.ranks, data=member.ranks), []
    both = dict(use_distributed_optimizer=True, overlap_param_gather=True)
    for ours in (False, True):
        model = build(member, spec, {})
        config = DistributedDataParallelConfig(
            grad_reduce_in_fp32=True, overlap_grad_reduce=True, bucket_size=1, **both
        )
        ddp = DistributedDataParallel(model.config, config, model)
        if member.device.type == "cpu":
            pass_as_cuda(model.parameters())
        step = OptimizerConfig(optimizer="adam", lr=0.1, adam_eps=0.1, clip_grad=0.0, **both)
        optimizer, values = get_megatron_optimizer(step, [ddp]), []
        for number in range(3):
            ddp.zero_grad_buffer()
            data = batch(number, spec, member.device)
            output = of_ours(ddp, data, Scoring(0.7)) if ours else of_stock(ddp, data, 0.7)
            policy_loss(output, data.labels, True).backward()
            ddp.finish_grad_sync()
            values += [v.detach() for v in output]
            optimizer.step()
            optimizer.zero_grad()
        found.append(values)
    for truth, mine in zip(*found, strict=True):
        assert_close(mine, truth, 1e-5)


def test_parameters_that_hooks_gather(worlds):
    worlds(2).run(_gathered_by_hooks)


def _half(member: Member) -> None:
    from megatron.core.distributed import DistributedDataParallel, DistributedDataParallelConfig
    from megatron.core.transformer.module import Float16Module

    spec, found = Model(ranks=member.ranks, dtype=torch.bfloat16), []
    for ours in (False, True):
        model = build(member, spec, {})
        config = DistributedDataParallelConfig(grad_reduce_in_fp32=True)
        ddp = DistributedDataParallel(model.config, config, Float16Module(model.config, model))
        ddp.zero_grad_buffer()
        data = batch(0, spec, member.device)
        output = of_ours(ddp, data, Scoring(0.7)) if ours else of_stock(ddp, data, 0.7)
        policy_loss(output, data.labels, True).backward()
        found.append((*output, *(p.main_grad for p in model.parameters())))
    assert all(v.dtype is torch.float32 for v in found[1])
    for truth, mine in zip(*found, strict=True):
        assert_close(mine, truth, 2e-2)


def test_wrappers(worlds):
    worlds(2).run(_half)


def _compiled(member: Member) -> None:
    """The model's graphs break where it calls the loss."""
    spec = Model(ranks=member.ranks)
    model, data = build(member, spec, {}), batch(0, spec, member.device)
    expected = of_stock(model, data, 1.0)
    policy_loss(expected, data.labels, True).backward()
    truth = [*expected, *(p.grad for p in model.parameters())]
    wrapped = torch.compile(model, backend="eager")
    for _ in range(2):
        model.zero_grad()
        found = of_ours(wrapped, data, Scoring())
        policy_loss(found, data.labels, True).backward()
        for a, b in zip((*found, *(p.grad for p in model.parameters())), truth, strict=True):
            assert_close(a, b, 1e-5)
    torch._dynamo.reset()


def test_a_compiled_model(worlds):
    worlds(2).run(_compiled)


def _hooks(member: Member) -> None:
    model, data = build(member, Model(ranks=member.ranks), {}), batch(0, Model(ranks=member.ranks), member.device)
    calls = []
    model.output_layer.register_forward_pre_hook(lambda module, inputs: calls.append("before"))
    model.output_layer.register_forward_hook(lambda module, inputs, output: calls.append(list(output[0].shape)))
    of_ours(model, data, Scoring())
    assert calls == ["before", [SEQUENCE, BATCH, VOCAB // member.ranks]]


def test_hooks_of_the_output_layer_run(worlds):
    worlds(2).run(_hooks)


def _gathering(member: Member) -> None:
    """A model that was built to gather its logits."""
    spec = Model(ranks=member.ranks)
    model, data = build(member, spec, {}), batch(0, spec, member.device)
    expected = of_stock(model, data, 1.0)
    model.output_layer.gather_output = True
    found = of_ours(model, data, Scoring())
    assert_close(found.log_probs, expected.log_probs, 1e-5)


def test_a_model_that_gathers_its_logits(worlds):
    worlds(2).run(_gathering)


def _fully_sharded(member: Member) -> None:
    """Sharded where the model begins: the output weight is whole within the model's forward."""
    spec, gradients = Model(ranks=member.ranks, data=member.ranks), []
    for ours in (False, True):
        model, data = build(member, spec, {}), batch(0, spec, member.device)
        fully_shard(model, mesh=DeviceMesh.from_group(member.group, member.device.type))
        output = of_ours(model, data, Scoring()) if ours else of_stock(model, data, 1.0)
        policy_loss(output, data.labels, True).backward()
        gradients.append([p.grad.full_tensor() for p in model.parameters()])
    for truth, mine in zip(*gradients, strict=True):
        assert_close(mine, truth, 1e-5)


def test_torchs_fully_sharded_data_parallel(worlds):
    worlds(2).run(_fully_sharded)


def _budgets(member: Member, mtp: int | None) -> None:
    """The budget of each call, by default and as installed; and the filter, which is not for entropies."""
    spec, given = Model(ranks=member.ranks, mtp=mtp), []
    model, data = build(member, spec, {}), batch(0, spec, member.device)
    real = output_layer.fused_statistics

    def noted(arguments, *more, **options):
        given.append((arguments.logits_budget, arguments.reduce_dtype, arguments.gradient_filter))
        return real(arguments, *more, **options)

    with mock.patch.object(output_layer, "fused_statistics", noted):
        of_ours(model, data, Scoring())
        with mock.patch.dict(os.environ, PARALLEL_LCE_LOGITS_BUDGET="345"):
            of_ours(model, data, Scoring())
        parallel_lce.megatron.install(logits_budget=12345, reduce_dtype=torch.float32, gradient_filter=0.25)
        try:
            of_ours(model, data, Scoring())
            of_ours(model, data, Scoring(entropy=False))
        finally:
            parallel_lce.megatron.uninstall()
    default = None if mtp is None else default_budget(member.device) // (1 + mtp)
    installed = 12345, torch.float32
    assert given == [(default, None, None), (345, None, None), (*installed, None), (*installed, 0.25)]


@pytest.mark.parametrize("mtp", [None, 1])
def test_budgets(mtp, worlds):
    worlds(2).run(_budgets, mtp)


def _refused(member: Member) -> None:
    spec = Model(ranks=member.ranks)
    model, data = build(member, spec, {}), batch(0, spec, member.device)
    before = type(model.output_layer), {*vars(model.output_layer)}, {*vars(model)}

    def error(model=model, kind=ValueError, **changed) -> str:
        given = dict(input_ids=data.tokens, position_ids=data.positions, attention_mask=data.mask, labels=data.labels)
        with pytest.raises(kind) as caught:
            token_log_probs(model, **{**given, **changed})
        assert before == (type(model.output_layer), {*vars(model.output_layer)}, {*vars(model)})
        return str(caught.value)

    def never(*arguments):
        raise AssertionError("the model was called")

    guard = model.register_forward_pre_hook(never)
    shape = f"[{BATCH}, {SEQUENCE}]"
    assert error(labels=None).endswith("of an integer dtype, got NoneType")
    assert error(labels=data.labels.float()).endswith(f"got {shape} of torch.float32")
    assert error(labels=data.labels[0]).endswith(f"got [{SEQUENCE}] of torch.int64")
    assert f"input_ids' shape {shape}, got [{BATCH}, 3]" in error(labels=data.labels[:, :3])
    for wrong in (0, -1.0, float("nan"), "1", True):
        assert "temperature must be a number > 0" in error(temperature=wrong)
    assert f"of labels' shape {shape}, got [{SEQUENCE}]" in error(temperature=torch.ones(SEQUENCE))
    assert "none flows to it" in error(temperature=torch.ones(BATCH, SEQUENCE, requires_grad=True))
    assert "is on meta" in error(temperature=torch.ones(BATCH, SEQUENCE, device="meta"))
    assert "real ones" in error(temperature=torch.ones(BATCH, SEQUENCE, dtype=torch.complex64, device=member.device))
    assert "entropy must be True or False, got 1" in error(entropy=1)
    assert "takes no runtime_gather_output" in error(runtime_gather_output=True)
    assert "takes no inference_context" in error(inference_context=object())
    with pytest.raises(ValueError, match="HybridModel, alone or in wrappers, got list"):
        token_log_probs([model], data.tokens, data.positions, data.mask, data.labels)
    with pytest.raises(ValueError, match="HybridModel, alone or in wrappers, got BertModel"):
        bert = build(member, Model(ranks=member.ranks, family="bert"), {})
        token_log_probs(bert, data.tokens, data.positions, data.mask, data.labels)
    model.config.defer_embedding_wgrad_compute = True
    assert "token_log_probs does not support defer_embedding_wgrad_compute=True" in error()
    model.config.defer_embedding_wgrad_compute = False
    with mock.patch.object(output_layer, "_KNOWN", ()):
        assert "does not know the forward of the output layer ColumnParallelLinear" in error()
    guard.remove()
    assert "unexpected keyword argument 'unknown'" in error(kind=TypeError, unknown=1)

    # What would make real logits.
    def use(output):
        return lambda module, inputs, logits: output(logits)

    layer, stock = model.output_layer, []
    guards = mock.patch.object(
        type(layer), "forward", lambda self, *a, **k: stock.append(self) or forward(self, *a, **k)
    )
    forward = type(layer).forward
    hooks = {
        "token_log_probs makes no logits: attribute 'mean'": use(lambda o: (o[0].mean(), None)[1]),
        "something has replaced the output layer's result, by one of type Tensor": use(
            lambda o: (torch.zeros(1), None)
        ),
    }
    with guards:
        for words, hook in hooks.items():
            handle = layer.register_forward_hook(hook)
            assert words in error(kind=RuntimeError)
            handle.remove()
        handle = layer.register_full_backward_hook(lambda *arguments: None)
        assert "makes no logits: the output layer has backward hooks" in error(kind=RuntimeError)
        handle.remove()
        layer.weight.__fsdp_param__ = True
        assert "makes no logits: the output weight is fully sharded" in error(kind=RuntimeError)
        del layer.weight.__fsdp_param__
        model.eval()
        handle = layer.register_forward_hook(lambda module, inputs, output: (output[0] + 0, None))
        assert "token_log_probs makes no logits: operator '__add__'" in error(kind=RuntimeError)
        handle.remove()
        of_ours(model, data, Scoring())
    assert layer not in stock
    model.register_forward_hook(lambda module, inputs, output: output[0])
    assert "GPTModel's forward must return compute_language_model_loss" in error(kind=RuntimeError)


def test_refusals(worlds):
    worlds(1).run(_refused)


def _afterwards(member: Member) -> None:
    """The model computes its own loss, and logits, as before."""
    for options in ({}, switched(Model())):
        spec = Model(ranks=member.ranks)
        model, data = build(member, spec, options), batch(0, spec, member.device)
        before = losses_of(model, spec, data)
        of_ours(model, data, Scoring())
        assert torch.equal(losses_of(model, spec, data), before)
        logits = model(data.tokens, data.positions, data.mask)
        assert logits.shape == (BATCH, SEQUENCE, VOCAB // member.ranks)
    parallel_lce.megatron.uninstall()


def test_the_model_is_as_before(worlds):
    worlds(2).run(_afterwards)
