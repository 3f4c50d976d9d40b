"""torch.compile with ``fullgraph=True``: the losses and gradients of eager mode by the same work."""

import functools
import re
import shutil
from contextlib import nullcontext

import pytest
import torch
import torch._dynamo.testing
import torch._functorch.config
import torch.distributed as dist
from torch.testing._internal.distributed.fake_pg import FakeStore
from torch.utils.checkpoint import checkpoint

import parallel_lce
from benchmarks.engine.peak_memory import peak_memory
from cases import DTYPES, make, part
from measures import ROUNDED, assert_close
from parallel_lce.backends import backend_of
from parallel_lce.call import prepare
from parallel_lce.run.compile import _place_of
from parallel_lce.run.results import DIFFERENTIABLE
from tools import counted_forwards, debug_mode, fields, on_ranks, shrunk, small, statistics, watched_backwards

V, D = 150, 16
SIZES = (24, 30, 41)  # tokens: compiled for one number, then for any
SOME = 10000  # bytes: a part of the logits, beside blocks of 4000

LOSSES = {
    "saved": {},
    "none, every option": dict(reduction="none", label_smoothing=0.1, z_loss=1e-3, logit_scale=0.7, logit_softcap=5.0),
    "some saved": dict(reduction="none", logits_budget=SOME, label_smoothing=0.1),
    "recomputed": dict(reduction="none", logits_budget=0, temperature=0.7, reduce_hidden_grad=False),
    "accumulated": dict(reduction="sum", logits_budget=0, label_smoothing=0.1, z_loss=1e-3),
}


@pytest.fixture(autouse=True)
def fresh():
    torch._dynamo.reset()
    yield
    torch._dynamo.reset()


def compiled(function, backend: str = "aot_eager", **options):
    """``function`` compiled as one graph, and a counter of its compilations (``frame_count``)."""
    counter = torch._dynamo.testing.CompileCounterWithBackend(backend)
    return torch.compile(function, fullgraph=True, backend=counter, **options), counter


def operands(N: int, device: str, dtype: str = "fp32", **options):
    return small(device, **dict(N=N, V=V, D=D, dtype=dtype, ignored=True, token_weight=True) | options)


def loss_of(name: str, **others):
    return lambda x, w, y: parallel_lce.linear_cross_entropy(x, w, y, **LOSSES[name] | others)


def results(function, t, *given) -> list[torch.Tensor]:
    value = function(*(given or (t.x, t.weight, t.target)))
    leaves = [leaf for leaf in (t.x, t.weight, t.bias) if leaf is not None and leaf.requires_grad]
    return [value, *(torch.autograd.grad(value, leaves, torch.ones_like(value)) if value.requires_grad else ())]


def assert_same(found, expected, device: str, rtol: float = 0.0) -> None:
    """Without ``rtol`` to the bit where the same kernels run; a GPU's may be chosen by a tensor's address."""
    for a, b in zip(found, expected, strict=True):
        assert a.dtype == b.dtype
        if device == "cpu" and not rtol:
            assert torch.equal(a, b)
        else:
            assert_close(a, b, rtol or next((r for name, r in ROUNDED.items() if DTYPES[name] == a.dtype), 1e-5))


def assert_as_eager(fast, function, t, device: str, *given) -> list[int]:
    """The value and the gradients of ``fast`` are those of ``function``, by the same work. Returns the number of
    tensors that each block's backward is handed."""
    both, work, backend = [], [], backend_of(t.weight)
    for f in (fast, function):
        counts = []
        with watched_backwards(backend, lambda task, counts=counts: counts.append(len(task.saved))):
            with counted_forwards(backend) as forwards:
                both.append(results(f, t, *given))
        work.append((counts, forwards))
    assert_same(*both, device)
    assert work[0] == work[1], "exponentials that were kept are used, and nothing is computed again"
    return work[0][0]


