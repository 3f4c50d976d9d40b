"""Kernels without an error, of which compute-sanitizer may report one: controls of sanitize.py."""

import triton
import triton.language as tl
from triton.experimental import gluon
from triton.experimental.gluon import language as gl


@gluon.jit
def _first(out, value):
    layout: gl.constexpr = gl.BlockedLayout([1], [32], [4], [0])
    at = gl.arange(0, 128, layout)
    gl.store(out + at, gl.full([128], 0.0, gl.float32, layout) + value)


@gluon.jit
def _second(out, value):
    layout: gl.constexpr = gl.BlockedLayout([1], [32], [1], [0])
    at = gl.arange(0, 32, layout)
    gl.store(out + 128 + at, gl.full([32], 1.0, gl.float32, layout) + value)


@gluon.jit(repr=lambda _: "lce_control_two_partitions", do_not_specialize=["value"])
def two_partitions(out, value):
    gl.warp_specialize([(_first, (out, value)), (_second, (out, value))], [1], [40])


@triton.jit(repr=lambda _: "lce_control_doubled")
def doubled(values, BLOCK: tl.constexpr):
    at = values + tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    tl.store(at, 2 * tl.load(at))
