"""The call as an operator, for graphs of torch.compile.

The operator runs the autograd.Function of the call, as eager mode does. The Function's saved tensors are attached to a
handle, a tensor of one byte. Graphs carry the handle, and never see that a backward overwrites saved tensors.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from parallel_lce.call.call import Call, Needs, token_count
from parallel_lce.call.prepare import needs_of, prepare
from parallel_lce.call.seam import Shapes, features_of
from parallel_lce.core.collectives import Layout
from parallel_lce.core.grad_buffers import MainGrad
from parallel_lce.core.options import Options, Tensors
from parallel_lce.core.partials import accumulation_dtype
from parallel_lce.core.private import group_of_name, keep_with, take_from
from parallel_lce.run.autograd import FIRST_ORDER, AccumulatedLoss, DenseLoss, Fused
from parallel_lce.run.statistics import DIFFERENTIABLE, NAMES, present

# An operator's numbers have 64 bits.
_LARGEST_BUDGET = 1 << 60


def function_of(call: Call) -> type[torch.autograd.Function]:
    """The Function of a planned call. Its inputs are hidden states, weight, bias and the call."""
    if call.plan.accumulate:
        return AccumulatedLoss
    return Fused if call.dense is None else DenseLoss


# --- a call as an operator's arguments -------------------------------------------------------------

_KINDS = {
    "str": "str",
    "str | None": "str?",
    "bool": "bool",
    "int": "int",
    "int | None": "SymInt?",
    "torch.dtype | None": "ScalarType?",
}
# Types of the options as text, by name.
_TYPES = {name: kind.__forward_arg__ for name, kind in Options.__annotations__.items()}
_NUMBERS = [name for name, kind in _TYPES.items() if kind.startswith("float")]
_OTHERS = [name for name in _TYPES if name not in _NUMBERS]
_TENSORS = ", ".join(f"Tensor{'' if n in ('input', 'linear_weight') else '?'} {n}_" for n in Tensors._fields)
_CALL = (
    f"{_TENSORS}, Tensor numbers, bool[] given, {', '.join(f'{_KINDS[_TYPES[n]]} {n}' for n in _OTHERS)}, "
    "bool[] needs, str group"
)


class Arguments(NamedTuple):
    """A call as the arguments of an operator."""

    tensors: Tensors
    # The floating-point options, fp64 on the CPU. torch.compile would make constants of Python numbers.
    numbers: Tensor
    # Which of them are not 0 or None.
    given: list[bool]
    # The other options.
    others: list
    # Which gradients a backward must produce: Needs.
    needs: list[bool]
    # Name of the process group; '' for none
    group: str

    @classmethod
    def of(cls, options: Options, tensors: Tensors, layout: Layout) -> Arguments:
        if options.logits_budget is not None:
            options = options._replace(logits_budget=min(options.logits_budget, _LARGEST_BUDGET))
        values = [getattr(options, name) or 0.0 for name in _NUMBERS]
        zero = tensors.linear_weight.new_zeros((), dtype=torch.float64, device="cpu")
        numbers = torch.stack([zero + value for value in values])
        others = [getattr(options, name) for name in _OTHERS]
        name = "" if layout.group is None else layout.group.group_name
        return cls(tensors, numbers, [value != 0.0 for value in values], others, [*needs_of(tensors)], name)

    @property
    def flat(self) -> list:
        return [*self.tensors, self.numbers, self.given, *self.others, self.needs, self.group]

    def options(self, values: Sequence[float] = (0.5,) * len(_NUMBERS)) -> Options:
        """The options. ``values``: of the floating-point options. While a graph is traced they are unknown; results'
        shapes do not depend on them, so any number will do."""
        numbers = {
            name: value if there else (None if "None" in _TYPES[name] else 0.0)
            for name, value, there in zip(_NUMBERS, values, self.given)
        }
        return Options(**numbers, **dict(zip(_OTHERS, self.others)))

    @property
    def process_group(self) -> Any:
        return group_of_name(self.group) if self.group else None


def _split(arguments: Sequence[Any]) -> tuple[Arguments, list]:
    """Split an operator's arguments into the call's, which come first, and the others."""
    given, count, number = list(arguments), len(Tensors._fields), len(_OTHERS)
    tensors, given = Tensors(*given[:count]), given[count:]
    numbers, there, *given = given
    others, (needs, group, *rest) = given[:number], given[number:]
    return Arguments(tensors, numbers, there, others, needs, group), rest


# --- the operators ---------------------------------------------------------------------------------

# Not one list: autograd would not record tensors of a list that has None.
_UPSTREAM = ", ".join(f"Tensor? upstream_{name}" for name in DIFFERENTIABLE)
# torch.compile's CUDA graphs refuse CPU tensors (the numbers) and do not track the memory behind a handle.
# torch.cuda.graph over forward and backward has neither problem.
_OUTSIDE_GRAPHS = (torch.Tag.cudagraph_unsafe,)


class _Forward:
    """A forward that ran in an operator. The Function gets it instead of autograd's ctx."""

    saved_tensors: tuple[Tensor | None, ...] = ()

    def __init__(self, given: Arguments, needs: Needs) -> None:
        options = given.options(given.numbers.tolist())
        self.call, inputs = prepare(options, given.tensors, given.process_group, needs)
        self.function = function_of(self.call)
        with torch.no_grad():
            self.results = self.function.forward(self, *inputs, self.call)

    def backward(self, upstream: Sequence[Tensor | None], wanted: list[bool]) -> tuple[Tensor | None, ...]:
        self.needs_input_grad = wanted
        if self.call.options.reduction is not None:
            upstream = upstream[:1]
        with torch.no_grad():
            return self.function.backward(self, *upstream)[:3]

    def save_for_backward(self, *tensors: Tensor | None) -> None:
        self.saved_tensors = tensors

    def set_materialize_grads(self, value: bool) -> None:
        """Ignored: the operator makes no zeros for missing gradients."""

    def mark_non_differentiable(self, *results: Tensor) -> None:
        """Ignored: :func:`_save` marks them."""


