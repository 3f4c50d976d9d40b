"""The fused statistics in TRL: ``patch()`` replaces the autograd function in which TRL's trainers project hidden states
onto the vocabulary in tiles."""

from __future__ import annotations

import importlib
import re
from functools import partial
from typing import Any

from torch import Tensor

from parallel_lce.call.checks import int64_ids
from parallel_lce.call.prepare import autocasted
from parallel_lce.core.options import Options, Tensors, check_option
from parallel_lce.core.plan import lean_budget
from parallel_lce.functional import statistics_of
from parallel_lce.neighbours import TRL_FUNCTION, TRL_KERNEL, TRL_USER
from parallel_lce.patching import Replacements, is_own, warn

OUTPUTS = "log_probs", "entropy", "log_sum_sq_probs", "mean_logits", "is_top1"


class TRLWarning(UserWarning):
    """TRL's own function runs, or somebody else's stays."""


class _Fused:
    """In place of TRL's autograd function, ``own``."""

    def __init__(self, logits_budget: int | None, own: Any) -> None:
        self.own, self.logits_budget, self._said = own, logits_budget, set[str]()

    def apply(self, *arguments: Any) -> tuple[Tensor | None, ...]:
        """What the fused function refuses TRL's own computes."""
        try:
            if any(hasattr(each, "ds_id") for each in arguments):
                raise ValueError("its weight is a parameter of ZeRO-3")
            return self._log_probs(*arguments)
        except (ValueError, NotImplementedError) as refusal:
            reason = str(refusal).partition(", got ")[0]
        key = re.sub(r"\d+", "", reason)  # sizes differ by batch
        if key not in self._said:
            self._said.add(key)
            warn(f"parallel_lce: TRL's own {self.own.__name__} runs: {reason}", TRLWarning)
        return self.own.apply(*arguments)

    def _log_probs(
        self, hidden, weight, bias, targets, temperature, chunk_size, softcap=None, logit_scale=1.0, outputs=OUTPUTS
    ) -> tuple[Tensor | None, ...]:
        """``OUTPUTS`` of ``hidden [N, D]``, ``weight [V, D]``, ``bias [V]`` and ids ``targets [N]``: ``[N]`` each, None
        if not in ``outputs``, except the first. The first two have a gradient. As in TRL's function weight and bias are
        cast to ``hidden``'s dtype, all to autocast's if that is on, and a target outside the vocabulary has the logit
        0."""
        targets = int64_ids("targets", targets)
        hidden, weight, _, bias, *_ = autocasted(Tensors(hidden, weight, linear_bias=bias))
        bias = bias if bias is None else bias.to(hidden.dtype)
        options = Options(
            "token_statistics",
            logit_scale=logit_scale,
            logit_softcap=softcap,
            temperature=temperature,
            logits_budget=lean_budget(self.logits_budget),
            entropy="entropy" in outputs,
            sum_p_squared="log_sum_sq_probs" in outputs,
            mean_logit="mean_logits" in outputs,
            argmax="is_top1" in outputs,
        )
        found: Any = statistics_of(options, Tensors(hidden, weight.to(hidden.dtype), targets, bias), None)
        is_top1 = None if found.argmax is None else found.argmax == targets
        squares = None if found.sum_p_squared is None else found.sum_p_squared.detach().log()
        mean = None if found.mean_logit is None else found.mean_logit.detach()
        results = found.target_log_prob, found.entropy, squares, mean
        return *(None if value is None else value.float() for value in results), is_top1


_replacements = Replacements()


def patch(*, logits_budget: int | None = None) -> None:
    """Lets TRL compute its fused language-model head by :func:`parallel_lce.token_statistics`, for models and trainers
    built before and after. ``logits_budget`` is as in :func:`parallel_lce.linear_cross_entropy`, but by default the
    environment's, else 128 MiB; a second call replaces it.

    What ours refuses TRL's own computes, with one :class:`TRLWarning` for each reason, and a function that somebody
    else has replaced stays. ``ImportError``: there is no TRL, or one without this head.
    """
    check_option("logits_budget", logits_budget)
    unpatch()
    try:
        kernel, user = importlib.import_module(TRL_KERNEL), importlib.import_module(TRL_USER)
        own = getattr(user, TRL_FUNCTION)
    except (ImportError, AttributeError) as error:
        raise ImportError(f"parallel_lce.trl needs TRL 1.16 or later (pip install trl): {error}") from error
    methods = [getattr(own, name, None) for name in ("forward", "backward")]
    if own in vars(kernel).values() and all(is_own(method, TRL_KERNEL) for method in methods):
        _replacements.replace(user, TRL_FUNCTION, partial(_Fused, logits_budget))
    else:
        warn(f"parallel_lce: {TRL_USER}.{TRL_FUNCTION} is not TRL's function as released: it stays", TRLWarning)


def unpatch() -> None:
    """Undoes :func:`patch`, if it was called."""
    _replacements.restore()
