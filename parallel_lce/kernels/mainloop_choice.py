"""The choice of a tile and of its mainloop. A mainloop for another GPU is a file beside this one, a tile in ``_TILES``,
and an import in :func:`mainloop_of`. A mainloop has

    projection     the kernel, a ``Relaunched``
    operands       the arguments of a launch that only this mainloop takes so: descriptors or pointers of ``x``,
                   ``weight`` and ``out``; strides, which follow the common arguments; and constants. ``tma``: whether
                   TMA can address ``x`` and ``weight``.
    descriptor     makes a TMA descriptor
"""

from __future__ import annotations

import functools
import warnings
from types import ModuleType

import torch
import triton

from parallel_lce.kernels import mainloop_plain
from parallel_lce.kernels.device import generation, interpreted
from parallel_lce.kernels.tuning import MEASURED, MODEST_TILES, Tile

# Tiles of 16-bit operands that TMA loads, by the device's generation. A tile names its mainloop.
_TILES = {9: MEASURED.hopper_tile, 10: MEASURED.tma_tile}
# Oldest and newest Triton whose Gluon runs the mainloop for Hopper.
_GLUON = (3, 6), (3, 9)


def mainloop_of(name: str) -> ModuleType:
    if name == "hopper":
        from parallel_lce.kernels import mainloop_hopper  # not every Triton can import it

        return mainloop_hopper
    return mainloop_plain


def tile_of(weight: torch.Tensor, tma: bool) -> Tile:
    """The tile for operands of the weight's dtype on its device, loaded by TMA or by pointers.

    The tile does not depend on the epilogue: the backward reads partials by the forward's windows.
    """
    tile = _TILES.get(generation(weight.device)) if tma and weight.element_size() == 2 else None
    if tile is None:
        return MODEST_TILES[weight.element_size()]
    return tile if tile.mainloop != "hopper" or _has_gluon() else MEASURED.tma_tile


@functools.cache
def _has_gluon() -> bool:
    """Whether the mainloop for Hopper is tested with this Triton's Gluon, which is experimental. Warns if not, except
    in Triton's interpreter, which has no Gluon."""
    if interpreted():
        return False
    oldest, newest = _GLUON
    if oldest <= tuple(map(int, triton.__version__.split(".")[:2])) <= newest:
        try:
            mainloop_of("hopper")
            return True
        except (AttributeError, ImportError):
            pass
    first, last = (".".join(map(str, version)) for version in _GLUON)
    warnings.warn(
        f"Triton {triton.__version__}: parallel_lce runs its plain mainloop on this GPU, since the one for Hopper "
        f"needs the Gluon of Triton {first} to {last}. Results are the same up to rounding. The projection "
        "takes up to 10 % longer.",
        stacklevel=2,
    )
    return False
