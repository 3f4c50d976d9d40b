"""The wheel holds all of the code, kernels included, and imports where nothing of the repository is."""

from __future__ import annotations

import importlib.metadata
import importlib.util
import os
import shutil
import subprocess
import sys
import tarfile
import zipfile
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent

needs_build = pytest.mark.skipif(
    importlib.util.find_spec("build") is None, reason="needs the 'build' package (pip install build)"
)


def python(*arguments: str, path: str | None = None, cwd: Path | None = None) -> subprocess.CompletedProcess:
    """A Python of this environment that sees ``path`` and nothing else of ours."""
    environment = {k: v for k, v in os.environ.items() if k not in ("PYTHONPATH", "PYTHONHOME")}
    if path is not None:
        environment["PYTHONPATH"] = path
    return subprocess.run(
        [sys.executable, *arguments], cwd=cwd, env=environment, capture_output=True, text=True, timeout=240
    )


def _copy(destination: Path) -> Path:
    """What git would check out of the package, its link included, and of a folder beside it."""
    skip = shutil.ignore_patterns("__pycache__", "*.egg-info", "build", "dist")
    for name in ("parallel_lce", "kernels", "benchmarks"):
        shutil.copytree(ROOT / name, destination / name, symlinks=True, ignore=skip)
    for name in ("pyproject.toml", "README.md", "LICENSE"):
        shutil.copy(ROOT / name, destination / name)
    return destination


@pytest.fixture(scope="module")
def built(tmp_path_factory) -> Path:
    """The folder of an sdist and of the wheel built from it."""
    source = _copy(tmp_path_factory.mktemp("source"))
    out = tmp_path_factory.mktemp("dist")
    # setuptools comes with torch; where it is too old, build fetches one.
    version = importlib.metadata.version("setuptools") if importlib.util.find_spec("setuptools") else "0"
    isolation = ["--no-isolation"] if int(version.split(".")[0]) >= 77 else []
    # Not from the repository: its build/ folder would hide the tool.
    done = python("-m", "build", *isolation, "--outdir", str(out), str(source), cwd=out)
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]
    return out


@pytest.fixture(scope="module")
def unpacked(built, tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("site")
    (wheel,) = built.glob("*.whl")
    zipfile.ZipFile(wheel).extractall(folder)
    return folder


def _modules(folder: Path) -> set[str]:
    return {str(p.relative_to(folder)) for p in folder.rglob("*.py") if "__pycache__" not in p.parts}


@needs_build
def test_the_wheel_holds_every_module_and_nothing_else(built, unpacked):
    """No top-level ``kernels`` (another package has that name), ``benchmarks``, ``tests`` or ``launch``."""
    kernels = _modules(ROOT / "kernels")
    assert kernels, "there are kernels to pack"
    named = {f"parallel_lce/kernels/{m}" for m in kernels}
    assert _modules(unpacked) == {f"parallel_lce/{m}" for m in _modules(ROOT / "parallel_lce")} | named
    for name in kernels:
        packed = unpacked / "parallel_lce" / "kernels" / name
        assert not packed.is_symlink() and packed.read_bytes() == (ROOT / "kernels" / name).read_bytes()
    (information,) = unpacked.glob("*.dist-info")
    assert {p.name for p in unpacked.iterdir()} == {"parallel_lce", information.name}
    assert (unpacked / "parallel_lce" / "py.typed").is_file()
    assert (information / "licenses" / "LICENSE").read_bytes() == (ROOT / "LICENSE").read_bytes()
    metadata = (information / "METADATA").read_text().splitlines()
    assert "License-Expression: Apache-2.0" in metadata and "License-File: LICENSE" in metadata
    (sdist,) = built.glob("*.tar.gz")
    with tarfile.open(sdist) as archive:
        names = {m.name.split("/", 1)[-1] for m in archive.getmembers() if m.isfile()}
    for module in kernels:
        assert f"parallel_lce/kernels/{module}" in names or f"kernels/{module}" in names


USE = """
import importlib.util, math, torch, parallel_lce
x = torch.zeros(3, 4, requires_grad=True)
w = torch.ones(5, 4, requires_grad=True)
loss = parallel_lce.linear_cross_entropy(x, w, torch.tensor([0, 1, 4]))
loss.backward()
assert abs(loss.item() - math.log(5)) < 1e-6, loss
assert w.grad.shape == (5, 4)
print(parallel_lce.__file__)
"""


@needs_build
def test_the_wheel_works_elsewhere(unpacked, tmp_path):
    names = [".".join(("parallel_lce.kernels", *Path(m).with_suffix("").parts)) for m in _modules(ROOT / "kernels")]
    each = f"for name in {names!r}:\n    assert importlib.util.find_spec(name) is not None, name\n"
    done = python("-c", USE + each, path=str(unpacked), cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    assert Path(done.stdout.strip()) == unpacked / "parallel_lce" / "__init__.py"


@pytest.mark.parametrize("lost", ["removed", "a text file", "dangling"])
def test_a_lost_link_names_its_cause(lost, tmp_path):
    """Some archive tools drop the link, git without symbolic links writes a file of its target's name."""
    shutil.copytree(
        ROOT / "parallel_lce", tmp_path / "parallel_lce", ignore=shutil.ignore_patterns("kernels", "__pycache__")
    )
    link = tmp_path / "parallel_lce" / "kernels"
    if lost == "a text file":
        link.write_text("../kernels")
    elif lost == "dangling":
        link.symlink_to("../kernels")
    done = python("-c", "import parallel_lce", path=str(tmp_path), cwd=tmp_path)
    assert done.returncode != 0
    last = done.stderr.strip().splitlines()[-1]
    assert last.startswith("ImportError: parallel_lce/kernels is missing")
    assert "symbolic link to ../kernels" in last and "core.symlinks=false" in last


IMPORTS = """
import sys
# Whatever else the extras install may be absent.
for name in ("megatron", "triton", "numpy", "matplotlib", "rich", "pydantic", "tokenizers"):
    sys.modules[name] = None  # import raises ImportError
import torch, torch.distributed
before = set(sys.modules)
import parallel_lce
added = {name.partition(".")[0] for name in set(sys.modules) - before}
ours = {name for name in added if name not in sys.stdlib_module_names}
assert ours <= {"parallel_lce", "torch"}, ours
"""


def test_importing_needs_torch_alone(tmp_path):
    done = python("-c", IMPORTS + USE, path=str(ROOT), cwd=tmp_path)
    assert done.returncode == 0, done.stderr


def test_the_link_is_in_the_repository():
    link = ROOT / "parallel_lce" / "kernels"
    assert link.is_symlink() and os.readlink(link) == "../kernels"
    assert not (ROOT / "kernels" / "__init__.py").exists(), "a top-level package of that name"
