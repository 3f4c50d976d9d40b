"""Vocabulary-parallel cross-entropy of the user's logits, in Megatron's semantics."""

from __future__ import annotations

import sys

import torch
import torch.distributed as dist
from torch import Tensor
from torch.overrides import handle_torch_function, has_torch_function_unary

from parallel_lce.backends import backend_of
from parallel_lce.backends.interface import Backend
from parallel_lce.call import debug
from parallel_lce.call.checks import as_group, check_kind, described, int64_ids, public, renamed
from parallel_lce.core.collectives import Layout, PartialsGather, Shard, digest_of
from parallel_lce.core.memory import in_memory, with_aligned_rows
from parallel_lce.core.options import as_int64, is_number, shortened
from parallel_lce.core.partials import MAX, SHIFTED, SUM_EXP, TARGET, Columns, accumulation_dtype
from parallel_lce.core.private import outside_graphs
from parallel_lce.run.schedule import function_backward, function_forward

# The kernels for existing logits form no matrix product, so they take fp32, too.
_SUITABLE = (torch.bfloat16, torch.float16, torch.float32)


@outside_graphs
@public
def vocab_parallel_cross_entropy(
    vocab_parallel_logits: Tensor,
    target: Tensor,
    label_smoothing: float = 0.0,
    tp_group: dist.ProcessGroup | None = None,
) -> Tensor:
    """Cross-entropy of ``vocab_parallel_logits [..., V/P]`` and ``target [...]``, ``[...]`` in fp32 (fp64 for fp64).

    It replaces ``megatron.core.tensor_parallel.vocab_parallel_cross_entropy``, with the same values and gradients.
    Ranks hold equal shards in rank order. A target outside every shard has loss ``lse - max`` and the gradient of lse.
    ``label_smoothing`` in [0, 1) spreads ``eps * K / (K - 1)`` over the K = V/P entries of *this rank's* shard, as
    Megatron does, so the loss then depends on the rank. ``tp_group=None``: Megatron's tensor-parallel group, or a
    single process where torch.distributed is not initialised.

    Unlike Megatron's it does not change the logits, and saves an id and three numbers per token, no softmax.

    Collectives: forward, one all-gather of 3 N + 3 fp32 (fp64) elements per rank; backward, none. The upstream gradient
    must be the same on all ranks.

    Raises:
        ValueError: shapes or dtypes that do not fit, an unknown group; in debug mode on every rank, also where targets
            or settings differ. NotImplementedError: forward-mode differentiation.
        RuntimeError: in backward, with ``create_graph=True``.
    """
    if has_torch_function_unary(vocab_parallel_logits):
        given = vocab_parallel_logits, target, label_smoothing, tp_group
        return handle_torch_function(vocab_parallel_cross_entropy, given[:1], *given)
    with renamed(process_group="tp_group"):
        debug.state.group = group = as_group(_megatron_group() if tp_group is None else tp_group)
        layout = Layout.of(group, False)
        _check(vocab_parallel_logits, target, label_smoothing)
        entries = vocab_parallel_logits.shape[-1]
        logits = with_aligned_rows(in_memory(vocab_parallel_logits).reshape(-1, entries))
        backend = backend_of(logits, _SUITABLE)
        if debug.enabled() and layout.ranks > 1:
            values = dict(target=target, tokens=tuple(target.shape), dtype=logits.dtype, backend=backend.NAME)
            values |= {"entries per rank": entries, "label_smoothing": label_smoothing}
            shard = layout.rank * entries, entries, debug.fingerprint(logits)
            debug.agree(layout, "vocab_parallel_cross_entropy", values, shard)
    ids = as_int64(in_memory(target)).reshape(-1).contiguous()
    smoothing = float(label_smoothing)
    digest = digest_of("vocab_parallel_cross_entropy", logits.dtype, smoothing + 0.0) if layout.ranks > 1 else 0
    return _LogitsCrossEntropy.apply(logits, ids, smoothing, layout, digest, backend).view(target.shape)


def _check(logits: Tensor, target: Tensor, label_smoothing: object) -> None:
    for name, value in (("vocab_parallel_logits", logits), ("target", target)):
        if not isinstance(value, Tensor):
            raise ValueError(f"{name} must be a tensor, got {type(value).__name__}")
        check_kind(name, value)
    shape, entries = list(logits.shape), logits.shape[-1] if logits.dim() else 0
    if entries < 1 or not logits.is_floating_point():
        given = described(logits)
        raise ValueError(f"vocab_parallel_logits must be [..., V/P] with at least 1 entry, floating point, got {given}")
    if shape[:-1] != list(target.shape) or target.device != logits.device:
        expected = f"{shape[:-1]} on {logits.device} for vocab_parallel_logits {shape}"
        raise ValueError(f"target must have shape {expected}, got {list(target.shape)} on {target.device}")
    int64_ids("target", target)
    if not (is_number(label_smoothing) and 0 <= label_smoothing < 1):
        raise ValueError(f"label_smoothing must be in [0, 1), got {shortened(label_smoothing)}")
    if label_smoothing and entries < 2:
        raise ValueError(f"label_smoothing={label_smoothing} needs at least 2 entries per rank, got {entries}")


def _megatron_group() -> dist.ProcessGroup | None:
    if not (dist.is_available() and dist.is_initialized()):
        return None
    state = sys.modules.get("megatron.core.parallel_state")
    group = state and state.get_tensor_model_parallel_group(check_initialized=False)
    if group is None:
        raise ValueError(
            "tp_group is None, torch.distributed is initialised and Megatron-core has no tensor-parallel group: pass "
            "tp_group (each rank alone would act as rank 0)"
        )
    return group


class _LogitsCrossEntropy(torch.autograd.Function):
    @staticmethod
    @function_forward
    def forward(
        ctx, logits: Tensor, target: Tensor, label_smoothing: float, layout: Layout, digest: int, backend: Backend
    ):
        entries = logits.shape[1]
        start, columns = layout.rank * entries, Columns(shifted=label_smoothing > 0)
        target, ids = target - start, target
        partial = logits.new_empty(columns.count, len(target), dtype=accumulation_dtype(logits.dtype))
        shard = Shard(start, entries, None, digest)
        gather = PartialsGather(partial, len(target), shard, Columns(), layout)
        backend.logits_partial(logits, target, columns.shifted, partial)
        gather.local.copy_(partial[:SHIFTED])
        gather.start()
        (merged, vocab_size), _ = gather.finish(backend)
        top, log_sum = merged[MAX], merged[SUM_EXP].log()
        inside = (ids >= 0) & (ids < vocab_size)
        loss = log_sum - (merged[TARGET] - top).masked_fill(~inside, 0.0)
        smoothing = label_smoothing * entries / (entries - 1) if label_smoothing else 0.0
        if label_smoothing:
            mean_log_prob = partial[SHIFTED] / entries + (partial[MAX] - top) - log_sum
            loss = (1 - smoothing) * loss - smoothing * mean_log_prob
        ctx.save_for_backward(logits, target, merged)
        ctx.smoothing, ctx.backend = smoothing, backend
        return loss

    @staticmethod
    @function_backward
    def backward(ctx, saved, upstream: Tensor):
        logits, target, merged = saved
        of_others = upstream * (ctx.smoothing / logits.shape[1])
        coefficients = torch.stack([upstream, upstream * (1 - ctx.smoothing), of_others])
        # Saved-tensor hooks may have changed the strides.
        logits, target, merged = with_aligned_rows(logits), target.contiguous(), merged.contiguous()
        gradient = ctx.backend.logits_gradient(logits, target, merged, coefficients)
        return gradient, None, None, None, None, None
