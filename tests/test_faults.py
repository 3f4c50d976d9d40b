"""Faults, made on purpose, and what is rare without being one. docs/faults.md lists them.

A faulty rank would take the shared processes of other tests with it. So these tests start processes of their own, with
a group of a short timeout. The last rank is the faulty one.
"""

import os
import re
import signal
import tempfile
import time
from collections import defaultdict
from contextlib import ExitStack, contextmanager, suppress
from datetime import timedelta
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch.utils._python_dispatch import TorchDispatchMode

import parallel_lce
from cases import make, part
from parallel_lce.core import collectives
from parallel_lce.core.grad_buffers import MainGrad
from parallel_lce.distillation import divergence
from parallel_lce.run.entry import fused_loss
from releases import ROOT
from tools import REDUCED, chosen_backend, given, on_ranks, shrunk, small
from world import Member, configure, forkserver

pytestmark = pytest.mark.slow

TIMEOUT = 4.0  # seconds, of the faulty group
SLACK = 10.0  # seconds that busy cores may take
N, V, D = 24, 40, 8
BLOCKS = 1000, (8, 16)  # of these sizes; see shrunk


def of_call(name: str, t, group=None, **options) -> torch.Tensor:
    """The loss, by the name of a strategy of :data:`REDUCED`, or the divergence from a teacher."""
    if name in REDUCED:
        options = REDUCED[name] | options
        return parallel_lce.linear_cross_entropy(t.x, t.weight, t.target, process_group=group, **options).sum()
    return divergence(t.x, t.weight, 2 * t.x.detach(), t.weight.detach(), process_group=group, **options)


def step_of(name: str, t, group=None, **options) -> list[torch.Tensor]:
    loss = of_call(name, t, group, **options)
    return [loss.detach(), *torch.autograd.grad(loss, [t.x, t.weight])]


def same(found, expected) -> bool:
    return all(map(torch.equal, found, expected))


# --- processes of which one fails ------------------------------------------------------------------


def _serve(rank: int, ranks: int, folder: str, pipe, body, given) -> None:
    torch.set_num_threads(1)
    configure()
    store = dist.FileStore(os.path.join(folder, "store"), ranks)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=ranks)
    member = Member(rank, ranks, torch.device("cpu"), dist.new_group(timeout=timedelta(seconds=TIMEOUT)))
    dist.barrier()
    with chosen_backend("torch"), shrunk(*BLOCKS):
        body(member, lambda *note: pipe.send(note), *given)


def ends(body, *given) -> list[dict]:
    """What ``body(member, note, *given)`` notes on each of two ranks, by a word, and its exit "code". A second rank
    that was stopped goes on when the first has ended."""
    context, ranks = forkserver(), 2
    pipes = [context.Pipe(duplex=False) for _ in range(ranks)]
    with tempfile.TemporaryDirectory() as folder:
        arguments = [(rank, ranks, folder, pipes[rank][1], body, given) for rank in range(ranks)]
        processes = [context.Process(target=_serve, args=each) for each in arguments]
        for process, (_, sent) in zip(processes, pipes):
            process.start()
            sent.close()
        try:
            limit = time.monotonic() + 2 * TIMEOUT + 3 * SLACK
            for process in processes:
                if process is processes[-1] and process.is_alive():
                    os.kill(process.pid, signal.SIGCONT)
                process.join(max(0.0, limit - time.monotonic()))
            hanging = [rank for rank, process in enumerate(processes) if process.is_alive()]
        finally:
            for process in processes:
                process.kill()
                process.join()
    found = [defaultdict(lambda: None, code=process.exitcode) for process in processes]
    for notes, (received, _) in zip(found, pipes):
        with suppress(EOFError):
            while received.poll():
                word, value = received.recv()
                notes[word] = value
    assert not hanging, f"ranks {hanging} hang: {found}"
    return found


def noted_step(member: Member, note, name: str, between=lambda: None, **options) -> None:
    """A step of shards of the same tensors; notes its loss, its gradients' finiteness, or its error and seconds."""
    sequence_parallel = options.get("sequence_parallel", False)
    t = part(make(N, V, D), member, sequence_parallel)
    began = time.monotonic()
    try:
        loss = of_call(name, t, member.group, **options)
        note("loss", loss.item())
        between()
        loss.backward()
        note("gradients", bool(t.x.grad.isfinite().all() and t.weight.grad.isfinite().all()))
    except Exception as error:
        note("error", f"{type(error).__name__}: {error}")
    note("seconds", time.monotonic() - began)


def _fails(fault: str) -> None:
    if fault == "raises":
        raise torch.OutOfMemoryError("made up")
    os.kill(os.getpid(), signal.SIGKILL if fault == "killed" else signal.SIGSTOP)


