"""The reports on snapshots of a training: parity of log-probabilities with an fp32 head, and what gradient_filter does.
Their inputs, their measures, what they write and refuse."""

from __future__ import annotations

import json
import math
import sys
from pathlib import Path

import pytest
import torch

pytest.importorskip("rich", reason="needs the benchmark's packages")
pytest.importorskip("safetensors", reason="needs the benchmark's packages")
pytest.importorskip("matplotlib", reason="needs the benchmark's packages")

from matplotlib import pyplot
from safetensors.torch import save_file

from benchmarks import gradient_filter, parity, problem, snapshots, timing
from benchmarks.gradient_filter import BUDGETS, BY_PROBABILITY, EXACT, FILTERS, NATURAL, ROUNDINGS
from benchmarks.parity import FP32_HEAD, OURS, OUTPUTS, random_problem
from benchmarks.problem import Problem, Shape
from benchmarks.team import NotMeasured, Team
from cases import normal
from parallel_lce import linear_cross_entropy
from tools import chosen_backend, everywhere, ran
from world import Member

ROOT = Path(__file__).resolve().parent.parent
BF16 = "bf16 logits"
ALONE = Team(torch.device("cpu"))
N, V, D = 300, 700, 32


def written(path: Path, n=6, v=10, d=8, dtype=torch.bfloat16, **changed) -> str:
    target = torch.randint(v, (n,), generator=torch.Generator().manual_seed(2))
    weight = normal(v, d, seed=1) * d**-0.5
    content = {"hidden": normal(n, d).to(dtype), "weight": weight.to(dtype), "target": target} | changed
    save_file({name: tensor for name, tensor in content.items() if tensor is not None}, path)
    return str(path)


@pytest.fixture
def short(monkeypatch):
    """Hardly any time is spent on timing."""
    monkeypatch.setitem(timing.ALONE, "cpu", (0.0, 1e-6))


# --- files -------------------------------------------------------------------------------------------------


def test_a_file_is_read(tmp_path):
    target = torch.arange(6, dtype=torch.int32)
    found = snapshots.read(written(tmp_path / "a", dtype=torch.float16, target=target), ALONE)
    assert torch.equal(found.hidden, normal(6, 8).half()) and found.weight.dtype == torch.float16
    assert torch.equal(found.target, target.long()) and found.shape == Shape(6, 10, 8)


@pytest.mark.parametrize(
    ("changed", "words"),
    [
        (dict(weight=None), r"has no tensor weight, but \['hidden', 'target'\]"),
        (dict(hidden=torch.ones(6, 8)), "both fp16, and integers, got hidden torch.float32, weight torch.bfloat16"),
        (dict(target=torch.ones(6, dtype=torch.bool)), "and integers, got .* target torch.bool"),
        (dict(target=torch.ones(5, dtype=torch.int64)), r"got hidden \[6, 8\], weight \[10, 8\], target \[5\]"),
        (dict(weight=torch.ones(0, 8).bfloat16()), r"none empty, got hidden \[6, 8\], weight \[0, 8\]"),
        (dict(target=torch.tensor([0, 1, 2, 3, 4, 10])), r"targets must lie in \[0, 10\), got 0 to 10"),
    ],
)
def test_a_file_that_cannot_be_measured_is_refused(changed, words, tmp_path):
    with pytest.raises(NotMeasured, match=words):
        snapshots.read(written(tmp_path / "a.safetensors", **changed), ALONE)


# --- parity ------------------------------------------------------------------------------------------------


def assert_parity(case: dict) -> None:
    its, rounded, head = (case["deviations"][way] for way in (OURS, BF16, FP32_HEAD))
    slack = 4 * torch.finfo(torch.float32).eps * max(1.0, case["max_sum_of_magnitudes"])
    assert its["largest"] <= 2 * head["largest"] + slack and 100 * its["largest"] < rounded["largest"]
    assert its["outside"] == 0 and 0.999 < its["smallest_ratio"] <= its["largest_ratio"] < 1.001
    assert 100 * its["mean"] < rounded["mean"] and 100 * head["mean"] < rounded["mean"]
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
    case = parity.measure(random_problem(shape, deviation, Team(torch.device(device))))
    assert_parity(case)
    assert case["mean_log_prob"] > 0.3 - math.log(shape.v)  # targets are drawn from the softmax
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
    """./launch/parity.sh twice: the second time nothing is trained. A file that cannot be read does not end it."""
    pytest.importorskip("tokenizers", reason="needs the training program's packages")
    pytest.importorskip("pydantic", reason="needs the training program's packages")
    tiny = ["model.hidden=64", "train.steps=20", "train.sequence=64", "text.max_bytes=300_000", "text.vocab_size=1024"]
    tiny += ["snapshots.steps=[5]", "snapshots.tokens=256"]
    config = ["--config", str(ROOT / "configs" / "snapshots-cpu.yaml"), *([] if large else tiny)]
    folders = [f"text.cache={tmp_path / 'cache'}", f"output={tmp_path / 'out'}"]
    (tmp_path / "worse").write_bytes(b"no header")
    report = ["worse", written(tmp_path / "bad [x]", weight=None), "--device", "cpu", "--random", "64,512,32"]
    command = ["bash", str(ROOT / "launch" / "parity.sh"), *config, *folders, "--", *report, "--json", "figures.json"]
    for trains in (True, False):
        done = ran(*command, cwd=tmp_path)
        assert done.returncode == 2, done.stdout + done.stderr
        assert "bad [x] has no tensor weight" in done.stderr and "error: worse cannot be read" in done.stderr
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


