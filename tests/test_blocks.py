"""Blocks, pieces and slices of sizes that the fuzz does not draw, by the kernels: interpreted on the CPU, compiled with
``-m gpu``."""

from dataclasses import replace
from unittest import mock

import pytest

pytest.importorskip("triton", reason="needs triton")

from blocks import launches
from fuzz import program
from fuzz.draw import Configuration
from fuzz.run import execute
from parallel_lce import linear_cross_entropy
from parallel_lce.backends import named, triton_backward
from parallel_lce.backends.interface import Scratch
from tools import chosen_backend, everywhere, shrunk, small

EVERY = dict(
    asked=("mean_logit", "entropy", "argmax", "sum_p_squared"),
    mixture=("lse", "target_logit", "mean_logit", "expected_logit", "sum_p_squared"),
)
SURE = dict(sure="some", miss=1e-3)
PIECES = dict(N=600, D=72, budget=0, block_bytes=2 * 512 * 512)
# The most bytes of a product are one.
PRODUCTS = dict(N=1100, V=300, D=8)
# N, V, D and fields of a configuration; ``block_bytes``: of recomputed logits.
CASES = {
    "saved": SURE,
    "recomputed": dict(budget=0, block_bytes=40_000) | SURE,
    "some saved": dict(budget=20_000 + 300 * 40 * 2, block_bytes=20_000),
    "every statistic": EVERY,
    "every statistic, recomputed": dict(budget=0, bias="masked") | EVERY,
    "tiny gradients": dict(upstream="tiny"),
    "rows in pieces": PIECES,
    "rows in pieces, a bias": PIECES | dict(bias="masked"),
    "logits far from 0": dict(offset=304.0, bias="plain"),
    "whole tiles": dict(N=128, V=256, D=128) | SURE,
    "windows of two tiles of the merge": dict(N=20, V=16600, D=25),
    "row blocks of two launches": dict(N=35 * 128 - 5, V=40, D=8),
    "products of some rows": PRODUCTS,
    "products of some rows, recomputed": PRODUCTS | dict(budget=0, block_bytes=4 << 20),
}
SLOW = [*CASES][-4:]
NAMES = [pytest.param(name, marks=[pytest.mark.slow] * (name in SLOW)) for name in CASES]


def _executed(member, c: Configuration, few_rows: bool):
    most = 1 if few_rows else triton_backward.PRODUCT_BYTES
    with mock.patch.object(triton_backward, "PRODUCT_BYTES", most):
        return execute(member, c, "triton")


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("ranks", [1, 2])
@pytest.mark.parametrize("dtype", ["bf16", "fp16", "fp32"])
@pytest.mark.thinned
def test_a_call(name, ranks, dtype, worlds, device, kernels):
    """Statistics and their gradients. On two ranks another one adds up the parts of dX, which then are formed first."""
    given = dict(N=40, V=700, D=136, mixture=("lse", "target_log_prob")) | CASES[name]
    tokens, entries = given.pop("N"), given["V"]
    first = entries // 3 if ranks > 1 else entries
    shards = ((0, first), (first, entries - first))[:ranks]
    where = dict(ranks=ranks, shape=(tokens,), shards=shards, starts_given=ranks > 1)
    c = Configuration("statistics", values=1, dtype=dtype, reduction="none", **where, **given)
    run = lambda c: everywhere(worlds, device, ranks, _executed, c, name.startswith("products"))  # noqa: E731
    _, finding = program.examine(c, run)
    assert not finding, f"{c}\n{finding}"


SLICES = {
    "with the bytes of dX too": (600, 256, 0, 2 * 600 * 256, [512, 188]),
    "without them, since they are long enough": (300, 256, 0, 2 * 300 * 256, [256, 256, 188]),
    "in the memory of two windows that were saved": (40, 16, 40 * 512 * 2 + 256, 256, [188]),
    "in that of an earlier block": (100, 256, 90_000, 256, [700]),
    "of pieces of rows, where those of all would be narrow": (600, 16, 0, 2 * 512 * 512, [512, 512, 188, 188]),
}


@pytest.mark.parametrize(("N", "D", "budget", "block", "slices"), SLICES.values(), ids=SLICES)
def test_slices_that_are_projected_again(N, D, budget, block, slices, device, monkeypatch):
    """A budget is one buffer, not two, and slices are as large as it. On one rank they also take the bytes in which dX
    is written at the end."""
    if N == 300:
        monkeypatch.setattr(triton_backward, "MEASURED", replace(triton_backward.MEASURED, longest_slice=256))
    if N == 40:
        monkeypatch.setattr(Scratch, "borrow", lambda *_: pytest.fail("more memory than what was saved"))
    monkeypatch.setattr(named("triton"), "CODES", False)
    t = small(device, N=N, V=700, D=D, dtype="bf16")
    t.weight.requires_grad_(N != 100)  # else columns would be saved, not rows
    freed = mock.Mock(wraps=Scratch.release)
    monkeypatch.setattr(Scratch, "release", lambda scratch: freed(scratch))
    with chosen_backend("triton"), shrunk(block), launches() as found:
        loss = linear_cross_entropy(t.x, t.weight, t.target, reduction="none", logits_budget=budget)
        loss.sum().backward()
    assert freed.called == (N in (300, 600))  # nothing was saved
    projected = [given for name, given in found if name.endswith("projection") and given["KIND"] == "backward"]
    assert [given["entries"] for given in projected] == slices
