"""Lazy logits: they do whatever logits do in stock, make real ones only where a use needs them, and say so."""

import ast
import copy
import pickle
import warnings
from unittest import mock

import numpy
import pytest
import torch
from torch.utils.checkpoint import checkpoint

pytest.importorskip("megatron.core", reason="needs megatron-core")

from megatron.core import tensor_parallel

from measures import error, largest_error, relative_error, size
from megatron_models import VOCAB, Model, build
from megatron_training import output_layers, side_by_side, switched, train, words_of
from parallel_lce.megatron import output_layer
from parallel_lce.megatron.lazy_logits import LazyLogits
from tools import on_ranks, words_of_error

# --- every use ----------------------------------------------------------------------------------------

# What a program may do with the logits ``z`` before it gives them, or its ``out``, to the loss; an ``extra`` is added
# to it. The last expression's value, or the kind of error, is compared, too. ``ramp`` is a row of the vocabulary,
# ``places`` are integers of the logits' shape.
USES = """
z[..., 20:].fill_(-1e4)
z.data.div_(2)
z.data = 2 * z.data
z.data = z.data[1:]; z.argmax(-1)
z.unsqueeze_(0); z.mul_(ramp); z.squeeze_(0)
with torch.inference_mode(): z.add_(ramp)
with torch.no_grad(): copy.copy(z).mul_(2)
F.threshold(input=z, threshold=0.0, value=-5.0, inplace=True)
torch._foreach_addcmul_([z], (ramp,), [z])
with torch.no_grad(): torch.add(input=z, other=ramp, out=z)
with torch.no_grad(): torch.max(z.expand(2, *z.shape), 0, out=(z, places))
y = z; y += ramp; y.neg_(); out = y; y is z
z[..., 20:] = -5.0
y = 2 * z; z.mul_(ramp); out = y
z.mul_(ramp); out = 2 * z
hook = z.register_hook(lambda gradient: 2 * gradient)
extra = z.max(-1).values.square().mean()
extra = (2 * z).float().logsumexp(-1).square().mean()
z.float().mean(); z.sum(); z[0]; z.max(); 2 + z; torch.softmax(z, -1); z.tolist(); list(z); repr(z); z.argmax(-1)
with torch.no_grad(): z.float().mean(); z.max(-1); z.mul(2)
with torch.no_grad(): out = 2 * z
z.stride(); z.is_contiguous(); z.is_leaf; z.layout; z.grad_fn is None; z.grad
bool(z)
z + 1, 1 + z, z - 1, 1 - z, z / 2, 2 / z, z // 0.3, 2 // z, z % 0.3, 2 % z, z ** 2, 2 ** z
z[1], z[..., 2], z[z > 0], z[None], z[:, [0, 1]]
(numpy.float64(2) * z)[...], z * numpy.float32(2) + 0
copy.deepcopy(z)
pickle.loads(pickle.dumps(z)), pickle.loads(pickle.dumps(z)).requires_grad
torch.stack([z, z]), torch.cat(tensors=(z, z), dim=0), torch.einsum("abc,abc->a", z, z)
y = z[...]; torch.autograd.grad((2 * z).square().sum(), z), torch.autograd.grad(y.square().sum(), z)
z.retain_grad(); z.square().sum().backward(); z.grad
torch.empty(z.shape).copy_(z), torch.zeros(z.shape).add_(z), torch.zeros(z.shape).__iadd__(z)
torch.zeros_like(z), z.new_ones(2), torch.ops.aten.add(z, 1), torch.where(z > 0, z, 0.0)
x = torch.zeros(z.shape); x[...] = z; x
z.max(-1, keepdim=True), torch.max(z, z + 1), torch.max(z), torch.max(z, 0), torch.max(input=z, dim=-1)
""".strip().splitlines()

