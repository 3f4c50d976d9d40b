"""What a backend must do. A backend is a module that satisfies :class:`Backend`.

No backend starts a collective or waits for one. The caller runs it on the weight's device and without autocast. The
work of :mod:`parallel_lce.distillation` has a module for each backend there.
"""

from __future__ import annotations

from typing import Any, Protocol

import torch
from torch import Tensor

from parallel_lce.backends.interface import BackwardTask, ForwardTask, Picked, PickedGradient, Projection, Saved
from parallel_lce.core.options import Options
from parallel_lce.core.partials import Coefficients, Columns


class BlockBackward(Protocol):
    """The gradients of one block, in two steps: a collective sums dX while dW is formed."""

    # Whether hidden_grad reads x, so that the gather of x must be complete.
    reads_hidden_first: bool

    def hidden_grad(self) -> None:
        """Form dX, and any part of dW and dbias."""

    def weight_grad(self) -> None:
        """Form what is left of dW and dbias."""


class Backend(Protocol):
    # In PARALLEL_LCE_BACKEND.
    NAME: str
    # Flops of a matrix product that take as long as reading or writing a byte.
    FLOPS_PER_BYTE: float
    # Whether a token's statistics have the same bits whatever surrounds it. Partials of ranks then have second rows.
    SAME_BITS: bool
    # Whether the backward recomputes logits in the memory of saved exponentials.
    REUSES_SAVED: bool
    # Whether exponentials can be saved as codes of one byte.
    CODES: bool
    # Most flops of the three products for which a loss makes fp32 logits; 0: never.
    DENSE_FLOPS: float
    # Class of the tensors that a block saves, a NamedTuple: see interface.Saved.
    Saved: Any
    # Class of the work on dense logits, one instance for each signature: parallel_lce.backends.triton_dense.
    Dense: Any

    # --- a block of R tokens ---

    def allocate_saved(self, projection: Projection, rows: int, entries: int) -> Tensor:
        """A buffer for the exponentials of ``rows`` tokens and the shard's first ``entries`` vocabulary rows."""
        ...

    def block_forward(self, task: ForwardTask) -> tuple[Tensor, Saved | tuple[()]]:
        """A block's partial over the shard, ``[C, R]``, and the tensors that it saves: the exponentials of its first
        vocabulary rows."""
        ...

    def block_backward(self, task: BackwardTask) -> BlockBackward:
        """Logits whose exponentials are not saved are projected again."""
        ...

    # --- results of all tokens ---

    def merge_ranks(self, packed: Tensor, columns: Columns, rows: int, vocab_size: int | None) -> tuple[Tensor, Tensor]:
        """:func:`parallel_lce.core.partials.merge_ranks`"""
        ...

    def token_losses(
        self, partial: Tensor, vocab_size: Tensor | int, target: Tensor, token_weight: Tensor | None, options: Options
    ) -> tuple[Tensor, Coefficients]:
        """:func:`parallel_lce.backends.loss_formula.token_losses`"""
        ...

    def token_statistics(
        self,
        partial: Tensor,
        vocab_size: Tensor | int,
        target: Tensor | None,
        columns: Columns,
        options: Options,
        log_sum: bool = False,
    ) -> dict[str, Tensor | None]:
        """:func:`parallel_lce.backends.statistics_formula.token_statistics`"""
        ...

    def statistics_gradient(
        self,
        upstream: dict[str, Tensor | None],
        partial: Tensor,
        vocab_size: Tensor,
        target: Tensor | None,
        columns: Columns,
        options: Options,
    ) -> Coefficients:
        """:func:`parallel_lce.backends.statistics_formula.statistics_gradient`"""
        ...

    def mean_loss(
        self, losses: Tensor, target: Tensor, token_weight: Tensor | None, ignore_index: int | None
    ) -> tuple[Tensor, Tensor]:
        """:func:`parallel_lce.backends.loss_formula.mean_loss`"""
        ...

    def scaled(self, gradient: Tensor, factor: Tensor, dtype: torch.dtype) -> Tensor:
        """``gradient * factor`` in ``dtype``, in place if the gradient has that dtype. ``factor``: 0-dimensional."""
        ...

    # --- picked entries ---

    def picked_logits(self, projection: Projection, x: Tensor, picked: Picked, out: Tensor) -> None:
        """Write the logits of a block's picked entries to ``out [E]``. Elements of other shards are 0, or are not
        written."""

    def picked_hidden_gradient(self, weight: Tensor, gradient: PickedGradient, dx: Tensor) -> None:
        """Write ``dx [R, D]``: the sums of the picked rows of ``weight [V, D]``, times their values."""

    def picked_weight_gradient(
        self, x: Tensor, owner: Tensor, gradient: PickedGradient, dweight: Tensor, dbias: Tensor | None
    ) -> None:
        """Write ``dweight [V, D]`` and ``dbias [V]``, 0 in rows that are not picked. ``owner [E]``: the row of
        ``x [R, D]`` of each entry."""

    def log_softmax_of_sets(
        self, packed: Tensor, sets: Any, broken: Tensor | None, vocab_size: Tensor | int
    ) -> tuple[Tensor, Tensor]:
        """Log-softmax ``[E]`` over each token's picked entries, and their logits ``[E]``; -inf and 0 for ids outside
        ``[0, vocab_size)``.

        ``packed [P, >= E]``: each rank's logits, 0 for other ranks' ids. ``sets``: the picked entries
        (:class:`parallel_lce.call.picks.PickedIds`). ``broken``, 0-dimensional bool: all log-probabilities are NaN.
        """
        ...

    def gradient_of_sets(self, log_probs: Tensor, upstream: Tensor, sets: Any) -> Tensor:
        """The gradient ``[E]`` of the logits of :meth:`log_softmax_of_sets`."""
        ...

    # --- logits that exist ---

    def logits_partial(self, logits: Tensor, target: Tensor, shifted: bool, partial: Tensor) -> None:
        """Write the ``partial [3, N]``, or with ``shifted`` ``[4, N]``, of the user's ``logits [N, V/P]``. ``target
        [N]``: relative to the shard."""

    def logits_gradient(self, logits: Tensor, target: Tensor, partial: Tensor, coefficients: Tensor) -> Tensor:
        """The gradient ``p alpha - beta [j = target] - gamma`` of the user's ``logits``, in their dtype. ``partial``:
        merged over all ranks. ``coefficients [3, N]``."""
        ...
