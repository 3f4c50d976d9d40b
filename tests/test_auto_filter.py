"""Filters that are chosen on the device: the errors that they are chosen by, beside those of the definition."""

from __future__ import annotations

import copy
from pathlib import Path

import pytest
import torch
from torch.nn.functional import one_hot

from cases import DTYPES, normal
from filters import FILTERS, TILE, filtered
from measures import assert_close, relative_error
from parallel_lce import LinearCrossEntropy, linear_cross_entropy, prepare, token_statistics
from parallel_lce.operands import call_of, numbers_of, operands_of
from parallel_lce.partials import Columns
from tools import arguments_of, arguments_to, chosen_backend, everywhere, results_of, shrunk
from world import Member

pytest.importorskip("triton", reason="needs triton")

from parallel_lce.backends import triton as backend
from parallel_lce.backends import triton_filter, triton_slices
from parallel_lce.backends.interface import Coefficients, GradBuffers, Projection, Scratch
from parallel_lce.kernels import tile_scan
from parallel_lce.kernels.active_tiles import entry_shares, find_active_tiles, list_tiles
from parallel_lce.kernels.filter_choice import LARGEST_ERROR, Allowance, SampledErrors, choose_level, error_allowance
from parallel_lce.kernels.filter_estimates import LEVELS, RowFactors, level_products, signs
from parallel_lce.kernels.tile_scan import GROUP, inverse_limits, sample_blocks, scan_tiles

LIMIT = LARGEST_ERROR


def test_the_documentation_names_the_filters():
    documented = " ".join((linear_cross_entropy.__doc__ or "").split())
    assert "the largest of 2**-10, 2**-11, ..., 2**-15, 2**-17 and 2**-19 whose errors" in documented
    usage = (Path(__file__).parent.parent / "docs/usage.md").read_text()
    assert "the largest of 2^-10 to 2^-15, 2^-17 and 2^-19 whose" in " ".join(usage.split())


def inputs_of(kind: str, N: int, V: int):
    """Hidden states and a weight. The first entry has most of the softmax. The rest is in the first tiles, or ``even``
    in all tiles. ``mixed``: some tokens have much less of the first entry, and like others of the rest. ``steps``: no
    entry has much."""
    x, weight = normal(N, 16), 0.15 * normal(V, 16, seed=1)
    if kind == "steps":
        return x, weight
    x[:, 0] = 4.0
    x[TILE:, 0] = 3.0 if kind == "mixed" else 3.6
    if kind == "mixed":
        x[TILE:, 1] = 3.0
    offsets = torch.zeros(4) if kind == "even" else torch.tensor([0.0, 0.0, -0.9, -1.1])
    weight[:, 0] = offsets.repeat_interleave(TILE)[:V]
    weight[0, 0] = 4.5 if kind == "even" else 3.0
    return x, weight


def draw(kind: str, N: int = 150, V: int = 500, dtype: str = "bf16", device: str = "cpu"):
    """x, weight and targets drawn from the softmax, outside the first tile once each."""
    x, weight = (t.to(DTYPES[dtype]) for t in inputs_of(kind, N, V))
    p = (x.double() @ weight.double().T).softmax(1)
    target = p.multinomial(1, generator=torch.Generator().manual_seed(2)).squeeze(1)
    for i, y in enumerate(target.tolist()):
        if y >= TILE and y in target[:i]:
            target[i] = -100
    return [x.to(device).requires_grad_(), weight.to(device).requires_grad_(), target.to(device)]


def gradients(x, weight, target, upstream=1.0, **options):
    loss = linear_cross_entropy(x, weight, target, **options)
    return torch.autograd.grad(loss.sum() * upstream, (x, weight))


@pytest.fixture
def choices():
    """What has been estimated of each slice since, but by replays."""
    prepare.KNOWN.clear()
    with chosen_backend("triton"), results_of(triton_filter, "estimated") as found:
        yield found


def allowance_of(device: str, limit: float, of_weight: float | None = None, share: float = 1.0) -> Allowance:
    """The limits of dX and dW, by default the same, and nothing added."""
    of_all = torch.tensor([[limit, 0.0, 0.0], [of_weight or limit, 0.0, 0.0]], device=device)
    return Allowance(of_all, share)


N = 150


