"""The fused statistics in TRL: ``patch()`` replaces the function that computes TRL's fused language-model head.

Importing this module does not import TRL; calling ``patch()`` does.
"""

from __future__ import annotations

import importlib
from typing import Any

from torch import Tensor

from parallel_lce.call.checks import int64_ids, renamed
from parallel_lce.core.budget import lean_budget
from parallel_lce.core.options import NO_LABEL
from parallel_lce.functional import token_statistics

_NAME = "_ChunkedLogProbFunction"
_OUTPUTS = ("log_probs", "entropy", "log_sum_sq_probs", "mean_logits", "is_top1")


class _LogProbs:
    """In place of TRL's ``_ChunkedLogProbFunction``, which is ``own``."""

    own: Any = None
    logits_budget: int | None = None

    @classmethod
    def apply(
        cls, hidden, weight, bias, targets, temperature, chunk_size, softcap=None, logit_scale=1.0, outputs=_OUTPUTS
    ) -> tuple[Tensor | None, ...]:
        """The ``outputs``, and the log-probabilities in any case, in the order of ``_OUTPUTS``; None for the others.

        ``hidden [N, D]``; ``weight [V, D]`` and ``bias [V]``, which are cast to its dtype; ids ``targets [N]``. Results
        are ``[N]``, fp32 and bool. The first two have a gradient.
        """
        if unknown := {*outputs} - {*_OUTPUTS}:
            raise ValueError(f"outputs must be among {_OUTPUTS}, got {sorted(unknown)}")
        if hasattr(weight, "ds_id"):  # TRL gathers ZeRO-3's weight for this call, and again in its own backward
            return cls.own.apply(hidden, weight, bias, targets, temperature, chunk_size, softcap, logit_scale, outputs)
        targets = int64_ids("targets", targets)
        inside = (targets >= 0) & (targets < len(weight))
        own = dict(input="hidden", linear_weight="weight", target="targets", linear_bias="bias")
        with renamed(**own):
            found = token_statistics(
                hidden,
                weight.to(hidden.dtype),
                targets.masked_fill(~inside, NO_LABEL),
                linear_bias=bias if bias is None else bias.to(hidden.dtype),
                logit_scale=logit_scale,
                logit_softcap=softcap,
                temperature=temperature,
                logits_budget=lean_budget(cls.logits_budget),
                entropy="entropy" in outputs,
                sum_p_squared="log_sum_sq_probs" in outputs,
                mean_logit="mean_logits" in outputs,
                argmax="is_top1" in outputs,
            )
        squares = None if found.sum_p_squared is None else found.sum_p_squared.detach().log()
        mean = None if found.mean_logit is None else found.mean_logit.detach()
        top = None if found.argmax is None else found.argmax == targets
        assert found.target_log_prob is not None
        # As in TRL, a target outside the vocabulary has a logit of 0.
        return found.target_log_prob.where(inside, -found.lse), found.entropy, squares, mean, top


def patch(*, logits_budget: int | None = None) -> None:
    """Lets TRL compute its fused language-model head by :func:`parallel_lce.token_statistics`.

    It holds for every model that ``add_fused_lm_head`` has changed or will change, and so for TRL's trainers. One call
    computes all ``outputs``, ``[N]`` each: ``is_top1`` in bool, the others in fp32. ``logits_budget`` is as in
    :func:`parallel_lce.linear_cross_entropy`, but by default the environment's, else 128 MiB; a second call replaces
    it. With ZeRO-3, TRL's own function stays.

    Collectives: none. TRL gathers a sharded weight before.

    Raises:
        ImportError: there is no TRL, or one without this head. ValueError: in a forward, as
        :func:`parallel_lce.token_statistics`.
    """
    try:
        utils = importlib.import_module("trl.trainer.utils")
    except ImportError as error:
        raise ImportError(f"parallel_lce.trl needs TRL 1.16 or later (pip install trl): {error}") from error
    own = getattr(utils, _NAME, None)
    if own is None:
        raise ImportError(f"parallel_lce.trl needs TRL 1.16 or later: trl.trainer.utils has no {_NAME}")
    _LogProbs.own = _LogProbs.own if own is _LogProbs else own
    _LogProbs.logits_budget = logits_budget
    setattr(utils, _NAME, _LogProbs)


def unpatch() -> None:
    """Undoes :func:`patch`, if it was called."""
    utils = importlib.import_module("trl.trainer.utils")
    if getattr(utils, _NAME, None) is _LogProbs:
        setattr(utils, _NAME, _LogProbs.own)
