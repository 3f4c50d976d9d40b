"""The switch: training stock Megatron-core models with it equals training them without, also where the output weight
is fully sharded. patch(), fuse() and explain(), refusals, and ``python -m parallel_lce.megatron SCRIPT``."""

import inspect
import os
import runpy
import sys
from dataclasses import replace
from types import SimpleNamespace
from unittest import mock

import pytest
import torch
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import fully_shard

pytest.importorskip("megatron.core", reason="needs megatron-core")

import megatron.core
from megatron.core.models.common.language_module.language_module import LanguageModule

import megatron_models
from megatron_models import HIDDEN, Model, batch, build, losses_of, of_other_releases, path_of, specs
from megatron_training import compare, side_by_side, switched
from parallel_lce.megatron import __main__ as launcher
from parallel_lce.megatron import explain, fuse, loss, patch, token_log_probs, unpatch
from tools import on_ranks
from world import Member, forget, launched

SPECS = [*specs(1), *specs(2), *(pytest.param(spec, marks=pytest.mark.slow) for spec in specs(4))]


@pytest.mark.parametrize("spec", SPECS, ids=str)
@pytest.mark.thinned
def test_training_equals_stock(spec, worlds):
    worlds(spec.ranks).run(compare, spec)


def test_training_on_logits_equals_stock(worlds):
    spec = Model(ranks=2, sequence_parallel=True, ddp="fp32", tied=True, mtp=1)
    worlds(2).run(compare, spec, "logits")


def _compare_on(member: Member, release: str, spec: Model) -> None:
    # From 0.18 on it adds the commit of the repository that it lies in.
    assert megatron.core.__version__.partition("+")[0] == release
    compare(member, spec)


@pytest.mark.parametrize(("release", "spec"), of_other_releases([(s,) for s in specs(2, tp_of_pairs=1)]), ids=str)
def test_other_releases_train_as_stock(release, spec, worlds):
    worlds(spec.ranks, path_of(release)).run(_compare_on, release, spec)


# What is a unit of its own, and whether the loss is fused.
UNITS = {"model": True, "tied": True, "layer": False}


@pytest.mark.parametrize("unit", UNITS)
@on_ranks(2)
def test_fully_sharded_weights_are_fused_where_they_are_whole(member, unit):
    """The model's is whole until the loss, the layer's own within its call alone."""
    spec = Model(ranks=member.ranks, data=member.ranks, tied=unit == "tied")

    def results(model, data, ours):
        mesh = DeviceMesh.from_group(member.group, member.device.type)
        if unit == "layer":
            fully_shard(model.output_layer, mesh=mesh)
        fully_shard(model, mesh=mesh)
        found, parameters = [], [*model.parameters()]
        for _ in range(2):
            losses = losses_of(model, spec, data) * (data.labels >= 0)
            losses.mean().backward()
            found += [losses, *(p.grad.full_tensor() for p in parameters)]
        model.eval()
        with torch.no_grad():
            found.append(losses_of(model, spec, data) * (data.labels >= 0))
            found.append(model(data.tokens, data.positions, data.mask)[...])
        return found

    with mock.patch.object(loss, "run", wraps=loss.run) as fused:
        side_by_side(member, spec, results)
    assert bool(fused.call_count) == UNITS[unit]


@pytest.fixture(autouse=True)
def _unpatched():
    yield
    unpatch()


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (dict(reduce_dtype=torch.float16), "None or torch.float32"),
        (dict(cross_entropy="fused"), "must be one of .*, got 'fused'"),
        (dict(skip_masked="yes"), "must be True or False, got 'yes'"),
        (dict(skip_masked=True, cross_entropy="logits"), "=True needs cross_entropy='output_layer', got 'logits'"),
        (dict(gradient_filter=0.1, label_smoothing=0.1), "gradient_filter.*label_smoothing"),
    ],
)
def test_patch_refuses(options, message):
    with pytest.raises(ValueError, match=message):
        patch(**options)


