"""The benchmark on one device: what a command line measures, that nothing wrong is timed, and what it writes."""

from __future__ import annotations

import json
import math

import pytest
import torch
import torch.nn.functional as F

pytest.importorskip("rich", reason="needs the benchmark's packages")

from benchmarks import __main__ as command
from benchmarks import distillation, measure, options, peers, problem, timing, tune
from benchmarks.accuracy import Judge, answers
from benchmarks.libraries import torch_loss
from benchmarks.peers import ALL, ANY, CPU_AND_CUDA, FORWARD, FORWARD_BACKWARD, ONE, PASSES, Peer
from benchmarks.problem import IGNORE_INDEX, Shape, make_problem
from benchmarks.report import NONE, speaker
from benchmarks.tables import cell_table, overview
from benchmarks.team import NotMeasured, Team
from tools import chosen_backend

MIB = 2**20
ALONE = Team(torch.device("cpu"))
TINY = Shape(40, 90, 16)


@pytest.fixture(autouse=True)
def short(monkeypatch):
    """Hardly any time is spent on timing."""
    monkeypatch.setitem(timing.ALONE, "cpu", (0.0, 1e-6))


def a_problem(shape=TINY, dtype=torch.float32, seed=0):
    return make_problem(shape, dtype, ALONE, seed)


def judge_of(problem) -> Judge:
    return Judge(problem, *(answers(problem, dtype) for dtype in (torch.float64, problem.hidden.dtype)))


def rows_of(table, capsys) -> list[list[str]]:
    capsys.readouterr()
    speaker()(table)
    lines = [line for line in capsys.readouterr().out.splitlines() if line.startswith("|")]
    return [[cell.strip() for cell in line.strip("|").split("|")] for line in lines if "---" not in line]


# --- what a command line measures ------------------------------------------------------------------


def chosen(*arguments) -> list[str]:
    return [peer.name for peer in options.parse_arguments(["--device", "cpu", *arguments]).chosen]


def test_every_suite_measures_peers_that_exist():
    for name, suite in options.SUITES.items():
        expected = [*suite.ours, "gemm-only", *(suite.others if suite.others is not None else ["torch"])]
        found = chosen("--suite", name)
        # in the order of the table; what is not installed here is left out
        assert [peer for peer in found if peer in expected] == [peer for peer in expected if peer in found]
        assert {*suite.ours, "gemm-only"} <= {*found}
    assert chosen("--suite", "lean") == ["ours-per-token@0", "gemm-only"]


def test_options_override_the_suite():
    found = options.parse_arguments(["--device", "cpu", "--suite", "bars", "--shape", "3,5,7", "--rounds", "2"])
    assert found.shapes == [Shape(3, 5, 7)] and found.rounds == 2
    names = chosen("--suite", "bars", "--peers", "torch", "ours", "ours-per-token@0")
    assert names == ["ours", "ours-per-token@0", "gemm-only", "torch"]
    assert [peers.parse_budget(t) for t in ("512MiB", "3 kib", "7", "all")] == [512 * MIB, 3072, 7, ALL]


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["--suite", "nothing"], "invalid choice"),
        (["--shape", "1,2"], "three positive numbers N,V,D below 2^31, got '1,2'"),
        (["--shape", "1,x,2"], "three positive numbers N,V,D below 2^31, got '1,x,2'"),
        (["--peers", "ours@5 tons"], "KiB, MiB or GiB, or all, got '5 tons'"),
        (["--shape", f"1,2,{2**31}"], "three positive numbers N,V,D below 2^31, got '1,2,2147483648'"),
        (["--tp", "2"], "--tp must lie in 1 to 1, the number of ranks, got [2]"),
        (["--rounds", "0"], "--rounds must be at least 1, got 0"),
        (["--plot", "p.foo"], "--plot: the suffix must be one of "),
        (["--peers", "nobody"], "no such peer: nobody"),
        (["--peers", "gone"], "cannot run here: gone (no module no_such_module.of_mine)"),
    ],
)
def test_a_bad_command_line_says_why(arguments, words, monkeypatch, capsys):
    gone = Peer("gone", ANY, CPU_AND_CUDA, None, needs="no_such_module.of_mine")
    monkeypatch.setattr(peers, "OTHERS", (*peers.OTHERS, gone))
    with pytest.raises(SystemExit) as refusal:
        command.main(["--device", "cpu", *arguments])
    assert refusal.value.code == 2 and words in capsys.readouterr().err


