"""The hardware and the software that decide the numbers."""

import importlib.metadata
import os
import platform
from pathlib import Path

import torch

LIBRARIES = ("triton", "megatron-core", "liger-kernel", "cut-cross-entropy", "quack-kernels", "verl")


def machine(device: torch.device) -> dict[str, str]:
    """{what: text}."""
    facts = {"device": _cpu_name(), "cpus": str(os.cpu_count()), "threads": str(torch.get_num_threads())}
    if device.type == "cuda":
        properties = torch.cuda.get_device_properties(device)
        size = f"{properties.multi_processor_count} SMs, {properties.total_memory // 2**20} MiB"
        facts |= {"device": f"{properties.name}, {size}", "cuda": str(torch.version.cuda)}
    facts |= {"python": platform.python_version(), "torch": torch.__version__}
    for name in LIBRARIES:
        try:
            facts[name] = importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            facts[name] = "none"
    facts["float32 matmul precision"] = torch.get_float32_matmul_precision()
    facts["PARALLEL_LCE_BACKEND"] = os.environ.get("PARALLEL_LCE_BACKEND", "")
    return facts


def _cpu_name() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines()
    except OSError:
        lines = []
    names = [line.split(":", 1)[1].strip() for line in lines if line.startswith("model name")]
    return names[0] if names else platform.processor() or platform.machine()
