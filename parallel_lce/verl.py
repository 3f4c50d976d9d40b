"""A plugin of verl. It replaces verl's fused linear cross-entropy on the FSDP and on the Megatron path.

Importing this module calls :func:`install`. verl imports it by the entry point ``parallel_lce`` of ``verl.plugins``, or
by ``VERL_USE_EXTERNAL_MODULES=parallel_lce.verl``. Nothing of verl or Megatron-core is imported here: modules of verl
are changed right after their own import.

verl's kernel returns one shard's term of the gradient of the hidden states. On the Megatron path with sequence
parallelism the mapping that gathers the sequence sums the terms. Without sequence parallelism verl does not sum them,
and the gradient is wrong. In that case the plugin sums them.
"""

from __future__ import annotations

import functools
import importlib.abc
import importlib.machinery
import sys
import warnings
from collections.abc import Callable
from contextvars import ContextVar
from types import ModuleType
from typing import Any

import torch
from torch import Tensor

from parallel_lce import rl


class _Call:
    """Passed through verl as the temperature. It carries the temperature to the kernel, and the sums of squared
    probabilities back, which the kernel's result cannot hold. Not a dataclass: FSDP copies these and rounds their
    tensors."""

    def __init__(self, temperature: Any, sum_p_squared: bool = False) -> None:
        self.temperature = temperature
        self.sum_p_squared = sum_p_squared
        self.sums: Tensor | None = None


# Each of the functions below is called instead of ``original``, a function of verl.


def _kernel(
    original: Callable, hidden: Tensor, weight: Tensor, labels: Tensor, temperature: Any = 1.0, *rest: Any, **named: Any
) -> tuple[Tensor, ...]:
    call = temperature if isinstance(temperature, _Call) else _Call(temperature)
    named["sum_p_squared"] = call.sum_p_squared
    log_probs, entropy, *sums = rl.linear_cross_entropy(hidden, weight, labels, call.temperature, *rest, **named)
    call.sums = sums[0] if sums else None
    return log_probs, entropy


_SAME_STATES = (
    *("CloneBackward0", "PermuteBackward0", "SqueezeBackward1", "ToCopyBackward0", "TransposeBackward0"),
    *("UnsafeViewBackward0", "UnsqueezeBackward0", "ViewBackward0"),
)


def _kernel_of_megatron(original: Callable, hidden: Tensor, *rest: Any, **named: Any) -> tuple[Tensor, ...]:
    """Sums dX, unless the hidden states come from a mapping whose backward does."""
    from megatron.core.tensor_parallel import mappings

    node = hidden.grad_fn
    while node is not None and node.name() in _SAME_STATES:
        node = node.next_functions[0][0]
    function = getattr(node, "_forward_cls", None)
    summed = function in (mappings._GatherFromSequenceParallelRegion, mappings._CopyToModelParallelRegion)
    named["reduce_hidden_grad"] = not (summed and getattr(node, "tensor_parallel_output_grad", True))
    return _kernel(original, hidden, *rest, **named)


def _call_of(batch: Any) -> _Call | None:
    """The options of a micro-batch that verl refuses with fused kernels: a temperature of each sample, or
    ``calculate_sum_pi_squared``. None if it has neither."""
    from verl.utils.tensordict_utils import get_non_tensor_data

    temperature, sums = batch["temperature"], get_non_tensor_data(batch, "calculate_sum_pi_squared", False)
    of_samples = isinstance(temperature, Tensor) and temperature.dim() == 1
    return _Call(temperature, bool(sums)) if sums or of_samples else None


def _changed(batch: Any, **values: object) -> Any:
    """A shallow copy of a TensorDict with other values."""
    from tensordict import NonTensorData

    batch = batch.clone(recurse=False)
    for name, value in values.items():
        batch[name] = value if isinstance(value, Tensor) else NonTensorData(value)
    return batch


def _fsdp_inputs(original: Callable, engine: Any, micro_batch: Any) -> tuple[dict, dict]:
    from verl.utils.tensordict_utils import get_non_tensor_data

    fused = get_non_tensor_data(micro_batch, "use_fused_kernels", False)
    packed = get_non_tensor_data(micro_batch, "use_remove_padding", True)
    backend = (engine.model_config.fused_kernel_options or {}).get("impl_backend")
    call = _call_of(micro_batch) if fused and packed and backend == "triton" else None
    if call is None:
        return original(engine, micro_batch)
    # Without fused kernels verl refuses nothing, and prepares the temperatures of this rank's tokens.
    inputs, kept = original(engine, _changed(micro_batch, use_fused_kernels=False))
    if isinstance(call.temperature, Tensor):
        call.temperature = kept["temperature_rmpad"].clamp(min=1e-8)
    labels = kept["input_ids_rmpad_rolled"].unsqueeze(0)
    return inputs | dict(temperature=call, return_dict=True, shift_labels=labels), kept | dict(parallel_lce=call)


def _fsdp_outputs(original: Callable, engine: Any, output: Any, output_args: dict, micro_batch: Any, *rest, **named):
    call = output_args.get("parallel_lce")
    if call is None or not call.sum_p_squared:
        return original(engine, output, output_args, micro_batch, *rest, **named)
    asked = _changed(micro_batch, calculate_sum_pi_squared=False)
    found = original(engine, output, output_args, asked, *rest, **named)
    sums = engine._gather_and_unpad_packed(call.sums, output_args["pad_size"])
    sums = torch.nested.nested_tensor_from_jagged(sums, micro_batch["input_ids"].offsets())
    return found | dict(sum_pi_squared=sums)


_current: ContextVar[_Call | None] = ContextVar("current", default=None)


