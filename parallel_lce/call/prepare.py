"""Makes a call from a public function's options and tensors.

Calls of one signature are checked and planned once. Checks and plan depend on the signature alone (``_signature``): the
options; the shapes, dtypes and devices of the tensors and of a ``main_grad``; which of them need gradients; the ranks
of the group; and the environment variables that choose the backend and the budget. They do not depend on the tensors'
values.
"""

from __future__ import annotations

import os
from dataclasses import replace
from typing import cast

import torch
import torch.distributed as dist
from torch import Tensor

from parallel_lce.backends import VARIABLE, backend_of
from parallel_lce.call import debug
from parallel_lce.call.call import Call, Inputs, features_of
from parallel_lce.call.checks import check_target, check_tensors, known_vocab_size
from parallel_lce.core.collectives import Layout, Shard, digest_of
from parallel_lce.core.grad_buffers import MainGrad
from parallel_lce.core.logit_map import LogitMap
from parallel_lce.core.memory import in_memory, out_of_inference
from parallel_lce.core.options import Options, Tensors, agreed, as_int64, check_options, with_floats
from parallel_lce.core.partials import accumulation_dtype
from parallel_lce.core.plan import BUDGET_VARIABLE, NOMINAL_SHARD, Needs, Plan, Problem, default_budget, plan
from parallel_lce.core.private import in_forward_mode, outside_selective_checkpoints, recording
from parallel_lce.core.selection import Selection

KNOWN: dict[tuple, Call] = {}
"""Calls without their tensors, by signature."""

_MOST_KNOWN = 1024
_PLAIN_TENSORS = (Tensor, torch.nn.Parameter)
_PLAIN = frozenset((int, float, bool, str, type(None), torch.dtype))
_VARIABLES = VARIABLE, BUDGET_VARIABLE
# Under a soft-cap the forward saves what that is applied to, in fp16. Largest cap for which this is enough: a logit's
# error is then at most 0.03, in fp16 0.001. fp32 and fp64, whose logits are otherwise not rounded, have none.
_LARGEST_CAP = {torch.bfloat16: 256.0, torch.float16: 10.0}


def prepare(
    options: Options,
    tensors: Tensors,
    group: dist.ProcessGroup | None = None,
    needs: Needs | None = None,
    *,
    main_grad: MainGrad | None = None,
) -> tuple[Call, Inputs]:
    """The checked and planned call, and its hidden states, weight and bias. Arguments as in :func:`check`, and:

    ``main_grad``: dW is added to it, and no gradient is formed in forward. ``needs``: which gradients a backward must
    produce; by default the gradients of tensors that require one.
    """
    tensors, layout = autocasted(tensors), Layout.of(group, options.sequence_parallel)
    key = _signature(options, tensors, layout, main_grad, needs)
    known = None if key is None else KNOWN.get(key)
    if known is None:
        options, _, shape = check(options, tensors, group, main_grad)
        tensors = Tensors(*[in_memory(t) if isinstance(t, Tensor) else t for t in tensors])
        needs = needs_of(tensors) if needs is None else needs
        known = _planned(options, tensors, layout, shape, needs, main_grad)
        if key is not None:
            if len(KNOWN) >= _MOST_KNOWN:
                KNOWN.clear()
            KNOWN[key] = known
    with outside_selective_checkpoints():  # whose hooks may change strides, and so what is copied
        result = _with_tensors(known, tensors, layout, main_grad)  # may refuse a target
    debug.state.awaited = False
    return result


def check(
    options: Options, tensors: Tensors, group: dist.ProcessGroup | None, main_grad: MainGrad | None = None
) -> tuple[Options, Layout, torch.Size]:
    """Raise ``ValueError`` for arguments that do not fit. Returns the options with floats for integers, the layout and
    the tokens' shape. torch.compile traces this function."""
    layout = Layout.of(group, options.sequence_parallel)
    options = with_floats(options)
    check_options(options)
    shape = check_tensors(options, tensors, layout)
    if main_grad is not None and main_grad.tensor.shape != tensors.linear_weight.shape:
        raise ValueError(
            f"main_grad must have linear_weight's shape {list(tensors.linear_weight.shape)}, got "
            f"{list(main_grad.tensor.shape)}"
        )
    backend_of(tensors.linear_weight)  # may refuse the environment's choice
    return options, layout, shape


