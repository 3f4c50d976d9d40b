"""Odd input that is not refused, and that the fuzz does not draw: bad ids and shards give NaN, and the rest just works.
So do numbers of other libraries, and copies and pickles of the module."""

import copy
import pickle
from contextlib import nullcontext

import pytest
import torch

import parallel_lce
from calls import D, N, V, call, good
from cases import make
from parallel_lce import rl, trl
from parallel_lce.distillation import divergence, top_k_divergence
from tools import debug_mode, on_ranks, shrunk, small, started, unchecked

# The first ids of three shards of V rows: gaps, overlaps, and vocabularies of which nothing but the size is wrong.
GAPS, OVERLAPS = [(0, 10, 21), (1, 11, 21)], [(0, 10, 19), (20, 11, 0), (10, 10, 10)]
SHARDS = [*((starts, None) for starts in (*GAPS, *OVERLAPS)), ((0, 10, 20), 31)]


@pytest.mark.parametrize(("starts", "vocab_size"), SHARDS, ids=str)
@on_ranks(3)
def test_a_gap_or_an_overlap_gives_nan(member, starts, vocab_size, backend):
    where = dict(process_group=member.group, vocab_start=starts[member.rank], vocab_size=vocab_size)
    tensors = good(member.device)
    x, w, ids = tensors["input"], tensors["linear_weight"], tensors["target"][:, None]
    results = [parallel_lce.selected_log_probs(x, w, ids, **where), divergence(x, w, x, w, reduction="none", **where)]
    for budget in (None, 0):
        call_ = tensors | where | dict(logits_budget=budget)
        statistics = call(call_ | dict(argmax=True), parallel_lce.token_statistics)
        results += call(call_ | dict(reduction="none")), call(call_), statistics.lse
        assert (statistics.argmax == -1).all()
    assert all(found.isnan().all() for found in results)


CALLS = {
    "loss": {},
    "counted": dict(counted_tokens=5),
    "statistics": dict(function=parallel_lce.token_statistics),
    "masked": dict(function=parallel_lce.token_statistics, counted_tokens=N),
}


@pytest.mark.parametrize("name", CALLS)
@pytest.mark.parametrize("wrong", [-1, 2 * V, "uint64"])
@on_ranks(2)
def test_a_target_outside_the_vocabulary_is_refused(member, wrong, name):
    """On a CPU, elsewhere in debug mode: with torch's type of error, before any collective; not of ignored tokens."""
    arguments = good(member.device) | dict(process_group=member.group) | CALLS[name]
    function, target = arguments.pop("function", parallel_lce.linear_cross_entropy), arguments["target"]
    arguments["linear_weight"] = arguments["linear_weight"] + member.rank  # debug mode refuses equal shards
    target[0] = -100
    if name == "masked":
        arguments["mask"] = torch.ones(N, dtype=torch.bool, device=member.device)
    with started() as events, debug_mode() if member.device.type == "cuda" else nullcontext():
        for kind in (ValueError, IndexError):
            odd = target.clone()
            odd[2] = -100 if wrong == "uint64" else wrong
            if wrong == "uint64":  # where the bits of -100 are a large number
                odd[0] = 1
                odd = odd.view(torch.uint64)
                arguments |= dict(counted_tokens=N) if "counted_tokens" in arguments else {}
            with pytest.raises(kind, match=r"at position 2 is outside \[0, 20\) and is not (-100|ignore_index)($| \()"):
                call(arguments | dict(target=odd), function)
    assert not events or member.device.type == "cuda"
    if name == "masked":
        arguments["mask"][2], odd = False, target.clone()
        odd[2] = -1
        assert call(arguments | dict(target=odd, counted_tokens=N - 1), function).target_log_prob[2] == 0


@pytest.mark.parametrize("ranks", [1, 2])
@on_ranks()
def test_a_target_outside_the_vocabulary_has_a_gradient_of_nan(member, backend):
    """Where it is not refused, unless no gradient comes from it. A token without a label has none, even from NaN."""
    arguments = good(member.device)
    x, w = (arguments[name].requires_grad_() for name in ("input", "linear_weight"))
    target = torch.tensor([-100, -1, member.ranks * V, 2**40, 3, 4], device=member.device)
    where = dict(process_group=member.group)
    with shrunk(tile=(2, 3)), unchecked():
        found = parallel_lce.token_statistics(x, w, target, **where)
        means = [call(arguments | where | dict(target=target, logits_budget=b)) for b in (None, 0)]

        def gradient(of, *upstream):
            dx = torch.autograd.grad(of, x, torch.tensor(upstream, device=member.device), retain_graph=True)
            return dx[0].isnan().all(1).tolist()

        assert all(mean.isnan() for mean in means)
        for of in (found.target_log_prob, found.target_logit):
            assert gradient(of, torch.nan, 1.0, 1.0, 0.0, 1.0, 1.0) == [False, True, True, False, False, False]


