"""Exponentials that are saved as codes of one byte: Triton's kernels interpreted on the CPU, compiled with ``-m gpu``.

Each row of x picks a column of the weight: logits are known exactly, and dW shows the gradient of each logit."""

import pytest
import torch

pytest.importorskip("triton", reason="needs triton")

from cases import normal
from parallel_lce import linear_cross_entropy, token_statistics
from tools import chosen_backend, everywhere, planned, shrunk

R, V = 18, 700
BLOCK = 256 * R
WINDOW = 256  # of the tile's entries or a multiple
ALL = R * V + BLOCK  # bytes of all codes


def problem(device: str):
    """``x, weight, target, z [R, V]``: of every sixth token the target is its largest logit, by far; or so is another
    entry; or two entries tie, one of them the target; or all logits are below 0, and the first of two shards may end
    before the target; or all logits are alike."""
    z, kind = normal(R, V, seed=1) * 2, torch.arange(R) % 6
    target = torch.randint(V, (R,), generator=torch.Generator().manual_seed(0))
    target[::7], target[1::9], target[3::12] = 5, -100, 240
    rows, at = torch.arange(R), target.clamp(min=0)
    z[kind == 3] -= 10
    z[kind == 4] *= 0.01
    z[rows, at] = torch.where(kind == 0, 12.0, z[rows, at])
    z[kind == 1, 333] = 20.0
    z[rows, at] = torch.where(kind == 2, 12.0, z[rows, at])
    z[rows, (at + 1) % V] = torch.where(kind == 2, 12.0, z[rows, (at + 1) % V])
    x, weight = torch.eye(R).bfloat16(), z.t().contiguous().bfloat16()
    return x.to(device), weight.to(device), target.to(device), weight.t().double().to(device)


def allowed_errors(z, target):
    """The largest error of each probability: half a step of f, at most 1 / 253, times ``|de / df| <= 8 e / f``."""
    p = z.softmax(1)
    hidden = p.scatter(1, target.clamp(min=0)[:, None], 0.0).where((target >= 0)[:, None], p)
    padded = torch.nn.functional.pad(hidden, (0, -V % WINDOW)).unflatten(1, (-1, WINDOW))
    largest = padded.amax(2, keepdim=True).expand_as(padded).flatten(1)[:, :V]
    return p, 0.02 * hidden**0.75 * largest**0.25 + 1e-9 * largest


