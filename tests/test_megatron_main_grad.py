"""The output weight's gradient goes where stock's goes: to the main_grad of Megatron's DistributedDataParallel (DDP),
or where a hook, a partial backward or another use of the weight wants it."""

import pytest
import torch

pytest.importorskip("megatron.core", reason="needs megatron-core")

from megatron_models import BATCH, HIDDEN, SEQUENCE, Model, batch, losses_of
from megatron_training import in_ddp, side_by_side
from tools import on_ranks


def _weight(model):
    tied = model.share_embeddings_and_output_weights
    return model.shared_embedding_or_output_weight() if tied else model.output_layer.weight


# What is done to the output weight, and how the loss is differentiated: what is compared.
GRADIENTS = {
    "hook": (lambda w: w.register_hook(lambda gradient: 2 * gradient), None),
    "hook after": (lambda w: w.register_post_accumulate_grad_hook(lambda w: setattr(w, "grad", 2 * w.grad)), None),
    "grad of the weight": (None, lambda loss, w, x: torch.autograd.grad(loss, [w])),
    "another use": (None, lambda loss, w, x: ((loss + w.square().sum()).backward(), w.main_grad)[1:]),
    "inputs without it": (None, lambda loss, w, x: (loss.backward(inputs=[x]), x.main_grad)[1:]),
    "inputs with it": (None, lambda loss, w, x: (loss.backward(inputs=[w]), w.main_grad)[1:]),
}


@pytest.mark.parametrize("tied", [False, True])
@pytest.mark.parametrize("budget", [None, 0])
@pytest.mark.parametrize("how", GRADIENTS)
@pytest.mark.thinned
@on_ranks(2)
def test_main_grad_gets_what_autograd_gives(member, how, budget, tied):
    """Without gradient_accumulation_fusion, in three microbatches."""
    spec = Model(ranks=member.ranks, tied=tied, budget=budget)
    change, differentiate = GRADIENTS[how]

    def gradients(model, data, ours):
        ddp, weight = in_ddp(model.config, model), _weight(model)
        other = next(p for name, p in model.named_parameters() if "linear_qkv" in name)
        found = []
        for number in range(3):
            if change is not None and number == 1:
                change(weight)
            loss = losses_of(model, spec, batch(number, spec, member.device)).mean()
            if differentiate is None or number != 1:
                loss.backward()
            else:
                found += [g.clone() for g in differentiate(loss, weight, other)]
        ddp.finish_grad_sync()
        return [*found, *(p.main_grad for p in model.parameters())]

    side_by_side(member, spec, gradients)


@on_ranks(2)
def test_real_logits_beside_the_loss_lose_no_gradient(member):
    def gradient(model, data, ours):
        ddp, layer = in_ddp(model.config, model), model.output_layer
        hidden = torch.randn(SEQUENCE, BATCH, HIDDEN, generator=torch.Generator().manual_seed(1)).to(member.device)
        layer.gradient_accumulation_fusion = ours  # stock has it through Apex alone
        loss = losses_of(model, Model(ranks=member.ranks), data).mean()
        layer.gradient_accumulation_fusion = False
        (loss + layer(hidden)[0][0].square().mean()).backward()
        ddp.finish_grad_sync()
        return [layer.weight.main_grad]

    side_by_side(member, Model(ranks=member.ranks), gradient)


@pytest.mark.parametrize("tied", [False, True])
@pytest.mark.parametrize("fusion", [False, True])
@on_ranks(2)
def test_a_main_grad_that_was_replaced_since_forward(member, fusion, tied):
    """As stock does: with gradient_accumulation_fusion the weight gets back the one of the forward."""
    spec = Model(ranks=member.ranks, fusion=fusion, tied=tied)

    def gradients(model, data, ours):
        in_ddp(model.config, model)
        weight = _weight(model)
        loss = losses_of(model, spec, data).mean()
        before, after = weight.main_grad, torch.full_like(weight.main_grad, 0.5)
        weight.main_grad = after
        loss.backward()
        assert weight.main_grad is (before if fusion else after)
        return before, after

    side_by_side(member, spec, gradients)


@pytest.mark.parametrize("tied", [False, True])
@on_ranks(1)
def test_a_main_grad_of_the_programs_own_with_fusion(member, tied):
    """Stock's fusion asks for no attribute of DDP's."""
    spec = Model(tied=tied, fusion=True)

    def gradients(model, data, ours):
        model.config.gradient_accumulation_fusion = False  # comes too late: the layers have read it
        for parameter in model.parameters():
            parameter.main_grad = torch.zeros_like(parameter, dtype=torch.float32)
        losses_of(model, spec, data).mean().backward()
        kept = [p.grad for p in model.parameters() if p.grad is not None]
        return [*(p.main_grad for p in model.parameters()), *kept]

    side_by_side(member, spec, gradients)
