"""What is done to lazy logits, or to what they are made of, counts as it does in stock."""

from __future__ import annotations

import copy
import warnings
from contextlib import nullcontext

import pytest
import torch

pytest.importorskip("megatron.core", reason="needs megatron-core")

import parallel_lce.megatron
from measures import assert_close, error, relative_error, size
from megatron_models import Model, batch, build, losses_of
from megatron_training import output_layers, switched
from parallel_lce.megatron.lazy_logits import LazyLogits
from tools import words_of_error
from world import Member

# What a program may do with the logits ``z`` before it gives them, or its ``out``, to the loss; an
# ``extra`` is added to it. ``ramp`` is a row of the vocabulary.
CHANGES = """
z[..., 20:].fill_(-1e4)
z[0][:, 5:].mul_(-4)
z.view(-1, z.shape[-1])[:, 20:].fill_(-1e4)
z.narrow(-1, 20, 9).fill_(3.0)
z.mT[..., 20:, :].zero_()
z.flatten()[::3].neg_()
z.data.div_(2)
z.detach().div_(2)
z.detach()[..., 20:] = -3.0
z.float().div_(2)
z.to(torch.float32).mul_(ramp)
z.contiguous().mul_(ramp)
z.real.mul_(ramp)
z.data = 2 * z.data
z.mul_(ramp).sub_(1)
z.copy_(3 * z)
z.unsqueeze_(0); z.mul_(ramp); z.squeeze_(0)
y = z; y.mul_(ramp)
z.requires_grad_().mul_(ramp)
with torch.no_grad(): z.add_(ramp)
with torch.inference_mode(): z.add_(ramp)
with torch.no_grad(): [row.mul_(2) for row in z]
with torch.no_grad(): copy.copy(z).mul_(2)
torch.from_dlpack(z.detach()).mul_(2)
F.relu(z, inplace=True)
F.threshold(input=z, threshold=0.0, value=-5.0, inplace=True)
torch.relu_(z)
torch.clamp_(z, -1, 1)
torch._foreach_mul_([z], 4.0)
torch._foreach_addcmul_([z], (ramp,), [z])
with torch.no_grad(): torch.mul(z, ramp, out=z)
with torch.no_grad(): torch.add(input=z, other=ramp, out=z)
torch.sort(2 * z.detach(), -1, out=(z.data, torch.empty(z.shape, dtype=torch.long, device=z.device)))
with torch.no_grad(): torch.max(z.expand(2, *z.shape), 0, out=(z, torch.empty(z.shape, dtype=torch.long, device=z.device)))
z += ramp
y = z; y += ramp; y.neg_()
y = z; y += ramp; y.neg_(); out = y
z -= ramp
z *= 2
z *= ramp
z /= 2
z **= 2
z %= 0.3
with torch.no_grad(): z //= 0.3
z @= torch.eye(z.shape[-1], device=z.device, dtype=z.dtype).roll(1, 0)
z[3:] = 0
z[..., 20:] = -5.0
z[z > 0] = 0
z[...] = z.flip(-1)
z.__imul__(ramp)
y = 2 * z; z.mul_(ramp); out = y
y = 2 * z; y.mul_(ramp)
y = 2 * z; y.mul_(ramp); out = y
y = z * 0.5; y *= ramp; z.neg_(); out = y
z.mul_(ramp); out = 2 * z
y = z.clone(); z.mul_(ramp); out = y
y = z.float(); z.mul_(ramp); out = y
out = z.transpose(0, 1).mul_(ramp).transpose(0, 1)
z.register_hook(lambda gradient: 2 * gradient)
extra = z.float().logsumexp(-1).square().mean()
extra = (2 * z).float().logsumexp(-1).square().mean()
z.float().mean(); z.sum(); z[0]; z.max(); 2 + z; torch.softmax(z, -1); z.tolist(); list(z); repr(z); len(z); z.argmax(-1)
with torch.no_grad(): z.float().mean(); z.max(-1); z.mul(2)
with torch.inference_mode(): z.float().mean()
with torch.no_grad(): out = 2 * z
with torch.no_grad(): out = z + ramp
""".strip().splitlines()


