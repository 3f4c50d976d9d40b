"""Bad input is refused before any kernel or collective, with both sizes named, also after a good call of nearly the
same signature; and by every rank in debug mode, if one alone has it. test_agreement.py has ranks that disagree."""

import fractions
import re
import warnings
from unittest import mock

import numpy as np
import pytest
import torch
import torch.distributed as dist
from torch.distributed.tensor import Shard, distribute_tensor

import parallel_lce
from calls import D, N, V, call, calls, good
from parallel_lce.call import prepare
from tools import alone, debug_mode, on_ranks
from world import Member, mesh_of


class _Wrapper(torch.Tensor):
    """As of a quantized tensor, its operations are its own."""

    __torch_dispatch__ = classmethod(lambda *given: None)


NAN, INF, HUGE, NO_MEMBER = float("nan"), float("inf"), 10**400, dist.GroupMember.NON_GROUP_MEMBER
ZEROS, LEAF, IDS = torch.zeros(N), torch.ones(N, requires_grad=True), torch.zeros(N).long()
OTHER_DTYPE = "is torch.%s and input is torch.float32: cast one, or use torch.autocast$"
WRAPPED = "is a _Wrapper.*__torch_dispatch__.*plain tensor"
SCALED, CAPPED = dict(logit_scale=1e30, temperature=1e-30), dict(logit_softcap=1e-30, temperature=1e30)
DOUBLE = dict(teacher_hidden=torch.zeros(N, D).double(), teacher_weight=torch.zeros(V, D).double())
ONE_ENTRY = dict(vocab_parallel_logits=torch.zeros(N, 1), label_smoothing=0.1)
SMOOTHED = dict(gradient_filter=0.01, label_smoothing=0.1)
TWO_SUMS = dict(reduce_hidden_grad=False, sequence_parallel=True)
# The refused argument, which begins the message; a pattern of the rest; refused values, or dicts of several arguments.
OPTIONS = [
    ("reduction", "must be 'none', 'mean' or 'sum', got ('average'|None)", "average", None),
    ("ignore_index", "must be an integer of 64 bits or None, got", 2**70, True, 0.5),
    (
        "label_smoothing",
        r"must be a Python number in \[0, 1\], got",
        1.5,
        NAN,
        torch.tensor(0.1),
        fractions.Fraction(1, 8),
    ),
    ("z_loss", "must be a finite Python number >= 0, got", -1, INF, np.float64(0.1), "0.1", [0.1], True),
    ("z_loss", r"must be a finite Python number >= 0, got -1000.*\(402 characters\)", -HUGE),
    ("logit_scale", "must be a finite Python number, got", 1e39, NAN, "x", HUGE),
    ("logit_scale", "=.* and logit_softcap=.* divided by temperature=.* are beyond fp32", SCALED, CAPPED),
    ("logit_softcap", "must be None or a positive Python number, got", 1e-60, 1e300, 0.0, -3.0, INF),
    ("temperature", r"must be a finite Python number > 0, got [^(]*$", 0.0, -1, NAN, None),
    ("logits_budget", "must be None or a number of bytes >= 0 .* got", -1, 0.5, 1e9, 2**63),
    ("vocab_size", "must be None or a number of entries >= 1 .* got", 9.0, torch.tensor(9), np.int64(9)),
    ("gradient_filter", r"must be None or a number between 0 and 1, such as 2\*\*-13, got", 0, 1, NAN, True, "0.1"),
    ("vocab_start", "must be None or an id >= 0 and < 2.31, got", -1, 2**31),
    ("vocab_size", "must be None or a number of entries >= 1 and < 2.31, got", 0, 2**31),
    ("sequence_dim", "must be 0 or 1, got", 2, -1, None, True, torch.ones(2, dtype=torch.bool)),
    ("sequence_parallel", "must be True or False, got", "no", None, 1, 1.0, np.True_, torch.tensor(True)),
    ("gradient_filter", "=0.01 cannot be combined with label_smoothing", SMOOTHED),
    ("reduce_hidden_grad", "must be .* got 'no'", "no"),
    ("reduce_hidden_grad", "=False cannot be combined .*=True: .* with sequence_parallel=False", TWO_SUMS),
    ("reduce_dtype", "must be None, torch.float32 or the input's (dtype|torch.float32), got", torch.int32, "float32"),
]
TENSORS = [
    ("input", "must be a tensor, got list", [1.0]),
    ("input", r"must be \[..., D\], got \[\]", torch.tensor(1.0)),
    ("input", "must be bfloat16, float16, float32 or float64, got torch.int64", torch.ones(N, D).long()),
    ("input", r"has 5 features and linear_weight \[10, 4\] has 4", torch.zeros(N, 5)),
    ("linear_weight", r"must be \[V, D\] with two dimensions, got \[10, 1, 4\]", torch.zeros(V, 1, D)),
    ("input", r"has 4 .* linear_weight \[4, 10\] has 10: .* transposed\?", dict(linear_weight=torch.zeros(D, V))),
    ("linear_weight", "must be a tensor, got Linear: pass its weight", torch.nn.Linear(D, V)),
    ("linear_weight", OTHER_DTYPE % "bfloat16", torch.zeros(V, D).bfloat16()),
    ("linear_weight", r"\[0, 4\] has no rows: the vocabulary is empty", torch.zeros(0, D)),
    ("target", "must be a tensor.*, got (list|NoneType)", [1, 2], None),
    ("target", r"must have shape \[6\] for input \[6, 4\], got \[(7|6, 1)\]", torch.zeros(7).long(), IDS[:, None]),
    ("target", r"must hold .* integer dtype, got .*probabilities are not", ZEROS, torch.zeros(N, V), ZEROS > 0),
    ("linear_bias", r"must have shape \[10\].* linear_weight \[10, 4\], got", torch.zeros(9), torch.zeros(V, 1)),
    ("linear_bias", "must be a tensor or None, got float", 0.0),
    ("linear_bias", "must be bfloat16, float16, float32 or float64, got torch.int64", torch.zeros(V).long()),
    ("token_weight", r"must have shape \[6\] for input \[6, 4\], got \[5\]", ZEROS[1:]),
    ("token_weight", "must be real, got torch.complex64", torch.zeros(N, dtype=torch.complex64)),
    ("logit_scale", "must be floating-point, got torch.int64", IDS),
    ("logit_scale", r"requires a gradient, and none flows to it: pass logit_scale.detach\(\)", LEAF),
    ("token_weight", r"requires a gradient, .*: pass token_weight.detach\(\), or multiply the losses of", LEAF),
    ("logit_scale", r"must be .* target's shape \[6\], got one of shape \[5\]", ZEROS[1:]),
    ("temperature", r"must be .*, got one of shape \[\]$", ZEROS[0]),
    ("weight", "of torch.* is not supported: use token_weight", torch.ones(V)),
]
with warnings.catch_warnings(action="ignore"):  # a prototype
    TENSORS.append(("input", "must be a dense tensor, got a nested one", torch.nested.nested_tensor([ZEROS])))
