"""What the doors do to other projects' code is undone, in any order, but never what other code has done since."""

import importlib
import sys
import warnings
from types import ModuleType

import pytest
import torch
from torch import nn

from parallel_lce.gathered import called_with
from parallel_lce.patching import AfterImport, Replacements, is_own, replaced


class Base:
    def method(self):
        return "own"


class Derived(Base):
    pass


def around(word):
    def make(own):
        return lambda self: f"{word} {(own or Base.method)(self)}"

    return make


def undone(*replacements) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        for each in replacements:
            each.restore()


@pytest.fixture(autouse=True)
def _as_before():
    own = Base.method
    yield
    assert vars(Base)["method"] is own and "method" not in vars(Derived)


def test_what_was_inherited_is_inherited_again():
    ours = Replacements()
    for _ in range(2):  # the second changes nothing
        ours.replace(Base, "method", around("a"))
        ours.replace(Derived, "method", around("b"))
    assert Derived().method() == "b a own"
    undone(ours, ours)
    assert Derived().method() == "own" and not ours


@pytest.mark.parametrize("inner_first", [False, True])
def test_two_doors_at_one_attribute(inner_first):
    inner, outer = Replacements(), Replacements()
    inner.replace(Base, "method", around("a"))
    outer.replace(Base, "method", around("b"))
    if inner_first:
        with pytest.warns(RuntimeWarning, match="Base.method has been replaced since patch"):
            inner.restore()
        assert Base().method() == "b a own"  # the other door's stays
    undone(outer)
    assert Base().method() == "a own"
    undone(inner)


@pytest.mark.parametrize("others_end", ["after ours", "before ours", "with ours"])
def test_ours_around_others_around_ours(others_end):
    ours, own = Replacements(), Base.method
    ours.replace(Base, "method", around("a"))
    first = Base.method
    Base.method = others = around("others")(first)
    ours.replace(Base, "method", around("b"))
    assert Base.method is others
    for _ in range(2):
        ours.replace(Base, "method", around("b"), again=True)
        assert Base().method() == "b others a own"
    if others_end == "after ours":
        with pytest.warns(RuntimeWarning, match="has been replaced"):
            ours.restore()
        assert Base.method is others
    Base.method = own if others_end == "with ours" else first
    undone(ours)


def test_ours_that_another_module_has_imported():
    home, user, ours = ModuleType("home"), ModuleType("user"), Replacements()
    home.function = own = lambda: "own"
    ours.replace(home, "function", lambda own: lambda: f"home {own()}")
    user.function = home.function
    ours.replace(user, "function", lambda own: lambda: f"user {own()}")
    assert user.function() == "user own"
    undone(ours)
    assert home.function is user.function is own


def test_values_within_a_context():
    thing = Derived()
    thing.none = None
    with pytest.raises(RuntimeError, match="in between"), replaced(thing, none=1, method=2):
        assert (thing.none, thing.method) == (1, 2)
        raise RuntimeError("in between")
    assert vars(thing) == {"none": None}


def test_another_forward_between_the_hooks():
    layer, x = nn.Linear(2, 3), torch.ones(2)
    layer.register_forward_pre_hook(lambda module, given: (given[0] + 1,))
    layer.register_forward_hook(lambda module, given, output: -output)
    layer.forward = own = lambda hidden: hidden * 0
    assert called_with(layer, lambda hidden: hidden * 5, x).tolist() == [-10, -10]
    assert layer.forward is own


def test_own_code_is_known_by_its_globals():
    name = "torch.nn.modules.linear"
    assert is_own(nn.Linear.forward, name, "Linear.forward")
    assert not is_own(nn.Linear.forward, "not.imported", "Linear.forward")
    assert not is_own(nn.Bilinear.forward, name, "Linear.forward")

    def wrapper(*given):
        return nn.Linear.forward(*given)

    wrapper.__module__, wrapper.__qualname__ = nn.Linear.forward.__module__, nn.Linear.forward.__qualname__
    assert not is_own(wrapper, name, "Linear.forward") and not is_own(len, name, "len")


def test_an_import_is_acted_upon_once(tmp_path, monkeypatch):
    for name in ("imported_before", "imported_later", "never_imported"):
        (tmp_path / f"a_{name}.py").write_text("value = 1\n")
    (tmp_path / "a_failing.py").write_text("raise ImportError\n")
    monkeypatch.syspath_prepend(tmp_path)
    before, acted, twice = [*sys.meta_path], [], []
    names = ["a_imported_before", "a_imported_later", "a_never_imported", "a_failing"]
    importlib.import_module(names[0])
    hook = AfterImport(names, lambda module: acted.append((module.__name__, module.value)))
    other = AfterImport(names[1:], lambda module: twice.append(module.__name__))
    assert acted == [(names[0], 1)] and twice == []
    assert importlib.util.find_spec(names[1]) is not None  # which asks, and imports nothing
    with pytest.raises(ImportError):
        importlib.import_module(names[3])
    assert len(acted) == 1
    module = importlib.import_module(names[1])
    importlib.reload(module)
    assert acted == [(name, 1) for name in names[:2]] and twice == [names[1]]
    hook.cancel()
    other.cancel()
    importlib.import_module(names[2])
    assert len(acted) == 2 and sys.meta_path == before
    for name in names:
        sys.modules.pop(name, None)
