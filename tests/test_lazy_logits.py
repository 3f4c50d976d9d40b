"""Lazy logits: what they answer without logits, what makes real ones, and who is told."""

from __future__ import annotations

import warnings
from dataclasses import replace
from unittest import mock

import pytest
import torch

pytest.importorskip("megatron.core", reason="needs megatron-core")

import parallel_lce.megatron
from measures import largest_error
from megatron_models import BATCH, HIDDEN, SEQUENCE, VOCAB, Batch, Model, batch, build, losses_of
from megatron_training import output_layers, side_by_side, switched, train
from on_ranks import on_ranks
from parallel_lce.megatron import output_layer
from parallel_lce.megatron.lazy_logits import LazyLogits
from world import Member


@pytest.mark.parametrize("tied", [False, True])
@pytest.mark.parametrize(("ranks", "sequence_parallel"), [(1, False), (2, False), (2, True), (4, True)])
@pytest.mark.thinned
@on_ranks()
def test_logits_without_a_loss(member, tied, sequence_parallel):
    """Without labels, in evaluation, and of the layer alone, they are the stock ones, and nobody is told."""
    spec = Model(ranks=member.ranks, tied=tied, sequence_parallel=sequence_parallel)
    stock, ours, hidden, weight = output_layers(member, spec)
    data = batch(0, spec, member.device)
    given = data.tokens, data.positions, data.mask
    for model in (stock, ours):
        model.eval()
    with torch.no_grad(), warnings.catch_warnings():
        warnings.filterwarnings("error", message="parallel_lce")
        assert torch.equal(stock(*given), ours(*given))
        assert largest_error(*(m(*given, labels=data.labels) for m in (stock, ours))) <= 1e-5
        gathered = [m(*given, runtime_gather_output=True) for m in (stock, ours)]
        assert gathered[0].shape[-1] == VOCAB and torch.equal(*gathered)
    real, lazy = (model.output_layer(hidden, weight=weight)[0] for model in (stock, ours))
    assert isinstance(lazy, LazyLogits) and torch.equal(lazy[2], real[2]) and all(map(torch.equal, lazy, real))
    assert torch.equal((2 * lazy).float(), 2 * real) and torch.equal(1 - lazy / 2, 1 - real / 2)
    # Stock models built while the switch is installed stay stock.
    assert type(build(member, spec, {}).output_layer) is type(stock.output_layer)
    assert type(ours.output_layer).__name__ == type(stock.output_layer).__name__


def _never(*arguments, **options):
    raise AssertionError("the logits were made")


@pytest.mark.parametrize("sequence_parallel", [False, True])
@pytest.mark.parametrize("scale", [1.0, -0.25])
@on_ranks(2)
def test_known_without_logits(member, sequence_parallel, scale):
    """Sizes, and the largest logit of this rank's shard and its place, as Megatron's MTP acceptance asks."""
    spec = Model(ranks=member.ranks, sequence_parallel=sequence_parallel)
    stock, ours, hidden, _ = output_layers(member, spec)
    real = stock.output_layer(hidden)[0].detach() * scale
    lazy = ours.output_layer(hidden)[0] * scale
    lazy.stock_forward = _never
    assert lazy.shape == real.shape and lazy.size() == real.size() and lazy.size(-1) == real.size(-1)
    assert (lazy.dim(), lazy.ndim, len(lazy)) == (real.dim(), real.ndim, len(real))
    assert (lazy.dtype, lazy.device, lazy.is_cuda) == (real.dtype, real.device, real.is_cuda)
    assert lazy.requires_grad and lazy.is_floating_point() and lazy.numel() == real.numel()
    assert not hasattr(lazy, "no_attribute_of_tensors")
    assert repr(lazy) == f"LazyLogits({list(real.shape)}, {real.dtype}, {real.device})"
    values, places = real.max(dim=-1)
    with torch.no_grad():
        for found in (lazy.max(dim=-1), lazy.max(2), torch.max(lazy, -1)):
            assert largest_error(found.values, values) <= 1e-5 and torch.equal(found.indices, places)
            assert found.values.dtype == values.dtype and found.indices.dtype == places.dtype
    for found in (lazy.argmax(-1), torch.argmax(lazy, dim=-1)):
        assert torch.equal(found, places)
    for use in (lambda: lazy.max(dim=-1), lambda: lazy.max(), lambda: lazy.argmax(0), lambda: lazy + 1):
        with pytest.raises(AssertionError, match="the logits were made"):
            use()