@contextmanager
def before_collective(number: int, act):
    """``act()`` before this process starts this collective of the package, counted from 1."""
    started = iter(range(1, 1000))

    def faulty(start):
        def begin(*arguments, **options):
            if next(started) == number:
                act()
            return start(*arguments, **options)

        return begin

    with ExitStack() as stack:
        for owner, name in ((collectives, "all_gather"), (collectives, "reduce_scatter"), (dist, "all_reduce")):
            stack.enter_context(mock.patch.object(owner, name, faulty(getattr(owner, name))))
        yield


def _with_fault(member: Member, note, fault: str, place: int | None, name: str, options: dict) -> None:
    act = (lambda: _fails(fault)) if member.rank == member.ranks - 1 else lambda: None
    with before_collective(place or 0, act):
        noted_step(member, note, name, act if place is None else lambda: None, **options)


SP = dict(sequence_parallel=True)


# The fault; the collective before which it comes, or None: between forward and backward; the call; what is not reached.
FAULTS = [
    ("killed", 3, "accumulate", SP, "forward"),
    ("killed", 5, "recompute", SP, "backward"),
    ("killed", 2, "divergence", {}, "forward"),
    ("stopped", 3, "save", SP, "backward"),
    ("raises", 1, "save", {}, "forward"),
    ("raises", None, "save", SP, "backward"),
]


@pytest.mark.parametrize(("fault", "place", "name", "options", "stage"), FAULTS)
def test_if_one_rank_fails_the_other_raises_within_the_timeout(fault, place, name, options, stage):
    other, faulty = ends(_with_fault, fault, place, name, options)
    assert other["code"] == 0 and other["gradients"] is None, other
    assert other["error"].startswith("RuntimeError: "), other
    assert (other["loss"] is None) == (stage == "forward"), other
    assert fault != "stopped" or "Timed out waiting" in other["error"], other
    assert other["seconds"] < TIMEOUT + SLACK
    if fault == "killed":
        assert faulty["code"] == -signal.SIGKILL and faulty["error"] is None, faulty
    else:
        words = "OutOfMemoryError: made up" if fault == "raises" else "RuntimeError: "
        assert faulty["code"] == 0 and faulty["gradients"] is None and faulty["error"].startswith(words), faulty


# --- ranks whose calls differ ------------------------------------------------------------------------

ONE, FEWER = (N, "fp32", {}), (N - 6, "fp32", {})
# Calls of the first rank, and of the last.
DIFFERENT = {
    "N": ([ONE], [FEWER]),
    "sequence_parallel": ([ONE], [(N, "fp32", SP)]),
    "dtype fp64": ([(N, "fp64", {})], [ONE]),
    "order": ([ONE, FEWER], [FEWER, ONE]),
}


def _differing(member: Member, note, name: str) -> None:
    noted_step(member, lambda *_: None, "save")  # leaves memory with the bounds of both shards
    torch.utils.deterministic.fill_uninitialized_memory = False
    for number, (tokens, dtype, options) in enumerate(DIFFERENT[name][member.rank]):
        t = part(make(tokens, V, D, dtype), member, options.get("sequence_parallel", False))
        try:
            loss = parallel_lce.linear_cross_entropy(t.x, t.weight, t.target, process_group=member.group, **options)
            note(f"loss {number}", loss.item())
            loss.backward()
            note("gradients", number)
        except RuntimeError as error:
            note("error", str(error))
            break


@pytest.mark.parametrize("name", DIFFERENT)
def test_calls_of_other_sizes_end_on_every_rank(name):
    """Without debug mode, on gloo. A rank that receives more than it expects is ended by gloo, and the others then
    raise. A rank that receives less has a loss of NaN, and so has a rank with another dtype."""
    found = ends(_differing, name)
    for end in found:
        assert end["gradients"] is None, found
        assert end["code"] == -signal.SIGABRT or (end["code"] == 0 and end["error"]), found
        assert end["loss 0"] is None or end["loss 0"] != end["loss 0"], found


# --- groups that are destroyed -----------------------------------------------------------------------


@on_ranks(2)
def test_a_group_may_be_destroyed_between_forward_and_backward(member):
    """On gloo the backward works, since the graph keeps the group. On NCCL it raises. The next call is refused."""
    group = dist.new_group()
    t = part(make(N, V, D, device=member.device), member, sequence_parallel=True)
    expected = step_of("save", t, group, **SP)
    loss = of_call("save", t, group, **SP)
    dist.destroy_process_group(group)
    if member.device.type == "cuda":
        with pytest.raises((ValueError, dist.DistBackendError), match="not initialized|communicator was aborted"):
            torch.autograd.grad(loss, [t.x, t.weight])
    else:
        assert same(torch.autograd.grad(loss, [t.x, t.weight]), expected[1:])
    with pytest.raises(ValueError, match="not registered, please create group with torch.distributed.new_group"):
        of_call("save", t, group, **SP)


# --- memory that runs out, and errors of the user ----------------------------------------------------


