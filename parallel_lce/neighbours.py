"""What the doors use of their neighbours' private interfaces, each with the release in which it was seen.

The doors' tests on the releases use each. PyTorch's are in core/private.py.
"""

from __future__ import annotations

import importlib
from typing import Any

from torch import nn
from torch.distributed.fsdp import FSDPModule

from parallel_lce.core.private import constant_in_graphs, parameters_of

# --- Megatron-core, 0.14 to 0.19: by module or class, what makes an output layer's logits and their unfused loss ---
_LAYERS, _LOSS = "megatron.core.tensor_parallel.layers", "megatron.core.tensor_parallel.cross_entropy"
MEGATRON = {
    "megatron.core.tensor_parallel": "vocab_parallel_cross_entropy",
    _LAYERS: "linear_with_grad_accumulation_and_async_allreduce linear_with_frozen_weight "
    "copy_to_tensor_model_parallel_region LinearWithGradAccumulationAndAsyncCommunication LinearWithFrozenWeight",
    "megatron.core.models.common.language_module.language_module": "fused_vocab_parallel_cross_entropy",
    f"{_LAYERS}:ColumnParallelLinear": "forward",  # and its _forward_impl
    f"{_LAYERS}:LinearWithGradAccumulationAndAsyncCommunication": "forward backward apply",
    f"{_LAYERS}:LinearWithFrozenWeight": "forward backward apply",
    _LOSS: "VocabParallelCrossEntropy _VocabParallelCrossEntropy",
    f"{_LOSS}:_VocabParallelCrossEntropy": "forward backward apply",
    f"{_LOSS}:VocabParallelCrossEntropy": "calculate_logits_max calculate_predicted_logits calculate_gradients "
    "calculate_cross_entropy_loss prepare_gradient_calculation_operands",
}


def is_global_group(group: Any) -> bool:
    """Whether a group is the one that Megatron's unfused cross-entropy takes."""
    ranks = importlib.import_module("megatron.core.parallel_state")
    return group is None or group is ranks.get_tensor_model_parallel_group(check_initialized=False)


# --- DeepSpeed, 0.19: its package, of the hooks on a model's outputs; the modules of the hooks of ZeRO-3 ---
DEEPSPEED = "deepspeed."
ZERO_MODULES = "deepspeed.runtime.zero", "deepspeed.utils.nvtx"


def is_unit(layer: nn.Module) -> bool:
    """Whether FSDP2 or DeepSpeed's ZeRO-3 gathers the layer's weight, by hooks, for a call of the layer alone."""
    return isinstance(layer, FSDPModule) or hasattr(parameters_of(layer).get("weight"), "ds_id")


# --- transformers, 5.24: the package of ForCausalLMLoss and of its helper; Liger-Kernel, 0.8: that of its forwards ---
TRANSFORMERS, LIGER = {"transformers"}, {"liger_kernel"}


def is_of(packages: set[str], function: Any) -> bool:
    return getattr(function, "__globals__", {}).get("__name__", "").partition(".")[0] in packages


@constant_in_graphs
def is_causal_lm_loss(loss: Any) -> bool:
    both = loss, getattr(loss, "__globals__", {}).get("fixed_cross_entropy", loss)
    return getattr(loss, "__name__", None) == "ForCausalLMLoss" and all(is_of(TRANSFORMERS, each) for each in both)


# --- TRL, 1.16: the module of its autograd function; the module whose functions call it, and its name there ---
TRL_KERNEL, TRL_USER, TRL_FUNCTION = "trl.kernels.chunked_logprob", "trl.trainer.utils", "_ChunkedLogProbFunction"

# --- verl, 0.9.1: the module of its linear_cross_entropy, and those that import it when they are imported; backwards of
# Megatron-core's mappings that sum the gradient of the hidden states over the ranks; what makes an engine's labels ---
VERL_KERNEL = "verl.utils.kernel.linear_cross_entropy"
VERL_USERS = "verl.models.mcore.model_forward_fused", "verl.models.mcore.model_forward_1f1b_overlap"
VERL_SUMMED = "_GatherFromSequenceParallelRegionBackward", "_CopyToModelParallelRegionBackward"
VERL_FSDP = "verl.workers.engine.fsdp.transformer_impl", "FSDPEngineWithLMHead", "prepare_model_inputs"

# --- torchtitan, 0.3.0: the module of a forward that distributes a layer's tensors ---
TORCHTITAN_DISTRIBUTED = "torchtitan.protocols.module"
