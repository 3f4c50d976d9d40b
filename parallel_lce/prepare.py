"""From a public function's arguments to a call: checked, planned, and in debug mode agreed on by all ranks."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

from parallel_lce import debug
from parallel_lce.arguments import Arguments, LossOptions
from parallel_lce.backends import backend_of, valueless
from parallel_lce.backends.interface import Backend
from parallel_lce.budget import default_budget
from parallel_lce.call import Call, Inputs, token_count
from parallel_lce.checks import check_arguments, check_filtered, check_loss_options, check_process_group, token_shape
from parallel_lce.collectives import Layout, Shard
from parallel_lce.grad_buffers import MainGrad
from parallel_lce.memory import in_memory
from parallel_lce.partials import Columns, accumulation_dtype
from parallel_lce.plan import GradientTraits, Plan, plan, shared_shard_rows
from parallel_lce.replay import Tapes
from parallel_lce.selection import Selected
from parallel_lce.signature import signature_of


@dataclass(frozen=True)
class Prepared:
    """A checked call and its tensors."""

    call: Call
    inputs: Inputs
    # [N] in the statistics' dtype
    token_weight: Tensor | None
    # of the tokens
    shape: torch.Size
    differentiable: bool


def prepare(
    arguments: Arguments,
    columns: Columns,
    *,
    function: str,
    options: LossOptions | None = None,
    extra_check: Callable[[], None] | None = None,
    accumulable: bool = False,
    main_grad: MainGrad | None = None,
) -> Prepared:
    """Check ``arguments`` and plan the call. Both are done once for calls of one signature.

    ``function``: what the user called. ``options``: of the loss, if it is one. ``extra_check`` is called with the
    other checks; it raises if an argument that is not among ``arguments`` is wrong. ``accumulable``: the result is a
    sum or mean over tokens. ``main_grad``: dW is added to it.
    """
    check_process_group(arguments.process_group)
    arguments = autocasted(arguments)
    key = signature_of(arguments, columns, options, accumulable, main_grad)
    known = None if key is None else KNOWN.get(key)
    if known is not None:
        layout = Layout.of(arguments.process_group, arguments.sequence_parallel)
        if known.group == _group_traits(layout, arguments.input):
            if extra_check is not None:
                extra_check()
            return _prepared(arguments, known, layout, columns, main_grad)
    debugging = debug.enabled()
    a = arguments.with_python_numbers()
    layout = Layout.of(a.process_group, a.sequence_parallel is True)
    # From here on a refusal is told to the other ranks.
    try:
        if extra_check is not None:
            extra_check()
        if options is not None:
            check_loss_options(options)
        shape = check_arguments(a, layout, needs_target=options is not None)
        check_filtered(a, columns, options)
        if main_grad is not None and main_grad.tensor.shape != a.linear_weight.shape:
            raise ValueError(
                f"main_grad must have linear_weight's shape {list(a.linear_weight.shape)}, got "
                f"{list(main_grad.tensor.shape)}"
            )
        backend = backend_of(a.linear_weight)
    except Exception as refusal:
        debug.report_refusal(layout, refusal)
        raise

    a = replace(a, **{name: in_memory(value) for name, value in a.tensors.items()})
    inputs = a.input, a.linear_weight, a.linear_bias
    rows = a.linear_weight.shape[0]
    start = layout.rank * rows if a.vocab_start is None else a.vocab_start
    shard = Shard(start, rows, a.vocab_size)
    gradients = _gradients(inputs, a.reduce_dtype if layout.ranks > 1 and a.reduce_hidden_grad else None, main_grad)
    planned = _plan(a, inputs, layout, shard, backend, gradients, accumulable)
    if debugging and not valueless(a.linear_weight):
        agreed = {
            "function": function,
            **(vars(options) if options is not None else {}),
            "statistics": columns,
            "gradients": gradients,
            "backend": backend.NAME,
        }
        _check_together(a, layout, shard, options, agreed)
    tapes = Tapes() if key is not None and backend.NAME == "triton" else None
    known = _Known(shape, backend, shard, planned, gradients is not None, _group_traits(layout, a.input), tapes)
    if key is not None:
        if len(KNOWN) >= _MOST_KNOWN:
            KNOWN.clear()
        KNOWN[key] = known
    return _prepared(a, known, layout, columns, main_grad)


class _Known(NamedTuple):
    """What checks and planning found for calls of one signature."""

    shape: torch.Size
    backend: Backend
    shard: Shard
    plan: Plan
    differentiable: bool
    group: tuple
    tapes: Tapes | None


KNOWN: dict[tuple, _Known] = {}
"""By signature. Cleared by whoever changes what a plan or a run depends on: a constant, or a function that it calls."""

_MOST_KNOWN = 1024


def _group_traits(layout: Layout, input: Tensor) -> tuple:
    """What checks and plan depend on of a process group."""
    if layout.ranks == 1:
        return ()
    return layout.ranks, layout.rank, None if input.is_cuda else dist.get_backend(layout.group)


def _prepared(a: Arguments, known: _Known, layout: Layout, columns: Columns, main_grad: MainGrad | None) -> Prepared:
    hidden, weight, bias = a.input, a.linear_weight, a.linear_bias
    weight = weight if weight.stride(1) == 1 else weight.contiguous()
    bias = bias if bias is None else bias.contiguous()
    target = a.target
    if target is not None and not (target.dim() == 1 and target.dtype is torch.int64 and target.is_contiguous()):
        target = target.reshape(-1).long().contiguous()
    token_scale, softcap = _flat(a.token_scale, hidden), a.logit_softcap
    temperature = _flat(a.token_temperature, hidden)
    if temperature is not None:
        token_scale = (1.0 if token_scale is None else token_scale) / temperature
        softcap = softcap if softcap is None else softcap / temperature
    call = Call(
        known.backend,
        layout,
        known.shard,
        columns,
        known.plan,
        target,
        token_scale,
        None if a.selected is None else Selected.of(a.selected, a.selected_offsets, known.shape.numel()),
        a.top_k or 0,
        1.0 if a.token_scale is not None else a.logit_scale,
        softcap,
        1.0 if temperature is not None else a.temperature,
        main_grad,
        a.reduce_dtype,
        a.reduce_hidden_grad,
        a.gradient_filter,
        known.tapes,
    )
    # hidden is not reshaped here: under torch.compile a second derivative is refused by an input of the graph, not by
    # a view of one.
    return Prepared(call, (hidden, weight, bias), _flat(a.token_weight, hidden), known.shape, known.differentiable)


def _flat(per_token: Tensor | None, hidden: Tensor) -> Tensor | None:
    """``[N]`` in the statistics' dtype."""
    return None if per_token is None else per_token.reshape(-1).to(accumulation_dtype(hidden.dtype)).contiguous()


