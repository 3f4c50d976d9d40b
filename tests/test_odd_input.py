"""Odd but legal: NumPy's numbers, no features, tensors without values, hooks that move saved tensors, copies of
the module, vocabularies beyond fp32's integers."""

from __future__ import annotations

import copy
import fractions
import io
import itertools
import math
import pickle
import warnings

import numpy as np
import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.distributed import _functional_collectives as collectives

import parallel_lce
from cases import dense_loss, normal
from measures import assert_close, assert_no_worse, size
from parallel_lce.backends import named
from parallel_lce.core import options
from parallel_lce.core.partials import Columns, bounds_of, merge_ranks
from tools import REDUCED, N, V, call, everywhere, good, shrunk, small
from world import Member

# --- numbers of other libraries ---------------------------------------------------------------------

NUMBERS = {
    "ignore_index": (np.int64(3), 3),
    "label_smoothing": (np.float32(0.125), 0.125),
    "z_loss": (fractions.Fraction(1, 8), 0.125),
    "logit_scale": (np.float16(0.5), 0.5),
    "logit_softcap": (np.float64(5.0), 5.0),
    "temperature": (np.int32(2), 2.0),
    "reduce_hidden_grad": (np.bool_(False), False),
    "logits_budget": (np.int32(0), 0),
    "vocab_size": (np.uint8(9), 9),
    "vocab_start": (np.int16(0), 0),
}


@pytest.mark.parametrize(
    "name", [*NUMBERS, "label_smoothing of float64", "z_loss of float64", "logit_scale of float64"]
)
def test_numbers_of_other_libraries(name, backend, device):
    name, _, float64 = name.partition(" of ")
    theirs, plain = NUMBERS[name]
    theirs = np.float64(plain) if float64 else theirs  # one that is a float, and compares to no bool
    arguments = good(device)
    arguments["target"] %= 9
    assert torch.equal(call(arguments | {name: theirs}), call(arguments | {name: plain}))
    module = parallel_lce.LinearCrossEntropy(**{name: theirs})
    positional = [arguments[k] for k in ("input", "linear_weight", "target")]
    assert torch.equal(module(*positional), call(arguments | {name: plain}))


@pytest.mark.parametrize(
    "value", [1.5, np.float64(1.5), np.float32(1.5), fractions.Fraction(3, 2), 2, np.int8(2)], ids=repr
)
def test_a_number_is_of_a_plain_type(value):
    """Triton's kernels have a case for numbers of Python alone."""
    assert options.as_number(value) == value and type(options.as_number(value)) in (int, float)


@pytest.mark.parametrize(
    "value", [np.float32("nan"), np.bool_(True), fractions.Fraction(10**400), "0.1", [0.1]], ids=repr
)
def test_what_is_no_number_is_refused(value, device):
    with pytest.raises(ValueError, match="z_loss must be a finite Python number, got"):
        call(good(device) | dict(z_loss=value))


def test_a_module_with_numbers_of_other_libraries_compiles(device):
    arguments = good(device)
    arguments["target"] %= 9
    positional = [arguments[k] for k in ("input", "linear_weight", "target")]
    module = parallel_lce.LinearCrossEntropy(
        **{name: np.float64(v) if isinstance(v, float) else n for name, (n, v) in NUMBERS.items()}
    )
    assert torch.equal(torch.compile(module, backend="aot_eager", fullgraph=True)(*positional), module(*positional))


def _by_other_truth_values(member: Member) -> list[bool]:
    arguments = good(member.device) | dict(process_group=member.group)
    whole = arguments | dict(target=arguments["target"].repeat(member.ranks))
    split, same = (call(whole | dict(sequence_parallel=True)), call(arguments))
    return [
        *(torch.equal(call(whole | dict(sequence_parallel=yes)), split) for yes in (np.bool_(True), 1, np.int8(1))),
        *(torch.equal(call(arguments | dict(sequence_parallel=no)), same) for no in (np.bool_(False), 0, np.uint8(0))),
    ]