def _lost_gradients_of_sure_tokens(right, inputs, entry):
    """Lost beside those of the other tokens."""
    sure = parity.dense(inputs, entry, torch.float64).values[2] > -1e-3
    return right._replace(gradients=[dx.masked_fill(sure[:, None], 0.0) for dx in right.gradients])


WRONG = {  # words of the report: what is made of its results, and of how many cases it fails
    "FAILED": (lambda right, *_: right, 0),
    "FAILED: ours is off by": (
        lambda right, *given: right._replace(values=parity.dense(*given, torch.bfloat16).values),
        3,
    ),
    "its entropies by nan": (
        lambda right, *_: right._replace(values=[right.values[0], right.values[1] * math.nan, right.values[2]]),
        3,
    ),
    "; its dX by more than twice those of bf16 logits, where 1 - p is at most ": (_lost_gradients_of_sure_tokens, 1),
}


@pytest.mark.parametrize("words", WRONG)
def test_a_wrong_result_fails_the_report(words, monkeypatch, capsys, tmp_path):
    (wrong, failed), right, path = WRONG[words], parity.ours, tmp_path / "figures.json"
    monkeypatch.setattr(parity, "ours", lambda inputs, entry: wrong(right(inputs, entry), inputs, entry))
    status = parity.main(["--device", "cpu", "--random", "256,512,64", "--json", str(path)])
    said = capsys.readouterr().out
    assert status == bool(failed) and said.count("FAILED") == said.count(words) == failed
    assert ("1e-03, 1e-04, 1e-05" in said) == (wrong is _lost_gradients_of_sure_tokens)
    cases = json.loads(path.read_text(), parse_constant=pytest.fail)["cases"]  # NaN is no JSON
    assert [case["holds"] for case in cases].count(False) == failed


# --- gradient_filter ---------------------------------------------------------------------------------------


@pytest.fixture
def given(tmp_path) -> Problem:
    return snapshots.read(written(tmp_path / "step-1.safetensors", N, V, D), ALONE)


def probabilities(given: Problem) -> torch.Tensor:
    """[N, V] fp64"""
    return (given.hidden.double() @ given.weight.double().T).softmax(1)


def test_the_vocabulary_is_ordered_by_mean_probability_and_dealt_to_the_ranks(given, monkeypatch):
    monkeypatch.setattr(problem, "BLOCK_BYTES", 8 * V * 7)  # blocks of 7 tokens
    mean, order = probabilities(given).mean(0), gradient_filter.by_probability(given)
    assert torch.equal(order.sort().values, torch.arange(V))
    assert (mean[order].diff() <= 1e-6 * mean[order][1:]).all()
    assert torch.equal(gradient_filter.by_probability(given, 2), torch.cat([order[0::2], order[1::2]]))
    changed = gradient_filter.reordered(given, order)  # the vocabulary alone
    torch.testing.assert_close(probabilities(changed), probabilities(given)[:, order])
    assert torch.equal(order[changed.target], given.target)


def test_the_measures_of_a_small_snapshot(short, given, monkeypatch):
    monkeypatch.setattr(problem, "BLOCK_BYTES", 8 * V * 70)  # blocks of 70 tokens
    filters = []

    def loss(*tensors, gradient_filter, **options):
        filters.append(gradient_filter)
        return linear_cross_entropy(*tensors, gradient_filter=gradient_filter, **options)

    monkeypatch.setattr(gradient_filter, "linear_cross_entropy", loss)
    with chosen_backend("torch"):
        case = gradient_filter.measure(given.name, 2, ALONE)
    assert {*filters} == {*FILTERS} and case["step"] == 1 and case["dtype"] == "bfloat16"
    assert case["loss"] == pytest.approx(-probabilities(given)[range(N), given.target].log().mean().item())
    # The exact gradients, rounded: of a number at most 2^-9 of it, 2^-9 / sqrt(3) in the mean or less.
    references, names = case["reference_errors"], ("dX", "dW", "dW rows")
    assert all(2**-11 < references[EXACT][name] < 2**-9 for name in names)
    assert all(references[rounded][name] > references[EXACT][name] for rounded in ROUNDINGS for name in names)
    found = [(each["order"], each["gradient_filter"]) for each in case["results"]]
    assert found == [(order, value) for order in (NATURAL, BY_PROBABILITY) for value in FILTERS]
    for none, *filtered in (case["results"][: len(FILTERS)], case["results"][len(FILTERS) :]):
        for memory in BUDGETS:
            for name in names:
                exact = none[memory]["errors"][name]
                assert exact < 2 * references[EXACT][name]
                # The torch backend computes exact gradients.
                assert all(each[memory]["errors"][name] == exact for each in filtered)
            ratios = sorted(g / s for g, s in zip(none["gemm_only_seconds"], none[memory]["seconds"]))
            assert none[memory]["of_gemm_only"] == pytest.approx([sum(ratios) / 2, *ratios])