def _gradients(inputs: Inputs, reduce_dtype: torch.dtype | None, main_grad: MainGrad | None) -> GradientTraits | None:
    """What the backward must produce; None: there is none. ``reduce_dtype``: of dX, None for the input's."""
    hidden, weight, bias = inputs
    if not (_needs(hidden) or _needs(weight) or (bias is not None and _needs(bias))):
        return None
    sum_dtype = accumulation_dtype(weight.dtype)
    dx_dtype = hidden.dtype if reduce_dtype is None else reduce_dtype
    dw_dtype = weight.dtype if main_grad is None else main_grad.tensor.dtype
    return GradientTraits(
        hidden=hidden.requires_grad,
        weight=weight.requires_grad,
        hidden_fp32=hidden.dtype == sum_dtype,
        weight_fp32=dw_dtype == sum_dtype,
        weight_new=main_grad is None,
        hidden_buffered=dx_dtype != hidden.dtype,
    )


def _plan(
    a: Arguments,
    inputs: Inputs,
    layout: Layout,
    shard: Shard,
    backend: Backend,
    gradients: GradientTraits | None,
    accumulable: bool,
) -> Plan:
    hidden, weight, _ = inputs
    # Accumulation needs the loss's weights as constants and, over ranks, blocks on which all agree. It writes dX before
    # the upstream gradient is known, which in fp16 would undo loss scaling.
    accumulable = (
        accumulable
        and (a.token_weight is None or not _needs(a.token_weight))
        and (a.vocab_start is None or a.vocab_size is not None or layout.ranks == 1)
        and hidden.dtype != torch.float16
    )
    itemsize = weight.element_size()
    planned = plan(
        token_count(hidden, layout),
        shared_shard_rows(shard.rows, layout.ranks, a.vocab_start, a.vocab_size),
        hidden.shape[-1],
        itemsize,
        budget=budget_of(a),
        sp_size=layout.sp_size,
        ranks=layout.ranks,
        gradients=gradients,
        savable=_savable(a, backend),
        accumulable=accumulable,
        smallest_accumulated=backend.SMALLEST_ACCUMULATED,
        reuses_saved=backend.REUSES_SAVED,
    )
    return planned.limited(shard.real_rows, itemsize, layout.sp_size)


