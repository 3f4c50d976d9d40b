"""Two ends of a Megatron model, neither of which has a mapping without sequence parallelism."""

from dataclasses import dataclass
from types import SimpleNamespace

from megatron.core import parallel_state
from megatron.core.tensor_parallel.mappings import gather_from_sequence_parallel_region
from verl.utils.kernel.linear_cross_entropy import linear_cross_entropy


@dataclass
class FusedOutputProcessorContext:
    temperature: float


def preprocess_thd_engine(ids, need_roll=False):
    raise NotImplementedError


def postprocess_thd_engine(output):
    raise NotImplementedError


def fused_output_processor(*, hidden_states, output_layer, output_weight, labels, context, config, **others):
    states = gather_from_sequence_parallel_region(hidden_states) if config.sequence_parallel else hidden_states
    weight = output_layer.weight if output_weight is None else output_weight
    group = parallel_state.get_tensor_model_parallel_group()
    log_probs, entropy = linear_cross_entropy(states, weight, labels, context.temperature, "none", group)
    return SimpleNamespace(log_probs=log_probs, entropy=entropy, hidden_states=hidden_states)


def _fused_GPTModel_forward(model, input_ids, position_ids, attention_mask, *, labels, temperature):
    embedded, rotary, *_ = model._preprocess(input_ids=input_ids, position_ids=position_ids)
    hidden = model.decoder(hidden_states=embedded, attention_mask=attention_mask, rotary_pos_emb=rotary)
    tied = model.share_embeddings_and_output_weights
    end = dict(output_layer=model.output_layer, output_weight=model.embedding.word_embeddings.weight if tied else None)
    context = FusedOutputProcessorContext(temperature)
    return fused_output_processor(hidden_states=hidden, labels=labels, context=context, config=model.config, **end)
