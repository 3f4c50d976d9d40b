"""The processes that serve tests of several ranks."""

from __future__ import annotations

import time
from pathlib import Path

import pytest
import torch.distributed as dist

from world import Member


def _leaves_a_group(member: Member) -> None:
    class Model:
        pass

    model = Model()
    model.itself, model.group = model, dist.new_group(range(member.ranks))


def _gloo_threads(member: Member) -> int:
    return sum("gloo" in name.read_text() for name in Path("/proc/self/task").glob("*/comm"))


def _gloo_threads_after(member: Member, before: list[int]) -> int:
    """A thread that has ended may be listed a little longer."""
    deadline = time.monotonic() + 5.0
    while (found := _gloo_threads(member)) != before[member.rank] and time.monotonic() < deadline:
        time.sleep(0.01)
    return found


@pytest.mark.skipif(not Path("/proc/self/task").exists(), reason="lists the threads of a process as Linux does")
def test_a_group_ends_with_its_test(worlds, device):
    world = worlds(2)
    before = world.run(_gloo_threads)
    world.run(_leaves_a_group)
    assert world.run(_gloo_threads_after, before) == before
