"""The ranks that are measured together. One GPU is a team of one rank.

Measured calls use `group` (NCCL on GPUs). The benchmark's own messages use `host`, a gloo group of the same ranks: they
do not run on the GPU, and do not wait for it.
"""

import gc
import os
from collections.abc import Callable
from dataclasses import dataclass
from datetime import timedelta
from typing import Any

import numpy as np
import torch
import torch.distributed as dist

# Functions of this module have the world group as a default argument. If torch.compile imported the module after
# init_process_group, the group and its threads would outlive destroy_process_group, and gloo might abort at exit.
import torch.distributed.nn

TIMEOUT = timedelta(minutes=3)  # of a collective in a measured call
IDLE_TIMEOUT = timedelta(hours=2)  # of ranks outside the team, which wait until it has been measured


class NotMeasured(Exception):
    """A peer or a file is not measured, for the reason in the message."""


@dataclass(frozen=True)
class Team:
    """Ranks 0 to `ranks` - 1 of the run, seen from one of them. Without groups: a single process."""

    device: torch.device
    rank: int = 0
    ranks: int = 1
    group: dist.ProcessGroup | None = None
    host: dist.ProcessGroup | None = None

    @classmethod
    def of(cls, ranks: int, device: torch.device) -> "Team | None":
        """The team of the first `ranks` ranks; None on other ranks. Every rank of the run must call this function."""
        if not dist.is_initialized():
            return cls(device)
        members, shared = list(range(ranks)), torch.cuda.device_count() < int(os.environ.get("LOCAL_WORLD_SIZE", "1"))
        backend = "nccl" if device.type == "cuda" and not shared else "gloo"
        host = dist.new_group(members, backend="gloo", timeout=IDLE_TIMEOUT)
        group = dist.new_group(members, backend=backend, timeout=TIMEOUT)
        if not isinstance(host, dist.ProcessGroup) or not isinstance(group, dist.ProcessGroup):
            return None  # this rank is not a member
        return cls(device, dist.get_rank(), ranks, group, host)

    @classmethod
    def here(cls, device_type: str) -> "Team":
        """All ranks that torchrun started, or this process alone. Ranks share devices if there are fewer."""
        device = torch.device("cpu")
        if device_type == "cuda":
            device = torch.device("cuda", int(os.environ.get("LOCAL_RANK", "0")) % max(1, torch.cuda.device_count()))
            torch.cuda.set_device(device)
        if "RANK" in os.environ:
            dist.init_process_group("gloo", timeout=IDLE_TIMEOUT)
        team = cls.of(int(os.environ.get("WORLD_SIZE", "1")), device)
        assert team is not None  # every rank is a member
        return team

    def reduce(self, tensor: torch.Tensor, op=dist.ReduceOp.SUM) -> torch.Tensor:
        """Reduces the tensor over the ranks in place and returns it."""
        if self.ranks > 1:
            dist.all_reduce(tensor, op, group=self.group)
        return tensor

    def gather(self, value: Any) -> list:
        """The `value` of every rank, in rank order. Waits for the other processes, not for their devices."""
        values = [value] * self.ranks
        if self.ranks > 1:
            dist.all_gather_object(values, value, group=self.host)
        return values

    def agree(self, function: Callable[[], Any]) -> Any:
        """The result of `function()` on this rank. If it raises on a rank, all ranks raise NotMeasured with the reason.

        If a rank raises while another waits for it in a collective, NotMeasured follows the collective's timeout."""
        value, reason = None, ""
        try:
            value = function()
        except NotMeasured as refusal:
            reason = str(refusal)
        except Exception as error:
            kind = "not installed" if isinstance(error, ImportError) else f"failed: {type(error).__name__}"
            reason = ": ".join([kind, *str(error).strip().splitlines()[:1]])[:200]
        reasons = self.gather(reason)
        failed = [rank for rank, text in enumerate(reasons) if text]
        if not failed:
            return value
        where = f" (on rank {', '.join(map(str, failed))} of {self.ranks})" if len(failed) < self.ranks else ""
        raise NotMeasured(reasons[failed[0]] + where)

    def worst(self, errors: dict[str, float]) -> dict[str, float]:
        """`{name: largest error of all ranks}`, NaN if one is."""
        by_rank = self.gather(errors)
        return {name: float(np.max([own[name] for own in by_rank])) for name in errors}


def release(device: torch.device) -> None:
    """Gives the memory of what no longer exists back to the device."""
    gc.collect()
    if device.type == "cuda":
        torch.cuda.empty_cache()
