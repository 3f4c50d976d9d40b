"""The parity report: its measures, its inputs, and the claim that it shows: ours equals an fp32 head."""

from __future__ import annotations

import json
import math
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F

pytest.importorskip("rich", reason="needs the benchmark's packages")
pytest.importorskip("safetensors", reason="needs the benchmark's packages")

from safetensors.torch import save_file

from benchmarks import parity, problem, snapshots
from benchmarks.parity import FP32_HEAD, OURS, OUTPUTS, Found, measure, random_problem
from benchmarks.problem import Problem, Shape
from benchmarks.team import NotMeasured, Team
from cases import normal

ROOT = Path(__file__).resolve().parent.parent
BF16 = "bf16 logits"
ALONE = Team(torch.device("cpu"))


def tensors(n=6, v=10, d=8, dtype=torch.bfloat16, sharpness=1.0) -> dict[str, torch.Tensor]:
    target = torch.randint(v, (n,), generator=torch.Generator().manual_seed(2))
    weight = normal(v, d, seed=1) * sharpness * d**-0.5
    return {"hidden": normal(n, d).to(dtype), "weight": weight.to(dtype), "target": target}


def written(path: Path, **changed) -> str:
    content = tensors() | changed
    save_file({name: tensor for name, tensor in content.items() if tensor is not None}, path)
    return str(path)


# --- measures ------------------------------------------------------------------------------------------


def test_the_measures_of_a_hand_made_case():
    def found(log_prob, entropy):
        return Found([torch.tensor(values, dtype=torch.float64) for values in (log_prob, entropy)], [])

    truth = found([-1.0, -2.0, -3.0, -4.0], [0.5, 0.5, 0.5, 0.5])
    its = parity._deviation(found([-1.0, -1.75, -3.5, -4.0 + 2**-8], [0.5, 0.75, 0.5, 0.125]), truth)
    assert its["mean"] == (0.25 + 0.5 + 2**-8) / 4 and its["largest"] == 0.5
    assert (its["smallest_ratio"], its["largest_ratio"]) == pytest.approx((math.exp(-0.5), math.exp(0.25)))
    assert its["outside"] == 0.5  # exp(2^-8) = 1.0039 is within
    assert its["entropy_mean"] == 0.625 / 4 and its["entropy_largest"] == 0.375
    its = parity._deviation(found([-1.0, math.nan], [0.5, math.nan]), found([-1.0, -2.0], [0.5, 0.5]))
    assert its["outside"] == 0.5 and math.isnan(its["largest"]) and math.isnan(its["entropy_largest"])


@pytest.mark.parametrize("rows", [1, 4, 6])
def test_the_truth_is_torch_in_float64(rows, monkeypatch):
    monkeypatch.setattr(problem, "BLOCK_BYTES", 8 * 10 * rows)  # blocks of tokens, the last perhaps a part
    given = tensors(sharpness=4.0)
    x = given["hidden"].double().requires_grad_()
    z = x @ given["weight"].double().T
    inputs = Problem(Shape(6, 10, 8), ALONE, **given)
    found = parity.dense(inputs, z.argmax(1), torch.float64)
    log_prob = -F.cross_entropy(z, inputs.target, reduction="none")
    values = log_prob, torch.distributions.Categorical(logits=z).entropy(), z.log_softmax(1).amax(1)
    for value, gradient, expected in zip(*found, values):
        torch.testing.assert_close(value, expected.detach())
        torch.testing.assert_close(gradient, torch.autograd.grad(expected.sum(), x, retain_graph=True)[0])


def test_logits_are_rounded_once_and_the_softmax_is_fp32():
    inputs = Problem(Shape(6, 10, 8), ALONE, **tensors(sharpness=8.0))
    exact = inputs.hidden.double() @ inputs.weight.double().T
    for dtype, z in ((torch.bfloat16, exact.bfloat16()), (torch.float32, exact)):
        found = parity.dense(inputs, z.argmax(1), dtype)
        assert found.values[0].dtype == torch.float32
        expected = z.double().log_softmax(1).gather(1, inputs.target[:, None])[:, 0]
        torch.testing.assert_close(found.values[0].double(), expected, rtol=1e-5, atol=1e-5)


# --- inputs --------------------------------------------------------------------------------------------


@pytest.mark.parametrize("deviation", parity.DEVIATIONS)
def test_random_inputs(deviation):
    inputs = random_problem(Shape(300, 400, 200), deviation, ALONE)
    assert (inputs.hidden.dtype, inputs.weight.dtype) == (torch.bfloat16,) * 2
    z = inputs.hidden.double() @ inputs.weight.double().T
    assert z.shape == (300, 400) and z.std().item() == pytest.approx(deviation, rel=0.03)
    # Drawn from the softmax: the mean log-probability is minus the mean entropy, up to the noise of 300 tokens.
    log_p = z.log_softmax(1)
    entropy = -(log_p.exp() * log_p).sum(1)
    spread = ((log_p.exp() * log_p.square()).sum(1) - entropy.square()).clamp(min=0).sum().sqrt() / 300
    drawn = log_p.gather(1, inputs.target[:, None]).mean()
    assert abs(drawn + entropy.mean()) < 4 * spread