class Slice:
    """A slice of G as the backward has it, in float64 and on a device. ``placed``: with factors and targets.
    ``steps``: for each filter the largest probability of a tile is a little above it, and of the tile below less."""

    def __init__(self, kind: str, dtype: str, placed: bool, device: str) -> None:
        V, first = 1012 if kind == "steps" else 500, 1000
        x, weight = (t.to(DTYPES[dtype]) for t in inputs_of(kind, N, V))
        token, ones = torch.arange(N), torch.ones(N).double()
        self.scale, alpha, self.dx_factor, self.dw_factor = 1.0, ones, ones, ones
        # Of a third of the targets all is left beside G, of a third a little, and a third is in another slice.
        target = first + torch.where(token % 3 < 2, (7 * token) % V, V + token)
        residual = 0.0 * alpha
        if placed:
            alpha, self.dx_factor, self.dw_factor = (0.5 + normal(N, seed=s).sigmoid() for s in (3, 4, 5))
            self.scale, residual = 8.0, -alpha * torch.where(token % 3 == 0, 0.9, 0.05)
        p = (x.double() @ weight.double().T).softmax(1)
        if kind == "steps":
            tiles = [tile for rows in p.split(TILE) for tile in rows.split(TILE, dim=1)]
            for tile, largest in zip(tiles, [eps * 2**step for step in (0.2, -0.2) for eps in FILTERS], strict=True):
                tile *= largest / tile.max()
        else:
            p[:, 0] -= 1.0
        # What follows a row is never read as a number.
        memory = torch.full((N, V + 4), torch.nan, dtype=DTYPES[dtype], device=device)
        memory[:, :V] = (p * (alpha / self.dx_factor * self.scale)[:, None]).to(device)
        self.g, self.inverse = memory[:, :V].cpu().double(), self.dx_factor / (alpha * self.scale)
        self.x, self.weight = x.double(), weight.double()
        self.beside = one_hot((target - first) % V, V) * (target < first + V)[:, None] * residual[:, None]
        # What each filter takes away.
        p = self.g * self.inverse[:, None]
        self.removed = [self.g - filtered(self.g, p, eps)[0] for eps in FILTERS]

        rows = [t.float().to(device) for t in (self.dx_factor, self.dw_factor, torch.tensor(self.scale))]
        factors = RowFactors(*rows, target.to(device), residual.float().to(device))
        self.given = x.to(device), factors, first
        self.sketch = triton_filter.sketch_of(weight.to(device))
        self.scanned = scan_tiles(memory[:, :V], self.inverse.float().to(device), sketch=self.sketch)

    def of_hidden(self, g: torch.Tensor, beside: torch.Tensor | float = 0.0) -> torch.Tensor:
        """``g`` as it counts for dX, ``beside``: the targets."""
        return g * (self.dx_factor / self.scale)[:, None] + beside

    def of_weight(self, g: torch.Tensor) -> torch.Tensor:
        return g * (self.dw_factor / self.scale)[:, None]


@pytest.mark.parametrize(
    ("kind", "dtype", "placed"),
    [("first", "bf16", False), ("first", "fp16", True), ("mixed", "bf16", True), ("even", "bf16", False)],
)
def test_estimates_are_near_the_errors_of_the_definition(kind, dtype, placed, device):
    t = Slice(kind, dtype, placed, device)
    # What all rows of the weight have in common is not counted.
    dx, dw = t.of_hidden(t.g, t.beside) @ (t.weight - t.weight.mean(0)), t.of_weight(t.g).T @ t.x
    limit = LIMIT * dw.norm().item()
    allowance = allowance_of(device, LIMIT, limit * t.scale)
    sampled = triton_filter.sampled_errors(*t.given, t.scanned, t.sketch)
    eps, errors = triton_filter.estimated(sampled, allowance, step=1, hidden_size=1 << 20)
    true = [
        ((t.of_hidden(r) @ t.weight).norm() / dx.norm(), LIMIT * (t.of_weight(r).T @ t.x).norm() / limit)
        for r in t.removed
    ]
    assert max(true[0]) > LIMIT / 8
    errors[1] *= LIMIT
    for level, (found, expected) in enumerate(zip(errors.T.tolist(), true)):
        for a, b in zip(found, expected):
            # What is rounded on the way has norms of that order.
            assert b / 2 - 2**-13 <= a <= 2 * b + 2**-13, (level, a, b)
    passing = [eps for eps, found in zip(FILTERS, errors.T.tolist()) if max(found) <= LIMIT]
    assert eps.item() == (passing or [0.0])[0]


@pytest.mark.parametrize(
    ("kind", "dtype", "rtol"), [("mixed", "fp32", 4e-3), ("mixed", "fp16", 4e-2), ("steps", "fp32", 4e-3)]
)
def test_sketched_products_are_those_of_the_definition(kind, dtype, rtol, device):
    """The signs of the sketch being given, nothing is left to chance. Rounding is relative to G's product, and R's is
    smaller."""
    t = Slice(kind, dtype, True, device)
    norms, signed, skipped = level_products(t.scanned, t.sketch, *t.given[1:])
    sketch = t.sketch.cpu().double().T
    for level, r in enumerate([*t.removed, t.g]):
        beside = t.beside if level == LEVELS else 0.0
        hidden = t.scale * (t.of_hidden(r, beside) @ sketch[:, :4]).norm()
        assert abs(norms[:, level].norm().item() - hidden) <= rtol * hidden, level
        if level == LEVELS:
            continue
        count = (t.scanned.largest <= FILTERS[level]).sum()
        assert skipped[:, level].sum() == count and (kind != "steps" or count == 15 - 2 * level), level
        expected = t.scale * (t.of_weight(r) @ sketch[:, 4:])
        first, second, both = signed.view(3, -1, N)[:, 4 * level : 4 * level + 4]
        # The GPU's operands are TF32, rounded to 2^-11; in steps the terms are 16 times their sum.
        rounded = 2**-11 * t.scale * (t.of_weight(r).abs() @ sketch[:, 4:].abs()).norm().item()
        assert_close(both.T, expected, rtol, rounded if device == "cuda" else 0.0, level)
        # Of every other row block each.
        assert torch.equal(first + second, both) and not first[:, TILE:].any() and not second[:, :TILE].any()


