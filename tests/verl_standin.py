"""What parallel_lce.verl needs of verl 0.9.1 and of tensordict, of the same contract, in few lines. A folder to import
them from has a copy of this file for each of their modules."""

import importlib
import os
from functools import partial
from types import SimpleNamespace

import torch
from torch.nn.functional import pad

if __name__ == "verl":
    for name in filter(None, os.environ.get("VERL_USE_EXTERNAL_MODULES", "").split(",")):
        importlib.import_module(name)
elif __name__ == "verl.models.mcore.model_forward_fused":
    from megatron.core import parallel_state
    from megatron.core.tensor_parallel.mappings import gather_from_sequence_parallel_region
    from verl.utils.kernel.linear_cross_entropy import linear_cross_entropy
elif __name__ == "verl.utils.kernel.linear_cross_entropy":

    class LinearCrossEntropy(torch.autograd.Function):
        @staticmethod
        def forward(ctx, hidden, weight, labels, temperature=1.0, reduction="none", dist_process_group=None):
            raise RuntimeError("verl's kernel needs a GPU")

    linear_cross_entropy = LinearCrossEntropy.apply


get_non_tensor_data = dict.get


def TensorDict(data, batch_size=None):
    return data


def NonTensorData(value):
    return value


def preprocess_thd_engine(input_ids, pre_process=True, need_roll=False):
    ranks = parallel_state.get_tensor_model_parallel_world_size()
    rows = [pad(row, (0, -len(row) % ranks)) for row in input_ids.unbind()]
    packed = torch.cat(rows)[None]
    return packed.roll(-1, -1) if need_roll else packed, [len(row) for row in rows], None


def postprocess_thd_engine(output, packed_seq_params, input_ids, batch_size):
    rows = zip(output[0].split(packed_seq_params), input_ids.unbind())
    return torch.nested.as_nested_tensor([row[: len(ids)] for row, ids in rows], layout=torch.jagged)


def fused_forward_model_engine(model, input_ids, labels, temperature):
    ids, params, _ = preprocess_thd_engine(input_ids, pre_process=True)
    labels, _, _ = preprocess_thd_engine(labels, pre_process=True, need_roll=True)
    output = _fused_GPTModel_forward(model, ids, None, None, labels=labels, temperature=temperature)
    values = dict(log_probs=output.log_probs, entropy=output.entropy)
    return {name: postprocess_thd_engine(v[None], params, input_ids, len(input_ids)) for name, v in values.items()}


def fused_output_processor(*, hidden_states, output_layer, output_weight, labels, context, config, **others):
    states = gather_from_sequence_parallel_region(hidden_states) if config.sequence_parallel else hidden_states
    weight = output_layer.weight if output_weight is None else output_weight
    group = parallel_state.get_tensor_model_parallel_group()
    log_probs, entropy = linear_cross_entropy(states, weight, labels, context.temperature, "none", group)
    return SimpleNamespace(log_probs=log_probs, entropy=entropy)


def _fused_GPTModel_forward(model, input_ids, position_ids, attention_mask, *, labels, temperature):
    embedded, rotary, *_ = model._preprocess(input_ids=input_ids, position_ids=position_ids)
    hidden = model.decoder(hidden_states=embedded, attention_mask=attention_mask, rotary_pos_emb=rotary)
    tied = model.share_embeddings_and_output_weights
    end = dict(output_layer=model.output_layer, output_weight=model.embedding.word_embeddings.weight if tied else None)
    context = SimpleNamespace(temperature=temperature)
    return fused_output_processor(hidden_states=hidden, labels=labels, context=context, config=model.config, **end)


def forward_with_triton_backend(model, input_ids, temperature, shift_labels, return_dict, **others):
    kernel = importlib.import_module("verl.utils.kernel.linear_cross_entropy").linear_cross_entropy
    hidden = model.model(input_ids=input_ids)[0]
    log_probs, entropy = kernel(hidden, model.lm_head.weight, shift_labels, temperature, "none")
    return SimpleNamespace(log_probs=log_probs, entropy=entropy)


class MegatronEngineWithLMHead:
    def _maybe_enable_fused_kernels(self):
        pass

    def prepare_model_inputs(self, batch):
        return {"input_ids": batch["input_ids"], "loss_mask": batch["loss_mask"].to(bool)}

    def forward_step(self, batch_iter, model, logits_processor_func, postprocess_micro_batch_func):
        batch = next(batch_iter)
        input_ids = self.prepare_model_inputs(batch)["input_ids"]
        fused = importlib.import_module("verl.models.mcore.model_forward_fused")
        output = fused.fused_forward_model_engine(model, input_ids, input_ids.clone(), batch["temperature"])
        return output, partial(postprocess_micro_batch_func, data=batch, local_cp_size=None)


class FSDPEngineWithLMHead:
    def prepare_model_inputs(self, micro_batch):
        ids = micro_batch["input_ids"]
        padding = (0, -len(ids.values()) % self.pad_to_length_bucket)
        labels = pad(ids.values().roll(-1), padding)
        inputs = dict(temperature=micro_batch["temperature"], return_dict=True, shift_labels=labels[None])
        return dict(input_ids=pad(ids.values(), padding)[None], **inputs), {"input_ids_rmpad_rolled": labels}

    def forward_step(self, micro_batch, loss_function, forward_only):
        ids = micro_batch["input_ids"]
        inputs, _ = self.prepare_model_inputs(micro_batch=micro_batch)
        output, found = self.module(**inputs), {}
        for name in ("log_probs", "entropy"):
            values = getattr(output, name)[: len(ids.values())]
            found[name] = torch.nested.nested_tensor_from_jagged(values, ids.offsets())
        return loss_function(model_output=found, data=micro_batch, dp_group=None)
