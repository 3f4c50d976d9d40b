"""README.md, CONTRIBUTING.md and docs/: their links and anchors work, and the files and commands they name exist."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
PAGES = sorted([ROOT / "README.md", ROOT / "CONTRIBUTING.md", *(ROOT / "docs").rglob("*.md")])

FENCED = re.compile(r"^```(\w*)\n(.*?)^```$", re.MULTILINE | re.DOTALL)
LINK = re.compile(r"\]\(([^)\s]+)\)")
HEADING = re.compile(r"^#+ (.+)$", re.MULTILINE)
SPAN = re.compile(r"`([^`]+)`")
FILE = re.compile(
    r"(?<![\w/.-])(?:\./)?((?:benchmarks|configs|docs|examples|kernels|launch|parallel_lce|tests)/[\w./-]*\w)"
)
MODULE = re.compile(r"-m ((?:parallel_lce|benchmarks)\b[\w.]*)")

# Names that stand for others.
PLACEHOLDERS = {"examples/NAME.py", "tests/test_x.py"}

every_page = pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))


def _prose(page: Path) -> str:
    return FENCED.sub("", page.read_text())


def _anchors(page: Path) -> set[str]:
    """The anchors that GitHub gives to a page's headings."""
    titles = [re.sub(r"[^\w\- ]", "", title.lower()) for title in HEADING.findall(_prose(page))]
    return {title.replace(" ", "-") for title in titles}


def _links(page: Path) -> list[str]:
    return [link for link in LINK.findall(_prose(page)) if "://" not in link]


@every_page
def test_links_lead_somewhere(page):
    for link in _links(page):
        name, _, anchor = link.partition("#")
        target = (page.parent / name).resolve() if name else page
        assert target.exists(), f"{link}: no such file"
        assert target.is_relative_to(ROOT), f"{link} leads out of the repository"
        assert not anchor or anchor in _anchors(target), f"{link}: no such heading"


@every_page
def test_python_compiles(page):
    for language, code in FENCED.findall(page.read_text()):
        if language == "python":
            compile(code, str(page), "exec")


@every_page
def test_named_files_and_modules_exist(page):
    code = "\n".join([*(block for _, block in FENCED.findall(page.read_text())), *SPAN.findall(_prose(page))])
    for name in set(FILE.findall(code)) - PLACEHOLDERS:
        assert (ROOT / name).exists(), f"{name}: no such file"
    for module in MODULE.findall(code):
        path = ROOT / module.replace(".", "/")
        assert path.with_suffix(".py").exists() or (path / "__main__.py").exists(), f"{module} cannot be started"


def test_every_page_is_linked():
    """From README.md, or from a page that it links."""
    reached, todo = set(), [ROOT / "README.md"]
    while todo:
        page = todo.pop()
        if page in reached or page.suffix != ".md" or not page.exists():
            continue
        reached.add(page)
        todo += [(page.parent / link.partition("#")[0]).resolve() for link in _links(page)]
    assert reached == set(PAGES)


def test_every_example_and_configuration_is_named():
    text = "\n".join(page.read_text() for page in PAGES)
    for path in [*(ROOT / "examples").glob("*.py"), *(ROOT / "configs").iterdir()]:
        if path.name != "ranks.py":  # what the examples share
            assert path.name in text or f"[{path.suffix}](../{path.relative_to(ROOT)})" in text, path
