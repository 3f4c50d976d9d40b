"""Mutation testing: changes one operator, constant or statement of a file at a time, and runs tests that should fail.

    python tests/mutants.py --files kernels/partials.py --sample 20 --seed 1
    python tests/mutants.py --only core/plan.py:330

A mutant is killed if a test fails, or if the tests take too long. Mutants are written to a copy of the checkout, one at
a time. Its tests run in a process that is forked from one which has imported PyTorch and Triton, but nothing of the
package. Ranks are forked from a server that has imported the same. Kernels run in Triton's interpreter.
"""

import argparse
import ast
import json
import os
import re
import shutil
import signal
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from multiprocessing import forkserver
from pathlib import Path
from random import Random

ROOT = Path(__file__).resolve().parent.parent

_PROJECTED = (
    "statistics:dense_path[triton functional:strategies[cpu-triton confident_tokens fuzz:any-loss-1 blocks:a_block"
)
TESTS = {
    "parallel_lce/core/plan.py": "plan",
    "parallel_lce/core/partials.py": "statistics:merge,dense_path[torch fuzz:s_hold[statistics,s_hold[logits",
    "kernels/partials.py": "statistics:merge,dense_path[triton fuzz:masked-statistics-1 blocks:a_block",
    "kernels/token_gradients.py": _PROJECTED,
    "parallel_lce/run/statistics.py": "statistics:dense_path[torch,asked draws:excluded",
    "parallel_lce/run/schedule.py": "functional:strategies,pieces collectives:ranks=2 selected",
    "parallel_lce/core/collectives.py": "collectives:ranks=2,asked",
    "kernels/arithmetic.py": _PROJECTED,
    "kernels/projection.py": _PROJECTED,
    "kernels/draws.py": "draws:beside,places,excluded",
    "parallel_lce/run/losses.py": "statistics:asked functional:strategies",
    "parallel_lce/run/fused_loss.py": "functional:strategies autograd:in_place fuzz:process_hold[loss]",
}
"""The tests of a file, the most telling first. ``plan``: tests/test_plan.py; ``plan:few,more``: those of its tests that
have one of these in their names."""

_COMPARISONS = {"<": "<=", "<=": "<", ">": ">=", ">=": ">", "==": "!=", "!=": "==", "is": "is not", "in": "not in"}
_COMPARISONS |= {"is not": "is", "not in": "in"}
_ARITHMETIC = {"+": "-", "-": "+", "*": "/", "/": "*", "//": "*", "%": "*", "&": "|", "|": "&", "<<": ">>", ">>": "<<"}
_LOGIC = {"and": "or", "or": "and"}
_FUNCTIONS = {"min": "max", "minimum": "maximum", "amin": "amax", "any": "all"}
_FUNCTIONS |= {new: old for old, new in _FUNCTIONS.items()}
_TOKEN = re.compile(r"is\s+not\b|not\s+in\b|is\b|in\b|and\b|or\b|[<>=!]=|<<|>>|//|\*\*|[<>+\-*/%&|]")


@dataclass(frozen=True)
class Mutant:
    """``new`` in place of the bytes ``[start, stop)`` of a file. ``change`` and the position name it."""

    file: str
    line: int
    column: int
    start: int
    stop: int
    new: str
    change: str

    @property
    def name(self) -> str:
        return f"{self.file}:{self.line}:{self.column} {self.change}"


