"""The repository: its pages are short, what they name and link exists, and their Python runs on one rank; ruff is
content; the wheel holds all of the code, kernels included, and imports alone."""

import importlib.metadata
import importlib.util
import re
import shutil
import sys
import zipfile
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

import parallel_lce.megatron
from benchmarks.engine.options import SUITES
from benchmarks.engine.peers import ONE, RANKS, named
from parallel_lce.megatron import __main__ as megatron_launcher
from releases import ROOT
from tools import ran

load_config = pytest.importorskip("training.config", reason="needs the training program's packages").load_config
PAGES = sorted([*ROOT.glob("*.md"), *(ROOT / "docs").rglob("*.md")])
FENCED = re.compile(r"^```(\w*)\n(.*?)^```$", re.MULTILINE | re.DOTALL)
FOLDERS = "benchmarks|configs|docs|examples|kernels|launch|parallel_lce|tests"
FILE = re.compile(rf"(?<![\w/.-])(?:\./)?((?:{FOLDERS})/[\w./-]*\w)")
MODULE = re.compile(r"-m ((?:parallel_lce|benchmarks)\b[\w.]*)")
OPTION = re.compile(r"(?<![\w-])--[a-z][\w-]*")
SETTING = re.compile(r"(?<![\w./-])((?:text|model|train|loss|parallel|memory|compare|snapshots)\.\w+)=(?! )")
SOURCES = [*(ROOT / "benchmarks").rglob("*.py"), ROOT / "launch" / "training" / "config.py"]
SOURCES += [ROOT / "tests" / name for name in ("conftest.py", "fuzz/program.py", "sanitize.py")]
PROGRAM = re.compile(r"launch/(\w+)\.(?:sh|py)|-m (benchmarks[.\w]*)|tests/(fuzz|sanitize)\b")
OPTIONS_OF_OTHERS = {"--override"}  # of torchtitan
PLACEHOLDERS = {"examples/NAME.py", "tests/test_x.py"}


def _prose(page: Path) -> str:
    return FENCED.sub("", page.read_text())


def _links(page: Path) -> list[tuple[Path, str]]:
    parts = (link.partition("#") for link in re.findall(r"\]\(([^)\s]+)\)", _prose(page)) if "://" not in link)
    return [((page.parent / name).resolve() if name else page, anchor) for name, _, anchor in parts]


def test_readme_and_pages_are_short():
    pages = [ROOT / "README.md", *(ROOT / "docs").rglob("*.md")]
    assert len(pages[0].read_text().splitlines()) <= 110
    assert sum(len(page.read_text().split()) for page in pages) <= 12_000


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_links_files_and_modules_of_a_page_exist(page):
    for text, name in re.findall(r"\[([\w/]+\.py)\]\(([^)\s]+)\)", _prose(page)):
        assert f"/{name}".endswith(f"/{text}"), f"{text} is the text of a link to {name}"
    for target, anchor in _links(page):
        assert target.exists() and target.is_relative_to(ROOT), target
        if anchor:  # those that GitHub gives to headings
            titles = re.findall(r"^#+ (.+)$", _prose(target), re.MULTILINE)
            assert anchor in {re.sub(r"[^\w\- ]", "", title.lower()).replace(" ", "-") for title in titles}, anchor
    blocks = [block for _, block in FENCED.findall(page.read_text())]
    code = "\n".join([*blocks, *re.findall(r"`([^`]+)`", _prose(page))])
    for name in set(FILE.findall(code)) - PLACEHOLDERS:
        assert (ROOT / name).exists(), f"{name}: no such file"
    for module in MODULE.findall(code):
        path = ROOT / module.replace(".", "/")
        assert path.with_suffix(".py").exists() or (path / "__main__.py").exists(), f"{module} cannot be started"


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_options_settings_tests_and_variables_of_a_page_exist(page):
    blocks = [code for language, code in FENCED.findall(page.read_text()) if language != "python"]
    lines = [line.partition(" #")[0] for code in blocks for line in code.replace("\\\n", " ").splitlines()]
    spans = re.findall(r"`([^`]+)`", " ".join(_prose(page).split()))
    sources = "".join(path.read_text() for path in SOURCES)
    known = {"--help", *OPTIONS_OF_OTHERS, *re.findall(r'"(--[a-z][\w-]*)"', sources)}
    known |= {f"--parallel-lce-{name}" for name in megatron_launcher._OPTIONS}
    for command in [*lines, *spans]:
        assert {option for option in OPTION.findall(command) if option.startswith("--parallel-lce-")} <= known, command
        if program := PROGRAM.search(command):
            name = next(filter(None, program.groups()))
            setting = RANKS if name == "bench" or command.startswith("torchrun") else ONE
            command = command[program.end() :].rpartition(" -- ")[2]  # in front of the -- are torchrun's
            for peers in re.findall(r"--peers((?: (?!-)\S+)+)", command):
                assert [named(peer, setting) for peer in peers.split()]
            assert set(re.findall(r"--suite (\w+)", command)) <= {*SUITES}, command
        if program or command.startswith("--"):
            assert set(OPTION.findall(command)) <= known, command
    config = load_config(ROOT / "configs" / "snapshots.yaml", []).model_dump()
    sections = {section: values for section, values in config.items() if isinstance(values, dict)}
    settings = {f"{section}.{name}" for section, values in sections.items() for name in values}
    assert set(SETTING.findall("\n".join([*lines, *spans]))) <= settings
    tests = {path.stem: path.read_text() for path in (ROOT / "tests").glob("*.py")}
    text, defined = page.read_text(), re.findall(r"def (test_\w+)", "\n".join(tests.values()))
    assert set(re.findall(r"(?<![\w/])test_\w+", text)) <= {*defined, *tests}
    variables = set(re.findall(r"PARALLEL_LCE_\w*[A-Z]", text)) - {"PARALLEL_LCE_PYTHON"}
    read = "\n".join([*tests.values(), *[path.read_text() for path in (ROOT / "parallel_lce").rglob("*.py")]])
    assert not {name for name in variables if f'"{name}"' not in read}


