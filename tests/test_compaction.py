"""Calls on the tokens that count alone: the same results, and nothing is computed for the others."""

from __future__ import annotations

import pytest
import torch

import parallel_lce
from blocks import counted_forwards
from cases import Case, make, normal, part
from parallel_lce.backends import backend_of
from tools import debug_mode, everywhere, fields, small
from world import Member

N, V, D = 48, 120, 16
LOSSES = {
    "none": dict(reduction="none"),
    "mean": dict(reduction="mean", label_smoothing=0.1),
    "sum": dict(reduction="sum", z_loss=1e-3),
}


def _loss(member: Member, name: str, sequence_parallel: bool, counted: bool):
    """Loss, dX and dW, with the number of tokens that count and without."""
    t = part(make(Case(N, V, D, ignored="some"), member.device), member, sequence_parallel)
    scale = normal(N, seed=7).abs().to(member.device) + 0.5
    leaves = [t.x.detach().requires_grad_(), t.weight.detach().requires_grad_()]
    options = dict(LOSSES[name], process_group=member.group, sequence_parallel=sequence_parallel, logit_scale=scale)
    options["token_weight"] = normal(N, seed=8).abs().to(member.device)
    if counted:
        options["counted_tokens"] = int((t.target != -100).sum())
        assert 0 < options["counted_tokens"] < N
    with counted_forwards(backend_of(t.weight)) as rows:
        loss = parallel_lce.linear_cross_entropy(*leaves, t.target, **options)
    assert sum(rows) == options.get("counted_tokens", N)
    upstream = normal(N, seed=9).to(loss)[: loss.numel()].view(loss.shape)
    return [v.detach().cpu() for v in (loss, *torch.autograd.grad(loss, leaves, upstream))]


@pytest.mark.parametrize(("ranks", "sequence_parallel"), [(1, False), (2, False), (2, True)])
@pytest.mark.parametrize("name", LOSSES)
@pytest.mark.thinned
def test_a_loss(name, ranks, sequence_parallel, worlds, backend, device):
    found, expected = (
        everywhere(worlds, device, ranks, _loss, name, sequence_parallel, counted) for counted in (True, False)
    )
    for ours, other in zip(found, expected):
        for a, b in zip(ours, other, strict=True):
            torch.testing.assert_close(a, b, rtol=1e-4, atol=1e-6)


def test_statistics(backend, device):
    t = small(device, N=N)
    mask = torch.arange(N, device=device).view(6, 8) % 3 == 1
    ids = torch.randint(0, 150, (6, 8, 4), device=device)
    everything = dict(mean_logit=True, expected_logit=True, argmax=True, sum_p_squared=True, selected=ids, top_k=3)
    arguments = t.x.view(6, 8, -1), t.weight, t.target.view(6, 8)
    plain = parallel_lce.token_statistics(*arguments, **everything)
    found = parallel_lce.token_statistics(*arguments, **everything, mask=mask, counted_tokens=16)
    assert found.vocab_size == 150
    for name, value in fields(found).items():
        if name == "vocab_size":
            continue
        expected = getattr(plain, name)
        assert value.shape == expected.shape, name
        nothing = 0 if value.is_floating_point() else -1
        assert (value[~mask] == nothing).all(), name
        torch.testing.assert_close(value[mask], expected[mask], msg=name)
    total = lambda s: s.entropy[mask].sum() + s.selected_log_prob[mask].sum()  # noqa: E731
    gradients = (torch.autograd.grad(total(s), [t.x, t.weight]) for s in (found, plain))
    for a, b in zip(*gradients):
        torch.testing.assert_close(a, b)


@pytest.mark.parametrize("wrong", [-1, 1])
def test_a_wrong_number_gives_nan(wrong, device):
    t = small(device, N=N, ignored="some")
    count = int((t.target != -100).sum()) + wrong
    for reduction in ("mean", "none"):
        assert (
            parallel_lce.linear_cross_entropy(t.x, t.weight, t.target, reduction=reduction, counted_tokens=count)
            .isnan()
            .all()
        )
    mask = t.target != -100
    found = parallel_lce.token_statistics(t.x, t.weight, None, argmax=True, mask=mask, counted_tokens=count)
    assert found.lse.isnan().all() and (found.argmax == -1).all()
    for gradient in torch.autograd.grad(found.lse.sum(), [t.x, t.weight]):
        assert gradient.isnan().any(), "a step of no gradient would be taken"


def test_an_ignore_index_that_the_targets_dtype_does_not_hold(device):
    t = small(device, N=N)
    target = t.target.clamp(max=100).to(torch.int8)
    target[::5] = 0  # 2^40 in 8 bits
    found, expected = (
        parallel_lce.linear_cross_entropy(t.x, t.weight, target, ignore_index=2**40, counted_tokens=count)
        for count in (N, None)
    )
    torch.testing.assert_close(found, expected)


