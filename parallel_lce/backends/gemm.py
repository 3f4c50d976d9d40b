"""Matrix products with fp32 (fp64 for fp64) results, at the best speed that torch offers.

Low-precision operands enter the product as they are on CUDA, whose tensor cores sum in fp32; CPUs
have no product with that result, so there they are converted to fp32 first.
"""

from __future__ import annotations

import torch
from torch import Tensor

from parallel_lce.weight_grad import accumulation_dtype


# oneDNN sums k products one after another: in pieces of 128 its rounding error falls below MKL's, for
# a tenth more time.
_SUMMED = 128
# Below this many products torch.mm is done before several calls have begun.
_SMALL = 1 << 21


def operand(tensor: Tensor) -> Tensor:
    """``tensor`` as :func:`matmul_nt` takes it on its device."""
    if tensor.is_cuda:
        return tensor
    return tensor.to(accumulation_dtype(tensor.dtype))


def _onednn(a: Tensor, b: Tensor) -> bool:
    # oneDNN picks its kernels by the processor's features; MKL, behind torch.mm, picks them by its
    # maker and runs at half the speed on AMD.
    return (
        a.device.type == "cpu"
        and a.dtype == torch.float32
        and a.numel() * b.shape[0] >= _SMALL
        and torch.backends.mkldnn.enabled
        and torch.backends.mkldnn.is_available()
        and hasattr(torch.ops.mkldnn, "_linear_pointwise")
    )


def _dense(tensor: Tensor) -> Tensor:
    # oneDNN has no fast kernel for a second operand with gaps between its rows.
    return tensor if tensor.is_contiguous() or tensor.t().is_contiguous() else tensor.contiguous()


def _onednn_nt(a: Tensor, b: Tensor) -> Tensor:
    product = None
    for k in range(0, a.shape[1], _SUMMED):
        left, right = a[:, k : k + _SUMMED], _dense(b[:, k : k + _SUMMED])
        part = torch.ops.mkldnn._linear_pointwise(left, right, None, "none", [], "")
        product = part if product is None else product.add_(part)
    return product


def matmul_nt(a: Tensor, b: Tensor) -> Tensor:
    """``a [m, k] @ b [n, k].T`` as a new fp32 (fp64) tensor ``[m, n]``."""
    if 0 in (*a.shape, b.shape[0]):
        return a.new_zeros(a.shape[0], b.shape[0], dtype=accumulation_dtype(a.dtype))
    if _onednn(a, b):
        return _onednn_nt(a, b)
    if a.dtype in (torch.float32, torch.float64):
        return torch.mm(a, b.t())
    return torch.mm(a, b.t(), out_dtype=torch.float32)


def accumulate_nt(
    total: Tensor, a: Tensor, b: Tensor, *, overwrite: bool, factor: Tensor | None = None
) -> None:
    """``total [m, n] += factor * a [m, k] @ b [n, k].T``, or ``=`` with ``overwrite``.

    ``factor`` is a 0-dimensional tensor, so that no host waits for it; None is 1.
    """
    if a.is_cuda and factor is None and a.dtype == total.dtype:
        torch.addmm(total, a, b.t(), beta=0 if overwrite else 1, out=total)
        return
    product = matmul_nt(a, b)
    if factor is not None:
        product *= factor
    total.copy_(product) if overwrite else total.add_(product)