# Where the fuzz draws no ids, or none of unsigned integers.
OF_IDS = {
    "counted": lambda x, w, y: parallel_lce.linear_cross_entropy(x, w, y, ignore_index=3, counted_tokens=N - 1),
    "sets": lambda x, w, y: parallel_lce.selected_log_probs(x, w, (y, torch.arange(N + 1).to(y))),
    "logits": lambda x, w, y: parallel_lce.vocab_parallel_cross_entropy(x @ w.t(), y),
    "top-k": lambda x, w, y: top_k_divergence(x, w, y[:, None], x[:, :1], target=y, ignore_index=3),
    "verl": lambda x, w, y: rl.linear_cross_entropy(x, w, y)[0],
    "TRL": lambda x, w, y: trl._Fused(None, None)._log_probs(x, w, None, y, 1.0, 9)[0],
}


@pytest.mark.parametrize("bits", ["int16", "uint64", "uint32", "uint16"])
def test_ids_of_any_integer_dtype_give_the_same_results(bits, device):
    dtype, entries = getattr(torch, bits), 70000 if "16" in bits else 300
    x, w = good(device)["input"], make(N, entries, D, device=device).weight.detach()
    most = min(torch.iinfo(dtype).max, entries - 1)
    ids = torch.tensor([0, 1, most - 1, most, most // 2, 3], device=device)
    for name, function in OF_IDS.items():
        want = function(x.detach(), w, ids)
        with debug_mode():
            assert torch.equal(function(x.detach(), w, ids.to(dtype)), want) and want.isfinite().all(), name


LARGE = 2**24 + 3


@pytest.mark.slow
@on_ranks(2)
def test_a_vocabulary_beyond_2_to_the_24_keeps_its_ids_apart(member):
    first = 2**24 - 5
    start, stop = ((0, first), (first, LARGE))[member.rank]
    whole = torch.arange(LARGE, device=member.device) % 7 - 3
    x = torch.tensor([[0.5], [1.0], [-1.0], [2.0]], dtype=torch.bfloat16, device=member.device)
    target = torch.tensor([LARGE - 1, LARGE - 2, 2**24, 2**24 - 1], device=member.device)
    where = dict(process_group=member.group, vocab_start=start)
    found = parallel_lce.token_statistics(x, whole[start:stop, None].bfloat16(), target, argmax=True, **where)
    z = whole.double() * x.double()
    torch.testing.assert_close(found.target_logit.double(), z.gather(1, target[:, None])[:, 0])
    expected = z.log_softmax(1).gather(1, target[:, None])[:, 0]
    torch.testing.assert_close(found.target_log_prob.double(), expected, rtol=1e-5, atol=1e-5)
    assert found.vocab_size == LARGE and found.vocab_size.dtype == torch.int64
    assert torch.equal(found.argmax, z.argmax(1))


@on_ranks(2)
def test_copies_of_a_module_share_its_group_which_pytorch_cannot_pickle(member):
    positional = good(member.device).values()
    module = parallel_lce.LinearCrossEntropy(process_group=member.group, z_loss=0.1)
    want = module(*positional)
    shallow, deep = copy.copy(module), copy.deepcopy(torch.nn.ModuleList([module, module]))
    assert deep[0] is deep[1] and deep[0].options is not module.options and shallow.options is module.options
    for other in (deep[0], shallow):
        assert other is not module and other.process_group is member.group and torch.equal(other(*positional), want)
    with pytest.raises(TypeError, match="cannot pickle .*ProcessGroup"):
        pickle.dumps(module)


def test_rows_that_share_memory_change_nothing(backend, device):
    t, found = small(device, N=6, V=40), []
    shared = t.x[:1].detach().expand(6, -1), t.weight[:1].detach().expand(40, -1)
    for operands in (shared, [value.contiguous() for value in shared]):
        leaves = [value.detach().requires_grad_() for value in operands]
        loss = parallel_lce.linear_cross_entropy(*leaves, t.target[:1].expand(6))
        found.append([loss, *torch.autograd.grad(loss, leaves)])
    for one, other in zip(*found):
        torch.testing.assert_close(one, other, rtol=1e-5, atol=1e-6)