# These make no logits: sizes, which are compared after each use; products; and in fp32, where logits have no equals,
# the largest logit of this rank's shard and its place, as Megatron's MTP acceptance asks.
WITHOUT_LOGITS = """
pass
hasattr(z, "no_attribute_of_tensors")
out = 2.0 * (z * 0.25)
out = 1.5 * torch.tanh(z.float() / 3)
""".strip().splitlines()
LARGEST = """
z.argmax(-1), torch.argmax(z, dim=-1), (z * -0.25).argmax(-1)
torch.no_grad()(z.max)(dim=-1), torch.no_grad()(z.max)(2), torch.no_grad()(torch.max)(z, -1)
torch.no_grad()((z * -0.25).max)(-1)
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
    z = model.output_layer(leaf, weight=weight)[0]
    lazy = isinstance(z, LazyLogits)
    ramp = torch.linspace(0.5, 2.0, z.shape[-1], device=z.device, dtype=z.dtype)
    places = torch.empty(z.shape, dtype=torch.long, device=z.device)
    modules = dict(torch=torch, F=torch.nn.functional, copy=copy, numpy=numpy, pickle=pickle, checkpoint=checkpoint)
    names = {"z": z, "ramp": ramp, "places": places} | modules
    value = _value(use, names), _sizes(z) if z.dim() else None
    try:
        logits = names.get("out", z)
        # Stock's loss overwrites fp32 logits, which other uses may have saved.
        losses = model.compute_language_model_loss(labels, logits if lazy else logits.clone())
        (losses.square().mean() + names.get("extra", 0.0)).backward()
    except (AssertionError, IndexError, RuntimeError, TypeError, ValueError):
        return value, None
    if lazy and use in WITHOUT_LOGITS + LARGEST:
        assert z.made is logits.made is None, use
    used = model.output_layer.weight if weight is None else weight
    return value, [losses.detach(), leaf.grad, used.grad.clone()]


def _same(a: object, b: object, rtol: float = 0.0) -> bool:
    b = b[...] if isinstance(b, LazyLogits) else b
    if isinstance(a, (tuple, list)) and not isinstance(a, torch.Size):
        return isinstance(b, type(a)) and len(a) == len(b) and all(_same(x, y, rtol) for x, y in zip(a, b))
    if isinstance(a, torch.Tensor):
        equal = isinstance(b, torch.Tensor) and a.dtype == b.dtype and a.shape == b.shape
        return equal and (torch.equal(a, b) or (a.is_floating_point() and error(b, a) <= rtol * size(a)))
    return a is b or a == b


@pytest.mark.parametrize(
    ("ranks", "sequence_parallel", "tied", "dtype"),
    [(1, False, False, torch.bfloat16), (2, False, True, torch.float32), (2, True, False, torch.float32)],
)
@on_ranks()
def test_every_use_is_as_in_stock(member, tied, sequence_parallel, dtype):
    spec = Model(ranks=member.ranks, tied=tied, sequence_parallel=sequence_parallel)
    stock, ours, hidden, data = output_layers(member, spec)
    labels = data.labels
    models, kept, wrong = (stock.to(dtype), ours.to(dtype)), {}, []
    weights = [m.shared_embedding_or_output_weight() if tied else None for m in models]
    with torch.no_grad():  # logits large enough that each change shows
        for model, weight in zip(models, weights):
            (model.output_layer.weight if weight is None else weight).mul_(20)
    tolerance = 1e-5 if dtype == torch.float32 else 2e-2
    for enabled in (False, True):
        for use in (*WITHOUT_LOGITS, *(LARGEST if dtype == torch.float32 else []), *USES):
            with warnings.catch_warnings(), torch.set_grad_enabled(enabled):
                warnings.simplefilter("ignore")
                pairs = [_after(m, use, hidden.to(dtype), w, labels) for m, w in zip(models, weights)]
                (value, truth), (other, mine) = pairs
                if not _same(value, other, 1e-5 if use in LARGEST else 0.0):
                    wrong.append((use, enabled, *(str(v)[:100] for v in (value, other))))
            if (truth is None) != (mine is None):
                wrong.append((use, enabled, "fails" if truth is None else "does not fail"))
            elif truth is not None:
                kept[use] = truth
                for name, a, b in zip(("losses", "hidden", "weight"), truth, mine):
                    if not error(b, a) <= tolerance * size(a):
                        wrong.append((use, name, relative_error(b, a)))
    assert not wrong, wrong
    changes = [use for use, found in kept.items() if max(map(relative_error, found, kept["pass"])) > 0.1]
    assert len(changes) >= 16, changes  # the others read


# --- the layer's call ----------------------------------------------------------------------------------


@on_ranks(2)
def test_modes_are_those_of_the_layers_call(member):
    """No gradient from the start; and autocast."""
    spec = Model(ranks=member.ranks)
    _, _, hidden, _ = output_layers(member, spec)

    def modes_of(model, data, ours):
        loss_of = model.compute_language_model_loss
        for mode in (torch.no_grad, torch.inference_mode):
            with mode():
                z = model.output_layer(hidden)[0]
            z = z * 0.5
            losses = loss_of(data.labels, z)
            assert not (z.requires_grad or losses.requires_grad or z.float().requires_grad)
        with torch.autocast(member.device.type, torch.bfloat16):
            z, again, made = (model.output_layer(hidden)[0] for _ in range(3))
            losses = loss_of(data.labels, again)
        assert torch.equal(loss_of(data.labels, z), losses)
        assert z.dtype == made.clone().dtype == torch.bfloat16
        return [made.float()]

    side_by_side(member, spec, modes_of)


@on_ranks(2)
def test_changed_hidden_states_and_weights_are_refused(member):
    """What logits are made of may not change between the layer and their first use."""
    _, ours, hidden, data = output_layers(member, Model(ranks=member.ranks))
    layer, loss_of = ours.output_layer, lambda z: ours.compute_language_model_loss(data.labels, z)
    layer.training = False  # no warnings
    layer.bias = torch.nn.Parameter(torch.zeros_like(layer.weight[:, 0]))
    for name in ("hidden states", "weight", "bias"):
        for use in (loss_of, lambda z: z.float(), lambda z: z.argmax(-1), lambda z: loss_of(2 * z)):
            z = layer(hidden)[0]
            part = hidden if name == "hidden states" else getattr(layer, name)
            with torch.no_grad():
                part.view(-1)[:1].add_(1.0)
            assert f"output layer's {name} changed in place" in words_of_error(lambda: use(z)), name
    # A fused optimizer's step raises no version. test_transformers_habits.py has which optimizers count.
    z, made = layer(hidden)[0], layer(hidden)[0]
    before, layer.weight.grad = made.clone(), torch.ones_like(layer.weight)
    torch.optim.AdamW([layer.weight], fused=True).step()
    assert torch.equal(made, before) and layer(hidden)[0].clone().shape == before.shape
    for use in (lambda: z.float(), lambda: loss_of(2 * z)):
        assert "an optimizer's step may have changed the output layer's weight" in words_of_error(use)
    with torch.inference_mode():  # whose tensors do not count their changes
        input_ = hidden.clone()
        assert loss_of(layer(input_)[0]).isfinite().all()
        z = layer(input_)[0]
        before = z.clone()
        input_.zero_()
        assert torch.equal(z, before)


@on_ranks(2)
def test_logits_are_those_of_the_call(member):
    """What the layer has or was asked for at its call holds for logits that are made later."""
    _, ours, hidden, data = output_layers(member, Model(ranks=member.ranks))

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
        ours.compute_language_model_loss(data.labels, z)
        assert f"{name} comes after the loss" in words_of_error(lambda: getattr(z, name)(*arguments))
    # As in torch a NaN is the largest: of a token, and of a row of the weight in all other tokens.
    hidden = hidden.detach().clone()
    with torch.no_grad():
        hidden[1] = layer.weight[5] = torch.nan
        z, real = layer(hidden)[0], torch.nn.functional.linear(hidden, layer.weight)
        assert torch.equal(z.argmax(-1), real.argmax(-1)) and torch.equal(z.max(-1).indices, real.argmax(-1))
        assert z.max(-1).values.isnan().all() and z.made is None


# --- autograd's Functions and checkpoints ---------------------------------------------------------------


class _Square(torch.autograd.Function):
    @staticmethod
    def forward(ctx, z):
        return z * z


class _Calling(torch.autograd.Function):
    """Its forward uses what it is not given."""

    @staticmethod
    def forward(ctx, function):
        return function()


@on_ranks(2)
def test_autograd_functions_get_no_lazy_logits(member):
    """A torch.autograd.Function that gets no tensor returns none with a gradient: refused, or a tensor's."""
    _, ours, hidden, data = output_layers(member, Model(ranks=member.ranks))
    ours.output_layer.training = False  # no warnings
    target, leaf = data.labels.transpose(0, 1).contiguous(), hidden.clone().requires_grad_()
    uses = [
        _Square.apply,
        lambda z: _Calling.apply(lambda: (2 * z)[...]),
        lambda z: checkpoint(ours.compute_language_model_loss, data.labels, z, use_reentrant=True),
        lambda z: (z.add_(0), _Square.apply(z))[1],  # with real logits, too
    ]
    for number, use in enumerate(uses):
        z = ours.output_layer(leaf)[0]
        assert "give it `logits[...]`" in words_of_error(lambda: use(z)), number
        with torch.no_grad():  # where stock's has no gradient either
            assert not use(ours.output_layer(leaf)[0]).requires_grad

    def of_tensors(model, data, ours):
        """The remedy, a loss that is recomputed in backward, and a use that makes logits within a checkpoint."""
        leaf, found = hidden.clone().requires_grad_(), []
        # Stock's loss changes fp32 logits.
        loss = lambda z: model.compute_language_model_loss(data.labels, z if ours else z.clone())  # noqa: E731
        recomputed = lambda z: checkpoint(loss, z, use_reentrant=False)  # noqa: E731
        cross_entropy = tensor_parallel.vocab_parallel_cross_entropy
        for function in (lambda z: cross_entropy(z, target), lambda z: cross_entropy(z[...], target), recomputed):
            losses = function(model.output_layer(leaf)[0])
            found += [losses, torch.autograd.grad(losses.mean(), leaf)[0]]
        squares = checkpoint(torch.square, model.output_layer(leaf)[0], use_reentrant=False)
        return found + [squares, torch.autograd.grad(squares.mean(), leaf)[0]]

    side_by_side(member, Model(ranks=member.ranks), of_tensors)


