"""The operators of a compiled graph: their contracts, and what no graph can do."""

from __future__ import annotations

import pytest
import torch

import parallel_lce
from parallel_lce.call import prepare
from parallel_lce.call.call import Needs
from parallel_lce.core.grad_buffers import MainGrad
from parallel_lce.core.options import Tensors
from parallel_lce.megatron.output_layer import _called
from parallel_lce.run.ops import Arguments
from tools import given, shrunk, small

V, D = 150, 16
SOME = 10000  # bytes: a part of the logits, beside blocks of 4000


def problem(device: str, bias: bool = False):
    return small(device, V=V, D=D, bias=bias, ignored="some", token_weight=True)


def _call(t, reduction: str | None = "none", budget: int = SOME, smoothed: bool = True, **options):
    """The call, and its tensors apart from their graph."""
    smoothing = 0.1 if smoothed and reduction is not None else 0.0
    asked, tensors = given(
        t.x,
        t.weight,
        t.target,
        t.bias,
        reduction=reduction,
        ignore_index=-100,
        label_smoothing=smoothing,
        mean_logit=reduction is None,
        logits_budget=budget,
    )
    tensors = Tensors(*[v if v is None else v.detach() for v in tensors])
    return prepare.prepare(asked, tensors, **options)[0], tensors


def test_main_grad_is_refused_in_words(device):
    """Megatron's loss is no part of a graph: there only is dW added to a gradient that exists."""
    assert _called._torchdynamo_disable
    call, tensors = _call(problem(device), main_grad=MainGrad(torch.empty(V, D), lambda: None))
    with pytest.raises(RuntimeError, match="main_grad cannot be compiled"):
        Arguments.of(call, tensors)


def test_a_gradient_that_an_exported_graph_does_not_have(device):
    """'mean' and 'sum' beyond the budget form in forward the gradients that were needed when the graph was made."""

    class Head(torch.nn.Module):
        def __init__(self, weight) -> None:
            super().__init__()
            self.weight = torch.nn.Parameter(weight.detach().clone())

        def forward(self, x, target):
            return parallel_lce.linear_cross_entropy(x, self.weight, target, logits_budget=0)

    t = problem(device)
    with shrunk(4000, (16, 32)):
        exported = torch.export.export(Head(t.weight), (t.x.detach(), t.target)).module()
        exported(t.x.detach(), t.target).backward()
        assert exported.weight.grad.norm() > 0
        with pytest.raises(RuntimeError, match="a gradient is asked for that was not when this graph was made"):
            exported(t.x.detach().requires_grad_(), t.target).backward()


@pytest.mark.parametrize("name", ["forward", "backward", "accumulated_loss"])
def test_operators_that_read_the_cpu_stay_outside_of_the_compilers_graphs(name):
    """A CUDA graph of ``mode="reduce-overhead"`` would read ``numbers`` where there is nothing."""
    operator = getattr(torch.ops.parallel_lce, name).default
    assert "numbers" in [argument.name for argument in operator._schema.arguments]
    assert torch.Tag.cudagraph_unsafe in operator.tags


def test_contracts_of_the_operators(device):
    """Schema, fake tensors and dynamic shapes by torch's own checks."""
    library = torch.ops.parallel_lce
    with shrunk(4000, (16, 32)):
        t = problem(device, bias=True)
        everything, nothing = Needs(True, True, True), Needs(False, False, False)
        for needs in (everything, nothing):
            for smoothed in (False, True):
                call, tensors = _call(t, smoothed=smoothed, needs=needs)
                torch.library.opcheck(library.forward.default, Arguments.of(call, tensors).flat)
            call, tensors = _call(t, reduction=None, needs=needs)
            arguments = Arguments.of(call, tensors).flat
            torch.library.opcheck(library.forward.default, arguments)
        call, tensors = _call(t, reduction=None, needs=everything)
        assert 0 < call.plan.saved < V
        arguments = Arguments.of(call, tensors).flat
        *_, partial, handle = library.forward(*arguments)
        alpha = torch.rand(24, device=device)
        for folded in ((alpha, alpha, *[None] * 5), (alpha, None, alpha, None, alpha, None, None)):
            for wanted in ([True, True, True], [False, True, False]):
                torch.library.opcheck(library.backward.default, (*arguments, partial, handle, *folded, wanted))
        for reduction in ("mean", "sum"):
            call, tensors = _call(t, reduction=reduction, budget=0, needs=everything)
            assert call.plan.accumulate
            torch.library.opcheck(library.accumulated_loss.default, Arguments.of(call, tensors).flat)
        first_order = torch.ones((), device=device), t.x.detach(), t.weight.detach(), t.bias.detach()
        torch.library.opcheck(library.first_order.default, first_order)


def test_an_upstream_gradient_that_is_not_there():
    """Autograd may hand a graph's function None for an output that no gradient reaches."""

    class Cut(torch.autograd.Function):
        @staticmethod
        def forward(ctx, loss):
            return loss.clone()

        @staticmethod
        def backward(ctx, upstream):
            return None

    hidden = torch.empty(6, 8, device="meta", requires_grad=True)
    weight = torch.empty(10, 8, device="meta", requires_grad=True)
    target = torch.empty(6, dtype=torch.long, device="meta")
    Cut.apply(parallel_lce.linear_cross_entropy(hidden, weight, target, reduction="none")).sum().backward()
    assert hidden.grad is None and weight.grad is None
