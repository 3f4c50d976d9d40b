"""The program that makes mutants: one that only the ranks of a test can kill is killed, code that does the same
survives."""

import sys
from pathlib import Path

import pytest

from tools import ran

PLANTED = """
import tempfile
import mutants

FILE, OLD = "parallel_lce/core/collectives.py", b"start.fill_(self.start)"
source = (mutants.ROOT / FILE).read_bytes()
start = source.index(OLD)
with tempfile.TemporaryDirectory() as folder:
    laboratory = mutants.Laboratory(folder)
    for new in ("start.fill_(self.rows)", "start.fill_(0 + self.start)"):
        mutant = mutants.Mutant(FILE, 1, 1, start, start + len(OLD), new, "planted")
        outcome, failed, _ = laboratory.tested(mutant, "statistics:equals_comes_first[cpu-torch")
        print(outcome, failed)
    assert (laboratory.root / FILE).read_bytes() == source == (mutants.ROOT / FILE).read_bytes()
"""


@pytest.mark.slow
def test_a_planted_mutant_is_killed_and_one_of_no_effect_survives():
    done = ran(sys.executable, "-c", PLANTED, cwd=Path(__file__).parent)
    assert done.returncode == 0, done.stderr
    killed, survived = done.stdout.splitlines()
    assert killed == "killed tests/test_statistics.py::test_the_lowest_of_equals_comes_first[cpu-torch-3]"
    assert survived.strip() == "survived"


SOURCE = b"""
def f(a: int = 1, b=None):
    "1 < 2"
    if not a <= 0 and b is not None:
        a += max(a, 3) ** 2
    return -a if a in (b or ()) else where(a, True, 0.5)
"""


def test_what_is_mutated():
    from mutants import _Changes

    found = [(m.line, m.change) for m in _Changes("f.py", SOURCE).found]
    assert sorted(found) == sorted(
        [
            (2, "1 -> 2"),
            (4, "and -> or"),
            (4, "not -> nothing"),
            (4, "<= -> <"),
            (4, "0 -> 1"),
            (4, "is not -> is"),
            (5, "a += max(a, 3) ** 2 -> pass"),
            (5, "+ -> -"),
            (5, "max -> min"),
            (5, "3 -> 4"),
            (5, "2 -> 3"),
            (6, "- -> nothing"),
            (6, "in -> not in"),
            (6, "or -> and"),
            (6, "True, 0.5 -> 0.5, True"),
            (6, "True -> False"),
            (6, "0.5 -> (0.5 * 1.5)"),
        ]
    )