@on_ranks(2)
def test_each_call_has_the_settings_patched_last(member):
    spec = Model(ranks=member.ranks)
    model, data = build(member, spec, switched(spec)), batch(0, spec, member.device)
    given = data.tokens, data.positions, data.mask, data.labels

    def settings(entry: str, call, *arguments, **options) -> tuple:
        with mock.patch.object(loss, entry, wraps=getattr(loss, entry)) as called:
            call(model, *arguments, **options)
        (found,) = called.call_args_list
        of_loss = found.args[0]
        return of_loss.logits_budget, of_loss.reduce_dtype, of_loss.gradient_filter

    exact, filtered = (12345, torch.float32, None), (12345, torch.float32, 0.25)
    patch(12345, reduce_dtype=torch.float32, gradient_filter=0.25)
    patch()  # keeps what was chosen
    assert settings("fused_loss", losses_of, spec, data) == filtered
    assert settings("fused_statistics", token_log_probs, *given) == filtered
    assert settings("fused_statistics", token_log_probs, *given, entropy=True) == exact
    patch(gradient_filter=None)  # the default
    assert settings("fused_loss", losses_of, spec, data) == exact
    patch(cross_entropy="logits")
    assert type(model.output_layer(torch.zeros(4, 1, HIDDEN, device=member.device))[0]) is torch.Tensor
    unpatch()
    assert settings("fused_statistics", token_log_probs, *given) == (None, None, None)
    fuse(model, logits_budget=7)
    unpatch()
    assert settings("fused_statistics", token_log_probs, *given) == (7, None, None)  # the model's own


@on_ranks(1)
def test_what_is_not_fused_is_said_once_at_construction(member):
    spec = Model()
    options = switched(spec)
    for name, others in (("cross_entropy_loss_fusion", "False"), ("cross_entropy_fusion_impl", "'native'")):
        with pytest.warns(RuntimeWarning, match=f"GPTModel is not fused: its configuration has .*{name}={others}"):
            model = build(member, spec, {other: value for other, value in options.items() if other != name})
        assert f"{name}={others}" in explain(model)[0]
    unpatch()
    with mock.patch.object(LanguageModule, "compute_language_model_loss", LanguageModule.forward):
        with pytest.warns(RuntimeWarning, match="loss was replaced before patch"):
            build(member, spec, switched(spec))
        unpatch()


@on_ranks(1)
def test_fuse_and_explain(member):
    """Of a model of any other loss. Its settings are its own."""
    no_layer = "this pipeline stage has no output layer"
    replaced = "its output layer was replaced since, or fused for another model; call fuse(model)"
    first, second, data = build(member, Model(), {}), build(member, Model(), {}), batch(0, Model(), member.device)
    assert "cross_entropy_fusion_impl='native', not True and 'parallel_lce'; call fuse(model)" in explain(first)[0]
    assert fuse([first, second], z_loss=0.1) == fuse(second, z_loss=0.3) * 2 == ["fused", "fused"]
    of_first, of_second = [losses_of(model, Model(), data) for model in (first, second)]
    assert (of_second > of_first + 0.1).all()
    unfused = build(member, Model(), {})
    layer, stock = first.output_layer, unfused.output_layer
    assert type(layer).__name__ == type(stock).__name__
    assert [*first.sharded_state_dict()] == [*unfused.sharded_state_dict()]
    assert [*inspect.signature(layer.forward).parameters] == [*inspect.signature(stock.forward).parameters]
    first.output_layer = second.output_layer  # with its settings
    assert explain([first, second]) == fuse([first, second]) == [replaced, "fused"]
    first.compute_language_model_loss = lambda labels, logits: logits  # a loss of its own asks for no setting
    with pytest.raises(RuntimeError, match="z_loss=0.1 needs a fused loss, .*: its output layer was replaced since"):
        losses_of(first, Model(), data)
    first.output_layer = stock
    unfused.config.defer_embedding_wgrad_compute = True
    assert "defer_embedding_wgrad_compute" in fuse(unfused, z_loss=0.1)[0] and fuse(unfused) == explain(unfused)
    with pytest.raises(RuntimeError, match="z_loss=0.1 needs a fused loss, .*: defer_embedding_wgrad_compute"):
        unfused.compute_language_model_loss(data.labels, None)
    unfused.config.defer_embedding_wgrad_compute = False
    unfused.config.cross_entropy_loss_fusion, unfused.config.cross_entropy_fusion_impl = True, "linear"
    assert "returns losses of Megatron's own" in fuse(unfused)[0]
    second.output_layer = None
    assert explain([first, second]) == [replaced, no_layer]
    assert fuse([first, second]) == ["fused", no_layer]
    assert fuse(first, cross_entropy="logits") == ["fused"] and "cross_entropy='logits'" in explain(first)[0]
    unpatch()
    assert explain(first) == ["unpatch() was called; call fuse(model)"]
    with pytest.raises(ValueError, match="zloss is no setting: take one of cross_entropy, "):
        fuse(first, zloss=1)


@on_ranks(1)
def test_a_model_that_was_built_before_patch_needs_fuse(member):
    chosen = dict(cross_entropy_loss_fusion=True, cross_entropy_fusion_impl="parallel_lce")
    model, data = build(member, Model(), chosen).eval(), batch(0, Model(), member.device)
    patch()
    assert explain(model) == ["it was built before patch(); call fuse(model)"]
    with pytest.raises(RuntimeError, match="was not fused when it was built: call fuse"):
        losses_of(model, Model(), data)
    assert fuse(model) == ["fused"]
    fused = losses_of(model, Model(), data)
    unpatch()
    model.train().output_layer.register_forward_hook(lambda layer, inputs, output: (output[0].add_(0), None))
    losses = losses_of(model, Model(), data)
    losses.mean().backward()
    torch.testing.assert_close(losses, fused)


