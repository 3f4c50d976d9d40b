"""Training steps on tensors that stay where they are: the same bits however ranks, hosts and GPUs are delayed, and from
CUDA graphs, without waiting for the device.

A delayed step finds other data in the same memory. Its inputs are overwritten as soon as backward has returned, and the
memory that the call has freed is filled with NaN."""

import random
import time
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field, replace
from unittest import mock

import pytest
import torch
import torch.distributed as dist

import parallel_lce
from cases import DTYPES, make, normal, part
from measures import ROUNDED, assert_close
from parallel_lce.backends import backend_of
from parallel_lce.call import prepare
from parallel_lce.core import collectives
from tools import alone, chosen_backend, everywhere, planned, savable, shrunk, statistics, watched_backwards
from world import Member


@dataclass(frozen=True)
class Strategy:
    """``share``: the budget, in logits of an equal shard, None for the default. ``blocks``: of rows, what the logits
    make. ``saved``: whether the blocks' backwards are handed exponentials. ``of_statistics``: not of a loss.
    ``parts``: of the logits, of which one is a block's memory; 0: as many as blocks."""

    share: float | None = None
    blocks: int = 1
    saved: set[bool] = field(default_factory=lambda: {True})
    options: dict = field(default_factory=lambda: dict(reduction="none"))
    frozen: str = ""
    of_statistics: bool = False
    parts: int = 0


_MEAN = dict(z_loss=1e-3)
_FILTERED = dict(reduction="none", gradient_filter=2**-7)
STRATEGIES = {
    "saved": Strategy(),
    "hidden states gathered again": Strategy(1.0),
    "some columns saved": Strategy(0.83, 2),
    # Capped: bf16 logits of a plain loss would all fit in codes.
    "some rows saved": Strategy(0.7, 4, {True, False}, dict(reduction="none", logit_softcap=30.0)),
    "codes": Strategy(0.8, parts=4),  # half of the logits' bytes, and a quarter to decode into
    "recomputed": Strategy(0.0, 4, {False}),
    "accumulated": Strategy(0.0, 2, options=_MEAN),
    "accumulated, sums in fp32": Strategy(0.0, 2, options=dict(reduce_dtype=torch.float32)),
    "a frozen weight": Strategy(1.0, frozen="weight"),
    "some rows saved, a frozen weight": Strategy(0.83, 2, {True, False}, frozen="weight"),
    "statistics": Strategy(of_statistics=True),
    "filtered": Strategy(options=_FILTERED),
    "filtered, recomputed": Strategy(0.0, saved={False}, options=_FILTERED),
}


@dataclass(frozen=True)
class Call:
    """``strategy``: a name. ``shards``: the ranks' rows, None for equal ones; from ``vocab_size`` on padding."""

    strategy: str
    ranks: int = 1
    sequence_parallel: bool = False
    dtype: str = "bf16"
    backend: str = ""
    shards: tuple[int, ...] | None = None
    vocab_size: int | None = None
    bias: bool = False


