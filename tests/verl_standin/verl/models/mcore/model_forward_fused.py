"""Two ends of a Megatron model, neither of which has a mapping without sequence parallelism; packed sequences."""

from dataclasses import dataclass
from types import SimpleNamespace

import torch
from megatron.core import parallel_state
from megatron.core.tensor_parallel.mappings import gather_from_sequence_parallel_region
from verl.utils.kernel.linear_cross_entropy import linear_cross_entropy


@dataclass
class FusedOutputProcessorContext:
    temperature: float


def preprocess_thd_engine(input_ids, pre_process=True, need_roll=False):
    multiple = parallel_state.get_tensor_model_parallel_world_size()
    rows = [torch.nn.functional.pad(row, (0, -len(row) % multiple)) for row in input_ids.unbind()]
    packed = torch.cat(rows)[None]
    return packed.roll(-1, -1) if need_roll else packed, [len(row) for row in rows], None


def postprocess_thd_engine(output, packed_seq_params, input_ids, batch_size):
    rows = zip(output[0].split(packed_seq_params), input_ids.unbind())
    return torch.nested.as_nested_tensor([row[: len(ids)] for row, ids in rows], layout=torch.jagged)


def fused_forward_model_engine(model, input_ids, temperature):
    ids, params, _ = preprocess_thd_engine(input_ids, pre_process=True)
    labels, _, _ = preprocess_thd_engine(input_ids, pre_process=True, need_roll=True)
    output = _fused_GPTModel_forward(model, ids, None, None, labels=labels, temperature=temperature)
    values = dict(log_probs=output.log_probs, entropy=output.entropy)
    return {name: postprocess_thd_engine(v[None], params, input_ids, len(input_ids)) for name, v in values.items()}


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
