"""The tokens' rows of the gradient of the logits, beside float64: interpreted on the CPU, compiled with ``-m gpu``."""

from __future__ import annotations

from dataclasses import dataclass, replace
from types import SimpleNamespace

import pytest
import torch

pytest.importorskip("triton", reason="needs triton")

from cases import DTYPES, normal
from parallel_lce.core.partials import Coefficients
from parallel_lce.kernels.arithmetic import REACH, SAVED_FP16_SCALE
from parallel_lce.kernels.rewrite import GradientTerms, Saved
from parallel_lce.kernels.token_gradients import token_gradients

pytestmark = pytest.mark.usefixtures("kernels")

WINDOW = 64
R, C = 30, 200
KINDS = 8  # of rows, in turn
TARGET = 11  # of tokens that have one


@dataclass
class Rows:
    """Tokens of each kind, their saved exponentials, and what statistics say of them.

    0: as it is. 1: alpha is 0, but not the gradient of the target. 2: one window relative to its own
    maximum. 3: a maximum of all shards far above the reference. 4: both are 0. 5: p of one entry, which is no target,
    is nearly 1. 6: alpha is tiny. 7: no window near the reference, and one of -inf alone. Tokens of kind 1 and some of
    kind 0 have a target.
    """

    z: torch.Tensor
    saved: torch.Tensor
    maxima: torch.Tensor
    softmax_shift: torch.Tensor | None
    on_shift: torch.Tensor | None
    statistics: torch.Tensor
    alpha: torch.Tensor
    beta: torch.Tensor
    gamma: torch.Tensor
    delta: torch.Tensor
    epsilon: torch.Tensor
    token_scale: torch.Tensor
    target: torch.Tensor

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
    beta = normal(R, seed=2).abs() + 0.1
    target = torch.where((kind == 1) | (torch.arange(R) % 16 == 0), TARGET, -1)
    target[16] = TARGET + 1  # that no other token has
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
    statistics = torch.stack([maximum, sum_exp, z[torch.arange(R), target.clamp(min=0)]]).float().to(device)
    coefficients = (t.float().to(device) for t in (alpha, beta, gamma / C, *normal(3, R, seed=3)))
    return Rows(z.to(device), saved, *narrow, statistics, *coefficients, target.to(device))


def exact(r: Rows, *, gamma=False, of_entries=False, factor=1.0, softcap=None) -> torch.Tensor:
    """``p alpha - gamma`` times the slope, ``[R, C]`` float64; ``of_entries``: with delta, epsilon and token_scale."""
    top, sum_exp, _ = r.statistics.double()
    moved = r.z - top[:, None]
    p = moved.exp() / sum_exp[:, None]
    g = p * r.alpha.double()[:, None]
    if of_entries:
        g += p * (r.delta.double()[:, None] * moved.clamp(min=-1e4) + r.epsilon.double()[:, None] * p)
    if gamma:
        g -= r.gamma.double()[:, None]
    if of_entries:
        g *= r.token_scale.double()[:, None]
    if softcap is not None:
        g *= 1 - (r.z / softcap) ** 2
    return g * factor


def formed(
    r: Rows, *, gamma=False, of_entries=False, fp16_scale=None, scale=1.0, softcap=None, rewrite=False, factor=None
):
    delta, epsilon, token_scale = (r.delta, r.epsilon, r.token_scale) if of_entries else (None, None, None)
    coefficients = Coefficients(r.alpha, r.beta, r.gamma if gamma else None, delta, epsilon, factor)
    operands = SimpleNamespace(scale=scale, token_scale=token_scale, softcap=softcap)
    found = token_gradients(
        r.saved,
        Saved(r.saved, r.maxima, r.softmax_shift, r.on_shift),
        r.target,
        GradientTerms.of(r.statistics, coefficients, fp16_scale, operands),
        entries=C,
        window=WINDOW,
        rewrite=rewrite,
    )
    whole = rewrite or gamma or of_entries or softcap is not None or r.softmax_shift is None
    assert (found.dx_factor is None) == (found.dw_factor is None) == whole
    ones = torch.ones_like(r.alpha)
    return found._replace(dx_factor=ones, dw_factor=ones) if whole else found


def without_targets(values: torch.Tensor, r: Rows) -> torch.Tensor:
    """``[R, C]`` with 0 for the targets' entries."""
    at = r.target.clamp(min=0)[:, None]
    return values.scatter(1, at, torch.where(r.target[:, None] >= 0, 0.0, values.gather(1, at)).to(values.dtype))


@pytest.fixture(params=["fp32", "bf16", "fp16"])
def dtype(request) -> torch.dtype:
    return DTYPES[request.param]


