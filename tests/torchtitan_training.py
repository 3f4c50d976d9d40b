"""Training torchtitan's own debug model on gloo, with its own chunked loss and with ours.

The release expects a GPU. What it needs to run on CPUs: its device is named "cpu", and attention is a plain one without
a mask, of which a part of the queries needs no offset under context parallelism."""

from __future__ import annotations

import importlib.util
import sys
import warnings
from dataclasses import dataclass, field, fields
from pathlib import Path
from types import ModuleType
from unittest import mock

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.distributed.fsdp import FSDPModule

from measures import assert_close
from torchtitan_bodies import SPOILED
from world import Member

BATCH, SEQUENCE = 2, 16


@dataclass(frozen=True)
class Run:
    """How the debug model is trained."""

    backend: str = "spmd_types"
    tp: int = 1
    sp: bool = True
    dp: int = 1
    cp: int = 1
    fsdp: bool = False
    inner: str = "CrossEntropyLoss"
    steps: int = 2
    microbatches: int = 1
    bias: bool = False
    soft_cap: bool = False
    vocabulary: int = 2048
    tied: bool = False
    dtype: str = "float32"
    compiled: bool = False
    checked: bool = False  # by spmd_types
    budget: int | None = None
    reshard: str = "default"

    def __str__(self) -> str:
        given = {n: v for n, v in vars(self).items() if v != Run.__dataclass_fields__[n].default}
        return "-".join(f"{n}={v}" for n, v in given.items()) or "default"


@dataclass
class Trained:
    """Of each step the loss of all ranks, every gradient, and the loss of other tokens afterwards, without gradients;
    of each microbatch the metrics."""

    losses: list[float] = field(default_factory=list)
    gradients: list[dict[str, torch.Tensor]] = field(default_factory=list)
    metrics: list[dict[str, float]] = field(default_factory=list)
    validation: list[float] = field(default_factory=list)


def on_cpu() -> None:
    """The release's models run on CPUs."""
    from torchtitan.tools import utils

    utils.device_type, utils.device_module = "cpu", torch.cpu
    from torchtitan.models.common.attention import FlexAttention

    def forward(self, q_BLNH, k_BLNH, v_BLNH, **_):
        q, k, v = (t.transpose(1, 2) for t in (q_BLNH, k_BLNH, v_BLNH))
        return F.scaled_dot_product_attention(q, k, v).transpose(1, 2).contiguous()

    FlexAttention.forward = forward


