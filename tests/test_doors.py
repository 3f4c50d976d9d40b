"""The benchmark of steps in transformers and torchtitan, with stand-ins of them, on the CPU."""

import json
import sys
from types import ModuleType, SimpleNamespace

import pytest
import torch

from tools import counted_forwards

pytest.importorskip("rich", reason="needs the benchmark's packages")

import torchtitan_standin
from benchmarks import doors
from benchmarks.engine import timing
from parallel_lce.backends import torch_backend
from parallel_lce.transformers import LogitsWarning
from transformers_standin import CausalLM

COMMAND = ["--device", "cpu", "--rounds", "2"]


@pytest.fixture(autouse=True)
def libraries(monkeypatch):
    """Stand-ins of transformers and of torchtitan's loss, and no Liger."""
    monkeypatch.setitem(timing.LENGTHS, "cpu", (0.0, 1e-6))
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
    status = doors.main([*COMMAND, "--json", str(path), *more])
    content = json.loads(path.read_text())
    return status, {case["name"]: {row["name"]: row for row in case["ways"]} for case in content["cases"]}


def assert_measured(row: dict) -> None:
    assert row["refused"] is None and len(row["step"]["seconds"]) == 2 and row["step"]["peak"] > 0
    assert row["gradient_off"] < 1e-5


@pytest.mark.filterwarnings(f"error::{LogitsWarning.__module__}.{LogitsWarning.__name__}")
def test_each_way_is_measured_if_its_library_is_installed_on_the_tokens_that_count(tmp_path):
    with counted_forwards(torch_backend) as rows:
        status, cases = measured(tmp_path / "figures.json", "--counted", "0.25")
    assert status == 0 and list(cases) == list(doors.CASES) and {*rows} == {2 * 4}
    for ways in cases.values():
        first, ours, unsaved, *others = ways.values()
        for row in (first, ours, unsaved):
            assert_measured(row)
        assert first["gradient_off"] == 0 and ours["loss"] == pytest.approx(first["loss"], rel=1e-5)
        assert all(row["refused"].startswith("not installed: ") for row in others)


WRONG = {
    "refused: loss ": lambda loss: 1.002 * loss,
    "refused: the gradient ": lambda loss: loss.detach() * 0.9 + loss * 0.1,
}


@pytest.mark.parametrize("reason", WRONG)
def test_what_differs_is_not_timed(reason, monkeypatch, tmp_path):
    def wrong(way, size):
        hidden, weight = torch.ones(3, 4), torch.arange(8.0).view(2, 4).requires_grad_()
        change = WRONG[reason] if way == "ours" else lambda loss: loss
        return doors.step(lambda: change((hidden @ weight.T).logsumexp(1).mean()), [weight])

    monkeypatch.setitem(doors.CASES, "llama", (wrong, "transformers ours", doors.TINY))
    status, cases = measured(tmp_path / "figures.json", "--cases", "llama")
    assert status == 1 and "step" not in cases["llama"]["ours"]
    assert cases["llama"]["ours"]["refused"].startswith(reason)
    assert_measured(cases["llama"]["transformers"])
