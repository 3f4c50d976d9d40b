"""The scripts under examples/, on one and two processes: they print the numbers of float64 without shards."""

from __future__ import annotations

import functools
import importlib
import os
import re
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

import reference
from tools import ran

ROOT = Path(__file__).resolve().parent.parent
EXAMPLES = ROOT / "examples"


def _statistics(hidden, weight, target, temperature=1.0, mask=None, **_) -> SimpleNamespace:
    found = reference.statistics(hidden @ weight.t() / temperature, target)
    found["target_log_prob"] = found["target_log_prob"] * (1 if mask is None else mask)
    return SimpleNamespace(**found)


def _rl(hidden, weight, target, temperature, **_):
    found = _statistics(hidden, weight, target, temperature)
    return found.target_log_prob, found.entropy


def _divergence(hidden, weight, teacher_hidden, teacher, beta, temperature, **_):
    log_p, log_q = ((x @ w.t() / temperature).log_softmax(-1) for x, w in ((hidden, weight), (teacher_hidden, teacher)))
    log_m = (beta * log_q.exp() + (1 - beta) * log_p.exp()).log()
    of_student, of_teacher = ((v.exp() * (v - log_m)).sum(-1).mean() for v in (log_p, log_q))
    return beta * of_teacher + (1 - beta) * of_student


DENSE = {  # in place of what the examples import
    "linear_cross_entropy": lambda hidden, weight, target, **_: reference.loss(hidden @ weight.t(), target),
    "token_statistics": _statistics,
    "log_prob": lambda statistics: statistics.target_log_prob,
    "entropy": lambda statistics: statistics.entropy,
    "rl": SimpleNamespace(linear_cross_entropy=_rl),
    "divergence": _divergence,
}
# Of each example the names of the numbers that it prints, and how far its loss falls.
CASES = {
    "sequence_parallel": (["loss"], lambda loss: loss / 4),
    "policy_gradient": (["loss", "log-probability", "entropy"], lambda loss: loss - 0.01),
    "grpo": (["loss", "entropy"], lambda loss: loss - 0.01),
    "dpo": (["loss"], lambda loss: loss - 0.01),
    "distillation": (["loss"], lambda loss: 0.9 * loss),
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
def test_example(name, ranks, device, monkeypatch, capsys):
    (names, improved), number = CASES[name], r"(-?\d+\.\d+)"
    pattern = r"^step \d+: " + ", ".join(f"{each} {number}" for each in names) + "$"

    def numbers(printed: str) -> list[list[float]]:
        return [list(map(float, re.findall(number, line[0]))) for line in re.finditer(pattern, printed, re.MULTILINE)]

    printed = _example(name, ranks, device)
    compared = re.findall(rf"^first loss, .*: {number}, unsharded: {number}$", printed, re.MULTILINE)
    assert len(compared) == (name == "sequence_parallel")
    for sharded, unsharded in compared:
        assert float(sharded) == pytest.approx(float(unsharded), abs=1e-5)

    monkeypatch.syspath_prepend(str(EXAMPLES))
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 0)
    module = importlib.import_module(name)
    for each in DENSE.keys() & vars(module):
        monkeypatch.setattr(module, each, DENSE[each])
    made = module.build()
    made = [each if getattr(each, "dtype", None) in (torch.int64, torch.bool) else each.double() for each in made]
    monkeypatch.setattr(module, "build", lambda: made)
    module.main()
    found, expected = numbers(printed), numbers(capsys.readouterr().out)
    assert len(found) == len(expected) == module.STEPS
    for step, truth in zip(found, expected):
        assert step == pytest.approx(truth, abs=1e-4 if name == "sequence_parallel" else 1e-5)
    assert found[-1][0] < improved(found[0][0]), "it improves"
