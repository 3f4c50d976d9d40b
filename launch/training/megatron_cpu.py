"""What stock Megatron-core needs to train on a CPU. Only a process without GPUs calls this.

Model, schedules, data-parallel wrapper and optimizer are Megatron's own; a few of their helpers ask for "cuda" by name.
"""

import contextlib
import functools
from collections.abc import Iterable

import torch


class _TorchOnCpu:
    """The torch module, with the tensors that are asked for on "cuda", or in its pinned memory, made on the CPU."""

    def __getattr__(self, name: str) -> object:
        return getattr(torch, name)

    def zeros(self, *size: object, device: object = None, **options: object) -> torch.Tensor:
        return torch.zeros(*size, device="cpu", **options)

    def tensor(self, data: object, device: object = None, pin_memory: bool = False, **options: object) -> torch.Tensor:
        return torch.tensor(data, device="cpu", **options)


@functools.cache
def adapt_megatron_to_cpu() -> None:
    """Makes Megatron-core's remaining assumptions about CUDA hold on a CPU, for the life of this process.

    Its modules ask `torch.cuda.current_device()` where to put a tensor, and its tracker of random-number states
    forks the GPU's generator (for dropout). Fusions and GPU initialisation are switched off in the model's own
    configuration, not here, and so is the pipeline's `batch_p2p_sync`.
    """
    from megatron.core import utils
    from megatron.core.models.common.embeddings import rope_utils
    from megatron.core.optimizer import clip_grads, optimizer
    from megatron.core.pipeline_parallel import schedules
    from megatron.core.tensor_parallel import random

    class CpuRNGStatesTracker(random.CudaRNGStatesTracker):
        """The same named states, kept for the CPU's generator."""

        def add(self, name: str, seed: int) -> None:
            if name in self.states_:
                raise ValueError(f"random-number state {name!r} exists already")
            self._is_initialized = True
            self.seeds_.add(seed)
            self.states_[name] = torch.Generator().manual_seed(seed).get_state()

        @contextlib.contextmanager
        def fork(self, name: str = "model-parallel-rng"):
            outer = torch.get_rng_state()
            torch.set_rng_state(self.states_[name])
            try:
                yield
            finally:
                self.states_[name] = torch.get_rng_state()
                torch.set_rng_state(outer)

    torch.cuda.current_device = lambda: torch.device("cpu")
    torch.cuda.synchronize = lambda *args, **options: None  # before checkpoints
    random.CudaRNGStatesTracker = CpuRNGStatesTracker
    # Recomputation saves the generators' states; the CPU's is saved as such already.
    random._get_cuda_rng_state = lambda *args, **options: torch.get_rng_state()
    random._set_cuda_rng_state = lambda state, *args, **options: torch.set_rng_state(state)
    for module in (schedules, optimizer, clip_grads, utils, rope_utils):  # counts, loss scales, norms, positions
        module.torch = _TorchOnCpu()
    # Tied embeddings on two pipeline stages are moved to the GPU before their first exchange.
    torch.Tensor.cuda = lambda self, *args, **options: self


def pass_as_cuda(parameters: Iterable[torch.nn.Parameter]) -> None:
    """The distributed optimizer takes a parameter by the name of its type, and knows the names of CUDA's alone."""
    for parameter in parameters:
        parameter.type = lambda: "torch.cuda.FloatTensor"