# --- nothing wrong is timed ------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("dtype", "rows", "rtol"), [(torch.float64, 7, 1e-12), (torch.float32, 8, 1e-5), (torch.bfloat16, 8, 1e-2)]
)
def test_the_truth_and_the_yardstick_are_torch_in_blocks(dtype, rows, rtol, monkeypatch):
    monkeypatch.setattr(problem, "BLOCK_BYTES", 8 * 90 * rows)
    given = a_problem(dtype=torch.float32 if dtype == torch.float64 else dtype, seed=2)
    given.target[8:16] = IGNORE_INDEX  # a block of 8 of which no token counts
    x, weight = (t.to(dtype).requires_grad_() for t in (given.x, given.weight))
    z = F.linear(x, weight)
    sums = torch.promote_types(dtype, torch.float32)
    loss = F.cross_entropy(z.to(sums), given.target, ignore_index=IGNORE_INDEX)
    loss.backward()
    found = answers(given, dtype)
    assert found.largest_logit == pytest.approx(z.abs().max().item(), rel=rtol)
    for value, expected in zip(found, (loss.detach(), x.grad, weight.grad)):
        torch.testing.assert_close(value, expected, rtol=rtol, atol=1e-8 if rtol > 1e-8 else 1e-15)


class Faulty(torch.autograd.Function):
    """The right loss times `loss`, the right gradients but for one row of dW times `row`; None is no gradient."""

    @staticmethod
    def forward(ctx, x, weight, target, loss, row):
        ctx.save_for_backward(x, weight, target)
        ctx.row = row
        return loss * torch_loss(x, weight, target)

    @staticmethod
    def backward(ctx, upstream):
        x, weight, target = ctx.saved_tensors
        with torch.enable_grad():
            leaves = x.detach().requires_grad_(), weight.detach().requires_grad_()
            grad_x, grad_weight = torch.autograd.grad(torch_loss(*leaves, target), leaves, upstream)
        if ctx.row is None:
            return grad_x, None, None, None, None
        grad_weight[int(target[target >= 0][0])] *= ctx.row
        return grad_x, grad_weight, None, None, None


def raising(x, weight, target):
    raise NotImplementedError("of no use here\nat all")


def raising_later():
    calls = []

    def loss(x, weight, target):
        calls.append(1)
        if len(calls) > 10:  # a check, a measurement of memory and three first readings, of two passes each
            raise RuntimeError("out of something")
        return torch_loss(x, weight, target)

    return loss


def faulty(loss, row):
    return lambda x, weight, target: Faulty.apply(x, weight, target, loss, row)


FAULTS = {
    "right": (faulty(1.0, 1.0), ""),
    "wrong loss": (faulty(1.001, 1.0), "refused: loss error 1.0e-03, allowed"),
    "NaN": (faulty(math.nan, 1.0), "refused: loss error nan"),
    "one wrong row": (faulty(1.0, 1.5), "dW row error"),
    "a row of NaN": (faulty(1.0, math.nan), "dW error nan"),
    "no dW": (faulty(1.0, None), "refused: dW is None"),
    "raises": (raising, "failed: NotImplementedError: of no use here"),
    "raises later": (raising_later(), "failed: RuntimeError: out of something"),
}


def test_what_is_wrong_is_shown_and_never_timed(monkeypatch, capsys):
    monkeypatch.setattr(measure, "peak_memory", lambda call, device: (call() is None, 0))
    monkeypatch.setattr(timing, "clock", lambda call, *_: (call(), 0.5)[1])
    all_peers = [Peer(name, ANY, CPU_AND_CUDA, lambda *_, loss=loss: loss) for name, (loss, _) in FAULTS.items()]
    all_peers.append(peers.named("gemm-only", ONE))
    cell = measure.measure(all_peers, judge_of(a_problem()), 2)
    rows = {row[0]: row for row in rows_of(cell_table(cell), capsys)}
    for entry, (_, words) in zip(cell["peers"], FAULTS.values()):
        assert words in (entry["refused"] or "") and bool(words) == bool(entry["refused"])
        assert (FORWARD in entry) == (FORWARD_BACKWARD in entry) == (not words)
        if words:
            assert rows[f"{entry['name']}, {entry['refused'].split(':')[0]}"][2:10] == [NONE] * 8
    errors = cell["peers"][3]["errors"]
    assert errors["dW row"] > errors["dW"] > 0  # a refused peer's errors are shown
    assert rows["gemm-only"][2:4] == ["500 (500–500)", "1.000"]


