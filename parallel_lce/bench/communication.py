"""Communication by itself, and how much of it lies beside other work in the timeline of a call."""

import gzip
import json
import os
from functools import partial
from statistics import median

import torch
import torch.distributed as dist
from torch.profiler import ProfilerActivity, profile

from .peers import OVERLAPPED, SAVED
from .team import all_gather, reduce_scatter, synchronize
from .timing import calls_in, reading

NAMES = ("all_reduce", "all_gather", "reduce_scatter", "all_gather_partials")
TRACED = (SAVED, OVERLAPPED)


def measure_collectives(problem, rounds, window):
    """`{name: {'bytes': of the whole tensor, 'seconds': [one per round], 'seconds_median'}}` for [N, D] in the dtype of
    the hidden states and for the packed partials, 3 N + 2 numbers of fp32 per rank. Empty for a single rank."""
    team = problem.team
    if team.ranks == 1:
        return {}
    whole = torch.zeros_like(problem.hidden)
    part = torch.zeros_like(problem.hidden.chunk(team.ranks)[team.rank])
    partials = torch.zeros(3 * len(whole) + 2, device=team.device)
    gathered = partials.new_zeros(team.ranks * len(partials))
    calls = (
        (partial(dist.all_reduce, whole, group=team.group), whole),
        (partial(all_gather, whole, part, group=team.group), whole),
        (partial(reduce_scatter, part, whole, group=team.group), whole),
        (partial(all_gather, gathered, partials, group=team.group), gathered),
    )
    found = {}
    for name, (call, tensor) in zip(NAMES, calls):
        one = reading(call, (1, 1), team)
        numbers = calls_in(window.warm_up / 4, one), calls_in(window.measured / 4, one)
        seconds = [reading(call, numbers, team) for _ in range(rounds)]
        found[name] = {"bytes": tensor.nbytes, "seconds": seconds, "seconds_median": median(seconds)}
    return found


def write_trace(folder, problem, name, call):
    """A compressed Chrome trace of rank 0, of the peers in TRACED only. Every rank of the team makes the same calls.
    Returns its path on rank 0."""
    if name not in TRACED:
        return None
    team = problem.team
    layout = "-sp" if problem.sequence_parallel else ""
    path = os.path.join(folder, f"tp{team.ranks}-n{problem.shape.n}{layout}-{name}.json.gz")
    call()
    synchronize(team.device)
    if team.rank != 0:
        team.barrier()
        call()
        synchronize(team.device)
        return None
    os.makedirs(folder, exist_ok=True)
    activities = [ProfilerActivity.CPU] + [ProfilerActivity.CUDA] * (team.device.type == "cuda")
    with profile(activities=activities) as profiled:
        team.barrier()  # the others wait for the profiler, whose start takes a while
        call()
        synchronize(team.device)
    profiled.export_chrome_trace(path)
    return path


def hidden_communication(path):
    """`(milliseconds of communication on the device, of these beside other work)` of a trace: kernels of NCCL and
    copies between devices, against all other kernels."""
    opened = gzip.open if str(path).endswith(".gz") else open
    with opened(path, "rt", encoding="utf-8") as file:
        events = json.load(file)["traceEvents"]
    spans = {True: [], False: []}
    for event in events:
        name, kind = event.get("name", ""), event.get("cat", "")
        peer_copy = kind == "gpu_memcpy" and "PtoP" in name
        if kind == "kernel" or peer_copy:
            spans[peer_copy or name.startswith("nccl")].append((event["ts"], event["ts"] + event["dur"]))
    talk, work = (_union(spans[key]) for key in (True, False))
    hidden = sum(max(0, min(e, f) - max(s, t)) for s, e in talk for t, f in work)
    return sum(e - s for s, e in talk) / 1e3, hidden / 1e3


def _union(spans):
    """Disjoint spans that cover the same."""
    merged = []
    for start, end in sorted(spans):
        if merged and start <= merged[-1][1]:
            merged[-1] = merged[-1][0], max(end, merged[-1][1])
        else:
            merged.append((start, end))
    return merged
