"""Forward and backward of a call as operators.

torch.compile takes an operator as a whole; meta and fake tensors get the shapes of its results. An operator gets the
options and tensors of a call, and a process group by its name. It prepares the call
(:mod:`parallel_lce.call.prepare`) and runs the schedule of eager mode (:mod:`parallel_lce.run.schedule`), with its
collectives.

Saved exponentials travel outside the graph. The forward operator returns a *handle*, a tensor of one byte. The saved
tensors are an attribute of its storage, and live as long as it does. The backward removes the attribute. If it is gone,
in a second backward or after saved-tensor hooks copied the handle, the backward recomputes. The exponentials cannot be
outputs of the operator: the backward overwrites them. If it declared that, Inductor would copy them, up to
``logits_budget`` bytes. If it did not, a second backward would read overwritten values.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple, cast

import torch
from torch import Tensor
from torch.distributed.distributed_c10d import _resolve_process_group  # pyright: ignore[reportPrivateImportUsage]

from parallel_lce.backends.interface import Coefficients
from parallel_lce.call.call import Call, Inputs, Needs, token_count
from parallel_lce.call.prepare import prepare
from parallel_lce.call.selection import Selected
from parallel_lce.core.collectives import Layout
from parallel_lce.core.options import Options, Tensors
from parallel_lce.core.partials import Merged, accumulation_dtype
from parallel_lce.run import losses, schedule, statistics
from parallel_lce.run.autograd import FIRST_ORDER
from parallel_lce.run.statistics import DIFFERENTIABLE, NAMES, Residuals

# Attribute of a handle's storage that holds the saved tensors.
_SAVED = "_parallel_lce_saved"
# Outputs of the forward operator that are the user's. Its residuals, the partial and the handle follow.
_NUM_OUTPUTS, _NUM_RESIDUALS = len(NAMES), len(Residuals._fields)


# --- a call as an operator's arguments -------------------------------------------------------------

_KINDS = {
    "str": "str",
    "str | None": "str?",
    "bool": "bool",
    "int | None": "SymInt?",
    "torch.dtype | None": "ScalarType?",
}
# Types of the fields as text, by name.
_TYPES = {name: kind.__forward_arg__ for name, kind in Options.__annotations__.items()}
_NUMBERS = [name for name, kind in _TYPES.items() if kind.startswith("float")]
_OTHERS = [name for name in _TYPES if name not in _NUMBERS]
_TENSORS = ", ".join(f"Tensor{'' if n in ('input', 'linear_weight') else '?'} {n}_" for n in Tensors._fields)
CALL = (
    f"{_TENSORS}, Tensor numbers, bool[] given, {', '.join(f'{_KINDS[_TYPES[n]]} {n}' for n in _OTHERS)}, "
    "bool[] needs, str group"
)
"""The arguments of :class:`Arguments` in an operator's schema."""