def test_every_page_is_linked_and_every_example_and_configuration_named():
    reached, todo = set(), [ROOT / "README.md"]
    while todo:
        page = todo.pop()
        if page not in reached and page.suffix == ".md":
            reached.add(page)
            todo += [target for target, _ in _links(page)]
    assert reached == set(PAGES)
    text = "\n".join(page.read_text() for page in PAGES)
    for path in [*(ROOT / "examples").glob("*.py"), *(ROOT / "configs").iterdir()]:
        if path.name != "ranks.py":  # what the examples share
            assert path.name in text or f"[{path.suffix}](../{path.relative_to(ROOT)})" in text, path


N, D, V = 6, 8, 50257  # the vocabulary of the pages


def _tensors() -> dict:
    torch.manual_seed(0)
    hidden, weight = torch.randn(N, D, requires_grad=True), torch.randn(V, D, requires_grad=True)
    target = torch.randint(V, (N,))
    names = dict(torch=torch, dist=dist, hidden=hidden, weight=weight, target=target, tokens=target, V=V)
    names |= dict(input_ids=target, model=lambda ids: hidden, mask=target > 3, advantage=torch.randn(N))
    names |= dict(student_hidden=hidden, student_weight=weight, teacher_hidden=hidden, teacher_weight=weight.detach())
    return names | dict(tp_group=None, sharding={}, step=300, rows=V, ranks=1)


def _blocks(page: str) -> list[str]:
    return [code for language, code in FENCED.findall((ROOT / page).read_text()) if language == "python"]


@pytest.mark.parametrize("page", ["README.md", "docs/usage.md", "docs/gradient_filter.md"])
def test_every_snippet_of_the_page_runs(page):
    blocks = _blocks(page)
    assert blocks
    for block in blocks:
        names = _tensors()
        exec(block, names)
        for name in {"loss", "policy_loss"} & {*names}:
            assert names[name].isfinite() and names[name].requires_grad


def test_the_losses_of_the_readme_before_and_after_agree():
    (block,), names = _blocks("README.md"), _tensors()
    losses = []
    for line in re.split(r"^(?=loss = )", block, flags=re.MULTILINE):
        exec(line, names)
        losses += [names["loss"]] if "loss" in names else []
    assert len(losses) == 3
    torch.testing.assert_close(losses[1:], losses[:1] * 2)


def test_the_imports_of_the_readmes_table_run_as_they_stand():
    lines = re.findall(r"`(from parallel_lce[^`]*|import parallel_lce)(?:;[^`]*)?`", (ROOT / "README.md").read_text())
    assert len(lines) == 5
    for line in lines:
        exec(line, {})
    patches = re.findall(r"parallel_lce\.(\w+)\.patch\(", (ROOT / "README.md").read_text())
    assert len(patches) == 3 and all(callable(getattr(parallel_lce, name).patch) for name in patches)


