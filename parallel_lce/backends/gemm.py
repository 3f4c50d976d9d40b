"""Matrix products with fp32 (fp64 for fp64) sums, at the best speed that torch offers.

On CUDA low-precision operands enter the product as they are: tensor cores sum in fp32. CPUs have no such product, so
there the operands are converted to fp32 first.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from parallel_lce.partials import accumulation_dtype

# K per oneDNN product. oneDNN sums along K one after another: in pieces of 128 its rounding error falls below MKL's,
# for a tenth more time.
_SUMMED = 128
# Multiplications below which one torch.mm is faster than several oneDNN calls.
_SMALL = 1 << 21
# Elements of 16 bytes. Where an operand's contiguous dimension is no multiple of them, cuBLAS takes up to five times as
# long, even if the rows are aligned.
_ALIGNED = 8


def operand(tensor: Tensor) -> Tensor:
    """``tensor`` as :func:`matmul_nt` takes it on its device."""
    if tensor.is_cuda:
        return tensor
    return tensor.to(accumulation_dtype(tensor.dtype))


def _onednn(a: Tensor, b: Tensor) -> bool:
    # oneDNN chooses kernels by the processor's features. MKL, behind torch.mm, chooses them by the processor's maker,
    # and runs at half the speed on AMD.
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
    assert product is not None  # K is at least 1
    return product


def _cuda_nt(total: Tensor, a: Tensor, b: Tensor, overwrite: bool) -> None:
    """``total (+)= a @ b.T`` in place.

    If the contiguous dimension of a low-precision ``a`` is no multiple of 8 elements, the remainder is a second
    product. If that dimension is K, the two are added, so ``total`` must be fp32: otherwise it would be rounded
    twice.
    """
    along = 1 if a.stride(1) == 1 else 0
    size = a.shape[along]
    whole = size // _ALIGNED * _ALIGNED
    aligned = a.element_size() == 2 and a.stride(1 - along) % _ALIGNED == 0
    if not aligned or whole in (0, size) or (along == 1 and total.dtype != torch.float32):
        _cuda_product(total, a, b, overwrite)
    elif along == 0:
        _cuda_product(total[:whole], a[:whole], b, overwrite)
        _cuda_product(total[whole:], a[whole:], b, overwrite)
    else:
        _cuda_product(total, a[:, :whole], b[:, :whole], overwrite)
        _cuda_product(total, a[:, whole:], b[:, whole:], False)


def _cuda_product(total: Tensor, a: Tensor, b: Tensor, overwrite: bool) -> None:
    form: dict[str, Any] = {} if total.dtype == a.dtype else {"out_dtype": total.dtype}
    if overwrite:
        torch.mm(a, b.t(), out=total, **form)
    else:
        torch.addmm(total, a, b.t(), out=total, **form)


def matmul_nt(a: Tensor, b: Tensor) -> Tensor:
    """``a [m, k] @ b [n, k].T`` as a new fp32 (fp64) tensor ``[m, n]``."""
    dtype = accumulation_dtype(a.dtype)
    if 0 in (*a.shape, b.shape[0]):
        return a.new_zeros(a.shape[0], b.shape[0], dtype=dtype)
    if a.is_cuda:
        product = a.new_empty(a.shape[0], b.shape[0], dtype=dtype)
        _cuda_nt(product, a, b, True)
        return product
    a, b = operand(a), operand(b)
    if _onednn(a, b):
        return _onednn_nt(a, b)
    # A checkpoint that keeps results of torch.mm would keep one that callers change in place.
    return torch.mm(a, b.t(), out=a.new_empty(a.shape[0], b.shape[0]))


def accumulate_nt(total: Tensor, a: Tensor, b: Tensor, *, overwrite: bool, factor: Tensor | None = None) -> None:
    """``total [m, n] += factor * a [m, k] @ b [n, k].T``, or ``=`` with ``overwrite``.

    Sums are fp32 (fp64 for fp64). ``total`` is fp32 (fp64), or of lower precision with ``overwrite``.
    ``factor`` is a 0-dimensional tensor, so that no host waits for it; None is 1.
    """
    if a.is_cuda and factor is None and 0 not in (*a.shape, b.shape[0]):
        _cuda_nt(total, a, b, overwrite)
        return
    product = matmul_nt(a, b)
    if factor is not None:
        product *= factor
    put(total, product, overwrite)


def put(total: Tensor, value: Tensor, overwrite: bool) -> None:
    """``total += value``, or ``=`` with ``overwrite``."""
    total.copy_(value) if overwrite else total.add_(value)
