"""Every collective of a call is the one its docstring states: kind, order, size, dtype and group."""

from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, replace
from types import SimpleNamespace
from unittest import mock

import pytest
import torch
import torch.distributed as dist

import parallel_lce
from cases import DTYPES, make, part
from measures import error, size
from parallel_lce.backends import backend_of
from parallel_lce.core import collectives
from parallel_lce.core.grad_buffers import GradBuffer
from parallel_lce.distillation import divergence
from tools import Started, chosen_backend, on_ranks, savable, shrunk, started
from world import Member

N, D, ROWS = 48, 4, 40  # tokens of the whole sequence, hidden size, vocabulary rows per rank
REDUCTIONS = ("all_reduce", "reduce_scatter")


@dataclass(frozen=True)
class Call:
    """``strategy``: "save alone": the budget holds every logit, and no hidden states beside them; "evaluation": under
    no_grad; "by vocabulary": of 8 tokens. ``blocks``: how many blocks the budget makes of the rows."""

    strategy: str
    ranks: int
    blocks: int
    sequence_parallel: bool = False
    dtype: str = "fp32"
    smoothing: float = 0.0
    frozen: str = ""
    reduce_dtype: str = ""

    @property
    def tokens(self) -> int:
        return 8 if self.strategy == "by vocabulary" else N

    @property
    def block_bytes(self) -> int:
        rows = 2 if self.strategy == "by vocabulary" else self.tokens // self.blocks
        return rows * ROWS * DTYPES[self.dtype].itemsize * (2 if self.strategy == "accumulate" else 1)

    def on(self, device) -> "Call":
        saves = self.strategy in ("save", "accumulate")
        return replace(self, dtype=savable(self.dtype, device)) if saves else self


@contextmanager
def all_waited_for():
    """A collective that nobody waits for may write to memory of others, and no CUDA graph can be captured with it."""
    works = []

    def watched(start):
        def start_one(*given, **options):
            works.append(mock.Mock(wraps=start(*given, **options)))
            return works[-1]

        return start_one

    with ExitStack() as stack:
        for owner, name in ((collectives, "all_gather"), (collectives, "reduce_scatter"), (dist, "all_reduce")):
            stack.enter_context(mock.patch.object(owner, name, watched(getattr(owner, name))))
        yield
    assert all(work.wait.called for work in works)


def _events(member: Member, call: Call):
    """The collectives that a rank starts in forward and in backward, and windows of dW that it finishes."""
    call = call.on(member.device)
    t = make(call.tokens, ROWS * member.ranks, D, call.dtype, device=member.device)
    t = part(t, member, call.sequence_parallel)
    # A view with gaps, which NCCL does not send.
    x = t.x.detach().repeat(1, 2)[:, :D].requires_grad_("input" not in call.frozen)
    t.weight.requires_grad_("weight" not in call.frozen)
    budgets = {"save": None, "evaluation": None, "save alone": N * ROWS * x.dtype.itemsize}
    options = dict(process_group=member.group, sequence_parallel=call.sequence_parallel, label_smoothing=call.smoothing)
    options["logits_budget"] = budgets.get(call.strategy, 0)
    options["reduction"] = "mean" if call.strategy == "accumulate" else "none"
    options["reduce_dtype"] = getattr(torch, call.reduce_dtype) if call.reduce_dtype else None
    close = GradBuffer.close

    def watched_close(self, start, stop, total):
        events.append(Started("dW", stop - start, "", True, None, True))
        return close(self, start, stop, total)

    with shrunk(call.block_bytes, (8, 16)), started() as events, mock.patch.object(GradBuffer, "close", watched_close):
        with torch.set_grad_enabled(call.strategy != "evaluation"), all_waited_for():
            loss = parallel_lce.linear_cross_entropy(x, t.weight, t.target, **options)
        of_forward = len(events)
        if loss.requires_grad:
            with all_waited_for():
                loss.sum().backward()
    assert events and all(each.asynchronous and each.contiguous for each in events)
    return told(events[:of_forward], member.group), told(events[of_forward:], member.group)


