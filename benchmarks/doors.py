"""`python -m benchmarks.doors`: training steps of transformers, Megatron-core, TRL, verl and torchtitan with their own
losses and with ours.

A step is forward and backward, without an optimizer. Weights and tokens are random. On a GPU the models have the shapes
of released ones, in bf16; on a CPU all cases are tiny, in float32.

llama, qwen2       a causal language model of transformers; also with Liger-Kernel's fused loss, its other kernels off
qwen2-loss         the same without layers: little more than the loss
qwen2-eval         its evaluation: the loss and logits.argmax(-1), without a backward; dW off is that of the ids
megatron-llama     Megatron-core's GPTModel without layers, with its fused native loss; ours skips masked tokens
grpo               compute_loss of TRL's GRPOTrainer: no generation, gradient checkpointing as by TRL's default
trl                TRL's fused head alone, as GRPO uses it: the entropies get no gradient
verl, verl-wide    verl's fused kernel alone, as its FSDP engine calls it with impl_backend=triton
torchtitan         torchtitan's chunked loss alone, as its trainer calls it, with the output layer's backward

ours@0 is ours with a logits_budget of 0. `--counted 1 0.1` measures each case with all of its tokens, and with a tenth
that counts, the last of each sequence, as after a prompt.

A case is measured in several ways: with the library's own loss, which comes first, with other libraries' losses, and
with ours. A way is refused if its loss or gradient differs too much from the first way's. Exit status: 1 if ours
was refused or failed although its library is installed.
"""

import importlib
import os
import sys
import tempfile
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import dataclass, replace
from functools import cache, partial
from itertools import product
from typing import Any
from unittest import mock

import torch
from torch import Tensor

import parallel_lce.megatron
import parallel_lce.transformers
import parallel_lce.trl
from parallel_lce import count_tokens
from parallel_lce.core.plan import BUDGET_VARIABLE

from .engine import ways
from .engine.libraries import group_of_one
from .engine.report import mebibytes, new_parser, parse, session
from .engine.team import NotMeasured, release

OF_BATCH = {"batch", "counted", "device", "dtype"}  # the fields of a Size that are no sizes of a model
GRADIENT_LIMIT = 0.1  # relative difference from the first way's gradient of the output layer's weight, by norms
Call = Callable[[], tuple[Tensor, Tensor]]  # a step: the loss, and that gradient, or what else shows that it is right


@dataclass(frozen=True)
class Size:
    """Sizes of a model, under the names of transformers, and its batch: sequences of equal length, of random tokens. A
    head alone has no layers."""

    hidden_size: int
    vocab_size: int
    num_hidden_layers: int = 0
    num_attention_heads: int = 0
    num_key_value_heads: int = 0
    intermediate_size: int = 0
    batch: tuple[int, int] = (4, 2048)
    counted: float = 1.0  # share of each sequence's tokens, the last ones
    device: torch.device = torch.device("cpu")
    dtype: torch.dtype = torch.float32

    def __str__(self) -> str:
        share = f", {self.counted:.0%} counted" if self.counted < 1 else ""
        return "{} x {} tokens".format(*self.batch) + f"{share}, V={self.vocab_size}, D={self.hidden_size}"

    def normal(self, seed: int, *shape: int) -> Tensor:
        return torch.randn(shape, device=self.device, generator=torch.Generator(self.device).manual_seed(seed))

    def ids(self) -> Tensor:
        generator = torch.Generator(self.device).manual_seed(0)
        return torch.randint(4, self.vocab_size, self.batch, device=self.device, generator=generator)

    def mask(self) -> Tensor:
        """True for the tokens that count."""
        ignored = self.batch[1] - max(1, round(self.counted * self.batch[1]))
        return (torch.arange(self.batch[1], device=self.device) >= ignored).expand(self.batch).contiguous()


def step(loss: Callable[[], Tensor], leaves: list[Tensor], plugin: Any = None) -> Call:
    """One training step: `loss()` and its backward. It returns the loss, and the gradient of the first of the `leaves`,
    the output layer's weight. `plugin`: a module of ours, whose patch holds during the step alone."""

    def call() -> tuple[Tensor, Tensor]:
        with ExitStack() as stack:
            if plugin:
                stack.callback(plugin.unpatch)
                plugin.patch()
            value = loss()
            value.backward()
        gradient = leaves[0].grad
        assert gradient is not None
        for leaf in leaves:  # all tensors that get gradients
            leaf.grad = None
        return value.detach(), gradient

    return call


