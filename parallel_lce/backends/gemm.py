"""Matrix products with fp32 (fp64 for fp64) sums.

On CUDA low-precision operands enter the product as they are: tensor cores sum in fp32. CPUs have no such product, and
fp16 gradients would underflow: the torch backend converts such operands to fp32 first.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from parallel_lce.core.partials import accumulation_dtype

_WIDE = torch.float32, torch.float64
# 16-bit elements in 16 bytes. If an operand's contiguous dimension is no multiple of this, cuBLAS takes up to five
# times as long, even if the rows are aligned.
_ALIGNED = 8


def operand(tensor: Tensor) -> Tensor:
    """``tensor`` as an operand of a product: in fp32 if it is fp16, or bf16 on a CPU."""
    plain = tensor.dtype in _WIDE or (tensor.is_cuda and tensor.dtype == torch.bfloat16)
    return tensor if plain else tensor.float()


def _on_cuda(total: Tensor, a: Tensor, b: Tensor, overwrite: bool) -> None:
    """``total (+)= a @ b`` in place. If the contiguous dimension of a low-precision ``a`` is no multiple of 8
    elements, the remainder is a second product. If that is the K dimension, the two are added, but only in an fp32
    ``total``: any other would be rounded twice."""
    along = 1 if a.stride(1) == 1 else 0
    size = a.shape[along]
    whole = size // _ALIGNED * _ALIGNED
    if whole in (0, size) or a.element_size() != 2 or a.stride(1 - along) % _ALIGNED:
        _product(total, a, b, overwrite)
    elif along == 0:
        _product(total[:whole], a[:whole], b, overwrite)
        _product(total[whole:], a[whole:], b, overwrite)
    elif total.dtype != torch.float32:
        _product(total, a, b, overwrite)
    else:
        _product(total, a[:, :whole], b[:whole], overwrite)
        _product(total, a[:, whole:], b[whole:], False)


def _product(total: Tensor, a: Tensor, b: Tensor, overwrite: bool) -> None:
    form: dict[str, Any] = {} if total.dtype == a.dtype else {"out_dtype": total.dtype}
    if overwrite:
        torch.mm(a, b, out=total, **form)
    else:
        torch.addmm(total, a, b, out=total, **form)


def matmul(a: Tensor, b: Tensor) -> Tensor:
    """``a [m, k] @ b [k, n]`` as a new fp32 (fp64) tensor ``[m, n]``."""
    product = torch.empty(a.shape[0], b.shape[1], dtype=accumulation_dtype(a.dtype), device=a.device)
    accumulate(product, a, b, overwrite=True)
    return product


def accumulate(total: Tensor, a: Tensor, b: Tensor, *, overwrite: bool, factor: Tensor | None = None) -> None:
    """``total [m, n] += factor * a [m, k] @ b [k, n]``, or ``=`` with ``overwrite``. ``total`` is fp32 (fp64), or of
    lower precision with ``overwrite``. ``factor`` is a 0-dimensional tensor, so that the host does not synchronise with
    the device; None is 1."""
    if 0 in (*a.shape, b.shape[1]):
        if overwrite:
            total.zero_()
    elif factor is not None:
        put(total, matmul(a, b).mul_(factor), overwrite)
    elif a.is_cuda:
        _on_cuda(total, a, b, overwrite)
    elif total.dtype not in _WIDE:
        put(total, matmul(a, b), overwrite)
    else:
        plain = a.dtype == b.dtype == total.dtype
        _product(total, a if plain else operand(a), b if plain else operand(b), overwrite)


def put(total: Tensor, value: Tensor, overwrite: bool) -> None:
    """``total += value``, or ``=`` with ``overwrite``."""
    total.copy_(value) if overwrite else total.add_(value)
