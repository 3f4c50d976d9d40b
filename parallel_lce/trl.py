"""The fused statistics and divergences in TRL: ``patch()`` replaces the two autograd functions in which TRL's trainers
project hidden states onto the vocabulary in tiles.

Importing this module does not import TRL; calling ``patch()`` does.
"""

from __future__ import annotations

import importlib
import sys
import warnings
from collections.abc import Callable
from functools import partial
from operator import getitem
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from parallel_lce.call.checks import int64_ids, renamed
from parallel_lce.call.prepare import autocasted, prepare
from parallel_lce.core.budget import DEFAULT_BUDGET, lean_budget
from parallel_lce.core.options import Options, Tensors, check_option
from parallel_lce.core.private import constant_in_graphs, outside_graphs
from parallel_lce.distillation import check_beta, check_pair, detached
from parallel_lce.distillation.blocks import Divergence, divergences
from parallel_lce.functional import token_statistics
from parallel_lce.patching import is_own

_OUTPUTS = ("log_probs", "entropy", "log_sum_sq_probs", "mean_logits", "is_top1")

_settings: dict[str, int | None] = {"logits_budget": None}


class TRLWarning(UserWarning):
    """TRL's own function runs, or stays."""


class _Function:
    """In place of one of TRL's autograd functions, ``own``, in every module that holds it. A class that is derived from
    it is derived from ``own``, and attributes are those of ``own``."""

    def __init__(self, own: Any, fused: Callable[..., tuple]) -> None:
        self.own, self._fused, self._said = own, fused, set()
        self._place = own.__module__, own.__name__

    def __mro_entries__(self, bases: tuple) -> tuple:
        return (self.own,)

    def __getattr__(self, name: str) -> Any:
        return getattr(object.__getattribute__(self, "own"), name)  # a copy in the making has none

    def apply(self, *arguments: Any) -> tuple[Tensor | None, ...]:
        """What TRL's own returns. What the fused function refuses is TRL's own to answer."""
        try:
            if not _is_stock(*self._place):
                raise ValueError("its forward or backward was replaced")
            if not (partitioned := [each for each in arguments if hasattr(each, "ds_id")]):
                return self._fused(*arguments)
            if (gathered := getattr(sys.modules.get("trl.trainer.utils"), _GATHERED, None)) is None:
                raise ValueError(f"its weight is a parameter of ZeRO-3, and trl.trainer.utils has no {_GATHERED}")
            context = partial(gathered, *partitioned)
            if torch.is_grad_enabled():
                return _of_partitioned(self._fused, context, *arguments)
            with context():
                return self._fused(*arguments)
        except (ValueError, NotImplementedError) as refusal:
            reason = str(refusal)
        if (kind := reason.partition(", got ")[0]) not in self._said:
            self._said.add(kind)
            warnings.warn(f"parallel_lce: TRL's own {self.own.__name__} runs: {reason}", TRLWarning, stacklevel=2)
        return self.own.apply(*arguments)


# TRL's context, in which parameters of ZeRO-3 are whole. It does nothing with those that are.
_GATHERED = "maybe_gather_lm_head_ctx"


class _OfPartitioned(torch.autograd.Function):
    """``fused(*arguments)`` of parameters of ZeRO-3, which ``gathered()`` makes whole for the forward, unless they are,
    and again for the backward.

    The graph of ``fused`` has leaves of its own, since the parameters' hooks belong to the graph around. What it would
    save is saved here: for the caller's hooks of saved tensors, and until the backward."""

    @staticmethod
    def forward(ctx, fused, gathered, *arguments):
        ctx.set_materialize_grads(False)
        partitioned, needs = [each for each in arguments if hasattr(each, "ds_id")], ctx.needs_input_grad[2:]
        saved: list[Tensor] = []

        def place(tensor: Tensor) -> tuple[Any, Any]:
            for each in partitioned:  # of which no copy is kept
                if tensor.data_ptr() == each.data_ptr() and tensor.shape == each[: len(tensor)].shape:
                    return each, slice(len(tensor))
            saved.append(tensor.detach())
            return saved, len(saved) - 1

        recorded = torch.autograd.graph.saved_tensors_hooks(place, lambda found: getitem(*found))
        with gathered(), torch.enable_grad(), recorded:
            inputs = [each.detach().requires_grad_() if need else each for each, need in zip(arguments, needs)]
            results = fused(*inputs)
        ctx.save_for_backward(*saved)
        saved.clear()
        ctx.leaves = [each for each, need in zip(inputs, needs) if need]
        for leaf in ctx.leaves:
            leaf.data = leaf.new_empty(0)  # else the graph would keep it
        ctx.results, ctx.saved, ctx.gathered = results, saved, gathered
        outputs = [each if each is None else each.detach() for each in results]
        constant = [o for o, each in zip(outputs, results) if each is not None and not each.requires_grad]
        ctx.mark_non_differentiable(*constant)
        return tuple(outputs)

    @staticmethod
    @once_differentiable
    def backward(ctx, *upstream):
        pairs = [pair for pair in zip(ctx.results, upstream) if pair[1] is not None]
        if not pairs:
            return (None,) * len(ctx.needs_input_grad)
        results, given = zip(*pairs)
        ctx.saved.extend(ctx.saved_tensors)
        try:
            with ctx.gathered():
                found = torch.autograd.grad(results, ctx.leaves, given, retain_graph=True, allow_unused=True)
        finally:
            ctx.saved.clear()
        gradients = iter(found)
        return tuple([next(gradients) if need else None for need in ctx.needs_input_grad])


