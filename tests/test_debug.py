"""``PARALLEL_LCE_DEBUG=1``: whatever differs between the ranks, every rank raises and says what and how."""

from __future__ import annotations

import re

import pytest
import torch
from torch.autograd import forward_ad

import parallel_lce
from parallel_lce.run.fused_loss import fused_loss
from tools import D, N, V, call, chosen_backend, debug_mode, given, good, small
from world import Member

LOSS, STATISTICS = parallel_lce.linear_cross_entropy, parallel_lce.token_statistics


def _refusal(member: Member, arguments: dict, function=LOSS) -> str:
    """The error's name and message on this rank."""
    with debug_mode():
        try:
            call(dict(process_group=member.group) | arguments, function)
            return "not refused"
        except (NotImplementedError, RuntimeError, TypeError, ValueError) as refusal:
            return f"{type(refusal).__name__}: {refusal}"


def _changed(name: str, odd: bool, P: int, device) -> dict:
    """What the last rank's call has, and, where all are wrong alike, every rank's."""
    tensors = good(device)
    x, w, y = tensors.values()
    other = y.clone()
    other[4] = (y[4] + 1) % V
    outside = y.clone()
    outside[4] = 10 * P
    zeros = lambda *shape, **options: torch.zeros(*shape, device=device, **options)  # noqa: E731
    if name == "target out of range everywhere":
        return tensors | dict(target=outside)
    if not odd:
        return tensors
    return (
        tensors
        | {
            "N": lambda: dict(input=zeros(7, D), target=zeros(7, dtype=torch.int64)),
            "leading shape": lambda: dict(input=zeros(2, 3, D), target=zeros(2, 3, dtype=torch.int64)),
            "D": lambda: dict(input=zeros(N, 5), linear_weight=zeros(V, 5)),
            "dtype": lambda: dict(input=x.bfloat16(), linear_weight=w.bfloat16()),
            "hidden states": lambda: dict(input=torch.cat([x[:3], -x[3:]])),
            "budget": lambda: dict(logits_budget=0),
            "reduction": lambda: dict(reduction="sum"),
            "label_smoothing": lambda: dict(label_smoothing=0.1),
            "z_loss": lambda: dict(z_loss=1e-3),
            "ignore_index": lambda: dict(ignore_index=5),
            "scale": lambda: dict(logit_scale=0.5),
            "softcap": lambda: dict(logit_softcap=30.0),
            "temperature": lambda: dict(temperature=0.5),
            "temperature of each token": lambda: dict(temperature=torch.ones(N, device=device)),
            "reduce_hidden_grad": lambda: dict(reduce_hidden_grad=False),
            "vocab_size": lambda: dict(vocab_size=10 * P - 1),
            "reduce_dtype": lambda: dict(reduce_dtype=torch.float32),
            "sequence_parallel": lambda: dict(sequence_parallel=True, target=zeros(N * P, dtype=torch.int64)),
            "input needs a gradient": lambda: dict(input=x.requires_grad_()),
            "weight needs a gradient": lambda: dict(linear_weight=w.requires_grad_()),
            "bias": lambda: dict(linear_bias=zeros(V)),
            "target": lambda: dict(target=other),
            "token_weight": lambda: dict(token_weight=torch.ones(N, device=device)),
            "target out of range": lambda: dict(target=outside),
            "bad argument": lambda: dict(linear_bias=zeros(3)),
            "unknown keyword": lambda: dict(label_smothing=0.1),
            "keyword of PyTorch's": lambda: dict(options=1),
            "no input": lambda: dict(input=None),
            "no target": lambda: dict(target=None),
            "no number": lambda: dict(label_smoothing="x"),
            "no truth value": lambda: dict(sequence_parallel=zeros(2)),
            "a tangent": lambda: dict(input=forward_ad.make_dual(x, w[:1] + x)),
            "unequal rows": lambda: dict(linear_weight=zeros(V + 1, D)),
            "weight of no rows": lambda: dict(linear_weight=zeros(0, D)),
            "gap": lambda: dict(vocab_start=10 * (P - 1) + 1),
            "overlap": lambda: dict(vocab_start=10 * (P - 1) - 1),
        }[name]()
    )


def _one_differs(member: Member, name: str) -> str:
    odd = member.rank == member.ranks - 1
    with forward_ad.dual_level():
        arguments = _changed(name, odd, member.ranks, member.device)
        if name in ("gap", "overlap") and not odd:
            arguments["vocab_start"] = 10 * member.rank
        return _refusal(member, arguments)


