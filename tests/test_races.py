"""Calls that random delays tear apart: between ranks, between a rank's host and its GPU, and between the
streams of that. Whatever waits too little reads what is not there yet, or what is there no more.

Every repetition finds other data in the same memory. Inputs are overwritten as soon as backward has
returned, and the memory that the call has freed is filled with NaN. The bits must be those of an undisturbed
run, each of whose collectives is over before the next line runs.
"""

from __future__ import annotations

import random
import time
from contextlib import ExitStack, contextmanager, nullcontext
from dataclasses import dataclass
from unittest import mock

import pytest
import torch
import torch.distributed as dist

import parallel_lce
from cases import DTYPES, Case, make, part
from parallel_lce.backends import backend_of
from parallel_lce.core import collectives
from tools import chosen_backend, everywhere, shrunk
from world import Member

DATA = 5  # sets of inputs; repetitions that follow each other have different ones
REPETITIONS = {"cpu": 20, "cuda": 200}
SLEEP = 2e-3  # seconds that a host sleeps at most, at one place
CYCLES = 3_000_000  # of a GPU asleep at most, at one place: some 2 ms
OFTEN = 0.12  # of the places where a delay may be


@dataclass(frozen=True)
class Call:
    """``budget``: in logits of an equal shard, None for the default. ``blocks``: of rows, what does not fit.
    ``streams``: of the caller's on a GPU, one for the forward and one for the backward, in turns."""

    strategy: str
    budget: float | None = None
    reduction: str = "none"
    blocks: int = 1
    ranks: int = 2
    sequence_parallel: bool = False
    dtype: str = "bf16"
    backend: str = ""
    shards: tuple[int, ...] | None = None
    vocab_size: int | None = None
    reduce_dtype: torch.dtype | None = None
    smoothing: float = 0.0
    frozen: str = ""
    streams: int = 1

    def __str__(self) -> str:
        defaults = type(self).__dataclass_fields__
        changed = [f"{n}={v}" for n, v in vars(self).items() if v != defaults[n].default]
        return "-".join(changed).removeprefix("strategy=")


@dataclass(frozen=True)
class Size:
    """Tokens of the whole sequence, rows of an equal shard, hidden size."""

    N: int
    rows: int
    D: int


# On GPUs messages are too large for the buffers of NCCL, so that it reads and writes while they are sent.
SIZES = {"cpu": Size(48, 40, 4), "cuda": Size(6144, 1024, 1024)}

CALLS = [
    Call("saved"),
    Call("saved", sequence_parallel=True),
    Call("hidden gathered again", 1.0, sequence_parallel=True, dtype="fp32", ranks=3),
    Call("recomputed", 0.0, blocks=4, reduce_dtype=torch.float32),
    Call("recomputed", 0.0, blocks=4, sequence_parallel=True, ranks=3),
    Call("some saved", 0.7, blocks=4, sequence_parallel=True),
    Call("accumulated", 0.0, "mean", blocks=4, smoothing=0.1),
    Call("accumulated", 0.0, "mean", blocks=4, sequence_parallel=True, ranks=3, dtype="fp32"),
    Call("uneven, saved", shards=(60, 15), vocab_size=70, sequence_parallel=True),
    Call("uneven, recomputed", 0.0, blocks=4, ranks=3, shards=(10, 0, 85), vocab_size=90),
    Call("accumulated", 0.0, "mean", blocks=4, sequence_parallel=True, reduce_dtype=torch.float32),
    Call("hidden gathered again", 1.0, sequence_parallel=True, backend="triton"),
]
ON_STREAMS = [
    Call("saved", streams=2),
    Call("saved", sequence_parallel=True, streams=2),
    Call("hidden gathered again", 1.0, sequence_parallel=True, streams=2),
    Call("recomputed", 0.0, blocks=4, sequence_parallel=True, streams=2),
    Call("accumulated", 0.0, "mean", blocks=4, streams=2),
]


COLLECTIVES = [(collectives, "all_gather"), (collectives, "reduce_scatter"), (dist, "all_reduce")]


class Delays:
    """Where a rank may be held up, it is at times: its host, or its GPU on the current stream."""

    def __init__(self, seed: int, device: torch.device) -> None:
        self._random, self._cuda = random.Random(seed), device.type == "cuda"

    def __call__(self, *_) -> None:
        if self._random.random() < OFTEN:
            time.sleep(self._random.random() * SLEEP)
        if self._cuda and self._random.random() < OFTEN:
            torch.cuda._sleep(int(self._random.random() * CYCLES))


@contextmanager
def around(weight: torch.Tensor, before, after):
    """``before(name)`` and ``after(name, result)`` of each collective, and each of the backend's block functions."""
    backend = backend_of(weight)

    def within(owner, name):
        original = getattr(owner, name)

        def call(*arguments, **options):
            before(name)
            result = original(*arguments, **options)
            after(name, result)
            return result

        return mock.patch.object(owner, name, call)

    blocks = [(backend, name) for name in ("block_forward", "block_backward", "merge_ranks")]
    with ExitStack() as stack:
        for place in (*COLLECTIVES, *blocks):
            stack.enter_context(within(*place))
        yield


