"""The shell scripts of launch/: where they may be started from, with which Python, and how .venv is made."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import time
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
LAUNCH = ROOT / "launch"
SCRIPTS = {
    "bench": f"{LAUNCH / 'bench.py'}",
    "test": "-m pytest -n auto --dist worksteal",
    **{name: f"{LAUNCH / 'program.py'} {name}" for name in ("demo", "gradient_filter", "parity", "train")},
}
TIMEOUT = 120


def run(*command: str | Path, cwd: Path = ROOT, **environment: str) -> subprocess.CompletedProcess:
    inherited = {k: v for k, v in os.environ.items() if k not in ("PYTHONPATH", "CDPATH", "PYTHON")}
    environment = inherited | {"PARALLEL_LCE_PYTHON": sys.executable} | environment
    return subprocess.run(command, cwd=cwd, env=environment, capture_output=True, text=True, timeout=TIMEOUT)


@pytest.fixture
def echo(tmp_path) -> Path:
    """A Python that says what it is to run, and its PYTHONPATH; a folder of its own has no other file."""
    folder = tmp_path / "echo"
    folder.mkdir()
    python = folder / "python"
    python.write_text(f'#!/usr/bin/env bash\n[ "$1" = -c ] && exec "{sys.executable}" "$@"\necho "$@ $PYTHONPATH"\n')
    python.chmod(0o755)
    return python


# --- from anywhere ---------------------------------------------------------------------------------


@pytest.mark.parametrize("name", SCRIPTS)
def test_a_script_may_be_started_from_anywhere(name, echo, tmp_path):
    """Through links, with CDPATH set, with a relative path of the interpreter or one that PATH finds."""
    script = f"{name}.sh"
    (tmp_path / "twice").symlink_to("relative")
    (tmp_path / "relative").symlink_to(os.path.relpath(LAUNCH / script, tmp_path))
    (tmp_path / "checkout").symlink_to(ROOT)
    (tmp_path / "launch").mkdir()
    path = f"{echo.parent}{os.pathsep}{os.environ['PATH']}"
    starts = [
        run("bash", f"launch/{script}", PARALLEL_LCE_PYTHON=str(echo), CDPATH=f".:{tmp_path}"),
        run("bash", "twice", cwd=tmp_path, PARALLEL_LCE_PYTHON="echo/python"),
        run("bash", f"checkout/launch/{script}", cwd=tmp_path, PARALLEL_LCE_PYTHON="python", PATH=path),
        run("bash", LAUNCH / script, cwd=echo.parent, PARALLEL_LCE_PYTHON="../echo/python"),
    ]
    for done in starts:
        assert done.returncode == 0, done
        assert done.stdout.splitlines()[-1] == f"{SCRIPTS[name]} {ROOT}:{LAUNCH}"
    done = run("bash", LAUNCH / script, "x", PARALLEL_LCE_PYTHON=str(echo), PYTHONPATH="/a:/b")
    assert done.stdout.splitlines()[-1] == f"{SCRIPTS[name]} x {ROOT}:{LAUNCH}:/a:/b"  # ours come first


@pytest.mark.parametrize("variable", ["PARALLEL_LCE_PYTHON", "PYTHON"])
@pytest.mark.parametrize("value", ["no/such/python", "no-such-python", "false"])
def test_no_python_is_one_line(variable, value):
    empty = {"PARALLEL_LCE_PYTHON": ""} if variable == "PYTHON" else {}
    done = run("bash", LAUNCH / "test.sh", **(empty | {variable: value}))
    assert done.returncode == 2 and done.stdout == ""
    assert done.stderr == f"error: {variable}={value} is not a Python 3.11 or newer\n"


def test_a_python_without_the_packages_is_one_line(tmp_path):
    python = tmp_path / "python"
    python.write_text(f'#!/usr/bin/env bash\nexec "{sys.executable}" -S "$@"\n')
    python.chmod(0o755)
    for name in SCRIPTS:
        done = run("bash", LAUNCH / f"{name}.sh", PARALLEL_LCE_PYTHON=str(python))
        assert done.returncode == 2 and done.stdout == "" and len(done.stderr.splitlines()) == 1, done
        assert done.stderr.startswith(f"error: {sys.executable} has no ")


def test_python_may_be_told_not_to_look_beside_a_program():
    done = run("bash", LAUNCH / "train.sh", "train.steps=0", PYTHONSAFEPATH="1")
    assert done.returncode == 2 and done.stderr.startswith("error: train.steps=0: input should be"), done
    done = run("bash", LAUNCH / "bench.sh", "--rounds", "0", PYTHONSAFEPATH="1")
    assert done.returncode == 2 and done.stderr.endswith("error: --rounds must be at least 1, got 0\n"), done
    done = run("bash", LAUNCH / "test.sh", "--version", PYTHONSAFEPATH="1")
    assert done.returncode == 0, done


# --- .venv -----------------------------------------------------------------------------------------

# Installs nothing, but takes its time and says so.
SLOW = """
import sys, time
sys.path.insert(0, {launch!r})
import make_venv

