"""Checks of tensors and arguments, before any kernel or collective. Messages name the given and the expected value."""

from __future__ import annotations

import functools
import inspect
import re
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any, TypeGuard, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor
from torch.autograd import forward_ad
from torch.distributed.device_mesh import DeviceMesh

from parallel_lce.call import debug
from parallel_lce.call.call import features_of
from parallel_lce.core.collectives import NCCL_ALONE, Layout
from parallel_lce.core.memory import in_memory, out_of_inference
from parallel_lce.core.options import FLOATS, INTEGERS, Options, Tensors, as_int64, shortened
from parallel_lce.core.partials import accumulation_dtype
from parallel_lce.core.private import TRACING, AsyncCollectiveTensor

F = TypeVar("F", bound=Callable)
_OPERANDS = {*"input linear_weight linear_bias teacher_hidden teacher_weight teacher_bias".split()}
_FACTORS = {"logit_scale", "teacher_logit_scale", "temperature", "teacher_log_probs"}
# What torch.distributed.new_group returns to a process that is not a member.
_NO_MEMBER: Any = dist.GroupMember.NON_GROUP_MEMBER


@contextmanager
def renamed(**names: str) -> Iterator[None]:
    """A context that replaces argument names of :func:`parallel_lce.linear_cross_entropy` by ``names`` in the message
    of a ``ValueError``."""
    try:
        yield
    except ValueError as refusal:
        text = re.sub(rf"\b({'|'.join(names)})\b", lambda match: names[match[0]], str(refusal))
        raise type(refusal)(text) from None


def described(value: object) -> str:
    """A tensor's shape and dtype, or the type of anything else."""
    return f"{list(value.shape)} of {value.dtype}" if isinstance(value, Tensor) else type(value).__name__


def int64_ids(name: str, ids: object) -> Tensor:
    """:func:`as_int64`. Raises ``ValueError`` unless ``ids`` is a tensor of integers."""
    if not isinstance(ids, Tensor) or ids.dtype not in INTEGERS:
        raise ValueError(f"{name} must be ids of an integer dtype, got {described(ids)}")
    return as_int64(ids)


def public(function: F) -> F:
    """Decorates a public function, a door's loss, and the operator of compiled graphs. Every refusal goes through here,
    once: what the outermost function raises before its exchange (:func:`parallel_lce.call.debug.agree`) makes the other
    ranks of its process group raise in debug mode."""
    parameters = inspect.signature(function).parameters

    @functools.wraps(function)
    def called(*given: Any, **named: Any) -> Any:
        if torch.compiler.is_compiling():  # the operator of the graph calls prepare
            return function(*given, **named)
        state = debug.state
        state.depth += 1
        state.awaited = True
        try:
            return function(*given, **named)
        except Exception as refusal:
            if state.depth == 1 and state.awaited:
                debug.report_refusal(_layout_of(dict(zip(parameters, given)) | named), refusal)
            raise
        finally:
            state.depth -= 1
            if not state.depth:
                vars(state).clear()  # a group must not outlive its destruction here

    return called  # pyright: ignore[reportReturnType]


def _layout_of(arguments: Mapping[str, Any]) -> Layout:
    """The layout of a refused call over the group that it has noted, or that its arguments give."""
    names = ("process_group", "tp_group", "dist_process_group", "group")
    groups = [debug.state.group, *map(arguments.get, names), getattr(arguments.get("self"), "process_group", None)]
    try:
        for name, value in arguments.items():
            # The placements of the weight name the dimension of tensor parallelism.
            if "weight" in name and name != "token_weight" and is_dtensor(value):
                dims = [dim for dim, placement in enumerate(value.placements) if not placement.is_replicate()]
                groups += [value.device_mesh.get_group(dims[0])] if len(dims) == 1 else []
        for group in groups:
            if group is not None:
                return Layout.of(as_group(group), False)
    except Exception:  # the group itself is refused, or destroyed
        pass
    return Layout()


