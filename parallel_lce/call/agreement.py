"""What all ranks must share: the digest of a call, which every message carries, and what debug mode compares."""

from __future__ import annotations

import torch
from torch import Tensor

from parallel_lce.backends import backend_of
from parallel_lce.call import debug
from parallel_lce.call.checks import check_target
from parallel_lce.core.collectives import Layout, Shard, digest_of
from parallel_lce.core.options import SPOKEN, Options, Tensors, agreed, as_int64
from parallel_lce.core.plan import GradientTraits, default_budget


def shard_of(options: Options, weight: Tensor, layout: Layout) -> Shard:
    rows = weight.shape[0]
    start = layout.rank * rows if options.vocab_start is None else options.vocab_start
    return Shard(start, rows, options.vocab_size)


def digest(options: Options, tensors: Tensors, shape: torch.Size) -> int:
    """Digest of the arguments that must be equal on all ranks. Not in it: the budget, which may depend on a
    rank's memory, and options of gradients, which a rank may not form."""
    start = options.vocab_start if options.vocab_size is None else None
    others = dict(logits_budget=None, reduce_dtype=None, token_weight_gradient=False)
    values = agreed(options._replace(vocab_start=start, **others))
    values = {name: value + 0.0 if isinstance(value, float) else value for name, value in values.items()}  # -0.0 is 0.0
    per_token = tensors.logit_scale is not None, tensors.temperature is not None
    return digest_of(*values.items(), shape.numel(), tensors.input.shape[-1], tensors.input.dtype, *per_token)


def check_together(
    options: Options,
    tensors: Tensors,
    layout: Layout,
    gradients: GradientTraits | None,
    counted: tuple[int, Tensor] | None = None,
) -> None:
    """Debug mode: raise ``ValueError`` unless all ranks make the same call, and for targets as :func:`check_target`.
    ``counted``: the number and the mask of the counted tokens. Their call, which follows, is not compared again."""
    if debug.state.compared:
        debug.state.compared = False
        return
    (count, mask), debug.state.compared = counted or (None, None), counted is not None
    hidden, weight, shard = tensors.input, tensors.linear_weight, shard_of(options, tensors.linear_weight, layout)
    shards: list[debug.Slice] = [(shard.start, shard.rows, debug.fingerprint(weight[: shard.real_rows]))]
    if layout.ranks > 1:
        if options.logits_budget is None:
            options = options._replace(logits_budget=default_budget(weight.device))
        token_weight = tensors.token_weight
        values = agreed(options) | {
            "token_weight_gradient": options.token_weight_gradient
            or (token_weight is not None and token_weight.requires_grad and torch.is_grad_enabled()),
            "tokens": (hidden.shape[0] * layout.sp_size, *hidden.shape[1:-1]) if hidden.dim() > 1 else (),
            "hidden size": hidden.shape[-1],
            "dtype": hidden.dtype,
            "linear_bias given": tensors.linear_bias is not None,
            "gradients": gradients,
            "backend": backend_of(weight).NAME,
            "counted_tokens": count,
        }
        # The numbers of each token take the place of an option's one.
        of_tokens = tensors._replace(input=None, linear_weight=None, linear_bias=None).named()
        values |= {SPOKEN.get(name, name): value for name, value in of_tokens.items()}
        if mask is not None and options.reduction is None:  # a loss makes it from the targets
            values["mask"] = mask
        whole = None if layout.sequence_parallel else hidden
        shards = debug.agree(layout, options.function, values, shards[0], whole)
    check_target(options, as_int64(tensors.target), _covered(shards, options.vocab_size), mask)


def _covered(shards: list[debug.Slice], vocab_size: int | None) -> int:
    """V. Raises ``ValueError`` if the shards leave a gap or overlap, or have fewer than ``vocab_size`` rows or none."""
    end = 0
    for start, rows in sorted(s[:2] for s in shards if s[1]):
        if start != end:
            kind = "a gap" if start > end else "an overlap"
            raise ValueError(f"the vocabulary shards leave {kind}: one ends at {end}, the next starts at {start}")
        end = start + rows
    if end == 0:
        raise ValueError(f"the vocabulary is empty: none of the {len(shards)} shards has a row")
    if vocab_size is not None and vocab_size > end:
        raise ValueError(f"vocab_size={vocab_size} exceeds the {end} rows of all shards")
    return end if vocab_size is None else vocab_size
