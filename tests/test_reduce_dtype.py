"""``reduce_dtype``: dX summed over the ranks in fp32 and rounded once."""

from __future__ import annotations

import inspect
from unittest import mock

import pytest
import torch
import torch._dynamo
import torch.distributed as dist

import parallel_lce
from cases import DTYPES, Case, make, part
from measures import error, size
from tools import REDUCED, debug_mode, everywhere, recorded, shrunk, small
from world import Member

N, D, ROWS = 48, 16, 40  # tokens of the whole sequence, hidden size, vocabulary rows per rank
STRATEGIES = {"save": (None, "none"), "recompute": (0, "none"), "accumulate": (0, "mean")}
BLOCKS = {"save": 1, "recompute": 4, "accumulate": 4}


def problem(ranks: int, dtype: str, offset: float, device="cpu"):
    """With an ``offset`` the ranks' parts of dX are large and cancel: all rows of the weight share it, so that
    it adds nothing to the sum over the vocabulary, where the logits' gradient adds up to 0, but to each
    rank's part."""
    t = make(Case(N, ROWS * ranks, D, dtype, ignored="none"), device)
    t.weight += offset
    return t


def _gradient(member: Member, dtype: str, strategy: str, sequence_parallel: bool, reduce_dtype, offset=0.0):
    """This rank's dX and dW, and the reductions of its call."""
    t = part(problem(member.ranks, dtype, offset, member.device), member, sequence_parallel)
    budget, reduction = STRATEGIES[strategy]
    in_flight = 2 if strategy == "accumulate" else 1
    block = in_flight * N // BLOCKS[strategy] * ROWS * DTYPES[dtype].itemsize
    with shrunk(block, (8, 16)), recorded(member.group) as events:
        loss = parallel_lce.linear_cross_entropy(
            t.x,
            t.weight,
            t.target,
            reduction=reduction,
            logits_budget=budget,
            process_group=member.group,
            sequence_parallel=sequence_parallel,
            reduce_dtype=reduce_dtype,
        )
        dx, dw = torch.autograd.grad(loss, [t.x, t.weight], torch.full_like(loss, 1 if loss.dim() == 0 else 1 / N))
    assert dx.dtype == t.x.dtype and dw.dtype == t.weight.dtype
    return dx.cpu(), dw.cpu(), [e for e in events if e[0] in ("all_reduce", "reduce_scatter")]


def exact_parts(ranks: int, dtype: str, offset: float) -> list[torch.Tensor]:
    """Each rank's part of dX in float64."""
    t = problem(ranks, dtype, offset)
    x, w = t.x.double(), t.weight.double()
    g = (torch.softmax(x @ w.t(), 1) - torch.nn.functional.one_hot(t.target, len(w))) / N
    return [a @ b for a, b in zip(g.chunk(ranks, 1), w.chunk(ranks))]


def whole(found: list, sequence_parallel: bool) -> torch.Tensor:
    if sequence_parallel:
        return torch.cat([dx for dx, *_ in found])
    assert all(torch.equal(dx, found[0][0]) for dx, *_ in found[1:]), "dX differs by rank"
    return found[0][0]


@pytest.mark.parametrize("sequence_parallel", [False, True])
@pytest.mark.parametrize("strategy", STRATEGIES)
@pytest.mark.parametrize("ranks", [2, 3, 4])
@pytest.mark.thinned
def test_a_sum_that_cancels_keeps_its_digits(ranks, strategy, sequence_parallel, worlds, device):
    given = "bf16", strategy, sequence_parallel
    low, wide = (everywhere(worlds, device, ranks, _gradient, *given, d, 8.0) for d in (None, torch.float32))
    parts = exact_parts(ranks, "bf16", 8.0)
    truth = sum(parts)
    assert sum(map(size, parts)) > 10 * size(truth), "the case must cancel"
    its = error(sum(p.bfloat16().double() for p in parts), truth)
    ours, default = (error(whole(found, sequence_parallel), truth) for found in (wide, low))
    # What is left is the rounding of the logits' gradient, which the sum's does not add to.
    assert ours <= 0.5 * its and ours <= 0.5 * default, f"{ours:.3g}, {default:.3g}, of bf16 parts {its:.3g}"
    for (_, a, _), (_, b, _) in zip(low, wide):
        assert torch.equal(a, b), "dW is no sum over ranks"


