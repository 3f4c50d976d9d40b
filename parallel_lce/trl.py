"""The fused statistics in TRL: ``patch()`` replaces what computes TRL's fused language-model head.

Importing this module imports nothing of TRL; :func:`patch` does.
"""

from __future__ import annotations

import importlib
from typing import Any

from torch import Tensor

from parallel_lce.call.checks import renamed
from parallel_lce.functional import token_statistics

__all__ = ["patch", "unpatch"]

_NAME = "_ChunkedLogProbFunction"
_OUTPUTS = ("log_probs", "entropy", "log_sum_sq_probs", "mean_logits", "is_top1")


class _LogProbs:
    """Has the ``apply`` of TRL's ``_ChunkedLogProbFunction``, which is ``own``."""

    own: Any = None
    options: dict[str, Any] = {}

    @classmethod
    def apply(
        cls,
        hidden: Tensor,
        weight: Tensor,
        bias: Tensor | None,
        targets: Tensor,
        temperature: float,
        chunk_size: int,
        final_logit_softcapping: float | None = None,
        logit_scale: float = 1.0,
        outputs: tuple[str, ...] = _OUTPUTS,
    ) -> tuple[Tensor, Tensor | None, Tensor | None, Tensor | None, Tensor | None]:
        """Statistics of ``softcap(logit_scale * (hidden @ weight.T + bias)) / temperature``, by one call.

        Args:
            hidden: ``[N, D]``. weight: ``[V, D]``. bias: ``[V]`` or None. They are cast to the dtype of ``hidden``, or
                to autocast's.
            targets: ids ``[N]``.
            chunk_size: not used.
            outputs: names of the results that are asked for, beside the log-probabilities; the others are None.

        Returns:
            Log-probabilities and entropies, which have a gradient; log Σp², the mean logit, and whether the target is
            the first of the largest logits. ``[N]`` each, fp32, the last bool.

        Raises:
            ValueError: ``outputs`` has another name, or as :func:`parallel_lce.token_statistics`.
        """
        if unknown := {*outputs} - {*_OUTPUTS}:
            raise ValueError(f"outputs must be among {_OUTPUTS}, got {sorted(unknown)}")
        if hasattr(weight, "ds_id"):  # TRL gathers ZeRO-3's weight for the call, and again in its own backward
            given = temperature, chunk_size, final_logit_softcapping, logit_scale, outputs
            return cls.own.apply(hidden, weight, bias, targets, *given)
        weight, bias = weight.to(hidden.dtype), None if bias is None else bias.to(hidden.dtype)
        own = dict(input="hidden", linear_weight="weight", target="targets", linear_bias="bias")
        with renamed(logit_softcap="final_logit_softcapping", **own):
            found = token_statistics(
                hidden,
                weight,
                targets,
                linear_bias=bias,
                logit_scale=logit_scale,
                logit_softcap=final_logit_softcapping,
                temperature=temperature,
                expected_logit="entropy" in outputs,
                sum_p_squared="log_sum_sq_probs" in outputs,
                mean_logit="mean_logits" in outputs,
                argmax="is_top1" in outputs,
                **cls.options,
            )
        assert found.target_log_prob is not None
        squares = None if found.sum_p_squared is None else found.sum_p_squared.detach().log()
        mean = None if found.mean_logit is None else found.mean_logit.detach()
        top = None if found.argmax is None else found.argmax == targets
        return found.target_log_prob, found.entropy, squares, mean, top


def patch(*, logits_budget: int | None = None) -> None:
    """Lets TRL compute its fused language-model head by :func:`parallel_lce.token_statistics`.

    It holds for every model that ``add_fused_lm_head`` has changed or will change, and so for TRL's trainers, from SFT
    to GRPO. Log-probabilities, entropies and the other ``outputs`` are fp32 and come from one call; no logits are
    rounded to the hidden states' dtype. A second call replaces ``logits_budget``, which is as in
    :func:`parallel_lce.linear_cross_entropy`. With DeepSpeed's ZeRO-3, TRL's own function computes them.

    Collectives: none; TRL gathers a sharded weight before.

    Raises:
        ImportError: TRL is not installed, or has no such head.
        ValueError: in a forward, as :func:`parallel_lce.token_statistics`.
    """
    utils = importlib.import_module("trl.trainer.utils")
    own = getattr(utils, _NAME, None)
    if own is None:
        raise ImportError(f"parallel_lce.trl needs TRL 1.16 or later: trl.trainer.utils has no {_NAME}")
    if own is not _LogProbs:
        _LogProbs.own = own
    _LogProbs.options = {"logits_budget": logits_budget}
    setattr(utils, _NAME, _LogProbs)


def unpatch() -> None:
    """Undoes :func:`patch`. ``ValueError`` without one."""
    utils = importlib.import_module("trl.trainer.utils")
    if getattr(utils, _NAME, None) is not _LogProbs:
        raise ValueError("parallel_lce.trl.patch() has not been called")
    setattr(utils, _NAME, _LogProbs.own)
