"""Who is measured.

A peer is a function `loss(x, weight, target) -> scalar`: the mean cross-entropy over the targets that are not
IGNORE_INDEX, of this rank's hidden states x [N, D] ([N/P, D] under sequence parallelism), its vocabulary shard
weight [V/P, D], and the targets [N] of the whole sequence.

The exception is the GEMM-only baseline: the three matrix products that every loss needs, without a loss. Everybody's
time is measured against it.
"""

import importlib.util
import re
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

from . import libraries, ours
from .libraries import library

FORWARD, FORWARD_BACKWARD = "forward", "forward_backward"
PASSES = (FORWARD, FORWARD_BACKWARD)  # without gradients, as in evaluation; with dX and dW, as in training

ANY, SCALAR = "any", "scalar"
CPU_AND_CUDA, CUDA = ("cpu", "cuda"), ("cuda",)
ONE, RANKS = "one", "ranks"  # one process without a group; a process group, with or without sequence parallelism
BOTH = (ONE, RANKS)

GEMM_ONLY, OVERLAPPED, SAVED = "gemm-only", "gemm-only-overlapped", "ours-per-token@all"
UNITS = {"": 1, "kib": 2**10, "mib": 2**20, "gib": 2**30}
ALL = 1 << 40  # a logits_budget that everything fits


@dataclass(frozen=True)
class Peer:
    """One row of the table."""

    name: str
    upstream: str  # the gradient that its loss accepts: 'any' per token, or one 'scalar'
    devices: tuple[str, ...]  # those on which it is measured without being named
    build: Callable | None  # of a group (None on one GPU) and whether sequence parallel; returns the loss
    family: str = "other"  # 'ours', 'gemm-only' (a GEMM-only baseline) or 'other'
    main_grad: bool = False  # dW is added to an fp32 `weight.main_grad` that exists before the call
    settings: tuple[str, ...] = (ONE,)
    needs: str = ""  # a module that `build` imports
    judged: bool = True  # its answers are those of the problem

    @property
    def missing(self) -> str:
        """Why it cannot run here, or ''."""
        try:
            found = not self.needs or importlib.util.find_spec(self.needs) is not None
        except ImportError:  # of the package that it is a part of
            found = False
        return "" if found else f"no module {self.needs}"


OURS = {  # {kind: (upstream, function of a budget and of what other peers' `build` takes)}
    "ours": (SCALAR, partial(ours.loss, "mean")),
    "ours-per-token": (ANY, partial(ours.loss, "none")),
    "ours-main-grad": (ANY, ours.main_grad),
    **{kind: (ANY, partial(ours.statistics, asked)) for kind, asked in ours.ASKED.items()},
    "ours-replay": (ANY, ours.replay),
}
UNJUDGED = ("ours-masked", "ours-replay")  # kinds that give another answer than the mean cross-entropy
_LIGER = "liger_kernel.transformers.functional", "liger_fused_linear_cross_entropy"
_CCE = "cut_cross_entropy", "linear_cross_entropy"
_QUACK = "quack.linear_cross_entropy", "chunked_linear_cross_entropy"
OTHERS = (
    Peer(GEMM_ONLY, ANY, CPU_AND_CUDA, None, "gemm-only", settings=BOTH),
    Peer(OVERLAPPED, ANY, CPU_AND_CUDA, None, "gemm-only", settings=(RANKS,)),
    Peer("torch", ANY, CPU_AND_CUDA, lambda *_: libraries.torch_loss),
    Peer("torch-lce", ANY, CPU_AND_CUDA, library("torch.nn.functional", "linear_cross_entropy")),
    Peer("torch-lce-chunked", SCALAR, CPU_AND_CUDA, libraries.torch_lce_chunked),
    Peer("torch-compile", ANY, CUDA, libraries.torch_compile),
    Peer("megatron-fused", ANY, CUDA, partial(libraries.megatron, True), settings=BOTH, needs="megatron.core"),
    Peer("megatron", ANY, CUDA, partial(libraries.megatron, False), settings=BOTH, needs="megatron.core"),
    Peer("verl", ANY, CUDA, libraries.verl, settings=BOTH, needs="verl"),
    # LIGER_KERNEL_IMPL in the environment chooses liger's backend, as everywhere in that library.
    Peer("liger", SCALAR, CUDA, library(*_LIGER, reduction="mean"), needs="liger_kernel"),
    Peer("cce", ANY, CUDA, library(*_CCE, impl="cce"), needs="cut_cross_entropy"),  # skips gradients it finds small
    Peer("cce-exact", ANY, CUDA, library(*_CCE, impl="cce_exact"), needs="cut_cross_entropy"),
    # Chunks of 8192 tokens sum the fp32 dW half as often as the default of 4096.
    Peer("quack", SCALAR, CUDA, library(*_QUACK, chunk_size=8192), needs="quack"),
)


def named(name: str, setting: str) -> Peer:
    """The peer of this name, or ValueError. A name of ours may end in a `logits_budget`: ours@512MiB."""
    kind, at, budget = name.partition("@")
    if kind in OURS:
        upstream, build = OURS[kind]
        build = partial(build, parse_budget(budget) if at else None)
        main_grad, judged = kind == "ours-main-grad", kind not in UNJUDGED
        return Peer(name, upstream, CPU_AND_CUDA, build, "ours", main_grad, BOTH, judged=judged)
    known = {peer.name: peer for peer in others(setting)}
    if name not in known:
        raise ValueError(f"no such peer: {name}; known: {', '.join([*OURS, *known])}")
    return known[name]


def others(setting: str) -> list[Peer]:
    """All but ours."""
    return [peer for peer in OTHERS if setting in peer.settings]


def parse_budget(text: str) -> int:
    """'512MiB', '0', '1048576' -> bytes; 'all' -> more than anything needs."""
    if text.lower() == "all":
        return ALL
    match = re.fullmatch(r"(\d+)\s*([a-z]*)", text.lower())
    if match is None or match[2] not in UNITS:
        raise ValueError(f"expected bytes, a number with KiB, MiB or GiB, or all, got {text!r}")
    return int(match[1]) * UNITS[match[2]]
