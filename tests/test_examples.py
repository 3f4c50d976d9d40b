"""The scripts under examples/, on one and two processes: what they print is what float64 computes without shards."""

from __future__ import annotations

import importlib
import os
import re
import subprocess
import sys
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


@pytest.mark.parametrize("ranks", [1, pytest.param(2, marks=pytest.mark.slow)])
def test_policy_gradient(ranks, run, example):
    printed = run("policy_gradient", ranks)
    module = example("policy_gradient")
    hidden, weight, tokens, advantage = module.build()
    hidden, weight, advantage = hidden.double(), weight.double().requires_grad_(), advantage.double()
    optimizer = torch.optim.SGD([weight], lr=5.0)
    old, expected = None, []
    for _ in range(module.STEPS):
        table = (hidden @ weight.t()).log_softmax(-1)  # [N, V]
        log_prob = table.gather(1, tokens[:, None])[:, 0]
        entropy = -(table.exp() * table).sum(-1)
        old = log_prob.detach() if old is None else old
        ratio = torch.exp(log_prob - old)
        clipped = ratio.clamp(0.8, 1.2)
        loss = -torch.minimum(ratio * advantage, clipped * advantage).mean() - 0.01 * entropy.mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        expected.append([loss.item(), log_prob.mean().item(), entropy.mean().item()])
    found = _steps(printed, "loss", "log-probability", "entropy")
    assert len(found) == module.STEPS
    for numbers, others in zip(found, expected):
        assert numbers == pytest.approx(others, abs=1e-5)
    assert found[-1][0] < found[0][0] - 0.01, "it improves"


@pytest.mark.parametrize("ranks", [1, pytest.param(2, marks=pytest.mark.slow)])
def test_grpo(ranks, run, example):
    printed = run("grpo", ranks)
    module = example("grpo")
    hidden, weight, tokens, rewards = module.build()
    hidden, weight, rewards = hidden.double(), weight.double().requires_grad_(), rewards.double()
    optimizer = torch.optim.SGD([weight], lr=5.0)
    old, expected = None, []
    for _ in range(module.STEPS):
        table = (hidden @ weight.t() / module.TEMPERATURE).log_softmax(-1)
        log_probs = table.gather(-1, tokens[..., None])[..., 0]
        old = log_probs.detach() if old is None else old
        loss = module.grpo_loss(log_probs, old, rewards)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        expected.append([loss.item(), -(table.exp() * table).sum(-1).mean().item()])
    found = _steps(printed, "loss", "entropy")
    assert len(found) == module.STEPS and found[-1][0] < found[0][0] - 0.01, "it improves"
    for numbers, others in zip(found, expected):
        assert numbers == pytest.approx(others, abs=1e-5)


@pytest.mark.parametrize("ranks", [1, pytest.param(2, marks=pytest.mark.slow)])
def test_dpo(ranks, run, example):
    printed = run("dpo", ranks)
    module = example("dpo")
    hidden, tokens, mask, weight = module.build()
    hidden, weight = hidden.double(), weight.double().requires_grad_()
    optimizer = torch.optim.SGD([weight], lr=5.0)
    reference, expected = None, []
    for _ in range(module.STEPS):
        log_probs = (hidden @ weight.t()).log_softmax(-1).gather(-1, tokens[..., None])[..., 0]
        log_probs = (log_probs * mask).sum(-1)
        reference = log_probs.detach() if reference is None else reference
        loss = module.dpo_loss(log_probs, reference)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        expected.append([loss.item()])
    found = _steps(printed, "loss")
    assert len(found) == module.STEPS and found[-1][0] < found[0][0] - 0.01, "it improves"
    for numbers, others in zip(found, expected):
        assert numbers == pytest.approx(others, abs=1e-5)


@pytest.mark.parametrize("ranks", [1, pytest.param(2, marks=pytest.mark.slow)])
def test_distillation(ranks, run, example):
    printed = run("distillation", ranks)
    module = example("distillation")
    hidden, weight, teacher_hidden, teacher = (t.double() for t in module.build())
    optimizer, expected = torch.optim.SGD([weight.requires_grad_()], lr=1000.0), []
    log_q = (teacher_hidden @ teacher.t() / module.TEMPERATURE).log_softmax(-1)
    for _ in range(module.STEPS):
        log_p = (hidden @ weight.t() / module.TEMPERATURE).log_softmax(-1)
        log_m = (module.BETA * log_q.exp() + (1 - module.BETA) * log_p.exp()).log()
        of_teacher, of_student = ((v.exp() * (v - log_m)).sum(-1).mean() for v in (log_q, log_p))
        loss = module.BETA * of_teacher + (1 - module.BETA) * of_student
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        expected.append([loss.item()])
    found = _steps(printed, "loss")
    assert len(found) == module.STEPS and found[-1][0] < 0.9 * found[0][0], "it improves"
    for numbers, others in zip(found, expected):
        assert numbers == pytest.approx(others, abs=1e-5)


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
