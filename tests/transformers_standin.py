"""What parallel_lce.transformers and parallel_lce.trl use of transformers 5 and TRL 1.16, of the same contract."""

import copy
import sys
import types
from collections import OrderedDict

import torch
from torch import nn
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor
from torch.utils._pytree import register_pytree_node

from parallel_lce.transformers import PACKAGES
from tools import with_modules
from zero_standin import gathered

PACKAGES.add(__name__)  # this module stands for that package


def ForCausalLMLoss(
    logits, labels, vocab_size, num_items_in_batch=None, ignore_index=-100, shift_labels=None, **kwargs
):
    if shift_labels is None:
        shift_labels = nn.functional.pad(labels, (0, 1), value=ignore_index)[..., 1:].contiguous()
    reduction = "mean" if num_items_in_batch is None else "sum"
    logits = logits.float().view(-1, vocab_size)
    loss = nn.functional.cross_entropy(logits, shift_labels.view(-1), ignore_index=ignore_index, reduction=reduction)
    return loss if num_items_in_batch is None else loss / num_items_in_batch


class Output(OrderedDict):
    def __getattr__(self, name: str):
        if name not in self:
            raise AttributeError(name)
        return self[name]


def ForMaskedLMLoss(logits, labels, vocab_size, **kwargs):
    return nn.functional.cross_entropy(logits.float().view(-1, vocab_size), labels.view(-1))


LOSS_MAPPING = {"ForCausalLM": ForCausalLMLoss, "ForMaskedLM": ForMaskedLMLoss}


# As transformers does for its outputs. FSDP2 of torch 2.11 finds a forward's tensors only in what is registered.
register_pytree_node(Output, lambda o: ([*o.values()], [*o]), lambda values, names: Output(zip(names, values)))


class CausalLM(nn.Module):
    def __init__(self, V: int, D: int, bias=False, tied=False, cap=None, scale=None) -> None:
        super().__init__()
        self.model = nn.ModuleDict({"embed": nn.Embedding(V, D), "norm": nn.Linear(D, D)})
        self.lm_head = nn.Linear(D, V, bias=bias)
        if tied:
            self.lm_head.weight = self.model["embed"].weight
        self.vocabulary, self.loss_type, self.cap, self.scale = V, "ForCausalLM", cap, scale

    @property
    def loss_function(self):
        return self._loss_function if hasattr(self, "_loss_function") else LOSS_MAPPING[self.loss_type]

    @loss_function.setter
    def loss_function(self, value) -> None:
        self._loss_function = value

    def get_input_embeddings(self) -> nn.Module:
        return self.model["embed"]

    def get_output_embeddings(self) -> nn.Module:
        return self.lm_head

    def forward(self, input_ids, labels=None, return_dict=True, **kwargs):
        logits = self.lm_head(torch.tanh(self.model["norm"](self.model["embed"](input_ids))))
        if self.scale is not None:
            logits = logits * self.scale
        if self.cap is not None:
            logits = torch.tanh(logits.float().contiguous() / self.cap) * self.cap
        loss = None if labels is None else self.loss_function(logits, labels, self.vocabulary, **kwargs)
        return Output(loss=loss, logits=logits) if return_dict else (loss, logits)[loss is None :]


class ModulesToSave(nn.Module):
    """PEFT's wrapper of this name, around the output layer: it trains a copy, and has the copy's attributes."""

    def __init__(self, module: nn.Module) -> None:
        super().__init__()
        self.original_module = module.requires_grad_(False)
        self.modules_to_save = nn.ModuleDict({"default": copy.deepcopy(module).requires_grad_(True)})

    def __getattr__(self, name: str):
        try:
            return super().__getattr__(name)
        except AttributeError:
            return getattr(self.modules_to_save["default"], name)

    def forward(self, *arguments, **options):
        return self.modules_to_save["default"](*arguments, **options)


class ColwiseGatherOutput:
    """transformers' style of this name, on the layer alone."""

    def install_forward(self, module: nn.Module, mesh) -> None:
        for name, parameter in [*module.named_parameters()]:
            setattr(module, name, nn.Parameter(distribute_tensor(parameter.data, mesh, [Shard(0)])))
        original_forward = module.forward

        def tp_forward(hidden):
            hidden = DTensor.from_local(hidden, mesh, [Replicate()], run_check=False)
            return original_forward(hidden).redistribute(placements=[Replicate()]).to_local()

        module.forward = tp_forward


