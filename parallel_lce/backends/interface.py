"""What a backend must do (:class:`Backend`), and its arguments and results.

No backend starts a collective or waits for one. The caller runs it on the weight's device and without autocast. What
:mod:`parallel_lce.distillation` makes of two blocks of logits has a module for each backend there.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import cached_property
from typing import Any, NamedTuple, Protocol

import torch
from torch import Tensor

from parallel_lce.core.grad_buffers import GradBuffer
from parallel_lce.core.logit_map import Projection
from parallel_lce.core.options import Wanted
from parallel_lce.core.partials import Coefficients, Columns
from parallel_lce.core.selection import Selection


class HiddenGrad:
    """Memory for a block's dX. ``new``: allocates it, when it is first asked for. ``last``: nothing waits for dX, so it
    may be formed after dW. Before that the backend may use dX's bytes for logits."""

    def __init__(self, new: Callable[[], Tensor], last: bool = False) -> None:
        self._new, self.last = new, last

    @cached_property
    def memory(self) -> Tensor:
        """``[R, D]``, written once"""
        return self._new()


class Scratch:
    """Working memory of one backward, shared by its blocks: ``size`` bytes beside the saved tensors."""

    def __init__(self, size: int, device: torch.device | str = "cpu") -> None:
        self.size = size
        self._device = device
        # None: the next :meth:`borrow` allocates it.
        self.memory: Tensor | None = None

    def adopt(self, tensor: Tensor) -> None:
        """Use the memory of a tensor that is no longer read, if it is larger and contiguous."""
        given = tensor.numel() * tensor.element_size()
        held = self.size if self.memory is None else self.memory.numel()
        if given > held and tensor.is_contiguous() and tensor.data_ptr() % 16 == 0:
            # A contiguous tensor of one element may have any stride.
            self.memory = torch.as_strided(tensor, (tensor.numel(),), (1,)).view(torch.uint8)

    def capacity(self, dtype: torch.dtype) -> int:
        """Elements that :meth:`borrow` can give."""
        held = 0 if self.memory is None else self.memory.numel()
        return max(self.size, held) // dtype.itemsize

    def borrow(self, elements: int, dtype: torch.dtype) -> Tensor:
        """``[elements]`` of uninitialised memory: the same memory at each call, allocated at the first one. A request
        may exceed :meth:`capacity` if the smallest unit of work does; memory is then allocated for it."""
        needed = elements * dtype.itemsize
        if self.memory is None or self.memory.numel() < needed:
            self.memory = torch.empty(max(self.size, needed), dtype=torch.uint8, device=self._device)
        return self.memory.narrow(0, 0, needed).view(dtype)


class ForwardTask(NamedTuple):
    """The arguments of a block's forward: R tokens against the real rows of a vocabulary shard."""

    projection: Projection
    # [R, D]
    x: Tensor
    # [R] int64 ids relative to the shard; an id outside ``[0, real_rows)`` has no logit here. None: no targets.
    target: Tensor | None
    columns: Columns
    # The exponentials of this many vocabulary rows, the shard's first, are saved.
    save: int
    # Memory of the exponentials, from ``allocate_saved``; None: new.
    buffer: Tensor | None = None
    # Memory of the partial [C, R]; None: new.
    out: Tensor | None = None
    # Selected entries, relative to the shard, with memory for their logits. Those of other shards and blocks are not
    # written, or are -inf.
    selection: Selection | None = None
    # Exponentials are saved as codes of one byte: only for gradients of alpha and beta alone.
    codes: bool = False
    # What is made of the partials, if the shard is the whole vocabulary; None: nothing.
    wanted: Wanted | None = None
    # Memory of the logits [R, real_rows], in the statistics' dtype, rows contiguous. None: they are not kept. Only
    # without ``save``.
    logits: Tensor | None = None


class BackwardTask(NamedTuple):
    """The arguments of a block's backward."""

    projection: Projection
    # [R, D]. Hidden states of other ranks may arrive later: see ``block_backward``.
    x: Tensor
    # See ForwardTask.
    target: Tensor | None
    # [C, R], merged over all ranks
    partial: Tensor
    coefficients: Coefficients
    # The backend's Saved from the block's forward; ``()``: all logits are recomputed. May be overwritten.
    saved: Any
    # Memory for the block's gradients, those of weight and bias to add to; None for one that is not needed.
    dx: HiddenGrad | None
    dweight: GradBuffer | None
    dbias: GradBuffer | None
    # Shared by the blocks of the call.
    scratch: Scratch
    # Selected entries, relative to the shard, with their logits, and their terms of the gradient of the projection's
    # output, which are added before it is rounded.
    selection: Selection | None = None
    # ``filter(piece, vocab_slice)``: the slice of a piece, or one that multiplies less. None: all are multiplied whole.
    # Only without gamma, delta, epsilon and ``selection``, for a backend with slices.
    filter: Callable[..., Any] | None = None

    def of_rows(self, rows: slice) -> BackwardTask:
        """The task of some of the tokens. Memory of gradients and ``saved`` stay the block's."""
        return self._replace(
            projection=self.projection.of_rows(rows),
            x=self.x[rows],
            target=None if self.target is None else self.target[rows],
            partial=self.partial[:, rows],
            coefficients=self.coefficients.of_rows(rows),
            selection=None if self.selection is None else self.selection.of_rows(rows),
        )


