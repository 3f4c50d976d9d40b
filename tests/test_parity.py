"""The parity report: its measures, its inputs, and the claim that it shows: ours equals an fp32 head."""

from __future__ import annotations

import json
import math
import os
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F

pytest.importorskip("rich", reason="needs the benchmark's packages")
pytest.importorskip("safetensors", reason="needs the benchmark's packages")

from safetensors.torch import save_file

from cases import normal
from parallel_lce.bench import exactness, parity
from parallel_lce.bench.exactness import (
    FP32_HEAD,
    OURS,
    OUTPUTS,
    Case,
    Deviation,
    Group,
    Inputs,
    Scores,
    head,
    measure,
    random_inputs,
)
from parallel_lce.bench.problem import Shape

ROOT = Path(__file__).resolve().parent.parent
BF16 = "bf16 logits"
EPS = torch.finfo(torch.float32).eps
NAN = float("nan")
CPU = torch.device("cpu")


def scores(log_prob, entropy=None, dtype=torch.float64) -> Scores:
    log_prob = torch.tensor(log_prob, dtype=dtype)
    return Scores(log_prob, torch.zeros_like(log_prob) if entropy is None else torch.tensor(entropy, dtype=dtype))


def tensors(n=6, v=10, d=8, dtype=torch.bfloat16, sharpness=1.0) -> dict[str, torch.Tensor]:
    target = torch.randint(v, (n,), generator=torch.Generator().manual_seed(2))
    weight = normal(v, d, seed=1) * sharpness * d**-0.5
    return {"hidden": normal(n, d).to(dtype), "weight": weight.to(dtype), "target": target}


# --- measures ------------------------------------------------------------------------------------------


def test_the_measures_of_a_hand_made_case():
    truth = scores([-1.0, -2.0, -3.0, -4.0], [0.5, 0.5, 0.5, 0.5])
    found = scores([-1.0, -1.75, -3.5, -4.0 + 2**-8], [0.5, 0.75, 0.5, 0.125])
    its = Deviation.of(found, truth)
    assert its.mean == (0.25 + 0.5 + 2**-8) / 4 and its.largest == 0.5
    assert its.smallest_ratio == pytest.approx(math.exp(-0.5)) and its.largest_ratio == pytest.approx(math.exp(0.25))
    assert its.outside == 0.5  # exp(2^-8) = 1.0039 is within
    assert its.entropy_mean == 0.625 / 4 and its.entropy_largest == 0.375


@pytest.mark.parametrize(
    ("ratio", "outside"), [(1.0, 0), (0.9901, 0), (1.0099, 0), (0.9899, 1), (1.0101, 1), (math.inf, 1), (NAN, 1)]
)
def test_a_ratio_outside_of_one_percent_counts(ratio, outside):
    assert Deviation.of(scores([math.log(ratio)]), scores([0.0])).outside == outside


def test_not_a_number_is_not_hidden():
    for found in (scores([0.0, NAN, 0.0]), scores([0.0] * 3, [0.0, 0.0, NAN])):
        its = Deviation.of(found, scores([0.0] * 3))
        largest = its.largest if found.log_prob.isnan().any() else its.entropy_largest
        assert math.isnan(largest)


def test_differences_are_of_fp64():
    """Both of these round to the same fp32 number."""
    found, truth = scores([-5.0], dtype=torch.float32), scores([-5.0 - 2**-30])
    assert Deviation.of(found, truth).largest == 2**-30


def case(ours: float, fp32: float, rounded: float = 0.1, largest_sum: float = 0.5) -> Case:
    off = {OURS: ours, BF16: rounded, FP32_HEAD: fp32}
    deviations = {name: Deviation(value, value, 1, 1, 0, 0, 0) for name, value in off.items()}
    return Case("made up", Shape(1, 2, 3), "bf16", 0.5, largest_sum, -1.0, deviations)


@pytest.mark.parametrize(
    ("ours", "fp32", "largest_sum", "holds"),
    [
        (2e-3, 1e-3, 0.5, True),
        (2.1e-3, 1e-3, 0.5, False),
        (4 * EPS, 0.0, 0.5, True),  # a few roundings of 1
        (5 * EPS, 0.0, 0.5, False),
        (256 * EPS, 0.0, 64.0, True),  # and of the largest sum
        (300 * EPS, 0.0, 64.0, False),
        (NAN, 1e-3, 0.5, False),
        (1e-3, NAN, 0.5, False),
    ],
)
def test_what_is_equal_to_an_fp32_head(ours, fp32, largest_sum, holds):
    assert case(ours, fp32, largest_sum=largest_sum).holds is holds