@pytest.mark.parametrize("count", [0, N])
def test_none_and_all(count, device):
    t = small(device, N=N)
    if count == 0:
        t.target[:] = -100
    loss = parallel_lce.linear_cross_entropy(t.x, t.weight, t.target, counted_tokens=count)
    expected = parallel_lce.linear_cross_entropy(t.x, t.weight, t.target)
    torch.testing.assert_close(loss, expected)
    for a, b in zip(*(torch.autograd.grad(value, [t.x, t.weight]) for value in (loss, expected))):
        torch.testing.assert_close(a, b)


def test_a_single_token(device):
    t = small(device, N=1)
    one = torch.ones((), dtype=torch.bool, device=device)
    found = parallel_lce.token_statistics(
        t.x[0], t.weight, t.target[0], mask=one, counted_tokens=1, selected=t.target, top_k=2
    )
    assert found.lse.shape == () and found.top_ids.shape == (2,)
    loss = parallel_lce.linear_cross_entropy(t.x[0], t.weight, t.target[0], reduction="none", counted_tokens=1)
    torch.testing.assert_close(loss, -found.target_log_prob)


def test_autocast(device):
    t = small(device, N=N, ignored="some")
    with torch.autocast(torch.device(device).type, torch.bfloat16):
        count = int((t.target != -100).sum())
        found = parallel_lce.linear_cross_entropy(t.x.bfloat16(), t.weight, t.target, counted_tokens=count)
        torch.testing.assert_close(found, parallel_lce.linear_cross_entropy(t.x.bfloat16(), t.weight, t.target))


def _told(member: Member, name: str):
    t = small(member.device, N=N)
    shard = t.weight.chunk(member.ranks)[member.rank]
    count = {"refused": -1, "other": N - 1}[name] if member.rank else N
    with debug_mode(), pytest.raises(ValueError) as raised:
        parallel_lce.linear_cross_entropy(
            t.x[: N // 2], shard, t.target, counted_tokens=count, process_group=member.group, sequence_parallel=True
        )
    return str(raised.value)


@pytest.mark.parametrize("name", ["refused", "other"])
def test_debug_mode_raises_on_every_rank(name, worlds, device):
    said = everywhere(worlds, device, 2, _told, name)
    expected = {
        "refused": "counted_tokens must be a number of tokens",
        "other": "disagree about counted_tokens: rank 0",
    }
    assert all(expected[name] in text for text in said), said


BAD = {
    "too many": (dict(counted_tokens=N + 1), "counted_tokens must be a number of tokens from 0 to 48, got 49"),
    "negative": (dict(counted_tokens=-1), "from 0 to 48, got -1"),
    "a float": (dict(counted_tokens=3.0), "from 0 to 48, got 3.0"),
    "a tensor": (dict(counted_tokens=torch.tensor(3)), r"from 0 to 48, got tensor\(3\)"),
    "no group": (dict(counted_tokens=3, process_group="tp"), "process_group must be .* got str"),
    "ignore_index": (dict(counted_tokens=3, ignore_index="a"), "ignore_index must be an integer .* got 'a'"),
    "shapes": (dict(counted_tokens=3, target=torch.zeros(5, dtype=torch.int64)), r"target must have shape \[48\]"),
}
BAD_STATISTICS = {
    "no count": (dict(mask=torch.ones(N, dtype=torch.bool)), "given together, got Tensor and NoneType"),
    "no mask": (dict(counted_tokens=3), "given together, got NoneType and int"),
    "of integers": (dict(mask=torch.ones(N), counted_tokens=3), r"mask must be torch.bool .* got torch.float32 \[48\]"),
    "mask's shape": (
        dict(mask=torch.ones(6, 8, dtype=torch.bool), counted_tokens=3),
        r"tokens' shape \[48\], got torch.bool \[6, 8\]",
    ),
    "mask's device": (
        dict(mask=torch.ones(N, dtype=torch.bool, device="meta"), counted_tokens=3),
        "mask is on meta and input is on cpu",
    ),
    "sets": (
        dict(
            mask=torch.ones(N, dtype=torch.bool),
            counted_tokens=N,
            selected=(torch.zeros(3, dtype=torch.int64), torch.zeros(N + 1, dtype=torch.int64)),
        ),
        "without offsets, where counted_tokens is given",
    ),
}


@pytest.mark.parametrize("name", [*BAD, *BAD_STATISTICS])
def test_refused(name):
    t = small(N=N)
    function = parallel_lce.linear_cross_entropy if name in BAD else parallel_lce.token_statistics
    arguments, message = (BAD | BAD_STATISTICS)[name]
    with pytest.raises(ValueError, match=message):
        function(**(dict(input=t.x, linear_weight=t.weight, target=t.target) | arguments))


@pytest.mark.gpu
def test_nobody_waits_for_the_device():
    t = small("cuda", N=N, ignored="some")
    count = int((t.target != -100).sum())
    call = lambda: parallel_lce.linear_cross_entropy(t.x, t.weight, t.target, counted_tokens=count)  # noqa: E731
    call().backward()
    torch.cuda.set_sync_debug_mode("error")
    try:
        call().backward()
    finally:
        torch.cuda.set_sync_debug_mode("default")
