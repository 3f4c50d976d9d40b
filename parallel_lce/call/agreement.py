"""What all ranks must share: the digest of a call, which every message carries, and debug mode's comparison."""

from __future__ import annotations

import torch
from torch import Tensor

from parallel_lce.call import debug
from parallel_lce.call.checks import check_target
from parallel_lce.core.collectives import Layout, Shard, digest_of
from parallel_lce.core.options import SPOKEN, Options, Tensors, agreed, as_int64

# Names in debug mode's messages, where they are not the names of the fields.
_DEBUG_NAMES = {"logit_scale": "logit_scale of each token", "temperature": "temperature of each token", **SPOKEN}


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
    options: Options, tensors: Tensors, layout: Layout, others: dict[str, object], mask: Tensor | None = None
) -> None:
    """Debug mode: raise ``ValueError`` unless all ranks have the same arguments, the same ``others`` and, for
    statistics, the same ``mask`` of the tokens that count; and for targets as :func:`check_target`."""
    weight, shard = tensors.linear_weight, shard_of(options, tensors.linear_weight, layout)
    shards = [debug.Slice(shard.start, shard.rows, debug.fingerprint(weight[: shard.real_rows]))]
    hidden, target = tensors.input, tensors.target
    if layout.ranks > 1:
        settings = agreed(options) | {
            "tokens": (hidden.shape[0] * layout.sp_size, *hidden.shape[1:-1]) if hidden.dim() > 1 else (),
            "hidden size": hidden.shape[-1],
            "dtype": hidden.dtype,
            **others,
        }
        for name in ("logit_scale", "temperature"):
            if getattr(tensors, name) is not None:
                settings[name] = "of each token"
        if shard.rows:
            settings["linear_bias given"] = tensors.linear_bias is not None
        per_token = {
            _DEBUG_NAMES.get(name, name): value
            if value is None
            else value.double()
            if value.is_floating_point()
            else as_int64(value).long()
            for name, value in zip(Tensors._fields, tensors)
            if name not in ("input", "linear_weight", "linear_bias")
        }
        if mask is not None and options.reduction is None:  # a loss makes it from the targets
            per_token["mask"] = mask.long()
        shards = debug.agree(layout, settings, per_token, shards[0])
        if not layout.sequence_parallel:
            debug.agree_about_hidden(layout, hidden)
    vocab_size = debug.check_cover(shards, options.vocab_size)
    check_target(options, as_int64(target), vocab_size, mask)