CHECKPOINTS = {
    "reentrant": lambda run, x: checkpoint(run, x, use_reentrant=True),
    "not reentrant": lambda run, x: checkpoint(run, x, use_reentrant=False),
    "Megatron's": lambda run, x: tensor_parallel.random.checkpoint(run, False, x),
}


@pytest.mark.parametrize("with_loss", [False, True])
@pytest.mark.parametrize("kind", CHECKPOINTS)
@on_ranks(2)
def test_the_output_layer_within_a_checkpoint(member, kind, with_loss):
    """Alone or with its loss, and a loss of something else."""
    spec, checkpointed = Model(ranks=member.ranks, sequence_parallel=True), CHECKPOINTS[kind]
    _, _, hidden, _ = output_layers(member, spec)

    def gradients(model, data, ours):
        leaf, labels = hidden.clone().requires_grad_(), data.labels
        layer = lambda x: model.output_layer(x)[0]  # noqa: E731
        loss_of = model.compute_language_model_loss
        if with_loss:
            losses = checkpointed(lambda x: loss_of(labels, layer(x)), leaf)
        elif ours and kind != "not reentrant":
            z = checkpointed(layer, leaf)
            for use in (lambda: loss_of(labels, z), lambda: z.float()):
                assert "let it return `logits[...]`" in words_of_error(use)
            with torch.no_grad():  # where stock's has no gradient either
                assert torch.equal(checkpointed(layer, leaf)[...], layer(leaf)[...])
            losses = loss_of(labels, checkpointed(lambda x: layer(x)[...], leaf))
        else:
            losses = loss_of(labels, checkpointed(layer, leaf))
        (losses.mean() + leaf.square().mean() + model.output_layer.weight.square().mean()).backward()
        return losses, leaf.grad, model.output_layer.weight.grad

    side_by_side(member, spec, gradients)


