"""The training program under launch/: its configurations, its layouts, its verdict."""

from __future__ import annotations

import json
import math
import os
import socket
import subprocess
import sys
from pathlib import Path

import pytest
import torch

pytest.importorskip("megatron.core", reason="needs megatron-core")
pytest.importorskip("omegaconf", reason="needs the training program's packages")

from training.compare import compare
from training.config import DEFAULT_CONFIG, ROOT, Config, TrainConfig, load_config

CONFIGS = sorted((ROOT / "configs").glob("*.yaml"))
TIMEOUT = 300


@pytest.mark.parametrize("path", CONFIGS, ids=lambda path: path.stem)
def test_every_configuration_loads(path):
    assert load_config(path, []).parallel.processes >= 1


@pytest.mark.parametrize(
    "overrides, words",
    [
        (["model.heads=6"], "model.hidden=256 is not a multiple of model.heads=6"),
        (["model.kv_heads=3"], "model.heads=4 is not a multiple of model.kv_heads=3"),
        (["model.kv_heads=1"], "model.kv_heads=1 is not a multiple of parallel.tensor=2"),
        (["parallel.pipeline=4"], "model.layers=2 is not a multiple of parallel.pipeline=4"),
        (["model.vocab_size=1000"], "model.vocab_size=1000 is less than text.vocab_size=16384"),
        (["train.micro_batches=0"], "^train.micro_batches=0: input should be greater than or equal to 1$"),
        (["parallel.data=0"], "^parallel.data=0: input should be greater than or equal to 1$"),
        (["train.clip_grad=-1"], "^train.clip_grad=-1: input should be greater than or equal to 0$"),
        (["parallel.device=cpu", "train.clip_grad=1"], "train.clip_grad=1.0 needs GPUs"),
        (["parallel.device=cpu", "train.precision=bf16"], "train.precision=bf16 needs GPUs"),
        (["train.steps"], "expected key=value"),
    ],
    ids=lambda value: value[-1] if isinstance(value, list) else "",
)
def test_bad_numbers_are_refused_in_words(overrides, words):
    with pytest.raises(ValueError, match=words):
        load_config(DEFAULT_CONFIG, overrides)


def test_another_number_of_processes_is_refused(monkeypatch):
    from training.worker import run

    monkeypatch.setenv("WORLD_SIZE", "3")
    monkeypatch.setenv("LOCAL_RANK", "0")
    with pytest.raises(ValueError, match=r"tensor=2 \* pipeline=1 \* data=2 needs 4 processes, torchrun started 3"):
        run(load_config(DEFAULT_CONFIG, ["parallel.data=2"]))


def test_the_program_silences_megatrons_remarks_alone():
    said = subprocess.run(
        [sys.executable, "-c", "import warnings, training.worker\n"
         "from parallel_lce.megatron import LogitsWarning\n"
         "for category in (UserWarning, LogitsWarning):\n"
         "    warnings.warn_explicit(category.__name__, category, 'file', 1, module='megatron.core.models')"],
        env={**os.environ, "PYTHONPATH": os.pathsep.join(map(str, (ROOT, ROOT / "launch")))
             + os.pathsep + os.environ.get("PYTHONPATH", "")},
        capture_output=True, text=True, timeout=TIMEOUT,
    )  # fmt: skip
    assert said.returncode == 0, said.stderr
    assert "file:1: LogitsWarning: LogitsWarning" in said.stderr and "UserWarning" not in said.stderr


def _batches(**changed):
    import numpy as np
    from training.batches import Batches
    from training.text import Text

    settings = {"sequence": 5, "micro_batch": 2, "micro_batches": 3, "reverse_samples": False, "seed": 7}
    text = Text(np.arange(1000, dtype=np.int32), end_of_document=0, source="", entries=1000)
    return Batches(text, TrainConfig.model_construct(**(settings | changed)), torch.device("cpu"))


def test_samples_of_a_step_do_not_depend_on_the_layout():
    one = torch.cat([batch.tokens for batch in _batches(micro_batches=6).of_rank(4, 0, 1)])
    two = torch.cat([batch.tokens for rank in range(2) for batch in _batches().of_rank(4, rank, 2)])
    back = torch.cat(
        [batch.tokens for rank in range(2) for batch in _batches(reverse_samples=True).of_rank(4, rank, 2)]
    )
    assert one.shape == (12, 5)
    assert torch.equal(one, two)
    assert torch.equal(one.flip(0), back)
    assert len(one.unique(dim=0)) > 1


