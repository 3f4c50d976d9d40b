"""``token_loss`` beside float64 autograd of the same function of all logits; and what its function may not do."""

import gc
import weakref
from contextlib import nullcontext, suppress
from types import SimpleNamespace

import pytest
import torch

import parallel_lce
from cases import Tensors, dense_statistics, make, normal, part
from measures import ROUNDED, assert_close, assert_near
from tools import debug_mode, everywhere, on_ranks, savable, shrunk, small
from world import Member

N, V = 48, 120
HIDDEN = {"save": 16, "recompute": 64, "accumulate": 16}
"""Hidden size: with a large one an fp32 dW is larger than the exponentials, and gradients wait for the backward."""
OF_BLOCKS = {"save": (None, None), "recompute": (0, 8 * V * 2), "accumulate": (0, 8 * V * 2)}
"""A budget, and the bytes of a block of a few tokens."""


def ppo(s, old, advantage):
    ratio = (s.target_log_prob - old).exp()
    gain = torch.minimum(ratio * advantage, ratio.clamp(0.8, 1.2) * advantage)
    return -gain - 0.01 * s.entropy, {"clipped": (ratio - 1).abs() > 0.2, "kl": old - s.target_log_prob}


def everything(s, old, advantage):
    terms = s.target_log_prob, s.lse, s.entropy, s.sum_p_squared, s.mean_logit, s.mean_log_prob, s.expected_logit
    return sum(a * b * advantage for a, b in zip(terms, terms[1:])) + old * s.target_logit.sin() * s.max_logit.detach()


ASKED = {ppo: dict(entropy=True), everything: dict(entropy=True, sum_p_squared=True, mean_logit=True)}


# The function; where its gradients are formed; ranks, sequence parallelism, dtype and reduction.
CASES = [
    (ppo, "accumulate", 2, False, "bf16", "sum"),
    (everything, "save", 1, False, "fp16", "sum"),
    (everything, "recompute", 2, True, "fp32", "mean"),
    (everything, "accumulate", 2, True, "fp32", "sum"),
    (everything, "accumulate", 1, False, "fp64", "mean"),
]


def problem(kind: str = "accumulate", dtype: str = "fp32", device="cpu") -> tuple[Tensors, torch.Tensor, torch.Tensor]:
    """Every third target is -100, where the values per token are NaN."""
    t = make(N, V, HIDDEN[kind], dtype, device, ignored=True)
    old, advantage = normal(N, seed=5) - 4, normal(N, seed=6)
    return t, *[v.float().masked_fill(t.target.cpu() == -100, torch.nan).to(device) for v in (old, advantage)]


def _ran(member: Member, function, kind, ranks, sequence_parallel, dtype, reduction):
    t, *values = problem(kind, savable(dtype, member.device), member.device)
    t, blocks, (budget, block) = part(t, member, sequence_parallel), [], OF_BLOCKS[kind]

    def loss(*given):
        blocks.append(len(given[1]))
        return function(*given)

    options = dict(process_group=member.group, sequence_parallel=sequence_parallel, reduction=reduction)
    options |= ASKED[function] | dict(logits_budget=budget)
    with shrunk(block, (8, 16)):
        total, metrics = parallel_lce.token_loss(t.x, t.weight, t.target, loss, *values, **options)
        gradients = torch.autograd.grad(total * 3, [t.x, t.weight])
    assert len(blocks) > 2 if kind == "accumulate" else blocks == [N]
    return [v.detach().cpu() for v in (total, *gradients)], {n: m.cpu() for n, m in metrics.items()}


def truth_of(function, reduction: str, t: Tensors, *values) -> tuple[list[torch.Tensor], dict]:
    """Loss, gradients and metrics in float64, without the ignored tokens."""
    counted = t.target != -100
    x, weight = (v.detach().double().requires_grad_() for v in (t.x, t.weight))
    found = dense_statistics((x @ weight.t())[counted], t.target[counted])
    losses = function(SimpleNamespace(**found), *[v[counted].double() for v in values])
    losses, metrics = losses if isinstance(losses, tuple) else (losses, {})
    total = losses.mean() if reduction == "mean" else losses.sum()
    whole = {n: torch.zeros(N, dtype=m.dtype).masked_scatter(counted, m.detach()) for n, m in metrics.items()}
    return [total.detach(), *torch.autograd.grad(total * 3, [x, weight])], whole


