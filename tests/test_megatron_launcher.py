"""``python -m parallel_lce.megatron SCRIPT``: unedited scripts get the loss by their own arguments."""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("megatron.core", reason="needs megatron-core")

from parallel_lce.megatron import __main__ as launcher

ROOT = Path(__file__).resolve().parent.parent

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


# A script that knows nothing of this package, with Megatron's argument for the loss. It puts its own Megatron first,
# after setting its environment.
SCRIPT = """
import argparse, os, sys
from beside import CHECKOUT
assert "megatron.core" not in sys.modules
sys.path.insert(0, CHECKOUT)
from megatron.core.models.gpt.gpt_model import GPTModel
group = argparse.ArgumentParser().add_argument_group("training")
group.add_argument("--cross-entropy-fusion-impl", default="native", choices=["native", "te"])
print(sys.modules["megatron.core"].__file__)
print(hasattr(GPTModel.compute_language_model_loss, "__wrapped__"))
print(group._actions[-1].choices, sys.argv, os.environ.get("PARALLEL_LCE_LOGITS_BUDGET"), sep="\\n")
"""


@pytest.fixture
def script(tmp_path) -> Path:
    for name, text in {"__init__.py": ""}.items() | CHECKOUT.items():
        path = tmp_path / "checkout" / "megatron" / "core" / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    folder = tmp_path / "scripts"
    folder.mkdir()
    # Imported as scripts import what lies beside them.
    (folder / "beside.py").write_text(f"CHECKOUT = {str(tmp_path / 'checkout')!r}")
    (folder / "train.py").write_text(SCRIPT)
    return folder / "train.py"


def test_an_unedited_script(script):
    paths = [str(ROOT), *filter(None, [os.environ.get("PYTHONPATH")])]
    options = ["--parallel-lce-logits-budget", "7", str(script), "--cross-entropy-fusion-impl", "parallel_lce"]
    done = subprocess.run(
        [sys.executable, "-m", "parallel_lce.megatron", *options],
        env={**os.environ, "PYTHONPATH": os.pathsep.join(paths)},
        capture_output=True,
        text=True,
        timeout=240,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    file, *said = done.stdout.splitlines()[-5:]
    assert Path(file).is_relative_to(script.parents[1] / "checkout")
    assert said == ["True", "('native', 'te', 'parallel_lce')", str([str(script), *options[3:]]), "7"]


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
