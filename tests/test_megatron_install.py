"""install() and uninstall(), and what the switch refuses."""

from __future__ import annotations

import sys
import traceback
from pathlib import Path

import pytest
import torch

pytest.importorskip("megatron.core", reason="needs megatron-core")

import parallel_lce.megatron
from megatron_models import BATCH, HIDDEN, SEQUENCE, Model, batch, build, losses_of
from megatron_releases import OTHERS, path_of
from megatron_training import switched
from on_ranks import on_ranks
from parallel_lce.megatron import choices
from tools import arguments_to, recorded
from world import Member

ASKED_FOR = {"cross_entropy_loss_fusion": True, "cross_entropy_fusion_impl": "parallel_lce"}


@pytest.fixture(autouse=True)
def _uninstalled():
    yield
    parallel_lce.megatron.uninstall()


def _methods() -> tuple:
    from megatron.core import tensor_parallel
    from megatron.core.models.common.language_module.language_module import LanguageModule
    from megatron.core.tensor_parallel import cross_entropy

    return (
        LanguageModule.compute_language_model_loss,
        LanguageModule.setup_embeddings_and_output_layer,
        tensor_parallel.vocab_parallel_cross_entropy,
        cross_entropy.vocab_parallel_cross_entropy,
    )


def test_install_is_idempotent_and_undone():
    before = _methods()
    parallel_lce.megatron.install()
    once = _methods()
    assert once[0] is not before[0] and once[2:] == before[2:]
    parallel_lce.megatron.install(logits_budget=5, reduce_dtype=torch.float32)
    assert _methods() == once
    parallel_lce.megatron.install(cross_entropy="logits")
    assert _methods()[2] is _methods()[3] is parallel_lce.vocab_parallel_cross_entropy
    parallel_lce.megatron.install()  # keeps what was chosen
    assert _methods()[2] is parallel_lce.vocab_parallel_cross_entropy
    assert choices.installed.logits_budget == 5
    assert choices.installed.reduce_dtype == torch.float32
    parallel_lce.megatron.install(cross_entropy="output_layer")
    assert _methods() == once
    parallel_lce.megatron.uninstall()
    parallel_lce.megatron.uninstall()
    assert _methods() == before


def test_others_may_wrap_it_too():
    """What somebody put around the switch is not taken away with it."""
    from megatron.core.models.common.language_module.language_module import LanguageModule

    before = _methods()
    parallel_lce.megatron.install()
    ours = LanguageModule.compute_language_model_loss
    around = lambda self, labels, logits: ours(self, labels, logits)  # noqa: E731
    LanguageModule.compute_language_model_loss = around
    try:
        parallel_lce.megatron.install(cross_entropy="logits")
        assert LanguageModule.compute_language_model_loss is around
        with pytest.warns(RuntimeWarning, match="compute_language_model_loss has been replaced"):
            parallel_lce.megatron.uninstall()
        assert LanguageModule.compute_language_model_loss is around
    finally:
        LanguageModule.compute_language_model_loss = before[0]
    assert _methods() == before


@pytest.mark.parametrize(
    ("options", "environment", "message"),
    [
        *((dict(logits_budget=budget), {}, "logits_budget") for budget in (-1, 1.5, "1GiB", True)),
        *((dict(reduce_dtype=dtype), {}, "None or torch.float32") for dtype in (torch.float16, "float32")),
        (
            dict(gradient_filter=0.5, cross_entropy="logits"),
            {},
            "gradient_filter=0.5 needs cross_entropy='output_layer'",
        ),
        ({}, {"PARALLEL_LCE_LOGITS_BUDGET": "1GiB"}, "1GiB"),
        ({}, {"PARALLEL_LCE_CROSS_ENTROPY": "fused"}, "fused"),
    ],
)
def test_install_refuses(options, environment, message, monkeypatch):
    for name, value in environment.items():
        monkeypatch.setenv(name, value)
    with pytest.raises(ValueError, match=message):
        parallel_lce.megatron.install(**options)