def test_main_grad_takes_dw_and_is_no_memory_of_the_call():
    given = a_problem(Shape(64, 4096, 32), torch.bfloat16)
    strategies = [peers.named(name, ONE) for name in ("ours-main-grad@0", "ours-per-token@0")]
    added, returned = measure.measure(strategies, judge_of(given), 1)["peers"]
    both = [entry[FORWARD_BACKWARD] for entry in (added, returned)]
    sizes = [its["peak_bytes"] - its["beyond_gradients_bytes"] for its in both]
    assert sizes == [given.x.nbytes, given.x.nbytes + given.weight.nbytes]
    assert both[0]["peak_bytes"] < both[1]["peak_bytes"]


# --- what is written -------------------------------------------------------------------------------


def run(tmp_path, *arguments):
    """(exit status, JSON) of a command."""
    path = tmp_path / "new" / "bench.json"
    status = command.main(["--device", "cpu", "--rounds", "3", "--json", str(path), *arguments])
    return status, json.loads(path.read_text())


def test_a_run_writes_tables_json_and_a_picture(tmp_path, capsys):
    picture = tmp_path / "bench.png"
    shapes = ["--shape", "40,90,16", "--shape", "33,70,8"]
    status, found = run(tmp_path, "--suite", "bars", *shapes, "--plot", str(picture))
    assert status == 0 and picture.read_bytes().startswith(b"\x89PNG")
    assert found["machine"]["torch"] == torch.__version__ and found["settings"]["suite"] == "bars"
    assert [(cell["n"], cell["v"], cell["d"]) for cell in found["cells"]] == [(40, 90, 16), (33, 70, 8)]
    printed = capsys.readouterr().out
    assert printed.count("| ours-main-grad@512MiB ") == 2 and printed.count("| N=40, V=90, D=16 ") == 1
    for cell in found["cells"]:
        entries = {entry["name"]: entry for entry in cell["peers"]}
        assert [*entries][:6] == [*options.SUITES["bars"].ours, "gemm-only", "torch"]
        gradients = 4 * cell["d"] * (cell["n"] + cell["v"])
        for name, entry in entries.items():
            assert entry["refused"] is None and (name == "gemm-only" or entry["errors"]["dX"] < 1e-5)
            for kind in PASSES:
                its, bare = entry[kind], entries["gemm-only"][kind]["seconds"]
                assert len(its["seconds"]) == 3 and its["seconds_min"] <= its["seconds_median"] <= its["seconds_max"]
                ratios = sorted(b / t for b, t in zip(bare, its["seconds"]))
                assert its["of_gemm_only"] == its["of_overlapped"] == pytest.approx([ratios[1], ratios[0], ratios[2]])
            mine = gradients - 4 * cell["d"] * cell["v"] if "main-grad" in name else gradients
            both = entry[FORWARD_BACKWARD]
            assert both["peak_bytes"] - both["beyond_gradients_bytes"] == mine


def test_the_host_suite_has_the_hosts_time(tmp_path, capsys):
    _, found = run(tmp_path, "--suite", "host", "--shape", "40,90,16", "--peers", "ours", "ours-statistics", "torch")
    for entry in found["cells"][0]["peers"]:
        assert entry["refused"] is None
        assert all(len(entry[kind]["host_seconds"]) == 3 and min(entry[kind]["host_seconds"]) > 0 for kind in PASSES)
    assert "N=40, V=90, D=16, float32: the host" in capsys.readouterr().out


