"""The tensors of a configuration: whole ones, the same on every rank, and strides that hold the same numbers."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from cases import DTYPES
from fuzz_draw import LARGEST_TARGET, Configuration

MASKED = -1e34
"""Stands for a bias of -inf where a product with 0 must be 0."""


@dataclass
class Whole:
    """``x [*shape, D]``, ``weight [V, D]`` and ``bias [V]`` without padding, ``target`` and ``token_weight
    [*shape]``; ``logits [*shape, V]`` where these are given; ``upstream``: of the loss, or of each field of the
    mixture; ``masked [V]``: where the bias is -inf."""

    x: Tensor
    weight: Tensor
    bias: Tensor | None
    target: Tensor | None
    token_weight: Tensor | None
    logits: Tensor | None
    upstream: dict[str, Tensor]
    masked: Tensor


def ignore_index(c: Configuration) -> int:
    return -100 if c.ignore_index is None else c.ignore_index


def make(c: Configuration) -> Whole:
    """The whole tensors of ``c``, on the CPU."""
    generator = torch.Generator().manual_seed(c.values)
    dtype = DTYPES[c.dtype]

    def normal(*shape: int) -> Tensor:
        return torch.randn(shape, generator=generator, dtype=torch.float64)

    def repeated(value: Tensor, place: int) -> Tensor:
        """All along the first dimension the same, if this is to be laid out in one place."""
        if c.layouts[place] != "expanded" or value.dim() == 0 or len(value) == 0:
            return value
        return value[:1].expand_as(value).clone()

    x = weight = bias = logits = None
    masked = torch.zeros(c.V, dtype=torch.bool)
    if c.kind == "logits":
        x, weight = normal(*c.shape, 0), normal(c.V, 0)
        logits = repeated(normal(*c.shape, c.V) * (3 * c.sharpness) + c.offset, 0).to(dtype)
    else:
        x = repeated(normal(*c.shape, c.D), 0)
        weight = repeated(normal(c.V, c.D) * (c.sharpness / max(1, c.D) ** 0.5), 1)
    if c.bias:
        bias = repeated(normal(c.V) + c.offset, 2).to(dtype)
    if c.bias == "masked":
        masked = torch.rand(c.V, generator=generator) < 0.3
        masked[int(torch.randint(c.V, (), generator=generator))] = False
        bias[masked] = -torch.inf
    target = None if c.no_target else repeated(_targets(c, generator, masked), 3)
    token_weight = None
    if c.token_weight:
        token_weight = repeated(_token_weight(c, normal(*c.shape)), 4)
    upstream = _upstream(c, normal)
    return Whole(x.to(dtype), weight.to(dtype), bias, target, token_weight, logits, upstream, masked)


def _targets(c: Configuration, generator: torch.Generator, masked: Tensor) -> Tensor:
    largest = LARGEST_TARGET[c.target_dtype]
    candidates = torch.arange(min(c.V, largest + 1))
    # A target of -inf has an infinite loss: no other can be added to it, and no 0 be a factor of it.
    plain = c.kind != "loss" or (c.reduction == "none" and not c.token_weight and c.label_smoothing < 1)
    allowed = candidates[~masked[: len(candidates)]]
    if not plain and len(allowed):
        candidates = allowed
    target = candidates[torch.randint(len(candidates), c.shape, generator=generator)]
    flat = target.view(-1)
    signed = c.target_dtype != "uint8"
    if c.targets == "outside":
        others = [c.V, c.V + 3, -1, -7, -(2**63), 2**62]
        others = [o for o in others if (-largest - 1 if signed else 0) <= o <= largest]
        if others:
            flat[1::3] = torch.tensor(others).repeat(len(flat))[: len(flat[1::3])]
    index = ignore_index(c)
    if c.kind == "loss" and (-largest - 1 if signed else 0) <= index <= largest:
        if c.ignored != "none":
            flat[slice(None) if c.ignored == "all" else slice(0, None, 3)] = index
    return target.to(getattr(torch, c.target_dtype))


def _token_weight(c: Configuration, normal: Tensor) -> Tensor:
    weight = normal.abs()
    if c.token_weight == "mask":
        weight = (normal > 0).double()
    elif c.token_weight == "zero":
        weight = torch.zeros_like(normal)
    elif c.token_weight == "zeros":
        weight = weight * (normal > 0)
    elif c.token_weight == "negative":
        # Their sum stays away from 0, where a mean means nothing.
        weight = normal + 0.7 * normal.sum().sign()
    return weight.to(getattr(torch, c.weight_dtype))


def _upstream(c: Configuration, normal) -> dict[str, Tensor]:
    names = c.mixture if c.kind == "statistics" else ("loss",)
    shape = c.shape if c.reduction == "none" or c.kind == "statistics" else ()
    wide = torch.float64 if c.dtype == "fp64" else torch.float32
    found = {}
    for name in names:
        value = normal(*shape)
        if c.upstream == "ones":
            value = torch.ones_like(value)
        elif c.upstream == "some zeros":
            value.view(-1)[1::2] = 0
        elif c.upstream == "zero":
            value.zero_()
        elif c.upstream == "large":
            value *= 100.0 if c.computed == "fp16" else 1e5
        elif c.upstream == "tiny":
            value *= 1e-3 if c.computed == "fp16" else 1e-9
        found[name] = value.to(wide)
    return found


def laid(value: Tensor, layout: str) -> Tensor:
    """The same numbers at other strides or another offset; what lies between them is NaN."""
    if layout == "expanded" and value.dim() and len(value):
        return value[:1].clone().expand(value.shape)
    if layout == "offset":
        flat = value.new_empty(value.numel() + 1)
        view = flat[1:].view(value.shape)
    elif layout in ("wide", "gaps", "rows") and value.dim():
        between = torch.nan if value.is_floating_point() else 1
        sizes, slices = list(value.shape), [slice(None)] * value.dim()
        if layout == "wide":
            sizes, slices = [n + 3 for n in sizes], [slice(2, 2 + n) for n in sizes]
        else:
            place = 0 if layout == "rows" else -1
            sizes[place] *= 2
            slices[place] = slice(0, None, 2)
        view = value.new_full(sizes, between)[tuple(slices)]
    elif layout == "transposed" and value.dim() > 1:
        view = torch.empty_like(value.transpose(0, -1), memory_format=torch.contiguous_format).transpose(0, -1)
    else:
        return value.clone(memory_format=torch.contiguous_format)
    return view.copy_(value)
