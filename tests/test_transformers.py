"""transformers and TRL: in the default suite with stand-ins of their contracts; with --all with the releases, beside
their own losses."""

from __future__ import annotations

import os
import re
import sys
from pathlib import Path

import pytest
import torch

import transformers_bodies as bodies
from parallel_lce.transformers import patch, unpatch
from releases import ROOT, folder_of
from tools import alone, ran
from transformers_standin import CausalLM

RELEASE = "5.24.0"
# Beside torch and tokenizers, all that TRL's trainers import.
OTHERS = "accelerate==1.15.0 regex==2026.11.19 psutil==7.2.2 datasets==5.2.0 pandas==3.1.1 pyarrow==26.0.1 dill==0.4.1 "
OTHERS += "multiprocess==0.70.19 xxhash==4.1.0 requests==2.34.2 urllib3==2.8.0 certifi charset_normalizer trl==1.16.0"
RELEASES = ["stand-in", pytest.param("release", marks=pytest.mark.slow)]
KINDS = ["plain", "capped", "tied, biased", "biased"]


@pytest.fixture(params=["cpu"])
def device(request) -> str:
    return request.param


def folder() -> str:
    return str(folder_of("transformers", RELEASE, others=tuple(OTHERS.split())))


def _run(worlds, release: str, ranks: int, body, *arguments) -> None:
    if release == "stand-in" and ranks == 1:
        body(alone(), *arguments)
    else:
        worlds(ranks, None if release == "stand-in" else folder()).run(body, *arguments)


SHARDED = [
    *[(kind, how, before) for kind in KINDS[:3] for how in ("DDP", "FSDP1", "FSDP2") for before in (True, False)],
    *[("plain", how, before) for how in ("FSDP2, head apart", "FSDP2, head with norm") for before in (True, False)],
    *[(kind, "plan", False) for kind in ("plain", "capped", "biased")],
]


def _tiered(cases: list[tuple], release_alone: list[tuple]) -> list:
    """Each case with the stand-in and, in a slow test, with the release."""
    slow = [pytest.param("release", *case, marks=pytest.mark.slow) for case in (*cases, *release_alone)]
    return [*(("stand-in", *case) for case in cases), *slow]


TRAINED = ["plain", "capped", "tied, biased"]


@pytest.mark.parametrize("accuracy", [False, True])
@pytest.mark.parametrize(("release", "kind"), _tiered([(k,) for k in KINDS], [("scaled",), ("divided",), ("experts",)]))
def test_loss_gradients_logits_and_generation(release, kind, accuracy, worlds):
    _run(worlds, release, 1, bodies.alone, release, kind, accuracy)


@pytest.mark.parametrize("accuracy", [False, True])
@pytest.mark.parametrize(  # a stand-in's plan shards the output layer alone, so its weight is not tied
    ("release", "kind", "how", "before"), _tiered(SHARDED, [("tied, biased", "plan", False)])
)
def test_sharded(release, kind, how, before, accuracy, worlds):
    _run(worlds, release, 2, bodies.sharded, release, kind, how, before, accuracy)


@pytest.mark.parametrize("mistake", ["no shift", "doubled scale", "doubled cap"])
def test_a_mistake_is_seen(mistake):
    with pytest.raises(AssertionError, match="Scalars are not close|Tensor-likes are not close"):
        bodies.spoiled(alone(), mistake)


def test_a_gradient_that_is_not_summed_is_seen(worlds):
    with pytest.raises(AssertionError, match="Tensor-likes are not close"):
        _run(worlds, "stand-in", 2, bodies.unsummed)


@pytest.mark.parametrize(
    "body", [bodies.rounded, bodies.compiled, bodies.fallbacks, bodies.log_probs], ids=lambda body: body.__name__
)
@pytest.mark.parametrize("release", RELEASES)
def test_on_one_process(release, body, worlds):
    _run(worlds, release, 1, body, release)