def test_after_a_final_choice_nothing_is_estimated(device):
    t = Slice("mixed", "bf16", True, device)
    masses, sums, sketched = (torch.full_like(part, torch.nan) for part in t.scanned[1:])
    unread = t.scanned._replace(masses=masses, column_sums=sums, sketched=sketched)
    for chosen, read in ((0.0, False), (FILTERS[0], True)):
        only_if = torch.tensor([chosen], device=device)
        norms, _, skipped = level_products(unread, t.sketch, *t.given[1:], only_if=only_if)
        assert norms[:, : LEVELS + 1].isnan().any().item() == skipped.any().item() == read


def test_the_choice_is_that_of_the_definition(choices, device):
    """Beyond rounding, the gradients differ from the exact ones by what the filter may add."""
    x, weight, target = draw("first", device=device)
    found, (estimates,) = gradients(x, weight, target, gradient_filter="auto"), choices
    eps = estimates.eps.item()
    assert 0 < eps < FILTERS[0]
    exact = gradients(x, weight, target)
    same = gradients(x, weight, target, gradient_filter=eps)
    for a, b, c in zip(found, exact, same):
        assert torch.equal(a, c)
        assert not torch.equal(a, b)
        assert relative_error(a, b) <= 2 * LIMIT + 2**-9


def test_gradients_are_exact_where_every_filter_would_add_too_much(choices, device):
    t = draw("even", device=device)
    found, (estimates,) = gradients(*t, gradient_filter="auto"), choices
    assert estimates.eps.item() == 0.0
    for a, b, c in zip(found, gradients(*t), gradients(*t, gradient_filter=FILTERS[-1])):
        assert_close(a, b.double(), 6e-3)
        assert relative_error(c, b) > 2 * LIMIT


@pytest.mark.parametrize("upstream", [2.0**-40, -(2.0**20)])
def test_the_choice_does_not_depend_on_the_scale_of_the_loss(upstream, choices, device):
    t = draw("first", 40, 300, device=device)
    for factor in (1.0, upstream):
        gradients(*t, factor, gradient_filter="auto", reduction="none")
    once, scaled = choices
    assert once.eps.item() == scaled.eps.item() > 0
    torch.testing.assert_close(once.errors, scaled.errors, rtol=1e-2, atol=1e-5)


def test_equal_calls_give_equal_bits_and_draw_no_random_numbers(choices, device):
    """The third call of a signature and later ones are replayed."""
    t, state = draw("first", 40, 300, device=device), torch.random.get_rng_state()
    first, *others = (gradients(*t, gradient_filter="auto", reduction="sum") for _ in range(4))
    assert torch.equal(torch.random.get_rng_state(), state)
    for other in others:
        assert all(map(torch.equal, first, other))


def test_slices_share_what_may_be_added(choices, device):
    """A slice takes a filter that it could not take alone; all of them keep the promise."""
    t = draw("mixed", device=device)
    with shrunk(40_000), arguments_to(triton_filter, "choose_level") as asked:
        found = gradients(*t, gradient_filter="auto", logits_budget=70_000, reduction="none")
        exact = gradients(*t, logits_budget=70_000, reduction="none")
    taken = [(FILTERS.index(eps.item()), errors) for eps, errors in choices if eps.item()]
    assert len(choices) > 1 and max(errors[:, level].max().item() for level, errors in taken) > LIMIT
    for a, b in zip(found, exact):
        assert relative_error(a, b) <= 2 * LIMIT + 2**-9
    # Those of as many entries each have the same part of what is allowed.
    count = len(asked)
    assert [given[1].share for given in asked] == pytest.approx([1 / (count - k) for k in range(count)], rel=0.3)


@pytest.mark.parametrize("where", ["hidden", "target"])
def test_nan_reaches_what_it_would_reach_without_a_filter(where, choices, device):
    x, weight, target = draw("first", 40, 300, device=device)
    with torch.no_grad():
        if where == "hidden":
            x[5] = torch.nan
        else:
            target[5] = 10_000
    found, exact = (gradients(x, weight, target, gradient_filter=f, reduction="none") for f in ("auto", None))
    assert choices[0].eps.item() == 0.0
    for a, b in zip(found, exact):
        assert torch.equal(a.isnan(), b.isnan()) and b.isnan().any()
        assert_close(a.nan_to_num(), b.nan_to_num().double(), 6e-3)


def chosen(device, hidden, weight, whole: float = 1.0, allowance=None, second=None, both=None, **options) -> float:
    """``hidden``: the errors of dX, or rows of such, which are those of some tokens each, relative to dX. ``weight``:
    those of dW. With a ``step`` these are of the first half of the sample, ``second`` (None: as large) of the second
    one, and the two are orthogonal, unless ``both`` gives the norms of their sums. All are multiplied by ``whole``."""
    hidden, first = (torch.tensor(errors, device=device) for errors in (hidden, weight))
    rows = torch.full((hidden[..., 0].numel(), 16), torch.nan, device=device)
    rows[:, :LEVELS], rows[:, LEVELS] = hidden, len(rows) ** -0.5
    skipped = torch.tensor([[4.0 - level / 2 for level in range(LEVELS)]] * 3, device=device)
    allowance = allowance_of(device, 0.25, 0.25 * whole) if allowance is None else allowance
    second = first if second is None else torch.tensor(second, device=device)
    if both is None:
        both = torch.hypot(first, second) if options.get("step", 1) > 1 else first
    else:
        both = torch.tensor(both, device=device)
    # Four columns of the sketch have four times the square.
    norms = torch.cat([first, second, both]) * (2 * whole)
    return choose_level(SampledErrors(rows * whole, norms, skipped, 12), allowance, **options)[0].item()


