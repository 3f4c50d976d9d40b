"""The scripts under examples/, on one and two processes: what they print is what float64 computes without shards."""

from __future__ import annotations

import functools
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


def policy_gradient(module, first):
    hidden, weight, tokens, advantage = (t.double() if t.is_floating_point() else t for t in module.build())

    def numbers():
        table = (hidden @ weight.t()).log_softmax(-1)  # [N, V]
        log_prob = table.gather(1, tokens[:, None])[:, 0]
        entropy = -(table.exp() * table).sum(-1)
        loss = module.policy_loss(log_prob, first.setdefault("old", log_prob.detach()), advantage, entropy)
        return loss, log_prob.mean(), entropy.mean()

    return [weight], torch.optim.SGD([weight], lr=5.0), numbers


def grpo(module, first):
    hidden, weight, tokens, rewards = (t.double() if t.is_floating_point() else t for t in module.build())

    def numbers():
        table = (hidden @ weight.t() / module.TEMPERATURE).log_softmax(-1)
        log_probs = table.gather(-1, tokens[..., None])[..., 0]
        loss = module.grpo_loss(log_probs, first.setdefault("old", log_probs.detach()), rewards)
        return loss, -(table.exp() * table).sum(-1).mean()

    return [weight], torch.optim.SGD([weight], lr=5.0), numbers


def dpo(module, first):
    hidden, tokens, mask, weight = module.build()
    hidden, weight = hidden.double(), weight.double()

    def numbers():
        log_probs = (hidden @ weight.t()).log_softmax(-1).gather(-1, tokens[..., None])[..., 0]
        log_probs = (log_probs * mask).sum(-1)
        return (module.dpo_loss(log_probs, first.setdefault("reference", log_probs.detach())),)

    return [weight], torch.optim.SGD([weight], lr=5.0), numbers


def distillation(module, first):
    hidden, weight, teacher_hidden, teacher = (t.double() for t in module.build())
    log_q = (teacher_hidden @ teacher.t() / module.TEMPERATURE).log_softmax(-1)

    def numbers():
        log_p = (hidden @ weight.t() / module.TEMPERATURE).log_softmax(-1)
        log_m = (module.BETA * log_q.exp() + (1 - module.BETA) * log_p.exp()).log()
        of_teacher, of_student = ((v.exp() * (v - log_m)).sum(-1).mean() for v in (log_q, log_p))
        return (module.BETA * of_teacher + (1 - module.BETA) * of_student,)

    return [weight], torch.optim.SGD([weight], lr=1000.0), numbers


def sequence_parallel(module, first):
    body, weight = module.build()
    body, weight, steps = body.double(), weight.double(), iter(range(module.STEPS))
    leaves = [*body.parameters(), weight]

    def numbers():
        tokens, target = module.batch(next(steps))
        return (functional.cross_entropy((body(tokens) @ weight.t()).flatten(0, 1), target.flatten()),)

    return leaves, torch.optim.AdamW(leaves, lr=1e-2), numbers


# Of each example what it computes, the names of the numbers that it prints, and how far its loss falls.
CASES = {
    "sequence_parallel": (sequence_parallel, ["loss"], lambda loss: loss / 4),
    "policy_gradient": (policy_gradient, ["loss", "log-probability", "entropy"], lambda loss: loss - 0.01),
    "grpo": (grpo, ["loss", "entropy"], lambda loss: loss - 0.01),
    "dpo": (dpo, ["loss"], lambda loss: loss - 0.01),
    "distillation": (distillation, ["loss"], lambda loss: 0.9 * loss),
}
# Prints the threads that are left, which may abort the process while Python ends.
ALL_IN_ONE_PROCESS = f"""
import importlib, pathlib
for name in {[*CASES]}:
    print("example", name)
    importlib.import_module(name).main()
    print(*(task.read_text().strip() for task in pathlib.Path("/proc/self/task").glob("*/comm")), sep="\\n")
"""


@functools.cache
def _printed(device: str, *command: str) -> str:
    paths = os.pathsep.join([str(ROOT), str(EXAMPLES), *filter(None, [os.environ.get("PYTHONPATH")])])
    environment = os.environ | {"OMP_NUM_THREADS": "1", "PYTHONPATH": paths}
    if device == "cpu":
        environment["CUDA_VISIBLE_DEVICES"] = ""
    done = subprocess.run([sys.executable, *command], env=environment, capture_output=True, text=True, timeout=240)
    assert done.returncode == 0, done.stderr[-3000:]
    assert "gloo" not in done.stdout, "threads of the group outlive it"
    return done.stdout


def _example(name: str, ranks: int, device: str) -> str:
    """What it prints."""
    if ranks == 1:
        return _printed(device, "-c", ALL_IN_ONE_PROCESS).partition(f"example {name}\n")[2].partition("example ")[0]
    if device == "cuda" and ranks > torch.cuda.device_count():
        pytest.skip(f"needs {ranks} GPUs, and there are {torch.cuda.device_count()}")
    torchrun = "-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={ranks}"
    return _printed(device, *torchrun, str(EXAMPLES / f"{name}.py"))


MORE = [pytest.param(2, name, marks=pytest.mark.slow) for name in CASES if name != "sequence_parallel"]


@pytest.mark.parametrize(("ranks", "name"), [*((1, name) for name in CASES), (2, "sequence_parallel"), *MORE])
def test_example(name, ranks, device, monkeypatch):
    (compute, names, improved), printed = CASES[name], _example(name, ranks, device)
    number = r"(-?\d+\.\d+)"
    pattern = r"^step \d+: " + ", ".join(f"{each} {number}" for each in names) + "$"
    found = [list(map(float, re.findall(number, line[0]))) for line in re.finditer(pattern, printed, re.MULTILINE)]
    compared = re.findall(rf"^first loss, .*: {number}, unsharded: {number}$", printed, re.MULTILINE)
    assert len(compared) == (name == "sequence_parallel")
    for sharded, unsharded in compared:
        assert float(sharded) == pytest.approx(float(unsharded), abs=1e-5)

    monkeypatch.syspath_prepend(str(EXAMPLES))
    module = importlib.import_module(name)
    leaves, optimizer, numbers = compute(module, {})
    for leaf in leaves:
        leaf.requires_grad_()
    assert len(found) == module.STEPS
    for step in found:
        loss, *others = numbers()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        expected = [loss.item(), *(other.item() for other in others)]
        assert step == pytest.approx(expected, abs=1e-4 if len(leaves) > 1 else 1e-5)
    assert found[-1][0] < improved(found[0][0]), "it improves"
