"""Calls on the tokens that count alone: the same results, and nothing is computed for the others."""

from __future__ import annotations

import pytest
import torch

import parallel_lce
from blocks import counted_forwards
from cases import Case, make, normal, part
from on_ranks import on_ranks
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


def _cases(t):
    """Tensors and options of calls in which all, none, some or one of the tokens count, and their number."""
    narrow = t.target.clamp(max=100).to(torch.int8)
    narrow[::5] = 0  # 2^40 in 8 bits
    some = t.target.masked_fill(torch.arange(N, device=t.x.device) % 3 == 0, -100)
    yield t.x, t.target, {}, N
    yield t.x, torch.full_like(t.target, -100), {}, 0
    yield t.x, some, {}, N - N // 3
    yield t.x[0], t.target[0], dict(reduction="none"), 1
    # An ignore_index that the target's dtype does not hold.
    yield t.x, narrow, dict(ignore_index=2**40), N


def test_numbers_of_tokens(device):
    t = small(device, N=N)
    for x, target, options, count in _cases(t):
        for autocast in (False, True):
            with torch.autocast(torch.device(device).type, torch.bfloat16, enabled=autocast):
                found, expected = (
                    parallel_lce.linear_cross_entropy(x, t.weight, target, **options, **counted)
                    for counted in (dict(counted_tokens=count), {})
                )
            torch.testing.assert_close(found, expected)
            for a, b in zip(*(torch.autograd.grad(value, [t.x, t.weight]) for value in (found, expected))):
                torch.testing.assert_close(a, b)


def test_statistics_of_a_single_token(device):
    t = small(device, N=1)
    one = torch.ones((), dtype=torch.bool, device=device)
    found = parallel_lce.token_statistics(
        t.x[0], t.weight, t.target[0], mask=one, counted_tokens=1, selected=t.target, top_k=2
    )
    assert found.lse.shape == () and found.top_ids.shape == (2,)


@pytest.mark.parametrize(
    ("last", "message"),
    [(-1, "counted_tokens must be a number of tokens"), (N - 1, "disagree about counted_tokens: rank 0")],
)
@on_ranks(2)
def test_debug_mode_raises_on_every_rank(member, last, message):
    t = small(member.device, N=N)
    shard = t.weight.chunk(member.ranks)[member.rank]
    options = dict(counted_tokens=last if member.rank else N, process_group=member.group, sequence_parallel=True)
    with debug_mode(), pytest.raises(ValueError, match=message):
        parallel_lce.linear_cross_entropy(t.x[: N // 2], shard, t.target, **options)


ALL = torch.ones(N, dtype=torch.bool)
LOSS, STATISTICS = parallel_lce.linear_cross_entropy, parallel_lce.token_statistics
SETS = torch.zeros(3, dtype=torch.int64), torch.zeros(N + 1, dtype=torch.int64)
BAD = [
    (LOSS, dict(counted_tokens=N + 1), "counted_tokens must be a number of tokens from 0 to 48, got 49"),
    (LOSS, dict(counted_tokens=-1), "from 0 to 48, got -1"),
    (LOSS, dict(counted_tokens=3.0), "from 0 to 48, got 3.0"),
    (LOSS, dict(counted_tokens=torch.tensor(3)), r"from 0 to 48, got tensor\(3\)"),
    (LOSS, dict(counted_tokens=3, process_group="tp"), "process_group must be .* got str"),
    (LOSS, dict(counted_tokens=3, ignore_index="a"), "ignore_index must be an integer .* got 'a'"),
    (LOSS, dict(counted_tokens=3, target=SETS[0]), r"target must have shape \[48\]"),
    (STATISTICS, dict(mask=ALL), "given together, got Tensor and NoneType"),
    (STATISTICS, dict(counted_tokens=3), "given together, got NoneType and int"),
    (STATISTICS, dict(mask=ALL.float(), counted_tokens=3), r"mask must be torch.bool .* got torch.float32 \[48\]"),
    (STATISTICS, dict(mask=ALL.view(6, 8), counted_tokens=3), r"tokens' shape \[48\], got torch.bool \[6, 8\]"),
    (STATISTICS, dict(mask=ALL.to("meta"), counted_tokens=3), "mask is on meta and input is on cpu"),
    (STATISTICS, dict(mask=ALL, counted_tokens=N, selected=SETS), "without offsets, where counted_tokens is given"),
]


@pytest.mark.parametrize(("function", "arguments", "message"), BAD)
def test_refused(function, arguments, message):
    t = small(N=N)
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
