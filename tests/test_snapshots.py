"""Snapshots of what an output layer sees: what is written, when a training is known again, who reports on it."""

from __future__ import annotations

import math
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F

pytest.importorskip("megatron.core", reason="needs the training program's packages")
pytest.importorskip("tokenizers", reason="needs the training program's packages")

from safetensors.torch import load_file

import program  # of launch/
from training.batches import split
from training.config import ROOT, load_config
from training.refusal import Refusal
from training.results import is_trained, read_metrics, snapshots_in
from training.text import load_text

CPU = ROOT / "configs" / "snapshots-cpu.yaml"
TINY = """text.vocab_size=300 model.hidden=32 train.steps=30 train.sequence=24 train.warmup_steps=2
    train.learning_rate=0.01 snapshots.steps=[4,8,40] snapshots.tokens=120""".split()


@pytest.fixture(scope="module")
def trained(tmp_path_factory) -> list[str]:
    """The arguments of a training that launch/snapshots.py has done."""
    folder = tmp_path_factory.mktemp("snapshots")
    (folder / "text.txt").write_text(" ".join(f"{i} times {i % 7} is {i * (i % 7)}," for i in range(4000)))
    arguments = [
        *TINY,
        f"text.path={folder / 'text.txt'}",
        f"text.cache={folder / 'cache'}",
        f"output={folder / 'out'}",
    ]
    arguments = ["--config", str(CPU), *arguments]
    command = [sys.executable, str(ROOT / "launch" / "snapshots.py"), *arguments]
    environment = os.environ | {"PYTHONPATH": str(ROOT)}
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "300 of the 300 entries of the vocabulary stand for text" in done.stdout
    return arguments


def config_of(arguments: list[str], *overrides: str):
    return load_config(CPU, [*arguments[2:], *overrides])


def test_there_is_a_configuration_for_each_device():
    cpu, gpu = (load_config(ROOT / "configs" / f"{name}.yaml", []) for name in ("snapshots-cpu", "snapshots"))
    assert (gpu.vocab_size, gpu.model.hidden, gpu.snapshots.steps) == (65536, 1024, [50, 300, 1000])
    assert (gpu.parallel.device, cpu.parallel.device) == ("cuda", "cpu")


def test_snapshots_are_what_the_output_layer_sees(trained):
    config = config_of(trained)
    metrics, files = read_metrics(Path(config.output)), snapshots_in(config.output)
    assert [path.stem for path in files] == ["step-4", "step-8", "step-30"] and len(metrics.losses) == 30
    held_out, _ = split(load_text(config.text), 24, 5)
    losses = []
    for path in files:
        tensors = load_file(path)
        hidden, weight, target = (tensors.pop(name) for name in ("hidden", "weight", "target"))
        assert not tensors and (hidden.dtype, weight.dtype, target.dtype) == (torch.bfloat16,) * 2 + (torch.int64,)
        assert hidden.shape == (120, 32) and weight.shape == (384, 32)  # rows are padded
        assert torch.equal(target, held_out[:, 1:].flatten())
        losses.append(F.cross_entropy(hidden.double() @ weight.double().T, target).item())
    assert math.log(384) > losses[0] > losses[1] > losses[2]  # it learns
    assert metrics.held_out_loss == pytest.approx(losses[2], rel=2e-3)  # there without rounding to bf16


def test_a_training_is_known_again(trained):
    config = config_of(trained)
    assert is_trained(config) and is_trained(config_of(trained, "text.cache=elsewhere"))
    assert not is_trained(config_of(trained, "output=elsewhere"))
    with pytest.raises(Refusal, match="has snapshots of another configuration: give another output="):
        is_trained(config_of(trained, "train.seed=7"))
    with pytest.raises(Refusal, match="snapshots=None: the report needs some"):
        is_trained(config_of(trained, "snapshots=null"))
    folder = Path(config.output)
    for name in ("step-8.safetensors", "metrics.json"):  # the latter is missing after a training that was interrupted
        (folder / name).rename(folder / "away")
        assert not is_trained(config)
        (folder / "away").rename(folder / name)
    assert is_trained(config)


@pytest.mark.parametrize("name", ["parity", "gradient_filter"])
def test_a_report_is_given_the_snapshots(name, trained, monkeypatch):
    started = []
    monkeypatch.setattr(os, "execve", lambda path, command, environment: started.append(command))
    monkeypatch.setattr(subprocess, "run", lambda *_, **__: pytest.fail("nothing is to be trained"))
    program.run(name, [*trained, "--", "--device", "cpu"])
    files = map(str, snapshots_in(config_of(trained).output))
    assert started == [[sys.executable, "-P", "-m", f"{program.BENCHMARKS}.{name}", *files, "--device", "cpu"]]


@pytest.mark.parametrize("option", ["--json", "--plot"])
def test_what_cannot_be_written_is_refused_before_the_training(option, tmp_path, monkeypatch):
    monkeypatch.setattr(subprocess, "run", lambda *_, **__: pytest.fail("nothing was refused"))
    (tmp_path / "file").touch()
    with pytest.raises(Refusal, match=f"the folder of {option}=.*file cannot be made a folder"):
        program.run("gradient_filter", [f"output={tmp_path / 'out'}", "--", option, str(tmp_path / "file" / "p.png")])
    assert not (tmp_path / "out").exists()


def test_too_little_text_is_refused(trained, tmp_path):
    arguments = [*trained, "snapshots.tokens=96000", f"output={tmp_path}"]
    with pytest.raises(Refusal, match=r"text.txt has \d+ tokens, fewer than the 100025 of the samples"):
        program.run("snapshots", arguments)
