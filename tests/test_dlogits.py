"""Kept exponentials made gradients of the logits, beside float64: interpreted on the CPU, compiled
with ``-m gpu``."""

from __future__ import annotations

from dataclasses import dataclass

import pytest
import torch

pytest.importorskip("triton", reason="needs triton")

from cases import DTYPES
from parallel_lce.kernels import dlogits
from parallel_lce.kernels.epilogues import FP16_SCALE, REACH

pytestmark = pytest.mark.usefixtures("kernels")

WINDOW = 64
R, C = 30, 200
KINDS = 10  # of rows, in turn


@dataclass
class Rows:
    """Tokens of each kind, their kept exponentials, and what statistics say of them.

    0: as it is, with its target here. 1: the target in another shard. 2: the target nowhere. 3: one
    window relative to its own maximum. 4: a maximum of all shards far above the reference. 5: alpha
    is 0, beta is not. 6: p of the target is nearly 1. 7: both coefficients are 0. 8: both are tiny.
    9: no window near the reference, and one of -inf alone.
    """

    z: torch.Tensor
    kept: torch.Tensor
    maxima: torch.Tensor
    common: torch.Tensor | None
    agreed: torch.Tensor | None
    target: torch.Tensor
    statistics: torch.Tensor
    alpha: torch.Tensor
    beta: torch.Tensor
    gamma: torch.Tensor

    @property
    def kind(self) -> torch.Tensor:
        return torch.arange(R, device=self.z.device) % KINDS


def rows(dtype: torch.dtype, device: str, softcap: float | None = None) -> Rows:
    generator = torch.Generator().manual_seed(0)

    def normal(*shape):
        return torch.randn(shape, generator=generator, dtype=torch.float64)

    kind = torch.arange(R) % KINDS
    z = normal(R, C)
    target = torch.randint(C, (R,), generator=generator)
    here = torch.arange(R)
    if softcap is None:
        z[kind == 3, WINDOW : 2 * WINDOW] -= 2 * REACH
        z[kind == 6, target[kind == 6]] = 13.0
        z[kind == 9, 2 * WINDOW : 3 * WINDOW] = -torch.inf
        target[kind == 9] = 5
    else:
        z = softcap * torch.tanh(2 * z / softcap)
    logit = z[here, target]
    target[kind == 1] = C
    logit[kind == 1] = 1.5
    target[kind == 2] = -(2**63)
    logit[kind == 2] = 0.0
    total = z.logsumexp(1)
    elsewhere = torch.where(kind == 4, total + REACH + 20, total - 1)
    if softcap is not None:
        elsewhere = total - 1
    maximum = torch.maximum(z.amax(1), elsewhere)
    sum_exp = (torch.logaddexp(total, elsewhere) - maximum).exp()
    # Its own shard alone, so that p of the target is 1 - 1e-3.
    sum_exp[kind == 6], maximum[kind == 6] = (total - z.amax(1)).exp()[kind == 6], z.amax(1)[kind == 6]
    alpha, beta, gamma = normal(3, R).abs() + 0.1
    beta[kind == 6] = alpha[kind == 6]
    alpha[(kind == 5) | (kind == 7)] = 0.0
    beta[kind == 7] = 0.0
    alpha[kind == 8], beta[kind == 8] = alpha[kind == 8] * 1e-25, beta[kind == 8] * 1e-25
    common = agreed = None
    maxima = torch.stack([part.amax(1) for part in z.split(WINDOW, 1)])
    references = maxima
    if dtype != torch.float16:
        common = torch.zeros(R) if softcap is not None else z.amax(1).float() - 2
        common[kind == 9] += 150 if softcap is None else 0
        near = ((maxima - common).abs() <= REACH) | (maxima == -torch.inf)
        references = torch.where(near, common.double(), maxima)
        agreed = (references == common).all(0).to(torch.uint8)
    scale = FP16_SCALE if dtype == torch.float16 else 1.0
    memory = torch.full((R, 256), torch.nan, dtype=dtype, device=device)
    finite = references.masked_fill(references == -torch.inf, 0.0)
    kept = memory[:, :C].copy_((z - finite.repeat_interleave(WINDOW, 0)[:C].t()).exp() * scale)
    narrow = [t if t is None else t.to(device) for t in (maxima.float(), common, agreed, target)]
    statistics = torch.stack([maximum, sum_exp, logit]).float().to(device)
    coefficients = (t.float().to(device) for t in (alpha, beta, gamma / C))
    return Rows(z.to(device), kept, *narrow, statistics, *coefficients)


