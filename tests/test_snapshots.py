"""launch/snapshots.py: what is held out, how the small GPT computes and learns, what is written and what is refused."""

from __future__ import annotations

import json
import math

import numpy as np
import pytest
import torch
import torch.nn.functional as F

pytest.importorskip("omegaconf", reason="needs the training program's packages")
pytest.importorskip("pydantic", reason="needs the training program's packages")
pytest.importorskip("tokenizers", reason="needs the training program's packages")
pytest.importorskip("safetensors", reason="needs the training program's packages")

from safetensors.torch import load_file

from training import snapshot_run
from training.batches import split
from training.config import ROOT, TextConfig
from training.refusal import Refusal
from training.small_gpt import SmallGPT
from training.snapshot_config import load_snapshots, parse_snapshots
from training.snapshot_run import Metrics, is_trained, learning_rate, run, share_done, snapshots_in
from training.text import Text, load_text, read_documents

CONFIGS = sorted((ROOT / "configs").glob("snapshots*.yaml"))
CPU = ROOT / "configs" / "snapshots-cpu.yaml"
WORDS = " ".join(f"{i} times {i % 7} is {i * (i % 7)}," for i in range(4000))
TINY = [
    "text.vocab_size=300",
    "model.hidden=32",
    "train.steps=12",
    "train.sequence=24",
    "train.warmup_steps=2",
    "train.learning_rate=0.01",
    "snapshots.steps=[4, 8, 40]",
    "snapshots.tokens=100",
]


@pytest.fixture
def tiny(tmp_path):
    """``tiny(*overrides)``: a configuration whose training takes a moment."""
    text = tmp_path / "text.txt"
    text.write_text(WORDS)

    def load(*overrides: str):
        folders = [f"text.cache={tmp_path / 'cache'}", f"output={tmp_path / 'out'}"]
        return load_snapshots(CPU, [*TINY, *folders, *overrides], str(text))

    return load


def _text(tokens: int, end: int = -1) -> Text:
    return Text(np.arange(tokens, dtype=np.int32), end, "numbers", tokens)


# --- configurations ----------------------------------------------------------------------------------


def test_there_is_a_configuration_for_each_device():
    assert [path.stem for path in CONFIGS] == ["snapshots-cpu", "snapshots"]
    cpu, gpu = (load_snapshots(path, []) for path in CONFIGS)
    assert (gpu.vocab_size, gpu.model.hidden, gpu.snapshots.steps) == (65536, 1024, [50, 300, 1000])
    assert (gpu.train.device.value, cpu.train.device.value) == ("cuda", "cpu")
    assert parse_snapshots("", []) == (gpu if torch.cuda.is_available() else cpu)


@pytest.mark.parametrize(
    ("override", "words"),
    [
        ("model.heads=5", "model.hidden=128 is not a multiple of model.heads=5"),
        ("model.vocab_size=1000", "model.vocab_size=1000 is less than text.vocab_size=4096"),
        ("train.steps=null", "train.steps and train.minutes are both null"),
        ("train.minutes=0", "train.minutes=0: input should be greater than 0"),
        ("snapshots.steps=[0]", r"snapshots.steps.0=0: input should be greater than or equal to 1"),
        ("snapshots.steps=5", "snapshots.steps=5: input should be a valid list"),
        ("snapshots.tokens=0", "snapshots.tokens=0: input should be greater than or equal to 1"),
        ("train.device=tpu", "train.device='tpu': input should be 'auto', 'cpu' or 'cuda'"),
        ("train.sequences=3", "train.sequences=3: extra inputs are not permitted"),
    ],
)
def test_bad_numbers_are_refused_in_words(override, words):
    with pytest.raises(Refusal, match=words):
        load_snapshots(CPU, [override])


