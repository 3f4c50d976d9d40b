"""The scripts under examples/, on one and two processes: they print the losses that float64 gives without shards."""

import functools
import importlib
import os
import re
import sys

import pytest
import torch

from releases import ROOT
from world import launched

MEGATRON = "megatron_gpt"  # alone in its process: Megatron keeps threads of its groups
# The number of steps, and the losses of the second and of the last step, in float64 by plain PyTorch.
CASES = {
    "sequence_parallel": (30, 6.290983, 0.172316),
    "policy_gradient": (5, -0.182857, -0.183904),
    "grpo": (5, -0.128221, -0.134308),
    "dpo": (5, 0.111185, 0.043961),
    "distillation": (5, 0.048929, 0.035058),
    MEGATRON: (5, 6.178493, 5.917152),  # of Megatron's own loss, in fp32
}


def _run(names: tuple[str, ...], ranks: int, device: str) -> None:
    if ranks == 1:
        del os.environ["RANK"]
    if device == "cpu":
        os.environ["CUDA_VISIBLE_DEVICES"] = ""
    sys.path.insert(0, str(ROOT / "examples"))
    for name in names:
        print("example", name)
        importlib.import_module(name).main()


@functools.cache
def _printed(ranks: int, device: str, *names: str) -> str:
    return launched(ranks, _run, names, ranks, device, device=device)


MORE = [pytest.param(2, name, marks=pytest.mark.slow) for name in CASES if name != "sequence_parallel"]


@pytest.mark.parametrize(("ranks", "name"), [*((1, name) for name in CASES), (2, "sequence_parallel"), *MORE])
def test_an_example_prints_the_losses_of_float64(name, ranks, device):
    if device == "cuda" and ranks == 2 > torch.cuda.device_count():
        pytest.skip(f"needs 2 GPUs, and there are {torch.cuda.device_count()}")
    if name == MEGATRON:
        pytest.importorskip("megatron.core")
    together = [each for each in CASES if each != MEGATRON] if ranks == 1 and name != MEGATRON else [name]
    printed = _printed(ranks, device, *together).partition(f"example {name}\n")[2].partition("example ")[0]
    steps, second, last = CASES[name]
    losses = [float(loss) for loss in re.findall(r"^step \d+: loss (-?\d+\.\d+)", printed, re.MULTILINE)]
    bound = 1e-4 if name == "sequence_parallel" else 1e-5
    assert len(losses) == steps and [losses[1], losses[-1]] == pytest.approx([second, last], abs=bound)
    if name == MEGATRON:
        assert f"{ranks} rank(s): ['fused']" in printed
    for pair in re.findall(r"^first loss, .*: (\S+), unsharded: (\S+)$", printed, re.MULTILINE):
        assert float(pair[0]) == pytest.approx(float(pair[1]), abs=1e-5)
