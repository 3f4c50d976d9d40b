"""CUDA graphs of a training step, and steps that never wait for the device. GPUs only."""

from __future__ import annotations

import contextlib

import pytest
import torch

import parallel_lce
from blocks import watched_backwards
from measures import ROUNDED, assert_close
from parallel_lce.backends import backend_of
from parallel_lce.call import prepare
from steps import Call, Step
from tools import alone, chosen_backend, everywhere, recorded, results_of, small
from world import Member

SIZE = 2048, 3000, 256

pytestmark = pytest.mark.parametrize("device", [pytest.param("cuda", marks=pytest.mark.gpu)], indirect=True)


ALONE = ["saved", "some columns saved", "some rows saved, a frozen weight", "recomputed", "accumulated"]
BOTH = [("torch", "fp32"), ("triton", "bf16")]
ON_ONE = [
    Call(name, dtype=dtype, backend=backend)
    for name in ALONE
    for backend, dtype in (*BOTH, ("torch", "bf16"), ("triton", "fp16"))
    # Gradients of fp16 are not formed in forward. fp32 sums are the gradients themselves: columns are saved, not rows.
    if (name, dtype) not in (("accumulated", "fp16"), ("some rows saved, a frozen weight", "fp32"))
]
OVER_RANKS = [
    Call(name, 2, sequence_parallel, dtype, backend)
    for name in ("saved", "hidden states gathered again", "some rows saved", "recomputed", "a frozen weight")
    + ("accumulated", "accumulated, sums in fp32")
    for sequence_parallel in (False, True)
    for backend, dtype in BOTH
    # Without sequence parallelism hidden states are not gathered; sums of fp32 are fp32 anyway.
    if (sequence_parallel or "gathered" not in name) and ("fp32" not in name or dtype == "bf16")
]


def warm_up(step: Step) -> None:
    """On a stream aside; and the step must be what it is called."""
    handed, strategy = [], step.strategy
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    watch = watched_backwards(backend_of(step.weight), lambda task: handed.append(len(task.saved) > 0))
    with torch.cuda.stream(stream):
        with watch, recorded(step.member.group) as events:
            step()
        assert set(handed) == strategy.saved, handed
        if step.member.ranks > 1:
            assert (len(handed) > 1) == (strategy.blocks > 1), handed
            assert sum(e[0] in ("all_reduce", "reduce_scatter") for e in events) == len(handed)
        for _ in range(2):
            step()
    torch.cuda.current_stream().wait_stream(stream)
    torch.cuda.synchronize()


def assert_same(found, expected, dtype: str) -> None:
    for a, b in zip(found, expected, strict=True):
        assert b.isfinite().all() and b.any()
        assert_close(a, b, ROUNDED[dtype])


@contextlib.contextmanager
def never_waiting():
    """Whatever waits for the device raises."""
    torch.cuda.set_sync_debug_mode("error")
    try:
        yield
    finally:
        torch.cuda.set_sync_debug_mode("default")


def _captured(member: Member, call: Call) -> torch.Tensor:
    """The last loss of a graph of the step: on other data each replay gives what the step gives."""
    step = Step(member, call, SIZE)
    with step.small_blocks():
        warm_up(step)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            captured = step()
        for seed in (1, 2):
            step.load(step.data(seed))
            graph.replay()
            found = [tensor.clone() for tensor in captured]
            # The same kernels; but cuBLAS may choose them by an address.
            assert_same(found, step(), call.dtype)
            graph.replay()
            torch.cuda.synchronize()
            assert all(torch.equal(a, b) for a, b in zip(found, captured)), "what was kept is there again"
    # The communicator must outlive what was captured of it.
    graph.reset()
    return found[0].cpu()


@pytest.mark.parametrize("call", [*ON_ONE, *OVER_RANKS], ids=str)
def test_a_captured_step_replays_on_other_data(call, worlds, device):
    with chosen_backend(call.backend):
        first, *others = everywhere(worlds, device, call.ranks, _captured, call)
    assert all(torch.equal(first, other) for other in others), "the loss differs by rank"


@pytest.mark.parametrize("name", ["filtered", "filtered, recomputed"])
def test_filtered_steps_are_captured_and_never_wait(name, device):
    from parallel_lce.backends import triton_filter

    prepare.KNOWN.clear()
    call = Call(name, backend="triton")
    with chosen_backend("triton"), results_of(triton_filter, "list_active_windows") as listed:
        _captured(alone(device), call)
        assert bool(listed) == (name != "filtered")
        step = Step(alone(device), call, SIZE)
        with step.small_blocks():
            warm_up(step)
            with never_waiting():
                step()


def _first_call(member: Member, call: Call) -> bool:
    """A forward and a step, over ranks of a shape that this process has not seen; and whether the next step has
    returned while the device, which was asleep when it began, still is."""
    # Kernels and what NCCL connects at first are of any shape.
    known = Step(member, call, SIZE)
    with known.small_blocks():
        warm_up(known)
    N, V, D = SIZE
    fresh = known if member.ranks == 1 else Step(member, call, (N + 384, V + 1024, D + 64))
    with fresh.small_blocks():
        with never_waiting():
            with torch.no_grad():
                evaluated = fresh.forward()
            found = fresh()
        assert_same([evaluated], found[:1], call.dtype)
        # Memory for the next step is there, and the launches of a step fit the queue of the device.
        found = [tensor.clone() for tensor in found]
        torch.cuda.synchronize()
        asleep = torch.cuda.Event()
        torch.cuda._sleep(1_000_000_000)
        asleep.record()
        with never_waiting():
            again = fresh()
        ahead = not asleep.query()
        torch.cuda.synchronize()
        assert_same(again, found, call.dtype)
    return ahead


@pytest.mark.parametrize("call", [*ON_ONE, *OVER_RANKS], ids=str)
def test_nobody_waits_for_the_device(call, worlds, device):
    with chosen_backend(call.backend):
        assert everywhere(worlds, device, call.ranks, _first_call, call) == [True] * call.ranks


@pytest.mark.parametrize("call", [c for c in ON_ONE if (c.backend, c.dtype) in BOTH], ids=str)
def test_graphs_of_the_compiler(call, device):
    """``mode="reduce-overhead"``: the compiler's own graphs leave out what they do not know of."""
    torch._dynamo.reset()
    step = Step(alone(device), call, SIZE)
    compiled = torch.compile(parallel_lce.linear_cross_entropy, fullgraph=True, mode="reduce-overhead")
    with chosen_backend(call.backend), step.small_blocks():
        for seed in range(4):
            step.load(step.data(seed))
            torch.compiler.cudagraph_mark_step_begin()
            found = [tensor.clone() for tensor in step.backward(step.forward(compiled))]
            assert_same(found, step(), call.dtype)


def test_a_number_of_counted_tokens_spares_the_wait(device):
    t = small(device, N=48, ignored="some")
    options = dict(counted_tokens=int((t.target != -100).sum()))
    step = lambda: parallel_lce.linear_cross_entropy(t.x, t.weight, t.target, **options).backward()  # noqa: E731
    step()
    with never_waiting():
        step()


def test_the_check_sees_a_step_that_waits(device):
    with pytest.raises(RuntimeError, match="synchronizing"), never_waiting():
        torch.ones(1, device=device).item()
