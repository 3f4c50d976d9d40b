"""launch/: its scripts start from anywhere, .venv is made once, and a user's mistake is one line and exit status 2,
before any process of a training starts."""

import os
import shutil
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest

pytest.importorskip("pydantic", reason="needs the training program's packages")
pytest.importorskip("tokenizers", reason="needs the training program's packages")

import torch
import yaml

import make_venv  # of launch/
import program  # of launch/
from benchmarks import peers
from benchmarks.peers import ANY, CPU_AND_CUDA, RANKS, Peer
from tools import ran
from training.config import DEFAULT_CONFIG, ROOT, load_config, save_config

LAUNCH = ROOT / "launch"
SCRIPTS = ("bench", "demo", "gradient_filter", "parity", "test", "train")
TIMEOUT = 120


def run(*command: str | Path, cwd: Path = ROOT, **environment: str) -> subprocess.CompletedProcess:
    return ran(*command, cwd=cwd, env=environment, timeout=TIMEOUT)


def python_at(folder: Path, line: str) -> Path:
    """A Python whose start is that line of bash."""
    path = folder / "bin" / "python"
    path.parent.mkdir()
    path.write_text(f"#!/usr/bin/env bash\n{line}\n")
    path.chmod(0o755)
    return path


@pytest.mark.parametrize("name", SCRIPTS)
def test_a_script_may_be_started_from_anywhere(name, tmp_path):
    """Through links, with CDPATH set, with a relative path of the interpreter or one that PATH finds."""
    echo = python_at(tmp_path, f'[ "$1" = -c ] && exec "{sys.executable}" "$@"; echo "$@ $PYTHONPATH"')
    script = f"{name}.sh"
    (tmp_path / "twice").symlink_to("relative")
    (tmp_path / "relative").symlink_to(os.path.relpath(LAUNCH / script, tmp_path))
    (tmp_path / "checkout").symlink_to(ROOT)
    (tmp_path / "launch").mkdir()
    path = f"{echo.parent}{os.pathsep}{os.environ['PATH']}"
    starts = [
        run("bash", f"launch/{script}", "x", PARALLEL_LCE_PYTHON=str(echo), CDPATH=f".:{tmp_path}"),
        run("bash", "twice", "x", cwd=tmp_path, PARALLEL_LCE_PYTHON="bin/python"),
        run("bash", f"checkout/launch/{script}", "x", cwd=tmp_path, PARALLEL_LCE_PYTHON="python", PATH=path),
        run("bash", LAUNCH / script, "x", cwd=echo.parent, PARALLEL_LCE_PYTHON="../bin/python"),
        run("bash", LAUNCH / script, "x", PARALLEL_LCE_PYTHON=str(echo), PYTHONPATH="/a:/b"),  # ours come first
    ]
    for start in starts:
        assert start.returncode == 0, start
        assert start.stdout.strip().removesuffix(":/a:/b") == f"{LAUNCH / 'program.py'} {name} x {ROOT}:{LAUNCH}"


def test_no_python_or_one_without_the_packages_is_one_line(tmp_path):
    bare = str(python_at(tmp_path, f'exec "{sys.executable}" -S "$@"'))
    starts = [("test", variable, word) for variable in ("PARALLEL_LCE_PYTHON", "PYTHON") for word in ("none", "false")]
    for name, variable, value in [*starts, *((name, "PARALLEL_LCE_PYTHON", bare) for name in SCRIPTS)]:
        done = run("bash", LAUNCH / f"{name}.sh", **({"PARALLEL_LCE_PYTHON": ""} | {variable: value}))
        expected = f"error: {variable}={value} is not a Python 3.11 or newer"
        expected = f"error: {sys.executable} has no " if value == bare else expected
        assert done.returncode == 2 and done.stdout == "" and len(done.stderr.splitlines()) == 1, done
        assert done.stderr.startswith(expected), done


def test_python_may_be_told_not_to_look_beside_a_program():
    done = run("bash", LAUNCH / "train.sh", "train.steps=0", PYTHONSAFEPATH="1")
    assert done.returncode == 2
    assert done.stderr == "error: train.steps=0: input should be greater than or equal to 1\n"