def needs_of(tensors: Tensors) -> Needs:
    """The gradients that a backward must produce."""
    if not torch.is_grad_enabled():
        return Needs(False, False, False)
    return Needs(*[isinstance(t, Tensor) and t.requires_grad for t in (tensors[0], tensors[1], tensors[3])])


def _signature(
    options: Options, tensors: Tensors, layout: Layout, main_grad: MainGrad | None, needs: Needs | None
) -> tuple | None:
    """The signature. None for a call that must be checked in full: in debug mode, forward-mode differentiation or a
    trace, or with an argument that is neither a plain tensor nor a number or string of Python's own types."""
    if in_forward_mode() or recording() or debug.enabled():
        return None
    # 1, 1.0 and True are equal as keys.
    kinds = tuple(map(type, options))
    if not _PLAIN.issuperset(kinds) or tensors.input is None:
        return None
    key: list = [options, kinds, needs, torch.is_grad_enabled(), *map(os.environ.get, _VARIABLES)]
    for tensor in tensors:
        if tensor is None:
            key.append(None)
        elif (
            type(tensor) in _PLAIN_TENSORS
            and tensor.layout is torch.strided
            and not (tensor.is_nested or tensor.is_neg())
        ):
            key += tensor.shape, tensor.dtype, tensor.device, tensor.requires_grad
        else:
            return None
    if main_grad is not None:
        key += main_grad.tensor.shape, main_grad.tensor.dtype
    if layout.ranks > 1:
        key += layout.ranks, layout.rank, None if tensors.input.is_cuda else dist.get_backend(layout.group)
    return tuple(key)


def _planned(
    options: Options, tensors: Tensors, layout: Layout, shape: torch.Size, needs: Needs, main_grad: MainGrad | None
) -> Call:
    """A planned call without its tensors. ``options``: checked."""
    weight = tensors.linear_weight
    backend = backend_of(weight)
    if options.logits_budget is None:
        options = options._replace(logits_budget=default_budget(weight.device))
    number = None
    if debug.enabled():
        vocab_size = debug.check_together(options, tensors, layout, needs, main_grad)
        check_target(options, as_int64(tensors.target), vocab_size, layout)
        number = debug.next_call(layout)
    shard = Shard.of(weight.shape[0], layout, options.vocab_start, options.vocab_size)
    if layout.ranks > 1:
        shard = replace(shard, digest=digest(options, tensors, shape))
    call = Call(
        options=options,
        backend=backend,
        shard=shard,
        columns=replace(options.columns, low=backend.SAME_BITS and layout.ranks > 1),
        plan=cast(Plan, None),  # until it is made, below
        shape=shape,
        vocab_size=known_vocab_size(shard.rows, layout, options.vocab_start, options.vocab_size),
        needs=needs,
        dtype=accumulation_dtype(weight.dtype),
        logit_map=LogitMap.of(options),
        features=tuple([kind() for kind in features_of(options, tensors)]),
        number=number,
    )
    return call._replace(plan=_plan(call, tensors, layout, main_grad))


def digest(options: Options, tensors: Tensors, shape: torch.Size) -> int:
    """Digest of the arguments that must be equal on all ranks. Not in it: the budget, which may depend on a
    rank's memory, and options of gradients, which a rank may not form."""
    start = options.vocab_start if options.vocab_size is None else None
    values = agreed(options._replace(vocab_start=start, logits_budget=None, reduce_dtype=None))
    values = {name: value + 0.0 if isinstance(value, float) else value for name, value in values.items()}  # -0.0 is 0.0
    per_token = tensors.logit_scale is not None, tensors.temperature is not None
    return digest_of(*values.items(), shape.numel(), tensors.input.shape[-1], tensors.input.dtype, *per_token)


