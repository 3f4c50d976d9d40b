"""One training step, with Megatron-core's own schedule, data-parallel wrapper, gradient reduction and optimizer."""

from collections.abc import Callable, Iterator
from typing import Any

import torch
from megatron.core import parallel_state
from megatron.core.distributed import DistributedDataParallel, DistributedDataParallelConfig, finalize_model_grads
from megatron.core.optimizer import OptimizerConfig, get_megatron_optimizer
from megatron.core.pipeline_parallel import get_forward_backward_func
from megatron.core.transformer.module import Float16Module

from training.batches import Batch
from training.config import Config, TrainConfig
from training.megatron_cpu import pass_as_cuda
from training.model import build_model


class Stepper:
    """This rank's part of the model with its optimizer. A call trains one step."""

    def __init__(self, config: Config, device: torch.device):
        self.config, self.device = config, device
        train, parallel, bf16 = config.train, config.parallel, config.train.precision == "bf16"
        self.gpt = build_model(config, device)
        transformer = self.gpt.config
        ddp = DistributedDataParallelConfig(
            grad_reduce_in_fp32=True,
            overlap_grad_reduce=parallel.overlap_grad_reduce,
            use_distributed_optimizer=parallel.distributed_optimizer,
        )
        module = Float16Module(transformer, self.gpt) if bf16 else self.gpt
        self.model = DistributedDataParallel(transformer, ddp, module)
        if device.type == "cpu":
            pass_as_cuda(self.model.parameters())
        options = OptimizerConfig(
            optimizer="adam",
            lr=train.learning_rate,
            weight_decay=train.weight_decay,
            adam_eps=train.adam_eps,
            clip_grad=train.clip_grad,
            bf16=bf16,
            params_dtype=transformer.params_dtype,
            use_distributed_optimizer=parallel.distributed_optimizer,
        )
        self.optimizer = get_megatron_optimizer(options, [self.model], use_gloo_process_groups=False)
        self.forward_backward = get_forward_backward_func()
        transformer.finalize_model_grads_func = finalize_model_grads
        transformer.grad_scale_func = self.optimizer.scale_loss
        if parallel.overlap_grad_reduce:
            transformer.no_sync_func = self.model.no_sync
            transformer.grad_sync_func = self.model.start_grad_sync

    def __call__(self, batches: list[Batch], step: int, done: float) -> list[torch.Tensor]:
        """Trains on this rank's micro batches as step `step`, when this share of the training is done. The last
        pipeline stage returns each micro batch's [sum of losses, tokens]."""
        for group in self.optimizer.param_groups:
            group["lr"] = learning_rate(self.config.train, step, done)
            group["weight_decay"] = self.config.train.weight_decay * group.get("wd_mult", 1.0)  # 0 for norms
        self.model.zero_grad_buffer()
        self.optimizer.zero_grad()
        reports = self._run(batches, forward_only=False)
        self.optimizer.step()
        return reports

    def evaluate(self, batches: list[Batch]) -> float:
        """The mean loss, without training."""
        with torch.no_grad():
            return self.mean_loss(self._run(batches, forward_only=True))

    def _run(self, batches: list[Batch], forward_only: bool) -> list[torch.Tensor]:
        return self.forward_backward(
            forward_step_func=_forward,
            data_iterator=iter(batches),
            model=[self.model],
            num_microbatches=len(batches),
            seq_length=self.config.train.sequence,
            micro_batch_size=self.config.train.micro_batch,
            forward_only=forward_only,
        )

    def mean_loss(self, reports: list[torch.Tensor]) -> float:
        """The mean loss over the tokens of all micro batches and data-parallel ranks, the same on every rank.
        `reports` are the results of a step."""
        total = torch.zeros(2, dtype=torch.float64, device=self.device)  # sum of losses, number of tokens
        for report in reports:
            total += report
        torch.distributed.all_reduce(total, group=parallel_state.get_data_parallel_group())
        stages: Any = parallel_state.get_pipeline_model_parallel_group()
        torch.distributed.broadcast(total, src=parallel_state.get_pipeline_model_parallel_last_rank(), group=stages)
        loss, tokens = total.tolist()
        return loss / tokens


def learning_rate(train: TrainConfig, step: int, done: float) -> float:
    """Rises linearly over the warm-up, and falls linearly to `last_rate` as the share `done` of the training grows."""
    warm_up = min(1.0, (step + 1) / (train.warmup_steps + 1))  # the first step's is not 0
    return train.learning_rate * warm_up * (1 - (1 - train.last_rate) * done)


def _forward(batches: Iterator[Batch], model: torch.nn.Module) -> tuple[torch.Tensor, Callable]:
    """Runs a micro batch through this stage: hidden states [s, b, h], on the last stage losses of tokens [b, s]."""
    batch = next(batches)

    def sum_loss(per_token: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """The sum of the losses and the number of tokens. Megatron divides one by the other over the whole step."""
        loss, tokens = batch.sum_loss(per_token), batch.loss_mask.sum()
        return loss, tokens.int(), torch.stack([loss.detach(), tokens])

    return model(batch.tokens, batch.position_ids, None, labels=batch.labels), sum_loss
