"""The operator among autograd's tools: checkpointing, hooks, loss scaling, second derivatives."""

from __future__ import annotations

import functools

import pytest
import torch
from torch.distributed._functional_collectives import AsyncCollectiveTensor
from torch.utils.checkpoint import CheckpointPolicy, checkpoint, create_selective_checkpoint_contexts

import parallel_lce
import reference
from blocks import counted_forwards, watched_backwards
from cases import dense_loss, part
from measures import ROUNDED, assert_close, assert_near
from parallel_lce.backends import backend_of
from parallel_lce.distillation import divergence
from parallel_lce.run import statistics as statistics_module
from tools import REDUCED, everywhere, fields, shrunk, small, statistics
from world import Member

SIZE = dict(N=64, V=300, D=8)
WALKED_SIZE = dict(N=48, V=200, D=8)


@pytest.mark.parametrize("reentrant", [False, True])
@pytest.mark.parametrize("reduction", ["mean", "none"])
@pytest.mark.thinned
def test_checkpointed_loss_is_computed_twice_and_no_more(reduction, reentrant, backend, device):
    t = small(device, N=64, V=300, D=8)
    x, w = t.x, t.weight

    def loss(x, w):
        return parallel_lce.linear_cross_entropy(x, w, t.target, reduction=reduction, logits_budget=0).sum()

    with shrunk(8000), counted_forwards(backend_of(w)) as blocks:
        want = torch.autograd.grad(loss(x, w), (x, w))
        once = len(blocks)
        assert once > 1 or reduction == "none", "several blocks accumulate"
        checkpoint(loss, x, w, use_reentrant=reentrant).backward()
    # The plain call, the checkpoint's forward (without gradients if reentrant) and its recomputation.
    assert len(blocks) == 2 * once + (1 if reentrant else once)
    assert torch.equal(x.grad, want[0]) and torch.equal(w.grad, want[1])


_aten = torch.ops.aten
PRODUCTS = (_aten.mm.default, _aten.addmm.default, _aten.bmm.default, _aten.baddbmm.default, _aten.linear.default)


def _save_products(context, operation, *arguments, **options) -> CheckpointPolicy:
    """What trainers checkpoint a block with."""
    return CheckpointPolicy.MUST_SAVE if operation in PRODUCTS else CheckpointPolicy.PREFER_RECOMPUTE


@pytest.mark.parametrize("name", [*REDUCED, "statistics", "selected", "divergence"])
@pytest.mark.thinned
def test_selective_checkpoints_may_keep_products(name, backend, device):
    """They keep what ``aten.mm`` gives, and refuse it if it is changed in place. So no such result is: a product that
    is to be changed is written by ``out=``."""
    t = small(device, N=40, V=150, D=16, dtype="bf16")
    ids = t.target[:, None]

    def values(x, w):
        if name == "divergence":
            return divergence(x, w, x.detach() * 0.5, w.detach(), temperature=2.0, reduction="none")
        if name == "selected":
            return parallel_lce.selected_log_probs(x, w, ids.repeat(1, 2))
        if name == "statistics":
            found = statistics(x, w, t.target, logit_scale=0.5, selected=ids, top_k=2)
            return found.entropy + found.selected_log_prob[:, 0]
        return parallel_lce.linear_cross_entropy(x, w, t.target, logit_scale=0.5, **REDUCED[name])

    def block(x, w):
        return values(torch.nn.functional.linear(x, torch.eye(16, dtype=x.dtype, device=device)).relu(), w).sum()

    with shrunk(8000, (16, 32)):
        want = torch.autograd.grad(block(t.x, t.weight), (t.x, t.weight))
        contexts = functools.partial(create_selective_checkpoint_contexts, _save_products)
        kept = checkpoint(block, t.x, t.weight, use_reentrant=False, context_fn=contexts)
        found = torch.autograd.grad(kept, (t.x, t.weight))
    assert all(torch.equal(a, b) for a, b in zip(found, want))


# --- the graph walked again ------------------------------------------------------------------------

