"""torch.compile with ``fullgraph=True``: the same losses and gradients, and the operators' contracts."""

from __future__ import annotations

import shutil
from contextlib import contextmanager

import pytest
import torch
import torch._dynamo.testing
import torch._functorch.config
from torch.utils.checkpoint import checkpoint

import parallel_lce
from benchmarks.peak_memory import peak_memory
from blocks import watched_backwards
from cases import DTYPES, Case, make, part
from measures import ROUNDED, assert_close
from parallel_lce.backends import backend_of
from parallel_lce.run.fused_loss import fused_loss
from tools import DIFFERENTIABLE, chosen_backend, debug_mode, everywhere, fields, given, shrunk, small
from world import Member

V, D = 150, 16
SIZES = (40, 46, 57)  # tokens: compiled for one number, then for any


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
    """x, weight, bias, target and token_weight; the operands need gradients."""
    return small(device, **dict(N=N, V=V, D=D, dtype=dtype, ignored="some", token_weight=True) | options)


def gradients(value, t):
    leaves = [leaf for leaf in (t.x, t.weight, t.bias) if leaf is not None and leaf.requires_grad]
    return torch.autograd.grad(value, leaves, torch.ones_like(value))


def assert_as_eager(function, t, *given, device: str):
    """The compiled function's value and gradients, beside the function's own."""
    results = []
    for f in (compiled(function)[0], function):
        value = f(*(given or (t.x, t.weight, t.target)))
        results.append([value, *gradients(value, t)])
    assert_same(*results, device)
    return results[0]


def assert_same(found, expected, device: str) -> None:
    """To the bit where the same kernels run; a GPU's may be chosen by a tensor's address."""
    for a, b in zip(found, expected, strict=True):
        if device == "cpu":
            assert torch.equal(a, b)
        else:
            assert_close(a, b, next((r for name, r in ROUNDED.items() if DTYPES[name] == a.dtype), 1e-5))


SOME = 10000  # bytes: a part of the logits, beside blocks of 4000

LOSSES = {
    "saved": {},
    "none, every option": dict(reduction="none", label_smoothing=0.1, z_loss=1e-3, logit_scale=0.7, logit_softcap=5.0),
    "some saved": dict(reduction="none", logits_budget=SOME, label_smoothing=0.1),
    "recomputed": dict(reduction="none", logits_budget=0, logit_softcap=5.0),
    "accumulated": dict(logits_budget=0),
    "tempered": dict(reduction="none", logits_budget=0, logit_softcap=5.0, temperature=0.7, reduce_hidden_grad=False),
    "accumulated, every option": dict(
        reduction="sum", logits_budget=0, label_smoothing=0.1, z_loss=1e-3, logit_softcap=5.0
    ),
}


@contextmanager
def observed(device: str, dtype: str):
    """Yields a list of the number of tensors that each block's backward is handed."""
    backend, counts = backend_of(torch.empty(1, 1, dtype=DTYPES[dtype], device=device)), []
    with watched_backwards(backend, lambda task: counts.append(len(task.saved))):
        yield counts


@pytest.mark.parametrize(("dtype", "weighted"), [("fp32", False), ("bf16", True)])
@pytest.mark.parametrize("name", LOSSES)
@pytest.mark.thinned
def test_losses(name, dtype, weighted, device):
    """The loss and the gradients of eager mode by the same work, whatever N, compiled but twice.

    ``weighted``: with a bias and a weight of each token.
    """

    def loss(x, weight, bias, target, token_weight):
        return parallel_lce.linear_cross_entropy(
            x, weight, target, linear_bias=bias, token_weight=token_weight, **LOSSES[name]
        )

    fast, counter = compiled(loss)
    for N in SIZES:
        t = operands(N, device, dtype, bias=weighted)
        given = t.x, t.weight, t.bias, t.target, t.token_weight if weighted else None
        with shrunk(4000, (16, 32)), observed(device, dtype) as counts:
            value = fast(*given)
            found = gradients(value, t)
            work, counts[:] = list(counts), []
            expected = loss(*given)
            truth = gradients(expected, t)
        assert_same([value, *found], [expected, *truth], device)
        assert work == counts and work, "exponentials that were kept are used"
        assert [f.dtype for f in found] == [f.dtype for f in truth]
    assert counter.frame_count == 2