def as_group(group: Any) -> dist.ProcessGroup | None:
    """The process group, also of a one-dimensional DeviceMesh. Raises ``ValueError`` for anything else."""
    if group is None or isinstance(group, dist.ProcessGroup):
        return group
    given = type(group).__name__
    if isinstance(group, DeviceMesh):
        if group.ndim == 1 and group.get_coordinate() is not None:
            return group.get_group()
        given += f" of {group.ndim} dimensions: pass one of them, as mesh['tp'], in its own processes"
    elif type(group) is int and group == _NO_MEMBER:
        given = "GroupMember.NON_GROUP_MEMBER: this process is not one of the group's"
    raise ValueError(
        f"process_group must be a torch.distributed.ProcessGroup, a one-dimensional DeviceMesh or None, got {given}"
    )


def has_dtensor(values: Iterable[object]) -> bool:
    # Importing torch.distributed.tensor takes a second. Before, there are no DTensors.
    tensor = getattr(dist, "tensor", None)
    return tensor is not None and any([isinstance(value, tensor.DTensor) for value in values])


def is_dtensor(value: object) -> TypeGuard[Any]:
    return has_dtensor((value,))


def check_tensors(options: Options, tensors: Tensors, layout: Layout) -> torch.Size:
    """Raise ``ValueError`` for tensors that do not fit each other, the options or the layout. Returns the tokens'
    shape."""
    input, weight, _, bias, *_ = tensors
    _check_each(options, tensors)
    if options.reduce_dtype not in (None, input.dtype, accumulation_dtype(input.dtype)):
        given = f"{accumulation_dtype(input.dtype)} or the input's {input.dtype}, got {options.reduce_dtype!r}"
        raise ValueError(f"reduce_dtype must be None, {given}")
    if input.dim() < 1 + layout.sequence_parallel:
        needed = "[S/P, ..., D] under sequence parallelism" if layout.sequence_parallel else "[..., D]"
        raise ValueError(f"input must be {needed}, got {list(input.shape)}")
    if weight.dim() != 2:
        flattened = ". A parameter that FSDP1 has flattened is whole only in the forward of the module that it wraps"
        hint = flattened if weight.dim() == 1 else ""
        raise ValueError(f"linear_weight must be [V, D] with two dimensions, got {list(weight.shape)}{hint}")
    if input.shape[-1] != weight.shape[1]:
        raise ValueError(
            f"input has {input.shape[-1]} features and linear_weight {list(weight.shape)} has {weight.shape[1]}: it "
            "must have one row per entry of the vocabulary. Is it transposed?"
        )
    if bias is not None and bias.shape != weight.shape[:1]:
        rows = f"[{weight.shape[0]}], one entry per row of linear_weight {list(weight.shape)}"
        raise ValueError(f"linear_bias must have shape {rows}, got {list(bias.shape)}")
    leading = input.shape[:-1]
    tokens = torch.Size((leading[0] * layout.sp_size, *leading[1:]) if leading else ())
    for name in ("target", "token_weight", "logit_scale", "temperature"):
        value, size = getattr(tensors, name), list(tokens)
        if value is None or value.shape == tokens:
            continue
        if name in ("logit_scale", "temperature"):
            expected = f"be one Python number, or a tensor of target's shape {size}, got one of shape"
        else:
            where = f" of each of {layout.ranks} sequence-parallel ranks" if layout.sequence_parallel else ""
            expected = f"have shape {size} for input {list(input.shape)}{where}, got"
        hint = _hint_of_a_group(layout.ranks) if options.sequence_parallel else ""
        if layout.sequence_parallel and len(leading) > 1:
            hint = ". If the second dimension is the sequence, pass sequence_dim=1 (of a style: Shard(1))"
        raise ValueError(f"{name} must {expected} {list(value.shape)}{hint}")
    _check_selected(tensors, tokens)
    _check_shard(options, weight, layout)
    vocab_size = known_vocab_size(weight.shape[0], layout, options.vocab_start, options.vocab_size)
    for feature in features_of(options, tensors):
        feature.check(options, tensors, vocab_size)
    return tokens


def check_kind(name: str, value: Tensor) -> None:
    """Raise for a DTensor, a sparse tensor, a subclass that has no plain memory, and a forward-mode dual tensor, whose
    tangent would be ignored."""
    if is_dtensor(value):
        raise ValueError(f"{name} is a DTensor: pass {name}.to_local(), and the process group that shards it")
    if dispatches(type(value)):
        raise ValueError(
            f"{name} is a {type(value).__name__}, a subclass of Tensor with a __torch_dispatch__ of its own, whose "
            "memory may hold anything: pass a plain tensor"
        )
    if value.layout != torch.strided or value.is_nested:
        given = "a nested one" if value.is_nested else f"one of layout {value.layout}"
        raise ValueError(f"{name} must be a dense tensor, got {given}")
    if not torch.compiler.is_compiling() and forward_ad.unpack_dual(value).tangent is not None:
        raise NotImplementedError(f"{name} has a tangent: parallel_lce has no forward-mode derivatives")