def test_truth_values_of_other_libraries(worlds, device):
    for found in everywhere(worlds, device, 2, _by_other_truth_values):
        assert found == [True] * 6


@pytest.mark.parametrize("name", ["z_loss", "logit_scale", "logit_softcap", "temperature"])
def test_integers_of_any_length_are_numbers(name, backend, device):
    arguments, number = good(device), 10**20
    if name == "logit_scale":
        arguments["linear_weight"] /= float(number)
    assert torch.equal(call(arguments | {name: number}), call(arguments | {name: float(number)}))


@pytest.mark.parametrize(
    "dtype", [torch.uint8, torch.int8, torch.uint16, torch.int16, torch.uint32, torch.int32, torch.uint64]
)
def test_targets_of_any_integer_dtype(dtype, device):
    arguments = good(device)
    want = call(arguments)
    assert torch.equal(call(arguments | dict(target=arguments["target"].to(dtype))), want)


# --- memory that is not what it looks like ----------------------------------------------------------


def more(device) -> dict:
    """A bias and weights of tokens for the arguments of :func:`tools.good`."""
    return dict(
        linear_bias=normal(V, seed=1).float().to(device), token_weight=normal(N, seed=2).abs().float().to(device)
    )


def _functional_collectives(member: Member, name: str, grad: bool) -> list[torch.Tensor]:
    """Hidden states, or the whole weight, by a functional all-gather, which nobody has waited for."""
    arguments = good(member.device) | more(member.device)
    # The first of the ranks' parts: the other ranks' are the same.
    part = arguments[name].chunk(member.ranks)[member.rank].clone().requires_grad_(grad)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        gathered = (collectives.all_gather_tensor_autograd if grad else collectives.all_gather_tensor)(
            part, 0, member.group
        )
    assert grad or isinstance(gathered, collectives.AsyncCollectiveTensor)
    loss = call(arguments | {name: gathered})
    whole = arguments[name].clone().requires_grad_(grad)
    want = call(arguments | {name: whole})
    if not grad:
        return [loss, want]
    loss.backward()
    want.backward()
    return [loss.detach(), want.detach(), part.grad, member.ranks * whole.grad.chunk(member.ranks)[member.rank]]


@pytest.mark.parametrize(
    ("name", "grad"),
    [*itertools.product(("input", "linear_weight", "linear_bias", "token_weight"), (False, True)), ("target", False)],
)
def test_results_of_functional_collectives(name, grad, backend, worlds, device):
    for found in everywhere(worlds, device, 2, _functional_collectives, name, grad):
        for mine, truth in zip(found[::2], found[1::2]):
            torch.testing.assert_close(mine, truth)


@pytest.mark.parametrize("name", ["input", "linear_weight", "linear_bias", "token_weight", "target"])
def test_negative_views(name, backend, device):
    arguments = good(device) | more(device)
    plain = call(arguments)
    assert torch.equal(call(arguments | {name: torch._neg_view(-arguments[name])}), plain)


# --- no features, no values -------------------------------------------------------------------------


@pytest.mark.parametrize("budget", [None, 0])
@pytest.mark.parametrize("shape", [(5, 0), (2, 3, 0), (0,), (0, 0)], ids=str)
def test_no_features(shape, budget, backend, device):
    """Every logit is 0, or the bias."""
    x, weight = (torch.zeros(s, device=device, requires_grad=True) for s in (shape, (7, 0)))
    target = torch.full(shape[:-1], 3, device=device)
    bias = torch.arange(7.0, device=device, requires_grad=True)
    loss = parallel_lce.linear_cross_entropy(x, weight, target, reduction="none", logits_budget=budget)
    assert loss.shape == shape[:-1] and torch.allclose(loss, torch.full_like(loss, math.log(7)))
    loss = parallel_lce.linear_cross_entropy(x, weight, target, linear_bias=bias, reduction="sum", logits_budget=budget)
    loss.backward()
    assert x.grad.shape == shape and weight.grad.shape == (7, 0)
    tokens = target.numel()
    expected = tokens * (torch.softmax(bias.detach(), 0) - (torch.arange(7, device=device) == 3).float())
    torch.testing.assert_close(bias.grad, expected)


