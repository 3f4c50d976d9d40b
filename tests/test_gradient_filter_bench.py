"""The report on gradient_filter: the order of the vocabulary, active tiles, errors, what is written and refused."""

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
pytest.importorskip("matplotlib", reason="needs the benchmark's packages")

from safetensors.torch import save_file

from cases import normal
from measures import relative_error
from parallel_lce.bench import accuracy, exactness, filtered, gradient_filter, sparsity, timing
from parallel_lce.bench.exactness import Inputs
from parallel_lce.bench.filtered import BUDGETS, BY_PROBABILITY, EXACT, NATURAL, ROUNDINGS, UNROUNDED, measure, step_of
from parallel_lce.bench.team import Team
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


def inputs(device="cpu", **changed) -> Inputs:
    return Inputs("made up", **{name: t.to(device) for name, t in (tensors() | changed).items()})


def probabilities(given: Inputs) -> torch.Tensor:
    """[N, V] fp64"""
    return (given.hidden.double() @ given.weight.double().T).softmax(1)


@pytest.fixture
def short(monkeypatch):
    """Hardly any time is spent on timing."""
    monkeypatch.setitem(timing.ALONE, "cpu", (0.0, 1e-6))


# --- the order of the vocabulary, and active tiles -----------------------------------------------------


def test_the_vocabulary_is_ordered_by_mean_probability(monkeypatch):
    monkeypatch.setattr(exactness, "BLOCK_BYTES", 8 * V * 7)  # blocks of 7 tokens
    given = inputs()
    mean = probabilities(given).mean(0)
    torch.testing.assert_close(sparsity.mean_probabilities(given).double(), mean, rtol=1e-5, atol=0)
    order = sparsity.by_probability(given)
    assert torch.equal(order.sort().values, torch.arange(V))
    assert (mean[order].diff() <= 1e-6 * mean[order][1:]).all()


def test_an_order_changes_the_vocabulary_alone():
    given, order = inputs(), torch.randperm(V, generator=torch.Generator().manual_seed(5))
    changed = sparsity.reordered(given, order)
    torch.testing.assert_close(probabilities(changed), probabilities(given)[:, order])
    assert torch.equal(order[changed.target], given.target)
    assert torch.equal(changed.hidden, given.hidden) and changed.name == given.name


@pytest.mark.parametrize("rows", [7, 200, N])
def test_active_tiles_are_those_with_a_large_probability_or_a_target(rows, monkeypatch):
    monkeypatch.setattr(exactness, "BLOCK_BYTES", 8 * V * rows)
    given = inputs()
    given = sparsity.reordered(given, sparsity.by_probability(given))
    p, found = probabilities(given), sparsity.tile_maxima(given)
    assert found.shape == (3, 1, 6)
    found = found[:, 0]
    for i in range(3):
        for j in range(6):
            tokens, entries = slice(128 * i, 128 * i + 128), slice(128 * j, 128 * j + 128)
            target = given.target[tokens]
            here = ((target >= entries.start) & (target < entries.stop)).any()
            expected = 1.0 if here else p[tokens, entries].max().item()
            assert found[i, j].item() == pytest.approx(expected, rel=1e-5)
    assert 0 < (found > 2**-10).double().mean() < (found > 2**-13).double().mean() < 1


# --- errors --------------------------------------------------------------------------------------------


def gradients(given: Inputs, logits=lambda z: z, dlogits=lambda g: g) -> list[torch.Tensor]:
    """dX and dW of the mean, fp64, of rounded logits, or of a rounded gradient of them."""
    x, weight = given.hidden.double(), given.weight.double()
    z = logits(x @ weight.T)
    g = dlogits((z.softmax(1) - F.one_hot(given.target, len(weight))) / len(x))
    return [g @ weight, g.T @ x]


def errors_of(found: list[torch.Tensor], truth: list[torch.Tensor]) -> list[float]:
    """Of dX, of dW, and of dW's rows in the mean."""
    of_rows = [relative_error(*rows) for rows in zip(found[1], truth[1])]
    return [*map(relative_error, found, truth), sum(of_rows) / len(of_rows)]


def to_bf16(values: torch.Tensor) -> torch.Tensor:
    return values.bfloat16().double()


@pytest.mark.parametrize("name", ROUNDINGS)
def test_answers_round_one_thing_alone(name, monkeypatch):
    monkeypatch.setattr(accuracy, "BLOCK_BYTES", 8 * V * 70)  # blocks of 70 tokens
    given = inputs()
    found = accuracy.answers(filtered._problem(given, ALONE), torch.float64, **ROUNDINGS[name])
    for its, expected in zip(filtered._gradients(found), gradients(given, **dict.fromkeys(ROUNDINGS[name], to_bf16))):
        assert relative_error(its, expected) < 1e-12


