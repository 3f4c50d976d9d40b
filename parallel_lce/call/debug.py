"""Debug mode: checks that wait for the device and for all ranks, with ``PARALLEL_LCE_DEBUG=1`` on every rank.

An error on one rank alone leaves the others in their collective until the group's timeout. In debug mode every call
begins with an exchange: each rank sends its arguments or, if it refuses them, its reason. Every rank raises if a rank
refused, or if the arguments differ. So does every backward that reduces dX: its ranks send the number of its call.
"""

from __future__ import annotations

import hashlib
import os
import pickle
import threading
from collections.abc import Mapping
from typing import NamedTuple, TypeVar
from weakref import WeakKeyDictionary

import torch
import torch.distributed as dist
from torch import Tensor

from parallel_lce.core.collectives import Layout, all_gather
from parallel_lce.core.private import device_of_objects

T = TypeVar("T")

# Calls in debug mode so far, by the group. Names of groups are used again.
_CALLS: WeakKeyDictionary[dist.ProcessGroup, int] = WeakKeyDictionary()

# Largest allowed difference of a token's hidden states between ranks, relative to their norm: an all-reduce may round
# them differently on each rank.
_SAME_HIDDEN = 0.05


def enabled() -> bool:
    """Whether debug mode is on. Not while torch.compile traces: the operator of the graph makes the checks."""
    if torch.compiler.is_compiling():
        return False
    value = _given()
    if value not in ("", "0", "1"):
        raise ValueError(f"PARALLEL_LCE_DEBUG must be 0 or 1, got {value!r}")
    return value == "1"


def _given() -> str:
    return os.environ.get("PARALLEL_LCE_DEBUG", "")


class _State(threading.local):
    """What a thread knows of the public function that it runs."""

    # Public functions within each other: 0 outside all of them.
    depth = 0
    # Whether the other ranks wait for a message of this rank, or will: from a function's beginning to its exchange.
    awaited = False
    # The group of the outermost function, where its arguments do not give it.
    group: dist.ProcessGroup | None = None


state = _State()


class Slice(NamedTuple):
    """A rank's part of the vocabulary."""

    start: int = 0
    rows: int = 0
    # Of the values: fingerprint()
    values: str | None = None


_NO_SLICE = Slice()


class _Message(NamedTuple):
    """A rank's message to the others."""

    # Why the rank refuses its arguments, or None.
    refusal: str | None
    # The arguments as text, by name.
    values: dict[str, str]
    shard: Slice


def report_refusal(layout: Layout, refusal: Exception) -> None:
    """Called by a rank that is about to raise ``refusal``. Debug mode sends it to the other ranks, by the first two
    collectives of :func:`agree`. Otherwise its message gets a note that the other ranks may wait."""
    if layout.ranks == 1:
        return
    if _given() not in ("", "0"):  # also a malformed value, which may be this rank's alone, and the refusal
        _gathered(layout, _Message(str(refusal), {}, _NO_SLICE))
    elif isinstance(refusal, (TypeError, ValueError)):
        note = (
            f"{refusal} (if only this rank's arguments are wrong, the other {layout.ranks - 1} "
            "rank(s) of process_group wait in their collective until its timeout; "
            "PARALLEL_LCE_DEBUG=1 raises on every rank)"
        )
        refusal.args = (note,)


def agree(
    layout: Layout, settings: Mapping[str, object], tensors: Mapping[str, Tensor | None], shard: tuple = _NO_SLICE
) -> list[Slice]:
    """Raise ``ValueError`` on every rank unless all pass the same ``settings`` and ``tensors``.

    A setting is compared among the ranks that pass it; ``tensors``, int64 or fp64, by their elements. Returns every
    rank's ``shard``. Collectives: two all-gathers, of 1 int64 and of some hundred bytes; if one tensor alone differs,
    and has as many elements on all ranks, two others with its values.
    """
    values = {name: repr(value) for name, value in settings.items()}
    values |= {name: _digest(tensor) for name, tensor in tensors.items()}
    messages = _gathered(layout, _Message(None, values, Slice(*shard)))
    refusing = {rank: m.refusal for rank, m in enumerate(messages) if m.refusal is not None}
    if refusing:
        first = next(iter(refusing))
        raise ValueError(
            f"rank(s) {[*refusing]} of process_group refused their arguments, rank {first} because: {refusing[first]}"
        )
    names = dict.fromkeys(name for m in messages for name in m.values)
    values_of = {n: {rank: m.values[n] for rank, m in enumerate(messages) if n in m.values} for n in names}
    differing = {name: said for name, said in values_of.items() if len(set(said.values())) > 1}
    if differing:
        alone = len(differing) == 1
        differences = [
            _difference(layout, name, tensor)
            if alone and (tensor := tensors.get(name)) is not None and len({*map(_size, said.values())}) == 1
            else f"{name}: {_by_rank(said)}"
            for name, said in differing.items()
        ]
        raise ValueError(f"the ranks of process_group disagree about {'; '.join(differences)}")
    shards = [m.shard for m in messages]
    _check_unlike(shards)
    return shards


def next_call(layout: Layout) -> int | None:
    """The number of this call among those of the group, the same on all ranks, which have just agreed. None: no group
    of several ranks."""
    if layout.group is None:
        return None
    _CALLS[layout.group] = number = _CALLS.get(layout.group, 0) + 1
    return number


def agree_about_backward(layout: Layout, call: int) -> None:
    """Raise ``ValueError`` on every rank unless all run the backward of the call of this number. Collectives: those of
    :func:`agree`."""
    agree(layout, {"the call whose backward runs": call}, {})


