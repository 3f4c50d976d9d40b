"""What a call is made of: the operations of the GPU, and where the host's time goes, from a profile of some calls."""

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch.profiler import ProfilerActivity, profile, record_function

from .peak_memory import trace_events
from .team import synchronize

CALLS = 10  # profiled; during the first the profiler still sets itself up
CALL = "benchmarks: one call"
GPU = ("kernel", "gpu_memcpy", "gpu_memset")  # categories of the trace
CUDA = ("cuda_runtime", "cuda_driver")  # the host inside a function of the CUDA runtime or driver


@dataclass(frozen=True)
class Operation:
    """One kind of kernel, copy or fill, in one call."""

    name: str
    count: float
    seconds: float  # on the GPU, of all of them together


@dataclass(frozen=True)
class Breakdown:
    """Of one call; averages over those profiled."""

    operations: list[Operation]  # in the order in which they first start; none without a GPU
    host_seconds: float  # of the host, slowed down by the profiler
    cuda: float  # of these, the share inside CUDA's functions: launches above all
    torch: float  # the share of torch's operations, without what they spend inside CUDA's functions

    @property
    def rest(self) -> float:
        """The share of everything else: Python, autograd's engine, Triton's launcher."""
        return 1 - self.cuda - self.torch


def break_down(call: Callable, device: torch.device) -> Breakdown:
    """Profiles some calls, each of which finds the device idle."""
    activities = [ProfilerActivity.CPU] + [ProfilerActivity.CUDA] * (device.type == "cuda")
    synchronize(device)
    with profile(activities=activities) as profiled:
        for _ in range(CALLS):
            with record_function(CALL):
                call()
            synchronize(device)
    return of_events(trace_events(profiled))


def of_events(events: list[dict]) -> Breakdown:
    """The breakdown of the events of a trace, whose times are in microseconds."""
    events = sorted((e for e in events if e.get("ph") == "X"), key=lambda e: e["ts"])
    calls = [e for e in events if e["cat"] == "user_annotation" and e["name"] == CALL]
    lengths = {}
    for event in events:
        if event["cat"] in GPU:
            lengths.setdefault(event["name"], []).append(event["dur"])
    operations = [Operation(name, len(of) / len(calls), 1e-6 * sum(of) / len(calls)) for name, of in lengths.items()]
    cuda = [e for e in events if e["cat"] in CUDA]
    both = [e for e in events if e["cat"] in CUDA or (e["cat"] == "cpu_op" and e["name"].startswith("aten::"))]
    settled = calls[1:]
    total = sum(e["dur"] for e in settled)
    in_cuda, in_both = _covered(cuda, settled) / total, _covered(both, settled) / total
    return Breakdown(operations, 1e-6 * total / len(settled), in_cuda, in_both - in_cuda)


def _covered(events: list[dict], calls: list[dict]) -> float:
    """How long at least one of the events runs during the calls. Both are in order of time."""
    covered = 0.0
    for call in calls:
        reached, end = call["ts"], call["ts"] + call["dur"]
        for event in events:
            until = min(event["ts"] + event["dur"], end)
            covered += max(0.0, until - max(event["ts"], reached))
            reached = max(reached, until)
    return covered
