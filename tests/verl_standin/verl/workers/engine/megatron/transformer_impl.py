"""An engine that refuses with fused kernels what verl's refuses."""

from functools import partial

import torch
from verl.models.mcore import model_forward_fused


def get_device_id():
    raise NotImplementedError


def _resolve_fused_temperature(temperature):
    values = torch.as_tensor(temperature).flatten()
    assert (values == values[0]).all()
    return float(values[0])


class MegatronEngineWithLMHead:
    def _maybe_enable_fused_kernels(self):
        pass

    def forward_step(self, batch_iter, model, logits_processor_func, postprocess_micro_batch_func):
        batch = next(batch_iter).to(get_device_id())
        assert not batch["calculate_sum_pi_squared"]
        temperature = _resolve_fused_temperature(batch["temperature"])
        output = model_forward_fused.fused_forward_model_engine(model, batch["input_ids"], temperature)
        return output, partial(postprocess_micro_batch_func, data=batch, local_cp_size=None)
