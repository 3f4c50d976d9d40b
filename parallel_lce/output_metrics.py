"""What is made of a model's output beside its loss: metrics of tokens, as fields of it, and the loss of a Trainer that
smooths labels."""

from __future__ import annotations

import dataclasses
import functools
import inspect
import sys
import traceback
from types import FrameType
from typing import Any, NamedTuple

import torch
from torch import Tensor

from parallel_lce.patching import is_own


class Found(NamedTuple):
    """Of each token: the id of its largest logit; and, if metrics of each token are wanted, its label's log-probability
    and the entropy."""

    argmax: Tensor
    log_prob: Tensor | None = None
    entropy: Tensor | None = None

    @classmethod
    def of_logits(cls, logits: Tensor, target: Tensor, ignore: int, of_each: bool) -> Found:
        argmax = logits.argmax(-1)
        if not of_each or argmax.numel() != target.numel():
            return cls(argmax)
        log_p = torch.log_softmax(logits.float(), -1)
        labels = target.to(log_p.device).view(argmax.shape)
        chosen = log_p.gather(-1, labels.masked_fill(labels == ignore, 0).unsqueeze(-1)).squeeze(-1)
        return cls(argmax, chosen, -(log_p.exp() * log_p).sum(-1))

    def metrics(self, target: Tensor, ignore: int, accuracy: bool) -> dict[str, Tensor]:
        """The fields. Tokens with the target ``ignore`` do not count."""
        counted, metrics = target != ignore, {}
        if accuracy:
            metrics["token_accuracy"] = ((self.argmax == target) & counted).sum() / counted.sum().clamp(min=1)
        if self.log_prob is not None and self.entropy is not None:
            metrics["predicted_ids"] = self.argmax.masked_fill(~counted, -1)
            metrics["log_probs"] = self.log_prob.detach().masked_fill(~counted, 0.0)
            metrics["entropies"] = self.entropy.detach().masked_fill(~counted, 0.0)
        return metrics


@functools.cache
def with_fields(kind: type, names: tuple[str, ...]) -> type:
    """An output's class with these fields. DDP copies outputs field by field: they must be fields."""
    if not dataclasses.is_dataclass(kind):
        return kind
    fields = [(name, Any, dataclasses.field(default=None)) for name in names]

    def reduced(self: Any) -> tuple:
        return _restored, (kind, names, *(getattr(self, field.name) for field in dataclasses.fields(self)))

    return dataclasses.make_dataclass(kind.__name__, fields, bases=(kind,), namespace={"__reduce__": reduced})


def _restored(kind: type, names: tuple[str, ...], *values: Any) -> Any:
    """Of a pickle: the class itself has no place where it could be found."""
    return with_fields(kind, names)(*values)


def labels_of_caller(frame: FrameType) -> tuple[Tensor | None, Any]:
    """The labels that the caller of a model has, but does not give it; and the Trainer that smooths them, or None."""
    for each, _ in traceback.walk_stack(frame):
        # Before Python 3.13 f_locals of a function keeps all its tensors until it returns: it is read where it must be.
        code = each.f_code
        named = "labels" in (*code.co_varnames, *code.co_cellvars, *code.co_freevars)
        if (named or not code.co_flags & inspect.CO_OPTIMIZED) and isinstance(each.f_locals.get("labels"), Tensor):
            return each.f_locals["labels"], _smoothing_trainer(each)
    return None, None


def _smoothing_trainer(frame: FrameType) -> Any:
    """The transformers Trainer whose method this frame is, if its own ``label_smoother`` makes the loss of the logits
    of a whole weight; else None. FSDP and DeepSpeed gather the output layer's weight for the forward alone."""
    trainer = frame.f_locals.get("self")
    smoother = getattr(trainer, "label_smoother", None)
    call = type(getattr(smoother, "own", smoother)).__call__
    trainers = frame.f_globals is getattr(sys.modules.get("transformers.trainer"), "__dict__", None)
    sharded = getattr(trainer, "is_fsdp_enabled", False) or getattr(trainer, "is_deepspeed_enabled", False)
    other = sharded or getattr(trainer, "compute_loss_func", None) is not None
    return trainer if trainers and not other and is_own(call, "transformers.trainer_pt_utils") else None