def test_the_largest_level_with_both_errors_within_the_limit_is_chosen(device):
    small = [0.1] * LEVELS
    assert chosen(device, small, small) == FILTERS[0]
    assert chosen(device, [0.5, 0.3, *small[2:]], [0.3, *small[1:]]) == FILTERS[2]
    assert chosen(device, [0.3, *small[1:]], [0.5, 0.3, 0.25, *small[3:]]) == FILTERS[2]
    # A level is taken if it passes, even if a smaller one does not.
    assert chosen(device, [0.5, 0.1, 0.5, *small[3:]], small) == FILTERS[1]
    assert chosen(device, [0.5] * 7 + [0.1], small) == FILTERS[7]
    nan = torch.nan
    assert chosen(device, [nan] * LEVELS, small) == chosen(device, small, [0.3] * LEVELS) == 0.0
    for whole in (0.0, 2.0**-60, 2.0**70, torch.inf, nan):
        assert chosen(device, small, small, whole) == 0.0


def test_a_filter_that_skips_few_tiles_is_not_chosen(device):
    """Of three blocks of entries the levels skip 12, 10.5, 9, ... tiles."""
    small = [0.1] * LEVELS
    passes_from_third = [0.5, 0.5, *small[2:]]
    assert chosen(device, small, passes_from_third, fewest=9.0) == FILTERS[2]
    allowance = allowance_of(device, 0.25)
    assert chosen(device, small, passes_from_third, fewest=9.1, allowance=allowance) == 0.0
    # It adds no error.
    torch.testing.assert_close(allowance.of_all[:, 1:].tolist(), [[0.0, 1.0], [0.0, 0.0]])


def test_a_choice_is_noted_once(device):
    small, large = [0.1] * LEVELS, [0.3] * LEVELS
    taken, exact = [[0.01, 1.0], [0.16, 0.0]], [[0.0, 1.0], [0.0, 0.0]]
    for first, second, noted in ((small, small, taken), (small, large, exact), (large, small, exact)):
        allowance = allowance_of(device, 0.25)
        found = chosen(device, first, small, allowance=allowance, tentative=True)
        assert found == (FILTERS[0] if first is small else 0.0)
        torch.testing.assert_close(allowance.of_all[:, 1:].tolist(), exact if found == 0 else [[0.0, 0.0]] * 2)
        only_if = torch.tensor([found], device=device)
        # Where it is final, what is known the second time means nothing.
        second = second if found else [torch.nan] * LEVELS
        found = chosen(device, second, second, allowance=allowance, only_if=only_if)
        assert found == (FILTERS[0] if noted is taken else 0.0)
        torch.testing.assert_close(allowance.of_all[:, 1:].tolist(), noted)


def test_errors_of_few_tokens_count_as_larger(device):
    """One of a hundred parts of a sample has all of the error: the standard error of the sum of squares is as large as
    the sum."""
    errors = [[0.0] * LEVELS] * 99 + [[0.2] * LEVELS]
    none = [0.0] * LEVELS
    assert chosen(device, errors, none) == FILTERS[0]
    assert chosen(device, errors, none, step=3) == 0.0
    assert chosen(device, [[0.24 / 10] * LEVELS] * 100, none, step=3) == FILTERS[0]
    # The root of 3 times as large.
    assert chosen(device, [[e * 0.7 for e in row] for row in errors], none, step=3) == FILTERS[0]
    assert chosen(device, [[e * 0.74 for e in row] for row in errors], none, step=3) == 0.0
    # Norms of which fp32 does not hold the squares.
    for whole in (2.0**-49, 2.0**57):
        assert chosen(device, [[0.01] * LEVELS] * 100, none, whole, step=3) == FILTERS[0]


@pytest.mark.parametrize("whole", [1.0, 2.0**-48, 2.0**56])
def test_what_tokens_have_in_common_grows_faster(whole, device):
    """Of four times as many tokens it is four times as large. What they do not have in common is twice as large."""
    none = [0.0] * LEVELS

    def passes(error: float, together: float, second: float | None = None) -> bool:
        given = dict(both=[together] * LEVELS, second=None if second is None else [second] * LEVELS)
        return chosen(device, none, [error] * LEVELS, whole, step=4, **given) == FILTERS[0]

    root = 2**0.5
    # Nothing in common.
    assert passes(0.085, 0.085 * root) and not passes(0.09, 0.09 * root)
    # All in common.
    assert passes(0.03, 0.06) and not passes(0.032, 0.064)
    # The halves take from each other: that may be chance. What is left grows as if it were their own.
    assert passes(0.06, 0.0) and not passes(0.065, 0.0)
    assert passes(0.12, 0.12, 0.0) and not passes(0.13, 0.13, 0.0)
    # Without other tokens nothing is estimated.
    assert chosen(device, none, [0.24] * LEVELS, whole) == FILTERS[0]
    assert chosen(device, none, [0.26] * LEVELS, whole) == 0.0


