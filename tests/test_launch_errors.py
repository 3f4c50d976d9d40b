"""A user's mistake gives one line and exit status 2, before any process of a training starts."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest

pytest.importorskip("omegaconf", reason="needs the training program's packages")
pytest.importorskip("pydantic", reason="needs the training program's packages")

from training.config import DEFAULT_CONFIG, ROOT, load_config, parse_command_line, save_config
from training.host import check_host
from training.refusal import Refusal
from training.start import prepare_text
from training.torchrun import started_by_torchrun

TIMEOUT = 120
CPU = "parallel.device=cpu"


def _refusal(*arguments: str, torchrun: tuple[str, ...] = ()) -> str:
    """What the program says in one line."""
    with pytest.raises(Refusal) as refused:
        config = parse_command_line("", list(arguments))
        check_host(config, list(torchrun))
    said = str(refused.value)
    assert said and "\n" not in said
    return said


@pytest.fixture(autouse=True)
def without_gpus(monkeypatch):
    """What the host has is what the tests say."""
    import torch

    monkeypatch.setattr(torch.cuda, "device_count", lambda: 0)


SETTINGS = {
    "train.precision=bf16": "train.precision=bf16 needs GPUs; on a CPU it must be fp32",
    "train.clip_grad=1": "train.clip_grad=1.0 needs GPUs; on a CPU it must be 0",
    "train.clip_grad=.inf": "train.clip_grad=inf: input should be a finite number",
    "parallel.device=cuda": "parallel.device=cuda needs a GPU for each of this host's 2 processes, found 0",
    "parallel.device=tpu": "parallel.device='tpu': input should be 'auto', 'cpu' or 'cuda'",
    "loss.logits_budget_mib=-5": "loss.logits_budget_mib=-5: input should be greater than or equal to 0",
    "loss.logits_budget_mib=.nan": "loss.logits_budget_mib=nan: input should be",
    "loss.logits_budget_mib=nan": "loss.logits_budget_mib='nan': input should be a valid number",
    "loss.gradient_filter=2": "loss.gradient_filter=2: expected null or a number between 0 and 1, such as 0.000122",
    "loss.gradient_filter=auto": "loss.gradient_filter='auto': expected null or a number between 0 and 1",
    "loss.impl=theirs": "loss.impl='theirs': input should be 'stock' or 'parallel_lce'",
    "train.learning_rate=nan": "train.learning_rate='nan': input should be a valid number",
    "train.learning_rate=fast": "train.learning_rate='fast': input should be a valid number",
    "train.adam_eps=-1": "train.adam_eps=-1: input should be greater than 0",
    "train.weight_decay=-0.1": "train.weight_decay=-0.1: input should be greater than or equal to 0",
    "train.warmup_steps=-1": "train.warmup_steps=-1: input should be greater than or equal to 0",
    "train.seed=-1": "train.seed=-1: input should be greater than or equal to 0",
    "train.seed=99999999999": "train.seed=99999999999: input should be less than 4294967296",
    "train.steps=2.5": "train.steps=2.5: input should be a valid integer",
    "train.steps=true": "train.steps=True: input should be a valid integer",
    "train.steps=null": "train.steps=None: input should be a valid integer",
    "train.steps=???": "train.steps=???: a value is needed",
    "train.steps=${nowhere}": "train.steps: Interpolation key 'nowhere' not found",
    "train.stepz=3": "train.stepz=3: extra inputs are not permitted",
    "train=3": "train=3: input should be a valid dictionary",
    "parallel.sequence=maybe": "parallel.sequence='maybe': input should be a valid boolean",
    "parallel.timeout_seconds=99999999999": "parallel.timeout_seconds=99999999999: input should be less than",
    "compare.factor=0": "compare.factor=0: input should be greater than 0",
    "model.head_dim=3": "model.head_dim=3 is not even",
    "model.hidden=12": "model.head_dim=3 is not even",
    "model.head_dim=0": "model.head_dim=0: input should be greater than or equal to 1",
    "text.vocab_size=256": "text.vocab_size=256: input should be greater than or equal to 257",
    "text.path=": "text.path='': string should have at least 1 character",
    "output=": "output='': string should have at least 1 character",
    "output=???": "output=???: a value is needed",
    "text={path: 8}": "text.path=8: input should be a valid string",
    "text.vocab_size=123456789012345678901234": "text.vocab_size=123456789012345678901234: input should be less than",
    f"text.max_bytes={10**24}": "input should be less than 9223372036854775808",
    f"model.hidden={10**31}": "input should be less than or equal to 2147483647",
    f"model.rotary_base={10**50}": "input should be less than or equal to 2147483647",
    f"memory.micro_batch={10**21}": "input should be less than or equal to 2147483647",
    f"train.warmup_steps={2**31}": "input should be less than or equal to 2147483647",
    f"train.steps={'9' * 5000}": "or an override is no YAML: Exceeds the limit",
    "train.steps=&a [*a]": "or an override is no YAML: maximum recursion depth",
    "[=3": "or an override is no YAML",
    "train.learning_rate=1e300": "train.learning_rate=1e+300: input should be less than or equal to 10000000000000000",
    "train.adam_eps=1e20": "train.adam_eps=1e+20: input should be less than or equal to 1000000000000000000",
    "train.steps=[1": "is no YAML",
    "train.steps": "expected key=value, got 'train.steps'",
}


@pytest.mark.parametrize("override", SETTINGS)
def test_settings(override):
    assert SETTINGS[override] in _refusal(override)


def test_all_mistakes_in_one_line():
    said = _refusal("train.steps=0", "train.seed=-1")
    assert "train.steps=0" in said and "train.seed=-1" in said


def test_an_empty_text_is_not_the_current_folder():
    assert _refusal("--text", "") == "path='': string should have at least 1 character"


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"train: [", "is no YAML: while parsing"),
        (b"- 1\n- 2\n", "expected sections of keys and values, got a list"),
        (b"7\n", "expected sections of keys and values"),
        (b"train: \xe9\n", "is not UTF-8"),
        (b"", "text: field required"),
        (b"output: ???\n", "output: Missing mandatory value: output"),
        (b"output: 0123\n", "output=83: input should be a valid string"),
        (b"output: !!binary aGk=\n", "output=b'hi': input should be a valid string"),
        (None, "No such file or directory"),
    ],
)
def test_files(content, message, tmp_path):
    path = tmp_path / "config.yaml"
    if content is not None:
        path.write_bytes(content)
    assert message in _refusal("--config", str(path))
    assert message == "No such file or directory" or message in _refusal("--config", str(path), "--text", "x")


# What YAML or OmegaConf would make something else of.
NAMES = [
    "7",
    "0123",
    "1e3",
    "1:30",
    "null",
    "a #b",
    "a: b",
    "${x}",
    r"a\${x}",
    r"\\${oc.env:HOME}",
    "'a'",
    "[a",
    "?",
    "é 漢",
    "a\x85b",
    "a\u2028b",
    " a ",
    "x=y",
    "*a",
    "!a",
]


@pytest.mark.parametrize("name", NAMES)
def test_a_path_is_what_the_user_types(name, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    keys = ["output", "text[cache]", "text.path", "compare.report"]
    config = load_config(DEFAULT_CONFIG, [*(f"{key}={name}" for key in keys), "train.learning_rate=1"])
    path = None if name == "null" else str(tmp_path / name)
    report = None if name == "null" else str(ROOT / name)
    assert [config.output, config.text.cache, config.compare.report] == [str(ROOT / name)] * 2 + [report]
    assert config.text.path == path
    save_config(config, tmp_path / "config.yaml")
    assert load_config(tmp_path / "config.yaml", []) == config  # values come back as they were
    assert load_config(DEFAULT_CONFIG, [f"output={config.output}"]).output == config.output


def test_a_configuration_may_refer_to_what_is_overridden(tmp_path):
    path = tmp_path / "config.yaml"
    path.write_text(DEFAULT_CONFIG.read_text().replace("report: null", "report: ${output}/report"))
    assert load_config(path, ["output=/a/${x} #b"]).compare.report == "/a/${x} #b/report"


@pytest.mark.parametrize("kind", ["fifo", "device", "folder", "pipe"])
def test_a_configuration_that_cannot_be_read_twice(kind, tmp_path):
    """Nor once: reading a pipe that nobody writes to never ends."""
    os.mkfifo(tmp_path / "fifo")
    reader, writer = os.pipe()
    path = {"fifo": tmp_path / "fifo", "device": "/dev/null", "folder": tmp_path, "pipe": f"/dev/fd/{reader}"}[kind]
    try:
        assert _refusal("--config", str(path)) == f"{path} is neither a regular file nor a link to one"
    finally:
        os.close(reader)
        os.close(writer)


@pytest.mark.parametrize("key", ["output", "text.cache"])
@pytest.mark.parametrize("kind", ["a file", "below a file", "no name"])
def test_folders_that_cannot_be_made(kind, key, tmp_path):
    (tmp_path / "file").write_text("")
    folder = {"a file": tmp_path / "file", "below a file": tmp_path / "file" / "folder", "no name": "a\0b"}[kind]
    other = "output" if key == "text.cache" else "text.cache"
    said = _refusal(CPU, f"{other}={tmp_path / 'other'}", f"{key}={folder}")
    assert said.startswith(f"{key}=") and "cannot be made a folder" in said


@pytest.mark.parametrize("key", ["output", "text.path", "text.cache", "compare.report"])
def test_a_user_without_a_name(key):
    assert _refusal(f"{key}=~a\0b/c").startswith(f"{key}='~a\\x00b/c' is no path: ")


@pytest.mark.parametrize("text", ["none", "loop", "a\0b", "~nosuchuser/x"])
def test_text_that_is_not_there(text, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "loop").symlink_to("loop")
    for arguments in (["--text", text], [f"text.path={text}"]):
        with pytest.raises(Refusal, match=f"no such file or folder: {tmp_path}/"):
            prepare_text(parse_command_line("", arguments))


def test_a_folder_that_is_no_more(tmp_path, monkeypatch):
    (tmp_path / "gone").mkdir()
    monkeypatch.chdir(tmp_path / "gone")
    (tmp_path / "gone").rmdir()
    assert _refusal("--text", "x").startswith("text.path='x' is no path: ")
    assert load_config(DEFAULT_CONFIG, [], "/x").text.path == "/x"


@pytest.mark.skipif(os.geteuid() == 0, reason="root may write everywhere")
def test_a_folder_that_cannot_be_written_to(tmp_path):
    tmp_path.chmod(0o500)
    assert "cannot be" in _refusal(CPU, f"output={tmp_path}")


@pytest.mark.parametrize(
    ("torchrun", "message"),
    [
        (["--nproc-per-node=2"], "parallel.tensor=1 * pipeline=1 * data=1 needs 1 processes, torchrun started 2"),
        (["--nnodes=2", "--node-rank=0"], "needs 1 processes, torchrun started 2"),
        (["--nnodes=1:3"], "needs 1 processes, torchrun started 3"),
        (["--nproc-per-node=many"], "torchrun: Unsupported nproc_per_node value: many"),
        (["--nproc-per-node=gpu"], "torchrun: "),
        (["--nnodes=x"], "torchrun: "),
        (["--no-such-flag"], "torchrun: "),
        (["--log-dir"], "torchrun: "),
        (["--nproc-per-node=1", "--max-restarts=-1"], "torchrun: max_restarts must be >= 0"),
        (["--nproc-per-node=1", "--nnodes=0:1"], "torchrun: min_nodes must be > 0"),
        (["--nproc-per-node=1", "--redirects=x"], "torchrun: x does not match"),
        (["--nproc-per-node=1", "--rdzv-conf=x"], "torchrun: "),
        (["other.py"], "torchrun: 'other.py' in front of -- is none of torchrun's own arguments"),
        (["--nproc-per-node=1", "the program"], "torchrun: 'the program' in front of --"),
        (["-m", "foo"], "torchrun: 'foo' in front of --"),
        (["-m"], "torchrun: --module, --no-python and --run-path"),
        (["--no-python"], "torchrun: --module, --no-python and --run-path"),
        (["--run-path"], "torchrun: --module, --no-python and --run-path"),
    ],
    ids=str,
)
def test_torchrun_and_the_layout(torchrun, message, tmp_path, capfd):
    before = dict(os.environ)
    assert message in _refusal(CPU, "parallel.tensor=1", f"output={tmp_path}", torchrun=tuple(torchrun))
    assert os.environ == before and capfd.readouterr() == ("", "")


@pytest.mark.parametrize(
    ("environment", "message"),
    [
        ({"LOCAL_RANK": "0"}, "LOCAL_RANK is set as torchrun does, but not RANK, WORLD_SIZE, LOCAL_WORLD_SIZE"),
        (
            dict.fromkeys(("RANK", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT"), "1"),
            "but not WORLD_SIZE",
        ),
        (
            {
                **dict.fromkeys(("RANK", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT"), "1"),
                "WORLD_SIZE": "x",
            },
            "WORLD_SIZE='x' is no number",
        ),
    ],
)
def test_a_part_of_what_torchrun_sets(environment, message, monkeypatch):
    for name, value in environment.items():
        monkeypatch.setenv(name, value)
    with pytest.raises(Refusal, match=message):
        started_by_torchrun()


def _run(*command: str, **environment: str) -> subprocess.CompletedProcess:
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "CUDA_VISIBLE_DEVICES": "", **environment}
    return subprocess.run(command, env=environment, capture_output=True, text=True, timeout=TIMEOUT)


def _program(name: str, *arguments: str, python: tuple[str, ...] = (), **environment: str):
    return _run(sys.executable, *python, str(ROOT / "launch" / f"{name}.py"), *arguments, **environment)


@pytest.mark.parametrize(
    ("name", "arguments", "environment", "message"),
    [
        ("train", ["train.seed=-1"], {}, "error: train.seed=-1: input should be"),
        ("train", ["train.clip_grad=1"], {}, "error: train.clip_grad=1.0 needs GPUs"),
        ("train", [], {"LOCAL_RANK": "0"}, "error: LOCAL_RANK is set as torchrun does, but not"),
        ("demo", ["--nproc-per-node=3", "--"], {}, "error: parallel.tensor=2 * pipeline=1 * data=1 needs 2"),
        ("demo", ["--text", "no such file"], {}, "error: no such file or folder"),
        ("demo", ["--text", "~nosuchuser/x"], {}, "error: no such file or folder"),
        ("demo", ["text.path=a\nb"], {}, "error: no such file or folder"),
        ("train", ["-m", "foo", "--"], {}, "error: torchrun: 'foo' in front of --"),
        ("compare", ["output=no/such/folder"], {}, "error: no results of a run at"),
        ("train", ["--foo"], {}, "error: unrecognized arguments: --foo"),
        ("demo", ["--config"], {}, "error: argument --config: expected one argument"),
        ("compare", ["--text"], {}, "error: argument --text: expected one argument"),
    ],
)
@pytest.mark.thinned("name")
def test_programs_say_one_line_and_exit_with_2(name, arguments, environment, message):
    done = _program(name, *arguments, **environment)
    assert done.returncode == 2 and done.stdout == ""
    assert len(done.stderr.splitlines()) == 1 and done.stderr.startswith(message), done.stderr


@pytest.mark.parametrize("name", ["train", "demo", "bench"])
@pytest.mark.parametrize("arguments", [["--help"], ["--help", "--"]], ids=["ours", "torchrun"])
@pytest.mark.thinned
def test_help_is_no_mistake(name, arguments):
    done = _program(name, *arguments)
    assert done.returncode == 0 and done.stdout.startswith("usage: ") and done.stderr == "", done


@pytest.mark.parametrize("name", ["train", "demo", "compare"])
def test_an_interpreter_without_the_packages(name):
    done = _program(name, python=("-S",))
    assert done.returncode == 2 and len(done.stderr.splitlines()) == 1, done.stderr
    assert " has no omegaconf, pydantic, " in done.stderr and "pip install '.[demo]'" in done.stderr


@pytest.mark.slow
def test_ranks_of_a_torchrun_of_the_users_own(tmp_path):
    """Each rank checks again; one of a host speaks. The report after it is torchrun's."""
    program = [str(ROOT / "launch" / "train.py"), CPU, "parallel.tensor=1", f"output={tmp_path}"]
    done = _run(sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2", *program)
    ours = [line for line in done.stderr.splitlines() if line.startswith("error: ")]
    assert ours == ["error: parallel.tensor=1 * pipeline=1 * data=1 needs 1 processes, torchrun started 2"]
    assert "exitcode  : 2" in done.stderr and "training/worker.py" not in done.stderr


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