for name, value in (good() | dict(linear_bias=torch.zeros(V), token_weight=ZEROS)).items():
    TENSORS.append((name, "must be a dense tensor, got one of layout torch.sparse_coo", value.to_sparse()))
    TENSORS.append((name, WRAPPED, value.as_subclass(_Wrapper)))
    if name != "input":
        TENSORS.append((name, "is on meta and input is on cpu", value.to("meta")))
TWO = torch.ones(2, dtype=torch.bool)
COUNTED = [
    ("counted_tokens", "must be an integer from 0 to 6, got", N + 1, -1, 3.0),
    ("target", r"must have shape \[6\]", dict(target=IDS[1:], counted_tokens=3)),
]
PAIR = torch.zeros(3).long(), torch.zeros(N + 1).long()
OF_STATISTICS = [
    *((name, "must be True or False, got", "no", TWO[0], 1) for name in ("mean_logit", "entropy")),
    *((name, "must be True or False, got", "no", TWO[0], 1) for name in ("argmax", "sum_p_squared")),
    ("top_k", "must be None or a number of entries >= 1, got 0", 0),
    ("mask", r"must be torch.bool of the tokens' shape \[6\], got NoneType: counted", dict(counted_tokens=3)),
    ("mask", r"must be torch.bool .* got torch.float32 \[6\]", ZEROS, dict(mask=ZEROS, counted_tokens=3)),
    ("mask", r"must .* shape \[6\], got torch.bool \[2, 3\]", dict(mask=(ZEROS > 0).view(2, 3), counted_tokens=3)),
    ("", "without offsets, where a mask is given", dict(mask=ZEROS == 0, counted_tokens=N, selected=PAIR)),
    *(("", f"gradient_filter=0.01 cannot be combined with {name}", dict(gradient_filter=0.01) | {name: value})
      for name, value in dict(mean_logit=True, entropy=True, sum_p_squared=True, selected=IDS[:, None]).items()),
]  # fmt: skip
OTHERS = torch.zeros(3, 2).long()
SELECTED = [
    ("selected", "must hold ids of an integer dtype, got torch.float32", torch.zeros(N, 2)),
    ("selected", r"must be ids of shape \[..., K\] for tokens of shape \[6\].*, got \[3, 2\]", OTHERS),
    ("selected_offsets", "is on meta", dict(selected=(IDS, torch.arange(N + 1).to("meta")))),
    ("selected", "must .* or a pair of ids and offsets, got NoneType and Tensor", dict(selected=(None, IDS))),
    ("selected", "must be a tensor.*got", dict(selected=(1, 2)), dict(selected="ids")),
]
NO_TOKENS = dict(input=torch.zeros(0, D), target=IDS[:0], selected=(IDS, IDS[:1]))
OF_DIVERGENCE = [
    ("teacher_hidden", r"must have the tokens .* got \[5, 4\] .* and \[6, 4\]", torch.zeros(N - 1, D)),
    ("teacher_hidden", "has 5 features", torch.zeros(N, D + 1)),
    ("teacher_hidden", "must .* both or none must be float64, got .* torch.float64", DOUBLE),
    ("", r"\[0, 9\).*\[0, 10\)", dict(teacher_weight=torch.zeros(V - 1, D))),
    ("beta", "must be 0, 1", 1e-9, 2),
    ("teacher_logit_scale", r"must be .* of target's shape \[6\]", ZEROS[1:]),
]
OF_TOP_K = [
    ("tail", "must be 'class' or 'renormalize', got", "none"),
    ("teacher_ids", "must be ids of shape", dict(student_hidden=torch.zeros(N - 1, D))),
    ("teacher_log_probs", "must be floating-point, got torch.int64", IDS[:, None]),
    ("teacher_log_probs", r"must have the shape of teacher_ids, .* got \[6, 2\]", torch.zeros(N, 2)),
    ("teacher_log_probs", "must have .* on cpu, got .* on meta", torch.zeros(N, 1, device="meta")),
]
OF_LOGITS = [
    ("target", r"must have shape \[6\] on cpu for vocab_parallel_logits \[6, 10\], got \[6, 1\]", IDS[:, None]),
    ("label_smoothing", r"must be in \[0, 1\), got 1.0", 1.0),
    ("label_smoothing", "=0.1 needs at least 2 entries per rank, got 1", ONE_ENTRY),
    ("vocab_parallel_logits", "must be a tensor", "x"),
    ("vocab_parallel_logits", r"must be .* floating point, got \[6, 10\] of torch.int64", torch.zeros(N, V).long()),
]
OF_VERL = [
    ("reduction", "must be 'none', 'sum' or, without a mask, 'mean', got", "all", dict(reduction="mean", mask=IDS > 0)),
    ("hidden", r"must be \[..., D\], got \[\]", ZEROS[0]),
    ("temperature", "must be", 0, ZEROS[1:]),
]
OF_SKYRL = [("weight", r"must be \[V/P, D\], got str", "x"), ("target", "must be ids of an integer dtype", ZEROS)]
OF_NEMO = [
    ("target", "must be", "x", IDS),
    ("mask", r"must be \[B, S\] = .* got \[6, 1\]", ZEROS[:, None] == 0),
    ("bias", r"must have shape \[10\].*got \[5\]", ZEROS[1:]),
    ("output_weight_layer", "has 10 rows, which do not fit the ids from", dict(vocab_end_index=1000)),
    ("", r"output_weight_layer .*\[V/P, D\]", dict(output_weight_layer=ZEROS)),
    ("", "ids from vocab_start_index=9 to vocab_end_index=8", dict(vocab_start_index=9, vocab_end_index=8)),
    ("", ".*", dict(tensor_parallel_hidden_states=ZEROS)),
    ("inference_only", "must be True or False, got", TWO),
    ("cp_group", "must be a torch.distributed", 3),
]
TABLES = {
    "loss": OPTIONS + TENSORS + COUNTED,
    "statistics": OF_STATISTICS + SELECTED,
    "token loss": [("reduction", "must be 'sum' or 'mean'", "none"), ("target", "must have shape", IDS[1:])],
    "selected": SELECTED + [("logit_softcap", "must be", 0), ("selected", "must .* got NoneType", None)],
    "module": [("target", "must be a tensor", None), ("token_weight", "must have shape", ZEROS[1:])],
    "divergence": OF_DIVERGENCE,
    "top_k": OF_TOP_K,
    "logits": OF_LOGITS,
    "verl": OF_VERL,
    "skyrl": OF_SKYRL,
    "nemo": OF_NEMO,
}
"""By the names of :func:`calls.calls`."""
# What several ranks allow, and what they cannot tell each other.
ONE_RANK = [
    ("loss", "vocab_start", r"=3 without a process group .* \[0, 3\)", 3),
    ("loss", "vocab_size", "=11 exceeds the 10 rows of .* 1 rank", 11, dict(vocab_size=11, vocab_start=0)),
    ("statistics", "top_k", "=11 exceeds the 10 entries of the vocabulary", 11),
    ("loss", "process_group", "must be .* got GroupMember.NON_GROUP_MEMBER: this process is not one", NO_MEMBER),
    ("loss", "process_group", "must be a torch.distributed.ProcessGroup, a one-dimensional .* got", "tp", ZEROS),
    ("nemo", "tp_group", "must be a .*ProcessGroup, .* or None, got str", "tp"),
    ("statistics", "selected", "has 6 ids, and there is no token that could have them", NO_TOKENS),
    *((name, "", "got an unexpected keyword argument 'other'", dict(other=1)) for name in TABLES),
]
ROWS = [(name, *row) for name, rows in TABLES.items() for row in rows]