def disagree(what: str, two: str, last: str) -> str:
    said = f"rank 0 has {two}, rank 1 has {two}, rank 2 has {last}"
    return f"ValueError: the ranks of process_group disagree about .*{what}: {said}"


def refused(why: str) -> tuple[str, str]:
    """What the ranks say that were right, and the one that was not."""
    return (
        rf"^ValueError: rank\(s\) \[2\] of process_group refused their arguments, rank 2 because: {why}",
        f"Error: {why}",
    )


DISAGREEMENTS = {
    "N": disagree("tokens", r"\(6,\)", r"\(7,\)"),
    "leading shape": disagree("tokens", r"\(6,\)", r"\(2, 3\)"),
    "D": disagree("hidden size", "4", "5"),
    "dtype": disagree("dtype", "torch.float32", "torch.bfloat16"),
    "hidden states": r"disagree about input: token 3 has norm (\S+) on rank 0 and \1 on rank 2, along a random",
    "budget": disagree("logits_budget", r"\d{9,}", "0"),
    "reduction": disagree("reduction", "'mean'", "'sum'"),
    "label_smoothing": disagree("label_smoothing", "0.0", "0.1"),
    "z_loss": disagree("z_loss", "0.0", "0.001"),
    "ignore_index": disagree("ignore_index", "-100", "5"),
    "scale": disagree("logit_scale", "1.0", "0.5"),
    "softcap": disagree("logit_softcap", "None", "30.0"),
    "temperature": disagree("temperature", "1.0", "0.5"),
    "temperature of each token": disagree("temperature", "1.0", "'of each token'"),
    "reduce_hidden_grad": disagree("reduce_hidden_grad", "True", "False"),
    "vocab_size": disagree("vocab_size", "None", "29"),
    "reduce_dtype": disagree("reduce_dtype", "None", "torch.float32"),
    "sequence_parallel": disagree("sequence_parallel", "False", "True"),
    "input needs a gradient": disagree("gradients", "None", r"GradientTraits\(hidden=True, weight=False.*"),
    "weight needs a gradient": disagree("gradients", "None", r"GradientTraits\(hidden=False, weight=True.*"),
    "bias": disagree("linear_bias given", "False", "True"),
    "target": disagree("target at position 4", r"\d", r"\d"),
    "token_weight": disagree("token_weight", "None", "values of digest .*"),
    "target out of range": disagree("target at position 4", r"\d", "30"),
    "target out of range everywhere": r"target 30 at position 4 is outside \[0, 30\)",
    "bad argument": refused(r"linear_bias must have shape \[10\].* got \[3\]"),
    "unknown keyword": refused("linear_cross_entropy\\(\\) got an unexpected keyword argument 'label_smothing'"),
    "keyword of PyTorch's": refused("options=1 of torch.nn.functional.linear_cross_entropy is not supported"),
    "no input": refused("input must be a tensor, got NoneType"),
    "no target": refused("target must be a tensor, got NoneType"),
    "no number": refused("label_smoothing must be a Python number in .* got 'x'"),
    "no truth value": refused(r"sequence_parallel must be True or False, got tensor\(\[0., 0.\].*\)"),
    "a tangent": (refused("input has a tangent")[0], "NotImplementedError: input has a tangent"),
    "unequal rows": r"leave a gap: one ends at 20, the next starts at 22",
    "weight of no rows": refused(r"linear_weight \[0, 4\] has no rows"),
    "gap": r"leave a gap: one ends at 20, the next starts at 21",
    "overlap": r"leave an overlap: one ends at 20, the next starts at 19",
}


@pytest.mark.parametrize("name", DISAGREEMENTS)
def test_every_rank_raises(name, worlds, device):
    expected = DISAGREEMENTS[name]
    others, odd = expected if isinstance(expected, tuple) else (expected, expected)
    for rank, said in enumerate(worlds(3).run(_one_differs, name, timeout=30)):
        assert re.search(odd if rank == 2 else others, said), f"rank {rank}: {said}"


def test_only_what_differs_is_named(worlds, device):
    for said in worlds(3).run(_one_differs, "ignore_index", timeout=30):
        assert said.count("rank 0 has") == 1 and "reduction" not in said


