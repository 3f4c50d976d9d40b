"""The settings of :func:`parallel_lce.megatron.patch`, else of the environment."""

from __future__ import annotations

import os
from typing import Any, NamedTuple

import torch

from parallel_lce.call.seam import features_of
from parallel_lce.core.budget import budget_of_environment
from parallel_lce.core.options import NO_LABEL, Options, Tensors, check_option, check_options
from parallel_lce.megatron.losses import Formula
from parallel_lce.run.token_count import skips_by_environment

CROSS_ENTROPIES = ("output_layer", "logits")


class Settings(NamedTuple):
    """Arguments of :func:`parallel_lce.megatron.patch`. None: not given."""

    cross_entropy: str | None = None
    logits_budget: int | None = None
    gradient_filter: float | None = None
    reduce_dtype: torch.dtype | None = None
    skip_masked: bool = False
    z_loss: float = 0.0
    label_smoothing: float = 0.0
    vocab_size: int | None = None
    token_metrics: bool = False

    def of_call(self, options: Options, training: bool) -> Options:
        """The options of a call with these settings. ``training``: of the model."""
        # The gradients of these are large where probabilities are small.
        exact = options.entropy or options.sum_p_squared or options.mean_logit
        filtered = None if exact else self.gradient_filter
        budget, dtype = self.logits_budget, self.reduce_dtype
        options = options._replace(logits_budget=budget, gradient_filter=filtered, reduce_dtype=dtype)
        if training and options.reduction is not None and not options.loss_function:
            options = options._replace(z_loss=self.z_loss, label_smoothing=self.label_smoothing)
        return options._replace(vocab_size=self.vocab_size)

    def formula(self, training: bool) -> Formula:
        """Of a loss. The z-loss and label smoothing are those of training alone."""
        added = (self.z_loss, self.label_smoothing) if training else (0.0, 0.0)
        return Formula(*added, self.z_loss, NO_LABEL if self.skip_masked else None)

    def changes_loss(self, training: bool) -> bool:
        """Whether the loss of real logits is another one than stock's, or has metrics."""
        added = training and (self.z_loss or self.label_smoothing)
        return bool(self.vocab_size is not None or self.token_metrics or added)


installed: Settings | None = None


def skips_masked() -> bool:
    """Whether ``patch(skip_masked=True)`` holds, or without a ``patch`` the environment's."""
    return resolve().skip_masked


def takes_logits() -> bool:
    """Whether ``patch(cross_entropy="logits")`` holds."""
    return installed is not None and installed.cross_entropy == "logits"


def resolve(**given: object) -> Settings:
    """Each setting is the given value, where None means the environment's; if none is given, that of the last ``patch``
    or, without one, the environment's. Raises ``ValueError`` as ``patch``."""
    if not given and installed is not None:
        return installed
    of_environment = _of_environment()
    given = {name: getattr(of_environment, name) if value is None else value for name, value in given.items()}
    settings = (installed or of_environment)._replace(**given)
    if settings.cross_entropy not in CROSS_ENTROPIES:
        raise ValueError(f"cross_entropy must be one of {CROSS_ENTROPIES}, got {settings.cross_entropy!r}")
    if settings.reduce_dtype not in (None, torch.float32):
        raise ValueError(f"reduce_dtype must be None or torch.float32, got {settings.reduce_dtype!r}")
    for name in ("skip_masked", "token_metrics"):
        if type(getattr(settings, name)) is not bool:
            raise ValueError(f"{name} must be True or False, got {getattr(settings, name)!r}")
    options = Options("patch", "none", logits_budget=settings.logits_budget, gradient_filter=settings.gradient_filter)
    smoothed = dict(z_loss=settings.z_loss, label_smoothing=settings.label_smoothing, vocab_size=settings.vocab_size)
    check_options(options := options._replace(**smoothed))
    for feature in features_of(options, Tensors(None, None)):
        feature.check(options, Tensors(None, None), None)
    if settings.cross_entropy == "logits":
        for name in ("gradient_filter", "skip_masked"):
            if value := getattr(settings, name):
                raise ValueError(
                    f"{name}={value} needs cross_entropy='output_layer', got 'logits'; if it is that of an earlier "
                    f"patch() or of PARALLEL_LCE_{name.upper()}, unpatch() or unset it"
                )
    return settings


def _of_environment() -> Settings:
    cross_entropy = os.environ.get("PARALLEL_LCE_CROSS_ENTROPY") or "output_layer"
    filtered = "a number between 0 and 1, such as 0.0001220703125, which is 2**-13"
    return Settings(
        cross_entropy,
        budget_of_environment(),
        _number("gradient_filter", float, None, filtered),
        skip_masked=skips_by_environment(),
        z_loss=_number("z_loss", float, 0.0, "a number >= 0"),
        label_smoothing=_number("label_smoothing", float, 0.0, "a number in [0, 1]"),
        vocab_size=_number("vocab_size", int, None, "a number of entries"),
    )


def _number(name: str, kind: type, default: Any, expected: str) -> Any:
    variable = f"PARALLEL_LCE_{name.upper()}"
    text = os.environ.get(variable, "")
    try:
        value = kind(text) if text else default
        check_option(name, value)
    except ValueError:
        raise ValueError(f"{variable} must be {expected}, got {text!r}") from None
    return value
