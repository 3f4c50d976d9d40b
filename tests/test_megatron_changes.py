"""What is done to lazy logits, or to what they are made of, counts as it does in stock."""

from __future__ import annotations

import ast
import copy
import operator
import pickle
import re
import warnings
from contextlib import nullcontext

import numpy
import pytest
import torch

pytest.importorskip("megatron.core", reason="needs megatron-core")

from measures import error, relative_error, size
from megatron_models import Model, batch, losses_of
from megatron_training import output_layers, side_by_side
from on_ranks import on_ranks
from parallel_lce.megatron.lazy_logits import LazyLogits
from tools import words_of_error

# What a program may do with the logits ``z`` before it gives them, or its ``out``, to the loss; an
# ``extra`` is added to it. ``ramp`` is a row of the vocabulary.
CHANGES = """
z[..., 20:].fill_(-1e4)
z[0][:, 5:].mul_(-4)
z.view(-1, z.shape[-1])[:, 20:].fill_(-1e4)
z.mT[..., 20:, :].zero_()
z.data.div_(2)
z.detach()[..., 20:] = -3.0
z.to(torch.float32).mul_(ramp)
z.contiguous().mul_(ramp)
z.data = 2 * z.data
z.unsqueeze_(0); z.mul_(ramp); z.squeeze_(0)
z.requires_grad_().mul_(ramp)
with torch.inference_mode(): z.add_(ramp)
with torch.no_grad(): [row.mul_(2) for row in z]
with torch.no_grad(): copy.copy(z).mul_(2)
torch.from_dlpack(z.detach()).mul_(2)
F.relu(z, inplace=True)
F.threshold(input=z, threshold=0.0, value=-5.0, inplace=True)
torch.relu_(z)
torch._foreach_addcmul_([z], (ramp,), [z])
with torch.no_grad(): torch.add(input=z, other=ramp, out=z)
torch.sort(2 * z.detach(), -1, out=(z.data, torch.empty(z.shape, dtype=torch.long, device=z.device)))
with torch.no_grad(): torch.max(z.expand(2, *z.shape), 0, out=(z, torch.empty(z.shape, dtype=torch.long, device=z.device)))
z.detach().numpy()[...] *= 2
numpy.asarray(z.detach())[...] *= 2
z += ramp
y = z; y += ramp; y.neg_(); out = y
z *= ramp
z %= 0.3
with torch.no_grad(): z //= 0.3
z @= torch.eye(z.shape[-1], device=z.device, dtype=z.dtype).roll(1, 0)
z[..., 20:] = -5.0
z[z > 0] = 0
z.__imul__(ramp)
y = 2 * z; z.mul_(ramp); out = y
y = 2 * z; y.mul_(ramp)
y = 2 * z; y.mul_(ramp); out = y
y = z * 0.5; y *= ramp; z.neg_(); out = y
z.mul_(ramp); out = 2 * z
y = z.clone(); z.mul_(ramp); out = y
out = z.transpose(0, 1).mul_(ramp).transpose(0, 1)
hook = z.register_hook(lambda gradient: 2 * gradient)
extra = z.float().logsumexp(-1).square().mean()
extra = (2 * z).float().logsumexp(-1).square().mean()
z.float().mean(); z.sum(); z[0]; z.max(); 2 + z; torch.softmax(z, -1); z.tolist(); list(z); repr(z); len(z); z.argmax(-1)
with torch.no_grad(): z.float().mean(); z.max(-1); z.mul(2)
with torch.no_grad(): out = 2 * z
""".strip().splitlines()


