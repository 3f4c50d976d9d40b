"""TRL's function, replaced and not: of a stand-in, and with --all of the release, whose fused head runs, too."""

import contextlib
import importlib
import itertools
import sys
import types
from unittest import mock

import torch
from torch.nn import functional as F

from cases import normal
from measures import assert_near
from parallel_lce import trl as door
from test_checks import _Wrapper
from tools import with_modules
from transformers_models import RELEASE_ALONE, RELEASES, D, V, batch, model_of, on_releases, same, warned

OUTPUTS = door.OUTPUTS


class ChunkedLogProbFunction:
    """TRL's function, of the same contract. It is differentiated by autograd."""

    @classmethod
    def apply(cls, *arguments):
        return cls.forward(None, *arguments)

    def forward(ctx, hidden, weight, bias, targets, temperature, chunk_size, softcap=None, logit_scale=1.0, outputs=()):
        if not torch.is_autocast_enabled("cpu"):
            weight, bias = weight.to(hidden.dtype), None if bias is None else bias.to(hidden.dtype)
        z = F.linear(hidden, weight, bias).float() * logit_scale
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


@contextlib.contextmanager
def patched(release: str):
    with installed() if release == "stand-in" else contextlib.nullcontext():
        utils = importlib.import_module("trl.trainer.utils")
        own = utils._ChunkedLogProbFunction
        door.patch(), door.patch(logits_budget=0)
        try:
            yield own, utils._ChunkedLogProbFunction
        finally:
            door.unpatch()
        assert utils._ChunkedLogProbFunction is own


def agree(own, ours, leaves, rest) -> None:
    """The error of ours against float64 is at most twice TRL's; so are the gradients', dtypes and what is None."""
    found = []
    for function, dtype in ((own, None), (ours, None), (ChunkedLogProbFunction, torch.float64)):
        each = [v if v is None else v.to(dtype or v.dtype, copy=True).requires_grad_() for v in leaves]
        values = function.apply(*each, *rest)
        upstream = values[0].sum() + (0 if values[1] is None else (values[1] * torch.arange(23)).sum())
        found.append([*values, *torch.autograd.grad(upstream, [v for v in each if v is not None])])
    for i, (theirs, mine, exact) in enumerate(zip(*found)):
        assert (mine is None) == (theirs is None) == (exact is None)
        if mine is not None:
            assert mine.dtype == theirs.dtype and mine.requires_grad == (i < 2)
            error, allowed = ((v.double() - exact.double()).norm() for v in (mine, theirs))
            assert error <= 2 * allowed + 2e-7 * exact.double().norm(), (i, error, allowed)


@RELEASES
@on_releases()
def test_log_probs_and_their_gradients_are_trls(member, release):
    with patched(release) as (own, ours):
        h, w, b = normal(23, D).float(), normal(V, D, seed=1).float(), normal(V, seed=2).float()
        targets = torch.arange(23) * 4
        for cap, scale, temperature, bias, names in itertools.product(
            (None, 2.0), (1.0, 0.3), (1.0, 0.7), (None, b), (OUTPUTS, OUTPUTS[:2], (*OUTPUTS[:1], "logits"))
        ):
            agree(own, ours, (h, w, bias), (targets, temperature, 40, cap, scale, names))
        with torch.autocast("cpu", torch.float16):  # each operand is rounded once
            agree(own, ours, (h.bfloat16(), w, b), (targets, 1.0, 40, None, 1.0, OUTPUTS[:2]))
        empty = ours.apply(h[:0], w, None, targets[:0], 1.0, 40, None, 1.0, OUTPUTS)
        assert [value.shape for value in empty] == [(0,)] * 5
        # Outside of the vocabulary, as for -100, TRL's and ours are of a logit of 0.
        z = F.linear(h, w.requires_grad_(), b)
        inside, labels = torch.arange(23) > 4, torch.cat([torch.tensor([-100, V, V + 5, -1, -7]), targets[5:]])
        exact = z.gather(-1, labels.clamp(0, V - 1)[:, None])[:, 0].where(inside, 0.0) - z.logsumexp(-1)
        found, *_ = ours.apply(h, w, b, labels, 1.0, 40)
        for pair in ((found, exact), (torch.autograd.grad(v.square().sum(), w)[0] for v in (found, exact))):
            assert_near(*pair, 2e-6)


@RELEASES
@on_releases()
def test_what_ours_refuse_trls_own_computes_and_it_is_said_once(member, release):
    x, w, ids = torch.randn(5, D), torch.randn(V, D), torch.arange(5)
    of_zero, quantized = torch.nn.Parameter(w.clone()), w.as_subclass(_Wrapper)
    of_zero.ds_id = 3
    cases = {"or a tensor of target's shape [5]": (x, w, None, ids, torch.tensor(0.7), 9)}
    cases |= {"of ZeRO-3": (x, of_zero, None, ids, 1.0, 9), "_Wrapper": (x, quantized, None, ids, 1.0, 9)}
    with patched(release) as (_, ours):
        for words, given in cases.items():
            own = types.SimpleNamespace(__name__="it", apply=lambda *arguments: arguments)
            with warned((door.TRLWarning,)) as found, mock.patch.object(ours, "own", own):
                fewer = x[:4], *given[1:3], ids[:4], *given[4:]
                assert ours.apply(*given) == given and ours.apply(*fewer) == fewer
            assert len(found) == 1 and words in found[0]


@RELEASES
@on_releases()
def test_a_function_that_somebody_else_has_put_there_stays(member, release):
    with patched(release) as (own, _):
        utils, derived = sys.modules["trl.trainer.utils"], type("Derived", (own,), {})
        changes = (utils, "_ChunkedLogProbFunction", derived), (own, "backward", staticmethod(F.silu))
        for change, kept in zip(changes, (derived, own)):
            door.unpatch()
            with mock.patch.object(*change), warned((door.TRLWarning,)) as found:
                door.patch()
                assert utils._ChunkedLogProbFunction is kept
            assert "hunkedLogProbFunction is not TRL's function as released: it stays" in found[0], found


@RELEASE_ALONE
@on_releases()
def test_the_fused_head_of_a_model_gives_what_it_gives_without(member, release):
    utils, found = importlib.import_module("trl.trainer.utils"), []
    for ours in (False, True):
        model = model_of(release, "capped").train()
        utils.add_fused_lm_head(model, temperature=0.7, outputs=OUTPUTS)
        with mock.patch.object(door, "statistics_of", wraps=door.statistics_of) as called:
            if ours:
                door.patch()
            output = model(**batch(0), fused_lm_head=True)
            door.unpatch()
        assert bool(called.call_count) == ours
        (output.loss + output.entropy.sum()).backward()
        found.append([*(output[name] for name in OUTPUTS), *(p.grad for p in model.parameters())])
    same(*found)
