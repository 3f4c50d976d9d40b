"""Updates a policy's vocabulary-sharded output layer by a clipped policy gradient with an entropy bonus.

python examples/policy_gradient.py
torchrun --nproc-per-node=2 examples/policy_gradient.py
"""

import torch
import torch.distributed as dist
from torch import nn

from parallel_lce import token_loss, token_statistics
from ranks import join

V, D, N, STEPS = 512, 64, 256, 5  # vocabulary, hidden size, tokens, updates


def policy_loss(statistics, old, advantage):
    """PPO's clipped objective with an entropy bonus, and metrics. All tensors are [R], of a block of tokens."""
    ratio = (statistics.target_log_prob - old).exp()
    gain = torch.minimum(ratio * advantage, ratio.clamp(0.8, 1.2) * advantage)
    return -gain - 0.01 * statistics.entropy, {"clipped": (ratio - 1).abs() > 0.2, "entropy": statistics.entropy}


def main() -> None:
    group, device = join()
    rank, size = dist.get_rank(group), dist.get_world_size(group)
    torch.manual_seed(0)  # every rank makes the same tensors: hidden states, weight, sampled tokens, advantages
    hidden, whole = torch.randn(N, D).to(device), (torch.randn(V, D) * D**-0.5).to(device)
    tokens, advantage = torch.randint(V, (N,)).to(device), torch.randn(N).to(device)
    shard = nn.Parameter(whole.chunk(size)[rank].clone())  # [V/P, D]: this rank's rows of the output layer's weight
    optimizer, options = torch.optim.SGD([shard], lr=5.0), dict(process_group=group, vocab_size=V)
    with torch.no_grad():  # log-probabilities by the policy that sampled the tokens
        old = token_statistics(hidden, shard, tokens, **options).target_log_prob
    for step in range(STEPS):
        asked = dict(entropy=True, reduction="mean")
        loss, metrics = token_loss(hidden, shard, tokens, policy_loss, old, advantage, **asked, **options)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        if rank == 0:
            means = {name: f"{metric.float().mean():.6f}" for name, metric in metrics.items()}
            print(f"step {step}: loss {loss:.6f}, {means}")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