# --- who makes logits, and who is told ------------------------------------------------------------------


@pytest.mark.parametrize("ranks", [1, 2])
@on_ranks()
def test_logits_without_a_loss(member):
    """Without labels, in evaluation, and of the layer alone, they are the stock ones, and nobody is told."""
    spec = Model(ranks=member.ranks, sequence_parallel=member.ranks > 1)
    stock, ours, _, data = output_layers(member, spec)
    given = data.tokens, data.positions, data.mask
    stock.eval(), ours.eval()
    with torch.no_grad(), warnings.catch_warnings():
        warnings.filterwarnings("error", message="parallel_lce")
        assert torch.equal(stock(*given), ours(*given))
        assert largest_error(*(m(*given, labels=data.labels) for m in (stock, ours))) <= 1e-5
        gathered = [m(*given, runtime_gather_output=True) for m in (stock, ours)]
        assert gathered[0].shape[-1] == VOCAB and torch.equal(*gathered)
        # With labels nothing is gathered.
        losses = ours.train()(*given, labels=data.labels, runtime_gather_output=True)
        assert largest_error(losses, stock(*given, labels=data.labels)) <= 1e-5
    # Stock models built while the switch is installed stay stock.
    assert type(build(member, spec, {}).output_layer) is type(stock.output_layer)
    assert type(ours.output_layer).__name__ == type(stock.output_layer).__name__


