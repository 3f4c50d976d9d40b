"""Other libraries, called through their public functions and imported only here.

Each function returns a loss as peers.py describes it, or raises what the import raised.
"""

import inspect
import os

import torch
import torch.distributed as dist
import torch.nn.functional as F

from .inputs import IGNORE_INDEX


class Unavailable(Exception):
    """A peer that this machine cannot run; the message says why."""


def forget_compiled():
    """A shape measured before must not turn this one into a dynamic shape, in whatever calls torch.compile."""
    torch._dynamo.reset()


def mean_of(per_token, target):
    """The mean of per-token losses [N] that are 0 where the target is IGNORE_INDEX."""
    return per_token.sum() / (target != IGNORE_INDEX).sum()


def _megatron_loss(cross_entropy, project=F.linear):
    """`cross_entropy(logits [N, 1, V], labels [N, 1]) -> [N, 1]` behind the output layer, `project(x, weight)`.

    Megatron knows no ignore_index: its training loop multiplies per-token losses by a loss mask, and so do we.
    """

    def loss(x, weight, target):
        mask = target != IGNORE_INDEX
        labels = torch.where(mask, target, 0)
        per_token = cross_entropy(project(x, weight).unsqueeze(1), labels.unsqueeze(1)).squeeze(1)
        return mean_of(per_token * mask, target)

    return loss


def _megatron_group():
    """Megatron's tensor-parallel group; where nothing is initialised yet, that of this one process."""
    from megatron.core import parallel_state

    if not dist.is_initialized():
        backend = "nccl" if torch.cuda.is_available() else "gloo"
        dist.init_process_group(backend, store=dist.HashStore(), rank=0, world_size=1)
    if not parallel_state.model_parallel_is_initialized():
        parallel_state.initialize_model_parallel()
    return parallel_state.get_tensor_model_parallel_group()


def megatron():
    from megatron.core.tensor_parallel import vocab_parallel_cross_entropy

    _megatron_group()
    return _megatron_loss(vocab_parallel_cross_entropy)


def megatron_fused():
    from megatron.core.fusions.fused_cross_entropy import fused_vocab_parallel_cross_entropy

    forget_compiled()
    group = _megatron_group()
    return _megatron_loss(lambda logits, labels: fused_vocab_parallel_cross_entropy(logits, labels, group))


def megatron_tensor_parallel(fused, group, sequence_parallel):
    """The output layer's own autograd function, which overlaps dX's reduction with dW, and the native or fused loss."""
    from megatron.core import parallel_state
    from megatron.core.fusions.fused_cross_entropy import fused_vocab_parallel_cross_entropy
    from megatron.core.tensor_parallel import vocab_parallel_cross_entropy
    from megatron.core.tensor_parallel.layers import linear_with_grad_accumulation_and_async_allreduce

    # The native loss asks for the group by this name, and gathered hidden states live in this buffer.
    parallel_state._TENSOR_MODEL_PARALLEL_GROUP = group
    parallel_state._GLOBAL_MEMORY_BUFFER = None
    parallel_state._set_global_memory_buffer()
    options = {
        "bias": None,
        "gradient_accumulation_fusion": False,
        "allreduce_dgrad": not sequence_parallel and dist.get_world_size(group) > 1,
        "sequence_parallel": sequence_parallel,
        "tp_group": group,
    }

    def project(x, weight):
        return linear_with_grad_accumulation_and_async_allreduce(x, weight, **options)

    def cross_entropy(logits, labels):
        if fused:
            return fused_vocab_parallel_cross_entropy(logits, labels, group)
        return vocab_parallel_cross_entropy(logits, labels)

    return _megatron_loss(cross_entropy, project)


def loss_parallel(group, sequence_parallel):
    """PyTorch's own: DTensors, and a cross-entropy of logits that stay sharded over the vocabulary."""
    from torch.distributed.device_mesh import DeviceMesh
    from torch.distributed.tensor import DTensor, Replicate, Shard
    from torch.distributed.tensor.parallel import loss_parallel

    kind = "cuda" if dist.get_backend(group) == "nccl" else "cpu"
    mesh = DeviceMesh.from_group(group, kind)

    def loss(x, weight, target):
        hidden = DTensor.from_local(x, mesh, [Shard(0) if sequence_parallel else Replicate()], run_check=False)
        hidden = hidden.redistribute(mesh, [Replicate()])
        shard = DTensor.from_local(weight, mesh, [Shard(0)], run_check=False)
        logits = F.linear(hidden, shard).float()
        return F.cross_entropy(logits, target, ignore_index=IGNORE_INDEX).to_local()

    loss.around = loss_parallel  # both passes have to run inside
    return loss


