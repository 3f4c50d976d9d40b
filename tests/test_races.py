"""The same bits from run to run and on every rank, also of calls that random delays tear apart: between ranks, between
a rank's host and its GPU, and between the streams of that. Whatever waits too little reads what is not there yet, or
what is there no more.

Every repetition finds other data in the same memory. Inputs are overwritten as soon as backward has
returned, and the memory that the call has freed is filled with NaN. The bits must be those of an undisturbed
run, each of whose collectives is over before the next line runs.
"""

from __future__ import annotations

import random
import time
from contextlib import ExitStack, contextmanager, nullcontext
from dataclasses import replace
from unittest import mock

import pytest
import torch
import torch.distributed as dist

from blocks import watched_backwards
from parallel_lce.backends import backend_of
from parallel_lce.core import collectives
from steps import Call, Step
from tools import chosen_backend, everywhere
from world import Member

DATA = 5  # sets of inputs; repetitions that follow each other have different ones
REPETITIONS = {"cpu": 20, "cuda": 200}
SLEEP = 2e-3  # seconds that a host sleeps at most, at one place
CYCLES = 3_000_000  # of a GPU asleep at most, at one place: some 2 ms
OFTEN = 0.12  # of the places where a delay may be


# Tokens of the whole sequence, rows of an equal shard, hidden size. On GPUs messages are too large for the buffers of
# NCCL, so that it reads and writes while they are sent.
SIZES = {"cpu": (48, 40, 4), "cuda": (6144, 1024, 1024)}

CALLS = [
    Call("saved", 2, bias=True, deterministic=False),
    Call("saved", 2, True),
    Call("hidden states gathered again", 3, True, "fp32", deterministic=False),
    Call("some rows saved", 2, True, bias=True, deterministic=False),
    Call("accumulated", 3, True, "fp32", deterministic=False),
    Call("saved", 2, True, shards=(60, 15), vocab_size=70),
    Call("recomputed", 3, shards=(10, 0, 85), vocab_size=90, deterministic=False),
    Call("accumulated, sums in fp32", 2, True),
    Call("hidden states gathered again", 2, True, backend="triton"),
    Call("accumulated", backend="triton", bias=True, deterministic=False),
    Call("statistics", 3, True, backend="triton", shards=(0, 60, 60), deterministic=False),
    Call("saved", 2, True, streams=2),
    Call("recomputed", 2, True, streams=2),
    Call("accumulated", 2, streams=2),
]
COLLECTIVES = [(collectives, "all_gather"), (collectives, "reduce_scatter"), (dist, "all_reduce")]


def step_of(member: Member, call: Call) -> Step:
    N, rows, D = SIZES[member.device.type]
    # Shards are given for a CPU's size.
    scale = rows // SIZES["cpu"][1]
    shards = (rows,) * member.ranks if call.shards is None else tuple(n * scale for n in call.shards)
    call = replace(call, shards=shards, vocab_size=call.vocab_size and call.vocab_size * scale)
    return Step(member, call, (N, sum(shards), D), (16, 16) if scale == 1 else None)


def delays(seed: int, device: torch.device):
    """A function that holds a rank up at times: its host, or its GPU on the current stream."""
    drawn = random.Random(seed)

    def delay(*_) -> None:
        if drawn.random() < OFTEN:
            time.sleep(drawn.random() * SLEEP)
        if device.type == "cuda" and drawn.random() < OFTEN:
            torch.cuda._sleep(int(drawn.random() * CYCLES))

    return delay


@contextmanager
def around(places, before, after):
    """``before()`` and ``after(name, result)`` of each of these functions; what ``after`` returns is the result."""

    def within(name, original):
        def call(*arguments, **options):
            before()
            result = original(*arguments, **options)
            other = after(name, result)
            return result if other is None else other

        return call

    with ExitStack() as stack:
        for owner, name in places:
            stack.enter_context(mock.patch.object(owner, name, within(name, getattr(owner, name))))
        yield


def steps_of(weight: torch.Tensor) -> list:
    """The collectives, and the backend's functions of a block."""
    blocks = "block_forward", "block_backward", "merge_ranks"
    return [*COLLECTIVES, *((backend_of(weight), name) for name in blocks)]


