"""The scripts under examples/, on one and two processes: what they print is what float64 computes without shards."""

from __future__ import annotations

import functools
import importlib
import inspect
import os
import re
import sys
from pathlib import Path

import pytest
import torch

import reference
from tools import ran

ROOT = Path(__file__).resolve().parent.parent
EXAMPLES = ROOT / "examples"


def _of_tokens(hidden, weight, tokens, temperature=1.0):
    """Log-probabilities and entropies."""
    found = reference.statistics(hidden @ weight.t() / temperature, tokens)
    return found["target_log_prob"], found["entropy"]


# The numbers that an example prints of a step. ``first``: what it keeps of the first step.


def policy_gradient(module, first, step, hidden, weight, tokens, advantage):
    log_prob, entropy = _of_tokens(hidden, weight, tokens)
    old = first.setdefault("old", log_prob.detach())
    return module.policy_loss(log_prob, old, advantage, entropy), log_prob.mean(), entropy.mean()


def grpo(module, first, step, hidden, weight, tokens, rewards):
    log_prob, entropy = _of_tokens(hidden, weight, tokens, module.TEMPERATURE)
    return module.grpo_loss(log_prob, first.setdefault("old", log_prob.detach()), rewards), entropy.mean()


def dpo(module, first, step, hidden, tokens, mask, weight):
    log_prob = (_of_tokens(hidden, weight, tokens)[0] * mask).sum(-1)
    return [module.dpo_loss(log_prob, first.setdefault("old", log_prob.detach()))]


def distillation(module, first, step, hidden, weight, teacher_hidden, teacher):
    pairs = (hidden, weight), (teacher_hidden, teacher)
    log_p, log_q = ((x @ w.t() / module.TEMPERATURE).log_softmax(-1) for x, w in pairs)
    log_m = (module.BETA * log_q.exp() + (1 - module.BETA) * log_p.exp()).log()
    of_student, of_teacher = ((v.exp() * (v - log_m)).sum(-1).mean() for v in (log_p, log_q))
    return [module.BETA * of_teacher + (1 - module.BETA) * of_student]


def sequence_parallel(module, first, step, body, weight):
    tokens, target = module.batch(step)
    return [reference.loss(body(tokens) @ weight.t(), target)]


SGD = torch.optim.SGD
CASES = {  # the numbers, their names, the optimizer, and how far the loss falls
    "sequence_parallel": (sequence_parallel, ["loss"], (torch.optim.AdamW, 1e-2), lambda loss: loss / 4),
    "policy_gradient": (policy_gradient, ["loss", "log-probability", "entropy"], (SGD, 5.0), lambda loss: loss - 0.01),
    "grpo": (grpo, ["loss", "entropy"], (SGD, 5.0), lambda loss: loss - 0.01),
    "dpo": (dpo, ["loss"], (SGD, 5.0), lambda loss: loss - 0.01),
    "distillation": (distillation, ["loss"], (SGD, 1000.0), lambda loss: 0.9 * loss),
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
    visible = os.environ.get("CUDA_VISIBLE_DEVICES", "0,1") if device == "cuda" else ""
    done = ran(sys.executable, *command, env={"PYTHONPATH": paths, "CUDA_VISIBLE_DEVICES": visible})
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
    (numbers, names, (optimizer, rate), improved), printed = CASES[name], _example(name, ranks, device)
    number = r"(-?\d+\.\d+)"
    pattern = r"^step \d+: " + ", ".join(f"{each} {number}" for each in names) + "$"
    found = [list(map(float, re.findall(number, line[0]))) for line in re.finditer(pattern, printed, re.MULTILINE)]
    compared = re.findall(rf"^first loss, .*: {number}, unsharded: {number}$", printed, re.MULTILINE)
    assert len(compared) == (name == "sequence_parallel")
    for sharded, unsharded in compared:
        assert float(sharded) == pytest.approx(float(unsharded), abs=1e-5)

    monkeypatch.syspath_prepend(str(EXAMPLES))
    module = importlib.import_module(name)
    made = zip(list(inspect.signature(numbers).parameters)[3:], module.build())
    built = {each: t if getattr(t, "dtype", None) in (torch.int64, torch.bool) else t.double() for each, t in made}
    leaves = [built["weight"].requires_grad_(), *(built["body"].parameters() if "body" in built else ())]
    steps, first = optimizer(leaves, lr=rate), {}
    assert len(found) == module.STEPS
    for step, printed in enumerate(found):
        expected = numbers(module, first, step, **built)
        steps.zero_grad()
        expected[0].backward()
        steps.step()
        assert printed == pytest.approx([each.item() for each in expected], abs=1e-4 if len(leaves) > 1 else 1e-5)
    assert found[-1][0] < improved(found[0][0]), "it improves"
