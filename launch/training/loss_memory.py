"""Measures the peak memory of the output layer and the loss, forward and backward, the same way for either loss."""

from collections.abc import Callable

import torch
from megatron.core.models.gpt.gpt_model import GPTModel
from torch.distributed._tools.mem_tracker import MemTracker

from training.batches import Batch


def loss_peak_bytes(model: GPTModel, batch: Batch) -> int:
    """Bytes that the output layer and the loss add on this rank, at the peak of one forward and backward.

    `model` is the whole model, not one stage of a pipeline. It must run within `no_sync` of its data-parallel wrapper.

    The model runs once up to its last hidden states [s/P, b, h]. In the measured forward and backward these replace
    the decoder's output, as a leaf tensor, so that only the output layer and the loss run. The peak includes the
    gradient of the hidden states. The weight's gradient is added to its `main_grad`, which exists before. On a GPU
    PyTorch's allocator counts the bytes, on a CPU PyTorch's tracker of storages.
    """
    outputs = []
    hook = model.decoder.register_forward_hook(lambda module, args, output: outputs.append(output))
    with torch.no_grad():
        model(batch.tokens, batch.position_ids, None, labels=batch.labels)
    hook.remove()
    hidden = outputs.pop().detach().clone().requires_grad_()
    model.zero_grad(set_to_none=True)
    model.decoder.forward = lambda hidden_states, **options: hidden_states  # pyright: ignore[reportAttributeAccessIssue]

    def forward_backward() -> None:
        per_token = model(batch.tokens, batch.position_ids, None, decoder_input=hidden, labels=batch.labels)
        batch.sum_loss(per_token).backward()

    try:
        if hidden.is_cuda:
            return _cuda_peak_bytes(forward_backward)
        return _cpu_peak_bytes(forward_backward, model, hidden, batch)
    finally:
        del model.decoder.forward
        model.zero_grad(set_to_none=True)


def _cuda_peak_bytes(run: Callable[[], None]) -> int:
    torch.cuda.synchronize()
    before = torch.cuda.memory_allocated()
    torch.cuda.reset_peak_memory_stats()
    run()
    torch.cuda.synchronize()
    return torch.cuda.max_memory_allocated() - before


def _cpu_peak_bytes(run: Callable[[], None], model: GPTModel, hidden: torch.Tensor, batch: Batch) -> int:
    tracker = MemTracker()
    # The tracker must know the existing tensors, else it counts them as new when an operator returns a view of one.
    gradients = [p.main_grad for p in model.parameters()]  # pyright: ignore[reportAttributeAccessIssue]
    tracker.track_external(model, hidden, *gradients, *vars(batch).values())
    before = _total(tracker, "current")
    with tracker:
        run()
    return _total(tracker, "peak") - before


def _total(tracker: MemTracker, moment: str) -> int:
    return sum(snapshot["Total"] for snapshot in tracker.get_tracker_snapshot(moment).values())
