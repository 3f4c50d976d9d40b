"""The call as an operator, for graphs of torch.compile.

The operator runs the autograd.Function of the call, as eager mode does. The Function's saved tensors are attached to a
handle, a tensor of one byte. Graphs carry the handle, and never see that a backward overwrites saved tensors.
"""

from __future__ import annotations

import json
import math
from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.multiprocessing.reductions import StorageWeakRef

from parallel_lce.call.call import Shapes, features_of
from parallel_lce.call.checks import public
from parallel_lce.call.prepare import needs_of, prepare
from parallel_lce.core.collectives import Layout
from parallel_lce.core.options import COUNT_OPTIONS, FLOAT_OPTIONS, Options, Tensors
from parallel_lce.core.partials import accumulation_dtype
from parallel_lce.core.plan import Needs
from parallel_lce.core.private import constant_in_graphs, group_of_name, keep_with, take_from
from parallel_lce.run.results import DIFFERENTIABLE, NAMES, present
from parallel_lce.run.schedule import FIRST_ORDER, function_of

# A call as an operator's arguments: its tensors that are not None; the options that may change from call to call
# within one graph, floats in fp64 on the CPU, since torch.compile would make constants of Python numbers, and counts;
# and all else as JSON. A float or count that is None is None in the JSON, and 0 among the others.
_CALL = "Tensor[] tensors, Tensor floats, SymInt[] counts, str others"
# torch.compile's CUDA graphs refuse CPU tensors (the floats) and do not track the memory behind a handle.
# torch.cuda.graph over forward and backward has neither problem.
_OUTSIDE_GRAPHS = (torch.Tag.cudagraph_unsafe,)


def encoded(options: Options, tensors: Tensors, layout: Layout) -> tuple[list[Tensor], Tensor, list[int], str]:
    """A call as an operator's arguments."""
    values = {name: getattr(options, name) for name in Options._fields}
    numbers = {name: 0 if values[name] is None else values[name] for name in (*FLOAT_OPTIONS, *COUNT_OPTIONS)}
    zero = tensors.linear_weight.new_zeros((), dtype=torch.float64, device="cpu")
    floats, counts = [zero + numbers[name] for name in FLOAT_OPTIONS], [numbers[name] for name in COUNT_OPTIONS]
    values |= {name: None if values[name] is None else 0 for name in numbers}
    values["sequence_dim"] = 0  # to which the adapter has set it
    given = {name: tensor for name, tensor in zip(Tensors._fields, tensors) if tensor is not None}
    group = "" if layout.group is None else layout.group.group_name
    place = group, layout.ranks, layout.rank
    return [*given.values()], torch.stack(floats), counts, _json([*given], values, [*needs_of(tensors)], place)


@constant_in_graphs
def _json(*values: object) -> str:
    return json.dumps(values, default=str)  # of a dtype


def _decoded(
    tensors: Sequence[Tensor], floats: Tensor | None, counts: Sequence[int], others: str
) -> tuple[Options, Tensors, Needs, Any]:
    """The options, tensors, needs and process group. ``floats``: None while a graph is traced, where they are unknown;
    results' shapes do not depend on them, so they may be 0."""
    given, values, needs, (name, ranks, rank) = json.loads(others)
    numbers = [*zip(COUNT_OPTIONS, counts), *zip(FLOAT_OPTIONS, () if floats is None else floats.tolist())]
    values |= {name: number for name, number in numbers if values[name] is not None}
    if (dtype := values["reduce_dtype"]) is not None:
        values["reduce_dtype"] = getattr(torch, dtype.removeprefix("torch."))
    group = group_of_name(name) if name else None
    if group is not None and (ranks, rank) != (dist.get_world_size(group), dist.get_rank(group)):
        raise ValueError(
            f"process_group: a graph of torch.compile was made on rank {rank} of {ranks}, and this is rank "
            f"{dist.get_rank(group)} of {dist.get_world_size(group)} in a new group of its name: call "
            "torch.compiler.reset() after a new initialisation"
        )
    return Options(**values), Tensors(**dict(zip(given, tensors))), Needs(*needs), group


def _results(options: Options, tensors: Tensors, values: Sequence[Tensor | None]) -> list[Tensor | None]:
    """The ``values`` of the :func:`present` results, as a Function returns them, or gets their gradients."""
    by_name = dict(zip(present(options, tensors), values))
    return [by_name.get(name) for name in (("loss",) if options.kind == "loss" else NAMES)]


def _place_of(tensor: Tensor) -> tuple[StorageWeakRef, int]:
    """Of a tensor that is computed again another, on every rank. Not its address: memory that was freed may be used
    again, for that or for something else, and FSDP2 frees a weight's and allocates other memory for its storage."""
    return StorageWeakRef(tensor.untyped_storage()), int(tensor.storage_offset())


