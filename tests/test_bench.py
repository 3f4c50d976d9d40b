"""The benchmarks on one device and over ranks: nothing wrong is timed, on whichever rank it is wrong; and each report's
figures are what they are called."""

import json
import math
from dataclasses import replace
from functools import partial
from pathlib import Path
from unittest import mock

import pytest
import torch
import torch.distributed as dist

pytest.importorskip("rich", reason="needs the benchmark's packages")
pytest.importorskip("safetensors", reason="needs the benchmark's packages")

from safetensors.torch import save_file

import parallel_lce
import torchtitan_training
from benchmarks import __main__ as command
from benchmarks import gradient_filter, losses, parity, same_bits, tune
from benchmarks.engine import measure, options, ours, peers, problem, snapshots, timing
from benchmarks.engine.accuracy import Judge, answers
from benchmarks.engine.peers import FORWARD_BACKWARD, GEMM_ONLY, ONE, OVERLAPPED, PASSES, RANKS, Peer, calls_of, named
from benchmarks.engine.problem import Problem, Shape, make_problem
from benchmarks.engine.team import Team
from benchmarks.gradient_filter import BUDGETS, BY_PROBABILITY, EXACT, FILTERS, NATURAL, ROUNDED_LOGITS
from benchmarks.parity import FP32_HEAD, OURS, random_problem
from cases import normal
from releases import ROOT
from tools import chosen_backend, everywhere, on_ranks, ran
from world import Member, launched

ALONE = Team(torch.device("cpu"))
TINY = Shape(64, 96, 16)


@pytest.fixture
def short(monkeypatch):
    """Hardly any time is spent on timing."""
    monkeypatch.setitem(timing.ALONE, "cpu", (0.0, 1e-6))


def problem_of(member: Member, sequence_parallel: bool) -> Problem:
    team = Team(member.device) if member.group is None else Team.of(member.ranks, member.device)
    return replace(make_problem(TINY, torch.float32, team), sequence_parallel=sequence_parallel)


# --- nothing wrong is timed ------------------------------------------------------------------------


@pytest.mark.parametrize("sequence_parallel", [False, True])
@on_ranks(2)
def test_the_baselines_form_both_gradients(member, sequence_parallel):
    given = problem_of(member, sequence_parallel)
    z = given.hidden.double() @ given.weight.double().T
    bare = z @ given.weight.double(), z.T @ given.hidden.double()
    summed = given.own(given.team.reduce(bare[0].clone()))
    for name, truths in ((GEMM_ONLY, bare), (OVERLAPPED, (summed, bare[1]))):
        for value, truth in zip(calls_of(named(name, RANKS), given)[FORWARD_BACKWARD](), truths):
            torch.testing.assert_close(value.double(), truth, rtol=1e-4, atol=1e-4)


def _one_row(factor: float):
    """Multiplies the largest row."""

    def change(gradient):
        gradient = gradient.clone()
        gradient[gradient.norm(dim=1).argmax()] *= factor
        return gradient

    return change


FAULTS = {  # name: (change of dW, how the reason begins)
    "none": (lambda g: g, ""),
    "wrong dW": (lambda g: 1.01 * g, "refused: dW error 1.0e-02, allowed"),
    "one wrong row": (_one_row(1.5), "refused: dW error "),
    "a row of NaN": (_one_row(math.nan), "refused: dW error nan"),
    "not built": (None, "failed: ImportError: no such library"),
}


def _planted(fault: str, group, sequence_parallel: bool):
    """Ours, on the last rank with a fault."""
    right = ours.loss("mean", None, group, sequence_parallel)
    if fault == "none" or (group is not None and dist.get_rank(group) == 0):
        return right
    if fault == "not built":
        raise ImportError("no such library\nat all")
    change, _ = FAULTS[fault]

    def wrong(x, weight, target):
        weight = weight.view_as(weight)
        if weight.requires_grad:
            weight.register_hook(change)
        return right(x, weight, target)

    return wrong


def _measured(member: Member, sequence_parallel: bool) -> dict:
    """What each rank says of peers of which one rank is wrong."""
    given = problem_of(member, sequence_parallel)
    planted = [Peer(fault, partial(_planted, fault), family="ours") for fault in FAULTS]
    planted.append(named(GEMM_ONLY, ONE))
    lengths = timing.ALONE if member.ranks == 1 else timing.OVER_RANKS
    lengths[member.device.type] = 0.0, 1e-9  # one call
    judge = Judge(given, *(answers(given, dtype) for dtype in (torch.float64, torch.float32)))
    return measure.measure(planted, judge, 2)