@torch.library.custom_op(
    "parallel_lce::forward", mutates_args=(), schema=f"({_CALL}) -> (Tensor[], Tensor)", tags=_OUTSIDE_GRAPHS
)
def _forward(*arguments):
    """The results of a call that are not None, and the handle."""
    given, _ = _split(arguments)
    forward = _Forward(given, Needs(*given.needs))
    results, handle = forward.__dict__.pop("results"), given.tensors.input.new_zeros(1, dtype=torch.uint8)
    keep_with(handle, forward)
    return [results] if isinstance(results, Tensor) else [r for r in results if r is not None], handle


@_forward.register_fake
def _(*arguments):
    given, _ = _split(arguments)
    options, tensors = given.options(), given.tensors
    hidden = tensors.input
    tokens = token_count(hidden, Layout.of(given.process_group, options.sequence_parallel))
    dtype, handle = accumulation_dtype(hidden.dtype), hidden.new_empty(1, dtype=torch.uint8)
    if options.reduction is not None:
        shape = (tokens,) if options.token_weight_gradient or options.reduction == "none" else ()
        return [hidden.new_empty(shape, dtype=dtype)], handle
    shapes: Shapes = {"vocab_size": ((), torch.int64), "argmax": ((tokens,), torch.int64)}
    for feature in features_of(options, tensors):
        shapes |= feature.shapes(options, tensors, tokens)
    given = [shapes.get(name, ((tokens,), dtype)) for name in present(options, tensors)]
    return [hidden.new_empty(shape, dtype=each or dtype) for shape, each in given], handle


def _save(ctx, inputs, output) -> None:
    ctx.set_materialize_grads(False)
    given, _ = _split(inputs)
    ctx.arguments, options = given._replace(tensors=Tensors(None, None), numbers=None), given.options()
    ctx.names = None if options.reduction is not None else present(options, given.tensors)
    results, handle = output
    if ctx.names is not None:
        ctx.mark_non_differentiable(*[r for r, name in zip(results, ctx.names) if name not in DIFFERENTIABLE])
    ctx.save_for_backward(*given.tensors, given.numbers, handle)


def _differentiate(ctx, upstream, _):
    *tensors, numbers, handle = ctx.saved_tensors
    given = ctx.arguments._replace(tensors=Tensors(*tensors), numbers=numbers)
    nothing = (None,) * (len(given.flat) - 4)
    if all(u is None for u in upstream):
        return None, None, None, None, *nothing
    # The gradient of a loss takes the place of the first statistic's.
    by_name = dict(zip(ctx.names or DIFFERENTIABLE, upstream))
    upstream = [by_name.get(name) for name in DIFFERENTIABLE]
    # In the order of the operator's tensors: input, linear_weight, target, linear_bias.
    hidden, weight, _, bias, *_ = ctx.needs_input_grad
    wanted = [hidden, weight, bias]
    gradients = iter(torch.ops.parallel_lce.backward(*given.flat, handle, *upstream, wanted))
    dx, dweight, dbias = (next(gradients) if each else None for each in wanted)
    return dx, dweight, None, dbias, *nothing


_forward.register_autograd(_differentiate, setup_context=_save)


@torch.library.custom_op(
    "parallel_lce::backward",
    mutates_args=(),
    schema=f"({_CALL}, Tensor handle, {_UPSTREAM}, bool[] wanted) -> Tensor[]",
    tags=_OUTSIDE_GRAPHS,
)
def _backward(*arguments):
    """Those of dX, dW and dbias that are ``wanted``. The forward runs again if the handle is a copy, or if an earlier
    backward has used it."""
    given, (handle, *upstream, wanted) = _split(arguments)
    forward = take_from(handle)
    if forward is None:
        # The graph has cast the tensors already, by the autocast of its forward.
        with torch.autocast(given.tensors.input.device.type, enabled=False):
            forward = _Forward(given, Needs(*wanted))
    gradients = forward.backward(upstream, wanted)
    return [g for g, each in zip(gradients, wanted) if each]


@_backward.register_fake
def _(*arguments):
    given, (*_, wanted) = _split(arguments)
    operands = given.tensors.input, given.tensors.linear_weight, given.tensors.linear_bias
    return [t.new_empty(t.shape) for t, each in zip(operands, wanted) if each]


def _refuse_second_order(ctx, *_):
    raise RuntimeError(FIRST_ORDER)


_backward.register_autograd(_refuse_second_order, setup_context=lambda ctx, inputs, output: None)


def call(options: Options, tensors: Tensors, layout: Layout, main_grad: MainGrad | None) -> Any:
    """The results of the call, from the operator."""
    if main_grad is not None:
        raise RuntimeError("a gradient that is added to main_grad cannot be compiled")
    results, _ = torch.ops.parallel_lce.forward(*Arguments.of(options, tensors, layout).flat)
    if options.reduction is not None:
        return results[0]
    by_name = dict(zip(present(options, tensors), results))
    return tuple([by_name.get(name) for name in NAMES])