@pytest.mark.parametrize("case", CASES, ids=lambda case: "-".join([case[0].__name__, *map(str, case[1:])]))
def test_loss_gradients_and_metrics_are_those_of_float64(case, backend, worlds, device):
    function, kind, ranks, sequence_parallel, dtype, reduction = case
    found = everywhere(worlds, device, ranks, _ran, *case)
    (total, dx, dweight), metrics = truth_of(function, reduction, *problem(kind, savable(dtype, device)))
    dxs = [gradients[1] for gradients, _ in found]
    assert all(torch.equal(gradients[0], found[0][0][0]) for gradients, _ in found), "the ranks have one loss"
    rounded = ROUNDED.get(dtype, 1e-12)
    assert_close(found[0][0][0], total, rounded / 10)
    assert_close(torch.cat(dxs) if sequence_parallel else dxs[0], dx, rounded, name="dx")
    assert_close(torch.cat([gradients[2] for gradients, _ in found]), dweight, rounded, name="dweight")
    for name, truth in metrics.items():
        for _, of_rank in found:
            assert of_rank[name].dtype == (truth.dtype if truth.dtype == torch.bool else torch.float32)
            assert_near(of_rank[name].double(), truth.double(), 1e-3)


@pytest.mark.parametrize("kind", OF_BLOCKS)
def test_every_mode_has_the_gradients_of_the_plain_call(kind, device):
    """In evaluation the function has no gradients; a second backward, a checkpoint, a compiled function, and values of
    inference mode, which autograd could not save, have those of the plain call. Autocast is off in the function, and
    losses that are constants have no gradient."""
    (budget, block), (t, *values) = OF_BLOCKS[kind], problem(kind, device=device)
    t, grad_modes = part(t, Member(0, 1, torch.device(device), None)), []

    def loss(*given):
        grad_modes.append(torch.is_grad_enabled() and given[0].target_log_prob.requires_grad)
        assert not torch.is_autocast_enabled(torch.device(device).type)
        return ppo(*given)

    def total(x, weight, target=t.target, *given):
        given = given or values
        return parallel_lce.token_loss(x, weight, target, loss, *given, entropy=True, logits_budget=budget)[0]

    leaves = [t.x, t.weight]
    with shrunk(block):
        value = total(*leaves)
        true = torch.autograd.grad(value, leaves, retain_graph=True)
        ways = {"again": lambda: value, "compiled": lambda: torch.compile(total, backend="eager")(*leaves)}
        ways["checkpoint"] = lambda: torch.utils.checkpoint.checkpoint(total, *leaves, use_reentrant=False)
        with torch.inference_mode():
            others = [value.clone() for value in (t.target, *values)]
        ways["inference"] = lambda: total(*leaves, *others)
        for way in ways.values():
            for found, exact in zip(torch.autograd.grad(way(), leaves), true):
                assert_near(found, exact, 1e-6)
        assert all(grad_modes)
        with torch.no_grad():
            assert_near(total(*leaves), value, 1e-6)
        assert grad_modes.pop() is False
        with torch.autocast(torch.device(device).type):
            assert total(*leaves).isfinite()
        constant, _ = parallel_lce.token_loss(*leaves, t.target, lambda s: s.lse.detach(), logits_budget=budget)
        assert not constant.requires_grad


def test_a_whole_graph_has_no_place_for_it():
    t, *values = problem()

    @torch.compile(backend="eager", fullgraph=True)
    def total(x):
        return parallel_lce.token_loss(x, t.weight, t.target, ppo, *values, entropy=True)[0]

    with pytest.raises(Exception, match="use token_statistics"):
        total(t.x)


@pytest.mark.parametrize(
    ("loss", "block", "found"),
    [
        (lambda s, a: s.lse - s.lse.mean(), True, True),
        (lambda s, a: s.lse.cumsum(0), False, True),
        (lambda s, a: s.lse.flip(0).cumsum(0).flip(0), False, True),
        (lambda s, a: s.lse.exp() * a, True, False),
    ],
)
def test_debug_mode_finds_what_is_not_elementwise(loss, block, found, device):
    t, _, advantage = problem(device=device)
    with debug_mode(), shrunk(2000 if block else None):
        for x in (t.x, t.x.clone().requires_grad_()):
            given = x, t.weight, t.target.clamp(min=0), loss, advantage.nan_to_num(1.0)
            if found:
                with pytest.raises(ValueError, match=r"must be elementwise: .* in a block of \d+ tokens, and"):
                    parallel_lce.token_loss(*given, logits_budget=0 if block else None)
            else:
                parallel_lce.token_loss(*given, logits_budget=0 if block else None)


@pytest.mark.parametrize("kind", ["save", "accumulate"])
@pytest.mark.parametrize(("everyone", "debug"), [(True, False), (True, True), (False, False), (False, True)])
@on_ranks(2)
def test_an_exception_ends_on_every_rank(member, kind, everyone, debug):
    """The ranks' collectives match before and after it."""
    (budget, block), (t, *values) = OF_BLOCKS[kind], problem(kind, device=member.device)
    t, calls, said = part(t, member), [], "nothing"
    options = dict(entropy=True, process_group=member.group, logits_budget=budget)

    def loss(*given):
        calls.append(given)
        if len(calls) == 1 and (everyone or member.rank):
            raise RuntimeError("no advantage")
        return ppo(*given)

    with shrunk(block), debug_mode() if debug else nullcontext():
        try:
            parallel_lce.token_loss(t.x, t.weight, t.target, loss, *values, **options)
        except Exception as error:  # a rank that misses it must not leave the others
            said = f"{type(error).__name__}: {error}"
        total, _ = parallel_lce.token_loss(t.x, t.weight, t.target, ppo, *values, **options)
        total.backward()
    expected = "RuntimeError: no advantage" if everyone or member.rank else "nothing"
    if debug and expected == "nothing":
        expected = "ValueError: rank(s) [1] of process_group refused their arguments, rank 1 because: loss raised "
        expected += "RuntimeError: no advantage"
    assert said == expected and t.x.grad.isfinite().all()


