"""The report on gradient_filter: the order of the vocabulary, errors, what is written and refused."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F

pytest.importorskip("rich", reason="needs the benchmark's packages")
pytest.importorskip("safetensors", reason="needs the benchmark's packages")
pytest.importorskip("matplotlib", reason="needs the benchmark's packages")

from safetensors.torch import save_file

from benchmarks import gradient_filter, problem, snapshots, timing
from benchmarks.gradient_filter import BUDGETS, BY_PROBABILITY, EXACT, FILTERS, NATURAL, ROUNDINGS, measure
from benchmarks.problem import Problem
from benchmarks.team import NotMeasured, Team
from cases import normal
from measures import relative_error
from parallel_lce import linear_cross_entropy
from tools import chosen_backend, everywhere
from world import Member

ALONE = Team(torch.device("cpu"))
ROOT = Path(__file__).resolve().parent.parent
N, V, D = 300, 700, 32


def tensors(n=N, v=V, d=D, steepness=12.0) -> dict[str, torch.Tensor]:
    """Logits fall over a random order of the vocabulary, so that many tiles are nearly empty in the order of their
    probabilities, and few in the natural one. Targets are probable entries."""
    place = torch.randperm(v, generator=torch.Generator().manual_seed(3))
    hidden, weight = normal(n, d), normal(v, d, seed=1) * d**-0.5
    hidden[:, 0], weight[:, 0] = 1.0, -steepness * place / v
    target = place.argsort()[: max(1, v // 20)].repeat(n)[:n]
    return {"hidden": hidden.bfloat16(), "weight": weight.bfloat16(), "target": target}


def written(folder: Path, name: str, sizes=(40, 60, 16), **changed) -> str:
    content = {key: tensor for key, tensor in (tensors(*sizes) | changed).items() if tensor is not None}
    save_file(content, folder / f"{name}.safetensors")
    return str(folder / f"{name}.safetensors")


def probabilities(given: Problem) -> torch.Tensor:
    """[N, V] fp64"""
    return (given.hidden.double() @ given.weight.double().T).softmax(1)


@pytest.fixture
def short(monkeypatch):
    """Hardly any time is spent on timing."""
    monkeypatch.setitem(timing.ALONE, "cpu", (0.0, 1e-6))


@pytest.fixture
def given(tmp_path) -> Problem:
    return snapshots.read(written(tmp_path, "step-1", (N, V, D)), ALONE)


# --- the order of the vocabulary -----------------------------------------------------------------------


def test_the_vocabulary_is_ordered_by_mean_probability_and_dealt_to_the_ranks(given, monkeypatch):
    monkeypatch.setattr(problem, "BLOCK_BYTES", 8 * V * 7)  # blocks of 7 tokens
    mean, order = probabilities(given).mean(0), gradient_filter.by_probability(given)
    assert torch.equal(order.sort().values, torch.arange(V))
    assert (mean[order].diff() <= 1e-6 * mean[order][1:]).all()
    for ranks in (2, 5):
        dealt = torch.cat([order[rank::ranks] for rank in range(ranks)])
        assert torch.equal(gradient_filter.by_probability(given, ranks), dealt)


def test_an_order_changes_the_vocabulary_alone(given):
    order = torch.randperm(V, generator=torch.Generator().manual_seed(5))
    changed = gradient_filter.reordered(given, order)
    torch.testing.assert_close(probabilities(changed), probabilities(given)[:, order])
    assert torch.equal(order[changed.target], given.target) and torch.equal(changed.hidden, given.hidden)


# --- errors --------------------------------------------------------------------------------------------


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
    monkeypatch.setattr(gradient_filter, "FILTERS", (None, 1e-30, 2**-11, 0.2))
    monkeypatch.setattr(problem, "BLOCK_BYTES", 8 * V * 70)  # blocks of 70 tokens
    filters = []

    def loss(*tensors, gradient_filter, **options):
        filters.append(gradient_filter)
        return linear_cross_entropy(*tensors, gradient_filter=gradient_filter, **options)

    monkeypatch.setattr(gradient_filter, "linear_cross_entropy", loss)
    with chosen_backend("torch"):
        truth, case = gradients(given), measure(given.name, 2, ALONE)
    assert {*filters} == {*gradient_filter.FILTERS}
    assert case["step"] == 1 and case["dtype"] == "bfloat16"
    assert case["loss"] == pytest.approx(-probabilities(given)[range(N), given.target].log().mean().item())
    references = case["reference_errors"]
    for name, rounding in ROUNDINGS.items():
        rounded = gradients(given, **dict.fromkeys(rounding, to_bf16))
        for suffix, ends in ((", results not rounded", lambda t: t), ("", to_bf16)):
            expected = errors_of([ends(its) for its in rounded], truth)
            assert list(references[name + suffix].values()) == pytest.approx(expected, rel=1e-3)
    expected = errors_of([to_bf16(t) for t in truth], truth)
    assert list(references[EXACT].values()) == pytest.approx(expected, rel=1e-6)
    assert [(each["order"], each["gradient_filter"]) for each in case["results"]] == [
        (order, value) for order in (NATURAL, BY_PROBABILITY) for value in (None, 1e-30, 2**-11, 0.2)
    ]
    for none, tiny, usual, large in (case["results"][:4], case["results"][4:]):
        for memory in BUDGETS:
            for name in ("dX", "dW", "dW rows"):
                exact = none[memory]["errors"][name]
                assert exact < 2 * references[EXACT][name]
                # The torch backend computes exact gradients.
                assert all(each[memory]["errors"][name] == exact for each in (tiny, usual, large))
            ratios = sorted(g / s for g, s in zip(none["gemm_only_seconds"], none[memory]["seconds"]))
            assert none[memory]["of_gemm_only"] == pytest.approx([sum(ratios) / 2, *ratios])


def test_rows_of_dw_that_are_0_do_not_count():
    truth = gradient_filter.Answers(torch.zeros(()), torch.ones(2, 3), torch.tensor([[3.0, 4.0], [0, 0], [0, 1]]), 0.0)
    found = [torch.ones(2, 3), torch.tensor([[3.0, 3.0], [1.0, 0.0], [0.0, 1.5]])]
    expected = {"dX": 0.0, "dW": (2.25 / 26) ** 0.5, "dW rows": (0.2 + 0.5) / 2}
    assert gradient_filter._errors(found, truth) == pytest.approx(expected)


# --- over ranks ------------------------------------------------------------------------------------------


def _measured_on(member: Member, path: str) -> dict:
    timing.OVER_RANKS[member.device.type] = 0.0, 1e-6
    gradient_filter.FILTERS = None, 2**-11
    team = Team(member.device, member.rank, member.ranks, member.group, member.group)
    with chosen_backend("torch"):
        return measure(path, 1, team)


def test_ranks_have_the_errors_of_the_whole(worlds, short, given, device, monkeypatch):
    monkeypatch.setattr(gradient_filter, "FILTERS", (None, 2**-11))
    first, second = everywhere(worlds, device, 2, _measured_on, given.name)
    with chosen_backend("torch"):
        whole = measure(given.name, 1, Team(torch.device(device)))
    assert first["tp"] == 2 and whole["tp"] == 1 and first["reference_errors"] == whole["reference_errors"]
    assert first == second
    for ours, of_whole in zip(first["results"], whole["results"]):
        for memory in BUDGETS if ours["gradient_filter"] is None else ():
            found, expected = ours[memory]["errors"], of_whole[memory]["errors"]
            for name in ("dW", "dW rows"):
                assert found[name] == pytest.approx(expected[name], rel=0.02)
            assert expected["dX"] <= found["dX"] < 2 * expected["dX"]  # a bf16 dX is summed over the ranks in bf16


@pytest.mark.slow
def test_the_report_over_ranks(tmp_path):
    """torchrun's own start: one rank speaks, and what one cannot read all refuse."""
    bad, good = written(tmp_path, "bad", weight=None), written(tmp_path, "good")
    figures = tmp_path / "figures.json"
    command = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node=2", "--standalone", "-m"]
    command += ["benchmarks.gradient_filter", bad, good, "--device", "cpu", "--rounds", "1", "--json", str(figures)]
    unset = ("RANK", "WORLD_SIZE", "TRITON_INTERPRET")
    environment = {k: v for k, v in os.environ.items() if k not in unset} | {"PYTHONPATH": str(ROOT)}
    environment |= {"OMP_NUM_THREADS": "1", "PARALLEL_LCE_BACKEND": "torch"}
    run = subprocess.run(command, env=environment, cwd=tmp_path, capture_output=True, text=True, timeout=300)
    assert run.stderr.count(f"error: {bad} has no tensor weight") == 1, run.stderr
    assert run.stdout.count(f"{good}: TP 2, N=40, V=60, D=16, bfloat16") == 1
    (case,) = json.loads(figures.read_text())["cases"]
    assert case["tp"] == 2 and len(case["results"]) == 2 * len(FILTERS)


