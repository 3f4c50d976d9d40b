"""Peak memory, by an allocation tracker: nothing of size N * V but what the budget allows. The budget's default."""

import ctypes
import gc
import resource
from contextlib import nullcontext
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from unittest import mock

import pytest
import torch

import parallel_lce
from benchmarks.engine.peak_memory import peak_memory
from cases import DTYPES, make, normal, part
from parallel_lce.backends import backend_of, torch_backend, triton
from parallel_lce.call import prepare
from parallel_lce.core.plan import default_budget
from tools import alone, everywhere, on_ranks, savable, shrunk
from world import Member

KiB, MiB, GiB = 1 << 10, 1 << 20, 1 << 30
BLOCK = MiB  # SMALLEST_BLOCK of these tests

# A part of the rows saved and the rest recomputed; all recomputed; accumulated, also with a loss of the caller's own.
STRATEGIES = {
    "save": dict(reduction="none", logits_budget=3 * MiB // 2),
    "recompute": dict(reduction="none", logits_budget=0),
    "accumulate": dict(reduction="sum", logits_budget=0),
    "own": dict(reduction="sum", logits_budget=0, entropy=True),
}


def measured(
    member: Member,
    size,
    *,
    dtype="fp32",
    shards=None,
    frozen="",
    tile=(64, 2048),
    backward=True,
    block=BLOCK,
    **options,
) -> tuple[int, int]:
    """(peak, alive) of a forward and backward after what a device's first use takes for good. ``size``: N, V and D of
    the whole group. ``options``: of the loss."""
    sequence_parallel = options.get("sequence_parallel", False)
    t = part(make(*size, dtype, device=member.device), member, sequence_parallel, shards)
    wanted = [leaf for name, leaf in (("x", t.x), ("weight", t.weight)) if name not in frozen]
    for leaf in (t.x, t.weight):
        leaf.requires_grad_(any(leaf is one for one in wanted))
    options = dict(reduction="none", logits_budget=0, process_group=member.group) | options
    if shards is not None:
        options |= dict(vocab_start=sum(shards[: member.rank]), vocab_size=size[1])

    def step():
        if "entropy" in options:
            own = lambda s: (s.target_log_prob.exp() * s.entropy, {"lse": s.lse})  # noqa: E731
            loss, _ = parallel_lce.token_loss(t.x, t.weight, t.target, own, **options)
        else:
            loss = parallel_lce.linear_cross_entropy(t.x, t.weight, t.target, **options)
        return torch.autograd.grad(loss, wanted, torch.ones_like(loss)) if backward else loss

    with shrunk(block, tile):
        if member.device.type == "cuda":
            step()
        return peak_memory(step, member.device)


@pytest.mark.parametrize("strategy", STRATEGIES)
@pytest.mark.parametrize(
    ("ranks", "sequence_parallel", "dtype"),
    [(1, False, "fp32"), (1, False, "bf16"), (2, False, "fp32"), (2, True, "fp32")],
)
@pytest.mark.thinned
def test_growth_of_n_grows_no_buffer_with_v_in_it(strategy, dtype, ranks, sequence_parallel, worlds, device):
    """Twice the tokens cost some more numbers per token, and no more logits. Of a step the gradients remain."""
    V, D, itemsize = 8192 * ranks, 4, DTYPES[dtype].itemsize
    # In N rows blocks of the same size as in 2 N; what is kept by rows comes on top of them.
    N = 272 if strategy == "save" else 256

    def peak(n):
        step = partial(measured, dtype=dtype, sequence_parallel=sequence_parallel, **STRATEGIES[strategy])
        peaks, alive = zip(*everywhere(worlds, device, ranks, step, (n, V, D)))
        assert ranks > 1 or max(alive) <= (n + V) * D * itemsize + 64 * KiB
        assert max(peaks) < 6 * MiB
        return max(peaks)

    growth = peak(2 * N) - peak(N)
    logits = N * V // ranks * itemsize
    by_torch = backend_of(torch.empty(1, 1, dtype=DTYPES[dtype], device=device)) is torch_backend
    # Numbers per token and window of 2048 columns, or 128; one more of saved bf16 exponentials.
    of_window = 3 + (strategy == "save" and dtype == "bf16" and not by_torch)
    partials = V // ranks * of_window // (2048 if by_torch else 128)
    # Per token: hidden states and their gradient, statistics, and partials of windows.
    assert growth < N * (4 * D + 40 + partials) * 4 < 0.0205 * of_window * logits, (
        f"{growth} bytes for {N} more tokens, whose logits are {logits}"
    )


@pytest.mark.parametrize(
    ("dtype", "budget"), [("fp32", None), ("bf16", None), *(("fp32", n * MiB) for n in (0, 1, 2, 5))], ids=str
)
def test_saved_bytes_are_within_the_budget(dtype, budget, device):
    """Without one they are those of the exponentials, and no more."""
    N, V, dtype = 512, 4096, savable(dtype, device)
    _, alive = measured(alone(device), (N, V, 4), dtype=dtype, logits_budget=budget, backward=False)
    whole = N * V * DTYPES[dtype].itemsize
    assert alive <= (1.02 * whole if budget is None else max(0, budget - BLOCK)) + 64 * KiB
    assert budget is not None or alive >= whole


@pytest.mark.parametrize("budget", [MiB, 256 * 2000 * 4])
@on_ranks(2)
def test_the_larger_of_uneven_shards_stays_within_the_budget(member, budget):
    """Of 1000 and 3000 rows, planned as 2000 each."""
    options = dict(shards=(1000, 3000), tile=(64, 256), backward=False, block=128 * KiB, logits_budget=budget)
    _, alive = measured(member, (256, 4000, 4), **options)
    # Partials of 12 windows of 256 columns, and the maxima kept of them, come on top.
    assert alive <= budget + 256 * KiB


@pytest.mark.parametrize("mode", [torch.no_grad, nullcontext])
def test_evaluation_keeps_nothing(mode, device):
    """Parameters that need gradients, but nobody will ask for them; or that need none."""
    N, V, frozen = 512, 4096, "x weight" if mode is nullcontext else ""
    options = dict(logits_budget=None, frozen=frozen, backward=False)
    with mode():
        peak, alive = measured(alone(device), (N, V, 4), **options)
    assert alive <= 16 * N * 4
    assert peak < N * V * 4 / 4


@pytest.mark.parametrize("strategy", [name for name in STRATEGIES if name != "own"])
@pytest.mark.parametrize(("frozen", "sizes"), [("weight", (128, 4096, 256)), ("x", (2048, 64, 512))])
@pytest.mark.thinned("strategy", "frozen")
def test_a_frozen_operand_allocates_no_gradient_of_its_size(frozen, sizes, strategy, device):
    (N, V, D), block = sizes, 256 * KiB if frozen == "weight" else 64 * KiB
    options = dict(tile=(64, min(V, 256)), block=block, **STRATEGIES[strategy])
    peak, _ = measured(alone(device), sizes, frozen=frozen, **options)
    free, _ = measured(alone(device), sizes, **options)
    own, other = (V, N) if frozen == "weight" else (N, V)
    assert free >= own * D * 4
    # The other gradient, the budget or block and a few tiles.
    assert peak < other * D * 4 + max(options["logits_budget"], block) + MiB < own * D * 4


def test_low_precision_dw_in_one_block_has_no_fp32_sum(device):
    """All rows in one block: windows of dW are summed in fp32 one at a time (Liger #1323, #1391)."""
    N, V, D = 32, 1024, 256
    peak, alive = measured(alone(device), (N, V, D), dtype="bf16", tile=(64, 128), block=16 * KiB)
    assert alive >= V * D * 2
    assert peak - alive < V * D * 4 / 4


@pytest.mark.parametrize("device", [pytest.param("cuda", marks=pytest.mark.gpu)], indirect=True)
def test_recomputed_logits_take_the_memory_of_dx_until_it_is_written(device):
    """Beyond the gradients there are the block, and dX in fp32. On a CPU operands are also copied to fp32."""
    N, V, D, block = 1024, 16384, 1024, 4 * MiB
    peak, alive = measured(alone(device), (N, V, D), dtype="bf16", block=block)
    dx = N * D * 2
    assert alive >= dx + V * D * 2
    assert peak - alive <= block + 2 * dx + MiB < block + 3 * dx


@pytest.mark.parametrize("backward", [False, True], ids=["forward", "backward"])
@on_ranks(2)
def test_sequence_parallel_chunks_are_let_go(member, backward):
    """Hidden states are gathered, and local dX reduced, a few of 32 blocks of 128 rows at a time: neither the whole
    sequence's ``[N, D]`` hidden states nor its local dX ever exist on a rank, as the plan assumes."""
    whole = 4096 * 256 * 4
    options = dict(sequence_parallel=True, tile=(128, 64), block=128 * 64 * 4, backward=backward)
    peak, alive = measured(member, (4096, 128, 256), **options)
    assert alive >= whole // 2 or not backward
    assert peak - alive < 0.5 * whole, f"{(peak - alive) / whole:.2f} of [N, D]"


@pytest.mark.parametrize("backend", ["torch", pytest.param("triton", marks=pytest.mark.slow)], indirect=True)
def test_forward_s_window_partials_do_not_grow_with_n(backend, device, monkeypatch):
    """Twice the tokens, with 32 or 64 windows: their partials are merged group by group."""
    V = 2048
    if backend == "triton":
        V = 8192
        monkeypatch.setattr(triton, "PARTIAL_BYTES", 64 * KiB)
    peaks = [measured(alone(device), (N, V, 4), tile=(8, 64), backward=False)[0] for N in (64, 128)]
    per_token = 256  # bytes: columns, statistics and losses, none of them 32 long
    assert peaks[1] - peaks[0] <= 64 * per_token


@pytest.mark.parametrize(("total", "budget"), [(139.8, 4352), (79.1, 2304), (79.4, 2304), (23.6, 512), (2, 256)])
def test_a_gpu_s_is_a_thirty_second_of_its_memory_and_a_cpu_s_is_1_gib(total, budget, monkeypatch):
    properties = SimpleNamespace(total_memory=int(total * GiB))
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: properties)
    assert default_budget(torch.device("cuda")) == budget << 20
    assert default_budget(torch.device("cpu")) == GiB == default_budget(torch.device("meta"))


