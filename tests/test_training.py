"""The training program under launch/: its batches, its layouts, its verdict."""

from __future__ import annotations

import json
import math
import os
import socket
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import torch

pytest.importorskip("megatron.core", reason="needs the training program's packages")
pytest.importorskip("tokenizers", reason="needs the training program's packages")

import program  # of launch/
from training.batches import Batches, split
from training.comparison import compare
from training.config import DEFAULT_CONFIG, ROOT, Config, TrainConfig, load_config
from training.refusal import Refusal
from training.results import remove_results
from training.step import learning_rate
from training.text import Text, by_frequency
from training.worker import run_rank, share_done

TIMEOUT = 300


def numbers(tokens: int) -> Text:
    return Text(np.arange(tokens, dtype=np.int32), 0, "numbers", tokens)


# --- parts of a training ---------------------------------------------------------------------------


def test_samples_of_a_step_do_not_depend_on_the_layout():
    def samples(ranks: int, **changed) -> torch.Tensor:
        settings = {"sequence": 5, "micro_batch": 2, "micro_batches": 3, "reverse_samples": False, "seed": 7} | changed
        batches = Batches(numbers(1000), TrainConfig.model_construct(**settings), torch.device("cpu"))
        return torch.cat([batch.tokens for rank in range(ranks) for batch in batches.of_rank(4, rank, ranks)])

    one = samples(1, micro_batches=6)
    assert one.shape == (12, 5) and len(one.unique(dim=0)) > 1
    assert torch.equal(one, samples(2)) and torch.equal(one.flip(0), samples(2, reverse_samples=True))


@pytest.mark.parametrize(("tokens", "sequence", "samples"), [(100, 9, 4), (50, 9, 4), (57, 3, 13), (20, 4, 1)])
def test_held_out_samples_are_not_trained_on(tokens, sequence, samples):
    held_out, rest = split(numbers(tokens), sequence, samples)
    assert held_out.shape == (samples, sequence + 1) and held_out.dtype == torch.int64
    assert torch.equal(held_out, held_out[:, :1] + torch.arange(sequence + 1))  # each is one piece of the text
    assert sorted([*held_out.flatten().tolist(), *rest.tokens.tolist()]) == list(range(tokens))
    assert held_out[0, 0] == 0 and (samples == 1 or held_out[-1, -1] == tokens - 1)


def test_a_text_by_frequency():
    tokens = torch.randint(2, 9, (500,), generator=torch.Generator().manual_seed(0)).int()
    tokens[:100], tokens[100:160] = 8, 3
    text = Text(tokens.numpy(), 4, "somewhere", 10)
    found = by_frequency(text, rows=12, ranks=2)
    assert len(found.tokens) == 500 and found.tokens.dtype == text.tokens.dtype
    # Each id became one other: the most frequent two the first rows of the two shards.
    assert len({*zip(text.tokens, found.tokens)}) == 7
    assert (found.tokens[:100] == 0).all() and (found.tokens[100:160] == 6).all()
    assert (found.tokens[text.tokens == 4] == found.end_of_document).all()


def test_the_nearer_limit_ends_the_training():
    def done(step: int, seconds: float, **limits) -> float:
        return share_done(TrainConfig.model_construct(**({"steps": None, "minutes": None} | limits)), step, seconds)

    assert done(5, 12.0, steps=10, minutes=2) == 0.5 and done(1, 90.0, steps=10, minutes=2) == 0.75
    assert done(10**6, 15.0, minutes=0.5) == 0.5 and done(6, 1e9, steps=12) == 0.5


def test_the_learning_rate_rises_then_falls():
    train = TrainConfig.model_construct(learning_rate=3.0, warmup_steps=3, last_rate=0.1)
    assert [learning_rate(train, step, 0.0) for step in range(5)] == [0.75, 1.5, 2.25, 3.0, 3.0]
    assert learning_rate(train, 99, 0.5) == pytest.approx(1.65) and learning_rate(train, 99, 1.0) == pytest.approx(0.3)


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


def test_the_program_silences_megatrons_remarks_alone():
    code = """
import warnings, training.worker
from parallel_lce.megatron import LogitsWarning
for category in (UserWarning, LogitsWarning):
    warnings.warn_explicit(category.__name__, category, 'file', 1, module='megatron.core.models')
"""
    environment = os.environ | {"PYTHONPATH": os.pathsep.join(map(str, (ROOT, ROOT / "launch")))}
    said = subprocess.run([sys.executable, "-c", code], env=environment, capture_output=True, text=True)
    assert said.returncode == 0, said.stderr
    assert "file:1: LogitsWarning: LogitsWarning" in said.stderr and "UserWarning" not in said.stderr


