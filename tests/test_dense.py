"""Losses of logits that exist: small problems, whose fp32 logits are saved (:mod:`parallel_lce.backends.triton_dense`);
and the kernels of losses and of whole logits, beside plain torch and float64. The kernels are interpreted on the CPU,
compiled with ``-m gpu``."""

from __future__ import annotations

from unittest import mock

import pytest
import torch

pytest.importorskip("triton", reason="needs triton")

from blocks import launches
from cases import Case, assemble, check, normal, ours, part
from measures import assert_no_worse, size
from parallel_lce import linear_cross_entropy
from parallel_lce.backends import torch_backend, triton
from parallel_lce.call import prepare
from parallel_lce.core.grad_buffers import MainGrad
from parallel_lce.core.options import Options
from parallel_lce.core.plan import LOGIT_COLUMNS
from parallel_lce.run.fused_loss import fused_loss
from tools import chosen_backend, debug_mode, everywhere, given, small
from world import Member


@pytest.fixture(autouse=True)
def dense(kernels):
    with chosen_backend("dense"):
        yield


SHAPE = dict(N=40, V=208, D=32, dtype="bf16", sharpness=4.0)
CASES = {
    "mean": {},
    "sum": dict(reduction="sum"),
    "every option": dict(reduction="none", bias=True, label_smoothing=0.1, z_loss=1e-3, logit_scale=0.7)
    | dict(logit_softcap=5.0, token_weight=True, frozen="bias"),
    "logits far from 0": dict(bias=True, offset=300.0, frozen="bias"),
    "padding": dict(V=200, ranks=2, shards=(136, 120)),
    "nothing counts": dict(ignored="all"),
    "a frozen weight": dict(frozen="weight"),
    "frozen hidden states": dict(frozen="x"),
    "ranks": dict(ranks=2, reduction="none"),
    "sequence parallel": dict(ranks=2, sequence_parallel=True, label_smoothing=0.1),
    "uneven shards": dict(ranks=2, shards=(152, 56), token_weight=True),
    "an empty shard": dict(ranks=2, shards=(208, 0)),
}


def saved_logits() -> bool:
    """Whether the plan of the call that was made last says so."""
    return [*prepare.KNOWN.values()][-1].dense is not None


def _found(member: Member, case: Case) -> tuple[dict[str, torch.Tensor], bool]:
    return ours(member, case), saved_logits()


@pytest.mark.parametrize("name", CASES)
def test_errors_are_at_most_those_of_torch(name, worlds, device):
    case = Case(**SHAPE | CASES[name])
    found, dense = zip(*everywhere(worlds, device, case.ranks, _found, case))
    check(case, assemble(case, found), 1.0, device)
    assert dense == tuple(rows > 0 for rows in case.shards or [case.V] * case.ranks)


def test_a_step_has_few_launches(device):
    t = small(device, **SHAPE)
    with launches() as found:
        linear_cross_entropy(t.x, t.weight, t.target, reduction="none").sum().backward()
    assert [each.kernel for each in found] == ["lce_forward_dense", "lce_backward_dense"]


def test_later_backwards_have_the_bits_of_the_first_and_so_have_saved_tensors_in_other_memory(device):
    """A later one projects again what the first has overwritten."""
    t = small(device, **SHAPE | dict(bias=True))
    options = dict(linear_bias=t.bias.detach(), temperature=torch.linspace(0.5, 2.0, 40, device=device))
    sizes = []

    def pack(value: torch.Tensor) -> torch.Tensor:
        sizes.append(value.numel() * value.element_size())
        return torch.stack([value, value], -1)[..., 0]

    plain = linear_cross_entropy(t.x, t.weight, t.target, **options)
    with torch.autograd.graph.saved_tensors_hooks(pack, lambda value: value):
        moved = linear_cross_entropy(t.x, t.weight, t.target, **options)
    assert saved_logits()
    walks = [torch.autograd.grad(loss, [t.x, t.weight], retain_graph=True) for loss in [plain] * 3 + [moved] * 2]
    assert all(torch.equal(a, b) for walk in walks[1:] for a, b in zip(walk, walks[0]))
    # fp32, rows of a multiple of 64 entries; nothing else has the logits' shape.
    assert max(sizes) == 40 * 208 * 4 and sum(size >= 40 * 208 for size in sizes) == 2  # and the weight


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_main_grad_is_added_to(dtype, device):
    t = small(device, **SHAPE)
    options, tensors = given(t.x, t.weight, t.target, reduction="none", ignore_index=-100)
    [expected] = torch.autograd.grad(fused_loss(options, tensors, None).sum(), [t.weight])
    total = torch.ones(208, 32, device=device, dtype=dtype)
    for _ in range(2):
        fused_loss(options, tensors, None, main_grad=MainGrad(total, lambda: None)).sum().backward()
    assert saved_logits() == (dtype == torch.float32)
    torch.testing.assert_close(total.double(), 1 + 2 * expected.double(), rtol=2e-2, atol=2e-2)


