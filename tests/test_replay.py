"""Replayed calls: the same bits as calls that are not replayed, whatever changed between them."""

from __future__ import annotations

import gc
import os
import subprocess
import sys
import threading
import tracemalloc
import weakref
from collections.abc import Callable
from contextlib import contextmanager, nullcontext
from unittest import mock

import pytest
import torch
from torch.multiprocessing.reductions import StorageWeakRef
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode

import parallel_lce
from cases import Case, Tensors, loss_options, make, ours
from parallel_lce import collectives, prepare, recording, replay, tape
from parallel_lce.arguments import LossOptions
from parallel_lce.fused_loss import fused_loss
from parallel_lce.grad_buffers import MainGrad
from tools import arguments_of, chosen_backend, fields, results_of, shrunk, small, statistics
from world import Member

pytestmark = pytest.mark.usefixtures("kernels", "triton")


@pytest.fixture
def triton():
    with chosen_backend("triton"):
        prepare.KNOWN.clear()
        yield
        prepare.KNOWN.clear()


@contextmanager
def never_replayed():
    prepare.KNOWN.clear()
    with mock.patch.object(replay, "_MOST_TAPES", 0):
        yield
    prepare.KNOWN.clear()


@contextmanager
def replays():
    """Yields a list with an entry per replay."""
    found, one = [], tape.Tape.replay
    with mock.patch.object(tape.Tape, "replay", lambda self, inputs: (found.append(self), one(self, inputs))[1]):
        yield found


def called(case: Case, device: str, seed: int, weights: bool = False) -> list[torch.Tensor]:
    """Loss and gradients of the case with another seed's values, in memory of their own."""
    t: Tensors = make(Case(**{**vars(case), "seed": seed}), device)
    leaves = [v for v in (t.x, t.weight, t.bias, t.token_weight if weights else None) if v is not None]
    for name, leaf in zip(("x", "weight", "bias", "token_weight"), leaves):
        leaf.requires_grad_(name not in case.frozen.split())
    loss = parallel_lce.linear_cross_entropy(
        t.x,
        t.weight,
        t.target,
        linear_bias=t.bias,
        token_weight=t.token_weight,
        logit_scale=case.logit_scale,
        logit_softcap=case.logit_softcap,
        logits_budget=case.budget,
        **loss_options(case),
    )
    wanted = [leaf for leaf in leaves if leaf.requires_grad]
    return [loss.detach(), *torch.autograd.grad(loss, wanted, t.upstream.to(loss.dtype))]


def same(found: list[torch.Tensor], expected: list[torch.Tensor]) -> bool:
    return all(torch.equal(a, b) for a, b in zip(found, expected, strict=True))


SMALL = dict(N=20, V=200, D=16, dtype="bf16")
CASES = [
    Case(**SMALL),
    Case(**SMALL, reduction="none"),
    Case(**SMALL, reduction="sum", token_weight=True),
    Case(**SMALL, reduction="none", budget=0),
    Case(**SMALL, budget=0),
    Case(**SMALL, reduction="none", bias=True, label_smoothing=0.1, z_loss=1e-2),
    Case(**SMALL, reduction="none", logit_softcap=5.0, logit_scale=0.5),
    Case(**SMALL, reduction="none", frozen="x"),
    Case(**SMALL, reduction="none", frozen="weight", bias=True),
    Case(**SMALL | dict(dtype="fp32"), reduction="none", bias=True),
    Case(**SMALL | dict(dtype="fp16"), reduction="none"),
    Case(**SMALL | dict(dtype="fp16"), bias=True, budget=0),
    Case(**SMALL, reduction="none", ignored="all"),
    Case(**SMALL, reduction="none", sharpness=60.0),
]


def check_replays(one: Callable[[int], list[torch.Tensor]]) -> None:
    """The results of ``one(seed)`` have the same bits, whether replayed or not."""
    with never_replayed():
        expected = [one(seed) for seed in range(4)]
    with replays() as found:
        for seed in range(4):
            assert same(one(seed), expected[seed]), seed
    # Of forward and backward, from the third call on.
    assert len(found) == 4


