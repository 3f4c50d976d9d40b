"""Distils a teacher's vocabulary-sharded output layer into a student's of a smaller hidden size.

python examples/distillation.py
torchrun --nproc-per-node=2 examples/distillation.py
"""

import torch
import torch.distributed as dist
from torch import Tensor, nn

from parallel_lce.distillation import divergence
from ranks import join

N, V, D, E, STEPS = 128, 512, 32, 64, 5  # tokens, vocabulary, hidden sizes of student and teacher, updates
BETA, TEMPERATURE = 0.5, 2.0


def build() -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Student: hidden states [N, D] and weight [V, D]. Teacher: hidden states [N, E] and weight [V, E]."""
    torch.manual_seed(0)  # every rank makes the same tensors
    student = torch.randn(N, D), torch.randn(V, D) * D**-0.5
    return *student, torch.randn(N, E), torch.randn(V, E) * E**-0.5


def main() -> None:
    group, device = join()
    rank, size = dist.get_rank(group), dist.get_world_size(group)
    hidden, whole, teacher_hidden, teacher = (x.to(device) for x in build())
    shard = nn.Parameter(whole.chunk(size)[rank].clone())  # [V/P, D]: this rank's rows of the student's weight
    teacher_shard = teacher.chunk(size)[rank]  # [V/P, E]: the teacher's rows of the same vocabulary entries
    optimizer = torch.optim.SGD([shard], lr=1000.0)
    for step in range(STEPS):
        loss = divergence(
            hidden,
            shard,
            teacher_hidden,
            teacher_shard,
            beta=BETA,
            temperature=TEMPERATURE,
            process_group=group,
            vocab_size=V,
        )
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        if rank == 0:
            print(f"step {step}: loss {loss:.6f}")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
