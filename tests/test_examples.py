"""The scripts under examples/, on one and two processes: what they print is what float64 computes without shards."""

from __future__ import annotations

import importlib
import os
import re
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from torch.nn import functional

ROOT = Path(__file__).resolve().parent.parent
EXAMPLES = ROOT / "examples"
NUMBER = r"(-?\d+\.\d+)"


@pytest.fixture
def run(device):
    """``run(name, ranks)``: what an example prints, on processes of the test's device."""

    def start(name: str, ranks: int) -> str:
        if device == "cuda" and ranks > torch.cuda.device_count():
            pytest.skip(f"needs {ranks} GPUs, and there are {torch.cuda.device_count()}")
        paths = os.pathsep.join(filter(None, [str(ROOT), os.environ.get("PYTHONPATH")]))
        environment = os.environ | {"OMP_NUM_THREADS": "1", "PYTHONPATH": paths}
        if device == "cpu":
            environment["CUDA_VISIBLE_DEVICES"] = ""
        torchrun = ["-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={ranks}"] if ranks > 1 else []
        command = [sys.executable, *torchrun, str(EXAMPLES / f"{name}.py")]
        done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=240)
        assert done.returncode == 0, done.stderr[-3000:]
        return done.stdout

    return start


@pytest.fixture
def example(monkeypatch):
    """``example(name)``: the module, for its sizes and its data."""
    monkeypatch.syspath_prepend(str(EXAMPLES))
    return importlib.import_module


def _steps(printed: str, *names: str) -> list[list[float]]:
    pattern = r"^step \d+: " + ", ".join(f"{name} {NUMBER}" for name in names) + "$"
    found = re.findall(pattern, printed, re.MULTILINE)
    return [[float(number) for number in (step if isinstance(step, tuple) else (step,))] for step in found]


@pytest.mark.parametrize("ranks", [pytest.param(1, marks=pytest.mark.slow), 2])
def test_sequence_parallel(ranks, run, example):
    printed = run("sequence_parallel", ranks)
    (first,) = re.findall(rf"^first loss, {ranks} rank\(s\): {NUMBER}, unsharded: {NUMBER}$", printed, re.MULTILINE)
    sharded, unsharded = map(float, first)
    assert sharded == pytest.approx(unsharded, abs=1e-5)

    module = example("sequence_parallel")
    body, weight = module.build()
    body, weight = body.double(), weight.double().requires_grad_()
    optimizer = torch.optim.AdamW([*body.parameters(), weight], lr=1e-2)
    expected = []
    for step in range(module.STEPS):
        tokens, target = module.batch(step)
        loss = functional.cross_entropy((body(tokens) @ weight.t()).flatten(0, 1), target.flatten())
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        expected.append(loss.item())
    losses = [loss for (loss,) in _steps(printed, "loss")]
    assert losses == pytest.approx(expected, abs=1e-4)
    assert losses[-1] < losses[0] / 4, "it learns"


def _descended(weight: torch.Tensor, rate: float, steps: int, numbers: Callable) -> list[list[float]]:
    """``numbers()``, the loss first, at each step of gradient descent on the weight."""
    optimizer, found = torch.optim.SGD([weight], lr=rate), []
    for _ in range(steps):
        loss, *others = numbers()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        found.append([loss.item(), *(other.item() for other in others)])
    return found


def _check(found: list[list[float]], expected: list[list[float]], improved: float) -> None:
    """Of each step the same numbers, and in the end a loss below ``improved``."""
    assert len(found) == len(expected)
    for numbers, others in zip(found, expected):
        assert numbers == pytest.approx(others, abs=1e-5)
    assert found[-1][0] < improved, "it improves"


@pytest.mark.parametrize("ranks", [1, pytest.param(2, marks=pytest.mark.slow)])
def test_policy_gradient(ranks, run, example):
    printed = run("policy_gradient", ranks)
    module, first = example("policy_gradient"), {}
    hidden, weight, tokens, advantage = module.build()
    hidden, weight, advantage = hidden.double(), weight.double().requires_grad_(), advantage.double()

    def numbers():
        table = (hidden @ weight.t()).log_softmax(-1)  # [N, V]
        log_prob = table.gather(1, tokens[:, None])[:, 0]
        entropy = -(table.exp() * table).sum(-1)
        ratio = torch.exp(log_prob - first.setdefault("old", log_prob.detach()))
        clipped = ratio.clamp(0.8, 1.2)
        loss = -torch.minimum(ratio * advantage, clipped * advantage).mean() - 0.01 * entropy.mean()
        return loss, log_prob.mean(), entropy.mean()

    found = _steps(printed, "loss", "log-probability", "entropy")
    _check(found, _descended(weight, 5.0, module.STEPS, numbers), found[0][0] - 0.01)


