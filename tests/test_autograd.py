"""The operator among autograd's tools: checkpointing, hooks, loss scaling, changes in place, second backwards."""

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

SIZE = dict(N=48, V=200, D=8)


def assert_equal(found, expected, name: object = "") -> None:
    assert all(torch.equal(a, b) for a, b in zip(found, expected, strict=True)), name


_aten = torch.ops.aten
PRODUCTS = (_aten.mm.default, _aten.addmm.default, _aten.bmm.default, _aten.baddbmm.default, _aten.linear.default)


def _save_products(context, operation, *arguments, **options) -> CheckpointPolicy:
    """What trainers checkpoint a block with."""
    return CheckpointPolicy.MUST_SAVE if operation in PRODUCTS else CheckpointPolicy.PREFER_RECOMPUTE


CHECKPOINTS = {
    "reentrant": dict(use_reentrant=True),
    "not reentrant": dict(use_reentrant=False),
    "selective": dict(
        use_reentrant=False, context_fn=functools.partial(create_selective_checkpoint_contexts, _save_products)
    ),
}


CHECKPOINTED = [(name, "selective") for name in (*REDUCED, "statistics", "selected", "divergence")]
CHECKPOINTED += [(name, how) for name in ("recompute", "accumulate") for how in ("reentrant", "not reentrant")]


@pytest.mark.parametrize("case", CHECKPOINTED, ids=", ".join)
@pytest.mark.thinned("case", "backend")
def test_checkpoints_compute_twice_and_no_more(case, backend, device):
    """Selective ones keep what ``aten.mm`` gives, and refuse it if it is changed in place. So no such result is: a
    product that is to be changed is written by ``out=``."""
    t, (name, how) = small(device, N=40, V=150, D=16, dtype="bf16"), case
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

    with shrunk(8000, (16, 32)), counted_forwards(backend_of(t.weight)) as blocks:
        want = torch.autograd.grad(block(t.x, t.weight), (t.x, t.weight))
        once = len(blocks)
        assert once > 1 or name != "accumulate", "several blocks accumulate"
        checkpoint(block, t.x, t.weight, **CHECKPOINTS[how]).backward()
    # The plain call, the checkpoint's forward (without gradients if reentrant) and its recomputation.
    assert len(blocks) == 2 * once + (min(1, once) if how == "reentrant" else once)
    assert_equal((t.x.grad, t.weight.grad), want)


# --- the graph walked again ------------------------------------------------------------------------

# Walked again, a graph recomputes what its first backward took from stored exponentials.
WALKED = REDUCED | {"save some": dict(logits_budget=17000, reduction="none")}
STORED_ERROR = {"fp32": 1e-6, "bf16": 1e-2, "fp16": 1e-3}


def _walked(member: Member, name: str, dtype: str):
    """Four backwards through one graph: one with a zero upstream and one with it doubled."""
    t = part(small(member.device, **SIZE, dtype=dtype), member)
    bias = t.weight.new_zeros(len(t.weight)).requires_grad_()
    leaves = [t.x, t.weight, bias]

    def grad(loss, upstream: float = 1.0, retain: bool = True):
        return torch.autograd.grad(loss, leaves, torch.full_like(loss, upstream), retain_graph=retain)

    def total():
        options = dict(linear_bias=bias, process_group=member.group, **WALKED[name])
        return parallel_lce.linear_cross_entropy(t.x, t.weight, t.target, **options).sum()

    with shrunk(8192, (16, 32)):
        loss = total()
        node = loss.grad_fn
        while not hasattr(node, "call"):  # plain operations behind the package's node
            node = node.next_functions[0][0]
        # dX of fp16 waits for the upstream gradient, which may be a loss scale.
        assert ("AccumulatedLoss" in type(node).__name__) == (name == "accumulate" and dtype != "fp16")
        first = grad(loss)
        copies = [g.clone() for g in first]
        nothing, double, again = grad(loss, 0.0), grad(loss, 2.0), grad(loss, retain=False)
        # Sums that were accumulated are scaled in place by the first backward: by 0.
        loss = total()
        grad(loss, 0.0)
        assert_equal(grad(loss), again)
    assert_equal(first, copies, "a later backward wrote into the first one's result")
    for one, zero, two, last in zip(first, nothing, double, again):
        assert torch.count_nonzero(one), "a gradient to compare with"
        assert torch.count_nonzero(zero) == 0
        assert_close(last, one, STORED_ERROR[dtype] if name.startswith("save") else 0.0)
        # Powers of two scale exactly, but in the subnormal numbers of fp16.
        assert torch.equal(two, 2 * last) or dtype == "fp16"
    return [g.cpu() for g in first]