def test_a_vocabulary_that_ranks_cannot_share_evenly_is_refused(given, monkeypatch):
    monkeypatch.setattr(Team, "agree", lambda self, work: work())
    with pytest.raises(NotMeasured, match="a vocabulary of 700 entries cannot be shared by 3 ranks"):
        measure(given.name, 1, Team(torch.device("cpu"), 0, 3))


# --- the command ---------------------------------------------------------------------------------------


def test_the_report_writes_tables_json_and_a_picture(short, tmp_path, capsys, monkeypatch):
    """Lines go through the snapshots in the order of their steps, whatever the order of the files."""
    from matplotlib import pyplot

    drawn = []
    monkeypatch.setattr(pyplot, "close", drawn.append)
    paths = [written(tmp_path, name) for name in ("step-20", "step-9", "other [x]")]
    bad = written(tmp_path, "bad", weight=None)
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


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ([], "no file is given, and at least one is needed"),
        (["none.safetensors"], "no such file: none.safetensors"),
        (["FILE", "--rounds", "0"], "--rounds must be at least 1, got 0"),
        (["FILE", "--plot", "p.foo"], "--plot: the suffix must be one of "),
        (["FILE", "--json", "FOLDER"], "FOLDER is a folder"),
    ],
)
def test_a_bad_command_line_says_why(arguments, words, tmp_path, capsys):
    names = {"FILE": written(tmp_path, "a"), "FOLDER": str(tmp_path)}
    with pytest.raises(SystemExit) as refusal:
        gradient_filter.main([names.get(word, word) for word in arguments])
    assert refusal.value.code == 2 and words.replace("FOLDER", names["FOLDER"]) in capsys.readouterr().err
