"""What the doors do to other projects' code is undone, in any order, but never what other code has done since."""

import sys

import pytest
from torch import nn

from parallel_lce.patching import Replacements, is_own, warn


class Base:
    def method(self):
        return "own"


def around(word):
    return lambda own: lambda self: f"{word} {own(self)}"


@pytest.mark.filterwarnings("error")
def test_each_door_undoes_what_it_did_and_no_more():
    inner, outer, own = Replacements(), Replacements(), Base.method
    for _ in range(2):  # the second changes nothing
        inner.replace(Base, "method", around("a"))
    assert Base().method() == "a own"
    outer.replace(Base, "method", around("c"))
    with pytest.warns(RuntimeWarning, match="Base.method has been replaced since patch"):
        inner.restore()
    assert Base().method() == "c a own"  # the other door's stays
    outer.restore()
    assert Base().method() == "a own"
    inner.restore()
    assert Base.method is own and not inner


def test_own_code_is_known_by_its_globals():
    name = "torch.nn.modules.linear"
    assert is_own(nn.Linear.forward, name, "Linear.forward")
    assert not is_own(nn.Linear.forward, "not.imported", "Linear.forward")
    assert not is_own(nn.Bilinear.forward, name, "Linear.forward")

    def wrapper(*given):
        return nn.Linear.forward(*given)

    wrapper.__module__, wrapper.__qualname__ = nn.Linear.forward.__module__, nn.Linear.forward.__qualname__
    assert not is_own(wrapper, name, "Linear.forward") and not is_own(len, name, "len")


@pytest.mark.skipif(sys.version_info < (3, 12), reason="from Python 3.12 on warnings can skip a package's files")
def test_a_warning_names_the_callers_line():
    with pytest.warns(UserWarning, match="words") as said:
        warn("words", UserWarning)
    assert said[0].filename == __file__
