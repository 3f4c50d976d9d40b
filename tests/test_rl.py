"""The functions of RL trainers, against their contracts in float64."""

from __future__ import annotations

import pytest
import torch

import parallel_lce
from cases import normal
from measures import assert_near
from parallel_lce import rl
from tools import everywhere
from world import Member

N, V, D = 30, 64, 16


def tensors(device="cpu", dtype=torch.float32):
    x, w = normal(N, D).to(device, dtype), (normal(V, D, seed=1) / 2).to(device, dtype)
    generator = torch.Generator().manual_seed(2)
    return x, w, torch.randint(0, V, (N,), generator=generator).to(device)


def contract(x, w, labels, temperature, reduction):
    """What verl's function gives, from all logits."""
    log_p = (x @ w.t() / temperature).log_softmax(-1)
    picked = log_p.gather(-1, labels[..., None]).flatten()
    entropy = -(log_p.exp() * log_p).sum(-1).flatten()
    return {"none": picked, "sum": picked.sum(), "mean": picked.mean()}[reduction], entropy


def _verl(member: Member, shape, temperature, reduction, by_token):
    x, w, labels = tensors(member.device)
    rows = V // member.ranks
    x, labels = x.view(*shape, D).requires_grad_(), labels.view(shape)
    shard = w[rows * member.rank : rows * (member.rank + 1)].clone().requires_grad_()
    t = normal(N, seed=5).abs().to(member.device).view(shape) + 0.5 if by_token else temperature
    found = rl.linear_cross_entropy(x, shard, labels, t, reduction, member.group)
    upstream = [normal(f.numel(), seed=6 + i).to(f).view(f.shape) for i, f in enumerate(found)]
    gradients = torch.autograd.grad(found, [x, shard], upstream)
    return [v.detach().cpu() for v in (*found, *gradients)]


@pytest.mark.parametrize("ranks", [1, 2, 4])
@pytest.mark.parametrize(
    ("shape", "temperature", "reduction", "by_token"),
    [((N,), 1.0, "none", False), ((5, 6), 0.7, "MEAN", False), ((3, 10), 2, "sum", False), ((N,), None, None, True)],
)
@pytest.mark.thinned("ranks")
def test_linear_cross_entropy(shape, temperature, reduction, by_token, ranks, worlds, device):
    parts = everywhere(worlds, device, ranks, _verl, shape, temperature, reduction, by_token)
    x, w, labels = tensors(dtype=torch.float64)
    x, w = x.view(*shape, D).requires_grad_(), w.requires_grad_()
    t = (normal(N, seed=5).abs() + 0.5).view(shape)[..., None] if by_token else temperature or 1.0
    expected = contract(x, w, labels.view(shape), t, (reduction or "none").lower())
    upstream = [normal(f.numel(), seed=6 + i).float().to(f).view(f.shape) for i, f in enumerate(expected)]
    dx, dw = torch.autograd.grad(expected, [x, w], upstream)
    # dX is each rank's part, which a mapping in front sums.
    parts[0][2] = sum(part[2] for part in parts)
    for log_probs, entropy, *_ in parts:
        assert log_probs.shape == expected[0].shape and entropy.shape == (N,) and log_probs.dtype == torch.float32
        assert torch.equal(log_probs, parts[0][0]) and torch.equal(entropy, parts[0][1])
    for found, truth in zip(parts[0][:3], (*expected, dx)):
        assert_near(found, truth, 2e-6)
    assert_near(torch.cat([p[3] for p in parts]), dw, 2e-6)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (dict(temperature=0.0), "temperature must be a number > 0.* got 0.0"),
        (dict(temperature=float("nan")), "temperature must be a number > 0.* got nan"),
        (dict(temperature="1"), "temperature must be a number > 0.* got '1'"),
        (dict(reduction="max"), "reduction must be 'none', 'sum' or 'mean', got 'max'"),
        (dict(temperature=torch.ones(3)), r"temperature must be .* of labels's shape \[30\], got one of shape \[3\]"),
        (dict(temperature=torch.ones(30, requires_grad=True)), r"pass temperature.detach\(\)"),
        (dict(hidden=torch.tensor(1.0)), r"hidden must be \[..., D\], got \[\]"),
        (dict(labels=torch.zeros(3, dtype=torch.int64)), r"labels must have shape \[30\]"),
        (dict(hidden=None), "hidden must be a tensor, got NoneType"),
        (dict(weight=[[1.0]]), "weight must be a tensor, got list"),
        (dict(labels=3), "labels must be a tensor, got int"),
        (dict(bias=torch.zeros(V + 1)), r"bias must have shape \[64\], one entry per row of weight"),
        (dict(dist_process_group=3), "dist_process_group must be a .*ProcessGroup or None, got int"),
        (dict(logits_budget=-1), "logits_budget must be None or a number of bytes >= 0, got -1"),
        (dict(vocab_size=V + 1), "vocab_size=65 exceeds the 64 rows of weight"),
    ],
)
def test_refused(arguments, message):
    x, w, labels = tensors()
    with pytest.raises(ValueError, match=message):
        rl.linear_cross_entropy(**(dict(hidden=x, weight=w, labels=labels) | arguments))


B, S = 3, 10
ENDS = {1: [64], 2: [32, 62]}
"""Ends of the ids of each rank's shard: two ids fewer on the last of two ranks. Its further rows are padding."""


