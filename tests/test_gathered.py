"""Output layers under DeepSpeed's ZeRO-3, in transformers and TRL: by default with a stand-in of its hooks, with --all
by the released package. tests/test_transformers.py has the units of FSDP."""

import contextlib
import os
import weakref
from unittest import mock

import pytest
import torch
from torch import Tensor, nn

import parallel_lce.transformers as door
import transformers_models
import zero_standin
from parallel_lce import gathered, token_statistics
from parallel_lce import trl as trl_door
from parallel_lce.core.private import keep_with
from releases import folder_of
from tools import on_ranks, started
from transformers_models import D, V, batch, fused, model_of, unmade, warned
from transformers_standin import installed_trl
from zero_standin import OTHERS, RELEASE, Released, StandIn, installed


def site(_: dict) -> str:
    zero = folder_of("deepspeed", RELEASE, others=tuple(OTHERS.split()))
    return os.pathsep.join([transformers_models.site(), str(zero)])


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


def hooked(model: nn.Module) -> None:
    """A step shows how often the hooks of gradients run."""

    def doubled(parameter: Tensor) -> None:
        parameter.grad *= 2

    for each in model.parameters():
        if each.requires_grad:
            each.register_hook(lambda gradient: 0.6 * gradient)
            each.register_post_accumulate_grad_hook(doubled)


def fused_beside_stock(member, zero: str, case: str) -> None:
    """Losses, weights and logits after two steps; collectives of the same number; and no copy of the weight is kept
    between forward and backward."""
    kind, frozen, options = CASES[case]

    def results(patched: bool):
        model = model_of("stand-in", kind).train()
        if frozen:
            model.get_submodule(frozen).requires_grad_(False)
        hooked(model)
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


def own_forward_beside_stock(member, zero: str, twice: bool) -> None:
    """Where the forward makes the logits, or calls the output layer ``twice``, for two losses."""

    class Own(type(model_of("stand-in", "plain"))):
        def forward(self, input_ids, labels):
            z = self.lm_head(hidden := self.model["embed"](input_ids))
            z = z if twice else z + 1.0
            loss = self.loss_function(z, labels, self.vocabulary)
            if twice:
                loss = loss + self.loss_function(self.lm_head(hidden.sin()), labels, self.vocabulary)
            return {"loss": loss, "logits": z}

    def results(patch):
        model = model_of("stand-in", "plain").train()
        model.__class__ = Own
        hooked(model)
        engine = engine_of(zero, model)
        patch(model)
        for step in range(2):
            out = engine(**batch(10 * step + member.rank))
            engine.backward(out["loss"])
            engine.step()
        weights = engine.whole()
        engine.end()
        assert unmade(out["logits"]) == (twice and patch is door.patch)
        return [out["loss"].detach(), *([] if twice else [out["logits"].detach()]), *weights]

    with linear_of(zero):
        stock = results(lambda model: model)
        with warned() as said:
            ours = results(door.patch)
    for found, expected in zip(ours, stock, strict=True):
        torch.testing.assert_close(found, expected)
    assert not said if twice else len(said) == 1 and "its forward makes them by 'add'" in said[0]


def parameters_of(*sizes: tuple[int, ...], seed: int = 0) -> list[nn.Parameter]:
    generator = torch.Generator().manual_seed(seed)
    return [nn.Parameter(torch.randn(size, generator=generator)) for size in sizes]