def test_a_gpu_that_is_not_there_is_refused(monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    with pytest.raises(Refusal, match="train.device=cuda needs a GPU, found none"):
        parse_snapshots("", ["train.device=cuda"])


# --- text ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("tokens", "sequence", "samples"), [(100, 9, 4), (50, 9, 4), (57, 3, 13), (20, 4, 1)])
def test_held_out_samples_are_not_trained_on(tokens, sequence, samples):
    held_out, rest = split(_text(tokens), sequence, samples)
    assert held_out.shape == (samples, sequence + 1) and held_out.dtype == torch.int64
    assert torch.equal(held_out, held_out[:, :1] + torch.arange(sequence + 1))  # each is one piece of the text
    assert sorted([*held_out.flatten().tolist(), *rest.tokens.tolist()]) == list(range(tokens))
    assert held_out[0, 0] == 0 and (samples == 1 or held_out[-1, -1] == tokens - 1)


def test_too_little_text_is_refused(tiny):
    needed = r"4000 held-out samples and one to train on, of 25 each, need 100025"
    with pytest.raises(Refusal, match=rf"text.txt has \d+ tokens; {needed}"):
        run(tiny("snapshots.tokens=96000"))


def test_torch_sources_come_after_the_standard_library(tmp_path, monkeypatch):
    from training import text as module

    for name in ("stdlib", "torch"):
        (tmp_path / name / "tests").mkdir(parents=True)
        (tmp_path / name / "tests" / "a.py").write_text("skipped")
        for letter in "ba":
            (tmp_path / name / f"{letter}.py").write_text(f"{name} {letter}")
    monkeypatch.setattr(module.sysconfig, "get_path", lambda _: str(tmp_path / "stdlib"))
    monkeypatch.setattr(module, "_folder_of", lambda package: tmp_path / package)
    config = TextConfig(torch_sources=True, vocab_size=300, max_bytes=1000, cache="unused")
    source, documents = read_documents(config)
    assert source == "the Python standard library's sources and PyTorch's"
    assert documents == ["stdlib a", "stdlib b", "torch a", "torch b"]
    assert read_documents(config.model_copy(update={"max_bytes": 21}))[1] == ["stdlib a", "stdlib b", "torch"]
    assert read_documents(config.model_copy(update={"torch_sources": False}))[1] == ["stdlib a", "stdlib b"]


def test_the_folder_of_torch_is_found():
    from training.text import _folder_of

    assert str(_folder_of("torch")) == str(ROOT.__class__(torch.__file__).parent)
    with pytest.raises(ValueError, match="there is no package no_such_package here"):
        _folder_of("no_such_package")


# --- the model and its training ------------------------------------------------------------------------


def test_the_model_is_causal_and_begins_as_it_should():
    torch.manual_seed(0)
    gpt = SmallGPT(layers=3, hidden=64, heads=4, vocab_size=97, sequence=20).double()
    tokens = torch.randint(97, (2, 20))
    whole = gpt(tokens)
    assert whole.shape == (2, 20, 64)
    changed = tokens.clone()
    changed[:, 12:] = (changed[:, 12:] + 1) % 97
    after = gpt(changed)
    torch.testing.assert_close(after[:, :12], whole[:, :12], rtol=1e-12, atol=1e-12)
    assert (after[:, 12:] - whole[:, 12:]).abs().amin((0, 2)).min() > 0
    torch.testing.assert_close(gpt(tokens[:, :7]), whole[:, :7], rtol=1e-12, atol=1e-12)
    loss = F.cross_entropy((whole @ gpt.head.T).flatten(0, 1), tokens.flatten()).item()
    assert abs(loss - math.log(97)) < 0.1
    stds = {name: p.std().item() for name, p in gpt.named_parameters() if p.dim() == 2}
    for name, std in stds.items():
        ends_branch = "attention_out" in name or "down" in name
        assert std == pytest.approx(0.02 * (6**-0.5 if ends_branch else 1), rel=0.1), name


def test_the_nearer_limit_ends_the_training(tiny):
    train = tiny("train.steps=10", "train.minutes=2").train
    assert share_done(train, 5, 12.0) == 0.5 and share_done(train, 1, 90.0) == 0.75
    alone = tiny("train.steps=null", "train.minutes=0.5").train
    assert share_done(alone, 10**6, 15.0) == 0.5
    assert share_done(tiny("train.minutes=null").train, 6, 1e9) == 0.5


def test_the_learning_rate_rises_then_falls_to_a_tenth(tiny):
    train = tiny("train.learning_rate=3", "train.warmup_steps=3").train
    assert [learning_rate(train, step, 0.0) for step in range(5)] == [0.75, 1.5, 2.25, 3.0, 3.0]
    assert learning_rate(train, 99, 0.5) == pytest.approx(1.65) and learning_rate(train, 99, 1.0) == pytest.approx(0.3)


def test_the_end_of_a_document_is_not_followed_by_a_loss(tiny):
    training = snapshot_run.Training(tiny(), _text(290, end=0), torch.device("cpu"))
    batch = training.windows(0, 3)
    batch.loss_mask[:, 5:] = 0
    hidden, weight = training._inputs(batch.tokens)
    expected = F.cross_entropy((hidden @ weight.T)[:, :5].flatten(0, 1), batch.labels[:, :5].flatten())
    torch.testing.assert_close(training._loss(hidden, weight, batch), expected)


def test_hidden_states_are_the_models_on_text_it_is_not_trained_on(tiny, tmp_path):
    (tmp_path / "out").mkdir()
    config = tiny("train.batch=2")  # the held-out samples take three batches
    training = snapshot_run.Training(config, _text(290), torch.device("cpu"))
    assert not set(training.held_out.flatten().tolist()) & set(training.windows.text.tokens.tolist())
    training._write()
    with torch.no_grad():
        expected = training.gpt(training.held_out[:, :-1]).flatten(0, 1)[:100]
    found = load_file(tmp_path / "out" / "step-0.safetensors")
    torch.testing.assert_close(found["hidden"], expected.bfloat16(), rtol=0, atol=0)
    assert torch.equal(found["weight"], training.gpt.head.bfloat16())


# --- what is written ------------------------------------------------------------------------------------


def test_snapshots_are_what_the_output_layer_sees(tiny, tmp_path, capsys):
    config = tiny("model.vocab_size=320")
    assert not is_trained(config)
    run(config)
    said = capsys.readouterr().out
    assert "of the 320 entries of the vocabulary stand for text" in said
    assert "the training ended after step 12: no snapshot of step 40" in said
    files = snapshots_in(config.output)
    assert [path.name for path in files] == ["step-4.safetensors", "step-8.safetensors", "step-12.safetensors"]
    metrics = Metrics.model_validate_json((tmp_path / "out" / "metrics.json").read_bytes())
    assert metrics.steps == 12 and list(metrics.held_out_losses) == [4, 8, 12] and metrics.entries == 300
    held_out, _ = split(load_text(config.text, 2), 24, 5)
    for path, loss in zip(files, metrics.held_out_losses.values()):
        tensors = load_file(path)
        hidden, weight, target = (tensors.pop(name) for name in ("hidden", "weight", "target"))
        assert not tensors and (hidden.dtype, weight.dtype, target.dtype) == (torch.bfloat16,) * 2 + (torch.int64,)
        assert hidden.shape == (100, 32) and weight.shape == (320, 32)
        assert torch.equal(target, held_out[:, 1:].flatten()[:100])
        expected = F.cross_entropy(hidden.double() @ weight.double().T, target)
        assert loss == pytest.approx(expected.item(), rel=1e-5)
    losses = list(metrics.held_out_losses.values())
    assert math.log(320) > losses[0] > losses[1] > losses[2]  # it learns


def test_a_seed_determines_the_snapshots(tiny, tmp_path):
    parts = []
    for seed in (1, 1, 2):
        run(tiny(f"train.seed={seed}", "train.steps=3", "snapshots.steps=[]"))
        parts.append(load_file(tmp_path / "out" / "step-3.safetensors"))
    assert all(torch.equal(parts[0][name], parts[1][name]) for name in parts[0])
    assert not torch.equal(parts[0]["hidden"], parts[2]["hidden"]) and torch.equal(
        parts[0]["target"], parts[2]["target"]
    )


def test_a_training_is_known_again(tiny, tmp_path):
    short = ("train.steps=2", "snapshots.steps=[1]")
    config, folder = tiny(*short), tmp_path / "out"
    run(config)
    assert is_trained(config) and is_trained(load_snapshots(folder / "config.yaml", []))
    assert is_trained(tiny(*short, f"text.cache={tmp_path / 'elsewhere'}"))
    with pytest.raises(Refusal, match=r"out has snapshots of another configuration: give another output="):
        is_trained(tiny(*short, "train.seed=7"))
    (folder / "step-1.safetensors").unlink()
    assert not is_trained(config)
    run(config)
    (folder / "metrics.json").write_text(json.dumps({"config": 3}))
    with pytest.raises(Refusal, match=r"metrics.json is not what a training writes"):
        is_trained(config)
    (folder / "metrics.json").unlink()
    assert not is_trained(config)  # as after a training that was interrupted


def test_a_new_training_removes_the_snapshots_of_the_last(tiny, tmp_path):
    run(tiny("train.steps=2", "snapshots.steps=[1]"))
    (tmp_path / "out" / "step-last.safetensors").touch()  # of the user
    run(tiny("train.steps=3", "snapshots.steps=[]"))
    assert [path.name for path in snapshots_in(str(tmp_path / "out"))] == ["step-3.safetensors"]
    assert (tmp_path / "out" / "step-last.safetensors").exists()


def test_files_of_others_are_not_removed(tiny, tmp_path):
    other = tmp_path / "out" / "step-5.safetensors"
    other.parent.mkdir()
    other.touch()
    with pytest.raises(Refusal, match=r"step-5.safetensors is of no training that this program knows of"):
        run(tiny("train.steps=1", "snapshots.steps=[]"))
    assert other.exists()
