"""torchtitan's override: in the default suite with a stand-in of the release's contract; with --all with the release,
whose debug model is trained beside its own chunked loss."""

from __future__ import annotations

import json
import os
import re
import sys
from pathlib import Path

import pytest

import torchtitan_bodies
import torchtitan_training
from releases import ROOT, folder_of
from tools import ran
from torchtitan_training import Run

RELEASE = "0.3.0"
# Beside torch, tokenizers and what torchtitan_trainer.py replaces: all that its trainer imports.
OTHERS = ("spmd_types==0.2.3", "tyro==1.0.17", "docstring_parser==0.18.0", "typeguard==4.6.1", "torchdata==0.11.0")
RELEASES = ["stand-in", pytest.param(RELEASE, marks=pytest.mark.slow)]


@pytest.fixture(params=["cpu"])
def device(request) -> str:
    """The release is made to run on CPUs here. It is trained on GPUs by hand."""
    return request.param


def folder() -> str:
    return str(folder_of("torchtitan", RELEASE, others=OTHERS))


def _run(worlds, release: str, ranks: int, body, *arguments) -> None:
    path = None if release == "stand-in" else folder()
    worlds(ranks, path).run(body, release, *arguments)


@pytest.mark.parametrize(("ranks", "compiled"), [(1, False), (2, False), (2, True)])
@pytest.mark.parametrize("release", RELEASES)
def test_plain_tensors_and_a_group(release, ranks, compiled, worlds):
    _run(worlds, release, ranks, torchtitan_bodies.plain, compiled)


@pytest.mark.parametrize("units", ["one", "apart", "apart, resharded"])
@pytest.mark.parametrize("release", RELEASES)
def test_fully_sharded(release, units, worlds):
    _run(worlds, release, 2, torchtitan_bodies.fully_sharded, units)


@pytest.mark.parametrize("body", ["dtensors", "log_probs", "left_alone", "refusals"])
@pytest.mark.parametrize("release", RELEASES)
def test_on_two_ranks(release, body, worlds):
    _run(worlds, release, 2, getattr(torchtitan_bodies, body))


@pytest.mark.parametrize("mistake", torchtitan_bodies.SPOILED)
def test_a_mistake_is_seen(mistake, worlds):
    _run(worlds, "stand-in", 2, torchtitan_bodies.broken, mistake)


DEFAULT = [  # plain tensors and a group
    Run(),
    Run(bias=True, microbatches=2),
    Run(tied=True),
    Run(soft_cap=True),
    Run(fsdp=True, reshard="always"),
    Run(dtype="bfloat16"),
    Run(checked=True),
    Run(dp=2, fsdp=True, microbatches=2),
    Run(cp=2),
    Run(tp=2),
    Run(tp=2, sp=False, bias=True),
    Run(tp=2, checked=True),
    Run(tp=2, sp=False, checked=True),
    Run(tp=2, compiled=True),
    Run(tp=2, vocabulary=2049, budget=0),
    Run(tp=2, soft_cap=True),
    Run(tp=4),
    Run(tp=4, sp=False),
    Run(tp=2, dp=2, fsdp=True, microbatches=2),
    Run(tp=2, dp=2, fsdp=True, sp=False),
    Run(tp=2, cp=2),
]
DTENSORS = [
    *(Run(backend, tp=tp, sp=sp, fsdp=True) for backend in ("partial_dtensor", "full_dtensor")
      for tp, sp in ((1, True), (2, True), (2, False), (4, True), (4, False))),
    *(Run(backend, tp=2, dp=2, fsdp=True, microbatches=2) for backend in ("partial_dtensor", "full_dtensor")),
    Run("full_dtensor", cp=2, fsdp=True),
    Run("partial_dtensor", dp=2, fsdp=True, tied=True, reshard="always"),
    Run("partial_dtensor", tp=2, fsdp=True, bias=True, soft_cap=True),
]  # fmt: skip
POLICIES = [
    Run(inner="DAPOLoss", microbatches=2),
    Run(tp=2, inner="GRPOLoss"),
    Run(tp=4, sp=False, inner="DAPOLoss"),
    Run("partial_dtensor", tp=2, dp=2, fsdp=True, inner="DAPOLoss"),
]


@pytest.mark.slow
@pytest.mark.parametrize("run", [*DEFAULT, *DTENSORS, *POLICIES], ids=str)
def test_training_equals_its_own_loss(run, worlds):
    worlds(run.tp * run.dp * run.cp, folder()).run(torchtitan_training.compare, run)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("mistake", "run"),
    [
        ("sums_dx", Run(tp=2)),
        ("sums_dx", Run(tp=2, sp=False)),
        ("sums_dx", Run("partial_dtensor", tp=2, fsdp=True)),
        ("sums_dx", Run("full_dtensor", tp=2, fsdp=True, sp=False)),
        ("forgets_bias", Run(tp=2, bias=True)),
        ("counts_ignored", Run()),
        ("scores_this_shard", Run(tp=2)),
    ],
    ids=str,
)
def test_training_sees_a_mistake(mistake, run, worlds):
    worlds(run.tp * run.dp * run.cp, folder()).run(torchtitan_training.differs, run, mistake)


