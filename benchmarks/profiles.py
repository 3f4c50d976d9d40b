"""Profiles of a call: what it is made of, and its timeline."""

from collections.abc import Callable
from contextlib import nullcontext
from pathlib import Path

import torch
from torch.profiler import ProfilerActivity, profile

from .problem import Problem
from .team import Team, synchronize

PROFILED = 10  # calls
SHOWN = 40  # rows of a table


def profile_of(call: Callable, team: Team) -> dict:
    """What a call is made of: how many kernels, copies and fills, their seconds on the GPU, and the profiler's table.
    Each of the profiled calls finds the device idle."""
    call()
    synchronize(team.device)
    with profile(activities=[ProfilerActivity.CPU, ProfilerActivity.CUDA]) as profiled:
        for _ in range(PROFILED):
            call()
            synchronize(team.device)
    found = profiled.key_averages()
    on_gpu = [event for event in found if event.device_type == torch.autograd.DeviceType.CUDA]
    return {
        "operations": sum(event.count for event in on_gpu) / PROFILED,
        "gpu_seconds": 1e-6 * sum(event.self_device_time_total for event in on_gpu) / PROFILED,
        "table": found.table(sort_by="self_cpu_time_total", row_limit=SHOWN, max_name_column_width=100),
    }


def write_trace(folder: str, problem: Problem, name: str, call: Callable) -> None:
    """A compressed Chrome trace of one call on rank 0. Every rank of the team makes the same calls."""
    team = problem.team
    call()
    synchronize(team.device)
    activities = [ProfilerActivity.CPU] + [ProfilerActivity.CUDA] * (team.device.type == "cuda")
    with profile(activities=activities) if team.rank == 0 else nullcontext() as profiled:
        team.gather(None)  # the others wait for the profiler, whose start takes a while
        call()
        synchronize(team.device)
    if profiled:
        Path(folder).mkdir(parents=True, exist_ok=True)
        layout = "-sp" if problem.sequence_parallel else ""
        profiled.export_chrome_trace(f"{folder}/tp{team.ranks}-n{problem.shape.n}{layout}-{name}.json.gz")
