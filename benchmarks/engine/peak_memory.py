"""Peak memory of one call, in bytes that its tensors occupy.

On CUDA the caching allocator counts the bytes. On CPU the profiler records every allocation and release of torch's
allocator, and these records are summed in order. Memory that a library allocates otherwise is not counted. On CUDA a
matrix library takes its workspace from torch's allocator at its first use, so call the function once before it is
measured.
"""

import gc
import json
import os
import tempfile
from collections.abc import Callable
from itertools import accumulate
from pathlib import Path

import torch


def peak_memory(fn: Callable, device: torch.device | str) -> tuple[int, int]:
    """Runs `fn()` once and returns `(peak, alive)`, both in bytes above what was allocated before the call: the largest
    number during the call, and what still exists after it, the result of `fn` included. If the call frees earlier
    tensors, both are lower; on CPU only tensors of an earlier measured call are known."""
    gc.collect()
    return _peak_cuda(fn, device) if torch.device(device).type == "cuda" else _peak_cpu(fn)


def _peak_cuda(fn: Callable, device: torch.device | str) -> tuple[int, int]:
    held = _finish_backwards(device)
    torch.cuda.synchronize(device)
    before = torch.cuda.memory_allocated(device)
    torch.cuda.reset_peak_memory_stats(device)
    result = fn()  # held until the last line: the result counts as alive
    torch.cuda.synchronize(device)
    peak = torch.cuda.max_memory_allocated(device) - before
    alive = torch.cuda.memory_allocated(device) - before
    del result, held
    return peak, alive


def _finish_backwards(device: torch.device | str) -> tuple[torch.Tensor, torch.Tensor]:
    """Runs a tiny backward. Autograd's thread may still hold the results of the last backward. After this call it holds
    the returned tensors instead."""
    with torch.inference_mode(False), torch.enable_grad():
        leaf, one = torch.zeros(1, device=device, requires_grad=True), torch.ones(1, device=device)
        torch.autograd.grad(leaf.view(1), leaf, one)
    return leaf, one


def _peak_cpu(fn: Callable) -> tuple[int, int]:
    os.environ.setdefault("KINETO_LOG_LEVEL", "99")  # otherwise the profiler prints to stderr at each start
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU], profile_memory=True) as profile:
        result = fn()
    with tempfile.TemporaryDirectory() as folder:  # the exported trace is the only public form of these records
        path = Path(folder, "trace.json")
        profile.export_chrome_trace(str(path))
        events = json.loads(path.read_text(encoding="utf-8"))["traceEvents"]
    del result
    events = [e for e in events if e.get("name") == "[memory]" and e["args"]["Device Type"] == 0]  # 0 is CPU
    events.sort(key=lambda e: e["ts"])
    levels = [0, *accumulate(e["args"]["Bytes"] for e in events)]  # negative for a release
    return max(levels), levels[-1]
