"""The public functions under ``torch.func``, in ``torch.export``, and for tensors without values.

The autograd.Functions of a call keep work between forward and backward, and write over it. Transforms forbid that, and
exported graphs lose it. So here a function is one step from tensors to tensors, and its backward runs it again.
"""

from __future__ import annotations

import dataclasses
import functools
import json
from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh

from parallel_lce.backends import is_meta_or_fake
from parallel_lce.call.checks import as_group, is_dtensor
from parallel_lce.core import private
from parallel_lce.core.partials import accumulation_dtype
from parallel_lce.run.token_count import TokenCount

FIRST_ORDER = "gradients of parallel_lce cannot be differentiated twice"
_NO_TANGENTS = "parallel_lce has no forward-mode derivatives (jvp, jacfwd, hessian): use vjp, grad or jacrev"


class _Step(torch.autograd.Function):
    """``run(*tensors)``, a tuple of tensors. Subclasses differentiate it. Under vmap it runs once for each example."""

    @staticmethod
    def forward(run: Callable, *tensors: Tensor) -> tuple[Tensor, ...]:
        return run(*tensors)

    @staticmethod
    def jvp(ctx: Any, *_: Any) -> None:
        raise NotImplementedError(_NO_TANGENTS)

    @classmethod
    def vmap(cls, info: Any, in_dims: tuple, run: Callable, *tensors: Tensor) -> tuple[tuple, tuple]:
        if not info.batch_size:
            raise ValueError("vmap has 0 examples: parallel_lce runs once for each, and needs at least one")
        examples = [
            cls.apply(run, *[t if d is None else t.select(d, n) for t, d in zip(tensors, in_dims[1:])])
            for n in range(info.batch_size)
        ]
        results = tuple([torch.stack(each) for each in zip(*examples)])
        return results, (0,) * len(results)


class _FirstOrder(_Step):
    """Refuses to be differentiated."""

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple, output: tuple) -> None:
        """Nothing is kept."""

    @staticmethod
    def backward(ctx: Any, *_: Any) -> None:
        raise RuntimeError(FIRST_ORDER)


class _Again(_Step):
    """Runs again in backward."""

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple, output: tuple) -> None:
        ctx.run, *tensors = inputs
        ctx.save_for_backward(*tensors)
        ctx.mark_non_differentiable(*[each for each in output if not each.is_floating_point()])
        ctx.set_materialize_grads(False)

    @staticmethod
    def backward(ctx: Any, *upstream: Tensor | None) -> tuple[Tensor | None, ...]:
        return None, *_gradients(ctx.run, ctx.saved_tensors, upstream, ctx.needs_input_grad[1:])


def first_order(run: Callable, dependencies: Sequence[Tensor], *given: Tensor | None) -> tuple:
    """``run(*given)``, tensors or None, not differentiable by the ``given`` tensors and the ``dependencies``."""
    there = [g is not None for g in given]
    found: list[bool] = []

    def run_present(*tensors: Tensor) -> tuple[Tensor, ...]:
        remaining = iter(tensors)
        results = run(*[next(remaining) if each else None for each in there])
        found[:] = [r is not None for r in results]
        # No view: gradients are often changed in place, which a view forbids.
        return tuple([r.clone() for r in results if r is not None])

    results = iter(_FirstOrder.apply(run_present, *[g for g in given if g is not None], *dependencies))
    return tuple([next(results) if each else None for each in found])


def batched(run: Callable, upstream: Sequence[Tensor | None]) -> tuple:
    """``run(*upstream)``, the gradients of a backward; of a batch of upstream gradients, once for each.
    ``is_grads_batched`` batches them by an older vmap than ``torch.func``'s."""
    if torch.compiler.is_dynamo_compiling() or not any(map(private.is_batch, filter(torch.is_tensor, upstream))):
        return run(*upstream)
    # A backward on a GPU has a thread of its own, which does not know the level of the vmap. At another level a tensor
    # is no batch, and gets an empty one.
    first = next(u for u in upstream if _is_batched(u))
    level = next(level for level in range(1, 64) if len(private.remove_dim(first, level, 0, 0)))
    whole = [private.remove_dim(u, level, 0, 0) if _is_batched(u) else None for u in upstream]
    count = next(len(w) for w in whole if w is not None)
    each = [run(*[u if w is None else w[n] for u, w in zip(upstream, whole)]) for n in range(count)]
    return tuple([None if g[0] is None else private.add_dim(torch.stack(g), 0, level) for g in zip(*each)])