def _after(model, change: str, hidden: torch.Tensor, weight, labels: torch.Tensor) -> list | str:
    """Losses, gradients of hidden states and output weight, and that of kept logits; or how it failed."""
    model.zero_grad()
    leaf = hidden.clone().requires_grad_()
    z, runs = model.output_layer(leaf, weight=weight)[0], []
    if lazy := isinstance(z, LazyLogits):
        stock_forward = z.stock_forward
        z.stock_forward = lambda *a, **k: (runs.append(a), stock_forward(*a, **k))[1]
    ramp = torch.linspace(0.5, 2.0, z.shape[-1], device=z.device, dtype=z.dtype)
    names = {"z": z, "ramp": ramp, "torch": torch, "F": torch.nn.functional, "copy": copy}
    try:
        exec(change, names)
        logits = names.get("out", z)
        # Stock's loss overwrites fp32 logits, which other uses may have saved.
        losses = model.compute_language_model_loss(labels, logits if lazy else logits.clone())
        (losses.square().mean() + names.get("extra", 0.0)).backward()
    except (RuntimeError, TypeError) as error:
        return type(error).__name__
    assert len(runs) <= 1 or "y = " in change or "2 * z" in change, (change, "projected again")
    used = model.output_layer.weight if weight is None else weight
    return [losses.detach(), leaf.grad, used.grad.clone()]


def _changes(member: Member, tied: bool, sequence_parallel: bool, dtype: torch.dtype) -> None:
    spec = Model(ranks=member.ranks, tied=tied, sequence_parallel=sequence_parallel)
    stock, ours, hidden, _ = output_layers(member, spec)
    labels = batch(0, spec, member.device).labels
    models, kept, wrong = (stock.to(dtype), ours.to(dtype)), {}, []
    for model in models:
        with torch.no_grad():  # logits large enough that each change shows
            (model.output_layer.weight if not tied else model.shared_embedding_or_output_weight()).mul_(20)
    on_cpu = ["z.detach().numpy()[...] *= 2", "numpy = __import__('numpy'); numpy.asarray(z.detach())[...] *= 2"]
    changes = CHANGES + on_cpu * (member.device.type == "cpu" and dtype == torch.float32)
    for change in ("pass", *changes):
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            truth, mine = kept[change] = [
                _after(m, change, hidden.to(dtype), m.shared_embedding_or_output_weight() if tied else None, labels)
                for m in models
            ]
        if isinstance(truth, str) or isinstance(mine, str):
            if truth != mine:
                wrong.append((change, truth, mine))
            continue
        tolerance = 1e-5 if dtype == torch.float32 else 2e-2
        for name, a, b in zip(("losses", "hidden", "weight"), truth, mine):
            if not error(b, a) <= tolerance * size(a):
                wrong.append((change, name, relative_error(b, a)))
    assert not wrong, wrong
    # Each of these is seen by the loss or by its gradients.
    read = ("y = 2 * z; y.mul_(ramp)", "z.float().mean()", "y = z.clone()", "with torch.", "z @= ")
    copies = () if dtype == torch.float32 else ("z.float()", "z.to(", "y = z.float()")
    for change in changes:
        truth = kept[change][0]
        if not isinstance(truth, str) and not change.startswith(read + copies):
            if max(relative_error(b, a) for a, b in zip(kept["pass"][0], truth)) < 0.1:
                wrong.append(change)
    assert not wrong, wrong
    without_gradient = [c for c in changes if isinstance(kept[c][0], str)]
    assert all(c.startswith("with torch.no_grad(): out = ") for c in without_gradient), without_gradient
    parallel_lce.megatron.uninstall()


@pytest.mark.parametrize(
    ("ranks", "sequence_parallel", "tied", "dtype"),
    [
        (1, False, False, torch.float32),
        (1, False, True, torch.bfloat16),
        (2, False, False, torch.float32),
        (2, False, True, torch.float32),
        (2, True, False, torch.bfloat16),
        (2, True, True, torch.float32),
    ],
)
@pytest.mark.thinned
def test_every_change_counts_as_in_stock(ranks, sequence_parallel, tied, dtype, worlds):
    worlds(ranks).run(_changes, tied, sequence_parallel, dtype)


def _sizes(z) -> tuple:
    sizes = (z.shape, z.size(), z.size(-1), z.dim(), z.ndim, len(z), z.numel())
    return *sizes, z.dtype, z.device, z.is_cuda, z.requires_grad, z.is_floating_point()