# In place of the Python that .venv is made with. The Python that it makes installs nothing, and fails if it is told to.
BASE = """#!/usr/bin/env bash
echo begin >>"$LOG"
sleep "$DELAY"
mkdir -p "${@: -1}/bin"
printf '#!/usr/bin/env bash\\necho end >>"$LOG"\\nexit "$STATUS"\\n' >"${@: -1}/bin/python"
chmod +x "${@: -1}/bin/python"
"""


def test_of_first_starts_at_once_one_installs_and_the_next_after_a_change_a_failure_or_an_interruption(tmp_path):
    checkout, log, base = tmp_path / "checkout", tmp_path / "log", tmp_path / "base"
    (checkout / "launch").mkdir(parents=True)
    for name in ("launch/make_venv.py", "pyproject.toml", "constraints.txt"):
        shutil.copy(ROOT / name, checkout / name)
    base.write_text(BASE)
    base.chmod(0o755)

    def start(delay: float = 0.0, status: int = 0) -> subprocess.Popen:
        environment = os.environ | {"LOG": str(log), "DELAY": str(delay), "STATUS": str(status)}
        command = [sys.executable, str(checkout / "launch" / "make_venv.py"), str(base)]
        return subprocess.Popen(command, env=environment, stderr=subprocess.PIPE, text=True, start_new_session=True)

    killed = start(60.0)
    while not log.exists():
        assert killed.poll() is None
        time.sleep(0.01)
    os.killpg(killed.pid, signal.SIGKILL)
    failed = start(status=1)
    assert failed.communicate()[1].endswith(" failed; the next start tries again\n") and failed.returncode == 1
    log.unlink()
    for times, name in enumerate(["", "pyproject.toml", "constraints.txt", ".venv/stamp", ".venv/bin/python"], 1):
        if name == ".venv/bin/python":
            (checkout / name).chmod(0o644)
        elif name:
            with (checkout / name).open("ab") as file:
                file.write(b"# changed\n\xff" if name == ".venv/stamp" else b"# changed\n")
        starts = [start(0.5) for _ in range(3)]
        assert [each.wait(TIMEOUT) for each in [*starts, start()]] == [0] * 4
        assert log.read_text().split() == ["begin", "end"] * times
    shutil.rmtree(checkout / ".venv")
    (checkout / ".venv").symlink_to("/proc/no-such-folder/.venv")  # no one may write there, root neither
    refused = start()
    (line,) = refused.communicate()[1].splitlines()
    assert line.startswith("error: cannot write /proc/no-such-folder/.venv.lock: No such file or directory")
    assert refused.returncode == 2


def test_a_stamp_that_another_start_removes_is_no_error(tmp_path, monkeypatch):
    stamp, ended = tmp_path / "stamp", threading.Event()
    monkeypatch.setattr(make_venv, "STAMP", stamp)

    def come_and_go() -> None:
        while not ended.is_set():
            stamp.touch()
            stamp.unlink()

    other = threading.Thread(target=come_and_go)
    other.start()
    try:
        assert not any(make_venv.is_made() for _ in range(2000))
    finally:
        ended.set()
        other.join()


# --- mistakes --------------------------------------------------------------------------------------

FILES = {"list": b"- 1\n- 2\n", "twice": b"output: x\noutput: y\n"}
FITS = "parallel.tensor=1 output=FOLDER/o text.cache=FOLDER/c"

