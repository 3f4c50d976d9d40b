"""Watches the blocks that the schedule gives a backend, and the kernels that these launch."""

from collections.abc import Callable
from contextlib import contextmanager
from unittest import mock


@contextmanager
def watched_backwards(backend, before: Callable):
    """Calls ``before(task)`` before each block's backward."""
    original = backend.block_backward

    def block_backward(task):
        before(task)
        return original(task)

    with mock.patch.object(backend, "block_backward", block_backward):
        yield


@contextmanager
def counted_forwards(backend):
    """Yields a list of the number of rows of each block that the backend projects."""
    original, rows = backend.block_forward, []
    with mock.patch.object(backend, "block_forward", lambda task: rows.append(len(task.x)) or original(task)):
        yield rows


@contextmanager
def launches():
    """Yields a list of the launches of kernels, in order: a name, and arguments and constants by name."""
    from parallel_lce.kernels.relaunch import Relaunched

    found: list[tuple[str, dict[str, object]]] = []
    launch = Relaunched.launch

    def noted(kernel, grid, *arguments, **constants) -> None:
        found.append((kernel.__name__, dict(zip(kernel.arg_names, arguments)) | constants))
        launch(kernel, grid, *arguments, **constants)

    with mock.patch.object(Relaunched, "launch", noted):
        yield found