@on_ranks(1)
def test_a_loss_that_is_chosen_in_the_constructor(member):
    """As on Megatron's main branch, which raises for other names."""
    own = LanguageModule.__init__

    def select_cross_entropy(self, config, pg_collection=None):
        own(self, config, pg_collection)
        if config.cross_entropy_fusion_impl not in ("native", "te"):
            raise ValueError(config.cross_entropy_fusion_impl)

    with mock.patch.object(LanguageModule, "__init__", select_cross_entropy):
        with pytest.raises(ValueError, match="parallel_lce"):
            build(member, Model(), {"cross_entropy_fusion_impl": "parallel_lce"})
        model = build(member, Model(), switched(Model()))
        assert explain(model) == ["fused"]
        assert type(model.config.cross_entropy_fusion_impl) is str  # else configurations cannot be written as YAML
        off = replace(model.config, cross_entropy_loss_fusion=False)
        with mock.patch.object(megatron_models, "TransformerConfig", lambda **_: off):
            assert "cross_entropy_loss_fusion=False" in explain(build(member, Model(), {}))[0]
        unpatch()


OPTION = "--cross-entropy-fusion-impl"
# A script that knows nothing of this package, with Megatron's argument for the loss.
SCRIPT = """
import argparse, beside, sys
from megatron.core.models.gpt.gpt_model import GPTModel
def typed(x: int): assert vars(sys.modules["__mp_main__"]) is globals() and __file__[0] == "/"
print(hasattr(GPTModel.compute_language_model_loss, "__wrapped__") and typed.__annotations__ == {"x": int})
typed(parser := argparse.ArgumentParser())
parser.add_argument("--cross-entropy-fusion-impl", default="native", choices=["native", "te"])
print(parser.parse_args().cross_entropy_fusion_impl)
from parallel_lce.megatron import settings, switch
print(sys.argv, settings.current.logits_budget, switch.fuses_native, sep="\\n")
"""


def _start(arguments: list[str]) -> None:
    """As ``python -m`` does, where nothing has imported Megatron yet."""
    forget("megatron", "parallel_lce")
    sys.path.insert(0, os.getcwd())
    sys.argv[1:] = arguments
    runpy.run_module("parallel_lce.megatron", run_name="__main__", alter_sys=True)


def test_an_unedited_script_is_fused_by_its_arguments(tmp_path):
    """It reads "native", and its models are fused, since its arguments chose this package."""
    (tmp_path / "beside.py").touch()  # imported as scripts import what lies beside them
    script = os.path.relpath(tmp_path / "train.py")
    (tmp_path / "train.py").write_text(SCRIPT)
    options = ["--parallel-lce-logits-budget", "7", script, OPTION, "parallel_lce"]
    seen = [script, OPTION, "native"]
    assert launched(1, _start, options).splitlines()[-5:] == ["True", "native", str(seen), "7", "True"]


def test_options_may_stand_anywhere():
    ours = ["--parallel-lce-skip-masked=0", "--parallel-lce-logits-budget 7", "--parallel-lce-cross-entropy logits"]
    text = f"{ours[0]} train.py --lr -1 {ours[1]} -x {ours[2]} --help"
    found = dict(skip_masked=False, logits_budget=7, cross_entropy="logits")
    assert launcher._parsed(text.split()) == (found, ["train.py", "--lr", "-1", "-x", "--help"], False)
    chosen = ["train.py", f"{OPTION}=parallel_lce"]
    assert launcher._parsed(chosen) == ({}, ["train.py", f"{OPTION}=native"], True)


def test_the_launcher_refuses_in_words(monkeypatch):
    started = SimpleNamespace(argv=[], path=["first"], flags=SimpleNamespace(safe_path=True), exit=sys.exit)
    monkeypatch.setattr(launcher, "sys", started)
    for arguments in ([], ["--help"], ["--lr", "1"]):
        with pytest.raises(SystemExit, match=r"SCRIPT.py(.|\n)*--parallel-lce-z-loss Z_LOSS"):
            launcher.main(arguments)
    for script, words in (("no.py", "no such script: no.py"), (__file__, "z_loss must be")):
        with pytest.raises(SystemExit, match=f"error: {words}"):
            launcher.main(["--parallel-lce-z-loss", "-1", script])
    assert started.path == ["first"]  # as with `python -P SCRIPT`
