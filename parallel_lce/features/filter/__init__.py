"""Filtered gradients: products that skip most of the gradient of the logits.

Most of a trained softmax lies in few tiles of 128 tokens by 128 vocabulary entries. A token's *unit* is the entry of
its row of the gradient G for a probability of 1. An entry of G divided by its token's unit is a probability. A tile is
*active* if one of its probabilities exceeds the filter, or if it contains a target that several tokens share. (For
other targets G holds 0: :mod:`parallel_lce.kernels.token_gradients`.) The backward's products read only the active
tiles. In every other tile G is estimated by a number per token times a number per entry:

    G_ij ~ m_it q_j        m_it = sum_j G_ij over tile t        q_j = sum_i |G_ij| u_i / sum_j sum_i |G_ij| u_i

The sums over i run over the tokens whose tile is not active. The weights ``u_i = 1 / unit_i`` make G's entries
probabilities. The estimate preserves each token's sum over the tile's entries, its *mass* m. It preserves the sums over
tokens if all tokens have the same coefficient. Then

    dX_i gets m_it c_t, with the centroid c_t = sum_j q_j W_j        dW_j gets q_j S_t, with S_t = sum_i m_it x_i

Both products with m have at most 1/128 of the full products' size, and cuBLAS computes them.

A slice of G in memory takes these launches: a scan of the tiles for the largest entries, the masses and the sums over
tokens; the lists of active tiles (:mod:`.kernels.tiles`); for dX the centroids, their product with the masses, and the
product with the active tiles; for dW the sums S_t, and the product with the active tiles, to which ``q_j S_t`` is added
(:mod:`.kernels.products`; on Hopper :mod:`.kernels.hopper_products`).

If a slice was not saved, the backward projects only its active windows again (:mod:`.kernels.windows`). The forward
keeps the maximum and the sum of exponentials of each token's windows. They give a window's largest probability and its
mass. Windows then take the place of the tiles t in the formulas.

Restrictions: the only bound of the errors is the filter's probability. They grow with the mass in skipped tiles. G must
be a probability times one number per token, except at the targets; a soft-cap's slope may be a further factor. Rows of
G begin at multiples of 16 bytes. Windows need G of 16 bits, no soft-cap, and windows of one or two tiles.
"""

from __future__ import annotations

from typing import Any, NamedTuple

from parallel_lce.backends.interface import BackwardTask, ForwardTask
from parallel_lce.core.options import Options, Tensors


class Filter(NamedTuple):
    """The option ``gradient_filter`` of a call. It changes nothing in the torch backend, whose gradients are exact."""

    eps: float

    @classmethod
    def of(cls, options: Options) -> Filter | None:
        return None if options.gradient_filter is None else cls(options.gradient_filter)

    def check(self, options: Options, tensors: Tensors | None = None) -> None:
        """Raise ``ValueError`` for a call whose gradient of the logits is not the probabilities times one number per
        token. ``tensors``: None before they are known."""
        refused = {
            f"label_smoothing={options.label_smoothing}": options.label_smoothing != 0,
            "mean_logit": options.mean_logit,
            "entropy": options.expected_logit,
            "sum_p_squared": options.sum_p_squared,
            "selected": tensors is not None and tensors.picked is not None,
        }
        for name, given in refused.items():
            if given:
                raise ValueError(
                    f"gradient_filter={self.eps} cannot be combined with {name}, whose gradient is large where "
                    "probabilities are small"
                )

    def before_block(self, task: ForwardTask, call: Any) -> ForwardTask:
        """The forward saves the partials of windows for a backward of one block without a gradient of the bias."""
        plan, needs = call.plan, call.needs
        alone = len(plan.blocks) == 1 and plan.blocks == plan.forward_blocks and not plan.accumulate
        if call.backend.NAME == "torch" or not any(needs) or needs.bias or not alone:
            return task
        from parallel_lce.features.filter.form import with_window_partials

        return with_window_partials(task)

    def before_backward(self, task: BackwardTask, call: Any) -> BackwardTask:
        """``call``: a :class:`parallel_lce.call.call.Call`."""
        if call.backend.NAME == "torch":
            return task
        from parallel_lce.features.filter.form import FilterForm

        return task._replace(form=FilterForm(self.eps))
