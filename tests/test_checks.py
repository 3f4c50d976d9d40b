"""Bad input is refused before any kernel or collective, with both sizes named, also after a good call of nearly the
same signature. In debug mode every rank refuses values that differ between the ranks."""

import os
import re
from types import SimpleNamespace
from unittest import mock

import numpy as np
import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch.distributed.tensor import Shard, distribute_tensor

import parallel_lce
from parallel_lce import rl
from parallel_lce.call import debug, prepare
from parallel_lce.core.grad_buffers import MainGrad
from parallel_lce.distillation import divergence, top_k_divergence
from parallel_lce.run.fused_loss import fused_loss
from parallel_lce.sampled import sampled_linear_cross_entropy
from tools import D, N, V, call, chosen_backend, debug_mode, given, good, on_ranks
from world import Member, mesh_of


class _Wrapper(torch.Tensor):
    """As of a quantized tensor, its operations are its own."""

    __torch_dispatch__ = classmethod(lambda *given: None)


NAN, INF, HUGE = float("nan"), float("inf"), 10**400
ZEROS, LEAF, IDS = torch.zeros(N), torch.ones(N, requires_grad=True), torch.zeros(N).long()
OTHER_DTYPE = "is torch.%s and input is torch.float32: cast one, or use torch.autocast$"
WRAPPED = "is a _Wrapper.*__torch_dispatch__.*plain tensor"
SCALED, CAPPED = dict(logit_scale=1e30, temperature=1e-30), dict(logit_softcap=1e-30, temperature=1e30)
TWO_SUMS = dict(reduce_hidden_grad=False, sequence_parallel=True)
# The refused argument, which begins the message; a pattern of the rest; refused values, or dicts of several arguments.
OPTIONS = [
    ("reduction", "must be 'none', 'mean' or 'sum', got ('average'|None)", "average", None),
    ("ignore_index", "must be an integer of 64 bits or None, got", 2**70, True, 0.5),
    ("label_smoothing", r"must be a Python number in \[0, 1\], got", 1.5, -0.1, NAN),
    ("z_loss", "must be a finite Python number >= 0, got", -1, INF, np.float32("nan"), np.bool_(True), "0.1", [0.1]),
    ("z_loss", r"must be a finite Python number >= 0, got -1000.*\(402 characters\)", -HUGE),
    ("logit_scale", "must be a finite Python number, got", 1e39, NAN, "x", HUGE),
    ("logit_scale", "=.* and logit_softcap=.* divided by temperature=.* are beyond fp32", SCALED, CAPPED),
    ("logit_softcap", "must be None or a positive Python number, got", 1e-60, 1e300, 0.0, -3.0, INF),
    ("temperature", r"must be a number > 0, .* got [^(]*$", 0.0, -1, NAN, None),
    ("logits_budget", "must be None or a number of bytes >= 0, got", -1, 0.5),
    ("logits_budget", r"must be .*, got 1000000000.0 \(pass an int: int\(logits_budget\)\)$", 1e9),
    ("vocab_size", r"must be .* \(pass an int: int\(vocab_size\)\)$", 9.0, torch.tensor(9)),
    ("label_smoothing", r"must be .* \(pass a float: float\(label_smoothing\)\)$", torch.tensor(0.1), np.array(0.1)),
    ("sequence_parallel", r"must be .* \(pass a bool: bool\(sequence_parallel\)\)$", torch.tensor(True)),
    ("gradient_filter", r"must be None or a number between 0 and 1, such as 2\*\*-13, got", 0, 1, -0.1, 2.0, NAN, True),
    ("gradient_filter", "must be .* got", "", "auto", "0.1", [0.1], torch.tensor(0.1)),
    ("vocab_start", "must be None or an id >= 0 and < 2.31, got", -1, 2**31),
    ("vocab_size", "must be None or a number of entries >= 1 and < 2.31, got", 0, 2**31),
    ("process_group", "is of other ranks: .*global rank unknown", dist.GroupMember.NON_GROUP_MEMBER),
    ("process_group", "must be a torch.distributed.ProcessGroup, a one-dimensional DeviceMesh or None, got str", "tp"),
    ("sequence_dim", "must be 0 or 1, got", 2, -1, None, True),
    ("sequence_parallel", "must be True or False, got", "no", None, 2, 1.0),
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
    ("input", r"has 4 .* linear_weight \[4, 10\] has 10. Is .* transposed\?", dict(linear_weight=torch.zeros(D, V))),
    ("linear_weight", "must be a tensor, got Linear: pass its weight", torch.nn.Linear(D, V)),
    ("linear_weight", OTHER_DTYPE % "bfloat16", torch.zeros(V, D).bfloat16()),
    ("linear_weight", r"\[0, 4\] has no rows: the vocabulary is empty", torch.zeros(0, D)),
    ("target", "must be a tensor.*, got (list|NoneType)", [1, 2], None),
    ("target", r"must have shape \[6\] for input \[6, 4\], got \[(7|6, 1)\]", torch.zeros(7).long(), IDS[:, None]),
    ("target", r"must hold .* integer dtype, got .*probabilities are not", ZEROS, torch.zeros(N, V), ZEROS > 0),
    ("linear_bias", r"must have shape \[10\].* linear_weight \[10, 4\], got", torch.zeros(9), torch.zeros(V, 1)),
    ("linear_bias", "must be a tensor or None, got float", 0.0),
    ("token_weight", r"must have target's shape \[6\], got \[5\]", ZEROS[1:]),
    ("token_weight", "must be real, got torch.complex64", torch.zeros(N, dtype=torch.complex64)),
    ("logit_scale", "must be floating-point, got torch.int64", IDS),
    ("logit_scale", r"requires a gradient, and none flows to it: pass logit_scale.detach\(\)", LEAF),
    ("logit_scale", r"must be .* target's shape \[6\], got one of shape \[5\]", ZEROS[1:]),
    ("temperature", r"must be .*, got one of shape \[\] \(pass a float: float\(temperature\)\)", ZEROS[0]),
    ("vocab_start", r"=3 without a process group .* \[0, 3\)", 3),
    ("vocab_size", "=11 exceeds the 10 rows of .* 1 rank", 11, dict(vocab_size=11, vocab_start=0)),
    ("weight", "=.* is not supported: use token_weight", torch.ones(V)),
]
for name, value in (good() | dict(linear_bias=torch.zeros(V), token_weight=ZEROS)).items():
    TENSORS.append((name, "must be a dense tensor, got one of layout torch.sparse_coo", value.to_sparse()))
    TENSORS.append((name, WRAPPED, value.as_subclass(_Wrapper)))
    if name != "input":
        TENSORS.append((name, "is on meta and input is on cpu", value.to("meta")))
