"""An order of the vocabulary: how ids are dealt to ranks, what is permuted, and that a model stays the same."""

from functools import partial

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import parallel_lce
from cases import normal
from measures import assert_near
from parallel_lce.call.checks import INTEGERS
from parallel_lce.vocabulary import VocabularyOrder
from tools import small

safetensors = pytest.importorskip("safetensors.torch", reason="needs safetensors")

V, ROWS = 37, 40


def drawn_order(seed: int = 3, rows: int = ROWS, ranks: int = 2) -> VocabularyOrder:
    return VocabularyOrder.by_frequency(normal(V, seed=seed).abs(), ranks=ranks, rows=rows)


def dealt_by_hand(counts: list, ranks: int, rows: int) -> list[int]:
    """Each rank in turn gives the next id its next free row, if it still has one that is no padding."""
    shard = rows // ranks
    free = [list(range(rank * shard, min((rank + 1) * shard, len(counts)))) for rank in range(ranks)]
    turns = [turn for place in range(shard) for turn in (f[place : place + 1] for f in free) if turn]
    new_id = [-1] * len(counts)
    for id, (row,) in zip(sorted(range(len(counts)), key=lambda i: (-counts[i], i)), turns):
        new_id[id] = row
    return new_id


DTYPES = torch.float32, torch.bfloat16, torch.int32, torch.uint8, torch.uint64


