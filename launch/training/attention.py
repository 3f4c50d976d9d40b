"""Causal attention through PyTorch's fused kernels. Megatron's own would materialise the s x s matrix."""

import torch
from megatron.core.transformer.enums import AttnMaskType
from megatron.core.transformer.transformer_config import TransformerConfig


class CausalAttention(torch.nn.Module):
    """A core attention for Megatron's layer spec: one sequence per sample, no dropout, no token sees a later one."""

    def __init__(
        self,
        config: TransformerConfig,
        layer_number: int,
        attn_mask_type: AttnMaskType,
        attention_type: str,
        softmax_scale: float | None = None,  # None: 1 / sqrt(d)
        **others: object,  # process groups among them; attention within a rank's own heads needs none
    ):
        super().__init__()
        if attn_mask_type is not AttnMaskType.causal or attention_type != "self" or config.attention_dropout:
            raise ValueError("only causal self-attention without dropout is supported")
        self.softmax_scale = softmax_scale

    def forward(self, query, key, value, attention_mask, packed_seq_params=None, **others) -> torch.Tensor:
        """Of query [s, b, heads/P, d] and key and value [s, b, kv_heads/P, d] the heads' outputs [s, b, heads/P * d].
        The mask is causal, whatever `attention_mask` is."""
        if packed_seq_params is not None:
            raise ValueError("packed sequences are not supported")
        query, key, value = (x.permute(1, 2, 0, 3) for x in (query, key, value))  # [b, heads, s, d]
        grouped = query.size(1) != key.size(1)  # fewer kernels support it: ask only where it is needed
        context = torch.nn.functional.scaled_dot_product_attention(
            query, key, value, is_causal=True, scale=self.softmax_scale, enable_gqa=grouped
        )
        return context.permute(2, 0, 1, 3).flatten(2)
