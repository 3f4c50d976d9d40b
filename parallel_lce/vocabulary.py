"""An order of the vocabulary in which :mod:`filtered gradients <parallel_lce.features.filter>` skip many tiles.

A tokenizer's own order spreads frequent tokens over all rows, so that most tiles of 128 neighbouring rows have a large
probability. In descending order of frequency most tiles hold rare tokens alone. If each tensor-parallel rank's shard
has the same share of frequent tokens, the ranks have equal work with the remaining tiles.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from os import PathLike
from typing import Any, Final

import torch
from torch import Tensor

from parallel_lce.call.checks import INTEGERS, described


class VocabularyOrder:
    """A permutation of the vocabulary, the same on every rank; no method runs a collective.

    Ids and rows in the tokenizer's order are called old; in the model's order, new. Ids and weights may be on any
    device: each call copies ``new_id`` to that device, unless it is there already (:meth:`to`).

    Args:
        new_id: int64 ``[V]``: the new id of each old id.
        rows: rows of the whole weight; rows from V on are padding. None: V.

    Raises:
        ValueError: ``new_id`` is no such tensor or no permutation of 0 to V - 1, or ``rows`` is less than V.
    """

    new_id: Final[Tensor]
    rows: Final[int]

    def __init__(self, new_id: Tensor, rows: int | None = None) -> None:
        if not isinstance(new_id, Tensor) or new_id.dtype != torch.int64 or new_id.dim() != 1 or not len(new_id):
            raise ValueError(f"new_id must be an int64 tensor [V] with V > 0, got {described(new_id)}")
        V = len(new_id)
        rows = V if rows is None else rows
        if not isinstance(rows, int) or rows < V:
            raise ValueError(f"rows must be a whole number of at least V={V}, got {rows!r}")
        # [V] int64: the old id of each new id
        ascending, self._old_id = new_id.sort()
        if not torch.equal(ascending, torch.arange(V, device=new_id.device)):
            given = f"{len(ascending.unique())} different ones from {ascending[0]} to {ascending[-1]}"
            raise ValueError(f"new_id must hold each of the {V} numbers from 0 to {V - 1} once, got {given}")
        # A copy: the caller may change the given tensor.
        self.new_id, self.rows = new_id.clone(), rows

    @classmethod
    def by_frequency(cls, counts: Tensor, *, ranks: int = 1, rows: int | None = None) -> VocabularyOrder:
        """The order in which every rank's shard is in descending order of frequency, on the device of ``counts``.

        Ids are dealt to the ranks in turn: the most frequent id gets the first row of rank 0's shard, the next id the
        first row of rank 1's. Ids of the same count are dealt in ascending order. Padding stays at the end of the whole
        weight, as a loss with ``vocab_size`` expects; a rank whose shard has padding is dealt fewer ids.

        Args:
            counts: ``[V]`` numbers >= 0: how often each id occurs in the training text, or in a sample of it.
            ranks: tensor-parallel size P >= 1. Rank r has the r-th block of ``rows / P`` rows.
            rows: rows of the whole weight, at least V and a multiple of ``ranks``. None: V.

        Raises:
            ValueError: for other arguments.
        """
        if not isinstance(counts, Tensor) or counts.dim() != 1 or not len(counts):
            raise ValueError(f"counts must be a tensor [V] with V > 0, got {described(counts)}")
        if counts.dtype not in INTEGERS and not counts.is_floating_point():
            raise ValueError(f"counts must be integers or floating-point numbers, got {counts.dtype}")
        if type(ranks) is not int or ranks < 1:
            raise ValueError(f"ranks must be a whole number of at least 1, got {ranks!r}")
        V = len(counts)
        rows = V if rows is None else rows
        if type(rows) is not int or rows < V or rows % ranks:
            raise ValueError(f"rows must be at least V={V} and a multiple of ranks={ranks}, got {rows!r}")
        counts = counts.double() if counts.is_floating_point() else counts.long()
        if not (counts >= 0).all():
            raise ValueError("counts must be at least 0, got a negative number or NaN")
        new_ids = torch.arange(V, device=counts.device)
        # First all ranks' first rows, in the order of ranks, then their second rows.
        dealt = torch.argsort(new_ids % (rows // ranks), stable=True)
        by_count = torch.argsort(counts, descending=True, stable=True)
        return cls(torch.empty_like(dealt).scatter_(0, by_count, dealt), rows)

    def to(self, device: torch.device | str) -> VocabularyOrder:
        """The same order on a device."""
        return VocabularyOrder(self.new_id.to(device), self.rows)

    def apply(self, ids: Tensor) -> Tensor:
        """New ids of old ``ids``, such as inputs and targets, of any shape.

        Numbers outside [0, V) stay as they are, such as ``ignore_index``. Raises ``ValueError`` unless ``ids`` is of an
        integer dtype that can hold V - 1.
        """
        return _mapped(ids, self.new_id)

    def undo(self, ids: Tensor) -> Tensor:
        """Old ids of new ``ids``, such as sampled tokens. The inverse of :meth:`apply`."""
        return _mapped(ids, self._old_id)

    def apply_rows(self, weight: Tensor) -> Tensor:
        """A new tensor: a whole weight, embedding or bias ``[rows, ...]``, or ``[V, ...]`` without padding, with its
        rows moved from the old to the new order. Differentiable. Padding stays where it is. With ``n = rows // P``, the
        shard of rank r is ``[r * n : (r + 1) * n]``. Raises ``ValueError`` for another number of rows."""
        return self._moved("weight", weight, self._old_id)

    def undo_rows(self, weight: Tensor) -> Tensor:
        """The rows from the new to the old order. The inverse of :meth:`apply_rows`."""
        return self._moved("weight", weight, self.new_id)

    def apply_checkpoint(self, state: Mapping[str, Any], names: Iterable[str]) -> dict[str, Any]:
        """A checkpoint from the old to the new order, as a new dict.

        Args:
            state: whole tensors by name, as a model without shards saves them.
            names: of the tensors whose rows are vocabulary entries: the embedding, the output layer's weight and bias.
                For a tied weight, every name under which it is saved. These tensors are new, as from
                :meth:`apply_rows`, without gradients; names that shared memory share it again.

        Raises:
            ValueError: ``names`` is one string, a name is missing, or its tensor has another number of rows.
        """
        return self._moved_checkpoint(state, names, self._old_id)

    def undo_checkpoint(self, state: Mapping[str, Any], names: Iterable[str]) -> dict[str, Any]:
        """A checkpoint from the new to the old order. The inverse of :meth:`apply_checkpoint`."""
        return self._moved_checkpoint(state, names, self.new_id)

    def save(self, path: str | PathLike[str]) -> None:
        """Write the order to a safetensors file. Needs the package safetensors, as :meth:`load` does."""
        from safetensors.torch import save_file

        save_file({"new_id": self.new_id.contiguous(), "rows": torch.tensor(self.rows, device="cpu")}, path)

    @classmethod
    def load(cls, path: str | PathLike[str]) -> VocabularyOrder:
        """The order in a file of :meth:`save`, on the CPU. Raises ``ValueError``, with path and reason, if the file
        cannot be read or holds no order."""
        from safetensors import SafetensorError
        from safetensors.torch import load_file

        try:
            tensors = load_file(path)
            if tensors.keys() != {"new_id", "rows"}:
                raise ValueError(f"expected the tensors new_id and rows, got {sorted(tensors)}")
            rows: Any = tensors["rows"].tolist()  # the constructor refuses anything but a number
            return cls(tensors["new_id"], rows)
        except (OSError, SafetensorError, ValueError) as error:
            raise ValueError(f"{path} holds no order of a vocabulary: {error}") from None

    def _moved(self, name: str, value: Any, sources: Tensor) -> Tensor:
        """``value`` with its row ``sources[i]`` moved to row i. Padding stays."""
        V = len(sources)
        if not isinstance(value, Tensor) or value.dim() < 1 or len(value) not in (V, self.rows):
            padded = f", or {self.rows} with padding" if self.rows > V else ""
            raise ValueError(f"{name} must be a tensor of {V} rows{padded}, got {described(value)}")
        padding = torch.arange(V, len(value), device=sources.device)
        return value.index_select(0, torch.cat([sources, padding]).to(value.device))

    @torch.no_grad()
    def _moved_checkpoint(self, state: Mapping[str, Any], names: Iterable[str], sources: Tensor) -> dict[str, Any]:
        if isinstance(names, str):
            raise ValueError(f"names must be several names, such as [{names!r}], got the string {names!r}")
        names = [*names]
        if missing := [name for name in names if name not in state]:
            raise ValueError(f"the checkpoint has no {', '.join(map(repr, missing))}")
        result, by_memory = dict(state), {}
        for name in names:
            value = state[name]
            result[name] = self._moved(name, value, sources)
            if value.data_ptr():  # the names of a tied weight share memory again
                memory = value.data_ptr(), value.shape, value.stride(), value.dtype, value.device
                result[name] = by_memory.setdefault(memory, result[name])
        return result


def _mapped(ids: Tensor, table: Tensor) -> Tensor:
    last = len(table) - 1
    if not isinstance(ids, Tensor) or ids.dtype not in INTEGERS:
        raise ValueError(f"ids must be a tensor of integers, got {described(ids)}")
    if torch.iinfo(ids.dtype).max < last:
        raise ValueError(f"ids must be of a dtype that can hold {last}, the largest id, got {ids.dtype}")
    # uint64 ids above int64's range become negative here. The last conversion restores them.
    wide = ids.long()
    inside = (wide >= 0) & (wide <= last)
    return torch.where(inside, table.to(ids.device)[wide.clamp(0, last)], wide).to(ids.dtype)