def test_rows_of_dw_that_are_0_do_not_count():
    truth = accuracy.Answers(torch.zeros(()), torch.ones(2, 3), torch.tensor([[3.0, 4.0], [0.0, 0.0], [0.0, 1.0]]), 0.0)
    found = [torch.ones(2, 3), torch.tensor([[3.0, 3.0], [1.0, 0.0], [0.0, 1.5]])]
    expected = {"dX": 0.0, "dW": (2.25 / 26) ** 0.5, "dW rows": (0.2 + 0.5) / 2}
    assert filtered._errors(found, truth) == pytest.approx(expected)
    found[1][1] = torch.nan
    assert filtered._errors(found, truth)["dW rows"] == pytest.approx(expected["dW rows"])
    truth.grad_weight[2] = torch.nan
    assert all(math.isnan(filtered._errors(found, truth)[name]) for name in ("dW", "dW rows"))


def test_the_measures_of_a_small_snapshot(short, monkeypatch):
    monkeypatch.setattr(filtered, "FILTERS", (None, 1e-30, 2**-11, 0.2))
    given = inputs()
    truth = gradients(given)
    measured = measure(given, 2, ALONE)
    assert measured.loss == pytest.approx(-probabilities(given)[range(N), given.target].log().mean().item())
    for name, rounding in ROUNDINGS.items():
        rounded = gradients(given, **dict.fromkeys(rounding, to_bf16))
        for suffix, ends in ((UNROUNDED, lambda t: t), ("", to_bf16)):
            expected = errors_of([ends(its) for its in rounded], truth)
            assert list(measured.references[name + suffix].values()) == pytest.approx(expected, rel=1e-3)
    expected = errors_of([to_bf16(t) for t in truth], truth)
    assert list(measured.references[EXACT].values()) == pytest.approx(expected, rel=1e-6)
    assert [(each.order, each.gradient_filter) for each in measured.results] == [
        (order, value) for order in (NATURAL, BY_PROBABILITY) for value in (None, 1e-30, 2**-11, 0.2)
    ]
    for order in (NATURAL, BY_PROBABILITY):
        none, tiny, usual, large = (each for each in measured.results if each.order == order)
        ids = torch.arange(V) if order == NATURAL else sparsity.by_probability(given)
        maxima = sparsity.tile_maxima(sparsity.reordered(given, ids)).flatten().tolist()
        for each in (tiny, usual, large):
            assert each.active == pytest.approx(sum(p > each.gradient_filter for p in maxima) / len(maxima))
        assert none.active == tiny.active == 1 and large.active <= usual.active
        for memory in BUDGETS:
            for name in ("dX", "dW", "dW rows"):
                exact = none.ways[memory].errors[name]
                assert exact < 2 * measured.references[EXACT][name]
                assert tiny.ways[memory].errors[name] == exact
                assert large.ways[memory].errors[name] >= usual.ways[memory].errors[name] >= 0.99 * exact
            ratios = sorted(g / s for g, s in zip(none.gemm_seconds, none.ways[memory].seconds))
            assert none.of_gemm_only(memory) == pytest.approx([sum(ratios) / 2, *ratios])
    in_order = measured.results[-1]
    assert in_order.active < 1 and in_order.ways["saved"].errors["dX"] > 3 * measured.references[EXACT]["dX"]
    assert measured.results[6].active < measured.results[2].active  # the order of probabilities empties tiles


def test_both_budgets_and_every_filter_are_asked_for(short, monkeypatch):
    """Recorded at the public function, which the report times."""
    import parallel_lce

    asked, real = [], parallel_lce.linear_cross_entropy
    before = {"reduction": "mean"}

    def recorded(*tensors, **options):
        asked.append((options["gradient_filter"], options["logits_budget"], (before | options)["reduction"]))
        return real(*tensors, **options)

    monkeypatch.setattr(parallel_lce, "linear_cross_entropy", recorded)
    measure(Inputs("", **tensors(20, 30, 8)), 1, ALONE)
    values = None, 2**-13, 2**-12, 2**-11, 2**-10
    assert set(asked) == {(value, budget, "mean") for value in values for budget in (1 << 40, 0)}


# --- over ranks ------------------------------------------------------------------------------------------


def test_entries_are_dealt_to_the_ranks_in_turn():
    given = inputs()
    order = sparsity.by_probability(given)
    for ranks in (2, 5):
        assert torch.equal(sparsity.by_probability(given, ranks), torch.cat([order[r::ranks] for r in range(ranks)]))


