"""The plugin of verl, and what other RL trainers call, each after Megatron's decoder and mappings: in the default suite
with a stand-in of verl's contract; with --all with the release, its engines included."""

from __future__ import annotations

import os
import re
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
# Innermost where it is a parameter, so that it changes last: processes of another release are started anew.
RELEASES = ["stand-in", pytest.param(RELEASE, marks=pytest.mark.slow)]


@pytest.fixture(params=["cpu"])
def device(request) -> str:
    """verl's engines are made to run on CPUs here."""
    return request.param


def folder() -> str:
    return str(folder_of("verl", RELEASE, others=OTHERS))


def _run(worlds, ranks: int, release: str, body, *arguments) -> None:
    worlds(ranks, None if release == "stand-in" else folder()).run(body, *arguments)


SLOW = [pytest.param(*case, marks=pytest.mark.slow) for case in ((1, False), (4, False), (4, True))]
SEQUENCE_PARALLEL = [(2, False), (2, True), *SLOW]


@pytest.mark.parametrize(("ranks", "sequence_parallel"), SEQUENCE_PARALLEL)
@pytest.mark.parametrize("trainer", ["slime", "skyrl"])
def test_what_trainers_call(trainer, ranks, sequence_parallel, worlds):
    _run(worlds, ranks, "stand-in", verl_bodies.ends, "stand-in", trainer, sequence_parallel)


@pytest.mark.parametrize(("ranks", "sequence_parallel"), SEQUENCE_PARALLEL)
@pytest.mark.parametrize("trainer", ["verl", "verl hook", "tied verl"])
@pytest.mark.parametrize("release", RELEASES)
def test_what_verl_calls(release, trainer, ranks, sequence_parallel, worlds):
    _run(worlds, ranks, release, verl_bodies.ends, release, trainer, sequence_parallel)


def test_where_the_kernel_sums(worlds):
    _run(worlds, 2, "stand-in", verl_bodies.mapped)


WANTED = ["", "temperature", "sums", "temperature, sums"]


@pytest.mark.parametrize("wanted", WANTED)
@pytest.mark.parametrize(("ranks", "sequence_parallel"), SEQUENCE_PARALLEL)
@pytest.mark.parametrize("release", RELEASES)
def test_its_megatron_engine(release, ranks, sequence_parallel, wanted, worlds):
    _run(worlds, ranks, release, verl_bodies.megatron_engine, release, sequence_parallel, wanted)


@pytest.mark.slow
@pytest.mark.parametrize("sequence_parallel", [True, False])
def test_its_megatron_engine_on_megatrons_hook(sequence_parallel, worlds):
    path = os.pathsep.join([megatron_models.path_of("0.18.2"), folder()])
    worlds(2, path).run(verl_bodies.hooked_engine, RELEASE, sequence_parallel, WANTED[-1])


@pytest.mark.parametrize("wanted", WANTED)
@pytest.mark.parametrize("ranks", [1, 2])
@pytest.mark.parametrize("release", RELEASES)
def test_its_fsdp_engine(release, ranks, wanted, worlds):
    _run(worlds, ranks, release, verl_bodies.fsdp_engine, release, wanted)


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
    search = ":".join(map(str, [ROOT, *path]))
    done = ran(sys.executable, "-c", code, env={"PYTHONPATH": search, **environment})
    assert done.returncode == 0, done.stderr[-2000:]


def test_the_line_of_the_page():
    before, after = re.findall(r"^```bash\n(.*?)^```$", PAGE, re.M | re.S)
    name, value = re.match(r"(\w+)=(\S+) ", after).groups()
    assert after == f"{name}={value} {before}"
    _python(IMPORT, verl_bodies.STANDIN, **{name: value})


def test_the_entry_point(tmp_path):
    groups = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["entry-points"]
    information = tmp_path / "parallel_lce-0.dist-info"
    information.mkdir()
    (information / "METADATA").write_text("Metadata-Version: 2.1\nName: parallel-lce\nVersion: 0\n")
    lines = [f"{name} = {value}" for name, value in groups["verl.plugins"].items()]
    (information / "entry_points.txt").write_text("\n".join(["[verl.plugins]", *lines]))
    _python(IMPORT, tmp_path, verl_bodies.STANDIN)


def test_the_python_of_the_page_and_nothing_else_imports_a_trainer():
    blocks = re.findall(r"^```python\n(.*?)^```$", PAGE, re.M | re.S)
    ours = [block for block in blocks if not block.startswith(("from skyrl", "from ."))]
    assert len(ours) == len(blocks) - 2
    none = "import sys\nassert not {'verl', 'megatron', 'skyrl', 'slime', 'nemo_rl'} & {*sys.modules}\n"
    _python("\n".join([*ours, none]))