OF_LOGITS = [
    ("target", r"must have shape \[6\] for vocab_parallel_logits \[6, 10\], got \[6, 1\]", IDS[:, None]),
    ("label_smoothing", r"must be in \[0, 1\), got 1.0", 1.0),
    ("label_smoothing", "=0.1 needs at least 2 entries per rank, got 1", 0.1),
    ("vocab_parallel_logits", "must be floating point, got torch.int64", torch.zeros(N, V).long()),
    ("vocab_parallel_logits", WRAPPED, torch.zeros(N, V).as_subclass(_Wrapper)),
]
_LOSS_ONLY = {"reduction", "ignore_index", "label_smoothing", "z_loss", "token_weight", "weight", "options"}


def _rows(table: list[tuple]) -> list[tuple[str, list[dict]]]:
    """A pattern of the whole message, and the changes to a good call that give this message."""
    changes = lambda name, value: value if isinstance(value, dict) else {name: value}  # noqa: E731
    return [(rf"^{name}\b.*{said}", [changes(name, value) for value in values]) for name, said, *values in table]


@pytest.mark.parametrize(("said", "changes"), _rows(OPTIONS + TENSORS))
def test_refused(said, changes):
    for changed in changes:
        without_loss = not _LOSS_ONLY & {*changed} and changed.get("target", 0) is not None
        for function in [parallel_lce.linear_cross_entropy, *[parallel_lce.token_statistics] * without_loss]:
            call(good(), function)
            with pytest.raises(ValueError, match=said):
                call(good() | changed, function)


@pytest.mark.parametrize(("said", "changes"), _rows(OPTIONS))
def test_refused_when_a_module_is_made(said, changes):
    for changed in changes:
        with pytest.raises(ValueError, match=said):
            parallel_lce.LinearCrossEntropy(**changed)


