"""The power of two by which gradients are multiplied in fp16, and finished gradients divided."""

from __future__ import annotations

import torch
from torch import Tensor

from parallel_lce.backends.interface import PickedGradient, Projection
from parallel_lce.core.partials import Coefficients


def fp16_scale_of(
    coefficients: Coefficients, sum_exp: Tensor, projection: Projection, picked: PickedGradient | None = None
) -> Tensor:
    """A power of two that brings the largest gradient of a logit near 2^10 in fp16, 0-dimensional, on the device.

    The gradients of a mean over many tokens, 1 / N each, would underflow without it. A token's NaN or infinity does not
    affect the others. ``coefficients``: without a factor. Gradients that are differences may be far smaller than their
    coefficients: with them, no p counts as more than ``1 / sum_exp [R]``.
    """
    logit_map, (alpha, beta, gamma, delta, epsilon, *_) = projection.logit_map, coefficients
    if any(c is not None for c in (gamma, delta, epsilon)):
        alpha, delta, epsilon = (c if c is None else c / sum_exp for c in (alpha, delta, epsilon))
        epsilon = epsilon if epsilon is None else epsilon / sum_exp
    terms = [c for c in (alpha, beta, gamma, delta, epsilon) if c is not None]
    token_scale = logit_map.token_scale
    scaled = [c.abs() if token_scale is None else (c * token_scale).abs() for c in terms]
    first, *others = [c.nan_to_num(0.0, 0.0).amax() for c in scaled]
    largest = sum(others, start=first) * abs(logit_map.scale)
    if picked is not None and len(picked.values):
        largest = largest + picked.values.abs().nan_to_num(0.0, 0.0).amax()
    return fp16_scale_near(largest)


def fp16_scale_near(largest: Tensor) -> Tensor:
    """A power of two that brings ``largest`` near 2^10, 0-dimensional, on the device."""
    exponent = 10 - torch.frexp(largest).exponent
    return torch.ldexp(torch.ones_like(largest), exponent.clamp(-40, 40))
