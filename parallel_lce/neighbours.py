"""What the doors use of their neighbours' private interfaces, each with the release in which it was seen.

tests/test_neighbours.py has a test of each use. PyTorch's private interfaces are in core/private.py."""

from __future__ import annotations

import importlib
from typing import Any

from parallel_lce.core.private import constant_in_graphs
from parallel_lce.patching import is_own

# --- Megatron-core, 0.14 to 0.19: functions and, by their class, methods that make the logits of an output layer, and
# those that make the unfused loss of logits ---
_FUNCTION = ("forward", "backward", "apply")
_OF_LAYERS = "linear_with_grad_accumulation_and_async_allreduce", "linear_with_frozen_weight"
MEGATRON_PROJECTION = {
    "": (*_OF_LAYERS, "copy_to_tensor_model_parallel_region"),
    "ColumnParallelLinear": ("forward",),  # and its _forward_impl
    "LinearWithGradAccumulationAndAsyncCommunication": _FUNCTION,
    "LinearWithFrozenWeight": _FUNCTION,
}
MEGATRON_LOSS = {
    "": ("VocabParallelCrossEntropy", "_VocabParallelCrossEntropy"),
    "_VocabParallelCrossEntropy": _FUNCTION,
    "VocabParallelCrossEntropy": ("calculate_logits_max", "calculate_predicted_logits", "calculate_cross_entropy_loss")
    + ("prepare_gradient_calculation_operands", "calculate_gradients"),
}


def is_global_group(group: Any) -> bool:
    """Whether a group is the one that Megatron's unfused cross-entropy takes."""
    ranks = importlib.import_module("megatron.core.parallel_state")
    return group is None or group is ranks.get_tensor_model_parallel_group(check_initialized=False)


def linear_cross_entropy_module() -> Any:
    """An output layer of the development branch; None in releases."""
    try:
        return importlib.import_module("megatron.core.transformer.linear_cross_entropy").LinearCrossEntropyModule
    except ImportError:
        return None


# --- DeepSpeed, 0.19: its package, of the hooks on a model's outputs; the modules of the hooks of ZeRO-3 ---
DEEPSPEED = "deepspeed."
ZERO_MODULES = "deepspeed.runtime.zero", "deepspeed.utils.nvtx"

# --- transformers, 5.24: the package of ForCausalLMLoss, of its helper, and of a plan's forward of an output layer ---
TRANSFORMERS = {"transformers"}


def is_transformers(function: Any) -> bool:
    return _package(function) in TRANSFORMERS


@constant_in_graphs
def is_causal_lm_loss(loss: Any) -> bool:
    helper = getattr(loss, "__globals__", {}).get("fixed_cross_entropy", loss)
    return getattr(loss, "__name__", None) == "ForCausalLMLoss" and is_transformers(loss) and is_transformers(helper)


def is_ligers(forward: Any) -> bool:
    return _package(forward) == "liger_kernel"


def _package(function: Any) -> str:
    return getattr(function, "__globals__", {}).get("__name__", "").partition(".")[0]


# --- TRL, 1.16: modules and names that hold its two autograd functions; the first is that function's own ---
TRL_LOG_PROBS = [
    ("trl.kernels.chunked_logprob", "ChunkedLogProbFunction"),
    ("trl.trainer.utils", "_ChunkedLogProbFunction"),  # imported with the module of the divergence
]
TRL_DIVERGENCE = [
    (module, "ChunkedDivergenceFunction")
    for module in ("trl.kernels.chunked_divergence", "trl.trainer.distillation_trainer")
]
TRL_OUTPUTS = "log_probs", "entropy", "log_sum_sq_probs", "mean_logits", "is_top1"

# --- verl, 0.9.1 ---
# The module of its linear_cross_entropy, and those that import the function from there when they are imported.
VERL_KERNEL = (
    "verl.utils.kernel.linear_cross_entropy",
    "verl.models.mcore.model_forward_fused",
    "verl.models.mcore.model_forward_1f1b_overlap",
)
# Backwards of Megatron-core's mappings that sum the gradient of the hidden states over the ranks.
VERL_SUMMED = "_GatherFromSequenceParallelRegionBackward", "_CopyToModelParallelRegionBackward"
VERL_FSDP_STEP = "verl.workers.engine.fsdp.transformer_impl", "FSDPEngineWithLMHead", "forward_step"
VERL_MEGATRON_STEP = "verl.workers.engine.megatron.transformer_impl", "MegatronEngineWithLMHead", "forward_step"
VERL_PACKING = "verl.models.mcore.model_forward_fused", "preprocess_thd_engine"

# --- torchtitan, 0.3.0 ---


def torchtitan_tp_group() -> Any:
    """The tensor-parallel group of plain tensors, where the caller's region has one of several ranks."""
    regions = importlib.import_module("torchtitan.distributed.spmd_types")
    return regions.current_spmd_mesh().get_group("tp") if regions.spmd_mesh_size("tp") > 1 else None


def torchtitan_logit_options(lm_head: Any) -> dict[str, Any] | None:
    """An output layer's scale and soft-cap as arguments of the fused loss. None: it has a forward of its own."""
    instead, forward = vars(lm_head).get("forward"), type(lm_head).forward  # fully_shard derives a class
    if instead is not None and not is_own(instead, "torchtitan.protocols.module"):  # that one distributes tensors
        return None
    if is_own(forward, "torch.nn.modules.linear", "Linear.forward"):
        return {}
    if is_own(forward, "torchtitan.models.muse_glimmer.model", "SoftCappedLinear.forward"):
        return {"logit_scale": lm_head.output_multiplier, "logit_softcap": lm_head.output_soft_cap_temp}
    return None
