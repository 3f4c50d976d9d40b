"""``python -m parallel_lce.megatron SCRIPT``: unedited scripts get the loss by their own arguments."""

from __future__ import annotations

import argparse
import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("megatron.core", reason="needs megatron-core")

from parallel_lce.megatron import __main__ as launcher

ROOT = Path(__file__).resolve().parent.parent

# A training script that knows nothing of this package, with Megatron's argument for the loss.
SCRIPT = """
import argparse, json, os
import torch
import torch.distributed as dist
from beside import COUNT

parser = argparse.ArgumentParser()
group = parser.add_argument_group("training")
group.add_argument("--cross-entropy-loss-fusion", action="store_true")
group.add_argument("--cross-entropy-fusion-impl", type=str, default="native", choices=["native", "te"])
group.add_argument("--output", required=True)
arguments = parser.parse_args()

from megatron_models import Model
from megatron_training import train
from world import Member

cuda = torch.cuda.device_count() >= COUNT
device = torch.device("cuda", int(os.environ["LOCAL_RANK"])) if cuda else torch.device("cpu")
if cuda:
    torch.cuda.set_device(device)
dist.init_process_group("nccl" if cuda else "gloo")
member = Member(dist.get_rank(), COUNT, device, dist.group.WORLD)
options = {
    "cross_entropy_loss_fusion": arguments.cross_entropy_loss_fusion,
    "cross_entropy_fusion_impl": arguments.cross_entropy_fusion_impl,
}
trained = train(member, Model(ranks=COUNT, sequence_parallel=True, ddp="fp32"), options)
if dist.get_rank() == 0:
    from megatron.core.models.common.language_module.language_module import LanguageModule
    found = {
        "losses": [loss.tolist() for loss in trained.losses],
        "switched": hasattr(LanguageModule.compute_language_model_loss, "__wrapped__"),
        "budget": os.environ.get("PARALLEL_LCE_LOGITS_BUDGET"),
    }
    with open(arguments.output, "w") as file:
        json.dump(found, file)
dist.destroy_process_group()
"""


@pytest.fixture
def script(tmp_path) -> Path:
    folder = tmp_path / "scripts"
    folder.mkdir()
    (folder / "beside.py").write_text("COUNT = 2\n")  # imported as scripts import what lies beside them
    path = folder / "train.py"
    path.write_text(SCRIPT)
    return path


def _run(command: list[str], folder: Path) -> subprocess.CompletedProcess:
    paths = [ROOT, ROOT / "tests", ROOT / "launch", *filter(None, [os.environ.get("PYTHONPATH")])]
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(map(str, paths)), "OMP_NUM_THREADS": "1"}
    environment.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    return subprocess.run(
        [*torchrun, *command], cwd=folder, env=environment, capture_output=True, text=True, timeout=240
    )


@pytest.mark.slow
def test_an_unedited_script(script, tmp_path, device):
    stock, ours = tmp_path / "stock.json", tmp_path / "ours.json"
    done = _run([str(script), "--output", str(stock)], tmp_path)
    assert done.returncode == 0, done.stderr[-3000:]
    switch = ["--cross-entropy-loss-fusion", "--cross-entropy-fusion-impl", "parallel_lce"]
    done = _run(
        [
            "-m",
            "parallel_lce.megatron",
            "--parallel-lce-logits-budget",
            "0",
            str(script),
            *switch,
            "--output",
            str(ours),
        ],
        tmp_path,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    stock, ours = json.loads(stock.read_text()), json.loads(ours.read_text())
    assert (stock["switched"], ours["switched"], ours["budget"]) == (False, True, "0")
    for a, b in zip(ours["losses"], stock["losses"], strict=True):
        assert max(abs(x - y) for p, q in zip(a, b) for x, y in zip(p, q)) <= 1e-5


def test_megatron_is_what_the_script_imports(tmp_path):
    """A script that puts its own Megatron first, after setting its environment, gets that one, switched."""
    import megatron.core

    source = Path(megatron.core.__file__).parents[1]
    checkout = tmp_path / "checkout"
    checkout.mkdir()
    shutil.copytree(source, checkout / "megatron", ignore=shutil.ignore_patterns("__pycache__", "*.so"))
    script = tmp_path / "script.py"
    script.write_text(
        "import sys\n"
        "assert 'megatron.core' not in sys.modules\n"
        f"sys.path.insert(0, {str(checkout)!r})\n"
        "from megatron.core.models.gpt.gpt_model import GPTModel\n"
        "print(sys.modules['megatron.core'].__file__)\n"
        "print(hasattr(GPTModel.compute_language_model_loss, '__wrapped__'))\n"
    )
    command = [sys.executable, "-m", "parallel_lce.megatron", str(script)]
    paths = [str(ROOT), *filter(None, [os.environ.get("PYTHONPATH")])]
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(paths)}
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr[-3000:]
    file, switched = done.stdout.split()[-2:]
    assert Path(file).is_relative_to(checkout) and switched == "True"