def told(events: list[Started], group) -> list[tuple]:
    """The kind, the number of elements, their dtype, and whether it is on the group."""
    return [(e.kind, e.size, e.dtype, e.group == group) for e in events]


def expected(call: Call, device: str) -> tuple[list, list]:
    """Forward's and backward's collectives, from the docstring of ``linear_cross_entropy``."""
    call = call.on(device)
    tokens, B, P = call.tokens, call.blocks, call.ranks
    low = str(DTYPES[call.dtype]).removeprefix("torch.")
    wide = "float64" if call.dtype == "fp64" else "float32"
    columns = 4 if call.smoothing else 3
    if backend_of(torch.empty(1, 1, dtype=DTYPES[call.dtype], device=device)).NAME == "triton":
        columns += 2 if call.smoothing else 1
    hidden = [("all_gather", tokens // P // B * D, low, True)] * (B if call.sequence_parallel else 0)
    reduce = [(REDUCTIONS[call.sequence_parallel], tokens // B * D, call.reduce_dtype or low, True)] * (
        B if "input" not in call.frozen else 0
    )
    if call.strategy == "accumulate":
        partials = [("all_gather", columns * (tokens // B) + 3, wide, True)] * B
        return hidden + partials + reduce, []
    needs = call.frozen != "input weight" and call.strategy != "evaluation"
    # Where nothing is kept, all hidden states of so few tokens are gathered at once.
    whole = [("all_gather", tokens // P * D, low, True)] * call.sequence_parallel
    forward = whole + [("all_gather", columns * tokens + 3, wide, True)]
    again = [] if call.strategy == "save" else hidden
    return forward, (again + reduce if needs else [])


def of_collectives(events: list) -> list:
    return [e for e in events if e[0] != "dW"]


CALLS = [
    Call("save", 3, 1, smoothing=0.1),
    Call("save", 2, 1, True, dtype="bf16"),
    Call("save", 2, 1, dtype="bf16", reduce_dtype="float32"),
    Call("save", 2, 1, True, frozen="weight"),
    Call("save", 2, 1, frozen="input weight"),
    Call("save alone", 2, 1, True, dtype="bf16"),
    Call("evaluation", 2, 1),
    Call("by vocabulary", 2, 1, dtype="bf16"),  # dX [N, D] is the smaller accumulator: one block, one reduction
    Call("recompute", 2, 4, True, dtype="bf16", reduce_dtype="float32"),
    Call("recompute", 3, 4, True, smoothing=0.2, dtype="fp64"),
    Call("recompute", 2, 4, True, frozen="weight"),
    Call("accumulate", 3, 4, dtype="bf16", reduce_dtype="float32"),
    Call("accumulate", 2, 4, True, frozen="input"),
    Call("accumulate", 2, 4, True),
]


@pytest.mark.parametrize("call", CALLS, ids=str)
def test_a_call_has_the_expected_collectives_in_order(call, worlds, device):
    forward, backward = expected(call, device)
    everyone = worlds(call.ranks).run(_events, call)
    for rank, events in enumerate(everyone):
        assert [of_collectives(e) for e in events] == [of_collectives(e) for e in everyone[0]], f"rank {rank}"
        if not call.frozen and call.strategy != "evaluation":
            assert_dx_is_on_its_way_while_dw_is_computed(call, events[0] + events[1])
    found_forward, found_backward = map(of_collectives, everyone[0])
    # Gathers run ahead, so that blocks interleave: the docstring states numbers and sizes, and the order of its kinds.
    assert sorted(found_forward) == sorted(forward)
    assert sorted(found_backward) == sorted(backward)
    if call.strategy != "accumulate":
        assert found_forward == forward
    # Gathers of hidden states run a block ahead of the sums of dX.
    events, hidden = found_backward or found_forward, call.tokens // call.ranks // call.blocks * D
    gathers = [i for i, event in enumerate(events) if event[:2] == ("all_gather", hidden)]
    sums = [i for i, event in enumerate(events) if event[0] == "reduce_scatter"]
    assert all(gathered < reduced for gathered, reduced in zip(gathers[1:], sums))


def assert_dx_is_on_its_way_while_dw_is_computed(call: Call, events: list) -> None:
    """In every block the reduction of dX starts before the last window of dW is finished."""
    order = [e[0] for e in events if e[0] in ("dW", *REDUCTIONS)]
    starts = [i for i, kind in enumerate(order) if kind in REDUCTIONS]
    assert len(starts) == call.blocks and order[-1] == "dW"
    for start, following in zip(starts, [*starts[1:], len(order)]):
        assert "dW" in order[start + 1 : following]


@pytest.mark.parametrize("frozen", ["", "weight"])
@on_ranks(2)
def test_triton_waits_for_hidden_states_that_it_reads_late_or_not_at_all(member, frozen, kernels):
    with chosen_backend("triton"):
        _events(member, Call("save alone", 2, 1, True, "bf16", frozen=frozen))


@pytest.mark.parametrize("names", [("entropy",), ("argmax", "mean_logit")], ids=str)
@on_ranks(2)
def test_statistics_gather_what_was_asked_for(member, names):
    t = part(make(N, ROWS * member.ranks, D, device=member.device), member)
    with started() as events:
        parallel_lce.token_statistics(t.x, t.weight, t.target, process_group=member.group, **dict.fromkeys(names, True))
    columns = 3 + len(names) + ("mean_logit" in names)
    assert told(events, member.group) == [("all_gather", columns * N + 3, "float32", True)]


@pytest.mark.parametrize("split", [False, True])
@pytest.mark.parametrize("reduction", ["none", "mean"])
@on_ranks(2)
def test_a_divergence_reduces_only_with_gradients_and_repeats_its_bits(member, reduction, split):
    t = part(make(N, ROWS * 2, D, device=member.device), member, split)
    given = t.x, t.weight, t.x.detach()[:, :3], t.weight.detach()[:, :3]
    options = dict(process_group=member.group, sequence_parallel=split, reduction=reduction)
    gathers = [("all_gather", N // 2 * D), ("all_gather", N // 2 * 3)] * split
    reduced = [("reduce_scatter" if split else "all_reduce", N * D)]
    forward, backward = gathers + [("all_gather", 6 * N + 3), ("all_gather", 2 * N)], gathers + reduced
    if reduction == "mean":
        forward, backward = forward + reduced, []
    with torch.no_grad(), started() as found:
        divergence(*given, **options)
    assert {each.kind for each in found} == {"all_gather"}
    runs = []
    for _ in range(2):
        with started() as found:
            value = divergence(*given, **options)
            of_forward = len(found)
            runs.append([value, *torch.autograd.grad(value.sum(), [t.x, t.weight])])
        assert all(each.group == member.group and each.asynchronous for each in found)
        found = [(each.kind, each.size) for each in found]
        assert found[:of_forward] == forward and sorted(found[of_forward:]) == sorted(backward)
    assert all(map(torch.equal, *runs))


def _statistics(x, weight, target, **options):
    return parallel_lce.token_statistics(x, weight, target, **options).target_log_prob


def _selected(x, weight, target, **options):
    return parallel_lce.selected_log_probs(x, weight, target[:, None], **options)


@pytest.mark.parametrize("function", [parallel_lce.linear_cross_entropy, _statistics, _selected])
@on_ranks(2)
def test_a_message_that_does_not_arrive_gives_nan(member, function, backend):
    """gloo accepts a shorter message than the buffer has room for, from a rank that calls with fewer tokens. The rest
    of the buffer then is what an earlier call has left there: trailers of all ranks."""
    t = part(make(N, ROWS * 2, D, device=member.device), member)
    loss = lambda: function(t.x, t.weight, t.target, process_group=member.group)  # noqa: E731
    with mock.patch.object(collectives, "all_gather", wraps=collectives.all_gather) as gathers:
        assert loss().isfinite().all()
    left, _ = gathers.call_args.args

    def nothing(*_, **__):
        return SimpleNamespace(wait=lambda: None)

    def leftover(new):
        def allocate(*given, **options):
            made = new(*given, **options)
            return made.copy_(left.view(made.shape)) if made.numel() == left.numel() else made

        return allocate

    with ExitStack() as stack, torch.no_grad():
        stack.enter_context(mock.patch.object(collectives, "all_gather", nothing))
        for name in ("new_empty", "new_zeros"):
            allocate = leftover(getattr(torch.Tensor, name))
            stack.enter_context(mock.patch.object(torch.Tensor, name, allocate))
        assert loss().isnan().all()


@on_ranks(2)
def test_a_message_of_another_block_gives_nan(member, backend):
    t, gathered = part(make(N, ROWS * 2, D, device=member.device), member), []
    start = collectives.all_gather

    def late(whole, own, **options):
        """The other rank's second message is its first."""
        start(whole, own, **options).wait()
        gathered.append(whole.clone())
        if len(gathered) == 2:
            whole.view(2, -1)[1 - member.rank] = gathered[0].view(2, -1)[1 - member.rank]
        return SimpleNamespace(wait=lambda: None)

    with shrunk(N // 4 * ROWS * 4), mock.patch.object(collectives, "all_gather", late):
        options = dict(process_group=member.group, logits_budget=0)
        assert parallel_lce.linear_cross_entropy(t.x, t.weight, t.target, **options).isnan()
    assert len(gathered) > 2


@on_ranks(2)
def test_one_rank_needs_none(member):
    groups = [dist.new_group([r]) for r in range(member.ranks)]
    t = part(make(N, ROWS, D, device=member.device), Member(0, 1, member.device, None))
    with started() as found:
        for group in (None, groups[member.rank]):
            options = dict(process_group=group, sequence_parallel=True)
            parallel_lce.linear_cross_entropy(t.x, t.weight, t.target, **options).backward()
    assert found == []


@pytest.mark.parametrize(("reduction", "sequence_parallel"), [("none", True), ("mean", False)])
@on_ranks(2)
def test_a_sum_of_dx_in_fp32_that_cancels_keeps_its_digits(member, reduction, sequence_parallel):
    """All rows of the weight share an offset, which adds nothing to the sum over the vocabulary, where the logits'
    gradient adds up to 0, but to each rank's part."""
    whole = make(N, ROWS * 2, 16, "bf16", member.device)
    whole.weight += 8
    x, w = whole.x.double(), whole.weight.double()
    g = (torch.softmax(x @ w.t(), 1) - torch.nn.functional.one_hot(whole.target, len(w))) / N
    parts = [a @ b for a, b in zip(g.chunk(2, 1), w.chunk(2))]
    assert sum(map(size, parts)) > 10 * size(sum(parts)), "the case must cancel"
    truth = sum(parts).chunk(2)[member.rank] if sequence_parallel else sum(parts)
    t, found = part(whole, member, sequence_parallel), []
    for reduce_dtype in (None, torch.float32):
        options = dict(process_group=member.group, sequence_parallel=sequence_parallel, reduce_dtype=reduce_dtype)
        with shrunk(N // 2 * ROWS * 2, (8, 16)):
            loss = parallel_lce.linear_cross_entropy(t.x, t.weight, t.target, reduction=reduction, **options).sum()
            found.append(torch.autograd.grad(loss / (N if reduction == "none" else 1), [t.x, t.weight]))
        assert [gradient.dtype for gradient in found[-1]] == [torch.bfloat16] * 2
    errors, of_weight = [error(dx, truth) for dx, _ in found], [dw for _, dw in found]
    # What is left is the rounding of the logits' gradient, which the sum's does not add to.
    assert errors[1] <= 0.5 * errors[0] and torch.equal(*of_weight), errors
