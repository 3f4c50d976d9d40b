"""TRL's two functions, of the same contract. They are differentiated by autograd."""

import sys
import types

import torch
from torch.nn import functional as F

from parallel_lce.trl import OUTPUTS
from tools import with_modules


def _log_softmax(hidden, weight, bias, logit_scale, softcap, temperature):
    bias = None if bias is None else bias.to(hidden.dtype)
    z = F.linear(hidden, weight.to(hidden.dtype), bias).float() * logit_scale
    z = (z if softcap is None else softcap * torch.tanh(z / softcap)) / temperature
    return z, z.log_softmax(-1)


class ChunkedLogProbFunction:
    @classmethod
    def apply(cls, *arguments):
        return cls.forward(None, *arguments)

    def forward(ctx, hidden, weight, bias, targets, temperature, chunk_size, softcap=None, logit_scale=1.0, outputs=()):
        z, log_p = _log_softmax(hidden, weight, bias, logit_scale, softcap, temperature)
        p, picked = log_p.exp(), log_p.gather(-1, targets[:, None]).squeeze(-1)
        entropy, squares = -(p * log_p).sum(-1), p.square().sum(-1).log().detach()
        found = dict(zip(OUTPUTS[1:], (entropy, squares, z.mean(-1).detach(), z.argmax(-1) == targets)))
        return picked, *(value if name in outputs else None for name, value in found.items())

    def backward(ctx, *upstream):
        raise NotImplementedError


class ChunkedDivergenceFunction(ChunkedLogProbFunction):
    def forward(ctx, x, w, b, y, u, c, beta, temperature=1.0, scale=1.0, cap=None, teacher_scale=1.0, teacher_cap=None):
        _, log_p = _log_softmax(x, w, b, scale, cap, temperature)
        teacher = y.detach(), u[: len(w)].detach(), c if c is None else c[: len(w)].detach()
        _, log_q = _log_softmax(*teacher, teacher_scale, teacher_cap, temperature)
        p, q = log_p.exp(), log_q.exp()
        log_m = (beta * q + (1 - beta) * p).log()
        of_q, of_p = (q * (log_q - (log_m if beta else log_p))).sum(-1), (p * (log_p - log_m)).sum(-1)
        divergence = of_q if beta == 0 else of_p if beta == 1 else beta * of_q + (1 - beta) * of_p
        return divergence, -(p * log_p).sum(-1).detach()


def installed():
    """A context in which TRL's modules are stand-ins, and this one is the home of its functions."""
    modules = {name: types.ModuleType(name) for name in ("trl", "trl.trainer", "trl.kernels", "trl.trainer.utils")}
    modules |= dict.fromkeys(("trl.kernels.chunked_logprob", "trl.kernels.chunked_divergence"), sys.modules[__name__])
    modules["trl.trainer.utils"]._ChunkedLogProbFunction = ChunkedLogProbFunction
    return with_modules(modules)
