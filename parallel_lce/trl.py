"""The fused statistics and divergences in TRL: ``patch()`` replaces the two autograd functions in which TRL's trainers
project hidden states onto the vocabulary in tiles.

Importing this module does not import TRL; calling ``patch()`` does.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable
from typing import Any

from torch import Tensor

from parallel_lce.call.checks import int64_ids
from parallel_lce.call.prepare import autocasted
from parallel_lce.core.options import Options, Tensors, check_option
from parallel_lce.core.plan import DEFAULT_BUDGET, lean_budget
from parallel_lce.core.private import outside_graphs
from parallel_lce.distillation import check_beta, paired
from parallel_lce.distillation.blocks import divergences
from parallel_lce.functional import token_statistics
from parallel_lce.neighbours import TRL_DIVERGENCE, TRL_LOG_PROBS
from parallel_lce.patching import exchange, is_own, warn

OUTPUTS = "log_probs", "entropy", "log_sum_sq_probs", "mean_logits", "is_top1"
_settings: dict[str, int | None] = {"logits_budget": None}


class TRLWarning(UserWarning):
    """TRL's own function runs, or somebody else's stays."""


class _Fused:
    """In place of one of TRL's autograd functions, ``own``."""

    def __init__(self, own: Any, fused: Callable[..., tuple]) -> None:
        self.own, self._fused = own, fused
        self._said: set[str] = set()

    def apply(self, *arguments: Any) -> tuple[Tensor | None, ...]:
        """What TRL's own returns. What the fused function refuses is TRL's own to answer."""
        try:
            if any(hasattr(each, "ds_id") for each in arguments):
                raise ValueError("its weight is a parameter of ZeRO-3")
            return self._fused(*arguments)
        except (ValueError, NotImplementedError) as refusal:
            reason = str(refusal)
        if (kind := reason.partition(", got ")[0]) not in self._said:
            self._said.add(kind)
            warn(f"parallel_lce: TRL's own {self.own.__name__} runs: {reason}", TRLWarning)
        return self.own.apply(*arguments)


def _log_probs(
    hidden, weight, bias, targets, temperature, chunk_size, softcap=None, logit_scale=1.0, outputs=OUTPUTS
) -> tuple[Tensor | None, ...]:
    """``OUTPUTS`` of ``hidden [N, D]``, ``weight [V, D]``, ``bias [V]`` and ids ``targets [N]``: ``[N]`` each, None
    if it is not among ``outputs``; the log-probabilities in any case. The first two have a gradient. Weight and bias
    are cast to the dtype of the hidden states. A target outside the vocabulary has the logit 0."""
    targets = int64_ids("targets", targets)
    inside = (targets >= 0) & (targets < len(weight))
    found = token_statistics(
        hidden,
        weight.to(hidden.dtype),
        targets.where(inside, 0),
        linear_bias=bias if bias is None else bias.to(hidden.dtype),
        logit_scale=logit_scale,
        logit_softcap=softcap,
        temperature=temperature,
        logits_budget=lean_budget(_settings["logits_budget"]),
        entropy="entropy" in outputs,
        sum_p_squared="log_sum_sq_probs" in outputs,
        mean_logit="mean_logits" in outputs,
        argmax="is_top1" in outputs,
    )
    assert found.target_log_prob is not None  # there is a target
    log_probs = found.target_log_prob.where(inside, -found.lse).float()
    entropy = None if found.entropy is None else found.entropy.float()
    squares = None if found.sum_p_squared is None else found.sum_p_squared.detach().log().float()
    mean = None if found.mean_logit is None else found.mean_logit.detach().float()
    return log_probs, entropy, squares, mean, None if found.argmax is None else found.argmax == targets


