"""Debug mode: checks that wait for the device and for all ranks, with ``PARALLEL_LCE_DEBUG=1`` (anything but 0) on
every rank.

An error on one rank alone leaves the others in their collective until the group's timeout. In debug mode a call begins
with an exchange. Each rank sends the function that it runs and, by name, the values that must be equal on all ranks;
or, if it refuses its arguments, its reason. Every rank raises if a rank refused, or if anything differs. There are
further exchanges after the function of a ``token_loss``, before each DTensor is redistributed, before each backward,
and in Megatron's door.
"""

from __future__ import annotations

import json
import os
import threading
from array import array
from collections.abc import Mapping, Sequence
from hashlib import sha256
from typing import Any
from weakref import WeakKeyDictionary

import torch
import torch.distributed as dist
from torch import Tensor

from parallel_lce.backends import backend_of
from parallel_lce.core.collectives import NCCL_ALONE, Layout, Shard, all_gather
from parallel_lce.core.grad_buffers import MainGrad
from parallel_lce.core.options import Options, Tensors, agreed
from parallel_lce.core.plan import Needs, default_budget

# Calls in debug mode so far, by the group. Names of groups are used again.
_CALLS: WeakKeyDictionary[dist.ProcessGroup, int] = WeakKeyDictionary()

# Largest allowed difference of a token's numbers between ranks, relative to their norm: an all-reduce may round them
# differently on each rank.
_NEAR = 0.05


def enabled() -> bool:
    """Whether debug mode is on. Not while torch.compile traces: the operator of the graph makes the checks."""
    return not torch.compiler.is_compiling() and os.environ.get("PARALLEL_LCE_DEBUG", "") not in ("", "0")


class _State(threading.local):
    """What a thread knows of the public function that it runs."""

    # Public functions within each other: 0 outside all of them.
    depth = 0
    # Whether the other ranks wait for a message of this rank, or will: from a function's beginning to its exchange.
    awaited = False
    # The group of the outermost function, where its arguments do not give it.
    group: dist.ProcessGroup | None = None
    # What the next exchange compares, too, by name.
    others: Mapping[str, object] = {}


state = _State()

Part = tuple[int, int, str | None]
"""A rank's part of the vocabulary: first id, rows, and :func:`fingerprint`."""


def report_refusal(layout: Layout, refusal: Exception) -> None:
    """Called by a rank that is about to raise ``refusal``. In debug mode it joins the other ranks' exchange, with its
    reason. Otherwise its message gets a note that the other ranks may wait."""
    if layout.ranks == 1:
        return
    if enabled():
        _gathered(layout, {"refusal": str(refusal)})
    elif isinstance(refusal, (TypeError, ValueError)):
        refusal.args = (
            f"{refusal} (if only this rank's arguments are wrong, the other {layout.ranks - 1} rank(s) of "
            "process_group wait in their collective until its timeout; PARALLEL_LCE_DEBUG=1 raises on every rank)",
        )


def compare_later(values: Mapping[str, object]) -> None:
    """In debug mode the next exchange compares these values, too: tensors by their elements."""
    if enabled():
        state.others = {**state.others, **values}


def agree(
    layout: Layout,
    function: str,
    values: Mapping[str, object],
    shard: Part | None = None,
    near: tuple[str, Tensor] | None = None,
) -> list[Part]:
    """The exchange. Raises ``ValueError`` on every rank unless all run the same ``function`` with the same ``values``,
    of tensors the same elements, and up to rounding the same numbers ``[..., D]`` of each token, ``near``, with a name.

    Returns every rank's ``shard``. Collectives: two all-gathers, of 1 int64 and of the longest message's bytes.
    """
    values, state.others = {"function": function, **state.others, **values}, {}
    texts = {name: _text(value) for name, value in values.items()}
    projected = None if near is None else _projected(near[1])
    messages = _gathered(layout, {"texts": texts, "shard": shard, "near": projected})
    refusing = [rank for rank, message in enumerate(messages) if "refusal" in message]
    if refusing:
        reason = f"rank {refusing[0]} because: {messages[refusing[0]]['refusal']}"
        raise ValueError(f"rank(s) {refusing} of process_group refused their arguments, {reason}")
    differing = []
    for name in dict.fromkeys(name for message in messages for name in message["texts"]):
        of_ranks = [message["texts"].get(name, "nothing") for message in messages]
        if len({*of_ranks}) > 1:
            differing.append(f"{name}: " + ", ".join(f"rank {rank} has {text}" for rank, text in enumerate(of_ranks)))
            if name == "function":  # of others the values differ, too
                break
    if differing:
        raise ValueError(f"the ranks of process_group disagree about {'; '.join(differing)}")
    if near is not None:
        _check_near(near[0], [message["near"] for message in messages])
    if shard is None:
        return []
    shards = [message["shard"] for message in messages]
    _check_unlike(shards)
    return shards


