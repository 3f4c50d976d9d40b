"""The training program under launch/: its batches, its layouts, its snapshots, its verdict."""

from __future__ import annotations

import importlib
import json
import math
import os
import socket
import subprocess
import sys
import warnings
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
import pytest
import torch
import torch.nn.functional as F

pytest.importorskip("megatron.core", reason="needs the training program's packages")
pytest.importorskip("tokenizers", reason="needs the training program's packages")

from megatron.core.transformer.enums import AttnMaskType
from megatron.core.transformer.transformer_config import TransformerConfig
from safetensors.torch import load_file

import program  # of launch/
import training
from parallel_lce.megatron import LogitsWarning
from tools import ran
from training.attention import CausalAttention
from training.batches import Batches, split
from training.comparison import compare
from training.config import DEFAULT_CONFIG, ROOT, Config, TrainConfig, load_config
from training.refusal import Refusal
from training.results import is_trained, read_metrics, remove_results, snapshots_in
from training.step import learning_rate
from training.text import Text, by_frequency, load_text
from training.worker import share_done


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


@pytest.mark.parametrize(("tokens", "sequence", "samples"), [(100, 9, 4), (50, 9, 4), (20, 4, 1)])
def test_held_out_samples_are_not_trained_on(tokens, sequence, samples):
    held_out, rest = split(numbers(tokens), sequence, samples)
    assert held_out.shape == (samples, sequence + 1) and held_out.dtype == torch.int64
    assert torch.equal(held_out, held_out[:, :1] + torch.arange(sequence + 1))  # each is one piece of the text
    assert sorted([*held_out.flatten().tolist(), *rest.tokens.tolist()]) == list(range(tokens))
    assert held_out[0, 0] == 0 and (samples == 1 or held_out[-1, -1] == tokens - 1)


def test_a_text_by_frequency():
    tokens = np.array([8] * 50 + [3] * 30 + [4] * 5 + [2, 5], dtype=np.int32)
    found = by_frequency(Text(tokens, 4, "somewhere", 10), rows=12, ranks=2)
    # The most frequent two are the first rows of the two shards, the third is the second of the first.
    assert found.tokens.dtype == np.int32 and found.end_of_document == 1
    assert found.tokens.tolist()[:85] == [0] * 50 + [6] * 30 + [1] * 5


def test_the_nearer_limit_ends_the_training_and_the_learning_rate_rises_then_falls():
    def done(step: int, seconds: float, **limits) -> float:
        return share_done(TrainConfig.model_construct(**({"steps": None, "minutes": None} | limits)), step, seconds)

    assert done(5, 12.0, steps=10, minutes=2) == 0.5 and done(1, 90.0, steps=10, minutes=2) == 0.75
    assert done(10**6, 15.0, minutes=0.5) == 0.5 and done(6, 1e9, steps=12) == 0.5
    train = TrainConfig.model_construct(learning_rate=3.0, warmup_steps=3, last_rate=0.1)
    assert [learning_rate(train, step, 0.0) for step in range(5)] == [0.75, 1.5, 2.25, 3.0, 3.0]
    assert learning_rate(train, 99, 0.5) == pytest.approx(1.65) and learning_rate(train, 99, 1.0) == pytest.approx(0.3)


@pytest.mark.parametrize("kv_heads", [6, 2, 1])
def test_attention_is_causal_softmax(kv_heads):
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
    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always")
        importlib.reload(training)  # its filters are those of the program
        for category in (UserWarning, LogitsWarning):
            warnings.warn_explicit(category.__name__, category, "file", 1, module="megatron.core.models")
    assert [each.category for each in said] == [LogitsWarning]


# --- trainings ----------------------------------------------------------------------------------------


SMALL = """train.sequence=16 train.micro_batch=2 train.learning_rate=0.01 train.warmup_steps=1 model.hidden=32
    text.vocab_size=300 parallel.tensor=1 parallel.device=cpu memory.micro_batch=null""".split()


@pytest.fixture(scope="module")
def work(tmp_path_factory) -> Path:
    """A folder with a text, and the user's own file, called like a module of Python's."""
    folder = tmp_path_factory.mktemp("training")
    (folder / "signal.py").write_text("raise SystemExit('Python has another one')")
    (folder / "text.txt").write_text(" ".join(f"{i} times {i % 7} is {i * (i % 7)}," for i in range(4000)))
    return folder