# --- trainings ----------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def train(tmp_path_factory):
    """``train(folder, *overrides, nodes=1)``: the metrics of a tiny training on CPUs through torchrun."""
    work = tmp_path_factory.mktemp("training")
    (work / "signal.py").write_text("raise SystemExit('Python has another one')")
    (work / "text.txt").write_text(" ".join(f"{i} times {i % 7} is {i * (i % 7)}," for i in range(4000)))
    settings = """--text text.txt train.steps=4 train.sequence=16 train.micro_batch=2 train.learning_rate=0.01
        train.warmup_steps=1 model.hidden=32 model.tie_embeddings=true text.vocab_size=300 parallel.tensor=1
        parallel.device=cpu memory.micro_batch=null save_weights=false""".split()

    def run(folder: str | Path, *overrides: str, nodes: int = 1) -> dict:
        arguments = [*settings, f"text.cache={work / 'cache'}", f"output={work / folder}", *overrides]
        starts = [[]]
        if nodes > 1:
            with socket.socket() as listener:
                listener.bind(("localhost", 0))
                port = listener.getsockname()[1]
            torchrun = [f"--nnodes={nodes}", "--master-addr=localhost", f"--master-port={port}", "--nproc-per-node=1"]
            starts = [[*torchrun, f"--node-rank={node}", "--"] for node in range(nodes)]
        command = [sys.executable, str(ROOT / "launch" / "program.py"), "train"]
        environment = os.environ | {"PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
        pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.STDOUT, "text": True, "cwd": work, "env": environment}
        processes = [subprocess.Popen([*command, *start, *arguments], **pipes) for start in starts]
        try:
            outputs = [process.communicate(timeout=TIMEOUT)[0] for process in processes]
        finally:
            for process in processes:
                process.kill()
        assert [process.returncode for process in processes] == [0] * nodes, "\n".join(outputs)
        return json.loads((work / folder / "metrics.json").read_text())

    return run


def test_losses_are_those_of_one_process_with_the_stock_loss(train, tmp_path):
    for name in ("weights-1.pt", "metrics.json"):  # of an earlier run of more ranks
        (tmp_path / name).touch()
    alone = train(tmp_path, "train.micro_batches=4", "loss.impl=stock", "save_weights=true")["losses"]
    assert alone[-1] < alone[0] - 0.1  # it learns
    assert {path.name for path in tmp_path.iterdir()} == {"config.yaml", "metrics.json", "weights-0.pt"}
    layout = ["parallel.data=2", "train.micro_batches=2", "parallel.distributed_optimizer=true"]
    assert train("two", *layout, nodes=2)["losses"] == pytest.approx(alone, abs=1e-5)


@pytest.mark.slow
def test_losses_on_two_pipeline_stages_are_those_of_stock(train):
    layout = ["parallel.pipeline=2", "train.micro_batches=4", "model.recompute=true"]
    stock, ours = (train(impl, *layout, f"loss.impl={impl}")["losses"] for impl in ("stock", "parallel_lce"))
    assert stock[-1] < stock[0] - 0.1 and ours == pytest.approx(stock, abs=1e-5)


@pytest.mark.slow
def test_an_ordered_vocabulary_with_filtered_gradients_learns(train):
    overrides = ["train.micro_batches=4", "train.held_out_samples=4", "memory.micro_batch=2"]
    overrides += ["model.order_vocabulary=true", "parallel.tensor=2", "loss.gradient_filter=0.0001"]
    metrics = train("ordered", *overrides)
    assert metrics["losses"][-1] < metrics["losses"][0] - 0.5 and metrics["loss_peak_bytes"] > 0
    assert metrics["held_out_loss"] < metrics["losses"][0] - 0.5


def test_another_number_of_processes_is_refused(monkeypatch):
    monkeypatch.setenv("WORLD_SIZE", "3")
    with pytest.raises(Refusal, match=r"tensor=2 \* pipeline=1 \* data=2 needs 4 processes, torchrun started 3"):
        run_rank(load_config(DEFAULT_CONFIG, ["parallel.data=2"]))


# --- the comparison -----------------------------------------------------------------------------------

