"""CUDA graphs of a training step, and steps that never wait for the device. GPUs only."""

from __future__ import annotations

import contextlib
import functools

import pytest
import torch

import parallel_lce
from blocks import watched, watched_backwards
from cases import DTYPES, Case, make, part
from measures import ROUNDED, assert_close
from parallel_lce.backends import backend_of
from parallel_lce.call import prepare
from tools import chosen_backend, recorded, results_of, shrunk
from world import Member

N, V, D = 2048, 3000, 256
BLOCK = 6_200_000  # bytes: 1024 rows of bf16 logits and a little more, 512 rows of fp32 ones

# name: (options, whether the weight is frozen, what the blocks' backwards find of saved exponentials)
STRATEGIES = {
    "saved": (dict(reduction="none"), False, {True}),
    "some columns saved": (dict(reduction="none", logits_budget=BLOCK + 4_000_000), False, {True}),
    "some rows saved": (dict(reduction="none", logits_budget=BLOCK + 4_000_000), True, {True, False}),
    "recomputed": (dict(reduction="none", logits_budget=0), False, {False}),
    "accumulated": (dict(logits_budget=0, label_smoothing=0.1, z_loss=1e-3), False, {True}),
}
# In one block.
FILTERED = {
    "filtered": (dict(reduction="none", gradient_filter=2**-7), False, {True}),
    "windows": (dict(reduction="none", gradient_filter=2**-7, logits_budget=0), False, {True}),
}
BACKENDS = [("torch", "fp32"), ("torch", "bf16"), ("triton", "bf16"), ("triton", "fp16")]

pytestmark = pytest.mark.parametrize("device", [pytest.param("cuda", marks=pytest.mark.gpu)], indirect=True)


@pytest.fixture
def small_blocks():
    """Around all calls of a test: what is known of a call is forgotten where this begins."""
    with shrunk(BLOCK):
        yield


def every_step(test):
    """Each strategy in each backend and dtype, on one GPU."""
    test = pytest.mark.usefixtures("small_blocks")(test)
    test = pytest.mark.parametrize(("backend", "dtype"), BACKENDS)(test)
    return pytest.mark.parametrize("name", STRATEGIES)(test)


class Step:
    """Forward and backward on tensors that stay where they are; ``saved`` records which of the
    blocks' backwards were handed exponentials."""

    def __init__(self, name: str, backend: str, dtype: str, monkeypatch, compile=lambda f: f) -> None:
        monkeypatch.setenv("PARALLEL_LCE_BACKEND", backend)
        if name == "accumulated" and dtype == "fp16":
            pytest.skip("gradients of fp16 are not formed in forward")
        if name == "some rows saved" and dtype == "fp32":
            pytest.skip("fp32 sums are the gradients themselves: columns are saved, not rows")
        options, frozen, self.expected = (STRATEGIES | FILTERED)[name]
        self.saved: set[bool] = set()
        self.case = Case(N, V, D, dtype)
        self.x, self.weight, self.target = self._fresh(0)
        self.x.requires_grad_()
        self.weight.requires_grad_(not frozen)
        module = backend_of(self.weight)
        backward = watched(module.block_backward, lambda task: self.saved.add(len(task.saved) > 0))
        monkeypatch.setattr(module, "block_backward", backward)
        self._loss = compile(lambda *operands: parallel_lce.linear_cross_entropy(*operands, **options))

    def _fresh(self, seed: int):
        t = make(Case(N, V, D, self.case.dtype, seed=seed), "cuda")
        return t.x, t.weight, t.target

    def __call__(self) -> list[torch.Tensor]:
        leaves = [leaf for leaf in (self.x, self.weight) if leaf.requires_grad]
        loss = self._loss(self.x, self.weight, self.target)
        gradients = torch.autograd.grad(loss, leaves, torch.ones_like(loss))
        return [loss.detach(), *gradients]

    def load(self, seed: int) -> None:
        """Other data in the same memory."""
        with torch.no_grad():
            for mine, other in zip((self.x, self.weight, self.target), self._fresh(seed)):
                mine.copy_(other)

    def warm_up(self) -> None:
        stream = torch.cuda.Stream()
        stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(stream):
            for _ in range(3):
                self()
        torch.cuda.current_stream().wait_stream(stream)
        torch.cuda.synchronize()
        assert self.saved == self.expected, "the case must be what it is called"