@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=[pytest.mark.slow] * (name != "some saved")) for name in LOSSES]
)
def test_losses_are_compiled_but_twice_whatever_n(name, device):
    def loss(x, weight, target, bias, token_weight):
        options = dict(linear_bias=bias, token_weight=token_weight, **LOSSES[name])
        return parallel_lce.linear_cross_entropy(x, weight, target, **options)

    fast, counter = compiled(loss)
    for N in SIZES:
        t = operands(N, device, "bf16", bias=True)
        with shrunk(4000, (16, 32)):
            assert assert_as_eager(fast, loss, t, device, t.x, t.weight, t.target, t.bias, t.token_weight)
    assert counter.frame_count == 2


@pytest.mark.parametrize("backend", ["triton"], indirect=True)
def test_no_graph_notices_that_tritons_backward_writes_over_what_is_kept(backend, device):
    t = operands(40, device, "bf16", V=900)
    loss = loss_of("some saved", logits_budget=48000)  # a window of 256 vocabulary rows
    with shrunk(24000):
        assert any(assert_as_eager(compiled(loss)[0], loss, t, device))


@pytest.mark.parametrize("sequence_parallel", [pytest.param(False, marks=pytest.mark.slow), True])
@on_ranks(2)
def test_losses_over_ranks_are_those_of_eager_mode(member, sequence_parallel):
    torch._dynamo.reset()
    t = part(make(24, 2 * 30, D, "bf16", member.device, ignored=True), member, sequence_parallel)
    where = dict(process_group=member.group, sequence_parallel=sequence_parallel, reduce_dtype=torch.float32)
    for counted in None, int((t.target != -100).sum()):
        loss = loss_of("some saved", counted_tokens=counted, **where)
        with shrunk(1000, (8, 16)):
            assert_as_eager(compiled(loss)[0], loss, t, member.device.type)


def test_a_weight_is_known_in_other_memory_and_no_other_tensor_in_its_own(device):
    """As under FSDP2. On some ranks alone its memory is another in backward, and a second forward would gather."""
    t = operands(24, device)
    loss = compiled(loss_of("saved"))[0](t.x, t.weight, t.target)
    storage, before, kept = t.weight.untyped_storage(), t.weight.data_ptr(), t.weight.detach().clone()
    with torch.autograd._unsafe_preserve_version_counter(t.weight):
        storage.resize_(0)
        others = [kept.clone() for _ in range(8)]
        storage.resize_(kept.nbytes)
        t.weight.data.copy_(kept)
    assert t.weight.data_ptr() != before, others
    with counted_forwards(backend_of(t.weight)) as rows:
        loss.backward()
    assert not rows
    freed = _place_of(torch.ones(4, device=device))
    assert all(_place_of(torch.ones(4, device=device)) != freed for _ in range(9))


@on_ranks(2)
def test_logits_that_exist_are_checked_at_each_call(member):
    """Not as at the first call of a compiled function, which was before debug mode."""
    logits, target = torch.randn(24, 30, device=member.device), torch.arange(24, device=member.device)
    eager = parallel_lce.vocab_parallel_cross_entropy
    loss = torch.compile(eager, backend="eager")
    assert torch.equal(loss(logits, target, 0.0, member.group), eager(logits, target, 0.0, member.group))
    with debug_mode(), pytest.raises(ValueError, match="the ranks of tp_group disagree about target"):
        loss(logits, target + member.rank, 0.0, member.group)


def _autocast(loss):
    def within(x, *given):
        with torch.autocast(x.device.type, torch.bfloat16):
            return loss(x, *given)

    return within


def _checkpoint(loss):
    return lambda *tensors: checkpoint(loss, *tensors, use_reentrant=False)


AROUND = [(torch.no_grad(), False), (_autocast, True), (_checkpoint, True), (_checkpoint, False)]
"""And whether the graph has it, too."""


