"""The default of ``logits_budget``, which follows the device."""

from __future__ import annotations

import torch

from parallel_lce.plan import DEFAULT_BUDGET

# Share of a GPU's memory that a call may use for tensors of the logits' shape, and the steps in which it is given: GPUs
# of one kind may differ by a few MiB, and all ranks must have the same budget.
_SHARE, _STEP = 32, 256 << 20


def default_budget(device: torch.device) -> int:
    """Bytes per rank and call for ``logits_budget=None``.

    On a GPU a thirty-second of its memory, in whole 256 MiB: 4.25 GiB of an H200's 140 GiB, 2.25 GiB of an 80-GB GPU's
    79. Elsewhere 1 GiB.
    """
    if device.type != "cuda" or not torch.cuda.is_available():
        return DEFAULT_BUDGET
    total = torch.cuda.get_device_properties(device).total_memory
    return max(_STEP, total // _SHARE // _STEP * _STEP)


# torch.compile calls it while tracing, as parallel_lce.backends says of _name.
default_budget._dynamo_marked_constant = True