def _config(run: Run, chosen: bool):
    """A tree with the loss where the trainer has it, after the override that a user names."""
    from torchtitan.components import loss as losses
    from torchtitan.config import Configurable
    from torchtitan.config.override import OverrideConfig, apply_overrides

    class Root(Configurable):
        @dataclass(kw_only=True, slots=True)
        class Config(Configurable.Config):
            loss: losses.BaseLoss.Config

    if run.inner == "CrossEntropyLoss":
        inner = losses.CrossEntropyLoss.Config(global_vocab_size=run.vocabulary)
    else:
        inner = policy_loss(run.inner).Config()
    root = Root.Config(loss=losses.ChunkedLossWrapper.Config(num_chunks=4 // run.cp, loss_fn=inner))
    if chosen:
        target = "parallel_lce.torchtitan.linear_cross_entropy"
        options = {} if run.budget is None else {"logits_budget": run.budget}
        lines = apply_overrides(OverrideConfig(imports=[(target, options)]), root)
        assert len(lines) == 1
    return root.loss


def policy_loss(name: str):
    """``DAPOLoss`` or ``GRPOLoss`` from their files. Their package imports vLLM."""
    import torchtitan

    folder, package = Path(torchtitan.__file__).parent / "experiments/rl/losses", "torchtitan.experiments.rl.losses"
    for module in ("dapo", "grpo"):
        full = f"{package}.{module}"
        if full not in sys.modules:
            spec = importlib.util.spec_from_file_location(full, folder / f"{module}.py")
            sys.modules[full] = importlib.util.module_from_spec(spec)
            with mock.patch.dict(sys.modules, {package: ModuleType(package), package[:-7]: ModuleType(package[:-7])}):
                spec.loader.exec_module(sys.modules[full])
    return getattr(sys.modules[f"{package}.{name[:4].lower()}"], name)


def _model(run: Run, dims):
    from torchtitan.models.llama3 import llama3_configs
    from torchtitan.models.llama3.sharding import set_llama3_sharding_config

    config = llama3_configs["debugmodel"](attn_backend="flex")
    config.layers = config.layers[:2]
    config.vocab_size = config.tok_embeddings.num_embeddings = run.vocabulary
    for layer in config.layers:
        layer.attention.rope.max_seq_len = SEQUENCE
    config.enable_weight_tying = run.tied
    config.lm_head.bias = run.bias
    config.lm_head.out_features = run.vocabulary
    if run.soft_cap:
        from torchtitan.models.muse_glimmer.model import SoftCappedLinear

        config.lm_head = SoftCappedLinear.Config(
            **{f.name: getattr(config.lm_head, f.name) for f in fields(config.lm_head)},
            output_multiplier=0.7,
            output_soft_cap_temp=3.0,
        )
    set_llama3_sharding_config(config, enable_sp=run.sp and run.tp > 1)
    if run.bias:
        shardings = config.lm_head.sharding_config.state_shardings
        shardings["bias"] = shardings["weight"]
    model = config.build()
    torch.manual_seed(0)
    for parameter in model.parameters():
        nn.init.normal_(parameter, std=0.06)
    model.init_states = None  # these values are the test's
    return model


def _parallelized(run: Run, model, dims):
    from torchtitan.distributed.fsdp import apply_fsdp_to_decoder
    from torchtitan.distributed.full_dtensor import resolve_fsdp_mesh

    for layer in model.layers.values():
        layer.attention.rope._init_self_buffers()
    if run.backend != "partial_dtensor" or run.tp > 1:
        model.parallelize(dims)
    if run.fsdp:
        of_data = None
        if run.backend == "partial_dtensor":
            mesh = dims.get_mesh(["fsdp"])
        elif run.backend == "full_dtensor":
            mesh, of_data = resolve_fsdp_mesh(dims)
        else:  # FSDP of torch 2.13 takes plain shards without their types
            mesh = dims.get_mesh("dp_shard")
        dtype = getattr(torch, run.dtype)
        apply_fsdp_to_decoder(
            model, mesh, dtype, torch.float32, pp_enabled=False, dp_mesh_dims=of_data,
            reshard_after_forward_policy=run.reshard,
        )  # fmt: skip
        for module in model.modules():
            if isinstance(module, FSDPModule):
                module.set_force_sum_reduction_for_comms(True)  # gloo has no other
    elif run.dtype != "float32":
        model.to(getattr(torch, run.dtype))
    return model


def _batch(run: Run, step: int, dims):
    """Tokens, labels and positions of this data-parallel rank's part, and the number of labels that count."""
    generator = torch.Generator().manual_seed(step)
    shape = (run.dp * BATCH, SEQUENCE)
    tokens = torch.randint(run.vocabulary, shape, generator=generator)
    labels = torch.randint(run.vocabulary, shape, generator=generator)
    labels[torch.rand(shape, generator=generator) < 0.2] = -100
    positions = torch.arange(SEQUENCE).expand(shape)
    others = {
        "advantages": torch.randn(shape, generator=generator),
        "generator_logprobs": torch.full(shape, -7.7),
        "loss_mask": labels != -100,
    }
    count = (labels != -100).sum()
    data, part = (dims.get_optional_mesh(n) for n in ("batch", "cp"))

    def mine(tensor):
        if data is not None and run.dp > 1:
            tensor = tensor.chunk(run.dp, 0)[data.get_local_rank()]
        if part is not None and run.cp > 1:
            tensor = tensor.chunk(run.cp, 1)[part.get_local_rank()]
        return tensor.contiguous()

    return mine(tokens), mine(labels), mine(positions), {n: mine(o) for n, o in others.items()}, count


def meshes(member: Member, run: Run):
    """torchtitan's ``ParallelDims`` of a run. Two models of one backend share them: DTensor keeps meshes in caches."""
    on_cpu()
    from torch.distributed.tensor import debug
    from torchtitan.distributed import ParallelDims

    debug._clear_sharding_prop_cache()
    dims = ParallelDims(1, run.dp, run.cp, run.tp, 1, 1, member.ranks, spmd_backend=run.backend)
    dims.build_mesh()
    return dims


def train(run: Run, dims, chosen: bool, spoiled=None) -> Trained:
    """Steps downhill. ``spoiled``: called with the built loss, to break it."""
    warnings.filterwarnings("ignore")
    from torch.distributed.tensor import DTensor
    from torchtitan.components.loss import ChunkedLossWrapper
    from torchtitan.config import CompileConfig
    from torchtitan.distributed import full_dtensor
    from torchtitan.distributed.spmd_types import annotate_input_spmd_types
    from torchtitan.distributed.utils import dist_max, dist_sum, get_spmd_context, set_spmd_backend

    set_spmd_backend(run.backend)
    model = _parallelized(run, _model(run, dims), dims)
    compile_config = CompileConfig(enable=run.compiled, components=["loss"], backend="aot_eager")
    loss_fn = _config(run, chosen).build(compile_config=compile_config)
    assert isinstance(loss_fn, ChunkedLossWrapper) and (type(loss_fn) is ChunkedLossWrapper) != chosen
    loss_fn.set_lm_head(model.lm_head)
    model._skip_lm_head = True
    if spoiled:
        spoiled(loss_fn)
    context = get_spmd_context(parallel_dims=dims, spmd_typechecking=run.checked)
    loss_mesh = dims.get_optional_mesh("loss")
    done = Trained()

    def of(step: int, normalized: bool = True):
        tokens, labels, positions, others, count = _batch(run, step, dims)
        extra = {"positions": positions}
        if run.backend == "full_dtensor":
            tokens, labels, extra = full_dtensor.parallelize_inputs(dims, tokens, labels, extra)
        elif run.backend == "spmd_types":
            tokens, labels, extra = annotate_input_spmd_types(dims, tokens, labels, extra)
        inputs = extra if run.inner == "CrossEntropyLoss" else others
        with context():
            hidden = model(tokens, **extra)
            return loss_fn(hidden, labels, count if normalized else None, **inputs)

    for step in range(run.steps):
        total = 0.0
        for number in range(run.microbatches):
            loss, metrics = of(step * run.microbatches + number)
            loss.backward()
            total += dist_sum(loss.detach(), loss_mesh)
            reduced = {n: (dist_max if n.endswith("/max") else dist_sum)(v, loss_mesh) for n, v in metrics.items()}
            done.metrics.append(reduced)
        done.losses.append(total)
        gradients = {n: p.grad for n, p in model.named_parameters()}
        whole = {n: g.full_tensor() if isinstance(g, DTensor) else g for n, g in gradients.items() if g is not None}
        done.gradients.append({n: g.detach().clone() for n, g in whole.items()})
        with torch.no_grad():
            for parameter in model.parameters():
                if parameter.grad is not None:
                    parameter -= 0.3 * parameter.grad
                    parameter.grad = None
            if run.inner == "CrossEntropyLoss":
                done.validation.append(dist_sum(of(99, normalized=False)[0], loss_mesh))
    return done


def compare(member: Member, run: Run, spoiled=None) -> None:
    """Losses, metrics and every gradient of every step equal those of torchtitan's own loss."""
    dims = meshes(member, run)
    own, ours = train(run, dims, chosen=False), train(run, dims, chosen=True, spoiled=spoiled)
    tolerance = 2e-5 if run.dtype == "float32" else 3e-2
    torch.testing.assert_close(ours.losses, own.losses, rtol=tolerance, atol=0)
    torch.testing.assert_close(ours.validation, own.validation, rtol=tolerance, atol=0)
    torch.testing.assert_close(ours.metrics, own.metrics, rtol=tolerance, atol=tolerance)
    assert len({*own.losses}) > 1
    for found, expected in zip(ours.gradients, own.gradients, strict=True):
        assert found.keys() == expected.keys() and len(found) > 15
        for name, gradient in expected.items():
            assert gradient.abs().max() > 0, name
            try:
                assert_close(found[name], gradient, tolerance)
            except AssertionError as error:
                raise AssertionError(f"{name}: {error}") from None


def differs(member: Member, run: Run, mistake: str) -> None:
    """:func:`compare` sees the mistake."""
    with pytest.raises(AssertionError):
        compare(member, run, SPOILED[mistake][0])
