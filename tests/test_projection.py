"""The projection kernels beside float64: interpreted on the CPU, compiled with ``-m gpu``."""

from __future__ import annotations

from dataclasses import dataclass

import pytest
import torch

pytest.importorskip("triton", reason="needs triton")

import reference
from cases import DTYPES, normal
from parallel_lce.core.partials import Coefficients, integer_view
from parallel_lce.kernels import projection as kernels
from parallel_lce.kernels.arithmetic import REACH, SAVED_FP16_SCALE
from parallel_lce.kernels.projection import Product, logits_gradient
from parallel_lce.kernels.token_logits import token_logits
from windows import ALL, finite, merged_truth, truth, window_partials

pytestmark = pytest.mark.usefixtures("kernels")

SENTINEL = 7.0


@dataclass(frozen=True)
class Shape:
    """``x [R, D]`` and ``weight [K, D]``; ``gap``: elements between their rows; ``offset``: elements
    before the first one. TMA takes neither, nor rows of other than multiples of 16 bytes."""

    R: int
    K: int
    D: int
    gap: int = 0
    offset: int = 0

    def __str__(self) -> str:
        return f"{self.R}x{self.K}x{self.D}" + "-gap" * (self.gap > 0) + "-offset" * (self.offset > 0)


SHAPES = [
    Shape(130, 300, 72),  # part of a tile in every direction
    Shape(128, 256, 64),  # whole tiles
    Shape(1, 5, 8),
    Shape(70, 200, 33),
    Shape(20, 300, 24, gap=3),
    Shape(20, 256, 64, offset=1),
]


@pytest.fixture(params=["fp32", "bf16", "fp16"])
def dtype(request, device) -> torch.dtype:
    if request.param == "fp32" and device == "cuda":
        pytest.skip("fp32 is the torch backend's on a GPU, unless it is asked not to be")
    return DTYPES[request.param]


def laid_out(value: torch.Tensor, shape: Shape, dtype: torch.dtype, device: str) -> torch.Tensor:
    rows, columns = value.shape
    memory = torch.full((rows * (columns + shape.gap) + shape.offset,), torch.nan, dtype=dtype)
    memory = memory.to(device)
    return memory[shape.offset :].view(rows, -1)[:, :columns].copy_(value)


def problem(
    shape: Shape, dtype, device, *, bias=None, scale=1.0, token_scale=None, softcap=None, sharpness=1.0
) -> tuple[Product, torch.Tensor]:
    """Operands, and their logits ``[R, K]`` in float64."""
    x = laid_out(normal(shape.R, shape.D), shape, dtype, device)
    weight = normal(shape.K, shape.D, seed=1) * (sharpness / shape.D**0.5)
    weight = laid_out(weight, shape, dtype, device)
    bias = None if bias is None else bias.to(dtype).to(device)
    doubles = (t if t is None else t.double() for t in (x, weight, bias))
    whole = scale if token_scale is None else scale * token_scale.double()
    z = reference.logits(*doubles, scale=whole, softcap=softcap)
    return Product(x, weight, bias, scale, softcap, token_scale), z


def some_bias(shape: Shape) -> torch.Tensor:
    return normal(shape.K, seed=2)