def verl(group, sequence_parallel):
    """Its kernel knows tensor parallelism alone and leaves dX to be summed: around it, what Megatron's regions do."""
    from verl.utils.kernel.linear_cross_entropy import LinearCrossEntropy

    options = {"reduction": "none", "temperature": 1.0, "dist_process_group": group}
    order = list(inspect.signature(LinearCrossEntropy.forward).parameters)[4:]  # after ctx, hidden, weight and labels

    def loss(x, weight, target):
        hidden = _Region.apply(x, group, sequence_parallel)
        mask = target != IGNORE_INDEX
        labels = torch.where(mask, target, 0)
        log_probs, _ = LinearCrossEntropy.apply(hidden, weight, labels, *(options[name] for name in order))
        return mean_of(-log_probs * mask, target)

    return loss


class _Region(torch.autograd.Function):
    """Hidden states in the layout of tensor parallelism, gathered if they are sharded; backward sums their gradient."""

    @staticmethod
    def forward(ctx, x, group, sequence_parallel):
        ctx.group, ctx.sequence_parallel = group, sequence_parallel
        if not sequence_parallel:
            return x.view_as(x)
        parts = [torch.empty_like(x) for _ in range(dist.get_world_size(group))]
        dist.all_gather(parts, x, group=group)
        return torch.cat(parts)

    @staticmethod
    def backward(ctx, gradient):
        total = gradient.contiguous()
        if not ctx.sequence_parallel:
            dist.all_reduce(total, group=ctx.group)
            return total, None, None
        parts = list(total.chunk(dist.get_world_size(ctx.group)))
        mine = torch.empty_like(parts[0])
        dist.reduce_scatter(mine, parts, group=ctx.group)
        return mine, None, None


def liger():
    """Its defaults. LIGER_KERNEL_IMPL in the environment chooses its backend, as everywhere in that library."""
    from liger_kernel.transformers.functional import liger_fused_linear_cross_entropy

    def loss(x, weight, target):
        return liger_fused_linear_cross_entropy(x, weight, target, ignore_index=IGNORE_INDEX, reduction="mean")

    return loss


def liger_fp32():
    """dW summed in fp32 and blocks of eight times the tokens, so that fewer are summed: more memory than its
    defaults, and faster where V is much larger than N."""
    from liger_kernel.transformers.functional import liger_fused_linear_cross_entropy

    options = {"reduction": "mean", "accum_dtype": torch.float32, "chunk_mem_const": 8}

    def loss(x, weight, target):
        return liger_fused_linear_cross_entropy(x, weight, target, ignore_index=IGNORE_INDEX, **options)

    return loss


def liger_sm90():
    """Needs N in multiples of 128 and V in multiples of 256."""
    from liger_kernel.ops.cutedsl.ops.fused_linear_cross_entropy_sm90 import liger_fused_linear_cross_entropy_sm90

    def loss(x, weight, target):
        return liger_fused_linear_cross_entropy_sm90(x, weight, target, IGNORE_INDEX, "mean")

    return loss


def liger_scaled_sm90():
    """Recomputes the logits in backward."""
    from liger_kernel.ops.cutedsl.ops.fused_scaled_cross_entropy_sm90 import LigerFusedScaledCrossEntropySM90Function

    os.environ.setdefault("LIGER_SCALED_CE_SM90_VALIDATE_TARGETS", "0")  # its check of targets waits for the device
    temperature = 1.0

    def loss(x, weight, target):
        per_token = LigerFusedScaledCrossEntropySM90Function.apply(x, weight, target, temperature, IGNORE_INDEX)
        return mean_of(per_token, target)

    return loss


def cce(impl):
    """'cce' skips gradients it takes for negligible; 'cce_exact' does not, and sums in fp32."""
    from cut_cross_entropy import linear_cross_entropy

    forget_compiled()

    def loss(x, weight, target):
        return linear_cross_entropy(x, weight, target, ignore_index=IGNORE_INDEX, impl=impl)

    return loss


# Of quack's calls, in tokens: half as many sums of the fp32 dW as with its default of 4096.
_QUACK_CHUNK = 8192


def quack():
    """Chooses its scaled-exp pipeline by itself where it can."""
    from quack.linear_cross_entropy import chunked_linear_cross_entropy

    def loss(x, weight, target):
        return chunked_linear_cross_entropy(x, weight, target, chunk_size=_QUACK_CHUNK, ignore_index=IGNORE_INDEX)

    return loss


def quack_chunked():
    """Without that pipeline: logits of a chunk and a kernel that makes their gradient in place."""
    from quack.linear_cross_entropy import chunked_linear_cross_entropy

    options = {"chunk_size": _QUACK_CHUNK, "ignore_index": IGNORE_INDEX, "use_scaled_exp": False}

    def loss(x, weight, target):
        return chunked_linear_cross_entropy(x, weight, target, **options)

    return loss