@outside_graphs
def _divergence(
    hidden, weight, bias, teacher_hidden, teacher_weight, teacher_bias, beta, temperature=1.0,
    logit_scale=1.0, softcap=None, teacher_logit_scale=1.0, teacher_softcap=None,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """Divergences, which have a gradient, and the student's entropies, ``[N]`` fp32 each. ``hidden [N, D]``,
    ``weight [V, D]``; of the teacher's ``[>= V, E]`` the first V rows count."""
    check_beta(beta)
    student = _side(hidden, weight, bias, temperature, logit_scale, softcap)
    teacher_bias = None if teacher_bias is None else teacher_bias[: len(weight)]
    teacher_weight = teacher_weight[: len(weight)]
    teacher = _side(teacher_hidden, teacher_weight, teacher_bias, temperature, teacher_logit_scale, teacher_softcap)
    losses, entropy = divergences(*paired(*student, *teacher), float(beta), entropy=True)
    assert entropy is not None  # wanted
    return losses.float(), entropy.float()


def _side(hidden, weight, bias, temperature, logit_scale, softcap) -> tuple[Options, Tensors]:
    """The student's or the teacher's. Refuses a bias that would be rounded: TRL adds it in fp32."""
    tensors = autocasted(Tensors(hidden, weight))
    dtype = tensors.input.dtype
    if bias is not None and bias.dtype != dtype:
        raise ValueError(f"its bias is {bias.dtype} and the projection runs in {dtype}: cast the bias")
    tensors = tensors._replace(linear_weight=tensors.linear_weight.to(dtype), linear_bias=bias)
    # Every block adds to all of an fp32 dW. This budget is that of TRL's tiles.
    budget = lean_budget(_settings["logits_budget"], DEFAULT_BUDGET)
    scaled = dict(temperature=temperature, logit_scale=logit_scale, logit_softcap=softcap)
    return Options("trl", logits_budget=budget, **scaled), tensors


_FUNCTIONS = (TRL_LOG_PROBS, _log_probs), (TRL_DIVERGENCE, _divergence)
_replaced: list[tuple[list[tuple[str, str]], _Fused]] = []


def patch(*, logits_budget: int | None = None) -> None:
    """Lets TRL compute its fused language-model head by :func:`parallel_lce.token_statistics`, and the divergence of
    its ``DistillationTrainer`` as :func:`parallel_lce.distillation.divergence` does, for models and trainers built
    before and after. The results are those of TRL's functions, ``[N]`` each: ``is_top1`` in bool, the others in fp32.

    ``logits_budget`` is as in :func:`parallel_lce.linear_cross_entropy`, but by default the environment's, else
    128 MiB, and 1 GiB for the divergence; a second call replaces it.

    What ours refuse TRL's own compute, with one :class:`TRLWarning` for each reason: a parameter of ZeRO-3, a quantized
    weight, a tensor as temperature or scale, a soft-cap that is not positive, a divergence whose bias has another dtype
    than its projection. A function that somebody else has replaced stays, with a warning.

    Collectives: those by which TRL gathers a sharded weight.

    Raises:
        ImportError: there is no TRL, or one without this head. ValueError: an invalid ``logits_budget``.
    """
    check_option("logits_budget", logits_budget)
    unpatch()
    try:
        found = [getattr(importlib.import_module(home), name) for ((home, name), *_), _ in _FUNCTIONS]
    except (ImportError, AttributeError) as error:
        raise ImportError(f"parallel_lce.trl needs TRL 1.16 or later (pip install trl): {error}") from error
    _settings["logits_budget"] = logits_budget
    for own, (places, fused) in zip(found, _FUNCTIONS):
        others = [".".join(places[0])]
        if all(is_own(getattr(own, name, None), places[0][0]) for name in ("forward", "backward")):
            _replaced.append((places, _Fused(own, fused)))
            others = exchange(places, own, _replaced[-1][1])
        for place in others:
            warn(f"parallel_lce: {place} is not TRL's function as released: it stays", TRLWarning)


def unpatch() -> None:
    """Undoes :func:`patch`, if it was called."""
    while _replaced:
        places, ours = _replaced.pop()
        exchange(places, ours, ours.own)
