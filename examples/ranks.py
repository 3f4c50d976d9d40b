"""Process groups of the examples: torchrun's processes, or this process alone."""

import os

import torch
import torch.distributed as dist

# Functions of this module have the world group as a default argument. If it is first imported after init_process_group
# (by an optimizer, say), the group outlives destroy_process_group, and gloo may abort at exit.
import torch.distributed.nn


def join() -> tuple[dist.ProcessGroup, torch.device]:
    """The group of all processes and this process's device. NCCL if each process has a GPU, else gloo."""
    on_gpu = torch.cuda.device_count() >= int(os.environ.get("LOCAL_WORLD_SIZE", 1))
    device = torch.device("cuda", int(os.environ.get("LOCAL_RANK", 0))) if on_gpu else torch.device("cpu")
    if on_gpu:
        torch.cuda.set_device(device)
    backend = "nccl" if on_gpu else "gloo"
    if "RANK" in os.environ:  # set by torchrun
        dist.init_process_group(backend)
    else:
        dist.init_process_group(backend, store=dist.HashStore(), rank=0, world_size=1)
    return dist.group.WORLD, device