def assert_same(found, expected, dtype: str) -> None:
    for a, b in zip(found, expected, strict=True):
        assert b.isfinite().all() and b.any()
        assert_close(a, b, ROUNDED[dtype])


def captured_and_replayed(step, dtype: str) -> tuple[torch.cuda.CUDAGraph, list[torch.Tensor]]:
    """The graph of a step, and its last results: on other data each replay gives what the step gives."""
    step.warm_up()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        captured = step()
    for seed in (1, 2):
        step.load(seed)
        graph.replay()
        found = [tensor.clone() for tensor in captured]
        # The same kernels; but cuBLAS may choose them by an address.
        assert_same(found, step(), dtype)
        graph.replay()
        torch.cuda.synchronize()
        assert all(torch.equal(a, b) for a, b in zip(found, captured)), "what was kept is there again"
    return graph, found


@contextlib.contextmanager
def never_waiting():
    """Whatever waits for the device raises."""
    torch.cuda.set_sync_debug_mode("error")
    try:
        yield
    finally:
        torch.cuda.set_sync_debug_mode("default")


@every_step
def test_a_captured_step_replays_on_other_data(name, backend, dtype, device, monkeypatch):
    captured_and_replayed(Step(name, backend, dtype, monkeypatch), dtype)


@pytest.mark.parametrize("name", FILTERED)
def test_filtered_steps_are_captured_and_never_wait(name, device, monkeypatch):
    from parallel_lce.backends import triton_windows

    prepare.KNOWN.clear()
    step = Step(name, "triton", "bf16", monkeypatch)
    with results_of(triton_windows, "list_active_windows") as listed:
        captured_and_replayed(step, "bf16")
    assert bool(listed) == (name == "windows")
    with never_waiting():
        step()


@every_step
def test_no_step_waits_for_the_device(name, backend, dtype, device, monkeypatch):
    step = Step(name, backend, dtype, monkeypatch)
    step.warm_up()
    with never_waiting():
        step()


@every_step
def test_graphs_of_the_compiler(name, backend, dtype, device, monkeypatch):
    """``mode="reduce-overhead"``: the compiler's own graphs leave out what they do not know of."""
    if (backend, dtype) not in (("torch", "fp32"), ("triton", "bf16")):
        pytest.skip("one dtype of each backend is enough")
    torch._dynamo.reset()
    step = Step(name, backend, dtype, monkeypatch, lambda f: torch.compile(f, fullgraph=True, mode="reduce-overhead"))
    eager = Step(name, backend, dtype, monkeypatch)
    for seed in range(4):
        step.load(seed)
        eager.load(seed)
        torch.compiler.cudagraph_mark_step_begin()
        found = [tensor.clone() for tensor in step()]
        assert_same(found, eager(), dtype)


# --- over ranks ------------------------------------------------------------------------------------

# name: (options, budget in logits of a shard, frozen operand, what the blocks' backwards find of saved
# exponentials, blocks that the logits make)
OVER_RANKS = {
    "saved": (dict(reduction="none"), None, "", {True}, 1),
    "hidden states gathered again": (dict(reduction="none"), 1.0, "", {True}, 1),
    "some rows saved": (dict(reduction="none"), 0.7, "", {True, False}, 4),
    "recomputed": (dict(reduction="none"), 0.0, "", {False}, 4),
    "accumulated": (dict(label_smoothing=0.1, z_loss=1e-3), 0.0, "", {True}, 3),
    "sums in fp32": (dict(reduce_dtype=torch.float32), 0.0, "", {True}, 3),
    "a frozen weight": (dict(reduction="none"), 1.0, "weight", {True}, 1),
}
STEPS_OVER_RANKS = [
    (name, sequence_parallel, backend, dtype)
    for name in OVER_RANKS
    for sequence_parallel in (False, True)
    for backend, dtype in (("torch", "fp32"), ("triton", "bf16"))
    # Without sequence parallelism hidden states are not gathered; sums of fp32 are fp32 anyway.
    if (name != "hidden states gathered again" or sequence_parallel) and (name != "sums in fp32" or dtype == "bf16")
]


