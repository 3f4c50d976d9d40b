"""Ranks whose calls differ: a result of NaN where their messages show it, and in debug mode an error on every rank that
names the difference. test_faults.py has messages of other sizes."""

from collections.abc import Callable
from unittest.mock import patch

import pytest
import torch
from torch.distributed.tensor import DTensor, Replicate, Shard

import parallel_lce
from calls import D, N, V, call, calls, good
from cases import make, part
from parallel_lce import backends
from parallel_lce.call import debug, prepare
from parallel_lce.call.checks import public
from parallel_lce.core.collectives import checksum_of
from parallel_lce.core.options import Options
from parallel_lce.distillation import divergence
from parallel_lce.run.entry import fused_loss
from tools import chosen_backend, debug_mode, given, on_ranks, shrunk
from world import Member, mesh_of


def _with(values, position: int, value):
    changed = values.clone()
    changed.view(-1)[position] = value
    return changed


def _cast(dtype):
    return lambda a: {name: a[name].to(dtype) for name in ("input", "linear_weight")}


def _moved(name: str, position: int):
    return lambda a: {name: _with(a[name], position, (a[name].view(-1)[position] + 1) % V)}


def _pairs(a, second: int = 2) -> dict:
    """Two entries of each token, those of the second one from there on."""
    ids = torch.arange(1, 2 * N + 1, device=a["input"].device) % V
    offsets = torch.arange(N + 1, device=ids.device) * 2
    offsets[1] = second
    return dict(selected=(ids, offsets))


def _all(a) -> dict:
    return dict(mask=a["target"] >= 0)


def _ignored(a) -> dict:
    return dict(target=torch.full_like(a["teacher_ids"][:, 0], -100), teacher_ids=-torch.ones_like(a["teacher_ids"]))


def _bias(a: dict) -> dict:
    return dict(linear_bias=a["input"].new_ones(V))


def _trained(name: str) -> Callable:
    return lambda a: {name: a[name].requires_grad_()}


# What a message says of a tensor.
DIGEST = r"\d+ values of digest \w+"
# By the name of a call (calls.py) and what differs: changes of the last rank's arguments, what debug mode names, the
# value of the others and of the last one; and changes of every rank's arguments. Without debug mode the result is NaN.
EXPOSED = {
    "loss, z_loss": (dict(z_loss=1e-3), "z_loss", "0.0", "0.001"),
    "loss, in blocks": (dict(reduction="sum"), "reduction", "'mean'", "'sum'", dict(logits_budget=0)),
    "loss, dtype": (_cast(torch.float16), "dtype", "torch.bfloat16", "torch.float16", _cast(torch.bfloat16)),
    "statistics, a loss": (dict(function="loss", reduction="none"), "function", "'token_.*'", "'linear_cross_.*'"),
    "selected, offsets": (lambda a: _pairs(a, 3), "selected_offsets", DIGEST, DIGEST, _pairs),
    "selected, ids": (_moved("selected", 4), "selected", DIGEST, DIGEST),
    "logits, smoothing": (dict(label_smoothing=0.1), "label_smoothing", "0.0", "0.1"),
    "divergence, beta": (dict(beta=1.0), "function", ".*beta=0.0.*", ".*beta=1.0.*", dict(beta=0.0)),
    "divergence, scale": (dict(teacher_logit_scale=0.5), "teacher_logit_scale", ".*", "0.5"),
}
# Without debug mode: wrong results, or messages of other sizes.
SILENT = {
    "loss, N": (lambda a: dict(input=a["input"][1:], target=a["target"][1:]), "tokens", r"\(6,\)", r"\(5,\)"),
    "loss, D": (lambda a: {n: a[n][:, 1:] for n in ("input", "linear_weight")}, "hidden size", "4", "3"),
    "loss, SP": (lambda a: dict(sequence_parallel=True, target=a["target"].repeat(3)), "sequence_par.*", "F.*", "T.*"),
    "loss, dW": (_trained("linear_weight"), "gradients", ".*", ".*weight=T.*"),
    "loss, bias": (_bias, "linear_bias given", "False", "True"),
    "loss, dbias": (_trained("linear_bias"), "gradients", "None", ".*bias=True.*", _bias),
    "loss, target": (_moved("target", 4), "target", DIGEST, DIGEST),
    "loss, weights": (lambda a: dict(token_weight=a["target"].float()), "token_weight", "nothing", "6 values of .*"),
    "loss, counted": (lambda a: _all(a) | dict(counted_tokens=N), "counted_tokens", "nothing", "6", _all),
    "loss, backend": (dict(backend="triton"), "backend", "'torch'", "'triton'"),
    "statistics, columns": (dict(entropy=True, argmax=True), "argmax", "False", "True"),
    "statistics, mask": (lambda a: dict(mask=a["target"] != a["target"][0]), "(?<=about )mask", DIGEST, DIGEST, _all),
    "logits, V": (lambda a: dict(vocab_parallel_logits=a["vocab_parallel_logits"][:, 1:]), "entries.*", "10", "9"),
    "top_k, values": (_moved("teacher_log_probs", 3), "teacher_log_probs", DIGEST, DIGEST),
    "top_k, ignored": (_moved("target", 3), "counted tokens", DIGEST, DIGEST, _ignored),
}
_whole, *_named = SILENT["loss, SP"]  # and with counts: hidden states are gathered first
SILENT["loss, SP of some"] = ((lambda a: _whole(a) | dict(counted_tokens=3 * N)), *_named, dict(counted_tokens=N))
DIFFERENT = EXPOSED | SILENT