# Other uses, of which the values or errors are compared, too.
USES = """
len(z); z.shape; z.stride(); z.is_contiguous(); z.is_leaf; z.layout; z.grad_fn is None; z.grad
bool(z)
bool(z.isnan().any())
z in [z]
z == None
z is None
~z
-z, +z, abs(z)
z + 1, 1 + z, z - 1, 1 - z, z / 2, 2 / z, z // 0.3, 2 // z, z % 0.3, 2 % z, z ** 2, 2 ** z
z @ z.mT, z.detach().numpy() @ z.mT.detach()
torch.ones(3, z.shape[1]) @ z
1 | z
divmod(2, z)
round(z)
float(z), int(z)
operator.index(z)
[*reversed(z)]
z[1], z[..., 2], z[z > 0], z[None], z[:, [0, 1]]
del z[0]
z.T.shape
z.no_such_thing
numpy.asarray(z)
(numpy.float64(2) * z)[...], z * numpy.float32(2) + 0
numpy.asarray(z.detach()), numpy.exp(z.detach()), numpy.float64(2) * z.detach()
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
torch.empty(z.shape).copy_(z), torch.zeros(z.shape).add_(z), torch.zeros(z.shape).__iadd__(z)
torch.zeros_like(z), z.new_ones(2), torch.ops.aten.add(z, 1), torch.where(z > 0, z, 0.0)
torch.from_dlpack(z.detach())
x = torch.zeros(z.shape); x[...] = z; x
torch.nn.utils.clip_grad_norm_([z], 1.0)
torch.max(z, z + 1), torch.max(z), torch.max(z, 0), z.max(-1, keepdim=True), torch.max(input=z, dim=-1), torch.argmax(z)
z.max(axis=-1), torch.max(z, axis=0)
hash(z) == hash(z)
z.unsqueeze_(0); v = z.max(-1), z.argmax(-1), torch.max(z, -1), torch.argmax(z, dim=-1); z.squeeze_(0); v
z.transpose_(0, 1); z.max(-1), z.argmax(-1)
z.detach_()
z.data = z.data.double(); z.max(-1)
z.data = z.data[1:]; z.argmax(-1)
z.detach_().resize_(3, 2, 5)
with torch.no_grad(): z[..., 7] = 9.0
""".strip().splitlines()


def _value(use: str, names: dict) -> object:
    """Of the last expression, None where there is none; or the kind of error."""
    tree = ast.parse(use)
    last = tree.body.pop() if isinstance(tree.body[-1], ast.Expr) else ast.Expr(ast.Constant(None))
    try:
        exec(compile(tree, use, "exec"), names)
        return eval(compile(ast.fix_missing_locations(ast.Expression(last.value)), use, "eval"), names)
    except Exception as error:
        return type(error)


def _sizes(z) -> tuple:
    sizes = (z.shape, z.size(), z.size(-1), z.dim(), z.ndim, len(z), z.numel())
    return *sizes, z.dtype, z.device, z.is_cuda, z.requires_grad, z.is_floating_point()


def _after(model, use: str, hidden: torch.Tensor, weight, labels: torch.Tensor) -> tuple[object, list | None]:
    """The value of the use with the sizes of the logits afterwards; and the losses with the gradients of hidden states
    and output weight, or None if the loss or its backward fails."""
    model.zero_grad()
    leaf = hidden.clone().requires_grad_()
    z, runs = model.output_layer(leaf, weight=weight)[0], []
    if lazy := isinstance(z, LazyLogits):
        stock_forward = z.stock_forward
        z.stock_forward = lambda *a, **k: (runs.append(a), stock_forward(*a, **k))[1]
    ramp = torch.linspace(0.5, 2.0, z.shape[-1], device=z.device, dtype=z.dtype)
    modules = dict(torch=torch, F=torch.nn.functional, copy=copy, numpy=numpy, operator=operator, pickle=pickle)
    names = {"z": z, "ramp": ramp} | modules
    value = _value(use, names), _sizes(z) if z.dim() else None
    try:
        logits = names.get("out", z)
        # Stock's loss overwrites fp32 logits, which other uses may have saved.
        losses = model.compute_language_model_loss(labels, logits if lazy else logits.clone())
        (losses.square().mean() + names.get("extra", 0.0)).backward()
    except (AssertionError, IndexError, RuntimeError, TypeError, ValueError):
        return value, None
    # Products are lazy logits of their own.
    assert len(runs) <= 1 or re.search(r"\* z|z \* |y = ", use), (use, "projected again")
    used = model.output_layer.weight if weight is None else weight
    return value, [losses.detach(), leaf.grad, used.grad.clone()]


def _same(a: object, b: object) -> bool:
    b = b[...] if isinstance(b, LazyLogits) else b
    if isinstance(a, (tuple, list)) and not isinstance(a, torch.Size):
        return isinstance(b, type(a)) and len(a) == len(b) and all(map(_same, a, b))
    if isinstance(a, torch.Tensor):
        return isinstance(b, torch.Tensor) and a.dtype == b.dtype and torch.equal(a, b)
    if isinstance(a, numpy.ndarray):
        return numpy.array_equal(a, b)
    return a is b or a == b