def _measured_on(member: Member, path: str) -> dict:
    timing.OVER_RANKS[member.device.type] = timing.ALONE[member.device.type] = 0.0, 1e-6
    gradient_filter.FILTERS = (None,)
    team = Team(member.device, member.rank, member.ranks, member.group, member.group)
    with chosen_backend("torch"):
        return gradient_filter.measure(path, 1, team)


def test_ranks_have_the_errors_of_the_whole(worlds, short, given, device, monkeypatch):
    monkeypatch.setattr(gradient_filter, "FILTERS", (None,))
    (whole,), (first, second) = (everywhere(worlds, device, ranks, _measured_on, given.name) for ranks in (1, 2))
    assert first["tp"] == 2 and whole["tp"] == 1 and first["reference_errors"] == whole["reference_errors"]
    assert first == second
    for ours, of_whole in zip(first["results"], whole["results"]):
        for memory in BUDGETS:
            found, expected = ours[memory]["errors"], of_whole[memory]["errors"]
            for name in ("dW", "dW rows"):
                assert found[name] == pytest.approx(expected[name], rel=0.02)
            assert expected["dX"] <= found["dX"] < 2 * expected["dX"]  # a bf16 dX is summed over the ranks in bf16
    monkeypatch.setattr(Team, "agree", lambda self, work: work())
    with pytest.raises(NotMeasured, match="a vocabulary of 700 entries cannot be shared by 3 ranks"):
        gradient_filter.measure(given.name, 1, Team(torch.device("cpu"), 0, 3))


@pytest.mark.slow
def test_the_report_over_ranks(tmp_path):
    """torchrun's own start: one rank speaks, and what one cannot read all refuse."""
    bad, good = written(tmp_path / "bad", weight=None), written(tmp_path / "good", 40, 60, 16)
    command = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node=2", "--standalone", "-m"]
    command += ["benchmarks.gradient_filter", bad, good, "--device", "cpu", "--rounds", "1"]
    run = ran(*command, cwd=tmp_path, env={"PYTHONPATH": str(ROOT), "PARALLEL_LCE_BACKEND": "torch"})
    assert run.stderr.count(f"error: {bad} has no tensor weight") == 1, run.stderr
    assert run.stdout.count(f"{good}: TP 2, N=40, V=60, D=16, bfloat16") == 1


def test_the_report_writes_tables_json_and_a_picture(short, tmp_path, capsys, monkeypatch):
    """Lines go through the snapshots in the order of their steps, whatever the order of the files."""
    drawn = []
    monkeypatch.setattr(pyplot, "close", drawn.append)
    paths = [written(tmp_path / f"{name}.safetensors", 40, 60, 16) for name in ("step-20", "step-9", "other [x]")]
    bad = written(tmp_path / "bad.safetensors", weight=None)
    figures, picture = tmp_path / "new" / "figures.json", tmp_path / "pictures" / "p.png"
    arguments = ["--device", "cpu", "--rounds", "3", "--json", str(figures), "--plot", str(picture)]
    assert gradient_filter.main([bad, *paths, *arguments]) == 2  # for one that cannot be measured
    monkeypatch.undo()
    said = capsys.readouterr()
    assert f"error: {bad} has no tensor weight" in said.err
    assert picture.read_bytes().startswith(b"\x89PNG")
    cases = json.loads(figures.read_text())["cases"]
    assert [(case["name"], case["step"]) for case in cases] == list(zip(paths, (20, 9, None)))
    for case in cases:
        assert f"{case['name']}: N=40, V=60, D=16, bfloat16, loss {case['loss']:.4f}" in said.out
    row = next(line for line in said.out.splitlines() if line.startswith("| by probability") and "| 2^-11" in line)
    for way in (cases[0]["results"][8][memory] for memory in BUDGETS):
        assert f"{way['of_gemm_only'][0]:.3f} (" in row and f"{way['errors']['dX']:.2e}" in row
    line = drawn[0].axes[0].lines[0]
    of_natural_and_saved = [case["results"][5]["saved"]["of_gemm_only"][0] for case in (cases[1], cases[0])]
    assert (list(line.get_xdata()), list(line.get_ydata())) == ([9, 20], of_natural_and_saved)
    pyplot.close(drawn[0])
    with pytest.raises(SystemExit):
        gradient_filter.main([])
    assert "no file is given, and at least one is needed" in capsys.readouterr().err
