"""The fuzz program: its configurations hold in both backends."""

import functools
from dataclasses import replace
from itertools import count, islice, product

import pytest
import torch

from fuzz import program
from fuzz.draw import Configuration
from fuzz.run import execute
from tools import DIFFERENTIABLE, alone, everywhere

SETTINGS = program.Settings(seed=7, backend="torch", device="cpu")


_draw = functools.cache(program.Settings.draw)  # most tests look through the same ones


def _run(c):
    return [execute(alone(), c, "torch")]


def _drawn(wanted, ranks=1, settings=SETTINGS):
    """Indices and configurations that are wanted."""
    drawn = ((index, _draw(settings, ranks, index)) for index in count())
    return ((index, c) for index, c in drawn if wanted(c))


@pytest.fixture
def of(request):
    """``of(all, few)``: what a test draws with ``--all``, and without."""
    return lambda all, few: all if request.config.option.all else few


def _cheap(c) -> bool:
    """Of few entries, from which the truth is computed, and of few tiles; logits have a weight ``[V, V]``."""
    tiles = 1 if c.tile is None else -(-c.N // c.tile[0]) * -(-c.V // c.tile[1])
    most = 50_000 if c.kind == "divergence" else 100_000  # of two layers
    return c.V * max(c.N, c.V if c.kind == "logits" else c.D) <= most and tiles <= 24


def _hold(of, number, fewer, wanted, run, ranks=1, settings=SETTINGS) -> None:
    fits = of(wanted, lambda c: wanted(c) and _cheap(c))
    for index, c in islice(_drawn(fits, ranks, settings), of(number, fewer)):
        finding = program.examine(c, run)
        assert not finding, f"{settings.command(ranks, index)}\n{finding}"


WANTED = {
    "any": lambda c: True,
    # Entries that -inf or a finite number excludes, windows of them.
    "masked": lambda c: c.excluded and c.N > 1,
    # Tokens that are sure of an entry: 1 - p must keep its digits.
    "sure": lambda c: c.sure and c.dtype in ("bf16", "fp16"),
    "twice": lambda c: c.walk.startswith("twice") and c.mode == "train",
    "edge": lambda c: c.edge,
    "batch first": lambda c: c.sequence_dim == 1,
    # Several windows, whose partials are merged, of which one is smaller.
    "windows": lambda c: c.tile is not None and c.V > 2 * c.tile[1] and c.V % c.tile[1],
}


@pytest.mark.parametrize(
    ("kind", "wanted"),
    [(kind, "any") for kind in ("loss", "statistics", "logits", "selected", "divergence")]
    + [("loss", "windows"), ("statistics", "windows"), pytest.param("divergence", "windows", marks=pytest.mark.slow)]
    + [("loss", "masked"), ("statistics", "sure")],
)
def test_configurations_of_one_process_hold(kind, wanted, of):
    _hold(of, 24, 6, lambda c: c.kind == kind and WANTED[wanted](c), _run)


@pytest.mark.parametrize("edge", ["cap", "flat", "mean", "window", "nan", "cold", "close"])
def test_configurations_at_an_edge_hold(edge, backend, device, of):
    """A saturated soft-cap, nearly equal logits, NaN beside infinity, infinite temperatures, equal teachers."""
    settings = program.Settings(seed=13, backend=backend, device=device)
    _hold(of, 6, 2, lambda c: c.edge == edge, lambda c: [execute(alone(device), c, backend)], 1, settings)


@pytest.mark.parametrize(
    ("wanted", "ranks", "number", "fewer"),
    [("any", 2, 30, 6), ("any", 3, 30, 6), ("batch first", 2, 20, 3), ("edge", 2, 6, 2)],
)
def test_configurations_over_ranks_hold(wanted, ranks, number, fewer, worlds, of):
    run = lambda c: worlds(ranks).run(execute, c, "torch", timeout=60)  # noqa: E731
    _hold(of, number, fewer, WANTED[wanted], run, ranks)


@pytest.mark.parametrize(
    ("ranks", "number", "fewer"), [(1, 6, 3), (2, 3, 2), pytest.param(4, 2, 2, marks=pytest.mark.slow)]
)
@pytest.mark.parametrize(
    ("kind", "wanted"),
    [("logits", "any"), *product(("loss", "statistics", "selected", "divergence"), ("any", "masked", "sure", "twice"))],
)
@pytest.mark.thinned("kind", "wanted", "ranks")
def test_configurations_of_kernels_hold(wanted, kind, ranks, number, fewer, kernels, worlds, device, of):
    settings = program.Settings(seed=13, backend="triton", device=device)
    run = lambda c: everywhere(worlds, device, ranks, execute, c, "triton")  # noqa: E731
    _hold(of, number, fewer, lambda c: c.kind == kind and WANTED[wanted](c), run, ranks, settings)


STATISTICS = Configuration(
    "statistics",
    *(1, (40,), 24, 700, ((0, 700),), 1, "bf16"),
    asked=("argmax", "entropy", "mean_logit", "sum_p_squared"),
    mixture=(*DIFFERENTIABLE,),
    reduction="none",
    block_bytes=40_000,
)
# Every statistic, of several windows: saved, a part of it, not, and over ranks.
GIVEN = [
    STATISTICS,
    replace(STATISTICS, budget=40_000 + 300 * 40 * 2),
    replace(STATISTICS, dtype="fp16", budget=0, bias="masked"),
    replace(STATISTICS, ranks=2, shards=((0, 300), (300, 400)), starts_given=True),
]
LOSS = Configuration("loss", *(1, (40,), 32, 700, ((0, 700),), 12, "bf16"), reduction="none", block_bytes=40_000)
FAR_BELOW = replace(LOSS, bias="masked", offset=-120.0, tile=(16, 32))
NO_WEIGHT = replace(LOSS, token_weight="zero", reduction="mean")
GIVEN += [
    FAR_BELOW,
    replace(FAR_BELOW, dtype="fp16"),
    replace(FAR_BELOW, dtype="fp32", budget=0, reduction="mean", token_weight="positive"),
    # Upstream gradients of 1e-25, of which exp(-58) is 0 in fp32, and no targets, as on a rank that has none of them.
    replace(LOSS, kind="statistics", mixture=("lse",), no_target=True, upstream="tiny", bias="plain", offset=55.0),
    NO_WEIGHT,
    replace(NO_WEIGHT, budget=0),
    # A soft-cap, whose saved numbers are as exact as the cap of each token is.
    replace(LOSS, softcap=2.0, temperatures=True),
    replace(LOSS, kind="statistics", V=16, shards=((0, 16),), mixture=("target_logit",)),
    replace(LOSS, kind="selected", selected="ids", K=9, ids="outside", no_target=True),
    # A divergence whose tokens, of different factors, are worked on some at a time.
    replace(LOSS, kind="divergence", dtype="fp32", E=24, beta=0.5, tile=(4, 700), block_bytes=None),
    replace(LOSS, dtype="fp32", autocast="bf16", token_weight="positive", reduce_dtype="same"),
]


@pytest.mark.parametrize("c", GIVEN, ids=str)
def test_given_configurations_hold(c, backend, worlds, device):
    assert not program.examine(c, lambda c: everywhere(worlds, device, c.ranks, execute, c, backend))


def test_ranks_that_differ_and_results_that_are_off_are_found():
    _, c = next(_drawn(lambda c: c.kind == "loss" and 0 < c.N * c.V < 10**4, ranks=2))
    part = {"loss": torch.zeros(c.shape if c.reduction == "none" else (), dtype=torch.float32)}
    assert "bits: loss of rank 1 differs" in program.examine(c, lambda c: [part, {"loss": part["loss"] + 1}])
    assert "loss" in program.examine(c, lambda c: [part, part])