class _Changes(ast.NodeVisitor):
    """The mutants of a file. Annotations, decorators, assertions and texts have none."""

    def __init__(self, file: str, source: bytes) -> None:
        self._file, self._source, self.found = file, source, []
        self._lines = [0, *(match.end() for match in re.finditer(rb"\n", source))]
        self._known: set[str] = set()
        self.visit(ast.parse(source))

    def _span(self, node: ast.AST) -> tuple[int, int]:
        first, last = self._lines[node.lineno - 1], self._lines[node.end_lineno - 1]
        return first + node.col_offset, last + node.end_col_offset

    def _text(self, node: ast.AST) -> str:
        return self._source[slice(*self._span(node))].decode()

    def _add(self, start: int, stop: int, new: str) -> None:
        line = self._source.count(b"\n", 0, start)
        old = self._source[start:stop].decode()
        mutated = self._source[:start] + new.encode() + self._source[stop:]
        compile(mutated, self._file, "exec", dont_inherit=True)
        change = " ".join(f"{old} -> {new or 'nothing'}".split())
        self.found.append(Mutant(self._file, line + 1, start - self._lines[line] + 1, start, stop, new, change))

    def _swap(self, before: ast.AST, after: ast.AST, table: dict[str, str]) -> None:
        """Another operator between two operands."""
        start, stop = self._span(before)[1], self._span(after)[0]
        token = _TOKEN.search(self._source[start:stop].decode())
        if token and (new := table.get(" ".join(token[0].split()))):
            self._add(start + token.start(), start + token.end(), new)

    def _visit_all(self, *nodes) -> None:
        for node in nodes:
            if node is not None:
                self.visit(node)

    def visit_FunctionDef(self, node) -> None:
        known, self._known = self._known, {a.arg for a in [*node.args.args, *node.args.kwonlyargs]}
        self._visit_all(*node.args.defaults, *node.args.kw_defaults, *node.body)
        self._known = known

    def visit_ClassDef(self, node) -> None:
        self._visit_all(*node.body)

    def visit_Assert(self, node) -> None:
        pass

    visit_JoinedStr = visit_Import = visit_ImportFrom = visit_Assert

    def visit_AnnAssign(self, node) -> None:
        self._visit_all(node.value)

    def visit_Compare(self, node) -> None:
        operands = [node.left, *node.comparators]
        for before, after in zip(operands, operands[1:]):
            self._swap(before, after, _COMPARISONS)
        self.generic_visit(node)

    def visit_BoolOp(self, node) -> None:
        for before, after in zip(node.values, node.values[1:]):
            self._swap(before, after, _LOGIC)
        self.generic_visit(node)

    def visit_BinOp(self, node) -> None:
        if not any(isinstance(side, ast.JoinedStr | ast.List) for side in (node.left, node.right)):
            self._swap(node.left, node.right, _ARITHMETIC)
        self.generic_visit(node)

    def visit_UnaryOp(self, node) -> None:
        start, _ = self._span(node)
        self._add(start, start + (4 if isinstance(node.op, ast.Not) else 1), "")
        self.generic_visit(node)

    def visit_Constant(self, node) -> None:
        value, text = node.value, self._text(node)
        if isinstance(value, bool):
            self._add(*self._span(node), str(not value))
        elif isinstance(value, int):
            self._add(*self._span(node), str(value + 1))
        elif isinstance(value, float):
            self._add(*self._span(node), f"({text} * 1.5)" if value else "1.0")

    def visit_Call(self, node) -> None:
        name = self._text(node.func).rpartition(".")[2]
        if name in _FUNCTIONS:
            _, stop = self._span(node.func)
            self._add(stop - len(name), stop, _FUNCTIONS[name])
        if name == "where" and len(node.args) == 3:
            _, a, b = node.args
            self._add(self._span(a)[0], self._span(b)[1], f"{self._text(b)}, {self._text(a)}")
        self.generic_visit(node)

    def visit_If(self, node) -> None:
        if not isinstance(node.test, ast.Compare | ast.BoolOp | ast.UnaryOp):
            self._add(*self._span(node.test), f"(not {self._text(node.test)})")
        self.generic_visit(node)

    visit_IfExp = visit_If

    def visit_Expr(self, node) -> None:
        if isinstance(node.value, ast.Call):
            self._add(*self._span(node), "pass")
        self.generic_visit(node)

    def visit_Raise(self, node) -> None:
        self._add(*self._span(node), "pass")

    def visit_AugAssign(self, node) -> None:
        self._add(*self._span(node), "pass")
        self._swap(node.target, node.value, _ARITHMETIC)
        self.generic_visit(node)

    def visit_Assign(self, node) -> None:
        """No first assignment to a name, nor one to an attribute: without it there would be no value."""
        parts = [part for target in node.targets for part in ast.walk(target)]
        names = {part.id for part in parts if isinstance(part, ast.Name)}
        if names <= self._known and not any(isinstance(part, ast.Attribute) for part in parts):
            self._add(*self._span(node), "pass")
        self._known |= names
        self.generic_visit(node)