class RankStep:
    """Forward and backward of one rank, equal shards, on tensors that stay where they are. ``small_blocks``
    belongs around all of its calls."""

    def __init__(
        self, member: Member, name: str, sequence_parallel: bool, dtype: str, N: int = N, V: int = V, D: int = D
    ) -> None:
        self._member, self._shape, self._dtype = member, (N, V, D), dtype
        options, share, frozen, self.saved, self.blocks = OVER_RANKS[name]
        logits = N * (V // member.ranks) * DTYPES[dtype].itemsize
        budget = None if share is None else int(share * logits)
        # Accumulating, two blocks are alive.
        alive = 1 if options.get("reduction") == "none" else 2
        self._parts = member.ranks if sequence_parallel else 1
        rows = -(-N // (self.blocks * self._parts)) * self._parts
        block_bytes = alive * rows * (logits // N)
        self.small_blocks = functools.partial(shrunk, block_bytes)
        self._options = options | dict(
            process_group=member.group, sequence_parallel=sequence_parallel, logits_budget=budget
        )
        self.x, self.weight, self.target = self._fresh(0)
        self.leaves = [v.requires_grad_() for n, v in (("x", self.x), ("weight", self.weight)) if n not in frozen]

    def _fresh(self, seed: int):
        member = self._member
        t = part(make(Case(*self._shape, self._dtype, seed=seed), member.device), member, self._parts > 1)
        return t.x.detach(), t.weight.detach(), t.target

    @torch.no_grad()
    def load(self, seed: int) -> None:
        """Other data in the same memory."""
        for mine, other in zip((self.x, self.weight, self.target), self._fresh(seed)):
            mine.copy_(other)

    def forward(self) -> torch.Tensor:
        return parallel_lce.linear_cross_entropy(self.x, self.weight, self.target, **self._options)

    def __call__(self) -> list[torch.Tensor]:
        loss = self.forward()
        return [loss.detach(), *torch.autograd.grad(loss, self.leaves, torch.ones_like(loss))]

    def warm_up(self) -> None:
        """On a stream aside; and the step must be what it is called."""
        handed = []
        stream = torch.cuda.Stream()
        stream.wait_stream(torch.cuda.current_stream())
        watch = watched_backwards(backend_of(self.weight), lambda task: handed.append(len(task.saved) > 0))
        with torch.cuda.stream(stream):
            with watch, recorded(self._member.group) as events:
                self()
            assert set(handed) == self.saved and (len(handed) > 1) == (self.blocks > 1), handed
            assert sum(e[0] in ("all_reduce", "reduce_scatter") for e in events) == len(handed)
            for _ in range(2):
                self()
        torch.cuda.current_stream().wait_stream(stream)
        torch.cuda.synchronize()


def _capture(member: Member, name: str, sequence_parallel: bool, backend: str, dtype: str):
    with chosen_backend(backend):
        step = RankStep(member, name, sequence_parallel, dtype)
        with step.small_blocks():
            graph, found = captured_and_replayed(step, dtype)
        # The communicator must outlive what was captured of it.
        graph.reset()
    return found[0].cpu()


@pytest.mark.parametrize(("name", "sequence_parallel", "backend", "dtype"), STEPS_OVER_RANKS)
def test_ranks_capture_their_step(name, sequence_parallel, backend, dtype, worlds, device):
    first, second = worlds(2).run(_capture, name, sequence_parallel, backend, dtype)
    assert torch.equal(first, second), "the loss differs by rank"


def _first_call(member: Member, name: str, sequence_parallel: bool, backend: str, dtype: str):
    """A forward and a step of a shape that this process has not seen; and whether the next step has returned
    while the device, which was asleep when it began, still is."""
    with chosen_backend(backend):
        # Kernels and what NCCL connects at first are of any shape.
        known = RankStep(member, name, sequence_parallel, dtype)
        with known.small_blocks():
            known.warm_up()
        torch.cuda.synchronize()
        fresh = RankStep(member, name, sequence_parallel, dtype, N + 384, V + 1024, D + 64)
        with fresh.small_blocks():
            with never_waiting():
                with torch.no_grad():
                    evaluated = fresh.forward()
                found = fresh()
            assert_same([evaluated], found[:1], dtype)
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
            assert_same(again, found, dtype)
        return ahead


@pytest.mark.parametrize(("name", "sequence_parallel", "backend", "dtype"), STEPS_OVER_RANKS)
def test_no_rank_waits_for_its_device_from_the_first_call_on(name, sequence_parallel, backend, dtype, worlds, device):
    assert worlds(2).run(_first_call, name, sequence_parallel, backend, dtype) == [True, True]


def test_the_check_sees_a_step_that_waits(device):
    with pytest.raises(RuntimeError, match="synchronizing"), never_waiting():
        torch.ones(1, device=device).item()