def test_sizes_and_numbers_may_all_be_dynamic(device):
    """With ``dynamic=True`` Python's numbers, too, are symbols in the graph."""
    options = dict(gradient_filter=2**-7, z_loss=0.1, logit_scale=0.5, logit_softcap=9.0)
    fast, counter = compiled(parallel_lce.linear_cross_entropy, dynamic=True)
    counts = []
    for N in (32, 33, 70):
        t = operands(N, device)
        given = {name: v * N / 32 for name, v in options.items()}
        value, expected = (f(t.x, t.weight, t.target, **given) for f in (fast, parallel_lce.linear_cross_entropy))
        found, truth = (torch.autograd.grad(v, [t.x, t.weight]) for v in (value, expected))
        assert_same([value, *found], [expected, *truth], device)
        counts.append(counter.frame_count)
    assert len(set(counts)) == 1


ASKED = [{}, dict(mean_logit=True), dict(mean_logit=True, expected_logit=True, argmax=True, sum_p_squared=True)]


@pytest.mark.parametrize("budget", [None, 0])
@pytest.mark.parametrize("names", [["lse", "target_log_prob"], list(DIFFERENTIABLE)], ids=["kept", "all"])
@pytest.mark.thinned
def test_statistics(names, budget, device):
    def statistics(*tensors, asked=ASKED[-1]):
        return parallel_lce.token_statistics(*tensors, logits_budget=budget, **asked)

    def total(*tensors):
        found = statistics(*tensors)
        return sum(getattr(found, name).sum() * (i + 1) for i, name in enumerate(names))

    (fast, counter), (fast_total, _) = compiled(statistics), compiled(total)
    for N in SIZES:
        t = operands(N, device)
        given = t.x.detach().view(1, N, D).requires_grad_(), t.weight, t.target.view(1, N)
        results, work = [], []
        for values, value in ((fast, fast_total), (statistics, total)):
            with shrunk(4000, (16, 32)), observed(device, "fp32") as counts:
                found = fields(values(*given))
                results.append([*found.values(), *torch.autograd.grad(value(*given), given[:2])])
                work.append(list(counts))
            for name, field in found.items():
                assert field.shape == (() if name == "vocab_size" else (1, N))
                assert field.requires_grad == (name in DIFFERENTIABLE)
        assert_same(*results, device)
        # Statistics that nobody differentiates, as the entropy may be, cost nothing in backward.
        assert work[0] == work[1]
    assert counter.frame_count == 2
    for asked, target in ((ASKED[0], None), (ASKED[1], t.target)):
        torch._dynamo.reset()  # which compiles only so many variants of a function
        found, expected = (f(t.x, t.weight, target, asked=asked) for f in (compiled(statistics)[0], statistics))
        assert fields(found).keys() == fields(expected).keys()


@pytest.mark.parametrize("outside_is_nan", [True, False])
@pytest.mark.parametrize("name", ["saved", "accumulated"])
def test_a_target_outside_has_the_loss_that_was_asked_for(name, outside_is_nan, device):
    """NaN, or lse - max as in Megatron. No public function has the option: they all want NaN."""
    reduction, budget = ("mean", 0) if name == "accumulated" else ("none", None)
    options = dict(reduction=reduction, ignore_index=-100, outside_is_nan=outside_is_nan, logits_budget=budget)
    loss = lambda x, w, y: fused_loss(*given(x, w, y, **options), None)  # noqa: E731
    t = operands(24, device)
    t.target[[1, 5]] = torch.tensor([V, -7], device=device)
    fast, _ = compiled(loss)
    with shrunk(4000, (16, 32)):
        results = []
        for f in (fast, loss):
            value = f(t.x, t.weight, t.target)
            results.append([value, *gradients(value, t)])
    (value, *_), (expected, *_) = results
    assert torch.equal(value.isnan(), expected.isnan())
    outside = value[[1, 5]] if name == "saved" else value
    assert outside.isnan().all() == outside_is_nan
    if not outside_is_nan:
        assert_same(*results, device)
    if name == "saved" and not outside_is_nan:
        z = (t.x @ t.weight.t())[[1, 5]]
        torch.testing.assert_close(outside, z.logsumexp(1) - z.amax(1))


@pytest.mark.parametrize("frozen", ["x", "weight"])
@pytest.mark.parametrize("name", ["saved", "accumulated"])
@pytest.mark.thinned
def test_frozen_operands(name, frozen, device):
    t = operands(24, device)
    getattr(t, frozen).requires_grad_(False)
    with shrunk(4000):
        assert_as_eager(lambda x, w, y: parallel_lce.linear_cross_entropy(x, w, y, **LOSSES[name]), t, device=device)


def test_evaluation_and_the_module(device):
    module = parallel_lce.LinearCrossEntropy(label_smoothing=0.1, vocab_size=V - 5)
    t = operands(24, device)
    t.target.clamp_(max=V - 6)
    with torch.no_grad():
        value, expected = compiled(module)[0](t.x, t.weight, t.target), module(t.x, t.weight, t.target)
    assert not value.requires_grad
    assert_same([value], [expected], device)