def _with_tensors(known: Call, tensors: Tensors, layout: Layout, main_grad: MainGrad | None) -> tuple[Call, Inputs]:
    hidden, weight, target, bias, *of_tokens = tensors
    target, *of_tokens = [t if t is None else out_of_inference(t) for t in (target, *of_tokens)]
    token_weight, scale, temperature, ids, offsets = of_tokens
    weight = weight if weight.stride(1) == 1 else weight.contiguous()
    target = target if target is None else as_int64(target).reshape(-1).contiguous()
    if weight.device.type == "cpu":  # where the host waits for nothing
        check_target(known.options, target, known.vocab_size, layout)
    scale, temperature, token_weight = [
        t if t is None else t.reshape(-1).to(known.dtype).contiguous() for t in (scale, temperature, token_weight)
    ]
    call = known._replace(
        layout=layout,
        target=target,
        logit_map=known.logit_map.of_tokens(scale, temperature),
        token_weight=token_weight,
        selection=None if ids is None else Selection.of(ids, offsets, known.shape.numel()),
        features=tuple([type(feature)() for feature in known.features]),
        main_grad=main_grad,
    )
    return call, (hidden, weight, bias)


def _plan(call: Call, tensors: Tensors, layout: Layout, main_grad: MainGrad | None) -> Plan:
    """The plan of a call without its tensors."""
    options, backend, shard, dtype = call.options, call.backend, call.shard, tensors.linear_weight.dtype
    size = call.vocab_size
    # Accumulation needs, on several ranks, the same blocks on each. It writes dX before the upstream gradient, and with
    # it the loss scale of fp16, is known.
    reduced = options.reduction in ("mean", "sum")
    accumulable = reduced and main_grad is None and size is not None and dtype != torch.float16
    # Codes have too little precision for differences of entries, and for logits. A bias may set entries so far apart,
    # or exclude one, that a window's few codes are too far from each other.
    plain = not call.features and not call.columns.differ and options.logit_softcap is None
    codable = backend.CODES and plain and dtype == torch.bfloat16 and tensors.linear_bias is None
    # The backward can work from what the forward saves. With a temperature per token, the caps are unknown to the host.
    cap = call.logit_map.softcap
    savable = cap is None or (tensors.temperature is None and cap <= _LARGEST_CAP.get(dtype, 0.0))
    # From fp16's exponentials the differences of entries cannot be formed.
    savable &= dtype in backend.SAVED_DTYPES and not (dtype == torch.float16 and options.label_smoothing)
    problem = Problem(
        call.shape.numel(),
        NOMINAL_SHARD if size is None else -(-size // layout.ranks),
        tensors.input.shape[-1],
        dtype.itemsize,
        budget=options.logits_budget or 0,
        sp_size=layout.sp_size,
        ranks=layout.ranks,
        needs=call.needs,
        main_grad=0 if main_grad is None else main_grad.tensor.itemsize,
        savable=savable,
        codable=codable,
        accumulable=accumulable,
        flops_per_byte=backend.FLOPS_PER_BYTE,
        reuses_saved=backend.REUSES_SAVED,
    )
    return plan(problem).limited(shard.real_rows)


def autocasted(tensors: Tensors) -> Tensors:
    """Under autocast: input, weight and bias in autocast's dtype unless they are fp64, as for ``F.linear``."""
    if not isinstance(tensors.input, Tensor):
        return tensors
    kind = tensors.input.device.type
    # Meta tensors, which are refused later, have no autocast.
    if kind == "meta" or not torch.is_autocast_enabled(kind):
        return tensors
    dtype = torch.get_autocast_dtype(kind)
    input, weight, bias = [
        t.to(dtype) if isinstance(t, Tensor) and t.is_floating_point() and t.dtype != torch.float64 else t
        for t in (tensors.input, tensors.linear_weight, tensors.linear_bias)
    ]
    return tensors._replace(input=input, linear_weight=weight, linear_bias=bias)
