"""One rank of a training run: it joins the process group, trains, measures, and writes the results."""

import os
import statistics
import time
from contextlib import nullcontext
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path

import megatron.core
import torch
from megatron.core import parallel_state
from megatron.core.tensor_parallel.random import model_parallel_cuda_manual_seed
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

from training.batches import Batches, split
from training.config import Config, save_config
from training.host import check_processes, uses_cuda
from training.loss_memory import loss_peak_bytes
from training.megatron_cpu import adapt_megatron_to_cpu
from training.model import padded_vocab_size
from training.refusal import Refusal, check_folder
from training.runs import Metrics, remove_results, write_metrics
from training.step import Stepper, mean_loss
from training.text import Text, by_frequency, load_text

WARM_UP_STEPS = 2  # not in the median step time and the peak memory


@dataclass
class Measured:
    """The measurements of a training. Losses and peaks are the same on every rank, seconds are this rank's."""

    losses: list[float]  # of each step
    seconds: list[float]  # of each step
    step_peak_bytes: int | None  # largest of all ranks, in the steps after the warm-up; None on a CPU
    loss_peak_bytes: int | None  # largest of all ranks, of the output layer and the loss; None if not asked for
    held_out_loss: float | None  # after the training; None if not asked for


def run(config: Config) -> None:
    """Trains on this rank of a torchrun launch. Rank 0 writes metrics.json and config.yaml.

    An exception ends this process alone; torchrun then ends the others.
    """
    check_processes(config, int(os.environ["WORLD_SIZE"]))
    use_cuda = uses_cuda(config, int(os.environ["LOCAL_WORLD_SIZE"]))
    check_folder("output", config.output)
    if os.environ["LOCAL_RANK"] == "0":  # no rank writes results before all ranks have joined the process group
        remove_results(config.output)
    device = _join(config, use_cuda)
    rank = torch.distributed.get_rank()
    held_out, text = _text(config)
    stepper = Stepper(config, device)
    measured = _train(config, stepper, Batches(text, config.train, device), held_out)
    if config.save_weights:
        weights = {name: p.detach().cpu() for name, p in stepper.gpt.named_parameters()}
        torch.save(weights, Path(config.output, f"weights-{rank}.pt"))
    if rank == 0:
        write_metrics(_metrics(config, text.source, measured), config.output)
        save_config(config, Path(config.output, "config.yaml"))
    torch.distributed.barrier()  # no rank leaves while another still needs the store or the group
    torch.distributed.destroy_process_group()


def _text(config: Config) -> tuple[torch.Tensor, Text]:
    """Held-out samples [samples, s + 1], none if they are not asked for, and the text to train on."""
    length, samples = config.train.sequence + 1, config.train.held_out_samples or 0
    try:
        text = load_text(config.text, (samples + 1) * length)
    except (OSError, ValueError) as error:
        raise Refusal(str(error)) from None
    if config.model.order_vocabulary:
        text = by_frequency(text, padded_vocab_size(config), config.parallel.tensor)
    return split(text, config.train.sequence, samples)


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
        pipeline_model_parallel_size=parallel.pipeline,
        create_gloo_process_groups=False,  # only checkpoints need them
        distributed_timeout_minutes=parallel.timeout_seconds / 60,  # pyright: ignore[reportArgumentType]
    )
    torch.manual_seed(seed)
    # As Megatron does: parameters that are drawn on GPUs differ between pipeline stages.
    model_parallel_cuda_manual_seed(seed + 100 * parallel_state.get_pipeline_model_parallel_rank())
    return device


def _train(config: Config, stepper: Stepper, batches: Batches, held_out: torch.Tensor) -> Measured:
    """Trains `train.steps` steps, then measures the loss's memory, and the loss of held-out samples [samples, s + 1].
    Rank 0 shows a progress bar."""
    device, steps = batches.device, config.train.steps
    on_gpu = device.type == "cuda"
    synchronize = torch.cuda.synchronize if on_gpu else nullcontext
    data_rank, data_size = parallel_state.get_data_parallel_rank(), parallel_state.get_data_parallel_world_size()
    columns = "{task.description}", BarColumn(), MofNCompleteColumn(), TextColumn("loss {task.fields[loss]}")
    name = config.loss.impl.name + (", reversed" if config.train.reverse_samples else "")
    losses, seconds = [], []
    with Progress(*columns, TimeElapsedColumn(), disable=torch.distributed.get_rank() != 0) as progress:
        bar = progress.add_task(f"{name:>15}", total=steps, loss="…")
        for step in range(steps):
            mine = batches.of_rank(step, data_rank, data_size)
            if on_gpu and step == min(WARM_UP_STEPS, steps - 1):
                torch.cuda.reset_peak_memory_stats()
            synchronize()
            start = time.perf_counter()
            reports = stepper(mine)
            synchronize()
            seconds.append(time.perf_counter() - start)
            losses.append(mean_loss(reports, device))
            progress.update(bar, advance=1, loss=f"{losses[-1]:.4f}")
    step_peak = _largest(torch.cuda.max_memory_allocated(), device) if on_gpu else None
    loss_peak = None
    if samples := _memory_samples(config):
        with stepper.model.no_sync():  # the gradients of this step are not used
            loss_peak = _largest(loss_peak_bytes(stepper.gpt, batches(steps, samples)), device)
    held_out_loss = None
    if len(held_out):
        reports = stepper.evaluate([batches.batch_of(part) for part in held_out.split(config.train.micro_batch)])
        held_out_loss = mean_loss(reports, device)
    return Measured(losses, seconds, step_peak, loss_peak, held_out_loss)


def _memory_samples(config: Config) -> int | None:
    """Samples of the step that measures the memory of the loss. A pipeline stage does not hold the whole model."""
    return config.memory.micro_batch if config.parallel.pipeline == 1 else None


def _largest(size: int, device: torch.device) -> int:
    """The largest of all ranks."""
    peak = torch.tensor(size, device=device)
    torch.distributed.all_reduce(peak, op=torch.distributed.ReduceOp.MAX)
    return int(peak)


def _metrics(config: Config, source: str, measured: Measured) -> Metrics:
    train, parallel, samples = config.train, config.parallel, _memory_samples(config)
    median = statistics.median(measured.seconds[WARM_UP_STEPS:] or measured.seconds)
    tokens = train.micro_batch * train.micro_batches * parallel.data * train.sequence
    on_gpu = measured.step_peak_bytes is not None
    return Metrics(
        model=config.model,
        train=train,
        loss=config.loss,
        parallel=parallel,
        device=torch.cuda.get_device_name() if on_gpu else "process of a CPU",
        processes=parallel.processes,
        hosts=parallel.processes // int(os.environ["LOCAL_WORLD_SIZE"]),
        backend=torch.distributed.get_backend(),
        versions={"torch": torch.__version__, "megatron-core": megatron.core.__version__},
        padded_vocab_size=padded_vocab_size(config),
        text=source,
        tokens_per_step=tokens,
        tokens_per_second=tokens / median,
        losses=measured.losses,
        step_seconds=measured.seconds,
        median_step_seconds=median,
        step_peak_bytes=measured.step_peak_bytes,
        loss_peak_bytes=measured.loss_peak_bytes,
        loss_peak_tokens=None if samples is None else samples * train.sequence,
        held_out_loss=measured.held_out_loss,
    )