def dispatches(kind: type[Tensor]) -> bool:
    """Whether tensors of this class have a ``__torch_dispatch__`` of their own, classes of torch's tracing excepted."""
    if kind.__torch_dispatch__ is Tensor.__torch_dispatch__:  # pyright: ignore[reportAttributeAccessIssue]
        return False
    if torch.compiler.is_compiling() or kind is AsyncCollectiveTensor:
        return False
    return not kind.__module__.startswith(TRACING)


def check_dtype(name: str, value: Tensor) -> None:
    """Raise ``ValueError`` for a dtype that no argument of this name may have."""
    dtype = value.dtype
    if name in _OPERANDS and dtype not in FLOATS:
        raise ValueError(f"{name} must be bfloat16, float16, float32 or float64, got {dtype}")
    if name in ("target", "selected", "selected_offsets") and dtype not in INTEGERS:
        classes = " (class probabilities are not supported)" if name == "target" else ""
        raise ValueError(f"{name} must hold ids of an integer dtype, got {dtype}{classes}")
    if name == "token_weight" and value.is_complex():
        raise ValueError(f"token_weight must be real, got {dtype}")
    if name in _FACTORS and not value.is_floating_point():
        raise ValueError(f"{name} must be floating-point, got {dtype}")
    if name == "mask" and dtype != torch.bool:
        raise ValueError(f"mask must be torch.bool, got {dtype}")


def _check_each(options: Options, tensors: Tensors) -> None:
    """Raise unless each is a plain tensor on the input's device, of a dtype that fits, or None if it is optional."""
    required = ("input", "linear_weight") + ("target",) * (options.kind == "loss")
    for name, value in zip(Tensors._fields, tensors):
        if value is None and name not in required:
            continue
        if not isinstance(value, Tensor):
            expected = "a tensor" if name in required else "a tensor or None"
            layer = ": pass its weight" if isinstance(getattr(value, "weight", None), Tensor) else ""
            raise ValueError(f"{name} must be {expected}, got {type(value).__name__}{layer}")
        check_kind(name, value)
        if value.device != tensors.input.device:
            raise ValueError(f"{name} is on {value.device} and input is on {tensors.input.device}")
        check_dtype(name, value)
        dtype = tensors.input.dtype
        if name in ("linear_weight", "linear_bias") and value.dtype != dtype:
            raise ValueError(f"{name} is {value.dtype} and input is {dtype}: cast one, or use torch.autocast")
        if name in ("token_weight", "logit_scale", "temperature"):
            check_no_gradient(name, value)


def check_no_gradient(name: str, value: Tensor) -> None:
    if value.requires_grad and torch.is_grad_enabled():
        instead = ", or multiply the losses of reduction='none' by it" if name == "token_weight" else ""
        raise ValueError(f"{name} requires a gradient, and none flows to it: pass {name}.detach(){instead}")


def check_values(loss: Any, values: Iterable[Any], reduction: Any, target: Any) -> tuple[Tensor, ...]:
    """The ``values`` per token of a caller's function ``loss``, in memory. Raises ``ValueError`` for those that do not
    fit the ``target``, for a loss that is no function, and for a reduction other than 'sum' and 'mean'."""
    if not callable(loss):
        raise ValueError(f"loss must be a function of statistics and values per token, got {type(loss).__name__}")
    if reduction not in ("sum", "mean"):
        raise ValueError(f"reduction must be 'sum' or 'mean', got {shortened(reduction)}: return losses as a metric")
    checked = []
    for number, value in enumerate(values):
        checked.append(check_value(f"per_token[{number}]", value, "target", target))
        check_no_gradient(f"per_token[{number}]", value)
    return tuple(checked)


