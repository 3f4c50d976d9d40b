"""Stock Megatron-core's GPTModel, built the same way for either loss and on either device."""

import torch
from megatron.core import parallel_state
from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec
from megatron.core.models.gpt.gpt_model import GPTModel
from megatron.core.transformer.transformer_block import TransformerBlockSubmodules
from megatron.core.transformer.transformer_config import TransformerConfig

from training.config import Config, LossImpl


# Settings of a TransformerConfig that otherwise want Apex, Transformer Engine or a GPU.
WITHOUT_EXTENSIONS = {
    "gradient_accumulation_fusion": False,
    "masked_softmax_fusion": False,
    "bias_activation_fusion": False,
    "bias_dropout_fusion": False,
    "apply_rope_fusion": False,
    "persist_layer_norm": False,
}


class RMSNorm(torch.nn.RMSNorm):
    """PyTorch's RMSNorm with the marks that sequence parallelism needs; Megatron's own wrapper of it refuses that."""

    def __init__(self, config: TransformerConfig, hidden_size: int, eps: float = 1e-5):
        super().__init__(hidden_size, eps=eps)
        # Each rank sees its own part of the sequence, so the weight's gradients are partial sums.
        self.weight.sequence_parallel = config.sequence_parallel


def build_model(config: Config, device: torch.device) -> GPTModel:
    """A GPTModel on `device`, fp32, with this rank's shards; equal for equal seeds whatever the loss and device.

    Megatron's tensor-parallel groups must exist. Parameters are initialised on the CPU, each rank drawing the whole
    matrix and keeping its shard.
    """
    transformer = TransformerConfig(
        num_layers=config.model.layers,
        hidden_size=config.model.hidden,
        ffn_hidden_size=config.model.ffn_hidden,
        num_attention_heads=config.model.heads,
        normalization="RMSNorm",
        gated_linear_unit=True,
        activation_func=torch.nn.functional.silu,
        add_bias_linear=False,
        hidden_dropout=0.0,
        attention_dropout=0.0,
        tensor_model_parallel_size=config.parallel.tensor,
        sequence_parallel=config.parallel.sequence and config.parallel.tensor > 1,
        params_dtype=torch.float32,
        use_cpu_initialization=True,
        **WITHOUT_EXTENSIONS,
        **_loss_options(config),
    )
    layer = get_gpt_layer_local_spec(normalization="RMSNorm")
    layer.submodules.input_layernorm = RMSNorm
    layer.submodules.pre_mlp_layernorm = RMSNorm
    model = GPTModel(
        config=transformer,
        transformer_layer_spec=TransformerBlockSubmodules([layer] * config.model.layers, layer_norm=RMSNorm),
        vocab_size=padded_vocab_size(config),
        max_sequence_length=config.train.sequence,
        position_embedding_type="rope",
        share_embeddings_and_output_weights=config.model.tie_embeddings,
    )
    return model.to(device)


def _loss_options(config: Config) -> dict[str, object]:
    """The one place where the two runs differ."""
    if config.loss.impl is LossImpl.stock:
        return {}
    import parallel_lce.megatron

    budget = config.loss.logits_budget_mib
    parallel_lce.megatron.install(**({} if budget is None else {"logits_budget": int(budget * 2**20)}))
    return {"cross_entropy_loss_fusion": True, "cross_entropy_fusion_impl": "parallel_lce"}


def padded_vocab_size(config: Config) -> int:
    """`text.vocab_size` rounded up, as Megatron does, to 128 rows on every rank."""
    multiple = 128 * config.parallel.tensor
    return -(-config.text.vocab_size // multiple) * multiple


def reduce_sequence_parallel_gradients(model: GPTModel) -> None:
    """Sums over the tensor-parallel group the gradients that each rank computed on its own part of the sequence.

    Megatron does this in `finalize_model_grads`, which wants its own data-parallel wrapper and `main_grad`.
    """
    if not model.config.sequence_parallel:
        return
    gradients = [p.grad for p in model.parameters() if getattr(p, "sequence_parallel", False) and p.grad is not None]
    flat = torch.cat([gradient.flatten() for gradient in gradients])
    torch.distributed.all_reduce(flat, group=parallel_state.get_tensor_model_parallel_group())
    for gradient, total in zip(gradients, flat.split([gradient.numel() for gradient in gradients])):
        gradient.copy_(total.view_as(gradient))
