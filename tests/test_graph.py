"""CUDA graphs of a training step, and steps that never wait for the device. GPUs only."""

from __future__ import annotations

import pytest
import torch

import parallel_lce
from cases import Case, make
from parallel_lce.backends import backend_of
from tools import shrunk

N, V, D = 2048, 3000, 256
BLOCK = 6_200_000  # bytes: 1024 rows of bf16 logits and a little more, 512 rows of fp32 ones

# name: (options, whether the weight is frozen, what the blocks' backwards find of kept exponentials)
STRATEGIES = {
    "saved": (dict(reduction="none"), False, {True}),
    "some columns saved": (dict(reduction="none", logits_budget=BLOCK + 4_000_000), False, {True}),
    "some rows saved": (dict(reduction="none", logits_budget=BLOCK + 4_000_000), True, {True, False}),
    "recomputed": (dict(reduction="none", logits_budget=0), False, {False}),
    "accumulated": (dict(logits_budget=0, label_smoothing=0.1, z_loss=1e-3), False, {True}),
}
BACKENDS = [("torch", "fp32"), ("torch", "bf16"), ("triton", "bf16"), ("triton", "fp16")]

pytestmark = [
    pytest.mark.parametrize("device", [pytest.param("cuda", marks=pytest.mark.gpu)], indirect=True),
    pytest.mark.parametrize(("backend", "dtype"), BACKENDS),
    pytest.mark.parametrize("name", STRATEGIES),
]


class Step:
    """Forward and backward on tensors that stay where they are; ``kept`` records which of the
    blocks' backwards were handed exponentials."""

    def __init__(self, name: str, backend: str, dtype: str, monkeypatch, compile=lambda f: f) -> None:
        monkeypatch.setenv("PARALLEL_LCE_BACKEND", backend)
        if name == "accumulated" and dtype == "fp16":
            pytest.skip("gradients of fp16 are not formed in forward")
        if name == "some rows saved" and dtype == "fp32":
            pytest.skip("fp32 sums are the gradients themselves: columns are saved, not rows")
        options, frozen, self.expected = STRATEGIES[name]
        self.kept: set[bool] = set()
        self.case = Case(N, V, D, dtype)
        self.x, self.weight, self.target = self._fresh(0)
        self.x.requires_grad_()
        self.weight.requires_grad_(not frozen)
        module = backend_of(self.weight)
        original = module.block_backward

        def watched(*arguments):
            self.kept.add(len(arguments[5]) > 0)
            return original(*arguments)

        monkeypatch.setattr(module, "block_backward", watched)
        self._loss = compile(lambda *operands: parallel_lce.linear_cross_entropy(*operands, **options))

    def _fresh(self, seed: int):
        t = make(Case(N, V, D, self.case.dtype, seed=seed), "cuda")
        return t.x, t.weight, t.target

    def __call__(self) -> list[torch.Tensor]:
        leaves = [leaf for leaf in (self.x, self.weight) if leaf.requires_grad]
        with shrunk(BLOCK):
            loss = self._loss(self.x, self.weight, self.target)
            gradients = torch.autograd.grad(loss, leaves, torch.ones_like(loss))
        return [loss.detach(), *gradients]

    def load(self, seed: int) -> None:
        """Other data in the same memory."""
        with torch.no_grad():
            for mine, other in zip((self.x, self.weight, self.target), self._fresh(seed)):
                mine.copy_(other)

    def warm_up(self) -> None:
        stream = torch.cuda.Stream()
        stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(stream):
            for _ in range(3):
                self()
        torch.cuda.current_stream().wait_stream(stream)
        torch.cuda.synchronize()
        assert self.kept == self.expected, "the case must be what it is called"


def assert_near(found, expected, dtype: str) -> None:
    tolerance = {"fp32": 1e-5, "bf16": 2e-2, "fp16": 4e-3}[dtype]
    for a, b in zip(found, expected, strict=True):
        assert b.isfinite().all() and b.norm() > 0
        assert (a - b).double().norm() <= tolerance * b.double().norm()


def test_a_captured_step_replays_on_other_data(name, backend, dtype, device, monkeypatch):
    step = Step(name, backend, dtype, monkeypatch)
    step.warm_up()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        captured = step()
    for seed in (1, 2):
        step.load(seed)
        graph.replay()
        found = [tensor.clone() for tensor in captured]
        assert_near(found, step(), dtype)
        graph.replay()
        torch.cuda.synchronize()
        assert all(torch.equal(a, b) for a, b in zip(found, captured)), "what was kept is there again"


def test_no_step_waits_for_the_device(name, backend, dtype, device, monkeypatch):
    step = Step(name, backend, dtype, monkeypatch)
    step.warm_up()
    torch.cuda.set_sync_debug_mode("error")
    try:
        step()
    finally:
        torch.cuda.set_sync_debug_mode("default")


def test_graphs_of_the_compiler(name, backend, dtype, device, monkeypatch):
    """``mode="reduce-overhead"``: the compiler's own graphs leave out what they do not know of."""
    if (backend, dtype) not in (("torch", "fp32"), ("triton", "bf16")):
        pytest.skip("one dtype of each backend is enough")
    torch._dynamo.reset()
    step = Step(
        name, backend, dtype, monkeypatch,
        lambda f: torch.compile(f, fullgraph=True, mode="reduce-overhead"),
    )  # fmt: skip
    eager = Step(name, backend, dtype, monkeypatch)
    for seed in range(4):
        step.load(seed)
        eager.load(seed)
        torch.compiler.cudagraph_mark_step_begin()
        found = [tensor.clone() for tensor in step()]
        assert_near(found, eager(), dtype)