# Each of the next functions builds the step of a way. It raises ImportError if the way's library is not installed.


def causal_model(kind: str, way: str, size: Size, training: bool = True) -> Call:
    model, ids = model_of(kind, size).train(training), size.ids()
    labels = ids.masked_fill(~size.mask(), -100)
    if way == "ours":
        parallel_lce.transformers.patch(model, eval_logits=training)
    elif way == "Liger":
        apply = getattr(importlib.import_module("liger_kernel.transformers"), f"apply_liger_kernel_to_{kind.lower()}")
        nothing_else = dict(rope=False, swiglu=False, rms_norm=False, cross_entropy=False)
        apply(**nothing_else, fused_linear_cross_entropy=True, model=model)

    @torch.no_grad()
    def evaluated() -> tuple[Tensor, Tensor]:
        output = model(input_ids=ids, labels=labels)
        return output.loss, output.logits.argmax(-1)

    return step(lambda: model(input_ids=ids, labels=labels).loss, leaves_of(model)) if training else evaluated


def model_of(kind: str, size: Size) -> Any:
    library = importlib.import_module("transformers")
    sizes = {name: value for name, value in vars(size).items() if name not in OF_BATCH}
    ids = dict(bos_token_id=1, eos_token_id=2, pad_token_id=0)
    config = getattr(library, f"{kind}Config")(**sizes, **ids, tie_word_embeddings=True, use_cache=False)
    torch.manual_seed(0)
    with size.device:
        make = library.AutoModelForCausalLM.from_config
        return make(config, dtype=size.dtype, attn_implementation="sdpa").train()


def megatron_model(way: str, size: Size) -> Call:
    from megatron.core import parallel_state
    from megatron.core.models.gpt.gpt_model import GPTModel
    from megatron.core.transformer.transformer_block import TransformerBlockSubmodules
    from megatron.core.transformer.transformer_config import TransformerConfig

    group_of_one()
    if not parallel_state.model_parallel_is_initialized():
        parallel_state.initialize_model_parallel()
    # Types of Megatron-core that leave out what it takes.
    implementation: Any = "parallel_lce" if way == "ours" else "native"
    no_layers: Any = TransformerBlockSubmodules([])
    config = TransformerConfig(
        num_layers=1,
        hidden_size=size.hidden_size,
        num_attention_heads=1,
        params_dtype=size.dtype,
        bf16=size.dtype == torch.bfloat16,
        use_cpu_initialization=True,
        cross_entropy_loss_fusion=True,
        cross_entropy_fusion_impl=implementation,
    )
    if way == "ours":  # for as long as the model lives; models of another configuration do not change
        parallel_lce.megatron.patch(skip_masked=True)
    torch.manual_seed(0)
    model = GPTModel(
        config=config,
        transformer_layer_spec=no_layers,
        vocab_size=size.vocab_size,
        max_sequence_length=size.batch[1],
        position_embedding_type="none",
    ).to(size.device)
    ids, mask = size.ids(), size.mask().float()

    def loss() -> Tensor:
        return (model(ids, None, None, labels=ids, loss_mask=mask) * mask).sum() / mask.sum()

    weights: list[Any] = [model.output_layer.weight, model.embedding.word_embeddings.weight]
    return step(loss, weights)


def leaves_of(model: Any) -> list[Tensor]:
    head = model.get_output_embeddings().weight
    return [head, *(leaf for leaf in model.parameters() if leaf is not head)]


def trl_head(way: str, size: Size) -> Call:
    utils: Any = importlib.import_module("trl.trainer.utils")
    options = 1.0, 32768, None, 1.0, ("log_probs", "entropy")  # 32768 columns at once, as in TRL

    def log_probs(hidden: Tensor, weight: Tensor, ids: Tensor) -> Tensor:
        if size.counted == 1:
            return utils._ChunkedLogProbFunction.apply(hidden, weight, None, ids, *options)[0]
        # As TRL's forward does it.
        log_probs = utils._ChunkedLogProbFunction.apply(hidden[mask], weight, None, ids[mask], *options)[0]
        return log_probs.new_zeros(mask.shape).masked_scatter(mask, log_probs)

    mask = size.mask().flatten()
    return head_alone(log_probs, size, parallel_lce.trl if way == "ours" else None)


