"""The default of ``logits_budget``."""

from __future__ import annotations

from types import SimpleNamespace
from unittest import mock

import pytest
import torch

import parallel_lce
from parallel_lce import prepare
from parallel_lce.budget import default_budget

GIB, MIB = 1 << 30, 1 << 20


def on(total: int):
    """A machine whose GPUs have ``total`` bytes."""
    properties = SimpleNamespace(total_memory=total)
    return mock.patch.multiple(torch.cuda, is_available=lambda: True, get_device_properties=lambda device: properties)


@pytest.mark.parametrize(
    ("total", "budget"),
    [
        (int(139.8 * GIB), 4352 * MIB),
        (int(79.1 * GIB), 2304 * MIB),
        (int(79.4 * GIB), 2304 * MIB),
        (int(23.6 * GIB), 512 * MIB),
        (2 * GIB, 256 * MIB),
    ],
)
def test_a_gpu_s_is_a_thirty_second_of_its_memory(total, budget):
    with on(total):
        assert default_budget(torch.device("cuda")) == budget


def test_a_cpu_s_is_1_gib():
    assert default_budget(torch.device("cpu")) == GIB == default_budget(torch.device("meta"))


def test_a_call_is_planned_with_it(device):
    prepare.KNOWN.clear()
    x, weight = torch.ones(3, 4, device=device, requires_grad=True), torch.ones(5, 4, device=device)
    with mock.patch.object(prepare, "plan", wraps=prepare.plan) as plan:
        parallel_lce.linear_cross_entropy(x, weight, torch.zeros(3, dtype=torch.int64, device=device))
    assert plan.call_args.kwargs["budget"] == default_budget(x.device)
