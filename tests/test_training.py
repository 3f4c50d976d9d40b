"""The training program under launch/: its configurations, its layouts, its verdict."""

from __future__ import annotations

import json
import math
import os
import runpy
import socket
import subprocess
import sys
from pathlib import Path

import pytest
import torch

pytest.importorskip("megatron.core", reason="needs megatron-core")
pytest.importorskip("omegaconf", reason="needs the training program's packages")

from training.comparison import compare
from training.config import DEFAULT_CONFIG, ROOT, Config, TrainConfig, describe, load_config
from training.refusal import Refusal
from training.runs import remove_results
from training.text import Text, by_frequency

# Those of snapshots.py are of another schema: tests/test_snapshots.py
CONFIGS = [path for path in sorted((ROOT / "configs").glob("*.yaml")) if not path.stem.startswith("snapshots")]
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
        (["train.held_out_samples=7"], "train.held_out_samples=7 is not a multiple of train.micro_batch=8"),
        (
            ["loss.gradient_filter=1"],
            "^loss.gradient_filter=1: expected null or a number between 0 and 1, such as 0.000122",
        ),
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
        [
            sys.executable,
            "-c",
            "import warnings, training.worker\n"
            "from parallel_lce.megatron import LogitsWarning\n"
            "for category in (UserWarning, LogitsWarning):\n"
            "    warnings.warn_explicit(category.__name__, category, 'file', 1, module='megatron.core.models')",
        ],
        env={
            **os.environ,
            "PYTHONPATH": os.pathsep.join(map(str, (ROOT, ROOT / "launch")))
            + os.pathsep
            + os.environ.get("PYTHONPATH", ""),
        },
        capture_output=True,
        text=True,
        timeout=TIMEOUT,
    )
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
    """``train(name, *overrides, nodes=1)``: a tiny training on CPUs through torchrun; the losses of its steps.

    `own`: torchrun is not started by train.py.
    """
    folder = tmp_path_factory.mktemp("training")
    text = folder / "text.txt"
    (folder / "signal.py").write_text("raise SystemExit('Python has another one')")
    text.write_text(" ".join(f"{i} times {i % 7} is {i * (i % 7)}," for i in range(4000)))
    settings = [
        "train.steps=4",
        "train.sequence=16",
        "train.micro_batch=2",
        "train.learning_rate=0.01",
        "train.warmup_steps=1",
        "model.hidden=32",
        "model.ffn_hidden=64",
        "text.vocab_size=300",
        f"text.cache={folder / 'cache'}",
        "parallel.tensor=1",
        "parallel.device=cpu",
        "memory.micro_batch=null",
        "save_weights=false",
    ]

    def run(name: str, *overrides: str, nodes: int = 1, own: bool = False, report: Path | None = None) -> list[float]:
        torchrun = ["-m", "torch.distributed.run", "--nproc-per-node=1"] if own else []
        program = [sys.executable, *torchrun, str(ROOT / "launch" / "train.py")]
        arguments = ["--text", str(text), *settings, f"output={folder / name}", *overrides]
        commands = [[*program, *arguments]]
        if nodes > 1:
            port = _free_port()
            torchrun = [f"--nnodes={nodes}", "--master-addr=localhost", f"--master-port={port}", "--nproc-per-node=1"]
            commands = [[*program, *torchrun, f"--node-rank={n}", "--", *arguments] for n in range(nodes)]
        environment = os.environ | {"PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
        pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.STDOUT, "text": True, "cwd": None if own else folder}
        processes = [subprocess.Popen(command, env=environment, **pipes) for command in commands]
        try:
            outputs = [process.communicate(timeout=TIMEOUT)[0] for process in processes]
        finally:
            for process in processes:
                process.kill()
        assert [process.returncode for process in processes] == [0] * nodes, "\n".join(outputs)
        return json.loads(((report or folder / name) / "metrics.json").read_text())["losses"]

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
        pytest.param(
            1, ["parallel.pipeline=2", "train.micro_batches=4", "model.recompute=true"], marks=pytest.mark.slow
        ),
    ],
    ids=["two-nodes-of-data-parallel", "pipeline"],
)
def test_losses_are_those_of_one_process_with_the_stock_loss(train, alone, nodes, overrides):
    losses = train(f"{nodes}-nodes", *overrides, "model.tie_embeddings=true", nodes=nodes)
    assert losses == pytest.approx(alone, abs=1e-5)


@pytest.mark.slow
def test_an_ordered_vocabulary_with_filtered_gradients_learns(train, tmp_path):
    overrides = ["train.micro_batches=4", "model.tie_embeddings=true", "train.held_out_samples=4"]
    overrides += ["model.order_vocabulary=true", "parallel.tensor=2", "loss.gradient_filter=0.0001"]
    losses = train("ordered", *overrides, f"output={tmp_path}", report=tmp_path)
    assert losses[-1] < losses[0] - 0.5
    held_out = json.loads((tmp_path / "metrics.json").read_text())["held_out_loss"]
    assert held_out < losses[0] - 0.5


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


