"""Who is measured, and how each is called.

A peer is a function `loss(x [N, D], weight [V, D], target [N]) -> scalar`: the mean cross-entropy over the targets
that are not IGNORE_INDEX. The bare matrix products are the one exception: they have no loss, and everybody's time
is measured against theirs.
"""

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

import torch
import torch.nn.functional as F

from . import libraries
from .inputs import IGNORE_INDEX
from .libraries import Unavailable, mean_of

FORWARD, FORWARD_BACKWARD = "forward", "forward_backward"
PASSES = (FORWARD, FORWARD_BACKWARD)  # without gradients, as in evaluation; with dX and dW, as in training

ANY, SCALAR = "any", "scalar"
CPU_AND_CUDA, CUDA = ("cpu", "cuda"), ("cuda",)
ALL = 1 << 40  # a logits_budget that everything fits


@dataclass(frozen=True)
class Peer:
    """One row of the table. `upstream` is the gradient its loss accepts: 'any' per token, or one 'scalar'.

    `build()` returns the loss function; it may import, initialise or compile. It is None for the bare products.
    `devices` are those on which the peer takes part without being named. With `main_grad`, dW is added to an fp32
    `weight.main_grad` that exists before the call.
    """

    name: str
    upstream: str
    devices: tuple
    build: Callable | None
    family: str = "other"  # 'ours', 'bare', 'torch' or 'other'
    label: str = ""
    passes: tuple = PASSES
    main_grad: bool = False

    def __str__(self):
        return self.label or self.name


def registry(strategies):
    """All peers there are, in the order of the table. `strategies` are those of ours: (name, logits_budget in bytes
    or None for the default). Without gradients they are one code, which the first of them measures."""
    peers = []
    for name, budget in strategies:
        upstream, build = _OURS[name]
        passes = (FORWARD_BACKWARD,) if peers else PASSES
        label = f"{name} ({show_budget(budget)})"
        main_grad = name == "ours-main-grad"
        peers.append(Peer(name, upstream, CPU_AND_CUDA, partial(build, budget), "ours", label, passes, main_grad))
    return peers + [
        Peer("bare", ANY, CPU_AND_CUDA, None, "bare"),
        Peer("torch", ANY, CPU_AND_CUDA, lambda: torch_loss, "torch"),
        Peer("torch-lce", ANY, CPU_AND_CUDA, _torch_lce, "torch"),
        Peer("torch-lce-chunked", SCALAR, CPU_AND_CUDA, _torch_lce_chunked, "torch"),
        Peer("torch-compile", ANY, CUDA, _torch_compile, "torch"),
        Peer("megatron", ANY, CUDA, libraries.megatron),
        Peer("megatron-fused", ANY, CUDA, libraries.megatron_fused),
        Peer("liger", SCALAR, CUDA, libraries.liger),
        Peer("liger-fp32", SCALAR, CUDA, libraries.liger_fp32),
        Peer("liger-sm90", SCALAR, CUDA, libraries.liger_sm90),
        Peer("liger-scaled-sm90", ANY, CUDA, libraries.liger_scaled_sm90),
        Peer("cce", ANY, CUDA, partial(libraries.cce, "cce")),
        Peer("cce-exact", ANY, CUDA, partial(libraries.cce, "cce_exact")),
        Peer("quack", SCALAR, CUDA, libraries.quack),
        Peer("quack-chunked", SCALAR, CUDA, libraries.quack_chunked),
    ]


def names():
    return [*_OURS, *(peer.name for peer in registry([]))]


def show_budget(budget):
    """As a person writes it: budget 0, budget 512 MiB, default budget."""
    if budget is None:
        return "default budget"
    if budget >= ALL:
        return "everything saved"
    for unit, size in (("GiB", 2**30), ("MiB", 2**20), ("KiB", 2**10)):
        if budget and budget % size == 0:
            return f"budget {budget // size} {unit}"
    return f"budget {budget}"


def ours(budget, process_group=None, sequence_parallel=False):
    from parallel_lce import linear_cross_entropy

    options = {"process_group": process_group, "sequence_parallel": sequence_parallel}

    def loss(x, weight, target):
        return linear_cross_entropy(x, weight, target, ignore_index=IGNORE_INDEX, logits_budget=budget, **options)

    return loss


def ours_per_token(budget, process_group=None, sequence_parallel=False):
    """Per-token losses averaged outside: the call that may not accumulate gradients in the forward pass."""
    from parallel_lce import linear_cross_entropy

    options = {"ignore_index": IGNORE_INDEX, "reduction": "none", "logits_budget": budget}
    options.update(process_group=process_group, sequence_parallel=sequence_parallel)

    def loss(x, weight, target):
        per_token = linear_cross_entropy(x, weight, target, **options)
        return mean_of(per_token, target)

    return loss


def ours_main_grad(budget, process_group=None, sequence_parallel=False):
    """As the Megatron output layer calls it, for a parameter whose dW is added to an fp32 buffer."""
    from parallel_lce.checks import Arguments
    from parallel_lce.differentiable import token_losses
    from parallel_lce.losses import WeightedLoss
    from parallel_lce.partials import Columns
    from parallel_lce.prepare import prepare
    from parallel_lce.weight_grad import MainGrad

    def loss(x, weight, target):
        arguments = Arguments(
            input=x,
            linear_weight=weight,
            target=target,
            linear_bias=None,
            logit_scale=1.0,
            logit_softcap=None,
            process_group=process_group,
            sequence_parallel=sequence_parallel,
            vocab_start=None,
            vocab_size=None,
            logits_budget=budget,
        )
        buffer = getattr(weight, "main_grad", None)
        main_grad = None if buffer is None else MainGrad(buffer, lambda: None)
        prepared = prepare(arguments, Columns(), main_grad=main_grad)
        per_token = WeightedLoss(prepared.call.target, ignore_index=IGNORE_INDEX, outside_is_nan=False)
        losses = token_losses(prepared.call, *prepared.tensors, per_token, prepared.differentiable)
        return mean_of(losses, target)

    return loss


_OURS = {"ours": (SCALAR, ours), "ours-per-token": (ANY, ours_per_token), "ours-main-grad": (ANY, ours_main_grad)}


def torch_loss(x, weight, target, reduction="mean"):
    """The plain path: logits in the dtype of the input, cross-entropy in float32. Also the yardstick of accuracy."""
    return F.cross_entropy(F.linear(x, weight).float(), target, ignore_index=IGNORE_INDEX, reduction=reduction)


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
    libraries.forget_compiled()
    return torch.compile(torch_loss, dynamic=False)