def test_the_verdict_says_how_many_times():
    from parallel_lce.bench.parity_table import verdict

    words = "made up: the largest difference of ours is 1.5 times the fp32 head's, that of bf16 logits 1e+02 times"
    assert verdict(case(1.5e-3, 1e-3)) == words
    failed = ". FAILED: ours is off by 3.0e-03, allowed 2.0e-03; its entropies by 0.0e+00, allowed 4.8e-07"
    assert verdict(case(3e-3, 1e-3)) == words.replace("1.5", "3") + failed


# --- the heads -----------------------------------------------------------------------------------------


@pytest.mark.parametrize("rows", [1, 4, 6])
def test_the_truth_is_torch_in_float64(rows, monkeypatch):
    monkeypatch.setattr(exactness, "BLOCK_BYTES", 8 * 10 * rows)  # blocks of tokens, the last perhaps a part
    inputs = Inputs("", **tensors(sharpness=4.0))
    z = inputs.hidden.double() @ inputs.weight.double().T
    found, largest = head(inputs, torch.float64)
    assert found.log_prob.dtype == found.entropy.dtype == torch.float64
    torch.testing.assert_close(found.log_prob, -F.cross_entropy(z, inputs.target, reduction="none"))
    torch.testing.assert_close(found.entropy, torch.distributions.Categorical(logits=z).entropy())
    assert largest == pytest.approx(z.abs().max().item(), rel=1e-12)


def test_logits_are_rounded_once_and_the_softmax_is_fp32():
    inputs = Inputs("", **tensors(sharpness=8.0))
    exact = inputs.hidden.double() @ inputs.weight.double().T
    for dtype, z in ((torch.bfloat16, exact.bfloat16()), (torch.float32, exact)):
        found, _ = head(inputs, dtype)
        assert found.log_prob.dtype == torch.float32
        expected = z.double().log_softmax(1).gather(1, inputs.target[:, None])[:, 0]
        torch.testing.assert_close(found.log_prob.double(), expected, rtol=1e-5, atol=1e-5)


def test_tf32_is_off_for_the_products_alone():
    before, seen = torch.get_float32_matmul_precision(), []

    class Hidden(torch.Tensor):
        @classmethod
        def __torch_function__(cls, function, types, args=(), kwargs=None):
            if "matmul" in function.__name__:
                seen.append(torch.get_float32_matmul_precision())
            return super().__torch_function__(function, types, args, kwargs)

    torch.set_float32_matmul_precision("high")
    try:
        given = tensors()
        head(Inputs("", given["hidden"].as_subclass(Hidden), given["weight"], given["target"]), torch.float32)
        assert seen == ["highest"] and torch.get_float32_matmul_precision() == "high"
    finally:
        torch.set_float32_matmul_precision(before)


# --- inputs --------------------------------------------------------------------------------------------


@pytest.mark.parametrize("deviation", parity.DEVIATIONS)
def test_random_inputs(deviation):
    inputs = random_inputs(Shape(300, 400, 200), deviation, CPU)
    assert (inputs.hidden.dtype, inputs.weight.dtype) == (torch.bfloat16,) * 2
    assert inputs.shape == Shape(300, 400, 200)
    z = inputs.hidden.double() @ inputs.weight.double().T
    assert z.std().item() == pytest.approx(deviation, rel=0.03)
    # Drawn from the softmax: the mean log-probability is minus the mean entropy, up to the noise of 300 tokens.
    log_p = z.log_softmax(1)
    entropy = -(log_p.exp() * log_p).sum(1)
    spread = ((log_p.exp() * log_p.square()).sum(1) - entropy.square()).clamp(min=0).sum().sqrt() / 300
    drawn = log_p.gather(1, inputs.target[:, None]).mean()
    assert abs(drawn + entropy.mean()) < 4 * spread


def written(path: Path, **changed) -> str:
    content = tensors() | changed
    save_file({name: tensor for name, tensor in content.items() if tensor is not None}, path)
    return str(path)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_a_file_is_read(dtype, tmp_path):
    given = tensors(dtype=dtype)
    path = written(tmp_path / "a.safetensors", **(given | {"target": given["target"].int()}))
    found = parity.read_inputs(path, CPU)
    assert torch.equal(found.hidden, given["hidden"]) and torch.equal(found.weight, given["weight"])
    assert torch.equal(found.target, given["target"]) and found.target.dtype == torch.int64
    assert found.name == path and found.dtype_name == {torch.bfloat16: "bf16", torch.float16: "fp16"}[dtype]


