"""Which mainloop a Triton gets on Hopper."""

from __future__ import annotations

import re
import sys
import warnings
from types import SimpleNamespace

import pytest
import torch

pytest.importorskip("triton", reason="needs triton")

from parallel_lce.kernels import tuning


@pytest.fixture
def on_hopper(monkeypatch):
    """``on_hopper(version)``: the tile of bf16 operands on a Hopper GPU with that Triton, and the warnings of two
    calls."""
    monkeypatch.setattr(tuning, "_capability", lambda device: 90)
    monkeypatch.setattr(tuning, "interpreted", lambda: False)
    tuning._has_gluon.cache_clear()

    def tile(version):
        monkeypatch.setattr(tuning, "triton", SimpleNamespace(__version__=version))
        weight = torch.empty(8, 8, dtype=torch.bfloat16)
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            found = {tuning.tile_of(weight, tma=True) for _ in range(2)}
        return found.pop(), [str(warning.message) for warning in caught]

    yield tile
    tuning._has_gluon.cache_clear()


@pytest.mark.parametrize("version", ["3.6.0", "3.7.1", "3.8.0+git1a2b3c", "3.9.0"])
def test_supported_triton_runs_the_mainloop_for_hopper(version, on_hopper):
    tile, warned = on_hopper(version)
    assert tile.warp_specialized and warned == []


@pytest.mark.parametrize("version", ["3.5.1", "3.10.0", "4.0.0+git1a2b3c"])
def test_other_triton_runs_the_plain_mainloop_and_says_so_once(version, on_hopper):
    tile, warned = on_hopper(version)
    assert not tile.warp_specialized
    assert [re.findall(r"Triton [\d.]+[+\w]*|plain mainloop|up to \d+ % longer", text) for text in warned] == [
        [f"Triton {version}", "plain mainloop", "Triton 3.6", "up to 8 % longer"]
    ]


def test_triton_whose_gluon_lacks_a_name_runs_the_plain_mainloop(on_hopper, monkeypatch):
    monkeypatch.setitem(sys.modules, "parallel_lce.kernels.hopper", None)  # its import raises
    tile, warned = on_hopper("3.9.0")
    assert not tile.warp_specialized and len(warned) == 1
