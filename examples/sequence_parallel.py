"""Trains a small model whose output layer is vocabulary-sharded, with sequence parallelism, in plain PyTorch.

python examples/sequence_parallel.py
torchrun --nproc-per-node=2 examples/sequence_parallel.py
"""

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn

from parallel_lce import linear_cross_entropy
from ranks import join

V, D, S, B, STEPS = 512, 64, 32, 8, 30  # vocabulary, hidden size, sequence, batch, training steps


def build() -> tuple[nn.Module, Tensor]:
    """The model up to its last hidden states, and the whole weight [V, D] of its output layer."""
    torch.manual_seed(0)  # every rank makes the same parameters
    body = nn.Sequential(nn.Embedding(V, D), nn.Linear(D, D), nn.GELU(), nn.RMSNorm(D))
    return body, torch.randn(V, D) * D**-0.5


def batch(step: int) -> tuple[Tensor, Tensor]:
    """Tokens and targets [S, B] of the whole sequence. A target is a function of its token, which the model learns."""
    tokens = torch.randint(V, (S, B), generator=torch.Generator().manual_seed(step))
    return tokens, (5 * tokens + 3) % V


def main() -> None:
    group, device = join()
    rank, size = dist.get_rank(group), dist.get_world_size(group)
    body, whole = build()
    body, whole = body.to(device), whole.to(device)
    shard = nn.Parameter(whole.chunk(size)[rank].clone())  # [V/P, D]: this rank's rows of the output layer's weight
    optimizer = torch.optim.AdamW([*body.parameters(), shard], lr=1e-2)
    for step in range(STEPS):
        tokens, target = (x.to(device) for x in batch(step))
        hidden = body(tokens.chunk(size)[rank])  # [S/P, B, D]: this rank's part of the sequence
        loss = linear_cross_entropy(hidden, shard, target, process_group=group, sequence_parallel=True, vocab_size=V)
        if step == 0:
            logits = F.linear(body(tokens), whole)  # [S, B, V], for comparison: the fused loss makes no logits
            unsharded = F.cross_entropy(logits.flatten(0, 1), target.flatten())
            if rank == 0:
                print(f"first loss, {size} rank(s): {loss:.6f}, unsharded: {unsharded:.6f}")
        optimizer.zero_grad()
        loss.backward()
        for parameter in body.parameters():  # each rank has the gradient from its part of the sequence
            dist.all_reduce(parameter.grad, group=group)
        optimizer.step()
        if rank == 0:
            print(f"step {step}: loss {loss:.6f}")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
