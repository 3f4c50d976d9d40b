"""The triton backend block by block: what it is handed, adds to, announces, and launches beside collectives."""

from __future__ import annotations

import dataclasses
from contextlib import contextmanager
from unittest import mock

import pytest
import torch

pytest.importorskip("triton", reason="needs triton")

import parallel_lce
from blocks import block_backward, block_forward, launches
from cases import DTYPES, Case, dense_loss, make, part
from measures import assert_close, size
from parallel_lce.backends import triton as backend
from parallel_lce.backends import triton_backward
from parallel_lce.backends.interface import Coefficients, GradBuffers, Projection, Scratch
from parallel_lce.core.grad_buffers import GradBuffer, MainGrad
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


def block(dtype: torch.dtype, device: str, N=40, V=700, D=24):
    t = make(Case(N, V, D, {v: k for k, v in DTYPES.items()}[dtype], bias=True, ignored="none"), device)
    projection = Projection(t.weight, t.bias, 0, V)
    coefficients = Coefficients(*(torch.rand(2, N, device=device) + 0.1), None, None)
    return t, projection, coefficients


def gradients_of(t, projection, coefficients, save: int, grads: GradBuffers, scratch: int = 20_000, **options):
    partial, saved = block_forward(backend, projection, t.x, t.target, Columns(), save)
    scratch = Scratch(scratch, t.x.device)
    block_backward(backend, projection, t.x, t.target, partial, coefficients, saved, grads, scratch, **options)


def exact_gradients(t, coefficients):
    doubles = [v.double() for v in (t.x, t.weight, t.bias)]
    p = torch.nn.functional.linear(*doubles).softmax(1)
    g = p * coefficients.alpha.double()[:, None]
    g[torch.arange(len(g)), t.target] -= coefficients.beta.double()
    return g @ doubles[1], g.t() @ doubles[0], g.sum(0)


