"""Hidden states behind Megatron's own mappings, which sum their gradient over the ranks in backward: the functions
leave it as this rank's part. Against whole tensors on one rank, in float64."""

from __future__ import annotations

from contextlib import nullcontext
from functools import partial
from unittest import mock

import pytest
import torch

pytest.importorskip("megatron.core", reason="needs megatron-core")

from megatron.core.tensor_parallel import mappings

import parallel_lce
from cases import normal
from measures import assert_near
from parallel_lce import rl
from parallel_lce.distillation import divergence, top_k_divergence
from tools import alone, everywhere, shrunk, started
from world import Member

S, B, V, D, CAP = 8, 3, 64, 16, 3.0
STORED = torch.tensor([-1.0, -2.0, -3.0])


def tensors(by_token: bool):
    """``x [S, B, D]``, ``w [V, D]``, ``y [S, B]`` and the temperature, fp64."""
    t = normal(S, B, seed=3).abs() + 0.5 if by_token else 0.7
    return normal(S, B, D), normal(V, D, seed=1) / 4, torch.arange(S * B).view(S, B) * 7 % V, t


def ids(y):
    """``[S, B, 3]``, on several ranks' shards."""
    return (y[..., None] + torch.tensor([0, 23, 41], device=y.device)) % V


def _rl(x, w, y, temperature, process_group, **_):
    return [found.view(S, B) for found in rl.linear_cross_entropy(x, w, y, temperature, "none", process_group)]


def _statistics(x, w, y, **options):
    found = parallel_lce.token_statistics(x, w, y, logit_softcap=CAP, expected_logit=True, **options)
    return found.target_log_prob, found.entropy


def _loss(x, w, y, **options):
    return [parallel_lce.linear_cross_entropy(x, w, y, **options)]


def _module(x, w, y, **options):
    return [parallel_lce.LinearCrossEntropy(reduction="sum", **options)(x, w, y)]


def _selected(x, w, y, **options):
    return [parallel_lce.selected_log_probs(x, w, ids(y), logit_softcap=CAP, **options)]


def _divergence(x, w, y, **options):
    return [divergence(x, w, x.detach(), w.detach().flip(1), **options)]


def _top_k(x, w, y, **options):
    stored = STORED.to(x).expand(S, B, 3)
    return [top_k_divergence(x, w, ids(y), stored, tail=tail, **options) for tail in ("class", "renormalize")]


def _logits(x, w, y, temperature, process_group, **_):
    """Of logits that exist each rank has its own gradient. The layer that made them sums that of its input."""
    return [parallel_lce.vocab_parallel_cross_entropy(x @ w.t() / temperature, y, tp_group=process_group)]


FUNCTIONS = {
    "rl": _rl,
    "statistics": _statistics,
    "losses": partial(_loss, reduction="none", logit_softcap=CAP),
    "gradients in forward": partial(_loss, reduction="sum", logits_budget=0),
    "counted": partial(_loss, reduction="sum", ignore_index=0, counted_tokens=S * B - 1, logit_softcap=CAP),
    "module": _module,
    "selected": _selected,
    "divergence": partial(_divergence, reduction="sum"),
    "top_k": partial(_top_k, reduction="sum"),
    "logits": _logits,
}


def _ours(member: Member, name: str, gathered: bool, by_token: bool):
    x, w, y, t = [v.to(member.device) if isinstance(v, torch.Tensor) else v for v in tensors(by_token)]
    group = member.group
    x = (x.chunk(member.ranks)[member.rank] if gathered else x).clone().requires_grad_()
    shard = w.chunk(member.ranks)[member.rank].clone().requires_grad_()
    mapping = mappings.copy_to_tensor_model_parallel_region
    if gathered:
        mapping = mappings.gather_from_sequence_parallel_region
    device = nullcontext()
    if member.device.type == "cpu":
        # Megatron's gather asks where to put its result.
        device = mock.patch.object(torch.cuda, "current_device", lambda: member.device)
    with device, shrunk(4000, (8, 16)), started() as collectives:
        hidden = x if group is None else mapping(x, group=group)
        found = FUNCTIONS[name](hidden, shard, y, temperature=t, process_group=group, reduce_hidden_grad=False)
        upstream = [normal(*f.shape, seed=6 + i).to(f) for i, f in enumerate(found)]
        gradients = torch.autograd.grad(found, [x, shard], upstream)
    reductions = [c.kind for c in collectives if c.kind != "all_gather"]
    # That of the mapping alone.
    assert reductions == ([] if group is None else ["reduce_scatter"] if gathered else ["all_reduce"])
    return [v.detach().cpu() for v in (*found, *gradients)]


@pytest.mark.parametrize("ranks", [2, 4])
@pytest.mark.parametrize("gathered", [True, False], ids=["gathered", "copied"])
@pytest.mark.parametrize(
    ("name", "by_token"),
    [("rl", False), ("rl", True), ("statistics", True), ("losses", False), ("counted", True), ("selected", True)]
    + [(name, False) for name in ("gradients in forward", "module", "divergence", "top_k", "logits")],
)
@pytest.mark.thinned
def test_gradients(name, by_token, gathered, ranks, worlds, device):
    parts = everywhere(worlds, device, ranks, _ours, name, gathered, by_token)
    *expected, dx, dw = _ours(alone(device), name, gathered, by_token)
    for part in parts:
        for found, truth in zip(part, expected):
            assert_near(found, truth, 1e-12)
        if not gathered:
            assert_near(part[-2], dx, 1e-12)
    if gathered:
        assert_near(torch.cat([part[-2] for part in parts]), dx, 1e-12)
    assert_near(torch.cat([part[-1] for part in parts]), dw, 1e-12)