@outside_graphs
def _of_partitioned(*arguments: Any) -> Any:
    """A graph's operator would keep the leaves, whose memory is given back."""
    return _OfPartitioned.apply(*arguments)


@constant_in_graphs
def _is_stock(home: str, name: str) -> bool:
    """Whether all of TRL's function was written where TRL has it."""
    held = getattr(sys.modules[home], name)
    own = held.own if isinstance(held, _Function) else held
    return "apply" not in vars(own) and is_own(own.forward, home) and is_own(own.backward, home)


def _log_probs(
    hidden, weight, bias, targets, temperature, chunk_size, softcap=None, logit_scale=1.0, outputs=_OUTPUTS
) -> tuple[Tensor | None, ...]:
    """The ``outputs``, and the log-probabilities in any case, in the order of ``_OUTPUTS``; None for the others.

    ``hidden [N, D]``; ``weight [V, D]`` and ``bias [V]``, which are cast to its dtype; ids ``targets [N]``. Results are
    ``[N]``, fp32 and bool. The first two have a gradient.
    """
    targets = int64_ids("targets", targets)
    inside = (targets >= 0) & (targets < len(weight))
    with renamed(input="hidden", linear_weight="weight", target="targets", linear_bias="bias"):
        found = token_statistics(
            hidden,
            weight.to(hidden.dtype),
            targets.where(inside, 0),
            linear_bias=bias if bias is None else bias.to(hidden.dtype),
            logit_scale=logit_scale,
            logit_softcap=softcap,
            temperature=temperature,
            logits_budget=lean_budget(_settings["logits_budget"]),
            entropy="entropy" in outputs,
            sum_p_squared="log_sum_sq_probs" in outputs,
            mean_logit="mean_logits" in outputs,
            argmax="is_top1" in outputs,
        )
    assert found.target_log_prob is not None  # there is a target
    # A target outside has the logit 0.
    log_probs = torch.where(inside, found.target_log_prob, -found.lse).float()
    entropy = None if found.entropy is None else found.entropy.float()
    squares = None if found.sum_p_squared is None else found.sum_p_squared.detach().log().float()
    mean = None if found.mean_logit is None else found.mean_logit.detach().float()
    return log_probs, entropy, squares, mean, None if found.argmax is None else found.argmax == targets


@outside_graphs
def _divergence(
    student_hidden,
    student_weight,
    student_bias,
    teacher_hidden,
    teacher_weight,
    teacher_bias,
    beta,
    temperature=1.0,
    student_logit_scale=1.0,
    student_softcap=None,
    teacher_logit_scale=1.0,
    teacher_softcap=None,
) -> tuple[Tensor, Tensor]:
    """Divergences and the student's entropies, ``[N]`` fp32 each; the first have a gradient.

    ``student_hidden [N, D]`` and ``student_weight [V, D]``; of the teacher's ``[>= V, E]`` the first V rows count.
    """
    check_beta(beta)
    rows = len(student_weight)
    teacher_bias = None if teacher_bias is None else teacher_bias[:rows]
    teacher = _operands(*map(detached, (teacher_hidden, teacher_weight[:rows], teacher_bias)))
    student = _operands(student_hidden, student_weight, student_bias)
    # Every block adds to all of an fp32 dW. This budget is that of TRL's tiles.
    budget = lean_budget(_settings["logits_budget"], DEFAULT_BUDGET)
    options = Options("trl", temperature=temperature, logits_budget=budget)
    with renamed(input="student_hidden", linear_weight="student_weight", linear_bias="student_bias"):
        of_student = options._replace(logit_scale=student_logit_scale, logit_softcap=student_softcap)
        call, inputs = prepare(of_student, student, planned=False)
    with renamed(input="teacher_hidden", linear_weight="teacher_weight", linear_bias="teacher_bias"):
        of_teacher = options._replace(logit_scale=teacher_logit_scale, logit_softcap=teacher_softcap)
        other, others = prepare(of_teacher, teacher, planned=False)
    check_pair(call, inputs, teacher, call.shape)
    task = Divergence.of(call, other, float(beta), inputs[0].dtype, entropy=True)
    losses, entropy = divergences(task, inputs, others)
    assert entropy is not None  # wanted
    return losses.float(), entropy.float()


