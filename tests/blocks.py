"""The work of a backend on one block, as the schedule drives it, without collectives."""

from collections.abc import Callable
from contextlib import contextmanager
from dataclasses import dataclass
from unittest import mock

from parallel_lce.backends.interface import BackwardTask, ForwardTask


def block_forward(backend, projection, x, target, columns, save, **others):
    """The block's partial and what it saves."""
    return backend.block_forward(ForwardTask(projection, x, target, columns, save, **others))


def block_backward(backend, *given, announce=lambda: None, **others):
    """Gradients of the block; ``announce()`` when dX is complete."""
    work = backend.block_backward(BackwardTask(*given, **others))
    work.hidden_grad()
    announce()
    work.weight_grad()


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
        return self.projects and self.given["KIND"] == "backward"


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
