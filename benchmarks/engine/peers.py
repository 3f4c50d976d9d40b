"""The peers: losses that are measured, and the GEMM-only baseline.

A loss is a function `loss(x, weight, target) -> scalar`, the mean cross-entropy over the targets that are not
IGNORE_INDEX. x are this rank's hidden states [N, D] ([N/P, D] under sequence parallelism), weight is its vocabulary
shard [V/P, D], and target has the ids [N] of the whole sequence.

The GEMM-only baseline is the three matrix products that every loss needs, without a loss. Speeds are relative to it.
"""

import importlib.util
import re
from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import dataclass
from functools import partial

from torch.distributed.tensor.parallel import loss_parallel

from . import libraries, ours
from .libraries import library

FORWARD, FORWARD_BACKWARD = "forward", "forward_backward"
PASSES = (FORWARD, FORWARD_BACKWARD)  # FORWARD: without gradients; FORWARD_BACKWARD: with dX and dW

ANY, SCALAR = "any", "scalar"
CPU_AND_CUDA, CUDA = ("cpu", "cuda"), ("cuda",)
ONE, RANKS = "one", "ranks"  # one process without a group; a process group, with or without sequence parallelism
BOTH = (ONE, RANKS)

GEMM_ONLY, OVERLAPPED, SAVED = "gemm-only", "gemm-only-overlapped", "ours-per-token@all"
UNITS = {"": 1, "kib": 2**10, "mib": 2**20, "gib": 2**30}
ALL = 1 << 40  # a logits_budget that holds all exponentials


@dataclass(frozen=True)
class Peer:
    """One row of the table."""

    name: str
    upstream: str  # the upstream gradient that its loss accepts: 'any' per token, or one 'scalar'
    devices: tuple[str, ...]  # devices on which it is measured by default
    build: Callable | None  # build(group, sequence_parallel) returns the loss; group is None on one GPU
    family: str = "other"  # 'ours', 'gemm-only' (a GEMM-only baseline) or 'other'
    main_grad: bool = False  # dW is added to an fp32 `weight.main_grad` that exists before the call
    settings: tuple[str, ...] = (ONE,)
    needs: str = ""  # the module that `build` imports
    context: Callable = nullcontext  # in which both passes run
    judged: bool = True  # its loss is the mean cross-entropy, so that its errors can be checked

    @property
    def missing(self) -> str:
        """The reason why it cannot run in this environment, or ''."""
        try:
            exists = not self.needs or importlib.util.find_spec(self.needs) is not None
        except ImportError:  # the parent package is missing
            exists = False
        return "" if exists else f"no {self.needs}"


OURS = {  # {kind: (upstream, function(budget, group, sequence_parallel) that returns the loss)}
    "ours": (SCALAR, partial(ours.loss, "mean")),
    "ours-per-token": (ANY, partial(ours.loss, "none")),
    "ours-main-grad": (ANY, ours.main_grad),
    **{kind: (ANY, partial(ours.statistics, asked)) for kind, asked in ours.ASKED.items()},
    "ours-replay": (ANY, ours.replay),
    "ours-style": (SCALAR, ours.style),
    "ours-torchtitan": (SCALAR, ours.torchtitan),
}
DOORS = {"ours-style": "", "ours-torchtitan": "torchtitan"}  # kinds that run over ranks alone: what `build` imports
UNJUDGED = ("ours-masked", "ours-replay")  # kinds whose loss is not the mean cross-entropy
_LIGER = "liger_kernel.transformers.functional", "liger_fused_linear_cross_entropy"
_CCE = "cut_cross_entropy", "linear_cross_entropy"
_QUACK = "quack.linear_cross_entropy", "chunked_linear_cross_entropy"
OTHERS = (
    Peer(GEMM_ONLY, ANY, CPU_AND_CUDA, None, "gemm-only", settings=BOTH),
    Peer(OVERLAPPED, ANY, CPU_AND_CUDA, None, "gemm-only", settings=(RANKS,)),
    Peer("torch", ANY, CPU_AND_CUDA, lambda *_: libraries.torch_loss),
    Peer("torch-compile", ANY, CUDA, libraries.torch_compile),
    *(
        Peer(
            name + suffix,
            ANY,
            CUDA,
            partial(libraries.megatron, name == "megatron-fused", main_grad=bool(suffix)),
            main_grad=bool(suffix),
            settings=BOTH,
            needs="megatron.core",
        )
        for suffix in ("", "-main-grad")
        for name in ("megatron-fused", "megatron")
    ),
    Peer(
        "torch-loss-parallel",
        ANY,
        CPU_AND_CUDA,
        libraries.torch_loss_parallel,
        settings=(RANKS,),
        context=loss_parallel,
    ),
    Peer("torchtitan", SCALAR, CUDA, partial(libraries.torchtitan, None), settings=(RANKS,), needs="torchtitan"),
    Peer("verl", ANY, CUDA, libraries.verl, settings=BOTH, needs="verl"),
    # The environment variable LIGER_KERNEL_IMPL chooses liger's backend.
    Peer("liger", SCALAR, CUDA, library(*_LIGER, reduction="mean"), needs="liger_kernel"),
    Peer("cce", ANY, CUDA, library(*_CCE, impl="cce"), needs="cut_cross_entropy"),  # skips small gradients
    Peer("cce-exact", ANY, CUDA, library(*_CCE, impl="cce_exact"), needs="cut_cross_entropy"),
    # With chunks of 8192 tokens the fp32 dW is added to half as often as with the default of 4096.
    Peer("quack", SCALAR, CUDA, library(*_QUACK, chunk_size=8192), needs="quack"),
)


def named(name: str, setting: str) -> Peer:
    """The peer of this name. A name of ours may end in a `logits_budget`: ours@512MiB. An unknown name: ValueError."""
    kind, at, budget = name.partition("@")
    known = {peer.name: peer for peer in others(setting)}
    of_ours = [kind for kind in OURS if setting == RANKS or kind not in DOORS]
    if kind in of_ours:
        upstream, build = OURS[kind]
        build = partial(build, parse_budget(budget) if at else None)
        main_grad, judged = kind == "ours-main-grad", kind not in UNJUDGED
        needs = DOORS.get(kind, "")
        return Peer(name, upstream, CPU_AND_CUDA, build, "ours", main_grad, BOTH, needs, judged=judged)
    if name not in known:
        raise ValueError(f"no such peer: {name}; known: {', '.join([*of_ours, *known])}")
    return known[name]


def others(setting: str) -> list[Peer]:
    """All peers except those of parallel_lce."""
    return [peer for peer in OTHERS if setting in peer.settings]


def parse_budget(text: str) -> int:
    """'512MiB', '0', '1048576' -> bytes; 'all' -> `ALL`."""
    if text.lower() == "all":
        return ALL
    match = re.fullmatch(r"(\d+)\s*([a-z]*)", text.lower())
    if match is None or match[2] not in UNITS:
        raise ValueError(f"expected bytes, a number with KiB, MiB or GiB, or all, got {text!r}")
    return int(match[1]) * UNITS[match[2]]