METRICS = {
    **describe(load_config(DEFAULT_CONFIG, [])),
    "device": "a device",
    "processes": 2,
    "hosts": 1,
    "backend": "gloo",
    "versions": {"torch": "2"},
    "padded_vocab_size": 16384,
    "text": "a text",
    "tokens_per_step": 100,
    "tokens_per_second": 50.0,
    "median_step_seconds": 2,
    "step_peak_bytes": None,
    "loss_peak_bytes": 7,
    "loss_peak_tokens": 9,
}


def _finished(folder: Path, **losses: list[float]) -> Config:
    """A configuration whose runs left these losses."""
    for name, values in losses.items():
        run = folder / name.replace("_reversed", "-reversed")
        run.mkdir()
        (run / "metrics.json").write_text(json.dumps({**METRICS, "losses": values}))
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


def _refusal(config: Config) -> str:
    with pytest.raises(Refusal) as refused:
        compare(config)
    assert "\n" not in str(refused.value)
    return str(refused.value)


@pytest.mark.parametrize(
    ("changed", "words"),
    [
        ({"losses": []}, "losses: List should have at least 1 item"),
        ({"losses": ["3"]}, "losses.0: Input should be a valid number"),
        ({"losses": [10**400]}, "losses.0: "),
        ({"model": {}}, "model.layers: Field required"),
        ({"versions": None}, "versions: Input should be a valid dictionary"),
        ({"step_peak_bytes": "7"}, "step_peak_bytes: Input should be a valid integer"),
        *(({key: ...}, f"{key}: Field required") for key in METRICS if key != "loss"),
    ],
    ids=str,
)
def test_results_that_the_report_cannot_show_are_refused(changed, words, tmp_path):
    config = _finished(tmp_path, stock=[3.0], parallel_lce=[3.0])
    path = tmp_path / "parallel_lce" / "metrics.json"
    run = {**json.loads(path.read_text()), **changed}
    path.write_text(json.dumps({key: value for key, value in run.items() if value is not ...}))
    said = _refusal(config)
    assert said.startswith(f"{path} holds no results of a run: ") and words in said


@pytest.mark.parametrize(
    "content", [b"", b"\xff", b"[]", b"7", b"{}", b"[" * 100_000, b"9" * 5000], ids=lambda content: str(content[:9])
)
def test_what_is_no_metrics_file_is_refused(content, tmp_path):
    config = _finished(tmp_path, stock=[3.0], parallel_lce=[3.0])
    (tmp_path / "stock" / "metrics.json").write_bytes(content)
    assert " holds no results of a run: " in _refusal(config)


@pytest.mark.parametrize(
    ("section", "changed", "words"),
    [
        ("parallel", {"tensor": 1}, "parallel.tensor: 2 (stock) and 1 (parallel_lce)"),
        ("model", {"hidden": 512}, "model.hidden: 256 (stock) and 512 (parallel_lce)"),
        ("train", {"seed": 0}, "train.seed: 1234 (stock) and 0 (parallel_lce)"),
        (None, {"backend": "nccl"}, "backend: gloo (stock) and nccl (parallel_lce)"),
        (None, {"loss_peak_tokens": None}, "loss_peak_tokens: 9 (stock) and None (parallel_lce)"),
    ],
    ids=str,
)
def test_runs_of_other_settings_are_refused(section, changed, words, tmp_path):
    config = _finished(tmp_path, stock=[3.0], parallel_lce=[3.0])
    path = tmp_path / "parallel_lce" / "metrics.json"
    run = json.loads(path.read_text())
    (run if section is None else run[section]).update(changed)
    path.write_text(json.dumps(run))
    assert _refusal(config) == f"the runs differ in {words}"


def test_runs_may_differ_in_what_does_not_matter(tmp_path):
    config = _finished(tmp_path, stock=[3.0], parallel_lce=[3.0])
    path = tmp_path / "parallel_lce" / "metrics.json"
    run = json.loads(path.read_text())
    run["train"]["reverse_samples"], run["parallel"]["timeout_seconds"], run["hosts"] = True, 7, 2
    path.write_text(json.dumps(run))
    assert compare(config).agree


def _with_weights(folder: Path) -> Config:
    """Two finished runs, each of the same weights."""
    config = _finished(folder, stock=[3.0], parallel_lce=[3.0])
    config.save_weights = True
    for name in ("stock", "parallel_lce"):
        for rank in range(2):
            torch.save({"a": torch.ones(2, 3), "b": torch.zeros(4)}, folder / name / f"weights-{rank}.pt")
    return config


def test_the_weights_that_differ_most_are_named(tmp_path):
    config = _with_weights(tmp_path)
    torch.save({"a": torch.ones(2, 3), "b": torch.full((4,), 0.25)}, tmp_path / "parallel_lce" / "weights-1.pt")
    assert compare(config).weights == ("b (weights-1)", 0.25)
    torch.save({"a": torch.full((2, 3), math.nan), "b": torch.ones(4)}, tmp_path / "parallel_lce" / "weights-0.pt")
    assert compare(config).weights[0] == "a (weights-0)"