# Walked again, a graph recomputes what its first backward took from stored exponentials.
WALKED = REDUCED | {"save some": dict(logits_budget=17000, reduction="none")}
STORED_ERROR = {"fp32": 1e-6, "bf16": 1e-2, "fp16": 1e-3}


def _walked(member: Member, name: str, dtype: str):
    """Four backwards through one graph: one with a zero upstream and one with it doubled."""
    t = part(small(member.device, **WALKED_SIZE, dtype=dtype), member)
    bias = t.weight.new_zeros(len(t.weight)).requires_grad_()
    leaves = [t.x, t.weight, bias]

    def grad(loss, upstream: float = 1.0, retain: bool = True):
        return torch.autograd.grad(loss, leaves, torch.full_like(loss, upstream), retain_graph=retain)

    def total():
        options = dict(linear_bias=bias, process_group=member.group, **WALKED[name])
        return parallel_lce.linear_cross_entropy(t.x, t.weight, t.target, **options).sum()

    with shrunk(8192, (16, 32)):
        loss = total()
        accumulates = "AccumulatedLoss" in type(_parent(loss)).__name__
        # dX of fp16 waits for the upstream gradient, which may be a loss scale.
        assert accumulates == (name == "accumulate" and dtype != "fp16")
        first = grad(loss)
        copies = [g.clone() for g in first]
        nothing, double, again = grad(loss, 0.0), grad(loss, 2.0), grad(loss, retain=False)
        # Sums that were accumulated are scaled in place by the first backward: by 0.
        loss = total()
        grad(loss, 0.0)
        after_zero = grad(loss)
    assert all(torch.equal(a, b) for a, b in zip(after_zero, again))
    for one, copy, zero, two, last in zip(first, copies, nothing, double, again):
        assert torch.count_nonzero(copy), "a gradient to compare with"
        assert torch.equal(one, copy), "a later backward wrote into the first one's result"
        assert torch.count_nonzero(zero) == 0
        if name.startswith("save"):
            assert_close(last, one, STORED_ERROR[dtype])
        else:
            assert torch.equal(last, one)
        # Powers of two scale exactly, but in the subnormal numbers of fp16.
        assert torch.equal(two, 2 * last) or dtype == "fp16"
    return [g.cpu() for g in first]


def _parent(loss):
    """The package's node behind a chain of plain operations."""
    node = loss.grad_fn
    while not hasattr(node, "call"):
        node = node.next_functions[0][0]
    return node


@pytest.mark.parametrize("ranks", [1, 2])
@pytest.mark.parametrize("dtype", ["fp32", "bf16", "fp16"])
@pytest.mark.parametrize("name", WALKED)
@pytest.mark.thinned
def test_second_backward(name, dtype, ranks, worlds, backend, device):
    parts = everywhere(worlds, device, ranks, _walked, name, dtype)
    reduction = "sum" if WALKED[name]["reduction"] == "none" else "mean"
    truth = dense_loss(small(**WALKED_SIZE, dtype=dtype), reduction=reduction)
    assert_near(parts[0][0], truth["dx"], ROUNDED[dtype])
    assert_near(torch.cat([p[1] for p in parts]), truth["dweight"], ROUNDED[dtype])


