"""A plugin of verl. It replaces verl's fused linear cross-entropy on the FSDP and on the Megatron path.

Importing this module calls :func:`patch`. verl imports it by the entry point ``parallel_lce`` of ``verl.plugins``, or
by ``VERL_USE_EXTERNAL_MODULES=parallel_lce.verl``. Nothing of verl or Megatron-core is imported here: modules of verl
are changed right after their own import.

verl's kernel returns one shard's term of the gradient of the hidden states, and so does ours: whoever calls it has a
mapping in front that sums the terms. With sequence parallelism this is the gather of verl's own functions. Without it
they have none, and the gradient is wrong: there, as the model's configuration says, ours sums the terms.
"""

from __future__ import annotations

import contextlib
import functools
import importlib
import inspect
import itertools
import os
import sys
import warnings
from collections.abc import Callable, Iterator
from contextvars import ContextVar
from types import ModuleType
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from parallel_lce import rl
from parallel_lce.core.options import check_flag
from parallel_lce.patching import AfterImport, Replacements
from parallel_lce.run.token_count import TokenCount, count_tokens


class _Call:
    """Passed through verl as the temperature. It carries the temperature to the kernel, and which tokens count; and
    the sums of squared probabilities back, which the kernel's result cannot hold. Not a dataclass: FSDP copies these
    and rounds their tensors."""

    def __init__(self, temperature: Any, sum_p_squared: bool = False, mask: Tensor | None = None) -> None:
        self.temperature = temperature
        self.sum_p_squared = sum_p_squared
        self.sums: Tensor | None = None
        # Of the batch's tokens, [total] bool, until packed() of this rank's tokens; None: all count.
        self.mask = mask
        self.count: TokenCount | None = None

    def packed(self, mask: Tensor) -> None:
        """This rank's tokens that count. Called before the model's forward."""
        self.mask, self.count = mask, count_tokens(mask)


# Set while verl's own functions run: the decoder's output if nothing sums its gradient, () if verl's gather does.
_unsummed: ContextVar[Tensor | tuple[()] | None] = ContextVar("unsummed", default=None)
_current: ContextVar[_Call | None] = ContextVar("current", default=None)
_KERNEL, _FUSED = "verl.utils.kernel.linear_cross_entropy", "verl.models.mcore.model_forward_fused"
_replacements = Replacements()


@contextlib.contextmanager
def _set(variable: ContextVar, value: Any) -> Iterator[None]:
    token = variable.set(value)
    try:
        yield
    finally:
        variable.reset(token)


# Each of the functions below is called instead of ``original``, a function of verl.


def _kernel(
    original, hidden, weight, labels, temperature=1.0, reduction="none", dist_process_group=None, **named
) -> tuple[Tensor, ...]:
    """Sums dX only if the hidden states are the very tensor that nothing sums. Between that and another tensor may be a
    mapping, so this leaves the sum to the caller, as verl's kernel does."""
    call, states = temperature if isinstance(temperature, _Call) else _Call(temperature), _unsummed.get()
    known = "reduce_hidden_grad" in named or hidden is states or isinstance(states, tuple)
    named = {"reduce_hidden_grad": hidden is states, "sum_p_squared": call.sum_p_squared, **named}
    if call.count is not None:
        named |= dict(mask=call.mask, counted_tokens=call.count)
    given = hidden, weight, labels, call.temperature, reduction, dist_process_group
    log_probs, entropy, *sums = rl.linear_cross_entropy(*given, **named)
    group, gradient = dist_process_group, log_probs.requires_grad and hidden.requires_grad
    if not known and gradient and group is not None and dist.get_world_size(group) > 1:
        warnings.warn(
            "parallel_lce.verl: as verl's own, this linear_cross_entropy returns the gradient of the hidden states as "
            "this rank's term, which a mapping in front must sum over the ranks. If there is none, pass "
            "reduce_hidden_grad=True; if there is, False ends this warning",
            stacklevel=3,
        )
    call.sums = sums[0] if sums else None
    return log_probs, entropy


def _needs_sum(config: Any) -> bool:
    from megatron.core import parallel_state

    return not config.sequence_parallel and parallel_state.get_tensor_model_parallel_world_size() > 1