FLOPS = 6 * 40 * 208 * (32 + LOGIT_COLUMNS)
# What changes of the problem, its logits' bytes beyond the budget, and the most flops of a small problem.
OTHERS = {
    "none": ({}, 0, FLOPS, True),
    "fp16": (dict(dtype="fp16"), 0, FLOPS, False),
    "the bias's gradient": (dict(bias=True), 0, FLOPS, False),
    "odd": (dict(V=207), 0, FLOPS, False),
    "large": ({}, 0, FLOPS - 1, False),
    "no memory": ({}, 1, FLOPS, False),
}


@pytest.mark.parametrize(("changes", "beyond", "flops", "saved"), OTHERS.values(), ids=OTHERS)
def test_other_calls_save_exponentials(changes, beyond, flops, saved, device, monkeypatch):
    monkeypatch.setattr(triton, "DENSE_FLOPS", flops)
    t = small(device, **SHAPE | changes)
    budget = 40 * 208 * 4 - beyond
    linear_cross_entropy(t.x, t.weight, t.target, linear_bias=t.bias, logits_budget=budget)
    assert saved_logits() == saved


def _without_a_bias(member: Member) -> tuple[torch.Tensor, bool]:
    t = small(member.device, **SHAPE | dict(bias=True))
    rows = 208 if member.rank == 0 else 0
    options = dict(process_group=member.group, sequence_parallel=True, logit_softcap=0.5)
    options |= dict(vocab_start=208 * member.rank, vocab_size=208, linear_bias=t.bias if rows else None)
    x = t.x.detach().chunk(2)[member.rank].clone().requires_grad_()
    loss = linear_cross_entropy(x, t.weight[:rows], t.target, **options)
    return torch.autograd.grad(loss, [x])[0].float().cpu(), saved_logits()


def test_ranks_whose_biases_differ_run_the_same_collectives(worlds, device):
    """An empty shard without a bias saves nothing, whatever the other rank saves for its bias's gradient."""
    t = small(device, **SHAPE | dict(bias=True))
    loss = linear_cross_entropy(t.x, t.weight, t.target, linear_bias=t.bias, logit_softcap=0.5)
    [whole] = torch.autograd.grad(loss, [t.x])
    found, dense = zip(*everywhere(worlds, device, 2, _without_a_bias))
    assert dense == (False, False)
    torch.testing.assert_close(torch.cat(found), whole.float().cpu(), rtol=2e-2, atol=1e-4)


def _with_unlike_gpus(member: Member) -> None:
    t = small(member.device, **SHAPE)
    words = "disagree about dense logits: rank 0 has True, rank 1 has False"
    with debug_mode(), mock.patch.object(triton, "DENSE_FLOPS", 0 if member.rank else 1e30):
        with pytest.raises(ValueError, match=words):
            linear_cross_entropy(t.x, t.weight[:104], t.target, process_group=member.group, reduction="none")


def test_debug_mode_tells_that_only_some_ranks_have_a_small_problem(worlds, device):
    """The most flops of one depend on the GPU."""
    everywhere(worlds, device, 2, _with_unlike_gpus)


def _unreduced(member: Member, reduce_hidden_grad: bool) -> torch.Tensor:
    t = part(small(member.device, **SHAPE), member)
    options = dict(reduction="none", process_group=member.group, reduce_hidden_grad=reduce_hidden_grad)
    loss = linear_cross_entropy(t.x, t.weight, t.target, **options)
    return torch.autograd.grad(loss.sum(), [t.x])[0].float().cpu()


def test_dx_may_stay_this_rank_s_part(worlds, device):
    parts, wholes = (everywhere(worlds, device, 2, _unreduced, reduced) for reduced in (False, True))
    torch.testing.assert_close(parts[0] + parts[1], wholes[0], rtol=2e-2, atol=2e-2)


# --- kernels ---------------------------------------------------------------------------------------


