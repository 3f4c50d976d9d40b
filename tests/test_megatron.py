"""The switch: training stock Megatron-core models with it equals training them without, also where the output weight
is fully sharded, detached, or used elsewhere, and where its main_grad is replaced. patch() and unpatch(), refusals,
and ``python -m parallel_lce.megatron SCRIPT``, by which unedited scripts get the loss by their own arguments."""

import os
import runpy
import sys
import warnings
from pathlib import Path
from unittest import mock

import pytest
import torch
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import fully_shard

pytest.importorskip("megatron.core", reason="needs megatron-core")

import megatron.core
from megatron.core import tensor_parallel
from megatron.core.fusions import fused_cross_entropy
from megatron.core.models.common.language_module.language_module import LanguageModule
from megatron.core.tensor_parallel import cross_entropy

import parallel_lce.megatron
from megatron_models import BATCH, HIDDEN, SEQUENCE, Model, batch, build, losses_of, of_other_releases, path_of, specs
from megatron_training import compare, in_ddp, side_by_side, switched, train_quietly
from parallel_lce.megatron import __main__ as launcher
from parallel_lce.megatron import cross_entropy as taken_over
from parallel_lce.megatron import output_layer, patch, token_log_probs, unpatch
from tools import arguments_to, on_ranks, words_of_error
from world import Member, forget, launched

SPECS = [*specs(1), *specs(2), *(pytest.param(spec, marks=pytest.mark.slow) for spec in specs(4))]
ON_LOGITS = Model(), Model(ranks=2, sequence_parallel=True, ddp="fp32", tied=True, mtp=1)


@pytest.mark.parametrize("spec", SPECS, ids=str)
@pytest.mark.thinned
def test_training_equals_stock(spec, worlds):
    worlds(spec.ranks).run(compare, spec)


@pytest.mark.parametrize("spec", ON_LOGITS, ids=str)
def test_training_on_logits_equals_stock(spec, worlds):
    worlds(spec.ranks).run(compare, spec, "logits")


def _compare_on(member: Member, release: str, spec: Model) -> None:
    # From 0.18 on it adds the commit of the repository that it lies in.
    assert not release[0].isdigit() or megatron.core.__version__.partition("+")[0] == release
    compare(member, spec)


@pytest.mark.parametrize(("release", "spec"), of_other_releases([(s,) for s in specs(2, tp_of_pairs=1)]), ids=str)
def test_other_releases(release, spec, worlds):
    worlds(spec.ranks, path_of(release)).run(_compare_on, release, spec)


@pytest.mark.parametrize("ranks", [1, 2])
@on_ranks()
def test_deterministic_mode_repeats_every_bit(member):
    several = member.ranks > 1
    spec = Model(ranks=member.ranks, sequence_parallel=several, deterministic=True, ddp="fp32", dtype=torch.bfloat16)
    first, second = (train_quietly(member, spec) for _ in range(2))
    for a, b in zip(first.losses, second.losses, strict=True):
        assert torch.equal(a, b)
    for name, value in first.parameters.items():
        assert torch.equal(value, second.parameters[name]), name


UNITS = [(unit, {}) for unit in ("model", "layer", "layer, kept whole", "layer, in shards", "tied")]
UNITS += [("layer", {"token_metrics": True}), ("layer", {"skip_masked": True})]


