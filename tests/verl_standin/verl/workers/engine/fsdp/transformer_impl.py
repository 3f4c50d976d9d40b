"""An engine that refuses with fused kernels what verl's refuses."""

import torch
from torch.nn.functional import pad
from verl.utils.torch_functional import expand_as_nested


def get_device_id():
    raise NotImplementedError


class FSDPEngineWithLMHead:
    def prepare_model_inputs(self, micro_batch):
        temperature, ids = micro_batch["temperature"], micro_batch["input_ids"]
        fused = micro_batch["use_fused_kernels"]
        assert not (fused and isinstance(temperature, torch.Tensor))
        padding = (0, -len(ids.values()) % self.pad_to_length_bucket)
        of_tokens = expand_as_nested(torch.as_tensor(temperature).expand(len(ids)), ids).values()
        labels = pad(ids.values().roll(-1), padding)
        kept = dict(
            pad_size=padding[1], input_ids_rmpad_rolled=labels, temperature_rmpad=pad(of_tokens, padding, value=1)
        )
        inputs = dict(input_ids=pad(ids.values(), padding)[None])
        if fused:
            inputs |= dict(temperature=temperature, return_dict=True, shift_labels=labels[None])
        return inputs, kept

    def prepare_model_outputs(self, output, output_args, micro_batch, logits_processor_func):
        assert micro_batch["use_fused_kernels"] and not micro_batch["calculate_sum_pi_squared"]
        found = {}
        for name in ("log_probs", "entropy"):
            values = self._gather_and_unpad_packed(getattr(output, name), output_args["pad_size"])
            found[name] = torch.nested.nested_tensor_from_jagged(values, micro_batch["input_ids"].offsets())
        return found

    def _gather_and_unpad_packed(self, tensor, pad_size):
        return tensor[: len(tensor) - pad_size]

    def forward_step(self, micro_batch, loss_function, forward_only):
        micro_batch = micro_batch.to(get_device_id())
        inputs, kept = self.prepare_model_inputs(micro_batch=micro_batch)
        output = self.module(**inputs, use_cache=False)
        given = dict(output=output, output_args=kept, micro_batch=micro_batch, logits_processor_func=loss_function)
        found = self.prepare_model_outputs(**given)
        return loss_function(model_output=found, data=micro_batch, dp_group=self.get_data_parallel_group())
