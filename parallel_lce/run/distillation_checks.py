"""Refusals of :mod:`parallel_lce.distillation`, in the names of its arguments."""

from __future__ import annotations

from contextlib import AbstractContextManager

import torch
from torch import Tensor

from parallel_lce.call.call import Call, Inputs
from parallel_lce.call.checks import INTEGERS, renamed
from parallel_lce.core.collectives import Shard
from parallel_lce.core.options import Tensors, as_number, check_option, check_reduction, is_number, shortened
from parallel_lce.core.partials import accumulation_dtype

_NEAREST = 1e-6  # of a beta to 0 and 1: the mixture's logarithm is less exact the nearer it is


def naming(who: str, **others: str) -> AbstractContextManager[None]:
    """Refusals within it name the arguments of the student or teacher, and the ``others``, instead of those of
    :func:`parallel_lce.linear_cross_entropy`."""
    names = {"input": f"{who}_hidden", "linear_weight": f"{who}_weight", "linear_bias": f"{who}_bias"}
    return renamed(**names | others)


def check_numbers(beta: object, reduction: object, ignore_index: object, shape: torch.Size | None = None) -> None:
    if not (is_number(beta) and (beta in (0, 1) or _NEAREST <= beta <= 1 - _NEAREST)):
        between = f"0, 1 or a number from {_NEAREST} to 1 - {_NEAREST}"
        raise ValueError(f"beta must be {between}, got {shortened(beta)}")
    check_reduction(reduction)
    check_option("ignore_index", as_number(ignore_index))


def check_pair(student: Call, inputs: Inputs, teacher: Tensors, shape: torch.Size) -> None:
    """The teacher has the student's tokens, vocabulary entries, device and dtype of statistics."""
    x, weight = teacher.input, teacher.linear_weight
    own, shard, options = inputs[0], student.shard, student.options
    if x.shape[:-1] != own.shape[:-1]:
        raise ValueError(f"teacher_hidden {list(x.shape)} has other tokens than student_hidden {list(own.shape)}")
    if x.device != own.device:
        raise ValueError(f"teacher_hidden is on {x.device} and student_hidden is on {own.device}")
    if x.is_floating_point() and accumulation_dtype(x.dtype) != accumulation_dtype(own.dtype):
        raise ValueError(f"teacher_hidden is {x.dtype} and student_hidden is {own.dtype}: both or none must be float64")
    start = student.layout.rank * len(weight) if options.vocab_start is None else options.vocab_start
    other = Shard(start, len(weight), options.vocab_size)
    # Where a shard that has no entry starts does not matter.
    if other.real_rows != shard.real_rows or (shard.real_rows and other.start != shard.start):
        raise ValueError(
            f"teacher_weight {list(weight.shape)} has the vocabulary entries [{other.start}, "
            f"{other.start + other.real_rows}) and student_weight {list(inputs[1].shape)} has "
            f"[{shard.start}, {shard.start + shard.real_rows})"
        )


def check_stored(ids: object, log_probs: object, tail: object, target: object) -> None:
    if tail not in ("class", "renormalize"):
        raise ValueError(f"tail must be 'class' or 'renormalize', got {shortened(tail)}")
    if not (isinstance(ids, Tensor) and isinstance(log_probs, Tensor)):
        given = f"{type(ids).__name__} and {type(log_probs).__name__}"
        raise ValueError(f"teacher_ids and teacher_log_probs must be tensors, got {given}")
    if ids.dim() < 1 or ids.shape != log_probs.shape:
        raise ValueError(
            f"teacher_ids and teacher_log_probs must both be [..., K], got {list(ids.shape)} and "
            f"{list(log_probs.shape)}"
        )
    if ids.dtype not in INTEGERS:
        raise ValueError(f"teacher_ids must be of an integer dtype, got {ids.dtype}")
    if not log_probs.is_floating_point():
        raise ValueError(f"teacher_log_probs must be floating-point, got {log_probs.dtype}")
    if log_probs.device != ids.device:
        raise ValueError(f"teacher_log_probs is on {log_probs.device} and teacher_ids is on {ids.device}")
    if target is None:
        return
    if not isinstance(target, Tensor) or target.shape != ids.shape[:-1] or target.dtype not in INTEGERS:
        given = f"{list(target.shape)} of {target.dtype}" if isinstance(target, Tensor) else type(target).__name__
        raise ValueError(f"target must be None or ids of shape {list(ids.shape[:-1])}, got {given}")
