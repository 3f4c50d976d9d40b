"""Stock Megatron-core's GPTModel, built the same way for either loss and on any device."""

from typing import Any

import torch
from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec
from megatron.core.models.gpt.gpt_model import GPTModel
from megatron.core.transformer.transformer_block import TransformerBlockSubmodules
from megatron.core.transformer.transformer_config import TransformerConfig

from training.config import Config

RECOMPUTE: dict[str, Any] = dict(recompute_granularity="full", recompute_method="uniform", recompute_num_layers=1)


class RMSNorm(torch.nn.RMSNorm):
    """PyTorch's RMSNorm for sequence parallelism, which Megatron's own wrapper of it refuses."""

    def __init__(self, config: TransformerConfig, hidden_size: int, eps: float = 1e-5):
        super().__init__(hidden_size, eps=eps)
        # A rank has the gradient of its own part of the sequence. Megatron sums those of marked parameters over ranks.
        self.weight.sequence_parallel = config.sequence_parallel  # pyright: ignore[reportAttributeAccessIssue]


class CausalAttention(torch.nn.Module):
    """A causal core attention without dropout through PyTorch's fused kernels: Megatron's own would materialise the
    s x s matrix."""

    def __init__(self, softmax_scale: float | None = None, **others: object):  # None: 1 / sqrt(d)
        super().__init__()
        self.softmax_scale = softmax_scale

    def forward(self, query, key, value, attention_mask, **others: object) -> torch.Tensor:
        """The heads' outputs [s, b, heads/P * d], from query [s, b, heads/P, d] and key and value
        [s, b, kv_heads/P, d]. The mask is always causal; `attention_mask` is not read."""
        query, key, value = (x.permute(1, 2, 0, 3) for x in (query, key, value))  # [b, heads, s, d]
        grouped = query.size(1) != key.size(1)  # fewer kernels support it: ask only where it is needed
        context = torch.nn.functional.scaled_dot_product_attention(
            query, key, value, is_causal=True, scale=self.softmax_scale, enable_gqa=grouped
        )
        return context.permute(2, 0, 1, 3).flatten(2)


def build_model(config: Config, device: torch.device) -> GPTModel:
    """A GPTModel on `device`, with this rank's shards. Megatron's groups must exist."""
    model, parallel, bf16 = config.model, config.parallel, config.train.precision == "bf16"
    transformer = TransformerConfig(
        num_layers=model.layers,
        hidden_size=model.hidden,
        ffn_hidden_size=model.ffn_hidden,
        num_attention_heads=model.heads,
        num_query_groups=model.kv_heads,
        kv_channels=model.head_dim,
        normalization="RMSNorm",
        gated_linear_unit=True,
        activation_func=torch.nn.functional.silu,
        add_bias_linear=False,
        hidden_dropout=0.0,
        attention_dropout=0.0,
        tensor_model_parallel_size=parallel.tensor,
        sequence_parallel=parallel.sequence and parallel.tensor > 1,
        bf16=bf16,
        params_dtype=torch.bfloat16 if bf16 else torch.float32,
        calculate_per_token_loss=True,
        **(RECOMPUTE if model.recompute else {}),
        **_loss_options(config),
    )
    # Without Transformer Engine and Apex.
    layer: Any = get_gpt_layer_local_spec(normalization="RMSNorm")
    norm: Any = RMSNorm
    layer.submodules.input_layernorm = layer.submodules.pre_mlp_layernorm = norm
    layer.submodules.self_attention.submodules.core_attention = CausalAttention
    layers: Any = TransformerBlockSubmodules([layer] * config.model.layers, layer_norm=norm)
    gpt = GPTModel(
        config=transformer,
        transformer_layer_spec=layers,
        vocab_size=padded_vocab_size(config),
        max_sequence_length=config.train.sequence,
        position_embedding_type="rope",
        rotary_base=config.model.rotary_base,
        share_embeddings_and_output_weights=config.model.tie_embeddings,
    )
    return gpt.to(device)


def _loss_options(config: Config) -> dict[str, Any]:
    """What tells a run with one loss from the others."""
    if config.loss.impl == "stock":
        return {}
    if config.loss.impl == "parallel_lce":
        import parallel_lce.megatron

        budget = config.loss.logits_budget_mib
        parallel_lce.megatron.patch(
            logits_budget=None if budget is None else int(budget * 2**20), gradient_filter=config.loss.gradient_filter
        )
    return {"cross_entropy_loss_fusion": True, "cross_entropy_fusion_impl": config.loss.impl}


def padded_vocab_size(config: Config) -> int:
    """The vocabulary size, rounded up to a multiple of 128 rows on every tensor-parallel rank, as Megatron does."""
    multiple = 128 * config.parallel.tensor
    return -(-config.vocab_size // multiple) * multiple