def test_what_the_function_raises_in_a_second_backward_reaches_the_caller():
    (budget, block), (t, *values), failing = OF_BLOCKS["accumulate"], problem(), []

    def loss(*given):
        return ppo(*given) if not failing else 1 / 0

    with shrunk(block):
        given = t.x.requires_grad_(), t.weight, t.target, loss, *values
        total, _ = parallel_lce.token_loss(*given, entropy=True, logits_budget=budget)
        total.backward(retain_graph=True)
        failing.append(True)
        with pytest.raises(ZeroDivisionError):
            total.backward()


def test_an_exception_keeps_nothing_of_its_call():
    """Such as its exponentials, beside which a smaller microbatch would run."""
    t, values = small(N=N), []

    def loss(statistics):
        values.append(weakref.ref(statistics.lse))
        raise RuntimeError("no memory")

    gc.collect()
    gc.disable()
    try:
        with suppress(RuntimeError):
            parallel_lce.token_loss(t.x, t.weight, t.target, loss)
        assert [ref() for ref in values] == [None]
    finally:
        gc.enable()


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (dict(loss=None), "loss must be a function of statistics and values per token, got NoneType"),
        (dict(reduction="none"), "reduction must be 'sum' or 'mean', got 'none'"),
        (dict(values=[3.0]), r"per_token\[0\] must be a tensor, got float"),
        (dict(values=[torch.ones(N, 1)]), rf"must have the shape of target, \[{N}\] on cpu, got \[{N}, 1\]"),
        (dict(values=[torch.ones(N, requires_grad=True)]), r"per_token\[0\] requires a gradient"),
        (dict(loss=lambda s: s.lse.sum()), rf"losses \[{N}\] on cpu, .* as 'losses' it returned \[\] of torch.float32"),
        (dict(loss=lambda s: -s.top_logits), "loss reads top_logits, which token_loss does not compute"),
        (dict(loss=lambda s: (repr(s), s.argmax)[1], argmax=True), "as 'losses' it returned .* of torch.int64"),
        (dict(loss=lambda s: (s.lse, {"kl": 3.0})), "as 'kl' it returned float"),
        (dict(loss=lambda s: (s.lse, s.lse)), "dict of metrics, got .* of torch.float32"),
        (dict(loss=lambda s: s.expected_logit + 1, argmax=True), "reads expected_logit, .* entropy=True"),
        (
            dict(loss=lambda s: s.vocab_size.neg_()),
            "loss must not write into its statistics, and it wrote into vocab_size",
        ),
        (dict(gradient_filter=0.1, entropy=True), "cannot be combined with entropy"),
    ],
)
def test_what_the_function_returns_or_reads_may_be_refused(change, words):
    t = small(N=N, V=V)
    given = dict(loss=lambda s, *values: s.lse, values=[]) | change
    loss, values = given.pop("loss"), given.pop("values")
    with pytest.raises(ValueError, match=words):
        parallel_lce.token_loss(t.x, t.weight, t.target, loss, *values, **given)


@pytest.mark.parametrize("kind", ["save", "accumulate"])
@on_ranks(2)
def test_debug_mode_compares_what_the_function_gets_and_returns(member, kind):
    (budget, block), (t, *values) = OF_BLOCKS[kind], problem(kind, device=member.device)
    t, options = part(t, member), dict(entropy=True, process_group=member.group, logits_budget=budget)

    def scaled(*given):
        losses, metrics = ppo(*given)
        return losses * (1 + member.rank), metrics

    def renamed(*given):
        losses, metrics = ppo(*given)
        return losses, {f"kl {member.rank}": metrics["kl"]}

    with debug_mode(), shrunk(block):
        for loss, words in ((scaled, "about the loss:"), (renamed, "about the metrics of loss")):
            with pytest.raises(ValueError, match=words):
                parallel_lce.token_loss(t.x, t.weight, t.target, loss, *values, **options)
        old, advantage = values
        with pytest.raises(ValueError, match=r"disagree about per_token\[0\]: rank 0 has"):
            parallel_lce.token_loss(t.x, t.weight, t.target, ppo, old + member.rank, advantage, **options)
        parallel_lce.token_loss(t.x, t.weight, t.target, ppo, *values, **options)[0].backward()
