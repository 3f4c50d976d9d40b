"""What a backend is given for a block of tokens, and what it hands back."""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from parallel_lce.weight_grad import ShardGradient, accumulation_dtype


@dataclass(frozen=True)
class Projection:
    """``z = softcap(scale * (x @ weight.T + bias))`` for the real rows of a vocabulary shard.

    ``weight [V/P, D]``, ``bias [V/P]`` or None; ``start``: global id of the first row; ``real``:
    rows that are no padding; ``softcap(u) = cap * tanh(u / cap)``.
    """

    weight: Tensor
    bias: Tensor | None
    start: int
    real: int
    scale: float = 1.0
    softcap: float | None = None

    @property
    def dtype(self) -> torch.dtype:
        return accumulation_dtype(self.weight.dtype)


PRODUCT_ROWS = 1024
"""Where dX is formed in pieces, these have a multiple of so many rows."""

Kept = tuple[Tensor, ...]
"""What a block keeps of its first vocabulary rows for its backward, the exponentials first; ``()``
is nothing. Only the backend that made it knows its shapes, and may overwrite it in backward."""


# Exponents of e between the largest and the smallest number that is stored with full precision, less a margin.
_STORED_RANGE = {torch.float16: 20.0}
_DEFAULT_RANGE = 80.0


def keepable(dtype: torch.dtype, softcap: float | None) -> bool:
    """Whether kept exponentials still tell z, which the chain of a soft-cap needs.

    They tell it to one rounding of 1, not of z: too little for caps below 1.
    """
    return softcap is None or 1 <= softcap <= _STORED_RANGE.get(dtype, _DEFAULT_RANGE) / 2


@dataclass(frozen=True)
class Coefficients:
    """Per-token ``[R]`` upstream coefficients of the logits' gradient; None is zero."""

    alpha: Tensor
    beta: Tensor | None
    gamma: Tensor | None
    delta: Tensor | None

    @property
    def each(self) -> tuple[Tensor | None, ...]:
        return self.alpha, self.beta, self.gamma, self.delta

    @property
    def present(self) -> list[Tensor]:
        """Those that are not zero."""
        return [c for c in self.each if c is not None]

    def map(self, function: Callable[[Tensor], Tensor]) -> Coefficients:
        """The same function of all that there are."""
        return Coefficients(*(c if c is None else function(c) for c in self.each))

    def times(self, factor: Tensor) -> Coefficients:
        """All of them times one factor, or one per token ``[R]``, in one launch."""
        product = iter(torch._foreach_mul(self.present, [factor] * len(self.present)))
        return self.map(lambda c: next(product))


@dataclass(frozen=True)
class Destinations:
    """Where a block's gradients go; None where one is not wanted.

    ``dx [R, D]`` is written, then ``dx_ready()`` called, and maybe before that ``dx_ready(stop)`` as soon as
    the rows before ``stop`` are; ``dweight`` and ``dbias`` are added to.
    ``x_ready`` is called before the block's hidden states, which may be on their way, are first read.
    """

    dx: Tensor | None
    dx_ready: Callable[..., None] | None
    dweight: ShardGradient | None
    dbias: ShardGradient | None
    x_ready: Callable[[], object] = lambda: None


@dataclass(frozen=True)
class Arrival:
    """Of hidden states ``[R, D]`` on their way, in one piece and aligned: the rows ``[start, stop)`` are there, all
    of them after :attr:`wait`."""

    start: int
    stop: int
    wait: Callable[[], object]


class Scratch:
    """Working memory of one backward, shared by its blocks.

    ``limit``: bytes that a block may use beside what is kept.
    """

    def __init__(self, limit: int, device: torch.device | str = "cpu") -> None:
        self.limit = limit
        self._device = device
        self._memory: Tensor | None = None

    def adopt(self, tensor: Tensor) -> None:
        """Take over the memory of a tensor that nobody reads any more, if it is larger than what
        there is, and in one piece."""
        size = tensor.numel() * tensor.element_size()
        held = self.limit if self._memory is None else self._memory.numel()
        if size > held and tensor.is_contiguous() and tensor.data_ptr() % 16 == 0:
            # A contiguous tensor of one element may have any stride.
            self._memory = torch.as_strided(tensor, (tensor.numel(),), (1,)).view(torch.uint8)

    def capacity(self, dtype: torch.dtype) -> int:
        """Elements that :meth:`take` can give."""
        held = 0 if self._memory is None else self._memory.numel()
        return max(self.limit, held) // dtype.itemsize

    def take(self, elements: int, dtype: torch.dtype) -> Tensor:
        """``[elements]`` of uninitialised memory: the same memory at each call, allocated at the
        first one. More than :meth:`capacity`, if that is less than the smallest piece of work."""
        needed = elements * dtype.itemsize
        if self._memory is None or self._memory.numel() < needed:
            size = max(self.limit, needed)
            self._memory = torch.empty(size, dtype=torch.uint8, device=self._device)
        return self._memory.narrow(0, 0, needed).view(dtype)


def in_own_context(function: Callable) -> Callable:
    """Run on the weight's device, where Triton launches on the current one, and without autocast,
    which must not round the products of fp32 operands."""

    @functools.wraps(function)
    def call(projection: Projection, *arguments, **options):
        weight = projection.weight
        with torch.cuda.device_of(weight), torch.autocast(weight.device.type, enabled=False):
            return function(projection, *arguments, **options)

    return call


def power_of_two_scale(coefficients: Coefficients, scale: float) -> Tensor:
    """A power of two that brings the largest gradient of a logit near 2^10 in fp16, so that those
    of a mean over many tokens (1 / N each) do not underflow; 0-dimensional, on the device. One token's
    NaN or infinity does not concern the others."""
    largest = sum(c.abs().nan_to_num(0.0, 0.0).amax() for c in coefficients.each if c is not None)
    exponent = 10 - torch.frexp(largest * abs(scale)).exponent
    return torch.ldexp(torch.ones_like(largest), exponent.clamp(-40, 40))
