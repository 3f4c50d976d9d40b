"""TRL's function, of the same contract. It is differentiated by autograd."""

import sys
import types

import torch
from torch.nn import functional as F

from parallel_lce.trl import OUTPUTS
from tools import with_modules


class ChunkedLogProbFunction:
    @classmethod
    def apply(cls, *arguments):
        return cls.forward(None, *arguments)

    def forward(ctx, hidden, weight, bias, targets, temperature, chunk_size, softcap=None, logit_scale=1.0, outputs=()):
        bias = None if bias is None else bias.to(hidden.dtype)
        z = F.linear(hidden, weight.to(hidden.dtype), bias).float() * logit_scale
        z = (z if softcap is None else softcap * torch.tanh(z / softcap)) / temperature
        log_p = z.log_softmax(-1)
        p, picked = log_p.exp(), log_p.gather(-1, targets[:, None]).squeeze(-1)
        entropy, squares = -(p * log_p).sum(-1), p.square().sum(-1).log().detach()
        found = dict(zip(OUTPUTS[1:], (entropy, squares, z.mean(-1).detach(), z.argmax(-1) == targets)))
        return picked, *(value if name in outputs else None for name, value in found.items())

    def backward(ctx, *upstream):
        raise NotImplementedError


def installed():
    """A context in which TRL's modules are stand-ins, and this one is the home of its function."""
    modules = {name: types.ModuleType(name) for name in ("trl", "trl.trainer", "trl.kernels", "trl.trainer.utils")}
    modules["trl.kernels.chunked_logprob"] = sys.modules[__name__]
    modules["trl.trainer.utils"]._ChunkedLogProbFunction = ChunkedLogProbFunction
    return with_modules(modules)
