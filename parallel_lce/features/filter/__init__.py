"""Filtered gradients: products that skip most of the gradient of the logits.

Most of a trained softmax lies in few tiles of 128 tokens by 128 vocabulary entries. A token's *unit* is the entry of
its row of the gradient G for a probability of 1. An entry of G divided by its token's unit is a probability. A tile is
*active* if one of its probabilities exceeds the filter, or is negative: that of a target that several tokens share.
(For other targets G holds 0: :mod:`parallel_lce.kernels.token_gradients`.) The backward's products read only the active
tiles. In every other tile G is estimated by a number per token times a number per entry:

    G_ij ~ m_it q_j        m_it = sum_j G_ij over tile t        q_j = sum_i |G_ij| u_i / sum_j sum_i |G_ij| u_i

The sums over i run over the tokens whose tile is not active. The weights ``u_i = 1 / unit_i`` make G's entries
probabilities. The estimate preserves each token's sum over the tile's entries, its *mass* m. It preserves the sums over
tokens if all tokens have the same coefficient. Then

    dX_i gets m_it c_t, with the centroid c_t = sum_j q_j W_j        dW_j gets q_j S_t, with S_t = sum_i m_it x_i

Both products with m have at most 1/128 of the full products' size, and cuBLAS computes them.

A slice of G in memory takes these launches (:mod:`.tiles`): a scan of the tiles for the largest entries, the masses and
the sums over tokens; the lists of active tiles; for dX the centroids, their product with the masses, and the product
with the active tiles; for dW the sums S_t, and the product with the active tiles, to which ``q_j S_t`` is added.
:mod:`.gradient` has the choice of whether a call is filtered.

The only bound of the errors is the filter's probability. They grow with the mass in skipped tiles. G must be a
probability times one number per token, except at the targets; a soft-cap's slope may be a further factor.
"""

from __future__ import annotations

from typing import Any

from parallel_lce.backends.interface import BackwardTask
from parallel_lce.call.call import Feature
from parallel_lce.core.options import Options, Tensors
from parallel_lce.core.plan import Block


class Filter(Feature):
    """The argument ``gradient_filter``. Gradients of the torch backend are exact with it, too."""

    def __init__(self) -> None:
        # The CallFilter of all backwards, once there is one. Copies of this feature share it.
        self._of_call: list[Any] = []

    @classmethod
    def asked(cls, options: Options, tensors: Tensors) -> bool:
        return options.gradient_filter is not None

    @classmethod
    def check(cls, options: Options, tensors: Tensors, vocab_size: int | None) -> None:
        """Refuses gradients of the logits that are not the probabilities times one number per token."""
        names = ("label_smoothing", "mean_logit", "entropy", "sum_p_squared")
        given = [name for name in names if getattr(options, name)]
        if tensors.selected is not None:
            given.append("selected")
        if given:
            raise ValueError(
                f"gradient_filter={options.gradient_filter} cannot be combined with {given[0]}, whose gradient is "
                "large where probabilities are small"
            )

    def before_backward(self, call: Any, task: BackwardTask, block: Block) -> BackwardTask:
        if call.backend.NAME == "torch":
            return task
        from parallel_lce.features.filter.gradient import SLICE_BYTES, CallFilter, is_large

        if not self._of_call:
            self._of_call.append(CallFilter(call.options.gradient_filter))
        entries = min(task.x.shape[0] * task.projection.real_rows, SLICE_BYTES // task.x.element_size())
        if is_large(entries, task.x.shape[1]):  # smaller slices are not filtered, and take no more memory
            task.scratch.size = max(task.scratch.size, SLICE_BYTES)
        return task._replace(filter=self._of_call[0])
