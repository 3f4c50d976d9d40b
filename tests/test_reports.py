"""The reports on snapshots of a training: parity of log-probabilities with an fp32 head, and what gradient_filter does.
Their inputs, their measures, what they write and refuse."""

from __future__ import annotations

import json
import math
import sys
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F

pytest.importorskip("rich", reason="needs the benchmark's packages")
pytest.importorskip("safetensors", reason="needs the benchmark's packages")
pytest.importorskip("matplotlib", reason="needs the benchmark's packages")

from matplotlib import pyplot
from safetensors.torch import save_file

from benchmarks import gradient_filter, parity, problem, snapshots, timing
from benchmarks.gradient_filter import BUDGETS, BY_PROBABILITY, EXACT, FILTERS, NATURAL, ROUNDINGS
from benchmarks.parity import FP32_HEAD, OURS, OUTPUTS, Found, random_problem
from benchmarks.problem import Problem, Shape
from benchmarks.team import NotMeasured, Team
from cases import normal
from measures import relative_error
from parallel_lce import linear_cross_entropy
from tools import chosen_backend, everywhere, ran
from world import Member

ROOT = Path(__file__).resolve().parent.parent
BF16 = "bf16 logits"
ALONE = Team(torch.device("cpu"))
N, V, D = 300, 700, 32


def tensors(n=6, v=10, d=8, dtype=torch.bfloat16, sharpness=1.0) -> dict[str, torch.Tensor]:
    target = torch.randint(v, (n,), generator=torch.Generator().manual_seed(2))
    weight = normal(v, d, seed=1) * sharpness * d**-0.5
    return {"hidden": normal(n, d).to(dtype), "weight": weight.to(dtype), "target": target}


def written(path: Path, *shape, **changed) -> str:
    content = tensors(*shape) | changed
    save_file({name: tensor for name, tensor in content.items() if tensor is not None}, path)
    return str(path)


@pytest.fixture
def short(monkeypatch):
    """Hardly any time is spent on timing."""
    monkeypatch.setitem(timing.ALONE, "cpu", (0.0, 1e-6))


# --- files and command lines -----------------------------------------------------------------------------


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


@pytest.mark.parametrize(
    ("report", "arguments", "words"),
    [
        (gradient_filter, [], "no file is given, and at least one is needed"),
        (gradient_filter, ["none.safetensors"], "no such file: none.safetensors"),
        (gradient_filter, ["FOLDER/a", "--rounds", "0"], "--rounds must be at least 1, got 0"),
        (gradient_filter, ["FOLDER/a", "--plot", "p.foo"], "--plot: the suffix must be one of "),
        (gradient_filter, ["FOLDER/a", "--json", "FOLDER"], " is a folder"),
        (parity, ["none.safetensors"], "no such file: none.safetensors"),
        (parity, ["--random", "1,2"], "below 2^31, got '1,2'"),
    ],
)
def test_a_bad_command_line_says_why(report, arguments, words, tmp_path, capsys):
    written(tmp_path / "a")
    with pytest.raises(SystemExit) as refusal:
        report.main([word.replace("FOLDER", str(tmp_path)) for word in arguments])
    assert refusal.value.code == 2 and words in capsys.readouterr().err


# --- parity: measures and inputs ---------------------------------------------------------------------------


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
def test_the_dense_ways_are_torchs_with_logits_that_are_rounded_once(rows, monkeypatch):
    monkeypatch.setattr(problem, "BLOCK_BYTES", 8 * 10 * rows)  # blocks of tokens, the last perhaps a part
    given = tensors(sharpness=4.0)
    x = given["hidden"].double().requires_grad_()
    exact = x @ given["weight"].double().T
    inputs = Problem(Shape(6, 10, 8), ALONE, **given)
    for dtype, z in ((torch.float64, exact), (torch.float32, exact), (torch.bfloat16, exact.bfloat16().double())):
        found = parity.dense(inputs, z.argmax(1), dtype)
        log_prob = -F.cross_entropy(z, inputs.target, reduction="none")
        values = log_prob, torch.distributions.Categorical(logits=z).entropy(), z.log_softmax(1).amax(1)
        off = dict(rtol=1e-7, atol=1e-7) if dtype == torch.float64 else dict(rtol=1e-5, atol=1e-5)
        for value, gradient, expected in zip(*found, values):
            assert value.dtype == torch.promote_types(dtype, torch.float32)
            torch.testing.assert_close(value.double(), expected.detach(), **off)
            if dtype != torch.bfloat16:
                its = torch.autograd.grad(expected.sum(), x, retain_graph=True)[0]
                torch.testing.assert_close(gradient.double(), its, **off)


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


