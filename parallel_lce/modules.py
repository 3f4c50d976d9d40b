"""``linear_cross_entropy`` as a module."""

from __future__ import annotations

import copy
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh

from parallel_lce.call.call import features_of
from parallel_lce.call.checks import as_group, public
from parallel_lce.core.options import Options, Tensors, check_options, check_reduction
from parallel_lce.functional import linear_cross_entropy
from parallel_lce.run.token_count import TokenCount


class LinearCrossEntropy(nn.Module):
    """:func:`parallel_lce.linear_cross_entropy` with its options fixed. It owns no parameters.

    ``logit_scale`` and ``temperature`` must be numbers. A copy has the same ``process_group``; PyTorch pickles none.

    Attributes:
        process_group: as given. options: the other keyword arguments of each call.

    Raises:
        ValueError: at once, for an option that the function refuses for all tensors.
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
        process_group: dist.ProcessGroup | DeviceMesh | None = None,
        sequence_parallel: bool = False,
        sequence_dim: int = 0,
        vocab_start: int | None = None,
        vocab_size: int | None = None,
        logits_budget: int | None = None,
        reduce_dtype: torch.dtype | None = None,
        gradient_filter: float | None = None,
        temperature: float = 1.0,
        reduce_hidden_grad: bool = True,
    ) -> None:
        given = locals()
        super().__init__()
        options, no_tensors = Options.of(type(self).__name__, given), Tensors(None, None)
        check_reduction(reduction)
        check_options(options)
        for feature in features_of(options, no_tensors):
            feature.check(options, no_tensors, None)
        self.options = {name: given[name] for name in Options._fields if name in given}
        self.process_group = as_group(process_group)

    def __deepcopy__(self, memo: dict[int, Any]) -> LinearCrossEntropy:
        memo[id(self.process_group)] = self.process_group  # shared, since PyTorch cannot copy it
        copied = type(self).__new__(type(self))
        memo[id(self)] = copied
        vars(copied).update(copy.deepcopy(vars(self), memo))
        return copied

    @public
    def forward(
        self,
        input: Tensor,
        linear_weight: Tensor,
        target: Tensor,
        linear_bias: Tensor | None = None,
        token_weight: Tensor | None = None,
        counted_tokens: int | TokenCount | None = None,
        mask: Tensor | None = None,
    ) -> Tensor:
        tokens = dict(linear_bias=linear_bias, token_weight=token_weight, counted_tokens=counted_tokens, mask=mask)
        options: dict[str, Any] = self.options | tokens
        return linear_cross_entropy(input, linear_weight, target, process_group=self.process_group, **options)

    def extra_repr(self) -> str:
        return ", ".join(f"{name}={value!r}" for name, value in self.options.items())