def _sizes_after(member: Member) -> None:
    """Once there are real logits, sizes and the largest ones are theirs."""
    spec = Model(ranks=member.ranks)
    stock, ours, hidden, _ = output_layers(member, spec)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        for change in (
            "z.unsqueeze_(0)",
            "z.transpose_(0, 1)",
            "z.detach_()",
            "z.data = z.data.double()",
            "z.data = z.data[1:]",
            "z.detach_().resize_(3, 2, 5)",
            "with torch.no_grad(): z[..., 7] = 9.0",
        ):
            real, lazy = (model.output_layer(hidden)[0] for model in (stock, ours))
            for z in (real, lazy):
                exec(change, {"z": z, "torch": torch})
            assert _sizes(lazy) == _sizes(real), change
            with torch.no_grad():
                for function in (torch.max, lambda t, d: t.max(dim=d)):
                    assert all(map(torch.equal, function(lazy, -1), function(real, -1))), change
                assert torch.equal(lazy.argmax(-1), real.argmax(-1)), change
                assert torch.equal(torch.argmax(lazy, dim=-1), real.argmax(-1)), change
    # Without a gradient from the start, or from the multiplication on.
    modes = ((torch.no_grad, nullcontext), (nullcontext, torch.no_grad), (torch.inference_mode, nullcontext))
    for before, after in modes:
        found = []
        for model in (stock, ours):
            with before():
                z = model.output_layer(hidden)[0]
            with after():
                z = z * 0.5
            losses = model.compute_language_model_loss(batch(0, spec, member.device).labels, z)
            found.append((z.requires_grad, losses.requires_grad, z.float().requires_grad))
        assert found == [(False, False, False)] * 2, found
    found, labels = [], batch(0, spec, member.device).labels
    for model in (stock, ours):
        with torch.autocast(member.device.type, torch.bfloat16):
            z = model.output_layer(hidden)[0]
            losses = model.compute_language_model_loss(labels, model.output_layer(hidden)[0])
        later = model.compute_language_model_loss(labels, z)
        assert torch.equal(later, losses)
        with torch.autocast(member.device.type, torch.bfloat16):
            z = model.output_layer(hidden)[0]
        found.append((z.dtype, z.float(), z.clone().dtype))
    assert found[0][0] == found[1][0] == torch.bfloat16 == found[0][2] == found[1][2]
    assert torch.equal(found[0][1], found[1][1])
    parallel_lce.megatron.uninstall()


def test_sizes_and_modes_are_those_of_the_logits(worlds):
    worlds(2).run(_sizes_after)


def _changed_parts(member: Member, sequence_parallel: bool) -> None:
    """What stock's logits were made of may not change between the layer and its loss; stock's backward refuses it."""
    spec = Model(ranks=member.ranks, sequence_parallel=sequence_parallel)
    stock, ours, hidden, _ = output_layers(member, spec)
    labels = batch(0, spec, member.device).labels
    for model in (stock, ours):
        model.output_layer.bias = torch.nn.Parameter(torch.zeros_like(model.output_layer.weight[:, 0]))

    def lazy(model, name: str):
        leaf = hidden.clone().requires_grad_()
        input_ = leaf * 1.0
        z = model.output_layer(input_)[0]
        part = input_ if name == "hidden states" else getattr(model.output_layer, name)
        with torch.no_grad():
            part.view(-1)[:1].add_(1.0)
        return z

    for name in ("hidden states", "weight", "bias"):
        if name != "bias":  # a sum's gradient does not need it
            z = lazy(stock, name)
            assert "modified by an inplace operation" in words_of_error(z.sum().backward), name
        for use in (
            lambda z: ours.compute_language_model_loss(labels, z),
            lambda z: z.float(),
            lambda z: z.argmax(-1),
            lambda z: ours.compute_language_model_loss(labels, 2 * z),
        ):
            z = lazy(ours, name)
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")
                assert f"output layer's {name} changed in place" in words_of_error(lambda: use(z)), name
    # Changed after the loss it is autograd that refuses; after real logits they stay what they were.
    for name in ("hidden states", "weight"):
        leaf = hidden.clone().requires_grad_()
        input_ = leaf * 1.0
        z = ours.output_layer(input_)[0]
        loss = ours.compute_language_model_loss(labels, z).sum()
        part = input_ if name == "hidden states" else ours.output_layer.weight
        with torch.no_grad():
            part.view(-1)[:1].add_(1.0)
        assert "modified by an inplace operation" in words_of_error(loss.backward), name
    with torch.inference_mode():  # whose tensors do not count their changes
        z = ours.output_layer(hidden.clone())[0]
        assert torch.isfinite(ours.compute_language_model_loss(labels, z)).all()
        input_ = hidden.clone()
        z = ours.output_layer(input_)[0]
        before = z.clone()
        input_.zero_()
        assert torch.equal(z, before)
    parallel_lce.megatron.uninstall()