def test_the_configuration_of_megatrons_page_fuses():
    (block,) = _blocks("docs/megatron.md")
    names = {"TransformerConfig": lambda *others, **options: options}
    try:
        exec(block, names)
    finally:
        parallel_lce.megatron.unpatch()
    assert names["config"] == dict(cross_entropy_loss_fusion=True, cross_entropy_fusion_impl="parallel_lce")


@pytest.mark.parametrize("command", [["ruff", "check", "."], ["ruff", "format", "--check", "."]], ids=" ".join)
def test_ruff_is_content(command):
    done = ran(sys.executable, "-m", *command, cwd=ROOT)
    assert done.returncode == 0, done.stdout + done.stderr


USE = """
import math, sys
# Whatever else the extras install may be absent, and whatever the doors are for.
EXTRAS = "megatron triton numpy matplotlib rich pydantic tokenizers torchtitan spmd_types transformers trl verl"
for name in EXTRAS.split():
    sys.modules[name] = None  # import raises ImportError
import torch
before = set(sys.modules)
import parallel_lce
added = set(sys.modules) - before
assert not {"torch.distributed.tensor", "parallel_lce.backends.triton"} & added
assert {name.partition(".")[0] for name in added} <= {"parallel_lce", "torch", *sys.stdlib_module_names}

w = torch.ones(5, 4, requires_grad=True)
loss = parallel_lce.linear_cross_entropy(torch.zeros(3, 4), w, torch.tensor([0, 1, 4]))
loss.backward()
assert abs(loss.item() - math.log(5)) < 1e-6 and w.grad.shape == (5, 4)
print(parallel_lce.__file__, parallel_lce.__version__)

assert callable(parallel_lce.transformers.patch) and callable(parallel_lce.verl.patch) and parallel_lce.rl
def import_torchtitan():
    import parallel_lce.torchtitan
for call, needed in (
    (parallel_lce.megatron.patch, "parallel_lce.megatron needs megatron-core: pip install"),
    (parallel_lce.trl.patch, "parallel_lce.trl needs TRL 1.16 or later (pip install trl)"),
    (import_torchtitan, "parallel_lce.torchtitan needs torchtitan 0.3.0 (pip install torchtitan spmd_types)"),
):
    try:
        call()
    except ImportError as error:
        assert str(error).startswith(needed), error
    else:
        raise AssertionError(needed)
"""


@pytest.mark.slow
@pytest.mark.skipif(not importlib.util.find_spec("build"), reason="needs the 'build' package")
def test_the_wheel_holds_every_module_and_nothing_else_and_works_elsewhere(tmp_path):
    """Of what git would check out, built from an sdist. No top-level ``kernels`` (another package has that name),
    ``benchmarks``, ``tests`` or ``launch``. It needs torch alone, and names a neighbour that is missing."""
    source, out, site = (tmp_path / name for name in ("source", "dist", "site"))
    skip = shutil.ignore_patterns("__pycache__", "*.egg-info", "build", "dist")
    for name in ("parallel_lce", "kernels", "benchmarks"):
        shutil.copytree(ROOT / name, source / name, symlinks=True, ignore=skip)
    for name in ("pyproject.toml", "README.md", "LICENSE"):
        shutil.copy(ROOT / name, source / name)
    # Where a package that builds is missing, or setuptools, which comes with torch, is too old, build fetches it.
    version = importlib.metadata.version("setuptools") if importlib.util.find_spec("setuptools_scm") else "0"
    isolation = ["--no-isolation"] if int(version.split(".")[0]) >= 77 else []
    # Not from the repository: its build/ folder would hide the tool.
    done = ran(sys.executable, "-m", "build", *isolation, "--outdir", out, source, cwd=tmp_path)
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]
    (wheel,) = out.glob("*.whl")
    zipfile.ZipFile(wheel).extractall(site)
    wanted, found = ({p.relative_to(root) for p in root.rglob("*.py")} for root in (source / "parallel_lce", site))
    assert found == {Path("parallel_lce") / name for name in wanted}
    (information,) = site.glob("*.dist-info")
    assert {p.name for p in site.iterdir()} == {"parallel_lce", information.name}
    assert (site / "parallel_lce" / "py.typed").is_file()
    assert (information / "licenses" / "LICENSE").read_bytes() == (ROOT / "LICENSE").read_bytes()
    done = ran(sys.executable, "-c", USE, cwd=tmp_path, env={"PYTHONPATH": str(site)})
    assert done.returncode == 0, done.stderr
    file, version = done.stdout.split()
    assert Path(file) == site / "parallel_lce" / "__init__.py"
    assert information.name == f"parallel_lce-{version}.dist-info"