@pytest.mark.parametrize(
    ("ranks", "sequence_parallel", "tied", "dtype"),
    [
        (1, False, False, torch.float32),
        (1, False, True, torch.bfloat16),
        (2, False, True, torch.float32),
        (2, True, False, torch.bfloat16),
        (2, True, True, torch.float32),
    ],
)
@pytest.mark.thinned
@on_ranks()
def test_every_use_is_as_in_stock(member, tied, sequence_parallel, dtype):
    spec = Model(ranks=member.ranks, tied=tied, sequence_parallel=sequence_parallel)
    stock, ours, hidden, _ = output_layers(member, spec)
    labels = batch(0, spec, member.device).labels
    models, kept, wrong = (stock.to(dtype), ours.to(dtype)), {}, []
    weights = [m.shared_embedding_or_output_weight() if tied else None for m in models]
    with torch.no_grad():  # logits large enough that each change shows
        for model, weight in zip(models, weights):
            (model.output_layer.weight if weight is None else weight).mul_(20)
    tolerance = 1e-5 if dtype == torch.float32 else 2e-2
    for enabled in (False, True):
        for use in ("pass", *CHANGES, *USES):
            with warnings.catch_warnings(), torch.set_grad_enabled(enabled):
                warnings.simplefilter("ignore")
                pairs = [_after(m, use, hidden.to(dtype), w, labels) for m, w in zip(models, weights)]
                (value, truth), (other, mine) = pairs
                if not _same(value, other):
                    wrong.append((use, enabled, *(str(v)[:100] for v in (value, other))))
            if (truth is None) != (mine is None):
                wrong.append((use, enabled, "fails" if truth is None else "does not fail"))
            elif truth is not None:
                kept[use] = truth
                for name, a, b in zip(("losses", "hidden", "weight"), truth, mine):
                    if not error(b, a) <= tolerance * size(a):
                        wrong.append((use, name, relative_error(b, a)))
    assert not wrong, wrong
    # Each of these is seen by the loss or by its gradients.
    read = ("y = 2 * z; y.mul_(ramp)", "z.float().mean()", "y = z.clone()", "with torch.", "z @= ")
    copies = () if dtype == torch.float32 else ("z.to(",)
    if copies or member.device.type == "cuda":
        copies += "z.detach().numpy()", "numpy."
    for change in CHANGES:
        if change in kept and not change.startswith(read + copies):
            assert max(relative_error(b, a) for a, b in zip(kept["pass"], kept[change])) > 0.1, change
    assert {c for c in CHANGES if c not in kept} == {c for c in CHANGES if c.startswith("with torch.no_grad(): out = ")}


@on_ranks(2)
def test_modes_are_those_of_the_layers_call(member):
    """No gradient from the start, or from the multiplication on; and autocast."""
    _, _, hidden, _ = output_layers(member, Model(ranks=member.ranks))
    autocast = lambda: torch.autocast(member.device.type, torch.bfloat16)  # noqa: E731
    modes = ((torch.no_grad, nullcontext), (nullcontext, torch.no_grad), (torch.inference_mode, nullcontext))

    def modes_of(model, data, ours):
        loss_of = model.compute_language_model_loss
        for before, after in modes:
            with before():
                z = model.output_layer(hidden)[0]
            with after():
                z = z * 0.5
            losses = loss_of(data.labels, z)
            assert not (z.requires_grad or losses.requires_grad or z.float().requires_grad)
        with autocast():
            z, again, third = (model.output_layer(hidden)[0] for _ in range(3))
            losses = loss_of(data.labels, again)
        assert torch.equal(loss_of(data.labels, z), losses)
        assert third.dtype == third.clone().dtype == torch.bfloat16
        return [third.float()]

    truth, mine = side_by_side(member, Model(ranks=member.ranks), modes_of)
    assert torch.equal(truth[0], mine[0])


