"""The projection kernels and the merge of their windows, beside float64: interpreted on the CPU, compiled with
``-m gpu``."""

from __future__ import annotations

from dataclasses import dataclass, fields

import pytest
import torch

pytest.importorskip("triton", reason="needs triton")

import reference
from cases import DTYPES, normal
from parallel_lce.core.partials import MAX, NOBODY, SUM_EXP, TARGET, Columns, integer_view
from parallel_lce.kernels.arithmetic import REACH, SAVED_FP16_SCALE
from parallel_lce.kernels.epilogues import ForwardEpilogue
from parallel_lce.kernels.partials import PartialColumns, merge_windows
from parallel_lce.kernels.projection import Product, logits_gradient, new_window_partials
from parallel_lce.kernels.rewrite import TokenCoefficients
from parallel_lce.kernels.token_logits import token_logits

pytestmark = pytest.mark.usefixtures("kernels")

ALL = Columns(*[True] * len(fields(Columns)))
SENTINEL = 7.0
START = 11  # global id of the first entry


@dataclass(frozen=True)
class Shape:
    """``gap``: elements between the operands' rows; ``offset``: elements before the first one. TMA takes neither, nor
    rows of other than multiples of 16 bytes."""

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
SMALL = Shape(20, 300, 16)


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
    bias = (normal(shape.K, seed=2) if bias is None else bias).to(dtype).to(device)
    whole = scale if token_scale is None else scale * token_scale.double()
    z = reference.logits(x.double(), weight.double(), bias.double(), scale=whole, softcap=softcap)
    return Product(x, weight, bias, scale, softcap, token_scale), z


def forward(operands: Product, columns=ALL, *, shift=None, saved=None, target=None):
    """Partials of the windows, the merged one ``[C, R]``, and which tokens' windows are all relative to ``shift``."""
    windows = new_window_partials(operands, columns)
    operands.launch(saved, ForwardEpilogue(windows, shift))
    return windows, *merged(windows, operands, columns, shift, target)


def merged(windows: PartialColumns, operands: Product, columns=ALL, shift=None, target=None):
    partial = torch.full((columns.count, windows.max.shape[1]), torch.nan, device=windows.max.device)
    if target is not None:
        token_logits(operands, target, partial[TARGET], None)
    of = dict(window=operands.tile.entries, entries=len(operands.weight), start=START)
    return partial, merge_windows(windows, partial, shift, columns, target=target, **of)


def finite(maximum: torch.Tensor) -> torch.Tensor:
    return maximum.masked_fill(maximum == -torch.inf, 0.0)


def truth(z: torch.Tensor) -> dict[str, torch.Tensor]:
    """Columns of the partial of all logits but the target's and the argmax, float64."""
    top = z.amax(1)
    shifted = z - finite(top)[:, None]
    e = shifted.exp()
    sums = e.sum(1), shifted.sum(1), z.sum(1), (e * shifted.clamp(min=-1e4)).sum(1), e.square().sum(1)
    return dict(zip(("max", "sum_exp", "shifted", "total", "weighted", "squared"), (top, *sums)))


def exponentials(z: torch.Tensor, width: int, shift: torch.Tensor | None) -> tuple[torch.Tensor, torch.Tensor]:
    """``exp(z - reference) [R, K]``, and the windows' references: their maxima unless these are near ``shift``."""
    maxima = torch.stack([window.amax(1) for window in z.split(width, 1)], 1)
    references = finite(maxima)
    if shift is not None:
        near = ((maxima - shift.double()[:, None]).abs() <= REACH) | (maxima == -torch.inf)
        references = torch.where(near, shift.double()[:, None], references)
    return (z - references.repeat_interleave(width, 1)[:, : z.shape[1]]).exp(), references


def check_kept(saved: torch.Tensor, expected: torch.Tensor) -> None:
    scale = SAVED_FP16_SCALE if saved.dtype == torch.float16 else 1.0
    rounding = torch.finfo(saved.dtype).eps / 2
    # The smallest numbers of fp16 are further apart than their precision.
    smallest = 2**-25 if saved.dtype == torch.float16 else 0.0
    torch.testing.assert_close(saved.double(), expected * scale, rtol=1.01 * rounding + 3e-5, atol=1.01 * smallest)


