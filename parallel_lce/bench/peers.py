"""Who is measured, and how each is called.

A peer is a function `loss(x [N, D], weight [V, D], target [N]) -> scalar`: the mean cross-entropy over the targets
that are not IGNORE_INDEX. The bare matrix products are the one exception: they have no loss, and everybody's time
is measured against theirs.

Other libraries are called through their public functions with their defaults, and imported only here.
"""

from dataclasses import dataclass
from functools import partial
from typing import Callable

import torch
import torch.distributed as dist
import torch.nn.functional as F

from .inputs import IGNORE_INDEX

ANY, SCALAR = "any", "scalar"
CPU_AND_CUDA, CUDA = ("cpu", "cuda"), ("cuda",)


class Unavailable(Exception):
    """A peer that this machine cannot run; the message says why."""


@dataclass(frozen=True)
class Peer:
    """One row of the table. `upstream` is the gradient its loss accepts: 'any' per token, or one 'scalar'.

    `build()` returns the loss function; it may import, initialise or compile. It is None for the bare products.
    `devices` are those on which the peer takes part without being named.
    """

    name: str
    upstream: str
    devices: tuple
    build: Callable | None
    family: str = "other"  # 'ours', 'bare', 'torch' or 'other'
    label: str = ""

    def __str__(self):
        return self.label or self.name


def registry(budgets):
    """All peers there are, in the order of the table; `budgets` are ours, in bytes per rank or None for the default."""
    peers = []
    for budget in budgets:
        for name, upstream, build in (("ours", SCALAR, _ours), ("ours-per-token", ANY, _ours_per_token)):
            label = f"{name} ({show_budget(budget)})"
            peers.append(Peer(name, upstream, CPU_AND_CUDA, partial(build, budget), "ours", label))
    return peers + [
        Peer("bare", ANY, CPU_AND_CUDA, None, "bare"),
        Peer("torch", ANY, CPU_AND_CUDA, lambda: torch_loss, "torch"),
        Peer("torch-lce", ANY, CPU_AND_CUDA, _torch_lce, "torch"),
        Peer("torch-lce-chunked", SCALAR, CPU_AND_CUDA, _torch_lce_chunked, "torch"),
        Peer("torch-compile", ANY, CUDA, _torch_compile, "torch"),
        Peer("megatron", ANY, CUDA, _megatron),
        Peer("megatron-fused", ANY, CUDA, _megatron_fused),
        Peer("liger", SCALAR, CUDA, _liger),
        Peer("cce", ANY, CUDA, partial(_cce, "cce")),
        Peer("cce-exact", ANY, CUDA, partial(_cce, "cce_exact")),
        Peer("quack", SCALAR, CUDA, _quack),
        Peer("quack-chunked", SCALAR, CUDA, _quack_chunked),
    ]


def show_budget(budget):
    """As a person writes it: budget 0, budget 512 MiB, default budget."""
    if budget is None:
        return "default budget"
    for unit, size in (("GiB", 2**30), ("MiB", 2**20), ("KiB", 2**10)):
        if budget and budget % size == 0:
            return f"budget {budget // size} {unit}"
    return f"budget {budget}"


def _ours(budget):
    from parallel_lce import linear_cross_entropy

    def loss(x, weight, target):
        return linear_cross_entropy(x, weight, target, ignore_index=IGNORE_INDEX, logits_budget=budget)

    return loss


def _ours_per_token(budget):
    """Per-token losses averaged outside: the call that may not accumulate gradients in the forward pass."""
    from parallel_lce import linear_cross_entropy

    def loss(x, weight, target):
        per_token = linear_cross_entropy(
            x, weight, target, ignore_index=IGNORE_INDEX, reduction="none", logits_budget=budget
        )
        return per_token.sum() / (target != IGNORE_INDEX).sum()

    return loss


def torch_loss(x, weight, target):
    """The plain path: logits in the dtype of the input, cross-entropy in float32. Also the yardstick of accuracy."""
    return F.cross_entropy(F.linear(x, weight).float(), target, ignore_index=IGNORE_INDEX)


def _torch_lce():
    if not hasattr(F, "linear_cross_entropy"):
        raise Unavailable(f"torch >= 2.13 has F.linear_cross_entropy, this is {torch.__version__}")

    def loss(x, weight, target):
        return F.linear_cross_entropy(x, weight, target, ignore_index=IGNORE_INDEX)

    return loss


def _torch_lce_chunked():
    _torch_lce()  # raises where torch is too old
    options = torch.nn.LinearCrossEntropyOptions()

    def loss(x, weight, target):
        return F.linear_cross_entropy(x, weight, target, ignore_index=IGNORE_INDEX, options=options)

    return loss


def _torch_compile():
    torch._dynamo.reset()  # a shape measured before must not turn this one into a dynamic shape
    return torch.compile(torch_loss, dynamic=False)


def _megatron_loss(cross_entropy):
    """`cross_entropy(logits [N, 1, V], labels [N, 1]) -> [N, 1]` behind the output layer's matrix product.

    Megatron knows no ignore_index: its training loop multiplies per-token losses by a loss mask, and so do we.
    """

    def loss(x, weight, target):
        mask = target != IGNORE_INDEX
        labels = torch.where(mask, target, 0)
        per_token = cross_entropy(F.linear(x, weight).unsqueeze(1), labels.unsqueeze(1)).squeeze(1)
        return (per_token * mask).sum() / mask.sum()

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


def _megatron():
    from megatron.core.tensor_parallel import vocab_parallel_cross_entropy

    _megatron_group()
    return _megatron_loss(vocab_parallel_cross_entropy)


def _megatron_fused():
    from megatron.core.fusions.fused_cross_entropy import fused_vocab_parallel_cross_entropy

    group = _megatron_group()
    return _megatron_loss(lambda logits, labels: fused_vocab_parallel_cross_entropy(logits, labels, group))


def _liger():
    """LIGER_KERNEL_IMPL in the environment chooses its backend, as everywhere in that library."""
    from liger_kernel.transformers.functional import liger_fused_linear_cross_entropy

    def loss(x, weight, target):
        return liger_fused_linear_cross_entropy(x, weight, target, ignore_index=IGNORE_INDEX, reduction="mean")

    return loss


def _cce(impl):
    """'cce' skips gradients it takes for negligible; 'cce_exact' does not."""
    from cut_cross_entropy import linear_cross_entropy

    def loss(x, weight, target):
        return linear_cross_entropy(x, weight, target, ignore_index=IGNORE_INDEX, impl=impl)

    return loss


def _quack():
    from quack.linear_cross_entropy import chunked_linear_cross_entropy

    def loss(x, weight, target):
        return chunked_linear_cross_entropy(x, weight, target, ignore_index=IGNORE_INDEX)

    return loss


def _quack_chunked():
    """Without the scaled-exp pipeline that newer versions choose by themselves where they can."""
    from quack.linear_cross_entropy import chunked_linear_cross_entropy

    def loss(x, weight, target):
        return chunked_linear_cross_entropy(x, weight, target, ignore_index=IGNORE_INDEX, use_scaled_exp=False)

    return loss