def check_together(options: Options, tensors: Tensors, layout: Layout, needs: Needs, main_grad: MainGrad | None) -> int:
    """Debug mode: raise ``ValueError`` unless all ranks make the same call. Returns V."""
    hidden, weight = tensors.input, tensors.linear_weight
    shard = Shard.of(weight.shape[0], layout, options.vocab_start, options.vocab_size)
    shards: list[Part] = [(shard.start, shard.rows, fingerprint(weight[: shard.real_rows]))]
    if layout.ranks > 1:
        if options.logits_budget is None:
            options = options._replace(logits_budget=default_budget(weight.device))
        values = agreed(options) | {
            "tokens": (hidden.shape[0] * layout.sp_size, *hidden.shape[1:-1]) if hidden.dim() > 1 else (),
            "hidden size": hidden.shape[-1],
            "dtype": hidden.dtype,
            "linear_bias given": tensors.linear_bias is not None,
            "gradients": (needs, main_grad and main_grad.tensor.dtype) if any(needs) else None,
            "backend": backend_of(weight).NAME,
        }
        # The numbers of each token take the place of an option's one.
        values |= tensors._replace(input=None, linear_weight=None, linear_bias=None).named()
        name = "input (without sequence_parallel all ranks have the same tokens)"
        near = None if layout.sequence_parallel else (name, hidden)
        shards = agree(layout, options.function, values, shards[0], near)
    return _covered(shards, options.vocab_size)


def _covered(shards: list[Part], vocab_size: int | None) -> int:
    """V. Raises ``ValueError`` if the shards leave a gap or overlap, or have fewer than ``vocab_size`` rows or none."""
    end = 0
    for start, rows in sorted(s[:2] for s in shards if s[1]):
        if start != end:
            kind = "a gap" if start > end else "an overlap"
            of_ranks = ", ".join(f"rank {rank} has [{s[0]}, {s[0] + s[1]})" for rank, s in enumerate(shards))
            low, high = sorted((start, end))
            raise ValueError(f"the vocabulary shards leave {kind} between {low} and {high}: {of_ranks}")
        end = start + rows
    if end == 0:
        raise ValueError(f"the vocabulary is empty: none of the {len(shards)} shards has a row")
    if vocab_size is not None and vocab_size > end:
        raise ValueError(f"vocab_size={vocab_size} exceeds the {end} rows of all shards")
    return end if vocab_size is None else vocab_size


def next_call(layout: Layout) -> int | None:
    """The number of this call among those of the group, the same on all ranks, which have just agreed. None: no group
    of several ranks."""
    if layout.group is None:
        return None
    _CALLS[layout.group] = number = _CALLS.get(layout.group, 0) + 1
    return number


def agree_on_backward(layout: Layout, call: int | None, upstream: Sequence[Tensor | None]) -> None:
    """The exchange before the backward of a call, which :func:`next_call` has numbered. Raises ``ValueError`` unless
    all ranks run the backward of the same call, with the same ``upstream`` gradients up to rounding."""
    if call is not None:
        sizes = [each if each is None else each.numel() for each in upstream]
        values = {"the call whose backward runs": call, "the sizes of upstream gradients": sizes}
        elements = [each.detach().reshape(-1, 1).double() for each in upstream if each is not None]
        agree(layout, "a backward", values, near=("the upstream gradient", torch.cat(elements)) if elements else None)