@torch.no_grad()
def spoil(step: Step) -> None:
    """Overwrite the inputs, and what the allocator is going to hand out, as it is on this stream."""
    for tensor in step.tensors:
        tensor.fill_(torch.nan if tensor.is_floating_point() else 0)
    (N, rows, D), P = SIZES[step.x.device.type], step.member.ranks
    numbers = (step.x.numel(), N * D, step.weight.numel(), N * rows, P * (4 * N + 2), N)
    held = [
        torch.full((n // parts,), torch.nan, dtype=dtype, device=step.x.device)
        for n in numbers
        for parts in {1, 2, step.strategy.blocks}
        for dtype in (step.x.dtype, torch.float32)
    ]
    del held


def undisturbed(step: Step, tensors) -> list[torch.Tensor]:
    """The results of a set of inputs, each of whose collectives is over before anything else begins."""
    seen, handed = [], set()

    def complete(name: str = "", result=None) -> None:
        seen.append(name)
        if isinstance(result, dist.Work):
            result.wait()
        if step.x.is_cuda:
            torch.cuda.synchronize()

    step.load(tensors)
    with watched_backwards(backend_of(step.weight), lambda task: handed.add(len(task.saved) > 0)):
        with around(steps_of(step.weight), complete, complete):
            found = [tensor.clone() for tensor in step()]
    complete()
    assert (seen.count("block_backward") > 1) == (step.strategy.blocks > 1), "the case must be what it is called"
    assert handed == step.strategy.saved or len(step.weight) == 0
    assert step.member.ranks == 1 or ("merge_ranks" in seen and {n for _, n in COLLECTIVES} & set(seen))
    return found


def _disturbed(member: Member, call: Call, repetitions: int, seed: int):
    """Whether each repetition's loss and gradients have other bits than the undisturbed run's; and the first loss, and
    dX if all ranks have the same."""
    step = step_of(member, call)
    torch.use_deterministic_algorithms(call.deterministic)
    try:
        with chosen_backend(call.backend), step.small_blocks():
            sets = [step.data(number) for number in range(DATA)]
            expected = [undisturbed(step, tensors) for tensors in sets]
            assert all(e.isfinite().all() and e.count_nonzero() for r in expected for e in r if e.numel())
            delay = delays(seed * 64 + member.rank, member.device)
            with around(steps_of(step.weight), delay, delay):
                differs = _torn(step, sets, expected, repetitions, delay)
    finally:
        torch.use_deterministic_algorithms(True)
    same = expected[0][: 1 if call.sequence_parallel else 2]
    return [[d.item() for d in each] for each in differs], [tensor.cpu() for tensor in same]


def _torn(step: Step, sets, expected, repetitions: int, delay) -> list[list[torch.Tensor]]:
    first, second = (torch.cuda.Stream() for _ in range(2)) if step.call.streams == 2 else (None, None)
    differs = []
    for repetition in range(repetitions):
        forward, backward = (first, second) if repetition % 2 else (second, first)
        number = repetition % DATA
        with after_it(forward, backward):
            step.load(sets[number])
            delay()
            loss = step.forward()
            delay()
        with after_it(backward, forward):
            found = step.backward(loss)
            results = [tensor.clone() for tensor in found]
            del loss, found
            spoil(step)
            # Neither has a NaN: what differs in a bit differs in value, or in the sign of a 0, which does not matter.
            differs.append([(a != b).any() for a, b in zip(results, expected[number])])
            delay()
        if first is not None:
            with after_it(forward, backward):
                spoil(step)
    # Hosts have run ahead of their GPUs until here.
    if step.x.is_cuda:
        torch.cuda.synchronize()
    return differs


@contextmanager
def after_it(stream, other):
    """On ``stream``, after all that ``other`` has been given so far."""
    if stream is not None:
        stream.wait_stream(other)
    with nullcontext() if stream is None else torch.cuda.stream(stream):
        yield


@pytest.mark.parametrize("call", CALLS, ids=str)
@pytest.mark.thinned
def test_delays_change_no_bit(call, worlds, device, request):
    repetitions = REPETITIONS[device]
    if call.streams == 2 and device == "cpu":
        pytest.skip("a CPU has no streams")
    if call.backend == "triton":
        request.getfixturevalue("kernels")
        repetitions //= 4 if device == "cpu" else 1
    answers = everywhere(worlds, device, call.ranks, _disturbed, call, repetitions, CALLS.index(call))
    for rank, (differs, same) in enumerate(answers):
        red = [(i, each) for i, each in enumerate(differs) if any(each)]
        assert not red, f"rank {rank}: other bits of loss and gradients in {len(red)} repetitions: {red[:3]}"
        assert all(map(torch.equal, same, answers[0][1])), f"the loss or dX of rank {rank} is another"


def _waited_for(member: Member, call: Call) -> tuple[list[bool], list[bool]]:
    """Whether each collective was waited for when forward had returned, and when backward had: of forward, of both."""
    step, works = step_of(member, call), []

    def watched(name, work):
        works.append(mock.Mock(wraps=work))
        return works[-1]

    with chosen_backend(call.backend), step.small_blocks(), around(COLLECTIVES, lambda: None, watched):
        loss = step.forward()
        forward = [work.wait.called for work in works]
        step.backward(loss)
        return forward, [work.wait.called for work in works]


@pytest.mark.parametrize("frozen", ["", "x", "weight"])
@pytest.mark.parametrize("strategy", ["saved", "some rows saved", "recomputed", "accumulated"])
@pytest.mark.parametrize("sequence_parallel", [False, True])
@pytest.mark.thinned
def test_nothing_is_in_flight_after_a_call(sequence_parallel, strategy, frozen, backend, worlds, device):
    """A collective that nobody waits for may write to memory that is somebody else's by then, and no CUDA
    graph can be captured with it."""
    call = Call(strategy, 2, sequence_parallel, backend=backend, frozen=frozen)
    for forward, both in everywhere(worlds, device, 2, _waited_for, call):
        assert forward and all(forward) and all(both)
        assert len(both) > len(forward) or strategy == "accumulated" or frozen == "x"
