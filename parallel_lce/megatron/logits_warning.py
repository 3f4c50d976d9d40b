"""The warning that training makes the logits."""

from __future__ import annotations

import sys
import warnings

import torch


class LogitsWarning(RuntimeWarning):
    """Training makes the whole logits.

    Not a UserWarning: Megatron-LM's programs silence those on all ranks but the first, which has no output layer under
    pipeline parallelism.
    """


def warn_of_logits(module: torch.nn.Module, reason: str, stacklevel: int = 3) -> None:
    """Warn that training makes logits that nobody asked for: once per module and reason, on one of the ranks that have
    the module.

    Raises:
        RuntimeError: ``module`` is an output layer called by a function that makes no logits.
    """
    if (function := getattr(module, "logits_refused_by", None)) is not None:
        raise RuntimeError(f"{function} makes no logits: {reason}")
    if not module.training or _are_asked_for():
        return
    said = vars(module).setdefault("_parallel_lce_said", set())
    if reason in said:
        return
    said.add(reason)
    from megatron.core import parallel_state

    if parallel_state.is_initialized():
        replica = parallel_state.get_data_parallel_rank(with_context_parallel=True)
        if replica or parallel_state.get_tensor_model_parallel_rank():
            return
    message = f"parallel_lce: training makes the whole logits, which need not exist: {reason}"
    warnings.warn(message, LogitsWarning, stacklevel=stacklevel)


def _are_asked_for() -> bool:
    """Whether a language model is running that was called without labels."""
    from megatron.core.models.common.language_module.language_module import LanguageModule

    frame = sys._getframe(2)
    while frame is not None:
        known = frame.f_locals
        names = [name for name in ("labels", "lm_labels") if name in known]
        if names and isinstance(known.get("self"), LanguageModule):
            return known[names[0]] is None
        frame = frame.f_back
    return False