def _operands(hidden: Tensor, weight: Tensor, bias: Tensor | None) -> Tensors:
    """Raises ``ValueError`` for a bias that would be rounded: TRL adds it in fp32."""
    tensors = autocasted(Tensors(hidden, weight))
    dtype = tensors.input.dtype
    if bias is not None and bias.dtype != dtype:
        raise ValueError(f"its bias is {bias.dtype} and the projection runs in {dtype}: cast the bias")
    return tensors._replace(linear_weight=tensors.linear_weight.to(dtype), linear_bias=bias)


# TRL's functions: module and name, what replaces it, and the module and name by which TRL's trainers use it.
_CALLED, _COMPARED = "ChunkedLogProbFunction", "ChunkedDivergenceFunction"
_FUNCTIONS = (
    ("trl.kernels.chunked_logprob", _CALLED, _log_probs, "trl.trainer.utils", f"_{_CALLED}"),
    ("trl.kernels.chunked_divergence", _COMPARED, _divergence, "trl.trainer.distillation_trainer", _COMPARED),
)


def patch(*, logits_budget: int | None = None) -> None:
    """Lets TRL compute its fused language-model head by :func:`parallel_lce.token_statistics`, and the divergence of
    its ``DistillationTrainer`` as :func:`parallel_lce.distillation.divergence` does.

    It holds for all models of ``add_fused_lm_head`` and so for TRL's trainers, before and after they are built, and in
    modules that have imported TRL's two functions by their names. The results are those of TRL's functions, ``[N]``
    each: ``is_top1`` in bool, the others in fp32. ``logits_budget`` is as in :func:`parallel_lce.linear_cross_entropy`,
    but by default the environment's, else 128 MiB, and 1 GiB for the divergence; a second call replaces it.

    What the fused functions refuse, TRL's own compute, with one :class:`TRLWarning` for each reason: a weight of a
    quantized class, a tensor as temperature or scale, a soft-cap that is not positive, a divergence whose bias
    has another dtype than its projection. A function that somebody else has replaced stays, with a warning.

    Collectives: those by which TRL makes a sharded weight whole: before, and one of ZeRO-3 again in the backward.

    Raises:
        ImportError: there is no TRL, or one without this head. ValueError: an invalid ``logits_budget``.
    """
    check_option("logits_budget", logits_budget)
    try:
        if not hasattr(importlib.import_module("trl.trainer.utils"), "_ChunkedLogProbFunction"):
            raise ImportError("trl.trainer.utils has no _ChunkedLogProbFunction")
    except ImportError as error:
        raise ImportError(f"parallel_lce.trl needs TRL 1.16 or later (pip install trl): {error}") from error
    _settings["logits_budget"] = logits_budget
    for home, name, fused, user, used in _FUNCTIONS:
        held: Any = getattr(importlib.import_module(home), name)
        if not isinstance(held, _Function) and _is_stock(home, name):
            own, held = held, _Function(held, fused)
            _swap(name, own, held)
        its = getattr(sys.modules.get(user), used, held)
        if its is not held or not isinstance(held, _Function):
            message = f"parallel_lce: {user} uses {its}, not TRL's {name} as released: it stays"
            warnings.warn(message, TRLWarning, stacklevel=2)


def unpatch() -> None:
    """Undoes :func:`patch`, if it was called."""
    for home, name, *_ in _FUNCTIONS:
        held = getattr(sys.modules.get(home), name, None)
        if isinstance(held, _Function):
            _swap(name, held, held.own)


def _swap(name: str, old: Any, new: Any) -> None:
    for module in [*sys.modules.values()]:
        for each in (name, f"_{name}"):
            if getattr(module, "__dict__", {}).get(each) is old:
                setattr(module, each, new)
