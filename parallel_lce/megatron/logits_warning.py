"""The warning that training makes the logits."""

from __future__ import annotations

import sys
import traceback
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
    said = vars(module).setdefault("_parallel_lce_said", set())
    if not module.training or reason in said or _are_asked_for():
        return
    said.add(reason)
    from megatron.core import parallel_state as ranks

    if ranks.is_initialized():
        if ranks.get_data_parallel_rank(with_context_parallel=True) or ranks.get_tensor_model_parallel_rank():
            return
    message = f"parallel_lce: training makes the whole logits, which need not exist: {reason}"
    warnings.warn(message, LogitsWarning, stacklevel=stacklevel)


def _are_asked_for() -> bool:
    """Whether the caller asked for logits: a language model that was called without labels is on the stack."""
    from megatron.core.models.common.language_module.language_module import LanguageModule

    for frame, _ in traceback.walk_stack(sys._getframe()):
        local = frame.f_locals
        name = next((name for name in ("labels", "lm_labels") if name in local), None)
        if name is not None and isinstance(local.get("self"), LanguageModule):
            return local[name] is None
    return False
