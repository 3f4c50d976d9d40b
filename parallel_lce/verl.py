"""Replaces verl's fused linear cross-entropy by :func:`parallel_lce.rl.linear_cross_entropy`: ``patch()``, which an
import with ``VERL_USE_EXTERNAL_MODULES=parallel_lce.verl`` calls."""

from __future__ import annotations

import importlib
import os
import sys
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from parallel_lce import neighbours, rl
from parallel_lce.call.checks import public
from parallel_lce.core.options import check_flag
from parallel_lce.core.private import keep_with, take_from
from parallel_lce.patching import Replacements, warn
from parallel_lce.run.token_count import count_tokens

_NAME = "linear_cross_entropy"
_settings = {"skip_masked": False}
_replacements = Replacements()


@public
def _linear_cross_entropy(
    hidden, weight, labels, temperature=1.0, reduction="none", dist_process_group=None, **named
) -> tuple[Tensor, ...]:
    """Raises ``RuntimeError`` if nothing sums the gradient of the hidden states over the ranks, and where no tokens can
    be skipped."""
    several = dist_process_group is not None and dist.get_world_size(dist_process_group) > 1
    trained = torch.is_grad_enabled() and hidden.requires_grad
    if several and trained and type(hidden.grad_fn).__name__ not in neighbours.VERL_SUMMED:
        raise RuntimeError(
            "parallel_lce.verl: the hidden states do not come straight from a mapping that sums their gradient over "
            "the tensor-parallel ranks. On Megatron verl has one with sequence parallelism alone: set "
            "megatron.sequence_parallel=True, or use_fused_kernels=False. In a forward of your own call "
            "parallel_lce.rl.linear_cross_entropy"
        )
    if _settings["skip_masked"]:
        if dist_process_group is not None:
            said = "PARALLEL_LCE_SKIP_MASKED and skip_masked are for verl's FSDP engine: on Megatron leave them out"
            raise RuntimeError(f"parallel_lce.verl: {said}")
        module, kind, name = neighbours.VERL_FSDP  # what makes labels, in the engine that calls by now
        if module in sys.modules:
            _replacements.replace(getattr(sys.modules[module], kind), name, _preparing)
        named |= take_from(labels) or {}
    return rl.linear_cross_entropy(hidden, weight, labels, temperature, reduction, dist_process_group, **named)


def _preparing(own: Callable) -> Callable:
    def prepare_model_inputs(engine: Any, *batch: Any, **named: Any) -> Any:
        mask, found = _mask_of(*batch, *named.values()), own(engine, *batch, **named)
        # Ulysses gives each rank a part of the labels.
        if mask is not None and not engine.use_ulysses_sp and (labels := found[0].get("shift_labels")) is not None:
            of_labels = torch.nn.functional.pad(mask.roll(-1), (0, labels.numel() - len(mask)))
            # Before the model's forward, so that the host need not wait for the count.
            keep_with(labels, dict(mask=of_labels, counted_tokens=count_tokens(of_labels)))
        return found

    return prepare_model_inputs


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


def patch(*, skip_masked: bool | None = None) -> None:
    """Replace verl's ``linear_cross_entropy`` by :func:`parallel_lce.rl.linear_cross_entropy`: docs/rl.md. What other
    code has replaced stays, and so does what was imported before: with a warning. ``skip_masked``: by default
    ``PARALLEL_LCE_SKIP_MASKED``, else False; a second call replaces it. ``ImportError``: there is no verl, or one
    without this function.
    """
    if skip_masked is None:
        if (text := os.environ.get("PARALLEL_LCE_SKIP_MASKED") or "0") not in ("0", "1"):
            raise ValueError(f"PARALLEL_LCE_SKIP_MASKED must be 0 or 1, got {text!r}")
        skip_masked = text == "1"
    check_flag("skip_masked", skip_masked)
    try:
        kernel = importlib.import_module(neighbours.VERL_KERNEL)
        stock = kernel.LinearCrossEntropy.apply
    except (ImportError, AttributeError) as error:
        raise ImportError(f"parallel_lce.verl needs verl 0.9 or later (pip install verl): {error}") from error
    _settings["skip_masked"] = skip_masked
    if kernel.linear_cross_entropy == stock:
        _replacements.pop((kernel, _NAME), None)  # verl's own came back
        _replacements.replace(kernel, _NAME, lambda own: _linear_cross_entropy)
    for name in (neighbours.VERL_KERNEL, *neighbours.VERL_USERS):
        if getattr(sys.modules.get(name), _NAME, _linear_cross_entropy) != _linear_cross_entropy:
            said = "is other code's, or was imported before, and stays: import parallel_lce.verl earlier"
            warn(f"parallel_lce.verl: {name}.{_NAME} {said}", UserWarning)


def unpatch() -> None:
    """Undo :func:`patch`, except what other code has replaced since, and modules that have imported the function."""
    _settings["skip_masked"] = False
    _replacements.restore()


if __name__ in os.environ.get("VERL_USE_EXTERNAL_MODULES", "").split(","):
    patch()