def test_autocast(device):
    def loss(x, weight, target):
        with torch.autocast(device, torch.bfloat16):
            return parallel_lce.linear_cross_entropy(x, weight, target)

    _, dx, _ = assert_as_eager(loss, operands(24, device), device=device)
    assert dx.dtype == torch.float32


@pytest.mark.parametrize("inside", [True, False])
@pytest.mark.parametrize("name", ["saved", "accumulated"])
@pytest.mark.thinned
def test_checkpointing(name, inside, device):
    loss = lambda x, w, y: parallel_lce.linear_cross_entropy(x, w, y, **LOSSES[name])  # noqa: E731
    t = operands(24, device)
    kept = lambda f: lambda *a: checkpoint(f, *a, use_reentrant=False)  # noqa: E731
    again = compiled(kept(loss))[0] if inside else kept(compiled(loss)[0])
    with shrunk(4000):
        found, expected = (gradients(f(t.x, t.weight, t.target), t) for f in (again, loss))
    assert_same(found, expected, device)


@pytest.mark.parametrize("name", ["saved", "some saved", "recomputed", "accumulated"])
def test_a_graph_may_be_walked_again(name, device):
    """The first walk uses up what was kept: a later one recomputes it, and writes over nobody's result."""
    fast, _ = compiled(lambda x, w, y: parallel_lce.linear_cross_entropy(x, w, y, **LOSSES[name]).sum())
    t = operands(41, device)
    with shrunk(4000, (16, 32)), torch._functorch.config.patch(donated_buffer=False):
        value = fast(t.x, t.weight, t.target)
        walks = [torch.autograd.grad(value, [t.x, t.weight], retain_graph=True)]
        copies = [g.clone() for g in walks[0]]
        walks += [torch.autograd.grad(value, [t.x, t.weight], retain_graph=True) for _ in range(2)]
    assert_same(walks[0], copies, "cpu")
    assert_same(walks[2], walks[1], device)
    for first, second in zip(*walks[:2]):
        assert_close(second, first, 1e-6)


def test_equal_calls_in_one_graph(device):
    """The compiler may merge them: two backwards then share what one forward kept."""

    def loss(x, weight, target):
        once, twice = (parallel_lce.linear_cross_entropy(x, weight, target, reduction="none") for _ in range(2))
        return once.sum() + twice.square().mean()

    t = operands(24, device)
    found, expected = (gradients(f(t.x, t.weight, t.target), t) for f in (compiled(loss)[0], loss))
    for a, b in zip(found, expected):
        assert_close(a, b, 1e-6)


def test_offloaded_tensors(device):
    """A copy of the ticket has nothing attached, and everything is recomputed."""
    fast, _ = compiled(lambda x, w, y: parallel_lce.linear_cross_entropy(x, w, y, reduction="none").sum())
    t = operands(24, device)
    with torch.autograd.graph.saved_tensors_hooks(torch.clone, lambda tensor: tensor):
        found = gradients(fast(t.x, t.weight, t.target), t)
    expected = gradients(
        parallel_lce.linear_cross_entropy(t.x, t.weight, t.target, reduction="none", logits_budget=0), t
    )
    for a, b in zip(found, expected):
        assert_close(a, b, 1e-6)


@pytest.mark.parametrize("name", ["saved", "accumulated"])
def test_what_is_saved_is_not_copied(name, device):
    """Neither in the forward graph nor in the backward one; and afterwards nothing is left of it."""
    N, V = 512, 4096
    fast, _ = compiled(lambda x, w, y: parallel_lce.linear_cross_entropy(x, w, y, **LOSSES[name]))
    t = operands(N, device, V=V)

    def step():
        value = fast(t.x, t.weight, t.target)
        return torch.autograd.grad(value, [t.x, t.weight])

    with shrunk(1 << 20, (64, 2048)):
        step()
        peak, alive = peak_memory(step, device)
    results = (N + V) * D * 4
    logits = N * V * 4 if name == "saved" else 1 << 20
    # Beside them tiles, and of accumulated gradients the unscaled ones.
    assert peak <= logits + 2 * results + (3 << 20) < logits + N * V * 4
    assert alive <= results + (64 << 10)


