"""The ranks of one tensor-parallel size, and what they tell each other.

What is measured runs on `group` (NCCL on GPUs). Everything that the benchmark itself has to exchange goes over `host`,
a gloo group of the same ranks, so that it neither takes part in a timed call nor waits for a device.
"""

import math
import os
from dataclasses import dataclass
from datetime import timedelta

import torch
import torch.distributed as dist

from ..accuracy import Refused
from ..measure import Broken, describe

# torch 2.13 renamed these two.
all_gather = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
reduce_scatter = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor

PATIENCE = timedelta(hours=2)  # of ranks that are not in the group being measured


def join(device_type):
    """Joins the ranks that torchrun started, over gloo; returns this process's device."""
    device = torch.device("cpu")
    if device_type == "cuda":
        device = torch.device("cuda", int(os.environ["LOCAL_RANK"]))
        torch.cuda.set_device(device)
    dist.init_process_group("gloo", timeout=PATIENCE)
    return device


@dataclass(frozen=True)
class Team:
    """Ranks 0 to `ranks` - 1 of the run, of which this is one."""

    group: dist.ProcessGroup
    host: dist.ProcessGroup
    rank: int
    ranks: int
    device: torch.device

    @classmethod
    def of(cls, ranks, device, timeout):
        """The first `ranks` ranks, or None on the others; every rank of the run has to call this. A collective that
        takes longer than `timeout` seconds ends the run."""
        members, backend = list(range(ranks)), "nccl" if device.type == "cuda" else "gloo"
        host = dist.new_group(members, backend="gloo", timeout=PATIENCE)
        group = dist.new_group(members, backend=backend, timeout=timedelta(seconds=timeout))
        if dist.get_rank() >= ranks:
            return None
        team = cls(group, host, dist.get_rank(), ranks, device)
        team.together(team._connect)
        return team

    def _connect(self):
        """NCCL sets up its connections at the first collective of each kind."""
        mine, all_of_us = (torch.zeros(n, device=self.device) for n in (1, self.ranks))
        dist.all_reduce(mine, group=self.group)
        all_gather(all_of_us, mine, group=self.group)
        reduce_scatter(mine, all_of_us, group=self.group)
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)

    def barrier(self):
        """Waits on the host; of the device it says nothing."""
        dist.barrier(group=self.host)

    def together(self, function):
        """`[function() of each rank]`. If it raises on any rank, all of them raise Refused with the reason, or Broken
        where a device answers nothing any more. A rank that waits in a collective for one that raised before it gets
        here only after the timeout."""
        value, reason, broken = None, "", False
        try:
            value = function()
        except Exception as error:
            reason = str(error) if isinstance(error, Refused) else f"failed: {describe(error)}"
            broken = not self._answers()
        outcomes = [None] * self.ranks
        dist.all_gather_object(outcomes, (value, reason, broken), group=self.host)
        failed = [rank for rank, (_, text, _) in enumerate(outcomes) if text]
        if not failed:
            return [outcome[0] for outcome in outcomes]
        reason = outcomes[failed[0]][1]
        if len(failed) < self.ranks:
            reason += f" (on rank {', '.join(map(str, failed))} of {self.ranks})"
        if any(outcome[2] for outcome in outcomes):
            raise Broken(f"{reason}, and the device answers nothing any more")
        raise Refused(reason)

    def _answers(self):
        if self.device.type == "cuda":
            try:
                torch.cuda.synchronize(self.device)
            except RuntimeError:
                return False
        return True

    def worst(self, errors):
        """`{name: largest error of all ranks}`; NaN is larger than any number."""
        found = self.together(lambda: errors)
        return {name: max((e[name] for e in found), key=lambda e: (math.isnan(e), e)) for name in errors}
