"""Which launches ``kernels.relaunch`` takes for one of the same compiled kernel, without a GPU."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch
import triton
from torch.testing._internal.two_tensor import TwoTensor

from parallel_lce.kernels.relaunch import Bound, Relaunched


class Recorder:
    """A jit function, and what it compiles to, each of whose launches is recorded."""

    arg_names = ["x", "number", "scale", "bias", "BLOCK"]
    __name__ = "kernel"
    function, packed_metadata = "function", "metadata"

    def __init__(self) -> None:
        self.compiled, self.again = 0, []

    def __getitem__(self, grid):
        def launch(*arguments, BLOCK, num_warps, enable_fp_fusion):
            assert enable_fp_fusion, "whatever Triton's default is"
            self.compiled += 1
            return self

        return launch

    def run(self, x, y, z, stream, function, metadata, launch_metadata, on_entry, on_exit, *arguments):
        """As Triton's driver is called, in the order of Triton 3.6 to 3.9."""
        assert (stream, function, metadata) == ("stream of device -1", "function", "metadata")
        assert launch_metadata is on_entry is on_exit is None
        self.again.append(((x, y, z), arguments))


@pytest.fixture(autouse=True)
def driver(monkeypatch):
    """A driver for a machine without one."""
    fake = SimpleNamespace(get_current_stream=lambda device: f"stream of device {device}", get_current_device=lambda: 0)
    monkeypatch.setattr(type(triton.runtime.driver), "active", fake)


X, OTHER = torch.zeros(8), torch.ones(24)


def launched(kernel, x=X, number=7, scale=1.5, bias=None, **constants):
    kernel.launch((4,), x, number, scale, bias, **constants or dict(BLOCK=128, num_warps=4))


@pytest.mark.parametrize(
    ("first", "second", "arguments"),
    [
        ({}, dict(x=OTHER, number=9, scale=2.5), (OTHER.data_ptr(), 9, 2.5, None)),
        (dict(bias=(X, None)), dict(bias=(OTHER, None)), (X.data_ptr(), 7, 1.5, (OTHER.data_ptr(), None))),
    ],
)
def test_a_launch_of_the_same_kind_is_not_described_to_triton_again(first, second, arguments):
    """Addresses and constants are passed, but no options."""
    recorder = Recorder()
    kernel = Relaunched(recorder)
    launched(kernel, **first)
    assert (recorder.compiled, recorder.again) == (1, [])
    launched(kernel, **second)
    assert (recorder.compiled, recorder.again) == (1, [((4, 1, 1), (*arguments, 128))])


@pytest.mark.parametrize(
    ("first", "second"),
    [
        ({}, dict(x=torch.zeros(9)[1:])),
        ({}, dict(x=torch.zeros(8, dtype=torch.bfloat16))),
        ({}, dict(number=1)),
        ({}, dict(number=16)),
        ({}, dict(number=2**31 + 1)),
        (dict(number=2**31 + 1), dict(number=2**63 + 1)),
        ({}, dict(bias=torch.zeros(8))),
        (dict(bias=(X, None)), dict(bias=(None, X))),
        ({}, dict(BLOCK=64, num_warps=4)),
        ({}, dict(BLOCK=128, num_warps=8)),
        (dict(BLOCK=4, num_warps=8), dict(num_warps=4, BLOCK=8)),
    ],
    ids=str,
)
def test_a_launch_for_which_triton_compiles_anew_is_not_taken_for_the_same(first, second):
    recorder = Recorder()
    kernel = Relaunched(recorder)
    launched(kernel, **first)
    launched(kernel, **second)
    assert (recorder.compiled, recorder.again) == (2, [])


def test_bound_launches_pass_plain_tensors_alone_as_addresses():
    recorder = Recorder()
    bound = Bound(Relaunched(recorder), (4,), (7, 1.5, None), BLOCK=128, num_warps=4)
    bound(X)
    bound(torch.nn.Parameter(torch.ones(8)))
    assert (recorder.compiled, len(recorder.again)) == (1, 1)
    with pytest.raises(ValueError, match="no kernel can read a TwoTensor"):
        bound(TwoTensor(X, X))
    with pytest.raises(TypeError, match="a str is no argument of a kernel"):
        launched(Relaunched(recorder), bias="text")