# --- parity: the claim -------------------------------------------------------------------------------------


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
    case = parity.measure(random_problem(shape, deviation, Team(torch.device(device))))
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
        (lambda right, *_: right, 0, "FAILED"),
        (_rounded, 3, "FAILED: ours is off by"),
        (_no_entropy, 3, "its entropies by nan"),
        (
            _lost_gradients_of_sure_tokens,
            1,
            "; its dX by more than twice those of bf16 logits, where 1 - p is at most ",
        ),
    ],
)
def test_a_wrong_result_fails_the_report(wrong, failed, words, monkeypatch, capsys, tmp_path):
    right, path = parity.ours, tmp_path / "figures.json"
    monkeypatch.setattr(parity, "ours", lambda inputs, entry: wrong(right(inputs, entry), inputs, entry))
    status = parity.main(["--device", "cpu", "--random", "256,512,64", "--json", str(path)])
    said = capsys.readouterr().out
    assert status == bool(failed) and said.count("FAILED") == said.count(words) == failed
    assert ("1e-03, 1e-04, 1e-05" in said) == (wrong is _lost_gradients_of_sure_tokens)
    cases = json.loads(path.read_text(), parse_constant=pytest.fail)["cases"]  # NaN is no JSON
    assert [case["holds"] for case in cases].count(False) == failed


def test_gradients_of_a_group_are_held_to_those_of_rounded_logits():
    """At most twice their error, and one rounding; nothing is asked of few tokens."""
    cases = [(0.02, 0.01, 8, True), (0.025, 0.01, 8, False), (0.025, 0.01, 7, True)]
    cases += [(2**-8, 0.0, 8, True), (2**-7, 0.0, 8, False), (math.nan, 0.1, 8, False)]
    for ours, rounded, tokens, holds in cases:
        errors = {"entropy": {OURS: 0.0, BF16: 0.1}, "log-probability": {OURS: ours, BF16: rounded}}
        assert parity.group_holds({"tokens": tokens, "errors": errors}, BF16, torch.bfloat16) is holds


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
    for ranks in (2, 5):
        dealt = torch.cat([order[rank::ranks] for rank in range(ranks)])
        assert torch.equal(gradient_filter.by_probability(given, ranks), dealt)
    changed = gradient_filter.reordered(given, order)  # the vocabulary alone
    torch.testing.assert_close(probabilities(changed), probabilities(given)[:, order])
    assert torch.equal(order[changed.target], given.target) and torch.equal(changed.hidden, given.hidden)


def gradients(given: Problem, logits=lambda z: z, dlogits=lambda g: g) -> list[torch.Tensor]:
    """dX and dW of the mean, fp64, of rounded logits, or of a rounded gradient of them."""
    x, weight = given.hidden.double(), given.weight.double()
    z = logits(x @ weight.T)
    g = dlogits((z.softmax(1) - F.one_hot(given.target, len(weight))) / len(x))
    return [g @ weight, g.T @ x]


def errors_of(found: list[torch.Tensor], truth: list[torch.Tensor]) -> list[float]:
    """Of dX, of dW, and of dW's rows in the mean, without rows that are 0."""
    of_rows = [relative_error(*rows) for rows in zip(found[1], truth[1]) if rows[1].any()]
    return [*map(relative_error, found, truth), sum(of_rows) / len(of_rows)]


def to_bf16(values: torch.Tensor) -> torch.Tensor:
    return values.bfloat16().double()


