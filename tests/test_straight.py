"""Losses in straight lines have the bits of the schedule, and are those that they are said to be."""

from __future__ import annotations

from contextlib import contextmanager
from unittest import mock

import pytest
import torch

pytest.importorskip("triton", reason="needs triton")

from cases import Tensors, part
from parallel_lce import linear_cross_entropy
from parallel_lce.call import prepare
from parallel_lce.core.grad_buffers import MainGrad
from parallel_lce.kernels.relaunch import Launches
from parallel_lce.run.fused_loss import fused_loss
from tools import chosen_backend, everywhere, given, shrunk, small
from world import Member


@pytest.fixture(autouse=True)
def kernels_everywhere(kernels):
    with chosen_backend("triton"):
        yield


@contextmanager
def by_schedule():
    """No call is straight."""
    prepare.KNOWN.clear()
    with mock.patch.object(prepare, "_straightened", lambda known, *_: known):
        yield
    prepare.KNOWN.clear()


def is_straight() -> bool:
    """The call that was made last."""
    return [*prepare.KNOWN.values()][-1].straight is not None


def problem(device, V: int = 200, **options) -> Tensors:
    return small(device, N=70, V=V, D=32, dtype="bf16", ignored="some", token_weight=True, sharpness=6.0, **options)


def results(t: Tensors, upstream: torch.Tensor | None = None, **options) -> list[torch.Tensor]:
    """The loss, and the gradients of two backwards through one graph."""
    loss = linear_cross_entropy(t.x, t.weight, t.target, **options)
    leaves = [leaf for leaf in (t.x, t.weight) if leaf.requires_grad]
    upstream = torch.ones_like(loss) if upstream is None else upstream
    walks = [torch.autograd.grad(loss, leaves, upstream, retain_graph=True) for _ in range(2)]
    return [loss.detach(), *walks[0], *walks[1]]


def assert_equal(found: list[torch.Tensor], expected: list[torch.Tensor]) -> None:
    for number, (a, b) in enumerate(zip(found, expected, strict=True)):
        assert torch.equal(a.nan_to_num(7.0), b.nan_to_num(7.0)), f"result {number}"


CASES = {
    "none": {},
    "a bias": dict(bias=True),
    "odd sizes": dict(V=203),
    "padding": dict(V=256, vocab_size=200),
    "scaled": dict(logit_scale=0.5, temperature=2.0),
    "z-loss": dict(z_loss=1e-3),
    "frozen hidden states": dict(frozen="x"),
    "a frozen weight": dict(frozen="weight"),
    "a scale of each token": dict(token_scale=True),
}


@pytest.mark.parametrize("reduction", ["none", "mean", "sum"])
@pytest.mark.parametrize("name", CASES)
@pytest.mark.thinned
def test_the_bits_of_the_schedule(name, reduction, device):
    options = dict(CASES[name])
    frozen, token_scale = options.pop("frozen", None), options.pop("token_scale", False)
    t = problem(device, options.pop("V", 200), bias=options.pop("bias", False))
    if frozen is not None:
        getattr(t, frozen).requires_grad_(False)
    if t.bias is not None:
        options["linear_bias"] = t.bias.detach()
    if token_scale:
        options["logit_scale"] = torch.linspace(0.5, 2.0, 70, device=device)
    t.target %= 200
    options |= dict(reduction=reduction, token_weight=t.token_weight)
    with by_schedule():
        expected = results(t, **options)
    for _ in range(3):  # From the second call on, launches are repeated.
        assert_equal(results(t, **options), expected)
    assert is_straight()


@pytest.mark.parametrize("reduction", ["none", "mean", "sum"])
def test_weights_that_need_a_gradient(reduction, device):
    t = problem(device)
    weights = t.token_weight.detach().clone().requires_grad_()

    def run() -> list[torch.Tensor]:
        loss = linear_cross_entropy(t.x, t.weight, t.target, reduction=reduction, token_weight=weights)
        return [loss.detach(), *torch.autograd.grad(loss.sum(), [t.x, t.weight, weights])]

    with by_schedule():
        expected = run()
    assert_equal(run(), expected)