@pytest.mark.parametrize("saved", [0, 300, 700])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("main", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.thinned
def test_main_grad_is_added_to(main, dtype, saved, device):
    t, projection, coefficients = block(dtype, device)
    grad = torch.full_like(t.weight, 3.0, dtype=main)
    dweight = GradBuffer(t.weight, 700, 1, main_grad=MainGrad(grad, lambda: None))
    dbias = GradBuffer(t.bias, 700, 1)
    gradients_of(t, projection, coefficients, saved, GradBuffers(None, dweight, dbias))
    assert dweight.deliver() is None
    _, dw, db = exact_gradients(t, coefficients)
    rounding = torch.finfo(dtype).eps
    assert_close(grad.double() - 3, dw, 2 * rounding, torch.finfo(main).eps * size(grad))
    assert_close(dbias.deliver(), db, 2 * rounding)


@pytest.mark.parametrize("saved", [0, 300, 700])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
@pytest.mark.thinned
def test_dx_is_announced_once_complete_and_before_the_last_of_dw(dtype, saved, device):
    t, projection, coefficients = block(dtype, device)
    dx = torch.full_like(t.x, torch.nan)
    announced, closed = [], []

    class Watched(GradBuffer):
        def close(self, start, stop, total):
            closed.append(stop)
            super().close(start, stop, total)

    def ready():
        announced.append(dx.clone())
        assert 700 not in closed

    dweight = Watched(t.weight, 700, 1)
    gradients_of(t, projection, coefficients, saved, GradBuffers(dx, dweight, None), announce=ready)
    assert len(announced) == 1 and torch.equal(announced[0], dx) and closed[-1] == 700
    for found, expected in zip((dx, dweight.deliver()), exact_gradients(t, coefficients)):
        assert_close(found, expected, 2 * torch.finfo(dtype).eps)


def test_hidden_states_may_arrive_after_dx(device):
    """If everything is saved, dX is formed and announced without them."""
    t, projection, coefficients = block(torch.bfloat16, device)
    partial, saved = block_forward(backend, projection, t.x, t.target, Columns(), 700)
    late, dx, dweight = torch.full_like(t.x, torch.nan), torch.empty_like(t.x), GradBuffer(t.weight, 700, 1)
    grads = GradBuffers(dx, dweight, None)
    arguments = projection, late, t.target, partial, coefficients, saved, grads, Scratch(0, device)
    block_backward(backend, *arguments, announce=lambda: late.copy_(t.x))
    for found, expected in zip((dx, dweight.deliver()), exact_gradients(t, coefficients)):
        assert_close(found, expected, 2 * torch.finfo(torch.bfloat16).eps)


@pytest.mark.parametrize(("dtype", "saved"), [(torch.bfloat16, 300), (torch.float16, 0)], ids=str)
@pytest.mark.slow
def test_products_in_pieces(dtype, saved, device, monkeypatch):
    """Those that pass through fp32, of 1024 rows of dX and 256 of dW."""
    monkeypatch.setattr(triton_backward, "PRODUCT_BYTES", 1)
    t, projection, coefficients = block(dtype, device, N=1100, V=300, D=8)
    dx, dweight = torch.full_like(t.x, torch.nan), GradBuffer(t.weight, 300, 1)
    announced = []

    def ready(stop):
        announced.append((stop, dx[:stop].clone()))

    grads = GradBuffers(dx, dweight, None)
    gradients_of(t, projection, coefficients, saved, grads, scratch=4 << 20, announce=ready)
    assert [stop for stop, _ in announced] == [1024, 1100]
    assert all(torch.equal(rows, dx[:stop]) for stop, rows in announced)
    for found, expected in zip((dx, dweight.deliver()), exact_gradients(t, coefficients)):
        for some in (slice(0, 256), slice(256, 1024), slice(1024, None)):
            assert_close(found[some], expected[some], 2 * torch.finfo(dtype).eps)


def test_a_larger_buffer_serves_a_smaller_block(device):
    """As blocks that accumulate share one: what lies behind it stays, and gradients are the same."""
    t, projection, coefficients = block(torch.bfloat16, device)
    found = []
    for buffer in (None, backend.allocate_saved(projection, 64, 700).fill_(7.0)):
        partial, saved = block_forward(backend, projection, t.x, t.target, Columns(), 700, buffer=buffer)
        dx, dweight = torch.empty_like(t.x), GradBuffer(t.weight, 700, 1)
        grads, scratch = GradBuffers(dx, dweight, None), Scratch(0, device)
        block_backward(backend, projection, t.x, t.target, partial, coefficients, saved, grads, scratch)
        found.append((partial, dx, dweight.deliver()))
    assert all(torch.equal(a, b) for a, b in zip(*found))
    assert (buffer[saved[0].numel() :] == 7).all() and saved[0].data_ptr() == buffer.data_ptr()


@pytest.mark.parametrize("dtype", ["bf16", "fp16"])
def test_saved_tensors_may_come_back_elsewhere(dtype, device):
    """Hooks such as ``save_on_cpu`` may give a weight whose rows were not aligned back as one whose
    are, for which other tiles would be chosen; the windows of what is saved stay those of forward."""
    t = make(Case(40, 700, 64, dtype, ignored="none", sharpness=20.0), device)
    memory = torch.empty(700 * 64 + 1, dtype=t.weight.dtype, device=device)
    t.weight = memory[1:].view(700, 64).copy_(t.weight).requires_grad_()
    t.x.requires_grad_()
    with torch.autograd.graph.saved_tensors_hooks(lambda saved: saved.clone(), lambda saved: saved):
        loss = parallel_lce.linear_cross_entropy(t.x, t.weight, t.target)
    truth = dense_loss(t)
    for name, found in zip(("dx", "dweight"), torch.autograd.grad(loss, [t.x, t.weight])):
        assert_close(found, truth[name], 2 * torch.finfo(found.dtype).eps, name=name)


@pytest.mark.parametrize("own", [(64, 128), (128, 256), (100, 300), (0, 200), (40, 290)], ids=str)
@pytest.mark.parametrize(("dtype", "save"), [(torch.bfloat16, 700), (torch.float16, 700), (torch.bfloat16, 0)], ids=str)
@pytest.mark.thinned
def test_rows_that_are_there_are_projected_while_others_arrive(dtype, save, own, device):
    t, projection, _ = block(dtype, device, N=300)
    whole = t.x.clone()
    buffers = [backend.allocate_saved(projection, 300, 700).zero_() for _ in range(2)]
    arguments = t.target, Columns(argmax=True), save
    expected, of_saved = block_forward(backend, projection, whole, *arguments, buffer=buffers[0])
    start, stop = own
    arriving = torch.full_like(whole, torch.nan)
    arriving[start:stop] = whole[start:stop]
    waited = []

    def wait():
        waited.append(arriving.copy_(whole))

    local = range(start, stop)
    task = backend, projection, arriving, *arguments
    found, also_saved = block_forward(*task, buffer=buffers[1], local=local, arrive=wait)
    assert waited and torch.equal(found, expected)
    for a, b in zip(of_saved, also_saved, strict=True):
        assert (a is None and b is None) or torch.equal(a, b)


def test_what_runs_beside_a_gather_leaves_it_sms_for_no_longer_than_it_takes(device, monkeypatch):
    measured = dataclasses.replace(tuning.MEASURED, flops_per_byte=512, collective_sms=4)
    monkeypatch.setattr(tuning, "MEASURED", measured)
    monkeypatch.setattr(mainloop, "num_sms", lambda device: 10)
    t, projection, _ = block(torch.bfloat16, device, N=1024, V=1280)
    tile, local, before = Product(t.x, t.weight).tile, range(512, 1024), []
    with launches() as found:
        arrive = lambda: before.extend(found)  # noqa: E731
        block_forward(backend, projection, t.x, t.target, Columns(), 1280, local=local, arrive=arrive)
    # 512 rows of two bytes come, and take as long as 512 * 2 * 512 / (2 * 1280) = 204 rows of the product.
    rows, own = tile.rows, 512 // tile.rows
    known = min(-(-204 // rows), own)
    [first] = [each for each in before if each.projects]
    assert (first.grid, first.given["first_block"], first.given["num_blocks"]) == ((6,), own, known)
    others = [each for each in found if each.projects and each is not first]
    assert all(each.grid == (10,) for each in others)
    assert others[0].given["first_block"] == own + known
    assert sum(each.given["num_blocks"] for each in (first, *others)) == 1024 // rows


@contextmanager
def projected(found: list):
    """Notes of each projection its row blocks, None for all, and whether it is to leave SMs to a collective."""
    launch = Product.launch

    def noted(self, out, epilogue, blocks=None, overlaps_collective=False):
        found.append((blocks, overlaps_collective))
        launch(self, out, epilogue, blocks=blocks, overlaps_collective=overlaps_collective)

    with mock.patch.object(Product, "launch", noted):
        yield


@pytest.mark.parametrize(
    ("own", "parts"),
    [
        (None, [range(3)]),
        ((0, 128), [range(1), range(1, 3)]),
        ((128, 256), [range(1, 2), range(2, 4)]),
        ((100, 300), [range(1, 3), range(3, 4)]),
        ((100, 290), [range(1, 2), range(2, 4)]),
        ((100, 200), [range(0, 3)]),
    ],
    ids=str,
)
def test_the_order_of_row_blocks_begins_with_whole_tiles_that_are_there(own, parts, device, monkeypatch):
    t = make(Case(300, 8, 16, "fp16", ignored="none"), device)
    monkeypatch.setattr(mainloop, "num_sms", lambda device: 132)
    operands, before, found = Product(t.x, t.weight), [], []
    given = dict(local=range(*own), arrive=lambda: before.extend(found)) if own else {}
    with projected(found):
        block_forward(backend, Projection(t.weight, None, 0, 8), t.x, t.target, Columns(), 8, **given)
    assert before == [(blocks, True) for blocks, overlaps in found if overlaps] == found[:-1]
    assert [blocks for blocks, _ in found] == parts or operands.tile.rows != 128


RANKS, OWN, SHARD = 3, 384, 96  # a rank in the middle, three tiles of tokens and a window of the vocabulary of each


def _sharded(member: Member, sequence_parallel: bool, budget: int | None, reduction: str):
    whole = make(Case(RANKS * OWN, RANKS * SHARD, 16, "bf16", ignored="none"), member.device)
    t = part(whole, member, sequence_parallel)
    found = []
    # Of three blocks with a tile of each rank's tokens two are alive, where gradients are formed in forward.
    with shrunk(2 * RANKS * OWN // 3 * SHARD * 2), projected(found):
        loss = parallel_lce.linear_cross_entropy(
            t.x,
            t.weight,
            t.target,
            reduction=reduction,
            process_group=member.group,
            sequence_parallel=sequence_parallel,
            logits_budget=budget,
        )
        dx, dw = torch.autograd.grad(loss.sum(), [t.x, t.weight])
    return loss.detach(), dx, dw, any(overlaps and len(blocks) > 0 for blocks, overlaps in found)


@pytest.mark.slow
def test_each_rank_projects_its_own_rows_first(worlds, device):
    """And finds the same as without sequence parallelism: losses to the bit."""
    plain = everywhere(worlds, device, RANKS, _sharded, False, None, "none")
    saved = everywhere(worlds, device, RANKS, _sharded, True, None, "none")
    accumulated = everywhere(worlds, device, RANKS, _sharded, True, 0, "mean")
    for rank, (expected, whole, dweight, _) in enumerate(plain):
        dx = whole.chunk(RANKS)[rank]
        for found, tokens in ((saved[rank], 1), (accumulated[rank], RANKS * OWN)):
            assert found[3], "the case must be what it is called"
            for gradient, exact in ((found[1], dx), (found[2], dweight)):
                assert_close(gradient.double() * tokens, exact, 8e-3)
        assert torch.equal(saved[rank][0], expected)
        torch.testing.assert_close(accumulated[rank][0], expected.mean())
