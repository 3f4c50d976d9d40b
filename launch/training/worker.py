"""One rank of a training run: build, train, measure the loss's memory, write the results."""

import json
import os
import statistics
import time
import warnings
from contextlib import nullcontext
from datetime import timedelta
from pathlib import Path

import torch
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

# Megatron-core's remarks on optional packages, and on names that torch 2.13 renamed under it, would hide the results.
warnings.filterwarnings("ignore", module=r"megatron\.")
warnings.filterwarnings("ignore", r"`torch\.distributed\.\w+_tensor` is deprecated", FutureWarning)
from megatron.core import parallel_state  # noqa: E402
from megatron.core.tensor_parallel.random import model_parallel_cuda_manual_seed  # noqa: E402

from training.batches import Batches  # noqa: E402
from training.config import Config, Device, save_config  # noqa: E402
from training.megatron_cpu import adapt_megatron_to_cpu  # noqa: E402
from training.memory import loss_peak_bytes  # noqa: E402
from training.model import build_model, reduce_sequence_parallel_gradients  # noqa: E402
from training.text import load_text  # noqa: E402

WARM_UP_STEPS = 2  # left out of the median step time


def run(config: Config) -> None:
    """Trains on this rank of a torchrun launch. Rank 0 writes metrics.json and config.yaml; every rank its weights.

    An exception ends this process alone; torchrun then ends the others.
    """
    device = _start(config)
    rank = torch.distributed.get_rank()
    output = Path(config.output)
    output.mkdir(parents=True, exist_ok=True)
    text = load_text(config.text, config.train.sequence + 1)
    batches = Batches(text, config.train, device)
    model = build_model(config, device)
    losses, seconds = _train(config, model, batches)
    measured = batches(config.train.steps, config.memory.micro_batch)  # apart from the timed steps, and larger
    peak = torch.tensor(loss_peak_bytes(model, measured), device=device)
    torch.distributed.all_reduce(peak, op=torch.distributed.ReduceOp.MAX)
    torch.save({name: p.detach().cpu() for name, p in model.named_parameters()}, output / f"weights-{rank}.pt")
    if rank == 0:
        metrics = {
            "loss": config.loss.impl.name,
            "device": torch.cuda.get_device_name() if device.type == "cuda" else "CPU",
            "backend": torch.distributed.get_backend(),
            "tensor_parallel": config.parallel.tensor,
            "sequence_parallel": model.config.sequence_parallel,
            "tokens_per_step": config.train.micro_batch * config.train.sequence,
            "vocab_size": model.vocab_size,
            "text": text.source,
            "losses": losses,
            "step_seconds": seconds,
            "median_step_seconds": statistics.median(seconds[WARM_UP_STEPS:] or seconds),
            "loss_peak_bytes": int(peak),
            "loss_peak_tokens": measured.tokens.numel(),
        }
        (output / "metrics.json").write_text(json.dumps(metrics, indent=1) + "\n")
        save_config(config, output / "config.yaml")
    torch.distributed.barrier()  # nobody leaves while another still needs the store or the group
    torch.distributed.destroy_process_group()


def _start(config: Config) -> torch.device:
    """Joins the process group, seeds everything, and returns this rank's device."""
    world, local_rank = int(os.environ["WORLD_SIZE"]), int(os.environ["LOCAL_RANK"])
    if world != config.parallel.tensor:
        raise ValueError(f"parallel.tensor={config.parallel.tensor} needs as many processes, torchrun started {world}")
    gpus = torch.cuda.device_count()
    if config.parallel.device is Device.cuda and gpus < world:
        raise ValueError(f"parallel.device=cuda needs {world} GPUs for parallel.tensor={world}, found {gpus}")
    use_cuda = config.parallel.device is not Device.cpu and gpus >= world
    device = torch.device("cuda", local_rank) if use_cuda else torch.device("cpu")
    # The two losses are compared in full fp32: nothing may round to TF32 or depend on the order of atomics.
    torch.set_float32_matmul_precision("highest")
    torch.use_deterministic_algorithms(True, warn_only=True)
    torch.utils.deterministic.fill_uninitialized_memory = False  # it would add its own time to both losses
    if use_cuda:
        torch.cuda.set_device(device)
    else:
        adapt_megatron_to_cpu()
    torch.distributed.init_process_group(
        "nccl" if use_cuda else "gloo",
        timeout=timedelta(seconds=config.parallel.timeout_seconds),
        device_id=device if use_cuda else None,
    )
    parallel_state.initialize_model_parallel(  # its groups would wait for half an hour by default
        tensor_model_parallel_size=world, distributed_timeout_minutes=config.parallel.timeout_seconds / 60
    )
    torch.manual_seed(config.train.seed)
    model_parallel_cuda_manual_seed(config.train.seed)
    return device


def _train(config: Config, model: torch.nn.Module, batches: Batches) -> tuple[list[float], list[float]]:
    """Trains `train.steps` steps; the loss and the seconds of each. Rank 0 shows a progress bar."""
    train = config.train
    optimizer = torch.optim.AdamW(
        model.parameters(), lr=train.learning_rate, eps=train.adam_eps, weight_decay=train.weight_decay
    )
    warm_up = lambda step: min(1.0, (step + 1) / (train.warmup_steps + 1))  # noqa: E731
    schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, warm_up)
    synchronize = torch.cuda.synchronize if batches.device.type == "cuda" else nullcontext
    columns = "{task.description}", BarColumn(), MofNCompleteColumn(), TextColumn("loss {task.fields[loss]}")
    losses, seconds = [], []
    with Progress(*columns, TimeElapsedColumn(), disable=torch.distributed.get_rank() != 0) as progress:
        bar = progress.add_task(f"{config.loss.impl.name:>12}", total=train.steps, loss="…")
        for step in range(train.steps):
            batch = batches(step, train.micro_batch)
            synchronize()
            start = time.perf_counter()
            per_token = model(batch.tokens, batch.position_ids, batch.attention_mask, labels=batch.labels)  # [b, s]
            loss = batch.mean_loss(per_token)
            loss.backward()
            reduce_sequence_parallel_gradients(model)
            optimizer.step()
            optimizer.zero_grad(set_to_none=True)
            schedule.step()
            synchronize()
            seconds.append(time.perf_counter() - start)
            losses.append(loss.item())
            progress.update(bar, advance=1, loss=f"{losses[-1]:.4f}")
    return losses, seconds
