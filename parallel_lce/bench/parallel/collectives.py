"""The collectives of an output layer by themselves: what of its time is communication that nothing hides."""

from functools import partial
from statistics import median

import torch
import torch.distributed as dist

from ..measure import calls_in
from .measure import reading
from .team import all_gather, reduce_scatter

NAMES = ("all_reduce", "all_gather", "reduce_scatter", "all_gather_partials")


def measure_collectives(problem, team, rounds, window):
    """`{name: {'bytes': of the whole tensor, 'seconds': [one per round], 'seconds_median'}}` for [N, D] in the dtype of
    the hidden states and for the partials, 3 N + 2 numbers of fp32 per rank; empty for a single rank."""
    if team.ranks == 1:
        return {}
    n, group = len(problem.x), team.group
    whole = torch.zeros_like(problem.x)
    part = torch.zeros_like(problem.part(problem.x, team, True))
    partials = torch.zeros(3 * n + 2, device=team.device)
    gathered = partials.new_zeros(team.ranks * len(partials))
    calls = (
        (partial(dist.all_reduce, whole, group=group), whole),
        (partial(all_gather, whole, part, group=group), whole),
        (partial(reduce_scatter, part, whole, group=group), whole),
        (partial(all_gather, gathered, partials, group=group), gathered),
    )
    found = {}
    for name, (call, tensor) in zip(NAMES, calls):
        one = reading(call, (1, 1), team)
        numbers = calls_in(window.warm_up / 4, one), calls_in(window.measured / 4, one)
        seconds = [reading(call, numbers, team) for _ in range(rounds)]
        size = tensor.numel() * tensor.element_size()
        found[name] = {"bytes": size, "seconds": seconds, "seconds_median": median(seconds)}
    return found
