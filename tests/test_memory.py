"""Peak memory, measured by an allocation tracker: nothing of size N * V but what the budget allows."""

from __future__ import annotations

import pytest
import torch

import parallel_lce
from benchmarks.peak_memory import peak_memory
from blocks import block_backward, block_forward
from cases import DTYPES, Case, make, normal, part
from parallel_lce import backends
from parallel_lce.backends import backend_of, torch_backend
from parallel_lce.backends.interface import Coefficients, GradBuffers, Projection, Scratch
from parallel_lce.core.grad_buffers import GradBuffer
from parallel_lce.core.partials import Columns
from tools import alone, everywhere, shrunk, small
from world import Member

KiB, MiB = 1 << 10, 1 << 20
BLOCK = MiB  # SMALLEST_BLOCK of these tests

# (reduction, logits_budget): a part of the rows saved and the rest recomputed; all recomputed; accumulated.
STRATEGIES = {"save": ("none", 3 * MiB // 2), "recompute": ("none", 0), "accumulate": ("sum", 0)}


def measured(
    member: Member,
    N,
    V,
    D,
    dtype="fp32",
    reduction="none",
    budget=0,
    sequence_parallel=False,
    frozen="",
    tile=(64, 2048),
    backward=True,
    block=BLOCK,
    **options,
):
    """(peak, alive) of a forward and backward; N and V of the whole group, equal shards."""
    t = part(make(Case(N, V, D, dtype, ignored="none"), member.device), member, sequence_parallel)
    t.x.requires_grad_("input" not in frozen)
    t.weight.requires_grad_("weight" not in frozen)
    leaves = [leaf for leaf in (t.x, t.weight) if leaf.requires_grad]

    def step():
        loss = parallel_lce.linear_cross_entropy(
            t.x,
            t.weight,
            t.target,
            reduction=reduction,
            logits_budget=budget,
            process_group=member.group,
            sequence_parallel=sequence_parallel,
            **options,
        )
        if not backward:
            return loss
        return torch.autograd.grad(loss, leaves, torch.ones_like(loss))

    with shrunk(block, tile):
        return after_first_use(step, member.device)


def after_first_use(step, device: torch.device) -> tuple[int, int]:
    """(peak, alive) of a step after what a device's first use takes for good."""
    if device.type == "cuda":
        step()
    return peak_memory(step, device)


@pytest.mark.parametrize("strategy", STRATEGIES)
@pytest.mark.parametrize(
    ("ranks", "sequence_parallel", "dtype"),
    [(1, False, "fp32"), (1, False, "bf16"), (2, False, "fp32"), (2, True, "fp32")],
)
@pytest.mark.thinned
def test_growth_of_n_grows_no_buffer_with_v_in_it(strategy, dtype, ranks, sequence_parallel, worlds, device):
    """Twice the tokens cost some more numbers per token, and no more logits."""
    reduction, budget = STRATEGIES[strategy]
    V, D = 8192 * ranks, 4
    # In N rows blocks of the same size as in 2 N; what is kept by rows comes on top of them.
    N = 272 if strategy == "save" else 256

    def peak(n):
        options = (n, V, D, dtype, reduction, budget, sequence_parallel)
        return max(p for p, _ in everywhere(worlds, device, ranks, measured, *options))

    growth = peak(2 * N) - peak(N)
    logits = N * V // ranks * DTYPES[dtype].itemsize
    by_torch = backend_of(torch.empty(1, 1, dtype=DTYPES[dtype], device=device)) is torch_backend
    # Numbers per token and window of 2048 columns, or 128.
    partials = V // ranks * 3 // 2048 if by_torch else V // ranks * 2 // 128
    # Per token: hidden states and their gradient, statistics, and partials of windows.
    assert growth < N * (4 * D + 40 + partials) * 4 < 0.06 * logits, (
        f"{growth} bytes for {N} more tokens, whose logits are {logits}"
    )


def test_the_tracker_sees_logits(device):
    """The same measure of torch's own loss finds all of its [N, V] buffers."""
    N, V = 256, 4096

    def peak(n, v):
        t = small(device, n, v, 4)

        def step():
            loss = torch.nn.functional.cross_entropy(t.x @ t.weight.t(), t.target)
            return torch.autograd.grad(loss, [t.x, t.weight])

        step()
        return peak_memory(step, device)[0]

    mixed = (peak(2 * N, 2 * V) - peak(2 * N, V)) - (peak(N, 2 * V) - peak(N, V))
    assert mixed >= 2 * N * V * 4


@pytest.mark.parametrize("strategy", ["recompute", "accumulate"])
def test_no_n_by_v_buffer_with_budget_zero(strategy, device):
    N, V, D = 2048, 8192, 4
    reduction, budget = STRATEGIES[strategy]
    peak, alive = measured(alone(device), N, V, D, "fp32", reduction, budget)
    assert peak - alive < 6 * MiB < N * V * 4 / 10, f"{peak - alive} bytes beyond the gradients"
    assert alive <= (N + V) * D * 4 + 64 * KiB


@pytest.mark.parametrize("dtype", ["fp32", "bf16"])
def test_saving_saves_the_exponentials_and_no_more(dtype, device):
    N, V = 512, 4096
    whole = N * V * DTYPES[dtype].itemsize
    _, alive = measured(alone(device), N, V, 4, dtype, budget=None, backward=False)
    assert whole <= alive <= 1.02 * whole + 64 * KiB


@pytest.mark.parametrize("budget", [0, MiB, 2 * MiB, 5 * MiB])
def test_saved_bytes_are_within_the_budget(budget, device):
    N, V = 512, 4096
    _, alive = measured(alone(device), N, V, 4, budget=budget, backward=False)
    assert alive <= max(0, budget - BLOCK) + 64 * KiB


def _uneven(member: Member, budget):
    """The larger shard of 1000 and 3000 rows, planned as 2000 each, keeps no more than the budget."""
    t = part(small(member.device, N=256, V=4000, D=4), member, shards=(1000, 3000))

    def forward():
        return parallel_lce.linear_cross_entropy(
            t.x,
            t.weight,
            t.target,
            reduction="none",
            logits_budget=budget,
            process_group=member.group,
            vocab_start=(0, 1000)[member.rank],
            vocab_size=4000,
        )

    with shrunk(128 * KiB, (64, 256)):
        return after_first_use(forward, member.device)[1]


@pytest.mark.parametrize("budget", [MiB, 256 * 2000 * 4])
def test_the_larger_of_uneven_shards_stays_within_the_budget(budget, worlds, device):
    for alive in worlds(2).run(_uneven, budget):
        # Partials of 12 windows of 256 columns, and the maxima kept of them, come on top.
        assert alive <= budget + 256 * KiB


@pytest.mark.parametrize("budget", [None, 0])
@pytest.mark.parametrize("reduction", ["none", "mean"])
@pytest.mark.parametrize("mode", [torch.no_grad, torch.inference_mode])
@pytest.mark.thinned
def test_evaluation_keeps_nothing(mode, reduction, budget, device):
    """Parameters that need gradients, but nobody will ask for them."""
    N, V = 512, 4096
    with mode():
        peak, alive = measured(
            alone(device), N, V, 4, budget=budget, reduction=reduction, backward=False, label_smoothing=0.1
        )
    assert alive <= 16 * N * 4
    assert peak < N * V * 4 / 4


def test_frozen_everything_keeps_nothing(device):
    N, V = 512, 4096
    _, alive = measured(alone(device), N, V, 4, budget=None, frozen="input weight", backward=False)
    assert alive <= 16 * N * 4


@pytest.mark.parametrize("strategy", STRATEGIES)
def test_a_frozen_weight_allocates_no_buffer_of_its_size(strategy, device):
    N, V, D = 128, 4096, 256
    reduction, budget = STRATEGIES[strategy]
    options = dict(reduction=reduction, budget=budget, tile=(64, 256), block=256 * KiB)
    frozen, _ = measured(alone(device), N, V, D, frozen="weight", **options)
    free, _ = measured(alone(device), N, V, D, **options)
    assert free >= V * D * 4
    # dX [N, D], the budget or block and a few tiles; less than one [V, D].
    assert frozen < N * D * 4 + max(budget, 256 * KiB) + MiB < V * D * 4


@pytest.mark.parametrize("strategy", STRATEGIES)
def test_a_frozen_input_allocates_no_gradient_of_its_size(strategy, device):
    N, V, D = 2048, 64, 512
    reduction, budget = STRATEGIES[strategy]
    options = dict(reduction=reduction, budget=budget, tile=(64, 64), block=64 * KiB)
    frozen, _ = measured(alone(device), N, V, D, frozen="input", **options)
    free, _ = measured(alone(device), N, V, D, **options)
    assert free >= N * D * 4
    assert frozen < V * D * 4 + max(budget, 64 * KiB) + MiB < N * D * 4


def test_low_precision_dw_in_one_block_has_no_fp32_sum(device):
    """All rows in one block: windows of dW are summed in fp32 one at a time (Liger #1323, #1391)."""
    N, V, D = 32, 4096, 256
    peak, alive = measured(alone(device), N, V, D, "bf16", tile=(64, 128), block=64 * KiB)
    assert alive >= V * D * 2
    assert peak - alive < V * D * 4 / 4


def _chunked(member: Member, backward: bool):
    """32 blocks of 128 rows over both ranks."""
    return measured(
        member,
        4096,
        64 * member.ranks,
        256,
        sequence_parallel=True,
        tile=(128, 64),
        block=128 * 64 * 4,
        backward=backward,
    )


@pytest.mark.parametrize("backward", [False, True], ids=["forward", "backward"])
def test_sequence_parallel_chunks_are_let_go(backward, worlds, device):
    """Hidden states are gathered, and local dX reduced, a few blocks at a time: neither the whole
    sequence's ``[N, D]`` hidden states nor its local dX ever exist on a rank, as the plan assumes."""
    whole = 4096 * 256 * 4
    for peak, alive in worlds(2).run(_chunked, backward):
        assert alive >= whole // 2 or not backward
        assert peak - alive < 0.5 * whole, f"{(peak - alive) / whole:.2f} of [N, D]"


@pytest.mark.parametrize("backend", ["torch", pytest.param("triton", marks=pytest.mark.slow)], indirect=True)
def test_forward_s_window_partials_do_not_grow_with_n(backend, device, monkeypatch):
    """Four times the tokens, with 32 or 64 windows: their partials are merged group by group."""
    V = 2048
    if backend == "triton":
        V = 8192
        monkeypatch.setattr(backends.named("triton"), "_PARTIAL_BYTES", 64 * KiB)
    peaks = [measured(alone(device), N, V, 4, tile=(8, 64), backward=False)[0] for N in (128, 512)]
    per_token = 256  # bytes: columns, statistics and losses, none of them 32 long
    assert peaks[1] - peaks[0] <= (512 - 128) * per_token


def test_a_reduction_waits_for_no_more_than_a_tile(device):
    """Of what is projected again dW of one tile alone is formed beside the reduction of dX."""
    rows, V, D, columns = 512, 4096, 8, 1024
    t = make(Case(rows, V, D, ignored="none"), device)
    projection, alpha = Projection(t.weight, None, 0, V), normal(rows).abs().float().to(device)
    coefficients = Coefficients(alpha, alpha, None, None)

    def backward():
        dweight, dx = GradBuffer(projection.weight, V, 1), torch.empty_like(t.x)
        grads = GradBuffers(dx, dweight, None, reduces_dx=True)
        block_backward(torch_backend, projection, t.x, t.target, partial, coefficients, (), grads, Scratch(0, device))
        return dx, dweight.deliver()

    with shrunk(tile=(16, columns)):
        partial, _ = block_forward(torch_backend, projection, t.x, t.target, Columns(), 0)
        peak = peak_memory(backward, torch.device(device))[0]
    assert peak <= V * D * 4 + rows * D * 8 + rows * columns * 4 // 4