class RowwiseSplitInput:
    """transformers' style of this name, on the layer alone."""

    def install_forward(self, module: nn.Module, mesh) -> None:
        module.weight = nn.Parameter(distribute_tensor(module.weight.data, mesh, [Shard(1)]))
        original_forward = module.forward

        def tp_forward(hidden):
            hidden = DTensor.from_local(hidden, mesh, [Replicate()], run_check=False)
            hidden = hidden.redistribute(placements=[Shard(hidden.ndim - 1)])
            return original_forward(hidden).redistribute(placements=[Replicate()]).to_local()

        module.forward = tp_forward


def _log_probs(hidden, weight, bias, logit_scale, softcap, temperature):
    bias = None if bias is None else bias.to(hidden.dtype)
    z = nn.functional.linear(hidden, weight.to(hidden.dtype), bias).float() * logit_scale
    if softcap is not None:
        z = (softcap or 1.0) * torch.tanh(z / (softcap or 1.0))
    return z / temperature, (z / temperature).log_softmax(-1)


class _Function:
    """With logits, whose gradients are autograd's."""

    @classmethod
    def apply(cls, *arguments):
        return cls.forward(None, *arguments)

    def backward(ctx, *upstream):
        raise NotImplementedError


class ChunkedLogProbFunction(_Function):
    def forward(ctx, hidden, weight, bias, targets, temperature, chunk_size, softcap=None, logit_scale=1.0, outputs=()):
        z, log_p = _log_probs(hidden, weight, bias, logit_scale, softcap, temperature)
        p, picked = log_p.exp(), log_p.gather(-1, targets[:, None]).squeeze(-1)
        entropy, squares = -(p * log_p).sum(-1), p.square().sum(-1).log().detach()
        found = {"entropy": entropy, "log_sum_sq_probs": squares, "mean_logits": z.mean(-1).detach()}
        found["is_top1"] = z.argmax(-1) == targets
        return picked, *(value if name in outputs else None for name, value in found.items())


class ChunkedDivergenceFunction(_Function):
    def forward(
        ctx, hidden, weight, bias, teacher, teacher_weight, teacher_bias, beta,
        temperature=1.0, logit_scale=1.0, softcap=None, teacher_logit_scale=1.0, teacher_softcap=None,
    ):  # fmt: skip
        rows = len(weight)
        teacher_bias = None if teacher_bias is None else teacher_bias[:rows]
        of_teacher = teacher, teacher_weight[:rows], teacher_bias, teacher_logit_scale, teacher_softcap, temperature
        _, log_p = _log_probs(hidden, weight, bias, logit_scale, softcap, temperature)
        log_q = _log_probs(*(v.detach() if torch.is_tensor(v) else v for v in of_teacher))[1]
        p, q = log_p.exp(), log_q.exp()
        log_m = (beta * q + (1 - beta) * p).log()
        of_q, of_p = (q * (log_q - (log_m if beta else log_p))).sum(-1), (p * (log_p - log_m)).sum(-1)
        divergence = of_q if beta == 0 else of_p if beta == 1 else beta * of_q + (1 - beta) * of_p
        return divergence, -(p * log_p).sum(-1).detach()


def maybe_gather_lm_head_ctx(*parameters):
    return gathered(*dict.fromkeys(each for each in parameters if each is not None and not each.numel()))


def installed_trl():
    """A context in which TRL's modules are stand-ins. This module is the home of its functions."""
    modules = {name: types.ModuleType(name) for name in ("trl", "trl.trainer", "trl.trainer.utils")}
    modules |= dict.fromkeys(("trl.kernels.chunked_logprob", "trl.kernels.chunked_divergence"), sys.modules[__name__])
    modules["trl.trainer.distillation_trainer"] = types.ModuleType("trl.trainer.distillation_trainer")
    of_utils = {"_ChunkedLogProbFunction": ChunkedLogProbFunction, "maybe_gather_lm_head_ctx": maybe_gather_lm_head_ctx}
    vars(modules["trl.trainer.utils"]).update(of_utils)
    vars(modules["trl.trainer.distillation_trainer"])["ChunkedDivergenceFunction"] = ChunkedDivergenceFunction
    return with_modules(modules)
