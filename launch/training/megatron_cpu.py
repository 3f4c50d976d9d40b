"""What stock Megatron-core needs to train on a CPU. Only the training process calls this, and only without GPUs."""

import contextlib

import torch


def adapt_megatron_to_cpu() -> None:
    """Makes Megatron-core's two remaining assumptions about CUDA hold on a CPU, for the life of this process.

    Its modules ask `torch.cuda.current_device()` where to put a tensor, and its tracker of random-number states
    forks the GPU's generator (for dropout). Fusions and GPU initialisation are switched off in the model's own
    configuration, not here.
    """
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
    random.CudaRNGStatesTracker = CpuRNGStatesTracker
