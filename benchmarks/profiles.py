"""Profiles of a call: its GPU operations, and its timeline."""

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
    """The number of kernels, copies and fills of a call, their seconds on the GPU, and the profiler's table. The device
    is idle at the start of each profiled call."""
    call()
    synchronize(team.device)
    with profile(activities=[ProfilerActivity.CPU, ProfilerActivity.CUDA]) as profiled:
        for _ in range(PROFILED):
            call()
            synchronize(team.device)
    averages = profiled.key_averages()
    cuda = torch.autograd.DeviceType.CUDA  # pyright: ignore[reportPrivateImportUsage]
    on_gpu = [event for event in averages if event.device_type == cuda]
    return {
        "operations": sum(event.count for event in on_gpu) / PROFILED,
        "gpu_seconds": 1e-6 * sum(event.self_device_time_total for event in on_gpu) / PROFILED,
        "table": averages.table(sort_by="self_cpu_time_total", row_limit=SHOWN, max_name_column_width=100),
    }


def write_trace(folder: str, problem: Problem, name: str, call: Callable) -> None:
    """Writes a compressed Chrome trace of one call on rank 0. All ranks of the team must call this function."""
    team = problem.team
    call()
    synchronize(team.device)
    activities = [ProfilerActivity.CPU] + [ProfilerActivity.CUDA] * (team.device.type == "cuda")
    with profile(activities=activities) if team.rank == 0 else nullcontext() as profiled:
        team.gather(None)  # the other ranks wait until the profiler has started
        call()
        synchronize(team.device)
    if profiled:
        Path(folder).mkdir(parents=True, exist_ok=True)
        layout = "-sp" if problem.sequence_parallel else ""
        profiled.export_chrome_trace(f"{folder}/tp{team.ranks}-n{problem.shape.n}{layout}-{name}.json.gz")