def _processor(original: Callable, *given: Any, hidden_states: Any, config: Any, **named: Any) -> Any:
    states = ()
    if _needs_sum(config):
        # What wraps this function may have put a mapping in front.
        bound = sys.modules[_FUSED].fused_output_processor
        states = hidden_states if _replacements.own(bound) is original else None
    with _set(_unsummed, states):
        return original(*given, hidden_states=hidden_states, config=config, **named)


def _model_forward(original: Callable, model: Any, *given: Any, **named: Any) -> Any:
    if not _needs_sum(model.config):
        with _set(_unsummed, ()):
            return original(model, *given, **named)

    def found(decoder: Any, inputs: Any, output: Any) -> None:
        _unsummed.set(output[0] if isinstance(output, tuple) else output)

    # Before the user's hooks, which may return another tensor.
    with _set(_unsummed, None), model.decoder.register_forward_hook(found, prepend=True):
        return original(model, *given, **named)


def _call_of(batch: Any, module: str) -> _Call | None:
    """The options of a micro-batch that verl refuses with fused kernels: a temperature of each sample, or
    ``calculate_sum_pi_squared``; and with ``skip_masked`` its mask. None if it has none of these, or if the kernel of
    that module is not ours."""
    if (sys.modules.get(module), "linear_cross_entropy") not in _replacements:
        return None
    from verl.utils.tensordict_utils import get_non_tensor_data

    temperature, sums = batch["temperature"], get_non_tensor_data(batch, "calculate_sum_pi_squared", False)
    of_samples = isinstance(temperature, Tensor) and temperature.dim() == 1
    mask = _mask_of(batch) if _skips_masked() else None
    return _Call(temperature, bool(sums), mask) if sums or of_samples or mask is not None else None


def _mask_of(batch: Any) -> Tensor | None:
    """Of each token of the batch whether the next one counts in verl's losses: bool ``[total]``. None if the batch has
    no mask of a known form."""
    ids, mask = batch["input_ids"], batch.get("loss_mask")
    if mask is None or not ids.is_nested:
        return None
    total, ends = len(ids.values()), ids.offsets()[1:]
    if mask.is_nested and len(mask.values()) == total:  # of whole sequences, as of SFT
        values = mask.values()
    else:  # of the responses, at the ends of the sequences
        rows = mask.to_padded_tensor(0) if mask.is_nested else mask
        attention, width = batch.get("attention_mask"), rows.shape[1]
        if not mask.is_nested and attention is None:
            return None
        lengths = mask.offsets().diff() if mask.is_nested else attention[:, -width:].sum(1)
        column = torch.arange(width, device=rows.device)
        place = torch.where(column < lengths[:, None], (ends - lengths)[:, None] + column, total)
        values = rows.new_zeros(total + 1).index_copy(0, place.flatten(), rows.flatten())[:total]
    return values.roll(-1) != 0


def _changed(batch: Any, **values: object) -> Any:
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
    call = None
    # VeOmni's engine overrides the method, calls this one, and never runs the kernel.
    inherited = inspect.unwrap(type(engine).prepare_model_inputs) is inspect.unwrap(original)
    if fused and packed and backend == "triton" and inherited:
        importlib.import_module(_KERNEL)  # which the model's forward imports first, and which the door then replaces
        call = _call_of(micro_batch, _KERNEL)
    if call is None:
        return original(engine, micro_batch)
    # Without fused kernels verl refuses nothing, and prepares the temperatures of this rank's tokens.
    inputs, kept = original(engine, _changed(micro_batch, use_fused_kernels=False))
    if isinstance(call.temperature, Tensor):
        call.temperature = kept["temperature_rmpad"].clamp(min=1e-8)
    if call.mask is not None and not engine.use_ulysses_sp:  # which would give each rank a part of it
        call.packed(torch.nn.functional.pad(call.mask, (0, kept["pad_size"])))
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


