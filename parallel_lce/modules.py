"""``linear_cross_entropy`` as a module."""

from __future__ import annotations

import torch
import torch.distributed as dist
from torch import Tensor, nn

from parallel_lce.checks import check_loss_options
from parallel_lce.functional import linear_cross_entropy


class LinearCrossEntropy(nn.Module):
    """:func:`parallel_lce.linear_cross_entropy` with its options fixed; it owns no parameters, so
    that the weight may be tied, sharded or an ``nn.Linear``'s."""

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
    ) -> None:
        super().__init__()
        check_loss_options(reduction, ignore_index, label_smoothing, z_loss)
        self.options = {
            "reduction": reduction,
            "ignore_index": ignore_index,
            "label_smoothing": label_smoothing,
            "z_loss": z_loss,
            "logit_scale": logit_scale,
            "logit_softcap": logit_softcap,
            "process_group": process_group,
            "sequence_parallel": sequence_parallel,
            "vocab_start": vocab_start,
            "vocab_size": vocab_size,
            "logits_budget": logits_budget,
            "reduce_dtype": reduce_dtype,
        }

    def forward(
        self,
        input: Tensor,
        linear_weight: Tensor,
        target: Tensor,
        linear_bias: Tensor | None = None,
        token_weight: Tensor | None = None,
    ) -> Tensor:
        """The loss of ``input [..., D]`` and ``target [...]``, as the function returns it."""
        return linear_cross_entropy(
            input,
            linear_weight,
            target,
            linear_bias=linear_bias,
            token_weight=token_weight,
            **self.options,
        )

    def extra_repr(self) -> str:
        shown = {k: v for k, v in self.options.items() if k != "process_group"}
        return ", ".join(f"{name}={value!r}" for name, value in shown.items())
