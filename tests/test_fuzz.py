"""The fuzz program: its configurations hold in both backends, and planted faults are found."""

import functools
from itertools import count, islice, product

import pytest
import torch

from fuzz import program
from fuzz import run as fuzz_run
from fuzz.run import execute
from fuzz.values import make
from tools import alone, everywhere

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
        _, finding = program.examine(c, run)
        assert not finding, f"{settings.command(ranks, index)}\n{finding}"


WANTED = {
    "any": lambda c: True,
    # Entries that -inf or a finite number excludes, windows of them.
    "masked": lambda c: c.excluded and c.N > 1,
    # Tokens that are sure of an entry: 1 - p must keep its digits.
    "sure": lambda c: c.sure and c.dtype in ("bf16", "fp16"),
    "twice": lambda c: c.walk.startswith("twice") and c.mode == "train",
    "edge": lambda c: c.edge,
    # A sequence along the second dimension.
    "batch first": lambda c: c.sequence_dim == 1,
    # Several windows, whose partials are merged, of which one is smaller.
    "windows": lambda c: c.tile is not None and c.V > 2 * c.tile[1] and c.V % c.tile[1],
}


@pytest.mark.parametrize(
    ("kind", "wanted"),
    [(kind, "any") for kind in ("loss", "statistics", "logits", "selected", "divergence")]
    + [("loss", "windows"), ("statistics", "windows"), pytest.param("divergence", "windows", marks=pytest.mark.slow)],
)
def test_configurations_of_one_process_hold(kind, wanted, of):
    _hold(of, 24, 6, lambda c: c.kind == kind and WANTED[wanted](c), _run)


@pytest.mark.parametrize("edge", ["cap", "flat", "mean", "window", "nan", "cold", "close"])
def test_configurations_at_an_edge_hold(edge, backend, device, of):
    """A soft-cap that saturates, logits that are nearly equal, a NaN beside infinity, infinite temperatures, a teacher
    like the student."""
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
    """More of what few draws have."""
    settings = program.Settings(seed=13, backend="triton", device=device)
    run = lambda c: everywhere(worlds, device, ranks, execute, c, "triton")  # noqa: E731
    _hold(of, number, fewer, lambda c: c.kind == kind and WANTED[wanted](c), run, ranks, settings)


# --- planted faults --------------------------------------------------------------------------------


def _findings(monkeypatch, name: str, fault, number: int, **wanted):
    """Verdicts and finding of each of so many configurations with wanted attributes, where ``fault(c, value)`` moves
    what has this name, in place."""
    once, moved = fuzz_run._once, []

    def faulty(member, c):
        found = once(member, c)
        for each in {name, f"{name} again"} & {*found}:
            before = found[each].clone()
            fault(c, found[each])
            moved.append(not torch.equal(before.nan_to_num(), found[each].nan_to_num()))
        return found

    monkeypatch.setattr(fuzz_run, "_once", faulty)
    fits = _drawn(lambda c: all(getattr(c, name) in values for name, values in wanted.items()))
    for _, c in islice(fits, number):
        moved.clear()
        verdicts, finding = program.examine(c, _run)
        if any(moved):
            yield c, verdicts, finding


TRAINED = dict(mode=("train",), frozen=((),), autocast=("",))


@pytest.mark.parametrize("where", ["dinput", pytest.param("dweight", marks=pytest.mark.slow)])
def test_one_wrong_row_of_a_gradient_is_found(where, monkeypatch, of):
    """By 1 %. Roundings of low-precision gradients may be as large."""
    # Logits that are alike are rounded alike, and their gradient's terms cancel.
    wanted = dict(kind=("loss", "statistics", "divergence"), dtype=("fp64", "fp32"), offset=(0.0,), bias=("", "plain"))
    wanted |= dict(scale=(1.0, 0.5, -1.5), softcap=(None, 5.0, 30.0, 50.0), sharpness=(0.3, 1.0, 3.0, 10.0))
    wanted |= dict(upstream=("random", "ones"), edge=("", "cold", "close"))
    wanted |= dict(walk=("backward", "twice", "hooks"), **TRAINED)

    def largest_row_off(c, gradient):
        # Tokens without a loss have NaN.
        rows = gradient.reshape(len(gradient), -1).double().norm(dim=1).nan_to_num(0.0)
        gradient[int(rows.argmax())] *= 1.01

    said = []
    for _, verdicts, finding in _findings(monkeypatch, where, largest_row_off, of(16, 8), **wanted):
        assert not finding or where in finding
        # What is 0, lies beneath fp16's numbers or sums to nearly nothing has no percent.
        if max([v.truth for v in verdicts if v.name.removesuffix(" again") == where], default=0.0) >= 1e-3:
            said.append(where in finding)
    assert len(said) >= of(8, 4)
    assert sum(said) >= 0.95 * len(said), said


def test_exponentials_that_are_rounded_where_logits_are_nearly_equal_are_found(monkeypatch):
    """Roundings of p, of which a hundredth is the gradient. Row by row they are within what roundings may do."""

    def rounded(c, gradient):
        weight, x = (make(c).tensors[name].double() for name in ("weight", "input"))
        p = (x @ weight.t()).softmax(-1)
        gradient += make(c).upstream["entropy"].double()[..., None] * ((p.to(gradient.dtype) - p) @ weight)

    flat = dict(kind=("statistics",), edge=("flat",), mixture=(("entropy",),), sharpness=(0.02,), counted=("",))
    found = _findings(monkeypatch, "dinput", rounded, 3, walk=("backward",), **flat, **TRAINED)
    said = [finding for *_, finding in found]
    assert len(said) == 3 and all("dinput of all tokens" in each for each in said), said


def test_a_finding_is_printed_as_the_command_that_shows_it(capsys, monkeypatch):
    planted = SETTINGS.draw(1, 8)

    def run(self, c):
        if c == planted:
            raise ValueError("planted")
        return _run(c)

    monkeypatch.setattr(program.Ranks, "__call__", run)
    assert program.main("--first 7 --count 3 --ranks 1 --seed 7".split()) == 1
    first, last = capsys.readouterr().out.splitlines()
    assert first == f"{SETTINGS.command(1, 8)}  # ValueError: planted"
    assert last.endswith("configuration 9: 1 findings in 3")


def test_ranks_that_differ_and_results_that_are_off_are_found():
    _, c = next(_drawn(lambda c: c.kind == "loss" and 0 < c.N * c.V < 10**4, ranks=2))
    part = {"loss": torch.zeros(c.shape if c.reduction == "none" else (), dtype=torch.float32)}
    assert "bits: loss of rank 1 differs" in program.examine(c, lambda c: [part, {"loss": part["loss"] + 1}])[1]
    assert "loss" in program.examine(c, lambda c: [part, part])[1]