WEIGHTS = {
    "missing": (None, "left weights-1.pt"),
    "empty": (b"", "weights-1.pt cannot be read as weights"),
    "no such file": (b"some text", "weights-1.pt cannot be read as weights"),
    "a program": ({"a": subprocess.run}, "weights-1.pt cannot be read as weights"),
    "a list": ([torch.ones(2)], "weights-1.pt holds no weights of a run"),
    "nothing": ({}, "weights-1.pt holds no weights of a run"),
    "numbers": ({"a": 1.0, "b": 2.0}, "weights-1.pt holds no weights of a run"),
    "integers": ({"a": torch.ones(2, 3).long(), "b": torch.zeros(4)}, "weights-1.pt holds no weights of a run"),
    "another shape": ({"a": torch.ones(2, 3), "b": torch.zeros(5)}, "different parameters in weights-1.pt: b"),
    "another name": ({"a": torch.ones(2, 3), "c": torch.zeros(4)}, "different parameters in weights-1.pt: b, c"),
}


@pytest.mark.parametrize("kind", ["cut", *WEIGHTS])
@pytest.mark.parametrize("name", ["stock", "parallel_lce"])
def test_weights_that_cannot_be_compared_are_refused(name, kind, tmp_path):
    config = _with_weights(tmp_path)
    path = tmp_path / name / "weights-1.pt"
    content, words = WEIGHTS.get(kind, (path.read_bytes()[:1000], "weights-1.pt cannot be read as weights"))
    path.unlink()
    if isinstance(content, bytes):
        path.write_bytes(content)
    elif content is not None:
        torch.save(content, path)
    assert words in _refusal(config)


def test_results_of_an_earlier_run_are_removed(tmp_path):
    kept, gone = ["config.yaml", "weights-best.pt", "weights-0.txt"], ["metrics.json", "weights-0.pt", "weights-11.pt"]
    for name in kept + gone:
        (tmp_path / name).touch()
    remove_results(str(tmp_path))
    remove_results(str(tmp_path / "none"))
    assert sorted(path.name for path in tmp_path.iterdir()) == sorted(kept)
    (tmp_path / "metrics.json").mkdir()
    with pytest.raises(Refusal, match=r"metrics\.json cannot be removed: "):
        remove_results(str(tmp_path))


@pytest.mark.slow
def test_a_run_begins_without_the_results_of_another(train, tmp_path):
    """Of more ranks, say. Under a torchrun of the user's own as well."""
    for start in ("ours", "of the user's own"):
        for name in ("weights-1.pt", "metrics.json"):
            (tmp_path / name).touch()
        train(str(tmp_path), "train.steps=1", "save_weights=true", own=start != "ours")
        assert {path.name for path in tmp_path.iterdir()} == {"config.yaml", "metrics.json", "weights-0.pt"}


@pytest.fixture
def demo(tmp_path, monkeypatch):
    """``demo(*arguments)``: the exit status of the demo, whose runs are not started."""
    (tmp_path / "text").write_text("a few words " * 500)

    def start(*arguments: str) -> int:
        given = ["--text", str(tmp_path / "text"), f"text.cache={tmp_path / 'cache'}", "text.vocab_size=300"]
        given += ["parallel.device=cpu", f"output={tmp_path}/o #1"]
        monkeypatch.setattr(sys, "argv", ["demo.py", *arguments, *given])
        return runpy.run_path(str(ROOT / "launch" / "demo.py"))["main"]()

    monkeypatch.setattr(subprocess, "run", lambda command, env: subprocess.CompletedProcess(command, 0))
    return start


def test_the_demo_without_results(demo, tmp_path, capsys):
    assert demo() == 1
    assert capsys.readouterr().err == f"FAILED: the run left no results in {tmp_path / 'o #1' / 'stock'}\n"
    assert demo("--nnodes=1", "--nproc-per-node=2", "--") == 1
    assert demo("--nnodes=2", "--nproc-per-node=1", "--") == 0
    assert "another host has the results" in capsys.readouterr().out


def test_the_demo_starts_without_results(demo, tmp_path, monkeypatch):
    """None is left even where the first run fails."""
    for name in ("stock", "parallel_lce"):
        (tmp_path / "o #1" / name).mkdir(parents=True)
        (tmp_path / "o #1" / name / "weights-7.pt").touch()
    commands = []
    monkeypatch.setattr(
        subprocess, "run", lambda command, env: commands.append(command) or subprocess.CompletedProcess(command, 3)
    )
    assert demo() == 1
    assert not [*tmp_path.glob("o #1/*/*")]
    (command,) = commands
    assert command[1:4] == ["-P", "-m", "torch.distributed.run"]
    assert command[-1] == f"output={tmp_path / 'o #1' / 'stock'}"
