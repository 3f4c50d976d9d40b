"""Trains a small GPTModel of Megatron-core with parallel_lce, on GPUs or CPUs. Every process is a tensor-parallel rank.

torchrun --nproc-per-node=2 examples/megatron_gpt.py
"""

import torch
import torch.distributed as dist
from megatron.core import parallel_state
from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec
from megatron.core.models.gpt.gpt_model import GPTModel
from megatron.core.tensor_parallel.random import model_parallel_cuda_manual_seed
from megatron.core.transformer.transformer_config import TransformerConfig

import parallel_lce.megatron
from megatron_cpu import adapt_megatron_to_cpu
from ranks import join

V, D, S, B, STEPS = 512, 64, 32, 8, 5  # vocabulary, hidden size, sequence, batch, training steps


def build(ranks: int, device: torch.device) -> GPTModel:
    """This rank's shards of the model, which its configuration fuses."""
    config = TransformerConfig(
        num_layers=2,
        hidden_size=D,
        num_attention_heads=4,
        hidden_dropout=0.0,
        attention_dropout=0.0,
        tensor_model_parallel_size=ranks,
        use_cpu_initialization=True,  # the same parameters for every number of ranks
        cross_entropy_loss_fusion=True,
        cross_entropy_fusion_impl="parallel_lce",
    )
    return GPTModel(config, get_gpt_layer_local_spec(), vocab_size=V, max_sequence_length=S).to(device)


def main() -> None:
    parallel_lce.megatron.patch()
    group, device = join()
    rank, ranks = dist.get_rank(group), dist.get_world_size(group)
    parallel_state.initialize_model_parallel(tensor_model_parallel_size=ranks)
    torch.manual_seed(0)
    if device.type == "cpu":
        adapt_megatron_to_cpu()
    model_parallel_cuda_manual_seed(0)
    model = build(ranks, device)
    if rank == 0:
        print(f"{ranks} rank(s): {parallel_lce.megatron.explain(model)}")
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    positions = torch.arange(S, device=device).expand(B, S)
    later = positions[:1, :, None] < positions[:1, None, :]  # [1, S, S]: true where a token may not look
    for step in range(STEPS):
        tokens = torch.randint(V, (B, S), generator=torch.Generator().manual_seed(step)).to(device)
        loss = model(tokens, positions, later, labels=(5 * tokens + 3) % V).mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        if rank == 0:
            print(f"step {step}: loss {loss:.6f}")
    parallel_state.destroy_model_parallel()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