def test_dx_is_taken_smaller_where_few_tokens_have_most_of_it(device):
    def choice(last: float) -> float:
        rows = torch.full((100, 16), 0.02, device=device)
        rows[:, LEVELS] = 0.1
        rows[-1, LEVELS] = last
        sampled = SampledErrors(rows, rows.new_zeros(3 * LEVELS), rows.new_ones(1, LEVELS), 1)
        return choose_level(sampled, allowance_of(device, 0.25), step=3)[0].item()

    assert choice(0.1) == FILTERS[0] and choice(10.0) == 0.0


def test_a_slice_may_add_what_those_before_it_have_left(device):
    small, halves = [0.0] * LEVELS, [0.5**level for level in range(LEVELS)]
    allowance = allowance_of(device, 0.25)

    def choice(hidden, weight, share: float = 1.0, noted: bool = False, whole: float = 1.0) -> float:
        of_all = allowance.of_all if noted else allowance.of_all.clone()
        return chosen(device, hidden, weight, whole, Allowance(of_all, share))

    assert choice(small, small, noted=True) == FILTERS[0]
    assert allowance.of_all[:, 1:].tolist() == [[0.0, 1.0], [0.0, 0.0]]
    # dX has the norm of the root of 2.
    assert choice([0.35, *small[1:]], small) == FILTERS[0]
    assert choice([0.36, *small[1:]], small) == FILTERS[1]
    assert choice(small, [0.24, *small[1:]]) == FILTERS[0]
    assert choice(small, [0.26, *small[1:]]) == FILTERS[1]
    # A quarter of dW's squares.
    assert choice([0.35, *small[1:]], small, share=0.25) == FILTERS[0]
    assert choice(small, [0.12, *small[1:]], share=0.25) == FILTERS[0]
    assert choice(small, [0.13, *small[1:]], share=0.25) == FILTERS[1]
    assert choice(halves, [e / 4 for e in halves], share=0.25, noted=True) == FILTERS[2]
    torch.testing.assert_close(allowance.of_all[:, 1:].tolist(), [[1 / 16, 2.0], [1 / 16, 0.0]])
    # (1 + 1 + 1) / 16 - 1 / 16 is left of dX, and 15 / 16 of 1 / 16 of dW.
    assert choice([0.36, 0.35, *small[2:]], small) == FILTERS[1]
    assert choice(small, [0.245, 0.24, *small[2:]]) == FILTERS[1]
    # A slice that is formed exactly adds no error, and raises what dX allows.
    assert choice([1.0] * LEVELS, small, noted=True) == 0.0
    torch.testing.assert_close(allowance.of_all[:, 1:].tolist(), [[1 / 16, 3.0], [1 / 16, 0.0]])
    assert choice(small, small, noted=True, whole=torch.inf) == 0.0
    torch.testing.assert_close(allowance.of_all[:, 1:].tolist(), [[1 / 16, 3.0], [1 / 16, 0.0]])


def test_slices_are_chosen_for_together(device):
    def one(error: float) -> SampledErrors:
        rows = torch.full((2, 16), error, device=device)
        return SampledErrors(rows, rows.new_full((3 * LEVELS,), error), rows.new_ones(1, LEVELS), 5)

    both = SampledErrors.of_slices([one(3.0), one(4.0)])
    assert both.hidden_norms.tolist() == [[5.0] * 16] * 2
    assert both.weight_norms.tolist() == [5.0] * 3 * LEVELS
    assert both.skipped.tolist() == [[1.0] * LEVELS] * 2 and both.tiles == 10


def test_limits_are_of_each_product(device):
    allowance, tenth = allowance_of(device, 0.25, 0.05), [0.1] * LEVELS
    assert chosen(device, tenth, [0.1, 0.04, *tenth[2:]], allowance=allowance) == FILTERS[1]
    for nothing in (0.0, torch.nan):
        allowance.of_all[1, 0] = nothing
        assert chosen(device, tenth, [0.01] * LEVELS, allowance=allowance) == 0.0


@pytest.mark.parametrize("size", [1.0, 2.0**-70, 2.0**70])
def test_dw_may_be_off_by_what_an_error_of_the_logits_would_add(size, device):
    N, V = 1500, 50
    logits, norms = normal(N, V).float(), normal(N).abs().float() * size
    target, inverse = torch.arange(N) % V, 1 / (0.5 + normal(N, seed=1).abs().float())
    inverse[::3] = torch.finfo(torch.float32).max
    maximum = logits.amax(1)
    partial = torch.stack([maximum, (logits - maximum[:, None]).exp().sum(1), logits[torch.arange(N), target]])
    # What does not count is not read, and a target outside of the vocabulary has no logit.
    partial[:, ::3] = norms[::3] = torch.nan
    partial[2, 1::30] = 0.0
    counted = (torch.arange(N) % 3 > 0) & (partial[2] != 0)
    p = logits.double().softmax(1)[torch.arange(N), target]
    root = ((norms / inverse).double().square() * p * (1 - p))[counted].sum().sqrt().item()

    def limits(partial=partial, inverse=inverse, norms=norms, ranks=1):
        given = (t.contiguous().to(device) for t in (partial, inverse, norms))
        found = error_allowance(*given, ranks, sample_blocks(N, 1))
        assert found[:, 1:].count_nonzero() == 0
        return found[:, 0].tolist()

    assert limits() == [LIMIT, pytest.approx(root * 2**-7.5, rel=1e-4)]
    assert limits(ranks=4) == [LIMIT, pytest.approx(root * 2**-8.5, rel=1e-4)]
    certain = partial.clone()
    certain[2] = certain[0] + certain[1].log()
    assert limits(certain)[1] < 1e-2 * root * 2**-7.5
    for wrong in (torch.nan, torch.inf):
        others = [t.clone() for t in (partial, inverse, norms)]
        others[0][2, 5], others[1][4], others[2][5] = torch.nan, 0.0, wrong
        assert limits(others[0]) == [LIMIT, 0.0]
        assert limits(inverse=others[1]) == limits(norms=others[2]) == [0.0, 0.0]


