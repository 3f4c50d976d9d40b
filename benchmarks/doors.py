"""`python -m benchmarks.doors`: training steps of transformers and torchtitan with their own losses and with ours.

A step is forward and backward, without an optimizer. Weights and tokens are random. On a GPU the models have the shapes
of released ones, in bf16; on a CPU all cases are tiny, in float32.

llama, qwen2       a causal language model of transformers; also with Liger-Kernel's fused loss, its other kernels off
qwen2-loss         without layers: little more than the loss
torchtitan         torchtitan's chunked loss alone, as its trainer calls it, with the output layer's backward

ours@0 is ours with a logits_budget of 0. `--counted 1 0.1` measures each case with all of its tokens, and with a tenth
that counts, the last of each sequence, as after a prompt.

The library's own loss comes first. A way is refused if its loss or gradient differs too much from the first way's. Exit
status: 1 if ours was refused or failed although its library is installed.
"""

import importlib
import os
import sys
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from itertools import product
from typing import Any
from unittest import mock

import torch
from torch import Tensor

import parallel_lce.transformers
from parallel_lce.core.plan import BUDGET_VARIABLE

from .engine.measure import SECONDS, measure
from .engine.report import NONE, mebibytes, new_parser, new_table, parse, session, spread_ms, spread_text
from .engine.team import NotMeasured, release
from .engine.timing import ratios

OF_BATCH = {"batch", "counted", "device", "dtype"}  # the fields of a Size that are no sizes of a model
STEP = "step"  # the pass of each way
LOSS_LIMIT = 1e-3  # difference from the first way's loss, relative to the larger of it and 1: a rounding of bf16 logits
GRADIENT_LIMIT = 0.1  # relative difference from the first way's gradient of the output layer's weight, by norms
CAPTION = (
    "Medians (min–max over the rounds). ×: speed relative to the first way in the same round. MiB: peak of a step "
    "above the model and the batch, with gradients. dW off: relative difference from the first way's."
)
Call = Callable[[], tuple[Tensor, Tensor]]  # a step: the loss, and that gradient


@dataclass(frozen=True)
class Size:
    """Sizes of a model, under the names of transformers, and its batch: sequences of equal length, of random tokens."""

    hidden_size: int
    vocab_size: int
    num_hidden_layers: int
    num_attention_heads: int
    num_key_value_heads: int
    intermediate_size: int
    batch: tuple[int, int] = (4, 2048)
    counted: float = 1.0  # share of each sequence's tokens, the last ones
    device: torch.device = torch.device("cpu")
    dtype: torch.dtype = torch.float32

    def __str__(self) -> str:
        share = f", {self.counted:.0%} counted" if self.counted < 1 else ""
        return "{} x {} tokens".format(*self.batch) + f"{share}, V={self.vocab_size}, D={self.hidden_size}"

    def batch_of(self) -> tuple[Tensor, Tensor]:
        """Random ids, and a mask of the tokens that count."""
        generator = torch.Generator(self.device).manual_seed(0)
        ids = torch.randint(4, self.vocab_size, self.batch, device=self.device, generator=generator)
        ignored = self.batch[1] - max(1, round(self.counted * self.batch[1]))
        return ids, (torch.arange(self.batch[1], device=self.device) >= ignored).expand(self.batch)


def step(loss: Callable[[], Tensor], leaves: list[Tensor]) -> Call:
    """One training step: `loss()` and its backward. It returns the loss, and the gradient of the first of the `leaves`,
    the output layer's weight. `leaves`: all tensors that get gradients."""

    def call() -> tuple[Tensor, Tensor]:
        value = loss()
        value.backward()
        gradient = leaves[0].grad
        assert gradient is not None
        for leaf in leaves:
            leaf.grad = None
        return value.detach(), gradient

    return call


# Each of the next functions builds the step of a way. It raises ImportError if the way's library is not installed.


def causal_model(kind: str, way: str, size: Size) -> Call:
    library = importlib.import_module("transformers")
    sizes = {name: value for name, value in vars(size).items() if name not in OF_BATCH}
    special = dict(bos_token_id=1, eos_token_id=2, pad_token_id=0)
    config = getattr(library, f"{kind}Config")(**sizes, **special, tie_word_embeddings=True, use_cache=False)
    torch.manual_seed(0)
    with size.device:
        make = library.AutoModelForCausalLM.from_config
        model = make(config, dtype=size.dtype, attn_implementation="sdpa").train()
    ids, mask = size.batch_of()
    labels = ids.masked_fill(~mask, -100)
    if way == "ours":
        parallel_lce.transformers.patch(model)
    elif way == "Liger":
        apply = getattr(importlib.import_module("liger_kernel.transformers"), f"apply_liger_kernel_to_{kind.lower()}")
        nothing_else = dict(rope=False, swiglu=False, rms_norm=False, cross_entropy=False)
        apply(**nothing_else, fused_linear_cross_entropy=True, model=model)

    head = model.get_output_embeddings().weight
    leaves = [head, *(leaf for leaf in model.parameters() if leaf is not head)]
    return step(lambda: model(input_ids=ids, labels=labels).loss, leaves)


