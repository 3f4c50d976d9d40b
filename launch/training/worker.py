"""One rank of a training run: join, build, train, measure, write the results."""

import json
import os
import statistics
import time
import warnings
from contextlib import nullcontext
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path

import torch
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

# Megatron-core's remarks on optional packages, and on names that torch 2.13 renamed under it, would hide the results.
warnings.filterwarnings("ignore", category=UserWarning, module=r"megatron\.")
warnings.filterwarnings("ignore", r"`torch\.distributed\.\w+_tensor` is deprecated", FutureWarning)
import megatron.core  # noqa: E402
from megatron.core import parallel_state  # noqa: E402
from megatron.core.tensor_parallel.random import model_parallel_cuda_manual_seed  # noqa: E402

from training.batches import Batches  # noqa: E402
from training.config import Config, describe, save_config  # noqa: E402
from training.host import check_processes, remove_results, uses_cuda  # noqa: E402
from training.megatron_cpu import adapt_megatron_to_cpu  # noqa: E402
from training.memory import loss_peak_bytes  # noqa: E402
from training.model import padded_vocab_size  # noqa: E402
from training.refusal import Refusal, check_folder  # noqa: E402
from training.step import Stepper, mean_loss  # noqa: E402
from training.text import load_text  # noqa: E402

WARM_UP_STEPS = 2  # left out of the median step time and of the peak memory


@dataclass
class Trained:
    """What a training run measured on this rank."""

    losses: list[float]  # of each step, the same on every rank
    seconds: list[float]  # of each step
    peak_bytes: int | None  # allocated at the peak of the steps after the warm-up; None on a CPU


def run(config: Config) -> None:
    """Trains on this rank of a torchrun launch. Rank 0 of all writes metrics.json and config.yaml.

    An exception ends this process alone; torchrun then ends the others.
    """
    device = _start(config)
    rank, train = torch.distributed.get_rank(), config.train
    output = Path(config.output)
    check_folder("output", config.output)
    if os.environ["LOCAL_RANK"] == "0":  # a torchrun of the user's own has not; no rank is done before all have begun
        remove_results(config.output)
    try:
        text = load_text(config.text, train.sequence + 1)
    except (OSError, ValueError) as error:
        raise Refusal(str(error)) from None
    batches = Batches(text, train, device)
    stepper = Stepper(config, device)
    trained = _train(config, stepper, batches)
    step_peak = _largest(trained.peak_bytes, device)
    loss_peak = _largest(_loss_peak(config, stepper, batches), device)
    if config.save_weights:
        weights = {name: p.detach().cpu() for name, p in stepper.gpt.named_parameters()}
        torch.save(weights, output / f"weights-{rank}.pt")
    if rank == 0:
        median = statistics.median(trained.seconds[WARM_UP_STEPS:] or trained.seconds)
        tokens = train.micro_batch * train.micro_batches * config.parallel.data * train.sequence
        metrics = {
            **describe(config),
            "device": torch.cuda.get_device_name() if device.type == "cuda" else "process of a CPU",
            "processes": config.parallel.processes,
            "hosts": config.parallel.processes // int(os.environ["LOCAL_WORLD_SIZE"]),
            "backend": torch.distributed.get_backend(),
            "versions": {"torch": torch.__version__, "megatron-core": megatron.core.__version__},
            "padded_vocab_size": padded_vocab_size(config),
            "text": text.source,
            "tokens_per_step": tokens,
            "tokens_per_second": tokens / median,
            "losses": trained.losses,
            "step_seconds": trained.seconds,
            "median_step_seconds": median,
            "step_peak_bytes": step_peak,
            "loss_peak_bytes": loss_peak,
            "loss_peak_tokens": None if loss_peak is None else config.memory.micro_batch * train.sequence,
        }
        (output / "metrics.json").write_text(json.dumps(metrics, indent=1) + "\n")
        save_config(config, output / "config.yaml")
    torch.distributed.barrier()  # nobody leaves while another still needs the store or the group
    torch.distributed.destroy_process_group()


def _start(config: Config) -> torch.device:
    """Joins the process group, seeds everything, and returns this rank's device."""
    parallel, seed = config.parallel, config.train.seed
    check_processes(config, int(os.environ["WORLD_SIZE"]))
    use_cuda = uses_cuda(config, int(os.environ["LOCAL_WORLD_SIZE"]))
    device = torch.device("cuda", int(os.environ["LOCAL_RANK"])) if use_cuda else torch.device("cpu")
    # The runs are compared in their own precision: nothing may round to TF32 or depend on the order of atomics.
    torch.set_float32_matmul_precision("highest")
    torch.use_deterministic_algorithms(True, warn_only=True)
    torch.utils.deterministic.fill_uninitialized_memory = False  # it would add its own time to both losses
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
        create_gloo_process_groups=False,  # for checkpoints alone
        distributed_timeout_minutes=parallel.timeout_seconds / 60,  # half an hour by default
    )
    torch.manual_seed(seed)
    # As Megatron does: parameters drawn on GPUs differ between stages.
    model_parallel_cuda_manual_seed(seed + 100 * parallel_state.get_pipeline_model_parallel_rank())
    return device


def _train(config: Config, stepper: Stepper, batches: Batches) -> Trained:
    """Trains `train.steps` steps. Rank 0 shows a progress bar."""
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
    return Trained(losses, seconds, torch.cuda.max_memory_allocated() if on_gpu else None)


def _loss_peak(config: Config, stepper: Stepper, batches: Batches) -> int | None:
    """Bytes of the output layer and the loss on this rank, in a step apart from the timed ones, and larger."""
    if config.memory.micro_batch is None or config.parallel.pipeline > 1:
        return None
    with stepper.model.no_sync():  # its gradients go nowhere
        return loss_peak_bytes(stepper.gpt, batches(config.train.steps, config.memory.micro_batch))


def _largest(size: int | None, device: torch.device) -> int | None:
    """The largest of all ranks; None if they did not measure."""
    if size is None:
        return None
    peak = torch.tensor(size, device=device)
    torch.distributed.all_reduce(peak, op=torch.distributed.ReduceOp.MAX)
    return int(peak)