@pytest.mark.parametrize("height", [GROUP, TILE])
def test_a_sample_must_stand_for_all_tokens(height, device):
    """What is seen of it alone may be added to dW; and nothing, where most of the gradient is not seen."""
    N, p = 1600, 0.25
    sample, ones = sample_blocks(N, 3, height), torch.ones(N, device=device)
    assert sample.step == 3
    is_sampled = torch.zeros(N, dtype=torch.bool, device=device)
    is_sampled[sample.of(torch.arange(N, device=device))] = True
    partial = torch.stack([ones, ones / p, ones])

    def limits(of_sample, of_others):
        norms = torch.where(is_sampled, ones * of_sample, ones * of_others)
        return error_allowance(partial, ones, norms, 1, sample)[:, 0].tolist()

    of_all, seen = ((size * p * (1 - p)) ** 0.5 * 2**-7.5 for size in (N, 3 * sum(is_sampled.tolist())))
    assert limits(1.0, 1.0) == [LIMIT, pytest.approx(min(of_all, seen), rel=1e-5)]
    assert limits(0.9, 1.0) == [LIMIT, pytest.approx(0.9 * seen, rel=1e-5)]
    assert limits(1.0, 0.5)[1] < 0.75 * of_all
    assert limits(1.0, 2.0) == limits(0.0, 1.0) == [0.0, 0.0]


def test_heavy_tokens_that_are_not_sampled_have_exact_gradients(choices, device, monkeypatch):
    """Few tokens have most of the weight."""
    monkeypatch.setattr(tile_scan, "FEWEST_SAMPLED", 1)
    N = 512
    x, weight, target = draw("mixed", N, 500, device=device)
    sample = triton_filter.sample_of(N, True)
    assert sample.step == 3 and sample.first == 1
    filters = []
    for heavy in (1.0, 100.0):
        token_weight = torch.ones(N, device=device)
        token_weight[: sample.height] = heavy
        options = dict(token_weight=token_weight, logits_budget=1 << 30)
        found = gradients(x, weight, target, gradient_filter="auto", **options)
        filters.append(choices[-1].eps.item())
        exact = gradients(x, weight, target, **options)
    assert filters[0] > 0.0 and filters[1] == 0.0
    for a, b in zip(found, exact):
        assert_close(a, b.double(), 2e-3)


@pytest.mark.parametrize("saves", [True, False])
def test_the_backward_asks_for_what_the_loss_may_add(saves, choices, device):
    """With an upstream gradient that masks tokens, a scale, and ids that are ignored."""
    x, weight, target = draw("first", 150, 500, device=device)
    mask = torch.arange(150, device=device) % 4 < 2
    target = torch.arange(150, device=device)
    target[6] = -100
    z = 0.5 * x.double() @ weight.double().T
    p = z.softmax(1).gather(1, target.clamp_min(0)[:, None])[:, 0]
    squares = (0.5 * 3.0 * x.double().norm(dim=1)).square() * p * (1 - p)
    expected = squares[mask & (target >= 0)].sum().sqrt().item() * 2**-7.5
    allowed, asking = results_of(triton_slices, "error_allowance"), arguments_to(triton_filter, "choose_level")
    with allowed as allowances, asking as asked:
        options = dict(logit_scale=0.5, gradient_filter="auto", logits_budget=1 << 30 if saves else 0)
        loss = linear_cross_entropy(x, weight, target, reduction="none", **options)
        torch.autograd.grad((3.0 * loss * mask).sum(), (x, weight))
    assert allowances[0][:, 0].tolist() == [LIMIT, pytest.approx(expected, rel=2e-2)]
    assert all(given[1].of_all is allowances[0] for given in asked) and len(asked) == len(choices)


def _limits_on(member: Member) -> list[float]:
    x, weight, target = draw("first", 64, 400, device=member.device)
    rows = 400 // member.ranks
    weight = weight.detach()[member.rank * rows : (member.rank + 1) * rows].requires_grad_()
    prepare.KNOWN.clear()
    with results_of(triton_slices, "error_allowance") as allowances:
        gradients(x, weight, target.clamp(min=0), gradient_filter="auto", process_group=member.group)
    return allowances[0][:, 0].tolist()


@pytest.mark.thinned
def test_ranks_share_what_may_be_added_to_dw(device, worlds):
    with chosen_backend("triton"):
        (alone,), limits = everywhere(worlds, device, 1, _limits_on), everywhere(worlds, device, 2, _limits_on)
    assert limits == [[LIMIT, pytest.approx(alone[1] / 2**0.5, rel=1e-3)]] * 2


def test_without_targets_gradients_are_exact(choices, device):
    """Nothing tells then what may be added to dW."""
    x, weight, target = draw("first", device=device)
    found = (token_statistics(x, weight, target.clamp_min(0), gradient_filter=f).lse for f in ("auto", None))
    a, b = (torch.autograd.grad(lse.sum(), (x, weight)) for lse in found)
    assert not choices and all(map(torch.equal, a, b))