@pytest.mark.gpu
def test_the_host_suite_profiles_on_a_gpu(tmp_path, capsys):
    path = tmp_path / "host.json"
    arguments = ["--device", "cuda", "--suite", "host", "--shape", "256,512,128", "--peers", "ours", "--rounds", "1"]
    assert command.main([*arguments, "--json", str(path)]) == 0
    ours, bare = json.loads(path.read_text())["cells"][0]["peers"]
    assert 3 <= bare[FORWARD_BACKWARD]["profile"]["operations"] < 10
    assert ours[FORWARD_BACKWARD]["profile"]["operations"] > ours[FORWARD]["profile"]["operations"] >= 1
    assert "ours, fwd+bwd:\n" in capsys.readouterr().out


def test_what_post_training_asks_for_is_measured(tmp_path):
    status, found = run(tmp_path, "--suite", "post", "--shape", "40,90,16")
    for entry in found["cells"][0]["peers"]:
        judged = entry["name"] not in ("gemm-only", "ours-masked@all", "ours-replay")
        assert entry["refused"] is None and bool(entry["errors"]) == judged


def test_ours_refused_is_a_failure(monkeypatch, tmp_path, capsys):
    monkeypatch.setitem(peers.OURS, "ours", (ANY, lambda *_: faulty(1.0, 1.5)))
    status, found = run(tmp_path, "--shape", "40,90,16", "--peers", "ours@0")
    assert status == 1 and "dW row error" in found["cells"][0]["peers"][0]["refused"]
    assert "ours@0: refused: dW" in capsys.readouterr().out


def test_the_overview_names_the_fastest_with_a_gradient_per_token(capsys):
    def entry(name, upstream, family, seconds):
        its = {"seconds": [seconds] * 3, "seconds_median": seconds, "beyond_gradients_bytes": 3 * MIB}
        return {"name": name, "upstream": upstream, "family": family} | dict.fromkeys(PASSES, its)

    entries = [entry("ours", ANY, "ours", 8.0), entry("gemm-only", ANY, "gemm-only", 6.0)]
    entries += [entry("torch", ANY, "other", 12.0), entry("liger", "scalar", "other", 2.0)]
    columns, row = rows_of(overview([{"problem": "some", "tp": 1, "peers": entries}]), capsys)
    assert columns == ["problem", "of overlapped", "of GEMM-only", "forward of GEMM-only"] + [
        "torch ×",
        "liger ×",
        "the fastest ×",
        "MiB",
    ]
    assert row == ["some", *["0.750 (0.750–0.750)"] * 3, "1.50", "0.25", "1.50 (torch)", "3.0"]


# --- the other reports -----------------------------------------------------------------------------


def test_distillation_is_measured(capsys):
    arguments = ["--device", "cpu", "--shape", "20,50,8", "--teacher", "16", "--beta", "0", "0.5", "--rounds", "1"]
    distillation.main(arguments)
    printed = capsys.readouterr().out
    for way in ("dense, beta 0", "ours, mean, beta 0.5", "ours, none, beta 0.5", "products"):
        assert printed.count(f"| {way} ") == 1
    for _, seconds, memory, error in distillation.measure(ALONE, TINY, 16, torch.float32, [0.0, 0.5, 1.0], 2):
        assert len(seconds) == 2 and memory > 0 and (error is None or error < 1e-5)


def test_tiles_are_measured_on_the_interpreter():
    pytest.importorskip("triton", reason="needs triton")
    tiles = [tune.Tile(64, 64, 32, 4, 2), tune.Tile(64, 128, 32, 4, 2)]
    with chosen_backend("triton"):
        found = tune.tune(a_problem(Shape(70, 150, 16), torch.bfloat16), 1, tiles, (2,))
    assert [*found] == [(tile, 2, use) for tile in tiles for use in ("forward", "saving forward", "forward + backward")]
    assert all(speed > 0 for speed in found.values())


def test_a_wrong_form_is_refused():
    judge = judge_of(a_problem())
    outputs = judge.truth.loss, judge.truth.grad_x.float(), judge.truth.grad_weight.float()
    assert set(judge.check(outputs[0], outputs)) == {"loss", "dX", "dX row", "dW", "dW row"}
    for wrong in (outputs[2].double(), outputs[2][:-1]):
        with pytest.raises(NotMeasured, match=r"refused: dW is \[\d+, 16\], torch.float\d\d, expected \[90, 16\]"):
            judge.check(outputs[0], (*outputs[:2], wrong))