@pytest.mark.parametrize("sequence_parallel", [False, True])
@on_ranks(2)
def test_scaled_logits(member, sequence_parallel):
    """Logits that the model scales before the loss, as MuP does from 0.17 on, are not made."""
    spec = Model(ranks=member.ranks, sequence_parallel=sequence_parallel)
    _, _, hidden, _ = output_layers(member, spec)

    def gradients(model, data, ours):
        leaf = hidden.clone().requires_grad_()
        logits = model.output_layer(leaf)[0]
        if ours:
            logits.stock_forward = _never
        losses = model.compute_language_model_loss(data.labels, 2.0 * (logits * 0.25))
        losses.square().mean().backward()
        return losses, leaf.grad, model.output_layer.weight.grad

    side_by_side(member, spec, gradients)


def _said(model, data: Batch, **options) -> list[str]:
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        # As Megatron-LM's programs do on all ranks but the first, which may have no output layer.
        warnings.filterwarnings("ignore", category=UserWarning)
        warnings.filterwarnings("ignore", category=FutureWarning)
        model(data.tokens, data.positions, data.mask, labels=data.labels, **options)
    ours = [w for w in caught if "parallel_lce" in str(w.message)]
    assert all(w.filename == __file__ for w in ours if "of the output layer's result" in str(w.message))
    return [str(w.message) for w in ours]


def _hooked(layer, use) -> None:
    layer.register_forward_hook(lambda module, inputs, outputs: (use(outputs[0]), None)[1])


def _with_a_bias(layer) -> None:
    layer.skip_bias_add, layer.bias = True, torch.nn.Parameter(torch.zeros_like(layer.weight[:, 0]))


# What makes real logits in training, by what is said of it.
REASONS = {
    "built before install()": lambda layer: None,
    "parallel_output=True": lambda layer: None,
    "fully sharded": lambda layer: setattr(layer.weight, "__fsdp_param__", True),
    "skip_bias_add=False": _with_a_bias,
    "disable_grad_reduce=False": lambda layer: setattr(layer, "disable_grad_reduce", True),
    "attribute 'float'": lambda layer: _hooked(layer, lambda z: (z.float(), z.sum())),
    "torch function 'softmax'": lambda layer: _hooked(layer, lambda z: torch.softmax(z, -1)),
    "backward hooks": lambda layer: layer.register_full_backward_hook(lambda *given: None),
}


@pytest.mark.parametrize("reason", REASONS)
@on_ranks(2)
def test_says_once_that_logits_are_made(member, reason):
    """Whatever makes real logits in training is named once, and the loss is stock's."""
    spec = Model(ranks=member.ranks)
    options = {"cross_entropy_loss_fusion": True, "cross_entropy_fusion_impl": "parallel_lce"}
    if not reason.startswith("built before"):
        switched(spec)
    ours, stock = build(member, spec, options), build(member, spec, {})
    switched(spec)
    data = batch(0, spec, member.device)
    REASONS[reason](ours.output_layer)
    options = {"runtime_gather_output": True} if reason == "parallel_output=True" else {}
    first, second = _said(ours, data, **options), _said(ours, data, **options)
    # One rank speaks for those that shard the vocabulary.
    assert len(first) == (member.rank == 0) and all(reason in text for text in first), first
    assert second == []
    ours.eval()
    assert _said(ours, data) == []
    assert largest_error(losses_of(ours.train(), spec, data), losses_of(stock, spec, data)) <= 1e-5