def _changes(argument: str, value: object) -> dict:
    return value if isinstance(value, dict) else {argument: value}


def _assert_refused(function, arguments: dict, argument: str, said: str, value: object) -> None:
    pattern = rf"^{argument}\b.*{said}" if argument else said
    with pytest.raises((ValueError, TypeError), match=pattern):
        function(**arguments | _changes(argument, value))


@pytest.mark.parametrize("row", ROWS + ONE_RANK, ids=lambda row: "-".join(row[:3]))
def test_bad_arguments_are_refused_by_name(row):
    name, argument, said, *values = row
    function, arguments = calls(alone())[name]
    for value in values:
        function(**arguments)
        _assert_refused(function, arguments, argument, said, value)


ONE_NUMBER = "must be a finite Python number.*, got tensor"
OF_A_NEW_MODULE = [*OPTIONS, ("logit_scale", ONE_NUMBER, ZEROS), ("temperature", ONE_NUMBER, ZEROS)]


def test_a_module_refuses_bad_options_when_it_is_made():
    for argument, said, *values in OF_A_NEW_MODULE:
        for value in values:
            _assert_refused(parallel_lce.LinearCrossEntropy, {}, argument, said, value)


def _refused_alone(member: Member, name: str) -> list[str]:
    function, arguments = calls(member)[name]
    said = []
    with debug_mode():
        for argument, _, *values in (*TABLES[name], ("", "", dict(other=1)), ("", "", {})):
            for value in values:
                changes = _changes(argument, value) if member.rank else {}
                try:
                    function(**arguments | changes)
                    said.append("not refused")
                except (TypeError, ValueError) as refusal:
                    said.append(str(refusal))
    return said