@pytest.mark.parametrize("case", CASES, ids=str)
@pytest.mark.thinned
def test_replays_have_the_bits_of_other_calls(case, device):
    check_replays(lambda seed: called(case, device, seed))


def test_gradients_formed_in_forward(device):
    case = Case(N=64, V=150, D=16, dtype="bf16", budget=0)
    with shrunk(block_bytes=8192):
        with never_replayed():
            expected = [called(case, device, seed) for seed in range(5)]
        with replays() as found:
            assert all(same(called(case, device, seed), expected[seed]) for seed in range(5))
    assert len(found) == 3


def test_statistics_are_replayed(device):
    def one(seed: int):
        t = small(device, dtype="bf16", N=40, D=32, seed=seed)
        s = statistics(t.x, t.weight, t.target)
        total = s.lse.sum() + 2 * s.entropy.sum() + 3 * s.mean_logit.sum()
        return [*(v.detach() for v in fields(s).values()), *torch.autograd.grad(total, (t.x, t.weight))]

    check_replays(one)


def filtered(device: str, seed: int) -> list[torch.Tensor]:
    """Loss and gradients of some tokens of a softmax of which most lies in the first of three tiles."""
    t = make(Case(**SMALL | dict(V=300), seed=seed), device)
    with torch.no_grad():
        t.x[:, 0], t.weight[:, 0] = 4.0, 0.0
        t.weight[:128, 0] = 2.0
    inputs = t.x.requires_grad_(), t.weight.requires_grad_()
    loss = parallel_lce.linear_cross_entropy(*inputs, t.target, gradient_filter=2**-9)
    return [loss.detach(), *torch.autograd.grad(loss, inputs)]


def test_filters_are_replayed(device):
    check_replays(lambda seed: filtered(device, seed))


def test_filters_of_recomputed_windows_are_replayed(device, monkeypatch):
    """Slices of two windows and of one. A third of the tokens are a sample."""
    from parallel_lce.backends import triton_backward, triton_windows
    from parallel_lce.kernels.filter import windows

    N, V = 404, 700
    monkeypatch.setattr(windows, "FEWEST_SAMPLED", 1)
    monkeypatch.setattr(triton_backward, "WINDOWED_BYTES", 2 * 256 * N * 2)

    def one(seed: int) -> list[torch.Tensor]:
        t = make(Case(N=N, V=V, D=16, dtype="bf16", seed=seed), device)
        with torch.no_grad():
            t.x[:, 0], t.weight[:, 0] = 3.0, torch.linspace(4.0, -4.0, V)
        inputs = t.x.requires_grad_(), t.weight.requires_grad_()
        options = dict(gradient_filter=2**-6, logits_budget=0, reduction="none")
        loss = parallel_lce.linear_cross_entropy(*inputs, t.target, **options)
        return [loss.detach(), *torch.autograd.grad(loss.sum(), inputs)]

    with shrunk(40_000), results_of(triton_windows, "list_active_windows") as listed:
        check_replays(one)
    assert listed


