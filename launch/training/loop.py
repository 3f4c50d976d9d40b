"""The training loop of one rank: it joins the process group, trains, measures, and writes the results.

Schedule, data-parallel wrapper, gradient reduction and optimizer are Megatron-core's own.
"""

import os
import time
from collections.abc import Callable, Iterator
from datetime import timedelta
from pathlib import Path
from typing import Any

import megatron.core
import torch
from megatron.core import parallel_state
from megatron.core.distributed import DistributedDataParallel, DistributedDataParallelConfig, finalize_model_grads
from megatron.core.models.gpt.gpt_model import GPTModel
from megatron.core.optimizer import OptimizerConfig, get_megatron_optimizer
from megatron.core.pipeline_parallel import get_forward_backward_func
from megatron.core.tensor_parallel.random import model_parallel_cuda_manual_seed
from megatron.core.transformer.module import Float16Module
from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn

from benchmarks.engine.peak_memory import peak_memory
from examples.megatron_cpu import adapt_megatron_to_cpu, pass_as_cuda
from training.config import Config, TrainConfig
from training.model import build_model, padded_vocab_size
from training.report import WARM_UP_STEPS, Metrics
from training.text import Batch, Batches, by_frequency, load_text, split


class Stepper:
    """This rank's part of the model with its optimizer. A call trains one step."""

    def __init__(self, config: Config, device: torch.device):
        self.config, self.device = config, device
        train, parallel, bf16 = config.train, config.parallel, config.train.precision == "bf16"
        self.gpt = build_model(config, device)
        transformer = self.gpt.config
        sharded, overlap = parallel.distributed_optimizer, parallel.overlap_grad_reduce
        ddp = DistributedDataParallelConfig(
            grad_reduce_in_fp32=True, overlap_grad_reduce=overlap, use_distributed_optimizer=sharded
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
            use_distributed_optimizer=sharded,
        )
        self.optimizer = get_megatron_optimizer(options, [self.model], use_gloo_process_groups=False)
        self.forward_backward = get_forward_backward_func()
        transformer.finalize_model_grads_func = finalize_model_grads
        transformer.grad_scale_func = self.optimizer.scale_loss
        if overlap:
            transformer.no_sync_func = self.model.no_sync
            transformer.grad_sync_func = self.model.start_grad_sync

    def __call__(self, batches: list[Batch], step: int) -> list[torch.Tensor]:
        """Trains on this rank's micro batches as step `step`. Returns each micro batch's [sum of losses, tokens]."""
        for group in self.optimizer.param_groups:
            group["lr"] = learning_rate(self.config.train, step)
            group["weight_decay"] = self.config.train.weight_decay * group.get("wd_mult", 1.0)  # 0 for norms
        self.model.zero_grad_buffer()
        self.optimizer.zero_grad()
        reports = self._run(batches, forward_only=False)
        self.optimizer.step()
        return reports

    @torch.no_grad()
    def evaluate(self, batches: list[Batch]) -> float:
        """The mean loss, without training."""
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
        """The mean loss over the tokens of all micro batches and data-parallel ranks. `reports`: of a step."""
        total = torch.zeros(2, dtype=torch.float64, device=self.device)  # sum of losses, number of tokens
        for report in reports:
            total += report
        torch.distributed.all_reduce(total, group=parallel_state.get_data_parallel_group())
        loss, tokens = total.tolist()
        return loss / tokens


def learning_rate(train: TrainConfig, step: int) -> float:
    """Rises linearly over the warm-up, and falls linearly to `last_rate` over the training."""
    warm_up = min(1.0, (step + 1) / (train.warmup_steps + 1))  # the first step's is not 0
    return train.learning_rate * warm_up * (1 - (1 - train.last_rate) * step / train.steps)


