"""Replaces verl's fused linear cross-entropy by :func:`parallel_lce.rl.linear_cross_entropy`.

With ``VERL_USE_EXTERNAL_MODULES=parallel_lce.verl`` verl imports this module, which then calls :func:`patch`. Without
that variable an import changes nothing.
"""

from __future__ import annotations

import importlib
import os
import sys
from collections.abc import Callable
from contextvars import ContextVar
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from parallel_lce import neighbours, rl
from parallel_lce.core.options import check_flag
from parallel_lce.core.private import keep_with, take_from
from parallel_lce.patching import Replacements, exchange, warn
from parallel_lce.run.token_count import count_tokens

_PLACES = [(module, "linear_cross_entropy") for module in neighbours.VERL_KERNEL]
_settings = {"skip_masked": False}
_replacements = Replacements()
# Of each token of an engine's step whether it counts: from its inputs on until Megatron's labels are packed.
_mask: ContextVar[Tensor | None] = ContextVar("_mask", default=None)


def _linear_cross_entropy(
    hidden, weight, labels, temperature=1.0, reduction="none", dist_process_group=None, **named
) -> tuple[Tensor, ...]:
    """:func:`parallel_lce.rl.linear_cross_entropy`, of the tokens that count if masked ones are skipped. Raises
    ``RuntimeError`` if nothing sums the gradient of the hidden states over the ranks."""
    several = dist_process_group is not None and dist.get_world_size(dist_process_group) > 1
    trained = torch.is_grad_enabled() and hidden.requires_grad
    if several and trained and type(hidden.grad_fn).__name__ not in neighbours.VERL_SUMMED:
        raise RuntimeError(
            "parallel_lce.verl: on Megatron without sequence parallelism nothing in verl sums the gradient of the "
            "hidden states over the tensor-parallel ranks. Set megatron.sequence_parallel=True, or "
            "use_fused_kernels=False. In a forward of your own call parallel_lce.rl.linear_cross_entropy"
        )
    if _settings["skip_masked"]:
        _wrap_engines()
        named |= take_from(labels) or {}
    return rl.linear_cross_entropy(hidden, weight, labels, temperature, reduction, dist_process_group, **named)


def _keep(labels: Tensor, mask: Tensor) -> None:
    """With the memory of a step's labels, before the model's forward, so that the host need not wait for the count."""
    keep_with(labels, dict(mask=mask, counted_tokens=count_tokens(mask)))


def _preparing(own: Callable) -> Callable:
    def prepare_model_inputs(engine: Any, *batch: Any, **named: Any) -> Any:
        mask = _mask_of(*batch, *named.values())
        _mask.set(mask)
        found = own(engine, *batch, **named)
        # Megatron's engine gives no labels. Ulysses gives each rank a part of them.
        if mask is not None and isinstance(found, tuple) and not engine.use_ulysses_sp:
            if (labels := found[0].get("shift_labels")) is not None:
                _keep(labels, torch.nn.functional.pad(mask.roll(-1), (0, labels.numel() - len(mask))))
        return found

    return prepare_model_inputs


def _packing(own: Callable) -> Callable:
    def preprocess_thd_engine(ids: Any, *rest: Any, need_roll: bool = False, **named: Any) -> tuple:
        found, mask = own(ids, *rest, need_roll=need_roll, **named), _mask.get()
        if mask is not None and need_roll:  # of the labels, and so of the mask
            of_tokens = torch.nested.nested_tensor_from_jagged(mask.to(ids.dtype), ids.offsets())
            _keep(found[0], own(of_tokens, *rest, need_roll=True, **named)[0] != 0)
        return found

    return preprocess_thd_engine


def _mask_of(batch: Any) -> Tensor | None:
    """Of each token of the batch whether it counts in verl's losses: bool ``[total]``. None if masked tokens are not
    skipped, or if there is no mask of a known form."""
    ids, mask, attention = batch["input_ids"], batch.get("loss_mask"), batch.get("attention_mask")
    if not _settings["skip_masked"] or mask is None or not (mask.is_nested or attention is not None):
        return None
    # The mask is of each sequence's last tokens: of all, as of SFT, or of the response.
    rows = mask.to_padded_tensor(0) if mask.is_nested else mask
    lengths = mask.offsets().diff() if mask.is_nested else attention[:, -rows.shape[1] :].sum(1)
    total, starts = len(ids.values()), ids.offsets()[1:] - lengths
    column = torch.arange(rows.shape[1], device=rows.device)
    place = torch.where(column < lengths[:, None], starts[:, None] + column, total)
    flat = rows.new_zeros(total + 1).index_copy(0, place.flatten(), rows.flatten())
    return flat[:total] != 0


_WRAPPED = [(neighbours.VERL_FSDP, _preparing), (neighbours.VERL_MEGATRON, _preparing)]
_WRAPPED += [(neighbours.VERL_PACKING, _packing)]


def _wrap_engines() -> None:
    """Wrap the functions of the engines that are imported, once."""
    for (module, *of_class, name), wrap in _WRAPPED:
        if (owner := sys.modules.get(module)) is not None:
            _replacements.replace(getattr(owner, of_class[0]) if of_class else owner, name, wrap)


def patch(*, skip_masked: bool | None = None) -> None:
    """Replace verl's ``linear_cross_entropy`` by :func:`parallel_lce.rl.linear_cross_entropy`, whose docstring has
    shapes, dtypes, collectives and errors. It also raises ``RuntimeError`` where nothing in verl sums the gradient of
    the hidden states: on Megatron without sequence parallelism at TP > 1. A function that other code has put in verl's
    place stays, with a warning.

    ``skip_masked``: tokens that a batch's ``loss_mask`` leaves out of verl's losses cost nothing in the FSDP engine
    (with ``use_remove_padding``, without Ulysses) and the Megatron engine, from a process's second batch on; their
    log-probabilities and entropies are 0. Default: ``PARALLEL_LCE_SKIP_MASKED``, else False. A second call replaces it.

    Raises:
        ImportError: there is no verl, or one without this function. ValueError: an invalid ``skip_masked``.
    """
    if skip_masked is None:
        if (text := os.environ.get("PARALLEL_LCE_SKIP_MASKED") or "0") not in ("0", "1"):
            raise ValueError(f"PARALLEL_LCE_SKIP_MASKED must be 0 or 1, got {text!r}")
        skip_masked = text == "1"
    check_flag("skip_masked", skip_masked)
    try:
        stock = importlib.import_module(neighbours.VERL_KERNEL[0]).LinearCrossEntropy.apply
    except (ImportError, AttributeError) as error:
        raise ImportError(f"parallel_lce.verl needs verl 0.9 or later (pip install verl): {error}") from error
    _settings["skip_masked"] = skip_masked
    for place in exchange(_PLACES, stock, _linear_cross_entropy):
        said = f"{place} is other code's and stays: import parallel_lce.verl before that code"
        warn(f"parallel_lce.verl: {said}", UserWarning)


def unpatch() -> None:
    """Undo :func:`patch`, except what other code has replaced since."""
    _settings["skip_masked"] = False
    if (kernel := sys.modules.get(neighbours.VERL_KERNEL[0])) is not None:
        exchange(_PLACES, _linear_cross_entropy, kernel.LinearCrossEntropy.apply)
    _replacements.restore()


if __name__ in os.environ.get("VERL_USE_EXTERNAL_MODULES", "").split(","):
    patch()