LINE = ["--override.imports", "parallel_lce.torchtitan.linear_cross_entropy"]
COMMON = "--module llama3 --config llama3_debugmodel --checkpoint.no-enable --validator.enable --validator.steps 2 "
COMMON += "--validator.freq 2 --training.steps 4 --training.seq-len 32 --training.local-batch-size 2 "
COMMON += "--training.mixed-precision-param float32 --training.disable-cuda-graphs --debug.seed 1"


@pytest.mark.slow
@pytest.mark.parametrize(
    ("ranks", "more"),
    [
        (1, []),
        (1, ["--compile.enable", "--compile.components", "loss", "--compile.backend", "aot_eager"]),
        (2, ["--parallelism.tensor-parallel-degree", "2"]),
        (2, ["--training.global-batch-size", "8"]),
        (2, ["--parallelism.tensor-parallel-degree", "2", "--parallelism.spmd-backend", "partial_dtensor"]),
    ],
)
def test_its_trainer_with_the_line_of_the_page(ranks, more):
    """Nothing but the line differs."""
    pytest.importorskip("tokenizers")
    assert " ".join(LINE) in (ROOT / "docs" / "torchtitan.md").read_text()
    path = os.pathsep.join([str(ROOT), str(ROOT / "tests"), str(ROOT / "launch"), folder()])
    start = ["-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={ranks}"]
    printed = []
    for line in ([], LINE):
        command = [*start, str(ROOT / "tests" / "torchtitan_trainer.py"), *COMMON.split(), *more, *line]
        done = ran(sys.executable, *command, env={"PYTHONPATH": path})
        assert done.returncode == 0, done.stderr[-3000:]
        printed.append(json.loads(next(line for line in done.stdout.splitlines() if line.startswith("{"))))
    own, ours = printed
    assert (own.pop("loss"), ours.pop("loss")) == ("ChunkedLossWrapper", "LinearCrossEntropyLoss")
    assert [len(numbers) for numbers in own.values()] == [4, 4, 3] and own["validation"][-1] < own["validation"][0]
    for name, numbers in own.items():
        assert ours[name] == pytest.approx(numbers, rel=2e-5), name


PAGE = """
import re, sys, typing
from pathlib import Path
from torchtitan.components.loss import ChunkedLossWrapper, CrossEntropyLoss
from torchtitan.config import Configurable
from torchtitan.config.override import OverrideConfig, apply_overrides
from dataclasses import dataclass
import parallel_lce
assert "parallel_lce.torchtitan" not in sys.modules
page = Path("docs/torchtitan.md").read_text()

class Trainer(Configurable):
    @dataclass(kw_only=True, slots=True)
    class Config(Configurable.Config):
        loss: typing.Any

def replaced(override):
    root = Trainer.Config(loss=ChunkedLossWrapper.Config(loss_fn=CrossEntropyLoss.Config(global_vocab_size=9)))
    apply_overrides(override, root)
    print(type(root.loss).__qualname__, root.loss.logits_budget, root.loss.gradient_filter)
    assert root.loss.loss_fn.global_vocab_size == 9

(line,) = {*re.findall(r"--override\\.imports (\\S+)", page)}
replaced(OverrideConfig(imports=[line]))
for block in re.findall(r"^```python\\n(.*?)^```$", page, re.M | re.S):
    if "experiments" not in block:  # that package imports vLLM
        names = {}
        exec(block, names)
        replaced(names["override"]) if "override" in names else print(type(names["loss"].build()).__qualname__)
"""


@pytest.mark.slow
def test_the_lines_of_the_page_replace_the_loss():
    done = ran(sys.executable, "-c", PAGE, cwd=ROOT, env={"PYTHONPATH": f"{ROOT}:{folder()}"})
    assert done.returncode == 0, done.stderr[-2000:]
    ours = "LinearCrossEntropyLoss"
    assert done.stdout.split("\n")[:3] == [f"{ours}.Config None None", f"{ours}.Config {2**30} {2**-13}", ours]


def test_nothing_else_imports_torchtitan():
    files = [file for file in Path(ROOT / "parallel_lce").rglob("*.py") if file.name != "torchtitan.py"]
    assert len(files) > 30
    assert not [f for f in files if re.search(r"^\s*(from|import) (torchtitan|spmd_types)\b", f.read_text(), re.M)]