def agree_about_hidden(layout: Layout, hidden: Tensor) -> None:
    """Raise ``ValueError`` on every rank unless all have the same hidden states ``[..., D]``, up to rounding. One
    all-gather of objects, 2 fp64 numbers per token: the norm, and the component along one random direction."""
    flat = hidden.detach().reshape(-1, max(1, hidden.shape[-1])).double()
    generator = torch.Generator().manual_seed(0)
    direction = torch.randn(flat.shape[1], generator=generator, dtype=torch.float64, device="cpu").to(flat.device)
    norm, along = _stacked(layout, torch.stack([flat.norm(dim=1), flat @ direction])).nan_to_num().unbind(1)
    apart = (norm - norm[0]).abs() + (along - along[0]).abs() > _SAME_HIDDEN * norm.amax(0)
    if apart.any():
        rank, token = apart.nonzero()[0].tolist()
        raise ValueError(
            f"the ranks of process_group disagree about input: token {token} has norm {norm[0, token]:.6g} on rank 0 "
            f"and {norm[rank, token]:.6g} on rank {rank}, along a random direction {along[0, token]:.6g} and "
            f"{along[rank, token]:.6g} (without sequence_parallel all ranks have the same tokens)"
        )


def _difference(layout: Layout, name: str, tensor: Tensor) -> str:
    """Text with the first position at which the ranks' ``tensor`` differ, and each rank's value there."""
    all_values = _stacked(layout, tensor.detach().flatten())
    apart = (all_values != all_values[0]) & ~(all_values.isnan() & all_values[0].isnan())
    position = int(apart.any(0).nonzero()[0])
    said = {rank: repr(value) for rank, value in enumerate(all_values[:, position].tolist())}
    return f"{name} at position {position}: {_by_rank(said)}"


def _by_rank(said: dict[int, str]) -> str:
    return ", ".join(f"rank {rank} has {value}" for rank, value in said.items())


def _digest(tensor: Tensor | None) -> str:
    """The number of int64 or fp64 values, and a digest. All NaN are one value, and so are 0 and -0."""
    if tensor is None:
        return repr(None)
    # clone() gives even a tensor of one element the stride of 1 that a view as bytes needs.
    values = tensor.detach().flatten().cpu().clone(memory_format=torch.contiguous_format)
    if values.is_floating_point():
        values = values.nan_to_num(torch.finfo(values.dtype).max, torch.inf, -torch.inf) + 0
    digest = hashlib.sha256(bytes(values.view(torch.uint8).tolist()))
    return f"{tensor.numel()} values of digest {digest.hexdigest()[:12]}"


def _size(digest: str) -> str:
    """The number of a tensor's values, by its digest."""
    return digest.partition(" ")[0]


def _stacked(layout: Layout, values: Tensor) -> Tensor:
    """Every rank's ``values [...]``, int64 or fp64, as ``[P, ...]`` on the CPU."""
    stacked = torch.tensor(_gathered(layout, values.tolist()), dtype=values.dtype, device="cpu")
    return stacked.view(layout.ranks, *values.shape)


def _gathered(layout: Layout, own: T) -> list[T]:
    """Every rank's object, in rank order, without NumPy, which torch's collectives of objects need. Collectives: an
    all-gather of the sizes, 1 int64, and one of the bytes of the largest."""
    state.awaited = False
    device = device_of_objects(layout.group)
    message = pickle.dumps(own)

    def gathered(row: list[int], dtype: torch.dtype) -> Tensor:
        sent = torch.tensor(row, dtype=dtype, device=device)
        received = torch.empty(layout.ranks * len(row), dtype=dtype, device=device)
        all_gather(received, sent, group=layout.group, async_op=True).wait()
        return received.view(layout.ranks, len(row))

    sizes = gathered([len(message)], torch.int64).flatten().tolist()
    rows = gathered([*message, *bytes(max(sizes) - len(message))], torch.uint8).tolist()
    return [pickle.loads(bytes(row[:size])) for row, size in zip(rows, sizes)]


def fingerprint(rows: Tensor) -> str | None:
    """A digest of ``rows [R, n]``, of fp64 sums of the rows and columns. None if all rows have one sum, as those of a
    weight of zeros and a single row: other ranks may have the same."""
    sums, columns = (rows.detach().sum(dim, dtype=torch.float64).nan_to_num() for dim in (1, 0))
    return None if len(sums) == 0 or (sums == sums[0]).all() else _digest(torch.cat([sums, columns]))


def _check_unlike(shards: list[Slice]) -> None:
    """Raise ``ValueError`` if two ranks have the same values for different parts of the vocabulary."""
    seen: dict[str, int] = {}
    for rank, shard in enumerate(shards):
        if shard.values is not None and (first := seen.setdefault(shard.values, rank)) != rank:
            raise ValueError(
                f"ranks {first} and {rank} of process_group hold the same {shard.rows} rows of the vocabulary, as "
                f"entries from {shards[first].start} and from {shard.start} on: did you forget to shard? Each rank "
                "passes its own part; with the whole on every rank pass no process_group, or vocab_size"
            )


def check_cover(shards: list[Slice], vocab_size: int | None) -> int:
    """V. Raises ``ValueError`` if the shards leave a gap or overlap, or have fewer than ``vocab_size`` rows or none."""
    end = 0
    for start, rows in sorted(s[:2] for s in shards if s.rows):
        if start != end:
            kind = "a gap" if start > end else "an overlap"
            raise ValueError(f"the vocabulary shards leave {kind}: one ends at {end}, the next starts at {start}")
        end = start + rows
    if end == 0:
        raise ValueError(f"the vocabulary is empty: none of the {len(shards)} shards has a row")
    if vocab_size is not None and vocab_size > end:
        raise ValueError(f"vocab_size={vocab_size} exceeds the {end} rows of all shards")
    return end if vocab_size is None else vocab_size
