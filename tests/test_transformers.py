"""transformers and TRL: in the default suite with stand-ins of their contracts; with --all with the releases, beside
their own losses."""

from unittest import mock

import pytest
import torch

import transformers_bodies as bodies
import transformers_habits as habits
from parallel_lce import transformers as door
from parallel_lce import trl as trl_door
from parallel_lce.core.budget import BUDGET_VARIABLE
from parallel_lce.lazy_logits import LogitsTensor
from parallel_lce.transformers import patch, unpatch
from releases import folder_of
from tools import alone
from transformers_standin import CausalLM

RELEASE = "5.24.0"
# Beside torch and tokenizers, all that TRL's trainers import.
OTHERS = "accelerate==1.15.0 regex==2026.11.19 psutil==7.2.2 datasets==5.2.0 pandas==3.1.1 pyarrow==26.0.1 dill==0.4.1 "
OTHERS += "multiprocess==0.70.19 xxhash==4.1.0 requests==2.34.2 urllib3==2.8.0 certifi charset_normalizer"
OTHERS += " trl==1.16.0 peft==0.21.2"


@pytest.fixture(params=["cpu"])
def device(request) -> str:
    return request.param


@pytest.fixture(scope="session")
def site(tmp_path_factory):
    """The folder of the release. datasets pickles functions, by dill, which knows installed modules by its name."""
    site = tmp_path_factory.mktemp("release") / "site-packages"
    site.symlink_to(folder_of("transformers", RELEASE, others=tuple(OTHERS.split())))
    return str(site)


@pytest.fixture
def run(worlds, request):
    """``run(release, ranks, body, *arguments)``"""

    def on_ranks(release: str, ranks: int, body, *arguments) -> None:
        if release == "stand-in" and ranks == 1:
            body(alone(), *arguments)
        else:
            worlds(ranks, None if release == "stand-in" else request.getfixturevalue("site")).run(body, *arguments)

    return on_ranks


def _tiered(cases: list[tuple], release_alone: list[tuple]) -> list:
    """Each case with the stand-in and, in a slow test, with the release."""
    slow = [pytest.param("release", *case, marks=pytest.mark.slow) for case in (*cases, *release_alone)]
    return [*(("stand-in", *case) for case in cases), *slow]


RELEASES = ["stand-in", pytest.param("release", marks=pytest.mark.slow)]
KINDS, TRAINED = ("plain", "capped", "tied, biased", "biased"), ("plain", "capped", "tied, biased")
ONLY_RELEASED = ("scaled", "divided", "experts")
# The kind of the model, what is around it, and whether it is patched before that.
CASES = [
    *((kind, "alone", True) for kind in KINDS),
    *((kind, how, before) for kind in TRAINED for how in ("DDP", "FSDP1", "FSDP2") for before in (True, False)),
    *(("plain", how, before) for how in ("FSDP2, head apart", "FSDP2, head with norm") for before in (True, False)),
    *((kind, "plan", False) for kind in ("plain", "capped", "biased")),
    *((kind, "compiled", True) for kind in ("plain", "capped")),
]
# A stand-in's plan shards the output layer alone, so its weight is not tied.
MORE = [*((kind, "alone", True) for kind in ONLY_RELEASED), ("tied, biased", "plan", False)]


@pytest.mark.parametrize("accuracy", [False, True])
@pytest.mark.parametrize(("release", "kind", "how", "before"), _tiered(CASES, MORE))
def test_training(release, kind, how, before, accuracy, run):
    run(release, 1 if how in ("alone", "compiled") else 2, bodies.check, release, kind, how, before, accuracy)


@pytest.mark.parametrize(("release", "kind"), _tiered([(k,) for k in KINDS], [(k,) for k in ONLY_RELEASED]))
def test_modes(release, kind, run):
    run(release, 1, bodies.modes, release, kind)


ON_ONE = (bodies.rounded, bodies.fallbacks, bodies.log_probs, bodies.divergences, bodies.habits_with_trl)


@pytest.mark.parametrize("body", ON_ONE, ids=lambda body: body.__name__)
@pytest.mark.parametrize("release", RELEASES)
def test_on_one_process(release, body, run):
    run(release, 1, body, release)


@pytest.mark.thinned("name", "kind")
@pytest.mark.parametrize("kind", TRAINED)
@pytest.mark.parametrize("name", habits.HABITS)
@pytest.mark.parametrize("release", RELEASES)
def test_habits(release, name, kind, run):
    run(release, 1, habits.check, release, name, kind)


@pytest.mark.parametrize("kind", ["plain", "capped"])
@pytest.mark.parametrize("release", RELEASES)
def test_uses_of_the_logits(release, kind, run):
    run(release, 1, habits.uses, release, kind)


@pytest.mark.parametrize("name", bodies.STEPS)
def test_logits_after_an_optimizers_step(name):
    habits.after_a_step(name)


def test_logits_after_a_cast():
    habits.after_a_cast()


@pytest.mark.parametrize("before", [True, False])
@pytest.mark.parametrize("release", RELEASES)
def test_saved_modules(release, before, run):
    run(release, 1, habits.saved_modules, release, before)


@pytest.mark.parametrize("how", bodies.UNITS)
@pytest.mark.parametrize("release", RELEASES)
def test_units_of_the_output_layer(release, how, run):
    run(release, 2, bodies.units, release, how)


@pytest.mark.parametrize("apart", [True, False])
@pytest.mark.parametrize("release", RELEASES)
def test_logits_of_a_weight_that_is_kept_whole(release, apart, run):
    run(release, 2, bodies.kept_whole, release, apart)