def _is_batched(gradient: Tensor | None) -> bool:
    return gradient is not None and private.is_batch(gradient)


def _as_now(run: Callable, kind: str) -> Callable:
    """``run`` with the autocast of this moment. ``kind``: of the device."""
    if kind == "meta":  # has no autocast
        return run
    autocast = functools.partial(torch.autocast, kind, torch.get_autocast_dtype(kind), torch.is_autocast_enabled(kind))

    def again(*tensors: Tensor) -> tuple[Tensor, ...]:
        with autocast():
            return run(*tensors)

    return again


def _gradients(
    run: Callable, tensors: Sequence[Tensor], upstream: Sequence[Tensor | None], wanted: Sequence[bool]
) -> tuple[Tensor | None, ...]:
    """The gradients of the ``wanted`` tensors."""
    count = len(tensors)

    def again(*given: Any) -> list[Tensor | None]:
        with torch.enable_grad():
            leaves = [t.detach().requires_grad_(each) for t, each in zip(given, wanted)]
            results = run(*leaves)
        pairs = [(r, u) for r, u in zip(results, given[count:]) if u is not None and r.requires_grad]
        of, asked = [r for r, _ in pairs], [leaf for leaf in leaves if leaf.requires_grad]
        found = iter(torch.autograd.grad(of, asked, [u for _, u in pairs], allow_unused=True, materialize_grads=True))
        return [next(found) if each else None for each in wanted]

    return first_order(again, (), *tensors, *upstream)


# --- the public functions ----------------------------------------------------------------------------

_FUNCTIONS: dict[str, Callable] = {}


def transformable(function: Callable) -> Callable:
    """Decorator for a public function of tensors, which gives tensors in a tuple, dict or dataclass, or one tensor."""

    @functools.wraps(function)
    def call(*given: Any, **named: Any) -> Any:
        return _transformed(function, given, named) if private.transforming() else function(*given, **named)

    return call


def _split(given: tuple, named: dict[str, Any]) -> tuple[list[Tensor], list, Any]:
    """A call's tensors; its other arguments, each in a list, and None for each tensor; and their structure."""
    # A named tuple's type has no place in a text.
    given = tuple([tuple(value) if isinstance(value, tuple) else value for value in given])
    named = {name: tuple(value) if isinstance(value, tuple) else value for name, value in named.items()}
    leaves, structure = private.pytree.tree_flatten((given, named))
    tensors = [leaf for leaf in leaves if isinstance(leaf, Tensor)]
    return tensors, [None if isinstance(leaf, Tensor) else [leaf] for leaf in leaves], structure


def _joined(tensors: Sequence[Tensor], others: list, structure: Any) -> tuple[tuple, dict[str, Any]]:
    """The arguments of a call that :func:`_split` has split."""
    remaining = iter(tensors)
    leaves = [next(remaining) if other is None else other[0] for other in others]
    return private.pytree.tree_unflatten(leaves, structure)


@private.outside_graphs
def _transformed(function: Callable, given: tuple, named: dict[str, Any]) -> Any:
    tensors, others, structure = _split(given, named)
    # A count is of all examples of a vmap, and would be read for each.
    others = [[leaf[0].unread()] if leaf and isinstance(leaf[0], TokenCount) else leaf for leaf in others]
    form: list[Any] = []  # of the result, which the graph must not hold: class, structure and what is there

    def run(*tensors: Tensor) -> tuple[Tensor, ...]:
        given, named = _joined(tensors, others, structure)
        result = function(*given, **named)
        kind = type(result) if dataclasses.is_dataclass(result) else None
        values, of_result = private.pytree.tree_flatten(vars(result) if kind else result)
        form[:] = kind, of_result, [value is not None for value in values]
        return tuple([value for value in values if value is not None])

    found = iter(_Again.apply(_as_now(run, tensors[0].device.type) if tensors else run, *tensors))
    kind, of_result, there = form
    result = private.pytree.tree_unflatten([next(found) if each else None for each in there], of_result)
    return result if kind is None else kind(**result)