def problem(rows: int, entries: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Logits, a row of which is -inf, and targets, some of which lie outside."""
    logits = normal(rows, entries, seed=rows + entries) * 4
    if rows > 2:
        logits[2] = -torch.inf
        logits[1, : entries // 2] = -torch.inf
    return logits, torch.randint(-2, entries + 2, (rows,), generator=torch.Generator().manual_seed(0))


def partial_of(backend, logits: torch.Tensor, target: torch.Tensor, shifted: bool = True) -> torch.Tensor:
    dtype = torch.float64 if logits.dtype == torch.float64 else torch.float32
    partial = logits.new_full((3 + shifted, len(logits)), torch.nan, dtype=dtype)
    backend.logits_partial(logits, target, shifted, partial)
    return partial


@pytest.mark.parametrize("outside_is_nan", [True, False])
@pytest.mark.parametrize("ignore_index", [None, -100, 3])
@pytest.mark.parametrize("weighted", [False, True])
@pytest.mark.parametrize(("smoothing", "z_loss"), [(0.0, 0.0), (0.1, 0.0), (0.0, 1e-3), (0.2, 1e-2)])
def test_losses(smoothing, z_loss, weighted, ignore_index, outside_is_nan, device):
    R, V = 300, 40
    z, target = problem(R, V)
    z[3, 5] = torch.nan
    target[4::10], target[5::10], target[6] = -100, V, 2**62
    exact = partial_of(torch_backend, z, target)
    weight = normal(R, seed=1) if weighted else None
    terms = dict(ignore_index=ignore_index, label_smoothing=smoothing, z_loss=z_loss, outside_is_nan=outside_is_nan)
    options, entries = Options("", **terms), torch.tensor(float(V))
    truth = torch_backend.token_losses(exact, entries.double(), target, weight, options)
    put = lambda t: None if t is None else t.float().to(device)  # noqa: E731
    for backend in (triton, torch_backend):
        found = backend.token_losses(put(exact), put(entries), target.to(device), put(weight), options)
        for got, expected in zip(found, truth, strict=True):
            assert (got is None) == (expected is None)
            if got is not None:
                torch.testing.assert_close(got.double().cpu(), expected, rtol=2e-6, atol=1e-5, equal_nan=True)
    if ignore_index == -100:
        assert (truth[0][4::10] == 0).all() and (truth[1][4::10] == 0).all()
    outside = truth[0][5::10]
    assert outside.isnan().all() == outside_is_nan
    if not (outside_is_nan or smoothing or z_loss or weighted):  # lse - max, as in Megatron
        torch.testing.assert_close(outside, z.logsumexp(1)[5::10] - z.amax(1)[5::10])


@pytest.mark.parametrize("ignore_index", [None, 3, "all"])
@pytest.mark.parametrize("weighted", [False, True])
@pytest.mark.parametrize("rows", [1, 5000])
def test_mean(rows, weighted, ignore_index, device):
    target = torch.randint(-100, 9, (rows,), generator=torch.Generator().manual_seed(0))
    if ignore_index == "all":
        target[:], ignore_index = 3, 3
    losses, weight = normal(2, rows)
    weight = weight.abs() if weighted else None
    weights = torch.ones(rows).double() if weight is None else weight
    counted = torch.ones(rows, dtype=torch.bool) if ignore_index is None else target != ignore_index
    losses[~counted] = 0.0
    divisor = weights[counted].sum()
    put = lambda t: None if t is None else t.float().to(device)  # noqa: E731
    for backend in (triton, torch_backend):
        found, its = backend.mean_loss(put(losses), target.to(device), put(weight), ignore_index)
        assert found.shape == its.shape == () and found.dtype == torch.float32
        if counted.any():
            torch.testing.assert_close(found.double().cpu(), losses.sum() / divisor, rtol=1e-5, atol=1e-7)
            torch.testing.assert_close(its.double().cpu(), divisor, rtol=1e-6, atol=0)
        else:
            assert found == 0 and its > 0


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("shape", [(3, 5), (7, 4096), (5, 5000), (1, 1), (4, 12289)], ids=str)
@pytest.mark.thinned
def test_partials_and_gradients_of_whole_logits(shape, dtype, device):
    exact, target = problem(*shape)
    # A view with gaps between its rows.
    wide = torch.full((shape[0], shape[1] + 3), torch.nan, dtype=dtype, device=device)
    logits, target = wide[:, : shape[1]].copy_(exact), target.to(device)
    partial, want = partial_of(triton, logits, target), partial_of(torch_backend, logits.double(), target)
    assert torch.equal(partial[[0, 2]].double(), want[[0, 2]])
    torch.testing.assert_close(partial[[1, 3]].double(), want[[1, 3]], rtol=1e-5, atol=0)
    assert torch.equal(partial_of(triton, logits, target, False), partial[:3])

    coefficients = torch.rand(3, shape[0], generator=torch.Generator().manual_seed(1)).to(device)
    # As merged with another shard, which has finite logits.
    partial[0].clamp_(min=-5.0)
    partial[1] += 0.5
    found = triton.logits_gradient(logits, target, partial, coefficients)
    truth = torch_backend.logits_gradient(logits.double(), target, partial.double(), coefficients.double())
    yardstick = torch_backend.logits_gradient(logits, target, partial, coefficients)
    assert found.dtype == dtype and found.is_contiguous()
    assert_no_worse(found, truth, yardstick, 1.1, 1e-6 * size(truth))

    logits[0, -1] = torch.nan
    broken = partial_of(triton, logits, target)
    assert broken[:2, 0].isnan().all() and not broken[:, 1:].isnan().any()


def test_what_the_largest_logit_leaves_is_not_rounded_away(device):
    """1e-6 beside 1, of 12288 entries."""
    logits = torch.full((2, 12289), -23.0, device=device)
    logits[:, 77] = 0.0
    partial = partial_of(triton, logits, torch.full((2,), 77, device=device))
    truth = 12288 * torch.tensor(-23.0).double().exp()
    # Half a rounding of 1, in each of two sums.
    assert ((partial[1].double() - 1 - truth.to(device)).abs() <= 2**-24).all()
