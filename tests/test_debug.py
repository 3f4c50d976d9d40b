"""``PARALLEL_LCE_DEBUG=1``: whatever differs between the ranks, every rank raises and says what and how."""

from __future__ import annotations

import re
from types import SimpleNamespace

import pytest
import torch
from torch.autograd import forward_ad

import parallel_lce
from on_ranks import on_ranks
from parallel_lce.run.fused_loss import fused_loss
from tools import D, N, V, call, chosen_backend, debug_mode, given, good
from world import Member

LOSS, STATISTICS = parallel_lce.linear_cross_entropy, parallel_lce.token_statistics


def LOGITS(input, linear_weight, target, process_group, **changes):
    arguments = dict(vocab_parallel_logits=input @ linear_weight.t(), target=target, tp_group=process_group)
    return parallel_lce.vocab_parallel_cross_entropy(**arguments | changes)


def MEGATRON(input, linear_weight, target, process_group, ignore_index=None, outside_is_nan=False):
    """Any target is allowed there, and a token may count on one rank alone."""
    options, tensors = given(input, linear_weight, target, reduction="none", ignore_index=ignore_index)
    return fused_loss(options._replace(outside_is_nan=outside_is_nan), tensors, process_group)


DOORS = {"statistics": STATISTICS, "logits": LOGITS, "Megatron": MEGATRON}
"""By the first word of a case's name; of the others the door is the loss."""


def _with(values, position: int, value):
    changed = values.clone()
    changed[position] = value
    return changed