def _savable(a: Arguments, backend: Backend) -> bool:
    # The host does not know the caps of tokens that have temperatures of their own.
    unknown = a.logit_softcap is not None and a.token_temperature is not None
    if a.logit_softcap is None or unknown:
        return not unknown
    # A graph of torch 2.11 knows no quotient of two numbers that change.
    softcap = a.logit_softcap if a.temperature == 1.0 else a.logit_softcap / a.temperature
    return backend.savable(a.linear_weight.dtype, softcap)


def budget_of(a: Arguments) -> int:
    return default_budget(a.linear_weight.device) if a.logits_budget is None else a.logits_budget


def _check_together(
    a: Arguments, layout: Layout, shard: Shard, options: LossOptions | None, agreed: dict[str, object]
) -> None:
    """Debug mode: all ranks were given the same, ``agreed`` included, and, where a target outside the vocabulary
    gives NaN, every target lies in it."""
    shards = [(shard.start, shard.rows)]
    if layout.ranks > 1:
        weight = a.token_weight
        settings = {
            "tokens": token_shape(a.input, layout),
            "hidden size": a.input.shape[-1],
            "dtype": a.input.dtype,
            "sequence_parallel": layout.sequence_parallel,
            "reduce_hidden_grad": a.reduce_hidden_grad,
            "logit_scale": "of each token" if a.token_scale is not None else a.logit_scale,
            "logit_softcap": a.logit_softcap,
            "temperature": "of each token" if a.token_temperature is not None else a.temperature,
            "vocab_size": a.vocab_size,
            "vocab_start given": a.vocab_start is not None,
            "logits_budget": budget_of(a),
            "reduce_dtype": a.reduce_dtype,
            "gradient_filter": a.gradient_filter,
            "top_k": a.top_k,
            "token_weight needs a gradient": weight is not None and _needs(weight),
            **agreed,
        }
        if shard.rows:
            settings["linear_bias given"] = a.linear_bias is not None
        tensors = {
            "target": None if a.target is None else a.target.long(),
            "token_weight": None if weight is None else weight.double(),
            "selected": None if a.selected is None else a.selected.long(),
            "offsets of selected": None if a.selected_offsets is None else a.selected_offsets.long(),
            "logit_scale of each token": None if a.token_scale is None else a.token_scale.double(),
            "temperature of each token": None if a.token_temperature is None else a.token_temperature.double(),
        }
        shards = debug.agree(layout, settings, tensors, shards[0])
        if not layout.sequence_parallel:
            debug.agree_about_hidden(layout, a.input)
    vocab_size = debug.check_cover(shards, a.vocab_size)
    if a.target is not None and options is not None and options.outside_is_nan:
        target = a.target.long()
        debug.check_target(target, target != options.ignore_index, vocab_size)


def _needs(tensor: Tensor) -> bool:
    return torch.is_grad_enabled() and tensor.requires_grad


def autocasted(a: Arguments) -> Arguments:
    """fp32 and half operands in autocast's dtype, as for ``F.linear`` under autocast."""
    # Meta tensors have no autocast.
    if not isinstance(a.input, Tensor) or a.input.is_meta:
        return a
    if not torch.is_autocast_enabled(a.input.device.type):
        return a
    dtype = torch.get_autocast_dtype(a.input.device.type)
    names = ("input", "linear_weight", "linear_bias")
    cast = {
        name: t.to(dtype)
        for name in names
        if isinstance(t := getattr(a, name), Tensor) and t.is_floating_point() and t.dtype != torch.float64
    }
    return replace(a, **cast)