def fingerprint(rows: Tensor) -> str | None:
    """A digest of ``rows [R, n]``, of fp64 sums of the rows and columns. None if all rows have one sum, as those of a
    weight of zeros and a single row: other ranks may have the same."""
    sums, columns = (rows.detach().sum(dim, dtype=torch.float64).nan_to_num() for dim in (1, 0))
    return None if len(sums) == 0 or (sums == sums[0]).all() else _text(torch.cat([sums, columns]))


def _text(value: object) -> str:
    """Of a tensor the number of its elements, and a digest: the same for equal numbers of any dtype. All NaN are one
    number, and so are 0 and -0."""
    if not isinstance(value, Tensor):
        return repr(value)
    numbers = value.detach().flatten().double().nan_to_num(torch.finfo(torch.float64).max, torch.inf, -torch.inf) + 0.0
    return f"{len(numbers)} values of digest {sha256(array('d', numbers.tolist())).hexdigest()[:12]}"


def _projected(numbers: Tensor) -> list[list[float]]:
    """Of each token the norm of its numbers, and their component along one random direction."""
    flat = numbers.detach().reshape(-1, max(1, numbers.shape[-1])).double()
    generator = torch.Generator().manual_seed(0)
    direction = torch.randn(flat.shape[1], generator=generator, dtype=torch.float64, device="cpu").to(flat.device)
    return torch.stack([flat.norm(dim=1), flat @ direction]).tolist()


def _check_near(name: str, projected: list[list[list[float]]]) -> None:
    """Raise ``ValueError`` unless all ranks have nearly the same numbers."""
    numbers = torch.tensor(projected, dtype=torch.float64, device="cpu")
    norm, along = numbers.unbind(1)
    near = (norm - norm[0]).abs() + (along - along[0]).abs() <= _NEAR * norm.nan_to_num(0.0, 0.0).amax(0)
    same = numbers.isclose(numbers[0], 0.0, 0.0, equal_nan=True).all(1)  # also of NaN and infinite ones
    apart = ~(near | same)
    if apart.any():
        rank, token = apart.nonzero()[0].tolist()
        raise ValueError(
            f"the ranks of process_group disagree about {name}: token {token} has norm {norm[0, token]:.6g} on rank 0 "
            f"and {norm[rank, token]:.6g} on rank {rank}, along a random direction {along[0, token]:.6g} and "
            f"{along[rank, token]:.6g}"
        )


def _check_unlike(shards: list[Part]) -> None:
    """Raise ``ValueError`` if two ranks have the same values for different parts of the vocabulary."""
    seen: dict[str, int] = {}
    for rank, (start, rows, values) in enumerate(shards):
        if values is not None and (first := seen.setdefault(values, rank)) != rank:
            raise ValueError(
                f"ranks {first} and {rank} of process_group hold the same {rows} rows of the vocabulary, as entries "
                f"from {shards[first][0]} and from {start} on: did you forget to shard? Each rank passes its own part; "
                "with the whole on every rank pass no process_group, or vocab_size"
            )


def _gathered(layout: Layout, message: Any) -> list[Any]:
    """Every rank's message, in rank order, as JSON: torch's collectives of objects need NumPy. Collectives: an
    all-gather of the lengths, 1 int64, and one of the bytes of the longest."""
    state.awaited = False
    device = "cuda" if dist.get_backend(layout.group) in NCCL_ALONE else "cpu"
    text = json.dumps(message).encode()

    def gathered(row: list[int], dtype: torch.dtype) -> list[list[int]]:
        sent = torch.tensor(row, dtype=dtype, device=device)
        received = torch.empty(layout.ranks * len(row), dtype=dtype, device=device)
        all_gather(received, sent, group=layout.group, async_op=True).wait()
        return received.view(layout.ranks, len(row)).tolist()

    longest = max(gathered([len(text)], torch.int64))[0]
    return [json.loads(bytes(row)) for row in gathered([*text.ljust(longest)], torch.uint8)]
