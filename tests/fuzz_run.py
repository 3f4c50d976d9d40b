"""One configuration on one rank: the package's results and gradients, of its part of the tokens and its shard."""

from __future__ import annotations

from contextlib import ExitStack, nullcontext
from dataclasses import dataclass
from unittest import mock

import numpy as np
import torch
from torch import Tensor
from torch.autograd.graph import save_on_cpu, saved_tensors_hooks
from torch.utils.checkpoint import checkpoint

import parallel_lce
from cases import DTYPES
from fuzz_draw import FIELDS, Configuration
from fuzz_values import Whole, laid, make
from parallel_lce.core.partials import accumulation_dtype
from parallel_lce.distillation import divergence
from parallel_lce.run import divergence as divergences
from tools import chosen_backend, debug_mode, shrunk
from world import Member


class Wrong(AssertionError):
    """A result that no number need be compared to see is wrong."""


def execute(member: Member, c: Configuration, backend: str) -> dict[str, Tensor]:
    """Results by name, gradients as ``d<name>``; those of a second walk through the graph end in `` again``."""
    with ExitStack() as stack:
        stack.enter_context(chosen_backend(backend))
        stack.enter_context(shrunk(c.block_bytes, c.tile))
        if c.block_bytes is not None:
            stack.enter_context(mock.patch.object(divergences, "_FEWEST_TOKENS", 1))
        if backend == "triton":
            _filter_small_products(stack)
            if c.bias == "low" and not c.filtered and member.device.type == "cpu":
                _narrow_windows(stack)
        if c.debug:
            stack.enter_context(debug_mode())
        found = _once(member, c)
        for _ in range(2 * c.repeat):
            again = _once(member, c)
            for name, value in found.items():
                if not same_bits(value, again[name]):
                    raise Wrong(f"bits: {name} differs from run to run")
    return found


def _filter_small_products(stack: ExitStack) -> None:
    """Of 384 tokens on, a sample is less than all of them."""
    from parallel_lce.backends import triton_filter
    from parallel_lce.kernels.filter import windows

    stack.enter_context(mock.patch.object(triton_filter, "SMALLEST_FILTERED", 0))
    stack.enter_context(mock.patch.object(windows, "FEWEST_SAMPLED", 1))


def _narrow_windows(stack: ExitStack) -> None:
    """An interpreter's vocabulary has few of any other width."""
    from benchmarks.tune import forced
    from parallel_lce.kernels.tuning import Tile

    stack.enter_context(forced(Tile(64, 64, 32, 4, 2), 16))


def same_bits(a: Tensor, b: Tensor) -> bool:
    if a.shape != b.shape or a.dtype != b.dtype:
        return False
    bits = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}[a.dtype.itemsize]
    return torch.equal(a.view(bits), b.view(bits))


def real_rows(c: Configuration, rank: int) -> int:
    """Rows of a rank's shard that are no padding."""
    start, rows = c.shards[rank]
    return max(0, min(rows, c.V - start))


def teacher_rows(c: Configuration, rank: int) -> int:
    """Rows of a rank's shard of the teacher."""
    last = max((start + rows, rank) for rank, (start, rows) in enumerate(c.shards) if rows)[1]
    if c.teacher_padding is None or rank != last:
        return c.shards[rank][1]
    return real_rows(c, rank) + c.teacher_padding


@dataclass
class _Arguments:
    """``leaves`` may need gradients, ``given`` are the other tensors: each by its name in ``LAID``."""

    leaves: dict[str, Tensor]
    given: dict[str, Tensor]
    options: dict
    upstream: dict[str, Tensor]


def _arguments(member: Member, c: Configuration, whole: Whole) -> _Arguments:
    (start, rows), real = c.shards[member.rank], real_rows(c, member.rank)

    def layer(prefix: str, rows: int, x: Tensor, weight: Tensor, bias: Tensor | None) -> dict[str, Tensor | None]:
        found: dict[str, Tensor | None] = {f"{prefix}input": x, f"{prefix}weight": weight, f"{prefix}bias": bias}
        if c.sequence_parallel and c.ranks > 1:
            found[f"{prefix}input"] = x.chunk(c.ranks)[member.rank]
        for name, value in ((f"{prefix}weight", weight), (f"{prefix}bias", bias)):
            if value is not None:
                # Padding must never matter.
                found[name] = value.new_full((rows, *value.shape[1:]), torch.nan)
                found[name][:real] = value[start : start + real]
        return found

    if c.kind == "logits":
        tensors: dict[str, Tensor | None] = {"input": whole.x[..., start : start + rows]}
    else:
        tensors = layer("", rows, whole.x, whole.weight, whole.bias)
    tensors["token_weight"] = whole.token_weight
    others: dict[str, Tensor | None] = {
        "target": whole.target,
        "logit_scale": whole.scale,
        "temperature": whole.temperature,
        "selected": whole.ids,
        "offsets": whole.offsets,
        "mask": whole.mask if c.kind == "statistics" else None,
    }
    if whole.teacher is not None:
        others |= layer("teacher_", teacher_rows(c, member.rank), *whole.teacher[:3])
    leaves, given = (
        {name: laid(v.to(member.device), c.layout(name)).detach() for name, v in some.items() if v is not None}
        for some in (tensors, others)
    )
    for name, leaf in leaves.items():
        learns = c.weight_learns if name == "token_weight" else name not in c.frozen
        leaf.requires_grad_(learns and c.mode == "train")
    upstream = {name: value.to(member.device) for name, value in whole.upstream.items()}
    return _Arguments(leaves, given, _options(member, c, whole, given), upstream)


