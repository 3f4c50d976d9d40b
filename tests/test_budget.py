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
from tools import arguments_to
from world import Member

GIB = 1 << 30


@pytest.mark.parametrize(("total", "budget"), [(139.8, 4352), (79.1, 2304), (79.4, 2304), (23.6, 512), (2, 256)])
def test_a_gpu_s_is_a_thirty_second_of_its_memory_and_a_cpu_s_is_1_gib(total, budget, monkeypatch):
    properties = SimpleNamespace(total_memory=int(total * GIB))
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: properties)
    assert default_budget(torch.device("cuda")) == budget << 20
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


# Further heads of multi-token prediction, the budget that is installed, and that of each head: None for the default,
# or the number of heads that share the default.
HEADS = [(None, None, None), (0, None, None), (1, None, 2), (3, None, 4), (3, 5000, 5000), (3, 0, 0)]


def _budgets_of_heads(member: Member) -> list[int | None]:
    import parallel_lce.megatron
    from megatron_models import Model, batch
    from megatron_training import output_layers
    from parallel_lce.megatron import output_layer

    spec = Model(ranks=member.ranks)
    _, model, hidden, _ = output_layers(member, spec)
    labels = batch(0, spec, member.device).labels
    with arguments_to(output_layer, "fused_loss") as given:
        for model.output_layer.config.mtp_num_layers, budget, _ in HEADS:
            parallel_lce.megatron.install(budget)
            model.compute_language_model_loss(labels, model.output_layer(hidden)[0])
            parallel_lce.megatron.uninstall()
    return [options.logits_budget for options, *_ in given]


def test_heads_of_multi_token_prediction_share_it(worlds, device):
    pytest.importorskip("megatron.core", reason="needs megatron-core")
    whole = default_budget(torch.device(device))
    expected = [whole // share if budget is None and share else share for _, budget, share in HEADS]
    assert worlds(1).run(_budgets_of_heads) == [expected]