@pytest.mark.parametrize("kv_heads", [6, 2, 1])
def test_attention_is_causal_softmax(kv_heads):
    from megatron.core.transformer.enums import AttnMaskType
    from megatron.core.transformer.transformer_config import TransformerConfig
    from training.attention import CausalAttention

    config = TransformerConfig(num_layers=1, hidden_size=48, num_attention_heads=6, attention_dropout=0.0)
    attention = CausalAttention(config, 1, AttnMaskType.causal, "self")
    torch.manual_seed(0)
    query, key, value = (torch.randn(7, 2, heads, 8, dtype=torch.float64) for heads in (6, kv_heads, kv_heads))
    k, v = (x.repeat_interleave(6 // kv_heads, 2) for x in (key, value))
    scores = torch.einsum("sbhd,tbhd->bhst", query, k) / math.sqrt(8)
    weights = scores.masked_fill(torch.ones(7, 7).triu(1).bool(), -math.inf).softmax(-1)
    expected = torch.einsum("bhst,tbhd->sbhd", weights, v).flatten(2)
    torch.testing.assert_close(attention(query, key, value, None), expected, rtol=1e-12, atol=1e-12)


@pytest.fixture(scope="module")
def train(tmp_path_factory):
    """``train(name, *overrides, nodes=1)``: a tiny training on CPUs through torchrun; the losses of its steps."""
    folder = tmp_path_factory.mktemp("training")
    text = folder / "text.txt"
    text.write_text(" ".join(f"{i} times {i % 7} is {i * (i % 7)}," for i in range(4000)))
    settings = [
        "train.steps=4", "train.sequence=16", "train.micro_batch=2", "train.learning_rate=0.01", "train.warmup_steps=1",
        "model.hidden=32", "model.ffn_hidden=64", "text.vocab_size=300", f"text.cache={folder / 'cache'}",
        "parallel.tensor=1", "parallel.device=cpu", "memory.micro_batch=null", "save_weights=false",
    ]  # fmt: skip

    def run(name: str, *overrides: str, nodes: int = 1) -> list[float]:
        program = [sys.executable, str(ROOT / "launch" / "train.py")]
        arguments = ["--text", str(text), *settings, f"output={folder / name}", *overrides]
        commands = [[*program, *arguments]]
        if nodes > 1:
            port = _free_port()
            torchrun = [f"--nnodes={nodes}", "--master-addr=localhost", f"--master-port={port}", "--nproc-per-node=1"]
            commands = [[*program, *torchrun, f"--node-rank={n}", "--", *arguments] for n in range(nodes)]
        environment = os.environ | {"PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
        pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.STDOUT, "text": True}
        processes = [subprocess.Popen(command, env=environment, **pipes) for command in commands]
        try:
            outputs = [process.communicate(timeout=TIMEOUT)[0] for process in processes]
        finally:
            for process in processes:
                process.kill()
        assert [process.returncode for process in processes] == [0] * nodes, "\n".join(outputs)
        return json.loads((folder / name / "metrics.json").read_text())["losses"]

    return run


def _free_port() -> int:
    with socket.socket() as listener:
        listener.bind(("localhost", 0))
        return listener.getsockname()[1]


@pytest.fixture(scope="module")
def alone(train) -> list[float]:
    losses = train("alone", "train.micro_batches=4", "model.tie_embeddings=true", "loss.impl=stock")
    assert losses[-1] < losses[0] - 0.1  # it learns
    return losses


@pytest.mark.parametrize(
    "nodes, overrides",
    [
        (2, ["parallel.data=2", "train.micro_batches=2", "parallel.distributed_optimizer=true"]),
        (1, ["parallel.pipeline=2", "train.micro_batches=4", "model.recompute=true"]),
    ],
    ids=["two-nodes-of-data-parallel", "pipeline"],
)
def test_losses_are_those_of_one_process_with_the_stock_loss(train, alone, nodes, overrides):
    losses = train(f"{nodes}-nodes", *overrides, "model.tie_embeddings=true", nodes=nodes)
    assert losses == pytest.approx(alone, abs=1e-5)


def _finished(folder: Path, **losses: list[float]) -> Config:
    """A configuration whose runs left these losses."""
    for name, values in losses.items():
        run = folder / name.replace("_reversed", "-reversed")
        run.mkdir()
        (run / "metrics.json").write_text(json.dumps({"losses": values}))
    yardstick = "stock_reversed" in losses
    overrides = [f"output={folder}", f"compare.yardstick={yardstick}", "save_weights=false"]
    return load_config(DEFAULT_CONFIG, [*overrides, "compare.factor=1.5"])


@pytest.mark.parametrize(
    "ours, agree",
    [([3.0, 2.00009], True), ([3.0, 2.00011], False), ([3.0, math.nan], False)],
    ids=["within", "beyond", "nan"],
)
def test_verdict_by_tolerance(tmp_path, ours, agree):
    assert compare(_finished(tmp_path, stock=[3.0, 2.0], parallel_lce=ours)).agree is agree


@pytest.mark.parametrize(
    "ours, agree",
    [([3.1, 2.1], True), ([3.2, 2.0], False), ([3.14, 2.14], False), ([3.0, math.nan], False)],
    ids=["as-far", "further-at-most", "further-in-the-mean", "nan"],
)
def test_verdict_by_the_yardstick(tmp_path, ours, agree):
    reversed_losses = [3.1, 2.05]  # 0.1 at most, 0.075 in the mean
    config = _finished(tmp_path, stock=[3.0, 2.0], parallel_lce=ours, stock_reversed=reversed_losses)
    assert compare(config).agree is agree


def test_runs_that_do_not_fit_are_refused(tmp_path):
    config = _finished(tmp_path, stock=[3.0, 2.0], parallel_lce=[3.0])
    with pytest.raises(ValueError, match=r"2 steps \(stock\) and 1 \(parallel_lce\)"):
        compare(config)
    (tmp_path / "stock" / "metrics.json").unlink()
    with pytest.raises(ValueError, match="no results of a run at .*stock"):
        compare(config)