@pytest.mark.parametrize(("said", "changes"), _rows(OF_LOGITS))
def test_refused_of_logits(said, changes):
    for changed in changes:
        entries = 1 if "needs at least 2 entries" in said else V
        with pytest.raises(ValueError, match=said):
            arguments = dict(vocab_parallel_logits=torch.zeros(N, entries), target=IDS) | changed
            parallel_lce.vocab_parallel_cross_entropy(**arguments)


@pytest.mark.parametrize(
    ("function", "given", "meant"),
    [
        (parallel_lce.linear_cross_entropy, "bias", ": did you mean linear_bias?"),
        (parallel_lce.token_statistics, "softcap", ": did you mean logit_softcap?"),
        (parallel_lce.token_statistics, "reduction", ""),
        (parallel_lce.selected_log_probs, "group", ": did you mean process_group?"),
        (parallel_lce.LinearCrossEntropy, "tp_group", ": did you mean process_group?"),
        (divergence, "bias", ": did you mean student_bias or teacher_bias?"),
        (top_k_divergence, "temprature", ": did you mean temperature?"),
        (parallel_lce.vocab_parallel_cross_entropy, "process_group", ": did you mean tp_group?"),
        (sampled_linear_cross_entropy, "bias", ": did you mean linear_bias?"),
        (rl.linear_cross_entropy, "process_group", ": did you mean dist_process_group?"),
    ],
)
def test_a_keyword_that_may_be_meant(function, given, meant):
    """It is a TypeError, before anything is said of the tensors."""
    positional = [] if function is parallel_lce.LinearCrossEntropy else [None] * 3
    positional += [None] * ("divergence" in function.__name__)
    words = re.escape(f"{function.__name__}() got an unexpected keyword argument '{given}'{meant}")
    with pytest.raises(TypeError, match=f"^{words}$"):
        function(*positional, **{given: None})


def _said(arguments: dict) -> str:
    try:
        call(arguments)
    except ValueError as refusal:
        return str(refusal)
    return "not refused"


@on_ranks(2)
def test_refused_over_ranks(member):
    """Arguments that are wrong on every rank: nobody reaches a collective. Of one rank alone, others may wait."""
    whole = torch.zeros(12, dtype=torch.int64, device=member.device)
    arguments = good(member.device) | dict(process_group=member.group, sequence_parallel=True)
    for message, changes in {
        r"target must have shape \[12\] for input \[6, 4\] of each of 2 sequence-parallel ranks, got \[6\]": {},
        "vocab_size=21 exceeds the 20 rows .* 2 rank": dict(target=whole, vocab_size=21),
        r"sequence parallelism, got \[4\]": dict(input=arguments["input"][0], target=whole[0]),
    }.items():
        said = _said(arguments | changes)
        assert re.search(f"^.*{message}.*PARALLEL_LCE_DEBUG=1", said, re.DOTALL), said
    outside = dist.new_group([0])
    if member.rank:
        assert "process_group" in _said(arguments | dict(process_group=outside))
    if member.device.type == "cpu":
        whole[7] = 3 * V
        with pytest.raises(IndexError, match=r"^target 30 at position 7 is outside .*PARALLEL_LCE_DEBUG=1"):
            call(arguments | dict(target=whole))


TWO = torch.ones(2, dtype=torch.bool)


@pytest.mark.parametrize("name", ["mean_logit", "entropy", "expected_logit", "argmax", "sum_p_squared"])
@pytest.mark.parametrize("value", ["no", TWO, 2])
def test_flags_of_statistics(name, value):
    with pytest.raises(ValueError, match=f"^{name} must be True or False, got "):
        parallel_lce.token_statistics(**good(), **{name: value})
    for true in (True, np.True_, TWO[0]):
        assert torch.equal(
            parallel_lce.token_statistics(**good(), **{name: true}).lse, parallel_lce.token_statistics(**good()).lse
        )