@on_ranks(2)
def test_hidden_gradients_are_summed_in_the_dtype_asked_for(member):
    spec = Model(ranks=member.ranks)
    for dtype in (None, torch.float32):
        model = build(member, spec, switched(spec)).bfloat16()
        parallel_lce.megatron.install(reduce_dtype=dtype)
        losses = losses_of(model, spec, batch(0, spec, member.device))
        with recorded(None) as events:
            losses.sum().backward()
        sums = [e[2] for e in events if e[0] == "all_reduce" and e[1] == BATCH * SEQUENCE * HIDDEN]
        assert sums.count("float32") == (dtype is not None)


@on_ranks(1)
def test_a_filter_may_begin_later(member):
    """Of a loss before, and of one after a second install."""
    spec = Model()
    model = build(member, spec, switched(spec))
    with arguments_to(sys.modules["parallel_lce.megatron.output_layer"], "fused_loss") as given:
        losses_of(model, spec, batch(0, spec, member.device))
        parallel_lce.megatron.install(gradient_filter=2**-13)
        losses_of(model, spec, batch(0, spec, member.device))
    assert [options.gradient_filter for options, *_ in given] == [None, 2**-13]


@on_ranks(1)
def test_unsupported_settings(member):
    from megatron.core.tensor_parallel import ColumnParallelLinear

    spec = Model(ranks=member.ranks)
    model = build(member, spec, switched(spec))
    model.config.defer_embedding_wgrad_compute = True
    with pytest.raises(ValueError, match="defer_embedding_wgrad_compute=True.*set it to False"):
        model.setup_embeddings_and_output_layer()
    model.config.defer_embedding_wgrad_compute = False

    class Quantized(ColumnParallelLinear):
        def forward(self, input_, weight=None, runtime_gather_output=None):
            return super().forward(input_, weight, runtime_gather_output)

    model.output_layer.__class__ = Quantized
    with pytest.raises(ValueError, match="does not know the forward of the output layer Quantized"):
        model.setup_embeddings_and_output_layer()
    with pytest.warns(RuntimeWarning, match="no effect with cross_entropy_loss_fusion=False"):
        build(member, spec, {"cross_entropy_fusion_impl": "parallel_lce"})
    tied = build(member, Model(ranks=member.ranks, tied=True), ASKED_FOR)
    for weight, message in ((None, "no weight of its own and none"), (torch.zeros(95, HIDDEN), r"\[95, 32\]")):
        with pytest.raises(ValueError, match=rf"needs a weight \[96, 32\], got {message}"):
            tied.output_layer(torch.randn(SEQUENCE, BATCH, HIDDEN, device=member.device), weight=weight)


@pytest.mark.parametrize("fused", [False, True])
@on_ranks(1)
def test_misspelt_names_of_the_loss_are_refused(member, fused):
    spec = Model(ranks=member.ranks)
    switched(spec)
    for name in ("paralel_lce", "parallel-lce", "Parallel_LCE", "parallel lce", "parallel_lce "):
        with pytest.raises(ValueError, match=f"cross_entropy_fusion_impl='{name}': did you mean 'parallel_lce'"):
            build(member, spec, {"cross_entropy_loss_fusion": fused, "cross_entropy_fusion_impl": name})
    for name in ("native", "te", "linear", "vocab_parallel", None):
        build(member, spec, {"cross_entropy_loss_fusion": fused, "cross_entropy_fusion_impl": name})


def _forgotten(member: Member, family: str) -> str:
    """The last line of what a model that asks for this loss ends with."""
    spec = Model(ranks=member.ranks, family=family)
    try:
        losses_of(build(member, spec, ASKED_FOR), spec, batch(0, spec, member.device))
    except Exception as error:
        return "".join(traceback.format_exception_only(error)).strip()
    return "no error"


@pytest.mark.parametrize(
    ("family", "release"),
    [
        *((family, None) for family in ("gpt", "mamba", "bert", "t5")),
        *(pytest.param("gpt", release, marks=pytest.mark.slow) for release in OTHERS),
    ],
)
def test_a_forgotten_install_ends_as_documented(family, release, worlds):
    (line,) = worlds(1, release and path_of(release)).run(_forgotten, family)
    document = (Path(__file__).parent.parent / "docs" / "megatron.md").read_text()
    assert line.startswith("UnboundLocalError: ") and line in document.splitlines()