@pytest.mark.parametrize("frozen", ["", "x", "weight"])
@pytest.mark.parametrize(("around", "inside"), AROUND)
@pytest.mark.parametrize("name", ["saved", "accumulated", "module"])
@pytest.mark.thinned
def test_frozen_operands_and_what_is_around_a_call_change_no_work(name, around, inside, frozen, device):
    loss = parallel_lce.LinearCrossEntropy(label_smoothing=0.1) if name == "module" else loss_of(name)
    t = operands(24, device)
    if frozen:
        getattr(t, frozen).requires_grad_(False)
    with shrunk(4000):
        fast = compiled(around(loss))[0] if inside else around(compiled(loss)[0])
        assert_as_eager(fast, around(loss), t, device)
        assert len({call.needs for call in prepare.KNOWN.values()}) == 1, "saved for the same gradients"


def test_statistics_are_compiled_but_twice_whatever_n(device):
    fast, counter = compiled(call := functools.partial(statistics, logits_budget=0, top_k=2))
    for N in SIZES:
        t = operands(N, device)
        x, target = t.x.view(1, N, D), t.target.view(1, N)
        with shrunk(4000, (16, 32)):
            ids = target[..., None].clamp(min=0)
            found, expected = (fields(f(x, t.weight, target, selected=ids)) for f in (fast, call))
        assert_same(found.values(), expected.values(), device)
        assert all(value.requires_grad == (name in DIFFERENTIABLE) for name, value in found.items())
        sums = [sum(each[name].sum() for name in DIFFERENTIABLE) for each in (found, expected)]
        assert_same(*(torch.autograd.grad(value, [t.x, t.weight]) for value in sums), device)
    assert counter.frame_count == 2
    without = compiled(lambda: parallel_lce.token_statistics(t.x, t.weight, None))[0]()
    assert {*fields(without)} == {"lse", "max_logit", "vocab_size"}


@pytest.mark.parametrize("name", ["some saved", "accumulated"])
def test_a_graph_may_be_walked_again(name, device):
    """The first walk uses up what was kept: a later one recomputes it, in any autocast, and writes over no result."""
    t = operands(41, device)
    with shrunk(4000, (16, 32)), torch._functorch.config.patch(donated_buffer=False):
        value = compiled(loss_of(name))[0](t.x, t.weight, t.target).sum()
        walks = [torch.autograd.grad(value, [t.x, t.weight], retain_graph=True)]
        copies = [g.clone() for g in walks[0]]
        for around in (nullcontext(), torch.autocast(device, torch.bfloat16)):
            with around:
                walks.append(torch.autograd.grad(value, [t.x, t.weight], retain_graph=True))
        with torch._dynamo.compiled_autograd._enable(torch.compile(backend="eager")):
            value = loss_of(name)(t.x, t.weight, t.target).sum()
            for _ in range(2):
                (3 * value).backward(retain_graph=True)
    assert_same([t.x.grad / 6, t.weight.grad / 6], walks[0], device, 1e-6)
    assert_same(walks[0], copies, "cpu")
    assert_same(walks[2], walks[1], device)
    assert_same(walks[1], copies, device, 1e-6)


def test_what_is_saved_is_not_copied(device):
    """Neither in the forward graph nor in the backward one; and afterwards nothing is left of it."""
    N, V = 512, 4096
    fast, t = compiled(loss_of("saved"))[0], operands(N, device, V=V)
    step = lambda: results(fast, t)  # noqa: E731
    with shrunk(1 << 20, (64, 2048)):
        step()
        peak, alive = peak_memory(step, device)
    gradients, logits = (N + V) * D * 4, N * V * 4
    assert peak <= logits + 2 * gradients + (3 << 20) < 2 * logits  # beside them tiles
    assert alive <= gradients + (64 << 10)


@pytest.mark.slow
def test_inductor_gives_the_results_of_eager_mode(device):
    if shutil.which("g++") is None:
        pytest.skip("Inductor needs a C++ compiler, and there is no g++")
    if " " in torch.__file__ and device == "cpu":
        pytest.skip("Inductor's command line does not quote PyTorch's folder, whose name has a blank here")

    # Hidden states that are computed again for the backward, and of which one call's take the memory of the other's.
    hidden_of = _checkpoint(lambda x: torch.nn.functional.rms_norm(2 * x, (D,)).sin())

    def loss(x, weight, target):
        saved = parallel_lce.linear_cross_entropy(hidden_of(x), weight, target, reduction="none", logits_budget=SOME)
        hidden = hidden_of(x.cos() * saved.sum().detach())
        accumulated = parallel_lce.linear_cross_entropy(hidden, weight, target, logits_budget=0)
        return (saved * torch.arange(saved.shape[0], device=saved.device)).sum() + accumulated

    fast, counter = compiled(loss, "inductor")
    for N in SIZES:
        t = operands(N, device)
        with shrunk(4000, (16, 32)):
            assert_same(*(results(f, t) for f in (fast, loss)), "cpu", 1e-6)
    assert counter.frame_count == 2


