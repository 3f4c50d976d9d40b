"""The functions of RL trainers, against their contracts in float64."""

import pytest
import torch
from torch.nn.functional import linear

import parallel_lce
from cases import dense_statistics, normal
from measures import assert_near
from parallel_lce import rl
from parallel_lce.backends import backend_of
from tools import counted_forwards, everywhere
from world import Member

N, V, D = 30, 64, 16
B, S = 3, 10


def tensors(device="cpu", dtype=torch.float32):
    """Hidden states, weight, bias, labels, and a temperature of each token."""
    x, w, b = normal(N, D), normal(V, D, seed=1) / 2, normal(V, seed=3)
    labels = torch.randint(0, V, (N,), generator=torch.Generator().manual_seed(2))
    given = [value.float().to(device, dtype) for value in (x, w, b, normal(N, seed=5).abs() + 0.5)]
    return *given[:3], labels.to(device), given[3]


def upstream(found):
    return [normal(f.numel(), seed=6 + i).float().to(f).view(f.shape) for i, f in enumerate(found)]


def _verl(member: Member, shape, temperature, reduction, vocab_size, summed):
    x, w, b, labels, of_token = tensors(member.device)
    shard = slice(V // member.ranks * member.rank, V // member.ranks * (member.rank + 1))
    leaves = [value.clone().requires_grad_() for value in (x.view(*shape, D), w[shard], b[shard])]
    # Labels and temperatures are flattened, whatever their shapes.
    given = labels.view(6, 5), of_token.view(3, 10) if temperature == "tensor" else temperature, reduction, member.group
    more = {} if vocab_size is None else dict(vocab_size=vocab_size, logits_budget=0)
    more |= dict(reduce_hidden_grad=True, sum_p_squared=True) if summed else {}
    found = rl.linear_cross_entropy(*leaves[:2], *given, bias=leaves[2], **more)
    return [v.detach().cpu() for v in (*found, *torch.autograd.grad(found, leaves, upstream(found)))]


@pytest.mark.parametrize("ranks", [1, 2, 4])
@pytest.mark.parametrize(
    ("shape", "temperature", "reduction", "vocab_size", "summed"),
    [((N,), None, "none", None, False), ((5, 6), "tensor", "MEAN", V - 5, False), ((3, 10), 2, "sum", None, True)],
)
@pytest.mark.thinned
def test_results_and_gradients_are_those_of_logits(
    shape, temperature, reduction, vocab_size, summed, ranks, worlds, device
):
    parts = everywhere(worlds, device, ranks, _verl, shape, temperature, reduction, vocab_size, summed)
    x, w, b, labels, of_token = tensors(dtype=torch.float64)
    leaves = [value.requires_grad_() for value in (x, w, b)]
    z = linear(*leaves)[:, :vocab_size]
    truth = dense_statistics(z / (of_token[:, None] if temperature == "tensor" else temperature or 1.0), labels)
    picked = truth["target_log_prob"]
    log_probs = {"none": picked, "sum": picked.sum(), "mean": picked.mean()}[(reduction or "none").lower()]
    expected = [log_probs, truth["entropy"], *[truth["sum_p_squared"]] * summed]
    dx, dw, db = torch.autograd.grad(expected, leaves, upstream(expected))
    # dX is each rank's part, which a mapping in front sums, unless the call is told to.
    if not summed:
        parts[0][-3] = sum(part[-3] for part in parts)
    for log_probs, entropy, *_ in parts:
        assert log_probs.shape == expected[0].shape and entropy.shape == (N,) and log_probs.dtype == torch.float32
        assert torch.equal(log_probs, parts[0][0]) and torch.equal(entropy, parts[0][1])
    found = *parts[0][:-2], *(torch.cat([part[i] for part in parts]) for i in (-2, -1))
    for value, exact in zip(found, (*expected, dx.view(*shape, D), dw, db)):
        assert_near(value, exact, 2e-6)


def _masked(member: Member, function: str):
    """Results and gradients of all tokens times the mask, and of the counted tokens alone; and the latter's rows."""
    x, w, _, labels, of_token = tensors(member.device)
    w, labels = w.chunk(member.ranks)[member.rank], labels.view(B, S)
    mask, found = torch.arange(N, device=member.device).view(B, S) % 4 == 1, []
    shard, group = (len(w) * member.rank, len(w) * (member.rank + 1)), member.group
    for counted in ({}, dict(mask=mask, counted_tokens=parallel_lce.count_tokens(mask))):
        hidden, kept = x.view(B, S, D), mask
        if function == "NeMo":
            hidden, kept = x.view(S, B, D).chunk(member.ranks)[member.rank], mask[:, :-1]
        leaves = [value.clone().requires_grad_() for value in (hidden, w)]
        with counted_forwards(backend_of(w)) as rows:
            if function == "NeMo":
                results = [rl.from_parallel_hidden_states_to_logprobs(*leaves, True, labels, *shard, group, **counted)]
            elif function == "verl":
                more = dict(sum_p_squared=True, **counted)
                results = rl.linear_cross_entropy(*leaves, labels, of_token, "none", group, **more)
            else:
                results = [rl.FusedLinearLogprobTriton.apply(*leaves, labels, *shard, 4, group, **counted)]
        results = [value * kept.reshape(value.shape) for value in results]
        found.append([*results, *torch.autograd.grad(results, leaves, upstream(results))])
    assert sum(rows) == mask.sum()
    return [[value.detach().cpu() for value in each] for each in found]


@pytest.mark.parametrize("ranks", [1, 2])
@pytest.mark.parametrize("function", ["verl", "NeMo", "SkyRL"])
def test_tokens_that_do_not_count_have_0_and_cost_nothing(function, ranks, worlds, device):
    for whole, counted in everywhere(worlds, device, ranks, _masked, function):
        for value, expected in zip(counted, whole):
            torch.testing.assert_close(value, expected, rtol=1e-4, atol=1e-5)


ENDS = {1: [64], 2: [32, 62]}
"""Ends of the ids of each rank's shard: two ids fewer on the last of two ranks. Its further rows are padding."""


def of_sequences(labels):
    """``[B, S]``, of which two are outside the vocabulary of two ranks."""
    labels = labels.view(B, S).clone()
    labels[1, 4], labels[0, 1] = V + 3, 62
    return labels


def _of_ids(member: Member, trainer: str, inference_only: bool, vocab_size):
    x, w, b, labels, _ = tensors(member.device)
    start, end = V // member.ranks * member.rank, ENDS[member.ranks][member.rank]
    padding = V // member.ranks + start - end + 2
    rows = [torch.cat([v[start:end], v.new_full((padding, *v.shape[1:]), 9.0)]).requires_grad_() for v in (w, b)]
    given = of_sequences(labels), start, end
    if trainer == "NeMo":
        x = x.view(S, B, D).chunk(member.ranks)[member.rank].clone().requires_grad_()
        more = {} if vocab_size is None else dict(vocab_size=vocab_size, logits_budget=0)
        rest = *given, member.group, inference_only, None, 4
        found = rl.from_parallel_hidden_states_to_logprobs(x, rows[0], True, *rest, bias=rows[1], **more)
        assert rl.from_parallel_hidden_states_to_logprobs(x * torch.nan, rows[0], True, *rest, **more)[1, 3] == 0
    else:
        x, rows = x.view(B, S, D).double().requires_grad_(), rows[:1]
        found = rl.FusedLinearLogprobTriton.apply(x, *rows, *given, 4, member.group, inference_only)
    assert found.requires_grad != inference_only
    if inference_only:
        return [found.cpu()]
    dx, *of_rows = torch.autograd.grad(found, [x, *rows], upstream([found]))
    assert dx.dtype == x.dtype and not any(v[end - start :].any() for v in of_rows)
    return [v.detach().cpu() for v in (found, dx, *(v[: end - start] for v in of_rows))]


@pytest.mark.parametrize(
    ("trainer", "ranks", "vocab_size"), [("NeMo", 1, V - 5), ("NeMo", 2, None), ("SkyRL", 1, None), ("SkyRL", 2, None)]
)
@pytest.mark.parametrize("inference_only", [False, True])
def test_log_probs_of_a_range_of_ids_are_the_trainers(inference_only, trainer, ranks, vocab_size, worlds, device):
    """NeMo-RL's function and SkyRL's. Outside of the vocabulary the value is 0, and the gradient that of -lse.
    NeMo-RL's gives each rank dX of its tokens; SkyRL's the rank's part, in the dtype of the hidden states."""
    parts = everywhere(worlds, device, ranks, _of_ids, trainer, inference_only, vocab_size)
    nemo = trainer == "NeMo"
    x, w, b, labels, _ = tensors(dtype=torch.float64)
    end, labels = ENDS[ranks][-1], of_sequences(labels)
    leaves = [value.requires_grad_() for value in (x.view(*((S, B) if nemo else (B, S)), D), w[:end], b[:end])]
    if nemo:
        labels = labels[:, 1:]
        z = linear(leaves[0].transpose(0, 1), *leaves[1:])[:, :-1, :vocab_size]
    else:
        leaves = leaves[:2]
        z = linear(*leaves)
    truth, inside = dense_statistics(z, labels), labels < (vocab_size or end)
    exact = torch.where(inside, truth["target_log_prob"], -truth["lse"])
    gradients = torch.autograd.grad(exact, leaves, upstream([exact]))
    for found, *_ in parts:
        assert found.dtype == torch.float32 and torch.equal(found, parts[0][0])
        assert_near(found, exact.masked_fill(~inside, 0.0), 2e-6)
        assert (found[~inside] == 0).all() and not inside.all()
    if not inference_only:
        dx, *of_rows = zip(*(part[1:] for part in parts))
        assert_near(torch.cat(dx) if nemo else sum(dx), gradients[0], 2e-6)
        for shards, gradient in zip(of_rows, gradients[1:], strict=True):
            assert_near(torch.cat(shards), gradient, 2e-6)
