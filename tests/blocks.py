"""The work of a backend on one block, as the schedule drives it, without collectives."""

from __future__ import annotations

import inspect
from contextlib import contextmanager
from dataclasses import dataclass
from unittest import mock


def block_forward(
    backend,
    projection,
    x,
    target,
    columns,
    save,
    buffer=None,
    out=None,
    local=None,
    arrive=None,
    keep_windows=False,
    selected=None,
):
    """The block's partial and what it saves. ``local``: rows of x that are there before ``arrive()``."""
    work = backend.BlockForward(projection, x, target, columns, save, buffer, out, keep_windows, selected)
    if local is not None:
        work.project_local(local)
        arrive()
    saved = work.project_rest()
    return work.partial, saved


def block_backward(
    backend,
    projection,
    x,
    target,
    partial,
    coefficients,
    saved,
    grads,
    scratch,
    announce=lambda rows: None,
    selected=None,
    gradient_filter=None,
):
    """Gradients of the block; ``announce(rows)`` when the first rows of dX are complete."""
    work = backend.BlockBackward(
        projection, x, target, partial, coefficients, saved, grads, scratch, selected, gradient_filter
    )
    for rows in work.hidden_grad():
        announce(rows)
    work.weight_grad()


def watched(original: type, before=lambda given: None, after=lambda given: None) -> type:
    """A backend's ``BlockBackward`` that calls ``before`` and ``after`` with its arguments by name."""

    class Watched(original):
        __signature__ = inspect.signature(original)

        def __init__(self, *arguments) -> None:
            self.given = inspect.signature(original).bind(*arguments).arguments
            before(self.given)
            super().__init__(*arguments)

        def weight_grad(self) -> None:
            super().weight_grad()
            after(self.given)

    return Watched


@contextmanager
def watched_backwards(backend, before=lambda given: None, after=lambda given: None):
    """Has the backend's blocks be :func:`watched`."""
    original = backend.BlockBackward
    backend.BlockBackward = watched(original, before, after)
    try:
        yield
    finally:
        backend.BlockBackward = original


@contextmanager
def counted_forwards(backend):
    """Yields a list of the number of rows of each block that the backend projects."""
    original, rows = backend.BlockForward, []

    class Counted(original):
        def __init__(self, *arguments) -> None:
            rows.append(len(inspect.signature(original).bind(*arguments).arguments["x"]))
            super().__init__(*arguments)

    backend.BlockForward = Counted
    try:
        yield rows
    finally:
        backend.BlockForward = original


@dataclass(frozen=True)
class Launch:
    """A launch of a Triton kernel: its grid, and its arguments and constants by name."""

    kernel: str
    grid: tuple[int, ...]
    given: dict[str, object]

    @property
    def projects(self) -> bool:
        return self.kernel.endswith("projection")

    @property
    def of_gradient(self) -> bool:
        """Whether it projects in order to have the logits' gradient, in backward."""
        return self.projects and bool(self.given["GRADIENT"])


@contextmanager
def launches():
    """Yields a list of the launches of kernels, in order."""
    from parallel_lce.kernels.relaunch import Relaunched

    found: list[Launch] = []
    launch = Relaunched.launch

    def noted(kernel, grid, *arguments, **constants) -> None:
        named = dict(zip(kernel.arg_names, arguments)) | constants
        found.append(Launch(kernel.__name__, tuple(grid), named))
        launch(kernel, grid, *arguments, **constants)

    with mock.patch.object(Relaunched, "launch", noted):
        yield found
