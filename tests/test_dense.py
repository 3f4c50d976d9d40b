"""Small problems whose fp32 logits are saved (:mod:`parallel_lce.backends.triton_dense`)."""

from __future__ import annotations

from unittest import mock

import pytest
import torch

pytest.importorskip("triton", reason="needs triton")

from blocks import launches
from cases import Case, assemble, check, ours, part
from parallel_lce import linear_cross_entropy
from parallel_lce.backends import triton
from parallel_lce.call import prepare
from parallel_lce.core.grad_buffers import MainGrad
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
