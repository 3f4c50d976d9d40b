"""``python -m parallel_lce.megatron SCRIPT``: unedited scripts get the loss by their own arguments."""

from __future__ import annotations

import argparse
import json
import os
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
    switched = hasattr(LanguageModule.compute_language_model_loss, "__wrapped__")
    losses = [loss.tolist() for loss in trained.losses]
    print(json.dumps([losses, switched, os.environ.get("PARALLEL_LCE_LOGITS_BUDGET")]))
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


def _run(command: list[str], *paths: Path) -> subprocess.CompletedProcess:
    paths = [ROOT, *paths, *filter(None, [os.environ.get("PYTHONPATH")])]
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(map(str, paths)), "OMP_NUM_THREADS": "1"}
    environment.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
    done = subprocess.run([sys.executable, *command], env=environment, capture_output=True, text=True, timeout=240)
    assert done.returncode == 0, done.stderr[-3000:]
    return done


@pytest.mark.slow
def test_an_unedited_script(script, device):
    torchrun = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    launcher = ["-m", "parallel_lce.megatron", "--parallel-lce-logits-budget", "0", str(script)]
    switch = ["--cross-entropy-loss-fusion", "--cross-entropy-fusion-impl", "parallel_lce"]
    (stock, *without), (ours, *with_switch) = (
        json.loads(_run([*torchrun, *command], ROOT / "tests", ROOT / "launch").stdout.splitlines()[-1])
        for command in ([str(script)], [*launcher, *switch])
    )
    assert (without, with_switch) == ([False, None], [True, "0"])
    for a, b in zip(ours, stock, strict=True):
        assert max(abs(x - y) for p, q in zip(a, b) for x, y in zip(p, q)) <= 1e-5


# What is replaced of Megatron-core, and a model that imports it.
CHECKOUT = {
    "tensor_parallel/__init__.py": "from .cross_entropy import vocab_parallel_cross_entropy",
    "tensor_parallel/cross_entropy.py": "def vocab_parallel_cross_entropy(): pass",
    "models/common/language_module/language_module.py": """
class LanguageModule:
    def setup_embeddings_and_output_layer(self): pass
    def compute_language_model_loss(self, labels, logits): pass
""",
    "models/gpt/gpt_model.py": """
from megatron.core.models.common.language_module.language_module import LanguageModule
class GPTModel(LanguageModule): pass
""",
}


def test_megatron_is_what_the_script_imports(tmp_path):
    """A script that puts its own Megatron first, after setting its environment, gets that one, switched."""
    checkout = tmp_path / "checkout"
    for name, text in {"__init__.py": ""}.items() | CHECKOUT.items():
        path = checkout / "megatron" / "core" / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    script = tmp_path / "script.py"
    script.write_text(
        "import sys\n"
        "assert 'megatron.core' not in sys.modules\n"
        f"sys.path.insert(0, {str(checkout)!r})\n"
        "from megatron.core.models.gpt.gpt_model import GPTModel\n"
        "print(sys.modules['megatron.core'].__file__)\n"
        "print(hasattr(GPTModel.compute_language_model_loss, '__wrapped__'))\n"
    )
    file, switched = _run(["-m", "parallel_lce.megatron", str(script)]).stdout.split()[-2:]
    assert Path(file).is_relative_to(checkout) and switched == "True"


def _arguments(monkeypatch, *arguments: str) -> tuple:
    for name in launcher._OPTIONS:
        variable = f"PARALLEL_LCE_{name.replace('-', '_').upper()}"
        monkeypatch.setenv(variable, "")  # so that what the options set is undone
        monkeypatch.delenv(variable)
    return launcher._parse(list(arguments))


def test_options_may_stand_anywhere(monkeypatch, script):
    ours = ["--parallel-lce-debug=1", "--parallel-lce-logits-budget 7", "--parallel-lce-cross-entropy logits"]
    text = f"{ours[0]} {script} --lr -1 {ours[1]} -- -x {ours[2]} --help"
    assert _arguments(monkeypatch, *text.split()) == (False, str(script), ["--lr", "-1", "--", "-x", "--help"])
    found = [os.environ[f"PARALLEL_LCE_{name}"] for name in ("DEBUG", "LOGITS_BUDGET", "CROSS_ENTROPY")]
    assert found == ["1", "7", "logits"]
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
    for refused in [[name, "parallel"]] * bool(choices) + [["--attention", "parallel_lce"]]:
        with pytest.raises(SystemExit):
            parser.parse_args(refused)


@pytest.mark.parametrize(
    ("arguments", "code", "message"),
    [
        (["no_such.py"], 2, "no such script: no_such.py"),
        (["--lr", "1"], 2, "expected a script or -m MODULE, got '--lr 1'"),
        (["-m"], 2, "expected a script or -m MODULE"),
        (["--parallel-lce-budget", "1", "a.py"], 2, "unrecognized arguments: --parallel-lce-budget"),
        (["--parallel-lce-cross-entropy", "fused", "a.py"], 2, "invalid choice: 'fused'"),
        (["a.py", "--parallel-lce-debug"], 2, "expected one argument"),
        *(([], 0, f"--parallel-lce-{name}") for name in launcher._OPTIONS),  # help
        *(([], 0, f"PARALLEL_LCE_{name.replace('-', '_').upper()}") for name in launcher._OPTIONS),
    ],
)
def test_refuses_in_words(arguments, code, message, monkeypatch, capsys):
    with pytest.raises(SystemExit) as refusal:
        _arguments(monkeypatch, *arguments)
    said = capsys.readouterr()
    assert refusal.value.code == code and message in (said.err if code else said.out)