def mutants_of(file: str) -> list[Mutant]:
    return _Changes(file, (ROOT / file).read_bytes()).found


@contextmanager
def _written_to(path: str | Path) -> Iterator[None]:
    """Output of this process, and of those that it starts, goes to a file."""
    output, before = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC), (os.dup(1), os.dup(2))
    for number in (1, 2):
        os.dup2(output, number)
    yield
    for number, old in enumerate(before, 1):
        os.dup2(old, number)
        os.close(old)
    os.close(output)


class _ChosenTests:
    """A plugin of pytest: of each file, the tests whose names contain one of the words that are given for it."""

    def __init__(self, tests: str) -> None:
        parts = [each.partition(":") for each in tests.split()]
        self._words = {f"tests/test_{file}.py": words.split(",") for file, _, words in parts}
        self.files = [*self._words]

    def pytest_collection_modifyitems(self, items: list) -> None:
        files = [(item, item.nodeid.partition("::")[0]) for item in items]
        items[:] = [item for item, file in files if any(word in item.name for word in self._words[file])]


class Laboratory:
    """A copy of the checkout, in which one mutant at a time is tested."""

    def __init__(self, folder: str) -> None:
        self.root, self._log = Path(folder) / "copy", Path(folder) / "log"
        ignored = shutil.ignore_patterns(".*", "docs", "outputs", "build", "__pycache__", "*.egg-info")
        shutil.copytree(ROOT, self.root, symlinks=True, ignore=ignored)
        # Read when PyTorch and Triton are imported, here and by the server.
        os.environ |= dict(OMP_NUM_THREADS="1", CUDA_VISIBLE_DEVICES="", TRITON_INTERPRET="1")
        os.environ |= dict(PYTHONDONTWRITEBYTECODE="1", PYTHONPATH="")
        sys.path[:] = [path for path in sys.path if not Path(path).resolve().is_relative_to(ROOT) or "site-" in path]
        for name in ("hypothesis", "numpy", "pytest", "torch.distributed.tensor", "torch._inductor.config", "triton"):
            __import__(name)
        assert not {"parallel_lce", "tools"} & {*sys.modules}
        forkserver.set_forkserver_preload(["torch", "torch._inductor.config"])
        with _written_to(os.devnull):
            forkserver.ensure_running()

    def tested(self, mutant: Mutant | None, tests: str, limit: float = 600.0) -> tuple[str, str, float]:
        """The outcome, the test that failed, and the seconds that the tests took. None: the code as it is."""
        if mutant is None:
            return self._run(tests, limit, caches=True)
        path = self.root / mutant.file
        source, times = path.read_bytes(), (path.stat().st_atime, path.stat().st_mtime)
        path.write_bytes(source[: mutant.start] + mutant.new.encode() + source[mutant.stop :])
        os.utime(path, (times[0], times[1] + 1000))  # else a cached module might be taken for it
        try:
            return self._run(tests, limit)
        finally:
            path.write_bytes(source)
            os.utime(path, times)

    def _run(self, tests: str, limit: float, caches: bool = False) -> tuple[str, str, float]:
        began, child = time.monotonic(), os.fork()
        if child == 0:
            self._child(tests, caches)
        ended = (0, 0)
        try:
            while not ended[0] and time.monotonic() < began + limit:
                time.sleep(0.05)
                ended = os.waitpid(child, os.WNOHANG)
        finally:
            if not ended[0]:
                os.killpg(child, signal.SIGKILL)
                os.waitpid(child, 0)
            # Ranks may still wait for each other. They are children of the server.
            server = forkserver._forkserver._forkserver_pid
            for rank in Path(f"/proc/{server}/task/{server}/children").read_text().split():
                os.kill(int(rank), signal.SIGKILL)
        seconds, outcome = round(time.monotonic() - began, 1), "timeout"
        if ended[0]:
            code = os.waitstatus_to_exitcode(ended[1])
            assert code not in (4, 5), self._log.read_text()  # pytest's: wrong usage, no test
            outcome = "killed" if code else "survived"
        failed = re.findall(r"^(?:FAILED|ERROR) (.+?)(?: - .*)?$", self._log.read_text(errors="replace"), re.MULTILINE)
        return outcome, failed[0] if failed else "", seconds

    def _child(self, tests: str, caches: bool) -> None:
        try:
            import pytest

            os.setsid()
            signal.signal(signal.SIGTERM, signal.SIG_DFL)
            os.chdir(self.root)
            sys.dont_write_bytecode = not caches
            forkserver._forkserver.ensure_running = lambda: None  # it is, but is no child of this process
            chosen = _ChosenTests(tests)
            with _written_to(self._log):
                os._exit(int(pytest.main(["-x", "-q", "-p", "no:cacheprovider", *chosen.files], [chosen])))
        finally:
            os._exit(99)


