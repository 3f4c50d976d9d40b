"""Sampled softmax against the dense formula over each token's set, on one rank and on several; and the samplers."""

import math

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

import parallel_lce
from cases import DTYPES, normal
from measures import error
from parallel_lce.samplers import LogUniformSampler, UnigramSampler, in_batch
from tools import on_ranks, upstream

N, V, D, M = 12, 80, 24, 30
LEAVES = "input", "linear_weight", "linear_bias", "log_expected_count", "target_log_expected_count"


def problem(dtype=torch.float64, per_token=False, device="cpu") -> dict:
    """Samples with accidental hits, an id twice, and ids outside the vocabulary; ignored targets."""
    target = torch.arange(N).mul(7).remainder(V)
    target[::5] = -100
    shape = (N, M) if per_token else (M,)
    sampled = torch.randint(V - 20, shape, generator=torch.Generator().manual_seed(1))
    sampled[..., :4] = torch.tensor([7, 7, -1, V + 3])
    given = dict(
        input=normal(N, D).to(dtype),
        linear_weight=normal(V, D, seed=2).to(dtype) / 2,
        linear_bias=normal(V, seed=3).to(dtype),
        target=target,
        sampled=sampled,
        log_expected_count=normal(*shape, seed=4),
        target_log_expected_count=normal(N, seed=5),
    )
    return {name: t.to(device) for name, t in given.items()}


def dense(t: dict, reduction="mean", scale=1.0, remove=True) -> tuple[Tensor, ...]:
    """In float64: the loss and the gradients of ``LEAVES``."""
    leaves = [t[n].double().detach().requires_grad_() for n in LEAVES]
    logits, (counts, of_target) = scale * F.linear(*leaves[:3]), leaves[3:]
    counted, target = t["target"] != -100, t["target"].clamp(min=0)
    sampled = t["sampled"].expand(N, M)
    others = logits.gather(1, sampled.clamp(0, V - 1)) - counts.expand(N, M)
    others = others.masked_fill((sampled < 0) | (sampled >= V), -torch.inf)
    if remove:
        others = others.masked_fill(sampled == target[:, None], -torch.inf)
    own = logits.gather(1, target[:, None]) - of_target[:, None]
    losses = F.cross_entropy(torch.cat([own, others], 1), torch.zeros_like(target), reduction="none")
    losses = torch.where(counted, losses, 0.0)
    loss = {"none": losses, "sum": losses.sum(), "mean": losses.sum() / counted.sum()}[reduction]
    return loss.detach(), *torch.autograd.grad((loss * upstream(loss)).sum(), leaves)


CASES = [
    ("fp64", 1, False, False, "mean", {}),
    ("fp64", 1, False, True, "none", dict(logit_scale=0.5)),
    ("fp64", 2, False, False, "none", dict(logit_scale=-0.5)),
    ("fp64", 2, True, False, "mean", dict(remove_accidental_hits=False)),
    ("fp64", 2, True, True, "sum", {}),
    ("fp64", 4, False, False, "sum", {}),
    ("fp64", 4, True, True, "mean", {}),
    ("fp32", 2, False, False, "mean", {}),
    ("bf16", 2, True, False, "mean", {}),
    ("fp16", 1, False, False, "mean", {}),
]