@pytest.mark.parametrize("sequence_parallel", [False, True])
def test_changed_hidden_states_and_weights_are_refused(sequence_parallel, worlds):
    worlds(2).run(_changed_parts, sequence_parallel)


def _after_the_call(member: Member) -> None:
    """What the layer has or was asked for at its call holds for logits that are made later."""
    spec = Model(ranks=member.ranks)
    stock, ours, hidden, _ = output_layers(member, spec)
    labels, found = batch(0, spec, member.device).labels, []
    for model in (stock, ours):
        layer = model.output_layer
        layer.training, layer.gather_output = False, True
        z = layer(hidden, runtime_gather_output=False)[0]
        shape = z.shape
        with torch.no_grad():
            old, layer.weight = layer.weight, torch.nn.Parameter(torch.zeros_like(layer.weight))
        losses = model.compute_language_model_loss(labels, z * 1.0)
        assert z.clone().shape == shape
        found.append((z.clone(), losses.detach(), model.compute_language_model_loss(labels, z).detach()))
        layer.weight, layer.gather_output = old, False
    for truth, mine in zip(*found):
        assert_close(mine, truth, 1e-5)
    z = ours.output_layer(hidden)[0]
    ours.output_layer.bias = torch.nn.Parameter(torch.zeros_like(ours.output_layer.weight[:, 0]))
    assert "output layer's bias changed" in words_of_error(lambda: z.float())
    ours.output_layer.bias = None
    # A hook after the loss would never be called, a gradient never kept.
    for name, arguments in {"register_hook": (print,), "retain_grad": ()}.items():
        z = ours.output_layer(hidden.requires_grad_())[0]
        ours.compute_language_model_loss(labels, z)
        assert f"{name} comes after the loss" in words_of_error(lambda: getattr(z, name)(*arguments))
    hidden = hidden.detach().clone()
    hidden[1] = torch.nan
    z = ours.output_layer(hidden)[0]
    with torch.no_grad():  # places that something may be gathered by
        assert z.argmax(-1).min() == 0 and z.max(-1).indices.min() == 0 and z.max(-1).values[1].isnan().all()
    parallel_lce.megatron.uninstall()


def test_logits_are_those_of_the_call(worlds):
    worlds(2).run(_after_the_call)


def _hooked(member: Member, sequence_parallel: bool) -> None:
    """Hooks of the output layer, forward and backward, in a training step of the whole model."""
    layout, found = dict(ranks=member.ranks, sequence_parallel=sequence_parallel, tied=True), {}
    hooks = {
        "forward": lambda module, inputs, outputs: (outputs[0][..., 20:].fill_(-1e4), None)[1],
        "read": lambda module, inputs, outputs: (outputs[0].detach().float().mean(), None)[1],
        "backward": lambda module, of_inputs, of_outputs: tuple(g if g is None else 3 * g for g in of_inputs),
    }
    for kind, hook in hooks.items():
        # Stock's loss overwrites fp32 logits, which autograd refuses of those that a backward hook looks at.
        spec = Model(**layout, dtype=torch.bfloat16 if kind == "backward" else torch.float32)
        tolerance = 2e-2 if kind == "backward" else 1e-5
        for ours in (False, True):
            model, data = build(member, spec, switched(spec) if ours else {}), batch(0, spec, member.device)
            register = "register_full_backward_hook" if kind == "backward" else "register_forward_hook"
            getattr(model.output_layer, register)(hook)
            with warnings.catch_warnings():
                warnings.filterwarnings("ignore", message="parallel_lce")
                losses = losses_of(model, spec, data)
            losses.square().mean().backward()
            found[kind, ours] = [losses.detach(), *(p.grad for p in model.parameters())]
        for truth, mine in zip(found[kind, False], found[kind, True], strict=True):
            assert_close(mine, truth, tolerance, name=kind)
    for kind in ("forward", "backward"):
        assert any(error(a, b) > 0.1 * size(b) for a, b in zip(found[kind, False], found["read", False])), kind
    parallel_lce.megatron.uninstall()


@pytest.mark.parametrize("sequence_parallel", [False, True])
def test_hooks_of_the_output_layer(sequence_parallel, worlds):
    worlds(2).run(_hooked, sequence_parallel)
