"""Joules of a call, and its time, over two seconds of calls. At its power limit a GPU is the slower, the more joules a
call takes."""

import math
import time
from collections.abc import Callable

import torch

SECONDS = 2.0  # of calls: NVML updates its counter about ten times a second, an error of up to 5 %
WARM_UP = 0.5  # seconds


def sustained(call: Callable, device: torch.device) -> tuple[float, float]:
    """Joules of the whole GPU per call, by NVML's counter of energy (package nvidia-ml-py), and seconds per call."""
    import pynvml

    pynvml.nvmlInit()
    uuid = f"GPU-{torch.cuda.get_device_properties(device).uuid}"
    handle = pynvml.nvmlDeviceGetHandleByUUID(uuid)
    torch.cuda.synchronize(device)
    start = time.perf_counter()
    call()
    torch.cuda.synchronize(device)
    calls = max(1, math.ceil(WARM_UP / (time.perf_counter() - start)))
    for warm in (True, False):
        before, start = pynvml.nvmlDeviceGetTotalEnergyConsumption(handle), time.perf_counter()
        for _ in range(calls):
            call()
        torch.cuda.synchronize(device)
        seconds = (time.perf_counter() - start) / calls
        if warm:
            calls = max(1, math.ceil(SECONDS / seconds))
    return (pynvml.nvmlDeviceGetTotalEnergyConsumption(handle) - before) / 1e3 / calls, seconds