def test_the_measures_of_a_small_snapshot(short, given, monkeypatch):
    values = (None, 1e-30, 2**-11, 0.2)
    monkeypatch.setattr(gradient_filter, "FILTERS", values)
    monkeypatch.setattr(problem, "BLOCK_BYTES", 8 * V * 70)  # blocks of 70 tokens
    filters = []

    def loss(*tensors, gradient_filter, **options):
        filters.append(gradient_filter)
        return linear_cross_entropy(*tensors, gradient_filter=gradient_filter, **options)

    monkeypatch.setattr(gradient_filter, "linear_cross_entropy", loss)
    with chosen_backend("torch"):
        truth, case = gradients(given), gradient_filter.measure(given.name, 2, ALONE)
    assert {*filters} == {*values} and case["step"] == 1 and case["dtype"] == "bfloat16"
    assert case["loss"] == pytest.approx(-probabilities(given)[range(N), given.target].log().mean().item())
    references = case["reference_errors"]
    for name, rounding in ROUNDINGS.items():
        rounded = gradients(given, **dict.fromkeys(rounding, to_bf16))
        for suffix, ends in ((", results not rounded", lambda t: t), ("", to_bf16)):
            expected = errors_of([ends(its) for its in rounded], truth)
            assert list(references[name + suffix].values()) == pytest.approx(expected, rel=1e-3)
    expected = errors_of([to_bf16(t) for t in truth], truth)
    assert list(references[EXACT].values()) == pytest.approx(expected, rel=1e-6)
    found = [(each["order"], each["gradient_filter"]) for each in case["results"]]
    assert found == [(order, value) for order in (NATURAL, BY_PROBABILITY) for value in values]
    for none, *filtered in (case["results"][:4], case["results"][4:]):
        for memory in BUDGETS:
            for name in ("dX", "dW", "dW rows"):
                exact = none[memory]["errors"][name]
                assert exact < 2 * references[EXACT][name]
                # The torch backend computes exact gradients.
                assert all(each[memory]["errors"][name] == exact for each in filtered)
            ratios = sorted(g / s for g, s in zip(none["gemm_only_seconds"], none[memory]["seconds"]))
            assert none[memory]["of_gemm_only"] == pytest.approx([sum(ratios) / 2, *ratios])


def test_rows_of_dw_that_are_0_do_not_count():
    truth = gradient_filter.Answers(torch.zeros(()), torch.ones(2, 3), torch.tensor([[3.0, 4.0], [0, 0], [0, 1]]), 0.0)
    found = [torch.ones(2, 3), torch.tensor([[3.0, 3.0], [1.0, 0.0], [0.0, 1.5]])]
    expected = {"dX": 0.0, "dW": (2.25 / 26) ** 0.5, "dW rows": (0.2 + 0.5) / 2}
    assert gradient_filter._errors(found, truth) == pytest.approx(expected)


def _measured_on(member: Member, path: str) -> dict:
    timing.OVER_RANKS[member.device.type] = 0.0, 1e-6
    gradient_filter.FILTERS = None, 2**-11
    team = Team(member.device, member.rank, member.ranks, member.group, member.group)
    with chosen_backend("torch"):
        return gradient_filter.measure(path, 1, team)


def test_ranks_have_the_errors_of_the_whole(worlds, short, given, device, monkeypatch):
    monkeypatch.setattr(gradient_filter, "FILTERS", (None, 2**-11))
    first, second = everywhere(worlds, device, 2, _measured_on, given.name)
    with chosen_backend("torch"):
        whole = gradient_filter.measure(given.name, 1, Team(torch.device(device)))
    assert first["tp"] == 2 and whole["tp"] == 1 and first["reference_errors"] == whole["reference_errors"]
    assert first == second
    for ours, of_whole in zip(first["results"], whole["results"]):
        for memory in BUDGETS if ours["gradient_filter"] is None else ():
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
    figures = tmp_path / "figures.json"
    command = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node=2", "--standalone", "-m"]
    command += ["benchmarks.gradient_filter", bad, good, "--device", "cpu", "--rounds", "1", "--json", str(figures)]
    run = ran(*command, cwd=tmp_path, env={"PYTHONPATH": str(ROOT), "PARALLEL_LCE_BACKEND": "torch"})
    assert run.stderr.count(f"error: {bad} has no tensor weight") == 1, run.stderr
    assert run.stdout.count(f"{good}: TP 2, N=40, V=60, D=16, bfloat16") == 1
    (case,) = json.loads(figures.read_text())["cases"]
    assert case["tp"] == 2 and len(case["results"]) == 2 * len(FILTERS)


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
        assert len(case["results"]) == 2 * len(FILTERS)
    row = next(line for line in said.out.splitlines() if line.startswith("| by probability") and "| 2^-11" in line)
    result = cases[0]["results"][8]
    assert (result["order"], result["gradient_filter"]) == (BY_PROBABILITY, 2**-11)
    for way in (result[memory] for memory in BUDGETS):
        assert f"{way['of_gemm_only'][0]:.3f} (" in row and f"{way['errors']['dX']:.2e}" in row
    speed, error = drawn[0].axes
    labels = [axis.get_legend_handles_labels()[1] for axis in (speed, error)]
    assert [len(each) for each in labels] == [10, 12] and {"bf16 logits, dX", "bf16 logits, dW"} <= set(labels[1])
    of_natural_and_saved = [case["results"][5]["saved"]["of_gemm_only"][0] for case in (cases[1], cases[0])]
    assert list(speed.lines[0].get_xdata()) == [9, 20]
    assert list(speed.lines[0].get_ydata()) == of_natural_and_saved
    pyplot.close(drawn[0])