@pytest.mark.parametrize(("unit", "settings"), UNITS, ids=str)
@on_ranks(2)
def test_fully_sharded_weights(member, unit, settings):
    """The model's is whole until the loss. The layer's own is whole in a call of the layer, in which the loss is
    computed. Two steps, and an evaluation."""
    shards = {"sequence_parallel": True} if unit == "layer, in shards" else {"data": member.ranks}
    spec = Model(ranks=member.ranks, **shards, tied=unit == "tied", mtp=1 if "token_metrics" in settings else None)
    alone = torch.distributed.new_subgroups(1)[0]

    def results(model, data, ours):
        mesh = DeviceMesh.from_group(alone if spec.tensor > 1 else member.group, member.device.type)
        warnings.filterwarnings("error", message="parallel_lce|.*returned a view tensor")
        if ours:
            parallel_lce.megatron.patch(**settings)
        if "layer" in unit:
            fully_shard(model.output_layer, mesh=mesh, reshard_after_forward="whole" not in unit)
        fully_shard(model, mesh=mesh)
        found, parameters = [], [*model.parameters()]
        for _ in range(2):
            losses = losses_of(model, spec, data) * (data.labels >= 0)
            losses.mean().backward()
            found += [losses, *(p.grad.full_tensor() for p in parameters)]
            with torch.no_grad():
                for p in parameters:
                    p -= 0.1 * p.grad
                    p.grad = None
        model.eval()
        with torch.no_grad():
            found.append(losses_of(model, spec, data) * (data.labels >= 0))
            if not spec.mtp:  # which needs labels
                logits = model(data.tokens, data.positions, data.mask)
                assert "layer" not in unit or isinstance(logits, torch.Tensor)
                found.append(logits[...])
        return [*found, *(p.full_tensor() for p in parameters)]

    with mock.patch.object(output_layer, "_called", wraps=output_layer._called) as fused:
        side_by_side(member, spec, results)
    assert fused.call_count >= 3


@pytest.mark.parametrize("sharded", [False, True])
@on_ranks(2)
def test_detached_weights(member, sharded):
    """As of mtp_detach_heads from 0.18 on: no dW, and none in main_grad."""

    def gradients(model, data, ours):
        layer = model.output_layer
        layer.weight.main_grad = torch.zeros_like(layer.weight)
        layer.weight.grad_added_to_main_grad = False
        if sharded:  # the layer's weight is, whatever is passed
            layer.weight.__fsdp_param__ = True
        hidden = torch.randn(SEQUENCE, BATCH, HIDDEN, generator=torch.Generator().manual_seed(2))
        hidden = hidden.to(member.device).requires_grad_()
        logits, _ = layer(hidden, weight=layer.weight.detach())
        assert isinstance(logits, torch.Tensor) == (sharded or not ours)
        model.compute_language_model_loss(data.labels, logits).mean().backward()
        assert not layer.weight.main_grad.any() and layer.weight.grad is None
        return [hidden.grad]

    side_by_side(member, Model(ranks=member.ranks), gradients)


@pytest.mark.parametrize("use", ["weight", "logits"])
@on_ranks(2)
def test_other_uses_of_the_weight(member, use):
    """Beside the fused loss they lose no gradient under DDP."""
    spec = Model(ranks=member.ranks)

    def gradient(model, data, ours):
        ddp, layer = in_ddp(model.config, model), model.output_layer
        hidden = torch.randn(SEQUENCE, BATCH, HIDDEN, generator=torch.Generator().manual_seed(1)).to(member.device)
        # With fused accumulation, which stock has through Apex alone, only real logits mark the weight.
        model.config.gradient_accumulation_fusion = ours and use == "logits"
        loss = losses_of(model, spec, data).mean()
        model.config.gradient_accumulation_fusion = False
        other = layer.weight.square().sum() if use == "weight" else layer(hidden)[0][0].square().mean()
        (loss + other).backward()
        ddp.finish_grad_sync()
        return [layer.weight.main_grad]

    side_by_side(member, spec, gradient)


@pytest.mark.parametrize("tied", [False, True])
@pytest.mark.parametrize("fusion", [False, True])
@on_ranks(2)
def test_a_main_grad_that_was_replaced_since_forward(member, fusion, tied):
    """As stock does: with gradient_accumulation_fusion the weight gets back the one of the forward."""
    spec = Model(ranks=member.ranks, fusion=fusion, tied=tied)

    def gradients(model, data, ours):
        in_ddp(model.config, model)
        weight = model.shared_embedding_or_output_weight() if tied else model.output_layer.weight
        loss = losses_of(model, spec, data).mean()
        before, after = weight.main_grad, torch.full_like(weight.main_grad, 0.5)
        weight.main_grad = after
        loss.backward()
        assert weight.main_grad is (before if fusion else after)
        found = before.clone(), after.clone()
        if ours and not fusion:
            loss = losses_of(model, spec, data).mean()
            weight.main_grad = after.bfloat16()
            assert "main_grad was torch.float32 [" in words_of_error(loss.backward)
        return found

    side_by_side(member, spec, gradients)


# --- patch() and unpatch() ---------------------------------------------------------------------------


