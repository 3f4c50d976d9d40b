"""Lazy logits: what they answer without logits, what makes real ones, and who is told."""

from __future__ import annotations

import copy
import operator
import pickle
import warnings
from dataclasses import replace
from pathlib import Path

import numpy
import pytest
import torch

pytest.importorskip("megatron.core", reason="needs megatron-core")

import parallel_lce.megatron
from measures import assert_close, largest_error
from megatron_models import BATCH, HIDDEN, SEQUENCE, VOCAB, Batch, Model, batch, build, losses_of
from megatron_training import output_layers, switched
from parallel_lce.megatron.lazy_logits import LazyLogits
from world import Member


def _forward(model, data: Batch, labels: bool = True) -> torch.Tensor:
    return model(data.tokens, data.positions, data.mask, labels=data.labels if labels else None)


def _uses(member: Member, tied: bool, sequence_parallel: bool) -> None:
    """Without labels, in evaluation, indexed or scaled, lazy logits are the stock ones."""
    spec = Model(ranks=member.ranks, tied=tied, sequence_parallel=sequence_parallel)
    stock, ours, hidden, weight = output_layers(member, spec)
    data = batch(0, spec, member.device)
    for model in (stock, ours):
        model.eval()
    with torch.no_grad(), warnings.catch_warnings():
        warnings.filterwarnings("error", message="parallel_lce")
        assert torch.equal(_forward(stock, data, False), _forward(ours, data, False))
        assert largest_error(_forward(stock, data), _forward(ours, data)) <= 1e-5
        gathered = [m(data.tokens, data.positions, data.mask, runtime_gather_output=True) for m in (stock, ours)]
        assert gathered[0].shape[-1] == VOCAB and torch.equal(*gathered)
    real, _ = stock.output_layer(hidden, weight=weight)
    lazy, _ = ours.output_layer(hidden, weight=weight)
    assert torch.equal(lazy[2], real[2]) and all(map(torch.equal, lazy, real))
    assert torch.equal((2 * lazy).float(), 2 * real)
    assert torch.equal(torch.softmax(lazy, -1), torch.softmax(real, -1))
    assert torch.equal(1 - lazy / 2, 1 - real / 2) and torch.equal(-lazy, -real)
    assert torch.equal(lazy > 0, real > 0) and torch.equal(lazy == real, real == real)
    # Stock models built while the switch is installed stay stock.
    assert type(build(member, spec, {}).output_layer) is type(stock.output_layer)
    assert type(ours.output_layer).__name__ == type(stock.output_layer).__name__
    parallel_lce.megatron.uninstall()


@pytest.mark.parametrize("tied", [False, True])
@pytest.mark.parametrize(("ranks", "sequence_parallel"), [(1, False), (2, False), (2, True), (4, True)])
@pytest.mark.thinned
def test_other_uses_of_the_logits(ranks, sequence_parallel, tied, worlds):
    worlds(ranks).run(_uses, tied, sequence_parallel)


