"""The signature of a call: all that its checks, its plan and its run depend on, but for the ranks of its group, the
strides and alignment of its tensors, and their values.

Calls of one signature are checked and planned once (:mod:`parallel_lce.prepare`), and run alike
(:mod:`parallel_lce.replay`). Both take the host longer than a small problem takes the GPU.
"""

from __future__ import annotations

import os

import torch
from torch import Tensor
from torch.autograd import forward_ad

from parallel_lce import debug
from parallel_lce.arguments import Arguments, LossOptions
from parallel_lce.backends import VARIABLE
from parallel_lce.budget import BUDGET_VARIABLE
from parallel_lce.grad_buffers import MainGrad
from parallel_lce.partials import Columns

_TENSORS = (Tensor, torch.nn.Parameter)
_PLAIN = frozenset((int, float, bool, str, type(None)))


def signature_of(
    a: Arguments, columns: Columns, options: LossOptions | None, accumulable: bool, main_grad: MainGrad | None
) -> tuple | None:
    """The signature, or None for a call that must be checked in full.

    Plain tensors and Python's own numbers and strings have a signature, outside of compilation, debug mode and
    forward-mode differentiation. The values of the tensors do not matter to checks and plan.
    """
    if torch.compiler.is_compiling() or forward_ad._current_level >= 0 or debug.enabled():
        return None
    key: list = [torch.is_grad_enabled(), accumulable, columns, a.reduce_dtype]
    for tensor in a.tensors_or_none:
        if tensor is None:
            key.append(None)
        elif type(tensor) in _TENSORS and tensor.layout is torch.strided and not tensor.is_neg():
            key += tensor.shape, tensor.dtype, tensor.device, tensor.requires_grad
        else:
            return None
    numbers: tuple = (
        a.sequence_parallel,
        a.reduce_hidden_grad,
        None if a.token_scale is not None else a.logit_scale,
        None if a.token_temperature is not None else a.temperature,
        a.logit_softcap,
        a.vocab_start,
        a.vocab_size,
        a.logits_budget,
        a.top_k,
        a.gradient_filter,
    )
    if options is not None:
        key.append(options.reduction)
        numbers += options.ignore_index, options.label_smoothing, options.z_loss, options.outside_is_nan
    # 1, 1.0 and True are equal as keys.
    kinds = tuple(map(type, numbers))
    if kinds[:2] != (bool, bool) or not _PLAIN.issuperset(kinds):
        return None
    key += kinds, numbers
    if main_grad is not None:
        key += main_grad.tensor.shape, main_grad.tensor.dtype
    # What chooses the backend, and the budget.
    key += os.environ.get(VARIABLE), os.environ.get("TRITON_INTERPRET")
    if a.logits_budget is None:
        key.append(os.environ.get(BUDGET_VARIABLE))
    signature = tuple(key)
    try:
        hash(signature)
    except TypeError:  # of an argument that the checks refuse
        return None
    return signature
