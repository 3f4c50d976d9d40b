"""One rank of a training run: it joins the process group, trains, measures, and writes the results."""

import os
import statistics
import time
from contextlib import nullcontext
from datetime import timedelta
from pathlib import Path

import megatron.core
import torch
from megatron.core import parallel_state
from megatron.core.tensor_parallel.random import model_parallel_cuda_manual_seed
from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn

from training.batches import Batches, split
from training.config import Config, TrainConfig, save_config
from training.megatron_cpu import adapt_megatron_to_cpu
from training.model import padded_vocab_size
from training.output_layer import loss_peak_bytes, write_snapshot
from training.results import Metrics, remove_results
from training.start import check_processes, uses_cuda
from training.step import Stepper
from training.text import by_frequency, load_text

WARM_UP_STEPS = 2  # not in the median step time and the peak memory


def run_rank(config: Config) -> None:
    """Trains on this rank of a torchrun launch, and writes the results."""
    check_processes(config, int(os.environ["WORLD_SIZE"]))
    use_cuda = uses_cuda(config, int(os.environ["LOCAL_WORLD_SIZE"]))
    if os.environ["LOCAL_RANK"] == "0":  # no rank writes results before all ranks have joined the process group
        remove_results(config.output)
    device = _join(config, use_cuda)
    rank = torch.distributed.get_rank()
    if rank == 0:
        save_config(config, Path(config.output, "config.yaml"))
    text = load_text(config.text)
    if config.model.order_vocabulary:
        text = by_frequency(text, padded_vocab_size(config), config.parallel.tensor)
    held_out, text = split(text, config.train.sequence, config.train.held_out_samples or 0)
    stepper, batches = Stepper(config, device), Batches(text, config.train, device)
    metrics = _train(config, stepper, batches, held_out)
    if rank == 0:
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
        pipeline_model_parallel_size=parallel.pipeline,
        create_gloo_process_groups=False,  # only checkpoints need them
        distributed_timeout_minutes=parallel.timeout_seconds / 60,  # pyright: ignore[reportArgumentType]
    )
    torch.manual_seed(seed)
    # As Megatron does: parameters that are drawn on GPUs differ between pipeline stages.
    model_parallel_cuda_manual_seed(seed + 100 * parallel_state.get_pipeline_model_parallel_rank())
    return device


def _train(config: Config, stepper: Stepper, batches: Batches, held_out: torch.Tensor) -> Metrics:
    """Trains, writes snapshots, then measures the loss's memory, and the loss of held-out samples [samples, s + 1].
    Losses and peaks of memory are the same on every rank, seconds are this rank's."""
    device, train, parallel = batches.device, config.train, config.parallel
    on_gpu = device.type == "cuda"
    synchronize = torch.cuda.synchronize if on_gpu else nullcontext
    data_rank, data_size = parallel_state.get_data_parallel_rank(), parallel_state.get_data_parallel_world_size()
    unseen = [batches.batch_of(part) for part in held_out.split(train.micro_batch)] if len(held_out) else []
    columns = "{task.description}", BarColumn(), TextColumn("step {task.fields[step]}, loss {task.fields[loss]}")
    name = config.loss.impl + (", reversed" if train.reverse_samples else "")
    losses, seconds, done, begin = [], [], 0.0, time.monotonic()
    with Progress(*columns, TimeElapsedColumn(), disable=torch.distributed.get_rank() != 0) as progress:
        bar = progress.add_task(f"{name:>15}", total=1.0, step=0, loss="…")
        while done < 1:
            step = len(losses)
            mine = batches.of_rank(step, data_rank, data_size)
            if on_gpu and step <= WARM_UP_STEPS:
                torch.cuda.reset_peak_memory_stats()
            synchronize()
            start = time.perf_counter()
            reports = stepper(mine, step, done)
            synchronize()
            seconds.append(time.perf_counter() - start)
            losses.append(stepper.mean_loss(reports))
            done = share_done(train, step + 1, time.monotonic() - begin)
            if config.snapshots and (step + 1 in config.snapshots.steps or done >= 1):
                path = Path(config.output, f"step-{step + 1}.safetensors")
                write_snapshot(stepper.gpt, unseen, config.snapshots.tokens, path)
            progress.update(bar, completed=done, step=step + 1, loss=f"{losses[-1]:.4f}")
    step_peak = _largest(torch.cuda.max_memory_allocated(), device) if on_gpu else None
    loss_peak, samples = None, config.memory.micro_batch
    if samples and parallel.pipeline == 1:  # a pipeline stage does not hold the whole model
        batch = batches.batch_of(batches.samples(len(losses), samples))
        with stepper.model.no_sync():  # the gradients of this step are not used
            loss_peak = _largest(loss_peak_bytes(stepper.gpt, batch), device)
    return Metrics(
        config=config,
        device=torch.cuda.get_device_name() if on_gpu else "process of a CPU",
        hosts=parallel.processes // int(os.environ["LOCAL_WORLD_SIZE"]),
        backend=torch.distributed.get_backend(),
        versions={"torch": torch.__version__, "megatron-core": megatron.core.__version__},
        text=batches.text.source,
        losses=losses,
        step_seconds=seconds,
        median_step_seconds=statistics.median(seconds[WARM_UP_STEPS:] or seconds),
        step_peak_bytes=step_peak,
        loss_peak_bytes=loss_peak,
        held_out_loss=stepper.evaluate(unseen) if unseen else None,
    )


def share_done(train: TrainConfig, steps: int, seconds: float) -> float:
    """The share of a training that is done, by the nearer limit. From 1 on the training ends."""
    by_steps = steps / train.steps if train.steps else 0.0
    by_time = seconds / (60 * train.minutes) if train.minutes else 0.0
    return max(by_steps, by_time)


def _largest(size: int, device: torch.device) -> int:
    """The largest of all ranks."""
    peak = torch.tensor(size, device=device)
    torch.distributed.all_reduce(peak, op=torch.distributed.ReduceOp.MAX)
    return int(peak)