def _forward(batches: Iterator[Batch], model: torch.nn.Module) -> tuple[torch.Tensor, Callable]:
    """Runs a micro batch: the losses of its tokens [b, s], and the function that sums them."""
    batch = next(batches)

    def sum_loss(per_token: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """The sum of the losses and the number of tokens. Megatron divides one by the other over the whole step."""
        loss, tokens = batch.sum_loss(per_token), batch.loss_mask.sum()
        return loss, tokens.int(), torch.stack([loss.detach(), tokens])

    return model(batch.tokens, batch.position_ids, None, labels=batch.labels), sum_loss


@torch.no_grad()
def last_hidden(gpt: GPTModel, batch: Batch) -> torch.Tensor:
    """The hidden states [s/P, b, h] that the output layer projects."""
    outputs = []
    hook = gpt.decoder.register_forward_hook(lambda module, args, output: outputs.append(output))
    gpt(batch.tokens, batch.position_ids, None, labels=batch.labels)
    hook.remove()
    return outputs.pop().detach()


def write_snapshot(gpt: GPTModel, batches: list[Batch], tokens: int, path: Path) -> None:
    """Writes `hidden [N, D]` and the output's `weight [V, D]`, rounded to bf16, and the next tokens `target [N]` int64,
    of the first N = `tokens` tokens of the batches."""
    from safetensors.torch import save_file

    hidden = torch.cat([last_hidden(gpt, batch).transpose(0, 1).flatten(0, 1).bfloat16().cpu() for batch in batches])
    owner: Any = gpt.embedding.word_embeddings if gpt.share_embeddings_and_output_weights else gpt.output_layer
    target = torch.cat([batch.labels.flatten().cpu() for batch in batches])
    snapshot = {"hidden": hidden[:tokens], "weight": owner.weight.detach().bfloat16().cpu(), "target": target[:tokens]}
    save_file({name: tensor.contiguous() for name, tensor in snapshot.items()}, path)


def loss_peak_bytes(gpt: GPTModel, batch: Batch) -> int:
    """Peak bytes of the output layer and the loss on this rank, in one forward and backward, with the gradient of the
    hidden states; the weight's is added to its `main_grad`, which exists before. Do not train `gpt` afterwards."""
    hidden = last_hidden(gpt, batch).clone().requires_grad_()
    gpt.zero_grad(set_to_none=True)
    gpt.decoder.forward = lambda hidden_states, **options: hidden_states  # pyright: ignore[reportAttributeAccessIssue]

    def forward_backward() -> None:
        per_token = gpt(batch.tokens, batch.position_ids, None, decoder_input=hidden, labels=batch.labels)
        batch.sum_loss(per_token).backward()

    return peak_memory(forward_backward, hidden.device)[0]


def run_rank(config: Config) -> None:
    """Trains on this rank of a torchrun launch, and writes the results."""
    device = _join(config, config.uses_cuda(int(os.environ["LOCAL_WORLD_SIZE"])))
    text = load_text(config.text)
    if config.model.order_vocabulary:
        text = by_frequency(text, padded_vocab_size(config), config.parallel.tensor)
    held_out, text = split(text, config.train.sequence, config.train.held_out_samples or 0)
    stepper, batches = Stepper(config, device), Batches(text, config.train, device)
    metrics = _train(config, stepper, batches, held_out)
    if torch.distributed.get_rank() == 0:
        Path(config.output, "metrics.json").write_text(metrics.model_dump_json(indent=1) + "\n")
    torch.distributed.barrier()  # no rank leaves while another still needs the store or the group
    torch.distributed.destroy_process_group()


def _join(config: Config, use_cuda: bool) -> torch.device:
    """Joins the process group and Megatron's groups, seeds everything, and returns this rank's device."""
    parallel, seed = config.parallel, config.train.seed
    device = torch.device("cuda", int(os.environ["LOCAL_RANK"])) if use_cuda else torch.device("cpu")
    # The runs are compared in their own precision: no TF32, and no results that depend on the order of atomics.
    torch.set_float32_matmul_precision("highest")
    torch.use_deterministic_algorithms(True, warn_only=True)
    # Deterministic mode would fill new memory with NaN, which takes time in both losses.
    torch.utils.deterministic.fill_uninitialized_memory = False  # pyright: ignore[reportAttributeAccessIssue]
    if use_cuda:
        torch.cuda.set_device(device)
    else:
        adapt_megatron_to_cpu()
    torch.distributed.init_process_group(
        "nccl" if use_cuda else "gloo",
        timeout=timedelta(seconds=parallel.timeout_seconds),
        device_id=device if use_cuda else None,
    )
    parallel_state.initialize_model_parallel(
        tensor_model_parallel_size=parallel.tensor,
        create_gloo_process_groups=False,  # only checkpoints need them
        distributed_timeout_minutes=parallel.timeout_seconds / 60,  # pyright: ignore[reportArgumentType]
    )
    torch.manual_seed(seed)
    model_parallel_cuda_manual_seed(seed)
    return device


def _train(config: Config, stepper: Stepper, batches: Batches, held_out: torch.Tensor) -> Metrics:
    """Trains, writes snapshots, then measures the loss's memory, and the loss of held-out samples [samples, s + 1]. Of
    the results, seconds are this rank's, all others the same on every rank."""
    device, train = batches.device, config.train
    on_gpu = device.type == "cuda"
    synchronize = torch.get_device_module(device).synchronize
    data_rank, data_size = parallel_state.get_data_parallel_rank(), parallel_state.get_data_parallel_world_size()
    unseen = [batches.batch_of(part) for part in held_out.split(train.micro_batch)] if len(held_out) else []
    columns = "{task.description}", BarColumn(), TextColumn("step {task.fields[step]}, loss {task.fields[loss]}")
    name = config.loss.impl + (f", order {train.sample_order}" if train.sample_order else "")
    losses, seconds = [], []
    with Progress(*columns, TimeElapsedColumn(), disable=torch.distributed.get_rank() != 0) as progress:
        bar = progress.add_task(f"{name:>15}", total=train.steps, step=0, loss="…")
        for step in range(train.steps):
            mine = batches.of_rank(step, data_rank, data_size)
            if on_gpu and step <= WARM_UP_STEPS:
                torch.cuda.reset_peak_memory_stats()
            synchronize()
            start = time.perf_counter()
            reports = stepper(mine, step)
            synchronize()
            seconds.append(time.perf_counter() - start)
            losses.append(stepper.mean_loss(reports))
            if config.snapshots and step + 1 in (*config.snapshots.steps, train.steps):
                path = Path(config.output, f"step-{step + 1}.safetensors")
                write_snapshot(stepper.gpt, unseen, config.snapshots.tokens, path)
            progress.update(bar, completed=step + 1, step=step + 1, loss=f"{losses[-1]:.4f}")
    step_peak, loss_peak = torch.cuda.max_memory_allocated() if on_gpu else 0, 0
    held_out_loss = stepper.evaluate(unseen) if unseen else None
    if config.memory.micro_batch:
        batch = batches.batch_of(batches.samples(train.steps, config.memory.micro_batch))
        with stepper.model.no_sync():  # the gradients of this step are not used
            loss_peak = loss_peak_bytes(stepper.gpt, batch)
    peaks = torch.tensor([step_peak, loss_peak], device=device)
    torch.distributed.all_reduce(peaks, op=torch.distributed.ReduceOp.MAX)
    step_peak, loss_peak = (peak or None for peak in peaks.tolist())
    return Metrics(
        config=config,
        device=torch.cuda.get_device_name() if on_gpu else "process of a CPU",
        backend=torch.distributed.get_backend(),
        versions={"torch": torch.__version__, "megatron-core": megatron.core.__version__},
        text=batches.text.source,
        losses=losses,
        step_seconds=seconds,
        step_peak_bytes=step_peak,
        loss_peak_bytes=loss_peak,
        held_out_loss=held_out_loss,
    )