def test_flags_and_groups_of_others():
    x, w, y = good().values()
    nemo = dict(tensor_parallel_hidden_states=x[:, None], output_weight_layer=w, runtime_gather_output=None)
    nemo |= dict(target=y[None], vocab_start_index=0, vocab_end_index=V, tp_group=None)
    sampled = dict(input=x, linear_weight=w, target=y, sampled=y)
    stored = dict(student_hidden=x, student_weight=w, teacher_ids=y[:, None], teacher_log_probs=-x[:, :1])
    for function, arguments, message in (
        (parallel_lce.linear_cross_entropy, good() | dict(sequence_dim=TWO), "sequence_dim must be 0 or 1, got"),
        (parallel_lce.sampled_linear_cross_entropy, sampled | dict(remove_accidental_hits="no"), "must be True or"),
        (rl.from_parallel_hidden_states_to_logprobs, nemo | dict(inference_only=TWO), "inference_only must be True or"),
        (rl.linear_cross_entropy, dict(hidden=x.to_sparse(), weight=w, labels=y), "hidden must be a dense tensor"),
        (rl.from_parallel_hidden_states_to_logprobs, nemo | dict(cp_group=3), "cp_group must be a torch.distributed"),
        (top_k_divergence, stored | dict(target=y.to("meta")), "target is on meta and teacher_ids is on cpu"),
    ):
        with pytest.raises(ValueError, match=message):
            function(**arguments)


def test_a_main_grad_of_another_shape_is_refused(device):
    tensors = good(device)
    tensors["linear_weight"].requires_grad_()
    main_grad = MainGrad(torch.zeros(V, D + 1, device=device), lambda: None)
    with pytest.raises(ValueError, match=r"main_grad must have linear_weight's shape \[10, 4\], got \[10, 5\]"):
        fused_loss(*given(**tensors, reduction="none"), None, main_grad=main_grad)


# --- signatures ---------------------------------------------------------------------------------------


def test_checks_run_once_for_each_signature(monkeypatch):
    prepare.KNOWN.clear()
    with mock.patch.object(prepare, "check_tensors", wraps=prepare.check_tensors) as check:
        assert torch.equal(call(good()), call(good())) and check.call_count == 1
        call(good() | dict(input=torch.randn(N, D, requires_grad=True)))
        with torch.autocast("cpu"):
            call(good())
        for traits in ((2, 0, "gloo"), (2, 1, "gloo"), (4, 1, "gloo"), (4, 1, "nccl")):
            with mock.patch.object(prepare, "_group_traits", return_value=traits):
                call(good())
        assert check.call_count == 7
    monkeypatch.setattr(prepare, "_MOST_KNOWN", 3)
    for budget in range(10):
        call(good() | dict(logits_budget=budget))
        assert len(prepare.KNOWN) <= 3


@pytest.mark.parametrize("other", [True, 1.0])
def test_equal_numbers_of_another_type(other):
    """As keys, 1 and True are equal, and so are 1 and 1.0."""
    names = ["ignore_index", "logits_budget"]
    for name in names + ["z_loss", "logit_scale", "temperature", "logit_softcap"] * (other is True):
        call(good() | {name: 1})
        with pytest.raises(ValueError, match=f"{name} must be .*, got {other}"):
            call(good() | {name: other})


def test_a_tangent_and_another_backend_are_refused_after_a_good_call(monkeypatch):
    call(good())
    with torch.autograd.forward_ad.dual_level():
        dual = torch.autograd.forward_ad.make_dual(good()["input"], torch.ones(N, D))
        with pytest.raises(NotImplementedError, match="input has a tangent"):
            call(good() | dict(input=dual))
    monkeypatch.setenv("PARALLEL_LCE_BACKEND", "other")
    with pytest.raises(ValueError, match="PARALLEL_LCE_BACKEND='other'"):
        call(good())


# --- a DTensor in a function that takes none -----------------------------------------------------------


@on_ranks(2)
def test_logits_that_are_dtensors(member):
    arguments, loss = good(member.device), parallel_lce.vocab_parallel_cross_entropy
    logits, target = arguments["input"] @ arguments["linear_weight"].t(), arguments["target"]
    whole = distribute_tensor(logits, mesh_of(member.device.type, (2,)), [Shard(1)])
    with pytest.raises(ValueError, match=r"^vocab_parallel_logits is a DTensor: pass vocab_parallel_logits.to_local"):
        loss(whole, target, tp_group=member.group)
    found = loss(whole.to_local(), target, tp_group=whole.device_mesh.get_group(0))
    torch.testing.assert_close(found, F.cross_entropy(logits, target, reduction="none"))