class Arguments(NamedTuple):
    """A call as the arguments of an operator."""

    tensors: Tensors
    # Options that are floating-point numbers, fp64 on the CPU. A Python number would be compiled in as a constant.
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
    def of(cls, call: Call, tensors: Tensors) -> Arguments:
        if call.main_grad is not None:
            raise RuntimeError("a gradient that is added to main_grad cannot be compiled")
        options, group = call.options, call.layout.group
        values = [getattr(options, name) or 0.0 for name in _NUMBERS]
        zero = tensors.linear_weight.new_zeros((), dtype=torch.float64, device="cpu")
        numbers = torch.stack([zero + value for value in values])
        others = [getattr(options, name) for name in _OTHERS]
        name = "" if group is None else group.group_name
        return cls(tensors, numbers, [value != 0.0 for value in values], others, [*call.needs], name)

    @property
    def flat(self) -> list:
        return [*self.tensors, self.numbers, self.given, *self.others, self.needs, self.group]

    def options(self, values: Sequence[float] = (0.5,) * len(_NUMBERS)) -> Options:
        """The options. ``values``: of the numbers, which have none while a graph is traced; the results' shapes do not
        depend on them."""
        numbers = {
            name: value if there else (None if "None" in _TYPES[name] else 0.0)
            for name, value, there in zip(_NUMBERS, values, self.given)
        }
        return Options(**numbers, **dict(zip(_OTHERS, self.others)))

    def prepared(self) -> tuple[Call, Inputs]:
        # torch 2.13's annotation of a group's name is not str.
        group = _resolve_process_group(self.group) if self.group else None  # pyright: ignore[reportArgumentType]
        return prepare(self.options(self.numbers.tolist()), self.tensors, group, needs=Needs(*self.needs))

    def described(self) -> Call:
        """A call with only the fields that decide the shapes of its results and its coefficients."""
        group = _resolve_process_group(self.group) if self.group else None  # pyright: ignore[reportArgumentType]
        options, tensors = self.options(), self.tensors
        layout, ids = Layout.of(group, options.sequence_parallel), tensors.selected
        tokens = token_count(tensors.input, layout)
        selected = None if ids is None else Selected.of(ids, tensors.selected_offsets, tokens)
        needs, none = Needs(*self.needs), cast(Any, None)
        columns, target, dtype = options.columns, tensors.target, accumulation_dtype(tensors.linear_weight.dtype)
        fixed = options, none, none, columns, none, none, needs, 1.0, None, dtype, True
        return Call(*fixed, layout, target=target, selected=selected)


def _split(arguments: Sequence[Any]) -> tuple[Arguments, list]:
    """Split an operator's arguments: the call, whose arguments come first, and the others."""
    given, count, number = list(arguments), len(Tensors._fields), len(_OTHERS)
    tensors, given = Tensors(*given[:count]), given[count:]
    numbers, there, *given = given
    others, (needs, group, *rest) = given[:number], given[number:]
    return Arguments(tensors, numbers, there, others, needs, group), rest


# --- second derivatives ----------------------------------------------------------------------------


def _refuse_second_order(ctx, *_):
    raise RuntimeError(FIRST_ORDER)


def _save_nothing(ctx, inputs, output) -> None:
    pass


@torch.library.custom_op(
    "parallel_lce::first_order",
    mutates_args=(),
    schema="(Tensor upstream, Tensor hidden, Tensor weight, Tensor? bias) -> Tensor",
)
def _first_order(upstream, hidden, weight, bias):
    """A copy of ``upstream`` whose derivative is refused, as a function of all arguments."""
    return upstream.clone()


@_first_order.register_fake
def _(upstream, hidden, weight, bias):
    return torch.empty_like(upstream)


_first_order.register_autograd(_refuse_second_order, setup_context=_save_nothing)


# --- forward and backward --------------------------------------------------------------------------

# torch.compile's CUDA graphs refuse CPU tensors (the numbers) and do not track the memory behind a handle.
# torch.cuda.graph over forward and backward has neither problem.
_OUTSIDE_GRAPHS = (torch.Tag.cudagraph_unsafe,)


def _padded(values: Sequence[Tensor | None], count: int, like: Tensor) -> list[Tensor]:
    """``count`` tensors: an empty one for each value that is None or missing."""
    values = [*values, *[None] * (count - len(values))]
    return [like.new_empty(0) if v is None else v for v in values]


def _results(outputs: Sequence[Tensor | None], residuals: Residuals, partial: Tensor, handle: Tensor) -> tuple:
    """The outputs of the forward operator. None may share memory with an input or another output."""
    copied = [r if r is None else r.clone() for r in residuals]
    return *_padded(outputs, _NUM_OUTPUTS, partial), *_padded(copied, _NUM_RESIDUALS, partial), partial, handle


@torch.library.custom_op(
    "parallel_lce::forward",
    mutates_args=(),
    schema=f"({CALL}) -> ({', '.join(['Tensor'] * (_NUM_OUTPUTS + _NUM_RESIDUALS + 2))})",
    tags=_OUTSIDE_GRAPHS,
)
def _forward(*arguments):
    """Losses or statistics of each token, their residuals, the merged partial, and the handle."""
    call, inputs = _split(arguments)[0].prepared()
    merged, gathered, saved = schedule.forward(call, *inputs, any(call.needs))
    partial = merged.partial
    handle = partial.new_zeros(1, dtype=torch.uint8)
    vars(handle.untyped_storage())[_SAVED] = gathered, *saved
    module = statistics if call.options.reduction is None else losses
    return _results(*module.outputs(call, merged), partial, handle)


