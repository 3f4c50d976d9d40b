"""The benchmark of steps in transformers, TRL, verl and torchtitan, with stand-ins of them, on the CPU."""

from __future__ import annotations

import json
import sys
from types import ModuleType, SimpleNamespace

import pytest

pytest.importorskip("rich", reason="needs the benchmark's packages")

pytest.importorskip("megatron.core", reason="needs megatron-core")

import parallel_lce.megatron
import parallel_lce.verl
import torchtitan_standin
import trl_standin
from benchmarks import doors
from benchmarks.engine import timing
from blocks import counted_forwards
from parallel_lce.backends import torch_backend
from parallel_lce.transformers import LogitsWarning
from transformers_standin import CausalLM

FIRST = {"llama": "transformers", "qwen2": "transformers", "trl": "TRL", "verl": "verl", "verl-wide": "verl"}
FIRST |= {"torchtitan": "torchtitan", "qwen2-eval": "transformers"}
STAND_INS = "trl", "torchtitan", "spmd_types"
COMMAND = ["--device", "cpu", "--rounds", "2"]


def kernel(hidden, weight, labels, temperature, reduction):
    """verl's contract."""
    rest = labels.view(-1), temperature, None, None, 1.0, ("log_probs", "entropy")
    return trl_standin.ChunkedLogProbFunction.apply(hidden.flatten(0, -2), weight, None, *rest)[:2]


@pytest.fixture
def libraries(monkeypatch):
    """Stand-ins of transformers, TRL's head, verl's kernel and torchtitan's loss. No GRPOTrainer, and no Liger."""
    monkeypatch.setitem(timing.ALONE, "cpu", (0.0, 1e-6))
    library = ModuleType("transformers")
    library.LlamaConfig = library.Qwen2Config = SimpleNamespace
    make = lambda config, **_: CausalLM(config.vocab_size, config.hidden_size, tied=True)  # noqa: E731
    library.AutoModelForCausalLM = SimpleNamespace(from_config=make)
    verl = ModuleType(name := "verl.utils.kernel.linear_cross_entropy")
    verl.linear_cross_entropy = kernel
    verl.LinearCrossEntropy = SimpleNamespace(apply=kernel)
    with trl_standin.installed(), torchtitan_standin.installed() as door:
        own = {name: each for name, each in sys.modules.items() if name.partition(".")[0] in STAND_INS or each is door}
    for name, module in own.items():
        monkeypatch.setitem(sys.modules, name, module)
    for module in (library, *map(ModuleType, ("verl", "verl.utils", "verl.utils.kernel")), verl):
        monkeypatch.setitem(sys.modules, module.__name__, module)
    for name in ("datasets", "liger_kernel"):
        monkeypatch.setitem(sys.modules, name, None)  # its import fails
    parallel_lce.verl.unpatch()
    yield SimpleNamespace(verl=verl)
    parallel_lce.verl.unpatch()
    parallel_lce.megatron.unpatch()


def measured(path, *more: str) -> tuple[int, dict[str, dict[str, dict]]]:
    """The exit status, and the rows by case and way."""
    status = doors.main([*COMMAND, "--json", str(path), *more])
    content = json.loads(path.read_text())
    return status, {case["name"]: {row["way"]: row for row in case["ways"]} for case in content["cases"]}


def assert_measured(row: dict, tolerance: float = 1e-5) -> None:
    assert row["refused"] is None and len(row["seconds"]) == 2 and row["peak"] > 0 and row["gradient_off"] < tolerance


@pytest.mark.filterwarnings(f"error::{LogitsWarning.__module__}.{LogitsWarning.__name__}")
def test_each_way_is_measured_if_its_library_is_installed(libraries, tmp_path, capsys):
    status, cases = measured(tmp_path / "figures.json")
    assert status == 0 and list(cases) == list(doors.CASES)
    said = capsys.readouterr().out
    for name, first in FIRST.items():
        assert_measured(cases[name][first])
        assert_measured(cases[name]["ours"])
        assert cases[name]["ours"]["loss"] == pytest.approx(cases[name][first]["loss"], rel=1e-5)
        assert f"{name}: 2 x 16 tokens, V=512, D=128, torch.float32" in said
    assert_measured(cases["megatron-llama"]["ours"], 1e-2)  # Megatron's fused loss rounds to bf16
    absent = [cases[name]["Liger"] for name in ("llama", "qwen2")] + [*cases["grpo"].values()]
    assert all(row["refused"].startswith("not installed: ") for row in absent)
    assert "| Liger, not installed: " in said
    assert libraries.verl.linear_cross_entropy is kernel  # ours is there only within its own steps


def test_a_share_of_the_tokens_counts(libraries, tmp_path, capsys):
    names = ["llama", "trl", "verl", "megatron-llama", "torchtitan"]
    for name in names:
        with counted_forwards(torch_backend) as rows:
            status, cases = measured(tmp_path / "figures.json", "--counted", "0.25", "--cases", name)
        assert status == 0 and {*rows} == {2 * 4}, name
        assert_measured(cases[name]["ours"], 1e-2 if "megatron" in name else 1e-5)
    assert "llama: 2 x 16 tokens, 25% counted, V=512" in capsys.readouterr().out


WRONG = {
    "refused: loss ": lambda log_probs: 1.002 * log_probs,
    "refused: the gradient ": lambda log_probs: log_probs.detach() * 0.9 + log_probs * 0.1,
}


@pytest.mark.parametrize("reason", WRONG)
def test_what_differs_is_not_timed(reason, libraries, monkeypatch, tmp_path):
    right = parallel_lce.verl.rl.linear_cross_entropy

    def changed(*given, **named):
        log_probs, entropy = right(*given, **named)
        return WRONG[reason](log_probs), entropy

    monkeypatch.setattr(parallel_lce.verl.rl, "linear_cross_entropy", changed)
    status, cases = measured(tmp_path / "figures.json", "--cases", "verl")
    assert status == 1 and "seconds" not in cases["verl"]["ours"]
    assert cases["verl"]["ours"]["refused"].startswith(reason)
    assert_measured(cases["verl"]["verl"])
