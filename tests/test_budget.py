"""The default of ``logits_budget``."""

from __future__ import annotations

from functools import partial
from types import SimpleNamespace
from unittest import mock

import pytest
import torch

import parallel_lce
from parallel_lce.call import prepare
from parallel_lce.core.budget import default_budget
from world import Member

GIB, MIB = 1 << 30, 1 << 20


def on(total: int):
    """A machine whose GPUs have ``total`` bytes."""
    properties = SimpleNamespace(total_memory=total)
    return mock.patch.multiple(torch.cuda, is_available=lambda: True, get_device_properties=lambda device: properties)


@pytest.mark.parametrize(
    ("total", "budget"),
    [
        (int(139.8 * GIB), 4352 * MIB),
        (int(79.1 * GIB), 2304 * MIB),
        (int(79.4 * GIB), 2304 * MIB),
        (int(23.6 * GIB), 512 * MIB),
        (2 * GIB, 256 * MIB),
    ],
)
def test_a_gpu_s_is_a_thirty_second_of_its_memory(total, budget):
    with on(total):
        assert default_budget(torch.device("cuda")) == budget


def test_a_cpu_s_is_1_gib():
    assert default_budget(torch.device("cpu")) == GIB == default_budget(torch.device("meta"))


def test_a_call_is_planned_with_it(device, monkeypatch):
    """Or with the environment's, or with the one that is given, whatever is remembered of earlier calls."""
    prepare.KNOWN.clear()
    x, weight = torch.ones(3, 4, device=device, requires_grad=True), torch.ones(5, 4, device=device)
    call = partial(parallel_lce.linear_cross_entropy, x, weight, torch.zeros(3, dtype=torch.int64, device=device))

    def planned(**options) -> int:
        with mock.patch.object(prepare, "plan", wraps=prepare.plan) as plan:
            call(**options)
        return plan.call_args.kwargs["budget"]

    assert planned() == default_budget(x.device)
    monkeypatch.setenv("PARALLEL_LCE_LOGITS_BUDGET", "123")
    assert planned() == 123 and planned(logits_budget=45) == 45
    monkeypatch.setenv("PARALLEL_LCE_LOGITS_BUDGET", "-1")
    for _ in range(2):
        with pytest.raises(ValueError, match="PARALLEL_LCE_LOGITS_BUDGET must be a number of bytes, got '-1'"):
            call()
    call(logits_budget=46)


def _of_a_head(member: Member, further_heads: int | None, given: int | None) -> int | None:
    """The budget of one head's loss, in a model with so many further heads for multi-token prediction."""
    import parallel_lce.megatron
    from megatron_models import Model, batch
    from megatron_training import output_layers
    from parallel_lce.megatron import output_layer

    spec = Model(ranks=member.ranks)
    _, ours, hidden, _ = output_layers(member, spec)
    labels = batch(0, spec, member.device).labels
    parallel_lce.megatron.install(given)
    ours.output_layer.config.mtp_num_layers = further_heads
    with mock.patch.object(output_layer, "fused_loss", wraps=output_layer.fused_loss) as loss:
        ours.compute_language_model_loss(labels, ours.output_layer(hidden)[0])
    parallel_lce.megatron.uninstall()
    return loss.call_args.args[0].logits_budget


@pytest.mark.parametrize(
    ("further_heads", "given", "expected"),
    [(None, None, None), (0, None, None), (1, None, 2), (3, None, 4), (3, 5000, 5000), (3, 0, 0)],
)
def test_heads_of_multi_token_prediction_share_it(further_heads, given, expected, worlds, device):
    pytest.importorskip("megatron.core", reason="needs megatron-core")
    if given is None and expected is not None:
        expected = default_budget(torch.device(device)) // expected
    assert worlds(1).run(_of_a_head, further_heads, given) == [expected]
