"""The examples of vLLM and SGLang against the packages themselves, on CPUs: their layers on one and two ranks, and
vLLM's engine. A program of its own for each rank, since the packages keep the groups and the device in globals."""

import importlib.util
import os
import re
import subprocess
import sys

import pytest

from releases import ROOT

CASES = {"vllm": ("plain", "bias", "scale and soft-cap", "fp32 head of bf16", "others asked for")}
CASES["sglang"] = tuple(case for case in CASES["vllm"] if case != "bias")
FLOAT32 = 1e-5  # log-probabilities of up to 10, from other orders of fp32 sums


def differences(program: str, ranks: int, folder) -> list[dict[str, float]]:
    """What the program prints on each rank."""
    package = program.partition("_")[0]
    if importlib.util.find_spec(package) is None:
        pytest.skip(f"needs {package}, which is not installed")
    paths = [*(str(ROOT / part) for part in ("", "examples", "tests")), *filter(None, [os.environ.get("PYTHONPATH")])]
    offline = dict(HF_HUB_OFFLINE="1", VLLM_NO_USAGE_STATS="1", GLOO_SOCKET_IFNAME="lo", CUDA_VISIBLE_DEVICES="")
    running = [
        subprocess.Popen(
            [sys.executable, str(ROOT / "tests" / "sampler_programs.py"), program, str(rank), str(ranks), folder],
            env={**os.environ, **offline, "PYTHONPATH": os.pathsep.join(paths)},
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )
        for rank in range(ranks)
    ]
    try:
        printed = [process.communicate(timeout=300)[0] for process in running]
    finally:
        for process in running:
            process.kill()
    assert not any(process.returncode for process in running), "\n".join(text[-3000:] for text in printed)
    return [
        {name: float(value) for name, value in re.findall(r"^([\w -]+): (\S+)$", text, re.MULTILINE)}
        for text in printed
    ]


@pytest.mark.parametrize("ranks", [1, 2])
@pytest.mark.parametrize("package", ["vllm", "sglang"])
def test_layers(package, ranks, tmp_path):
    for found in differences(f"{package}_layers", ranks, str(tmp_path / "store")):
        found = {case: found[case] for case in CASES[package]}
        assert max(found.values()) < FLOAT32, found
        assert found["others asked for"] == 0  # the package's own path


def test_vllm_engine(tmp_path):
    (found,) = differences("vllm_engine", 1, str(tmp_path))
    assert found["largest difference of 95"] < FLOAT32