def test_filters_of_sixteen_slices_are_replayed(device, monkeypatch):
    """As many as 16384 tokens have of 131072 entries. No kernel runs, but launches are noted as a GPU's."""
    from parallel_lce.backends import triton_backward, triton_windows
    from parallel_lce.kernels import relaunch
    from parallel_lce.kernels.filter import windows

    compiled = relaunch.Compiled(lambda *arguments: None, None, None, lambda device: 0, 0, ())

    def launch(kernel, grid, *arguments, **constants):
        observer = getattr(relaunch._thread, "observer", None)
        return compiled if observer is None else observer(kernel, grid, arguments, constants)

    N, V = 404, 8192
    monkeypatch.setattr(windows, "FEWEST_SAMPLED", 1)
    monkeypatch.setattr(triton_backward, "WINDOWED_BYTES", V // 16 * N * 2)
    monkeypatch.setattr(relaunch.Relaunched, "launch", launch)
    t = make(Case(N=N, V=V, D=16, dtype="bf16"), device)
    inputs = t.x.requires_grad_(), t.weight.requires_grad_()
    with shrunk(40_000), results_of(triton_windows, "list_active_windows") as listed, replays() as found:
        for _ in range(4):
            options = dict(gradient_filter=2**-6, logits_budget=0, reduction="none")
            loss = parallel_lce.linear_cross_entropy(*inputs, t.target, **options)
            torch.autograd.grad(loss.sum(), inputs)
    # Forward and backward, of the third call and the fourth one.
    assert len(listed) == 2 * 16 and len(found) == 4


def post_training(kind: str, device: str, seed: int) -> list[torch.Tensor]:
    """Results and gradients of selected entries, with another seed's values, ids and scales."""
    t = make(Case(N=20, V=50, D=16, dtype="bf16", seed=seed), device)
    generator = torch.Generator().manual_seed(seed)
    ids = torch.randint(50, (60,), generator=generator).to(device)
    offsets = torch.cat(
        [torch.zeros(1), torch.randint(61, (19,), generator=generator).sort().values, torch.tensor([60.0])]
    )
    selected = ids.view(20, 3) if kind == "K" else (ids, offsets.long().to(device))
    scale = torch.rand(20, generator=generator).to(device) + 0.5
    leaves = [t.x.requires_grad_(), t.weight.requires_grad_()]
    if kind == "statistics":
        found = parallel_lce.token_statistics(*leaves, t.target, selected=selected, logit_scale=scale)
        log_probs = found.selected_log_prob
        assert log_probs is not None
    else:
        log_probs = parallel_lce.selected_log_probs(*leaves, selected, logit_scale=scale)
    upstream = torch.randn(log_probs.shape, generator=generator).to(device)
    return [log_probs.detach(), *torch.autograd.grad(log_probs, leaves, upstream)]


@pytest.mark.parametrize("kind", ["statistics", "K", "sets"])
def test_selected_entries_are_replayed(kind, device):
    check_replays(lambda seed: post_training(kind, device, seed))


def test_without_gradients(device):
    t = small(device, dtype="bf16", N=40, D=32)
    for context in (torch.no_grad, torch.inference_mode):
        with context(), replays() as found:
            first = parallel_lce.linear_cross_entropy(t.x, t.weight, t.target)
            for _ in range(3):
                assert torch.equal(parallel_lce.linear_cross_entropy(t.x, t.weight, t.target), first)
        assert found


def test_other_strides_and_addresses_are_other_runs(device):
    t = small(device, dtype="bf16", N=40, D=32)
    memory = torch.zeros(40 * 48 + 8, dtype=torch.bfloat16, device=device)
    views = [
        memory[: 40 * 32].view(40, 32),
        memory[1 : 1 + 40 * 32].view(40, 32),  # not 16 bytes aligned
        memory[: 40 * 48].view(40, 48)[:, :32],
        memory[: 40 * 32].view(32, 40).t(),
        t.x.detach(),
    ]
    with never_replayed():
        expected = parallel_lce.linear_cross_entropy(t.x, t.weight, t.target, reduction="none")
        dweight = torch.autograd.grad(expected.sum(), t.weight)[0]
    for _ in range(3):
        for view in views:
            view.copy_(t.x.detach())
            x = view.detach().requires_grad_()
            loss = parallel_lce.linear_cross_entropy(x, t.weight, t.target, reduction="none")
            torch.testing.assert_close(loss, expected, rtol=1e-6, atol=1e-6)
            torch.testing.assert_close(torch.autograd.grad(loss.sum(), t.weight)[0], dweight)


def test_inputs_that_share_memory(device):
    """As parameters do that an optimizer keeps in one buffer, here in another order each time."""
    case = Case(**SMALL, reduction="none", bias=True)
    t = make(case, device)

    def one(first: str):
        flat = torch.empty(t.weight.numel() + t.bias.numel() + 64, dtype=torch.bfloat16, device=device)
        at = (0, t.weight.numel()) if first == "weight" else (-(-t.bias.numel() // 8) * 8, 0)
        weight = flat[at[0] : at[0] + t.weight.numel()].view_as(t.weight).copy_(t.weight).requires_grad_()
        bias = flat[at[1] : at[1] + len(t.bias)].copy_(t.bias).requires_grad_()
        loss = parallel_lce.linear_cross_entropy(t.x, weight, t.target, linear_bias=bias, reduction="none")
        return [loss.detach(), *torch.autograd.grad(loss.sum(), (weight, bias))]

    with never_replayed():
        expected = one("weight")
    with replays() as found:
        assert all(same(one(first), expected) for first in ("weight", "weight", "bias", "weight", "bias"))
    assert found


WAYS = {
    "save": dict(N=48, V=301, D=32, reduction="mean"),
    "recompute": dict(N=48, V=301, D=32, reduction="none", budget=0),
    "accumulate": dict(N=48, V=201, D=16, reduction="mean", budget=0),
}


def over_ranks(member: Member, case: Case, blocks: bool) -> tuple[list[bool], int]:
    """Whether calls have the bits of calls that are not replayed, and the number of replays."""
    seeds = [Case(**{**vars(case), "seed": seed}) for seed in range(4)]
    with chosen_backend("triton"), shrunk(block_bytes=6144) if blocks else nullcontext():
        with never_replayed():
            expected = [ours(member, c) for c in seeds]
        with replays() as found:
            results = [ours(member, c) for c in seeds]
    equal = [all(torch.equal(r[name], e[name]) for name in e) for r, e in zip(results, expected)]
    return equal, len(found)


@pytest.mark.parametrize("sequence_parallel", [False, True], ids=["tp", "sp"])
@pytest.mark.parametrize("way", ["save", "recompute", "accumulate"])
@pytest.mark.thinned
def test_over_ranks(way, sequence_parallel, worlds, device):
    case = Case(dtype="bf16", ranks=2, sequence_parallel=sequence_parallel, **WAYS[way])
    for equal, number in worlds(2).run(over_ranks, case, way == "accumulate"):
        assert all(equal) and number == (2 if way == "accumulate" else 4)


def _most_gathered_at_once(member: Member) -> list[int]:
    """Of each of four calls, how many gathers' results were alive at once."""
    case = Case(120, 201, 16, "bf16", ranks=2, sequence_parallel=True, reduction="mean", budget=0)
    gather, most = collectives.all_gather, []

    def watched(result, *arguments, **options):
        results.append(StorageWeakRef(result.untyped_storage()))
        most[-1] = max(most[-1], sum(not r.expired() for r in results))
        return gather(result, *arguments, **options)

    with (
        chosen_backend("triton"),
        shrunk(block_bytes=2 * 8192),
        mock.patch.object(collectives, "all_gather", watched),
        mock.patch.object(recording, "_LARGE", 1),
    ):
        for _ in range(4):
            results: list[StorageWeakRef] = []
            most.append(0)
            ours(member, case)
    return most


def test_what_a_collective_gathered_is_freed_once_it_was_used(worlds, device):
    for first, *later in worlds(2).run(_most_gathered_at_once):
        assert 1 < first < 8
        assert later == [first] * 3


def test_one_tensor_as_two_arguments(device):
    square = small(device, dtype="bf16", N=32, V=32, D=32)
    for _ in range(4):
        loss = parallel_lce.linear_cross_entropy(square.x, square.x, square.target, reduction="none")
        apart = parallel_lce.linear_cross_entropy(
            square.x, square.x.detach().clone().requires_grad_(), square.target, reduction="none"
        )
        assert torch.equal(loss, apart)


def test_hooks_that_save_elsewhere(device):
    case = Case(**SMALL, reduction="none")
    with never_replayed():
        expected = [called(case, device, seed) for seed in range(4)]
    strided = lambda t: t.t().contiguous().t() if t.dim() == 2 else t.clone()  # noqa: E731
    hooks = [nullcontext, lambda: torch.autograd.graph.saved_tensors_hooks(strided, lambda t: t)]
    for seed in (0, 1, 2, 3):
        for context in hooks:
            with context():
                found = called(case, device, seed)
            assert torch.equal(found[0], expected[seed][0])
            for a, b in zip(found[1:], expected[seed][1:]):
                torch.testing.assert_close(a, b)


def test_a_second_backward(device):
    t = small(device, dtype="bf16", N=40, D=32)

    def one():
        loss = parallel_lce.linear_cross_entropy(t.x, t.weight, t.target, reduction="none").sum()
        return [torch.autograd.grad(loss, (t.x, t.weight), retain_graph=True) for _ in range(4)]

    with never_replayed():
        first, second, *_ = one()
    for _ in range(4):
        found = one()
        assert same(found[0], first) and all(same(later, second) for later in found[1:])


def test_other_needs_are_another_run(device):
    t = small(device, dtype="bf16", N=40, D=32)
    for _ in range(3):
        for wanted in ((t.x,), (t.weight,), (t.x, t.weight)):
            loss = parallel_lce.linear_cross_entropy(t.x, t.weight, t.target, reduction="none").sum()
            found = torch.autograd.grad(loss, wanted)
            assert [g.shape for g in found] == [w.shape for w in wanted]


def test_under_autocast(device):
    """Products of fp32 operands that autocast would round: forward and backward run in it, or only the backward."""
    t = small(device, dtype="fp64", N=40, D=32)
    x, weight = (v.detach().float().requires_grad_() for v in (t.x, t.weight))
    autocast = torch.autocast(device, dtype=torch.bfloat16)
    with never_replayed():
        loss = parallel_lce.linear_cross_entropy(x, weight, t.target)
        expected = [loss.detach(), *torch.autograd.grad(loss, (x, weight))]
    for _ in range(4):
        loss = parallel_lce.linear_cross_entropy(x, weight, t.target)
        with autocast:
            assert same([loss.detach(), *torch.autograd.grad(loss, (x, weight))], expected)
    rounded = []
    for _ in range(4):
        with autocast:
            loss = parallel_lce.linear_cross_entropy(x, weight, t.target)
            rounded.append([loss.detach(), *torch.autograd.grad(loss, (x, weight))])
        assert same(rounded[-1], rounded[0]) and not same(rounded[-1], expected)


def test_replays_on_several_threads(device):
    if device == "cpu":
        pytest.skip("Triton's interpreter runs on one thread at a time")
    case = Case(**SMALL, reduction="none")
    with never_replayed():
        expected = [called(case, device, seed) for seed in range(2)]
    wrong = []

    def many(seed: int) -> None:
        wrong.extend(n for n in range(8) if not same(called(case, device, seed), expected[seed]))

    threads = [threading.Thread(target=many, args=(seed,)) for seed in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not wrong


def test_dw_is_added_to_the_main_grad_of_the_call(device):
    """Each call has another one, and says once that it has been added to."""
    t = small(device, dtype="bf16", N=40, D=32)

    def one() -> list[torch.Tensor]:
        added, buffer = [], torch.full(t.weight.shape, 0.5, device=device)
        main_grad = MainGrad(buffer, lambda: added.append(True))
        losses = fused_loss(arguments_of(t.x, t.weight, t.target), LossOptions(), main_grad=main_grad)
        dx, dweight = torch.autograd.grad(losses.sum(), (t.x, t.weight), allow_unused=True)
        assert added == [True] and dweight is None
        return [losses.detach(), dx, buffer]

    with never_replayed():
        expected = one()
    with replays() as found:
        assert all(same(one(), expected) for _ in range(5))
    assert len(found) == 6


def test_no_tape_holds_a_tensor(device):
    case = Case(**SMALL, reduction="none")
    before = weakref.WeakSet()

    def one():
        t = make(case, device)
        x, weight = t.x.requires_grad_(), t.weight.requires_grad_()
        loss = parallel_lce.linear_cross_entropy(x, weight, t.target, reduction="none")
        gradients = torch.autograd.grad(loss.sum(), (x, weight))
        for tensor in (x, weight, t.target, loss, *gradients):
            before.add(tensor)

    for _ in range(4):
        one()
    gc.collect()
    assert not len(before)


class Operations(TorchDispatchMode):
    def __init__(self):
        super().__init__()
        self.found = []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        self.found.append(str(func))
        return func(*args, **(kwargs or {}))


def test_a_dispatch_mode_sees_every_call_alike(device):
    t = small(device, dtype="bf16", N=40, D=32)
    seen = []
    for _ in range(4):
        parallel_lce.linear_cross_entropy(t.x, t.weight, t.target)
        with Operations() as mode:
            parallel_lce.linear_cross_entropy(t.x, t.weight, t.target)
        seen.append(mode.found)
    assert seen[0] and all(one == seen[0] for one in seen)


class Functions(TorchFunctionMode):
    """Doubles what torch.add gives."""

    def __torch_function__(self, func, types, args=(), kwargs=None):
        result = func(*args, **(kwargs or {}))
        return result * 2 if func is torch.add else result


def test_what_a_function_mode_changes_is_not_replayed(device):
    x = torch.ones(4, device=device)
    tapes = replay.Tapes()
    for _ in range(4):
        with Functions():
            assert torch.equal(tapes.run("kind", lambda: torch.add(x, 1), (x,)), x * 4)
        assert torch.equal(tapes.run("kind", lambda: torch.add(x, 1), (x,)), x * 2)


def test_tensors_without_elements_are_replayed(device):
    x, tapes = torch.ones(4, 3, device=device), replay.Tapes()

    def work():
        empty = x.new_empty(4, 0, dtype=torch.bfloat16)
        return empty, x[:0].t(), torch.cat([x[:0], x + 1])

    found = [tapes.run("kind", work, (x,)) for _ in range(4)]
    assert isinstance([*tapes._tapes.values()][0], tape.Tape)
    for empty, view, rest in found:
        assert empty.shape == (4, 0) and empty.dtype == torch.bfloat16 and empty.device == x.device
        assert view.shape == (3, 0) and view.dtype == x.dtype
        assert torch.equal(rest, x + 1)
    assert found[2][0] is not found[3][0]


def test_no_tokens_are_replayed(device):
    for _ in range(3):
        input = torch.empty(0, 24, device=device, requires_grad=True)
        weight = torch.ones(40, 24, device=device, requires_grad=True)
        target = torch.empty(0, dtype=torch.int64, device=device)
        parallel_lce.linear_cross_entropy(input, weight, target, reduction="sum").backward()
        assert weight.grad is not None and torch.equal(weight.grad, torch.zeros_like(weight))


def test_one_thread_records_at_a_time(device):
    x = torch.ones(4, device=device)
    tapes = replay.Tapes()
    with replay._recording:
        for _ in range(3):
            assert torch.equal(tapes.run("kind", lambda: x + 1, (x,)), x + 1)
    assert [*tapes._tapes.values()] == [replay._RUN_ONCE]
    tapes.run("kind", lambda: x + 1, (x,))
    assert isinstance([*tapes._tapes.values()][0], tape.Tape)


def test_an_exception_ends_a_recording(device):
    x = torch.ones(4, device=device)
    fails = [False, True, False, False, False]

    def work():
        if fails.pop(0):
            recording.noted(lambda: 1 // 0)
        return x + 1

    def fall_through():
        try:
            recording.noted(lambda: 1 // 0)
        except ZeroDivisionError:
            return x + 2

    tapes = replay.Tapes()
    for failing in tuple(fails):
        with pytest.raises(ZeroDivisionError) if failing else nullcontext():
            assert torch.equal(tapes.run("kind", work, (x,)), x + 1)
    assert not replay._recording.locked()
    results, states = runs(fall_through, x)
    assert states == [replay._NEVER_REPLAYED] and all(torch.equal(r, x + 2) for r in results)


NO_DYNAMO = """
import sys, torch, parallel_lce
x, w = torch.ones(4, 16, dtype=torch.bfloat16, requires_grad=True), torch.ones(32, 16, dtype=torch.bfloat16)
for _ in range(4):
    parallel_lce.linear_cross_entropy(x, w, torch.arange(4)).backward()
assert "torch._dynamo" not in sys.modules
"""


def test_torch_dynamo_is_not_imported():
    if torch.cuda.is_available():
        pytest.skip("Triton's interpreter is tested")
    environment = {**os.environ, "PARALLEL_LCE_BACKEND": "triton", "TRITON_INTERPRET": "1"}
    subprocess.run([sys.executable, "-W", "ignore", "-c", NO_DYNAMO], env=environment, check=True)


def runs(work, *inputs, times=4):
    """The results of the same run again and again, and the tapes' states."""
    tapes = replay.Tapes()
    return [tapes.run("kind", work, inputs) for _ in range(times)], [*tapes._tapes.values()]


def test_what_the_host_reads_is_not_replayed(device):
    x = torch.arange(4.0, device=device)

    def work():
        count = int(x.sum().item())
        return x * count

    tapes = replay.Tapes()
    for value in (1.0, 1.0, 2.0, 3.0):
        x.fill_(value)
        assert torch.equal(tapes.run("kind", work, (x,)), x * (4 * value))
    assert [*tapes._tapes.values()] == [replay._NEVER_REPLAYED]


def test_a_tensor_from_elsewhere_is_not_replayed(device):
    x, hidden = torch.ones(4, device=device), torch.ones(4, device=device)
    results, states = runs(lambda: x + hidden, x)
    assert states == [replay._NEVER_REPLAYED] and all(torch.equal(r, x + hidden) for r in results)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.int32, torch.float64], ids=str)
def test_memory_of_another_dtype(dtype, device):
    x = torch.ones(8, dtype=dtype, device=device)

    def work():
        memory = torch.empty(1024, dtype=torch.uint8, device=device)
        part = memory[64 : 64 + 8 * dtype.itemsize].view(dtype)
        part.copy_(x)
        return part.view(2, 4) + 1

    results, [found] = runs(work, x)
    assert isinstance(found, tape.Tape)
    assert all(torch.equal(r, torch.full((2, 4), 2, dtype=dtype, device=device)) for r in results)


def test_results_in_place_and_views_of_inputs(device):
    x = torch.zeros(3, 4, device=device)

    def work():
        x[1].add_(1)
        rows = x.t()
        return [rows, None, (x[1:], 7)], torch.cat([x, x]).sum(0)

    tapes = replay.Tapes()
    for times in range(1, 5):
        [rows, nothing, (part, seven)], total = tapes.run("kind", work, (x,))
        assert nothing is None and seven == 7
        assert rows.data_ptr() == x.data_ptr() and torch.equal(rows, x.t()) and torch.equal(part, x[1:])
        assert torch.equal(total, torch.full((4,), 2.0 * times, device=device))
    assert isinstance([*tapes._tapes.values()][0], tape.Tape)


def test_memory_is_released_after_its_last_use(device, monkeypatch):
    monkeypatch.setattr(recording, "_LARGE", 1)
    x = torch.ones(4, device=device)
    alive: list[weakref.ref] = []

    def work():
        first = torch.empty(4, device=device)
        torch.mul(x, 2, out=first)
        second = first + 1
        del first
        return second + 1

    results, [found] = runs(work, x)
    assert all(torch.equal(r, x * 2 + 2) for r in results)
    one = tape.Operation.run

    def watched(action, memory):
        alive.append(sum(m is not None for m in memory))
        one(action, memory)

    with mock.patch.object(tape.Operation, "run", watched):
        found.replay((x,))
    # The input, and at each operation what it reads but no more.
    assert alive == [2, 2, 2]


def test_the_number_of_tapes_is_bounded(device, monkeypatch):
    monkeypatch.setattr(replay, "_MOST_TAPES", 3)
    tapes = replay.Tapes()
    x = torch.ones(4, device=device)
    for kind in range(10):
        assert torch.equal(tapes.run(kind, lambda: x + 1, (x,)), x + 1)
    assert len(tapes._tapes) == 3


def test_the_memory_of_all_tapes_of_the_process_is_bounded(device, monkeypatch):
    """Of calls of many lengths the oldest tapes are forgotten, and the newest are replayed."""
    assert replay._MOST_ACTIONS * 2048 <= 32 << 20
    assert replay._MOST_ACTIONS > 2 * recording._MOST_ACTIONS, "a forward and a backward never drive each other out"
    monkeypatch.setattr(replay, "_MOST_ACTIONS", 500)
    x, known = torch.ones(4, device=device), [replay.Tapes() for _ in range(60)]

    def work():
        y = x
        for _ in range(30):
            y = torch.cat([y[:2], y[2:] + 1])
        return y

    def number_of_replays(tapes) -> int:
        with replays() as found:
            for _ in range(3):
                tapes.run("kind", work, (x,))
        return len(found)

    gc.collect()
    tracemalloc.start()
    try:
        assert [number_of_replays(tapes) for tapes in known] == [1] * 60
        gc.collect()
        kept = tracemalloc.get_traced_memory()[0]
    finally:
        tracemalloc.stop()
    assert kept < 500 * 2048, f"{kept >> 10} KiB"
    assert [len(tapes._tapes) for tapes in known] == [0] * 52 + [1] * 8
    assert number_of_replays(known[0]) == 1, "one that was forgotten is recorded again"


@pytest.mark.gpu
def test_a_replay_needs_no_more_memory():
    case = Case(N=2048, V=8192, D=512, dtype="bf16", reduction="none")
    t = make(case, "cuda")
    x, weight = t.x.requires_grad_(), t.weight.requires_grad_()

    def peak() -> int:
        torch.cuda.synchronize()
        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_allocated()
        loss = parallel_lce.linear_cross_entropy(x, weight, t.target, reduction="none")
        torch.autograd.grad(loss.sum(), (x, weight))
        return torch.cuda.max_memory_allocated() - before

    with never_replayed():
        expected = [peak() for _ in range(2)][1]
    with replays() as found:
        peaks = [peak() for _ in range(4)]
    assert found and peaks[-1] <= expected


@pytest.mark.gpu
@pytest.mark.parametrize("before", [1, 2, 3, 4])
def test_captured_in_a_cuda_graph(before):
    """After one call the captured one is recorded, after two and more it is a replay."""
    case = Case(N=256, V=4096, D=128, dtype="bf16", reduction="none")
    t = make(case, "cuda")
    x, weight = t.x.requires_grad_(), t.weight.requires_grad_()

    def step() -> list[torch.Tensor]:
        loss = parallel_lce.linear_cross_entropy(x, weight, t.target, reduction="none")
        return [loss.detach(), *torch.autograd.grad(loss, (x, weight), t.upstream)]

    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        for _ in range(before):
            step()
    torch.cuda.current_stream().wait_stream(stream)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        captured = step()
    for seed in (1, 2):
        other = make(Case(**{**vars(case), "seed": seed}), "cuda")
        with torch.no_grad():
            for mine, new in ((x, other.x), (weight, other.weight), (t.target, other.target)):
                mine.copy_(new)
        graph.replay()
        for a, b in zip(captured, step(), strict=True):
            torch.testing.assert_close(a, b)