@pytest.mark.parametrize("name", TABLES)
def test_what_one_rank_refuses_every_rank_raises(name, worlds, device):
    first, odd = worlds(2).run(_refused_alone, name, timeout=60)
    for one, other in zip(first[:-1], odd):
        one = re.sub(r"of \w+ refused", "refused", one)
        assert one == f"rank(s) [1] refused their arguments, rank 1 because: {other}"
    assert first[-1] == odd[-1] == "not refused"


@on_ranks(2)
def test_what_is_wrong_on_every_rank_is_refused_before_a_collective(member):
    """Arguments that are wrong on every rank: nobody reaches a collective. Of one rank alone, others may wait."""
    whole = torch.zeros(12, dtype=torch.int64, device=member.device)
    arguments = good(member.device) | dict(process_group=member.group, sequence_parallel=True)
    batch = dict(input=arguments["input"].expand(2, 6, 4), target=whole.expand(2, 12))
    for message, changes in {
        r"target must have shape \[12\] for input \[6, 4\] of each of 2 sequence-parallel ranks, got \[6\]": {},
        "vocab_size=21 exceeds the 20 rows .* 2 rank": dict(target=whole, vocab_size=21),
        r"sequence parallelism, got \[4\]": dict(input=arguments["input"][0], target=whole[0]),
        r"got \[2, 12\]\. If the second dimension is the sequence, pass sequence_dim=1": batch,
    }.items():
        with pytest.raises(ValueError, match=rf"(?s)^.*{message}.*PARALLEL_LCE_DEBUG=1"):
            call(arguments | changes)
    outside = dist.new_group([0])
    if member.rank:
        with pytest.raises(ValueError, match="process_group"):
            call(arguments | dict(process_group=outside))
    if member.device.type == "cpu":
        whole[7] = 3 * V
        with pytest.raises(IndexError, match=r"^target 30 at position 7 is outside .*PARALLEL_LCE_DEBUG=1"):
            call(arguments | dict(target=whole))
        for given in dict(target=whole[2:8]), dict(vocab_size=20), dict(sequence_parallel=True, target=whole):
            with pytest.raises(ValueError, match=r"(30 at|vocab_size=20|\[12\]).* pass the process_group of all"):
                call(good(member.device) | given)
        for backend in ("nccl", "cuda:nccl"):
            with mock.patch.object(dist, "get_backend", return_value=backend):
                with pytest.raises(ValueError, match="process_group communicates through nccl, but input is on cpu"):
                    call(arguments | dict(target=whole.clamp(max=9)))
                # Debug mode would send its messages from a GPU: without one PyTorch refuses.
                message = "communicates through nccl" if torch.cuda.is_available() else "CUDA|NVIDIA"
                with debug_mode(), pytest.raises((AssertionError, RuntimeError, ValueError), match=message):
                    call(arguments | dict(target=whole.clamp(max=9)))


