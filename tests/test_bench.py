"""The benchmarks: nothing wrong is timed, on whichever rank it is wrong; each report's figures are what they say."""

import json
import math
import sys
from dataclasses import replace
from functools import partial
from types import ModuleType, SimpleNamespace

import pytest
import torch
import torch.distributed as dist

pytest.importorskip("rich", reason="needs the benchmark's packages")
pytest.importorskip("safetensors", reason="needs the benchmark's packages")

import torchtitan_standin
from benchmarks import __main__ as command
from benchmarks import doors
from benchmarks.engine import options, ours, timing
from benchmarks.engine.accuracy import Judge, answers
from benchmarks.engine.cells import measure_cell
from benchmarks.engine.peers import FORWARD_BACKWARD, GEMM_ONLY, ONE, OVERLAPPED, PASSES, RANKS, Peer, calls_of, named
from benchmarks.engine.problem import Problem, Shape, make_problem
from benchmarks.engine.team import Team
from parallel_lce.backends import torch_backend
from parallel_lce.transformers import LogitsWarning
from tools import counted_forwards, everywhere, on_ranks
from transformers_standin import CausalLM
from world import Member

TINY = Shape(64, 96, 16)


@pytest.fixture
def short(monkeypatch):
    monkeypatch.setitem(timing.LENGTHS, "cpu", (0.0, 1e-6))


def problem_of(member: Member, sequence_parallel: bool) -> Problem:
    team = Team(member.device) if member.group is None else Team.of(member.ranks, member.device)
    return replace(make_problem(TINY, torch.float32, team), sequence_parallel=sequence_parallel)


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
    "not built": (None, "not installed: no such library"),
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
    given = problem_of(member, sequence_parallel)
    planted = [Peer(fault, partial(_planted, fault)) for fault in FAULTS]
    planted.append(named(GEMM_ONLY, ONE))
    timing.LENGTHS[member.device.type] = 0.0, 1e-9  # one call
    judge = Judge(given, *(answers(given, dtype) for dtype in (torch.float64, torch.float32)))
    return measure_cell(planted, judge, 2)


@pytest.mark.parametrize(("ranks", "sequence_parallel"), [(1, False), (2, True)])
def test_what_is_wrong_is_never_timed(ranks, sequence_parallel, worlds, device, monkeypatch):
    monkeypatch.setitem(timing.LENGTHS, device, (0.0, 1e-9))
    cell, *others = everywhere(worlds, device, ranks, _measured, sequence_parallel)
    mine = repr(cell)  # NaN equals itself in words
    assert all(repr(other) == mine for other in others)  # times, bytes and errors are those of the worst rank
    for entry, (_, words) in zip(cell["peers"], FAULTS.values()):
        refused = entry["refused"] or ""
        assert refused.startswith(words) and bool(refused) == bool(words), entry
        assert ("(on rank 1 of 2)" in refused) == (ranks > 1 and bool(words) and " error " not in words)
        assert all((kind in entry) == (not words) for kind in PASSES)
    right, wrong, row = cell["peers"][:3]
    assert all(len(right[kind]["seconds"]) == 2 and right[kind]["peak"] > 0 for kind in PASSES)
    assert wrong["errors"]["dW"] > 100 * right["errors"]["dW"] > 0  # a refused peer's errors are shown
    assert "dW row error" in row["refused"] and row["errors"]["dW row"] > row["errors"]["dW"]


@pytest.mark.parametrize("suite", ["host --peers ours ours-statistics torch", "post"])
def test_a_suite_measures_all_its_peers(suite, short, tmp_path):
    path = tmp_path / "bench.json"
    arguments = f"--suite {suite} --shape 40,90,16 --rounds 2 --device cpu --json"
    assert all(named(name, ONE) for each in options.SUITES.values() for name in each.ours)
    assert command.main([*arguments.split(), str(path)]) == 0
    for entry in json.loads(path.read_text())["cells"][0]["peers"]:
        if entry["name"] == "verl":  # is missing
            continue
        assert entry["refused"] is None and ("errors" in entry) == named(entry["name"], ONE).judged
        for kind in PASSES if suite != "post" else ():
            assert len(entry[kind]["host_seconds"]) == 2 and min(entry[kind]["host_seconds"]) > 0


@pytest.fixture
def libraries(short, monkeypatch):
    """Stand-ins of transformers and of torchtitan's loss, and no Liger."""
    library = ModuleType("transformers")
    library.LlamaConfig = library.Qwen2Config = SimpleNamespace
    make = lambda config, **_: CausalLM(config.vocab_size, config.hidden_size, tied=True)  # noqa: E731
    library.AutoModelForCausalLM = SimpleNamespace(from_config=make)
    monkeypatch.setitem(sys.modules, "transformers", library)
    monkeypatch.setitem(sys.modules, "liger_kernel", None)  # its import fails
    with torchtitan_standin.installed():
        yield


def measured(path, *more: str) -> tuple[int, dict[str, dict[str, dict]]]:
    """The exit status, and the rows by case and way."""
    status = doors.main(["--device", "cpu", "--rounds", "2", "--json", str(path), *more])
    content = json.loads(path.read_text())
    return status, {case["name"]: {row["name"]: row for row in case["ways"]} for case in content["cases"]}


@pytest.mark.filterwarnings(f"error::{LogitsWarning.__module__}.{LogitsWarning.__name__}")
def test_each_way_is_measured_if_its_library_is_installed_on_the_tokens_that_count(libraries, tmp_path):
    with counted_forwards(torch_backend) as rows:
        status, cases = measured(tmp_path / "figures.json", "--counted", "0.25")
    assert status == 0 and list(cases) == list(doors.CASES) and {*rows} == {2 * 4}
    for ways in cases.values():
        first, ours, unsaved, *others = ways.values()
        for row in (first, ours, unsaved):
            assert row["refused"] is None and len(row["step"]["seconds"]) == 2 and row["step"]["peak"] > 0
            assert row["gradient_off"] < 1e-5
        assert first["gradient_off"] == 0 and ours["loss"] == pytest.approx(first["loss"], rel=1e-5)
        assert all(row["refused"].startswith("not installed: ") for row in others)