# What the last of three ranks changes of ``t.x``, ``t.w`` and ``t.y``; what differs; that of the others, and its own.
DISAGREEMENTS = {
    "N": (lambda t: dict(input=t.x.new_zeros(7, D), target=t.y.new_zeros(7)), "tokens", r"\(6,\)", r"\(7,\)"),
    "leading shape": (lambda t: dict(input=t.x.view(2, 3, D), target=t.y.view(2, 3)), "tokens", r"\(6,\)", r"\(2, 3\)"),
    "D": (lambda t: dict(input=t.x.new_zeros(N, 5), linear_weight=t.w.new_zeros(V, 5)), "hidden size", "4", "5"),
    "dtype": (lambda t: dict(input=t.x.half(), linear_weight=t.w.half()), "dtype", "torch.float32", "torch.float16"),
    "SP": (lambda t: dict(sequence_parallel=True, target=t.y.repeat(3)), "sequence_parallel", "False", "True"),
    "dW": (lambda t: dict(linear_weight=t.w.requires_grad_()), "gradients", "None", r".*hidden=False, weight=True.*"),
    "bias": (lambda t: dict(linear_bias=t.w.new_zeros(V)), "linear_bias given", "False", "True"),
    "temperatures": (lambda t: dict(temperature=t.x.new_ones(N)), "temperature", "1.0", "'of each token'"),
    "target": (lambda t: dict(target=_with(t.y, 4, (t.y[4] + 1) % V)), "target at position 4", r"\d", r"\d"),
    "outside": (lambda t: dict(target=_with(t.y, 4, 3 * V)), "target at position 4", r"\d", "30"),
    "weights": (lambda t: dict(token_weight=t.x.new_ones(N)), "token_weight", "None", "values of digest .*"),
    "a weight": (lambda t: dict(token_weight=_with(t.y.float(), 3, 0.5)), "token_weight at position 3", r"\d.0", "0.5"),
    "dweight": (lambda t: dict(token_weight=t.x[:, 0].requires_grad_()), "token_weight_gradient", "False", "True"),
    "backend": (lambda t: dict(backend="triton"), "backend", "'torch'", "'triton'"),
    "statistics: columns": (lambda t: dict(expected_logit=True, argmax=True), "argmax", "False", "True"),
    "statistics: no target": (lambda t: dict(target=None), "target", "values of digest .*", "None"),
    "statistics: a loss": (lambda t: dict(function=LOSS), "function", "'token_statistics'", "'linear_cross_entropy'"),
    "Megatron: ignore_index": (lambda t: dict(ignore_index=3), "ignore_index", "None", "3"),
    "Megatron: outside": (lambda t: dict(outside_is_nan=True), "outside_is_nan", "False", "True"),
    "logits: backend": (lambda t: dict(backend="triton"), "backend", "'torch'", "'triton'"),
    "logits: a loss": (lambda t: dict(function=LOSS), "function", "'vocab_parallel_.*'", "'linear_cross_entropy'"),
    "logits: target": (lambda t: dict(target=_with(t.y, 2, (t.y[2] + 1) % V)), "target at position 2", r"\d", r"\d"),
    "logits: V": (lambda t: dict(vocab_parallel_logits=t.x.new_zeros(N, 11)), "entries per rank", "10", "11"),
    "logits: smoothing": (lambda t: dict(label_smoothing=0.1), "label_smoothing", "0.0", "0.1"),
}
OPTIONS = dict(logits_budget=0, reduction="sum", label_smoothing=0.1, z_loss=1e-3, ignore_index=5, logit_scale=0.5)
OPTIONS |= dict(
    logit_softcap=30.0, temperature=0.5, reduce_hidden_grad=False, vocab_size=29, reduce_dtype=torch.float32
)
DISAGREEMENTS |= {
    name: (lambda t, changed={name: value}: changed, name, r"\S+", re.escape(repr(value)))
    for name, value in OPTIONS.items()
}
# The last rank's error, which the others name.
REFUSALS = {
    "a backend": (lambda t: dict(backend="cutlass"), "PARALLEL_LCE_BACKEND='cutlass' is none of"),
    "shape": (lambda t: dict(linear_bias=t.w.new_zeros(3)), r"linear_bias must have shape \[10\].* got \[3\]"),
    "keyword": (lambda t: dict(smothing=1), r"linear_cross_entropy\(\) got an unexpected keyword argument 'smothing'"),
    "PyTorch's": (lambda t: dict(options=1), "options=1 of torch.nn.functional.linear_cross_entropy is not supported"),
    "no input": (lambda t: dict(input=None), "input must be a tensor, got NoneType"),
    "no truth value": (lambda t: dict(sequence_parallel=t.x[0]), "sequence_parallel must be True or False, got tens"),
    "a tangent": (lambda t: dict(input=forward_ad.make_dual(t.x, t.w[:1] + t.x)), "input has a tangent"),
    "no rows": (lambda t: dict(linear_weight=t.w[:0]), r"linear_weight \[0, 4\] has no rows"),
    "statistics: keyword": (lambda t: dict(reduction="sum"), r"token_statistics\(\) got an unexpected keyword"),
    "logits: sparse": (lambda t: dict(vocab_parallel_logits=t.x.to_sparse()), "must be a dense .* torch.sparse_coo"),
}
# What every rank changes, and what all say.
MESSAGES = {
    "hidden states": (
        lambda t: dict(input=torch.cat([t.x[:3], -t.x[3:]]) if t.rank == 2 else t.x),
        r"disagree about input: token 3 has norm (\S+) on rank 0 and \1 on rank 2, along a random",
    ),
    "target everywhere": (lambda t: dict(target=_with(t.y, 4, 3 * V)), r"target 30 at position 4 is outside \[0, 30\)"),
    "no rows everywhere": (lambda t: dict(linear_weight=t.w[:0]), "has no rows"),
    "no vocabulary": (lambda t: dict(linear_weight=t.w[:0], vocab_start=0), "none of the 3 shards has a row"),
    "rows": (lambda t: dict(linear_weight=t.w.new_zeros(V + t.rank // 2, D)), "a gap: .* 20, the next starts at 22"),
    "gap": (lambda t: dict(vocab_start=(0, 10, 21)[t.rank]), "leave a gap: one ends at 20, the next starts at 21"),
    "overlap": (lambda t: dict(vocab_start=(0, 10, 19)[t.rank]), "an overlap: one ends at 20, the next starts at 19"),
}
CASES = DISAGREEMENTS | REFUSALS | MESSAGES
# Of the other ranks.
WEIGHTS = {"a weight": lambda t: dict(token_weight=t.y.float()), "dweight": lambda t: dict(token_weight=t.x[:, 0])}


def _said(member: Member, name: str) -> str:
    """The error's name and message on this rank."""
    arguments = dict(process_group=member.group, backend="torch") | good(member.device)
    arguments["function"] = DOORS.get(name.partition(":")[0], LOSS)
    x, w, y = (arguments[name] for name in ("input", "linear_weight", "target"))
    tensors = SimpleNamespace(x=x, w=w, y=y, rank=member.rank)
    with forward_ad.dual_level():
        if member.rank == 2 or name in MESSAGES:
            arguments |= CASES[name][0](tensors)
        elif name in WEIGHTS:
            arguments |= WEIGHTS[name](tensors)
        function, backend = arguments.pop("function"), arguments.pop("backend")
        with debug_mode(), chosen_backend(backend):
            try:
                call(arguments, function)
                return "not refused"
            except (NotImplementedError, RuntimeError, TypeError, ValueError) as refusal:
                return f"{type(refusal).__name__}: {refusal}"


@pytest.mark.parametrize("name", CASES)
def test_every_rank_raises(name, worlds, device, request):
    if name.split(": ")[-1] == "backend":
        request.getfixturevalue("kernels")
    first, second, odd = worlds(3).run(_said, name, timeout=30)
    if name in DISAGREEMENTS:
        what, two, last = DISAGREEMENTS[name][1:]
        said = f"rank 0 has {two}, rank 1 has {two}, rank 2 has {last}"
        expected = f"^ValueError: the ranks of process_group disagree about .*{what}: {said}"
        assert name not in OPTIONS or odd.count("rank 0 has") == 1, odd  # only what differs is named
    else:
        expected = CASES[name][1]
    if name in REFUSALS:
        kind = {"a tangent": "NotImplementedError"}.get(name, "TypeError" if "keyword" in name else "ValueError")
        assert re.search(rf"^{kind}: .*{expected}", odd), odd
        because = r"^ValueError: rank\(s\) \[2\] of process_group refused their arguments, rank 2 because: "
        expected = f"{because}.*{expected}"
    for said in (first, second) if name in REFUSALS else (first, second, odd):
        assert re.search(expected, said), said


@pytest.mark.parametrize("tokens", [N, 1, 0])
@pytest.mark.parametrize("sequence_parallel", [False, True])
@on_ranks(3)
def test_good_calls_pass(member, sequence_parallel, tokens):
    """With the same bits as without the checks."""
    call_ = good(member.device) | dict(process_group=member.group, sequence_parallel=sequence_parallel)
    call_["input"] = call_["input"][:tokens]
    targets = call_["target"][:tokens].repeat(member.ranks if sequence_parallel else 1)
    if tokens > 1:
        targets[0] = -100
    # Ranks that sum in another order have other bits. All NaN are equal here, and 0 and -0 are.
    sign = -1.0 if member.rank else 1.0
    weights = torch.full_like(targets, sign * torch.nan, dtype=torch.float32)
    weights[-1:] = sign * 0.0
    # Views with gaps.
    call_["target"], call_["token_weight"] = (torch.stack([t, t + 1], 1)[:, 0] for t in (targets, weights))
    call_["input"] = call_["input"] * (1 + 1e-6 * member.rank)
    plain = call(call_)
    # The same number.
    same = dict(z_loss=0, logit_scale=1) if member.rank else dict(z_loss=0.0, logit_scale=1.0)
    with debug_mode():
        with torch.device("meta"):  # whatever a program makes by default
            checked = call(call_ | same)
        del call_["token_weight"]
        call(call_ | dict(target=call_["target"] - 200), STATISTICS)
        call(call_ | dict(target=None), STATISTICS)
    assert plain.item() == checked.item() or (plain.isnan() and checked.isnan())


def test_one_rank(device, monkeypatch):
    bad = good(device)
    with debug_mode():
        for value in (V, -7):
            bad["target"][2] = value
            with pytest.raises(ValueError, match=rf"target {value} at position 2 is outside \[0, 10\)"):
                call(bad)
        assert call(bad | dict(ignore_index=-7)).isfinite()
    monkeypatch.setenv("PARALLEL_LCE_DEBUG", "false")
    with pytest.raises(ValueError, match="PARALLEL_LCE_DEBUG must be 0 or 1, got 'false'"):
        call(good(device))