def _arguments(monkeypatch, *arguments: str) -> tuple:
    for name in launcher._OPTIONS:
        variable = f"PARALLEL_LCE_{name.replace('-', '_').upper()}"
        monkeypatch.setenv(variable, "")  # so that what the options set is undone
        monkeypatch.delenv(variable)
    return launcher._parse(list(arguments))


def test_options_may_stand_anywhere(monkeypatch, script):
    found = _arguments(
        monkeypatch,
        "--parallel-lce-debug=1",
        str(script),
        "--lr",
        "-1",
        "--parallel-lce-logits-budget",
        "7",
        "--",
        "-x",
        "--parallel-lce-cross-entropy",
        "logits",
        "--help",
    )
    assert found == (False, str(script), ["--lr", "-1", "--", "-x", "--help"])
    assert os.environ["PARALLEL_LCE_LOGITS_BUDGET"] == "7"
    assert os.environ["PARALLEL_LCE_DEBUG"] == "1"
    assert os.environ["PARALLEL_LCE_CROSS_ENTROPY"] == "logits"


def test_modules(monkeypatch):
    assert _arguments(monkeypatch, "-m", "a.b", "-m", "c") == (True, "a.b", ["-m", "c"])


@pytest.mark.parametrize("name", ["--cross-entropy-fusion-impl", "--cross_entropy_fusion_impl"])
@pytest.mark.parametrize("choices", [["native", "te"], ("native",), None])
def test_parsers_take_the_implementation(name, choices):
    class Container(argparse.ArgumentParser):
        """So that no other parser of this process learns it."""

    launcher.allow_implementation(Container)
    parser = Container()
    parser.add_argument(name, choices=choices)
    parser.add_argument("--attention", choices=["flash"])
    assert parser.parse_args([name, "parallel_lce"]).cross_entropy_fusion_impl == "parallel_lce"
    if choices:
        with pytest.raises(SystemExit):
            parser.parse_args([name, "parallel"])
    with pytest.raises(SystemExit):
        parser.parse_args(["--attention", "parallel_lce"])


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["no_such.py"], "no such script: no_such.py"),
        (["--lr", "1"], "expected a script or -m MODULE, got '--lr 1'"),
        (["-m"], "expected a script or -m MODULE"),
        (["--parallel-lce-budget", "1", "a.py"], "unrecognized arguments: --parallel-lce-budget"),
        (["--parallel-lce-cross-entropy", "fused", "a.py"], "invalid choice: 'fused'"),
        (["a.py", "--parallel-lce-debug"], "expected one argument"),
    ],
)
def test_refuses_in_words(arguments, message, monkeypatch, capsys):
    with pytest.raises(SystemExit) as refusal:
        _arguments(monkeypatch, *arguments)
    assert refusal.value.code == 2 and message in capsys.readouterr().err


def test_help_says_what_the_environment_may_say(monkeypatch, capsys):
    with pytest.raises(SystemExit) as stop:
        _arguments(monkeypatch)
    assert stop.value.code == 0
    text = capsys.readouterr().out
    for name in launcher._OPTIONS:
        assert f"--parallel-lce-{name}" in text and f"PARALLEL_LCE_{name.replace('-', '_').upper()}" in text