def test_checks_run_once_for_each_signature(monkeypatch):
    prepare.KNOWN.clear()
    with mock.patch.object(prepare, "check_tensors", wraps=prepare.check_tensors) as check:
        assert torch.equal(call(good()), call(good())) and check.call_count == 1
        call(good() | dict(input=torch.randn(N, D, requires_grad=True)))
        with torch.autocast("cpu"):
            call(good())
        assert check.call_count == 3
    monkeypatch.setattr(prepare, "_MOST_KNOWN", 3)
    for budget in range(10):
        call(good() | dict(logits_budget=budget))
        assert len(prepare.KNOWN) <= 3


@pytest.mark.parametrize("other", [True, 1.0])
def test_equal_numbers_of_another_type_are_refused(other):
    names = ["ignore_index", "logits_budget"]
    for name in names + ["z_loss", "logit_scale", "temperature", "logit_softcap"] * (other is True):
        call(good() | {name: 1})
        with pytest.raises(ValueError, match=f"{name} must be .*, got {other}"):
            call(good() | {name: other})


@on_ranks(2)
def test_a_call_of_dtensors_that_one_rank_refuses_every_rank_does(member):
    mesh = mesh_of(member.device.type, (2,), ("tp",))
    placed = {name: distribute_tensor(value, mesh, [Shard(0)]) for name, value in good(member.device).items()}
    changes = dict(other=1), dict(reduction=None), dict(sequence_dim=2), dict(vocab_size=1000), dict(linear_bias=IDS)
    with debug_mode():
        for change in changes:
            with pytest.raises((TypeError, ValueError)) as refusal:
                parallel_lce.linear_cross_entropy(**placed | (change if member.rank else {}))
            assert member.rank or re.search(r"^rank\(s\) \[1\] of \w+ refused", str(refusal.value))
        assert parallel_lce.linear_cross_entropy(**placed).isfinite()
