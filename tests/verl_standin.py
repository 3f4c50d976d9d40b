"""What parallel_lce.verl needs of verl 0.9.1 and of tensordict, of the same contract, in few lines. A folder to import
them from has a copy of this file for each of their modules."""

import importlib
import os
from types import SimpleNamespace

import torch
from torch.nn.functional import pad

if __name__ == "verl":
    for name in filter(None, os.environ.get("VERL_USE_EXTERNAL_MODULES", "").split(",")):
        importlib.import_module(name)
elif __name__ == "verl.utils.kernel.linear_cross_entropy":

    class LinearCrossEntropy(torch.autograd.Function):
        @staticmethod
        def forward(ctx, hidden, weight, labels, temperature=1.0, reduction="none", dist_process_group=None):
            raise RuntimeError("verl's kernel needs a GPU")

    linear_cross_entropy = LinearCrossEntropy.apply
elif __name__ == "verl.models.mcore.model_forward_fused":
    from verl.utils.kernel.linear_cross_entropy import linear_cross_entropy  # noqa: F401


def TensorDict(data, batch_size=None):
    return data


def NonTensorData(value):
    return value


def forward_with_triton_backend(model, input_ids, temperature, shift_labels, return_dict, **others):
    kernel = importlib.import_module("verl.utils.kernel.linear_cross_entropy").linear_cross_entropy
    hidden = model.model(input_ids=input_ids)[0]
    log_probs, entropy = kernel(hidden, model.lm_head.weight, shift_labels, temperature, "none")
    return SimpleNamespace(log_probs=log_probs, entropy=entropy)


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
