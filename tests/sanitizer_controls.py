"""Racecheck may report a race in this kernel, which has none: a control of sanitize.py."""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl


@gluon.jit
def _first(out, value):
    layout: gl.constexpr = gl.BlockedLayout([1], [32], [8], [0])
    at = gl.arange(0, 256, layout)
    gl.store(out + at, gl.full([256], 0.0, gl.float32, layout) + value)


@gluon.jit
def _second(out, value):
    layout: gl.constexpr = gl.BlockedLayout([1], [32], [1], [0])
    at = gl.arange(0, 32, layout)
    gl.store(out + 256 + at, gl.full([32], 1.0, gl.float32, layout) + value)


@gluon.jit(repr=lambda _: "lce_control_two_partitions", do_not_specialize=["value"])
def two_partitions(out, value):
    """Writes ``out [programs, 2, 256]``: of each program a row by 8 warps, and a part of the other by one."""
    own = out + gl.program_id(0) * 512
    gl.warp_specialize([(_first, (own, value)), (_second, (own, value))], [1], [40])