def make(base):
    with open({log!r}, "a") as log:
        log.write("begin\\n")
        log.flush()
        time.sleep({seconds})
        log.write("end\\n")
    make_venv.PYTHON.parent.mkdir(parents=True, exist_ok=True)
    make_venv.PYTHON.touch(mode=0o755)
    make_venv.STAMP.write_text(make_venv.stamp() + "\\n")

make_venv.make = make
make_venv.main(sys.executable)
"""


@pytest.fixture
def checkout(tmp_path) -> Path:
    """What make_venv.py needs of a repository."""
    folder = tmp_path / "checkout"
    (folder / "launch").mkdir(parents=True)
    shutil.copy(LAUNCH / "make_venv.py", folder / "launch")
    for name in ("pyproject.toml", "constraints.txt"):
        shutil.copy(ROOT / name, folder)
    return folder


def _start(checkout: Path, seconds: float = 0) -> subprocess.Popen:
    program = SLOW.format(launch=str(checkout / "launch"), log=str(checkout / "log"), seconds=seconds)
    return subprocess.Popen([sys.executable, "-c", program], stderr=subprocess.PIPE, text=True)


def _log(checkout: Path) -> list[str]:
    return (checkout / "log").read_text().split() if (checkout / "log").exists() else []


def test_of_first_starts_at_once_one_installs(checkout):
    starts = [_start(checkout, 1.0) for _ in range(3)]
    assert [start.wait(TIMEOUT) for start in starts] == [0, 0, 0]
    assert _log(checkout) == ["begin", "end"]


def test_after_an_interrupted_installation_the_next_start_installs(checkout):
    killed = _start(checkout, 60)
    while not _log(checkout):
        assert killed.poll() is None
        time.sleep(0.01)
    killed.kill()
    killed.communicate()
    assert _start(checkout).wait(TIMEOUT) == 0
    assert _log(checkout) == ["begin", "begin", "end"]


def test_what_is_asked_for_changes_the_installation(checkout):
    for times, name in enumerate(["", "pyproject.toml", "constraints.txt", ".venv/stamp"], 1):
        if name:
            with (checkout / name).open("ab") as file:
                file.write(b"# changed\n\xff" if name == ".venv/stamp" else b"# changed\n")
        for _ in range(2):  # the second finds what the first has made
            assert _start(checkout).wait(TIMEOUT) == 0
        assert _log(checkout) == ["begin", "end"] * times


def test_where_nothing_can_be_written_is_one_line(checkout):
    (checkout / ".venv").symlink_to("/proc/no-such-folder/.venv")  # no one may write there, root neither
    done = run(sys.executable, checkout / "launch" / "make_venv.py", sys.executable)
    assert done.returncode == 2 and len(done.stderr.splitlines()) == 1
    assert done.stderr.startswith("error: cannot write /proc/no-such-folder/.venv.lock: No such file or directory")


def test_a_failed_installation_leaves_no_stamp(checkout):
    (checkout / "constraints.txt").write_text("this is no requirement\n")
    done = run(sys.executable, checkout / "launch" / "make_venv.py", sys.executable)
    assert done.returncode == 1 and "Traceback" not in done.stderr
    assert done.stderr.splitlines()[-1].endswith("failed; the next start tries again")
    assert (checkout / ".venv" / "bin" / "python").exists() and not (checkout / ".venv" / "stamp").exists()


def test_git_ignores_an_environment_that_is_a_link(tmp_path):
    git = ["git", "-C", str(tmp_path)]
    subprocess.run([*git, "init", "-q"], check=True)
    shutil.copy(ROOT / ".gitignore", tmp_path)
    (tmp_path / ".venv").symlink_to(tmp_path.parent)
    (tmp_path / ".venv.lock").touch()
    said = subprocess.run([*git, "status", "--porcelain", "-uall"], check=True, capture_output=True, text=True).stdout
    assert said == "?? .gitignore\n"