def torchtitan_head(way: str, size: Size) -> Call:
    losses: Any = importlib.import_module("torchtitan.components.loss")
    config = losses.ChunkedLossWrapper.Config(loss_fn=losses.CrossEntropyLoss.Config())
    if way == "ours":
        door = importlib.import_module("parallel_lce.torchtitan")
        config = door.linear_cross_entropy(config, skip_masked=size.counted < 1)
    torch.manual_seed(0)
    options: dict[str, Any] = dict(device=size.device, dtype=size.dtype)
    lm_head = torch.nn.Linear(size.hidden_size, size.vocab_size, bias=False, **options)
    hidden = torch.randn(*size.batch, size.hidden_size, **options).requires_grad_()
    (ids, mask), loss_fn = size.batch_of(), config.build()
    labels, tokens = ids.masked_fill(~mask, losses.IGNORE_INDEX), mask.sum()
    loss_fn.set_lm_head(lm_head)
    return step(lambda: loss_fn(hidden, labels, tokens)[0], [lm_head.weight, hidden])


LLAMA_1B = Size(2048, 128256, 16, 32, 8, 8192)  # Llama 3.2 1B
QWEN_1B5 = Size(1536, 151936, 28, 12, 2, 8960)  # Qwen 2.5 1.5B
QWEN_LOSS = replace(QWEN_1B5, num_hidden_layers=0)
TINY = Size(128, 512, 2, 4, 2, 96, (2, 16))
CASES = {
    "llama": (partial(causal_model, "Llama"), "transformers ours ours@0 Liger", LLAMA_1B),
    "qwen2": (partial(causal_model, "Qwen2"), "transformers ours ours@0 Liger", QWEN_1B5),
    "qwen2-loss": (partial(causal_model, "Qwen2"), "transformers ours ours@0 Liger", QWEN_LOSS),
    "torchtitan": (torchtitan_head, "torchtitan ours ours@0", LLAMA_1B),
}


def main(arguments: list[str] | None = None) -> int:
    parser = new_parser("python -m benchmarks.doors", __doc__, "--json", "--rounds")
    parser.add_argument("--cases", choices=CASES, nargs="+", default=[*CASES])
    parser.add_argument("--counted", type=float, nargs="+", default=[1.0], help="shares of the tokens that count")
    options = parse(parser, arguments)
    with session(options) as run:
        cases = run.content.setdefault("cases", [])
        for name, share in product(options.cases, options.counted):
            build, ways, size = CASES[name]
            size = size if options.device == "cuda" else TINY
            size = replace(size, counted=share, device=run.team.device, dtype=options.dtype)
            candidates = {way: partial(calls_of, build, way, size) for way in ways.split()}
            rows = measure(candidates, run.team, options.rounds, partial(compare, []))
            release(run.team.device)
            cases.append({"name": name, "size": str(size), "ways": rows})
            run.say(table(f"{name}: {size}, {size.dtype}", rows))
            run.save()
    refused = [row["refused"] for case in cases for row in case["ways"] if row["name"].startswith("ours")]
    return int(any(reason and not reason.startswith("not installed") for reason in refused))


def calls_of(build: Callable[..., Call], way: str, size: Size) -> dict[str, Call]:
    """The step of a way, whose name may end in a logits_budget: ours@0."""
    kind, _, budget = way.partition("@")
    within_budget = mock.patch.dict(os.environ, {BUDGET_VARIABLE: budget} if budget else {})
    return {STEP: within_budget(within_budget(build)(kind, size))}


def compare(first: list[tuple[Tensor, Tensor]], row: dict, results: dict) -> None:
    """Adds to the row the loss, and how far the gradient of the output layer's weight is from the first way's. Raises
    NotMeasured if either is too far. `first`: the first way's results, once there are any."""
    loss, gradient = results[STEP]
    if not first:
        first.append((loss, gradient))
    right, of_right = first[0]
    if not (loss - right).abs() <= LOSS_LIMIT * right.abs().clamp(min=1):  # NaN is wrong too
        raise NotMeasured(f"refused: loss {loss.item():.6g}, not {right.item():.6g}")
    off = ((gradient.float() - of_right.float()).norm() / of_right.float().norm()).item()
    if not off <= GRADIENT_LIMIT:
        raise NotMeasured(f"refused: the gradient of the output layer's weight differs by {off:.1e}")
    row.update(loss=loss.item(), gradient_off=off)


def table(title: str, rows: list[dict]):
    made = new_table(title, CAPTION, ["way"], ["ms", "×", "MiB", "loss", "dW off"])
    first = rows[0].get(STEP)
    for row in rows:
        if row["refused"]:
            texts = [row["name"] + ", " + row["refused"], *[NONE] * 5]
        else:
            its = row[STEP]
            speed = spread_text(ratios(first[SECONDS], its[SECONDS]) if first else None)
            texts = [row["name"], spread_ms(its[SECONDS]), speed, mebibytes(its["peak"])]
            texts += [f"{row['loss']:.6f}", f"{row['gradient_off']:.1e}"]
        made.add_row(*texts)
    return made


if __name__ == "__main__":
    sys.exit(main())
