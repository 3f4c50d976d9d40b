"""A user's mistake gives one line and exit status 2, before any process of a training starts."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest

pytest.importorskip("pydantic", reason="needs the training program's packages")
pytest.importorskip("tokenizers", reason="needs the training program's packages")

from training.config import DEFAULT_CONFIG, ROOT, load_config, parse_command_line, save_config
from training.refusal import Refusal
from training.start import Training

TIMEOUT = 120
CPU = "parallel.device=cpu"


def _refusal(*arguments: str, torchrun: tuple[str, ...] = ()) -> str:
    """What the program says in one line."""
    with pytest.raises(Refusal) as refused:
        Training(parse_command_line("", list(arguments)), list(torchrun), []).prepare()
    said = str(refused.value)
    assert said and "\n" not in said
    return said


@pytest.fixture(autouse=True)
def without_gpus(monkeypatch):
    """What the host has is what the tests say."""
    import torch

    monkeypatch.setattr(torch.cuda, "device_count", lambda: 0)


SETTINGS = {
    # The model, the training and the layout have to fit.
    "model.heads=6": "model.hidden=256 is not a multiple of model.heads=6",
    "model.kv_heads=3": "model.heads=4 is not a multiple of model.kv_heads=3",
    "model.kv_heads=1": "model.kv_heads=1 is not a multiple of parallel.tensor=2",
    "model.ffn_hidden=7": "model.ffn_hidden=7 is not a multiple of parallel.tensor=2",
    "model.head_dim=3": "model.head_dim=3 is not even",
    "model.vocab_size=1000": "model.vocab_size=1000 is less than text.vocab_size=16384",
    "parallel.pipeline=4": "model.layers=2 is not a multiple of parallel.pipeline=4",
    "train.sequence=255": "train.sequence=255 is not a multiple of parallel.tensor=2",
    "train.steps=null": "train.steps and train.minutes are both null",
    "train.minutes=1": "train.minutes needs a single process, got parallel.tensor=2 * pipeline=1 * data=1",
    "snapshots={tokens: 8}": "snapshots needs a single process, got parallel.tensor=2 * pipeline=1 * data=1",
    "train.precision=bf16": "train.precision=bf16 needs GPUs; on a CPU it must be fp32",
    "train.clip_grad=1": "train.clip_grad=1.0 needs GPUs; on a CPU it must be 0",
    "parallel.device=cuda": "parallel.device=cuda needs a GPU for each of this host's 2 processes, found 0",
    # Values, by the kind of the setting.
    "parallel.device=tpu": "parallel.device='tpu': input should be 'auto', 'cpu' or 'cuda'",
    "parallel.sequence=maybe": "parallel.sequence='maybe': input should be a valid boolean",
    "loss.logits_budget_mib=.nan": "loss.logits_budget_mib=nan: input should be",
    "loss.gradient_filter=2": "loss.gradient_filter=2: input should be less than 1",
    "loss.impl=theirs": "loss.impl='theirs': input should be 'stock' or 'parallel_lce'",
    "train.learning_rate=1e300": "train.learning_rate=1e+300: input should be less than or equal to 10000000000000000",
    "train.steps=0": "train.steps=0: input should be greater than or equal to 1",
    "train.steps=2.5": "train.steps=2.5: input should be a valid integer",
    "train.steps=true": "train.steps=True: input should be a valid integer",
    f"model.hidden={10**31}": "input should be less than or equal to 2147483647",
    "snapshots={steps: [0], tokens: 8}": "snapshots.steps.0=0: input should be greater than or equal to 1",
    "text.path=": "text.path='': string should have at least 1 character",
    # Keys, and what is no setting at all.
    "train.stepz=3": "train.stepz=3: extra inputs are not permitted",
    "train=3": "train=3: input should be a valid dictionary",
    "text={path: 8}": "text.path=8: input should be a valid string",
    "=3": "=3: extra inputs are not permitted",
    "train.steps": "expected key=value, got 'train.steps'",
    "train.steps=[1": "or an override is no YAML",
    f"train.steps={'9' * 5000}": "or an override is no YAML: Exceeds the limit",
    "train.steps=&a [*a]": "train.steps=[[...]]: input should be a valid integer",
    "train={steps: 1, steps: 2}": "or an override is no YAML: steps is given twice",
}


@pytest.mark.parametrize("override", SETTINGS)
def test_settings(override):
    assert SETTINGS[override] in _refusal(override)


def test_numbers_are_those_of_yaml():
    config = load_config(DEFAULT_CONFIG, ["train.learning_rate=1e-3", "train.adam_eps=2", "text.max_bytes=1_000"])
    assert (config.train.learning_rate, config.train.adam_eps, config.text.max_bytes) == (0.001, 2.0, 1000)


@pytest.mark.parametrize("path", sorted((ROOT / "configs").glob("*.yaml")), ids=lambda path: path.stem)
def test_every_configuration_loads(path):
    config = load_config(path, [])
    assert config.parallel.processes >= 1
    assert config.output == str(ROOT / "outputs" / path.stem)


def test_the_demos_configuration_names_all_settings(tmp_path):
    import yaml

    named, all_of_them = yaml.safe_load(DEFAULT_CONFIG.read_text()), load_config(DEFAULT_CONFIG, []).model_dump()
    assert named.keys() == all_of_them.keys()
    for section in ("text", "model", "train", "loss", "parallel", "memory", "compare"):
        assert named[section].keys() == all_of_them[section].keys()


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"train: [", "is no YAML: while parsing"),
        (b"- 1\n- 2\n", "expected sections of keys and values"),
        (b"train: \xe9\n", "is not UTF-8"),
        (b"output: x\n", "model: field required; train: field required"),
        (b"output: 0123\n", "output=83: input should be a valid string"),
        (b"output: x\noutput: y\n", "output is given twice"),
        (None, "No such file or directory"),
    ],
)
def test_files(content, message, tmp_path):
    path = tmp_path / "config.yaml"
    if content is not None:
        path.write_bytes(content)
    assert message in _refusal("--config", str(path))
    assert message == "No such file or directory" or message in _refusal("--config", str(path), "--text", "x")


# What YAML would make something else of.
NAMES = ["7", "1e3", "null", "a #b", "a: b", "'a'", "[a", "?", "é 漢😀", "a\x85b", "a\u2028b", " a ", "x=y", "*a"]


@pytest.mark.parametrize("name", NAMES)
def test_a_path_is_what_the_user_types(name, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    paths = ["text.path", "compare.report", *([] if name == "null" else ["output", "text.cache"])]
    config = load_config(DEFAULT_CONFIG, [f"{key}={name}" for key in paths])
    if name == "null":
        assert config.text.path is config.compare.report is None
    else:
        assert [config.output, config.text.cache, config.compare.report] == [str(ROOT / name)] * 3
        assert config.text.path == str(tmp_path / name)
    save_config(config, tmp_path / "config.yaml")
    assert load_config(tmp_path / "config.yaml", []) == config  # values come back as they were


def test_a_configuration_that_cannot_be_read_twice(tmp_path):
    """Nor once: reading a pipe that nobody writes to never ends."""
    os.mkfifo(tmp_path / "fifo")
    for path in (tmp_path / "fifo", "/dev/null", tmp_path):
        assert _refusal("--config", str(path)) == f"{path} is neither a regular file nor a link to one"


@pytest.mark.parametrize("key", ["output", "text.cache", "compare.report"])
def test_folders_that_cannot_be_made(key, tmp_path):
    (tmp_path / "file").write_text("")
    others = [f"{name}={tmp_path / 'other'}" for name in ("output", "text.cache", "compare.report") if name != key]
    for folder in (tmp_path / "file", tmp_path / "file" / "folder", "a\0b"):
        said = _refusal(CPU, *others, f"{key}={folder}")
        assert said.startswith(f"{key}=") and "cannot be made a folder" in said


def test_text_that_is_not_there(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "loop").symlink_to("loop")
    for arguments in (["--text", "none"], *([f"text.path={name}"] for name in ("loop", "a\0b", "~nosuchuser/x"))):
        said = _refusal(CPU, f"output={tmp_path / 'o'}", f"text.cache={tmp_path / 'c'}", *arguments)
        assert said.startswith(f"no such file or folder: {tmp_path}/")


def test_a_folder_that_is_no_more(tmp_path, monkeypatch):
    (tmp_path / "gone").mkdir()
    monkeypatch.chdir(tmp_path / "gone")
    (tmp_path / "gone").rmdir()
    assert _refusal("--text", "x").startswith("text.path='x': no path: ")
    assert load_config(DEFAULT_CONFIG, [], "/x").text.path == "/x"


@pytest.mark.parametrize(
    ("torchrun", "message"),
    [
        (["--nproc-per-node=2"], "parallel.tensor=1 * pipeline=1 * data=1 needs 1 processes, torchrun started 2"),
        (["--nnodes=1:3"], "needs 1 processes, torchrun started 3"),
        (["--nproc-per-node=many"], "torchrun: Unsupported nproc_per_node value: many"),
        (["--no-such-flag"], "torchrun: "),
        (["--nproc-per-node=1", "--max-restarts=-1"], "torchrun: max_restarts must be >= 0"),
        (["--nproc-per-node=1", "--rdzv-conf=x"], "torchrun: "),
        (["other.py"], "torchrun: 'other.py' in front of -- is none of torchrun's own arguments"),
        (["-m"], "torchrun: --module, --no-python and --run-path"),
    ],
    ids=str,
)
def test_torchrun_and_the_layout(torchrun, message, tmp_path, capfd):
    before = dict(os.environ)
    assert message in _refusal(CPU, "parallel.tensor=1", f"output={tmp_path}", torchrun=tuple(torchrun))
    assert os.environ == before and capfd.readouterr() == ("", "")


def _program(*arguments: str, python: tuple[str, ...] = (), file: str = "program.py"):
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "CUDA_VISIBLE_DEVICES": ""}
    command = [sys.executable, *python, str(ROOT / "launch" / file), *arguments]
    return subprocess.run(command, env=environment, capture_output=True, text=True, timeout=TIMEOUT)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (
            ["train", "train.seed=-1", "train.steps=x"],
            "error: train.steps='x': input should be a valid integer; train.seed=-1: ",
        ),
        (["demo", "--nproc-per-node=3", "--"], "error: parallel.tensor=2 * pipeline=1 * data=1 needs 2"),
        (["demo", "text.path=a\nb"], "error: no such file or folder"),
        (["snapshots", "--config"], "error: argument --config: expected one argument"),
        (["parity", "train.steps=0", "--"], "error: train.steps=0: input should be"),
        (["gradient_filter", "--foo", "--"], "error: unrecognized arguments: --foo"),
    ],
)
def test_programs_say_one_line_and_exit_with_2(arguments, message):
    done = _program(*arguments)
    assert done.returncode == 2 and done.stdout == ""
    assert len(done.stderr.splitlines()) == 1 and done.stderr.startswith(message), done.stderr


def test_a_program_of_its_own_file_says_one_line_too():
    done = _program("output=no/such/folder", file="compare.py")
    assert done.returncode == 2 and done.stderr.startswith("error: no results of a run at "), done
    done = _program("demo", python=("-S",))
    assert done.returncode == 2 and len(done.stderr.splitlines()) == 1, done.stderr
    assert " has no yaml, pydantic, " in done.stderr and "pip install '.[demo]'" in done.stderr


@pytest.mark.parametrize(
    "arguments", [["demo", "--help"], ["train", "--help", "--"], ["parity", "--", "--help"]], ids=str
)
def test_help_is_no_mistake(arguments):
    done = _program(*arguments)
    assert done.returncode == 0 and done.stdout.startswith("usage: ") and done.stderr == "", done


LAUNCHER = {
    "budget": (
        ["--parallel-lce-logits-budget", "1GiB"],
        {},
        "PARALLEL_LCE_LOGITS_BUDGET must be a number of bytes, got '1GiB'",
    ),
    "budget of the environment": ([], {"PARALLEL_LCE_LOGITS_BUDGET": "-1"}, "PARALLEL_LCE_LOGITS_BUDGET must be"),
    "cross-entropy": ([], {"PARALLEL_LCE_CROSS_ENTROPY": "x"}, "cross_entropy must be one of"),
    "backend": ([], {"PARALLEL_LCE_BACKEND": "x"}, "PARALLEL_LCE_BACKEND='x' is none of"),
}


@pytest.mark.parametrize("name", LAUNCHER)
def test_the_launcher_of_megatron_s_programs(name, monkeypatch, capsys):
    from parallel_lce.megatron import __main__ as launcher

    arguments, environment, message = LAUNCHER[name]
    monkeypatch.setattr(sys, "argv", sys.argv)
    monkeypatch.setattr(sys, "path", [*sys.path])
    for variable in ("PARALLEL_LCE_LOGITS_BUDGET", "PARALLEL_LCE_CROSS_ENTROPY", "PARALLEL_LCE_BACKEND"):
        monkeypatch.setenv(variable, environment.get(variable, ""))
    slept = []
    monkeypatch.setattr(launcher.time, "sleep", slept.append)
    for rank, lines in (("0", 1), ("1", 0)):
        monkeypatch.setenv("LOCAL_RANK", rank)
        with pytest.raises(SystemExit) as ended:
            launcher.main([*arguments, __file__])
        said = capsys.readouterr().err.splitlines()
        assert ended.value.code == 2 and len(said) == lines
        assert all(line.startswith(f"error: {message}") for line in said)
        assert len(slept) == 1 - lines, "a silent rank that ends first takes the speaking one with it"
