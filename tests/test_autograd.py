"""The operator among autograd's tools: selective checkpoints, upstream gradients, changes in place. The fuzz has other
checkpoints, hooks, and graphs that are walked twice."""

import functools
import gc

import pytest
import torch
from torch.distributed._functional_collectives import AsyncCollectiveTensor
from torch.utils.checkpoint import CheckpointPolicy, checkpoint, create_selective_checkpoint_contexts

import parallel_lce
from measures import assert_close
from parallel_lce.backends import backend_of
from parallel_lce.core.grad_buffers import MainGrad, within
from parallel_lce.distillation import divergence
from parallel_lce.run.entry import fused_loss
from parallel_lce.run.schedule import GradientSums, IncomingHidden
from tools import REDUCED, chosen_backend, counted_forwards, fields, given, savable, shrunk, small, statistics


def assert_equal(found, expected, name: object = "") -> None:
    assert all(torch.equal(a, b) for a, b in zip(found, expected, strict=True)), name


@pytest.mark.parametrize("name", [*REDUCED, "statistics", "selected", "divergence"])
@pytest.mark.thinned
def test_selective_checkpoints_compute_twice_and_no_more(name, backend, device):
    """They refuse what they keep if it is changed in place; a view of it that they keep is of other memory. A copy that
    one run makes and the other does not, since hooks have changed strides, is not taken for a program's own."""
    t = small(device, N=40, V=150, D=16, dtype=savable("bf16", device, backend))
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
        values_of_x = values(torch.nn.functional.linear(x, torch.eye(16, dtype=x.dtype, device=device)).relu(), w)
        return values_of_x.sum() + x.clone().square().sum()

    with shrunk(8000, (16, 32)), counted_forwards(backend_of(t.weight)) as blocks:
        value = block(t.x, t.weight)
        once = len(blocks)
        want = torch.autograd.grad(value, (t.x, t.weight))
        in_backward = len(blocks) - once
        assert once > 1 or name != "accumulate", "several blocks accumulate"
        contexts = functools.partial(create_selective_checkpoint_contexts, lambda *_, **__: CheckpointPolicy.MUST_SAVE)
        by_columns = t.weight.t().contiguous().t()
        with torch.autograd.graph.saved_tensors_hooks(lambda saved: saved.contiguous(), lambda saved: saved):
            loss = checkpoint(block, t.x, by_columns, use_reentrant=False, context_fn=contexts)
        loss.backward()
    # The plain call, the checkpoint's forward and its recomputation. The backward of divergences projects again.
    assert len(blocks) == 3 * once + 2 * in_backward and (in_backward > 0) == (name == "divergence")
    assert_equal((t.x.grad, t.weight.grad), want)


@pytest.mark.parametrize("reduction", ["none", "mean", "statistics"])
@pytest.mark.parametrize("budget", [None, 0])
@pytest.mark.thinned
def test_targets_that_were_written_to_since_forward_are_refused(budget, reduction, backend, device):
    """As ``F.cross_entropy`` refuses them: the gradient would be that of other targets."""
    t = small(device, N=48, V=200, D=8)
    with shrunk(8192):
        if reduction == "statistics":
            loss = statistics(t.x, t.weight, t.target, logits_budget=budget).target_log_prob
        else:
            loss = parallel_lce.linear_cross_entropy(t.x, t.weight, t.target, reduction=reduction, logits_budget=budget)
        t.target.zero_()
        with pytest.raises(RuntimeError, match="modified by an inplace operation"):
            loss.sum().backward()


class _Subclass(torch.Tensor):
    pass


FORMS = {
    "a negative view": lambda u: torch._neg_view(-u),
    "still on its way": lambda u: AsyncCollectiveTensor(u.clone()),
    "a subclass": lambda u: u.clone().as_subclass(_Subclass),
    # Of losses [4, 6] alone.
    "rows expanded": lambda u: u[0].expand(4, 6),
    "strided": lambda u: u.repeat_interleave(2, -1)[:, ::2],
    "transposed": lambda u: u.t().contiguous().t(),
}


@pytest.mark.parametrize("dtype", ["fp32", "bf16", "fp16"])
@pytest.mark.parametrize("budget", [None, 0])
@pytest.mark.parametrize("reduction", ["none", "mean", "sum"])
@pytest.mark.thinned
def test_an_upstream_gradient_of_any_form_gives_the_bits_of_a_contiguous_one(reduction, budget, dtype, backend, device):
    t = small(device, dtype=dtype)
    x, target = t.x.detach().view(4, 6, -1).requires_grad_(), t.target.view(4, 6)
    shape = (4, 6) if reduction == "none" else ()
    numbers = torch.randn(shape, device=device)

    def gradients(upstream):
        with shrunk(4096, (16, 32)):
            options = dict(reduction=reduction, logits_budget=budget)
            loss = parallel_lce.linear_cross_entropy(x, t.weight, target, **options)
            return torch.autograd.grad(loss, [x, t.weight], upstream)

    for name, form in [*FORMS.items()][: None if shape else 3]:
        upstream = form(numbers)
        assert_equal(gradients(upstream), gradients(torch.empty(shape, device=device).copy_(upstream)), name)


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
    assert_equal([4 * g for g in gradients(lambda loss: loss.div_(4))], expected)


def test_every_statistic_may_be_changed_in_place(backend, device):
    t = small(device)

    def gradients(change):
        found = fields(statistics(t.x, t.weight, t.target, selected=t.target[:, None], top_k=2))
        for value in found.values():
            change(value) if value.dim() else None  # vocab_size is saved
        return torch.autograd.grad(found["lse"].sum() + found["entropy"].sum(), (t.x, t.weight))

    assert_equal(gradients(lambda value: value.add_(1)), gradients(lambda value: None))


def test_what_autograd_gets_beside_main_grad_is_cleared(device, kernels):
    """In saved memory, of which a second backward runs; what the call works in is free. A forward adds nothing."""
    t, found = small(device, N=48, V=200, D=8, dtype="bf16"), []
    total = torch.zeros_like(t.weight, dtype=torch.float32)

    def placeholder(memory):
        assert not any(isinstance(held, (GradientSums, IncomingHidden)) for held in gc.get_objects())
        found.append(within(memory, t.weight).zero_())
        return found[-1]

    with chosen_backend("triton"):
        options, tensors = given(t.x, t.weight, t.target, reduction="none")
        loss = fused_loss(options, tensors, None, main_grad=MainGrad(total, placeholder)).sum()
        loss.backward(retain_graph=True)
        once = total.clone()
        loss.backward()
        with shrunk(400 * 8):
            options = options._replace(reduction="sum", logits_budget=0)
            fused_loss(options, tensors, None, main_grad=MainGrad(total, placeholder))
    assert found[0].untyped_storage().nbytes() > found[0].nbytes, "it is in that memory"
    assert_close(total, 2 * once, rtol=0.01)