@pytest.mark.parametrize("saves", [True, pytest.param(False, marks=pytest.mark.slow)])
def test_a_sample_stands_for_all_and_a_filter_must_pay(saves, choices, device, monkeypatch):
    """Each fifth of the groups of 16 tokens is looked at, or of the row blocks where nothing is known of windows."""
    monkeypatch.setattr(triton_filter, "HIDDEN_PER_SCAN", 4)
    x, weight, target = draw("first", 20 * TILE, 300, device=device)
    bias = torch.zeros(300, dtype=x.dtype, device=device, requires_grad=not saves)
    asked = []

    def noted(*given, **stage):
        result = choose_level(*given, **stage)
        asked.append((*given, stage, result[0]))
        return result

    monkeypatch.setattr(triton_filter, "choose_level", noted)
    with shrunk(1 << 30):
        loss = linear_cross_entropy(
            x, weight, target, linear_bias=bias, gradient_filter="auto", logits_budget=1 << 30 if saves else 0
        )
        loss.backward()
    *before, (_, _, _, _, last, _) = asked
    assert not last.get("tentative") and len(before) == saves
    for *_, stage, tentative in before:
        # With windows there is a choice by their bounds before.
        assert stage == {"tentative": True, "only_if": None} and last["only_if"] is tentative
    for _, _, step, fewest, _, _ in asked:
        # 4 of 16 hidden elements; three tiles each.
        assert step == 5 and fewest == (32 if saves else 4) * 3 * 4 / 16


def test_of_a_limit_on_the_device_the_same_tiles_are_active(device):
    gradient = normal(300, 384).to(torch.bfloat16).to(device)
    ones = torch.ones(300, device=device)
    number, tensor = (find_active_tiles(gradient, ones, eps) for eps in (4.0, ones[:1] * 4.0))
    counts = number.listed.of_rows.counts
    assert 0 < counts.sum() < 9 and torch.equal(counts, tensor.listed.of_rows.counts)
    assert torch.equal(number.masses, tensor.masses) and torch.equal(number.of_hidden, tensor.of_hidden)