def _changed(arguments: dict, changes) -> dict:
    return arguments | (changes(arguments) if callable(changes) else changes)


def _call(member: Member, name: str, odd: bool):
    functions, (change, _, _, _, *every) = calls(member), DIFFERENT[name]
    function, arguments = functions[name.partition(",")[0]]
    for changes in every:
        arguments = _changed(arguments, changes)
    arguments = _changed(arguments, change) if odd else arguments
    return functions[arguments.pop("function")][0] if "function" in arguments else function, arguments


def _numbers(found) -> list[torch.Tensor]:
    found = [found] if isinstance(found, torch.Tensor) else vars(found).values()
    return [value for value in found if value is not None and value.is_floating_point()]


@pytest.mark.parametrize("name", EXPOSED)
@pytest.mark.thinned
@on_ranks(2)
def test_calls_that_differ_give_nan(member, name, backend):
    """On every rank, without debug mode. The next calls, which agree, are right."""
    function, arguments = _call(member, name, member.rank == 1)
    with shrunk(2 * V * 4):
        assert all(value.isnan().all() for value in _numbers(function(**arguments)))
    function, arguments = _call(member, name, False)
    next(iter(arguments.values())).requires_grad_()
    values = _numbers(function(**arguments))
    assert all(value.isfinite().all() for value in values)
    sum(value.sum() for value in values).backward()


def test_every_option_is_in_the_digest_that_messages_carry():
    """But the budget, which may depend on a rank's memory, and options of gradients. Of ids their order is, too."""
    assert checksum_of(torch.tensor([3, 5])) != checksum_of(torch.tensor([5, 3]))
    options, tensors = given(**good(), reduction="mean")
    free = {"logits_budget", "reduce_dtype"}
    for name in Options._fields:
        others = options, options._replace(**{name: 0.75})
        one, other = (prepare.digest(each, tensors, tensors.target.shape) for each in others)
        assert (one == other) == (name in free), name


@pytest.mark.parametrize("name", DIFFERENT)
@on_ranks(3)
def test_every_rank_names_what_differs(member, name):
    if "backend" in name and not backends._triton_installed():
        return
    _, what, two, last, *_ = DIFFERENT[name]
    words = f"rank 0 has {two}, rank 1 has {two}, rank 2 has {last}"
    words = f"^the ranks of (process|tp)_group disagree about .*{what}: {words}"
    function, arguments = _call(member, name, member.rank == 2)
    with debug_mode(), chosen_backend(arguments.pop("backend", "torch")):
        with pytest.raises(ValueError, match=words) as refusal:
            function(**arguments)
    assert name != "loss, z_loss" or str(refusal.value).count("rank 0 has") == 1  # only what differs is named


REDISTRIBUTES = "rank 0 has '.*, which redistributes temperature', rank 1 has 'selected_log_probs'"
# What rank 1 makes of the temperatures of each rank's tokens, and their placement there.
OF_DTENSORS = [
    (lambda t: t.double(), Shard(0), "temperature: rank 0 has .*float32, .*, rank 1 has .*float64"),
    (lambda t: t.repeat(2), Replicate(), f"function: {REDISTRIBUTES}"),
]