def _megatron_step(original: Callable, engine: Any, batch_iter: Any, *rest: Any, **named: Any) -> tuple:
    batch = next(batch_iter)
    call = _call_of(batch) if engine.engine_config.use_fused_kernels else None
    if call is None:
        return original(engine, iter([batch]), *rest, **named)
    asked = _changed(batch, temperature=call, calculate_sum_pi_squared=False)
    token = _current.set(call)
    try:
        output, finish = original(engine, iter([asked]), *rest, **named)
    finally:
        _current.reset(token)
    if call.sums is not None:
        output["sum_pi_squared"] = call.sums
    before = dict(temperature=batch["temperature"], calculate_sum_pi_squared=call.sum_p_squared)
    return output, functools.partial(finish, data=_changed(finish.keywords["data"], **before))


def _megatron_temperature(original: Callable, temperature: Any) -> Any:
    if not isinstance(temperature, _Call):
        return original(temperature)
    if not isinstance(temperature.temperature, Tensor):
        temperature.temperature = original(temperature.temperature)
    return temperature


def _pack(original: Callable, ids: Tensor, *rest: Any, need_roll: bool = False, **named: Any) -> tuple:
    """Packs the temperatures of the samples as verl packs the labels. Only the labels come with ``need_roll=True``."""
    call = _current.get()
    if call is not None and need_roll and isinstance(call.temperature, Tensor):
        from verl.utils.torch_functional import expand_as_nested

        of_samples = call.temperature.to(ids.device, torch.float32).clamp(min=1e-8)
        packed, *_ = original(expand_as_nested(of_samples, ids), *rest, **named)
        call.temperature = torch.where(packed > 0, packed, 1.0)
    return original(ids, *rest, need_roll=need_roll, **named)


def _unpack(original: Callable, output: Tensor, *rest: Any, **named: Any) -> Tensor:
    """Unpacks the sums of squared probabilities together with verl's first tensor, the log-probabilities."""
    call = _current.get()
    if call is not None and call.sums is not None and not call.sums.is_nested:
        call.sums = original(call.sums.unsqueeze(0), *rest, **named)
    return original(output, *rest, **named)


# Module of verl: {a function or a method of it: what is called instead}.
_CHANGES: dict[str, dict[str, Callable]] = {
    "verl.utils.kernel.linear_cross_entropy": {"linear_cross_entropy": _kernel},
    "verl.models.mcore.model_forward_1f1b_overlap": {"linear_cross_entropy": _kernel_of_megatron},
    "verl.models.mcore.model_forward_fused": {
        "linear_cross_entropy": _kernel_of_megatron,
        "preprocess_thd_engine": _pack,
        "postprocess_thd_engine": _unpack,
    },
    "verl.workers.engine.fsdp.transformer_impl": {
        "FSDPEngineWithLMHead.prepare_model_inputs": _fsdp_inputs,
        "FSDPEngineWithLMHead.prepare_model_outputs": _fsdp_outputs,
    },
    "verl.workers.engine.megatron.transformer_impl": {
        "_resolve_fused_temperature": _megatron_temperature,
        "MegatronEngineWithLMHead.forward_step": _megatron_step,
    },
}

# (module or class, name): (our attribute, the original).
_replaced: dict[tuple[Any, str], tuple[Callable, Callable]] = {}


def _change(module: ModuleType) -> None:
    places = []
    try:
        for path, function in _CHANGES[module.__name__].items():
            *of_class, name = path.split(".")
            owner = getattr(module, of_class[0]) if of_class else module
            places.append((owner, name, getattr(owner, name), function))
    except AttributeError as error:
        warnings.warn(f"parallel_lce.verl leaves this release's {module.__name__} as it is: {error}", stacklevel=2)
        return
    for owner, name, bound, function in places:
        if (owner, name) not in _replaced:
            # A module that imported the name from a changed module holds our function: its original is looked up.
            original: Any = dict(_replaced.values()).get(bound, bound)
            _replaced[owner, name] = _instead(function, original), original
            setattr(owner, name, _replaced[owner, name][0])


def _instead(function: Callable, original: Callable) -> Callable:
    def replacement(*given: Any, **named: Any) -> Any:
        return function(original, *given, **named)

    return functools.update_wrapper(replacement, original)


class _Finder(importlib.abc.MetaPathFinder):
    """Changes the modules that are imported from now on."""

    def find_spec(self, fullname: str, path: Any, target: ModuleType | None = None) -> Any:
        spec = importlib.machinery.PathFinder.find_spec(fullname, path, target) if fullname in _CHANGES else None
        if spec is not None and spec.loader is not None:
            execute = spec.loader.exec_module
            spec.loader.exec_module = lambda module: (execute(module), _change(module))[0]
        return spec


_finder = _Finder()


def install() -> None:
    """Replace verl's ``linear_cross_entropy`` by :func:`parallel_lce.rl.linear_cross_entropy`, in the modules of verl
    that have imported it and in those that will. The docstring of our function has shapes, dtypes, collectives and
    errors. A second call changes nothing.

    On the Megatron path without sequence parallelism backward has one all-reduce of dX more. With ``use_fused_kernels``
    the FSDP engine (``impl_backend=triton``) and the Megatron engine also take a temperature of each sample and
    ``calculate_sum_pi_squared``. A module of another release that lacks a function stays as it is, with a warning.
    """
    if _finder not in sys.meta_path:
        sys.meta_path.insert(0, _finder)
    for name in _CHANGES:
        if name in sys.modules:
            _change(sys.modules[name])


def uninstall() -> None:
    """Undo :func:`install`, except what other code has replaced since."""
    if _finder in sys.meta_path:
        sys.meta_path.remove(_finder)
    while _replaced:
        (owner, name), (ours, original) = _replaced.popitem()
        if getattr(owner, name) is ours:
            setattr(owner, name, original)


install()