class Problem:
    """A call's inputs on this rank, in memory that stays where it is, and what it makes of them."""

    def __init__(self, member: Member, call: Call) -> None:
        self.member, self.call = member, call
        size, ranks = SIZES[member.device.type], member.ranks
        # Shards are given for a CPU's size.
        scale = size.rows // SIZES["cpu"].rows
        self.shards = shards = tuple([size.rows] * ranks if call.shards is None else [n * scale for n in call.shards])
        self.vocab_size = call.vocab_size and call.vocab_size * scale
        self.start = sum(shards[: member.rank])
        self.sets = [self._data(size, sum(shards), seed) for seed in range(DATA)]
        self.x, self.weight, self.target, self.upstream = (v.clone() for v in self.sets[0])
        self.leaves = [v.requires_grad_() for n, v in (("x", self.x), ("weight", self.weight)) if n not in call.frozen]
        itemsize = DTYPES[call.dtype].itemsize
        counted = size.rows if self.vocab_size is None else -(-self.vocab_size // ranks)
        logits = size.N * counted * itemsize
        self.budget = None if call.budget is None else int(call.budget * logits)
        in_flight = 2 if call.reduction == "mean" else 1
        self.block_bytes = in_flight * logits // call.blocks

    def _data(self, size: Size, V: int, seed: int):
        member, call = self.member, self.call
        t = make(
            Case(size.N, V, size.D, call.dtype, ignored="some", reduction=call.reduction, seed=seed), member.device
        )
        if self.vocab_size is not None:
            t.target[t.target >= self.vocab_size] = 0
        t = part(t, member, call.sequence_parallel, self.shards)
        return t.x.detach(), t.weight.detach(), t.target, t.upstream

    @torch.no_grad()
    def load(self, number: int) -> None:
        for mine, other in zip((self.x, self.weight, self.target, self.upstream), self.sets[number]):
            mine.copy_(other)

    @torch.no_grad()
    def spoil(self) -> None:
        """Overwrite the inputs, and what the allocator is going to hand out, as it is on this stream."""
        for tensor in (self.x, self.weight, self.upstream):
            tensor.fill_(torch.nan)
        self.target.fill_(0)
        size, P = SIZES[self.x.device.type], self.member.ranks
        logits = size.N * size.rows
        numbers = (self.x.numel(), size.N * size.D, self.weight.numel(), logits, P * (4 * size.N + 2), size.N)
        held = [
            torch.full((n // parts,), torch.nan, dtype=dtype, device=self.x.device)
            for n in numbers
            for parts in (1, 2, self.call.blocks)
            for dtype in (self.x.dtype, torch.float32)
        ]
        del held

    def forward(self) -> torch.Tensor:
        call = self.call
        return parallel_lce.linear_cross_entropy(
            self.x,
            self.weight,
            self.target,
            reduction=call.reduction,
            label_smoothing=call.smoothing,
            process_group=self.member.group,
            sequence_parallel=call.sequence_parallel,
            vocab_start=None if call.shards is None else self.start,
            vocab_size=self.vocab_size,
            logits_budget=self.budget,
            reduce_dtype=call.reduce_dtype,
        )

    def backward(self, loss: torch.Tensor) -> list[torch.Tensor]:
        return [loss.detach(), *torch.autograd.grad(loss, self.leaves, self.upstream.to(loss.dtype))]

    @contextmanager
    def small_blocks(self):
        with chosen_backend(self.call.backend), shrunk(self.block_bytes, (16, 16) if self._tiny else None):
            yield

    @property
    def _tiny(self) -> bool:
        return self.x.device.type == "cpu"


def undisturbed(problem: Problem, number: int) -> list[torch.Tensor]:
    """The results of a set of inputs, each of whose collectives is over before anything else begins."""
    seen = []

    def complete(name: str = "", result=None) -> None:
        seen.append(name)
        if isinstance(result, dist.Work):
            result.wait()
        if problem.x.is_cuda:
            torch.cuda.synchronize()

    problem.load(number)
    with around(problem.weight, lambda name: complete(), complete):
        found = [tensor.clone() for tensor in problem.backward(problem.forward())]
    complete()
    assert (seen.count("block_backward") > 1) == (problem.call.blocks > 1), "the case must be what it is called"
    assert "merge_ranks" in seen and {n for _, n in COLLECTIVES} & set(seen)
    return found


def _disturbed(member: Member, call: Call, repetitions: int, seed: int) -> list[list[bool]]:
    """Whether each repetition's loss and gradients have other bits than the undisturbed run's."""
    problem = Problem(member, call)
    with problem.small_blocks():
        expected = [undisturbed(problem, number) for number in range(DATA)]
        assert all(e.isfinite().all() and e.count_nonzero() for r in expected for e in r if e.numel())
        first, second = (torch.cuda.Stream() for _ in range(2)) if call.streams == 2 else (None, None)
        differs = []
        delay = Delays(seed * 64 + member.rank, member.device)
        with around(problem.weight, delay, delay):
            for repetition in range(repetitions):
                forward, backward = (first, second) if repetition % 2 else (second, first)
                number = repetition % DATA
                with after_it(forward, backward):
                    problem.load(number)
                    delay()
                    loss = problem.forward()
                    delay()
                with after_it(backward, forward):
                    found = problem.backward(loss)
                    results = [tensor.clone() for tensor in found]
                    del loss, found
                    problem.spoil()
                    differs.append([(bits(a) != bits(b)).any() for a, b in zip(results, expected[number])])
                    delay()
                if call.streams == 2:
                    with after_it(forward, backward):
                        problem.spoil()
        # Hosts have run ahead of their GPUs until here.
        if member.device.type == "cuda":
            torch.cuda.synchronize()
        return [[d.item() for d in each] for each in differs]


def bits(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.reshape(-1).view(torch.uint8)


@contextmanager
def after_it(stream, other):
    """On ``stream``, after all that ``other`` has been given so far."""
    if stream is None:
        with nullcontext():
            yield
        return
    stream.wait_stream(other)
    with torch.cuda.stream(stream):
        yield


def assert_undisturbed(found: list, repetitions: int) -> None:
    for rank, differs in enumerate(found):
        assert len(differs) == repetitions
        red = [i for i, each in enumerate(differs) if any(each)]
        assert not red, (
            f"rank {rank}: other bits in {len(red)} of {repetitions} repetitions, the first {red[:5]}; there of "
            f"loss and gradients: {differs[red[0]]}"
        )


@pytest.mark.parametrize("call", CALLS, ids=str)
@pytest.mark.thinned
def test_delays_change_no_bit(call, worlds, device, request):
    repetitions = REPETITIONS[device]
    if call.backend == "triton":
        request.getfixturevalue("kernels")
        repetitions //= 4 if device == "cpu" else 1
    found = everywhere(worlds, device, call.ranks, _disturbed, call, repetitions, CALLS.index(call))
    assert_undisturbed(found, repetitions)


@pytest.mark.parametrize("call", ON_STREAMS, ids=str)
def test_two_streams_of_the_caller_s(call, worlds, device):
    """One has the forward, the other the backward, and they change places from step to step."""
    if device == "cpu":
        pytest.skip("a CPU has no streams")
    repetitions = REPETITIONS[device]
    found = everywhere(worlds, device, call.ranks, _disturbed, call, repetitions, ON_STREAMS.index(call))
    assert_undisturbed(found, repetitions)


# --- what is left behind ---------------------------------------------------------------------------


class _Watched:
    """A collective's handle that remembers whether it was waited for."""

    def __init__(self, work: dist.Work, kind: str) -> None:
        self._work, self.kind, self.waits = work, kind, 0

    def wait(self, *arguments):
        self.waits += 1
        return self._work.wait(*arguments)


def _in_flight(member: Member, call: Call):
    """Of forward and of backward: how many collectives they start, and the kinds of those that were not
    waited for when they had returned."""
    problem, works = Problem(member, call), []

    def watched(owner, name):
        original = getattr(owner, name)

        def start(*arguments, **options):
            works.append(_Watched(original(*arguments, **options), name))
            return works[-1]

        return mock.patch.object(owner, name, start)

    with ExitStack() as stack:
        stack.enter_context(problem.small_blocks())
        for place in COLLECTIVES:
            stack.enter_context(watched(*place))
        problem.load(0)
        loss = problem.forward()
        forward = len(works), [w.kind for w in works if not w.waits]
        works.clear()
        problem.backward(loss)
        backward = len(works), [w.kind for w in works if not w.waits]
    for work in works:
        work._work.wait()
    return forward, backward


@pytest.mark.parametrize("frozen", ["", "x", "weight"])
@pytest.mark.parametrize("strategy", ["saved", "hidden gathered again", "some saved", "recomputed", "accumulated"])
@pytest.mark.parametrize("sequence_parallel", [False, True])
@pytest.mark.thinned
def test_nothing_is_in_flight_after_a_call(sequence_parallel, strategy, frozen, backend, worlds, device):
    """A collective that nobody waits for may write to memory that is somebody else's by then, and no CUDA
    graph can be captured with it."""
    budget = {"saved": None, "hidden gathered again": 1.0, "some saved": 0.7}.get(strategy, 0.0)
    call = Call(
        strategy,
        budget,
        "mean" if strategy == "accumulated" else "none",
        blocks=1 if strategy in ("saved", "hidden gathered again") else 4,
        sequence_parallel=sequence_parallel,
        backend=backend,
        frozen=frozen,
    )
    for (started, left), (again, left_again) in everywhere(worlds, device, 2, _in_flight, call):
        assert started > 0 and (again > 0 or strategy == "accumulated" or frozen == "x")
        assert (left, left_again) == ([], [])