@pytest.mark.parametrize(("ranks", "saved"), [(1, V), (2, 640)])
def test_losses_and_gradients_are_within_the_steps_of_codes(ranks, saved, worlds, device, kernels):
    with chosen_backend("triton"):
        everywhere(worlds, device, ranks, _loss, R * saved // ranks + BLOCK)


def _loss(member, budget):
    x, weight, target, z = problem(member.device)
    part = slice(V // 3 * member.rank, V if member.rank == member.ranks - 1 else V // 3)
    x, weight = x.requires_grad_(), weight[part].requires_grad_()
    upstream = torch.linspace(0.5, 2, R, device=member.device)
    where = dict(process_group=member.group, vocab_start=part.start, vocab_size=V)
    with shrunk(BLOCK):
        loss = linear_cross_entropy(x, weight, target, reduction="none", logits_budget=budget, **where)
        assert planned().codes
        loss.backward(upstream)
    true = torch.nn.functional.cross_entropy(z, target, reduction="none")
    assert ((loss.double() - true).abs() <= 1e-5).all()
    p, allowed = allowed_errors(z, target)
    scale = upstream.double()[:, None] * (target >= 0)[:, None]
    exact = scale * (p - (torch.arange(V, device=z.device) == target[:, None]).double())
    # G and dW are rounded. The rest of a target's term is in fp32.
    allowed = scale * (allowed + 1e-7) + 2.0**-8 * exact.abs()
    assert ((weight.grad.double() - exact[:, part].t()).abs() <= allowed[:, part].t()).all()
    rows = allowed @ z.t().abs() + 2.0**-7 * (exact @ z.t()).abs() + 2.0**-8 * (exact.abs() @ z.t().abs())
    assert ((x.grad.double() - exact @ z.t()).abs() <= rows).all()


@pytest.mark.parametrize("targets", [False, True])
def test_a_target_without_a_gradient_has_its_entry_formed(targets, device, kernels):
    """The target has no code, and its entry is formed even so. Without targets every entry has one, the largest too."""
    x, weight, target, z = problem(device)
    target = target.clamp(min=0)
    weight.requires_grad_()
    with chosen_backend("triton"), shrunk(BLOCK):
        token_statistics(x, weight, target if targets else None, logits_budget=ALL).lse.sum().backward()
        assert planned().codes
    found = weight.grad.double().t()
    p, allowed = allowed_errors(z, target if targets else torch.full_like(target, -100))
    if targets:
        rows = torch.arange(R, device=device)
        torch.testing.assert_close(found[rows, target], p[rows, target], atol=1e-7, rtol=0.005)
    assert ((found - p).abs() <= allowed + 2.0**-8 * p).all()


def gradient_of_weight(x, weight, target, upstream):
    leaves = weight.requires_grad_(), weight.detach().double().requires_grad_()
    with chosen_backend("triton"), shrunk(BLOCK):
        given = dict(reduction="none", logits_budget=len(x) * len(weight) + BLOCK)
        linear_cross_entropy(x, leaves[0], target, **given).backward(upstream)
        assert planned().codes
    true = torch.nn.functional.cross_entropy(x.double() @ leaves[1].t(), target, reduction="none")
    return leaves[0].grad.double(), torch.autograd.grad(true, leaves[1], upstream.double())[0]


def test_windows_may_be_of_another_tile_than_the_backwards(device, kernels):
    """Hooks return a weight that TMA cannot address, whose tile is narrower."""

    def moved(t):
        if t.dtype != torch.bfloat16 or t.dim() < 2 or len(t) == 16:
            return t
        memory = t.new_empty(t.numel() + 1)[1:].view(t.shape)
        return memory.copy_(t)

    x = torch.eye(16, device=device).bfloat16()
    weight = (
        (normal(1100, 16, seed=1) + torch.arange(1100)[:, None] // 256 % 2 * 4).to(device).bfloat16().requires_grad_()
    )
    block, target = 16 * 768, torch.arange(16, device=device)
    with chosen_backend("triton"), shrunk(block), torch.autograd.graph.saved_tensors_hooks(lambda t: t, moved):
        given = dict(reduction="none", logits_budget=16 * 1100 + block)
        linear_cross_entropy(x, weight, target, **given).sum().backward()
        assert planned().codes
    leaf = weight.detach().double().requires_grad_()
    torch.nn.functional.cross_entropy(x.double() @ leaf.t(), target, reduction="sum").backward()
    assert (weight.grad.double() - leaf.grad).norm() <= 0.006 * leaf.grad.norm()


def test_huge_logits_may_nearly_tie_with_the_target(device, kernels):
    """The target is smaller than the largest logit, by less than the roundings of a sum as large."""
    x = torch.cat([torch.eye(R), torch.ones(R, 1)], 1).to(device).bfloat16()
    weight = torch.zeros(V, R + 1, device=device, dtype=torch.bfloat16)
    weight[300:302, R], weight[301, :R] = 8192, 2.0**-7
    found, exact = gradient_of_weight(x, weight, torch.full((R,), 300, device=device), torch.ones(R, device=device))
    torch.testing.assert_close(found[301, :R], exact[301, :R], rtol=0.02, atol=0)


def test_small_gradients_of_large_logits_are_kept(device, kernels):
    x, weight, target, _ = problem(device)
    weight, target = weight.clamp(min=-2, max=2) + 66, target.clamp(min=0)
    found, exact = gradient_of_weight(x, weight, target, torch.full((R,), 1e-12, device=device))
    torch.testing.assert_close(found, exact, rtol=0.05, atol=0)


def test_a_bias_has_no_codes(device, kernels):
    """It may exclude an entry, or set a window's entries far apart."""
    x, weight, target, _ = problem(device)
    with chosen_backend("triton"), shrunk(BLOCK):
        given = dict(linear_bias=weight.new_zeros(V), reduction="none", logits_budget=ALL)
        linear_cross_entropy(x.requires_grad_(), weight, target, **given)
        assert not planned().codes


def test_logits_that_are_not_finite_stay_in_their_token(device, kernels):
    """NaN stays in its token. A window far below the others has no gradient, and one whose target alone is not."""
    x, weight, target, _ = problem(device)
    target[target < 512] += 100
    target[target < 512] = 600
    x[0] = torch.nan
    x, weight = torch.cat([x, x.new_ones(R, 1)], 1), torch.cat([weight, weight.new_zeros(V, 1)], 1)
    weight[:512, -1] = -1e4
    leaves = [x.requires_grad_(), weight.requires_grad_()]
    with chosen_backend("triton"), shrunk(BLOCK):
        loss = linear_cross_entropy(*leaves, target, reduction="none", logits_budget=ALL)
        assert planned().codes
        loss[1:].sum().backward()
    truth = [t.detach().double().nan_to_num().requires_grad_() for t in leaves]
    logits = torch.nn.functional.linear(*truth)
    torch.nn.functional.cross_entropy(logits[1:], target[1:], reduction="sum").backward()
    assert loss[0].isnan() and x.grad[0].isnan().all()
    assert (x.grad[1:].double() - truth[0].grad[1:]).norm() <= 0.006 * truth[0].grad[1:].norm()


def test_only_one_byte_is_saved(device, kernels):
    x, weight, target, _ = problem(device)
    saved: dict[int, int] = {}
    weight.requires_grad_()

    def keep(tensor):
        if tensor.data_ptr() not in (x.data_ptr(), weight.data_ptr()):
            saved[tensor.data_ptr()] = tensor.untyped_storage().nbytes()
        return tensor

    with chosen_backend("triton"), shrunk(BLOCK), torch.autograd.graph.saved_tensors_hooks(keep, lambda t: t):
        linear_cross_entropy(x, weight, target, reduction="none", logits_budget=ALL)
    assert R * V <= sum(saved.values()) <= 1.25 * R * V
