"""Updates a policy's vocabulary-sharded output layer by a clipped policy gradient with an entropy bonus.

python examples/policy_gradient.py
torchrun --nproc-per-node=2 examples/policy_gradient.py
"""

import torch
import torch.distributed as dist
from torch import Tensor, nn

from parallel_lce import entropy, log_prob, token_statistics
from ranks import join

V, D, N, STEPS = 512, 64, 256, 5  # vocabulary, hidden size, tokens, updates


def build() -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Hidden states [N, D], the whole weight [V, D], sampled tokens [N] and their advantages [N]."""
    torch.manual_seed(0)  # every rank makes the same tensors
    return torch.randn(N, D), torch.randn(V, D) * D**-0.5, torch.randint(V, (N,)), torch.randn(N)


def policy_loss(log_probs: Tensor, old: Tensor, advantage: Tensor, entropies: Tensor) -> Tensor:
    """PPO's clipped objective, with an entropy bonus. All arguments are [N]."""
    ratio = (log_probs - old).exp()
    gain = torch.minimum(ratio * advantage, ratio.clamp(0.8, 1.2) * advantage)
    return -gain.mean() - 0.01 * entropies.mean()


def main() -> None:
    group, device = join()
    rank, size = dist.get_rank(group), dist.get_world_size(group)
    hidden, whole, tokens, advantage = (x.to(device) for x in build())  # the same on every tensor-parallel rank
    shard = nn.Parameter(whole.chunk(size)[rank].clone())  # [V/P, D]: this rank's rows of the output layer's weight
    optimizer = torch.optim.SGD([shard], lr=5.0)
    with torch.no_grad():  # log-probabilities by the policy that sampled the tokens
        old = log_prob(token_statistics(hidden, shard, tokens, process_group=group, vocab_size=V))
    for step in range(STEPS):
        statistics = token_statistics(hidden, shard, tokens, process_group=group, vocab_size=V, entropy=True)
        log_probs, entropies = log_prob(statistics), entropy(statistics)  # [N], the same on every rank
        loss = policy_loss(log_probs, old, advantage, entropies)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        if rank == 0:
            means = f"log-probability {log_probs.mean():.6f}, entropy {entropies.mean():.6f}"
            print(f"step {step}: loss {loss:.6f}, {means}")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