class Backend(Protocol):
    # In PARALLEL_LCE_BACKEND.
    NAME: str
    # Flops of a matrix product that take as long as reading or writing a byte.
    FLOPS_PER_BYTE: float
    # Of inputs whose exponentials can be saved.
    SAVED_DTYPES: tuple[torch.dtype, ...]
    # Whether a token's statistics have the same bits whatever surrounds it. Partials of ranks then have second rows.
    SAME_BITS: bool
    # Whether the backward recomputes logits in the memory of saved exponentials.
    REUSES_SAVED: bool
    # Whether exponentials can be saved as codes of one byte.
    CODES: bool
    # Class of what a block saves for its backward, a NamedTuple of tensors or None. Its field ``exponentials`` holds
    # those of the logits, or under a soft-cap what it is applied to, in fp16. A block that saves nothing has ``()``.
    Saved: Any

    # --- a block of R tokens ---

    def allocate_saved(self, projection: Projection, rows: int, entries: int) -> Tensor:
        """A buffer for the exponentials of ``rows`` tokens and the shard's first ``entries`` vocabulary rows."""
        ...

    def block_forward(self, task: ForwardTask) -> tuple[Tensor, Any, Any]:
        """A block's partial over the shard, ``[C, R]``; its :attr:`Saved` or ``()``; and, as of :meth:`merge_ranks`,
        what the task wants."""
        ...

    def block_backward(self, task: BackwardTask) -> Iterator[bool]:
        """Forms the gradients of a block. Logits whose exponentials are not saved are projected again.

        Yields True once dX is complete: while a collective sums it, what is left of dW and dbias is formed. If hidden
        states are read before, yields False first. At both all of them must arrive before the iterator goes on."""
        ...

    # --- results of all tokens ---

    def merge_ranks(
        self, packed: Tensor, columns: Columns, rows: int, vocab_size: int | None, wanted: Wanted | None
    ) -> tuple[Tensor, Tensor, Any]:
        """:func:`parallel_lce.core.partials.merge_ranks`, and what is wanted of the merged tokens. A loss: the losses
        ``[R]`` and the coefficients of its gradient (:func:`parallel_lce.backends.formulas.token_losses`). Statistics:
        by name (:func:`parallel_lce.backends.formulas.token_statistics`)."""
        ...

    # Those of :mod:`parallel_lce.backends.formulas`.
    without_factor: Callable[[Coefficients], Coefficients]
    statistics_gradient: Callable[..., Coefficients]
    mean_loss: Callable[..., tuple[Tensor, Tensor]]

    def scaled(self, gradient: Tensor, factor: Tensor, dtype: torch.dtype) -> Tensor:
        """``gradient * factor`` in ``dtype``, in place if the gradient has that dtype. ``factor``: 0-dimensional."""
        ...

    # --- selected entries ---

    def selected_logits(self, projection: Projection, x: Tensor, selection: Selection) -> None:
        """Write :attr:`Selection.logits`, as for ``ForwardTask.selection``."""

    def selected_rows(self, selection: Selection, source: Tensor, out: Tensor) -> None:
        """Write ``out [R, D]``: of each row the sum of its entries' gradients times the rows ``ids`` of ``source``."""

    def log_softmax_of_sets(self, logits: Tensor, selection: Selection, upstream: Tensor | None = None) -> Tensor:
        """Log-softmax ``[E]`` over each token's selected entries; -inf where a logit is -inf, NaN for entries without a
        token. With the ``upstream [E]`` gradient of these: the gradient of the logits."""
        ...

    # --- logits that exist ---

    def logits_partial(self, logits: Tensor, target: Tensor, shifted: bool, partial: Tensor) -> None:
        """Write the ``partial [3, N]``, or with ``shifted`` ``[4, N]``, of the user's ``logits [N, V/P]``. ``target
        [N]``: relative to the shard."""

    def logits_gradient(self, logits: Tensor, target: Tensor, partial: Tensor, coefficients: Tensor) -> Tensor:
        """The gradient ``p alpha - beta [j = target] - gamma`` of the user's ``logits``, in their dtype. ``partial``:
        merged over all ranks. ``coefficients [3, N]``."""
        ...


def block_logits(backend: Backend, projection: Projection, x: Tensor) -> tuple[Tensor, Tensor]:
    """The logits ``[R, V/P]`` of a block, in the statistics' dtype, and this rank's partials ``[3, R]``."""
    logits = aligned_logits(x, projection, projection.dtype)
    partial, *_ = backend.block_forward(ForwardTask(projection, x, None, Columns(), 0, logits=logits))
    return logits, partial


def aligned_logits(x: Tensor, projection: Projection, dtype: torch.dtype) -> Tensor:
    """New memory ``[R, V/P]`` with rows at multiples of 16 elements: cuBLAS wants 16 bytes, and Triton loads several
    elements at a time."""
    entries = projection.real_rows
    return x.new_empty(len(x), -(-entries // 16) * 16, dtype=dtype)[:, :entries]
