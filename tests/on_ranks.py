"""Tests whose body runs on every rank of a process group."""

import importlib
import inspect
from collections.abc import Callable

from tools import over
from world import Member


def on_ranks(ranks: int | None = None) -> Callable:
    """Makes a test of ``body(member, **parameters)``: it passes if the body returns on each of the ``ranks``, or of as
    many as the test's parameter of this name says. The backend is that of the fixture ``backend``, if it is one of the
    parameters."""

    def decorate(body: Callable) -> Callable:
        def test(worlds, **given) -> None:
            size = given.pop("ranks") if ranks is None else ranks
            over(worlds(size), _run, body.__module__, body.__name__, given)

        _, *own = inspect.signature(body).parameters
        names = ["worlds", *(["ranks"] if ranks is None else []), *own]  # pytest gives them by name
        test.__signature__ = inspect.Signature([inspect.Parameter(n, inspect.Parameter.KEYWORD_ONLY) for n in names])
        test.__name__, test.__module__, test.__doc__ = body.__name__, body.__module__, body.__doc__
        test.body = body
        return test

    return decorate


def _run(member: Member, module: str, name: str, given: dict) -> None:
    getattr(importlib.import_module(module), name).body(member, **given)