# --- debug mode: every rank raises, and names the difference ---------------------------------------------

WHOLE = torch.arange(V * D).view(V, D)
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


# Changes of the last of three ranks to ``t.x``, ``t.w`` and ``t.y``; the name that differs; others' value, and its own.
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
# Changes of every rank to its arguments; a pattern of the message of all ranks.
MESSAGES = {
    "hidden states": (
        lambda t: dict(input=torch.cat([t.x[:3], -t.x[3:]]) if t.rank == 2 else t.x),
        r"disagree about input: token 3 has norm (\S+) on rank 0 and \1 on rank 2, along a random",
    ),
    "target everywhere": (lambda t: dict(target=_with(t.y, 4, 3 * V)), r"target 30 at position 4 is outside \[0, 30\)"),
    "statistics: target": (lambda t: dict(target=_with(t.y, 4, -7)), r"target -7 at position 4 is outside \[0, 30\)"),
    "no vocabulary": (lambda t: dict(linear_weight=t.w[:0], vocab_start=0), "none of the 3 shards has a row"),
    "whole": (lambda t: dict(linear_weight=WHOLE.to(t.x)), "ranks 0 and 1 .* the same 10 rows .* forget to shard"),
    "logits: whole": (lambda t: dict(vocab_parallel_logits=t.x @ WHOLE.to(t.x).t()), "forget to shard"),
    "gap": (lambda t: dict(vocab_start=(0, 10, 21)[t.rank]), "leave a gap: one ends at 20, the next starts at 21"),
    "overlap": (lambda t: dict(vocab_start=(0, 10, 19)[t.rank]), "an overlap: one ends at 20, the next starts at 19"),
}
CASES = DISAGREEMENTS | REFUSALS | MESSAGES


def _told_by(member: Member, name: str) -> str:
    """The error's name and message on this rank."""
    arguments = dict(process_group=member.group, backend="torch") | good(member.device)
    arguments["linear_weight"] = arguments["linear_weight"] + member.rank * arguments["input"][0]
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
    first, second, odd = worlds(3).run(_told_by, name, timeout=30)
    if name in DISAGREEMENTS:
        what, two, last = DISAGREEMENTS[name][1:]
        said = f"rank 0 has {two}, rank 1 has {two}, rank 2 has {last}"
        group = "tp_group" if name.startswith("logits") else "process_group"
        expected = f"^ValueError: the ranks of {group} disagree about .*{what}: {said}"
        assert name != "z_loss" or odd.count("rank 0 has") == 1, odd  # only what differs is named
    else:
        expected = CASES[name][1]
    if name in REFUSALS:
        kind = "TypeError" if "keyword" in name else "ValueError"
        assert re.search(rf"^{kind}: .*{expected}", odd), odd
        because = r"^ValueError: rank\(s\) \[2\] of \w+ refused their arguments, rank 2 because: "
        expected = f"{because}.*{expected}"
    for said in (first, second) if name in REFUSALS else (first, second, odd):
        assert re.search(expected, said), said


@on_ranks(2)
def test_equal_shards_that_are_no_mistake(member):
    """Of zeros, as a new output layer may have; of one row; and with ``vocab_size``, by which rank 1 has none."""
    x, w, y = good(member.device).values()
    where = dict(process_group=member.group)
    own = w.clone()
    own[3, 0] += member.rank
    with debug_mode():
        for shard, target in ((torch.zeros_like(w), y), (w[:1], y % 2), (own, y)):
            assert LOSS(x, shard, target, **where).isfinite()
        assert LOSS(x, w * torch.nan, y, **where).isnan()
        assert torch.equal(LOSS(x, w, y, vocab_size=V, **where), LOSS(x, w, y))


# --- debug mode: whatever one rank alone refuses, every rank raises ---------------------------------------