@pytest.mark.slow
@pytest.mark.parametrize("ranks", [1, 2])
@pytest.mark.parametrize("kind", TRAINED)
@pytest.mark.parametrize("body", [bodies.trainer, bodies.accelerated], ids=lambda body: body.__name__)
def test_trainer_and_accelerate(body, kind, ranks, worlds):
    _run(worlds, "release", ranks, body, kind)


@pytest.mark.slow
@pytest.mark.parametrize("algorithm", ["SFT", "DPO", "GRPO"])
def test_trl_s_trainers(algorithm, tmp_path):
    """datasets pickles functions, by dill, which knows installed modules by the name of their folder."""
    (tmp_path / "site-packages").symlink_to(folder())
    code = "import sys, tools, transformers_bodies as bodies\n"
    code += "for kind in ('plain', 'capped'): bodies.policies(tools.alone(), sys.argv[1], kind)"
    path = os.pathsep.join([str(ROOT), str(ROOT / "tests"), str(tmp_path / "site-packages")])
    done = ran(sys.executable, "-c", code, algorithm, env={"PYTHONPATH": path})
    assert done.returncode == 0, done.stderr[-3000:]


def test_steps_of_lazy_logits():
    layer, hidden = patch(CausalLM(9, 4)).lm_head, torch.randn(3, 4)
    real = hidden @ layer.weight.T
    steps = {
        lambda z: 2 * z / 4: {"logit_scale": 0.5},
        lambda z: torch.mul(torch.tanh(torch.div(z, 4)), 8).float(): {"logit_scale": 2.0, "logit_softcap": 8.0},
        lambda z: z.tanh() * -1: None,
        lambda z: z.tanh().tanh(): None,
        lambda z: z / 0.0: None,
    }
    for step, expected in steps.items():
        lazy = step(layer(hidden))
        assert lazy.epilogue() == expected and lazy.made is None and torch.equal(lazy[...], step(real))
    for made in (lambda z: z * torch.ones(9), lambda z: z + 1, lambda z: torch.div(z, 3, rounding_mode="floor")):
        assert torch.is_tensor(made(layer(hidden))) and torch.equal(made(layer(hidden)), made(real))


def test_refusals():
    layer, model = torch.nn.Linear(3, 3), CausalLM(9, 4)
    with pytest.raises(ValueError, match="must be a causal language model of transformers, got a Linear"):
        patch(layer)
    assert unpatch(model) is model
    with pytest.raises(ValueError, match="gradient_filter"):
        patch(model, gradient_filter=2.0)
    model.loss_function = torch.nn.functional.cross_entropy
    with pytest.raises(ValueError, match="loss_function of CausalLM must be ForCausalLMLoss, got <function cross_en"):
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


PAGE = """
import re, sys
from pathlib import Path
import parallel_lce
assert not {"parallel_lce.transformers", "parallel_lce.trl", "transformers", "trl"} & {*sys.modules}
blocks = re.findall(r"^```python\\n(.*?)^```$", Path("docs/transformers.md").read_text(), re.M | re.S)
sys.path.insert(0, "tests")
from transformers_bodies import batch, model_of
import torch
names = {"model": model_of("release", "plain"), "batch": batch(1), "torch": torch}
losses = [exec(block, names) or names["loss"].item() for block in blocks]
assert len(losses) == 5 and max(losses) - min(losses) < 1e-5, losses
"""


@pytest.mark.slow
def test_the_lines_of_the_page():
    done = ran(sys.executable, "-c", PAGE, cwd=ROOT, env={"PYTHONPATH": f"{ROOT}:{folder()}"})
    assert done.returncode == 0, done.stderr[-2000:]


def test_nothing_else_imports_them():
    files = [file for file in Path(ROOT / "parallel_lce").rglob("*.py")]
    assert len(files) > 30
    line = r"^\s*(from|import) (transformers|trl|accelerate)\b"
    assert not [f for f in files if re.search(line, f.read_text(), re.M)]
