"""Updates a policy's vocabulary-sharded output layer by group-relative policy optimization (GRPO).

python examples/grpo.py
torchrun --nproc-per-node=2 examples/grpo.py
"""

import torch
import torch.distributed as dist
from torch import Tensor, nn

from parallel_lce import rl
from ranks import join

V, D, STEPS = 512, 64, 5  # vocabulary, hidden size, updates
PROMPTS, GROUP, LENGTH = 4, 8, 16  # prompts, answers to each prompt, tokens of an answer
TEMPERATURE, PENALTY = 0.9, 0.04  # sampling temperature, weight of the divergence from the reference policy


def build() -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Hidden states [answers, LENGTH, D], the whole weight [V, D], tokens [answers, LENGTH], rewards [answers]."""
    torch.manual_seed(0)  # every rank makes the same tensors
    answers = PROMPTS * GROUP
    hidden, weight = torch.randn(answers, LENGTH, D), torch.randn(V, D) * D**-0.5
    return hidden, weight, torch.randint(V, (answers, LENGTH)), torch.randn(answers)


def grpo_loss(log_probs: Tensor, old: Tensor, rewards: Tensor) -> Tensor:
    """The clipped objective with group-relative advantages, plus the divergence from the reference policy.

    ``log_probs`` and ``old`` are [answers, LENGTH], ``rewards`` [answers]. The old policy is also the reference."""
    grouped = rewards.view(PROMPTS, GROUP)
    advantage = (grouped - grouped.mean(1, keepdim=True)) / (grouped.std(1, keepdim=True) + 1e-4)
    advantage, ratio = advantage.view(-1, 1), (log_probs - old).exp()
    gain = torch.minimum(ratio * advantage, ratio.clamp(0.8, 1.2) * advantage)
    divergence = (old - log_probs).exp() - (old - log_probs) - 1
    return (PENALTY * divergence - gain).mean()


def main() -> None:
    group, device = join()
    rank, size = dist.get_rank(group), dist.get_world_size(group)
    hidden, whole, tokens, rewards = (x.to(device) for x in build())  # the same on every tensor-parallel rank
    shard = nn.Parameter(whole.chunk(size)[rank].clone())  # [V/P, D]: this rank's rows of the output layer's weight
    optimizer, old = torch.optim.SGD([shard], lr=5.0), None
    for step in range(STEPS):
        log_probs, entropies = rl.linear_cross_entropy(
            hidden, shard, tokens, TEMPERATURE, dist_process_group=group, vocab_size=V
        )
        log_probs = log_probs.view(tokens.shape)
        old = log_probs.detach() if old is None else old
        loss = grpo_loss(log_probs, old, rewards)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        if rank == 0:
            print(f"step {step}: loss {loss:.6f}, entropy {entropies.mean():.6f}")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