# Values of ``z`` after each, or an error.
USES = """
len(z); z.shape; z.stride(); z.is_contiguous(); z.is_leaf; z.layout; z.grad_fn is None; z.grad
bool(z)
not z
bool(z.isnan().any())
bool(torch.isfinite(z).all())
z in [z]
0.5 in z
z == None
z != z
z is None
~z
-z, +z, abs(z)
z + 1, 1 + z, z - 1, 1 - z, z / 2, 2 / z, z // 0.3, 2 // z, z % 0.3, 2 % z, z ** 2, 2 ** z
z @ z.mT, z.detach().numpy() @ z.mT.detach()
torch.ones(3, z.shape[1]) @ z
z & z
1 | z
z ^ z
z << 1
z >> 1
1 << z
divmod(z, 2)
divmod(2, z)
round(z)
float(z), int(z)
int(z.numel()), float(z[0, 0, 0]), complex(z[0, 0, 0])
operator.index(z)
[*reversed(z)]
[*z][1]
sum(z)
z[1], z[..., 2], z[z > 0], z[None], z[:, [0, 1]]
del z[0]
z.T.shape
z.no_such_thing
numpy.asarray(z)
(numpy.float64(2) * z)[...], z * numpy.float32(2) + 0
numpy.asarray(z.detach()), numpy.exp(z.detach()), numpy.float64(2) * z.detach()
copy.copy(z).requires_grad
copy.copy(z)
copy.deepcopy(z)
copy.deepcopy([z.detach()])[0]
pickle.loads(pickle.dumps(z)), pickle.loads(pickle.dumps(z)).requires_grad
f"{z.sum():.3f}", format(z[0, 0, 0], ".2f")
format(z, ".2f")
torch.stack([z, z]), torch.cat(tensors=(z, z), dim=0), torch.einsum("abc,abc->a", z, z)
torch.utils.checkpoint.checkpoint(torch.sum, z[...], use_reentrant=True)
y = z[...]; torch.autograd.grad((2 * z).square().sum(), z), torch.autograd.grad(y.square().sum(), z)
z.retain_grad(); z.square().sum().backward(); z.grad
z.requires_grad = False
z.retain_grad(); z.backward(torch.ones(z.shape)); z.grad
torch.empty(z.shape).copy_(z), torch.zeros(z.shape).add_(z), torch.zeros(z.shape).__iadd__(z)
torch.zeros_like(z), z.new_ones(2), torch.ops.aten.add(z, 1), torch.where(z > 0, z, 0.0)
torch.from_dlpack(z)
torch.from_dlpack(z.detach())
x = torch.zeros(z.shape); x[...] = z; x
torch.nn.utils.clip_grad_norm_([z], 1.0)
torch.max(z, z + 1), torch.max(z), torch.max(z, 0), z.max(-1, keepdim=True), torch.max(input=z, dim=-1), torch.argmax(z)
torch.max(z, -1, out=(torch.empty(0), torch.empty(0, dtype=torch.long)))
z.max(axis=-1), torch.max(z, axis=0)
hash(z) == hash(z)
""".strip().splitlines()


def _value(use: str, z) -> object:
    *statements, last = use.split("; ")
    names = {"z": z, "torch": torch, "operator": operator, "numpy": numpy, "copy": copy, "pickle": pickle}
    try:
        exec("; ".join(statements), names)
        return eval(last, names) if not last.startswith(("del ", "z.requires_grad =")) else exec(last, names)
    except Exception as error:
        return type(error)


def _same(a: object, b: object) -> bool:
    if isinstance(a, (tuple, list)) and not isinstance(a, torch.Size):
        return isinstance(b, type(a)) and len(a) == len(b) and all(map(_same, a, b))
    if isinstance(a, torch.Tensor):
        return isinstance(b, torch.Tensor) and a.dtype == b.dtype and torch.equal(a, b)
    if isinstance(a, numpy.ndarray):
        return numpy.array_equal(a, b)
    return a is b or a == b


def _behaves(member: Member) -> None:
    spec = Model(ranks=member.ranks)
    stock, ours, hidden, _ = output_layers(member, spec)
    wrong = []
    for grad_enabled in (True, False):
        for use in USES:
            with warnings.catch_warnings(), torch.set_grad_enabled(grad_enabled):
                warnings.simplefilter("ignore")
                truth, mine = (_value(use, m.output_layer(hidden)[0]) for m in (stock, ours))
            if not _same(truth, mine):
                wrong.append((use, truth, mine))
    assert not wrong, wrong
    parallel_lce.megatron.uninstall()


def test_every_use_is_a_tensors(worlds, device):
    """Operators, conversions, attributes and errors are those of the stock logits."""
    if device == "cuda":
        pytest.skip("for CPU tensors alone: some of these uses are NumPy's")
    worlds(1).run(_behaves)


def _known_without_logits(member: Member, sequence_parallel: bool, scale: float) -> None:
    """Sizes, and the largest logit of this rank's shard and its place, as Megatron's MTP acceptance asks."""
    spec = Model(ranks=member.ranks, sequence_parallel=sequence_parallel)
    stock, ours, hidden, _ = output_layers(member, spec)
    real = stock.output_layer(hidden)[0].detach() * scale

    def refuse(*arguments, **options):
        raise AssertionError("the logits were made")

    lazy = ours.output_layer(hidden)[0] * scale
    lazy.stock_forward = refuse
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
    parallel_lce.megatron.uninstall()


