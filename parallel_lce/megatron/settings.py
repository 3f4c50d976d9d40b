"""The settings of :func:`parallel_lce.megatron.patch`, else of the environment."""

from __future__ import annotations

import os
from typing import NamedTuple

import torch

from parallel_lce.core.budget import budget_of_environment
from parallel_lce.core.options import Options, check_option, check_options
from parallel_lce.run.token_count import skips_by_environment

CROSS_ENTROPIES = ("output_layer", "logits")


class Settings(NamedTuple):
    """Arguments of :func:`parallel_lce.megatron.patch`. None: not given."""

    cross_entropy: str | None = None
    logits_budget: int | None = None
    gradient_filter: float | None = None
    reduce_dtype: torch.dtype | None = None
    skip_masked: bool = False

    def of_call(self, options: Options) -> Options:
        """The options of a call with these settings."""
        # The entropy's gradient is large where probabilities are small.
        filtered = None if options.expected_logit else self.gradient_filter
        budget, dtype = self.logits_budget, self.reduce_dtype
        return options._replace(logits_budget=budget, gradient_filter=filtered, reduce_dtype=dtype)


installed: Settings | None = None


def skips_masked() -> bool:
    """Whether ``patch(skip_masked=True)`` holds, or without a ``patch`` the environment's."""
    return resolve().skip_masked


def takes_logits() -> bool:
    """Whether ``patch(cross_entropy="logits")`` holds."""
    return installed is not None and installed.cross_entropy == "logits"


def resolve(**given: object) -> Settings:
    """Each setting is the given value, else that of the last ``patch`` or, without one, the environment's. Raises
    ``ValueError`` as ``patch``."""
    before = installed or _of_environment()
    settings = before._replace(**{name: value for name, value in given.items() if value is not None})
    if settings.cross_entropy not in CROSS_ENTROPIES:
        raise ValueError(f"cross_entropy must be one of {CROSS_ENTROPIES}, got {settings.cross_entropy!r}")
    if settings.reduce_dtype not in (None, torch.float32):
        raise ValueError(f"reduce_dtype must be None or torch.float32, got {settings.reduce_dtype!r}")
    if type(settings.skip_masked) is not bool:
        raise ValueError(f"skip_masked must be True or False, got {settings.skip_masked!r}")
    filtered = settings.gradient_filter
    check_options(Options("patch", logits_budget=settings.logits_budget, gradient_filter=filtered))
    if settings.cross_entropy == "logits":
        for name, value in (("gradient_filter", filtered), ("skip_masked", settings.skip_masked)):
            if value:
                raise ValueError(
                    f"{name}={value} needs cross_entropy='output_layer', got 'logits'; if it is that of an earlier "
                    f"patch() or of PARALLEL_LCE_{name.upper()}, unpatch() or unset it"
                )
    return settings


def _of_environment() -> Settings:
    text = os.environ.get("PARALLEL_LCE_GRADIENT_FILTER", "")
    try:
        filtered = float(text) if text else None
        check_option("gradient_filter", filtered)
    except ValueError:
        expected = "a number between 0 and 1, such as 0.0001220703125, which is 2**-13"
        raise ValueError(f"PARALLEL_LCE_GRADIENT_FILTER must be {expected}, got {text!r}") from None
    cross_entropy = os.environ.get("PARALLEL_LCE_CROSS_ENTROPY") or "output_layer"
    return Settings(cross_entropy, budget_of_environment(), filtered, skip_masked=skips_by_environment())
