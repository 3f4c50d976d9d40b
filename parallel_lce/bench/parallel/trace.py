"""The timeline of one call of forward + backward, and how much of its communication lies beside other work."""

import gzip
import json
import os

import torch
from torch.profiler import ProfilerActivity, profile

from .peers import OVERLAPPED, SAVED

TRACED = (SAVED, OVERLAPPED)


def write_trace(folder, cell, name, call, team):
    """A Chrome trace, compressed, of rank 0; only of the peers in TRACED. Every rank of the team makes the same calls.
    Returns its path on rank 0."""
    if name not in TRACED:
        return None
    layout = "-sp" if cell.sequence_parallel else ""
    path = os.path.join(folder, f"tp{cell.tp}-n{cell.shape.n}{layout}-{name}.json.gz")
    call()
    _finish(team.device)
    if team.rank != 0:
        team.barrier()
        call()
        _finish(team.device)
        return None
    os.makedirs(folder, exist_ok=True)
    activities = [ProfilerActivity.CPU] + [ProfilerActivity.CUDA] * (team.device.type == "cuda")
    with profile(activities=activities) as profiled:
        team.barrier()  # the others wait for the profiler, whose start takes a while
        call()
        _finish(team.device)
    profiled.export_chrome_trace(path)
    return path


def _finish(device):
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def communication(path):
    """`(milliseconds of communication on the device, of these beside other work)`, of a trace: kernels of NCCL and
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