def check_partials(found, expected, z, width) -> None:
    (maxima, sums), (true_maxima, true_sums, _) = found, expected
    assert maxima.dtype == sums.dtype == torch.float32
    torch.testing.assert_close(maxima.double(), true_maxima, rtol=2e-6, atol=1e-5)
    torch.testing.assert_close(sums[0].double(), true_sums[0], rtol=3e-5, atol=0)
    # Sums of terms of either sign: their error is that of the logits.
    torch.testing.assert_close(sums[1:3].double(), true_sums[1:3], rtol=1e-5, atol=2e-3)
    error = (sums[3].double() - true_sums[3]).abs()
    assert (error <= 1e-4 * true_sums[0] + 3e-5 * true_sums[3].abs()).all()
    torch.testing.assert_close(sums[4].double(), true_sums[4], rtol=6e-5, atol=0)
    for number, ids in enumerate(integer_view(sums[5]).long()):
        assert (ids // width == number).all()
        picked = z.gather(1, ids[:, None]).squeeze(1)
        torch.testing.assert_close(picked, true_maxima[number], rtol=2e-6, atol=1e-5)


def check_kept(saved: torch.Tensor, expected: torch.Tensor) -> None:
    scale = SAVED_FP16_SCALE if saved.dtype == torch.float16 else 1.0
    rounding = torch.finfo(saved.dtype).eps / 2
    # The smallest numbers of fp16 are further apart than their precision.
    smallest = 2**-25 if saved.dtype == torch.float16 else 0.0
    torch.testing.assert_close(saved.double(), expected * scale, rtol=1.01 * rounding + 3e-5, atol=1.01 * smallest)


def check_surroundings(buffer: torch.Tensor, rows: int, columns: int) -> None:
    """TMA writes whole 16 bytes."""
    last = -(-columns * buffer.element_size() // 16) * 16 // buffer.element_size()
    assert (buffer[rows:] == SENTINEL).all() and (buffer[:rows, last:] == SENTINEL).all()


@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_window_partials(shape, dtype, device):
    operands, z = problem(shape, dtype, device, bias=some_bias(shape))
    aligned = shape.gap == shape.offset == 0 and shape.D * dtype.itemsize % 16 == 0
    assert operands.tma == (aligned and (device == "cpu" or torch.cuda.get_device_capability() >= (9, 0)))
    width = operands.tile.entries
    check_partials(window_partials(operands, **ALL), truth(z, width, None), z, width)


@pytest.mark.parametrize(
    "options", [dict(scale=-1.5), dict(softcap=3.0, sharpness=4.0), dict(scale=0.5, softcap=30.0)], ids=str
)
def test_window_partials_of_scaled_and_capped_logits(options, dtype, device):
    shape = Shape(20, 300, 16)
    operands, z = problem(shape, dtype, device, bias=some_bias(shape), **options)
    width = operands.tile.entries
    check_partials(window_partials(operands, **ALL), truth(z, width, None), z, width)


@pytest.mark.parametrize("name", list(ALL))
def test_each_column_alone_is_the_same(name, device):
    operands, _ = problem(Shape(20, 300, 16), torch.float16, device)
    maxima, sums = window_partials(operands, **ALL)
    alone_maxima, alone = window_partials(operands, **{name: True})
    assert torch.equal(alone_maxima, maxima) and len(alone) == 2
    assert torch.equal(alone[0], sums[0])
    assert torch.equal(alone[1], sums[1 + list(ALL).index(name)])


@pytest.mark.parametrize("whole", [True, False], ids=["all", "one window"])
@pytest.mark.parametrize("agreement", ["on_shift", "some windows", "no window"])
@pytest.mark.parametrize("shape", [Shape(130, 300, 24), Shape(20, 300, 21)], ids=str)
@pytest.mark.thinned
def test_kept_exponentials(shape, agreement, whole, dtype, device):
    """Relative to the shift reference where the window's maximum is near it; fp16 has none."""
    bias = some_bias(shape)
    width = problem(shape, dtype, device)[0].tile.entries
    if agreement == "some windows":
        bias[width : 2 * width] -= 2 * REACH
    operands, z = problem(shape, dtype, device, bias=bias)
    shift = None
    if dtype != torch.float16:
        shift = z.amax(1).float() - (100 if agreement == "no window" else 3)
    C = shape.K if whole else width
    stride = -(-shape.K // 64) * 64 + 64
    buffer = torch.full((shape.R + 3, stride), SENTINEL, dtype=dtype, device=device)
    expected = truth(z, width, shift)
    found = window_partials(operands, **ALL, saved=buffer[: shape.R, :C], softmax_shift=shift)
    check_partials(found, expected, z, width)
    check_kept(buffer[: shape.R, :C], expected[2][:, :C])
    check_surroundings(buffer, shape.R, C)


@pytest.mark.parametrize("blocks", [3, 35])
def test_more_tiles_than_programs_and_more_row_blocks_than_a_launch(blocks, device, monkeypatch):
    monkeypatch.setattr(kernels, "num_sms", lambda device: 2)
    operands, _ = problem(Shape(1, 300, 16), torch.float16, device)
    shape = Shape(blocks * operands.tile.rows - 5, 300 if blocks == 3 else 40, 16)
    operands, z = problem(shape, torch.float16, device)
    width = operands.tile.entries
    saved = torch.empty(shape.R, 320, dtype=torch.float16, device=device)[:, : shape.K]
    expected = truth(z, width, None)
    check_partials(window_partials(operands, **ALL, saved=saved), expected, z, width)
    check_kept(saved, expected[2])


def test_logits_of_minus_infinity_and_nan(dtype, device):
    shape = Shape(20, 600, 16)
    bias = torch.zeros(600)
    bias[:256] = -torch.inf  # a whole window, or two
    bias[300:310] = -torch.inf
    operands, z = problem(shape, dtype, device, bias=bias)
    width = operands.tile.entries
    shift = z.amax(1).float() if dtype != torch.float16 else None
    saved = torch.empty(20, 640, dtype=dtype, device=device)[:, :600]
    maxima, sums = window_partials(operands, **ALL, saved=saved, softmax_shift=shift)
    true_maxima, true_sums, e = truth(z, width, shift)
    gone = 256 // width
    assert (maxima[:gone] == -torch.inf).all() and (sums[[0, 3], :gone] == 0).all()
    torch.testing.assert_close(maxima.double(), true_maxima, rtol=2e-6, atol=1e-5)
    torch.testing.assert_close(sums[0].double(), true_sums[0], rtol=3e-5, atol=0)
    torch.testing.assert_close(sums[3].double(), true_sums[3], rtol=1e-4, atol=1e-4)
    torch.testing.assert_close(sums[4].double(), true_sums[4], rtol=6e-5, atol=0)
    check_kept(saved, e)
    clean = window_partials(operands)[1][0]
    operands.x[5, 3] = torch.nan
    operands.bias[-1] = torch.nan
    poisoned = window_partials(operands)[1][0]
    assert poisoned[:, 5].isnan().all() and poisoned[-1].isnan().all()
    others = torch.arange(20, device=device) != 5
    assert torch.equal(poisoned[:-1, others], clean[:-1, others])


# --- targets ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("options", [{}, dict(scale=-1.5), dict(scale=2.0, softcap=4.0)], ids=str)
@pytest.mark.parametrize("shape", [Shape(130, 300, 72), Shape(20, 300, 24, gap=3), Shape(1, 5, 7)], ids=str)
@pytest.mark.thinned
def test_target_logits(shape, options, dtype, device):
    operands, z = problem(shape, dtype, device, bias=some_bias(shape), **options)
    target = torch.randint(shape.K, (shape.R,), generator=torch.Generator().manual_seed(0))
    outside = torch.tensor([-1, shape.K, -(2**63), 2**62])
    target[1::2] = outside.repeat(shape.R)[: len(target[1::2])]
    target = target.to(device)
    found = torch.full((shape.R,), torch.nan, device=device)
    token_logits(operands, target, found, None)
    hit = (target >= 0) & (target < shape.K)
    picked = z.gather(1, target.clamp(0, shape.K - 1)[:, None]).squeeze(1)
    torch.testing.assert_close(found.double(), torch.where(hit, picked, 0.0), rtol=2e-6, atol=1e-5)


def test_a_target_that_is_the_maximum_equals_it(device):
    """To the bit where tensor cores multiply; the interpreter's products differ in their order."""
    operands, z = problem(Shape(130, 300, 520), torch.bfloat16, device)
    found = torch.empty(130, device=device)
    token_logits(operands, z.argmax(1), found, None)
    top = window_partials(operands)[0].amax(0)
    torch.testing.assert_close(found, top, rtol=0, atol=0 if device == "cuda" else 2e-6)


# --- the gradient of recomputed logits -------------------------------------------------------------

FORMS = {
    "plain": {},
    "epsilon": dict(epsilon=True),
    "gamma and delta": dict(gamma=True, delta=True),
    "scaled and capped": dict(delta=True, scale=-0.5, softcap=3.0, power=2.0**7),
    "all": dict(gamma=True, delta=True, epsilon=True, token_scale=True, scale=2.0, softcap=4.0, power=0.5),
}


def gradient_truth(z, alpha, gamma, delta, epsilon, power, scale, softcap):
    top = z.amax(1, keepdim=True)
    shifted = z - finite(top)
    e = shifted.exp()
    p = e / e.sum(1, keepdim=True)
    g = p * (alpha[:, None] + delta[:, None] * shifted.clamp(min=-1e4) + epsilon[:, None] * p)
    g = (g - gamma[:, None]) * scale * power
    return g if softcap is None else g * (1 - (z / softcap) ** 2)


@pytest.mark.parametrize(
    ("shape", "form"), [(shape, "all") for shape in SHAPES] + [(Shape(20, 300, 16), form) for form in FORMS], ids=str
)
@pytest.mark.thinned
def test_gradient(shape, form, dtype, device):
    options = dict(FORMS[form])
    alpha, gamma, delta, epsilon, token_scale = normal(5, shape.R, seed=4).float().to(device)
    gamma = gamma / shape.K if options.pop("gamma", False) else None
    delta = delta if options.pop("delta", False) else None
    epsilon = epsilon if options.pop("epsilon", False) else None
    options["token_scale"] = token_scale if options.pop("token_scale", False) else None
    power = options.pop("power", None)
    operands, z = problem(shape, dtype, device, bias=some_bias(shape), sharpness=2.0, **options)
    statistics = merged_truth(z)[:2].float().contiguous()
    stride = -(-shape.K // 64) * 64 + 64
    buffer = torch.full((shape.R + 3, stride), SENTINEL, dtype=dtype, device=device)
    out = buffer[: shape.R, : shape.K]
    factor = None if power is None else torch.tensor(power, device=device)
    coefficients = Coefficients(alpha, None, gamma, delta, epsilon, None)
    logits_gradient(operands, statistics, coefficients, factor, out)
    nothing = torch.zeros_like(alpha)
    rows = (t.double() if t is not None else nothing.double() for t in (alpha, gamma, delta, epsilon))
    scale = operands.scale
    if operands.token_scale is not None:
        scale = scale * operands.token_scale.double()[:, None]
    exact = gradient_truth(z, *rows, power or 1.0, scale, operands.softcap)
    rounding = torch.finfo(dtype).eps / 2
    # Terms cancel where gamma is near p: their error is that of p.
    slack = 3e-5 * exact.abs().amax(1, keepdim=True)
    smallest = 2**-25 if dtype == torch.float16 else 0.0
    error = (out.double() - exact).abs()
    assert (error <= 1.01 * rounding * exact.abs() + slack + smallest).all()
    check_surroundings(buffer, shape.R, shape.K)