@pytest.mark.parametrize("ranks", [1, 2])
@pytest.mark.parametrize("dtype", ["fp32", "fp16", "bf16"])
@pytest.mark.parametrize("name", WALKED)
@pytest.mark.thinned
def test_second_backward(name, dtype, ranks, worlds, backend, device):
    parts = everywhere(worlds, device, ranks, _walked, name, dtype)
    reduction = "sum" if WALKED[name]["reduction"] == "none" else "mean"
    truth = dense_loss(small(**SIZE, dtype=dtype), reduction=reduction)
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
    leaves, handed = [t.x, t.weight], []

    def note(task):
        handed.append((len(task.saved) > 0, task.scratch.capacity(torch.uint8)))

    def spoil(task):
        for tensor in (t for t in task.saved if t is not None):
            tensor.fill_(torch.nan if tensor.is_floating_point() else 255)
        scratch = task.scratch
        scratch.borrow(scratch.capacity(torch.uint8), torch.uint8).fill_(255)

    with shrunk(4000, (16, 32)), watched_backwards(backend_of(t.weight), note, spoil):
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
    t = small(device, **SIZE)
    with shrunk(8192):
        if reduction == "statistics":
            loss = statistics(t.x, t.weight, t.target, logits_budget=budget).target_log_prob
        else:
            loss = parallel_lce.linear_cross_entropy(t.x, t.weight, t.target, reduction=reduction, logits_budget=budget)
        t.target.zero_()
        with pytest.raises(RuntimeError, match="modified by an inplace operation"):
            loss.sum().backward()


# --- upstream gradients, and what users do with a loss and its gradient ----------------------------


class _Subclass(torch.Tensor):
    pass


FORMS = {
    "a negative view": lambda u: torch._neg_view(-u),
    "still on its way": lambda u: AsyncCollectiveTensor(u.clone()),
    "a subclass": lambda u: u.clone().as_subclass(_Subclass),
    "all one": lambda u: u.flatten()[0].expand(u.shape),
    # Of losses [4, 6] alone.
    "rows expanded": lambda u: u[0].expand(4, 6),
    "strided": lambda u: u.repeat_interleave(2, -1)[:, ::2],
    "transposed": lambda u: u.t().contiguous().t(),
    "zeros in places": lambda u: u.index_fill(0, torch.ones(1, dtype=torch.long, device=u.device), 0.0),
}


@pytest.mark.parametrize(
    ("reduction", "budget", "dtype"),
    [("none", None, "fp32"), ("none", None, "bf16"), ("none", 0, "bf16"), ("none", 0, "fp16")]
    + [("mean", None, "bf16"), ("sum", None, "fp32"), ("mean", 0, "bf16"), ("sum", 0, "fp32")],
)
def test_upstream_of_any_form(reduction, budget, dtype, backend, device):
    """The same bits as a contiguous copy gives."""
    t = small(device, dtype=dtype)
    x, target = t.x.detach().view(4, 6, -1).requires_grad_(), t.target.view(4, 6)
    options = dict(reduction=reduction, logits_budget=budget)

    def gradients(upstream, reduced=lambda loss: loss):
        with shrunk(4096, (16, 32)):
            loss = parallel_lce.linear_cross_entropy(x, t.weight, target, **options)
            return torch.autograd.grad(reduced(loss), [x, t.weight], upstream)

    shape = (4, 6) if reduction == "none" else ()
    numbers = torch.randn(shape, device=device)
    for name, form in [*FORMS.items()][: None if shape else 4]:
        upstream = form(numbers)
        plain = torch.empty(shape, device=device).copy_(upstream)
        found = gradients(upstream)
        assert_equal(found, gradients(plain), name)
        truth = dense_loss(t, upstream=plain.flatten() if shape else plain, reduction=reduction)
        assert_near(found[0], truth["dx"].view(x.shape), ROUNDED[dtype])
        assert_near(found[1], truth["dweight"], ROUNDED[dtype])
    assert_equal(gradients(None, torch.sum), gradients(torch.ones(shape, device=device)))


@pytest.mark.parametrize("reduction", ["none", "mean", "sum"])
def test_a_loss_may_be_changed_in_place(reduction, backend, device):
    """So may a detached one, before the backward."""
    t = small(device)

    def gradients(change):
        loss = parallel_lce.linear_cross_entropy(t.x, t.weight, t.target, reduction=reduction)
        change(loss)
        found = torch.autograd.grad(loss.sum(), [t.x, t.weight])
        if reduction != "none":  # a view, of the tokens' shape
            loss.detach_()
            assert not loss.requires_grad
        return found

    expected = gradients(lambda loss: None)
    assert_equal(gradients(lambda loss: loss.detach().mul_(3)), expected)
    for one, other in zip(gradients(lambda loss: loss.div_(4)), expected):
        torch.testing.assert_close(4 * one, other)


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
        assert_equal(gradients(halved), want)


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
