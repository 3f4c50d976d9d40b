"""What Megatron-core's schedules, optimizer and recomputation need on a CPU, beyond what its model does.

Only a training process without GPUs calls this. The optimizer, the data-parallel wrapper and the schedules are
Megatron's own; a few of their helpers ask for "cuda" by name.
"""

from collections.abc import Iterable

import torch


class _TorchOnCpu:
    """The torch module, with the tensors that are asked for on "cuda" made on the CPU."""

    def __getattr__(self, name: str) -> object:
        return getattr(torch, name)

    def zeros(self, *size: object, device: object = None, **options: object) -> torch.Tensor:
        return torch.zeros(*size, device="cpu", **options)

    def tensor(self, data: object, device: object = None, **options: object) -> torch.Tensor:
        return torch.tensor(data, device="cpu", **options)


def adapt_training_to_cpu() -> None:
    """Makes them run on a CPU, for the life of this process."""
    from megatron.core import utils
    from megatron.core.optimizer import clip_grads, optimizer
    from megatron.core.pipeline_parallel import schedules
    from megatron.core.tensor_parallel import random

    for module in (schedules, optimizer, clip_grads, utils):  # counters of tokens, loss scales, norms
        module.torch = _TorchOnCpu()
    # Recomputation saves the generators' states; the CPU's is saved as such already.
    random._get_cuda_rng_state = lambda *args, **options: torch.get_rng_state()
    random._set_cuda_rng_state = lambda state, *args, **options: torch.set_rng_state(state)
    # Tied embeddings on two pipeline stages are moved to the GPU before their first exchange.
    torch.Tensor.cuda = lambda self, *args, **options: self


def pass_as_cuda(parameters: Iterable[torch.nn.Parameter]) -> None:
    """The distributed optimizer takes a parameter by the name of its type, and knows the names of CUDA's alone."""
    for parameter in parameters:
        parameter.type = lambda: "torch.cuda.FloatTensor"