@pytest.fixture(autouse=True)
def _unpatched():
    yield
    unpatch()


def _methods() -> tuple:
    return (
        LanguageModule.compute_language_model_loss,
        LanguageModule.setup_embeddings_and_output_layer,
        cross_entropy._VocabParallelCrossEntropy.apply,
        fused_cross_entropy._VocabParallelCrossEntropy.apply,
    )


def test_logits_of_all_callers():
    """With cross_entropy="logits" those of the function itself too, imported before or after."""
    logits, target = torch.randn(4, 3, 7, dtype=torch.float64), torch.tensor([[0, 1, -100]] * 4)
    calls = (tensor_parallel.vocab_parallel_cross_entropy, cross_entropy.vocab_parallel_cross_entropy)
    ours = parallel_lce.vocab_parallel_cross_entropy(logits, target)
    patch(cross_entropy="logits")
    for call in calls:
        with mock.patch.object(taken_over, "vocab_parallel_cross_entropy", return_value=ours) as called:
            assert call(logits.clone(), target) is ours and called.call_count == 1
    patch(cross_entropy="output_layer")
    with mock.patch.object(taken_over, "vocab_parallel_cross_entropy", side_effect=AssertionError):
        with pytest.raises(AssertionError, match="parallel group is not initialized"):
            calls[0](logits.clone(), target)


def test_patch_is_idempotent_and_undone():
    before = _methods()
    patch()
    once = _methods()
    assert all(ours is not own for ours, own in zip(once, before))
    patch(5, cross_entropy="logits", reduce_dtype=torch.float32)
    patch(cross_entropy="output_layer")
    assert _methods() == once
    unpatch()
    unpatch()
    assert _methods() == before


def test_others_may_wrap_it_too(monkeypatch):
    """What somebody put around the switch is not taken away with it."""
    original = LanguageModule.compute_language_model_loss
    monkeypatch.setattr(LanguageModule, "compute_language_model_loss", original)  # what it is in the end
    patch()
    around = LanguageModule.compute_language_model_loss = lambda self, labels, logits: None
    patch(cross_entropy="logits")
    assert LanguageModule.compute_language_model_loss is around
    with pytest.warns(RuntimeWarning, match="compute_language_model_loss has been replaced"):
        unpatch()
    assert LanguageModule.compute_language_model_loss is around


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (dict(logits_budget=-1), "logits_budget"),
        (dict(reduce_dtype=torch.float16), "None or torch.float32"),
        (dict(cross_entropy="fused"), "must be one of .*, got 'fused'"),
        (dict(gradient_filter="auto"), r"must be .* such as 2\*\*-13, got 'auto'"),
        (dict(skip_masked="yes"), "must be True or False, got 'yes'"),
        (dict(skip_masked=True, cross_entropy="logits"), "=True needs cross_entropy='output_layer', got 'logits'"),
    ],
)
def test_patch_refuses(options, message):
    with pytest.raises(ValueError, match=message):
        patch(**options)


def test_patch_refuses_a_budget_of_the_environment(monkeypatch):
    monkeypatch.setenv("PARALLEL_LCE_LOGITS_BUDGET", "1GiB")
    with pytest.raises(ValueError, match="1GiB"):
        patch()


@on_ranks(2)
def test_settings_of_each_call(member):
    """As patched last. The filter is not for entropies."""
    spec = Model(ranks=member.ranks)
    model, data = build(member, spec, switched(spec)), batch(0, spec, member.device)

    def settings(entry: str, call) -> list[tuple]:
        with arguments_to(output_layer, entry) as found:
            call()
        return [(o.logits_budget, o.reduce_dtype, o.gradient_filter) for o, *_ in found]

    def of_statistics(entropy: bool) -> list[tuple]:
        given = data.tokens, data.positions, data.mask, data.labels
        return settings("fused_statistics", lambda: token_log_probs(model, *given, entropy=entropy))

    patch(12345, reduce_dtype=torch.float32, gradient_filter=0.25)
    patch()  # keeps what was chosen
    exact, filtered = (12345, torch.float32, None), (12345, torch.float32, 0.25)
    assert settings("fused_loss", lambda: losses_of(model, spec, data)) == [filtered]
    assert of_statistics(False) == [filtered] and of_statistics(True) == [exact]
    unpatch()
    assert of_statistics(False) == [(None, None, None)]


