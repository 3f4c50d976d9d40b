"""The output layer's inputs and snapshots of them; the peak memory of output layer and loss."""

import os
from pathlib import Path
from typing import Any

import torch
from megatron.core.models.gpt.gpt_model import GPTModel
from torch.distributed._tools.mem_tracker import MemTracker

from training.batches import Batch


@torch.no_grad()
def last_hidden(gpt: GPTModel, batch: Batch) -> torch.Tensor:
    """The hidden states [s/P, b, h] that the output layer projects. `gpt` is the whole model, not a pipeline stage."""
    outputs = []
    hook = gpt.decoder.register_forward_hook(lambda module, args, output: outputs.append(output))
    gpt(batch.tokens, batch.position_ids, None, labels=batch.labels)
    hook.remove()
    return outputs.pop().detach()


def write_snapshot(gpt: GPTModel, batches: list[Batch], tokens: int, path: Path) -> None:
    """Writes a snapshot: the output layer's inputs of the first N = `tokens` tokens of the batches, and its weight.

    Three tensors: the hidden states `hidden [N, D]` and the output weight `weight [V, D]`, both rounded to bf16, and
    the next tokens `target [N]` int64.
    """
    from safetensors.torch import save_file

    hidden = torch.cat([last_hidden(gpt, batch).transpose(0, 1).flatten(0, 1).bfloat16().cpu() for batch in batches])
    owner: Any = gpt.embedding.word_embeddings if gpt.share_embeddings_and_output_weights else gpt.output_layer
    target = torch.cat([batch.labels.flatten().cpu() for batch in batches])
    snapshot = {"hidden": hidden[:tokens], "weight": owner.weight.detach().bfloat16().cpu(), "target": target[:tokens]}
    unfinished = path.with_suffix(".unfinished")  # a file of the right name is whole
    save_file({name: tensor.contiguous() for name, tensor in snapshot.items()}, unfinished)
    os.replace(unfinished, path)


def loss_peak_bytes(gpt: GPTModel, batch: Batch) -> int:
    """Bytes that the output layer and the loss add on this rank, at the peak of one forward and backward, within
    `no_sync` of the data-parallel wrapper of `gpt`, the whole model.

    The last hidden states, as a leaf tensor, replace the decoder's output, so that only the output layer and the loss
    run. The peak includes the gradient of the hidden states. The weight's is added to its `main_grad`, which exists
    before.
    """
    hidden = last_hidden(gpt, batch).clone().requires_grad_()
    gpt.zero_grad(set_to_none=True)
    gpt.decoder.forward = lambda hidden_states, **options: hidden_states  # pyright: ignore[reportAttributeAccessIssue]

    def forward_backward() -> None:
        per_token = gpt(batch.tokens, batch.position_ids, None, decoder_input=hidden, labels=batch.labels)
        batch.sum_loss(per_token).backward()

    try:
        if hidden.is_cuda:
            before = torch.cuda.memory_allocated()
            torch.cuda.reset_peak_memory_stats()
            forward_backward()
            return torch.cuda.max_memory_allocated() - before
        tracker = MemTracker()
        # It must know the existing tensors, else it counts them as new when an operator returns a view of one.
        gradients = [p.main_grad for p in gpt.parameters()]  # pyright: ignore[reportAttributeAccessIssue]
        tracker.track_external(gpt, hidden, *gradients, *vars(batch).values())
        before = tracker.get_tracker_snapshot("current")
        with tracker:
            forward_backward()
        peak = tracker.get_tracker_snapshot("peak")
        return sum(each["Total"] for each in peak.values()) - sum(each["Total"] for each in before.values())
    finally:
        del gpt.decoder.forward
        gpt.zero_grad(set_to_none=True)