@on_ranks(2)
def test_every_rank_names_what_differs_in_dtensors(member):
    """Before DTensor's collectives of another size, or of one rank alone. A mesh of token weights is no group."""
    mesh = mesh_of(member.device.type, (2,), ("tp",))
    x, w, y = good(member.device).values()
    input, ids = (DTensor.from_local(t.repeat(2, 1), mesh, [Replicate()]) for t in (x, y[:, None]))
    w = DTensor.from_local(w + member.rank, mesh, [Shard(0)])
    for change, placement, words in OF_DTENSORS:
        temperature = DTensor.from_local(x[:, 0].exp(), mesh, [Shard(0)])
        if member.rank:
            temperature = DTensor.from_local(change(x[:, 0].exp()), mesh, [placement])
        with debug_mode(), pytest.raises(ValueError, match=f"disagree about {words}"):
            parallel_lce.selected_log_probs(input, w, ids, temperature=temperature)
    x, whole, weights = (DTensor.from_local(t, mesh, [p]) for t, p in ((x, Shard(0)), (x, Replicate()), (y, Shard(0))))
    if member.rank:
        with debug_mode(), pytest.raises(ValueError, match="is outside"):
            parallel_lce.linear_cross_entropy(x, whole, y + V, token_weight=weights, reduction="sum")


WHOLE = torch.arange(V * D).view(V, D)
# Changes of every rank's arguments, and a pattern of the message of all ranks.
MESSAGES = {
    "loss, hidden states": (
        lambda a, rank: dict(input=torch.cat([a["input"][:3], -a["input"][3:]]) if rank == 2 else a["input"]),
        r"disagree about input \(.*\): token 3 has norm (\S+) on rank 0 and \1 on rank 2, along a random",
    ),
    "loss, NaN": (lambda a, r: dict(input=a["input"] * (0, 0, torch.nan)[r]), "norm 0 on .* and nan on rank 2"),
    "statistics, target": (lambda a, _: dict(target=_with(a["target"], 4, -7)), r"target -7 .* outside \[0, 30\)"),
    "loss, no row": (lambda a, _: dict(linear_weight=a["linear_weight"][:0], vocab_start=0), "none of the 3 shards"),
    "loss, whole": (lambda a, _: dict(linear_weight=WHOLE.to(a["input"])), "0 and 1 .* same 10 rows .* forget to sh"),
    "logits, whole": (lambda a, _: dict(vocab_parallel_logits=WHOLE[:N].to(a["target"]) / 2), "forget to shard"),
    "loss, gap": (lambda _, rank: dict(vocab_start=(0, 10, 21)[rank]), "gap between 20 and 21: rank 0 has .0, 10.,"),
    "loss, overlap": (lambda _, rank: dict(vocab_start=(0, 10, 19)[rank]), "overlap between 19 and 20: .* 2 has .19,"),
}


@pytest.mark.parametrize("name", MESSAGES)
@on_ranks(3)
def test_debug_mode_finds_wrong_values(member, name):
    function, arguments = calls(member)[name.partition(",")[0]]
    changes, words = MESSAGES[name]
    with debug_mode(), pytest.raises(ValueError, match=words):
        function(**arguments | changes(arguments, member.rank))


@on_ranks(2)
def test_debug_mode_names_calls_and_backwards_in_another_order(member):
    parts = [part(make(N, V, D, seed=seed, device=member.device), member) for seed in (0, 1)]

    def losses(order=(0, 1), **options) -> list:
        where = dict(process_group=member.group, **options)
        return [parallel_lce.linear_cross_entropy(t.x, t.weight, t.target, **where) for t in (parts[n] for n in order)]

    with debug_mode():
        with pytest.raises(ValueError, match="disagree about target: rank 0 has"):
            losses((1, 0) if member.rank else (0, 1))
        for options in ({}, dict(reduction="none", logits_budget=0), dict(reduce_hidden_grad=False)):
            with pytest.raises(ValueError, match=r"about the call whose backward runs: rank 0 has \d+, rank 1 has \d+"):
                losses(**options)[member.rank].sum().backward()
            with pytest.raises(ValueError, match=r"disagree about the upstream gradient: token \d+ has norm"):
                losses(**options)[0].flatten()[-3 + member.rank :].mul(1 + member.rank).sum().backward()
            with patch.object(debug, "_gathered", wraps=debug._gathered) as exchanges:
                for loss in losses(**options):
                    loss.sum().backward()
            assert exchanges.call_count == 4, "one of each call, and of each backward"
        for function, arguments in map(calls(member).get, ("selected", "divergence")):
            next(iter(arguments.values())).requires_grad_()
            with pytest.raises(ValueError, match="disagree about the upstream gradient"):
                function(**arguments).mul(1 + member.rank).sum().backward()


