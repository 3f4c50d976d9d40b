"""torchtitan 0.3.0 itself: where to import it from, and a region of its code with its own losses and with ours."""

import importlib
import re
from contextlib import contextmanager, nullcontext
from pathlib import Path

from releases import ROOT, folder_of

# Beside torch: all that its trainer imports.
OTHERS = ("spmd_types==0.2.3", "tyro==1.0.17", "docstring_parser==0.18.0", "typeguard==4.6.1", "torchdata==0.11.0")
PAGE = (ROOT / "docs" / "torchtitan.md").read_text()
BLOCKS = "".join(re.findall(r"^```python\n(.*?)^```$", PAGE, re.M | re.S))


def release() -> Path:
    """The folder to import the release from."""
    return folder_of("torchtitan", "0.3.0", others=OTHERS)


@contextmanager
def released(mesh=None, dtensors: bool = False):
    """Yields parallel_lce.torchtitan, with the release's losses. ``mesh``: that of plain tensors, with a "tp"."""
    regions = importlib.import_module("torchtitan.distributed.spmd_types")
    utils = importlib.import_module("torchtitan.distributed.utils")
    utils.set_spmd_backend("full_dtensor" if dtensors else "spmd_types")
    with regions.set_current_spmd_mesh(mesh) if mesh is not None else nullcontext():
        yield importlib.import_module("parallel_lce.torchtitan")