@on_ranks(1)
def test_unsupported_settings(member):
    spec = Model(ranks=member.ranks)
    switched(spec)
    with pytest.warns(RuntimeWarning, match="no effect with cross_entropy_loss_fusion=False"):
        build(member, spec, {"cross_entropy_fusion_impl": "parallel_lce"})
    tied = Model(ranks=member.ranks, tied=True)
    tied = build(member, tied, switched(tied))
    for weight, message in ((None, "no weight of its own and none"), (torch.zeros(95, HIDDEN), r"\[95, 32\]")):
        with pytest.raises(ValueError, match=rf"needs a weight \[96, 32\], got {message}"):
            tied.output_layer(torch.randn(16, 2, HIDDEN, device=member.device), weight=weight)
    for name in ("native", "te", "linear", "vocab_parallel", None):
        build(member, spec, {"cross_entropy_fusion_impl": name})


# --- the launcher -------------------------------------------------------------------------------------

# A script that knows nothing of this package, with Megatron's argument for the loss. Before it imports Megatron, it may
# choose which one that is, and set its environment.
SCRIPT = """
import argparse, beside, sys
assert "megatron.core" not in sys.modules
from megatron.core.models.gpt.gpt_model import GPTModel
print(hasattr(GPTModel.compute_language_model_loss, "__wrapped__"))
parser = argparse.ArgumentParser()
group = parser.add_argument_group("training")
group.add_argument("--cross-entropy-fusion-impl", default="native", choices=["native", "te"])
print(group.add_argument("--attention", choices=["flash"]).choices)
print(parser.parse_args().cross_entropy_fusion_impl)
group = argparse.ArgumentParser().add_argument_group("training")
print(group.add_argument("--cross_entropy_fusion_impl", choices=None).choices)
print(sys.argv, sys.modules["parallel_lce.megatron"].settings.current.logits_budget, sep="\\n")
"""


@pytest.fixture
def script(tmp_path) -> Path:
    (tmp_path / "beside.py").touch()  # imported as scripts import what lies beside them
    (tmp_path / "train.py").write_text(SCRIPT)
    return tmp_path / "train.py"


def _start(arguments: list[str]) -> None:
    """As ``python -m`` does, where nothing has imported Megatron yet."""
    forget("megatron", "parallel_lce")
    sys.path.insert(0, os.getcwd())
    sys.argv[1:] = arguments
    runpy.run_module("parallel_lce.megatron", run_name="__main__", alter_sys=True)


def test_an_unedited_script(script):
    options = ["--parallel-lce-logits-budget", "7", str(script), "--cross-entropy-fusion-impl", "parallel_lce"]
    rest = str(options[2:]), "7"
    assert launched(1, _start, options).splitlines()[-6:] == ["True", "['flash']", "parallel_lce", "None", *rest]


def test_options_may_stand_anywhere(script):
    ours = ["--parallel-lce-skip-masked=0", "--parallel-lce-logits-budget 7", "--parallel-lce-cross-entropy logits"]
    text = f"{ours[0]} {script} --lr -1 {ours[1]} -- -x {ours[2]} --help"
    found = dict(skip_masked=False, logits_budget=7, cross_entropy="logits")
    assert launcher._parse(text.split()) == (found, False, str(script), ["--lr", "-1", "--", "-x", "--help"])
    assert launcher._parse(["-m", "a.b", "-m", "c"]) == ({}, True, "a.b", ["-m", "c"])


@pytest.mark.parametrize(
    ("arguments", "code", "message"),
    [
        (["no_such.py"], 2, "no such script: no_such.py"),
        (["--lr", "1"], 2, "expected a script or -m MODULE, got '--lr 1'"),
        (["--parallel-lce-budget", "1", "a.py"], 2, "unrecognized arguments: --parallel-lce-budget"),
        (["a.py", "--parallel-lce-z-loss"], 2, "expected one argument"),
        ([], 0, "logits_budget of patch()"),  # help
    ],
)
def test_refuses_in_words(arguments, code, message, capsys):
    with pytest.raises(SystemExit) as refusal:
        launcher._parse(arguments)
    said = capsys.readouterr()
    assert refusal.value.code == code and message in (said.err if code else said.out)