def _calls(member: Member) -> dict:
    """Public functions and modules by name, each with the arguments of a good call, of two shards."""
    x, w, y = good(member.device).values()
    w = w + member.rank
    where, k = dict(process_group=member.group), y[:, None]
    whole = dict(hidden=x, weight=w, target=y, vocab_start_index=member.rank * V, vocab_end_index=member.rank * V + V)
    student = dict(student_hidden=x, student_weight=w)
    of_rank = dict(input=x, linear_weight=w) | where
    placed = [distribute_tensor(t, mesh_of(member.device.type, (2,), ("tp",)), [Shard(0)]) for t in (x, w, y)]
    sequence = torch.zeros(1, 2 * N, dtype=torch.int64, device=member.device)
    sharded = dict(
        output_weight_layer=w, runtime_gather_output=None, target=sequence, vocab_start_index=member.rank * V
    )
    sharded |= dict(vocab_end_index=member.rank * V + V, tp_group=member.group)
    return {
        "loss": (parallel_lce.linear_cross_entropy, of_rank | dict(target=y)),
        "dtensors": (parallel_lce.linear_cross_entropy, dict(zip(("input", "linear_weight", "target"), placed))),
        "statistics": (parallel_lce.token_statistics, of_rank | dict(target=y)),
        "selected": (parallel_lce.selected_log_probs, of_rank | dict(selected=k)),
        "sampled": (parallel_lce.sampled_linear_cross_entropy, of_rank | dict(target=y, sampled=IDS.to(member.device))),
        "module": (parallel_lce.LinearCrossEntropy(**where), dict(input=x, linear_weight=w, target=y)),
        "divergence": (divergence, student | where | dict(teacher_hidden=2 * x, teacher_weight=w)),
        "top_k": (
            top_k_divergence,
            student | where | dict(teacher_ids=k, teacher_log_probs=ZEROS[:, None].to(member.device)),
        ),
        "logits": (
            parallel_lce.vocab_parallel_cross_entropy,
            dict(vocab_parallel_logits=x @ w.t(), target=y, tp_group=member.group),
        ),
        "verl": (rl.linear_cross_entropy, dict(hidden=x, weight=w, labels=y, dist_process_group=member.group)),
        "skyrl": (rl.FusedLinearLogprobTriton.apply, whole | dict(chunk_size=None, tp_group=member.group)),
        "nemo": (rl.from_parallel_hidden_states_to_logprobs, dict(tensor_parallel_hidden_states=x[:, None]) | sharded),
    }


# By the function's name: arguments of the last rank alone, or a function of the rank that gives them.
REFUSED_ALONE = {
    "loss": [
        *(dict(other=1), dict(reduction=None), dict(weight=ZEROS), dict(target=None), dict(logit_scale=IDS)),
        *(dict(counted_tokens=0.5), dict(counted_tokens=N + 1), dict(z_loss=-1.0), dict(sequence_dim=2), dict(input=1)),
    ],
    "dtensors": [
        dict(other=1),
        dict(reduction=None),
        dict(sequence_dim=1),
        dict(vocab_size=1000),
        dict(linear_bias=IDS),
    ],
    "statistics": [
        *(dict(other=1), dict(mask=ZEROS > 0), dict(counted_tokens=1), dict(mask=1, counted_tokens=1)),
        *(dict(selected=(1, 2)), dict(selected=ZEROS), dict(top_k=1000), dict(sample_seed=-1), dict(temperature=0)),
    ],
    "selected": [
        dict(other=1),
        dict(selected=(1, 2)),
        dict(selected="ids"),
        dict(selected=ZEROS),
        dict(logit_softcap=0),
    ],
    "sampled": [
        *(dict(other=1), dict(reduction="all"), dict(ignore_index=0.5), dict(target="ids"), dict(target=ZEROS)),
        *(dict(sampled="ids"), dict(sampled=IDS[:, None, None]), dict(logit_scale=ZEROS), dict(logit_scale="1")),
        *(dict(log_expected_count=IDS), dict(target_log_expected_count=ZEROS[1:]), dict(linear_bias=ZEROS[1:])),
    ],
    "module": [dict(other=1), dict(target=None), dict(token_weight=ZEROS[1:])],
    "divergence": [
        *(dict(other=1), dict(beta=2), dict(reduction="all"), dict(target=ZEROS), dict(student_bias=ZEROS[1:])),
        *(dict(teacher_hidden=ZEROS), dict(teacher_weight=ZEROS), dict(teacher_bias=ZEROS[1:]), dict(temperature=-1)),
        dict(teacher_logit_softcap=ZEROS),
    ],
    "top_k": [
        *(dict(other=1), dict(tail="all"), dict(beta=2), dict(teacher_ids=ZEROS), dict(teacher_log_probs="x")),
        *(dict(student_hidden=ZEROS), dict(student_weight=ZEROS), dict(logits_budget=-1), dict(reduce_dtype="float32")),
        dict(student_weight=torch.zeros(V, D, device="meta")),
    ],
    "logits": [dict(target=ZEROS), dict(label_smoothing=1), dict(vocab_parallel_logits="x"), dict(other=1)],
    "verl": [
        *(dict(reduction="all"), dict(hidden="x"), dict(hidden=ZEROS[0]), dict(labels=ZEROS), dict(temperature=0)),
        *(dict(weight=ZEROS), dict(other=1)),
    ],
    "skyrl": [dict(weight="x"), dict(weight=ZEROS), dict(vocab_end_index=1000), dict(target=ZEROS), dict(other=1)],
    "nemo": [
        *(dict(target="x"), dict(target=IDS), dict(bias=ZEROS[1:]), dict(vocab_end_index=1000), dict(other=1)),
        *(dict(output_weight_layer=ZEROS), dict(vocab_size=0), dict(tensor_parallel_hidden_states=ZEROS)),
        lambda member: dict(cp_group=member.group),
    ],
}


