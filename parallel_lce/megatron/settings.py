"""The settings of :func:`parallel_lce.megatron.patch`."""

from __future__ import annotations

from typing import Any, NamedTuple

import torch

from parallel_lce.call.seam import features_of
from parallel_lce.core.options import NO_LABEL, Options, Tensors, check_flag, check_options
from parallel_lce.megatron.losses import Formula

CROSS_ENTROPIES = ("output_layer", "logits")


class Settings(NamedTuple):
    """Arguments of :func:`parallel_lce.megatron.patch`, with their defaults."""

    cross_entropy: str = "output_layer"
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


current = Settings()
"""Those of the last ``patch``, else the defaults."""


def takes_logits() -> bool:
    """Whether ``patch(cross_entropy="logits")`` holds."""
    return current.cross_entropy == "logits"


def resolve(**given: Any) -> Settings:
    """The current settings with the given ones, where None means the default. Raises ``ValueError`` as ``patch``."""
    defaults = Settings._field_defaults
    settings = current._replace(**{name: defaults[name] if value is None else value for name, value in given.items()})
    if settings.cross_entropy not in CROSS_ENTROPIES:
        raise ValueError(f"cross_entropy must be one of {CROSS_ENTROPIES}, got {settings.cross_entropy!r}")
    if settings.reduce_dtype not in (None, torch.float32):
        raise ValueError(f"reduce_dtype must be None or torch.float32, got {settings.reduce_dtype!r}")
    check_flag("skip_masked", settings.skip_masked)
    check_flag("token_metrics", settings.token_metrics)
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
                    "patch(), call unpatch()"
                )
    return settings