@on_ranks(2)
def test_a_door_of_counted_tokens_is_refused_on_every_rank_and_the_next_call_compared(member):
    options, tensors = given(**good(member.device), reduction="none", ignore_index=-100)
    tensors = tensors._replace(linear_weight=tensors.linear_weight + member.rank)
    other = _with(tensors.target, 4, member.rank)
    with debug_mode():
        short = tensors.target[member.rank :], N, "must have shape"
        for target, count, words in (short, (tensors.target - 7, N, "outside"), (other, None, "disagree about target")):
            with pytest.raises(ValueError, match=words):
                public(fused_loss)(options, tensors._replace(target=target), member.group, counted_tokens=count)


@on_ranks(2)
def test_equal_arguments_agree(member, backend):
    """Numbers of other types, and what may differ between ranks, as whether they need gradients."""
    t = part(make(N, 2 * V, D, device=member.device), member)
    loss, where = parallel_lce.linear_cross_entropy, dict(process_group=member.group)
    for one, other in (
        (dict(logit_softcap=30.0), dict(logit_softcap=30, temperature=1, logits_budget=1 << 20)),
        (dict(ignore_index=-100, z_loss=0.0), dict(ignore_index=None, z_loss=-0.0)),
        (dict(reduce_dtype=None), dict(reduce_dtype=torch.float32)),
        (dict(vocab_size=2 * V), dict(vocab_start=V, vocab_size=2 * V)),
    ):
        options = (one, other)[member.rank]
        for reduction in ("none", "mean"):
            assert loss(t.x, t.weight, t.target, reduction=reduction, **where, **options).isfinite().all(), options
    both, ignored = (t.x, t.weight, t.x, t.weight), (None, -100)[member.rank]
    assert divergence(*both, ignore_index=ignored, **where).isfinite()
    with torch.set_grad_enabled(member.rank == 0):
        assert loss(t.x, t.weight, t.target, **where).isfinite()


@on_ranks(2)
def test_equal_shards_that_are_no_mistake(member):
    """Of zeros, as a new output layer may have; of one row; and with ``vocab_size``, by which rank 1 has none."""
    (x, w, y), loss = good(member.device).values(), parallel_lce.linear_cross_entropy
    where = dict(process_group=member.group)
    own = w.clone()
    own[3, 0] += member.rank
    with debug_mode():
        for shard, target in ((torch.zeros_like(w), y), (w[:1], y % 2), (own, y)):
            assert loss(x, shard, target, **where).isfinite()
        assert loss(x, w * torch.nan, y, **where).isnan() and loss(x / 0, own, y, **where).isnan()
        assert torch.equal(loss(x, w, y, vocab_size=V, **where), loss(x, w, y))


@on_ranks(3)
def test_equal_values_pass(member):
    """All NaN are equal, and so are 0 and -0. Ranks that sum in another order have other bits."""
    call_, sign = good(member.device) | dict(process_group=member.group), -1.0 if member.rank else 1.0
    call_["input"] = call_["input"] * (1 + 1e-6 * member.rank)
    call_["linear_weight"] = call_["linear_weight"] + member.rank
    call_["token_weight"] = torch.full((N,), sign * 0.0, device=member.device)
    call_["token_weight"][2] = sign * torch.nan
    call_["target"][2] = -100
    plain = call(call_)
    same = dict(z_loss=0, logit_scale=1) if member.rank else dict(z_loss=0.0, logit_scale=1.0)
    numbers = torch.arange(N, device=member.device).to((torch.int64, torch.float32, torch.bfloat16)[member.rank])
    with debug_mode(), torch.device("meta"):  # whatever a program makes by default
        assert call(call_ | same).item() == plain.item() == 0
        with patch.object(debug, "_gathered", wraps=debug._gathered) as exchanges:
            assert call(call_ | dict(counted_tokens=N - 1)).item() == 0 and exchanges.call_count == 1
        assert call(call_ | dict(token_weight=numbers)).isfinite()