@pytest.fixture(scope="module")
def start(work):
    """``start(command, *arguments)``: runs a program of launch/, on each of several hosts where torchrun's arguments
    are lists. The words of the first."""

    def run(command: str, *arguments: str, nodes: tuple[list[str], ...] = ([],)) -> str:
        own = [f"--text={work / 'text.txt'}", f"text.cache={work / 'cache'}", *SMALL, *arguments]
        program = [sys.executable, *f"{ROOT / 'launch'}/{command}".split()]
        with ThreadPoolExecutor() as pool:
            runs = [pool.submit(ran, *program, *node, *own, cwd=work, env={"PYTHONPATH": str(ROOT)}) for node in nodes]
        for each in runs:
            assert each.result().returncode == 0, each.result().stdout + each.result().stderr
        return runs[0].result().stdout

    return run


@pytest.fixture
def train(start, tmp_path):
    """``train(*overrides, nodes=1)``: the metrics of a training on CPUs."""

    def run(*overrides: str, nodes: int = 1) -> dict:
        with socket.socket() as listener:
            listener.bind(("localhost", 0))
            port = listener.getsockname()[1]
        torchrun = [f"--nnodes={nodes}", "--master-addr=localhost", f"--master-port={port}", "--nproc-per-node=1"]
        starts = [[*torchrun, f"--node-rank={node}", "--"] for node in range(nodes)] if nodes > 1 else [[]]
        settings = ["train.steps=4", "model.tie_embeddings=true", f"output={tmp_path / 'out'}", *overrides]
        start("program.py train", *settings, nodes=tuple(starts))
        return json.loads((tmp_path / "out" / "metrics.json").read_text())

    return run


def test_losses_are_those_of_one_process_with_the_stock_loss(train):
    alone = train("train.micro_batches=4", "loss.impl=stock")["losses"]
    assert alone[-1] < alone[0] - 0.1  # it learns
    layout = ["parallel.data=2", "train.micro_batches=2", "parallel.distributed_optimizer=true"]
    assert train(*layout, nodes=2)["losses"] == pytest.approx(alone, abs=1e-5)


@pytest.mark.slow
def test_losses_on_two_pipeline_stages_are_those_of_stock(train):
    layout = ["parallel.pipeline=2", "train.micro_batches=4", "model.recompute=true"]
    stock, ours = (train(*layout, f"loss.impl={impl}")["losses"] for impl in ("stock", "parallel_lce"))
    assert stock[-1] < stock[0] - 0.1 and ours == pytest.approx(stock, abs=1e-5)


@pytest.mark.slow
def test_an_ordered_vocabulary_with_filtered_gradients_learns(train):
    overrides = ["train.micro_batches=4", "train.held_out_samples=4", "memory.micro_batch=2"]
    overrides += ["model.order_vocabulary=true", "parallel.tensor=2", "loss.gradient_filter=0.0001"]
    metrics = train(*overrides)
    assert metrics["losses"][-1] < metrics["losses"][0] - 0.5 and metrics["loss_peak_bytes"] > 0
    assert metrics["held_out_loss"] < metrics["losses"][0] - 0.5