@pytest.mark.parametrize(("ranks", "sequence_parallel"), [(1, False), (2, True)])
def test_what_is_wrong_is_never_timed(ranks, sequence_parallel, worlds, device, monkeypatch):
    monkeypatch.setitem(timing.ALONE, device, (0.0, 1e-9))
    cell, *others = everywhere(worlds, device, ranks, _measured, sequence_parallel)
    mine = repr(cell)  # NaN equals itself in words
    assert all(repr(other) == mine for other in others)  # times, bytes and errors are those of the worst rank
    for entry, (_, words) in zip(cell["peers"], FAULTS.values()):
        refused = entry["refused"] or ""
        assert refused.startswith(words) and bool(refused) == bool(words), entry
        assert ("(on rank 1 of 2)" in refused) == (ranks > 1 and bool(words) and " error " not in words)
        assert all((kind in entry) == (not words) for kind in PASSES)
    right, wrong, row = cell["peers"][:3]
    assert all(len(right[kind]["seconds"]) == 2 and right[kind]["peak_bytes"] > 0 for kind in PASSES)
    assert wrong["errors"]["dW"] > 100 * right["errors"]["dW"] > 0  # a refused peer's errors are shown
    assert "dW row error" in row["refused"] and row["errors"]["dW row"] > row["errors"]["dW"]


# --- what is written -------------------------------------------------------------------------------