def grpo(way: str, size: Size) -> Call:
    trl, datasets, tokenizers = map(importlib.import_module, ("trl", "datasets", "tokenizers"))
    model, on_cpu = model_of("Qwen2", size), size.device.type == "cpu"
    tokenizer = importlib.import_module("transformers").PreTrainedTokenizerFast(  # needed to make a trainer, not used
        tokenizer_object=tokenizers.Tokenizer(tokenizers.models.WordLevel({"</s>": 0}, unk_token="</s>")),
        eos_token="</s>",
        pad_token="</s>",
    )
    options = dict(per_device_train_batch_size=2, num_generations=2, report_to="none", use_cpu=on_cpu, bf16=not on_cpu)
    with tempfile.TemporaryDirectory() as folder:
        trainer = trl.GRPOTrainer(
            model,
            reward_funcs=lambda completions, **_: [0.0] * len(completions),
            args=trl.GRPOConfig(folder, **options),
            train_dataset=datasets.Dataset.from_list([{"prompt": "</s>"}]),
            processing_class=tokenizer,
        )
    trainer.current_gradient_accumulation_steps = 1  # this and the next line are done by train()
    trainer.model.gradient_checkpointing_enable(trainer.args.gradient_checkpointing_kwargs)
    ids, start = size.ids(), size.batch[1] // 4  # of the completions
    mask, advantages = torch.ones_like(ids), 1 + size.normal(1, size.batch[0])
    inputs = dict(prompt_ids=ids[:, :start], completion_ids=ids[:, start:], advantages=advantages)
    counts = size.mask().flip(1).long()  # completions end early
    inputs |= dict(prompt_mask=mask[:, :start], completion_mask=counts[:, : -start or None])
    inputs["num_items_in_batch"] = inputs["completion_mask"].sum()
    plugin = parallel_lce.trl if way == "ours" else None
    return step(lambda: trainer.compute_loss(trainer.model, inputs), leaves_of(trainer.model), plugin)


def verl_head(way: str, size: Size) -> Call:
    module: Any = importlib.import_module("verl.utils.kernel.linear_cross_entropy")
    plugin = importlib.import_module("parallel_lce.verl")
    mask, ours = size.mask().flatten(), way == "ours"

    def with_entropy(hidden: Tensor, weight: Tensor, ids: Tensor) -> Tensor:
        # As verl's engines pass the mask on.
        counts = dict(mask=mask, counted_tokens=count_tokens(mask)) if ours and size.counted < 1 else {}
        log_probs, entropy = module.linear_cross_entropy(hidden[None], weight, ids[None], 1.0, "none", **counts)
        return log_probs + 0.01 * entropy

    return head_alone(with_entropy, size, plugin if ours else None)


def head_alone(value: Callable[..., Tensor], size: Size, plugin: Any) -> Call:
    """The loss is the mean of `value(hidden [N, D], weight [V, D], ids [N]) -> [N]`, with an advantage per token that
    counts."""
    ids = size.ids().view(-1)
    advantages, hidden = 1 + size.normal(1, len(ids)), size.normal(2, len(ids), size.hidden_size)
    weight = size.normal(3, size.vocab_size, size.hidden_size) * size.hidden_size**-0.5
    hidden, weight = (tensor.to(size.dtype).requires_grad_() for tensor in (hidden, weight))
    advantages = advantages * size.mask().flatten()
    return step(lambda: -(advantages * value(hidden, weight, ids)).mean(), [weight, hidden], plugin)


def torchtitan_head(way: str, size: Size) -> Call:
    losses: Any = importlib.import_module("torchtitan.components.loss")
    config = losses.ChunkedLossWrapper.Config(loss_fn=losses.CrossEntropyLoss.Config())
    if way == "ours":
        door = importlib.import_module("parallel_lce.torchtitan")
        config = door.linear_cross_entropy(config, skip_masked=size.counted < 1)
    torch.manual_seed(0)
    lm_head = torch.nn.Linear(size.hidden_size, size.vocab_size, bias=False, device=size.device, dtype=size.dtype)
    hidden = size.normal(2, *size.batch, size.hidden_size).to(size.dtype).requires_grad_()
    mask, loss_fn = size.mask(), config.build()
    labels, tokens = size.ids().masked_fill(~mask, losses.IGNORE_INDEX), mask.sum()
    loss_fn.set_lm_head(lm_head)
    return step(lambda: loss_fn(hidden, labels, tokens)[0], [lm_head.weight, hidden])