@pytest.mark.parametrize("path", sorted((ROOT / "configs").glob("*.args")), ids=lambda path: path.stem)
def test_megatrons_arguments_describe_the_configuration_beside_them(path):
    """One flag on a line, and whole lines of comments, which `grep -v '^#'` takes away."""
    lines = [line for line in path.read_text().splitlines() if not line.startswith("#")]
    assert all(line.startswith("--") and line.count(" ") <= 1 for line in lines), lines
    flags = dict((*line.split(" "), None)[:2] for line in lines)
    config = load_config(path.with_suffix(".yaml"), [])
    model, train, parallel = config.model, config.train, config.parallel
    numbers = {
        "--num-layers": model.layers,
        "--hidden-size": model.hidden,
        "--ffn-hidden-size": model.ffn_hidden,
        "--num-attention-heads": model.heads,
        "--num-query-groups": model.kv_heads,
        "--vocab-size": model.vocab_size - 1,  # NullTokenizer adds one
        "--rotary-base": model.rotary_base,
        "--seq-length": train.sequence,
        "--max-position-embeddings": train.sequence,
        "--micro-batch-size": train.micro_batch,
        "--global-batch-size": train.micro_batch * train.micro_batches * parallel.data,
        "--train-iters": train.steps,
        "--lr": train.learning_rate,
        "--lr-warmup-iters": train.warmup_steps,
        "--weight-decay": train.weight_decay,
        "--clip-grad": train.clip_grad,
        "--seed": train.seed,
        "--tensor-model-parallel-size": parallel.tensor,
        "--pipeline-model-parallel-size": parallel.pipeline,
    }
    assert {name: float(flags[name]) for name in numbers} == numbers
    assert float(flags.get("--kv-channels", model.hidden // model.heads)) == model.head_dim
    switches = {
        "--untie-embeddings-and-output-weights": not model.tie_embeddings,
        "--sequence-parallel": parallel.sequence,
        "--use-distributed-optimizer": parallel.distributed_optimizer,
        "--overlap-grad-reduce": parallel.overlap_grad_reduce,
        "--recompute-granularity": model.recompute,
    }
    assert {name: name in flags for name in switches} == switches
    assert "--cross-entropy-loss-fusion" in flags and flags["--cross-entropy-fusion-impl"] == "parallel_lce"


# --- snapshots ----------------------------------------------------------------------------------------

CPU = ROOT / "configs" / "snapshots-cpu.yaml"


@pytest.fixture(scope="module")
def trained(start, work):
    """``trained(*overrides)``: the configuration of a training that launch/snapshots.py has done, and its arguments."""
    own = ["train.steps=30", "train.sequence=24", "train.micro_batch=8", "snapshots.steps=[4,8,40]"]
    own += ["snapshots.tokens=120", f"output={work / 'snapshots'}"]
    said = start("snapshots.py", *own)
    assert "300 of the 300 entries of the vocabulary stand for text" in said
    own = [*SMALL, f"text.path={work / 'text.txt'}", f"text.cache={work / 'cache'}", *own]
    return lambda *overrides: (load_config(CPU, [*own, *overrides]), [*own, *overrides])


def test_snapshots_are_what_the_output_layer_sees(trained):
    config, _ = trained()
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
    config, _ = trained()
    assert is_trained(config) and is_trained(trained("text.cache=elsewhere")[0])
    assert not is_trained(trained("output=elsewhere")[0])
    with pytest.raises(Refusal, match="has snapshots of another configuration: give another output="):
        is_trained(trained("train.seed=7")[0])
    with pytest.raises(Refusal, match="snapshots=None: the report needs some"):
        is_trained(trained("snapshots=null")[0])
    folder = Path(config.output)
    for name in ("step-8.safetensors", "metrics.json"):  # the latter is missing after a training that was interrupted
        (folder / name).rename(folder / "away")
        assert not is_trained(config)
        (folder / "away").rename(folder / name)


@pytest.mark.parametrize("name", ["parity", "gradient_filter"])
def test_a_report_is_given_the_snapshots(name, trained, tmp_path, monkeypatch):
    started, (config, arguments) = [], trained()
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    monkeypatch.setattr(os, "execve", lambda path, command, environment: started.append(command))
    monkeypatch.setattr(subprocess, "run", lambda *_, **__: pytest.fail("nothing is to be trained"))
    program.run(name, [*arguments, "--", "--device", "cpu"])
    files = map(str, snapshots_in(config.output))
    assert started == [[sys.executable, "-P", "-m", f"benchmarks.{name}", *files, "--device", "cpu"]]
    _, arguments = trained("snapshots.tokens=96000", f"output={tmp_path}")
    with pytest.raises(Refusal, match=r"text.txt has \d+ tokens, fewer than the 100025 of the samples"):
        program.run(name, [*arguments, "--"])
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)  # configs/snapshots.yaml is for GPUs
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 0)
    with pytest.raises(Refusal, match="parallel.device=cuda needs a GPU"):
        program.run("snapshots", [f"output={tmp_path}"])


# --- the comparison -----------------------------------------------------------------------------------

METRICS = {
    "config": load_config(DEFAULT_CONFIG, []).model_dump(mode="json"),
    **dict(device="a device", hosts=1, backend="gloo", versions={"torch": "2"}, text="a text"),
    **dict(median_step_seconds=2, step_peak_bytes=None, loss_peak_bytes=7 << 20, held_out_loss=None),
}