def exact(r: Rows, *, beta=True, gamma=False, delta=None, factor=1.0, softcap=None) -> torch.Tensor:
    """``p (alpha + delta (z - M)) - beta [j = y] - gamma`` times the slope, ``[R, C]`` float64."""
    top, sum_exp, _ = r.statistics.double()
    shifted = (r.z - top[:, None]).clamp(min=-1e4)
    level = r.alpha.double()[:, None]
    if delta is not None:
        level = level + delta.double()[:, None] * shifted
    g = shifted.exp() / sum_exp[:, None] * level
    if gamma:
        g -= r.gamma.double()[:, None]
    if beta:
        hit = torch.arange(C, device=r.z.device) == r.target[:, None]
        g -= torch.where(hit, r.beta.double()[:, None], 0.0)
    if softcap is not None:
        g *= 1 - (r.z / softcap) ** 2
    return g * factor


def settle(r: Rows, *, beta=True, gamma=False, power=None, scale=1.0, softcap=None, rewrite=False):
    """The factors of the rows: none are 1."""
    factor = dlogits.settle(
        r.kept, r.maxima, r.common, r.agreed, WINDOW, r.target if beta else None, r.statistics,
        r.alpha, r.beta if beta else None, r.gamma if gamma else None, power, scale, softcap, rewrite,
    )  # fmt: skip
    whole = rewrite or gamma or softcap is not None or r.common is None
    assert (factor is None) == whole
    return torch.ones_like(r.alpha) if whole else factor


def target_entries(r: Rows, gradient: torch.Tensor) -> torch.Tensor:
    hit = (r.target >= 0) & (r.target < C)
    return gradient[hit, r.target[hit]]


@pytest.fixture(params=["fp32", "bf16", "fp16"])
def dtype(request) -> torch.dtype:
    return DTYPES[request.param]


@pytest.mark.parametrize("rewrite", [False, True])
@pytest.mark.parametrize("with_target", [True, False])
def test_rows_are_rewritten_where_they_must(with_target, rewrite, dtype, device):
    r = rows(dtype, device)
    before = r.kept.clone()
    factor = settle(r, beta=with_target, rewrite=rewrite)
    must = (r.kind == 3) | (r.kind == 4) | (r.kind >= 8) | ((r.kind == 5) & with_target)
    must |= torch.tensor(rewrite or dtype == torch.float16, device=device)
    assert (factor[must] == 1).all() and (factor[~must] != 1).all()
    changed = before != r.kept
    hit = torch.arange(C, device=device) == r.target[:, None]
    assert not changed[~must].logical_and(~hit[~must] | (not with_target)).any()
    truth = exact(r, beta=with_target)
    gradient = r.kept.double() * factor[:, None].double()
    rounding = torch.finfo(dtype).eps
    # In fp16 p of 1e-5 times a coefficient of 0.1 is a subnormal number, without `power`.
    smallest = 2**-25 if dtype == torch.float16 else 0.0
    error = (gradient - truth).abs()
    assert (error <= 1.01 * rounding * truth.abs() + 3e-6 * r.alpha[:, None] + smallest).all()
    if with_target:
        # A target's entry is rounded once, and is no difference of rounded numbers.
        found, entries = target_entries(r, gradient), target_entries(r, truth)
        bound = 1.01 * rounding / 2 * entries.abs()
        bound += 1e-6 * target_entries(r, r.alpha[:, None].expand_as(gradient))
        assert ((found - entries).abs() <= bound + smallest).all()