METRICS = {
    **load_config(DEFAULT_CONFIG, []).model_dump(mode="json", include={"model", "train", "loss", "parallel", "memory"}),
    "device": "a device",
    "hosts": 1,
    "backend": "gloo",
    "versions": {"torch": "2"},
    "padded_vocab_size": 16384,
    "text": "a text",
    "median_step_seconds": 2,
    "step_peak_bytes": None,
    "loss_peak_bytes": 7 << 20,
    "held_out_loss": None,
}


def _finished(folder: Path, **losses: list[float]) -> Config:
    """A configuration whose runs left these losses, and the same weights."""
    for name, values in losses.items():
        run = folder / name.replace("_reversed", "-reversed")
        run.mkdir()
        (run / "metrics.json").write_text(json.dumps({**METRICS, "losses": values, "step_seconds": values}))
        for rank in range(2):
            torch.save({"a": torch.ones(2, 3), "b": torch.zeros(4)}, run / f"weights-{rank}.pt")
    yardstick = "stock_reversed" in losses
    return load_config(DEFAULT_CONFIG, [f"output={folder}", f"compare.yardstick={yardstick}"])


def _refusal(config: Config) -> str:
    with pytest.raises(Refusal) as refused:
        compare(config)
    assert "\n" not in str(refused.value)
    return str(refused.value)


REVERSED = [3.1, 2.05]  # 0.1 at most, 0.075 in the mean
VERDICTS = {
    "within": ({}, [3.0, 2.00009], True),
    "beyond": ({}, [3.0, 2.00011], False),
    "nan": ({}, [3.0, math.nan], False),
    "as far as the yardstick": ({"stock_reversed": REVERSED}, [3.1, 2.1], True),
    "further at most": ({"stock_reversed": REVERSED}, [3.2, 2.0], False),
    "further in the mean": ({"stock_reversed": REVERSED}, [3.14, 2.14], False),
    "nan beside the yardstick": ({"stock_reversed": REVERSED}, [3.0, math.nan], False),
}


@pytest.mark.parametrize("name", VERDICTS)
def test_the_verdict(name, tmp_path):
    yardstick, ours, agree = VERDICTS[name]
    assert compare(_finished(tmp_path, stock=[3.0, 2.0], parallel_lce=ours, **yardstick)).agree is agree


@pytest.mark.parametrize(("last", "status"), [(1.5, 0), (1.6, 1)])
def test_the_report(last, status, tmp_path, capsys):
    losses = [3 - step / 64 for step in range(96)] + [1.5]
    _finished(tmp_path, stock=losses, parallel_lce=[*losses[:-1], last])
    arguments = [f"output={tmp_path}", f"compare.report={tmp_path / 'report'}"]
    assert program.run("compare", arguments) == status
    said = capsys.readouterr().out
    assert "| 93   |   1.546875 |" in said and f"| 96   |   1.500000 |          {last:.6f} |" in said
    assert "| peak memory of the loss, measured at 8192 tokens, MiB per rank" in said and "|      7.0 |" in said
    verdict = said.splitlines()[-1]
    assert verdict.startswith("FAILED: the loss curves part" if status else "The loss curves agree: ")
    written = (tmp_path / "report" / "report.md").read_text()
    assert verdict in written and f"./launch/demo.sh {' '.join(arguments)}\n" in written and "seed=1234" in written
    assert json.loads((tmp_path / "report" / "report.json").read_text())["agree"] is (status == 0)
    assert (tmp_path / "report" / "report.png").stat().st_size > 10_000


@pytest.mark.parametrize(
    ("changed", "words"),
    [
        ({"losses": [3.0]}, "the runs have 2 steps (stock) and 1 (parallel_lce)"),
        (
            {"losses": [], "versions": None},
            "results of a run: versions=None: input should be an object; losses=[]: list",
        ),
        ({"parallel": {"tensor": 1}}, "the runs differ in parallel.tensor: 2 (stock) and 1 (parallel_lce)"),
        ({"model": {"layers": 2, "hidden": 512, "heads": 4}}, "the runs differ in model.hidden: 256 (stock) and 512"),
        ({"memory": {}}, "the runs differ in memory.micro_batch: 32 (stock) and None (parallel_lce)"),
        (b"\xff", "holds no results of a run: invalid JSON: "),
        (None, "no results of a run at "),
    ],
    ids=str,
)
def test_runs_that_do_not_fit_are_refused(changed, words, tmp_path):
    config = _finished(tmp_path, stock=[3.0, 2.0], parallel_lce=[3.0, 2.0])
    path = tmp_path / "parallel_lce" / "metrics.json"
    run = json.loads(path.read_text())
    run["train"]["reverse_samples"], run["parallel"]["timeout_seconds"], run["hosts"] = True, 7, 2
    path.write_text(json.dumps(run))
    assert compare(config).agree  # in these the runs may differ
    if isinstance(changed, dict):
        path.write_text(json.dumps(run | changed))
    elif changed is None:
        path.unlink()
    else:
        path.write_bytes(changed)
    assert words in _refusal(config)