LLAMA_1B = Size(2048, 128256, 16, 32, 8, 8192)  # Llama 3.2 1B
QWEN_1B5 = Size(1536, 151936, 28, 12, 2, 8960)  # Qwen 2.5 1.5B
QWEN_LOSS = replace(QWEN_1B5, num_hidden_layers=0)
CASES = {
    "llama": (partial(causal_model, "Llama"), "transformers ours ours@0 Liger", LLAMA_1B),
    "qwen2": (partial(causal_model, "Qwen2"), "transformers ours ours@0 Liger", QWEN_1B5),
    "qwen2-loss": (partial(causal_model, "Qwen2"), "transformers ours ours@0 Liger", QWEN_LOSS),
    "qwen2-eval": (partial(causal_model, "Qwen2", training=False), "transformers ours ours@0", QWEN_LOSS),
    "megatron-llama": (megatron_model, "Megatron ours ours@0", LLAMA_1B),
    "grpo": (grpo, "TRL ours ours@0", QWEN_1B5),
    "trl": (trl_head, "TRL ours ours@0", QWEN_LOSS),
    "verl": (verl_head, "verl ours ours@0", QWEN_LOSS),
    "verl-wide": (verl_head, "verl ours ours@0", Size(4096, 131072)),
    "torchtitan": (torchtitan_head, "torchtitan ours ours@0", LLAMA_1B),
}
TINY = Size(128, 512, 2, 4, 2, 96, (2, 16))
CAPTION = (
    "×: speed relative to the first way. MiB: peak of a step beyond the model and the batch; gradients count. dW off: "
    "relative difference from the first way's."
)
COLUMNS = {
    "MiB": lambda row: mebibytes(row["peak"]),
    "loss": lambda row: f"{row['loss']:.6f}",
    "dW off": lambda row: f"{row['gradient_off']:.1e}",
}


def main(arguments: list[str] | None = None) -> int:
    parser = new_parser("python -m benchmarks.doors", __doc__, "--json", "--rounds")
    parser.add_argument("--cases", choices=CASES, nargs="+", default=[*CASES])
    parser.add_argument("--counted", type=float, nargs="+", default=[1.0], help="shares of the tokens that count")
    options = parse(parser, arguments)
    with session(options) as run:
        cases = run.content.setdefault("cases", [])
        for name, share in product(options.cases, options.counted):
            build, names, size = CASES[name]
            size = size if options.device == "cuda" else TINY
            size = replace(size, counted=share, device=run.team.device, dtype=options.dtype)
            calls = {way: in_turn(build, way, size) for way in names.split()}
            rows = ways.measure(calls, run.team, options.rounds, compared)
            del calls
            release(run.team.device)
            cases.append({"name": name, "size": str(size), "ways": rows})
            run.say(ways.table(f"{name}: {size}, {size.dtype}", CAPTION, rows, "×", COLUMNS))
            run.save()
    refused = [row["refused"] for case in cases for row in case["ways"] if row["way"].startswith("ours")]
    return int(any(reason and not reason.startswith("not installed") for reason in refused))


def in_turn(build: Callable[..., Call], way: str, size: Size) -> Call:
    """A call of the way's step, which the first call builds: the ways before it are measured without it."""
    kind, _, budget = way.partition("@")
    built = cache(build)

    def call() -> tuple[Tensor, Tensor]:
        with mock.patch.dict(os.environ, {BUDGET_VARIABLE: budget} if budget else {}):
            try:
                return built(kind, size)()
            except ImportError as error:
                raise NotMeasured(f"not installed: {error}") from None

    return call


def compared(way: str, found: tuple[Tensor, Tensor], first: tuple[Tensor, Tensor]) -> dict[str, float]:
    """The loss, and the relative difference of the gradients of the output layer's weight."""
    (loss, gradient), (right, of_right) = found, first
    row = ways.same_loss(way, loss, right)
    off = ((gradient.float() - of_right.float()).norm() / of_right.float().norm()).item()
    if not off <= GRADIENT_LIMIT:
        raise NotMeasured(f"refused: the gradient of the output layer's weight, or the ids, differ by {off:.1e}")
    return row | {"gradient_off": off}


if __name__ == "__main__":
    sys.exit(main())