def operator(function: Callable) -> Callable:
    """Decorator as :func:`transformable` for a function that gives one tensor. While torch.export traces, and for
    tensors without values, an operator runs it. The function gives :func:`without_values` for the latter."""
    _FUNCTIONS[function.__name__] = function
    plain = transformable(function)

    @functools.wraps(function)
    def call(*given: Any, **named: Any) -> Any:
        if torch.compiler.is_dynamo_compiling():
            return plain(*given, **named)
        tensor = next((t for t in (*given, *named.values()) if isinstance(t, Tensor)), None)
        traced = tensor is not None and (torch.compiler.is_compiling() or is_meta_or_fake(tensor))
        if traced and (encoded := _encoded(given, named)) is not None:
            return torch.ops.parallel_lce.function(function.__name__, *encoded)
        return plain(*given, **named)

    private.explain_break(call, "graphs of torch.compile break at it, and torch.export takes it without strict=True")
    return call


def without_values(shape: Sequence[int], *operands: Tensor | None) -> Tensor:
    """A function's result of operands without values. It has a gradient by them."""
    present = [t for t in operands if t is not None]
    dtype = accumulation_dtype(present[0].dtype)
    return present[0].new_empty(shape, dtype=dtype) + torch.stack([t.sum() for t in present]).sum(dtype=dtype)


def _encoded(given: tuple, named: dict[str, Any]) -> tuple[list[Tensor], str] | None:
    """A call's tensors, and its other arguments as text. None if one has no place there: a DTensor, or what the
    function refuses."""
    tensors, others, structure = _split(given, named)
    if any(map(is_dtensor, tensors)):
        return None
    try:
        return tensors, json.dumps([others, private.pytree.treespec_dumps(structure)], default=_as_json)
    except TypeError:
        return None


def _as_json(value: Any) -> Any:
    if isinstance(value, torch.dtype):
        return {"dtype": str(value).removeprefix("torch.")}
    if isinstance(value, (dist.ProcessGroup, DeviceMesh)) and (group := as_group(value)) is not None:
        return {"group": group.group_name}
    raise TypeError(f"no number: {value!r}")


def _from_json(value: dict[str, str]) -> Any:
    if "dtype" in value:
        return getattr(torch, value["dtype"])
    return private.group_of_name(value["group"]) if "group" in value else value


def _runner(name: str, settings: str) -> Callable:
    """The function of an operator's arguments, of tensors alone. It gives a tuple of one."""
    others, structure = json.loads(settings, object_hook=_from_json)
    structure = private.pytree.treespec_loads(structure)

    def run(*tensors: Tensor) -> tuple[Tensor]:
        given, named = _joined(tensors, others, structure)
        return (_FUNCTIONS[name](*given, **named),)

    return run


def _run(name, tensors, settings):
    return _runner(name, settings)(*tensors)[0]


_function = torch.library.custom_op(
    "parallel_lce::function",
    _run,
    mutates_args=(),
    schema="(str name, Tensor[] tensors, str settings) -> Tensor",
    tags=(torch.Tag.cudagraph_unsafe,),
)
_function.register_fake(_run)


def _save(ctx, inputs, output) -> None:
    ctx.name, tensors, settings = inputs
    ctx.run = _as_now(_runner(ctx.name, settings), tensors[0].device.type)
    ctx.save_for_backward(*tensors)


def _differentiate(ctx, upstream):
    tensors, wanted = ctx.saved_tensors, ctx.needs_input_grad[1]
    if private.get_proxy_mode() is not None:
        raise RuntimeError(f"the backward of an exported {ctx.name} cannot be compiled: run it without torch.compile")
    if any(map(is_meta_or_fake, tensors)):
        gradients = [t.new_empty(t.shape) if each else None for t, each in zip(tensors, wanted)]
    else:
        gradients = [*_gradients(ctx.run, tensors, [upstream], wanted)]
    return None, gradients, None


_function.register_autograd(_differentiate, setup_context=_save)
