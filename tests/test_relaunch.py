"""What ``kernels.relaunch`` takes for a launch of the same compiled kernel, without a GPU."""

from __future__ import annotations

import pytest
import torch

from parallel_lce.kernels.relaunch import Relaunched


class Recorder:
    """A jit function and what it compiles to, each of whose launches is recorded."""

    arg_names = ["x", "number", "scale", "bias", "BLOCK"]
    __name__ = "kernel"

    def __init__(self) -> None:
        self.compiled, self.again = 0, []

    def __getitem__(self, grid):
        def launch(*arguments, BLOCK, num_warps, enable_fp_fusion):
            assert enable_fp_fusion, "whatever Triton's default is"
            self.compiled += 1
            return Compiled(self)

        return launch


class Compiled:
    def __init__(self, recorder: Recorder) -> None:
        self.recorder = recorder

    def __getitem__(self, grid):
        return lambda *arguments: self.recorder.again.append((grid, arguments))


def launched(kernel, x, number=7, scale=1.5, bias=None, BLOCK=128, num_warps=4):
    kernel.launch((4,), x, number, scale, bias, BLOCK=BLOCK, num_warps=num_warps)


def test_a_launch_of_the_same_kind_is_not_described_to_triton_again():
    recorder, x, other = Recorder(), torch.zeros(8), torch.ones(24)
    kernel = Relaunched(recorder)
    launched(kernel, x)
    assert (recorder.compiled, recorder.again) == (1, [])
    launched(kernel, other, number=9, scale=2.5)
    [(grid, arguments)] = recorder.again
    assert recorder.compiled == 1 and grid == (4, 1, 1)
    assert arguments[0] is other and arguments[1:] == (9, 2.5, None, 128), "constants, but no options"


@pytest.mark.parametrize(
    "change",
    [
        dict(x=torch.zeros(9)[1:]),
        dict(x=torch.zeros(8, dtype=torch.bfloat16)),
        dict(number=1),
        dict(number=16),
        dict(number=2**31 + 1),
        dict(number=2**63 + 1),
        dict(bias=torch.zeros(8)),
        dict(BLOCK=64),
        dict(num_warps=8),
    ],
    ids=str,
)
def test_what_triton_compiles_anew_for_is_not_taken_for_the_same(change):
    recorder, x = Recorder(), torch.zeros(8)
    kernel = Relaunched(recorder)
    launched(kernel, x)
    launched(kernel, **{"x": x} | change)
    assert (recorder.compiled, recorder.again) == (2, [])


def test_arguments_that_no_kernel_takes_are_refused():
    with pytest.raises(TypeError, match="no argument of a kernel: 'text', a str"):
        launched(Relaunched(Recorder()), torch.zeros(8), bias="text")