class _ForwardInGraph:
    """A forward that ran in an operator. The Function gets it instead of autograd's ctx."""

    saved_tensors: tuple[Tensor | None, ...] = ()

    @public
    def __init__(self, options: Options, tensors: Tensors, needs: Needs, group: Any) -> None:
        self.places = [_place_of(tensor) for tensor in tensors.named().values()]
        self.call, inputs = prepare(options, tensors, group, needs)
        self.function = function_of(self.call)
        with torch.no_grad():
            self.results = self.function.forward(self, *inputs, self.call)

    def backward(self, upstream: Sequence[Tensor | None], needs: Needs) -> tuple[Tensor | None, ...]:
        self.needs_input_grad = needs
        with torch.no_grad():
            return self.function.backward(self, *upstream)[:3]

    def save_for_backward(self, *tensors: Tensor | None) -> None:
        self.saved_tensors = tensors

    def _ignore(self, *given: Any) -> None:
        """The operator makes no zeros for missing gradients, and :func:`_save` marks results."""

    set_materialize_grads = mark_non_differentiable = _ignore


@torch.library.custom_op(
    "parallel_lce::forward", mutates_args=(), schema=f"({_CALL}) -> (Tensor[], Tensor)", tags=_OUTSIDE_GRAPHS
)
def _forward_operator(*arguments):
    """The results of a call that are not None, and the handle."""
    forward = _ForwardInGraph(*_decoded(*arguments))
    results, handle = forward.__dict__.pop("results"), arguments[0][0].new_zeros(1, dtype=torch.uint8)
    keep_with(handle, forward)
    return [results] if isinstance(results, Tensor) else [r for r in results if r is not None], handle


@_forward_operator.register_fake
def _(tensors, floats, counts, others):
    options, tensors, _, group = _decoded(tensors, None, counts, others)
    hidden = tensors.input
    tokens = math.prod(hidden.shape[:-1]) * Layout.of(group, options.sequence_parallel).sp_size
    dtype, handle = accumulation_dtype(hidden.dtype), hidden.new_empty(1, dtype=torch.uint8)
    of_loss = (tokens,) if options.reduction == "none" else ()
    shapes: Shapes = {"loss": (of_loss, None), "vocab_size": ((), torch.int64), "argmax": ((tokens,), torch.int64)}
    for feature in features_of(options, tensors):
        shapes |= feature.shapes(options, tensors, tokens)
    given = [shapes.get(name, ((tokens,), dtype)) for name in present(options, tensors)]
    return [hidden.new_empty(shape, dtype=each or dtype) for shape, each in given], handle


def _save(ctx, inputs, output) -> None:
    ctx.set_materialize_grads(False)
    tensors, floats, *ctx.others = inputs
    results, handle = output
    options, given, _, _ = _decoded(tensors, None, *ctx.others)
    named = zip(present(options, given), results)
    ctx.mark_non_differentiable(*[result for name, result in named if name not in ("loss", *DIFFERENTIABLE)])
    ctx.save_for_backward(*tensors, floats, handle)


def _differentiate(ctx, upstream, _):
    *tensors, floats, handle = ctx.saved_tensors
    wanted = ctx.needs_input_grad[0]
    if all(gradient is None for gradient in upstream):
        return [None] * len(tensors), None, None, None
    gradients = iter(torch.ops.parallel_lce.backward(tensors, floats, *ctx.others, handle, upstream, [*wanted]))
    return [next(gradients) if each else None for each in wanted], None, None, None


_forward_operator.register_autograd(_differentiate, setup_context=_save)


@torch.library.custom_op(
    "parallel_lce::backward",
    mutates_args=(),
    schema=f"({_CALL}, Tensor handle, Tensor?[] upstream, bool[] wanted) -> Tensor[]",
    tags=_OUTSIDE_GRAPHS,
)
def _backward_operator(tensors, floats, counts, others, handle, upstream, wanted):
    """The gradients of the ``wanted`` tensors. ``upstream``: of the :func:`present` results. The forward runs again
    if the handle is a copy, if an earlier backward has used it, or if the tensors are not the forward's."""
    options, given, _, group = _decoded(tensors, floats, counts, others)
    wanted_of = dict(zip(given.named(), wanted))
    needs = Needs(*[wanted_of.get(name, False) for name in ("input", "linear_weight", "linear_bias")])
    forward = take_from(handle)
    # A graph that computes a tensor again for its backward may have written over the first one's memory.
    if forward is None or forward.places != [_place_of(tensor) for tensor in tensors]:
        # The graph has cast the tensors already, by the autocast of its forward.
        with torch.autocast(given.input.device.type, enabled=False):
            forward = _ForwardInGraph(options, given, needs, group)
    gradients = forward.backward(_results(options, given, upstream), needs)
    return [gradient for gradient, each in zip(gradients, needs) if each]


@_backward_operator.register_fake
def _(tensors, floats, counts, others, handle, upstream, wanted):
    return [tensor.new_empty(tensor.shape) for tensor, each in zip(tensors, wanted) if each]


def _refuse_second_order(ctx, *_):
    raise RuntimeError(FIRST_ORDER)


_backward_operator.register_autograd(_refuse_second_order, setup_context=lambda ctx, inputs, output: None)


def call_in_graph(options: Options, tensors: Tensors, layout: Layout) -> Any:
    """The results of the call, from the operator."""
    values, _ = torch.ops.parallel_lce.forward(*encoded(options, tensors, layout))
    results = _results(options, tensors, values)
    return results[0] if options.kind == "loss" else tuple(results)
