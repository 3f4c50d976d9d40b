"""Trains a small GPT, and writes what its output layer sees at chosen steps and after the last one.

A snapshot is a file step-STEP.safetensors of three tensors, of N held-out tokens: the hidden states `hidden [N, D]` and
the output weight `weight [V, D]`, both rounded to bf16, and the next tokens `target [N]` int64. metrics.json, which is
written last, says that a training is finished, and of which configuration it was.
"""

import json
import os
import time
from contextlib import nullcontext
from pathlib import Path

import torch
from pydantic import BaseModel, ValidationError
from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn
from safetensors.torch import save_file
from torch import Tensor

from parallel_lce import linear_cross_entropy
from training.batches import Batch, Windows, split
from training.config import Device, save_config
from training.refusal import Refusal, check_folder
from training.small_gpt import SmallGPT
from training.snapshot_config import SmallTraining, SnapshotConfig, describe_snapshots
from training.text import Text, load_text

IGNORE_INDEX = -100
LAST_RATE = 0.1  # share of the largest learning rate that the last step has
LARGEST_NORM = 1.0  # of the gradient of all parameters
SHOWN = 10  # steps between two looks at the loss, each of which waits for the device


class Metrics(BaseModel):
    """The content of metrics.json."""

    config: dict[str, object]  # describe_snapshots()
    device: str
    torch: str
    text: str  # where the text is from
    entries: int  # of the vocabulary: those that the text filled
    steps: int
    seconds: float
    held_out_losses: dict[int, float]  # of each snapshot's step: the mean over its tokens, in nats


def run(config: SnapshotConfig) -> None:
    """Trains in this process, and replaces the snapshots of an earlier training. Raises a Refusal for a text that
    cannot be read or is too short."""
    console = Console(soft_wrap=True, highlight=False)
    check_folder("output", config.output)
    configuration, others = Path(config.output, "config.yaml"), snapshots_in(config.output)
    if others and not configuration.exists():
        raise Refusal(f"{others[0]} is of no training that this program knows of: give another output=, or remove it")
    on_gpu = torch.cuda.is_available() if config.train.device is Device.auto else config.train.device is Device.cuda
    device = torch.device("cuda" if on_gpu else "cpu")
    text = _text(config, console)
    size = f"{len(text.tokens):,} tokens; {text.entries:,} of the {config.vocab_size:,} entries of the vocabulary"
    console.print(f"{text.source}: {size} stand for text", markup=False)
    training = Training(config, text, device)
    for path in (Path(config.output, "metrics.json"), *others):
        path.unlink(missing_ok=True)
    save_config(config, configuration)  # before the first snapshot, which without it would be somebody else's
    training.run(console)
    missed = [step for step in config.snapshots.steps if step > training.steps]
    if missed:
        console.print(
            f"the training ended after step {training.steps}: no snapshot of step {', '.join(map(str, missed))}"
        )
    metrics = Metrics(
        config=describe_snapshots(config),
        device=torch.cuda.get_device_name() if on_gpu else "CPU",
        torch=torch.__version__,
        text=text.source,
        entries=text.entries,
        steps=training.steps,
        seconds=training.seconds,
        held_out_losses=training.held_out_losses,
    )
    Path(config.output, "metrics.json").write_text(json.dumps(metrics.model_dump(mode="json"), indent=1) + "\n")


def _text(config: SnapshotConfig, console: Console) -> Text:
    length, samples = config.train.sequence + 1, config.held_out_samples
    try:
        text = load_text(config.text, length, say=console.print)
    except (OSError, ValueError) as error:
        raise Refusal(str(error)) from None
    if len(text.tokens) < (samples + 1) * length:
        needed = f"{samples} held-out samples and one to train on, of {length} each, need {(samples + 1) * length}"
        raise Refusal(f"{text.source} has {len(text.tokens)} tokens; {needed}")
    return text


def snapshots_in(folder: str) -> list[Path]:
    """The snapshots in a folder, in the order of their steps."""
    found = {path.stem.removeprefix("step-"): path for path in Path(folder).glob("step-*.safetensors")}
    return [found[step] for step in sorted(filter(str.isdecimal, found), key=int)]


def is_trained(config: SnapshotConfig) -> bool:
    """Whether the output folder holds all snapshots of this configuration. Raises a Refusal if they are of another."""
    path = Path(config.output, "metrics.json")
    if not path.exists():
        return False
    try:
        metrics = Metrics.model_validate_json(path.read_bytes())
    except (OSError, ValidationError) as error:
        raise Refusal(f"{path} is not what a training writes: {str(error).splitlines()[0]}") from None
    if metrics.config != describe_snapshots(config):
        raise Refusal(f"{config.output} has snapshots of another configuration: give another output=, or remove them")
    return set(metrics.held_out_losses) == {
        int(path.stem.removeprefix("step-")) for path in snapshots_in(config.output)
    }