def test_inductor(device):
    if shutil.which("g++") is None:
        pytest.skip("Inductor needs a C++ compiler, and there is no g++")
    if " " in torch.__file__ and device == "cpu":
        pytest.skip("Inductor's command line does not quote PyTorch's folder, whose name has a blank here")

    def loss(x, weight, target):
        saved = parallel_lce.linear_cross_entropy(2 * x, weight, target, reduction="none", logits_budget=SOME)
        accumulated = parallel_lce.linear_cross_entropy(x, weight, target, logits_budget=0)
        return (saved * torch.arange(saved.shape[0], device=saved.device)).sum() + accumulated

    fast, counter = compiled(loss, "inductor")
    for N in (24, 41, 30):
        t = operands(N, device)
        with shrunk(4000, (16, 32)):
            found, expected = (f(t.x, t.weight, t.target) for f in (fast, loss))
            pairs = zip([found, *gradients(found, t)], [expected, *gradients(expected, t)])
        for a, b in pairs:
            assert_close(a, b, 1e-6)
    assert counter.frame_count == 2


@pytest.mark.parametrize("name", ["saved", "some saved", "accumulated"])
@pytest.mark.thinned
def test_the_triton_backend(name, kernels, device):
    """Its backward writes over what is kept, which no graph may notice."""
    t = operands(40, device, "bf16", V=900)
    # Some is a window of 256 vocabulary rows.
    options = LOSSES[name] | ({"logits_budget": 48000} if name == "some saved" else {})
    loss = lambda x, w, y: parallel_lce.linear_cross_entropy(x, w, y, **options).sum()  # noqa: E731
    results, work = [], []
    with chosen_backend("triton"), shrunk(24000):
        for f in (compiled(loss)[0], loss):
            with observed(device, "bf16") as counts:
                results.append(gradients(f(t.x, t.weight, t.target), t))
                work += counts
    assert_same(*results, device)
    assert any(work)


def _over_ranks(member: Member, name: str, sequence_parallel: bool):
    torch._dynamo.reset()
    t = part(make(Case(24, 2 * 30, D), member.device), member, sequence_parallel)
    where = dict(process_group=member.group, sequence_parallel=sequence_parallel)
    with shrunk(1000, (8, 16)):
        loss = lambda x, w, y: parallel_lce.linear_cross_entropy(x, w, y, **where, **LOSSES[name])  # noqa: E731
        assert_as_eager(loss, t, device=member.device.type)


@pytest.mark.parametrize(
    ("name", "sequence_parallel"),
    [(name, split) for name in ("saved", "some saved", "accumulated") for split in (False, True)]
    + [("tempered", False)],
)
@pytest.mark.thinned
def test_process_groups(name, sequence_parallel, worlds, device):
    everywhere(worlds, device, 2, _over_ranks, name, sequence_parallel)


# --- what is no part of a graph --------------------------------------------------------------------


def test_refusals(device):
    """Of shapes while the graph is traced; those of debug mode whenever it runs."""
    t = operands(24, device)
    loss = torch.compile(parallel_lce.linear_cross_entropy, backend="eager")
    with pytest.raises(ValueError, match="15 features .* 16"):
        loss(t.x[:, 1:], t.weight, t.target)
    torch._dynamo.reset()
    t.target[3] = V
    fast, _ = compiled(parallel_lce.linear_cross_entropy)
    assert fast(t.x, t.weight, t.target).isnan()
    with debug_mode(), pytest.raises(ValueError, match=f"target {V} at position 3"):
        fast(t.x, t.weight, t.target)


CHANGING = {
    "label_smoothing": [0.1 + i / 100 for i in range(5)],
    "z_loss": [1e-3 * (i + 1) for i in range(5)],
    "logit_scale": [0.5 + i / 7 for i in range(5)],
    "logit_softcap": [3.0 + i for i in range(5)],
    "temperature": [0.5 + i / 7 for i in range(5)],
    "logits_budget": [2**70, 2**65, 2**64],
    "ignore_index": [3, 5, 7, 9],
}
"""Option: its values from call to call."""


@pytest.mark.parametrize("dynamic", [None, True])
@pytest.mark.parametrize(
    ("function", "name"),
    [
        *(("loss", name) for name in CHANGING),
        *(("statistics", name) for name in ("logit_scale", "logit_softcap", "temperature", "logits_budget")),
    ],
)
@pytest.mark.thinned
def test_options_may_change_from_call_to_call(function, name, dynamic, device):
    """One graph for the first value and one for all others, as for sizes."""

    def call(x, weight, target, value):
        if function == "statistics":
            return parallel_lce.token_statistics(x, weight, target, **{name: value}).target_log_prob
        return parallel_lce.linear_cross_entropy(x, weight, target, reduction="none", **{name: value})

    t = operands(24, device)
    target = t.target.clamp(min=3)  # NaN is not equal to NaN
    graph, counter = compiled(call, dynamic=dynamic)
    for value in CHANGING[name]:
        found, expected = (f(t.x, t.weight, target, value) for f in (graph, call))
        assert_same([found, *gradients(found, t)], [expected, *gradients(expected, t)], device)
    assert counter.frame_count <= 3