@pytest.mark.parametrize(
    ("changed", "words"),
    [
        (dict(weight=None), r"has no tensor weight, but \['hidden', 'target'\]"),
        (dict(hidden=torch.ones(6, 8)), "both be bf16, or both fp16, got hidden torch.float32, weight torch.bfloat16"),
        (dict(target=torch.ones(6)), "target must be of an integer dtype, got torch.float32"),
        (dict(target=torch.ones(6, dtype=torch.bool)), "target must be of an integer dtype, got torch.bool"),
        (dict(target=torch.ones(5, dtype=torch.int64)), r"got hidden \[6, 8\], weight \[10, 8\], target \[5\]"),
        (dict(hidden=torch.ones(6, 7).bfloat16()), r"got hidden \[6, 7\], weight \[10, 8\], target \[6\]"),
        (dict(hidden=torch.ones(6, 8, 1).bfloat16()), r"got hidden \[6, 8, 1\], weight \[10, 8\], target \[6\]"),
        (dict(weight=torch.ones(0, 8).bfloat16()), r"none empty, got hidden \[6, 8\], weight \[0, 8\]"),
        (dict(target=torch.tensor([0, 1, 2, 3, 4, 10])), r"targets must lie in \[0, 10\), got 0 to 10"),
        (dict(target=torch.tensor([0, 1, 2, 3, 4, -100])), r"targets must lie in \[0, 10\), got -100 to 4"),
    ],
)
def test_a_file_that_cannot_be_measured_is_refused(changed, words, tmp_path):
    with pytest.raises(ValueError, match=words):
        parity.read_inputs(written(tmp_path / "a.safetensors", **changed), CPU)


def test_other_files_are_refused(tmp_path, capsys):
    path = tmp_path / "a.safetensors"
    path.write_bytes(b"no header")
    with pytest.raises(ValueError, match="a.safetensors cannot be read"):
        parity.read_inputs(str(path), CPU)
    for arguments, words in (
        (["none.safetensors"], "no such file: none.safetensors"),
        (["--random", "1,2"], "three positive numbers N,V,D below 2^31, got '1,2'"),
    ):
        with pytest.raises(SystemExit) as refusal:
            parity.parse_arguments(arguments)
        assert refusal.value.code == 2 and words in capsys.readouterr().err


# --- the claim -----------------------------------------------------------------------------------------


def assert_parity(measured: Case) -> None:
    off = {name: its.largest for name, its in measured.deviations.items()}
    assert off[OURS] <= 2 * off[FP32_HEAD] + 4 * EPS * max(1.0, measured.largest_sum), off
    assert 100 * off[OURS] < off[BF16], off
    its, rounded = measured.deviations[OURS], measured.deviations[BF16]
    assert its.outside == 0 and 0.999 < its.smallest_ratio <= its.largest_ratio < 1.001
    assert 100 * its.mean < rounded.mean
    assert its.entropy_largest <= measured.entropy_limit
    assert 10 * its.entropy_largest < rounded.entropy_largest
    assert measured.groups and measured.holds


@pytest.mark.parametrize("deviation", parity.DEVIATIONS)
@pytest.mark.parametrize(
    "shape", [Shape(200, 3000, 256), pytest.param(Shape(1024, 32768, 1024), marks=pytest.mark.slow)], ids=str
)
def test_ours_equals_an_fp32_head_on_random_inputs(shape, deviation, device):
    measured = measure(random_inputs(shape, deviation, torch.device(device)))
    assert_parity(measured)
    if deviation >= 5:
        assert measured.deviations[BF16].outside > 0.1


def test_gradients_of_sure_tokens_are_shown_by_group(device):
    measured = measure(random_inputs(Shape(200, 3000, 256), 20.0, torch.device(device)))
    edges = [(group.low, group.high) for group in measured.groups]
    assert edges == [(0.1, 1.0), (1e-2, 0.1), (1e-3, 1e-2), (1e-4, 1e-3), (1e-5, 1e-4), (0.0, 1e-5)]
    assert sum(group.tokens for group in measured.groups) == 200 and min(group.tokens for group in measured.groups) >= 8
    for group in measured.groups:
        assert list(group.errors) == list(OUTPUTS)
        for ways in group.errors.values():
            assert list(ways) == [OURS, BF16, FP32_HEAD]
            # Of float64 gradients of the rounded logits about one percent, and more of sure tokens.
            assert ways[OURS] < 0.03 and ways[FP32_HEAD] < 0.03 and ways[BF16] < 0.5
        assert max(ways[BF16] for ways in group.errors.values()) > 0.03