CHANGING = {
    "label_smoothing": (0.1, 0.2, 0.3),
    "z_loss": (1e-3, 2e-3, 3e-3),
    "logit_scale": (0.5, 0.7, 0.9),
    "logit_softcap": (3.0, 4.0, 5.0),
    "logits_budget": (2**60, 2**62, 2**63 - 1),
    "ignore_index": (3, 5, 7),
    "sequence_dim": (0, 0, 0),
}
"""Options, and their values from call to call."""


@pytest.mark.parametrize("dynamic", [None, pytest.param(True, marks=pytest.mark.slow)])
def test_options_and_sizes_may_change_from_call_to_call(dynamic, device):
    """One graph for the first values and one for all others. With ``dynamic=True`` numbers, too, are symbols."""

    def call(x, weight, target, *values):
        options = dict(zip(CHANGING, values))
        return parallel_lce.linear_cross_entropy(x, weight, target, reduction="none", **options)

    fast, counter = compiled(call, dynamic=dynamic)
    for N, values in enumerate(zip(*CHANGING.values()), 24):
        t = operands(N, device)
        assert_as_eager(fast, call, t, device, t.x, t.weight, t.target.clamp(min=3), *values)
    assert counter.frame_count <= 2


def test_a_call_without_any_count_is_compiled(device):
    t = operands(24, device)
    call = lambda x, w, y: parallel_lce.rl.linear_cross_entropy(x, w, y.clamp(min=0))[0]  # noqa: E731
    assert_as_eager(compiled(call)[0], call, t, device)


def test_shapes_are_refused_in_the_trace_and_targets_of_debug_mode_in_each_run(device):
    t = operands(24, device)
    loss = torch.compile(parallel_lce.linear_cross_entropy, backend="eager")
    with pytest.raises(ValueError, match="15 features .* 16"):
        loss(t.x[:, 1:], t.weight, t.target)
    torch._dynamo.reset()
    t.target[3] = V
    fast, _ = compiled(parallel_lce.linear_cross_entropy)
    with debug_mode(), pytest.raises(ValueError, match=f"target {V} at position 3"):
        fast(t.x, t.weight, t.target)


def test_a_graph_is_refused_in_a_group_where_the_process_has_another_rank(device):
    """After a new initialisation the new group may have the old one's name."""
    t, (fast, counter), said = operands(24, device), compiled(parallel_lce.linear_cross_entropy), ""
    for rank in (0, 1):
        dist.init_process_group("fake", store=FakeStore(), rank=rank, world_size=2)
        try:
            fast(t.x, t.weight, t.target, process_group=dist.group.WORLD)
        except ValueError as refusal:
            said = str(refusal)
        dist.destroy_process_group()
    compiled_again = counter.frame_count == 2  # by torch 2.11
    words = r"made on rank 0 of 2, and this is rank 1 of 2.* call torch.compiler.reset\(\)"
    assert compiled_again or re.search(words, said, re.S)


class _Cut(torch.autograd.Function):
    forward = staticmethod(lambda ctx, loss: loss.clone())
    backward = staticmethod(lambda ctx, upstream: None)


def test_an_upstream_gradient_that_is_not_there_leaves_none(device):
    """Autograd may hand a graph's function None for an output that no gradient reaches."""
    t = operands(6, device)
    fast, _ = compiled(loss_of("recomputed"), "eager")
    _Cut.apply(fast(t.x, t.weight, t.target)).sum().backward()
    assert t.x.grad is None and t.weight.grad is None
