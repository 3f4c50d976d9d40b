"""The training program under launch/: its text and tokenizer, its layouts, its snapshots, its verdict."""

import json
import math
import os
from pathlib import Path

import numpy as np
import pytest
import torch
import torch.nn.functional as F

pytest.importorskip("megatron.core", reason="needs the training program's packages")
pytest.importorskip("tokenizers", reason="needs the training program's packages")

from safetensors.torch import load_file

import program  # of launch/
from tools import ran
from training.config import DEFAULT_CONFIG, ROOT, Config, TextConfig, load_config
from training.report import RUNS, Metrics, compare
from training.text import Text, load_text, split
from world import launched


def test_held_out_samples_are_not_trained_on():
    held_out, rest = split(Text(np.arange(100, dtype=np.int32), 0, "numbers"), 9, 4)
    assert held_out.shape == (4, 10) and held_out.dtype == torch.int64
    assert torch.equal(held_out, held_out[:, :1] + torch.arange(10))  # each is one piece of the text
    assert sorted([*held_out.flatten().tolist(), *rest.tokens.tolist()]) == list(range(100))


def test_the_cache_is_of_one_text_and_tokenizer_and_is_made_anew_where_it_is_damaged(tmp_path):
    text, cache, texts = tmp_path / "text", tmp_path / "cache", []
    text.mkdir()
    for name in "ab":
        (text / name).write_text("a few words " * 50)

    def files(max_bytes=10_000, vocab_size=300) -> int:
        config = TextConfig(path=str(text), max_bytes=max_bytes, vocab_size=vocab_size, cache=str(cache))
        texts.append(load_text(config).tokens.tolist())
        return len([*cache.iterdir()])

    assert files() == files() == 1
    assert texts[0] == texts[1] == 2 * texts[0][: len(texts[0]) // 2]
    assert texts[0].count(0) == 2 and texts[0][-1] == 0  # documents end with their token
    (file,) = cache.iterdir()
    file.write_bytes(file.read_bytes()[:-5])
    assert files() == 1 and texts[-1] == texts[0]
    assert files(vocab_size=301) == 2 and files(max_bytes=500) == 3


SMALL = """train.sequence=16 train.micro_batch=2 train.learning_rate=0.01 train.warmup_steps=1 model.hidden=32
    text.vocab_size=300 parallel.tensor=1 parallel.device=cpu memory.micro_batch=null""".split()


@pytest.fixture(scope="module")
def work(tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("training")
    (folder / "signal.py").write_text("raise SystemExit('Python has another one')")
    (folder / "text.txt").write_text(" ".join(f"{i} times {i % 7} is {i * (i % 7)}," for i in range(4000)))
    return folder


CPU = ROOT / "configs" / "snapshots-cpu.yaml"


def _rank(arguments: list[str]) -> None:
    os.environ["TORCHELASTIC_RUN_ID"] = "a run"
    program.run("train", arguments)


@pytest.mark.slow  # three programs import Megatron
def test_snapshots_are_what_the_output_layer_sees(work, tmp_path, monkeypatch):
    """And losses of one process are those of two with the stock loss."""
    own = ["--config", str(CPU), f"text.path={work / 'text.txt'}", f"text.cache={work / 'cache'}", *SMALL]
    own += "train.steps=12 train.sequence=24 train.micro_batch=4".split()
    one = "train.micro_batches=4 snapshots.steps=[3,6,40] snapshots.tokens=120".split()
    one.append(f"output={work / 'snapshots'}")
    begun = []
    monkeypatch.setattr(os, "execve", lambda *given: begun.append(given))
    program.run("train", [*own, *one])  # makes folders and the text's cache
    assert len(begun) == 1
    launched(1, _rank, [*own, *one])
    two = "parallel.data=2 train.micro_batches=2 parallel.distributed_optimizer=true loss.impl=stock".split()
    two += ["snapshots=null", "train.held_out_samples=5", f"output={tmp_path}"]
    launched(2, _rank, [*own, *two])
    config, losses = load_config(CPU, [*own[2:], *one]), []
    texts = [Path(folder, "metrics.json").read_text() for folder in (config.output, tmp_path)]
    metrics, other = map(Metrics.model_validate_json, texts)
    assert metrics.losses == pytest.approx(other.losses, abs=1e-5) and len(metrics.losses) == 12
    assert len([*Path(config.output).glob("*.safetensors")]) == 3
    held_out, _ = split(load_text(config.text), 24, 5)
    for step in (3, 6, 12):
        tensors = load_file(Path(config.output, f"step-{step}.safetensors"))
        hidden, weight, target = (tensors.pop(name) for name in ("hidden", "weight", "target"))
        assert not tensors and (hidden.dtype, weight.dtype, target.dtype) == (torch.bfloat16,) * 2 + (torch.int64,)
        assert hidden.shape == (120, 32) and weight.shape == (384, 32)  # rows are padded
        assert torch.equal(target, held_out[:, 1:].flatten())
        losses.append(F.cross_entropy(hidden.double() @ weight.double().T, target).item())
    assert math.log(384) > losses[0] > losses[1] > losses[2]  # it learns
    assert metrics.held_out_loss == pytest.approx(losses[2], rel=2e-3)  # there without rounding to bf16


@pytest.mark.slow
def test_the_demo_ends_with_curves_that_agree(work, tmp_path):
    """Under torchrun, two ranks with either loss, in a folder that has a module of Python's name."""
    given = [f"text.path={work / 'text.txt'}", f"text.cache={work / 'cache'}", f"output={tmp_path}", "train.steps=3"]
    done = ran(ROOT / "launch" / "demo.sh", *SMALL, "parallel.tensor=2", *given, cwd=work, timeout=900)
    assert done.returncode == 0, done.stderr[-3000:]
    assert done.stdout.splitlines()[-1].startswith("The loss curves agree: "), done.stdout


METRICS = dict(
    **dict(device="a device", backend="gloo", versions={"torch": "2"}, text="a text"),
    **dict(step_peak_bytes=None, loss_peak_bytes=7 << 20, held_out_loss=None),
)


def _finished(folder: Path, **losses: list[float]) -> Config:
    for name, values in losses.items():
        run = folder / name.replace("stock_", "stock-")
        run.mkdir()
        config = load_config(DEFAULT_CONFIG, RUNS[run.name]).model_dump(mode="json")
        metrics = {**METRICS, "config": config, "losses": values, "step_seconds": values}
        (run / "metrics.json").write_text(json.dumps(metrics))
    yardstick = "stock_1" in losses
    return load_config(DEFAULT_CONFIG, [f"output={folder}", f"compare.yardstick={yardstick}"])


# Of the six pairs, these first two differ most in the mean, by 0.075; the last and stock at a single step, by 0.1.
OTHERS = dict(stock_1=[3.01, 2.0375], stock_2=[3.085, 1.9625], stock_3=[3.1, 2.0])
VERDICTS = [
    ({}, [3.0, 2.00009], True),
    ({}, [3.0, 2.00011], False),
    ({}, [3.0, math.nan], False),
    (OTHERS, [3.14, 2.0], True),
    (OTHERS, [3.2, 2.0], False),  # further at most
    (OTHERS, [3.14, 2.14], False),  # further in the mean
    (OTHERS, [3.0, math.nan], False),
    (OTHERS | {"stock_2": [3.0, math.inf]}, [3.0, 2.0], False),
]


@pytest.mark.parametrize(("yardstick", "ours", "agree"), VERDICTS)
def test_the_verdict_allows_what_stock_runs_differ_by(yardstick, ours, agree, tmp_path):
    losses = {"stock": [3.0, 2.0], "parallel_lce": ours, **yardstick}
    assert compare(_finished(tmp_path, **losses)).agree is agree