@pytest.mark.parametrize("case", ["", "frozen", "compiled"])
@pytest.mark.parametrize("device", ["cpu"])
@on_ranks(2)
def test_trls_functions(member, case):
    """Weights are whole in a forward of log-probabilities, else the functions gather them. Two uses of a weight, whose
    gradient has hooks; two backwards through one graph."""
    sizes = (V, D), (V,), (V, D), (V + 5, D + 3)

    def results(functions, made, context):
        w, b, s, u = made
        (x, y), ids = parameters_of((7, D), (7, D + 3), seed=1 + member.rank), torch.arange(7)

        def log_probs(x):
            return functions[0].apply(x, w, b, ids, 0.7, 40, 2.0, 0.3, ("entropy", "is_top1"))

        with context:
            found = torch.compile(log_probs, backend="eager")(x) if case == "compiled" else log_probs(x)
            again, *_ = functions[0].apply(x.sin(), w, b, ids, 0.7, 40)
        # TRL's gathers by itself, also without gradients.
        with torch.no_grad():
            unseen = functions[1].apply(x, s, None, y, u, None, 0.3)
        divergence, entropy = functions[1].apply(x, s, None, y, u, None, 0.3)
        total = (found[0] * torch.arange(7.0)).sum() + found[1].square().sum() + divergence.square().sum()
        return [*found, again, divergence, entropy, *unseen], total + again.sum(), x

    def hooked(each, accumulated):
        each.register_hook(lambda gradient: 2 * gradient)
        each.register_post_accumulate_grad_hook(lambda parameter: accumulated.append(parameter.grad.clone()))

    with installed_trl():
        from trl.trainer import distillation_trainer, utils

        own, theirs, mine = utils._ChunkedLogProbFunction, parameters_of(*sizes), parameters_of(*sizes)
        for w, _, _, u in (theirs, mine):
            w.requires_grad_(case != "frozen"), u.requires_grad_(False)
        functions = own, distillation_trainer.ChunkedDivergenceFunction
        trained = [number for number, each in enumerate(theirs) if each.requires_grad]
        of_theirs, of_mine = [], []
        for number in trained:
            hooked(theirs[number], of_theirs), hooked(mine[number], of_mine)
        expected, total, x = results(functions, theirs, contextlib.nullcontext())
        stock = torch.autograd.grad(total, [x, *(theirs[number] for number in trained)], retain_graph=True)
        total.backward()
        for each in mine:
            zero_standin.partition(each)
        trl_door.patch()
        functions = utils._ChunkedLogProbFunction, distillation_trainer.ChunkedDivergenceFunction
        with warned((trl_door.TRLWarning,)) as said:
            found, total, z = results(functions, mine, zero_standin.gathered(*mine))
        assert not said and not any(each.numel() for each in mine)
        ours = torch.autograd.grad(total, [z, *(mine[number] for number in trained)], retain_graph=True)
        with zero_standin.gathered(*mine):  # as by the model's hooks, when gradients are accumulated
            total.backward()
        trl_door.unpatch()
    of_theirs, of_mine = (sorted(each, key=Tensor.numel) for each in (of_theirs, of_mine))  # in no order
    for mine, theirs in zip((*found, *ours, z.grad, *of_mine), (*expected, *stock, x.grad, *of_theirs), strict=True):
        assert (mine is None) == (theirs is None)
        if mine is not None:
            torch.testing.assert_close(mine, theirs.to(mine.dtype), rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("device", ["cpu"])
@on_ranks(1)
def test_what_trls_functions_keep(member):
    """No whole weight. Hidden states until the backward, and as the caller's hooks of saved tensors want it."""

    def given():
        return [2 * each for each in parameters_of((7, D), (7, D + 3), seed=1)]

    def use(functions, x, y):
        total = functions[0].apply(x, w, b, torch.arange(7), 0.7, 40)[0].sum()
        return total + functions[1].apply(x, w, None, y, u, None, 0.3)[0].sum()

    def lives(tensor):
        keep_with(tensor, token := {"a token"})
        return weakref.ref(token)

    def offload(tensor):
        packed.append(tensor.shape)
        return tensor.clone()

    w, b, u = made = parameters_of((V, D), (V,), (V + 5, D + 3))
    with installed_trl():
        from trl.trainer import distillation_trainer, utils

        for each in made:
            zero_standin.partition(each)
        trl_door.patch()
        functions = utils._ChunkedLogProbFunction, distillation_trainer.ChunkedDivergenceFunction
        found = []
        for packed in (None, []):
            hooks = torch.autograd.graph.saved_tensors_hooks(offload, lambda tensor: tensor)
            with zero_standin.gathered(*made):
                weights, hidden = [lives(each) for each in made], given()
                with contextlib.nullcontext() if packed is None else hooks:
                    total = use(functions, *hidden)
                hidden = [lives(hidden.pop()) for _ in (0, 1)]
            assert not any(each() for each in weights), "a whole weight is kept"
            assert all(bool(each()) == (packed is None) for each in hidden)
            assert not packed or ((7, D) in packed and not {(V, D), (V, D + 3)} & {*packed})
            found.append([total.detach(), *torch.autograd.grad(total, made[:2])])
            assert not any(each() for each in hidden), "hidden states are kept after the backward"
            with pytest.raises(RuntimeError, match="second time"):
                torch.autograd.grad(total, made[:2])
        trl_door.unpatch()
    assert all(map(torch.equal, *found))


def trl_beside_stock(member, kind: str) -> None:
    """By ``add_fused_lm_head``, in models of transformers."""
    import transformers
    import trl.trainer.utils as utils

    def results(patched: bool):
        model = model_of("release", kind).train()
        utils.add_fused_lm_head(model, temperature=0.7, outputs=("log_probs", "entropy"))
        hooked(model)
        engine, found = Released(model, rate=1.0), []
        kept = transformers.integrations.HfDeepSpeedConfig(engine.config)
        with (
            started() as collectives,
            mock.patch.object(trl_door, "token_statistics", wraps=token_statistics) as called,
        ):
            for step in range(2):
                out = engine(**batch(10 * step + member.rank), fused_lm_head=True)
                engine.backward(out.loss + 0.1 * out.entropy.mean())
                engine.step()
                found += [out.loss.detach(), out.log_probs.detach(), out.entropy.detach()]
        assert called.called == patched
        weights = engine.whole()
        engine.end()
        del kept
        return [*found, *weights], [(c.kind, c.size) for c in collectives]

    stock, theirs = results(False)
    trl_door.patch()
    with warned((trl_door.TRLWarning,)) as said:
        ours, own = results(True)
    trl_door.unpatch()
    for found, expected in zip(ours, stock, strict=True):
        torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-5)
    assert not said and sorted(own) == sorted(theirs)


