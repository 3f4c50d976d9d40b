"""The peak memory of the output layer and the loss, forward and backward: measured, the same way for either loss."""

from collections.abc import Callable

import torch
from megatron.core.models.gpt.gpt_model import GPTModel
from torch.distributed._tools.mem_tracker import MemTracker

from training.batches import Batch


def loss_peak_bytes(model: GPTModel, batch: Batch) -> int:
    """Bytes that the output layer and the loss add on this rank, at the peak of one forward and backward.

    `model` is the whole model, not one stage of a pipeline, under Megatron's data-parallel wrapper's `no_sync`.
    The model runs once up to its last hidden states [s/P, b, h]. They then become a leaf that is handed to the model
    again in place of its decoder's work, so that the measured forward and backward hold the output layer and the
    loss alone, weight and input gradients included; the weight's is added to its `main_grad`, which exists before.
    Allocated tensors are counted: on a GPU by PyTorch's allocator, on a CPU by PyTorch's tracker of storages.
    """
    seen: list[torch.Tensor] = []
    hook = model.decoder.register_forward_hook(lambda module, args, hidden: seen.append(hidden))
    with torch.no_grad():
        model(batch.tokens, batch.position_ids, None, labels=batch.labels)
    hook.remove()
    hidden = seen.pop().detach().clone().requires_grad_()
    model.zero_grad(set_to_none=True)
    model.decoder.forward = lambda hidden_states, **options: hidden_states

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
    # What exists already is made known first: it would count as new when an operator returns a view of it.
    gradients = [p.main_grad for p in model.parameters()]
    tracker.track_external(model, hidden, *gradients, *vars(batch).values())
    before = _total(tracker, "current")
    with tracker:
        run()
    return _total(tracker, "peak") - before


def _total(tracker: MemTracker, moment: str) -> int:
    return sum(snapshot["Total"] for snapshot in tracker.get_tracker_snapshot(moment).values())