@pytest.mark.parametrize(
    ("spec", "told"), [(Model(ranks=2, context=2, ddp="fp32"), [1, 0]), (Model(ranks=2, pipeline=2), [0, 1])], ids=str
)
@on_ranks(2)
def test_one_rank_speaks_for_all(member, spec, told):
    """The first of those that have the output layer, in all steps and microbatches once."""
    with mock.patch.object(output_layer, "_why_logits", lambda *arguments: "of a test"):
        assert len(words_of(lambda: train(member, spec, switched(spec)))) == told[member.rank]


@on_ranks(2)
def test_protocol_of_the_development_branch(member):
    """``output_layer(output_cross_entropy_loss=True, labels=[b, s])``."""
    stock, ours, hidden, data = output_layers(member, Model(ranks=member.ranks))
    labels, layer = data.labels, ours.output_layer
    counts = labels != -100
    want = stock.compute_language_model_loss(labels, stock.output_layer(hidden)[0]).masked_fill(~counts, 0.0)
    ask = dict(input_=hidden, output_cross_entropy_loss=True, labels=labels)
    assert largest_error(layer(**ask), want) <= 1e-5
    assert (layer(reduction="sum", **ask) - want.sum()).abs() <= 1e-5 * want.sum()
    assert (layer(reduction="mean", **ask) - want.sum() / counts.sum()).abs() <= 1e-5
    # With real logits, of a layer that gathers them and leaves its bias to others.
    layer.gather_output, layer.skip_bias_add = True, True
    layer.bias = torch.nn.Parameter(torch.full_like(layer.weight[:, 0], 0.5))
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="parallel_lce")
        assert largest_error(layer(**ask), want) <= 1e-5