def chosen(arguments) -> Iterator[Mutant]:
    for file in arguments.files or TESTS:
        found = mutants_of(file)
        if arguments.only:
            found = [m for m in found if any(m.name.endswith(only) or only in m.name for only in arguments.only)]
        elif arguments.sample:
            found = Random(f"{arguments.seed}:{file}").sample(found, min(len(found), arguments.sample))
        yield from sorted(found, key=lambda m: m.start)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--files", nargs="+", metavar="FILE", help="files to mutate, from the root of the checkout")
    parser.add_argument("--only", nargs="+", metavar="TEXT", help="the mutants whose names contain one of these")
    parser.add_argument("--sample", type=int, metavar="N", help="N mutants of each file; by default all")
    parser.add_argument("--seed", type=int, default=0, help="of the sample")
    parser.add_argument("--tests", help="other tests than those of the mutated file, as TESTS names them")
    parser.add_argument("--list", action="store_true", help="print the mutants and test none")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the results there")
    arguments = parser.parse_args()
    mutants, results, usual = [*chosen(arguments)], [], {}
    if arguments.list:
        print(*(m.name for m in mutants), f"{len(mutants)} mutants", sep="\n")
        return 0
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(1))  # then what was started ends, too
    with tempfile.TemporaryDirectory() as folder:
        laboratory = Laboratory(folder)
        for number, mutant in enumerate(mutants, 1):
            tests = arguments.tests or TESTS[mutant.file]
            if tests not in usual:
                outcome, failed, usual[tests] = laboratory.tested(None, tests)
                assert outcome == "survived", f"without a mutant {failed} fails"
                print(f"{tests}: {usual[tests]} s without a mutant", flush=True)
            outcome, failed, seconds = laboratory.tested(mutant, tests, 20 + 2 * usual[tests])
            results.append(asdict(mutant) | dict(outcome=outcome, failed=failed, seconds=seconds))
            print(f"{number}/{len(mutants)} {outcome:8} {seconds:5} s  {mutant.name}  {failed}", flush=True)
            if arguments.json:
                arguments.json.write_text(json.dumps(results, indent=1))
    print(f"\n{'file':36}{'mutants':>8}{'killed':>8}{'timeout':>8}{'survived':>9}")
    for file in dict.fromkeys(m.file for m in mutants):
        counts = Counter(r["outcome"] for r in results if r["file"] == file)
        print(f"{file:36}{counts.total():8}{counts['killed']:8}{counts['timeout']:8}{counts['survived']:9}")
    survivors = [m.name for m, r in zip(mutants, results) if r["outcome"] == "survived"]
    print(*survivors, f"{len(survivors)} of {len(mutants)} mutants survived", sep="\n")
    return bool(survivors)


if __name__ == "__main__":
    sys.exit(main())
