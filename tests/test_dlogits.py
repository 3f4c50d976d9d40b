"""Saved exponentials made gradients of the logits, beside float64: interpreted on the CPU, compiled
with ``-m gpu``."""

from __future__ import annotations

from dataclasses import dataclass

import pytest
import torch

pytest.importorskip("triton", reason="needs triton")

from cases import DTYPES, normal
from parallel_lce.kernels import dlogits
from parallel_lce.kernels.arithmetic import REACH, SAVED_FP16_SCALE

pytestmark = pytest.mark.usefixtures("kernels")

WINDOW = 64
R, C = 30, 200
KINDS = 8  # of rows, in turn


@dataclass
class Rows:
    """Tokens of each kind, their saved exponentials, and what statistics say of them.

    0: as it is. 1: alpha is 0, but not the gradient of the target. 2: one window relative to its own
    maximum. 3: a maximum of all shards far above the reference. 4: both are 0. 5: p of one entry is
    nearly 1. 6: alpha is tiny. 7: no window near the reference, and one of -inf alone.
    """

    z: torch.Tensor
    saved: torch.Tensor
    maxima: torch.Tensor
    softmax_shift: torch.Tensor | None
    on_shift: torch.Tensor | None
    statistics: torch.Tensor
    alpha: torch.Tensor
    gamma: torch.Tensor
    of_target: torch.Tensor

    @property
    def kind(self) -> torch.Tensor:
        return torch.arange(R, device=self.z.device) % KINDS


def rows(dtype: torch.dtype, device: str, softcap: float | None = None) -> Rows:
    kind = torch.arange(R) % KINDS
    z = normal(R, C)
    if softcap is None:
        z[kind == 2, WINDOW : 2 * WINDOW] -= 2 * REACH
        z[kind == 5, 17] = 13.0
        z[kind == 7, 2 * WINDOW : 3 * WINDOW] = -torch.inf
    else:
        z = softcap * torch.tanh(2 * z / softcap)
    total = z.logsumexp(1)
    elsewhere = total - 1
    if softcap is None:
        elsewhere[kind == 3] = total[kind == 3] + REACH + 20
    maximum = torch.maximum(z.amax(1), elsewhere)
    sum_exp = (torch.logaddexp(total, elsewhere) - maximum).exp()
    alpha, gamma = normal(2, R, seed=1).abs() + 0.1
    alpha[(kind == 1) | (kind == 4)] = 0.0
    of_target = torch.where(kind == 4, 0.0, normal(R, seed=2))
    alpha[kind == 6] *= 1e-25
    softmax_shift = on_shift = None
    maxima = torch.stack([part.amax(1) for part in z.split(WINDOW, 1)])
    references = maxima
    if dtype != torch.float16:
        softmax_shift = torch.zeros(R) if softcap is not None else z.amax(1).float() - 2
        softmax_shift[kind == 7] += 150 if softcap is None else 0
        near = ((maxima - softmax_shift).abs() <= REACH) | (maxima == -torch.inf)
        references = torch.where(near, softmax_shift.double(), maxima)
        on_shift = (references == softmax_shift).all(0).to(torch.uint8)
    scale = SAVED_FP16_SCALE if dtype == torch.float16 else 1.0
    memory = torch.full((R, 256), torch.nan, dtype=dtype, device=device)
    finite = references.masked_fill(references == -torch.inf, 0.0)
    saved = memory[:, :C].copy_((z - finite.repeat_interleave(WINDOW, 0)[:C].t()).exp() * scale)
    narrow = [t if t is None else t.to(device) for t in (maxima.float(), softmax_shift, on_shift)]
    statistics = torch.stack([maximum, sum_exp]).float().to(device)
    coefficients = (t.float().to(device) for t in (alpha, gamma / C, of_target))
    return Rows(z.to(device), saved, *narrow, statistics, *coefficients)


def exact(r: Rows, *, gamma=False, factor=1.0, softcap=None) -> torch.Tensor:
    """``p alpha - gamma`` times the slope, ``[R, C]`` float64."""
    top, sum_exp = r.statistics.double()
    g = (r.z - top[:, None]).exp() / sum_exp[:, None] * r.alpha.double()[:, None]
    if gamma:
        g -= r.gamma.double()[:, None]
    if softcap is not None:
        g *= 1 - (r.z / softcap) ** 2
    return g * factor


def formed(r: Rows, *, gamma=False, fp16_scale=None, scale=1.0, softcap=None, rewrite=False):
    """The factors of the rows: none are 1."""
    factor = dlogits.gradient_from_saved(
        dlogits.SavedExponentials(r.saved, r.maxima, r.softmax_shift, r.on_shift),
        WINDOW,
        r.statistics,
        r.alpha,
        r.gamma if gamma else None,
        r.of_target,
        fp16_scale,
        scale,
        softcap,
        rewrite,
    )
    whole = rewrite or gamma or softcap is not None or r.softmax_shift is None
    assert (factor is None) == whole
    return torch.ones_like(r.alpha) if whole else factor


@pytest.fixture(params=["fp32", "bf16", "fp16"])
def dtype(request) -> torch.dtype:
    return DTYPES[request.param]


@pytest.mark.parametrize("rewrite", [False, True])
def test_rows_are_rewritten_where_they_must(rewrite, dtype, device):
    r = rows(dtype, device)
    before = r.saved.clone()
    factor = formed(r, rewrite=rewrite)
    must = ((r.kind >= 1) & (r.kind <= 3)) | (r.kind >= 6)
    must |= torch.tensor(rewrite or dtype == torch.float16, device=device)
    assert (factor[must] == 1).all() and (factor[~must] != 1).all()
    assert torch.equal(before[~must], r.saved[~must])
    truth = exact(r)
    gradient = r.saved.double() * factor[:, None].double()
    # In fp16 p of 1e-5 times a coefficient of 0.1 is a subnormal number, without `power`.
    smallest = 2**-25 if dtype == torch.float16 else 0.0
    bound = 1.01 * torch.finfo(dtype).eps * truth.abs() + 3e-6 * r.alpha[:, None] + smallest
    assert ((gradient - truth).abs() <= bound).all()


def test_no_coefficient_makes_a_gradient_of_zero(dtype, device):
    r = rows(dtype, device)
    factor = formed(r)
    gradient = r.saved * factor[:, None]
    assert torch.count_nonzero(gradient[(r.kind == 1) | (r.kind == 4)]) == 0


@pytest.mark.parametrize("softcap", [None, 5.0])
@pytest.mark.parametrize("gamma", [False, True])
def test_formed_with_every_coefficient(gamma, softcap, dtype, device):
    r = rows(dtype, device, softcap)
    fp16_scale = torch.tensor(2.0**6, device=device)
    factor = formed(r, gamma=gamma, fp16_scale=fp16_scale, scale=-0.5, softcap=softcap)
    truth = exact(r, gamma=gamma, factor=-0.5 * 64, softcap=softcap)
    p = exact(r, factor=-0.5 * 64).abs()
    error = (r.saved.double() * factor[:, None].double() - truth).abs()
    rounding = torch.finfo(dtype).eps
    # The slope is that of z from a rounded exponential, and acts on gamma too.
    slope = 0.0 if softcap is None else 4 / softcap
    terms = truth.abs() + (1 + slope) * (p + 32 * gamma * r.gamma[:, None])
    smallest = 2**-25 if dtype == torch.float16 else 0.0
    assert (error <= rounding * terms + 1e-4 * r.alpha[:, None] + smallest).all()