def _nemo(member: Member, inference_only: bool):
    x, w, labels = tensors(member.device)
    x = x.view(S, B, D).chunk(member.ranks)[member.rank].clone().requires_grad_()
    rows, end = V // member.ranks, ENDS[member.ranks][member.rank]
    start = rows * member.rank
    padding = w.new_full((rows + start - end + 2, D), 9.0)
    shard = torch.cat([w[start:end], padding]).requires_grad_()
    found = rl.from_parallel_hidden_states_to_logprobs(
        x, shard, True, of_sequences(labels), start, end, member.group, inference_only, None, 4
    )
    if inference_only:
        assert not found.requires_grad
        return [found.cpu()]
    dx, dw = torch.autograd.grad(found, [x, shard], normal(B, S - 1, seed=6).to(found))
    assert not dw[end - start :].any()
    return [v.detach().cpu() for v in (found, dx, dw[: end - start])]


def of_sequences(labels):
    """``[B, S]``, of which two are outside the vocabulary of two ranks."""
    labels = labels.view(B, S).clone()
    labels[1, 4], labels[0, 1] = V + 3, 62
    return labels


@pytest.mark.parametrize("inference_only", [False, True])
@pytest.mark.parametrize("ranks", [1, 2])
def test_from_parallel_hidden_states_to_logprobs(ranks, inference_only, worlds, device):
    parts = everywhere(worlds, device, ranks, _nemo, inference_only)
    x, w, labels = tensors(dtype=torch.float64)
    end = ENDS[ranks][-1]
    x, w, labels = x.view(S, B, D).requires_grad_(), w[:end].requires_grad_(), of_sequences(labels)[:, 1:]
    log_p = (x.transpose(0, 1) @ w.t()).log_softmax(-1)[:, :-1]
    inside = labels < end
    expected = torch.where(inside, log_p.gather(-1, labels.clamp(max=end - 1)[..., None]).squeeze(-1), 0.0)
    dx, dw = torch.autograd.grad(expected, [x, w], normal(B, S - 1, seed=6).float().double())
    for found, *_ in parts:
        assert_near(found, expected, 2e-6)
        assert (found[~inside] == 0).all() and torch.equal(found, parts[0][0])
    if not inference_only:
        assert_near(torch.cat([p[1] for p in parts]), dx, 2e-6)
        assert_near(torch.cat([p[2] for p in parts]), dw, 2e-6)


def test_hidden_states_and_labels_are_flattened():
    x, w, labels = tensors()
    found = rl.linear_cross_entropy(x.view(5, 6, D), w, labels.view(3, 10), torch.full((30, 1), 0.5))
    for a, b in zip(found, rl.linear_cross_entropy(x, w, labels, 0.5)):
        assert torch.equal(a, b)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (dict(vocab_end_index=65), "64 rows, which cannot be for the ids from .*=0 to vocab_end_index=65"),
        (dict(vocab_end_index=-1), "64 rows, which cannot be for the ids from .*=0 to vocab_end_index=-1"),
        (dict(vocab_start_index=9, vocab_end_index=8), "for the ids from vocab_start_index=9 to vocab_end_index=8"),
        (dict(vocab_start_index=-1), "for the ids from vocab_start_index=-1"),
        (dict(vocab_end_index=None), "to vocab_end_index=None"),
        (dict(tensor_parallel_hidden_states=None), "tensor_parallel_hidden_states must be a tensor, got NoneType"),
        (dict(output_weight_layer="w"), "output_weight_layer must be a tensor, got str"),
        (dict(output_weight_layer=torch.zeros(V)), r"output_weight_layer \[V/P, D\], got .* and \[64\]"),
        (dict(target=0), "target must be a tensor, got int"),
        (dict(target=torch.zeros(N, dtype=torch.int64)), r"target must be \[B, S\] .*got \[30\] and"),
        (dict(bias=torch.zeros(V + 1)), r"bias must have shape \[64\], got \[65\]"),
        (dict(tp_group="tp"), "tp_group must be a .*ProcessGroup or None, got str"),
    ],
)
def test_refused_of_parallel_hidden_states(change, message):
    x, w, labels = tensors()
    given = dict(tensor_parallel_hidden_states=x.view(S, B, D), output_weight_layer=w, runtime_gather_output=None)
    given |= dict(target=labels.view(B, S), vocab_start_index=0, vocab_end_index=V, tp_group=None)
    with pytest.raises(ValueError, match=message):
        rl.from_parallel_hidden_states_to_logprobs(**given | change)


def test_bias_vocabulary_and_budget():
    """Beyond what the trainers' functions take: as of :func:`parallel_lce.token_statistics`."""
    x, w, labels = tensors()
    more = dict(vocab_size=V - 5, logits_budget=0)
    bias = normal(V, seed=3).float()
    expected = parallel_lce.token_statistics(x, w, labels, linear_bias=bias, expected_logit=True, **more)
    log_probs, entropy = rl.linear_cross_entropy(x, w, labels, bias=bias, **more)
    assert torch.equal(log_probs, expected.target_log_prob) and torch.equal(entropy, expected.entropy)
    target = labels.view(S, B).t().roll(1, -1)
    found = rl.from_parallel_hidden_states_to_logprobs(x.view(S, B, D), w, None, target, 0, V, None, bias=bias, **more)
    inside = (labels < V - 5).view(S, B).t()[:, :-1]
    assert_near(found[inside], expected.target_log_prob.view(S, B).t()[:, :-1][inside], 1e-6)