# The program, its arguments, and words that refuse them. FOLDER is a folder of the test.
MISTAKES = [
    # Overrides of configs/demo.yaml. The model, the training and the layout have to fit.
    ("train", "model.heads=6", "model.hidden=256 is not a multiple of model.heads=6"),
    ("train", "train.sequence=255", "train.sequence=255 is not a multiple of parallel.tensor=2"),
    ("demo", "train.micro_batch=3 compare.yardstick=true", "compare.yardstick=true needs at least 4 samples a step"),
    ("train", "model.head_dim=3", "model.head_dim=3 is not even"),
    ("train", "model.vocab_size=1000", "model.vocab_size=1000 is less than text.vocab_size=16384"),
    ("train", "train.steps=null", "train.steps and train.minutes are both null"),
    ("train", "train.minutes=1", "train.minutes needs a single process, got parallel.tensor=2 * pipeline=1 * data=1"),
    ("train", "train.precision=bf16", "train.precision=bf16 needs GPUs; on a CPU it must be fp32"),
    ("train", "train.clip_grad=1", "train.clip_grad=1.0 needs GPUs; on a CPU it must be 0"),
    ("train", "parallel.device=cuda", "needs a GPU for each of this host's 2 processes, found 0"),
    # Values and keys.
    ("train", "loss.logits_budget_mib=.nan", "loss.logits_budget_mib=nan: input should be"),
    ("train", "train.learning_rate=1e300", "input should be less than or equal to 10000000000000000"),
    ("train", "train.steps=true", "train.steps=True: input should be a valid integer"),
    ("demo", "train.stps=5", "no such setting: train.stps; did you mean train.steps?"),
    ("train", "trian.steps=5", "no such setting: trian.steps; did you mean train.steps?"),
    ("train", "train=3", "train=3: a section, of settings such as train.steps"),
    ("train", "zzz=3", "no such setting: zzz; --help lists all"),
    ("train", "train.steps", "expected key=value, got 'train.steps'"),
    ("train", f"train.steps={'9' * 5000}", "or an override cannot be read: Exceeds the limit"),
    ("train", "train.seed=-1 train.steps=x", "error: train.steps='x': input should be a valid integer; train.seed=-1"),
    # Files and folders.
    ("demo", "--config FOLDER/none", "No such file or directory"),
    ("demo", "--config FOLDER/list", "expected sections of keys and values"),
    ("demo", "--config FOLDER/twice", "output is given twice"),
    ("demo", "--config FOLDER/fifo", "FOLDER/fifo is neither a regular file nor a link to one"),
    *(
        ("train", f"{FITS} {key}=FOLDER/{name}", f"error: {key}=FOLDER/{name} cannot be made a folder")
        for key in ("output", "text.cache", "compare.report")
        for name in ("list", "a\0b")
    ),
    *(
        ("train", f"{FITS} {text}", "error: no such file or folder: FOLDER/")
        for text in ("--text none", "text.path=loop", "text.path=a\0b", "text.path=~nosuchuser/x")
    ),
    # torchrun and the layout.
    ("train", f"--nproc-per-node=2 -- {FITS}", "data=1 needs 1 processes, torchrun started 2"),
    ("train", f"other.py -- {FITS}", "torchrun: 'other.py' in front of -- is none of torchrun's own arguments"),
    ("train", f"-m -- {FITS}", "torchrun: --module, --no-python and --run-path"),
    # The other programs.
    ("compare", "output=no/such/folder", "error: no results of a run at "),
    ("parity", "train.steps=0 --", "error: train.steps=0: input should be"),
    ("gradient_filter", "output=FOLDER/o -- --plot FOLDER/list/p.png", "the folder of --plot=FOLDER/list cannot be"),
    ("gradient_filter", "-- none.safetensors", "no such file: none.safetensors"),
    ("bench", f"--shape 1,2,{2**31}", "three positive numbers N,V,D below 2^31, got '1,2,2147483648'"),
    ("bench", "--rounds 0", "--rounds must be at least 1, got 0"),
    ("bench", "--peers ours@5tons", "KiB, MiB or GiB, or all, got '5tons'"),
    ("bench", "--peers none-such", "no such peer: none-such"),
    ("bench", "--peers gone", "cannot run here: gone (no no_such_module.of_mine)"),
    ("bench", "--plot p.foo", "--plot: the suffix must be one of "),
    ("bench", "--json FOLDER", "--json: FOLDER is a folder"),
    ("bench", "--trace FOLDER/list", "--trace=FOLDER/list cannot be made a folder"),
    ("bench", "--nproc-per-node=2 -- --tp 4", "--tp must lie in 1 to 2, the number of ranks, got [4]"),
    ("bench", "--nproc-per-node=2 -- --device cuda", "one GPU per process is needed, this host has 0"),
    ("bench", "--nproc-per-node=3 -- --tp 3", "N and V must be multiples of the TP size, got N=256, V=4096"),
]


