"""Every collective of a call is the one its docstring states: kind, order, size, dtype and group."""

from __future__ import annotations

from dataclasses import dataclass
from unittest import mock

import pytest
import torch
import torch.distributed as dist

import parallel_lce
from cases import DTYPES, Case, dense_loss, make, part
from measures import assert_close
from parallel_lce.core import collectives
from tools import recorded, shrunk, started
from world import Member

N, D, ROWS = 48, 4, 40  # tokens of the whole sequence, hidden size, vocabulary rows per rank
REDUCTIONS = ("all_reduce", "reduce_scatter")


@dataclass(frozen=True)
class Call:
    """``blocks``: how many blocks the budget makes of the rows. "save alone": the budget holds every
    logit, and no hidden states beside them."""

    strategy: str
    ranks: int
    blocks: int
    sequence_parallel: bool = False
    dtype: str = "fp32"
    smoothing: float = 0.0
    frozen: str = ""
    reduce_dtype: str = ""

    def __str__(self) -> str:
        return "-".join(str(v) if n in ("strategy", "dtype") else f"{n}={v}" for n, v in vars(self).items() if v)


def _events(member: Member, call: Call):
    """What a rank starts in forward and in backward."""
    dtype = DTYPES[call.dtype]
    t = make(Case(N, ROWS * member.ranks, D, call.dtype, ignored="none"), member.device)
    t = part(t, member, call.sequence_parallel)
    # A view with gaps, which NCCL does not send.
    x = t.x.detach().repeat(1, 2)[:, :D].requires_grad_("input" not in call.frozen)
    t.weight.requires_grad_("weight" not in call.frozen)
    budget = {"save": None, "save alone": N * ROWS * dtype.itemsize}.get(call.strategy, 0)
    in_flight = 2 if call.strategy == "accumulate" else 1
    block_bytes = in_flight * N // call.blocks * ROWS * dtype.itemsize
    with shrunk(block_bytes, (8, 16)), recorded(member.group) as events, started() as everything:
        loss = parallel_lce.linear_cross_entropy(
            x,
            t.weight,
            t.target,
            reduction="mean" if call.strategy == "accumulate" else "none",
            label_smoothing=call.smoothing,
            process_group=member.group,
            sequence_parallel=call.sequence_parallel,
            logits_budget=budget,
            reduce_dtype=getattr(torch, call.reduce_dtype) if call.reduce_dtype else None,
        )
        forward, events[:] = list(events), []
        if loss.requires_grad:
            loss.sum().backward()
        # Each is waited for where its result is used.
        assert everything and all(each.asynchronous and each.contiguous for each in everything)
        return forward, list(events)


