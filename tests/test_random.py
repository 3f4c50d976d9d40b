"""Random configurations of the fuzz in the Triton backend, more of them of what few draws have. test_fuzz.py has those
in the torch backend."""

from __future__ import annotations

import itertools

import pytest

import fuzz
from fuzz_run import execute
from tools import everywhere

WANTED = {
    # Whatever is drawn.
    "any": lambda c: True,
    # Entries that -inf or a finite number excludes, windows of them.
    "masked": lambda c: {c.bias, c.teacher_bias} & {"masked", "low"} and c.N > 1,
    # Tokens that are sure of an entry: 1 - p must keep its digits.
    "sure": lambda c: c.sure and c.dtype in ("bf16", "fp16"),
}


@pytest.mark.parametrize(("ranks", "count"), [(1, 10), (2, 4), pytest.param(4, 20, marks=pytest.mark.slow)])
@pytest.mark.parametrize("kind", ["loss", "statistics", "selected", "divergence"])
@pytest.mark.parametrize("wanted", WANTED)
def test_configurations_hold(wanted, kind, ranks, count, kernels, worlds, device):
    settings = fuzz.Settings(seed=11, backend="triton", device=device)
    drawn = ((index, settings.draw(ranks, index)) for index in itertools.count())
    chosen = ((index, c) for index, c in drawn if c.kind == kind and WANTED[wanted](c))
    for index, c in itertools.islice(chosen, count):
        _, finding = fuzz.examine(c, lambda c: everywhere(worlds, device, ranks, execute, c, "triton"))
        assert finding is None, f"{settings.command(ranks, index)}\n{finding}"
