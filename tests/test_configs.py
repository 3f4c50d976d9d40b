"""The arguments for Megatron-LM beside the configurations: they describe the same model and training."""

from __future__ import annotations

from pathlib import Path

import pytest

pytest.importorskip("pydantic", reason="needs the training program's packages")

from training.config import ROOT, load_config

ARGUMENTS = sorted((ROOT / "configs").glob("*.args"))


def _flags(path: Path) -> dict[str, str | None]:
    """Each flag and its value: one flag on a line, and whole lines of comments, which `grep -v '^#'` takes away."""
    lines = [line for line in path.read_text().splitlines() if not line.startswith("#")]
    flags = [line.split(" ") for line in lines]
    assert all(words[0].startswith("--") and len(words) <= 2 for words in flags), lines
    parsed = {words[0]: (*words, None)[1] for words in flags}
    assert len(parsed) == len(flags), "a flag is given twice"
    return parsed


def test_there_are_arguments_for_the_large_models():
    assert {path.stem for path in ARGUMENTS} == {"llama3-8b", "large-vocab"}


@pytest.mark.parametrize("path", ARGUMENTS, ids=lambda path: path.stem)
def test_arguments_describe_the_configuration(path):
    flags = _flags(path)
    config = load_config(path.with_suffix(".yaml"), [])
    model, train, parallel = config.model, config.train, config.parallel
    numbers = {
        "--num-layers": model.layers,
        "--hidden-size": model.hidden,
        "--ffn-hidden-size": model.ffn_hidden,
        "--num-attention-heads": model.heads,
        "--num-query-groups": model.kv_heads,
        "--vocab-size": model.vocab_size - 1,  # NullTokenizer adds one
        "--rotary-base": model.rotary_base,
        "--seq-length": train.sequence,
        "--max-position-embeddings": train.sequence,
        "--micro-batch-size": train.micro_batch,
        "--global-batch-size": train.micro_batch * train.micro_batches * parallel.data,
        "--train-iters": train.steps,
        "--lr": train.learning_rate,
        "--lr-warmup-iters": train.warmup_steps,
        "--weight-decay": train.weight_decay,
        "--clip-grad": train.clip_grad,
        "--seed": train.seed,
        "--tensor-model-parallel-size": parallel.tensor,
        "--pipeline-model-parallel-size": parallel.pipeline,
    }
    own_head_dim = model.head_dim * model.heads != model.hidden
    if own_head_dim:
        numbers["--kv-channels"] = model.head_dim
    assert {name: float(flags[name]) for name in numbers} == numbers
    switches = {
        "--untie-embeddings-and-output-weights": not model.tie_embeddings,
        "--kv-channels": own_head_dim,
        "--sequence-parallel": parallel.sequence,
        "--use-distributed-optimizer": parallel.distributed_optimizer,
        "--overlap-grad-reduce": parallel.overlap_grad_reduce,
        "--recompute-granularity": model.recompute,
        "--cross-entropy-loss-fusion": True,
        "--mock-data": True,
    }
    assert {name: name in flags for name in switches} == switches
    assert flags["--cross-entropy-fusion-impl"] == "parallel_lce"