def _megatron_s_options_differ(member: Member, name: str) -> str:
    odd = member.rank == 1
    options = {
        "ignore_index": dict(ignore_index=3 if odd else None, outside_is_nan=False),
        "outside_is_nan": dict(outside_is_nan=odd),
    }[name]
    tensors = good(member.device)
    with debug_mode():
        try:
            fused_loss(*given(*tensors.values(), reduction="none", **options), member.group)
            return "not refused"
        except ValueError as refusal:
            return str(refusal)


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("ignore_index", "disagree about ignore_index: rank 0 has None, rank 1 has 3"),
        ("outside_is_nan", "disagree about outside_is_nan: rank 0 has False, rank 1 has True"),
    ],
)
def test_options_of_megatron_s_loss_differ(name, message, worlds, device):
    """Any target is allowed there, and a token may count on one rank alone."""
    for said in worlds(2).run(_megatron_s_options_differ, name, timeout=30):
        assert message in said


def _weights_differ(member: Member, how: str) -> str:
    arguments = good(member.device)
    weight = torch.ones(N, device=member.device)
    if member.rank == 1:
        weight[3] = 0.5 if how == "values" else 1
        weight.requires_grad_(how == "needs a gradient")
    return _refusal(member, arguments | dict(token_weight=weight))


@pytest.mark.parametrize(
    ("how", "message"),
    [
        ("values", "disagree about token_weight at position 3: rank 0 has 1.0, rank 1 has 0.5"),
        ("needs a gradient", "disagree about token_weight needs a gradient: rank 0 has False, rank 1 has True"),
    ],
)
def test_token_weights_differ(how, message, worlds, device):
    for said in worlds(2).run(_weights_differ, how, timeout=30):
        assert message in said


def _backend_differs(member: Member, value: str) -> str:
    with chosen_backend(value if member.rank == 1 else "torch"):
        return _refusal(member, good(member.device))


def test_a_bad_backend_on_one_rank(worlds, device):
    first, second = worlds(2).run(_backend_differs, "cutlass", timeout=30)
    assert "refused their arguments, rank 1 because: PARALLEL_LCE_BACKEND='cutlass'" in first
    assert second.startswith("ValueError: PARALLEL_LCE_BACKEND='cutlass' is none of")


@pytest.mark.usefixtures("kernels")
def test_another_backend_on_one_rank(worlds, device):
    for said in worlds(2).run(_backend_differs, "triton", timeout=30):
        assert "disagree about backend: rank 0 has 'torch', rank 1 has 'triton'" in said


def _statistics_differ(member: Member, name: str) -> str:
    odd = member.rank == 1
    changes = {
        "columns": dict(argmax=odd, expected_logit=odd),
        "target": dict(target=None) if odd else {},
        "keyword": dict(reduction="mean") if odd else {},
        "function": {},
    }[name]
    function = LOSS if name == "function" and odd else STATISTICS
    return _refusal(member, good(member.device) | changes, function)


@pytest.mark.parametrize(
    ("name", "first", "second"),
    [
        ("columns", "expected_logit: rank 0 has False, rank 1 has True", "argmax: rank 0 has False, rank 1 has True"),
        ("target", "disagree about target: rank 0 has values of digest", "rank 1 has None"),
        ("keyword", "unexpected keyword argument 'reduction'", "TypeError: token_statistics() got an unexpected"),
        ("function", "rank 0 has 'token_statistics', rank 1 has 'linear_cross_entropy'", "disagree about function"),
    ],
)
def test_statistics_differ(name, first, second, worlds, device):
    zero, one = worlds(2).run(_statistics_differ, name, timeout=30)
    assert first in zero and second in one


def _another_function(member: Member) -> str:
    arguments = good(member.device)
    if member.rank == 0:
        return _refusal(member, arguments | dict(reduction="none"))
    with debug_mode():
        try:
            logits = arguments["input"] @ arguments["linear_weight"].t()
            parallel_lce.vocab_parallel_cross_entropy(logits, arguments["target"], tp_group=member.group)
            return "not refused"
        except ValueError as refusal:
            return str(refusal)


def test_another_function(worlds, device):
    for said in worlds(2).run(_another_function, timeout=30):
        assert "function: rank 0 has 'linear_cross_entropy', rank 1 has 'vocab_parallel_cross_entropy'" in said