@pytest.mark.parametrize(
    ("ours", "rounded", "tokens", "holds"),
    [
        (0.02, 0.01, 8, True),
        (0.025, 0.01, 8, False),
        (0.025, 0.01, 7, True),  # few
        (2**-8, 0.0, 8, True),  # one rounding
        (2**-7, 0.0, 8, False),
        (NAN, 0.1, 8, False),
    ],
)
def test_gradients_of_a_group_are_held_to_those_of_rounded_logits(ours, rounded, tokens, holds):
    right = {OURS: 0.0, BF16: 0.1, FP32_HEAD: 0.0}
    group = Group(1e-3, 1e-2, tokens, {"entropy": right, "log-probability": right | {OURS: ours, BF16: rounded}})
    assert group.holds is holds and replace(case(1e-3, 1e-3), groups=(group,)).holds is holds


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
    content = json.loads((tmp_path / "figures.json").read_text())
    steps = (20, 60) if large else (5, 20)
    names = [str(tmp_path / "out" / f"step-{step}.safetensors") for step in steps]
    assert [each["name"] for each in content["cases"]] == names + [f"random, std {s}" for s in (1, 5, 20)]
    for each in content["cases"]:
        deviations = {name: Deviation(**its) for name, its in each["deviations"].items()}
        shape = Shape(each["n"], each["v"], each["d"])
        numbers = each["max_abs_logit"], each["max_sum_of_magnitudes"], each["mean_log_prob"]
        groups = tuple(Group(**group) for group in each["groups"])
        assert sum(group.tokens for group in groups) == shape.n
        found = Case(each["name"], shape, each["dtype"], *numbers, deviations, groups)
        assert each["holds"] and found.as_dict() == each
        assert_parity(found)
        rows = [line for line in done.stdout.splitlines() if line.startswith(f"| {found.name}: {shape} ")]
        assert len(rows) == 2 and f"{deviations[OURS].largest:.1e}" in rows[0]
        assert all(f"{ways[OURS]:.1e} / " in rows[1] for ways in groups[0].errors.values())
    assert content["cases"][0]["max_abs_logit"] < content["cases"][1]["max_abs_logit"]  # it has been trained


def test_what_cannot_be_measured_does_not_end_the_report(tmp_path, capsys):
    bad = written(tmp_path / "bad.safetensors", weight=None)
    good = written(tmp_path / "good [x].safetensors")
    code = parity.main([bad, good, "--device", "cpu", "--random", "8,16,8"])
    said = capsys.readouterr()
    assert code == 2 and f"error: {bad} has no tensor weight" in said.err
    assert f"| {good}: N=6, V=10, D=8 " in said.out and "| random, std 20: N=8, V=16, D=8 " in said.out


def test_a_wrong_result_fails_the_report(monkeypatch, capsys):
    monkeypatch.setattr(exactness, "ours", lambda inputs: head(inputs, torch.bfloat16)[0])
    assert parity.main(["--device", "cpu", "--random", "32,64,32"]) == 1
    assert capsys.readouterr().out.count("FAILED: ours is off by") == 3


def test_wrong_gradients_of_sure_tokens_fail_the_report(monkeypatch, capsys):
    right = exactness.our_gradients

    def wrong(inputs, entry):
        log_p = head(replace(inputs, target=entry), torch.float64)[0].log_prob
        # Lost beside those of the other tokens.
        return {name: dx.where(log_p[:, None] < -1e-3, 0.0) for name, dx in right(inputs, entry).items()}

    monkeypatch.setattr(exactness, "our_gradients", wrong)
    assert parity.main(["--device", "cpu", "--random", "256,512,64"]) == 1
    said = capsys.readouterr().out
    words = "; its dX by more than twice those of bf16 logits, where 1 - p is at most 1e-03, 1e-04, 1e-05"
    assert said.count("FAILED") == said.count(words) == 1


def test_wrong_entropies_fail_the_report(monkeypatch, capsys, tmp_path):
    right = exactness.ours
    monkeypatch.setattr(exactness, "ours", lambda inputs: replace(right(inputs), entropy=torch.full((32,), torch.nan)))
    path = tmp_path / "figures.json"
    assert parity.main(["--device", "cpu", "--random", "32,64,32", "--json", str(path)]) == 1
    assert capsys.readouterr().out.count("FAILED") == 3
    found = json.loads(path.read_text(), parse_constant=pytest.fail)  # NaN is no JSON
    assert found["cases"][0]["deviations"]["ours"]["entropy_largest"] is None
