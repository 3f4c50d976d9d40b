"""One configuration on one rank: the package's results and gradients, of its part of the tokens and its shard."""

from __future__ import annotations

from contextlib import ExitStack, nullcontext
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor
from torch.autograd.graph import save_on_cpu, saved_tensors_hooks
from torch.utils.checkpoint import checkpoint

import parallel_lce
from cases import DTYPES
from fuzz_draw import FIELDS, Configuration
from fuzz_values import Whole, laid, make
from parallel_lce.partials import accumulation_dtype
from tools import chosen_backend, debug_mode, shrunk
from world import Member


class Wrong(AssertionError):
    """A result that no number need be compared to see is wrong."""


def execute(member: Member, c: Configuration, backend: str) -> dict[str, Tensor]:
    """Results by name, gradients as ``d<name>``; those of a second walk through the graph end in `` again``."""
    with ExitStack() as stack:
        stack.enter_context(chosen_backend(backend))
        stack.enter_context(shrunk(c.block_bytes, c.tile))
        if c.debug:
            stack.enter_context(debug_mode())
        found = _once(member, c)
        # The second run of a kind is recorded, the third one replayed.
        for _ in range(2 * c.repeat):
            again = _once(member, c)
            for name, value in found.items():
                if not same_bits(value, again[name]):
                    raise Wrong(f"bits: {name} differs from run to run")
    return found


def same_bits(a: Tensor, b: Tensor) -> bool:
    if a.shape != b.shape or a.dtype != b.dtype:
        return False
    bits = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}[a.dtype.itemsize]
    return torch.equal(a.view(bits), b.view(bits))


def real_rows(c: Configuration, rank: int) -> int:
    """Rows of a rank's shard that are no padding."""
    start, rows = c.shards[rank]
    return max(0, min(rows, c.V - start))


@dataclass
class _Arguments:
    leaves: dict[str, Tensor]
    target: Tensor | None
    options: dict
    upstream: dict[str, Tensor]


def _arguments(member: Member, c: Configuration, whole: Whole) -> _Arguments:
    (start, rows), real = c.shards[member.rank], real_rows(c, member.rank)

    def shard(value: Tensor) -> Tensor:
        # Padding must never matter.
        padded = value.new_full((rows, *value.shape[1:]), torch.nan)
        padded[:real] = value[start : start + real]
        return padded

    if c.kind == "logits":
        tensors = {"input": whole.logits[..., start : start + rows]}
    else:
        parts = c.ranks if c.sequence_parallel else 1
        x = whole.x.chunk(parts)[member.rank] if parts > 1 else whole.x
        tensors = {"input": x, "weight": shard(whole.weight)}
        tensors |= {} if whole.bias is None else {"bias": shard(whole.bias)}
    tensors |= {} if whole.token_weight is None else {"token_weight": whole.token_weight}
    layouts = dict(zip(("input", "weight", "bias", "target", "token_weight"), c.layouts))
    leaves = {}
    for name, value in tensors.items():
        leaves[name] = laid(value.to(member.device), layouts[name]).detach()
        learns = c.weight_learns if name == "token_weight" else name not in c.frozen
        leaves[name].requires_grad_(learns and c.mode == "train")
    target = None if whole.target is None else laid(whole.target.to(member.device), layouts["target"])
    upstream = {name: value.to(member.device) for name, value in whole.upstream.items()}
    return _Arguments(leaves, target, _options(member, c), upstream)


def _options(member: Member, c: Configuration) -> dict:
    group = member.group if c.ranks > 1 or c.group_given else None
    if c.kind == "logits":
        return {"label_smoothing": _number(c, c.label_smoothing), "tp_group": group}
    start, _ = c.shards[member.rank]
    wide = accumulation_dtype(DTYPES[c.computed])
    reduce = {"": None, "wide": wide, "same": DTYPES[c.computed]}[c.reduce_dtype]
    options = {
        "logit_scale": c.scale,
        "logit_softcap": c.softcap,
        "vocab_start": start if c.starts_given else None,
        "vocab_size": c.V if c.size_given else None,
        "logits_budget": c.budget,
    }
    if c.kind == "loss":
        options |= {"ignore_index": c.ignore_index, "label_smoothing": c.label_smoothing, "z_loss": c.z_loss}
    options = {name: _number(c, value) for name, value in options.items()}
    if c.kind == "loss":
        options["reduction"] = c.reduction
    options |= {name: True for name in c.asked}
    return options | {"process_group": group, "sequence_parallel": c.sequence_parallel, "reduce_dtype": reduce}


def _number(c: Configuration, value):
    """The same number of NumPy's, in the smallest of two types that hold it."""
    if not c.numpy or value is None:
        return value
    if isinstance(value, int):
        return np.int32(value) if -(2**31) <= value < 2**31 else np.int64(value)
    return np.float32(value) if float(np.float32(value)) == value else np.float64(value)