@pytest.mark.parametrize("sequence_parallel", [False, True])
@on_ranks(2)
def test_changed_hidden_states_and_weights_are_refused(member, sequence_parallel):
    """What stock's logits were made of may not change between the layer and its loss; stock's backward refuses it."""
    spec = Model(ranks=member.ranks, sequence_parallel=sequence_parallel)
    stock, ours, hidden, _ = output_layers(member, spec)
    labels = batch(0, spec, member.device).labels
    loss_of = ours.compute_language_model_loss
    for model in (stock, ours):
        model.output_layer.bias = torch.nn.Parameter(torch.zeros_like(model.output_layer.weight[:, 0]))

    def changed(model, name: str, use):
        """What becomes of ``use(z)`` if the operand changes after the layer's call, and before ``use`` or after it."""
        input_ = hidden.clone().requires_grad_() * 1.0
        z = model.output_layer(input_)[0]
        part = input_ if name == "hidden states" else getattr(model.output_layer, name)
        change = torch.no_grad()(lambda: part.view(-1)[:1].add_(1.0))
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            return words_of_error(lambda: use(z, change))

    refusal = "modified by an inplace operation"
    for name in ("hidden states", "weight"):  # a sum's gradient does not need the bias
        assert refusal in changed(stock, name, lambda z, change: (change(), z.sum().backward())), name
        assert refusal in changed(ours, name, lambda z, change: (loss_of(labels, z).sum(), change())[0].backward()), (
            name
        )
    for name in ("hidden states", "weight", "bias"):
        for use in (
            lambda z, change: (change(), loss_of(labels, z)),
            lambda z, change: (change(), z.float()),
            lambda z, change: (change(), z.argmax(-1)),
            lambda z, change: (change(), loss_of(labels, 2 * z)),
        ):
            assert f"output layer's {name} changed in place" in changed(ours, name, use), name
    with torch.inference_mode():  # whose tensors do not count their changes
        input_ = hidden.clone()
        assert torch.isfinite(loss_of(labels, ours.output_layer(input_)[0])).all()
        z = ours.output_layer(input_)[0]
        before = z.clone()
        input_.zero_()
        assert torch.equal(z, before)


@on_ranks(2)
def test_logits_are_those_of_the_call(member):
    """What the layer has or was asked for at its call holds for logits that are made later."""
    _, ours, hidden, _ = output_layers(member, Model(ranks=member.ranks))

    def later(model, data, ours):
        layer, loss_of = model.output_layer, model.compute_language_model_loss
        layer.training, layer.gather_output = False, True
        z = layer(hidden, runtime_gather_output=False)[0]
        shape = z.shape
        layer.weight = torch.nn.Parameter(torch.zeros_like(layer.weight))
        losses = loss_of(data.labels, z * 1.0)
        assert z.clone().shape == shape
        return z.clone(), losses, loss_of(data.labels, z)

    side_by_side(member, Model(ranks=member.ranks), later)
    layer = ours.output_layer
    z = layer(hidden)[0]
    layer.bias = torch.nn.Parameter(torch.zeros_like(layer.weight[:, 0]))
    assert "output layer's bias changed" in words_of_error(lambda: z.float())
    layer.bias = None
    # A hook after the loss would never be called, a gradient never kept.
    for name, arguments in {"register_hook": (print,), "retain_grad": ()}.items():
        z = layer(hidden.requires_grad_())[0]
        ours.compute_language_model_loss(batch(0, Model(), member.device).labels, z)
        assert f"{name} comes after the loss" in words_of_error(lambda: getattr(z, name)(*arguments))
    hidden = hidden.detach().clone()
    hidden[1] = torch.nan
    z = layer(hidden)[0]
    with torch.no_grad():  # places that something may be gathered by
        assert z.argmax(-1).min() == 0 and z.max(-1).indices.min() == 0 and z.max(-1).values[1].isnan().all()


HOOKS = {
    "none": lambda *given: None,
    "read": lambda module, inputs, outputs: (outputs[0].detach().float().mean(), None)[1],
    "forward": lambda module, inputs, outputs: (outputs[0][..., 20:].fill_(-1e4), None)[1],
    "backward": lambda module, of_inputs, of_outputs: tuple(g if g is None else 3 * g for g in of_inputs),
}


@pytest.mark.parametrize("sequence_parallel", [False, True])
@on_ranks(2)
def test_hooks_of_the_output_layer(member, sequence_parallel):
    """Forward and backward, in a training step of the whole model."""
    found = {}
    for kind, hook in HOOKS.items():
        # Stock's loss overwrites fp32 logits, which autograd refuses of those that a backward hook looks at.
        dtype, tolerance = (torch.bfloat16, 2e-2) if kind == "backward" else (torch.float32, 1e-5)
        spec = Model(ranks=member.ranks, sequence_parallel=sequence_parallel, tied=True, dtype=dtype)

        def gradients(model, data, ours):
            layer = model.output_layer
            (layer.register_full_backward_hook if kind == "backward" else layer.register_forward_hook)(hook)
            losses = losses_of(model, spec, data)
            losses.square().mean().backward()
            return [losses, *(p.grad for p in model.parameters())]

        found[kind] = side_by_side(member, spec, gradients, tolerance)[0]
    for kind in ("forward", "backward"):
        assert any(error(a, b) > 0.1 * size(b) for a, b in zip(found[kind], found["none"])), kind