@_forward.register_fake
def _(*arguments):
    call, hidden = (given := _split(arguments)[0]).described(), given.tensors.input
    count = token_count(hidden, call.layout)
    partial = hidden.new_empty((call.columns.count, count), dtype=accumulation_dtype(hidden.dtype))
    handle = partial.new_empty(1, dtype=torch.uint8)
    if call.options.reduction is not None:
        alpha, beta, gamma = (partial.new_empty(count) for _ in range(3))
        residuals = Residuals(alpha, beta, gamma if call.columns.shifted else None)
        return _results([partial.new_empty(count)], residuals, partial, handle)
    vocab_size, top_k = partial.new_empty((), dtype=torch.int64), call.options.top_k
    logits = None if call.selected is None else partial.new_empty(call.selected.count)
    top = None if top_k is None else partial.new_empty(count, top_k)
    found = Merged(partial, vocab_size, logits, None if top is None else (top, top.long()))
    return _results(*statistics.outputs(call, found), partial, handle)


def _save_forward(ctx, inputs, output) -> None:
    ctx.set_materialize_grads(False)
    given, _ = _split(inputs)
    ctx.arguments = given._replace(tensors=Tensors(None, None), numbers=None)
    is_loss = given.options().reduction is not None
    ctx.mark_non_differentiable(*output[1 if is_loss else len(DIFFERENTIABLE) :])
    ctx.save_for_backward(*given.tensors, given.numbers, *output[_NUM_OUTPUTS:])


def _differentiate_forward(ctx, *upstream):
    count, saved = len(Tensors._fields), ctx.saved_tensors
    given = ctx.arguments._replace(tensors=Tensors(*saved[:count]), numbers=saved[count])
    nothing = (None,) * (len(given.flat) - 4)
    if all(u is None for u in upstream):
        return None, None, None, None, *nothing
    *residuals, partial, handle = saved[count + 1 :]
    call, residuals = given.described(), Residuals(*residuals)
    if call.options.reduction is None:
        c, of_selected = statistics.coefficients(call, partial, residuals, upstream[: len(DIFFERENTIABLE)])
    else:
        gamma, of_selected = residuals.gamma if call.columns.shifted else None, None
        c = losses.coefficients(residuals._replace(gamma=gamma, divisor=None), upstream[0]).folded()
    # In the order of the operator's tensors: input, linear_weight, target, linear_bias.
    hidden, weight, _, bias, *_ = ctx.needs_input_grad
    wanted, of_selected = [hidden, weight, bias], of_selected or (None, None)
    found = torch.ops.parallel_lce.backward(*given.flat, partial, handle, *c[:5], *of_selected, wanted)
    dx, dweight, dbias = _by_input(found, wanted)
    return dx, dweight, None, dbias, *nothing


_forward.register_autograd(_differentiate_forward, setup_context=_save_forward)


@torch.library.custom_op(
    "parallel_lce::backward",
    mutates_args=(),
    schema=f"({CALL}, Tensor partial, Tensor handle, Tensor alpha, Tensor? beta, Tensor? gamma, "
    "Tensor? delta, Tensor? epsilon, Tensor? of_selected, Tensor? selected_logits, bool[] wanted) -> Tensor[]",
    tags=_OUTSIDE_GRAPHS,
)
def _backward(*arguments):
    """The ``wanted`` ones of dX, dW and dbias."""
    given, (partial, handle, *each, of_selected, selected_logits, wanted) = _split(arguments)
    gathered, *saved = vars(handle.untyped_storage()).pop(_SAVED, (None,))
    call, inputs = given.prepared()
    pair = None if of_selected is None else (of_selected, selected_logits)
    gradients = schedule.backward(call, *inputs, partial, gathered, saved, Coefficients(*each), pair, Needs(*wanted))
    return [g for g in gradients if g is not None]


