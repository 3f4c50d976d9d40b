"""``PARALLEL_LCE_DEBUG=1``: whatever differs between the ranks, every rank raises and says what and how."""

from __future__ import annotations

import re
from types import SimpleNamespace

import pytest
import torch

import parallel_lce
from on_ranks import on_ranks
from tools import D, N, V, call, chosen_backend, debug_mode, good
from world import Member

LOSS, STATISTICS = parallel_lce.linear_cross_entropy, parallel_lce.token_statistics


def LOGITS(input, linear_weight, target, process_group, **changes):
    arguments = dict(vocab_parallel_logits=input @ linear_weight.t(), target=target, tp_group=process_group)
    return parallel_lce.vocab_parallel_cross_entropy(**arguments | changes)


DOORS = {"statistics": STATISTICS, "logits": LOGITS}
"""By the first word of a case's name; of the others the door is the loss."""


def _with(values, position: int, value):
    changed = values.clone()
    changed[position] = value
    return changed


# What the last of three ranks changes of ``t.x``, ``t.w`` and ``t.y``; what differs; that of the others, and its own.
DISAGREEMENTS = {
    "N": (lambda t: dict(input=t.x.new_zeros(7, D), target=t.y.new_zeros(7)), "tokens", r"\(6,\)", r"\(7,\)"),
    "D": (lambda t: dict(input=t.x.new_zeros(N, 5), linear_weight=t.w.new_zeros(V, 5)), "hidden size", "4", "5"),
    "dtype": (lambda t: dict(input=t.x.half(), linear_weight=t.w.half()), "dtype", "torch.float32", "torch.float16"),
    "SP": (lambda t: dict(sequence_parallel=True, target=t.y.repeat(3)), "sequence_parallel", "False", "True"),
    "dW": (lambda t: dict(linear_weight=t.w.requires_grad_()), "gradients", "None", r".*hidden=False, weight=True.*"),
    "bias": (lambda t: dict(linear_bias=t.w.new_zeros(V)), "linear_bias given", "False", "True"),
    "temperatures": (lambda t: dict(temperature=t.x.new_ones(N)), "temperature", "1.0", "'of each token'"),
    "target": (lambda t: dict(target=_with(t.y, 4, (t.y[4] + 1) % V)), "target at position 4", r"\d", r"\d"),
    "weights": (lambda t: dict(token_weight=t.x.new_ones(N)), "token_weight", "None", "values of digest .*"),
    "a weight": (lambda t: dict(token_weight=_with(t.y.float(), 3, 0.5)), "token_weight at position 3", r"\d.0", "0.5"),
    "z_loss": (lambda t: dict(z_loss=1e-3), "z_loss", "0.0", "0.001"),
    "reduction": (lambda t: dict(reduction="sum"), "reduction", "'mean'", "'sum'"),
    "backend": (lambda t: dict(backend="triton"), "backend", "'torch'", "'triton'"),
    "statistics: columns": (lambda t: dict(expected_logit=True, argmax=True), "argmax", "False", "True"),
    "statistics: a loss": (lambda t: dict(function=LOSS), "function", "'token_statistics'", "'linear_cross_entropy'"),
    "logits: target": (lambda t: dict(target=_with(t.y, 2, (t.y[2] + 1) % V)), "target at position 2", r"\d", r"\d"),
    "logits: V": (lambda t: dict(vocab_parallel_logits=t.x.new_zeros(N, 11)), "entries per rank", "10", "11"),
    "logits: smoothing": (lambda t: dict(label_smoothing=0.1), "label_smoothing", "0.0", "0.1"),
}
# The last rank's error, which the others name.
REFUSALS = {
    "a backend": (lambda t: dict(backend="cutlass"), "PARALLEL_LCE_BACKEND='cutlass' is none of"),
    "keyword": (lambda t: dict(smothing=1), r"linear_cross_entropy\(\) got an unexpected keyword argument 'smothing'"),
    "PyTorch's": (lambda t: dict(options=1), "options=1 of torch.nn.functional.linear_cross_entropy is not supported"),
    "no input": (lambda t: dict(input=None), "input must be a tensor, got NoneType"),
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
    "no vocabulary": (lambda t: dict(linear_weight=t.w[:0], vocab_start=0), "none of the 3 shards has a row"),
    "gap": (lambda t: dict(vocab_start=(0, 10, 21)[t.rank]), "leave a gap: one ends at 20, the next starts at 21"),
    "overlap": (lambda t: dict(vocab_start=(0, 10, 19)[t.rank]), "an overlap: one ends at 20, the next starts at 19"),
}
CASES = DISAGREEMENTS | REFUSALS | MESSAGES


def _said(member: Member, name: str) -> str:
    """The error's name and message on this rank."""
    arguments = dict(process_group=member.group, backend="torch") | good(member.device)
    arguments["function"] = DOORS.get(name.partition(":")[0], LOSS)
    x, w, y = (arguments[name] for name in ("input", "linear_weight", "target"))
    tensors = SimpleNamespace(x=x, w=w, y=y, rank=member.rank)
    if member.rank == 2 or name in MESSAGES:
        arguments |= CASES[name][0](tensors)
    elif name == "a weight":
        arguments["token_weight"] = y.float()
    function, backend = arguments.pop("function"), arguments.pop("backend")
    with debug_mode(), chosen_backend(backend):
        try:
            call(arguments, function)
            return "not refused"
        except (TypeError, ValueError) as refusal:
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
        assert name != "z_loss" or odd.count("rank 0 has") == 1, odd  # only what differs is named
    else:
        expected = CASES[name][1]
    if name in REFUSALS:
        kind = "TypeError" if "keyword" in name else "ValueError"
        assert re.search(rf"^{kind}: .*{expected}", odd), odd
        because = r"^ValueError: rank\(s\) \[2\] of process_group refused their arguments, rank 2 because: "
        expected = f"{because}.*{expected}"
    for said in (first, second) if name in REFUSALS else (first, second, odd):
        assert re.search(expected, said), said


@on_ranks(3)
def test_equal_values_pass(member):
    """All NaN are equal, and so are 0 and -0. Ranks that sum in another order have other bits."""
    call_, sign = good(member.device) | dict(process_group=member.group), -1.0 if member.rank else 1.0
    call_["token_weight"] = torch.full((N,), sign * 0.0, device=member.device)
    call_["token_weight"][2] = sign * torch.nan
    call_["input"] = call_["input"] * (1 + 1e-6 * member.rank)
    call_["target"][2] = -100
    plain = call(call_)
    same = dict(z_loss=0, logit_scale=1) if member.rank else dict(z_loss=0.0, logit_scale=1.0)
    with debug_mode(), torch.device("meta"):  # whatever a program makes by default
        assert call(call_ | same).item() == plain.item() == 0


def test_one_rank(device, monkeypatch):
    bad = good(device)
    bad["target"][2] = -7
    with debug_mode():
        with pytest.raises(ValueError, match=r"target -7 at position 2 is outside \[0, 10\)"):
            call(bad)
        assert call(bad | dict(ignore_index=-7)).isfinite()
    monkeypatch.setenv("PARALLEL_LCE_DEBUG", "false")
    with pytest.raises(ValueError, match="PARALLEL_LCE_DEBUG must be 0 or 1, got 'false'"):
        call(good(device))