def test_active_tiles_of_ranks_are_those_of_their_shards():
    given = inputs()
    found = sparsity.tile_maxima(given, ranks=2)
    assert found.shape == (3, 2, 3)
    for rank in range(2):
        here = slice(rank * 350, rank * 350 + 350)
        p = probabilities(given)
        p[torch.arange(N), given.target] = 1.0
        expected = F.pad(p[:, here], (0, 34, 0, 84)).view(3, 128, 3, 128).amax((1, 3))
        torch.testing.assert_close(found[:, rank].double(), expected, rtol=1e-5, atol=0)


def _measured_on(member: Member, rounds: int) -> dict:
    timing.OVER_RANKS[member.device.type] = 0.0, 1e-6
    filtered.FILTERS = None, 2**-11
    team = Team(member.device, member.rank, member.ranks, member.group, member.group)
    with chosen_backend("torch"):
        return measure(inputs(member.device), rounds, team).as_dict()


def test_ranks_have_the_errors_of_the_whole(worlds, short, device, monkeypatch):
    monkeypatch.setattr(filtered, "FILTERS", (None, 2**-11))
    first, second = everywhere(worlds, device, 2, _measured_on, 1)
    with chosen_backend("torch"):
        whole = measure(inputs(device), 1, Team(torch.device(device))).as_dict()
    assert first["tp"] == 2 and whole["tp"] == 1 and first["reference_errors"] == whole["reference_errors"]
    for ours, theirs, of_whole in zip(first["results"], second["results"], whole["results"]):
        assert ours["order"] == of_whole["order"] and ours["gemm_only_seconds"] == theirs["gemm_only_seconds"]
        for memory in BUDGETS:
            assert ours[memory]["errors"] == theirs[memory]["errors"]
            if ours["gradient_filter"] is None:
                found, expected = ours[memory]["errors"], of_whole[memory]["errors"]
                assert [found[name] for name in ("dW", "dW rows")] == pytest.approx(
                    [expected[name] for name in ("dW", "dW rows")], rel=0.02
                )
                # A bf16 dX is summed over the ranks in bf16.
                assert expected["dX"] <= found["dX"] < 2 * expected["dX"]
    natural, in_order = first["results"][1], first["results"][3]
    assert in_order["active_tiles"] < natural["active_tiles"] <= 1


@pytest.mark.slow
def test_the_report_over_ranks(tmp_path):
    """torchrun's own start: one rank speaks, and what one cannot read all refuse."""
    (bad,), (good,) = written(tmp_path, "bad", weight=None), written(tmp_path, "good")
    figures = tmp_path / "figures.json"
    command = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node=2", "--standalone", "-m"]
    command += ["parallel_lce.bench.gradient_filter", bad, good, "--device", "cpu", "--rounds", "1"]
    unset = ("RANK", "WORLD_SIZE", "TRITON_INTERPRET")
    environment = {k: v for k, v in os.environ.items() if k not in unset} | {"PYTHONPATH": str(ROOT)}
    environment |= {"OMP_NUM_THREADS": "1", "PARALLEL_LCE_BACKEND": "torch"}
    run = subprocess.run(
        [*command, "--json", str(figures)], env=environment, cwd=tmp_path, capture_output=True, text=True, timeout=300
    )
    assert run.stderr.count(f"error: {bad} has no tensor weight") == 1, run.stderr
    assert run.stdout.count(f"{good}: TP 2, N=40, V=60, D=16, bf16") == 1
    (case,) = json.loads(figures.read_text())["cases"]
    assert case["tp"] == 2 and len(case["results"]) == 12


def test_a_vocabulary_that_ranks_cannot_share_evenly_is_refused():
    with pytest.raises(ValueError, match="a vocabulary of 700 entries cannot be shared by 3 ranks"):
        measure(inputs(), 1, Team(torch.device("cpu"), 0, 3))


# --- the command ---------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("name", "step"), [("a/step-50.safetensors", 50), ("step-last.safetensors", None), ("b/step-5/x.safetensors", None)]
)
def test_the_step_is_in_the_name(name, step):
    assert step_of(name) == step


def written(folder: Path, *names: str, **changed) -> list[str]:
    paths = [str(folder / f"{name}.safetensors") for name in names]
    for path in paths:
        save_file(
            {name: tensor for name, tensor in (tensors(40, 60, 16) | changed).items() if tensor is not None}, path
        )
    return paths


