"""Deferred logits: a program gets from them the answer of real ones, and the loss takes none where it need not."""

import copy
import functools
import gc
import pickle
import weakref
from unittest import mock

import numpy as np
import pytest
import torch
import torch.utils.checkpoint as checkpoints
from torch import nn
from torch.optim import SGD

from measures import assert_close
from parallel_lce import linear_cross_entropy, vocab_parallel_cross_entropy
from parallel_lce.deferred import DeferredLogits, Source

V, D, SHAPE = 32, 8, (2, 5)


class Layer(nn.Linear):
    """As a door's output layer, with a record of the uses that make real logits."""

    def __init__(self) -> None:
        super().__init__(D, V, dtype=torch.float64)
        self.defers, self.said = True, []

    def forward(self, hidden):
        if not self.defers:
            return super().forward(hidden)
        operands = self.weight, self.bias
        source = Source(self, hidden, *operands, nn.functional.linear, self._say, operands)
        return DeferredLogits.of(source, (*hidden.shape[:-1], V))

    def _say(self, source, use):
        self.said.append(use)


TARGET = torch.randint(V, SHAPE, generator=torch.Generator().manual_seed(1))


def loss_of(logits, target=TARGET):
    """A door's loss, and whether it took no logits."""
    if isinstance(logits, DeferredLogits) and logits.why_not_fused() is None:

        def loss(hidden, weight, bias):
            options = dict(linear_bias=bias, **logits.epilogue())
            return (linear_cross_entropy(hidden, weight, target.view(hidden.shape[:-1]), **options),)

        return logits.run(loss)[0], True
    real = logits.computed("a loss") if isinstance(logits, DeferredLogits) else logits
    return nn.functional.cross_entropy(real.flatten(0, -2), target.flatten()), False


