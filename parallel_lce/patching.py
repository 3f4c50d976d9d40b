"""How the doors change other projects' code: replace attributes and restore them, wait for an import, run a module
with another forward. :func:`is_own` tells a project's own code from what a program has put in its place."""

from __future__ import annotations

import functools
import importlib.abc
import inspect
import sys
import warnings
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from typing import Any


class Replacements(dict[tuple[Any, str], list[tuple[Any, Any]]]):
    """The attributes that a door has replaced, by owner (a module or a class) and name: pairs of our attribute and the
    owner's own before it, None if it had none of its own. The last pair is the outermost."""

    def replace(self, owner: Any, name: str, make: Callable[[Any], Any], again: bool = False) -> None:
        """Replace an attribute by ``make(own)``, once. ``again``: also if other code has replaced ours since."""
        pairs, now = self.get((owner, name), []), vars(owner).get(name)
        if not pairs or (again and not any(ours is now for ours, _ in pairs)):
            own = self.own(now)
            ours = make(own)
            self[owner, name] = [*pairs, (ours, own)]
            setattr(owner, name, ours)

    def own(self, attribute: Any) -> Any:
        """What one of our attributes, which other modules may have imported, replaces; another attribute as it is."""
        return next((own for pairs in self.values() for ours, own in pairs if ours is attribute), attribute)

    def restore(self) -> None:
        """Undo all replacements. What other code has replaced since stays, with a warning, until that is undone."""
        for (owner, name), pairs in [*self.items()]:
            for ours, own in reversed(pairs):
                if vars(owner).get(name) is ours:
                    delattr(owner, name) if own is None else setattr(owner, name, own)
            if vars(owner).get(name) is pairs[0][1]:
                del self[owner, name]
            else:
                said = f"{owner.__name__}.{name} has been replaced since patch() and stays: undo that first"
                warnings.warn(f"parallel_lce: {said}", RuntimeWarning, stacklevel=3)


@contextmanager
def replaced(owner: Any, **values: Any) -> Iterator[None]:
    """A context in which attributes of ``owner`` itself have these values."""
    before = {name: vars(owner)[name] for name in values if name in vars(owner)}
    try:
        for name, value in values.items():
            setattr(owner, name, value)
        yield
    finally:
        for name in values:
            setattr(owner, name, before[name]) if name in before else delattr(owner, name)


def named_as(own: Callable[..., Any], forward: Any) -> Any:
    """As ``functools.update_wrapper``, without the attribute by which accelerate finds what it takes for a wrapper's
    function, and puts that into the model."""
    functools.update_wrapper(forward, own)
    del forward.__wrapped__
    forward.__signature__ = inspect.signature(own)
    return forward


def is_own(function: Any, module: str, name: str | None = None) -> bool:
    """Whether a function was written in that module, under that qualified name. A wrapper copies names, not globals."""
    there = getattr(function, "__globals__", 0) is getattr(sys.modules.get(module), "__dict__", None)
    return there and name in (None, function.__qualname__)


class AfterImport(importlib.abc.MetaPathFinder):
    """Calls ``action(module)`` once for each of these modules: now if it is imported, else right after its import."""

    def __init__(self, names: Iterable[str], action: Callable[[Any], None]) -> None:
        self.waiting, self.action = {*names}, action
        sys.meta_path.insert(0, self)
        for module in [sys.modules[name] for name in names if name in sys.modules]:
            self._imported(module)

    def find_spec(self, fullname: str, path: Any, target: Any = None) -> Any:
        behind = sys.meta_path[sys.meta_path.index(self) + 1 :] if fullname in self.waiting else ()
        spec = next(filter(None, (finder.find_spec(fullname, path, target) for finder in behind)), None)
        if spec is not None and spec.loader is not None:
            execute = spec.loader.exec_module

            def execute_and_act(module: Any) -> None:
                execute(module)
                self._imported(module)

            spec.loader.exec_module = execute_and_act
        return spec

    def _imported(self, module: Any) -> None:
        if module.__name__ in self.waiting:
            self.waiting.remove(module.__name__)
            self.action(module)

    def cancel(self) -> None:
        self.waiting.clear()
        sys.meta_path[:] = [finder for finder in sys.meta_path if finder is not self]
