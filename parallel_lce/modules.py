"""``linear_cross_entropy`` as a module."""

from __future__ import annotations

from typing import Never

import torch
import torch.distributed as dist
from torch import Tensor, nn

from parallel_lce.arguments import LossOptions, as_bool, as_float, as_number, refuse_unknown
from parallel_lce.checks import (
    check_budget,
    check_filtered_loss,
    check_gradient_filter,
    check_logit_options,
    check_loss_options,
    check_process_group,
    check_reduce_dtype,
    check_sequence_parallel,
    check_vocabulary,
)
from parallel_lce.functional import linear_cross_entropy


class _Held:
    """A module's process group. Copies of the module share it; of a pickled one only its number of ranks is left."""

    def __init__(self, group: dist.ProcessGroup | None, lost_ranks: int = 0) -> None:
        self.group, self.lost_ranks = group, lost_ranks

    def __deepcopy__(self, memo: dict) -> _Held:
        return self

    def __reduce__(self) -> tuple:
        return _Held, (None, self.lost_ranks if self.group is None else dist.get_world_size(self.group))


class LinearCrossEntropy(nn.Module):
    """:func:`parallel_lce.linear_cross_entropy` with its options fixed.

    It owns no parameters, so the weight may be tied, sharded or an ``nn.Linear``'s. A copy has the same
    ``process_group``. A pickle has none, since a group belongs to its processes: an unpickled module refuses to run
    until :attr:`process_group` is set again.

    Args:
        reduction, ignore_index, ...: those of :func:`parallel_lce.linear_cross_entropy`, with the same defaults. Not
            ``counted_tokens``; ``logit_scale`` and ``temperature`` are numbers alone.

    Attributes:
        options: the keyword arguments of each call as Python numbers, without ``process_group``.

    Raises:
        ValueError: at once, for an option that the function refuses whatever the tensors are.
    """

    def __init__(
        self,
        *,
        reduction: str = "mean",
        ignore_index: int | None = -100,
        label_smoothing: float = 0.0,
        z_loss: float = 0.0,
        logit_scale: float = 1.0,
        logit_softcap: float | None = None,
        process_group: dist.ProcessGroup | None = None,
        sequence_parallel: bool = False,
        vocab_start: int | None = None,
        vocab_size: int | None = None,
        logits_budget: int | None = None,
        reduce_dtype: torch.dtype | None = None,
        gradient_filter: float | None = None,
        temperature: float = 1.0,
        reduce_hidden_grad: bool = True,
        **unknown: Never,
    ) -> None:
        super().__init__()
        if unknown:
            refuse_unknown(type(self), unknown)
        # Converted here: torch.compile turns NumPy scalars into tensors.
        loss = LossOptions.given(reduction, ignore_index, label_smoothing, z_loss)
        logit_scale, logit_softcap, temperature = map(as_float, (logit_scale, logit_softcap, temperature))
        vocab_start, vocab_size, logits_budget = as_number(vocab_start), as_number(vocab_size), as_number(logits_budget)
        sequence_parallel, reduce_hidden_grad = as_bool(sequence_parallel), as_bool(reduce_hidden_grad)
        check_loss_options(loss)
        check_logit_options(logit_scale, logit_softcap, temperature)
        check_vocabulary(vocab_start, vocab_size)
        check_budget(logits_budget)
        check_reduce_dtype(reduce_dtype)
        gradient_filter = as_float(gradient_filter)
        check_gradient_filter(gradient_filter)
        check_filtered_loss(gradient_filter, loss.label_smoothing)
        check_process_group(process_group)
        check_sequence_parallel(sequence_parallel, reduce_hidden_grad)
        self.options = {
            "reduction": loss.reduction,
            "ignore_index": loss.ignore_index,
            "label_smoothing": loss.label_smoothing,
            "z_loss": loss.z_loss,
            "logit_scale": logit_scale,
            "logit_softcap": logit_softcap,
            "sequence_parallel": sequence_parallel,
            "vocab_start": vocab_start,
            "vocab_size": vocab_size,
            "logits_budget": logits_budget,
            "reduce_dtype": reduce_dtype,
            "gradient_filter": gradient_filter,
            "temperature": temperature,
            "reduce_hidden_grad": reduce_hidden_grad,
        }
        self.process_group = process_group

    @property
    def process_group(self) -> dist.ProcessGroup | None:
        """The tensor-parallel group that shards the vocabulary; None for one process."""
        return self._held.group

    @process_group.setter
    def process_group(self, group: dist.ProcessGroup | None) -> None:
        check_process_group(group)
        self._held = _Held(group)

    def forward(
        self,
        input: Tensor,
        linear_weight: Tensor,
        target: Tensor,
        linear_bias: Tensor | None = None,
        token_weight: Tensor | None = None,
    ) -> Tensor:
        """The loss of ``input [..., D]``, ``linear_weight [V/P, D]`` and ``target [...]``.

        Shapes, result and errors are those of :func:`parallel_lce.linear_cross_entropy`. An unpickled module that has
        lost its process group raises ``ValueError``.
        """
        if self._held.lost_ranks:
            raise ValueError(
                f"this LinearCrossEntropy was pickled with a process_group of {self._held.lost_ranks} rank(s), which a "
                "pickle does not hold: set its process_group"
            )
        return linear_cross_entropy(
            input,
            linear_weight,
            target,
            linear_bias=linear_bias,
            token_weight=token_weight,
            process_group=self._held.group,
            **self.options,
        )

    def extra_repr(self) -> str:
        return ", ".join(f"{name}={value!r}" for name, value in self.options.items())