@pytest.mark.parametrize(("row_blocks", "tiles"), [(1, 1), (3, 129), (17, 300)])
@pytest.mark.parametrize("eps", [0.25, 0.0])
def test_lists_have_what_is_active_and_the_masses_of_what_is_skipped(row_blocks, tiles, eps, device):
    largest = normal(row_blocks, tiles).abs().float()
    largest[:, ::5], largest[0, : tiles // 2] = 0.0, torch.inf
    if row_blocks > 1:
        largest[1] = torch.inf
    is_active = largest > eps
    skipped = torch.nn.functional.pad(~is_active & (eps > 0), (0, -tiles % TILE)).view(row_blocks, -1, TILE).any(2)
    for limit in (eps, torch.tensor([eps], device=device)):
        listed = list_tiles(largest.to(device), limit)
        for lists, expected in zip(listed, (is_active, is_active.T, skipped, skipped.T), strict=True):
            assert lists.numbers.shape == expected.shape and lists.numbers.data_ptr() % 16 == 0
            assert lists.counts.data_ptr() % 16 == 0
            for numbers, count, row in zip(lists.numbers.tolist(), lists.counts.tolist(), expected, strict=True):
                assert numbers[:count] == row.nonzero().squeeze(1).tolist()


def test_shares_are_of_the_sums_of_skipped_tiles(device):
    """Or others, of the blocks of entries that have none and where there is a filter."""
    sums, otherwise = normal(3, 4 * TILE).abs().float(), normal(4 * TILE, seed=1).float()
    largest = torch.tensor([[0.1, 0.1, 0.9, 0.1], [0.9, 0.1, 0.9, 0.1], [0.2, 0.9, 0.9, 0.1]])
    sums[:, 3 * TILE :], sums[1, 0] = 0.0, torch.nan
    given = largest.to(device), sums.to(device)
    first, second = sums[[0, 2], :TILE].sum(0), sums[:2, TILE : 2 * TILE].sum(0)
    for others in (otherwise, torch.zeros_like(otherwise)):
        expected = torch.cat([first / first.sum(), second / second.sum(), others[2 * TILE :]])
        for eps in (0.5, torch.tensor([0.5], device=device)):
            found = entry_shares(*given, eps, otherwise.to(device) if others is otherwise else None)
            torch.testing.assert_close(found.cpu(), expected)
    assert not entry_shares(*given, torch.zeros(1, device=device), otherwise.to(device)).any()


def test_the_limits_of_rows(device):
    alpha, factor, scales, dx = (normal(5, seed=s).float().to(device) for s in range(4))
    alpha[1], dx[2], alpha[3], dx[3] = 0.0, 0.0, 0.0, 0.0
    fp16 = torch.tensor(8.0, device=device)
    found = inverse_limits(alpha, -0.5, (factor, scales, fp16), dx)
    expected = dx.double().abs() / (0.5 * alpha * factor * scales * fp16).double().abs()
    expected[1], expected[3] = torch.finfo(torch.float32).max, 0.0
    assert_close(found, expected, 1e-6)
    ones = torch.ones(5, device=device)
    for one in (torch.tensor(2.0, device=device), torch.tensor([2.0], device=device).expand(5)):
        assert inverse_limits(ones, 0.25, (one, None, None), None).tolist() == [2.0] * 5


def test_a_tile_with_nan_is_active_at_every_limit(device):
    gradient = torch.zeros(300, 384, dtype=torch.bfloat16, device=device)
    gradient[130, 300] = torch.nan
    scanned = scan_tiles(gradient, torch.ones(300, device=device))
    assert scanned.largest[1, 2] == torch.inf and scanned.largest.count_nonzero() == 1


def test_signs_are_balanced_and_independent(device):
    found = signs(torch.empty(4, 5000, dtype=torch.bfloat16, device=device), seed=0).cpu().float()
    assert set(found.unique().tolist()) == {-1.0, 1.0}
    other = signs(torch.empty(4, 5000, dtype=torch.bfloat16, device=device), seed=1).cpu().float()
    both = torch.cat([found, other])
    # Standard deviation: 1 / sqrt(5000), 0.014.
    assert ((both @ both.T) / 5000 - torch.eye(8)).abs().max() < 0.05
    assert both.mean(1).abs().max() < 0.05
    assert (both[:, 1:] * both[:, :-1]).mean(1).abs().max() < 0.05


def test_what_all_rows_of_the_weight_have_in_common_is_not_in_the_sketch(device):
    """In a slice it would make dX look large, where the parts of the slices cancel."""
    weight, mean = (5.0 + normal(300, 64)).bfloat16().to(device), normal(64).bfloat16().to(device)
    of_hidden = signs(torch.empty(4, 64, dtype=torch.bfloat16, device=device), seed=0)
    expected = of_hidden.double() @ (weight.double() - weight.double().mean(0)).T
    sketch, longer = triton_filter.sketch_of(weight), triton_filter.sketch_of(weight, mean)
    assert_close(sketch[:4], expected, 1e-4)
    assert set(sketch[4:].unique().tolist()) == {-1.0, 1.0}
    assert_close(longer[0], mean.double() @ weight.double().T, 1e-4)
    assert_close(longer[1:], sketch.double(), 1e-4)


@pytest.mark.parametrize("gradient_filter", [2**-8, "auto"])
def test_auto_reads_hidden_states_before_dx(gradient_filter, device):
    """They may arrive later else, if all exponentials are saved."""
    x, weight, target = (t.detach() for t in draw("first", 40, 70, device=device))
    ones, partial = torch.ones(40, device=device), torch.ones(3, 40, device=device)
    saved = tuple(backend.BlockForward(Projection(weight, None, 0, 70), x, target, Columns(), 70).project_rest())
    coefficients, grads = Coefficients(ones, ones, None), GradBuffers(torch.empty_like(x), None, None)
    work = backend.BlockBackward(
        Projection(weight, None, 0, 70),
        x,
        target,
        partial,
        coefficients,
        saved,
        grads,
        Scratch(0, device),
        None,
        gradient_filter,
    )
    assert work.reads_hidden_first == (gradient_filter == "auto")


def test_the_torch_backend_is_exact(device):
    t = draw("first", 40, 300, device=device)
    with chosen_backend("torch"):
        for a, b in zip(gradients(*t, gradient_filter="auto"), gradients(*t)):
            assert torch.equal(a, b)


def test_statistics_and_the_module_take_it(choices, device):
    x, weight, target = draw("first", 40, 300, device=device)
    target.clamp_(min=0)
    module = copy.copy(LinearCrossEntropy(gradient_filter="auto", reduction="sum"))
    assert "gradient_filter='auto'" in repr(module)
    of_loss = torch.autograd.grad(module(x, weight, target), (x, weight))
    found = token_statistics(x, weight, target, gradient_filter="auto")
    of_statistics = torch.autograd.grad(-found.target_log_prob.sum(), (x, weight))
    assert len(choices) == 2
    for a, b in zip(of_statistics, of_loss):
        assert_close(a, b.double(), 1e-2)


@pytest.mark.parametrize("name", ["label_smoothing", "expected_logit"])
def test_other_gradients_are_refused(name):
    x, weight, target = draw("first", 4, 8)
    function, value = (linear_cross_entropy, 0.1) if name == "label_smoothing" else (token_statistics, True)
    with pytest.raises(ValueError, match=f"gradient_filter=auto cannot be combined with {name}"):
        function(x, weight, target, gradient_filter="auto", **{name: value})


@pytest.mark.slow
def test_graphs_take_it(choices, device):
    t = draw("first", 40, 300, device=device)
    expected = gradients(*t, gradient_filter="auto")
    compiled = torch.compile(
        lambda *t: linear_cross_entropy(*t, gradient_filter="auto"), fullgraph=True, backend="aot_eager"
    )
    found = torch.autograd.grad(compiled(*t), t[:2])
    first, second = choices
    assert first.eps.item() == second.eps.item() > 0
    for a, b in zip(found, expected):
        assert_close(a, b.double(), 1e-6)


@pytest.mark.parametrize("value", [None, 2**-9, "auto"])
def test_operators_are_told_of_it(value):
    arguments = arguments_of(*draw("even", 4, 8), gradient_filter=value)
    prepared = prepare.prepare(arguments, Columns(), function="a test")
    operands, numbers = operands_of(prepared.call, prepared.inputs), numbers_of(prepared.call)
    assert call_of(operands, numbers).gradient_filter == value
