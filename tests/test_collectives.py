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

    def __str__(self) -> str:
        return "-".join(str(v) if n in ("strategy", "dtype") else f"{n}={v}" for n, v in vars(self).items() if v)


def _events(member: Member, call: Call):
    """What a rank starts in forward and in backward."""
    dtype = DTYPES[call.dtype]
    t = make(Case(N, ROWS * member.ranks, D, call.dtype, ignored="none"), member.device)
    t = part(t, member, call.sequence_parallel)
    t.x.requires_grad_("input" not in call.frozen)
    t.weight.requires_grad_("weight" not in call.frozen)
    budget = {"save": None, "save alone": N * ROWS * dtype.itemsize}.get(call.strategy, 0)
    in_flight = 2 if call.strategy == "accumulate" else 1
    block_bytes = in_flight * N // call.blocks * ROWS * dtype.itemsize
    with shrunk(block_bytes, (8, 16)), recorded(member.group) as events:
        loss = parallel_lce.linear_cross_entropy(
            t.x,
            t.weight,
            t.target,
            reduction="mean" if call.strategy == "accumulate" else "none",
            label_smoothing=call.smoothing,
            process_group=member.group,
            sequence_parallel=call.sequence_parallel,
            logits_budget=budget,
        )
        forward, events[:] = list(events), []
        if loss.requires_grad:
            loss.sum().backward()
        return forward, list(events)


