"""Training a small Megatron-core model by Megatron's own schedule, and comparing a stock model with ours."""

import warnings
from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import partial

import torch
from megatron.core.distributed import DistributedDataParallel, DistributedDataParallelConfig, finalize_model_grads
from megatron.core.optimizer import OptimizerConfig, get_megatron_optimizer
from megatron.core.pipeline_parallel import get_forward_backward_func

from examples.megatron_cpu import pass_as_cuda
from measures import assert_close, largest_error
from megatron_models import BATCH, SEQUENCE, Model, batch, build, build_chunks, losses_of
from parallel_lce.megatron import patch
from world import Member

STEPS = 2


def train(member: Member, spec: Model, loss_options: dict) -> tuple[list[torch.Tensor], dict]:
    """``STEPS`` steps of ``spec.microbatches`` microbatches, 1F1B under pipeline parallelism.

    Returns the losses ``[b, s]`` of each microbatch (last stage alone); and, by step and name, the gradients, None for
    parameters without, and the parameters after the last step."""
    models = build_chunks(member, spec, loss_options)
    config, trained = models[0].config, models
    if spec.ddp:
        options = dict(
            grad_reduce_in_fp32=spec.ddp == "fp32",
            overlap_grad_reduce=spec.overlap,
            use_distributed_optimizer=spec.distributed_optimizer,
            # Pre-hooks of the forwards, of the output layer's too, gather a step's parameters.
            overlap_param_gather=spec.distributed_optimizer,
            bucket_size=1 if spec.distributed_optimizer else None,
        )
        trained = [in_ddp(config, m, disable_bucketing=i > 0, **options) for i, m in enumerate(models)]
        config.finalize_model_grads_func = finalize_model_grads
        if spec.overlap:
            functions = [m.no_sync for m in trained]
            config.no_sync_func = functions if len(functions) > 1 else functions[0]
    optimizer = _distributed_optimizer(spec, trained) if spec.distributed_optimizer else None
    losses, tensors = [], {}
    for step in range(STEPS):
        if spec.ddp:
            for m in trained:
                m.zero_grad_buffer()
        numbers = range(step * spec.microbatches, (step + 1) * spec.microbatches)
        iterators = [iter(numbers) for _ in models]
        get_forward_backward_func()(
            forward_step_func=partial(_forward_step, spec, member.device, losses),
            data_iterator=iterators if len(models) > 1 else iterators[0],
            model=trained,
            num_microbatches=spec.microbatches,
            seq_length=SEQUENCE // spec.context,
            micro_batch_size=BATCH,
            forward_only=False,
        )
        tensors |= {(step, name): _copy(_gradient(p, spec)) for name, p in _parameters(models)}
        if optimizer is not None:
            optimizer.step()
            optimizer.zero_grad()
        else:
            _step_downhill(models, spec)
    tensors |= {("last", name): _copy(p) for name, p in _parameters(models)}
    return losses, tensors


def in_ddp(config, model: torch.nn.Module, disable_bucketing: bool = False, **options) -> torch.nn.Module:
    """In Megatron's DDP, by default with main_grad in fp32 of zeros."""
    settings = DistributedDataParallelConfig(**{"grad_reduce_in_fp32": True, **options})
    ddp = DistributedDataParallel(config, settings, model, disable_bucketing=disable_bucketing)
    ddp.zero_grad_buffer()
    return ddp


def _parameters(models: list[torch.nn.Module]) -> Iterator[tuple[str, torch.nn.Parameter]]:
    for number, model in enumerate(models):
        yield from model.named_parameters(prefix=str(number))


def _forward_step(spec: Model, device: torch.device, done: list, numbers, model):
    data = batch(next(numbers), spec, device)
    output = losses_of(model, spec, data)

    def loss_function(losses: torch.Tensor):
        done.append((losses.detach() * (data.counted if spec.masked else 1)).float().cpu())
        total, tokens = (losses * data.counted).sum(), data.counted.sum().int()
        return total, tokens, {"loss": total.detach()}

    return output, loss_function


def _distributed_optimizer(spec: Model, models: list):
    for model in models:
        if not next(model.parameters()).is_cuda:
            pass_as_cuda(model.parameters())
    # An eps far above the gradients' rounding: Adam would turn noise into steps of full size.
    adam = dict(optimizer="adam", lr=0.1, adam_eps=0.1, clip_grad=0.0, params_dtype=spec.dtype)
    config = OptimizerConfig(**adam, use_distributed_optimizer=True, overlap_param_gather=True)
    return get_megatron_optimizer(config, models)


def _gradient(parameter: torch.nn.Parameter, spec: Model) -> torch.Tensor | None:
    return parameter.main_grad if spec.ddp and parameter.requires_grad else parameter.grad


def _copy(tensor: torch.Tensor | None) -> torch.Tensor | None:
    return None if tensor is None else tensor.detach().float().cpu().clone()


@torch.no_grad()
def _step_downhill(models: list[torch.nn.Module], spec: Model) -> None:
    for _, parameter in _parameters(models):
        gradient = _gradient(parameter, spec)
        if gradient is not None:
            parameter -= 0.1 * gradient.to(parameter.dtype)
        parameter.grad = None


def switched(spec: Model, cross_entropy: str = "output_layer") -> dict:
    """Install the switch; the options of a TransformerConfig that ask for it."""
    patch(logits_budget=spec.budget, cross_entropy=cross_entropy)
    if spec.masked:
        patch(skip_masked=True)
    return {"cross_entropy_loss_fusion": True, "cross_entropy_fusion_impl": "parallel_lce"}


def compare(member: Member, spec: Model, cross_entropy: str = "output_layer") -> None:
    """Training with the switch equals stock's. Errors of losses are absolute, the others relative to their norm."""
    # With fused accumulation stock drops the MTP embedding's gradient where PP > 1 and weights are tied.
    drops = spec.fusion and spec.tied and spec.mtp and spec.pipeline > 1
    stock, truth = train(member, replace(spec, fusion=False) if drops else spec, {})
    with warnings.catch_warnings():
        warnings.filterwarnings("error", message="parallel_lce")  # no real logits may appear
        ours, found = train(member, spec, switched(spec, cross_entropy))
    tolerance = tolerance_of(spec)
    for a, b in zip(ours, stock, strict=True):
        assert largest_error(a, b) <= tolerance, ("losses", largest_error(a, b))
    assert found.keys() == truth.keys()
    for name, tensor in found.items():
        assert (tensor is None) == (truth[name] is None), name
        if tensor is not None:
            assert_close(tensor, truth[name], tolerance, 1e-12 * tolerance, name)


def tolerance_of(spec: Model) -> float:
    return 1e-5 if spec.dtype == torch.float32 and spec.ddp != "bf16" else 2e-2


def side_by_side(
    member: Member, spec: Model, body: Callable, tolerance: float = 1e-5, options: dict | None = None
) -> None:
    """``body(model, batch, ours)`` gives the same tensors of a stock model and of ours: one with the switch, or one of
    these ``options``. Both have the same weights."""
    found = []
    for ours in (False, True):
        asked_for = (switched(spec) if options is None else options) if ours else {}
        model = build(member, spec, asked_for)
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", message="parallel_lce")
            found.append([v.detach() for v in body(model, batch(0, spec, member.device), ours)])
    for number, (truth, mine) in enumerate(zip(*found, strict=True)):
        assert_close(mine, truth, tolerance, name=number)