@pytest.mark.parametrize("kind", ["meta", "fake"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(
    "options", [*REDUCED.values(), dict(logits_budget=4000, reduction="none", label_smoothing=0.1)], ids=str
)
def test_tensors_without_values_give_shapes(options, dtype, kind, device):
    """The shapes, dtypes and devices of results and gradients are those of a call with values."""

    def results(device, mode=None) -> list[torch.Tensor]:
        x = torch.empty(8, 3, 16, dtype=dtype, device=device, requires_grad=True)
        weight = torch.empty(150, 16, dtype=dtype, device=device, requires_grad=True)
        bias = torch.empty(150, dtype=dtype, device=device, requires_grad=True)
        target = torch.zeros(8, 3, dtype=torch.int64, device=device)
        loss = parallel_lce.linear_cross_entropy(x, weight, target, linear_bias=bias, **options)
        loss.sum().backward()
        found = parallel_lce.token_statistics(
            x,
            weight,
            target,
            mean_logit=True,
            expected_logit=True,
            argmax=True,
            sum_p_squared=True,
            selected=target.unsqueeze(-1),
            top_k=2,
        )
        (found.entropy.sum() + found.selected_log_prob.sum()).backward()
        with torch.no_grad():
            evaluated = parallel_lce.linear_cross_entropy(x, weight, target, reduction="none")
        logits = parallel_lce.vocab_parallel_cross_entropy(weight.t(), target[:8, 0].repeat(2))
        return [loss, x.grad, weight.grad, bias.grad, *vars(found).values(), evaluated, logits]

    with shrunk(4096, (16, 32)):
        real = results(device)
        if kind == "meta":
            found = results("meta")
        else:
            with FakeTensorMode():
                found = results(device)
    for one, other in zip(found, real, strict=True):
        assert (one.shape, one.dtype) == (other.shape, other.dtype)
        assert one.device.type == ("meta" if kind == "meta" else other.device.type)


# --- hooks for saved tensors ------------------------------------------------------------------------


def _gapped(tensor: torch.Tensor) -> torch.Tensor:
    """The same values at other strides, as a hook that keeps several tensors in one may give them back."""
    wide = tensor.new_empty(*tensor.shape, 2)
    wide[..., 0] = tensor
    return wide[..., 0]


def _transposed(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.t().contiguous().t() if tensor.dim() == 2 else tensor


@pytest.mark.parametrize("unpack", [_gapped, _transposed])
@pytest.mark.parametrize("strategy", [*REDUCED, "some", "statistics"])
@pytest.mark.parametrize("dtype", ["fp32", "bf16", "fp16"])
@pytest.mark.thinned
def test_saved_tensors_come_back_with_other_strides(dtype, strategy, unpack, backend, device):
    t = small(device, dtype=dtype)
    leaves = [t.x, t.weight]

    def gradients(again: bool = False):
        if strategy == "statistics":
            ids = t.target[:, None] // torch.tensor([2, 3, 5], device=device)
            found = parallel_lce.token_statistics(*leaves, t.target, expected_logit=True, selected=ids)
            value = (found.target_log_prob - found.entropy + found.selected_log_prob.sum(1)).sum()
        else:
            options = REDUCED.get(strategy, dict(logits_budget=5000, reduction="none"))
            value = parallel_lce.linear_cross_entropy(*leaves, t.target, **options).sum()
        first = torch.autograd.grad(value, leaves, retain_graph=True)
        return *first, *torch.autograd.grad(value, leaves)

    with shrunk(4096, (16, 32)):
        plain = gradients()
        with torch.autograd.graph.saved_tensors_hooks(lambda tensor: tensor.detach().clone(), unpack):
            moved = gradients()
    for a, b in zip(moved, plain):
        # Strides choose other product kernels.
        assert_close(a, b, 2 * torch.finfo(a.dtype).eps, 2**-24)


# --- copies of the module ---------------------------------------------------------------------------


def _copies(member: Member):
    arguments = good(member.device)
    positional = [arguments[k] for k in ("input", "linear_weight", "target")]
    module = torch.nn.Sequential(parallel_lce.LinearCrossEntropy(process_group=member.group, z_loss=0.1))[0]
    want = module(*positional)
    duplicate = copy.deepcopy(torch.nn.ModuleList([module, module]))
    assert duplicate[0] is duplicate[1] and duplicate[0] is not module
    assert duplicate[0].process_group is member.group and duplicate[0].options is not module.options
    assert torch.equal(duplicate[0](*positional), want)
    shallow = copy.copy(module)
    assert shallow is not module and shallow.process_group is member.group and shallow.options is module.options
    assert torch.equal(shallow(*positional), want)
    file = io.BytesIO()
    torch.save(module, file)
    file.seek(0)
    for restored in (pickle.loads(pickle.dumps(module)), torch.load(file, weights_only=False)):
        again = pickle.loads(pickle.dumps(copy.deepcopy(restored)))
        for lost in (restored, again):
            with pytest.raises(ValueError, match=rf"pickled with a process_group of {member.ranks} rank"):
                lost(*positional)
            lost.process_group = member.group
            assert torch.equal(lost(*positional), want)
    assert module.process_group is member.group
    with pytest.raises(ValueError, match="process_group must be a torch.distributed.ProcessGroup"):
        module.process_group = "tp"
    return True


def test_a_module_with_a_group_can_be_copied_and_pickled(worlds, device):
    assert all(worlds(2).run(_copies))


def test_a_module_without_a_group_is_pickled_whole(device):
    arguments = good(device)
    positional = [arguments[k] for k in ("input", "linear_weight", "target")]
    module = parallel_lce.LinearCrossEntropy(label_smoothing=0.1)
    restored = pickle.loads(pickle.dumps(module))
    assert torch.equal(restored(*positional), module(*positional))


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (dict(logit_softcap=-1), "logit_softcap must be None or a positive"),
        (dict(logit_scale="x"), "logit_scale must be a finite"),
        (dict(vocab_size=0), "vocab_size must be None or"),
        (dict(vocab_start=-1), "vocab_start must be None or"),
        (dict(logits_budget=-1), "logits_budget must be None or"),
        (dict(reduce_dtype="fp32"), "reduce_dtype must be None"),
        (dict(process_group="tp"), "process_group must be"),
        (dict(ignore_index=2**70), "ignore_index must be"),
        (dict(reduction="avg"), "reduction must be"),
    ],
    ids=str,
)
def test_a_module_refuses_when_it_is_made(options, message):
    with pytest.raises(ValueError, match=message):
        parallel_lce.LinearCrossEntropy(**options)


# --- vocabularies beyond fp32's integers ------------------------------------------------------------

LARGE = 2**24 + 3


def _of_a_large_vocabulary(member: Member, dtype: torch.dtype) -> list[torch.Tensor]:
    """Uneven shards of ids that fp32 cannot tell apart."""
    device = member.device
    first = 2**24 - 5 if member.ranks > 1 else LARGE
    start, stop = ((0, first), (first, LARGE))[member.rank]
    weight = (torch.arange(LARGE, device=device)[:, None] % 7 - 3)[start:stop].to(dtype)
    x = torch.tensor([[0.5], [1.0], [-1.0], [2.0], [0.25]], dtype=dtype, device=device)
    target = torch.tensor([LARGE - 1, LARGE - 2, 2**24, 2**24 - 1, LARGE], device=device)
    options = dict(process_group=member.group, vocab_start=start) if member.ranks > 1 else {}
    loss = parallel_lce.linear_cross_entropy(x, weight, target, reduction="none", **options)
    found = parallel_lce.token_statistics(x, weight, target, argmax=True, mean_logit=True, **options)
    return [v.cpu() for v in (loss, found.target_logit, found.vocab_size, found.argmax, found.mean_logit)]


@pytest.mark.slow
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("ranks", [1, 2])
def test_a_vocabulary_beyond_2_to_the_24(ranks, dtype, worlds, device):
    z = (torch.arange(LARGE) % 7 - 3).double() * torch.tensor([[0.5], [1.0], [-1.0], [2.0], [0.25]])
    target = torch.tensor([LARGE - 1, LARGE - 2, 2**24, 2**24 - 1])
    expected = -torch.log_softmax(z[:4], -1).gather(1, target[:, None])[:, 0]
    for loss, target_logit, vocab_size, argmax, mean in everywhere(
        worlds, device, ranks, _of_a_large_vocabulary, dtype
    ):
        torch.testing.assert_close(loss[:4].double(), expected, rtol=1e-5, atol=1e-5)
        assert loss[4].isnan() and target_logit[4] == 0
        torch.testing.assert_close(target_logit[:4].double(), z[:4].gather(1, target[:, None])[:, 0])
        assert vocab_size == LARGE and vocab_size.dtype == torch.int64
        assert torch.equal(argmax, z.argmax(1))
        torch.testing.assert_close(mean.double(), z.mean(1), rtol=1e-3, atol=1e-5)


@pytest.mark.parametrize("name", ["torch", "triton"])
def test_backends_tell_ids_beyond_2_to_the_24_apart(name, device, request):
    """Losses and merged shards of made-up partials: the interpreter would project for hours."""
    if name == "triton":
        request.getfixturevalue("kernels")
    module = named(name)
    target = torch.tensor([LARGE - 1, LARGE, 2**24], device=device)
    partial = torch.tensor([[1.0] * 3, [2.0] * 3, [0.5] * 3, [-4.0] * 3], device=device)
    vocab_size = torch.tensor(LARGE, device=device)
    losses, alpha, beta, gamma = module.token_losses(
        partial, vocab_size, target, None, options.Options("", label_smoothing=0.1)
    )
    assert losses.isnan().tolist() == [False, True, False]
    assert torch.allclose(gamma[::2], torch.full_like(gamma[::2], 0.1 / LARGE), rtol=1e-6)
    messages = torch.zeros(2, 3 * 3 + 2, device=device)
    bounds_of(messages, Columns(), 3).copy_(torch.tensor([[0, 2**24], [2**24, 3]]))
    for merge in (module.merge_ranks, merge_ranks):
        for vocab in (None, LARGE - 1):
            _, total = merge(messages, Columns(), 3, vocab)
            assert total.dtype == torch.int64 and total == (vocab or LARGE)


# --- soft-caps of any size --------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", ["fp32", "bf16"])
@pytest.mark.parametrize(
    ("cap", "sharpness"),
    [(1e-30, 3.0), (0.01, 0.03), (0.3, 3.0), (3.0, 3.0), (50.0, 3.0), (1e3, 3.0), (1e6, 3.0), (1e12, 3.0), (1e30, 3.0)],
)
@pytest.mark.thinned
def test_a_soft_cap_of_any_size_costs_no_digits(cap, sharpness, dtype, backend, device):
    """The loss and its gradients are as near to float64 as torch's."""
    t = small(device, N=64, V=200, D=32, dtype=dtype, sharpness=sharpness)
    truth, yardstick = (dense_loss(t, d, softcap=cap, reduction="none") for d in (torch.float64, t.x.dtype))
    loss = parallel_lce.linear_cross_entropy(t.x, t.weight, t.target, reduction="none", logit_softcap=cap)
    found = [loss.detach(), *torch.autograd.grad(loss.sum(), [t.x, t.weight])]
    for name, ours in zip(("loss", "dx", "dweight"), found):
        # The products of fp32 are summed in another order.
        rounding = 2 * torch.finfo(torch.float32).eps * size(truth[name])
        factor, floor = (1.5, rounding) if dtype == "fp32" else (1.0, 1e-6)
        assert_no_worse(ours, truth[name], yardstick[name], factor, floor, name)
