"""Output layers under DeepSpeed's ZeRO-3, in transformers: by default with a stand-in of its hooks, with --all by the
released package. tests/test_transformers.py has the units of FSDP."""

import contextlib

import pytest
import torch
from torch import nn

import parallel_lce.transformers as door
from parallel_lce import gathered
from releases import folder_of
from tools import on_ranks, started
from transformers_models import batch, fused, model_of, warned
from zero_standin import OTHERS, RELEASE, Released, StandIn, installed


def site(_: dict) -> str:
    return str(folder_of("deepspeed", RELEASE, others=tuple(OTHERS.split())))


def engine_of(zero: str, model):
    return (Released if zero == "release" else StandIn)(model, rate=1.0)


@contextlib.contextmanager
def linear_of(zero: str):
    home, linear = installed()
    with contextlib.ExitStack() as contexts:
        for context in (home, linear) if zero == "stand-in" else ():
            contexts.enter_context(context)
        yield


# Of a model: its kind, what is frozen, and options of the patch.
CASES = {
    "plain": ("plain", None, {}),
    "capped": ("capped", None, {"logits_budget": 0}),
    "tied, biased": ("tied, biased", None, {}),
    "frozen body": ("biased", "model", {"token_accuracy": True}),
    "frozen layer": ("plain", "lm_head", {}),
}


def fused_beside_stock(member, zero: str, case: str) -> None:
    """Losses, weights and logits after two steps; collectives of the same number; and no copy of the weight is kept
    between forward and backward."""
    kind, frozen, options = CASES[case]

    def results(patched: bool):
        model = model_of("stand-in", kind).train()
        if frozen:
            model.get_submodule(frozen).requires_grad_(False)
        engine, found = engine_of(zero, model), []
        if patched:
            door.patch(model, **options)
        with started() as collectives:
            for step in range(2):
                out = engine(**batch(10 * step + member.rank))
                assert fused(out) == patched and gathered.weight_of(model.lm_head).numel() == 0
                if patched:
                    with pytest.raises(RuntimeError, match="after ZeRO-3 has taken back the output layer's weight"):
                        out["logits"].sum()
                engine.backward(out["loss"])
                engine.step()
                found.append(out["loss"].detach())
        model.eval()
        with torch.no_grad():
            out = engine(**batch(1))
        weights = engine.whole()
        engine.end()
        return [*found, out["loss"], out["logits"][...], *weights], [(c.kind, c.size) for c in collectives]

    with linear_of(zero):
        stock, theirs = results(False)
        with warned() as said:
            ours, own = results(True)
    for found, expected in zip(ours, stock, strict=True):
        torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-5)
    assert not said and sorted(own) == sorted(theirs)


def own_loss_beside_stock(member, zero: str) -> None:
    """Where the forward makes the logits."""

    class Plus(type(model_of("stand-in", "plain"))):
        def forward(self, input_ids, labels):
            z = self.lm_head(self.model["embed"](input_ids)) + 1.0
            return {"loss": self.loss_function(z, labels, self.vocabulary), "logits": z}

    def results(patch):
        model = model_of("stand-in", "plain").train()
        model.__class__ = Plus
        engine = engine_of(zero, model)
        patch(model)
        for step in range(2):
            out = engine(**batch(10 * step + member.rank))
            engine.backward(out["loss"])
            engine.step()
        weights = engine.whole()
        engine.end()
        return [out["loss"].detach(), out["logits"].detach(), *weights]

    with linear_of(zero):
        stock = results(lambda model: model)
        with warned() as said:
            ours = results(door.patch)
    for found, expected in zip(ours, stock, strict=True):
        torch.testing.assert_close(found, expected)
    assert len(said) == 1 and "its forward makes them by 'add'" in said[0]


@pytest.mark.parametrize("case", [*CASES, None])
@pytest.mark.parametrize("device", ["cpu"])
@on_ranks(2)
def test_zero3(member, case):
    if case is None:
        own_loss_beside_stock(member, "stand-in")
    else:
        fused_beside_stock(member, "stand-in", case)


@pytest.mark.slow
@pytest.mark.parametrize("device", ["cpu"])
@on_ranks(2, site)
def test_zero3_of_the_release(member):
    """In one test, since DeepSpeed keeps process groups."""
    for case in CASES:
        fused_beside_stock(member, "release", case)
    own_loss_beside_stock(member, "release")


def test_what_a_unit_is():
    layer = nn.Linear(2, 3)
    assert gathered.unit_of(layer, [nn.Sequential(layer)]) == (None, None)
    layer.weight.ds_id = 0
    unit, reason = gathered.unit_of(layer, [])
    assert unit is None and "no hook of its output layer gathers the weight" in reason
    layer.register_forward_pre_hook(hook := lambda module, given: None)
    assert gathered.unit_of(layer, [])[0] is None and gathered.other_hooks(layer) == [hook]
    hook.__module__ = "deepspeed.runtime.zero.parameter_offload"
    assert gathered.unit_of(layer, []) == (layer, None) and not gathered.other_hooks(layer)