@pytest.mark.parametrize(("dtype", "ranks", "split", "per_token", "reduction", "options"), CASES)
@pytest.mark.parametrize("uneven", [False, True])
@on_ranks()
def test_the_dense_formula(member, dtype, split, per_token, reduction, options, uneven):
    whole = problem(DTYPES[dtype], per_token, member.device)
    truth = dense(whole, reduction, options.get("logit_scale", 1.0), options.get("remove_accidental_hits", True))
    given, ranks, rank = dict(whole), member.ranks, member.rank
    bounds = [V * r // ranks for r in range(ranks + 1)]
    if uneven and ranks > 1:
        bounds[1] -= 5
        options = options | dict(vocab_start=bounds[rank], vocab_size=V)
    rows = slice(bounds[rank], bounds[rank + 1])
    for name in ("linear_weight", "linear_bias"):
        given[name] = whole[name][rows]
    if split:
        given["input"] = whole["input"].chunk(ranks)[rank]
    leaves = {n: given[n].clone().requires_grad_() for n in LEAVES}
    loss = parallel_lce.sampled_linear_cross_entropy(
        **given | leaves,
        reduction=reduction,
        process_group=member.group if ranks > 1 else None,
        sequence_parallel=split,
        **options,
    )
    (loss * upstream(loss)).sum().backward()
    wants = [truth[0], truth[1].chunk(ranks)[rank] if split else truth[1], truth[2][rows], truth[3][rows], *truth[4:]]
    founds = [loss, *[leaf.grad for leaf in leaves.values()]]
    allowed = {"fp64": 1e-12, "fp32": 1e-5, "bf16": 2e-2, "fp16": 3e-3}[dtype]
    for found, want in zip(founds, wants, strict=True):
        assert error(found, want) <= allowed * max(1.0, want.double().norm().item())
    touched = torch.cat([whole["target"], whole["sampled"].reshape(-1)])
    others = ~torch.isin(torch.arange(rows.start, rows.stop, device=member.device), touched)
    assert others.any() or rank < ranks - 1
    assert not leaves["linear_weight"].grad[others].any() and not founds[3][others].any()


def test_few_samples_and_confident_tokens(device):
    """Without any sample the loss is 0. A loss as small as 1e-6 is as exact as others."""
    t = problem(torch.float32, device=device)
    x, weight = t["input"].requires_grad_(), t["linear_weight"]
    for sampled in (t["sampled"][:0], t["sampled"][2:4], t["sampled"].new_zeros(N, 0)):
        loss = parallel_lce.sampled_linear_cross_entropy(x, weight, t["target"], sampled)
        (gradient,) = torch.autograd.grad(loss, x)
        assert loss.item() == 0 and not gradient.any()
    weight = torch.eye(D, device=device)
    x, target = weight[:1] * 16, torch.zeros(1, dtype=torch.int64, device=device)
    for sampled in (torch.arange(1, 4), torch.arange(4), torch.arange(1, 4)[None]):
        loss = parallel_lce.sampled_linear_cross_entropy(x, weight, target, sampled.to(device))
        assert loss.item() == pytest.approx(math.log1p(3 * math.exp(-16)), rel=1e-5)


@pytest.mark.parametrize("shape", [(0, M), (0, 0), (M,), (0,)])
@pytest.mark.parametrize("ranks", [1, 2])
@on_ranks()
def test_no_tokens(member, shape):
    """The loss and all gradients are 0, as those of linear_cross_entropy are."""
    rows = V // member.ranks
    leaves = [torch.zeros(size, D, device=member.device, requires_grad=True) for size in (0, rows)]
    target, sampled = (torch.zeros(s, dtype=torch.int64, device=member.device) for s in ((0,), shape))
    for reduction in ("mean", "sum", "none"):
        loss = parallel_lce.sampled_linear_cross_entropy(
            *leaves, target, sampled, reduction=reduction, process_group=member.group
        )
        assert loss.shape == ((0,) if reduction == "none" else ()) and not loss.any()
        assert all(not g.any() for g in torch.autograd.grad(loss.sum(), leaves))


def test_the_gradient_of_expected_counts_alone(device):
    """With a frozen weight, and with a scale of 0."""
    t = problem(device=device)
    for scale in (1.0, 0.0):
        counts = t["log_expected_count"].clone().requires_grad_()
        loss = parallel_lce.sampled_linear_cross_entropy(**t | dict(log_expected_count=counts), logit_scale=scale)
        found, want = torch.autograd.grad(loss, counts)[0], dense(t, scale=scale)[4]
        assert error(found, want) < 1e-12 and want.any()


def test_samples_may_be_written_to_before_the_backward(device):
    """As a buffer that the next microbatch fills."""
    t, gradients = problem(device=device), []
    for write in (False, True):
        leaves = [t[name].detach().requires_grad_() for name in LEAVES]
        ids = t["sampled"].clone()
        loss = parallel_lce.sampled_linear_cross_entropy(**t | dict(zip(LEAVES, leaves), sampled=ids))
        ids.fill_(V // 2) if write else None
        gradients.append(torch.autograd.grad(loss, leaves))
    assert all(map(torch.equal, *gradients))


@pytest.mark.parametrize("per_token", [False, True])
def test_targets_may_be_a_transposed_view(device, per_token):
    t = problem(device=device, per_token=per_token)
    target = t["target"].view(3, 4).t().contiguous().t()
    wide = {n: v.unflatten(0, (3, 4)) for n, v in t.items() if len(v) == N and n != "target"}
    found = parallel_lce.sampled_linear_cross_entropy(**t | wide | dict(target=target))
    assert not target.is_contiguous() and torch.equal(found, parallel_lce.sampled_linear_cross_entropy(**t))


def test_rows_of_samples_are_saved_as_other_tensors_are(device):
    """So a backward frees them, and hooks and checkpoints see them."""
    t, shapes = problem(device=device), []
    t["input"].requires_grad_()
    with torch.autograd.graph.saved_tensors_hooks(lambda v: (shapes.append(v.shape), v)[1], lambda v: v):
        loss = parallel_lce.sampled_linear_cross_entropy(**t)
    assert (M, D) in shapes
    node, kept = loss.grad_fn, []
    while node is not None and not hasattr(node, "share"):
        node = next((each for each, _ in node.next_functions if each is not None), None)
    kept = [v for v in (vars(node.share) if node else {}).values() if isinstance(v, torch.Tensor)]
    assert node is not None and all(len(v.shape) == 1 for v in kept)


@pytest.mark.parametrize("per_token", [False, True])
def test_samples_that_the_bias_masks(device, per_token):
    """They have no gradient, and a token that has no others has none but its target's."""
    t = problem(per_token=per_token, device=device)
    t["sampled"] = t["sampled"].fill_(V - 1)
    t["linear_bias"][V - 1] = -torch.inf
    leaves = [t[name].detach().requires_grad_() for name in LEAVES]
    loss = parallel_lce.sampled_linear_cross_entropy(**t | dict(zip(LEAVES, leaves)))
    assert loss.item() == 0
    for gradient in torch.autograd.grad(loss, leaves):
        assert not gradient.any()


def test_a_target_outside_the_vocabulary_is_nan(device):
    t = problem(device=device)
    t["target"][1] = V
    losses = parallel_lce.sampled_linear_cross_entropy(**t, reduction="none")
    assert losses[1].isnan() and losses[2:].isfinite().all()


# --- samplers -----------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", ["log-uniform", "unigram"])
def test_frequencies_are_the_expected_counts(kind):
    """Chi-squared over all ids that are drawn; the same seed gives the same ids."""
    counts = torch.tensor([5.0, 0.0, 1.0, 9.0, 2.5, 0.1, 3.0])
    sampler = LogUniformSampler(7) if kind == "log-uniform" else UnigramSampler(counts)
    draws, ids = 200_000, torch.arange(7)
    drawn = sampler.sample(draws, seed=3)
    assert torch.equal(drawn, sampler.sample(draws, seed=3)) and not torch.equal(drawn, sampler.sample(draws, seed=4))
    expected, found = sampler.log_expected_count(ids, draws).double().exp(), torch.bincount(drawn, minlength=7)
    assert expected.sum().item() == pytest.approx(draws, rel=1e-6)
    assert not found[expected == 0].any()
    there = expected > 0
    assert ((found - expected).square() / expected)[there].sum() < 25  # p is 1e-3 or less for 6 degrees of freedom
    if kind == "unigram":
        powered = UnigramSampler(counts, power=0.75).log_expected_count(ids, 1).exp()
        want = counts.double().pow(0.75)
        torch.testing.assert_close(powered.double(), want / want.sum(), rtol=1e-5, atol=0)
        with pytest.raises(ValueError, match=r"counts must be \[V\], finite and >= 0"):
            UnigramSampler(-counts)


def test_samplers_draw_on_the_cpu_whatever_the_default_device():
    made = UnigramSampler([1.0, 3.0, 2.0]), LogUniformSampler(9)
    with torch.device("meta"):
        for own, other in zip(made, (UnigramSampler([1.0, 3.0, 2.0]), LogUniformSampler(9))):
            assert torch.equal(own.sample(20, seed=1, device="cpu"), other.sample(20, seed=1, device="cpu"))


@pytest.mark.parametrize("value", [1.5, torch.nan, 0, "3"])
def test_samplers_refuse_what_is_no_number_of_entries(value):
    with pytest.raises(ValueError, match="vocab_size must be an integer of at least 1"):
        LogUniformSampler(value)


@pytest.mark.parametrize("power", [torch.nan, torch.inf, "1", 2000, -3000.0])
def test_samplers_refuse_a_power_without_probabilities(power):
    with pytest.raises(ValueError, match="power must"):
        UnigramSampler(torch.tensor([3.0, 2.0]), power)


def test_samplers_refuse_negative_counts():
    for sampler in (LogUniformSampler(9), UnigramSampler(torch.ones(9))):
        for use in (sampler.sample, sampler.log_expected_count):
            given = (-5, 0) if use == sampler.sample else (torch.tensor([1]), -5)
            with pytest.raises(ValueError, match="count must be a number >= 0, got -"):
                use(*given)


def test_targets_of_the_batch_as_samples():
    target = torch.tensor([[3, 3], [-100, 5]])
    sampled, log_counts = in_batch(target)
    assert sampled.tolist() == [3, 3, -1, 5]
    assert log_counts.exp().tolist() == pytest.approx([2, 2, 1, 1])
    _, log_counts = in_batch(target, torch.full((9,), 0.25).log())
    assert log_counts.exp().tolist() == pytest.approx([0.75] * 4)
