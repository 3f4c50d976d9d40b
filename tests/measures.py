"""The measures of an error. A truth is float64; what is near to it by right is a yardstick."""

import torch
from torch import Tensor

ROUNDED = {"fp32": 1e-5, "bf16": 2e-2, "fp16": 4e-3}
"""Relative error of a gradient, for all roundings of its dtype on the way to it."""


def error(found: Tensor, truth: Tensor) -> float:
    """Frobenius norm of the difference."""
    return size(found.detach().double().cpu() - truth.detach().double().cpu())


def size(truth: Tensor) -> float:
    """Frobenius norm."""
    return truth.detach().double().norm().item()


def relative_error(found: Tensor, truth: Tensor) -> float:
    return error(found, truth) / size(truth)


def largest_error(found: Tensor, truth: Tensor) -> float:
    """Largest difference of two numbers; NaN where one is."""
    difference = (found.detach().double().cpu() - truth.detach().double().cpu()).abs()
    return difference.max().item() if difference.numel() else 0.0


def smallest_steps(value: Tensor) -> float:
    """Norm of an error of 2^-24, the distance of fp16's smallest numbers, in each number of an fp16 tensor. Else 0."""
    return 2**-24 * value.numel() ** 0.5 if value.dtype == torch.float16 else 0.0


def assert_close(found: Tensor, truth: Tensor, rtol: float, floor: float = 0.0, name: object = "") -> None:
    """The norm of the error is at most ``rtol`` of the truth's, plus ``floor``."""
    off, whole = error(found, truth), size(truth)
    assert off <= rtol * whole + floor, f"{name} error {off:.3g}, norm {whole:.3g}"


def assert_near(found: Tensor, expected: Tensor, rtol: float) -> None:
    """No number is off by more than ``rtol`` of the largest expected one."""
    off, scale = largest_error(found, expected), expected.abs().max().item()
    assert off <= rtol * scale, f"{off:.3g} of {scale:.3g}"


def assert_no_worse(
    found: Tensor, truth: Tensor, yardstick: Tensor, factor: float = 1.0, floor: float = 0.0, name: object = ""
) -> None:
    """The norm of the error is at most ``factor`` times the yardstick's, plus ``floor``."""
    ours, its = error(found, truth), error(yardstick, truth)
    assert ours <= factor * its + floor, f"{name} error {ours:.3g}, torch's {its:.3g}, norm {size(truth):.3g}"
