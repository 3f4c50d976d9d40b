"""Faults, made on purpose, and what is rare without being one. docs/faults.md lists them."""

import re
from datetime import timedelta
from functools import partial
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch.utils._python_dispatch import TorchDispatchMode

import parallel_lce
from cases import make, part
from parallel_lce.core.grad_buffers import MainGrad
from parallel_lce.run.entry import fused_loss
from releases import ROOT
from tools import REDUCED, chosen_backend, given, on_ranks, shrunk, small
from world import Member

pytestmark = pytest.mark.slow

N, V, D = 24, 40, 8
BLOCKS = 1000, (8, 16)  # of these sizes; see shrunk


def same(found, expected) -> bool:
    return all(map(torch.equal, found, expected))


class _RunsOut(TorchDispatchMode):
    """The operation of this number, counted from 0, finds no memory."""

    def __init__(self, number: int | None = None) -> None:
        super().__init__()
        self._number, self.count = number, 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        self.count += 1
        if self.count - 1 == self._number:
            raise torch.OutOfMemoryError("made up")
        return func(*args, **(kwargs or {}))


def _main_grad_step(t, main_grad: torch.Tensor, group, backward, **options) -> list[torch.Tensor]:
    """``backward(loss)`` of a loss whose dW is added to a zeroed ``main_grad``."""
    t.x.grad = None
    main_grad.zero_()
    where = given(t.x, t.weight, t.target, **options)
    loss = fused_loss(*where, group, main_grad=MainGrad(main_grad, lambda memory: None)).sum()
    backward(loss)
    return [loss.detach(), t.x.grad, main_grad.clone()]


@pytest.mark.parametrize("name", [*REDUCED, "main_grad", "main_grad in bf16"])
def test_the_step_after_one_without_memory_is_right(name, backend, device):
    """To the bit, wherever in forward or backward memory has run out."""
    t = small(device, N, V, D, dtype="bf16")
    main_grad = torch.zeros_like(t.weight, dtype=torch.bfloat16 if "bf16" in name else torch.float32)

    def step(*modes):
        def half(loss):
            with modes[1]:
                loss.backward()

        t.x.grad = t.weight.grad = None
        if "main_grad" in name:
            return _main_grad_step(t, main_grad, None, half, reduction="none", logits_budget=0)
        with modes[0]:
            loss = parallel_lce.linear_cross_entropy(t.x, t.weight, t.target, **REDUCED[name]).sum()
        half(loss)
        return [loss.detach(), t.x.grad, t.weight.grad]

    counted = _RunsOut(), _RunsOut()
    with shrunk(*BLOCKS):
        expected = step(*counted)
        for half, count in enumerate(mode.count for mode in counted):
            for number in sorted({*range(0, count, max(1, count // 4)), count - 1} - {-1}):
                modes = [_RunsOut(), _RunsOut()]
                modes[half] = _RunsOut(number)
                with pytest.raises(torch.OutOfMemoryError, match="made up"):
                    step(*modes)
                assert same(step(_RunsOut(), _RunsOut()), expected), f"half {half}, operation {number} of {count}"
    assert counted[1].count > 3


@on_ranks(2)
def test_the_lines_of_the_page_recover_from_one_rank_without_memory(member):
    """The other rank waits until the timeout, and raises. A new group and a zeroed main_grad mend the next step."""
    timeout, raised = timedelta(seconds=4), []
    # Also where the default is NCCL, whose watchdog would end the process.
    over_gloo = mock.Mock(wraps=dist)
    over_gloo.new_group = partial(dist.new_group, backend="gloo")
    t = part(make(N, V, D), Member(member.rank, 2, torch.device("cpu"), None), True)
    group = over_gloo.new_group(timeout=timeout)
    main_grad = torch.zeros_like(t.weight)
    options = dict(sequence_parallel=True, reduction="none", logits_budget=0)

    def step(group):
        def backward(loss):
            with _RunsOut(40 if member.rank and not raised else None):
                loss.backward()

        try:
            return _main_grad_step(t, main_grad, group, backward, **options)
        except RuntimeError as error:
            raised.append(str(error))
            raise

    with chosen_backend("torch"), shrunk(*BLOCKS):
        expected = _main_grad_step(t, main_grad, group, torch.Tensor.backward, **options)
        (block,) = re.findall(r"```python\n(.*?)```", (ROOT / "docs" / "faults.md").read_text(), re.DOTALL)
        given = dict(
            group=group, ranks=[0, 1], timeout=timeout, step=lambda group: found.append(step(group)), dist=over_gloo
        )
        found: list = []
        exec(block, given | dict(optimizer=torch.optim.SGD([t.x])))
    assert len(raised) == 1 and ("made up" if member.rank else "Timed out waiting") in raised[0], raised
    assert len(found) == 1 and same(found[0], expected)
