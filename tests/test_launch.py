"""launch/: its scripts start from anywhere, .venv is made once, and a user's mistake is one line and exit status 2,
before any process of a training starts."""

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("pydantic", reason="needs the training program's packages")
pytest.importorskip("tokenizers", reason="needs the training program's packages")

import torch
import yaml

import program  # of launch/
from tools import ran
from training.config import DEFAULT_CONFIG, ROOT, load_config

LAUNCH = ROOT / "launch"


def start(*command: str | Path, cwd: Path = ROOT, **environment: str) -> subprocess.CompletedProcess:
    return ran("bash", *command, cwd=cwd, env=environment, timeout=120)


def python_at(folder: Path, line: str) -> Path:
    path = folder / "bin" / "python"
    path.parent.mkdir()
    path.write_text(f"#!/usr/bin/env bash\n{line}\n")
    path.chmod(0o755)
    return path


@pytest.mark.parametrize("name", ["bench", "demo", "test", "train"])
def test_a_script_may_be_started_from_anywhere(name, tmp_path):
    """Through links, with CDPATH set, with a relative path of the interpreter or one that PATH finds."""
    echo = python_at(tmp_path, f'[ "$1" = -c ] && exec "{sys.executable}" "$@"; echo "$@ $PYTHONPATH"')
    script = f"{name}.sh"
    (tmp_path / "twice").symlink_to("relative")
    (tmp_path / "relative").symlink_to(os.path.relpath(LAUNCH / script, tmp_path))
    (tmp_path / "launch").mkdir()
    path = f"{echo.parent}{os.pathsep}{os.environ['PATH']}"
    starts = [
        start(f"launch/{script}", "x", PARALLEL_LCE_PYTHON=str(echo), CDPATH=f".:{tmp_path}"),
        start("twice", "x", cwd=tmp_path, PARALLEL_LCE_PYTHON="bin/python"),
        start(LAUNCH / script, "x", cwd=tmp_path, PARALLEL_LCE_PYTHON="python", PATH=path, PYTHONPATH="/a:/b"),
    ]
    for done in starts:
        assert done.returncode == 0, done
        assert done.stdout.strip().removesuffix(":/a:/b") == f"{LAUNCH / 'program.py'} {name} x {ROOT}:{LAUNCH}"


# In place of the Python that .venv is made with. The Python that it makes installs nothing, and fails if it is told to.
BASE = """[ "$1" = -c ] && exit; [ "$1" = -V ] && { echo Python; exit; }
echo begin >>"$LOG"
mkdir -p .venv/bin
printf '#!/usr/bin/env bash\\necho end >>"$LOG"\\nexit "$STATUS"\\n' >.venv/bin/python
chmod +x .venv/bin/python"""


def test_the_first_start_installs_and_the_next_after_a_change_or_a_failure(tmp_path):
    checkout, log, base = tmp_path / "checkout", tmp_path / "log", python_at(tmp_path, BASE)
    base.rename(base.with_name("python3.13"))
    (checkout / "launch").mkdir(parents=True)
    for name in ("launch/env.sh", "pyproject.toml", "constraints.txt"):
        shutil.copy(ROOT / name, checkout / name)
    given = dict(LOG=str(log), PATH=f"{base.parent}{os.pathsep}{os.environ['PATH']}", PARALLEL_LCE_PYTHON="")
    command = "-euc", f"source {checkout}/launch/env.sh; echo $python"
    assert start(*command, STATUS="1", **given).returncode == 1
    for times, name in enumerate(["", "pyproject.toml", ".venv/stamp"], 2):
        if name:
            with (checkout / name).open("ab") as file:
                file.write(b"# changed\n")
        for _ in range(2):
            assert start(*command, STATUS="0", **given).stdout == f"{checkout}/.venv/bin/python\n"
        assert log.read_text().split() == ["begin", "end"] * times


# The program, its arguments, and words that refuse them: of a layout, a key, a folder, torchrun and a benchmark.
MISTAKES = [
    ("train", "model.heads=6", "model.hidden=256 is not a multiple of model.heads=6"),
    ("train", "parallel.device=cuda", "needs a GPU for each of this host's 2 processes, found 0"),
    ("demo", "train.stps=5", "no such setting: train.stps; configs/demo.yaml has all"),
    ("train", "parallel.tensor=1 output=FOLDER/list", "error: output=FOLDER/list cannot be made a folder"),
    ("train", "--nproc-per-node=2 -- parallel.tensor=1", "data=1 needs 1 processes, torchrun started 2"),
    ("bench", "--peers none-such", "no such peer: none-such"),
    ("bench", "--nproc-per-node=2 -- --device cuda", "one GPU per process is needed, this host has 0"),
]


@pytest.mark.parametrize(("name", "arguments", "words"), MISTAKES, ids=lambda value: value[:60])
def test_a_mistake_ends_with_one_line_before_any_process_starts(name, arguments, words, tmp_path, monkeypatch, capfd):
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 0)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    for begun in ("execve", "fork"):
        monkeypatch.setattr(os, begun, lambda *_: pytest.fail("nothing was refused"))
    monkeypatch.setenv("OMP_NUM_THREADS", "1")  # torchrun would set it
    (tmp_path / "list").touch()
    with pytest.raises(SystemExit) as ended:
        program.main(name, arguments.replace("FOLDER", str(tmp_path)).split())
    said = capfd.readouterr()
    assert ended.value.code == 2 and said.out == ""
    assert words.replace("FOLDER", str(tmp_path)) in said.err.splitlines()[-1]


@pytest.mark.parametrize("path", sorted((ROOT / "configs").glob("*.yaml")), ids=lambda path: path.stem)
def test_every_configuration_loads_and_the_demos_names_all_settings(path):
    config = load_config(
        path, ["train.learning_rate=1e-3", "train.adam_eps=2", "text.max_bytes=1_000", "text.path=1e3"]
    )
    assert (config.train.learning_rate, config.train.adam_eps, config.text.max_bytes) == (0.001, 2.0, 1000)
    assert config.text.path == str(Path.cwd() / "1e3")  # as the user types it
    assert config.parallel.processes >= 1 and config.output == str(ROOT / "outputs" / path.stem)
    named, settings = yaml.safe_load(path.read_text()), config.model_dump()
    for section, values in settings.items() if path == DEFAULT_CONFIG else ():
        assert section in named and (not isinstance(values, dict) or named[section].keys() == values.keys())