class Training:
    """One training: its model, its text, and what it has reached."""

    def __init__(self, config: SnapshotConfig, text: Text, device: torch.device):
        model, train = config.model, config.train
        self.config, self.device = config, device
        torch.manual_seed(train.seed)
        with device:
            self.gpt = SmallGPT(model.layers, model.hidden, model.heads, config.vocab_size, train.sequence)
        decayed = [p for p in self.gpt.parameters() if p.dim() == 2]
        norms = {"params": [p for p in self.gpt.parameters() if p.dim() != 2], "weight_decay": 0.0}
        groups = [{"params": decayed, "weight_decay": train.weight_decay}, norms]
        self.optimizer = torch.optim.AdamW(groups, lr=train.learning_rate, betas=(0.9, 0.95), fused=True)
        self.held_out, rest = split(text, train.sequence, config.held_out_samples)
        self.windows = Windows(rest, train.sequence, train.seed, device)
        self.steps, self.seconds = 0, 0.0
        self.held_out_losses: dict[int, float] = {}

    def run(self, console: Console) -> None:
        """Trains to the end. Writes each snapshot when its step is done, and the last one."""
        columns = "{task.description}", BarColumn(), TextColumn("step {task.fields[step]}, loss {task.fields[loss]}")
        with Progress(*columns, TimeElapsedColumn(), console=console) as progress:
            bar = progress.add_task("training", total=1.0, step=0, loss="…")
            start, done = time.monotonic(), 0.0
            while done < 1:
                loss = self._step(done)
                self.steps += 1
                if self.steps in self.config.snapshots.steps:
                    self._write()
                self.seconds = time.monotonic() - start
                done = share_done(self.config.train, self.steps, self.seconds)
                if self.steps % SHOWN == 0 or done >= 1:
                    progress.update(bar, completed=done, step=self.steps, loss=f"{loss.item():.3f}")
            if self.steps not in self.held_out_losses:
                self._write()

    def _step(self, done: float) -> Tensor:
        train = self.config.train
        for group in self.optimizer.param_groups:
            group["lr"] = learning_rate(train, self.steps, done)
        batch = self.windows(self.steps, train.batch)
        loss = self._loss(*self._inputs(batch.tokens), batch)
        loss.backward()
        torch.nn.utils.clip_grad_norm_(self.gpt.parameters(), LARGEST_NORM)
        self.optimizer.step()
        self.optimizer.zero_grad()
        return loss.detach()

    def _inputs(self, tokens: Tensor) -> tuple[Tensor, Tensor]:
        """Hidden states [b, s, D] and the output weight [V, D]: bf16 on a GPU, fp32 on a CPU."""
        on_gpu = self.device.type == "cuda"
        with torch.autocast("cuda", torch.bfloat16) if on_gpu else nullcontext():
            hidden = self.gpt(tokens)
        dtype = torch.bfloat16 if on_gpu else torch.float32
        return hidden.to(dtype), self.gpt.head.to(dtype)

    def _loss(self, hidden: Tensor, weight: Tensor, batch: Batch) -> Tensor:
        """The mean over the tokens that do not end a document."""
        target = batch.labels.masked_fill(batch.loss_mask == 0, IGNORE_INDEX)
        return linear_cross_entropy(hidden, weight, target, ignore_index=IGNORE_INDEX)

    @torch.no_grad()
    def _write(self) -> None:
        """Writes a snapshot of this step. Under another name first: a file of the right name is whole."""
        count, hidden = self.config.snapshots.tokens, []
        for samples in self.held_out.split(self.config.train.batch):
            hidden.append(self._inputs(samples[:, :-1].to(self.device))[0].flatten(0, 1).bfloat16())
        tensors = {
            "hidden": torch.cat(hidden)[:count].contiguous(),
            "weight": self.gpt.head.bfloat16(),
            "target": self.held_out[:, 1:].flatten()[:count].to(self.device),
        }
        self.held_out_losses[self.steps] = linear_cross_entropy(*tensors.values()).item()
        path = Path(self.config.output, f"step-{self.steps}.safetensors")
        unfinished = path.with_suffix(".unfinished")
        save_file({name: tensor.cpu() for name, tensor in tensors.items()}, unfinished)
        os.replace(unfinished, path)


def share_done(train: SmallTraining, steps: int, seconds: float) -> float:
    """How much of a training is done, by the limit that is nearer; 1 and more: all of it."""
    by_steps = steps / train.steps if train.steps else 0.0
    by_time = seconds / (60 * train.minutes) if train.minutes else 0.0
    return max(by_steps, by_time)


def learning_rate(train: SmallTraining, step: int, done: float) -> float:
    """Of the step after `step` steps, when so much of the training is done."""
    warm_up = min(1.0, (step + 1) / (train.warmup_steps + 1))
    return train.learning_rate * warm_up * (1 - (1 - LAST_RATE) * done)
