"""The losses of PyTorch and of other libraries, called through their public functions and imported only here.

Each `build` function returns a loss as peers.py describes it, or raises the error of its import. `group` is None on one
GPU.
"""

import importlib
from functools import partial
from types import SimpleNamespace

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard

from .problem import IGNORE_INDEX


def liger(group, sequence_parallel):
    """Its loss in chunks of tokens. The environment variable LIGER_KERNEL_IMPL chooses its backend."""
    functions = importlib.import_module("liger_kernel.transformers.functional")
    return partial(functions.liger_fused_linear_cross_entropy, ignore_index=IGNORE_INDEX, reduction="mean")


def liger_scaled(group, sequence_parallel):
    """Its loss per token. On Hopper it needs the packages nvidia-cutlass-dsl and apache-tvm-ffi."""
    function = importlib.import_module("liger_kernel.ops").LigerFusedLinearScaledCrossEntropyFunction
    return lambda x, weight, target: mean_of(function.apply(x, weight, target, 1.0, IGNORE_INDEX), target)


def cut_cross_entropy(group, sequence_parallel):
    """With its own filter of gradients."""
    loss = importlib.import_module("cut_cross_entropy").linear_cross_entropy
    per_token = partial(loss, ignore_index=IGNORE_INDEX, reduction="none")
    return lambda x, weight, target: mean_of(per_token(x, weight, target), target)


def quack(group, sequence_parallel):
    """With chunks of 8192 tokens the fp32 dW is added to half as often as with the default of 4096."""
    module = importlib.import_module("quack.linear_cross_entropy")
    return partial(module.chunked_linear_cross_entropy, ignore_index=IGNORE_INDEX, chunk_size=8192)


def mean_of(per_token, target):
    """The mean of per-token losses [N] that are 0 where the target is IGNORE_INDEX."""
    return per_token.sum() / (target != IGNORE_INDEX).sum()


def torch_loss(x, weight, target):
    """Logits in the dtype of the input, cross-entropy in float32."""
    return F.cross_entropy(F.linear(x, weight).float(), target, ignore_index=IGNORE_INDEX)


def with_teacher(loss):
    """`loss(x, weight, target, hidden states, weight)` with those of a teacher, which the first call makes."""
    teacher = []

    def call(x, weight, target):
        if not teacher:
            generator = torch.Generator(x.device).manual_seed(1000)
            options = {"dtype": x.dtype, "device": x.device, "generator": generator}
            hidden, of_teacher = torch.randn(x.shape, **options), torch.randn(weight.shape, **options)
            teacher.extend((hidden, of_teacher.mul_(weight.shape[1] ** -0.5)))
        return loss(x, weight, target, *teacher)

    return call


def distillation(group, sequence_parallel):
    """A dense divergence, as trainers form it: logits in the dtype of the input, softmax in float32."""

    def loss(x, weight, target, hidden, of_teacher):
        with torch.no_grad():
            log_q = F.linear(hidden, of_teacher).float().log_softmax(-1)
        log_p = F.linear(x, weight).float().log_softmax(-1)
        divergences = F.kl_div(log_p, log_q, reduction="none", log_target=True).sum(-1)
        return mean_of(divergences.where(target != IGNORE_INDEX, 0), target)

    return with_teacher(loss)


def add_weight_gradient(x, gradient, main_grad):
    """In place of Apex, which is seldom installed: the product of its kernel, in cuBLAS."""
    torch.addmm(main_grad, gradient.t(), x, out_dtype=torch.float32, out=main_grad)


def megatron(fused, main_grad, group, sequence_parallel):
    """Megatron's output layer, which overlaps the reduction of dX with dW, and its native or `fused` loss. With
    `main_grad` dW is added to the weight's, as with gradient_accumulation_fusion."""
    from megatron.core import parallel_state
    from megatron.core.fusions.fused_cross_entropy import fused_vocab_parallel_cross_entropy
    from megatron.core.tensor_parallel import layers, vocab_parallel_cross_entropy

    if group is None and not dist.is_initialized():
        backend = "nccl" if torch.cuda.is_available() else "gloo"
        dist.init_process_group(backend, init_method="tcp://127.0.0.1:0", rank=0, world_size=1)
    group = group or dist.group.WORLD
    # The native loss reads the group from this global, and hidden states are gathered into this buffer.
    parallel_state._TENSOR_MODEL_PARALLEL_GROUP = group
    parallel_state._GLOBAL_MEMORY_BUFFER = None
    parallel_state._set_global_memory_buffer()
    if main_grad and not layers._grad_accum_fusion_available:
        layers.fused_weight_gradient_mlp_cuda = SimpleNamespace(wgrad_gemm_accum_fp32=add_weight_gradient)
    options = {
        "bias": None,
        "gradient_accumulation_fusion": main_grad,
        "allreduce_dgrad": not sequence_parallel and dist.get_world_size(group) > 1,
        "sequence_parallel": sequence_parallel,
        "tp_group": group,
    }

    def loss(x, weight, target):
        """Megatron's losses have no ignore_index. As in its training loop, losses are multiplied by a mask."""
        mask = target != IGNORE_INDEX
        labels = torch.where(mask, target, 0).unsqueeze(1)
        logits = layers.linear_with_grad_accumulation_and_async_allreduce(x, weight, **options).unsqueeze(1)
        if fused:
            per_token = fused_vocab_parallel_cross_entropy(logits, labels, group)
        else:
            per_token = vocab_parallel_cross_entropy(logits, labels)
        return mean_of(per_token.squeeze(1) * mask, target)

    return loss


def verl(group, sequence_parallel):
    """verl's kernel takes the hidden states of the whole sequence, and does not sum dX over the ranks. The backward of
    the gather does, and scatters it under sequence parallelism."""
    from verl.utils.kernel.linear_cross_entropy import LinearCrossEntropy

    mesh = group and DeviceMesh.from_group(group, "cuda" if dist.get_backend(group) == "nccl" else "cpu")
    placements = [Shard(0) if sequence_parallel else Replicate()]

    def loss(x, weight, target):
        if mesh:
            whole = DTensor.from_local(x, mesh, placements, run_check=False).redistribute(placements=[Replicate()])
            x = whole.to_local(grad_placements=[Partial()])
        mask = target != IGNORE_INDEX
        labels = torch.where(mask, target, 0)
        log_probs, _ = LinearCrossEntropy.apply(x, weight, labels, 1.0, "none", group)  # 1.0: the temperature
        return mean_of(-log_probs * mask, target)

    return loss