class Student(nn.Module):
    """Its forward is the divergence from a teacher, as of TRL's DistillationTrainer."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.embed, self.lm_head, self.teacher = nn.Embedding(V, D), nn.Linear(D, V, bias=False), nn.Linear(D, V + 5)
        self.teacher.requires_grad_(False)

    def forward(self, input_ids):
        from trl.trainer import distillation_trainer

        hidden = self.embed(input_ids.flatten())
        pair = hidden, self.lm_head.weight, None, hidden.detach().sin(), self.teacher.weight, self.teacher.bias
        return distillation_trainer.ChunkedDivergenceFunction.apply(*pair, 0.3, 0.7)


def divergence_beside_stock(member) -> None:
    import transformers

    def results():
        engine, found = Released(Student(), rate=1.0), []
        kept = transformers.integrations.HfDeepSpeedConfig(engine.config)
        with started() as collectives:
            for step in range(2):
                divergence, entropy = engine(input_ids=batch(10 * step + member.rank)["input_ids"])
                engine.backward(divergence.mean())
                engine.step()
                found += [divergence.detach(), entropy]
        weights = engine.whole()
        engine.end()
        del kept
        return [*found, *weights], [(c.kind, c.size) for c in collectives]

    stock, theirs = results()
    trl_door.patch()
    with warned((trl_door.TRLWarning,)) as said:
        ours, own = results()
    trl_door.unpatch()
    for found, expected in zip(ours, stock, strict=True):
        torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-5)
    assert not said and own == theirs


@pytest.mark.parametrize("case", [*CASES, True, False])
@pytest.mark.parametrize("device", ["cpu"])
@on_ranks(2)
def test_zero3(member, case):
    if case in CASES:
        fused_beside_stock(member, "stand-in", case)
    else:
        own_forward_beside_stock(member, "stand-in", twice=case)


@pytest.mark.slow
@pytest.mark.parametrize("device", ["cpu"])
@on_ranks(2, site)
def test_zero3_of_the_release(member):
    """In one test, since DeepSpeed keeps process groups."""
    for case in CASES:
        fused_beside_stock(member, "release", case)
    for twice in (True, False):
        own_forward_beside_stock(member, "release", twice)
    for kind in ("plain", "capped"):
        trl_beside_stock(member, kind)
    divergence_beside_stock(member)


def test_what_a_unit_is():
    layer = nn.Linear(2, 3)
    assert gathered.unit_of(layer, [nn.Sequential(layer)]) == (None, None)
    layer.weight.ds_id = 0
    reason, unit = gathered.unit_of(layer, [])
    assert unit is None and "no hook of its output layer gathers the weight" in reason
    layer.register_forward_pre_hook(hook := lambda module, given: None)
    assert gathered.unit_of(layer, [])[1] is None and gathered.other_hooks(layer) == [hook]
    hook.__module__ = "deepspeed.runtime.zero.parameter_offload"
    assert gathered.unit_of(layer, []) == (None, layer) and not gathered.other_hooks(layer)
