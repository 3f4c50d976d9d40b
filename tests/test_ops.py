"""The operators of a compiled graph: their contracts, and what no graph can do."""

from __future__ import annotations

import pytest
import torch

import parallel_lce
from parallel_lce.core.collectives import Layout
from parallel_lce.core.grad_buffers import MainGrad
from parallel_lce.megatron.output_layer import _called
from parallel_lce.run import ops
from tools import given, shrunk, small

V, D = 150, 16
SOME = 10000  # bytes: a part of the logits, beside blocks of 4000


def problem(device: str, bias: bool = False):
    return small(device, V=V, D=D, bias=bias, ignored="some", token_weight=True)


def test_main_grad_is_refused_in_words(device):
    """Megatron's loss is no part of a graph: there only is dW added to a gradient that exists."""
    assert _called._torchdynamo_disable
    t, main_grad = problem(device), MainGrad(torch.empty(V, D), lambda: None)
    with pytest.raises(RuntimeError, match="main_grad cannot be compiled"):
        ops.call(*given(t.x, t.weight, t.target, reduction="none"), Layout(), main_grad)


@pytest.mark.parametrize("budget", [0, None])
def test_a_gradient_that_an_exported_graph_did_not_have(budget, device):
    """The forward has formed, or saved, what was needed when the graph was made: backward runs it again."""

    class Head(torch.nn.Module):
        def __init__(self, weight) -> None:
            super().__init__()
            self.weight = torch.nn.Parameter(weight.detach().clone())

        def forward(self, x, target):
            return parallel_lce.linear_cross_entropy(x, self.weight, target, logits_budget=budget)

    t = problem(device)
    with shrunk(4000, (16, 32)):
        exported = torch.export.export(Head(t.weight), (t.x.detach(), t.target)).module()
        loss = exported(t.x, t.target)
        found = torch.autograd.grad(loss, [t.x, exported.weight])
        expected = torch.autograd.grad(
            parallel_lce.linear_cross_entropy(t.x, t.weight, t.target, logits_budget=budget), [t.x, t.weight]
        )
    torch.testing.assert_close(found, expected)


@pytest.mark.parametrize("name", ["forward", "backward"])
def test_operators_that_read_the_cpu_stay_outside_of_the_compilers_graphs(name):
    """A CUDA graph of ``mode="reduce-overhead"`` would read ``numbers`` where there is nothing."""
    operator = getattr(torch.ops.parallel_lce, name).default
    assert "numbers" in [argument.name for argument in operator._schema.arguments]
    assert torch.Tag.cudagraph_unsafe in operator.tags


@pytest.mark.parametrize("needs", [True, False])
@pytest.mark.parametrize(
    "options",
    [
        dict(reduction="none", ignore_index=-100, label_smoothing=0.1, logits_budget=SOME),
        dict(reduction="mean", ignore_index=-100, logits_budget=0),
        dict(mean_logit=True, expected_logit=True, argmax=True, logits_budget=SOME),
    ],
    ids=str,
)
def test_contracts_of_the_operators(options, needs, device):
    """Schema, fake tensors and dynamic shapes by torch's own checks."""
    library = torch.ops.parallel_lce
    with shrunk(4000, (16, 32)):
        t = problem(device, bias=True)
        asked, tensors = given(t.x, t.weight, t.target, t.bias, **options)
        arguments = ops.Arguments.of(asked, tensors, Layout())._replace(needs=[needs] * 3)
        detached = arguments._replace(tensors=type(tensors)(*[v if v is None else v.detach() for v in tensors])).flat
        torch.library.opcheck(library.forward.default, detached)
        if needs:
            results, handle = library.forward(*detached)
            upstream = [torch.rand_like(results[0]), *[None] * 11][: 1 if asked.reduction else 12]
            for wanted in ([True, True, True], [False, True, False]):
                torch.library.opcheck(library.backward.default, (*detached, handle, upstream, wanted))


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
