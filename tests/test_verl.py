"""The plugin of verl, and what other RL trainers call, each after Megatron's decoder and mappings: in the default suite
with a stand-in of verl's contract; with --all with the release, its engines included."""

import os
import re
import shutil
import sys
import tomllib
from pathlib import Path

import pytest

pytest.importorskip("megatron.core", reason="needs megatron-core")

import megatron_models
import verl_bodies
from releases import ROOT, folder_of
from tools import ran

RELEASE = "0.9.1"
# All that its engines import, beside torch, megatron-core and the placeholders of verl_bodies.py.
OTHERS = (
    "accelerate==1.15.0", "antlr4-python3-runtime==4.9.3", "certifi", "cloudpickle==3.1.3", "codetiming==1.4.0",
    "httpcore==1.0.9", "httpx==0.28.1", "huggingface_hub==1.33.0", "hydra-core==1.3.8", "omegaconf==2.4.0",
    "orjson==3.13.0", "peft==0.21.2", "psutil==7.2.2", "pyvers==0.2.3", "regex", "tensordict==0.10.0",
    "tokenizers==0.22.2", "torchdata==0.11.0", "transformers==5.9.0", "typer==0.29.2",
)  # fmt: skip
MODULES = (
    "models/transformers/dense_common", "models/mcore/model_forward_fused", "workers/engine/megatron/transformer_impl",
    "workers/engine/fsdp/transformer_impl", "utils/tensordict_utils", "utils/kernel/linear_cross_entropy",
    "utils/torch_functional", "__init__", "../tensordict",
)  # fmt: skip


@pytest.fixture(scope="module")
def standin(tmp_path_factory) -> str:
    folder = tmp_path_factory.mktemp("verl")
    for module in MODULES:
        path = folder / "verl" / f"{module}.py"
        path.parent.mkdir(parents=True, exist_ok=True)
        shutil.copy(ROOT / "tests" / "verl_standin.py", path)
    return str(folder)


@pytest.fixture(scope="module", params=["stand-in", pytest.param(RELEASE, marks=pytest.mark.slow)])
def verl(request, standin) -> str:
    """A folder to import verl from."""
    return standin if request.param == "stand-in" else str(folder_of("verl", RELEASE, others=OTHERS))


WANTED = ["", "temperature", "sums", "temperature, sums"]
CASES = [(calls, "") for calls in verl_bodies.CALLS if "engine" not in calls] + [("engine", each) for each in WANTED]
CASES = [(*case, *on) for case in CASES for on in ((2, False), (2, True), (1, False), (4, False), (4, True))]
CASES += [("fsdp engine", wanted, ranks, False) for wanted in WANTED for ranks in (2, 1)]
CASES = [pytest.param(*case, marks=[pytest.mark.slow] * (case[2] != 2)) for case in CASES]


@pytest.mark.parametrize(("calls", "wanted", "ranks", "sequence_parallel"), CASES)
@pytest.mark.parametrize("device", ["cpu"])  # verl's engines are made to run on CPUs here
def test_what_trainers_call(calls, wanted, ranks, sequence_parallel, verl, worlds):
    worlds(ranks, verl).run(verl_bodies.check, calls, sequence_parallel, wanted)


@pytest.mark.parametrize("device", ["cpu"])
def test_the_gradient_is_summed_once(verl, worlds):
    worlds(2, verl).run(verl_bodies.check_who_sums)


@pytest.mark.slow
@pytest.mark.parametrize("sequence_parallel", [True, False])
@pytest.mark.parametrize("device", ["cpu"])
def test_verls_engine_on_megatrons_hook(sequence_parallel, worlds):
    path = os.pathsep.join([megatron_models.path_of("0.18.2"), str(folder_of("verl", RELEASE, others=OTHERS))])
    worlds(2, path).run(verl_bodies.check, "hooked engine", sequence_parallel, WANTED[-1])


PAGE = (ROOT / "docs" / "rl.md").read_text()
IMPORT = """
import importlib, sys
import verl
kernel = importlib.import_module("verl.utils.kernel.linear_cross_entropy")
plugin = sys.modules["parallel_lce.verl"]
assert "megatron" not in sys.modules
ours = kernel.linear_cross_entropy
plugin.install()
assert kernel.linear_cross_entropy is ours
plugin.uninstall()
theirs = kernel.linear_cross_entropy
assert theirs is not ours and theirs is ours.__wrapped__
plugin.install()
assert kernel.linear_cross_entropy is not theirs
"""


def _python(code: str, *path: Path | str, **environment: str) -> None:
    done = ran(sys.executable, "-c", code, env={"PYTHONPATH": ":".join(map(str, [ROOT, *path])), **environment})
    assert done.returncode == 0, done.stderr[-2000:]


def test_the_line_of_the_page(standin):
    before, after = re.findall(r"^```bash\n(.*?)^```$", PAGE, re.M | re.S)
    name, value = re.match(r"(\w+)=(\S+) ", after).groups()
    assert after == f"{name}={value} {before}"
    _python(IMPORT, standin, **{name: value})


def test_the_entry_point(tmp_path, standin):
    groups = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["entry-points"]
    information = tmp_path / "a_plugin-0.dist-info"
    information.mkdir()
    (information / "METADATA").write_text("Metadata-Version: 2.1\nName: a-plugin\nVersion: 0\n")
    lines = [f"{name} = {value}" for name, value in groups["verl.plugins"].items()]
    (information / "entry_points.txt").write_text("\n".join(["[verl.plugins]", *lines]))
    _python(IMPORT, tmp_path, standin)


def test_the_python_of_the_page_and_nothing_else_imports_a_trainer():
    blocks = re.findall(r"^```python\n(.*?)^```$", PAGE, re.M | re.S)
    ours = [block for block in blocks if not block.startswith(("from skyrl", "from ."))]
    assert len(ours) == len(blocks) - 2
    none = "import sys\nassert not {'verl', 'megatron', 'skyrl', 'slime', 'nemo_rl'} & {*sys.modules}\n"
    _python("\n".join([*ours, none]))