def test_the_target_of_a_sure_token_does_not_cancel(dtype, device):
    """p = 1 - 1e-3 and alpha = beta: from an exponential in bf16, p - 1 would be off by more."""
    r = rows(dtype, device)
    sure = r.kind == 6
    factor = settle(r)
    gradient = r.kept.double() * factor[:, None].double()
    found = gradient[sure, r.target[sure]]
    truth = exact(r)[sure, r.target[sure]]
    assert (truth.abs() < 2e-3 * r.alpha[sure]).all()
    assert ((found - truth).abs() <= (torch.finfo(dtype).eps + 2e-4) * truth.abs()).all()


def test_no_coefficient_makes_a_gradient_of_zero(dtype, device):
    r = rows(dtype, device)
    factor = settle(r)
    gradient = r.kept * factor[:, None]
    assert torch.count_nonzero(gradient[r.kind == 7]) == 0


@pytest.mark.parametrize("softcap", [None, 5.0])
@pytest.mark.parametrize("gamma", [False, True])
def test_settled_with_every_coefficient(gamma, softcap, dtype, device):
    r = rows(dtype, device, softcap)
    power = torch.tensor(2.0**6, device=device)
    factor = settle(r, gamma=gamma, power=power, scale=-0.5, softcap=softcap)
    truth = exact(r, gamma=gamma, factor=-0.5 * 64, softcap=softcap)
    p = exact(r, beta=False, factor=-0.5 * 64).abs()
    error = (r.kept.double() * factor[:, None].double() - truth).abs()
    rounding = torch.finfo(dtype).eps
    # The slope is that of z from a rounded exponential, and acts on gamma too.
    slope = 0.0 if softcap is None else 4 / softcap
    terms = truth.abs() + (1 + slope) * (p + 32 * gamma * r.gamma[:, None])
    smallest = 2**-25 if dtype == torch.float16 else 0.0
    assert (error <= rounding * terms + 1e-4 * r.alpha[:, None] + smallest).all()


@pytest.mark.parametrize("softcap", [None, 5.0])
@pytest.mark.parametrize("options", ["plain", "all"])
def test_written_targets(options, softcap, dtype, device):
    r = rows(dtype, device, softcap)
    r.kept.fill_(7.0)
    gamma = delta = power = None
    scale = 1.0
    if options == "all":
        generator = torch.Generator().manual_seed(1)
        delta = torch.randn(R, generator=generator).to(device)
        gamma, power, scale = r.gamma, torch.tensor(4.0, device=device), -0.5
    dlogits.write_targets(
        r.kept, r.target, r.statistics, r.alpha, r.beta, gamma, delta, power, scale, softcap
    )
    factor = scale * (1.0 if power is None else 4.0)
    truth = exact(r, gamma=gamma is not None, delta=delta, factor=factor, softcap=softcap)
    hit = torch.arange(C, device=device) == r.target[:, None]
    assert (r.kept[~hit] == 7).all()
    found, entries = target_entries(r, r.kept.double()), target_entries(r, truth)
    rounding = torch.finfo(dtype).eps / 2
    smallest = 2**-25 if dtype == torch.float16 else 0.0
    # alpha and beta are at most 4, z - M at most 60, and p nearly 0 where it is so.
    assert ((found - entries).abs() <= 1.01 * rounding * entries.abs() + 4e-6 * abs(factor) + smallest).all()


@pytest.mark.parametrize("shape", [(1, 1), (5, 300), (3, 5000)], ids=str)
def test_scaled_rows(shape, dtype, device):
    generator = torch.Generator().manual_seed(0)
    source = torch.randn(shape[0], shape[1] + 5, generator=generator).to(device)[:, : shape[1]]
    factor = torch.randn(shape[0], generator=generator).to(device)
    expected = (source * factor[:, None]).to(dtype)
    memory = torch.full((shape[0] + 1, shape[1] + 2), 7.0, dtype=dtype, device=device)
    found = dlogits.scale_rows(source, factor, memory[:-1, :-2])
    assert torch.equal(found, expected) and found.data_ptr() == memory.data_ptr()
    assert (memory[-1] == 7).all() and (memory[:, -2:] == 7).all()
    assert torch.equal(dlogits.scale_rows(source, factor, source).to(dtype), expected)