class Tripled(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        return x * 1

    @staticmethod
    def backward(ctx, gradient):
        return gradient * 3


class Doubled(torch.autograd.Function):
    """Changes its input; its result is that, or a copy."""

    @staticmethod
    def forward(ctx, x, copied):
        if not copied:
            ctx.mark_dirty(x)
        return x.mul_(2).clone() if copied else x.mul_(2)

    @staticmethod
    def backward(ctx, gradient):
        return gradient * 2, None


def _hooked(z):
    z.register_hook(lambda gradient: gradient * 2)
    return z


def _looked_at(z):
    z.argmax(-1), z.sum(), repr(z), z[0, 0, 0].item(), z.data.sum(), z.detach().numpy()
    return z


def _flat(z, hooked: bool = False):
    moved = z.transpose(0, 1)
    if hooked:
        z.retain_grad()
    return (moved.view(-1, V) if moved.is_contiguous() else moved.reshape(-1, V)) + 0


def _view_of_changed(z):
    view = z.view(-1, V)
    z.mul_(2)
    return view


def _written(z):
    """Through memory, of which no version tells."""
    z.data[..., :3] = 0
    z.detach().numpy()[:, 0] *= 2
    return z


def _doubled(z):
    same = z
    z *= 2
    assert same is z
    return z


SCRIPTED = torch.jit.CompilationUnit("def double(z):\n    return z.mul_(2.0)\n").double
# What a program does between the output layer and the loss, and whether the loss takes no logits.
USES = {
    "nothing": (lambda z: z, True),
    "a scale": (lambda z: 2 * z / 3 * 0.5, True),
    "a number of NumPy": (lambda z: z * np.float32(2), True),
    "a soft-cap in fp32": (lambda z: 30 * torch.tanh(z.to(torch.float32) / 30), True),
    "a view": (lambda z: z.view(-1, V), True),
    "transposed": (lambda z: z.transpose(0, 1).contiguous().transpose(0, 1), True),
    "reshaped": (lambda z: z.transpose(0, 1).reshape(-1, V), True),
    "flat": (_flat, False),
    "flat, hooked between": (lambda z: _flat(z, True), False),
    "copied by indices": (lambda z: z[[1, 0]], False),
    "indexed": (lambda z: z[:, :, None][..., 0, :], True),
    "a use beside it, then a step": (lambda z: _looked_at(z) * 2, True),
    "a use beside it": (_looked_at, True),
    "cast on the way": (lambda z: z.float().to(z.device, torch.float64), True),
    "a sum": (lambda z: z + 1, False),
    "two soft-caps": (lambda z: torch.tanh(torch.tanh(z)), False),
    "a part of the vocabulary": (lambda z: torch.cat([z[..., :7], z[..., 7:]], -1), False),
    "a Function": (Tripled.apply, False),
    "a Function in place": (lambda z: Doubled.apply(Doubled.apply(z, False), False), False),
    "a Function that overwrites a view": (lambda z: Doubled.apply(z.view(-1, V), True), False),
    "scripted code in place": (lambda z: (torch.no_grad()(SCRIPTED)(z), z)[1], False),
    "a view without the vocabulary": (lambda z: z.view(-1).view(*SHAPE, V), False),
    "a Function of detached logits": (lambda z: Tripled.apply(z.detach()) + z, False),
    "a hook": (_hooked, False),
    "a product in place": (_doubled, False),
    "a hook of contiguous logits": (lambda z: (_hooked(z.contiguous().to(z.dtype)), z)[1], False),
    "a view of changed logits": (_view_of_changed, False),
    "a write to their memory": (_written, False),
    "a write to the memory of a view": (lambda z: (z.view(-1, V).data[:, :3].zero_(), z)[1], False),
    "new memory": (lambda z: (setattr(z, "data", z.data * 2), z)[1], False),
    "a reentrant checkpoint": (lambda z: checkpoints.checkpoint(lambda x: x * 2 + 0, z, use_reentrant=True), False),
    "a checkpoint": (lambda z: checkpoints.checkpoint(lambda x: x * 2 + 0, z, use_reentrant=False), False),
    "a checkpoint of a step": (lambda z: checkpoints.checkpoint(lambda x: x * 2, z, use_reentrant=False), True),
}


def _compared(run, frozen: str = "") -> Layer:
    """``run(layer, hidden)`` gives the loss and the gradients of real logits."""
    torch.manual_seed(0)
    layer, found, rows = Layer(), [], torch.randn(3, 5, D, dtype=torch.float64)
    layer.weight.requires_grad_(frozen != "weight")
    for layer.defers in (False, True):
        layer.zero_grad()
        hidden = rows.clone().requires_grad_(frozen != "hidden")
        loss = run(layer, hidden[1:])  # a slice, as of the tokens whose logits are kept
        loss.backward()
        found.append([loss.detach(), *(t.grad for t in (hidden, *layer.parameters()) if t.requires_grad)])
    for truth, mine in zip(*found, strict=True):
        assert_close(mine.double(), truth.double(), 1e-6)
    return layer


@pytest.mark.parametrize("use", USES)
def test_every_use_has_the_answer_of_real_logits(use):
    change, fused = USES[use]

    def run(layer, hidden):
        loss, took_none = loss_of(change(layer(hidden)))
        assert took_none == (fused and layer.defers)
        return loss

    layer = _compared(run)
    assert bool(layer.said) == (not fused or "beside" in use or use == "a Function of detached logits")


@pytest.mark.parametrize("reentrant", [True, False])
def test_checkpoints_around_the_layer_change_nothing(reentrant):
    checkpoint = functools.partial(checkpoints.checkpoint, use_reentrant=reentrant)
    _compared(lambda layer, hidden: loss_of(checkpoint(layer, hidden))[0])
    _compared(lambda layer, hidden: checkpoint(lambda x: loss_of(layer(x))[0], hidden))


def test_a_loss_closes_its_logits_after_its_backward():
    """In that backward a Function beside the loss gives its gradient, and a checkpoint computes the loss again."""

    def closed(z):
        loss, _ = loss_of(z)
        if isinstance(z, DeferredLogits):
            z.source.close_after(loss)
        return loss

    _compared(lambda layer, hidden: (lambda z: closed(z) + Tripled.apply(z).sin().sum())(layer(hidden)))
    _compared(lambda layer, hidden: checkpoints.checkpoint(closed, layer(hidden), use_reentrant=False))


@pytest.mark.parametrize("change", [lambda z: z, Tripled.apply])
@pytest.mark.parametrize("frozen", ["weight", "hidden"])
def test_frozen_operands_get_no_gradient(frozen, change):
    _compared(lambda layer, hidden: loss_of(change(layer(hidden)))[0], frozen)


def test_programs_see_a_tensor():
    z = Layer()(torch.randn(*SHAPE, D, dtype=torch.float64))
    assert isinstance(z, torch.Tensor) and torch.is_tensor(z) and z.requires_grad and not z.is_leaf
    assert z.shape == (*SHAPE, V) and len(z) == 2 and z.dtype == torch.float64 and z.float().dtype == torch.float32
    assert z.view(-1, V).shape == (10, V) and z.transpose(0, 1).stride() == (2 * V, V, 1)
    assert not z.detach().requires_grad and not z.source.layer.said  # no use so far
    with pytest.raises(RuntimeError, match="Cannot access data pointer"):
        torch.utils.dlpack.to_dlpack(z.detach())
    assert torch.equal(vocab_parallel_cross_entropy(z, TARGET), vocab_parallel_cross_entropy(z + 0, TARGET))
    with torch.no_grad():
        z = z.source.layer(z.source.hidden)
        for other in (pickle.loads(pickle.dumps(z)), copy.deepcopy(z), z + 0):
            assert type(other) is torch.Tensor
            assert_close(other, nn.functional.linear(z.source.hidden, z.source.weight, z.source.bias), 1e-12)
        z = z.source.layer(z.source.hidden)
        for other in (z.to(torch.int64), z.to("meta"), z.view(torch.int64)):
            assert type(other) is torch.Tensor and (other.is_meta or other.dtype == torch.int64)
    z = z.source.layer(z.source.hidden)
    z.retain_grad()
    loss_of(z)[0].backward()
    assert_close(z.grad.sum(-1), torch.zeros(SHAPE, dtype=torch.float64), 1, 1e-12)


def test_the_largest_logit_needs_no_logits():
    """Of all rows, and of those that a view shows; where there are logits, and a copy, it is theirs."""
    layer = Layer()
    z = layer(torch.randn(*SHAPE, D, dtype=torch.float64))
    truth = nn.functional.linear(z.source.hidden, layer.weight, layer.bias)
    with torch.no_grad():
        for rows in (slice(None), (slice(1, None), slice(1, -1))):
            expected = truth[rows].argmax(-1)
            assert torch.equal(z[rows].argmax(-1), expected) and torch.equal(z[rows].max(dim=-1).indices, expected)
        truth[0, 0] = z.source.hidden[0, 0, 0] = torch.nan
        assert torch.equal(layer(z.source.hidden)[:, :4].argmax(-1), truth[:, :4].argmax(-1))
    assert not layer.said
    z, truth = layer(z.source.hidden), truth[1:]
    kept = z.detach().clone()[1:]
    layer.weight.data.neg_()
    assert torch.equal(kept, truth) and torch.equal(z.detach()[1:].argmax(-1), truth.argmax(-1))


def _step(layer, kind):
    layer.weight.grad = torch.ones_like(layer.weight)
    kind([layer.weight], lr=0.1).step()


def _backward(z):
    loss, _ = loss_of(z)
    z.source.close_after(loss)
    loss.backward()


# What happens after the layer's call, and what is said of a later use. Weights with a main_grad have copies (Megatron).
TOO_LATE = {
    "a write": (lambda layer, z: layer.weight.mul_(2), "weight changed in place"),
    "a write of the input": (lambda layer, z: z.source.hidden.mul_(2), "hidden states changed in place"),
    "a step": (lambda layer, z: [_step(layer, SGD) for _ in range(3)], "changed in place|an optimizer's step"),
    "a fused step": (lambda layer, z: _step(layer, lambda p, lr: torch.optim.Adam(p, lr, fused=True)), "optimizer's"),
    "a copy": (lambda layer, z: vars(layer.weight).update(main_grad=1) or _step(Layer(), SGD), "step"),
    "freed memory": (lambda layer, z: layer.weight.untyped_storage().resize_(0), "has taken back the output layer's"),
    "freed input": (lambda _, z: z.source.hidden.untyped_storage().resize_(0), "hidden states was freed"),
    "the door's event": (lambda layer, z: _backward(z), "the backward of their loss"),
}


@pytest.mark.parametrize("event", TOO_LATE)
@torch.no_grad()
def test_too_late_is_said(event):
    change, message = TOO_LATE[event]
    layer = Layer()
    with torch.enable_grad():
        z = layer(torch.randn(*SHAPE, D, dtype=torch.float64))
        made = layer(z.source.hidden)
    _step(Layer(), SGD)  # of another layer's weight
    expected = made.sum()
    with torch.set_grad_enabled(event == "the door's event"):
        change(layer, z)
    for use in (torch.sum, lambda z: z.source.check()):
        with pytest.raises(RuntimeError, match=message):
            use(z)
    assert torch.equal(made.sum(), expected) and len(z.source.events) < 2  # made before; and no list that grows
    assert torch.equal(made[:, 1:].argmax(-1), made.computed("a test")[:, 1:].argmax(-1))
    made.untyped_storage().resize_(0)  # its memory is not read again
    assert made._is_touched()


def test_a_hook_after_the_loss_is_refused_but_for_fsdps():
    z = Layer()(torch.randn(*SHAPE, D, dtype=torch.float64))
    with pytest.raises(RuntimeError, match="call logits.register_hook"):
        z.grad_fn.register_prehook(print)
    loss, _ = loss_of(z)
    gradient = functools.partial(torch.autograd.grad, loss, [z.detach(), z], allow_unused=True)
    for use in (lambda: z.register_hook(print), z.retain_grad, gradient, lambda: loss.backward(inputs=[z])):
        with pytest.raises(RuntimeError, match="took no logits"):
            use()
    leaf = z.detach().requires_grad_()  # has no place in the graph of the loss
    assert torch.equal(torch.autograd.grad(leaf.sum(), leaf)[0], torch.ones(*SHAPE, V))
    with mock.patch.object(_hooked, "__module__", "torch.distributed.fsdp"):
        z.register_hook(_hooked)


def test_a_change_that_a_function_cannot_see_is_refused():
    for change in (lambda z: z.mul_(2), _hooked, _view_of_changed):
        z = Layer()(torch.randn(*SHAPE, D, dtype=torch.float64))
        changed = change(z)
        with pytest.raises(
            RuntimeError, match="changed in place or got a hook, and then used by a torch.autograd.Function"
        ):
            Tripled.apply(changed).sum().backward()
    z = Layer()(torch.randn(*SHAPE, D, dtype=torch.float64))
    copied, view = z[:, 1:].clone(), z[:, 1:]
    assert torch.equal(z.add_(1)[:, 1:], view.clone())
    with pytest.raises(RuntimeError, match="'clone' was taken of logits that were then changed in place"):
        copied.sum()


def test_nothing_is_kept():
    layer = Layer()
    for use in (lambda z: None, lambda z: z.sum(), lambda z: Tripled.apply(z).sum().backward(), lambda z: loss_of(z)):
        z = layer(torch.randn(*SHAPE, D, dtype=torch.float64))
        kept = weakref.ref(z.source)
        gc.disable()
        use(z)
        del z
        gc.enable()
        assert kept() is None
    z = layer(torch.randn(*SHAPE, D, dtype=torch.float64, requires_grad=True))
    loss, kept = loss_of(z)[0], weakref.ref(z.source)
    z.source.close_after(loss)
    del z
    assert kept() is None and loss.requires_grad
    loss.backward()


def test_the_modes_are_those_of_the_layers_call():
    layer = Layer().float()
    hidden = torch.randn(*SHAPE, D)
    with torch.autocast("cpu", torch.bfloat16):
        z = layer(hidden)
    assert z.dtype == torch.bfloat16 and z.sum().requires_grad and (z + 0).dtype == torch.bfloat16
    with torch.no_grad():
        z = layer(hidden)
    assert not z.requires_grad and not (z + 0).requires_grad and not loss_of(z)[0].requires_grad
    z = layer(hidden)
    with torch.no_grad():
        assert not (z * 2).requires_grad and not (z * 2).computed("a test").requires_grad
        assert z.computed("a test").requires_grad and not (z + 0).requires_grad and not loss_of(z)[0].requires_grad
    assert not loss_of(z.detach())[0].requires_grad
    with torch.inference_mode():  # where no version shows a change
        assert loss_of(layer(hidden)) != loss_of(_doubled(layer(hidden)))