@pytest.mark.parametrize(
    ("names", "dtype"),
    [(["lse", "target_logit"], "bf16"), (["entropy"], "bf16"), (["entropy"], "fp16")],
    ids=["saved", "entropy", "recomputed"],
)
@pytest.mark.parametrize(("budget", "blocks"), [(None, (1, 1)), (14000, (4, 3))])
@pytest.mark.thinned
def test_a_backend_may_overwrite_what_is_saved(budget, blocks, names, dtype, backend, device):
    """Its memory is scratch afterwards: for the blocks that follow, and for a second backward."""
    t = small(device, N=160, V=100, D=600, dtype=dtype)
    module, handed = backend_of(t.weight), []

    def note(task):
        handed.append((len(task.saved) > 0, task.scratch.capacity(torch.uint8)))

    def spoil(task):
        for tensor in (t for t in task.saved if t is not None):
            tensor.fill_(torch.nan if tensor.is_floating_point() else 255)
        scratch = task.scratch
        scratch.borrow(scratch.capacity(torch.uint8), torch.uint8).fill_(255)

    leaves = [t.x, t.weight]
    with shrunk(4000, (16, 32)), watched_backwards(module, note, spoil):
        found = statistics(*leaves, t.target, logits_budget=budget)
        total = sum(getattr(found, name).sum() for name in names)
        walks = [torch.autograd.grad(total, leaves, retain_graph=True) for _ in range(2)]
    x, w = (leaf.detach().double().requires_grad_() for leaf in leaves)
    exact = reference.statistics(x @ w.t(), t.target)
    expected = torch.autograd.grad(sum(exact[name].sum() for name in names), [x, w])
    for gradients in walks:
        for found, truth in zip(gradients, expected):
            assert_near(found, truth, 1e-2)
    # Rows of saved exponentials begin at multiples of 128 bytes in the triton backend.
    # What it recomputes goes to the memory of what was saved.
    scratch = 4000 if backend == "torch" else 0
    saved = (160 if budget is None else (budget - scratch) // 200) * (200 if backend == "torch" else 256)
    # The range of fp16 is too short to take logits from exponentials.
    uses = dtype == "bf16"
    assert handed[0] == (uses, scratch if uses else saved)
    assert handed[1:] == [(False, saved)] * (2 * blocks[backend == "triton"] - 1)


@pytest.mark.parametrize("reduction", ["none", "mean", "statistics"])
@pytest.mark.parametrize("budget", [None, 0])
def test_targets_that_were_written_to_since_forward_are_refused(budget, reduction, backend, device):
    """As ``F.cross_entropy`` refuses them: the gradient would be that of other targets."""
    t = small(device, **WALKED_SIZE)
    with shrunk(8192):
        if reduction == "statistics":
            loss = statistics(t.x, t.weight, t.target, logits_budget=budget).target_log_prob
        else:
            loss = parallel_lce.linear_cross_entropy(t.x, t.weight, t.target, reduction=reduction, logits_budget=budget)
        t.target.zero_()
        with pytest.raises(RuntimeError, match="modified by an inplace operation"):
            loss.sum().backward()


# --- upstream gradients -----------------------------------------------------------------------------


@pytest.mark.parametrize("budget", [None, 0])
@pytest.mark.parametrize("dtype", ["fp32", "bf16", "fp16"])
@pytest.mark.thinned
def test_upstream_of_any_layout(dtype, budget, backend, device):
    """Zeros in places, expanded, strided, transposed: the same bits as a contiguous copy gives."""
    t = small(device, dtype=dtype)
    x = t.x.detach().view(4, 6, -1).requires_grad_()
    target = t.target.view(4, 6)

    def gradients(upstream, reduced=lambda loss: loss):
        with shrunk(4096, (16, 32)):
            loss = parallel_lce.linear_cross_entropy(x, t.weight, target, reduction="none", logits_budget=budget)
            return torch.autograd.grad(reduced(loss), [x, t.weight], upstream)

    sparse = torch.randn(4, 6, device=device)
    sparse[1] = 0
    layouts = {
        "expanded": torch.tensor(0.25, device=device).expand(4, 6),
        "rows expanded": torch.randn(6, device=device).expand(4, 6),
        "strided": torch.randn(4, 12, device=device)[:, ::2],
        "transposed": torch.randn(6, 4, device=device).t(),
        "zeros in places": sparse,
    }
    for name, upstream in layouts.items():
        found, expected = gradients(upstream), gradients(upstream.contiguous())
        assert all(torch.equal(a, b) for a, b in zip(found, expected)), name
        truth = dense_loss(t, upstream=upstream.flatten(), reduction="none")
        assert_near(found[0], truth["dx"].view(x.shape), ROUNDED[dtype])
        assert_near(found[1], truth["dweight"], ROUNDED[dtype])
    by_sum = gradients(None, torch.sum)
    assert all(torch.equal(a, b) for a, b in zip(by_sum, gradients(torch.ones(4, 6, device=device))))


# --- what users do with a loss and its gradient ----------------------------------------------------


REDUCTIONS = pytest.mark.parametrize("reduction", ["none", "mean", "sum"])


def _loss_and_leaves(device: str, reduction: str):
    t = small(device)
    return parallel_lce.linear_cross_entropy(t.x, t.weight, t.target, reduction=reduction), [t.x, t.weight]


@REDUCTIONS
def test_a_loss_may_be_changed_in_place(reduction, backend, device):
    """So may a detached one, before the backward."""
    loss, leaves = _loss_and_leaves(device, reduction)
    expected = torch.autograd.grad(loss.sum(), leaves)
    loss, leaves = _loss_and_leaves(device, reduction)
    logged = loss.detach()
    logged *= 3
    found = torch.autograd.grad(loss, leaves, torch.ones_like(loss))
    assert all(torch.equal(a, b) for a, b in zip(found, expected))
    loss, leaves = _loss_and_leaves(device, reduction)
    loss /= 4
    found = torch.autograd.grad(loss.sum(), leaves)
    for one, other in zip(found, expected):
        torch.testing.assert_close(4 * one, other)
    if reduction != "none":  # a view, of the tokens' shape
        loss.detach_()
        assert not loss.requires_grad


@pytest.mark.parametrize(("shape", "sets"), [((24,), False), ((4, 6), False), ((4, 6), True)])
@pytest.mark.thinned
def test_every_statistic_may_be_changed_in_place(shape, sets, backend, device):
    """Of the tokens. Called twice: launches that are known start kernels again."""
    t = small(device, N=24, V=150, D=16, dtype="bf16")
    selected = torch.arange(48, device=device).view(*shape, 2)
    if sets:
        selected = selected.flatten(), torch.arange(0, 50, 2, device=device)

    def gradients(change):
        found = statistics(t.x.view(*shape, 16), t.weight, t.target.view(shape), selected=selected, top_k=2)
        changed = {name: change(value) for name, value in fields(found).items() if value.dim()}
        total = sum(value.sum() for name, value in changed.items() if name in statistics_module.DIFFERENTIABLE)
        return torch.autograd.grad(total, (t.x, t.weight))

    def halved(value):
        return value.mul_(0.5).masked_fill_(value > 0, 0.0) if value.is_floating_point() else value.add_(1)

    want = gradients(lambda v: (v * 0.5).masked_fill(v > 0, 0.0))
    for _ in range(2):
        assert all(torch.equal(a, b) for a, b in zip(gradients(halved), want))


def _negated(upstream: torch.Tensor) -> torch.Tensor:
    """``-upstream`` as a view whose sign is a bit of the tensor."""
    negated = torch.complex(torch.zeros_like(upstream), upstream).conj().imag
    assert negated.is_neg()
    return negated


def _waiting(upstream: torch.Tensor) -> torch.Tensor:
    return AsyncCollectiveTensor(-upstream)


class _Subclass(torch.Tensor):
    pass


@REDUCTIONS
@pytest.mark.parametrize(
    "form", [_negated, _waiting, lambda u: (-u).as_subclass(_Subclass)], ids=["bit", "async", "subclass"]
)
def test_an_upstream_gradient_of_another_form(form, reduction, backend, device):
    loss, leaves = _loss_and_leaves(device, reduction)
    expected = torch.autograd.grad(loss, leaves, torch.full_like(loss, -2.0))
    loss, leaves = _loss_and_leaves(device, reduction)
    found = torch.autograd.grad(loss, leaves, form(torch.full_like(loss, 2.0)))
    for one, other in zip(found, expected):
        assert torch.equal(one, other)


class _Weight(torch.nn.Parameter):
    pass


def test_subclasses_of_tensors_and_parameters(backend, device):
    t = small(device)
    expected = parallel_lce.linear_cross_entropy(t.x, t.weight, t.target)
    x, weight = t.x.detach().as_subclass(_Subclass), _Weight(t.weight.detach())
    found = parallel_lce.linear_cross_entropy(x, weight, t.target)
    assert torch.equal(torch.Tensor(found.detach()), expected.detach())
    found.backward()
    assert weight.grad is not None
