"""Updates a vocabulary-sharded output layer by direct preference optimization (DPO).

python examples/dpo.py
torchrun --nproc-per-node=2 examples/dpo.py
"""

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn

from parallel_lce import token_statistics
from ranks import join

V, D, STEPS = 512, 64, 5  # vocabulary, hidden size, updates
PAIRS, LENGTH, BETA = 8, 16, 0.1  # pairs of answers, tokens of prompt and answer, strength of the preference


def build() -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Hidden states [2, PAIRS, LENGTH, D]; tokens and the mask of answer tokens [2, PAIRS, LENGTH]; the whole weight
    [V, D]. Chosen answers come first, then rejected ones."""
    torch.manual_seed(0)  # every rank makes the same tensors
    shape = 2, PAIRS, LENGTH
    mask = torch.arange(LENGTH) >= torch.randint(1, LENGTH, (2, PAIRS, 1))  # the tokens before belong to the prompt
    return torch.randn(*shape, D), torch.randint(V, shape), mask, torch.randn(V, D) * D**-0.5


def dpo_loss(log_probs: Tensor, reference: Tensor) -> Tensor:
    """The loss of log-probabilities [2, PAIRS] by the policy, and by the reference. Chosen answers come first."""
    chosen, rejected = log_probs - reference
    return -F.logsigmoid(BETA * (chosen - rejected)).mean()


def main() -> None:
    group, device = join()
    rank, size = dist.get_rank(group), dist.get_world_size(group)
    hidden, tokens, mask, whole = (x.to(device) for x in build())  # the same on every tensor-parallel rank
    shard = nn.Parameter(whole.chunk(size)[rank].clone())  # [V/P, D]: this rank's rows of the output layer's weight
    optimizer, reference, count = torch.optim.SGD([shard], lr=5.0), None, int(mask.sum())
    for step in range(STEPS):
        # The call works on the answer tokens alone.
        statistics = token_statistics(
            hidden, shard, tokens, process_group=group, vocab_size=V, mask=mask, counted_tokens=count
        )
        log_probs = statistics.target_log_prob.sum(-1)  # [2, PAIRS]
        reference = log_probs.detach() if reference is None else reference
        loss = dpo_loss(log_probs, reference)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        if rank == 0:
            print(f"step {step}: loss {loss:.6f}")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