def test_a_file_is_read(tmp_path):
    given = tensors(dtype=torch.float16)
    path = written(tmp_path / "a.safetensors", **(given | {"target": given["target"].int()}))
    found = snapshots.read(path, ALONE)
    assert all(torch.equal(getattr(found, name), tensor) for name, tensor in given.items())
    assert found.target.dtype == torch.int64 and found.name == path and found.shape == Shape(6, 10, 8)


@pytest.mark.parametrize(
    ("changed", "words"),
    [
        (dict(weight=None), r"has no tensor weight, but \['hidden', 'target'\]"),
        (dict(hidden=torch.ones(6, 8)), "both fp16, and integers, got hidden torch.float32, weight torch.bfloat16"),
        (dict(target=torch.ones(6)), "and integers, got .* target torch.float32"),
        (dict(target=torch.ones(6, dtype=torch.bool)), "and integers, got .* target torch.bool"),
        (dict(target=torch.ones(5, dtype=torch.int64)), r"got hidden \[6, 8\], weight \[10, 8\], target \[5\]"),
        (dict(hidden=torch.ones(6, 7).bfloat16()), r"got hidden \[6, 7\], weight \[10, 8\], target \[6\]"),
        (dict(hidden=torch.ones(6, 8, 1).bfloat16()), r"got hidden \[6, 8, 1\], weight \[10, 8\], target \[6\]"),
        (dict(weight=torch.ones(0, 8).bfloat16()), r"none empty, got hidden \[6, 8\], weight \[0, 8\]"),
        (dict(target=torch.tensor([0, 1, 2, 3, 4, 10])), r"targets must lie in \[0, 10\), got 0 to 10"),
        (dict(target=torch.tensor([0, 1, 2, 3, 4, -100])), r"targets must lie in \[0, 10\), got -100 to 4"),
    ],
)
def test_a_file_that_cannot_be_measured_is_refused(changed, words, tmp_path):
    with pytest.raises(NotMeasured, match=words):
        snapshots.read(written(tmp_path / "a.safetensors", **changed), ALONE)


# --- the claim -----------------------------------------------------------------------------------------


def assert_parity(case: dict) -> None:
    its, rounded, head = (case["deviations"][way] for way in (OURS, BF16, FP32_HEAD))
    slack = 4 * torch.finfo(torch.float32).eps * max(1.0, case["max_sum_of_magnitudes"])
    assert its["largest"] <= 2 * head["largest"] + slack and 100 * its["largest"] < rounded["largest"]
    assert its["outside"] == 0 and 0.999 < its["smallest_ratio"] <= its["largest_ratio"] < 1.001
    assert 100 * its["mean"] < rounded["mean"]
    assert its["entropy_largest"] <= 2 * head["entropy_largest"] + slack
    assert 10 * its["entropy_largest"] < rounded["entropy_largest"]
    assert case["groups"] and case["holds"]
    assert sum(group["tokens"] for group in case["groups"]) == case["n"]
    for group in case["groups"]:
        assert list(group["errors"]) == list(OUTPUTS)
        assert all(list(ways) == [OURS, BF16, FP32_HEAD] for ways in group["errors"].values())


@pytest.mark.parametrize("deviation", parity.DEVIATIONS)
@pytest.mark.parametrize(
    "shape", [Shape(200, 3000, 256), pytest.param(Shape(1024, 32768, 1024), marks=pytest.mark.slow)], ids=str
)
def test_ours_equals_an_fp32_head_on_random_inputs(shape, deviation, device):
    case = measure(random_problem(shape, deviation, Team(torch.device(device))))
    assert_parity(case)
    if deviation >= 5:
        assert case["deviations"][BF16]["outside"] > 0.1
    if deviation == 20:
        edges = [(group["low"], group["high"]) for group in case["groups"]]
        assert edges == [(0.1, 1.0), (1e-2, 0.1), (1e-3, 1e-2), (1e-4, 1e-3), (1e-5, 1e-4), (0.0, 1e-5)]
        for group in case["groups"]:
            for ways in group["errors"].values():
                # Of float64 gradients of the rounded logits about one percent, and more of sure tokens.
                assert ways[OURS] < 0.03 and ways[FP32_HEAD] < 0.03 and ways[BF16] < 0.5
            assert max(ways[BF16] for ways in group["errors"].values()) > 0.03