def _call(c: Configuration, a: _Arguments, tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    """What is returned, by name."""
    if c.kind == "logits":
        return {"loss": parallel_lce.vocab_parallel_cross_entropy(tensors["input"], a.target, **a.options)}
    positional = tensors["input"], tensors["weight"], a.target
    options = a.options | {"linear_bias": tensors.get("bias")}
    if c.kind == "loss":
        options["token_weight"] = tensors.get("token_weight")
        return {"loss": parallel_lce.linear_cross_entropy(*positional, **options)}
    found = parallel_lce.token_statistics(*positional, **options)
    return {name: value for name, value in vars(found).items() if value is not None}


def _once(member: Member, c: Configuration) -> dict[str, Tensor]:
    a = _arguments(member, c, make(c))
    before = {name: value.detach().clone() for name, value in a.leaves.items()}
    modes = {"train": nullcontext, "no_grad": torch.no_grad, "inference": torch.inference_mode}
    casting = nullcontext()
    if c.autocast:
        casting = torch.autocast(member.device.type, dtype=DTYPES[c.autocast])
    with modes[c.mode](), casting, _saving(c):
        results = _forward(c, a)
    found = {name: value.detach().cpu() for name, value in results.items()}
    if any(value.requires_grad for value in a.leaves.values()):
        found |= _gradients(member, c, a, results)
    for name, value in before.items():
        if not same_bits(value, a.leaves[name].detach()):
            raise Wrong(f"{name} was written to")
    return found


def _gapped(tensor: Tensor) -> Tensor:
    wide = tensor.new_empty(*tensor.shape, 2)
    wide[..., 0] = tensor
    return wide[..., 0]


def _transposed(tensor: Tensor) -> Tensor:
    return tensor.t().contiguous().t() if tensor.dim() == 2 else tensor


def _saving(c: Configuration):
    if c.mode != "train":
        return nullcontext()
    if c.walk == "save_on_cpu":
        return save_on_cpu()
    if c.walk == "transposed hooks":
        return saved_tensors_hooks(lambda tensor: tensor.detach().clone(), _transposed)
    if c.walk in ("gapped hooks", "twice under hooks"):
        return saved_tensors_hooks(lambda tensor: tensor.detach().clone(), _gapped)
    return nullcontext()


def _forward(c: Configuration, a: _Arguments) -> dict[str, Tensor]:
    if "checkpoint" not in c.walk or not any(leaf.requires_grad for leaf in a.leaves.values()):
        return _call(c, a, a.leaves)
    names: list[str] = []

    def body(*values: Tensor) -> tuple[Tensor, ...]:
        results = _call(c, a, dict(zip(a.leaves, values)))
        names[:] = results
        return tuple(results.values())

    values = checkpoint(body, *a.leaves.values(), use_reentrant="reentrant" in c.walk)
    return dict(zip(names, values))


def _gradients(member: Member, c: Configuration, a: _Arguments, results: dict[str, Tensor]) -> dict[str, Tensor]:
    values, upstream = [], []
    for name, gradient in a.upstream.items():
        if results[name].requires_grad:
            values.append(results[name])
            # Gradients of sums come expanded.
            expands = c.upstream == "ones" and results[name].dim()
            upstream.append(gradient.new_ones(()).expand(gradient.shape) if expands else gradient)
    if not values:
        raise Wrong("nothing requires a gradient")
    wanted = {name: leaf for name, leaf in a.leaves.items() if leaf.requires_grad}
    alone = c.walk.removesuffix(" alone")
    if alone != c.walk and alone in wanted:
        wanted = {alone: wanted[alone]}
    walks = 2 if c.walk.startswith("twice") else 1
    if c.walk in ("backward", "reentrant checkpoint"):
        torch.autograd.backward(values, upstream)
        each = [[leaf.grad for leaf in wanted.values()]]
    else:
        each = [
            torch.autograd.grad(values, [*wanted.values()], upstream, retain_graph=walk + 1 < walks, allow_unused=True)
            for walk in range(walks)
        ]
    found = {}
    for suffix, gradients in zip(("", " again"), each):
        for (name, leaf), gradient in zip(wanted.items(), gradients):
            found[f"d{name}{suffix}"] = _checked(member, c, name, leaf, gradient)
    return found


def _checked(member: Member, c: Configuration, name: str, leaf: Tensor, gradient: Tensor | None) -> Tensor:
    if gradient is None:
        raise Wrong(f"no gradient of {name}")
    if gradient.shape != leaf.shape or gradient.dtype != leaf.dtype:
        raise Wrong(f"d{name} is {gradient.dtype} {list(gradient.shape)}")
    gradient = gradient.detach().cpu()
    if name in ("weight", "bias"):
        real = real_rows(c, member.rank)
        if torch.count_nonzero(gradient[real:]):
            raise Wrong(f"d{name} of padding is not 0")
        gradient = gradient[:real]
    return gradient.contiguous()


def assemble(c: Configuration, parts: list[dict[str, Tensor]]) -> dict[str, Tensor]:
    """Whole tensors from what each rank returned, and a :class:`Wrong` for what should agree to the bit."""
    whole = {}
    order = sorted(range(c.ranks), key=lambda rank: c.shards[rank][0])
    for name, value in parts[0].items():
        base = name.removesuffix(" again")
        if base in ("dweight", "dbias"):
            whole[name] = torch.cat([parts[rank][name] for rank in order if real_rows(c, rank)])
        elif base == "dinput" and (c.kind == "logits" or c.sequence_parallel and c.ranks > 1):
            whole[name] = torch.cat([p[name] for p in parts], -1 if c.kind == "logits" else 0)
        elif base == "loss" and c.kind == "logits" and c.label_smoothing:
            whole[name] = torch.stack([p[name] for p in parts])
        else:
            for rank, part in enumerate(parts[1:], 1):
                if not same_bits(value, part[name]):
                    raise Wrong(f"bits: {name} of rank {rank} differs from rank 0's")
            whole[name] = value
    expected = set(FIELDS) | {"max_logit", "argmax", "vocab_size", "loss"}
    if unknown := [name for name in whole if not name.startswith("d") and name not in expected]:
        raise Wrong(f"unknown results {unknown}")
    return whole
