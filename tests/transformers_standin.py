"""What parallel_lce.transformers uses of transformers 5, of the same contract."""

import copy
from collections import OrderedDict

import torch
from torch import nn
from torch.utils._pytree import register_pytree_node

from parallel_lce.neighbours import TRANSFORMERS

TRANSFORMERS.add(__name__)  # this module stands for that package


def fixed_cross_entropy(logits, target, num_items_in_batch, ignore_index):
    reduction = "mean" if num_items_in_batch is None else "sum"
    loss = nn.functional.cross_entropy(logits, target, ignore_index=ignore_index, reduction=reduction)
    return loss if num_items_in_batch is None else loss / num_items_in_batch


def ForCausalLMLoss(
    logits, labels, vocab_size, num_items_in_batch=None, ignore_index=-100, shift_labels=None, **kwargs
):
    if shift_labels is None:
        shift_labels = nn.functional.pad(labels, (0, 1), value=ignore_index)[..., 1:].contiguous()
    logits = logits.float().view(-1, vocab_size)
    return fixed_cross_entropy(logits, shift_labels.view(-1), num_items_in_batch, ignore_index)


class Output(OrderedDict):
    def __getattr__(self, name: str):
        if name not in self:
            raise AttributeError(name)
        return self[name]


# As transformers does for its outputs. FSDP2 of torch 2.11 finds a forward's tensors only in what is registered.
register_pytree_node(Output, lambda o: ([*o.values()], [*o]), lambda values, names: Output(zip(names, values)))


class CausalLM(nn.Module):
    def __init__(self, V: int, D: int, bias=False, tied=False, cap=None, scale=None) -> None:
        super().__init__()
        self.model = nn.ModuleDict({"embed": nn.Embedding(V, D), "norm": nn.Linear(D, D)})
        self.lm_head = nn.Linear(D, V, bias=bias)
        if tied:
            self.lm_head.weight = self.model["embed"].weight
        self.vocabulary, self.cap, self.scale = V, cap, scale

    @property
    def loss_function(self):
        return getattr(self, "_loss_function", ForCausalLMLoss)

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
