"""Updates a policy's vocabulary-sharded output layer by group-relative policy optimization (GRPO).

python examples/grpo.py
torchrun --nproc-per-node=2 examples/grpo.py
"""

import torch
import torch.distributed as dist
from torch import nn

from parallel_lce import token_loss, token_statistics
from ranks import join

V, D, STEPS = 512, 64, 5  # vocabulary, hidden size, updates
PROMPTS, GROUP, LENGTH = 4, 8, 16  # prompts, answers to each prompt, tokens of an answer
TEMPERATURE, PENALTY = 0.9, 0.04  # sampling temperature, weight of the divergence from the reference policy


def grpo_loss(statistics, old, advantage):
    """The clipped objective, plus the divergence from the reference policy, the old one. All tensors are [R]."""
    difference = old - statistics.target_log_prob
    ratio = (-difference).exp()
    gain = torch.minimum(ratio * advantage, ratio.clamp(0.8, 1.2) * advantage)
    divergence = difference.exp() - difference - 1
    return PENALTY * divergence - gain, {"divergence": divergence, "entropy": statistics.entropy}


def main() -> None:
    group, device = join()
    rank, size = dist.get_rank(group), dist.get_world_size(group)
    torch.manual_seed(0)  # every rank makes the same tensors
    answers = PROMPTS * GROUP
    hidden, whole = torch.randn(answers, LENGTH, D).to(device), (torch.randn(V, D) * D**-0.5).to(device)
    tokens, rewards = torch.randint(V, (answers, LENGTH)).to(device), torch.randn(answers).view(PROMPTS, GROUP)
    advantage = (rewards - rewards.mean(1, keepdim=True)) / (rewards.std(1, keepdim=True) + 1e-4)
    advantage = advantage.view(answers, 1).expand(answers, LENGTH).to(device)  # one of each token
    shard = nn.Parameter(whole.chunk(size)[rank].clone())  # [V/P, D]: this rank's rows of the output layer's weight
    optimizer = torch.optim.SGD([shard], lr=5.0)
    options = dict(temperature=TEMPERATURE, process_group=group, vocab_size=V)
    with torch.no_grad():
        old = token_statistics(hidden, shard, tokens, **options).target_log_prob
    for step in range(STEPS):
        asked = dict(entropy=True, reduction="mean")
        loss, metrics = token_loss(hidden, shard, tokens, grpo_loss, old, advantage, **asked, **options)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        if rank == 0:
            print(f"step {step}: loss {loss:.6f}, entropy {metrics['entropy'].mean():.6f}")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