def assert_plausible(cell: dict) -> None:
    """Three rounds in float32, of ours and of the baselines."""
    entries = {entry["name"]: entry for entry in cell["peers"]}
    baselines = [GEMM_ONLY, *([OVERLAPPED] if cell["tp"] > 1 else [])]
    expected = [*options.DEFAULTS[RANKS, "cpu"].ours, *baselines]
    assert [*entries][: len(expected)] == expected
    parts = cell["tp"] if cell["sequence_parallel"] else 1
    n, d, rows = cell["n"], cell["d"], cell["v"] // cell["tp"]
    for name, entry in entries.items():
        assert entry["refused"] is None
        assert not entry["errors"] if name in baselines else entry["errors"]["dX"] < 1e-5
        for kind in PASSES:
            its = entry[kind]
            assert len(its["seconds"]) == 3
            for baseline in baselines:
                ratios = sorted(b / t for b, t in zip(entries[baseline][kind]["seconds"], its["seconds"]))
                assert measure.ratio(cell, entry, baseline, kind) == pytest.approx([ratios[1], ratios[0], ratios[2]])
        gradients = 4 * d * (n // parts + (0 if "main-grad" in name else rows))
        assert its["peak_bytes"] - its["beyond_gradients_bytes"] == gradients
    if not cell["sequence_parallel"]:
        assert entries[GEMM_ONLY][FORWARD_BACKWARD]["beyond_gradients_bytes"] == 4 * n * rows  # the logits alone


def _short(arguments: list[str]) -> None:
    timing.ALONE["cpu"] = timing.OVER_RANKS["cpu"] = 0.0, 1e-9  # one call
    assert command.main(arguments) == 0


ON_TWO = "--device cpu --rounds 3 --shape 64,256,16 --json".split()


@pytest.mark.parametrize("shell", [False, pytest.param(True, marks=pytest.mark.slow)])
def test_a_run_of_two_processes(shell, tmp_path):
    path = tmp_path / "new" / "r.json"
    if shell:
        for name in ("signal", "torch", "benchmarks"):
            # The user's own file, called like a module that Python, PyTorch and the benchmark import.
            (tmp_path / f"{name}.py").write_text("raise SystemExit('not this one')")
        torchrun = "--standalone", "--nproc-per-node", 2, "--"
        peers = "--peers", *options.DEFAULTS[RANKS, "cpu"].ours, GEMM_ONLY, OVERLAPPED  # without compiled ones
        done = ran("bash", ROOT / "launch" / "bench.sh", *torchrun, *peers, *ON_TWO, "new/r.json", cwd=tmp_path)
        assert done.returncode == 0, done.stderr[-3000:]
        printed = done.stdout
    else:
        printed = launched(2, _short, [*ON_TWO, str(path)])
    assert printed.count("TP 2, N=64, V=256, D=16, SP, float32") == 1  # not once per rank
    found = json.loads(path.read_text())
    assert [(c["tp"], c["sequence_parallel"]) for c in found["cells"]] == [(1, False), (2, False), (2, True)]
    for cell in found["cells"]:
        assert_plausible(cell)


@pytest.mark.slow
def test_torchtitans_loss_is_measured_beside_ours(tmp_path):
    arguments = "--device cpu --tp 2 --rounds 1 --shape 64,256,16 --peers ours-torchtitan torchtitan --json r.json"
    environment = {"PYTHONPATH": str(torchtitan_training.release())}
    done = ran("bash", ROOT / "launch" / "bench.sh", *arguments.split(), cwd=tmp_path, env=environment)
    assert done.returncode == 0, done.stderr[-3000:]
    for cell in json.loads((tmp_path / "r.json").read_text())["cells"]:
        assert [entry["refused"] for entry in cell["peers"]] == [None] * 4


@pytest.mark.parametrize("suite", ["host", "post"])
def test_a_suite(suite, short, tmp_path):
    path = tmp_path / "bench.json"
    arguments = ["--suite", suite, "--shape", "40,90,16", "--rounds", "3", "--json", str(path)]
    assert command.main(["--device", "cpu", *arguments]) == 0
    for entry in json.loads(path.read_text())["cells"][0]["peers"]:
        if entry["name"] == "verl":  # is missing
            continue
        judged = entry["name"] not in ("gemm-only", "ours-masked@all", "ours-replay")
        assert entry["refused"] is None and bool(entry["errors"]) == judged
        for kind in PASSES if suite == "host" else ():
            assert len(entry[kind]["host_seconds"]) == 3 and min(entry[kind]["host_seconds"]) > 0


def test_ours_refused_is_a_failure(short, monkeypatch, capsys):
    planted = replace(named("ours", ONE), build=lambda *_: _planted("one wrong row", None, False))
    monkeypatch.setattr(peers, "OURS", [planted])
    assert command.main("--device cpu --rounds 1 --shape 40,90,16 --peers ours@0".split()) == 1
    assert "ours@0: refused: dW" in capsys.readouterr().out


def assert_rows(rows: list[dict]) -> None:
    for row in rows:
        assert row["refused"] is None and len(row["seconds"]) == 2 and row["peak"] >= row["kept"] > 0
        assert row["error"] is None if row["way"].startswith(("products", "mean")) else row["error"] < 1e-5


@pytest.mark.slow
def test_distillation_is_measured(short, capsys):
    losses.main(["distillation", "--device", "cpu", "--shape", "20,50,8", "--rounds", "1"])
    printed = capsys.readouterr().out
    for way in ("dense, beta 0", "ours, mean, beta 0.5", "ours, none, beta 0.5", "products"):
        assert printed.count(f"| {way} ") == 1
    assert_rows(losses.measure_distillation(make_problem(TINY, torch.float32, ALONE), 2))


def test_a_loss_of_ones_own_is_measured(short, capsys):
    losses.main(["token_loss", "--device", "cpu", "--shape", "20,50,8", "--rounds", "1"])
    printed = capsys.readouterr().out
    for way in ("products", "token_loss", "token_loss@0", "token_statistics@0", "mean cross-entropy"):
        assert printed.count(f"| {way} ") == 1
    assert_rows(losses.measure_token_loss(make_problem(TINY, torch.float32, ALONE), 2))


def test_bits_that_differ_are_counted(capsys):
    same_bits.main(["--device", "cpu", "--shape", "24,60,8"])
    assert capsys.readouterr().out.count("gradients, a budget of") == 3
    x, w, target = same_bits.tensors(TINY, torch.float32, torch.device("cpu"))
    base, moved = same_bits.asked(x, w, target), same_bits.asked(x * torch.linspace(1, 2, len(x))[:, None], w, target)
    assert same_bits.count(base, base) == [0] * 6
    assert min(same_bits.count(moved, base)) > 50  # the first token is as it was
    assert same_bits.shards(500, 3) == {
        "TP 3, shards of 167": [167, 334, 500],
        "TP 3, the last shard of 240, others of 130": [130, 260, 500],
        "TP 3, the last shard of 166, others of 167": [167, 334, 500],
    }


def test_each_tile_that_is_measured_is_used():
    triton_forward = pytest.importorskip("parallel_lce.backends.triton_forward", reason="needs triton")
    x, weight, target = torch.ones(8, 16).bfloat16(), torch.ones(256, 16).bfloat16(), torch.ones(8, dtype=torch.int64)
    new = mock.patch.object(triton_forward, "new_window_partials", wraps=triton_forward.new_window_partials)
    with chosen_backend("triton"), new as made:
        for entries in (64, 128, 64):
            with tune.forced(tune.Tile(64, entries, 32, 4, 2), 2):
                parallel_lce.linear_cross_entropy(x, weight, target)
    assert [call.args[1] for call in made.call_args_list] == [4, 2, 4]


@pytest.mark.slow
def test_tiles_are_measured_on_the_interpreter(short):
    pytest.importorskip("triton", reason="needs triton")
    tiles = [tune.Tile(64, 64, 32, 4, 2), tune.Tile(64, 128, 32, 4, 2)]
    with chosen_backend("triton"):
        found = tune.tune(make_problem(Shape(70, 150, 16), torch.bfloat16, ALONE), 1, tiles, (2,))
    assert [*found] == ["forward", "saving forward", "forward + backward"]
    for bare, *rows in found.values():
        names = [f"{tile}, 2 row blocks a launch" for tile in tiles]
        assert bare["way"] == GEMM_ONLY and [(row["way"], row["refused"]) for row in rows] == [(n, None) for n in names]


# --- reports on snapshots of a training -------------------------------------------------------------

BF16 = "bf16 logits"


def written(path: Path, n=6, v=10, d=8, **changed) -> str:
    target = torch.randint(v, (n,), generator=torch.Generator().manual_seed(2))
    weight = normal(v, d, seed=1) * d**-0.5
    content = {"hidden": normal(n, d).bfloat16(), "weight": weight.bfloat16(), "target": target} | changed
    save_file({name: tensor for name, tensor in content.items() if tensor is not None}, path)
    return str(path)


def assert_parity(case: dict) -> None:
    its, rounded, head = (case["deviations"][way] for way in (OURS, BF16, FP32_HEAD))
    slack = 4 * torch.finfo(torch.float32).eps * max(1.0, case["max_sum_of_magnitudes"])
    # bf16 rounds relative to a logit, fp32 statistics relative to lse: less is between them where logits are near 0.
    much = 100 if case["max_abs_logit"] > 1 else 10
    assert its["largest"] <= 2 * head["largest"] + slack and much * its["largest"] < rounded["largest"]
    assert its["outside"] == 0 and 0.999 < its["smallest_ratio"] <= its["largest_ratio"] < 1.001
    assert its["entropy_largest"] <= 2 * head["entropy_largest"] + slack
    assert much / 10 * its["entropy_largest"] < rounded["entropy_largest"]
    assert case["holds"] and sum(group["tokens"] for group in case["groups"]) == case["n"]


def test_gradients_of_nearly_flat_logits_are_no_worse_than_those_of_rounded_ones(device):
    """Exponentials that are rounded to bf16 lose what the entropy's gradient is: dX is then 16 times as far off."""
    case = parity.measure(random_problem(Shape(200, 3000, 256), parity.DEVIATIONS[0], Team(torch.device(device))))
    (group,) = case["groups"]
    assert case["holds"] and group["tokens"] == 200
    assert group["errors"]["entropy"][OURS] < 1.2 * group["errors"]["entropy"][BF16] < 1e-2


@pytest.mark.parametrize("deviation", parity.DEVIATIONS[1:])
def test_ours_equals_an_fp32_head_on_random_inputs(deviation, device):
    case = parity.measure(random_problem(Shape(200, 3000, 256), deviation, Team(torch.device(device))))
    assert_parity(case)
    if deviation >= 5:
        assert case["deviations"][BF16]["outside"] > 0.1
    if deviation == 20:
        edges = [(group["low"], group["high"]) for group in case["groups"]]
        assert edges == [(0.1, 1.0), (1e-2, 0.1), (1e-3, 1e-2), (1e-4, 1e-3), (1e-5, 1e-4), (0.0, 1e-5)]


def test_the_report_on_log_probabilities(tmp_path, capsys):
    """A file that cannot be read does not end it."""
    bad, good = written(tmp_path / "bad [x]", weight=None), written(tmp_path / "good", 40, 300, 64)
    figures = tmp_path / "figures.json"
    assert parity.main([bad, good, *f"--device cpu --shape 40,90,16 --json {figures}".split()]) == 2
    said = capsys.readouterr()
    assert "bad [x] cannot be read: File does not contain tensor weight" in said.err
    case, *random = json.loads(figures.read_text())["cases"]
    assert len(random) == len(parity.DEVIATIONS) and case["name"] == good and case["holds"]
    assert f"{case['deviations'][OURS]['largest']:.1e}" in said.out


@pytest.mark.slow
def test_parity_of_a_trained_model(tmp_path):
    pytest.importorskip("tokenizers", reason="needs the training program's packages")
    pytest.importorskip("pydantic", reason="needs the training program's packages")
    tiny = ["model.hidden=64", "train.steps=20", "train.sequence=64", "text.max_bytes=300_000", "text.vocab_size=1024"]
    tiny += ["snapshots.steps=[5]", "snapshots.tokens=256", f"text.cache={tmp_path / 'cache'}", f"output={tmp_path}"]
    config = ["--config", ROOT / "configs" / "snapshots-cpu.yaml", *tiny]
    done = ran("bash", ROOT / "launch" / "train.sh", *config, cwd=tmp_path)
    assert done.returncode == 0, done.stdout + done.stderr
    files, figures = [str(tmp_path / f"step-{step}.safetensors") for step in (5, 20)], tmp_path / "figures.json"
    assert parity.main([*files, "--device", "cpu", "--shape", "40,90,16", "--json", str(figures)]) == 0
    cases = json.loads(figures.read_text())["cases"]
    for case in cases[:2]:
        assert_parity(case)
    assert cases[0]["max_abs_logit"] < cases[1]["max_abs_logit"]  # it has been trained


def test_a_wrong_result_fails_the_report(monkeypatch, capsys):
    """Gradients of sure tokens that are lost beside those of the other tokens."""
    right = parity.ours

    def lost(inputs):
        tops, found = parity.dense(inputs, torch.float64).tops, right(inputs)
        return found._replace(gradients=[dx.masked_fill(tops[:, None] > -1e-3, 0.0) for dx in found.gradients])

    monkeypatch.setattr(parity, "ours", lost)
    assert parity.main(["--device", "cpu", "--shape", "256,512,64"]) == 1
    said = capsys.readouterr().out
    assert said.count("FAILED") == 1 and "; dX is off where 1 - p is at most" in said


def test_the_report_on_gradient_filter(short, tmp_path, capsys, monkeypatch):
    N, V = 150, 300
    monkeypatch.setattr(problem, "BLOCK_BYTES", 8 * V * 70)  # blocks of 70 tokens
    paths = [written(tmp_path / name, N, V, 32) for name in ("step-20.safetensors", "other [x]")]
    bad, figures = written(tmp_path / "bad.safetensors", weight=None), tmp_path / "figures.json"
    with chosen_backend("torch"):  # 2 for a file that cannot be measured
        assert gradient_filter.main([bad, *paths, *f"--device cpu --rounds 2 --json {figures}".split()]) == 2
    monkeypatch.undo()
    assert f"error: {bad} cannot be read: File does not contain tensor weight" in capsys.readouterr().err
    cases = json.loads(figures.read_text())["cases"]
    assert [case["name"] for case in cases] == paths

    case, given = cases[0], snapshots.read(paths[0], ALONE)
    p = (given.hidden.double() @ given.weight.double().T).softmax(1)
    assert case["loss"] == pytest.approx(-p[range(N), given.target].log().mean().item())
    mean, order = p.mean(0), gradient_filter.by_probability(given)
    assert torch.equal(order.sort().values, torch.arange(V)) and (mean[order].diff() <= 1e-6 * mean[order][1:]).all()
    # The exact gradients, rounded: of a number at most 2^-9 of it, 2^-9 / sqrt(3) in the mean or less.
    references, names = case["reference_errors"], ("dX", "dW", "dW rows")
    assert all(2**-11 < references[EXACT][name] < 2**-9 for name in names)
    assert all(references[ROUNDED_LOGITS][name] > references[EXACT][name] for name in names)
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