@pytest.mark.parametrize("sequence_parallel", [False, True])
@pytest.mark.parametrize("scale", [1.0, -0.25])
def test_known_without_logits(sequence_parallel, scale, worlds):
    worlds(2).run(_known_without_logits, sequence_parallel, scale)


def _scaled(member: Member, sequence_parallel: bool) -> None:
    """Logits that the model scales before the loss, as MuP does from 0.17 on: loss and gradients."""
    spec = Model(ranks=member.ranks, sequence_parallel=sequence_parallel)
    stock, ours, hidden, _ = output_layers(member, spec)
    labels = batch(0, spec, member.device).labels
    found = []
    for model in (stock, ours):
        leaf = hidden.clone().requires_grad_()
        losses = model.compute_language_model_loss(labels, 2.0 * (model.output_layer(leaf)[0] * 0.25))
        losses.square().mean().backward()
        found.append((losses.detach(), leaf.grad, model.output_layer.weight.grad))
    parallel_lce.megatron.uninstall()
    for truth, mine in zip(*found):
        assert_close(mine, truth, 1e-5)


@pytest.mark.parametrize("sequence_parallel", [False, True])
def test_scaled_logits(sequence_parallel, worlds):
    worlds(2).run(_scaled, sequence_parallel)


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


def _says_once(member: Member, reason: str, message: str) -> None:
    """Whatever makes real logits in training is named once, and the loss is stock's."""
    spec = Model(ranks=member.ranks)
    stock = build(member, spec, {})
    if reason == "late":
        ours = build(member, spec, {"cross_entropy_loss_fusion": True, "cross_entropy_fusion_impl": "parallel_lce"})
        switched(spec)
    else:
        ours = build(member, spec, switched(spec))
    data, layer = batch(0, spec, member.device), ours.output_layer
    if reason == "sharded":
        layer.weight.__fsdp_param__ = True
    if reason == "bias":
        layer.skip_bias_add, layer.bias = True, torch.nn.Parameter(torch.zeros_like(layer.weight[:, 0]))
    if reason == "unreduced":
        layer.disable_grad_reduce = True
    if reason == "use":
        layer.register_forward_hook(lambda module, inputs, outputs: (outputs[0].float(), outputs[0].sum(), None)[2])
    if reason == "function":
        layer.register_forward_hook(lambda module, inputs, outputs: (torch.softmax(outputs[0], -1), None)[1])
    if reason == "hooked":
        layer.register_full_backward_hook(lambda module, of_inputs, of_outputs: None)
    options = {"runtime_gather_output": True} if reason == "gathered" else {}
    first, second = _said(ours, data, **options), _said(ours, data, **options)
    # One rank speaks for those that shard the vocabulary.
    assert len(first) == (member.rank == 0) and all(message in text for text in first), first
    assert second == []
    ours.eval()
    assert _said(ours, data) == []
    want = losses_of(stock, spec, data)
    assert largest_error(losses_of(ours.train(), spec, data), want) <= 1e-5
    parallel_lce.megatron.uninstall()


@pytest.mark.parametrize(
    ("reason", "message"),
    [
        ("late", "built before install()"),
        ("sharded", "fully sharded"),
        ("bias", "skip_bias_add=False"),
        ("unreduced", "disable_grad_reduce=False"),
        ("gathered", "parallel_output=True"),
        ("use", "attribute 'float'"),
        ("function", "torch function 'softmax'"),
        ("hooked", "backward hooks"),
    ],
)
def test_says_once_that_logits_are_made(reason, message, worlds):
    worlds(2).run(_says_once, reason, message)