class Step:
    """Forward and backward of one rank. All calls are made within :meth:`small_blocks`. ``size``: N, V and D."""

    def __init__(
        self, member: Member, call: Call, size: tuple[int, int, int], tile: tuple[int, int] | None = None
    ) -> None:
        self.member, self.call, self.strategy = member, call, STRATEGIES[call.strategy]
        self._size, self._tile, strategy = size, tile, self.strategy
        self.reduction = strategy.options.get("reduction", "mean")
        N, V, _ = size
        self.dtype = savable(call.dtype, member.device, call.backend)
        row_bytes = -(-(call.vocab_size or V) // member.ranks) * DTYPES[self.dtype].itemsize
        parts = member.ranks if call.sequence_parallel else 1
        blocks = strategy.parts or strategy.blocks
        self._block_bytes = -(-N // (blocks * parts)) * parts * row_bytes
        given, share = call.shards is not None and member.ranks > 1, strategy.share
        self._options = ({} if strategy.of_statistics else strategy.options) | dict(
            process_group=member.group,
            sequence_parallel=call.sequence_parallel,
            vocab_start=sum(call.shards[: member.rank]) if given else None,
            vocab_size=call.vocab_size or (V if given else None),
            logits_budget=None if share is None else int(share * N * row_bytes),
        )
        self.tensors = self.data(0)
        self.x, self.weight, self.target, self.upstream, *self.bias = self.tensors
        named = zip(("x", "weight", "bias"), (self.x, self.weight, *self.bias))
        self.leaves = [leaf.requires_grad_() for name, leaf in named if name != strategy.frozen]

    def data(self, seed: int) -> list[torch.Tensor]:
        """x, weight, target, upstream gradient and, if there is one, bias."""
        (N, V, D), call = self._size, self.call
        t = make(N, V, D, self.dtype, self.member.device, bias=call.bias, ignored=True, seed=seed)
        upstream = normal(*((N,) if self.reduction == "none" else ()), seed=seed + 1).float().to(self.member.device)
        t.target[5:12] = t.target[4]  # tokens of one target add up in one row of dW
        if call.vocab_size is not None:
            t.target[t.target >= call.vocab_size] = 0
        t = part(t, self.member, call.sequence_parallel, call.shards)
        made = t.x, t.weight, t.target, upstream, t.bias
        return [value.detach() for value in made if value is not None]

    @torch.no_grad()
    def load(self, tensors: list[torch.Tensor]) -> None:
        """Other data in the same memory."""
        for mine, other in zip(self.tensors, tensors, strict=True):
            mine.copy_(other)

    def small_blocks(self):
        return shrunk(self._block_bytes, self._tile)

    def forward(self, function=parallel_lce.linear_cross_entropy) -> torch.Tensor:
        options = self._options | (dict(linear_bias=self.bias[0]) if self.bias else {})
        if self.strategy.of_statistics:
            found = statistics(self.x, self.weight, self.target.clamp(min=0), **options)
            return found.target_log_prob + 0.1 * found.entropy - found.mean_logit
        return function(self.x, self.weight, self.target, **options)

    def backward(self, loss: torch.Tensor) -> list[torch.Tensor]:
        return [loss.detach(), *torch.autograd.grad(loss, self.leaves, self.upstream.to(loss.dtype))]

    def __call__(self) -> list[torch.Tensor]:
        return self.backward(self.forward())


DATA = 5  # sets of inputs at most; repetitions that follow each other have different ones
REPETITIONS = {"cpu": 20, "cuda": 200}
FEWER = 4  # on a CPU without --all
SLEEP = 2e-3  # seconds that a host sleeps at most, at one place
CYCLES = 3_000_000  # of a GPU asleep at most, at one place: some 2 ms
OFTEN = 0.12  # of the places where a delay may be


# Tokens of the whole sequence, rows of an equal shard, hidden size. On GPUs messages are too large for the buffers of
# NCCL, so that it reads and writes while they are sent.
SIZES = {"cpu": (48, 40, 4), "cuda": (6144, 1024, 1024)}

CALLS = [
    Call("saved", 2, bias=True),
    Call("saved", 2, True),
    Call("hidden states gathered again", 3, True, "fp32"),
    Call("some rows saved", 2, True, backend="triton", bias=True),
    Call("accumulated", 3, True, "fp32"),
    Call("saved", 2, True, shards=(60, 15), vocab_size=70),
    Call("recomputed", 3, shards=(10, 0, 85), vocab_size=90),
    Call("accumulated, sums in fp32", 2, True),
    Call("hidden states gathered again", 2, True, backend="triton"),
    Call("accumulated", backend="triton", bias=True),
    Call("statistics", 3, True, backend="triton", shards=(0, 60, 60)),
    Call("codes", 2, True, backend="triton"),
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
    def within(name, original):
        def call(*arguments, **options):
            before()
            result = original(*arguments, **options)
            after(name, result)
            return result

        return call

    with ExitStack() as stack:
        for owner, name in places:
            stack.enter_context(mock.patch.object(owner, name, within(name, getattr(owner, name))))
        yield


def steps_of(weight: torch.Tensor) -> list:
    blocks = "block_forward", "block_backward", "merge_ranks"
    return [*COLLECTIVES, *((backend_of(weight), name) for name in blocks)]


@torch.no_grad()
def spoil(step: Step) -> None:
    """Overwrite the inputs, and what the allocator is going to hand out, as it is on this stream."""
    for tensor in step.tensors:
        tensor.fill_(torch.nan if tensor.is_floating_point() else 0)
    (N, rows, D), P = SIZES[step.x.device.type], step.member.ranks
    numbers = (step.x.numel(), N * D, step.weight.numel(), N * rows, P * (4 * N + 3), N)
    held = [
        torch.full((n // parts,), torch.nan, dtype=dtype, device=step.x.device)
        for n in numbers
        for parts in {1, 2, step.strategy.blocks}
        for dtype in (step.x.dtype, torch.float32)
    ]
    del held


def check_codes(step: Step) -> None:
    plan = planned()
    assert (plan is not None and plan.codes) == (step.call.strategy == "codes")


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
    check_codes(step)
    assert step.member.ranks == 1 or ("merge_ranks" in seen and {n for _, n in COLLECTIVES} & set(seen))
    return found


def _disturbed(member: Member, call: Call, repetitions: int, seed: int):
    """Whether a repetition has other bits than the undisturbed run; the first loss, and dX if ranks share it."""
    step = step_of(member, call)
    with chosen_backend(call.backend), step.small_blocks():
        sets = [step.data(number) for number in range(min(DATA, repetitions))]
        expected = [undisturbed(step, tensors) for tensors in sets]
        assert all(e.isfinite().all() and e.count_nonzero() for r in expected for e in r if e.numel())
        delay = delays(seed * 64 + member.rank, member.device)
        with around(steps_of(step.weight), delay, delay):
            differs = _torn(step, sets, expected, repetitions, delay)
    same = expected[0][: 1 if call.sequence_parallel else 2]
    return [[d.item() for d in each] for each in differs], [tensor.cpu() for tensor in same]


def _torn(step: Step, sets, expected, repetitions: int, delay) -> list[list[torch.Tensor]]:
    differs = []
    for repetition in range(repetitions):
        number = repetition % len(sets)
        step.load(sets[number])
        delay()
        loss = step.forward()
        delay()
        found = step.backward(loss)
        results = [tensor.clone() for tensor in found]
        del loss, found
        spoil(step)
        differs.append([(bits(a) != bits(b)).any() for a, b in zip(results, expected[number])])
        delay()
    # Hosts have run ahead of their GPUs until here.
    if step.x.is_cuda:
        torch.cuda.synchronize()
    return differs


def bits(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.reshape(-1).view(torch.uint8)


@pytest.mark.parametrize("call", CALLS, ids=str)
@pytest.mark.thinned
def test_delays_change_no_bit(call, worlds, device, request):
    repetitions = REPETITIONS[device] if device == "cuda" or request.config.option.all else FEWER
    if call.strategy == "codes" and device == "cpu":
        pytest.skip("a CPU's size is too small for codes")
    if call.backend == "triton":
        request.getfixturevalue("kernels")
        repetitions //= 4 if device == "cpu" else 1
    answers = everywhere(worlds, device, call.ranks, _disturbed, call, repetitions, CALLS.index(call))
    for rank, (differs, same) in enumerate(answers):
        red = [(i, each) for i, each in enumerate(differs) if any(each)]
        assert not red, f"rank {rank}: other bits of loss and gradients in {len(red)} repetitions: {red[:3]}"
        assert all(map(torch.equal, same, answers[0][1])), f"the loss or dX of rank {rank} is another"


GRAPH_SIZE = 2048, 3000, 256
REPLAYS = 1000
ON_GPUS = pytest.mark.parametrize("device", [pytest.param("cuda", marks=pytest.mark.gpu)], indirect=True)
BOTH = [("torch", "fp32"), ("triton", "bf16")]
ON_ONE = [
    Call(name, dtype=dtype, backend=backend)
    for name in ("saved", "some columns saved", "some rows saved, a frozen weight", "recomputed", "accumulated")
    for backend, dtype in BOTH
    # fp32 sums are the gradients themselves: columns are saved, not rows.
    if (name, dtype) != ("some rows saved, a frozen weight", "fp32")
]
OF_TRITON = [Call(name, backend="triton") for name in ("codes", "filtered", "filtered, recomputed")]
OVER_RANKS = [
    Call(name, 2, sequence_parallel, dtype, backend)
    for name in ("saved", "hidden states gathered again", "some rows saved", "recomputed", "a frozen weight")
    + ("accumulated", "accumulated, sums in fp32")
    for sequence_parallel in (False, True)
    for backend, dtype in BOTH
    # Without sequence parallelism no hidden states are gathered. Sums in fp32 are fp32. Capped logits are never saved.
    if (sequence_parallel or "gathered" not in name)
    and (dtype == "bf16" or ("fp32" not in name and name != "some rows saved"))
]


def warm_up(step: Step) -> None:
    """On a stream aside; and the step must be what it is called."""
    handed, stream = [], torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    watch = watched_backwards(backend_of(step.weight), lambda task: handed.append(len(task.saved) > 0))
    with torch.cuda.stream(stream), watch:
        for _ in range(3):
            step()
    assert set(handed) == step.strategy.saved, handed
    check_codes(step)
    assert step.member.ranks == 1 or (len(handed) > 3) == (step.strategy.blocks > 1), handed
    torch.cuda.current_stream().wait_stream(stream)
    torch.cuda.synchronize()


def assert_same(found, expected, dtype: str) -> None:
    for a, b in zip(found, expected, strict=True):
        assert b.isfinite().all() and b.any()
        assert_close(a, b, ROUNDED[dtype])


@contextmanager
def never_waiting():
    """Whatever waits for the device raises."""
    torch.cuda.set_sync_debug_mode("error")
    try:
        yield
    finally:
        torch.cuda.set_sync_debug_mode("default")


def _without_waiting(member: Member, call: Call) -> torch.Tensor:
    """The last loss of a graph of the step. First a step whose signature is not known must not wait, and the next one
    return while the device sleeps. Then each replay of the graph on other data gives what the step gives, and again to
    the bit, and memory does not grow."""
    step = Step(member, call, GRAPH_SIZE)
    with step.small_blocks():
        warm_up(step)
        prepare.KNOWN.clear()
        with never_waiting():
            with torch.no_grad():
                step.forward()
            step()
        # Memory for the next step is there, and the launches of a step fit the queue of the device.
        torch.cuda.synchronize()
        asleep = torch.cuda.Event()
        torch.cuda._sleep(1_000_000_000)
        asleep.record()
        with never_waiting():
            step()
        assert not asleep.query()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            captured = step()
        sets, first = [step.data(seed) for seed in range(5)], []
        for tensors in sets:
            step.load(tensors)
            graph.replay()
            first.append([tensor.clone() for tensor in captured])
            # The same kernels; but cuBLAS may choose them by an address.
            assert_same(first[-1], step(), call.dtype)
        wrong = torch.zeros((), dtype=torch.bool, device=member.device)
        torch.cuda.synchronize()
        held = torch.cuda.memory_allocated()
        for number in range(REPLAYS):
            step.load(sets[number % 5])
            graph.replay()
            for found, expected in zip(captured, first[number % 5]):
                wrong |= (bits(found) != bits(expected)).any()
        torch.cuda.synchronize()
        assert not wrong and torch.cuda.memory_allocated() <= held
    graph.reset()  # the communicator must outlive what was captured of it
    return first[-1][0].cpu()


@ON_GPUS
@pytest.mark.parametrize("call", [*ON_ONE, *OVER_RANKS, *OF_TRITON], ids=str)
def test_a_step_never_waits_and_is_captured_and_replayed_on_other_data(call, worlds, device):
    with chosen_backend(call.backend):
        first, *others = everywhere(worlds, device, call.ranks, _without_waiting, call)
    assert all(torch.equal(first, other) for other in others), "the loss differs by rank"


@ON_GPUS
@pytest.mark.parametrize("call", ON_ONE, ids=str)
def test_graphs_of_the_compiler_leave_nothing_out(call, device):
    """``mode="reduce-overhead"``: the compiler's own graphs leave out what they do not know of."""
    torch._dynamo.reset()
    step = Step(alone(device), call, GRAPH_SIZE)
    compiled = torch.compile(parallel_lce.linear_cross_entropy, fullgraph=True, mode="reduce-overhead")
    with chosen_backend(call.backend), step.small_blocks():
        for seed in range(4):
            step.load(step.data(seed))
            torch.compiler.cudagraph_mark_step_begin()
            found = [tensor.clone() for tensor in step.backward(step.forward(compiled))]
            assert_same(found, step(), call.dtype)