@pytest.mark.parametrize("dtype", ["bf16", "fp16", "fp32", "fp64"])
@pytest.mark.parametrize("ranks", [2, 4])
@pytest.mark.thinned
def test_ordinary_errors_are_no_larger(ranks, dtype, worlds, device):
    """Nor is anything lost where there is nothing to gain."""
    wide = torch.float64 if dtype == "fp64" else torch.float32
    truth = sum(exact_parts(ranks, dtype, 0.0))
    for strategy in STRATEGIES:
        found = [
            whole(everywhere(worlds, device, ranks, _gradient, dtype, strategy, False, d), False) for d in (None, wide)
        ]
        default, ours = (error(dx, truth) for dx in found)
        if dtype in ("fp32", "fp64"):
            assert torch.equal(*found), "the default is the same sum"
        assert ours <= default


@pytest.mark.parametrize("sequence_parallel", [False, True])
@pytest.mark.parametrize("strategy", STRATEGIES)
@pytest.mark.parametrize(("dtype", "asked"), [("bf16", "float32"), ("bf16", "bfloat16"), ("fp16", "float16")])
def test_what_is_sent(dtype, asked, strategy, sequence_parallel, worlds, device):
    """As many elements as by default, of the dtype that was asked for."""
    found = everywhere(worlds, device, 2, _gradient, dtype, strategy, sequence_parallel, getattr(torch, asked))
    # Gradients of fp16 are not formed in forward: then everything is recomputed, in blocks twice as large.
    blocks = 2 if (dtype, strategy) == ("fp16", "accumulate") else BLOCKS[strategy]
    kind = "reduce_scatter" if sequence_parallel else "all_reduce"
    for _, _, events in found:
        assert events == [(kind, N // blocks * D, asked, True)] * blocks


# --- no sum over ranks, no difference --------------------------------------------------------------


def _without_a_sum(member: Member, dtype: str):
    """Bits of the default and of fp32 sums, without a group and in a group of one."""
    groups = [None]
    if member.group is not None:
        own = [dist.new_group([rank]) for rank in range(member.ranks)]
        groups.append(own[member.rank])
    t = small(member.device, dtype=dtype)
    for name in REDUCED:
        results = []
        for group in groups:
            for reduce_dtype in (None, torch.float32):
                with shrunk(4000, (8, 32)):
                    loss = parallel_lce.linear_cross_entropy(
                        t.x,
                        t.weight,
                        t.target,
                        process_group=group,
                        sequence_parallel=True,
                        reduce_dtype=reduce_dtype,
                        **REDUCED[name],
                    )
                    results.append([loss, *torch.autograd.grad(loss.sum(), [t.x, t.weight])])
        for found in results[1:]:
            assert all(torch.equal(a, b) for a, b in zip(found, results[0], strict=True)), name
    return len(groups)


@pytest.mark.parametrize("ranks", [1, 2])
@pytest.mark.parametrize("dtype", ["bf16", "fp32"])
def test_one_rank_has_nothing_to_sum(dtype, ranks, worlds, device):
    assert everywhere(worlds, device, ranks, _without_a_sum, dtype) == [ranks] * ranks


# --- who takes it ----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("dtype", "asked", "words"),
    [
        ("bf16", torch.float16, "torch.bfloat16, got torch.float16"),
        ("bf16", torch.float64, "torch.bfloat16, got torch.float64"),
        ("bf16", "float32", "torch.bfloat16, got 'float32'"),
        ("bf16", torch.int32, "torch.bfloat16, got torch.int32"),
        ("fp16", torch.bfloat16, "torch.float16, got torch.bfloat16"),
        ("fp32", torch.bfloat16, "torch.float32, got torch.bfloat16"),
        ("fp64", torch.float32, "torch.float64, got torch.float32"),
    ],
)
def test_another_dtype_is_refused(dtype, asked, words, device):
    t = small(device, dtype=dtype)
    for function in (parallel_lce.linear_cross_entropy, parallel_lce.token_statistics):
        with pytest.raises(ValueError, match=f"reduce_dtype must be .*{words}"):
            function(t.x, t.weight, t.target, reduce_dtype=asked)


def _everybody(member: Member, how: str):
    """dX by the function and by what is to give the same, in fp32 sums; and the default's."""
    torch._dynamo.reset()
    t = part(problem(member.ranks, "bf16", 0.0, member.device), member)
    options = dict(process_group=member.group, logits_budget=0)

    def loss(**more):
        return lambda x, w, y: parallel_lce.linear_cross_entropy(x, w, y, **options, **more)

    def statistics(x, w, y):
        return -parallel_lce.token_statistics(x, w, y, **options, reduce_dtype=torch.float32).target_log_prob

    others = {
        "module": parallel_lce.LinearCrossEntropy(**options, reduce_dtype=torch.float32),
        "statistics": lambda *given: statistics(*given).mean(),
        "compiled loss": torch.compile(loss(reduce_dtype=torch.float32), fullgraph=True, backend="aot_eager"),
        "compiled statistics": torch.compile(
            lambda *given: statistics(*given).mean(), fullgraph=True, backend="aot_eager"
        ),
    }
    functions = loss(), loss(reduce_dtype=torch.float32), others[how]
    found, signature = [], inspect.signature(dist.all_reduce)
    with shrunk(N // 4 * ROWS * 2, (8, 16)):
        for function in functions:
            # The compiler takes no code that runs under a recorder of operators.
            with mock.patch.object(dist, "all_reduce", wraps=dist.all_reduce) as reduced:
                value = function(t.x, t.weight, t.target)
                (dx,) = torch.autograd.grad(value, t.x)
            sums = (signature.bind(*call.args, **call.kwargs).arguments["tensor"] for call in reduced.call_args_list)
            found.append((dx.cpu(), {tensor.dtype for tensor in sums}))
    torch._dynamo.reset()
    return found


@pytest.mark.parametrize("how", ["module", "statistics", "compiled loss", "compiled statistics"])
def test_whoever_takes_it_gives_the_same(how, worlds, device):
    for (default, low), (dx, wide), (other, its) in everywhere(worlds, device, 2, _everybody, how):
        assert (low, wide, its) == ({torch.bfloat16}, {torch.float32}, {torch.float32})
        assert not torch.equal(dx, default), "the option must change something"
        if "statistics" in how or device == "cuda":
            # Summed in other blocks, but to fp32.
            assert error(other, dx) < 0.5 * error(default, dx)
        else:
            assert torch.equal(other, dx)


def test_the_module_shows_it(device):
    module = parallel_lce.LinearCrossEntropy(reduce_dtype=torch.float32)
    assert "reduce_dtype=torch.float32" in repr(module)


def _ranks_that_disagree(member: Member):
    t = part(small(member.device, V=30 * member.ranks, dtype="bf16"), member)
    with debug_mode(), pytest.raises(ValueError, match="reduce_dtype"):
        parallel_lce.linear_cross_entropy(
            t.x, t.weight, t.target, process_group=member.group, reduce_dtype=torch.float32 if member.rank else None
        )
    return True


def test_debug_mode_finds_ranks_that_disagree(worlds, device):
    assert everywhere(worlds, device, 2, _ranks_that_disagree) == [True, True]