@_backward.register_fake
def _(*arguments):
    given, (*_, wanted) = _split(arguments)
    return _empty_gradients(given.tensors, wanted)


_backward.register_autograd(_refuse_second_order, setup_context=_save_nothing)


# --- gradients formed in forward -------------------------------------------------------------------


@torch.library.custom_op(
    "parallel_lce::accumulated_loss", mutates_args=(), schema=f"({CALL}) -> (Tensor, Tensor[])", tags=_OUTSIDE_GRAPHS
)
def _accumulated_loss(*arguments):
    """The loss, and those of dX, dW and dbias that the call needs."""
    call, inputs = _split(arguments)[0].prepared()
    loss, gradients = schedule.accumulate(call, *inputs, call.needs)
    return loss, [g for g in gradients if g is not None]


@_accumulated_loss.register_fake
def _(*arguments):
    given, _ = _split(arguments)
    dtype = accumulation_dtype(given.tensors.linear_weight.dtype)
    return given.tensors.input.new_empty((), dtype=dtype), _empty_gradients(given.tensors, given.needs, dtype)


def _save_gradients(ctx, inputs, output) -> None:
    given, _ = _split(inputs)
    ctx.needs, ctx.count = given.needs, len(inputs)
    ctx.save_for_backward(given.tensors.input, given.tensors.linear_weight, given.tensors.linear_bias, *output[1])


def _scale_gradients(ctx, upstream, _):
    hidden, weight, bias, *gradients = ctx.saved_tensors
    asked = (*ctx.needs_input_grad[:2], ctx.needs_input_grad[3])
    if any(wanted and not formed for wanted, formed in zip(asked, ctx.needs)):
        raise RuntimeError(
            "a gradient is asked for that was not when this graph was made, and gradients of parallel_lce's "
            "'mean' and 'sum' are formed in forward: make the graph with tensors that require gradients"
        )
    # Under create_graph=True autograd would treat gradients formed in forward as constants. first_order raises.
    upstream = torch.ops.parallel_lce.first_order(upstream, hidden, weight, bias)
    # torch.compile decides which of them it scales in place.
    scaled = [(g.to(upstream.dtype) * upstream).to(weight.dtype) for g in gradients]
    dx, dweight, dbias = _by_input(scaled, ctx.needs)
    return dx, dweight, None, dbias, *(None for _ in range(ctx.count - 4))


_accumulated_loss.register_autograd(_scale_gradients, setup_context=_save_gradients)


def _empty_gradients(tensors: Tensors, needs: list[bool], dtype: torch.dtype | None = None) -> list[Tensor]:
    hidden, parameters = tensors.input, (tensors.linear_weight, tensors.linear_bias)
    gradients = [hidden.new_empty(hidden.shape)] if needs[0] else []
    return gradients + [
        p.new_empty(p.shape, dtype=dtype) for p, needed in zip(parameters, needs[1:]) if needed and p is not None
    ]


def _by_input(gradients: list[Tensor], needs: list[bool]) -> tuple[Tensor | None, ...]:
    """An operator's list of ``gradients`` as a triple for hidden states, weight and bias; None for one not needed."""
    found = iter(gradients)
    return tuple(next(found) if needed else None for needed in needs)


# --- the functions of parallel_lce.run.autograd, in a graph --------------------------------------------


def fused(call: Call, tensors: Tensors) -> tuple[Any, ...]:
    """:func:`parallel_lce.run.autograd.fused` of a graph, whose reduction is 'none' or None."""
    outputs = torch.ops.parallel_lce.forward(*Arguments.of(call, tensors).flat)
    if call.options.reduction is not None:
        return (outputs[0],)
    return tuple(v if there else None for v, there in zip(outputs, statistics.present(call)))


def accumulated_loss(call: Call, tensors: Tensors) -> Tensor:
    """:func:`parallel_lce.run.autograd.accumulated_loss` of a graph."""
    return torch.ops.parallel_lce.accumulated_loss(*Arguments.of(call, tensors).flat)[0]