@pytest.mark.parametrize("large", [False, pytest.param(True, marks=pytest.mark.slow)], ids=["tiny", "configuration"])
def test_the_whole_command_on_a_trained_model(large, tmp_path):
    """./launch/parity.sh twice: the second time nothing is trained."""
    pytest.importorskip("tokenizers", reason="needs the training program's packages")
    pytest.importorskip("pydantic", reason="needs the training program's packages")
    tiny = ["model.hidden=64", "train.steps=20", "train.sequence=64", "text.max_bytes=300_000", "text.vocab_size=1024"]
    tiny += ["snapshots.steps=[5]", "snapshots.tokens=256"]
    config = ["--config", str(ROOT / "configs" / "snapshots-cpu.yaml"), *([] if large else tiny)]
    folders = [f"text.cache={tmp_path / 'cache'}", f"output={tmp_path / 'out'}"]
    report = ["--device", "cpu", "--random", "64,512,32", "--json", "figures.json"]
    command = ["bash", str(ROOT / "launch" / "parity.sh"), *config, *folders, "--", *report]
    environment = os.environ | {"PARALLEL_LCE_PYTHON": sys.executable}
    for trains in (True, False):
        done = subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True, text=True, timeout=300)
        assert done.returncode == 0, done.stdout + done.stderr
        assert ("stand for text" in done.stdout) is trains
    cases = json.loads((tmp_path / "figures.json").read_text())["cases"]
    steps = (20, 60) if large else (5, 20)
    names = [str(tmp_path / "out" / f"step-{step}.safetensors") for step in steps]
    assert [case["name"] for case in cases] == names + [f"random, std {s}" for s in (1, 5, 20)]
    for case in cases:
        assert_parity(case)
        title = "| {name}: N={n}, V={v}, D={d} ".format_map(case)
        values, gradients = [line for line in done.stdout.splitlines() if line.startswith(title)]
        assert f"{case['deviations'][OURS]['largest']:.1e}" in values
        assert all(f"{ways[OURS]:.1e} / " in gradients for ways in case["groups"][0]["errors"].values())
    assert cases[0]["max_abs_logit"] < cases[1]["max_abs_logit"]  # it has been trained


def test_what_cannot_be_measured_does_not_end_the_report(tmp_path, capsys):
    bad = written(tmp_path / "bad.safetensors", weight=None)
    (tmp_path / "worse").write_bytes(b"no header")
    good = written(tmp_path / "good [x].safetensors")
    code = parity.main([bad, str(tmp_path / "worse"), good, "--device", "cpu", "--random", "8,16,8"])
    said = capsys.readouterr()
    assert code == 2 and f"error: {bad} has no tensor weight" in said.err and "worse cannot be read" in said.err
    assert f"| {good}: N=6, V=10, D=8 " in said.out and "| random, std 20: N=8, V=16, D=8 " in said.out
    for arguments in (["none.safetensors"], ["--random", "1,2"]):
        with pytest.raises(SystemExit) as refusal:
            parity.parse_arguments(arguments)
        assert refusal.value.code == 2
    said = capsys.readouterr().err
    assert "no such file: none.safetensors" in said and "below 2^31, got '1,2'" in said


def _rounded(right, inputs, entry):
    return right._replace(values=parity.dense(inputs, entry, torch.bfloat16).values)


def _no_entropy(right, inputs, entry):
    return right._replace(values=[right.values[0], right.values[1] * math.nan, right.values[2]])


def _lost_gradients_of_sure_tokens(right, inputs, entry):
    """Lost beside those of the other tokens."""
    sure = parity.dense(inputs, entry, torch.float64).values[2] > -1e-3
    return right._replace(gradients=[dx.masked_fill(sure[:, None], 0.0) for dx in right.gradients])


@pytest.mark.parametrize(
    ("wrong", "failed", "words"),
    [
        (_rounded, 3, "FAILED: ours is off by"),
        (_no_entropy, 3, "its entropies by nan"),
        (
            _lost_gradients_of_sure_tokens,
            1,
            "; its dX by more than twice those of bf16 logits, where 1 - p is at most 1e-03, 1e-04, 1e-05",
        ),
    ],
)
def test_a_wrong_result_fails_the_report(wrong, failed, words, monkeypatch, capsys, tmp_path):
    right, path = parity.ours, tmp_path / "figures.json"
    monkeypatch.setattr(parity, "ours", lambda inputs, entry: wrong(right(inputs, entry), inputs, entry))
    assert parity.main(["--device", "cpu", "--random", "256,512,64", "--json", str(path)]) == 1
    said = capsys.readouterr().out
    assert said.count("FAILED") == said.count(words) == failed
    cases = json.loads(path.read_text(), parse_constant=pytest.fail)["cases"]  # NaN is no JSON
    assert [case["holds"] for case in cases].count(False) == failed


@pytest.mark.parametrize(
    ("ours", "rounded", "tokens", "holds"),
    [
        (0.02, 0.01, 8, True),
        (0.025, 0.01, 8, False),
        (0.025, 0.01, 7, True),  # few
        (2**-8, 0.0, 8, True),  # one rounding
        (2**-7, 0.0, 8, False),
        (math.nan, 0.1, 8, False),
    ],
)
def test_gradients_of_a_group_are_held_to_those_of_rounded_logits(ours, rounded, tokens, holds):
    errors = {"entropy": {OURS: 0.0, BF16: 0.1}, "log-probability": {OURS: ours, BF16: rounded}}
    assert parity.group_holds({"tokens": tokens, "errors": errors}, BF16, torch.bfloat16) is holds
