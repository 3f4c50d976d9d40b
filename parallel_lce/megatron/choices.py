"""The switch's settings: from :func:`parallel_lce.megatron.install`, else from the environment."""

from __future__ import annotations

import os
from typing import NamedTuple

import torch

from parallel_lce.core.budget import budget_of_environment
from parallel_lce.core.options import Options, check_option, check_options

CROSS_ENTROPIES = ("output_layer", "logits")


class Choices(NamedTuple):
    """Arguments of :func:`parallel_lce.megatron.install`. None: not given."""

    cross_entropy: str | None = None
    logits_budget: int | None = None
    gradient_filter: float | None = None
    reduce_dtype: torch.dtype | None = None


installed: Choices | None = None


def takes_logits() -> bool:
    """Whether ``install(cross_entropy="logits")`` holds."""
    return installed is not None and installed.cross_entropy == "logits"


def choose(**given: object) -> Choices:
    """Each setting is the given value, else the installed one or, if ``install`` was not called, the environment's.
    Raises ``ValueError`` as ``install``."""
    before = installed or _of_environment()
    chosen = before._replace(**{name: value for name, value in given.items() if value is not None})
    cross_entropy, filtered = chosen.cross_entropy, chosen.gradient_filter
    if cross_entropy not in CROSS_ENTROPIES:
        raise ValueError(f"cross_entropy must be one of {CROSS_ENTROPIES}, got {cross_entropy!r}")
    if chosen.reduce_dtype not in (None, torch.float32):
        raise ValueError(f"reduce_dtype must be None or torch.float32, got {chosen.reduce_dtype!r}")
    check_options(Options("install", logits_budget=chosen.logits_budget, gradient_filter=filtered))
    if filtered is not None and cross_entropy == "logits":
        raise ValueError(
            f"gradient_filter={filtered} needs cross_entropy='output_layer', got 'logits'; if it is that of an earlier "
            "install() or of PARALLEL_LCE_GRADIENT_FILTER, uninstall() or unset it"
        )
    return chosen


def _of_environment() -> Choices:
    text = os.environ.get("PARALLEL_LCE_GRADIENT_FILTER", "")
    try:
        filtered = float(text) if text else None
        check_option("gradient_filter", filtered)
    except ValueError:
        expected = "a number between 0 and 1, such as 0.0001220703125, which is 2**-13"
        raise ValueError(f"PARALLEL_LCE_GRADIENT_FILTER must be {expected}, got {text!r}") from None
    cross_entropy = os.environ.get("PARALLEL_LCE_CROSS_ENTROPY") or "output_layer"
    return Choices(cross_entropy, budget_of_environment(), filtered)