@pytest.mark.parametrize(("name", "arguments", "words"), MISTAKES, ids=lambda value: ascii(value)[:60])
def test_a_mistake_is_one_line(name, arguments, words, tmp_path, monkeypatch, capfd):
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 0)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    for started in ("execve", "fork"):
        monkeypatch.setattr(os, started, lambda *_: pytest.fail("nothing was refused"))
    gone = Peer("gone", ANY, CPU_AND_CUDA, None, settings=(RANKS,), needs="no_such_module.of_mine")
    monkeypatch.setattr(peers, "OTHERS", (*peers.OTHERS, gone))
    monkeypatch.chdir(tmp_path)
    for file, content in FILES.items():
        (tmp_path / file).write_bytes(content)
    (tmp_path / "loop").symlink_to("loop")
    os.mkfifo(tmp_path / "fifo")  # reading a pipe that nobody writes to never ends
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)  # torchrun would set it
    before = dict(os.environ)
    with pytest.raises(SystemExit) as ended:
        program.main(name, arguments.replace("FOLDER", str(tmp_path)).split())
    said, expected = capfd.readouterr(), words.replace("FOLDER", str(tmp_path)).replace("\0", "\\x00")
    *usage, last = said.err.splitlines()
    assert ended.value.code == 2 and said.out == "" and os.environ == before
    assert expected in last and "error: " in last and (not usage or name not in ("train", "demo"))


def test_help_is_no_mistake(capsys):
    for name, *arguments in (["demo", "--help"], ["train", "--help", "--"], ["parity", "--", "--help"]):
        with pytest.raises(SystemExit) as ended:
            program.main(name, arguments)
        said = capsys.readouterr().out
        assert not ended.value.code and said.startswith("usage: ")
        if name == "demo":
            listed = {line.strip().partition("=")[0] for line in said.splitlines() if line.startswith("  ")}
            assert {"train.steps", "snapshots.tokens", "output"} <= listed and "\n  train.steps=40\n" in said


@pytest.mark.parametrize("path", sorted((ROOT / "configs").glob("*.yaml")), ids=lambda path: path.stem)
def test_every_configuration_loads_and_the_demos_names_all_settings(path):
    config = load_config(path, ["train.learning_rate=1e-3", "train.adam_eps=2", "text.max_bytes=1_000"])
    assert (config.train.learning_rate, config.train.adam_eps, config.text.max_bytes) == (0.001, 2.0, 1000)
    assert config.parallel.processes >= 1 and config.output == str(ROOT / "outputs" / path.stem)
    named, settings = yaml.safe_load(path.read_text()), config.model_dump()
    for section, values in settings.items() if path == DEFAULT_CONFIG else ():
        assert section in named and (not isinstance(values, dict) or named[section].keys() == values.keys())


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


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("LOGITS_BUDGET", "PARALLEL_LCE_LOGITS_BUDGET must be a number of bytes, got"),
        ("CROSS_ENTROPY", "cross_entropy must be one of"),
        ("BACKEND", "PARALLEL_LCE_BACKEND='x' is none of"),
    ],
)
def test_the_launcher_of_megatrons_programs_refuses_once(name, message, monkeypatch, capsys):
    from parallel_lce.megatron import __main__ as launcher

    slept = []
    monkeypatch.setattr(sys, "argv", sys.argv)
    monkeypatch.setattr(sys, "path", [*sys.path])
    monkeypatch.setattr(launcher.time, "sleep", slept.append)
    monkeypatch.setenv(f"PARALLEL_LCE_{name}", "x")
    for rank, lines in (("0", 1), ("1", 0)):
        monkeypatch.setenv("LOCAL_RANK", rank)
        with pytest.raises(SystemExit) as ended:
            launcher.main([__file__])
        said = capsys.readouterr().err.splitlines()
        assert ended.value.code == 2 and len(said) == lines
        assert all(line.startswith(f"error: {message}") for line in said)
        assert len(slept) == 1 - lines, "a silent rank that ends first takes the speaking one with it"