def test_the_report_writes_tables_json_and_a_picture(short, tmp_path, capsys):
    paths = written(tmp_path, "step-20", "other")
    figures, picture = tmp_path / "new" / "figures.json", tmp_path / "pictures" / "p.png"
    arguments = ["--device", "cpu", "--rounds", "3", "--json", str(figures), "--plot", str(picture)]
    assert gradient_filter.main([*paths, *arguments]) == 0
    said = capsys.readouterr().out
    assert picture.read_bytes().startswith(b"\x89PNG") and picture.stat().st_size > 10_000
    content = json.loads(figures.read_text())
    assert content["machine"]["torch"] == torch.__version__ and content["settings"] == {"rounds": 3}
    assert [(case["name"], case["step"]) for case in content["cases"]] == list(zip(paths, (20, None)))
    for case in content["cases"]:
        assert (case["n"], case["v"], case["d"], case["dtype"]) == (40, 60, 16, "bf16")
        assert f"{case['name']}: N=40, V=60, D=16, bf16, loss {case['loss']:.4f}" in said
        assert set(case["reference_errors"]) == {EXACT, *ROUNDINGS, *(name + UNROUNDED for name in ROUNDINGS)}
        assert all(set(errors) == {"dX", "dW", "dW rows"} for errors in case["reference_errors"].values())
        assert len(case["results"]) == 10
        for result in case["results"]:
            assert len(result["gemm_only_seconds"]) == 3
            assert 0 < result["active_tiles"] <= 1
            for memory in BUDGETS:
                way = result[memory]
                ratios = sorted(g / s for g, s in zip(result["gemm_only_seconds"], way["seconds"]))
                assert way["of_gemm_only"] == pytest.approx([ratios[1], ratios[0], ratios[2]])
                assert set(way["errors"]) == {"dX", "dW", "dW rows"}
    row = next(line for line in said.splitlines() if line.startswith("| by probability") and "| 2^-11" in line)
    result = content["cases"][0]["results"][8]
    assert (result["order"], result["gradient_filter"]) == (BY_PROBABILITY, 2**-11)
    for way in (result[memory] for memory in BUDGETS):
        assert f"{way['of_gemm_only'][0]:.3f} (" in row and f"{way['errors']['dX']:.2e}" in row


def test_the_picture_has_a_line_per_filter_in_each_panel(short, tmp_path, monkeypatch):
    """Lines go through the snapshots in the order of their steps, whatever the order of the files."""
    from matplotlib import pyplot

    from parallel_lce.bench.filter_plot import plot_over_steps

    cases = [measure(Inputs(f"a/step-{s}.safetensors", **tensors(20, 30, 8)), 1, ALONE).as_dict() for s in (9, 2)]
    figures = []
    monkeypatch.setattr(pyplot, "close", figures.append)
    assert plot_over_steps(tmp_path / "p.png", {"device": "a", "torch": "b"}, cases)
    monkeypatch.undo()
    speed, error = figures[0].axes
    labels = [axis.get_legend_handles_labels()[1] for axis in (speed, error)]
    pyplot.close(figures[0])
    assert [len(each) for each in labels] == [10, 12] and {"bf16 logits, dX", "bf16 logits, dW"} <= set(labels[1])
    lines = [line for line in speed.lines if len(line.get_xdata()) == 2 and line.get_marker() == "o"]
    assert all(list(line.get_xdata()) == [2, 9] for line in lines)
    expected = [case["results"][5]["saved"]["of_gemm_only"][0] for case in cases[::-1]]
    assert any(list(line.get_ydata()) == expected for line in lines)
    expected = [case["results"][7]["saved"]["errors"]["dW"] for case in cases[::-1]]
    assert any(list(line.get_ydata()) == expected for line in error.lines)


def test_what_cannot_be_measured_does_not_end_the_report(short, tmp_path, capsys):
    (bad,), (good,) = written(tmp_path, "bad", weight=None), written(tmp_path, "good [x]")
    picture = tmp_path / "p.png"
    arguments = ["--device", "cpu", "--rounds", "1", "--plot", str(picture)]
    assert gradient_filter.main([bad, good, *arguments]) == 2
    said = capsys.readouterr()
    assert f"error: {bad} has no tensor weight" in said.err and f"{good}: N=40, V=60, D=16" in said.out
    assert f"named step-STEP.safetensors: no {picture}" in said.out and not picture.exists()


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
    names = {"FILE": written(tmp_path, "a")[0], "FOLDER": str(tmp_path)}
    with pytest.raises(SystemExit) as refusal:
        gradient_filter.main([names.get(word, word) for word in arguments])
    assert refusal.value.code == 2 and words.replace("FOLDER", names["FOLDER"]) in capsys.readouterr().err