def _says_nothing(member: Member, family: str) -> None:
    """Of logits that were asked for, in training too: by a call without labels. Those with labels are still told of."""
    spec = Model(ranks=member.ranks, family=family)
    ours = build(member, spec, switched(spec))
    data = batch(0, spec, member.device)
    ours.output_layer.register_forward_hook(lambda module, inputs, outputs: (outputs[0].float(), None)[1])
    unlabelled = replace(data, labels=None)
    assert _said(ours, unlabelled) == _said(ours, unlabelled, runtime_gather_output=True) == []
    assert len(_said(ours, data)) == (member.rank == 0)
    parallel_lce.megatron.uninstall()


@pytest.mark.parametrize("family", ["gpt", "mamba"])
def test_says_nothing_of_logits_that_were_asked_for(family, worlds):
    worlds(2).run(_says_nothing, family)


def _speak(member: Member, spec: Model) -> int:
    from megatron_training import train
    from parallel_lce.megatron import output_layer

    reason, output_layer._reason = output_layer._reason, lambda *arguments: "of a test"
    try:
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            warnings.filterwarnings("ignore", category=UserWarning)
            train(member, spec, switched(spec))
    finally:
        output_layer._reason = reason
        parallel_lce.megatron.uninstall()
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


def _gathers_nothing(member: Member) -> None:
    """Of one rank's vocabulary there is nothing to gather."""
    spec = Model(ranks=1)
    ours, data = build(member, spec, switched(spec)), batch(0, spec, member.device)
    assert _said(ours, data, runtime_gather_output=True) == []
    assert isinstance(ours.output_layer(torch.randn(SEQUENCE, BATCH, HIDDEN).to(member.device))[0], LazyLogits)
    parallel_lce.megatron.uninstall()


def test_one_rank_gathers_nothing(worlds):
    worlds(1).run(_gathers_nothing)


def _logged(member: Member, folder: str) -> None:
    """With config_logger_dir Megatron writes the logits of each forward to a file."""
    spec = Model(ranks=member.ranks)
    model, data = build(member, spec, switched(spec)), batch(0, spec, member.device)
    model.config.config_logger_dir = folder
    with pytest.warns(parallel_lce.megatron.LogitsWarning, match="pickling"):
        losses_of(model, spec, data).mean().backward()
    model.config.config_logger_dir = ""
    (path,) = Path(folder).rglob("*input_and_logits*.pth")
    written = torch.load(path, weights_only=True)["logits"]
    assert torch.equal(written.transpose(0, 1), _forward(model.eval(), data, False))
    parallel_lce.megatron.uninstall()


def test_config_logger(worlds, tmp_path):
    worlds(1).run(_logged, str(tmp_path))


def _protocol(member: Member, sequence_parallel: bool) -> None:
    """``output_layer(output_cross_entropy_loss=True, labels=[b, s])`` of Megatron's development branch."""
    spec = Model(ranks=member.ranks, sequence_parallel=sequence_parallel)
    stock, ours, hidden, _ = output_layers(member, spec)
    labels = batch(0, spec, member.device).labels
    counts = labels != -100
    want = stock.compute_language_model_loss(labels, stock.output_layer(hidden)[0]).masked_fill(~counts, 0.0)
    ask = dict(input_=hidden, weight=None, runtime_gather_output=None, output_cross_entropy_loss=True)
    found = ours.output_layer(labels=labels, **ask)
    assert found.shape == labels.shape and largest_error(found, want) <= 1e-5
    total = ours.output_layer(labels=labels, reduction="sum", **ask)
    mean = ours.output_layer(labels=labels, reduction="mean", **ask)
    assert (total - want.sum()).abs() <= 1e-5 * want.sum()
    assert (mean - want.sum() / counts.sum()).abs() <= 1e-5
    # With real logits, of a layer that gathers them and leaves its bias to others.
    layer = ours.output_layer
    layer.gather_output, layer.skip_bias_add = True, True
    layer.bias = torch.nn.Parameter(torch.full_like(layer.weight[:, 0], 0.5))
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="parallel_lce")
        again = layer(labels=labels, **ask)
    assert largest_error(again, want) <= 1e-5
    parallel_lce.megatron.uninstall()


@pytest.mark.parametrize("sequence_parallel", [False, True])
def test_protocol_of_the_development_branch(sequence_parallel, worlds):
    worlds(2).run(_protocol, sequence_parallel)