def expected(call: Call) -> tuple[list, list]:
    """Forward's and backward's collectives, from the docstring of ``linear_cross_entropy``."""
    B, P = call.blocks, call.ranks
    low = {"fp32": "float32", "bf16": "bfloat16", "fp64": "float64"}[call.dtype]
    wide = "float64" if call.dtype == "fp64" else "float32"
    columns = 4 if call.smoothing else 3
    hidden = [("all_gather", N // P // B * D, low, True)] * (B if call.sequence_parallel else 0)
    reduce = [("reduce_scatter" if call.sequence_parallel else "all_reduce", N // B * D, low, True)] * (
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
    Call("save", 4, 1, True, smoothing=0.1),
    Call("save", 2, 1, frozen="input"),
    Call("save", 2, 1, frozen="weight"),
    Call("save", 2, 1, True, frozen="input"),
    Call("save", 2, 1, True, frozen="weight"),
    Call("save alone", 2, 1, True, dtype="bf16"),
    Call("save alone", 3, 1, True, frozen="input"),
    Call("recompute", 2, 4),
    Call("recompute", 3, 2, smoothing=0.1),
    Call("recompute", 2, 4, True),
    Call("recompute", 4, 3, True, smoothing=0.2, dtype="fp64"),
    Call("recompute", 2, 4, frozen="input"),
    Call("recompute", 2, 4, frozen="weight"),
    Call("recompute", 2, 4, True, frozen="input"),
    Call("recompute", 2, 4, True, frozen="weight"),
    Call("accumulate", 2, 4),
    Call("accumulate", 3, 4, smoothing=0.1, dtype="bf16"),
    Call("accumulate", 2, 4, True),
    Call("accumulate", 4, 3, True, smoothing=0.2),
    Call("accumulate", 2, 4, frozen="input"),
    Call("accumulate", 2, 4, frozen="weight"),
    Call("accumulate", 2, 4, True, frozen="input"),
    Call("accumulate", 2, 4, True, frozen="weight"),
]


@pytest.mark.parametrize("call", CALLS, ids=str)
def test_collectives_of_a_call(call, worlds, device):
    forward, backward = expected(call)
    everyone = worlds(call.ranks).run(_events, call)
    for rank, events in enumerate(everyone):
        assert [of_collectives(e) for e in events] == [of_collectives(e) for e in everyone[0]], f"rank {rank}"
    found_forward, found_backward = map(of_collectives, everyone[0])
    # Gathers run ahead, so that blocks interleave: the docstring states numbers and sizes, and the
    # order of its kinds.
    assert sorted(found_forward) == sorted(forward)
    assert sorted(found_backward) == sorted(backward)
    if call.strategy != "accumulate":
        assert found_forward == forward
        kinds = [e[0] for e in found_backward]
        for block in range(call.blocks):
            if call.sequence_parallel and {"all_gather", "reduce_scatter"} <= set(kinds):
                gathered = [i for i, k in enumerate(kinds) if k == "all_gather"][block]
                reduced = [i for i, k in enumerate(kinds) if k == "reduce_scatter"][block]
                assert gathered < reduced


def _frozen_everything(member: Member):
    """A forward alone, and a forward under no_grad of a call that could have kept something."""
    found = []
    for grad in (False, True):
        call = Call("save", member.ranks, 1, frozen="" if grad else "input weight")
        with torch.set_grad_enabled(not grad):
            found.append(_events(member, call))
    return found


def test_forward_alone(worlds, device):
    partials = [("all_gather", 3 * N + 2, "float32", True)]
    for found in worlds(2).run(_frozen_everything):
        assert found == [(partials, []), (partials, [])]


def _reduction_starts(member: Member, call: Call):
    forward, backward = _events(member, call)
    return forward if call.strategy == "accumulate" else backward


@pytest.mark.parametrize(
    "call", [c for c in CALLS if not c.frozen and "save" not in c.strategy or c == CALLS[0] or c == CALLS[3]], ids=str
)
def test_dx_is_on_its_way_while_dw_is_computed(call, worlds, device):
    """In every block the reduction of dX starts before the last window of dW is finished."""
    kinds = ("all_reduce", "reduce_scatter")
    for events in worlds(call.ranks).run(_reduction_starts, call):
        order = [e[0] if e[0] in kinds else "dW" for e in events if e[0] in ("dW", *kinds)]
        starts = [i for i, kind in enumerate(order) if kind in kinds]
        assert len(starts) == call.blocks
        for start, following in zip(starts, [*starts[1:], len(order)]):
            assert order[start + 1 : following].count("dW") >= 1
        assert order[-1] == "dW"
        assert order.count("dW") % call.blocks == 0


def test_all_of_dw_runs_beside_the_reduction_where_rows_are_kept(worlds, device):
    for events in worlds(2).run(_reduction_starts, Call("save", 2, 1)):
        order = [e[0] for e in events]
        assert order[0] == "all_reduce" and order[1:] == ["dW"] * 3


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
        assert order == ["gather", "wait", "gather", "wait", "gather", "wait", "gather", "wait"]


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
        assert [e[0] for e in events][-1] == "dW", "something of dW runs beside the reduction"


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
    t = make(Case(N, ROWS, D), member.device)
    t.x.requires_grad_()
    with recorded(member.group) as events:
        for group in (None, groups[member.rank]):
            parallel_lce.linear_cross_entropy(
                t.x, t.weight, t.target, process_group=group, sequence_parallel=True
            ).backward()
    return of_collectives(events)


def test_one_rank_needs_none(worlds, device):
    assert worlds(2).run(_one_rank) == [[], []]


def _subgroups(member: Member, budget, sequence_parallel: bool, reduction: str):
    """Two tensor-parallel pairs side by side, [1, 3] and [0, 2], of different problems."""
    groups = {(1, 3): dist.new_group([1, 3]), (0, 2): dist.new_group([0, 2])}
    pair = (1, 3) if member.rank % 2 else (0, 2)
    group, place = groups[pair], pair.index(member.rank)
    assert place != member.rank or member.rank == 0
    t = make(Case(N, 2 * ROWS, D, seed=member.rank % 2), member.device)
    t = part(t, Member(place, 2, member.device, group), sequence_parallel)
    with shrunk(N // 2 * ROWS * 4, (8, 16)), recorded(group) as events:
        loss = parallel_lce.linear_cross_entropy(
            t.x,
            t.weight,
            t.target,
            process_group=group,
            sequence_parallel=sequence_parallel,
            logits_budget=budget,
            reduction=reduction,
        )
        loss.sum().backward()
    others = [e for e in of_collectives(events) if not e[3]]
    return others, len(of_collectives(events)), loss.detach().cpu(), t.x.grad.cpu(), t.weight.grad.cpu()


@pytest.mark.parametrize("sequence_parallel", [False, True])
@pytest.mark.parametrize(("budget", "reduction"), [(None, "mean"), (0, "none"), (0, "sum")])
def test_only_the_given_group_is_used(budget, reduction, sequence_parallel, worlds, device):
    found = worlds(4).run(_subgroups, budget, sequence_parallel, reduction)
    for others, count, *_ in found:
        assert others == [] and count >= 2
    for pair in ((0, 2), (1, 3)):
        truth = dense_loss(make(Case(N, 2 * ROWS, D, seed=pair[0] % 2)), reduction=reduction)
        a, b = (found[r][2:] for r in pair)
        assert torch.equal(a[0], b[0])
        dx = torch.cat([a[1], b[1]]) if sequence_parallel else a[1]
        for name, value in (("loss", a[0]), ("dx", dx), ("dweight", torch.cat([a[2], b[2]]))):
            assert_close(value, truth[name], 2e-6, name=name)


def _ranks_whose_local_rows_differ(member: Member, sizes: tuple, vocab_size):
    """Blocks follow from shared numbers: ranks of very different shards start the same collectives."""
    t = part(make(Case(N, sum(sizes), D), member.device), member, shards=sizes)
    found = []
    for reduction in ("mean", "none"):
        for budget in (0, 3000, 12000, None):
            with shrunk(2000, (8, 16)), recorded(member.group) as events:
                parallel_lce.linear_cross_entropy(
                    t.x,
                    t.weight,
                    t.target,
                    reduction=reduction,
                    process_group=member.group,
                    vocab_start=sum(sizes[: member.rank]),
                    vocab_size=vocab_size,
                    logits_budget=budget,
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


def _collectives_are_asynchronous(member: Member):
    """Each is started with ``async_op=True``, waited for where its result is used."""
    with started() as found:
        for sequence_parallel in (False, True):
            for strategy in ("save", "accumulate", "recompute"):
                _events(member, Call(strategy, member.ranks, 2, sequence_parallel))
    return [each.asynchronous for each in found]


def test_collectives_are_asynchronous(worlds, device):
    for flags in worlds(2).run(_collectives_are_asynchronous):
        assert len(flags) > 20 and all(flags)


def _sent_in_one_piece(member: Member):
    """Whether the hidden states of a view with gaps are sent without them."""
    t = part(make(Case(N, ROWS * member.ranks, D), member.device), member, True)
    wide = torch.zeros(len(t.x), 2 * D, device=member.device)
    gapped = wide[:, :D].copy_(t.x.detach())
    assert not gapped.is_contiguous()
    with started() as found:
        parallel_lce.linear_cross_entropy(
            gapped, t.weight.detach(), t.target, process_group=member.group, sequence_parallel=True
        )
    return [each.contiguous for each in found]


def test_views_with_gaps_are_sent_in_one_piece(worlds, device):
    """NCCL takes no others."""
    assert worlds(2).run(_sent_in_one_piece) == [[True, True]] * 2
