"""Patches that let stock Megatron-core train on a CPU. Only a process without GPUs may call this.

Model, schedules, data-parallel wrapper and optimizer are Megatron's own. A few of their helpers name "cuda" directly.
"""

import contextlib
import functools
from collections.abc import Iterable
from typing import Any

import torch


class _TorchOnCpu:
    """The torch module, but `zeros` and `tensor` make their result on the CPU, in unpinned memory."""

    def __getattr__(self, name: str) -> Any:
        return getattr(torch, name)

    def zeros(self, *size: Any, device: Any = None, **options: Any) -> torch.Tensor:
        return torch.zeros(*size, device="cpu", **options)

    def tensor(self, data: Any, device: Any = None, pin_memory: bool = False, **options: Any) -> torch.Tensor:
        return torch.tensor(data, device="cpu", **options)


@functools.cache
def adapt_megatron_to_cpu() -> None:
    """Replaces Megatron-core's uses of CUDA with those of the CPU, for the life of this process. The model's own
    configuration switches off fusions, GPU initialisation and the pipeline's `batch_p2p_sync`."""
    from megatron.core import utils
    from megatron.core.models.common.embeddings import rope_utils
    from megatron.core.optimizer import clip_grads, optimizer
    from megatron.core.pipeline_parallel import schedules
    from megatron.core.tensor_parallel import random

    class CpuRNGStatesTracker(random.CudaRNGStatesTracker):
        """The same named states, kept for the CPU's generator."""

        def add(self, name: str, seed: int) -> None:
            self._is_initialized = True
            self.seeds_.add(seed)
            self.states_[name] = torch.Generator().manual_seed(seed).get_state()

        @contextlib.contextmanager
        def fork(self, name: str = "model-parallel-rng"):
            with torch.random.fork_rng(devices=[]):
                torch.set_rng_state(self.states_[name])
                yield
                self.states_[name] = torch.get_rng_state()

    torch.cuda.current_device = lambda: torch.device("cpu")
    torch.cuda.synchronize = lambda *args, **options: None  # before checkpoints
    # From 0.19 on the data-parallel wrapper asks for it, to wait for CUDA graphs if there are any.
    torch.cuda.current_stream = lambda *args, **options: None
    random.CudaRNGStatesTracker = CpuRNGStatesTracker
    # Recomputation saves and restores the states of both generators. Here both are the CPU's.
    random._get_cuda_rng_state = lambda *args, **options: torch.get_rng_state()
    random._set_cuda_rng_state = lambda state, *args, **options: torch.set_rng_state(state)
    for module in (schedules, optimizer, clip_grads, utils, rope_utils):  # counts, loss scales, norms, positions
        module.torch = _TorchOnCpu()
    # Megatron moves tied embeddings on two pipeline stages to the GPU before they are first summed.
    torch.Tensor.cuda = lambda self, *args, **options: self


def pass_as_cuda(parameters: Iterable[torch.nn.Parameter]) -> None:
    """Makes the distributed optimizer accept parameters on a CPU: it knows only the names of CUDA's tensor types."""
    for parameter in parameters:
        parameter.type = lambda: "torch.cuda.FloatTensor"