def test_a_call_is_planned_with_it(device, monkeypatch):
    """Or with the environment's, or with the one that is given, whatever is remembered of earlier calls."""
    prepare.KNOWN.clear()
    x, weight = torch.ones(3, 4, device=device, requires_grad=True), torch.ones(5, 4, device=device)
    call = partial(parallel_lce.linear_cross_entropy, x, weight, torch.zeros(3, dtype=torch.int64, device=device))

    def planned(**options) -> int:
        with mock.patch.object(prepare, "plan", wraps=prepare.plan) as plan:
            call(**options)
        return plan.call_args.args[0].budget

    assert planned() == default_budget(x.device)
    monkeypatch.setenv("PARALLEL_LCE_LOGITS_BUDGET", "123")
    assert planned() == 123 and planned(logits_budget=45) == 45
    monkeypatch.setenv("PARALLEL_LCE_LOGITS_BUDGET", "-1")
    for _ in range(2):
        with pytest.raises(ValueError, match="PARALLEL_LCE_LOGITS_BUDGET must be a number of bytes, got '-1'"):
            call()
    call(logits_budget=46)


@pytest.mark.slow
def test_calls_of_many_lengths_leave_nothing_behind():
    """Neither memory of the host nor objects; and at most 1024 plans are remembered."""
    weight, generator = torch.randn(200, 16, requires_grad=True), torch.Generator().manual_seed(0)

    def held(calls: int) -> tuple[float, int]:
        """MiB of this process, and Python's objects, after so many calls."""
        for number in range(calls):
            tokens = int(torch.randint(1, 2000, (), generator=generator))
            x, target = torch.randn(tokens, 16, requires_grad=True), torch.randint(200, (tokens,))
            reduction = ("none", "mean")[number % 2]
            parallel_lce.linear_cross_entropy(x, weight, target, reduction=reduction).sum().backward()
            parallel_lce.token_statistics(x, weight, target).target_log_prob.sum().backward()
        assert len(prepare.KNOWN) <= prepare._MOST_KNOWN
        prepare.KNOWN.clear()
        gc.collect()
        ctypes.CDLL(None).malloc_trim(0)  # glibc may keep what is free
        size = int(Path("/proc/self/statm").read_text().split()[1]) * resource.getpagesize() / MiB
        return size, len(gc.get_objects())

    (size, objects), (later_size, later_objects) = held(300), held(1500)
    assert later_size < size + 16
    assert later_objects < objects + 100


@pytest.mark.parametrize("name", ["statistics", "a softmax of sets"])
def test_what_is_known_of_selected_ids_is_saved_once(name, device):
    """Of the ids themselves, 8 bytes each, and their logits: not whose they are."""
    x, weight = normal(64, 8).float().to(device).requires_grad_(), normal(4096, 8).float().to(device)
    ids = torch.arange(64 * 512, device=device).remainder(4096).view(64, 512)
    target = ids[:, 0].contiguous()

    def call():
        if name == "statistics":
            return parallel_lce.token_statistics(x, weight, target, selected=ids, logits_budget=0)
        return parallel_lce.selected_log_probs(x, weight, ids)

    call()
    _, alive = peak_memory(call, device)
    assert alive <= 4 * 2.1 * ids.numel() + 64 * KiB
