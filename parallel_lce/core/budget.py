"""The default of ``logits_budget``: from the environment, else a share of the device's memory."""

from __future__ import annotations

import os

import torch

from parallel_lce.core.private import constant_in_graphs

DEFAULT_BUDGET = 1 << 30
"""Bytes per rank and call on a CPU."""

# Rounded down to whole steps: GPUs of one kind may differ by a few MiB, and all ranks must have the same budget.
_SHARE, _STEP = 32, 256 << 20

BUDGET_VARIABLE = "PARALLEL_LCE_LOGITS_BUDGET"

LEAN_BUDGET = 128 << 20
"""Default of ``logits_budget`` in :mod:`parallel_lce.transformers` and :mod:`parallel_lce.trl`, bytes. While the loss
runs, the activations of all layers exist, so saved exponentials raise the peak of a step. Without them the loss takes
30 to 40 % longer, and a step a few percent."""


@constant_in_graphs
def budget_of_environment() -> int | None:
    """Bytes, or None if the variable is unset or empty. Raises ``ValueError`` if it is not a number of bytes."""
    text = os.environ.get(BUDGET_VARIABLE, "")
    if text and not (text.isascii() and text.isdigit()):
        raise ValueError(f"{BUDGET_VARIABLE} must be a number of bytes, got {text!r}")
    return int(text) if text else None


def lean_budget(given: int | None, lean: int = LEAN_BUDGET) -> int | None:
    """``logits_budget`` for doors that have a default of their own: the ``given`` budget. If it is None: ``lean``, or
    None if the environment sets a budget, which the call then uses."""
    return lean if given is None and budget_of_environment() is None else given


def default_budget(device: torch.device) -> int:
    """Bytes per rank and call for ``logits_budget=None``: the environment's budget, if it has one. Otherwise on a GPU a
    thirty-second of its memory, in whole 256 MiB (4.25 GiB of an H200's 140 GiB, 2.25 GiB of an 80-GB GPU's 79), and on
    a CPU 1 GiB."""
    given = budget_of_environment()
    if given is not None:
        return given
    if device.type != "cuda" or not torch.cuda.is_available():
        return DEFAULT_BUDGET
    total = torch.cuda.get_device_properties(device).total_memory
    return max(_STEP, total // _SHARE // _STEP * _STEP)
