"""What the triton backend launches beside collectives, and in what order."""

from __future__ import annotations

import dataclasses

import pytest
import torch

pytest.importorskip("triton", reason="needs triton")

import parallel_lce
from blocks import block_forward, launches
from cases import Case, make, part
from measures import assert_close
from parallel_lce.backends import triton as backend
from parallel_lce.backends.interface import Projection
from parallel_lce.core.partials import Columns
from parallel_lce.kernels import projection as mainloop
from parallel_lce.kernels import tuning
from parallel_lce.kernels.projection import Product
from tools import chosen_backend, everywhere, shrunk
from world import Member


@pytest.fixture(autouse=True)
def _chosen(kernels):
    with chosen_backend("triton"):
        yield


# Rows, those that are there, and the first row block and the number of each launch.
ORDERS = [
    (300, None, [(0, 3)]),
    (300, (0, 128), [(0, 1), (1, 2)]),
    (300, (128, 256), [(1, 1), (2, 2)]),
    (300, (100, 300), [(1, 2), (3, 1)]),
    (300, (100, 290), [(1, 1), (2, 2)]),
    (300, (100, 200), [(0, 3)]),
    # 512 rows of two bytes come, and take as long as 512 * 2 * 512 / (2 * 1280) = 204 rows of the product.
    (1024, (512, 1024), [(4, 2), (6, 6)]),
]


@pytest.mark.parametrize(("rows", "own", "parts"), ORDERS, ids=str)
def test_the_order_of_row_blocks_begins_with_whole_tiles_that_are_there(rows, own, parts, device, monkeypatch):
    """For no longer than a gather takes, to which they leave SMs."""
    measured = dataclasses.replace(tuning.MEASURED, flops_per_byte=512, collective_sms=4)
    monkeypatch.setattr(tuning, "MEASURED", measured)
    monkeypatch.setattr(mainloop, "num_sms", lambda device: 10)
    V = 1280 if rows > 300 else 8
    t = make(Case(rows, V, 16, "fp16", ignored="none"), device)
    if Product(t.x, t.weight).tile.rows != 128:
        pytest.skip("the orders are those of tiles of 128 tokens")
    before = []
    with launches() as found:
        given = dict(local=range(*own), arrive=lambda: before.extend(found)) if own else {}
        block_forward(backend, Projection(t.weight, None, 0, V), t.x, t.target, Columns(), V, **given)
    projections = [each for each in found if each.projects]
    assert [(each.given["first_block"], each.given["num_blocks"]) for each in projections] == parts
    assert len([each for each in before if each.projects]) == len(parts) - 1
    if rows > 300:
        assert [each.grid for each in projections] == [(6,), (10,)]


RANKS, OWN, SHARD = 3, 384, 96  # a rank in the middle, three tiles of tokens and a window of the vocabulary of each


def _sharded(member: Member, sequence_parallel: bool, budget: int | None, reduction: str):
    whole = make(Case(RANKS * OWN, RANKS * SHARD, 16, "bf16", ignored="none"), member.device)
    t = part(whole, member, sequence_parallel)
    options = dict(process_group=member.group, sequence_parallel=sequence_parallel, logits_budget=budget)
    # Of three blocks with a tile of each rank's tokens two are alive, where gradients are formed in forward.
    with shrunk(2 * RANKS * OWN // 3 * SHARD * 2), launches() as found:
        loss = parallel_lce.linear_cross_entropy(t.x, t.weight, t.target, reduction=reduction, **options)
        dx, dw = torch.autograd.grad(loss.sum(), [t.x, t.weight])
    return loss.detach(), dx, dw, sum(each.projects and not each.of_gradient for each in found)


@pytest.mark.slow
def test_each_rank_projects_its_own_rows_first(worlds, device):
    """And finds the same as without sequence parallelism: losses to the bit."""
    plain = everywhere(worlds, device, RANKS, _sharded, False, None, "none")
    saved = everywhere(worlds, device, RANKS, _sharded, True, None, "none")
    accumulated = everywhere(worlds, device, RANKS, _sharded, True, 0, "mean")
    for rank, (expected, whole, dweight, launched) in enumerate(plain):
        dx = whole.chunk(RANKS)[rank]
        for found, tokens in ((saved[rank], 1), (accumulated[rank], RANKS * OWN)):
            assert found[3] > launched, "the case must be what it is called"
            for gradient, exact in ((found[1], dx), (found[2], dweight)):
                assert_close(gradient.double() * tokens, exact, 8e-3)
        assert torch.equal(saved[rank][0], expected)
        torch.testing.assert_close(accumulated[rank][0], expected.mean())