def expected(call: Call) -> tuple[list, list]:
    """Forward's and backward's collectives, from the docstring of ``linear_cross_entropy``."""
    B, P = call.blocks, call.ranks
    low = str(DTYPES[call.dtype]).removeprefix("torch.")
    wide = "float64" if call.dtype == "fp64" else "float32"
    columns = 4 if call.smoothing else 3
    hidden = [("all_gather", N // P // B * D, low, True)] * (B if call.sequence_parallel else 0)
    reduce = [(REDUCTIONS[call.sequence_parallel], N // B * D, call.reduce_dtype or low, True)] * (
        B if "input" not in call.frozen else 0
    )
    if call.strategy == "accumulate":
        partials = [("all_gather", columns * (N // B) + 2, wide, True)] * B
        return hidden + partials + reduce, []
    needs = call.frozen != "input weight"
    # Where nothing is kept, all hidden states of so few tokens are gathered at once.
    whole = [("all_gather", N // P * D, low, True)] * call.sequence_parallel
    forward = whole + [("all_gather", columns * N + 2, wide, True)]
    again = [] if call.strategy == "save" else hidden
    return forward, (again + reduce if needs else [])


def of_collectives(events: list) -> list:
    return [e for e in events if e[0] != "dW"]


CALLS = [
    Call("save", 2, 1),
    Call("save", 3, 1, smoothing=0.1),
    Call("save", 2, 1, dtype="fp64"),
    Call("save", 2, 1, True, dtype="bf16"),
    Call("save", 2, 1, dtype="bf16", reduce_dtype="float32"),
    Call("save", 2, 1, True, dtype="fp16", reduce_dtype="float16"),
    Call("save", 2, 1, frozen="input"),
    Call("save", 2, 1, True, frozen="input"),
    Call("save", 2, 1, True, frozen="weight"),
    Call("save", 2, 1, frozen="input weight"),
    Call("save alone", 2, 1, True, dtype="bf16"),
    Call("save alone", 3, 1, True, frozen="input"),
    Call("recompute", 3, 2, smoothing=0.1),
    Call("recompute", 2, 4, True, dtype="bf16", reduce_dtype="float32"),
    Call("recompute", 4, 3, True, smoothing=0.2, dtype="fp64"),
    Call("recompute", 2, 4, frozen="input"),
    Call("recompute", 2, 4, True, frozen="weight"),
    Call("accumulate", 3, 4, smoothing=0.1, dtype="bf16", reduce_dtype="float32"),
    Call("accumulate", 2, 4, True),
    Call("accumulate", 4, 3, True, smoothing=0.2),
    Call("accumulate", 2, 4, True, frozen="input"),
    Call("accumulate", 2, 4, frozen="weight"),
]


@pytest.mark.parametrize("call", CALLS, ids=str)
def test_collectives_of_a_call(call, worlds, device):
    forward, backward = expected(call)
    everyone = worlds(call.ranks).run(_events, call)
    for rank, events in enumerate(everyone):
        assert [of_collectives(e) for e in events] == [of_collectives(e) for e in everyone[0]], f"rank {rank}"
        if not call.frozen:
            assert_dx_is_on_its_way_while_dw_is_computed(call, events[0] + events[1])
    found_forward, found_backward = map(of_collectives, everyone[0])
    # Gathers run ahead, so that blocks interleave: the docstring states numbers and sizes, and the
    # order of its kinds.
    assert sorted(found_forward) == sorted(forward)
    assert sorted(found_backward) == sorted(backward)
    if call.strategy != "accumulate":
        assert found_forward == forward
        kinds = [e[0] for e in found_backward]
        gathers, sums = ([i for i, k in enumerate(kinds) if k == kind] for kind in ("all_gather", "reduce_scatter"))
        assert all(gathered < reduced for gathered, reduced in zip(gathers, sums))


def assert_dx_is_on_its_way_while_dw_is_computed(call: Call, events: list) -> None:
    """In every block the reduction of dX starts before the last window of dW is finished."""
    order = [e[0] for e in events if e[0] in ("dW", *REDUCTIONS)]
    starts = [i for i, kind in enumerate(order) if kind in REDUCTIONS]
    assert len(starts) == call.blocks and order[-1] == "dW"
    for start, following in zip(starts, [*starts[1:], len(order)]):
        assert "dW" in order[start + 1 : following]


def _evaluation(member: Member):
    """A forward under no_grad of a call that could have kept something."""
    with torch.no_grad():
        return _events(member, Call("save", member.ranks, 1))


def test_evaluation(worlds, device):
    assert worlds(2).run(_evaluation) == [([("all_gather", 3 * N + 2, "float32", True)], [])] * 2


def _gathers_and_waits(member: Member):
    """The order in which a forward of several blocks starts gathers of hidden states and waits for them."""
    wait, blocks, waited = collectives.IncomingHidden.wait, 4, []

    def watched_wait(self):
        if not self.arrived and self.tensor.shape[-1] == D:
            waited.append(len(found))
        return wait(self)

    with started() as found, mock.patch.object(collectives.IncomingHidden, "wait", watched_wait):
        _events(member, Call("accumulate", member.ranks, blocks, True))
    hidden = N // member.ranks // blocks * D
    gathers = [place for place, each in enumerate(found) if (each.kind, each.size) == ("all_gather", hidden)]
    # A wait comes before what was started next.
    return [what for _, what in sorted([(g, "gather") for g in gathers] + [(w - 0.5, "wait") for w in waited])]


def test_the_second_gather_starts_once_the_first_is_waited_for(worlds, device):
    """With one queue to the device, what runs beside the first would stand behind it; later ones are a block ahead."""
    for order in worlds(2).run(_gathers_and_waits):
        assert order == ["gather", "wait"] * 4


def _events_by_vocabulary(member: Member):
    t = part(make(Case(8, ROWS * member.ranks, D, "bf16", ignored="none"), member.device), member)
    with shrunk(2 * ROWS * 2, (2, 16)), recorded(member.group) as events:
        loss = parallel_lce.linear_cross_entropy(
            t.x, t.weight, t.target, reduction="none", process_group=member.group, logits_budget=0
        )
        loss.sum().backward()
    return events


def test_recomputation_by_vocabulary_reduces_once(worlds, device):
    """dX [N, D] is the smaller accumulator: one block and one reduction, though the budget is 0."""
    for events in worlds(2).run(_events_by_vocabulary):
        assert of_collectives(events) == [
            ("all_gather", 3 * 8 + 2, "float32", True),
            ("all_reduce", 8 * D, "bfloat16", True),
        ]
        assert events[-1][0] == "dW", "something of dW runs beside the reduction"


def _statistics_events(member: Member):
    t = part(make(Case(N, ROWS * member.ranks, D, ignored="none"), member.device), member)
    sizes = []
    for number in range(8):
        asked = dict(mean_logit=bool(number & 1), expected_logit=bool(number & 2), argmax=bool(number & 4))
        with recorded(member.group) as events:
            parallel_lce.token_statistics(t.x, t.weight, t.target, process_group=member.group, **asked)
        sizes.append(events)
    return sizes


def test_statistics_gather_what_was_asked_for(worlds, device):
    for found in worlds(2).run(_statistics_events):
        for number, events in enumerate(found):
            columns = 3 + number.bit_count() + (number & 1)
            assert events == [("all_gather", columns * N + 2, "float32", True)]


def _one_rank(member: Member):
    groups = [dist.new_group([r]) for r in range(member.ranks)]
    t = part(make(Case(N, ROWS, D), member.device), Member(0, 1, member.device, None))
    with recorded(member.group) as events:
        for group in (None, groups[member.rank]):
            options = dict(process_group=group, sequence_parallel=True)
            parallel_lce.linear_cross_entropy(t.x, t.weight, t.target, **options).backward()
    return of_collectives(events)


def test_one_rank_needs_none(worlds, device):
    assert worlds(2).run(_one_rank) == [[], []]


def _subgroups(member: Member, budget, sequence_parallel: bool, reduction: str):
    """Two tensor-parallel pairs side by side, [1, 3] and [0, 2], of different problems."""
    groups = {(1, 3): dist.new_group([1, 3]), (0, 2): dist.new_group([0, 2])}
    pair = (1, 3) if member.rank % 2 else (0, 2)
    group, place = groups[pair], pair.index(member.rank)
    t = make(Case(N, 2 * ROWS, D, seed=member.rank % 2), member.device)
    t = part(t, Member(place, 2, member.device, group), sequence_parallel)
    options = dict(process_group=group, sequence_parallel=sequence_parallel)
    with shrunk(N // 2 * ROWS * 4, (8, 16)), recorded(group) as events:
        loss = parallel_lce.linear_cross_entropy(
            t.x, t.weight, t.target, logits_budget=budget, reduction=reduction, **options
        )
        loss.sum().backward()
    assert len(of_collectives(events)) >= 2 and all(e[3] for e in of_collectives(events))
    return loss.detach().cpu(), t.x.grad.cpu(), t.weight.grad.cpu()


@pytest.mark.parametrize("sequence_parallel", [False, True])
@pytest.mark.parametrize(("budget", "reduction"), [(None, "mean"), (0, "none"), (0, "sum")])
@pytest.mark.thinned
def test_only_the_given_group_is_used(budget, reduction, sequence_parallel, worlds, device):
    found = worlds(4).run(_subgroups, budget, sequence_parallel, reduction)
    for pair in ((0, 2), (1, 3)):
        truth = dense_loss(make(Case(N, 2 * ROWS, D, seed=pair[0] % 2)), reduction=reduction)
        a, b = (found[r] for r in pair)
        assert torch.equal(a[0], b[0])
        dx = torch.cat([a[1], b[1]]) if sequence_parallel else a[1]
        for name, value in (("loss", a[0]), ("dx", dx), ("dweight", torch.cat([a[2], b[2]]))):
            assert_close(value, truth[name], 2e-6, name=name)


def _ranks_whose_local_rows_differ(member: Member, sizes: tuple, vocab_size):
    """Blocks follow from shared numbers: ranks of very different shards start the same collectives."""
    t = part(make(Case(N, sum(sizes), D), member.device), member, shards=sizes)
    where = dict(process_group=member.group, vocab_start=sum(sizes[: member.rank]), vocab_size=vocab_size)
    found = []
    for reduction in ("mean", "none"):
        for budget in (0, 3000, 12000, None):
            with shrunk(2000, (8, 16)), recorded(member.group) as events:
                parallel_lce.linear_cross_entropy(
                    t.x, t.weight, t.target, reduction=reduction, logits_budget=budget, **where
                ).sum().backward()
            found.append(of_collectives(events))
    return found


@pytest.mark.parametrize("given", [True, False])
def test_uneven_shards_start_the_same_collectives(given, worlds, device):
    sizes = (100, 0, 17)
    everyone = worlds(3).run(_ranks_whose_local_rows_differ, sizes, sum(sizes) if given else None)
    assert everyone == [everyone[0]] * 3
    if given:
        assert len({len(events) for events in everyone[0]}) > 1, "the budget must change the blocks"
