"""Fixtures: devices, and process groups that live as long as the session."""

from __future__ import annotations

import os

os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")

import pytest
import torch

if not torch.cuda.is_available():
    # Kernels then run on the CPU; Triton reads this when they are imported.
    os.environ.setdefault("TRITON_INTERPRET", "1")

from tools import chosen_backend
from world import World, configure

configure()

DEVICES = [pytest.param("cpu", id="cpu"), pytest.param("cuda", id="cuda", marks=pytest.mark.gpu)]


@pytest.fixture(params=DEVICES)
def device(request) -> str:
    """Each test body runs on the CPU and, with ``-m gpu``, on a GPU."""
    if request.param == "cuda" and not torch.cuda.is_available():
        pytest.skip("needs a CUDA device, and there is none")
    return request.param


@pytest.fixture
def kernels(device) -> None:
    """What runs kernels: a GPU, or Triton's interpreter on the CPU."""
    pytest.importorskip("triton", reason="needs triton")
    if device == "cpu" and os.environ.get("TRITON_INTERPRET") != "1":
        pytest.skip("kernels are compiled for this machine's GPU, not interpreted")


@pytest.fixture(params=["torch", "triton"])
def backend(request) -> str:
    """Each test body runs in either backend."""
    if request.param == "triton":
        request.getfixturevalue("kernels")
    with chosen_backend(request.param):
        yield request.param


@pytest.fixture(scope="session")
def _worlds():
    worlds: dict[tuple[int, str, str | None], World] = {}
    yield worlds
    for world in worlds.values():
        if world.alive:
            world.close()


@pytest.fixture
def worlds(_worlds, device):
    """``worlds(P)``: P processes of the test's device, started at first use.

    ``worlds(P, path)``: such that import from the folder ``path`` first. Those of another path end,
    since every release of a library that is tested would keep its processes.
    """

    def get(ranks: int, path: str | None = None) -> World:
        if device == "cuda" and ranks > torch.cuda.device_count():
            pytest.skip(f"needs {ranks} GPUs, and there are {torch.cuda.device_count()}")
        for key in list(_worlds):
            if key[2] not in (None, path):
                _worlds.pop(key).close()
        known = _worlds.get((ranks, device, path))
        if known is None or not known.alive:
            known = _worlds[ranks, device, path] = World(ranks, device, path)
        return known

    return get