def surrounded(shape: Shape, dtype, device) -> torch.Tensor:
    return torch.full((shape.R + 3, -(-shape.K // 64) * 64 + 64), SENTINEL, dtype=dtype, device=device)


def check_surroundings(buffer: torch.Tensor, rows: int, columns: int) -> None:
    """TMA writes whole 16 bytes."""
    last = -(-columns * buffer.element_size() // 16) * 16 // buffer.element_size()
    assert (buffer[rows:] == SENTINEL).all() and (buffer[:rows, last:] == SENTINEL).all()


# Where a shift lies from each token's maximum, None without one; how many windows are saved.
FORWARDS = {str(shape): (shape, dict(shift=-3, windows=9)) for shape in SHAPES} | {
    "scale": (SMALL, dict(scale=-1.5)),
    "softcap": (SMALL, dict(softcap=3.0, sharpness=4.0)),
    "scale and softcap": (SMALL, dict(scale=0.5, softcap=30.0, shift=0)),
    "one window is saved": (Shape(130, 300, 24), dict(shift=-3, windows=1)),
    "no TMA": (Shape(20, 300, 21), dict(shift=-3, windows=1)),
    "a window far below the shift": (Shape(130, 600, 24), dict(shift=-3, windows=9, low=2 * REACH)),
    "a window of -inf": (Shape(20, 600, 16), dict(shift=-3, windows=9, low=torch.inf)),
    "a shift that no window is near": (Shape(130, 300, 24), dict(shift=-100, windows=9)),
    "a shift that is too low": (Shape(20, 300, 21), dict(shift=-100, windows=9)),
    "windows of two tiles of the merge": (Shape(20, 16600, 8, offset=1), dict()),
    "row blocks of two launches": (Shape(35 * 128 - 5, 40, 16), dict(windows=9)),
}


@pytest.mark.parametrize("name", FORWARDS)
@pytest.mark.thinned
def test_forward(name, dtype, device):
    """The merged partial, the targets' logits, and exponentials that are kept: relative to the token's shift where the
    window's maximum is near it; fp16 has none."""
    shape, options = FORWARDS[name]
    options = dict(options)
    distance, saved, low = (options.pop(key, None) for key in ("shift", "windows", "low"))
    width = problem(shape, dtype, device)[0].tile.entries
    bias = normal(shape.K, seed=2)
    if low:
        bias[width : 2 * width + 10] -= low
    operands, z = problem(shape, dtype, device, bias=bias, **options)
    aligned = shape.gap == shape.offset == 0 and shape.D * dtype.itemsize % 16 == 0
    assert operands.tma == (aligned and (device == "cpu" or torch.cuda.get_device_capability() >= (9, 0)))
    shift = None if distance is None or dtype == torch.float16 else z.amax(1).float() + distance
    kept = min(shape.K, (saved or 0) * width)
    buffer = surrounded(shape, dtype, device)
    target = torch.randint(shape.K, (shape.R,), generator=torch.Generator().manual_seed(0))
    outside = torch.tensor([-1, shape.K, -(2**63), 2**62])
    target[1::2] = outside.repeat(shape.R)[: len(target[1::2])]
    target = target.to(device)
    out = buffer[: shape.R, :kept] if kept else None
    windows, partial, on_shift = forward(operands, shift=shift, saved=out, target=target)

    true = truth(z)
    e, references = exponentials(z, width, shift)
    check_kept(buffer[: shape.R, :kept], e[:, :kept])
    check_surroundings(buffer, shape.R, kept)
    sums = torch.stack([window.sum(1) for window in e.split(width, 1)])
    torch.testing.assert_close(windows.sum_exp.double(), sums, rtol=3e-5, atol=0)
    if shift is None:
        assert on_shift is None
    else:
        assert torch.equal(on_shift, (references == shift[:, None]).all(1).byte())
    found = {name: partial[ALL.names.index(name)].double() for name in true}
    torch.testing.assert_close(found["max"], true["max"], rtol=2e-6, atol=1e-5)
    torch.testing.assert_close(found["sum_exp"], true["sum_exp"], rtol=3e-5, atol=0)
    torch.testing.assert_close(found["squared"], true["squared"], rtol=6e-5, atol=0)
    # Sums of terms of either sign: their error is that of the logits.
    for name in ("shifted", "total"):
        torch.testing.assert_close(found[name], true[name], rtol=1e-5, atol=2e-3)
    error = (found["weighted"] - true["weighted"]).abs()
    assert (error <= 1e-4 * true["sum_exp"] + 3e-5 * true["weighted"].abs()).all()
    ids = integer_view(partial[ALL["argmax"]]).long() - START
    torch.testing.assert_close(z.gather(1, ids[:, None]).squeeze(1), true["max"], rtol=2e-6, atol=1e-5)
    hit = (target >= 0) & (target < shape.K)
    picked = z.gather(1, target.clamp(0, shape.K - 1)[:, None]).squeeze(1)
    torch.testing.assert_close(partial[TARGET].double(), torch.where(hit, picked, 0.0), rtol=2e-6, atol=1e-5)


def test_each_column_alone_is_the_same(device):
    operands, _ = problem(SMALL, torch.float16, device)
    _, everything, _ = forward(operands)
    for name in ALL.requested:
        columns = Columns(**{name: True})
        _, alone, _ = forward(operands, columns)
        assert torch.equal(alone[:TARGET], everything[:TARGET]), name
        assert torch.equal(alone[columns[name]], everything[ALL[name]]), name


def test_nan_stays_in_its_token_and_its_window(dtype, device):
    operands, _ = problem(Shape(20, 600, 16), dtype, device)
    clean, *_ = forward(operands, Columns())
    operands.x[5, 3] = torch.nan
    operands.bias[-1] = torch.nan
    poisoned, *_ = forward(operands, Columns())
    assert poisoned.sum_exp[:, 5].isnan().all() and poisoned.sum_exp[-1].isnan().all()
    others = torch.arange(20, device=device) != 5
    assert torch.equal(poisoned.sum_exp[:-1, others], clean.sum_exp[:-1, others])


@pytest.mark.parametrize("shifted", [False, True])
def test_merged_windows_of_minus_infinity_and_nan(shifted, device):
    """A window of NaN has a maximum of its other logits."""
    operands, _ = problem(Shape(6, 1, 8), torch.float32, device)
    width = operands.tile.entries
    z = normal(6, 5, width).to(device)
    z[0] = z[1, :3] = z[4] = -torch.inf
    z[2, 3, 6] = z[4, 1, 1] = torch.nan
    z[3, 3, 6] = torch.inf
    shift = torch.full((6,), 1.5, device=device) if shifted else None
    maxima = z.nan_to_num(-torch.inf, torch.inf, -torch.inf).amax(2)
    near = (maxima - 1.5).abs() <= REACH
    references = torch.where(near | (maxima == -torch.inf), 1.5, maxima) if shifted else finite(maxima)
    ids = torch.arange(5, device=device, dtype=torch.int32) * width
    columns = Columns(argmax=True)
    windows = PartialColumns(
        maxima.t().float().contiguous(),
        (z - references[:, :, None]).exp().sum(2).t().float().contiguous(),
        *[None] * 5,
        ids[:, None].expand(5, 6).contiguous().view(torch.float32),
    )
    whole = Product(operands.x, operands.weight.expand(5 * width, 8), None)
    partial, on_shift = merged(windows, whole, columns, shift)
    top, sum_exp, ids = partial[MAX], partial[SUM_EXP], integer_view(partial[columns["argmax"]])
    true = truth(z.flatten(1))
    for name, found in (("max", top), ("sum_exp", sum_exp)):
        torch.testing.assert_close(found[[1, 5]].double(), true[name][[1, 5]], rtol=2e-6, atol=0)
    assert top[0] == -torch.inf and sum_exp[0] == 0
    assert top[[2, 4]].isnan().all() and sum_exp[[2, 4]].isnan().all() and (ids[[2, 4]] == NOBODY).all()
    assert top[3] == torch.inf and ids[3] == 3 * width + START
    assert not shifted or on_shift.tolist() == [1, 1, 1, 0, 1, 1]


@pytest.mark.parametrize("near", [True, False])
def test_nothing_is_lost_at_large_logits(near, device):
    """Logits around 300 that are exact, and whose distances are small: a reference is rounded in base
    2 there, by far more than the sums are, and the merge takes that back. Of equal logits the first is the largest."""
    generator = torch.Generator().manual_seed(3)
    x = (torch.randint(-4, 5, (20, 8), generator=generator) / 4).to(device)
    weight = (torch.randint(-4, 5, (300, 8), generator=generator) / 4).to(device)
    for dtype in (torch.float16, torch.bfloat16):
        bias = torch.full((300,), 304.0, dtype=dtype, device=device)
        z = x.double() @ weight.double().t() + 304
        shift = (z.amax(1) - (1 / 3 if near else 100)).float()
        _, partial, _ = forward(Product(x.to(dtype), weight.to(dtype), bias), shift=shift)
        for name, rtol in (("max", 0), ("sum_exp", 1e-6), ("weighted", 2e-6), ("squared", 2e-6)):
            found = partial[ALL.names.index(name)].double()
            torch.testing.assert_close(found, truth(z)[name], rtol=rtol, atol=0)
        largest = z == z.amax(1, keepdim=True)
        assert largest.sum(1).max() > 1
        assert torch.equal(integer_view(partial[ALL["argmax"]]) - START, largest.int().argmax(1).int())


def test_a_target_that_is_the_maximum_equals_it(device):
    """To the bit where tensor cores multiply; the interpreter's products differ in their order."""
    operands, z = problem(Shape(130, 300, 520), torch.bfloat16, device)
    found = torch.empty(130, device=device)
    token_logits(operands, z.argmax(1), found, None)
    top = forward(operands)[0].max.amax(0)
    torch.testing.assert_close(found, top, rtol=0, atol=0 if device == "cuda" else 2e-6)


# --- the gradient of recomputed logits -------------------------------------------------------------

FORMS = {
    "plain": {},
    "epsilon": dict(epsilon=True),
    "gamma and delta": dict(gamma=True, delta=True),
    "scaled and capped": dict(delta=True, scale=-0.5, softcap=3.0, power=2.0**7),
    "all": dict(gamma=True, delta=True, epsilon=True, token_scale=True, scale=2.0, softcap=4.0, power=0.5),
}


@pytest.mark.parametrize(
    ("shape", "form"), [(shape, "all") for shape in SHAPES] + [(SMALL, form) for form in FORMS], ids=str
)
@pytest.mark.thinned
def test_gradient(shape, form, dtype, device):
    options = dict(FORMS[form])
    power = options.pop("power", None)
    alpha, *others = normal(5, shape.R, seed=4).float().to(device)
    names = "gamma", "delta", "epsilon", "token_scale"
    gamma, delta, epsilon, token_scale = (v if options.pop(n, False) else None for n, v in zip(names, others))
    gamma = None if gamma is None else gamma / shape.K
    operands, z = problem(shape, dtype, device, sharpness=2.0, token_scale=token_scale, **options)
    true = truth(z)
    buffer = surrounded(shape, dtype, device)
    out = buffer[: shape.R, : shape.K]
    factor = None if power is None else torch.tensor(power, device=device)
    partial = torch.stack([true["max"], true["sum_exp"]]).float()
    logits_gradient(operands, partial, TokenCoefficients(alpha, None, gamma, delta, epsilon, None), factor, out)
    a, g, d, q = (
        (torch.zeros_like(alpha) if t is None else t).double()[:, None] for t in (alpha, gamma, delta, epsilon)
    )
    moved = z - true["max"][:, None]
    p = moved.exp() / true["sum_exp"][:, None]
    exact = (p * (a + d * moved + q * p) - g) * operands.scale * (power or 1.0)
    if token_scale is not None:
        exact *= token_scale.double()[:, None]
    if operands.softcap is not None:
        exact *= 1 - (z / operands.softcap) ** 2
    rounding = torch.finfo(dtype).eps / 2
    # Terms cancel where gamma is near p: their error is that of p.
    slack = 3e-5 * exact.abs().amax(1, keepdim=True)
    smallest = 2**-25 if dtype == torch.float16 else 0.0
    error = (out.double() - exact).abs()
    assert (error <= 1.01 * rounding * exact.abs() + slack + smallest).all()
    check_surroundings(buffer, shape.R, shape.K)