def test_repeated_launches_read_and_write_their_own_tensors(device):
    problems = [problem(device) for _ in range(3)]
    for number, t in enumerate(problems):
        with torch.no_grad():
            t.x.mul_(1 + number)
            t.target.copy_(t.target.roll(number))
    with by_schedule():
        expected = [results(t, reduction="none") for t in problems]
    alive = [results(t, reduction="none") for t in problems * 2]
    for found, truth in zip(alive, expected * 2):
        assert_equal(found, truth)


@pytest.mark.parametrize(
    "options",
    [
        dict(label_smoothing=0.1),
        dict(logit_softcap=30.0),
        dict(gradient_filter=0.01),
        dict(logits_budget=0),
        dict(linear_bias=torch.zeros(200, dtype=torch.bfloat16, requires_grad=True)),
    ],
    ids=lambda options: next(iter(options)),
)
def test_other_calls_run_the_schedule(options, device):
    t = problem(device)
    options = {
        name: v.to(device).detach().requires_grad_() if name == "linear_bias" else v for name, v in options.items()
    }
    with shrunk(4000):
        linear_cross_entropy(t.x, t.weight, t.target, reduction="none", **options)
        assert not is_straight()


def test_a_weight_in_other_memory(device):
    """A kernel is compiled for aligned addresses, and rows one after the other."""
    t = problem(device)
    memory = torch.empty(200 * 40 + 1, dtype=torch.bfloat16, device=device)
    expected = results(t, reduction="none")
    for weight in (memory[1 : 1 + 200 * 32].view(200, 32), memory[: 200 * 40].view(200, 40)[:, :32]):
        weight.copy_(t.weight.detach())
        other = Tensors(**vars(t) | dict(weight=weight.detach().requires_grad_()))
        torch.testing.assert_close(results(other, reduction="none"), expected, rtol=2e-2, atol=2e-2)


@pytest.mark.parametrize("moved", ["x", "weight"])
def test_the_first_call_in_other_memory(moved, device):
    """The tile depends on alignment. What the first call of a signature has is not taken for that of later ones."""
    t = problem(device, V=300)
    with by_schedule():
        expected = results(t, reduction="none")
    value = getattr(t, moved).detach()
    memory = torch.empty(value.numel() + 1, dtype=value.dtype, device=device)
    elsewhere = memory[1:].view(value.shape).copy_(value).requires_grad_()
    results(Tensors(**vars(t) | {moved: elsewhere}), reduction="none")
    # The second backward recomputes, in other memory.
    assert_equal(results(t, reduction="none")[:3], expected[:3])


def test_saved_tensors_in_other_memory(device):
    t = problem(device)
    with by_schedule():
        expected = results(t, reduction="mean")
    with torch.autograd.graph.saved_tensors_hooks(lambda v: v.clone(), lambda v: v):
        found = results(t, reduction="mean")
    assert_equal(found[:3], expected[:3])


def test_a_main_grad_is_added_to(device):
    t = problem(device)
    options, tensors = given(t.x, t.weight, t.target, reduction="none", ignore_index=-100)

    def added() -> torch.Tensor:
        total = torch.ones(200, 32, device=device)
        for _ in range(3):
            fused_loss(options, tensors, None, main_grad=MainGrad(total, lambda: None)).sum().backward()
        return total

    with by_schedule():
        expected = added()
    assert torch.equal(added(), expected) and is_straight()


def _over_ranks(member: Member, options: dict) -> None:
    t = part(problem(member.device, V=256), member)
    options = options | dict(process_group=member.group)
    with by_schedule():
        expected = results(t, **options)
    for _ in range(3):
        assert_equal(results(t, **options)[:3], expected[:3])
    assert is_straight()


@pytest.mark.parametrize(
    "options",
    [
        dict(reduction="none"),
        dict(reduction="mean", vocab_size=201),
        dict(reduction="sum", reduce_dtype=torch.float32),
        dict(reduction="mean", reduce_hidden_grad=False),
    ],
    ids=["none", "padded", "reduced in fp32", "not reduced"],
)
def test_over_ranks(options, worlds, device):
    everywhere(worlds, device, 2, _over_ranks, options)


def test_launches_that_cannot_be_repeated_are_made_again(device):
    """In Triton's interpreter, or of memory that is in none of the given tensors."""
    calls, launches = [], Launches()
    for _ in range(3):
        launches.run("a kind", [torch.empty(4, device=device)], lambda: calls.append(1))
    assert len(calls) in (1, 3)