def _megatron_step(original: Callable, engine: Any, batch_iter: Any, *rest: Any, **named: Any) -> tuple:
    if not engine.engine_config.use_fused_kernels:
        return original(engine, batch_iter, *rest, **named)
    batch = next(batch_iter)
    call = _call_of(batch, _FUSED)
    if call is None:
        return original(engine, itertools.chain([batch], batch_iter), *rest, **named)
    asked = _changed(batch, temperature=call, calculate_sum_pi_squared=False)
    with _set(_current, call):
        output, finish = original(engine, itertools.chain([asked], batch_iter), *rest, **named)
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


def _pack(original: Callable, ids: Any, *rest: Any, need_roll: bool = False, **named: Any) -> tuple:
    """Packs the temperatures of the samples, and the mask, as verl packs the labels. Only the labels come with
    ``need_roll=True``."""
    call = _current.get()
    if call is not None and need_roll and call.mask is not None:
        of_tokens = torch.nested.nested_tensor_from_jagged(call.mask.to(ids.device, ids.dtype), ids.offsets())
        packed, *_ = original(of_tokens, *rest, **named)
        call.packed(packed != 0)
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
    _KERNEL: {"linear_cross_entropy": _kernel},
    "verl.models.mcore.model_forward_1f1b_overlap": {"linear_cross_entropy": _kernel},
    _FUSED: {
        "linear_cross_entropy": _kernel,
        "fused_output_processor": _processor,
        "_fused_GPTModel_forward": _model_forward,
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
    own = getattr(getattr(sys.modules.get(_KERNEL), "LinearCrossEntropy", None), "apply", None)
    for owner, name, bound, function in places:
        original = _replacements.own(bound)  # a module may have imported ours from a changed module
        if function is _kernel and own is not None and original != own and (owner, name) not in _replacements:
            warnings.warn(
                f"parallel_lce.verl leaves {module.__name__}.{name} as it is: other code has replaced verl's function. "
                "If that code should call ours, import parallel_lce.verl before it",
                stacklevel=2,
            )
            continue
        _replacements.replace(owner, name, functools.partial(_instead, function, original))


def _instead(function: Callable, original: Callable, _: Any) -> Callable:
    def replacement(*given: Any, **named: Any) -> Any:
        return function(original, *given, **named)

    return functools.update_wrapper(replacement, original)


_after_import: list[AfterImport] = []


# Of the last patch(); None: the environment's.
_settings: dict[str, bool | None] = {"skip_masked": None}


def _skips_masked() -> bool:
    """As the last :func:`patch` says, else the environment. Raises ``ValueError`` if that says neither 0 nor 1."""
    if (given := _settings["skip_masked"]) is not None:
        return given
    skip = os.environ.get("PARALLEL_LCE_SKIP_MASKED") or "0"
    if skip not in ("0", "1"):
        raise ValueError(f"PARALLEL_LCE_SKIP_MASKED must be 0 or 1, got {skip!r}")
    return skip == "1"


def patch(*, skip_masked: bool | None = None) -> None:
    """Replace verl's ``linear_cross_entropy`` by :func:`parallel_lce.rl.linear_cross_entropy`, in the modules of verl
    that have imported it and in those that will. The docstring of our function has shapes, dtypes, collectives and
    errors. A second call changes ``skip_masked`` alone, if it is given.

    On the Megatron path without sequence parallelism backward has one all-reduce of dX more. With ``use_fused_kernels``
    the FSDP engine (``impl_backend=triton``) and the Megatron engine also take a temperature of each sample and
    ``calculate_sum_pi_squared``. A module of another release that lacks a function stays as it is, with a warning.

    ``skip_masked``: with ``use_fused_kernels`` tokens that a batch's ``loss_mask`` leaves out of verl's losses, such as
    those of the prompts, cost nothing in the FSDP engine (``impl_backend=triton``, without Ulysses) and the Megatron
    engine; their log-probabilities and entropies are 0. Default: ``PARALLEL_LCE_SKIP_MASKED``, else False.
    """
    if skip_masked is not None:
        check_flag("skip_masked", skip_masked)
        _settings["skip_masked"] = skip_masked
    if not _after_import:
        _after_import.append(AfterImport(_CHANGES, _change))


def unpatch() -> None:
    """Undo :func:`patch`, except what other code has replaced since, with a warning."""
    _settings["skip_masked"] = None
    while _after_import:
        _after_import.pop().cancel()
    _replacements.restore()


patch()
