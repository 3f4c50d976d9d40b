"""Communication by itself, and the timeline of a call."""

import os
from collections.abc import Callable
from contextlib import nullcontext
from functools import partial
from statistics import median

import torch
import torch.distributed as dist
from torch.profiler import ProfilerActivity, profile

from parallel_lce.core.collectives import all_gather, reduce_scatter

from .peers import OVERLAPPED, PASSES, Peer
from .problem import Problem
from .team import synchronize
from .timing import timer


def measure_collectives(problem: Problem, rounds: int) -> dict[str, dict]:
    """`{name: {'bytes': of the whole tensor, 'seconds': [one per round], 'seconds_median'}}` for [N, D] in the dtype of
    the hidden states and for the packed partials, 3 N + 2 numbers of fp32 per rank. Empty for a single rank."""
    team = problem.team
    if team.ranks == 1:
        return {}
    whole = torch.zeros_like(problem.hidden)
    part = torch.zeros_like(problem.hidden.chunk(team.ranks)[team.rank])
    partials = torch.zeros(3 * len(whole) + 2, device=team.device)
    gathered = partials.new_zeros(team.ranks * len(partials))
    calls = {
        "all_reduce": (whole, partial(dist.all_reduce, whole, group=team.group)),
        "all_gather": (whole, partial(all_gather, whole, part, group=team.group)),
        "reduce_scatter": (whole, partial(reduce_scatter, part, whole, group=team.group)),
        "all_gather_partials": (gathered, partial(all_gather, gathered, partials, group=team.group)),
    }
    found = {}
    for name, (tensor, call) in calls.items():
        read = timer(call, team)
        seconds = [read() for _ in range(rounds)]
        found[name] = {"bytes": tensor.nbytes, "seconds": seconds, "seconds_median": median(seconds)}
    return found


def write_trace(folder: str, problem: Problem, peer: Peer, call: Callable) -> None:
    """A compressed Chrome trace of rank 0, of the first strategy of ours and of the baseline with collectives. Every
    rank of the team makes the same calls."""
    if peer.name != OVERLAPPED and (peer.family != "ours" or peer.passes != PASSES):
        return
    team = problem.team
    call()
    synchronize(team.device)
    activities = [ProfilerActivity.CPU] + [ProfilerActivity.CUDA] * (team.device.type == "cuda")
    with profile(activities=activities) if team.rank == 0 else nullcontext() as profiled:
        team.barrier()  # the others wait for the profiler, whose start takes a while
        call()
        synchronize(team.device)
    if profiled:
        os.makedirs(folder, exist_ok=True)
        layout = "-sp" if problem.sequence_parallel else ""
        profiled.export_chrome_trace(f"{folder}/tp{team.ranks}-n{problem.shape.n}{layout}-{peer.name}.json.gz")
