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

from cases import normal
from measures import assert_near
from parallel_lce import LinearCrossEntropy, linear_cross_entropy, rl, selected_log_probs, token_statistics
from parallel_lce import vocab_parallel_cross_entropy as of_logits
from parallel_lce.distillation import divergence, top_k_divergence
from tools import alone, everywhere, shrunk, started
from world import Member

S, B, V, D, CAP = 8, 3, 64, 16, 3.0


def ids(y):
    """``[S, B, 3]``, on several ranks' shards."""
    return (y[..., None] + torch.tensor([0, 23, 41], device=y.device)) % V


def _statistics(x, w, y, **options):
    found = token_statistics(x, w, y, logit_softcap=CAP, expected_logit=True, **options)
    return found.target_log_prob, found.entropy


def _top_k(x, w, y, **options):
    stored = torch.tensor([-1.0, -2.0, -3.0]).to(x).expand(S, B, 3)
    return [top_k_divergence(x, w, ids(y), stored, tail=tail, **options) for tail in ("class", "renormalize")]


FUNCTIONS = {
    "statistics": _statistics,
    "losses": partial(linear_cross_entropy, reduction="none", logit_softcap=CAP),
    "gradients in forward": partial(linear_cross_entropy, reduction="sum", logits_budget=0),
    "counted": partial(linear_cross_entropy, reduction="sum", ignore_index=0, counted_tokens=S * B - 1),
    "module": lambda x, w, y, **options: LinearCrossEntropy(reduction="sum", **options)(x, w, y),
    "selected": lambda x, w, y, **options: selected_log_probs(x, w, ids(y), logit_softcap=CAP, **options),
    "divergence": lambda x, w, y, **o: divergence(x, w, x.detach(), w.detach().flip(1), reduction="sum", **o),
    "top_k": partial(_top_k, reduction="sum"),
}
# These need not be asked. Of logits that exist each rank has its own gradient; their layer sums that of its input.
UNASKED = {
    "rl": lambda x, w, y, t, group: rl.linear_cross_entropy(x, w, y, t, "none", group),
    "rl by token": lambda x, w, y, t, group: rl.linear_cross_entropy(x, w, y, t, "none", group),
    "logits": lambda x, w, y, t, group: of_logits(x @ w.t() / t, y, tp_group=group),
}


def _ours(member: Member, name: str, gathered: bool):
    by_token = name in ("rl by token", "statistics", "counted", "selected")
    temperature = (normal(S, B, seed=3).abs() + 0.5).to(member.device) if by_token else 0.7
    x, w = normal(S, B, D).to(member.device), normal(V, D, seed=1).to(member.device) / 4
    y, group = torch.arange(S * B, device=member.device).view(S, B) * 7 % V, member.group
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
        if name in UNASKED:
            found = UNASKED[name](hidden, shard, y, temperature, group)
        else:
            options = dict(temperature=temperature, process_group=group, reduce_hidden_grad=False)
            found = FUNCTIONS[name](hidden, shard, y, **options)
        found = [found] if isinstance(found, torch.Tensor) else [*found]
        upstream = [normal(*f.shape, seed=6 + i).to(f) for i, f in enumerate(found)]
        gradients = torch.autograd.grad(found, [x, shard], upstream)
    reductions = [c.kind for c in collectives if c.kind != "all_gather"]
    # That of the mapping alone.
    assert reductions == ([] if group is None else ["reduce_scatter"] if gathered else ["all_reduce"])
    return [v.detach().cpu() for v in (*found, *gradients)]


@pytest.mark.parametrize("ranks", [2, 4])
@pytest.mark.parametrize("gathered", [True, False], ids=["gathered", "copied"])
@pytest.mark.parametrize("name", FUNCTIONS | UNASKED)
@pytest.mark.thinned
def test_gradients(name, gathered, ranks, worlds, device):
    parts = everywhere(worlds, device, ranks, _ours, name, gathered)
    *expected, dx, dw = _ours(alone(device), name, gathered)
    for part in parts:
        for found, truth in zip(part, expected):
            assert_near(found, truth, 1e-12)
        if not gathered:
            assert_near(part[-2], dx, 1e-12)
    if gathered:
        assert_near(torch.cat([part[-2] for part in parts]), dx, 1e-12)
    assert_near(torch.cat([part[-1] for part in parts]), dw, 1e-12)