@pytest.mark.parametrize("ranks", [1, pytest.param(2, marks=pytest.mark.slow)])
def test_grpo(ranks, run, example):
    printed = run("grpo", ranks)
    module, first = example("grpo"), {}
    hidden, weight, tokens, rewards = module.build()
    hidden, weight, rewards = hidden.double(), weight.double().requires_grad_(), rewards.double()

    def numbers():
        table = (hidden @ weight.t() / module.TEMPERATURE).log_softmax(-1)
        log_probs = table.gather(-1, tokens[..., None])[..., 0]
        loss = module.grpo_loss(log_probs, first.setdefault("old", log_probs.detach()), rewards)
        return loss, -(table.exp() * table).sum(-1).mean()

    found = _steps(printed, "loss", "entropy")
    _check(found, _descended(weight, 5.0, module.STEPS, numbers), found[0][0] - 0.01)


@pytest.mark.parametrize("ranks", [1, pytest.param(2, marks=pytest.mark.slow)])
def test_dpo(ranks, run, example):
    printed = run("dpo", ranks)
    module, first = example("dpo"), {}
    hidden, tokens, mask, weight = module.build()
    hidden, weight = hidden.double(), weight.double().requires_grad_()

    def numbers():
        log_probs = (hidden @ weight.t()).log_softmax(-1).gather(-1, tokens[..., None])[..., 0]
        log_probs = (log_probs * mask).sum(-1)
        return (module.dpo_loss(log_probs, first.setdefault("reference", log_probs.detach())),)

    found = _steps(printed, "loss")
    _check(found, _descended(weight, 5.0, module.STEPS, numbers), found[0][0] - 0.01)


@pytest.mark.parametrize("ranks", [1, pytest.param(2, marks=pytest.mark.slow)])
def test_distillation(ranks, run, example):
    printed = run("distillation", ranks)
    module = example("distillation")
    hidden, weight, teacher_hidden, teacher = (t.double() for t in module.build())
    log_q = (teacher_hidden @ teacher.t() / module.TEMPERATURE).log_softmax(-1)

    def numbers():
        log_p = (hidden @ weight.t() / module.TEMPERATURE).log_softmax(-1)
        log_m = (module.BETA * log_q.exp() + (1 - module.BETA) * log_p.exp()).log()
        of_teacher, of_student = ((v.exp() * (v - log_m)).sum(-1).mean() for v in (log_q, log_p))
        return (module.BETA * of_teacher + (1 - module.BETA) * of_student,)

    found = _steps(printed, "loss")
    _check(found, _descended(weight.requires_grad_(), 1000.0, module.STEPS, numbers), 0.9 * found[0][0])


@pytest.mark.skipif(not Path("/proc/self/task").exists(), reason="lists the threads of a process as Linux does")
@pytest.mark.parametrize(
    "name",
    [
        "sequence_parallel",
        *(pytest.param(name, marks=pytest.mark.slow) for name in ("policy_gradient", "grpo", "dpo", "distillation")),
    ],
)
def test_no_thread_of_the_group_outlives_an_example(name):
    """Such a thread may abort the process while Python ends."""
    script = (
        f"import sys, pathlib; sys.path.insert(0, {str(EXAMPLES)!r}); import {name}; {name}.main();"
        "print(*(task.read_text().strip() for task in pathlib.Path('/proc/self/task').glob('*/comm')), sep='\\n')"
    )
    environment = os.environ | {"PYTHONPATH": str(ROOT), "CUDA_VISIBLE_DEVICES": "", "OMP_NUM_THREADS": "1"}
    command = [sys.executable, "-c", script]
    threads = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=60)
    assert threads.returncode == 0, threads.stderr
    assert "gloo" not in threads.stdout