def _finished(folder: Path, **losses: list[float]) -> Config:
    """A configuration whose runs left these losses."""
    for name, values in losses.items():
        run = folder / name.replace("_reversed", "-reversed")
        run.mkdir()
        (run / "metrics.json").write_text(json.dumps({**METRICS, "losses": values, "step_seconds": values}))
    yardstick = "stock_reversed" in losses
    return load_config(DEFAULT_CONFIG, [f"output={folder}", f"compare.yardstick={yardstick}"])


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
        ({"losses": []}, "holds no results of a run: losses=[]: li"),
        ({"parallel.tensor": 1}, "the runs differ in parallel.tensor: 2 (stock) and 1 (parallel_lce)"),
        ({"memory.micro_batch": None}, "the runs differ in memory.micro_batch: 32 (stock) and None (parallel_lce)"),
        (b"\xff", "holds no results of a run: Invalid JSON: "),
        (None, "no results of a run at "),
    ],
    ids=str,
)
def test_runs_that_do_not_fit_are_refused(changed, words, tmp_path):
    config = _finished(tmp_path, stock=[3.0, 2.0], parallel_lce=[3.0, 2.0])
    path = tmp_path / "parallel_lce" / "metrics.json"
    run = json.loads(path.read_text()) | {"hosts": 2}
    run["config"]["train"]["reverse_samples"], run["config"]["parallel"]["timeout_seconds"] = True, 7
    path.write_text(json.dumps(run))
    assert compare(config).agree  # in these the runs may differ
    path.unlink()
    for key, value in changed.items() if isinstance(changed, dict) else ():
        section, _, name = key.rpartition(".")
        (run["config"][section] if section else run)[name] = value
        path.write_text(json.dumps(run))
    if isinstance(changed, bytes):
        path.write_bytes(changed)
    with pytest.raises(Refusal) as refused:
        compare(config)
    assert words in str(refused.value) and "\n" not in str(refused.value)


def test_results_of_an_earlier_run_are_removed(tmp_path):
    kept = ["config.yaml", "step-last.safetensors"]
    for name in [*kept, "metrics.json", "step-5.safetensors", "step-11.safetensors"]:
        (tmp_path / name).touch()
    remove_results(tmp_path)
    assert sorted(path.name for path in tmp_path.iterdir()) == kept
    (tmp_path / "config.yaml").unlink()
    (tmp_path / "step-5.safetensors").touch()
    with pytest.raises(Refusal, match=r"step-5.safetensors is of no training that this program knows of"):
        remove_results(tmp_path)
    assert (tmp_path / "step-5.safetensors").exists()


# --- the demo -----------------------------------------------------------------------------------------


def test_a_demo_that_fails_or_runs_elsewhere(work, tmp_path, monkeypatch, capsys):
    for name in ("stock", "parallel_lce"):  # results of an earlier one, which must not stay
        (tmp_path / "o #1" / name).mkdir(parents=True)
        (tmp_path / "o #1" / name / "metrics.json").touch()
    given = ["--text", str(work / "text.txt"), f"text.cache={work / 'cache'}", *SMALL, "parallel.tensor=2"]
    hosts = ["--nnodes=2", "--nproc-per-node=1"]
    for code, torchrun, status, words in (
        (3, [], 1, "FAILED: the run 'stock' ended with exit code 3"),
        (0, [], 2, "error: no results of a run at "),
        (0, [*hosts, "--"], 0, "another host has the results"),
    ):
        commands, ended = [], subprocess.CompletedProcess([], code)
        monkeypatch.setattr(subprocess, "run", lambda command, env: commands.append(command) or ended)
        with pytest.raises(SystemExit) as exit:
            program.main("demo", [*torchrun, *given, f"output={tmp_path}/o #1"])
        assert exit.value.code == status and words in "".join(capsys.readouterr())
        assert not [*tmp_path.glob("o #1/*/*")]
        assert len(commands) == (1 if code else 2) and commands[0][1:4] == ["-P", "-m", "torch.distributed.run"]
        folder = tmp_path / "o #1" / "stock"
        assert commands[0][-3:] == ["loss.impl=stock", "train.reverse_samples=false", f"output={folder}"]
    assert [command[4:6] for command in commands] == [hosts] * 2