TRAINERS = "SFT", "DPO", "GRPO", "RLOO", "KTO", "Distillation"
TRAININGS = [("", ranks, kind) for ranks in (1, 2) for kind in TRAINED]
TRAININGS += [(name, 1, kind) for name in TRAINERS for kind in ("plain", "capped")]


@pytest.mark.slow
@pytest.mark.parametrize(("name", "ranks", "kind"), TRAININGS)
def test_trainers(name, ranks, kind, run):
    run("release", ranks, bodies.trained, name, kind)


@pytest.mark.slow
@pytest.mark.parametrize("name", habits.TRAINERS)
def test_losses_and_metrics_of_the_trainer(name, run):
    run("release", 1, habits.by_trainer, name)


@pytest.mark.slow
def test_the_lines_of_the_page(run):
    run("release", 1, bodies.page)


def test_steps_of_lazy_logits():
    layer, hidden = CausalLM(9, 4).lm_head, torch.randn(3, 4)
    real = hidden @ layer.weight.T

    def logits():
        return LogitsTensor.of(door._LazyLogits(mock.MagicMock(), layer, hidden))

    steps = {
        lambda z: 2 * z / 4: {"logit_scale": 0.5},
        lambda z: torch.mul(torch.tanh(torch.div(z, 4)), 8).to(torch.float32): {
            "logit_scale": 2.0,
            "logit_softcap": 8.0,
        },
        lambda z: z.tanh() * -1: None,
        lambda z: z.tanh().tanh(): None,
        lambda z: z / 0.0: None,
    }
    for step, expected in steps.items():
        for made in (logits(), door._LazyLogits(mock.MagicMock(), layer, hidden)):
            recorded = step(made)
            lazy = getattr(recorded, "lazy", recorded)
            assert lazy.epilogue() == expected and lazy.made is None and torch.equal(recorded[...], step(real))
    for made in (lambda z: z * torch.ones(9), lambda z: z + 1, lambda z: torch.div(z, 3, rounding_mode="floor")):
        assert type(made(logits())) is torch.Tensor and torch.equal(made(logits()), made(real))


@pytest.mark.parametrize("accuracy", [False, True])
def test_labels_outside_the_vocabulary(accuracy):
    """As in the library: refused, unless they are ignore_index."""
    own, ids = CausalLM(9, 4).train(), torch.tensor([[1, 2, 3, 4, 5]])
    labels = ids.clone()
    labels[0, 3] = -1
    expected = own(ids, labels=labels, ignore_index=-1).loss.item()
    model = patch(own, token_accuracy=accuracy)
    assert model(ids, labels=labels, ignore_index=-1).loss.item() == pytest.approx(expected)
    with pytest.raises(IndexError, match=r"target -1 at position 2 is outside \[0, 9\)"):
        model(ids, labels=labels)


def test_trls_head_has_trls_answer_outside_the_vocabulary():
    """A logit of 0 there, as for -100."""
    x, w = torch.randn(4, 3, requires_grad=True), torch.randn(9, 3, requires_grad=True)
    log_probs, *_ = trl_door._log_probs(x, w, None, torch.tensor([-100, 9, 4, -1]), 1.0, 9)
    z = x @ w.t()
    exact = torch.stack([z.new_zeros(()), z.new_zeros(()), z[2, 4], z.new_zeros(())]) - z.logsumexp(1)
    torch.testing.assert_close(log_probs, exact)
    for found, right in zip(*(torch.autograd.grad(v.square().sum(), [x, w]) for v in (log_probs, exact))):
        torch.testing.assert_close(found, right)


@pytest.mark.parametrize(("given", "environment", "budget"), [(None, "", 128 << 20), (None, "4096", None), (0, "9", 0)])
def test_the_budget(given, environment, budget, monkeypatch):
    """Without an argument it is the environment's, else 128 MiB."""
    monkeypatch.setenv(BUDGET_VARIABLE, environment)
    model, ids, hidden = patch(CausalLM(9, 4).train(), logits_budget=given), torch.ones(1, 3).long(), torch.ones(3, 4)
    monkeypatch.setitem(trl_door._settings, "logits_budget", given)
    for module, name, use in (
        (door, "linear_cross_entropy", lambda: model(ids, labels=ids)),
        (trl_door, "token_statistics", lambda: trl_door._log_probs(hidden, hidden, None, ids[0], 1.0, 9)),
    ):
        with mock.patch.object(module, name, wraps=getattr(module, name)) as called:
            use()
        assert called.call_args.kwargs["logits_budget"] == budget


def test_refusals():
    layer, model = torch.nn.Linear(3, 3), CausalLM(9, 4)
    with pytest.raises(ValueError, match="must be a causal language model of transformers, got a Linear"):
        patch(layer)
    assert unpatch(model) is model
    with pytest.raises(ValueError, match="gradient_filter"):
        patch(model, gradient_filter=2.0)
    model.loss_function = torch.nn.functional.cross_entropy
    with pytest.raises(ValueError, match="loss_function of CausalLM must be transformers' ForCausalLMLoss, got <fun"):
        patch(model)
    model = CausalLM(9, 4)
    model.lm_head = torch.nn.Bilinear(2, 2, 2)
    with pytest.raises(ValueError, match="the output layer of CausalLM must be an nn.Linear, got .*Bilinear"):
        patch(model)
    model = patch(CausalLM(9, 4))
    given = torch.ones(1, 3, dtype=torch.int64)
    logits = model(given, labels=given).logits
    with torch.no_grad():
        model.lm_head.weight.add_(1.0)
    with pytest.raises(RuntimeError, match="weight changed in place"):
        logits + 1