@settings(deadline=None)
@given(st.data())
def test_ids_are_dealt_to_the_ranks_in_turn(data):
    counts = data.draw(st.lists(st.integers(0, 4), min_size=1, max_size=60))
    ranks, more = data.draw(st.sampled_from([1, 2, 3, 4, 8])), data.draw(st.integers(0, 3))
    rows = (-(-len(counts) // ranks) + more) * ranks
    given = torch.tensor(counts).to(data.draw(st.sampled_from(DTYPES)))
    order = VocabularyOrder.by_frequency(given, ranks=ranks, rows=rows)
    assert order.rows == rows and order.new_id.dtype == torch.int64
    assert order.new_id.tolist() == dealt_by_hand(counts, ranks, rows)
    ids = torch.tensor(data.draw(st.lists(st.integers(-100, rows), max_size=9)), dtype=torch.int16)
    assert torch.equal(order.undo(order.apply(ids)), ids) and torch.equal(order.apply(order.undo(ids)), ids)
    dtype = data.draw(st.sampled_from([torch.bfloat16, torch.float8_e4m3fn, torch.int32]))
    shape = data.draw(st.sampled_from([rows, len(counts)])), *data.draw(st.sampled_from([(), (3,), (2, 3)]))
    weight = (8 * normal(*shape)).to(dtype)
    moved, back = order.apply_rows(weight), order.undo_rows(weight)
    assert moved.dtype == dtype and moved.shape == shape
    as_bits = lambda value: value.view(torch.uint8) if dtype == torch.float8_e4m3fn else value  # noqa: E731
    weight, moved = as_bits(weight), as_bits(moved)
    assert torch.equal(moved[order.new_id], weight[: len(counts)])
    assert torch.equal(moved[len(counts) :], weight[len(counts) :])
    assert torch.equal(as_bits(order.undo_rows(moved.view(dtype))), weight)
    assert torch.equal(as_bits(order.apply_rows(back)), weight)


IDS = dict(new_id=torch.arange(3))
NO_FILES = [
    (None, "No such file"),
    (safetensors.save(IDS)[:-1], "Error while deserializing header"),
    (safetensors.save(IDS), r"expected the tensors new_id and rows, got \['new_id'\]"),
    (safetensors.save(IDS | dict(rows=torch.tensor([3, 3]))), r"rows must be a .* of at least V=3, got \[3, 3\]"),
    (safetensors.save(dict(new_id=torch.tensor([3, 1, 2]), rows=torch.tensor(3))), ".*from 0 to 2 once"),
]


@pytest.mark.parametrize(("content", "message"), NO_FILES, ids=str)
def test_files_that_are_refused(content, message, tmp_path):
    path = tmp_path / "order.safetensors"
    if content is not None:
        path.write_bytes(content)
    with pytest.raises(ValueError, match=rf"order.safetensors holds no order of a vocabulary: {message}"):
        VocabularyOrder.load(path)


def test_an_order_keeps_its_own_table(tmp_path, device):
    order = drawn_order()
    table = order.new_id.to(device, copy=True)
    copy = VocabularyOrder(table, ROWS)
    table[0] = 0
    copy.save(tmp_path / "order.safetensors")
    found = VocabularyOrder.load(tmp_path / "order.safetensors")
    assert torch.equal(found.new_id, order.new_id) and found.rows == ROWS


@pytest.mark.parametrize("dtype", INTEGERS, ids=str)
def test_ids_keep_their_dtype_and_those_outside_their_value(dtype, device):
    order = drawn_order()
    outside = [V, V + 1, torch.iinfo(dtype).max] + [-1, -100, torch.iinfo(dtype).min] * dtype.is_signed
    ids = torch.tensor([[0, V - 1, 5], [5, 6, 7]]).to(dtype)
    for placed in (order, order.to(device)):
        found = placed.apply(ids.to(device))
        assert found.dtype == dtype and found.device.type == device
        assert found.cpu().long().tolist() == order.new_id[ids.long()].tolist()
        assert torch.equal(placed.undo(found).cpu(), ids)
        odd = torch.tensor(outside, dtype=dtype, device=device)
        assert torch.equal(placed.apply(odd), odd) and torch.equal(placed.undo(odd), odd)


def test_checkpoints_both_ways():
    """Names of a tied weight stay tied; no gradient, and no part of the given checkpoint, is touched."""
    order, embedding = drawn_order(), torch.nn.Parameter(normal(ROWS, 3))
    state = {"embedding": embedding, "output": embedding.detach(), "part": embedding[:, :2], "bias": normal(V)}
    others = {"layer": normal(V, 3), "extra": None}
    before = {name: value.detach().clone() for name, value in state.items()}
    found = order.apply_checkpoint(state | others, iter(state))
    assert [*found] == [*state, *others] and all(found[name] is value for name, value in others.items())
    assert found["output"].data_ptr() == found["embedding"].data_ptr() and not found["embedding"].requires_grad
    undone = order.undo_checkpoint(found, [*state])
    for name, value in before.items():
        assert torch.equal(found[name], order.apply_rows(value)) and not torch.equal(found[name], value)
        assert torch.equal(undone[name], value) and torch.equal(state[name], value)


COUNTED, ORDER, WIDE = VocabularyOrder.by_frequency, drawn_order(), VocabularyOrder(torch.arange(300).flip(0))
STATE = {"a": torch.zeros(V), "layer": torch.zeros(3, 3), "extra": None}
REFUSED = [
    (partial(COUNTED, torch.ones(7), ranks=2), r"rows must be at least V=7 and a multiple of ranks=2, got 7"),
    (partial(COUNTED, torch.ones(7), rows=8.0), r"at least V=7 and a multiple of ranks=1, got 8.0"),
    (partial(COUNTED, torch.ones(7), ranks=0), "ranks must be a whole number of at least 1, got 0"),
    (partial(COUNTED, torch.ones(7, 1)), r"counts must be a tensor \[V\] with V > 0, got \[7, 1\] of torch.float32"),
    (partial(COUNTED, torch.ones(0)), r"got \[0\] of torch.float32"),
    (partial(COUNTED, [1, 2]), "got list"),
    (partial(COUNTED, torch.ones(7) > 0), "integers or floating-point numbers, got torch.bool"),
    (partial(COUNTED, torch.tensor([1, torch.nan])), "counts must be at least 0, got a negative number or NaN"),
    (partial(VocabularyOrder, torch.tensor([0, 2, 2])), "of the 3 numbers .* once, got 2 different ones from 0 to 2"),
    (partial(VocabularyOrder, torch.tensor([3, 1, 2])), "from 0 to 2 once, got 3 different ones from 1 to 3"),
    (partial(VocabularyOrder, torch.tensor([1, 0]).int()), r"an int64 tensor \[V\] .*, got \[2\] of torch.int32"),
    (partial(VocabularyOrder, torch.empty(0).long()), r"with V > 0, got \[0\] of torch.int64"),
    (partial(VocabularyOrder, torch.arange(3), 2), "rows must be a whole number of at least V=3, got 2"),
    (partial(WIDE.apply, torch.zeros(2, dtype=torch.uint8)), "a dtype that can hold 299, .*, got torch.uint8"),
    (partial(WIDE.undo, torch.zeros(2)), r"ids must be a tensor of integers, got \[2\] of torch.float32"),
    (partial(ORDER.apply_rows, torch.zeros(38, 2)), r"of 37 rows, or 40 with padding, got \[38, 2\] of"),
    (partial(ORDER.apply_rows, torch.tensor(1.0)), r"got \[\] of torch.float32"),
    (partial(drawn_order(rows=V, ranks=1).undo_rows, torch.zeros(40)), r"must be a tensor of 37 rows, got \[40\]"),
    (partial(ORDER.apply_checkpoint, STATE, ["a", "b", "c"]), r"the checkpoint has no 'b', 'c'$"),
    (partial(ORDER.undo_checkpoint, STATE, ["a", "layer"]), r"layer must be a tensor of 37 rows, .*, got \[3, 3\]"),
    (partial(ORDER.apply_checkpoint, STATE, ["extra"]), "extra must be a tensor of 37 rows.* got NoneType"),
    (partial(ORDER.undo_checkpoint, STATE, "a"), r"must be several names, such as \['a'\], got the string 'a'"),
]


@pytest.mark.parametrize(("call", "message"), REFUSED)
def test_refused(call, message):
    with pytest.raises(ValueError, match=message):
        call()


def test_a_model_is_the_same_in_any_order(device):
    """Its loss, its gradients and its most likely entries."""
    order, t = drawn_order(), small(device, N=48, V=ROWS)
    t.target %= V

    def results(weight, target):
        found = parallel_lce.token_statistics(t.x, weight, target, vocab_size=V, top_k=3)
        return *torch.autograd.grad(-found.target_log_prob.mean(), (t.x, weight)), found.top_ids

    moved = order.apply_rows(t.weight).detach().requires_grad_()
    dx, dweight, ids = results(t.weight, t.target)
    moved_dx, moved_dweight, moved_ids = results(moved, order.apply(t.target))
    assert_near(moved_dx, dx, 2e-6)
    assert_near(order.undo_rows(moved_dweight), dweight, 2e-6)
    assert torch.equal(order.undo(moved_ids), ids) and not torch.equal(moved_ids, ids)