def check_value(name: str, value: Any, like_name: str, like: Any) -> Tensor:
    """The ``value`` in memory, without its gradient. Debug mode will compare it. Raises ``ValueError`` unless it is a
    plain tensor of the shape and on the device of ``like``, if that is a tensor."""
    if not isinstance(value, Tensor):
        raise ValueError(f"{name} must be a tensor, got {type(value).__name__}")
    check_kind(name, value)
    if isinstance(like, Tensor) and (value.shape, value.device) != (like.shape, like.device):
        expected, given = (f"{list(t.shape)} on {t.device}" for t in (like, value))
        raise ValueError(f"{name} must have the shape of {like_name}, {expected}, got {given}")
    debug.compare_later({name: value})
    return out_of_inference(in_memory(value.detach()))


def _check_selected(a: Tensors, tokens: torch.Size) -> None:
    ids, offsets, count = a.selected, a.selected_offsets, tokens.numel() + 1
    if ids is None:
        return
    fits = offsets is not None and ids.dim() == 1 and offsets.shape == (count,)
    if not (fits or (offsets is None and ids.dim() and ids.shape[:-1] == tokens)):
        given = "" if offsets is None else f" and {list(offsets.shape)}"
        raise ValueError(
            f"selected must be ids of shape [..., K] for tokens of shape {list(tokens)}, or ids [E] and offsets "
            f"[{count}], one more than the tokens, got {list(ids.shape)}{given}"
        )
    if offsets is not None and count == 1 and ids.numel():
        raise ValueError(f"selected has {ids.numel()} ids, and there is no token that could have them")


def _check_shard(options: Options, weight: Tensor, layout: Layout) -> None:
    rows, start, size = weight.shape[0], options.vocab_start, options.vocab_size
    if rows == 0 and (start is None or layout.ranks == 1):
        raise ValueError(f"linear_weight {list(weight.shape)} has no rows: the vocabulary is empty")
    if layout.ranks == 1 and start:
        raise ValueError(
            f"vocab_start={start} without a process group of several ranks: nobody holds the entries [0, {start})"
        )
    total = known_vocab_size(rows, layout, start, None)
    if size is not None and total is not None and size > total:
        raise ValueError(
            f"vocab_size={size} exceeds the {total} rows of linear_weight on {layout.ranks} rank(s) of {rows}"
            f"{_hint_of_a_group(layout.ranks)}"
        )
    if layout.ranks > 1 and not weight.is_cuda and dist.get_backend(layout.group) in NCCL_ALONE:
        raise ValueError(f"process_group communicates through nccl, but input is on {weight.device}")


class OutsideVocabulary(ValueError, IndexError):
    """A target that is no id. torch's losses raise ``IndexError``, this package's checks ``ValueError``."""


def check_target(
    options: Options, target: Tensor | None, vocab_size: int | None, layout: Layout, mask: Tensor | None = None
) -> None:
    """Raise :class:`OutsideVocabulary` for the first target outside ``[0, vocab_size)`` that would give NaN. Waits for
    the device. ``mask``: the tokens that count."""
    if target is None or vocab_size is None or options.ignore_index is None or not options.outside_is_nan:
        return
    low, high = map(int, target.aminmax()) if target.numel() else (0, 0)
    if 0 <= low and high < vocab_size:  # the usual case, at a quarter of the cost
        return
    outside = (target != options.ignore_index) & ((target < 0) | (target >= vocab_size))
    outside = outside if mask is None else outside & mask
    if outside.any():
        position = int(outside.flatten().nonzero()[0])
        raise OutsideVocabulary(
            f"target {int(target.flatten()[position])} at position {position} is outside [0, {vocab_size}) and is not "
            f"{'-100' if options.kind == 'statistics' else 'ignore_index'}{_hint_of_a_group(layout.ranks)}"
        )


def _hint_of_a_group(ranks: int) -> str:
    """What a refusal adds where a shard may have been passed without its group. ``ranks``: of the call."""
    alone = ranks > 1 or not dist.is_initialized() or dist.get_world_size() == 1
    return "" if alone else ". If linear_weight is a shard of the vocabulary, pass the process_group of all shards"


def known_vocab_size(rows: int, layout: Layout, vocab_start: int | None, vocab_size: int | None) -> int | None:
    """V, or None if V depends on numbers of rows that only other ranks know."""
    if vocab_size is not None:
        return vocab_size
    return rows * layout.ranks if vocab_start is None or layout.ranks == 1 else None