def _refused_alone(member: Member, name: str) -> list[str]:
    """What this rank says of each of the refusals, and of a good call after all of them."""
    function, arguments = _calls(member)[name]
    said = []
    with debug_mode():
        for changes in (*REFUSED_ALONE[name], {}):
            if callable(changes):
                changes = changes(member)
            try:
                function(**arguments | (changes if member.rank else {}))
                said.append("not refused")
            except (TypeError, ValueError) as refusal:
                said.append(str(refusal))
    return said


@pytest.mark.parametrize("name", REFUSED_ALONE)
def test_what_one_rank_refuses_every_rank_raises(name, worlds, device):
    first, odd = worlds(2).run(_refused_alone, name, timeout=60)
    for one, other in zip(first[:-1], odd):
        assert (
            re.sub(r"of \w+ refused", "refused", one) == f"rank(s) [1] refused their arguments, rank 1 because: {other}"
        )
    assert first[-1] == odd[-1] == "not refused"


@on_ranks(2)
def test_stored_log_probs_name_the_students_weight(member):
    function, arguments = _calls(member)["top_k"]
    mesh = mesh_of(member.device.type, (2,), ("tp",))
    placed = distribute_tensor(arguments["teacher_log_probs"], mesh, [Shard(0)])
    with pytest.raises(ValueError, match="and student_weight"):
        function(**arguments | dict(teacher_log_probs=placed))


@on_ranks(2)
def test_a_malformed_switch_of_one_rank(member):
    arguments = good(member.device) | dict(process_group=member.group)
    with debug_mode():
        if member.rank:
            os.environ["PARALLEL_LCE_DEBUG"] = "2"
        assert "PARALLEL_LCE_DEBUG must be 0 or 1, got '2'" in _said(arguments)


@on_ranks(2)
def test_an_error_after_the_exchange_is_not_sent(member):
    """The other ranks are in a later collective then."""
    arguments = good(member.device) | dict(process_group=member.group)
    arguments["linear_weight"] = arguments["linear_weight"] + member.rank
    fails = mock.patch("parallel_lce.functional.fused_loss", side_effect=ValueError("after"))
    with debug_mode(), mock.patch.object(debug, "report_refusal") as report:
        call(arguments)
        with fails as failing, pytest.raises(ValueError, match="^after$"):
            failing.side_effect = lambda *given: (fused_loss(*given), (_ for _ in ()).throw(ValueError("after")))
            call(arguments)
        report.assert_not_called()


@on_ranks(3)
def test_equal_values_pass(member):
    """All NaN are equal, and so are 0 and -0. Ranks that sum in another order have other bits."""
    call_, sign = good(member.device) | dict(process_group=member.group), -1.0 if member.rank else 1.0
    call_["token_weight"] = torch.full((N,), sign * 0.0, device=member.device)
    call_["token_weight"][2] = sign * torch.nan
    call_["input"] = call_["input"] * (1 + 1e-6 * member.rank)
    call_["linear_weight"] = call_["linear_weight"] + member.rank
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