def _options(member: Member, c: Configuration, whole: Whole, given: dict[str, Tensor]) -> dict:
    """All but the tensors that :func:`_call` hands over itself."""
    group = member.group if c.ranks > 1 or c.group_given else None
    if c.kind == "logits":
        return {"label_smoothing": _number(c, c.label_smoothing), "tp_group": group}
    start, _ = c.shards[member.rank]
    wide = accumulation_dtype(DTYPES[c.computed])
    reduce = {"": None, "wide": wide, "same": DTYPES[c.computed]}[c.reduce_dtype]
    numbers: dict = {"vocab_start": start if c.starts_given else None, "vocab_size": c.V if c.size_given else None}
    numbers["temperature"] = c.temperature
    if c.kind != "selected":
        numbers["logits_budget"] = c.budget
    if c.kind != "divergence":
        numbers |= {"logit_scale": c.scale, "logit_softcap": c.softcap}
    of_kind = {"divergence": ("ignore_index", "beta"), "loss": ("ignore_index", "label_smoothing", "z_loss")}
    numbers |= {name: getattr(c, name) for name in of_kind.get(c.kind, ())}
    if c.filtered:
        # Below every probability but those that underflow: gradients are the same.
        numbers["gradient_filter"] = 1e-300 if c.computed == "fp64" else 1e-38
    if c.counted:
        numbers["counted_tokens"] = whole.counted
    if c.top_k is not None:
        numbers["top_k"] = c.top_k
    options = {name: _number(c, value) for name, value in numbers.items()}
    if c.kind in ("loss", "divergence"):
        options["reduction"] = c.reduction
    if c.kind == "statistics" and c.selected:
        options["selected"] = _selected(given)
    options |= {name: True for name in c.asked}
    options |= {name: given[name] for name in ("logit_scale", "temperature", "mask") if name in given}
    options |= {"sequence_parallel": c.sequence_parallel, "reduce_hidden_grad": c.reduce_hidden_grad}
    return options | {"process_group": group, "reduce_dtype": reduce}


def _selected(given: dict[str, Tensor]) -> Tensor | tuple[Tensor, Tensor]:
    return (given["selected"], given["offsets"]) if "offsets" in given else given["selected"]


def _number(c: Configuration, value):
    """The same number of NumPy's, in the smallest of two types that hold it."""
    if not c.numpy or value is None:
        return value
    if isinstance(value, int):
        return np.int32(value) if -(2**31) <= value < 2**31 else np.int64(value)
    return np.float32(value) if float(np.float32(value)) == value else np.float64(value)


def _call(c: Configuration, a: _Arguments, tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    """What is returned, by name."""
    given, options = a.given, a.options
    if c.kind == "logits":
        return {"loss": parallel_lce.vocab_parallel_cross_entropy(tensors["input"], given["target"], **options)}
    x, weight, bias = tensors["input"], tensors["weight"], tensors.get("bias")
    if c.kind == "divergence":
        teacher = given["teacher_input"], given["teacher_weight"]
        options = options | {"student_bias": bias, "teacher_bias": given.get("teacher_bias")}
        return {"loss": divergence(x, weight, *teacher, target=given.get("target"), **options)}
    options = options | {"linear_bias": bias}
    if c.kind == "selected":
        return {"log_probs": parallel_lce.selected_log_probs(x, weight, _selected(given), **options)}
    target = given.get("target")
    if c.kind == "loss":
        options["token_weight"] = tensors.get("token_weight")
        return {"loss": parallel_lce.linear_cross_entropy(x, weight, target, **options)}
    found = parallel_lce.token_statistics(x, weight, target, **options)
    return {name: value for name, value in vars(found).items() if value is not None}


def _once(member: Member, c: Configuration) -> dict[str, Tensor]:
    a = _arguments(member, c, make(c))
    before = {name: value.detach().clone() for name, value in (a.leaves | a.given).items()}
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
        if not same_bits(value, (a.leaves | a.given)[name].detach()):
            raise Wrong(f"{name} was written to")
    return found


def _gapped(tensor: Tensor) -> Tensor:
    wide = tensor.new_empty(*tensor.shape, 2)
    wide[..., 0] = tensor
    return wide[..., 0]


def _saving(c: Configuration):
    """Hooks for saved tensors, which return other strides."""
    returned = {
        "transposed hooks": lambda tensor: tensor.t().contiguous().t() if tensor.dim() == 2 else tensor,
        "gapped hooks": _gapped,
        "twice under hooks": _gapped,
    }
    if c.mode == "train" and c.walk in returned:
        return saved_tensors_hooks(lambda tensor: tensor.detach().clone(), returned[c.walk])
    return save_on_cpu() if c.mode == "train" and c.walk == "save_on_cpu" else nullcontext()


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
        if c.counted != "wrong" and torch.count_nonzero(gradient[real:]):
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
        elif base == "dinput" and not c.reduce_hidden_grad:
            whole[name] = sum(p[name].double() for p in parts)
        elif base == "dinput" and (c.kind == "logits" or c.sequence_parallel and c.ranks > 1):
            whole[name] = torch.cat([p[name] for p in parts], -1 if c.kind == "logits" else 0)
        elif base == "loss" and c.kind == "logits" and c.label_smoothing:
            whole[name] = torch.stack([p[name] for p in parts])
        else:
            for rank, part in enumerate(parts[1:], 1):
                if not same_bits(value, part[name]):
                    raise Wrong(f"bits: {name} of rank {rank} differs from rank 0's")
            whole[name] = value
    expected = {*FIELDS, "max_logit", "argmax", "top_logits", "top_ids", "vocab_size", "loss", "log_probs"}
    if unknown := [name for name in whole if not name.startswith("d") and name not in expected]:
        raise Wrong(f"unknown results {unknown}")
    return whole
