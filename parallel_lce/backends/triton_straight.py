"""The loss of one block whose exponentials are all saved, in straight lines: the Triton backend for small problems.

A small problem takes the GPU less time than the host needs to find out what to launch. The launches here are those of
:mod:`parallel_lce.backends.triton` and :mod:`parallel_lce.backends.triton_backward` for one block, in their order and
with their bits. They are found once for calls of one signature; after that nothing but allocations, two matrix products
and the launches themselves is left (:class:`parallel_lce.kernels.relaunch.Launches`).
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from parallel_lce.backends.gemm import accumulate_nt
from parallel_lce.backends.interface import Projection
from parallel_lce.backends.triton_backward import FUSED_BYTES, PRODUCT_BYTES
from parallel_lce.backends.triton_operands import product_of, stride_of
from parallel_lce.core.options import Options
from parallel_lce.core.partials import Columns
from parallel_lce.kernels.epilogues import ForwardEpilogue
from parallel_lce.kernels.losses import mean_loss, token_losses
from parallel_lce.kernels.partials import PartialColumns, merge_windows
from parallel_lce.kernels.projection import Product
from parallel_lce.kernels.relaunch import Launches, next_power_of_2
from parallel_lce.kernels.rewrite import GradientTerms, Saved, TokenCoefficients
from parallel_lce.kernels.targets import Targets, add_targets, scale_and_add_targets
from parallel_lce.kernels.token_gradients import token_gradients
from parallel_lce.kernels.token_logits import token_logits

_COLUMNS = Columns()


def is_straight(hidden: Tensor, weight: Tensor, options: Options) -> bool:
    """Whether this module computes a loss of ``hidden [..., D]``: its gradients are then probabilities times one number
    per token, beside the targets', and its fp32 dX is one product's."""
    if options.reduction is None:
        return False
    plain = options.label_smoothing == 0.0 and options.logit_softcap is None and options.gradient_filter is None
    small = hidden.numel() * 4 <= PRODUCT_BYTES and hidden.numel() * hidden.element_size() <= FUSED_BYTES
    return plain and small and weight.dtype == torch.bfloat16 and 0 not in (*hidden.shape, weight.shape[0])


class Found(NamedTuple):
    """What a forward keeps for its backward."""

    # [N, stride_of(V)]
    exponentials: Tensor
    # fp32: [3 N] the merged partial; [N] each alpha, beta and softmax shift; [windows * N] the windows' maxima; [N]
    # bytes of on_shift; and [4 N] for what backward finds of each token
    vectors: Tensor


class Straight:
    """The launches of the calls of one signature: of hidden states ``[..., D]`` and a shard of ``entries`` real rows.

    All hidden states and weights are contiguous and 16 bytes aligned.
    """

    def __init__(self, hidden: Tensor, weight: Tensor, entries: int, options: Options) -> None:
        tokens = hidden.shape[:-1].numel()
        # As they will be given. The hidden states of this call may have other strides, or another alignment.
        product = Product(hidden.new_empty(tokens, hidden.shape[-1]), weight[:entries])
        self._tokens, self._entries, self._options = tokens, entries, options
        self._windows, self._width = product.windows, product.tile.entries
        self._stride = stride_of(entries)
        # Of each of the vectors, which begin on boundaries of 16 bytes as tensors of their own do.
        sizes = 3 * tokens, tokens, tokens, tokens, self._windows * tokens, -(-tokens // 4), *[tokens] * 4
        self._sizes = [-(-size // 4) * 4 for size in sizes]
        self._size = sum(self._sizes)
        self._launches = Launches()

    def project(self, x: Tensor, projection: Projection, target: Tensor, partial: Tensor | None) -> Found:
        """Project ``x [N, D]``. ``target [N]``: relative to the shard. ``partial [3, N]``: where this shard's partial
        is written; None: among the vectors."""
        tokens, weight = self._tokens, projection.weight
        exponentials = x.new_empty(tokens, self._stride)
        vectors = x.new_empty(self._size, dtype=torch.float32)
        sums = x.new_empty(self._windows * tokens, dtype=torch.float32)

        def make() -> None:
            merged, _, _, shift, maxima, on_shift, *_ = self._parts(vectors)
            merged = merged if partial is None else partial
            product = product_of(projection, x, 0, self._entries)
            windows = PartialColumns(maxima, sums.view_as(maxima), *[None] * 6)
            token_logits(product, target, merged[2], shift)
            product.launch(exponentials[:, : self._entries], ForwardEpilogue(windows, shift))
            merge_windows(
                windows,
                merged,
                shift,
                _COLUMNS,
                target=target,
                window=self._width,
                entries=self._entries,
                start=projection.start,
                on_shift=on_shift,
            )

        given = target, projection.bias, projection.token_scale
        tensors = x, weight, exponentials, vectors, sums, partial, *given
        self._launches.run(("project", _alignment(given)), tensors, make)
        return Found(exponentials, vectors)

    def losses(
        self, found: Found, merged: Tensor | None, vocab_size: Tensor | int, target: Tensor, token_weight: Tensor | None
    ) -> tuple[Tensor, Tensor | None]:
        """The losses ``[N]``; or their mean and what their sum was divided by. ``merged [3, N]``: the partial over all
        ranks; None: among the vectors."""
        vectors, options = found[1], self._options
        losses, mean = vectors.new_empty(self._tokens), None
        if options.reduction == "mean":
            mean = vectors.new_empty(()), vectors.new_empty(())

        def make() -> None:
            own, alpha, beta, *_ = self._parts(vectors)
            whole = own if merged is None else merged
            token_losses(whole, vocab_size, target, token_weight, options, out=(losses, alpha, beta))
            if mean is not None:
                mean_loss(losses, target, token_weight, options.ignore_index, out=mean)

        size = vocab_size if isinstance(vocab_size, Tensor) else None
        given = target, token_weight
        tensors = vectors, losses, merged, size, *(mean or ()), *given
        self._launches.run(("losses", _alignment(given)), tensors, make)
        return (losses.sum() if options.reduction == "sum" else losses, None) if mean is None else mean

    def hidden_gradient(
        self,
        x: Tensor,
        projection: Projection,
        target: Tensor,
        found: Found,
        merged: Tensor | None,
        factor: Tensor,
        dx: Tensor | None,
        wants_weight: bool,
    ) -> Tensor:
        """Write this shard's ``dx [N, D]``, and prepare dW: returns the rows of x times their factors. ``factor``: the
        gradient of the sum of the losses, ``[N]`` or 0-dimensional."""
        exponentials, vectors = found
        weight, gradient = projection.weight, self._gradient(exponentials)

        def prepare() -> None:
            own, alpha, beta, shift, maxima, on_shift, *memory = self._parts(vectors)
            coefficients = TokenCoefficients(alpha, beta, None, None, None, factor)
            token_gradients(
                gradient,
                Saved(gradient, maxima, shift, on_shift),
                target,
                GradientTerms.of(own if merged is None else merged, coefficients, None, projection),
                entries=self._entries,
                window=next_power_of_2(-(-self._entries // self._windows)),
                find_shared=wants_weight,
                memory=memory,
            )

        given = target, projection.token_scale, factor
        tensors = exponentials, vectors, merged, *given
        aligned = _alignment(given)
        self._launches.run(("tokens", wants_weight, factor.stride(), aligned), tensors, prepare)
        scaled = torch.empty_like(x) if wants_weight else x
        real = weight if len(weight) == self._entries else weight[: self._entries]
        product = None
        if dx is not None:
            product = self._product(gradient, real, torch.float32)

        def finish() -> None:
            dw_factor, _, residual, dx_factor = [v[: self._tokens] for v in self._parts(vectors)[6:]]
            if dx is None or product is None:
                scale_and_add_targets(x, dw_factor, None, scaled)
                return
            of_weight = (x, dw_factor, scaled) if wants_weight else None
            scale_and_add_targets(product, dx_factor, (target, residual, real), dx, of_weight)

        tensors = x, weight, target, vectors, scaled if wants_weight else None, product, dx
        self._launches.run(("finish", wants_weight, dx is None, aligned), tensors, finish)
        return scaled

    def weight_gradient(
        self, x: Tensor, target: Tensor, found: Found, scaled: Tensor, total: Tensor | None, overwrite: bool
    ) -> Tensor:
        """Write the real rows ``total [V, D]`` of dW, or add to them; None: they are new. Returns them. The others: of
        :meth:`hidden_gradient`."""
        exponentials, vectors = found
        gradient = self._gradient(exponentials).t()
        if total is None:
            total = self._product(gradient, scaled, scaled.dtype)
        else:
            accumulate_nt(total, gradient, scaled.t(), overwrite=overwrite)

        def make() -> None:
            _, unshared, residual, _ = self._parts(vectors)[6:]
            tokens = self._tokens
            targets = Targets(target, residual[:tokens], unshared.view(torch.uint8)[:tokens])
            add_targets(total, 0, targets, x)

        tensors = x, target, vectors, total
        self._launches.run(("targets", total.stride(), _alignment((target, total))), tensors, make)
        return total

    def partial_of(self, found: Found) -> Tensor:
        """The merged partial ``[3, N]`` of one rank."""
        return found[1][: 3 * self._tokens].view(3, self._tokens)

    def coefficients_of(self, found: Found) -> tuple[Tensor, Tensor]:
        """alpha and beta ``[N]``."""
        _, alpha, beta, *_ = self._parts(found[1])
        return alpha, beta

    def _parts(self, vectors: Tensor) -> tuple[Tensor, ...]:
        """Of :class:`Found`: the partial, alpha, beta, softmax shift, maxima and on_shift; then four vectors."""
        tokens, windows = self._tokens, self._windows
        partial, alpha, beta, shift, maxima, on_shift, *others = vectors.split(self._sizes)
        return (
            partial[: 3 * tokens].view(3, tokens),
            *(vector[:tokens] for vector in (alpha, beta, shift)),
            maxima[: windows * tokens].view(windows, tokens),
            on_shift.view(torch.uint8)[:tokens],
            *others,
        )

    def _gradient(self, exponentials: Tensor) -> Tensor:
        """The real entries ``[N, V]``."""
        return exponentials if self._stride == self._entries else exponentials[:, : self._entries]

    def _product(self, a: Tensor, b: Tensor, dtype: torch.dtype) -> Tensor:
        """``a @ b`` as a new tensor."""
        if self._entries % 8 == 0 and a.is_cuda:
            return torch.mm(a, b) if dtype == a.dtype else torch.mm(a, b, out_dtype=dtype)
        product = a.new_empty(a.shape[0], b.shape[1], dtype=dtype)
        accumulate_nt(product, a, b.t(), overwrite=True)
        return product


def _alignment(given: tuple[Tensor | None, ...]) -> int:
    """What launches depend on of the caller's tensors, whose shapes and dtypes are known: their addresses modulo 16."""
    bits = 0
    for tensor in given:
        bits = bits * 16 + (0 if tensor is None else tensor.data_ptr() & 15)
    return bits