@pytest.mark.parametrize("family", ["gpt", "mamba"])
@on_ranks(2)
def test_says_nothing_of_logits_that_were_asked_for(member, family):
    """In training too: by a call without labels. Those with labels are still told of."""
    spec = Model(ranks=member.ranks, family=family)
    ours, data = build(member, spec, switched(spec)), batch(0, spec, member.device)
    _hooked(ours.output_layer, lambda z: z.float())
    unlabelled = replace(data, labels=None)
    assert _said(ours, unlabelled) == _said(ours, unlabelled, runtime_gather_output=True) == []
    assert len(_said(ours, data)) == (member.rank == 0)


def _speak(member: Member, spec: Model) -> int:
    with mock.patch.object(output_layer, "_reason", lambda *arguments: "of a test"):
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            warnings.filterwarnings("ignore", category=UserWarning)
            train(member, spec, switched(spec))
    return sum("of a test" in str(w.message) for w in caught)


@pytest.mark.parametrize(
    ("spec", "told"),
    [
        (Model(ranks=2), [1, 0]),
        (Model(ranks=2, data=2, ddp="fp32"), [1, 0]),
        (Model(ranks=2, context=2, ddp="fp32"), [1, 0]),
        (Model(ranks=2, pipeline=2), [0, 1]),
    ],
    ids=str,
)
def test_one_rank_speaks_for_all(spec, told, worlds):
    """The first of those that have the output layer, in all steps and microbatches once."""
    assert worlds(2).run(_speak, spec) == told


@on_ranks(1)
def test_one_rank_gathers_nothing(member):
    """Of its vocabulary there is nothing to gather."""
    spec = Model(ranks=1)
    ours, data = build(member, spec, switched(spec)), batch(0, spec, member.device)
    assert _said(ours, data, runtime_gather_output=True) == []
    assert isinstance(ours.output_layer(torch.randn(SEQUENCE, BATCH, HIDDEN).to(member.device))[0], LazyLogits)


@on_ranks(1)
def test_config_logger(member, tmp_path):
    """With config_logger_dir Megatron writes the logits of each forward to a file."""
    spec = Model(ranks=member.ranks)
    model, data = build(member, spec, switched(spec)), batch(0, spec, member.device)
    model.config.config_logger_dir = str(tmp_path)
    with pytest.warns(parallel_lce.megatron.LogitsWarning, match="pickling"):
        losses_of(model, spec, data).mean().backward()
    model.config.config_logger_dir = ""
    (path,) = tmp_path.rglob("*input_and_logits*.pth")
    written = torch.load(path, weights_only=True)["logits"]
    assert torch.equal(written.transpose(0, 1), model.eval()(data.tokens, data.positions, data.mask))


@pytest.mark.parametrize("sequence_parallel", [False, True])
@on_ranks(2)
def test_protocol_of_the_development_branch(member, sequence_parallel):
    """``output_layer(output_cross_entropy_loss=True, labels=[b, s])``."""
    spec = Model(ranks=member.ranks, sequence_parallel=sequence_parallel)
    stock, ours, hidden, _ = output_layers(member, spec)
    labels, layer = batch(0, spec, member.device).labels, ours.output_layer
    counts = labels != -100
    want = stock.compute_language_model_loss(labels, stock.output_layer(hidden)[0]).masked_fill(~counts, 0.0)
    ask = dict(input_=hidden, weight=None, runtime_gather_output=None, output_cross_entropy_loss=True, labels=labels)
    found = layer(**ask)
    assert found.shape == labels.shape and largest_error(found, want) <= 1e-5
    assert (layer(reduction="sum", **ask) - want.sum()).abs() <= 1e-5 * want.sum()
    assert (layer(reduction="mean", **ask) - want.sum() / counts.sum()).abs() <= 1e-5
    # With real logits, of a layer that gathers them and leaves its bias to others.
    layer.gather_output, layer.skip_bias_add = True, True
    layer.bias = torch.nn.Parameter(torch.full_like(layer.weight[:, 0], 0.5))
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="parallel_lce")
        assert largest_error(layer(**ask), want) <= 1e-5