def test_the_weights_that_differ_most_are_named(tmp_path):
    config = _finished(tmp_path, stock=[3.0], parallel_lce=[3.0])
    torch.save({"a": torch.ones(2, 3), "b": torch.full((4,), 0.25)}, tmp_path / "parallel_lce" / "weights-1.pt")
    assert compare(config).weights == ("b (weights-1)", 0.25)
    torch.save({"a": torch.full((2, 3), math.nan), "b": torch.ones(4)}, tmp_path / "parallel_lce" / "weights-0.pt")
    assert compare(config).weights[0] == "a (weights-0)"
    (tmp_path / "parallel_lce" / "weights-1.pt").write_bytes(b"some text")
    assert "weights-1.pt cannot be read as weights" in _refusal(config)
    for rank in range(2):
        (tmp_path / "stock" / f"weights-{rank}.pt").unlink()
    assert "no weights in" in _refusal(config)


def test_results_of_an_earlier_run_are_removed(tmp_path):
    kept = ["config.yaml", "weights-best.pt", "weights-0.txt", "step-last.safetensors"]
    for name in [*kept, "metrics.json", "weights-0.pt", "weights-11.pt", "step-5.safetensors"]:
        (tmp_path / name).touch()
    remove_results(str(tmp_path))
    assert sorted(path.name for path in tmp_path.iterdir()) == sorted(kept)
    (tmp_path / "metrics.json").mkdir()
    with pytest.raises(Refusal, match=r"metrics\.json cannot be removed: "):
        remove_results(str(tmp_path))
    other = tmp_path / "other" / "step-5.safetensors"  # without a configuration beside it
    other.parent.mkdir()
    other.touch()
    with pytest.raises(Refusal, match=r"step-5.safetensors is of no training that this program knows of"):
        remove_results(str(other.parent))
    assert other.exists()


# --- the demo -----------------------------------------------------------------------------------------


@pytest.fixture
def demo(tmp_path, monkeypatch):
    """``demo(code, *arguments)``: runs the demo, whose trainings end with this code. Its exit status, and the
    commands of the trainings."""
    (tmp_path / "text").write_text("a few words " * 500)
    given = ["--text", str(tmp_path / "text"), f"text.cache={tmp_path / 'cache'}", "text.vocab_size=300"]
    given += ["parallel.device=cpu", "train.sequence=16", f"output={tmp_path}/o #1"]

    def start(code: int, *arguments: str) -> tuple[int, list[list[str]]]:
        commands = []
        ended = subprocess.CompletedProcess([], code)
        monkeypatch.setattr(subprocess, "run", lambda command, env: commands.append(command) or ended)
        with pytest.raises(SystemExit) as exit:
            program.main("demo", [*arguments, *given])
        return exit.value.code, commands

    return start


def test_the_demo_without_results(demo, capsys):
    assert demo(0)[0] == 2 and "error: no results of a run at " in capsys.readouterr().err
    status, commands = demo(0, "--nnodes=2", "--nproc-per-node=1", "--")
    assert status == 0 and "another host has the results" in capsys.readouterr().out
    assert [command[4:6] for command in commands] == [["--nnodes=2", "--nproc-per-node=1"]] * 2


def test_a_demo_that_fails_leaves_no_results_of_an_earlier_one(demo, tmp_path, capsys):
    for name in ("stock", "parallel_lce"):
        (tmp_path / "o #1" / name).mkdir(parents=True)
        (tmp_path / "o #1" / name / "weights-7.pt").touch()
    status, (command,) = demo(3)
    assert status == 1 and "FAILED: the run 'stock' ended with exit code 3" in capsys.readouterr().err
    assert not [*tmp_path.glob("o #1/*/*")]
    assert command[1:4] == ["-P", "-m", "torch.distributed.run"]
    assert command[-3:] == ["loss.impl=stock", "train.reverse_samples=false", f"output={tmp_path / 'o #1' / 'stock'}"]
