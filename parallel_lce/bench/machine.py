"""The hardware and the software that decide the numbers."""

import importlib.metadata
import os
import platform
import subprocess

import torch

from .peers import MIB

LIBRARIES = ("triton", "megatron-core", "liger-kernel", "cut-cross-entropy", "quack-kernels", "nvidia-cutlass-dsl")


def machine(device):
    """{what: text}."""
    facts = {"device": _cpu_name(), "cpus": str(os.cpu_count()), "threads": str(torch.get_num_threads())}
    if device.type == "cuda":
        properties = torch.cuda.get_device_properties(device)
        size = f"{properties.multi_processor_count} SMs, {properties.total_memory // MIB} MiB"
        facts["device"] = f"{properties.name}, {size}"
        facts["driver"] = _driver()
        facts["cuda"] = str(torch.version.cuda)
    facts["python"] = platform.python_version()
    facts["torch"] = torch.__version__
    for name in LIBRARIES:
        try:
            facts[name] = importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            facts[name] = "none"
    facts["float32 matmul precision"] = torch.get_float32_matmul_precision()
    facts["PARALLEL_LCE_BACKEND"] = os.environ.get("PARALLEL_LCE_BACKEND", "")
    return facts


def _driver():
    command = ["nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader"]
    try:
        done = subprocess.run(command, check=False, capture_output=True, text=True, timeout=30)
    except (OSError, subprocess.TimeoutExpired):
        return "unknown"
    return (done.stdout.splitlines() or ["unknown"])[0].strip()


def _cpu_name():
    try:
        with open("/proc/cpuinfo", encoding="utf-8") as file:
            names = [line.split(":", 1)[1].strip() for line in file if line.startswith("model name")]
    except OSError:
        names = []
    return names[0] if names else platform.processor() or platform.machine()
