"""Watches the blocks that the schedule gives a backend."""

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
