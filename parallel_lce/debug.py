"""Checks that wait for the host and the group, on request: ``PARALLEL_LCE_DEBUG=1``.

A ``ValueError`` on one rank alone leaves the others in their collective until the group's timeout.
In debug mode every call begins with an exchange in which each rank tells the numbers that all must
share, so that every rank raises.
"""

from __future__ import annotations

import os

import torch
from torch import Tensor

from parallel_lce.parallel import Layout, _all_gather


def enabled() -> bool:
    """A compiled call has no checks: it could not wait for them."""
    return not torch.compiler.is_compiling() and os.environ.get("PARALLEL_LCE_DEBUG", "0") not in ("", "0")


def agree(
    layout: Layout, shared: dict[str, object] | None, shard: tuple[int, int], device: torch.device
) -> list[tuple[int, int]]:
    """Raise ``ValueError`` on every rank unless all ranks pass the same values of ``shared``.

    ``shared=None``: this rank is about to refuse its arguments, which it tells the others; it does
    not raise here. Returns every rank's ``shard`` (start, rows). Two all-gathers, of 4 int64 and of
    the values' text.
    """
    text = repr(list((shared or {}).items())).encode()
    header = [shared is None, len(text), *shard]
    headers = _exchange(torch.tensor(header, dtype=torch.int64, device=device), layout).tolist()
    longest = max(h[1] for h in headers)
    padded = torch.tensor(list(text.ljust(longest)), dtype=torch.uint8, device=device)
    texts = [bytes(t).decode().rstrip() for t in _exchange(padded, layout).tolist()]
    if shared is None:
        return []
    refusing = [rank for rank, h in enumerate(headers) if h[0]]
    if refusing:
        raise ValueError(f"rank(s) {refusing} of process_group refused their arguments")
    other = next((rank for rank, t in enumerate(texts) if t != texts[0]), None)
    if other is not None:
        raise ValueError(
            f"the ranks of process_group disagree: rank 0 has {texts[0]}, rank {other} has "
            f"{texts[other]}"
        )
    return [(h[2], h[3]) for h in headers]


def _exchange(values: Tensor, layout: Layout) -> Tensor:
    gathered = values.new_empty(layout.ranks * values.numel())
    _all_gather(gathered, values, group=layout.group)
    return gathered.view(layout.ranks, -1)


def check_cover(shards: list[tuple[int, int]], vocab_size: int | None) -> int:
    """V, or ``ValueError`` where the shards leave a gap or overlap."""
    end = 0
    for start, rows in sorted(s for s in shards if s[1]):
        if start != end:
            kind = "a gap" if start > end else "an overlap"
            raise ValueError(
                f"the vocabulary shards leave {kind}: one ends at {end}, the next starts at {start}"
            )
        end = start + rows
    if vocab_size is not None and vocab_size > end:
        raise ValueError(f"vocab_size={vocab_size} exceeds the {end} rows of all shards")
    return end if vocab_size is None else vocab_size


def check_target(target: Tensor, counted: Tensor, vocab_size: int) -> None:
    """``ValueError`` naming the first counted target outside ``[0, vocab_size)``."""
    outside = counted & ((target < 0) | (target >= vocab_size))
    if outside.any():
        position = int(outside.flatten().nonzero()[0])
        raise ValueError(
            f"target {int(target.flatten()[position])} at position {position} is outside "
            f"[0, {vocab_size}) and is not ignore_index"
        )