def _logits_differ(member: Member, changes: dict) -> str:
    arguments = dict(
        vocab_parallel_logits=torch.zeros(3, 4, device=member.device),
        target=torch.tensor([0, 1, 2], device=member.device),
        tp_group=member.group,
    )
    if member.rank == 1:
        arguments |= {k: v.to(member.device) if isinstance(v, torch.Tensor) else v for k, v in changes.items()}
    with debug_mode():
        try:
            parallel_lce.vocab_parallel_cross_entropy(**arguments)
            return "not refused"
        except ValueError as refusal:
            return str(refusal)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        (
            dict(vocab_parallel_logits=torch.ones(3, 4).to_sparse()),
            "must be a dense tensor, got one of layout torch.sparse_coo",
        ),
        (dict(target=torch.tensor([0, 1, 3])), "disagree about target at position 2: rank 0 has 2, rank 1 has 3"),
        (dict(vocab_parallel_logits=torch.zeros(3, 5)), "disagree about entries per rank: rank 0 has 4, rank 1 has 5"),
        (dict(label_smoothing=0.1), "disagree about label_smoothing: rank 0 has 0.0, rank 1 has 0.1"),
        (dict(target=torch.zeros(2, dtype=torch.long)), "target must have shape [3] for vocab_parallel_logits"),
    ],
    ids=lambda value: "" if isinstance(value, str) else "-".join(value),
)
def test_real_logits_differ(changes, message, worlds, device):
    for said in worlds(2).run(_logits_differ, changes, timeout=30):
        assert message in said


def _kernels_differ(member: Member) -> str:
    with chosen_backend("triton" if member.rank == 1 else "torch"):
        return _logits_differ(member, {})


@pytest.mark.usefixtures("kernels")
def test_another_backend_for_real_logits(worlds, device):
    for said in worlds(2).run(_kernels_differ, timeout=30):
        assert "disagree about kernels: rank 0 has False, rank 1 has True" in said


def _agree(member: Member, sequence_parallel: bool, N: int):
    """A call that is right passes the debug checks and gives the same bits."""
    parts = member.ranks if sequence_parallel else 1
    call_ = good(member.device) | dict(process_group=member.group, sequence_parallel=sequence_parallel)
    call_["input"] = call_["input"][:N]
    call_["target"] = call_["target"][:N].repeat(parts)
    call_["target"][:1] = -100
    call_["token_weight"] = torch.full_like(call_["target"], torch.nan, dtype=torch.float32)
    # Ranks that sum in another order have other bits; NaN is equal to NaN here.
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
    return plain.item() == checked.item() or bool(plain.isnan() and checked.isnan())


@pytest.mark.parametrize("N", [N, 0])
@pytest.mark.parametrize("sequence_parallel", [False, True])
def test_good_calls_pass(sequence_parallel, N, worlds, device):
    assert all(worlds(3).run(_agree, sequence_parallel, N))


def _one_token_of_many(member: Member) -> bool:
    arguments = good(member.device) | dict(process_group=member.group)
    every = torch.arange(4, device=member.device)
    arguments |= dict(input=arguments["input"][:1], target=every[1:2:2], token_weight=every.float()[1:2:2])
    plain = call(arguments)
    with debug_mode():
        return torch.equal(call(arguments), plain)


def test_one_token_of_a_view(worlds, device):
    assert all(worlds(2).run(_one_token_of_many))


def _nobody_has_entries(member: Member, start: bool) -> str:
    arguments = good(member.device) | dict(linear_weight=torch.zeros(0, D, device=member.device))
    return _refusal(member, arguments | (dict(vocab_start=0) if start else {}))


@pytest.mark.parametrize(("start", "message"), [(False, "has no rows"), (True, "none of the 2 shards has a row")])
def test_a_vocabulary_of_nothing(start, message, worlds, device):
    for said in worlds(2).run(_nobody_has_entries, start, timeout=30):
        assert message in said


def test_a_switch_that_is_none(device, monkeypatch):
    monkeypatch.setenv("PARALLEL_LCE_DEBUG", "false")
    with pytest.raises(ValueError, match="PARALLEL_LCE_DEBUG must be 0 or 1, got 'false'"):
        call(good(device))


def test_one_rank(device):
    bad = good(device)
    bad["target"][2] = V
    with debug_mode():
        with pytest.raises(ValueError, match=r"target 10 at position 2 is outside \[0, 10\)"):
            call(bad)
        bad["target"][2] = -7
        with pytest.raises(ValueError, match=r"target -7 at position 2"):
            call(bad)
        assert call(bad | dict(ignore_index=-7)).isfinite()


@pytest.mark.parametrize(("dtype", "V"), [(torch.int8, 300), (torch.uint8, 300), (torch.int16, 40000)])
def test_narrow_targets(dtype, V, device):
    """Ids of a dtype that cannot hold V are compared as wide ones."""
    t = small(device, N=6, V=V, D=4)
    target = torch.tensor([0, 1, 100, 127, 49, 3], dtype=dtype, device=device)
    want = parallel_lce.linear_cross_entropy(t.x, t.weight, target.long())
    with debug_mode():
        assert torch.equal(parallel_lce.linear_cross_entropy(t.x, t.weight, target), want)