class _RunsOut(TorchDispatchMode):
    """The operation of this number, counted from 0, finds no memory."""

    def __init__(self, number: int | None = None) -> None:
        super().__init__()
        self._number, self.count = number, 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        self.count += 1
        if self.count - 1 == self._number:
            raise torch.OutOfMemoryError("made up")
        return func(*args, **(kwargs or {}))


def _main_grad_step(t, main_grad: torch.Tensor, group, backward, **options) -> list[torch.Tensor]:
    """``backward(loss)`` of a loss whose dW is added to a zeroed ``main_grad``."""
    t.x.grad = None
    main_grad.zero_()
    where = given(t.x, t.weight, t.target, **options)
    loss = fused_loss(*where, group, main_grad=MainGrad(main_grad, lambda memory: None)).sum()
    backward(loss)
    return [loss.detach(), t.x.grad, main_grad.clone()]


@pytest.mark.parametrize("name", [*REDUCED, "main_grad", "main_grad in bf16"])
def test_the_step_after_one_without_memory_is_right(name, backend, device):
    """To the bit, wherever in forward or backward memory has run out."""
    t = small(device, N, V, D, dtype="bf16")
    main_grad = torch.zeros_like(t.weight, dtype=torch.bfloat16 if "bf16" in name else torch.float32)

    def step(*modes):
        def half(loss):
            with modes[1]:
                loss.backward()

        t.x.grad = t.weight.grad = None
        if "main_grad" in name:
            return _main_grad_step(t, main_grad, None, half, reduction="none", logits_budget=0)
        with modes[0]:
            loss = of_call(name, t)
        half(loss)
        return [loss.detach(), t.x.grad, t.weight.grad]

    counted = _RunsOut(), _RunsOut()
    with shrunk(*BLOCKS):
        expected = step(*counted)
        for half, count in enumerate(mode.count for mode in counted):
            for number in sorted({*range(0, count, max(1, count // 4)), count - 1} - {-1}):
                modes = [_RunsOut(), _RunsOut()]
                modes[half] = _RunsOut(number)
                with pytest.raises(torch.OutOfMemoryError, match="made up"):
                    step(*modes)
                assert same(step(_RunsOut(), _RunsOut()), expected), f"half {half}, operation {number} of {count}"
    assert counted[1].count > 3


def _recovers(member: Member, note) -> None:
    """By the lines of the page of faults."""
    t = part(make(N, V, D), member, sequence_parallel=True)
    main_grad, options = torch.zeros_like(t.weight), SP | dict(reduction="none", logits_budget=0)

    expected = _main_grad_step(t, main_grad, member.group, torch.Tensor.backward, **options)

    def step(group):
        def backward(loss):
            with _RunsOut(40 if member.rank and group is member.group else None):
                loss.backward()

        try:
            found = _main_grad_step(t, main_grad, group, backward, **options)
        except RuntimeError as error:
            note("error", f"{type(error).__name__}: {error}")
            raise
        note("right", same(found, expected))

    (block,) = re.findall(r"```python\n(.*?)```", (ROOT / "docs" / "faults.md").read_text(), re.DOTALL)
    given = dict(group=member.group, ranks=[0, 1], timeout=timedelta(seconds=TIMEOUT))
    exec(block, given | dict(step=step, dist=dist, optimizer=torch.optim.SGD([t.x])))


def test_the_lines_of_the_page_recover_from_one_rank_without_memory():
    """The other rank waits until the timeout. With a new group and a zeroed main_grad the next step is right."""
    other, faulty = ends(_recovers)
    assert "Timed out waiting" in other["error"] and faulty["error"] == "OutOfMemoryError: made up", (other, faulty)
    assert other["right"] is True and faulty["right"] is True, (other, faulty)


# --- many calls alive ----------------------------------------------------------------------------------


@pytest.mark.parametrize("sequence_parallel", [False, True])
@pytest.mark.parametrize("name", [*REDUCED, "divergence"])
@pytest.mark.thinned
@on_ranks(2)
def test_100_microbatches_have_the_gradients_that_each_has_alone(member, name, sequence_parallel, backend):
    """Alive at once, with backwards in either order, each has the gradients that it has alone, to the bit. So a step is
    right that follows a forward whose backward an error of the user's has prevented."""
    slow = sequence_parallel or backend == "triton"  # kernels are interpreted
    microbatches = 8 if slow and member.device.type == "cpu" else 100
    parts = [part(make(8, V, D, seed=n, device=member.device), member, sequence_parallel) for n in range(microbatches)]
    where = dict(group=member.group, sequence_parallel=sequence_parallel)
    with shrunk(400, BLOCKS[1]):
        expected = [step_of(name, t, **where)[1:] for t in parts]
        for step in (1, -1):
            alive = [of_call(name, t, **where) for t in parts]
            for t, loss, gradients in [*zip(parts, alive, expected)][::step]:
                assert same(torch.autograd.grad(loss, [t.x, t.weight]), gradients)