@pytest.mark.parametrize("rewrite", [False, True])
def test_rows_are_rewritten_where_they_must(rewrite, dtype, device):
    r = rows(dtype, device)
    before = r.saved.clone()
    factor = formed(r, rewrite=rewrite).dx_factor
    must = ((r.kind >= 1) & (r.kind <= 3)) | (r.kind >= 5)
    must |= torch.tensor(rewrite or dtype == torch.float16, device=device)
    assert (factor[must] == 1).all() and (factor[~must] != 1).all()
    assert torch.equal(without_targets(before, r)[~must], without_targets(r.saved, r)[~must])
    truth = without_targets(exact(r), r)
    gradient = without_targets(r.saved, r).double() * factor[:, None].double()
    # In fp16 p of 1e-5 times a coefficient of 0.1 is a subnormal number, without `power`.
    smallest = 2**-25 if dtype == torch.float16 else 0.0
    bound = 1.01 * torch.finfo(dtype).eps * truth.abs() + 3e-6 * r.alpha[:, None] + smallest
    assert ((gradient - truth).abs() <= bound).all()


def test_no_coefficient_makes_a_gradient_of_zero(dtype, device):
    r = rows(dtype, device)
    factor = formed(r).dx_factor
    gradient = without_targets(r.saved, r) * factor[:, None]
    assert torch.count_nonzero(gradient[(r.kind == 1) | (r.kind == 4)]) == 0


@pytest.mark.parametrize("softcap", [None, 5.0])
@pytest.mark.parametrize(("gamma", "of_entries"), [(False, False), (True, False), (True, True)])
def test_formed_with_every_coefficient(gamma, of_entries, softcap, dtype, device):
    r = rows(dtype, device, softcap)
    asked = dict(gamma=gamma, of_entries=of_entries)
    fp16_scale = torch.tensor(2.0**6, device=device)
    factor = formed(r, **asked, fp16_scale=fp16_scale, scale=-0.5, softcap=softcap).dx_factor
    r.saved.copy_(without_targets(r.saved, r))
    truth = without_targets(exact(r, **asked, factor=-0.5 * 64, softcap=softcap), r)
    p = exact(r, factor=-0.5 * 64).abs()
    error = (r.saved.double() * factor[:, None].double() - truth).abs()
    rounding = torch.finfo(dtype).eps
    # The slope is that of z from a rounded exponential, and acts on gamma too.
    slope = 0.0 if softcap is None else 4 / softcap
    terms = truth.abs() + (1 + slope) * (p + 32 * gamma * r.gamma[:, None])
    size = r.alpha
    if of_entries:
        # A rounded exponential tells z to one rounding of 1.
        one = replace(r, alpha=torch.ones_like(r.alpha))
        p = exact(one, factor=0.5 * 64) * r.token_scale.abs()[:, None]
        size = r.alpha.abs() + r.delta.abs() + r.epsilon.abs()
        reach = (r.z - r.statistics[0].double()[:, None]).abs().clamp(max=1e4)
        terms = terms + (1 + slope) * p * (size[:, None] + r.delta.abs()[:, None] * reach)
        terms = terms + (1 + slope) * 32 * r.gamma[:, None] * r.token_scale.abs()[:, None]
    smallest = 2**-25 if dtype == torch.float16 else 0.0
    assert (error <= rounding * terms + 1e-4 * size[:, None] + smallest).all()


def test_a_target_is_an_entry_and_what_it_leaves(dtype, device):
    """Rows that are rewritten are so before their targets' entries are placed."""
    r = rows(dtype, device)
    found = formed(r)
    has, shared = r.target >= 0, r.target == TARGET
    assert torch.equal(found.unshared != 0, has & ~shared) and (has & ~shared).sum() == 1 and shared.sum() > 3
    top, sum_exp, z = r.statistics.double()
    t = torch.where(has, (z - top).exp() / sum_exp * r.alpha - r.beta, 0.0)
    entry = r.saved.double()[torch.arange(R, device=device), r.target.clamp(min=0)]
    assert (entry[has & ~shared] == 0).all()
    placed = torch.where(shared, entry, 0.0)
    torch.testing.assert_close(found.dx_factor * placed + found.residual, t, rtol=1e-6, atol=1e-6)
    assert (found.residual[shared].abs() <= torch.finfo(dtype).eps * t[shared].abs() + 1e-6).all()
    if r.softmax_shift is not None:
        torch.testing.assert_close((found.dw_factor * placed)[shared], t[shared], rtol=1e-6, atol=1e-6)
    assert torch.equal(found.dw_factor[~shared], found.dx_factor[~shared])


@pytest.mark.parametrize("per_token", [False, True])
def test_a_factor_multiplies_every_coefficient(per_token, dtype, device):
    factor = normal(R, seed=9).float().to(device) if per_token else torch.tensor(-1.5, device=device)
    one, other = rows(dtype, device), rows(dtype, device)
    other.alpha, other.beta = other.alpha * factor, other.beta * factor
    for found, expected in zip(formed(one, factor=factor), formed(other)):
        assert torch.equal(found, expected)
    assert torch.equal(one.saved, other.saved)
