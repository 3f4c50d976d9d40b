"""Sampled softmax: cross-entropy over the target and a few sampled entries. :mod:`parallel_lce.samplers` has samplers.

With the logits z of the target y and of the sampled entries s, and the logarithms of their expected counts q, a token's
loss is log(exp(z_y - q_y) + sum over s of exp(z_s - q_s)) - (z_y - q_y). Samples that equal the token's target are left
out. (Jean et al. 2015, arXiv:1412.2007; Bengio and Senecal 2008.)

Samples that all tokens share are one matrix product: of their M rows of the weight each rank gets M/P, and the ranks
merge maxima and sums of exponentials, as they do for the whole vocabulary.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh

from parallel_lce.backends import is_meta_or_fake
from parallel_lce.call import debug
from parallel_lce.call.checks import as_group, check_kind, described, int64_ids, public
from parallel_lce.call.prepare import autocasted, check, prepare
from parallel_lce.core.collectives import Layout
from parallel_lce.core.options import Options, Tensors, check_flag, check_option, check_reduction
from parallel_lce.core.partials import accumulation_dtype
from parallel_lce.core.private import outside_graphs
from parallel_lce.run.picked import logits_of
from parallel_lce.run.transforms import operator, without_values
from parallel_lce.sampled.blocks import LogSumExp, SharedSamples


@outside_graphs
@public
@operator
def sampled_linear_cross_entropy(
    input: Tensor,
    linear_weight: Tensor,
    target: Tensor,
    sampled: Tensor,
    *,
    log_expected_count: Tensor | None = None,
    target_log_expected_count: Tensor | None = None,
    remove_accidental_hits: bool = True,
    reduction: str = "mean",
    linear_bias: Tensor | None = None,
    logit_scale: float | Tensor = 1.0,
    process_group: dist.ProcessGroup | DeviceMesh | None = None,
    sequence_parallel: bool = False,
    vocab_start: int | None = None,
    vocab_size: int | None = None,
    ignore_index: int | None = -100,
) -> Tensor:
    """Cross-entropy over each token's target and the ``sampled`` entries.

    Args:
        input, linear_weight, target, linear_bias, ...: as in :func:`parallel_lce.linear_cross_entropy`.
        sampled: ids ``[M]``, the same for all tokens, or ``[..., M]``, of any integer dtype, the same on all ranks;
            under sequence parallelism of the whole sequence. An id that comes twice counts twice. An id outside
            ``[0, V)``, such as -1, is no sample.
        log_expected_count: the logarithm of how often each sample was expected, of ``sampled``'s shape. It is
            subtracted from the logit. Needs ``target_log_expected_count``. None: nothing is subtracted.
        target_log_expected_count: the same for the targets, of the target's shape. With zeros, which subtract nothing,
            the sum of exponentials is an unbiased estimate of the vocabulary's (arXiv:1712.00527).
        remove_accidental_hits: samples that equal a token's target are left out of that token's loss.
        logit_scale: a Python number.

    Returns:
        The loss, fp32 (fp64 for fp64), of the target's shape for 'none', else 0-dimensional; identical on every rank
        bit for bit, differentiable once, also by the expected counts. NaN if the ranks' ids or options differ, but
        a collective may fail or hang if they have different numbers of ids. The gradient of the weight is dense, 0 in
        rows that are neither a target nor sampled. A graph of torch.compile breaks at this call.

    Collectives, on ``process_group``, in this order; P ranks, N tokens, M' = M rounded up to a multiple of P. SP: under
    sequence parallelism.

    - Forward: SP, an all-gather of the hidden states, N/P * D elements per rank. An all-gather of N + 3 fp32 elements
      per rank; of N * (M + 1) + 3 for ``sampled [..., M]``. For shared samples also: a reduce-scatter of M' * D
      elements of the weight's dtype; one of 2 M' fp32 elements; SP, the gather of the hidden states again, in blocks;
      an all-gather of N fp32 elements per rank.
    - Backward: an all-reduce (SP: a reduce-scatter) of dX, N * D elements; SP, a gather of the hidden states. For
      shared samples both of these twice, and an all-gather of M'/P * (D + 1) fp32 elements per rank.

    Raises:
        ValueError: as :func:`parallel_lce.linear_cross_entropy`, before any collective. ``PARALLEL_LCE_DEBUG=1``
            compares the samples and the expected counts, too.
    """
    check_reduction(reduction)
    check_option("ignore_index", ignore_index := -100 if ignore_index is None else ignore_index)
    check_flag("remove_accidental_hits", remove_accidental_hits)
    target, sampled = int64_ids("target", target), int64_ids("sampled", sampled)
    _check(target, sampled, log_expected_count, target_log_expected_count, logit_scale)
    shared = sampled.dim() == 1 and target.dim() != 0
    ids = target.unsqueeze(-1)
    if not shared:
        ids = torch.cat([ids, sampled], -1)
    # Ranks compare the name, and so these settings.
    corrected = log_expected_count is not None
    settings = f"{reduction=}, {ignore_index=}, {remove_accidental_hits=}, {corrected=}, {[*sampled.shape]} samples"
    name, group = f"sampled_linear_cross_entropy with {settings}", as_group(process_group)
    if debug.enabled() and not is_meta_or_fake(target) and (layout := Layout.of(group, False)).ranks > 1:
        given = dict(target=target, sampled=sampled)
        counts = dict(log_expected_count=log_expected_count, target_log_expected_count=target_log_expected_count)
        given |= {n: None if t is None else t.double() for n, t in counts.items()}
        debug.agree(layout, {"function": "sampled_linear_cross_entropy"}, given, (0, 0))
        debug.state.awaited = True  # the exchange of prepare is to come
    options = Options(
        name,
        logit_scale=logit_scale,  # pyright: ignore[reportArgumentType]
        sequence_parallel=sequence_parallel,
        vocab_start=vocab_start,
        vocab_size=vocab_size,
        logits_budget=0,
    )
    tensors = Tensors(input, linear_weight, None, linear_bias, picked=ids)
    if is_meta_or_fake(target):
        check(options, autocasted(tensors), group)
        return without_values(target.shape if reduction == "none" else (), input, linear_weight, linear_bias)
    call, inputs = prepare(options, tensors, group, planned=False)
    count, dtype = target.numel(), accumulation_dtype(inputs[0].dtype)
    logits, size = logits_of(call, inputs, sampled)
    logits, ids = logits.view(count, ids.shape[-1]), ids.reshape(count, ids.shape[-1])
    outside = (ids < 0) | (ids >= size)
    target, sampled = target.reshape(-1), sampled if shared else sampled.reshape(count, sampled.shape[-1])
    offsets = torch.zeros_like(sampled, dtype=dtype)
    if log_expected_count is not None:
        offsets = offsets - log_expected_count.reshape(sampled.shape).to(dtype)
    of_target = logits[:, 0].masked_fill(outside[:, 0], torch.nan)
    if target_log_expected_count is not None:
        of_target = of_target - target_log_expected_count.reshape(-1).to(dtype)
    if shared:
        # Copies: nothing saves these ids, and a caller may write to its own before the backward.
        samples = SharedSamples(call, sampled.clone(), target.clone(), remove_accidental_hits)
        others = LogSumExp.apply(*inputs, offsets, samples)
    else:
        left_out = outside[:, 1:]
        if remove_accidental_hits:
            left_out = left_out | (sampled == target.unsqueeze(1))
        others = (logits[:, 1:] + offsets).masked_fill(left_out, -torch.inf)
        without = (others == -torch.inf).all(1)  # logsumexp has no gradient there but NaN
        others = others.masked_fill(without.unsqueeze(1), 0.0).logsumexp(1).masked_fill(without, -torch.inf)
    counted = target != ignore_index
    # Tokens that do not count are set to 0 here, so that a NaN of theirs reaches no gradient.
    difference = torch.where(counted, others - of_target, 0.0)
    losses = torch.where(counted, torch.logaddexp(torch.zeros_like(difference), difference), 0.0)
    if reduction == "none":
        return losses.view(tensors.picked.shape[:-1])
    return losses.sum() / counted.sum().clamp(min=1) if reduction == "mean" else losses.sum()


def _check(target: Tensor, sampled: Tensor, of_samples: Any, of_targets: Any, logit_scale: Any) -> None:
    check_kind("target", target)
    check_kind("sampled", sampled)
    if isinstance(logit_scale, Tensor):
        raise ValueError("logit_scale must be a finite Python number, got a tensor")
    if sampled.dim() != 1 and sampled.shape[:-1] != target.shape:
        raise ValueError(
            f"sampled must be ids [M] or [..., M] for target {list(target.shape)}, got {list(sampled.shape)}"
        )
    if sampled.device != target.device:
        raise ValueError(f"sampled is on {sampled.device} and target is on {target.device}")
    for name, value, ids in (
        ("log_expected_count", of_samples, sampled),
        ("target_log_expected_count", of_targets, target),
    ):
        if value is None:
            if of_samples is not of_targets:
                raise ValueError(
                    f"log_expected_count and target_log_expected_count must be given together, got no {name}: zeros "
                    "subtract nothing"
                )
            continue
        if not isinstance(value, Tensor) or not value.is_floating_point() or value.shape != ids.shape:
            raise ValueError(f"{name} must be floating-point of shape {list(ids.shape)}, got {described(value)}")
        check_kind(name, value)
        if value.device != ids.device:
            raise ValueError(f"{name} is on {value.device} and target is on {ids.device}")
