"""Small calls of ragged sizes that launch every kernel of the triton backend, in their variants; for compiling the
kernels without a GPU (compile_kernels.py) and for running them under a checker of memory (sanitize.py).

Triton specialises a kernel for an integer of 1, unlike its interpreter: hence calls with one token, window or block."""

import dataclasses
import re
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path

import torch
import torch.distributed as dist

import parallel_lce
from parallel_lce.core.options import Options, Wanted
from parallel_lce.core.partials import TRAILER, Columns
from parallel_lce.distillation import divergence
from parallel_lce.features.filter import gradient
from parallel_lce.kernels import partials
from parallel_lce.kernels.results import Results
from tools import shrunk

NAMES = {
    name
    for file in (Path(__file__).parents[1] / "parallel_lce").rglob("*.py")
    for name in re.findall(r"\blce_\w+", file.read_text())
}
"""Of every kernel."""

gradient.SMALLEST_FILTERED = 0  # small problems are filtered, too

# Tokens, vocabulary rows, hidden size, saved vocabulary rows, and options: all, none, or "each", a temperature per
# token, with which no exponentials are saved.
CALLS = [
    (400, 1000, 64, 256, False),  # the plain call first
    (80, 125, 64, 125, True),
    (300, 1000, 64, 0, "each"),
    (1, 7, 8, 7, False),
    (33, 300, 15, 300, False),
]


def every_call(device: str, groups: list[dist.ProcessGroup | None]) -> Iterator[tuple[bool, Callable]]:
    """``(plain, call)``: plain is without bias, logits that are stored, and statistics beside those of the loss; a
    soft-cap is its only option of the logits."""
    for arguments in CALLS:
        yield from of_sizes(*arguments, torch.bfloat16, device)
    yield from of_sizes(*CALLS[1], torch.float16, device)
    for saved in (1000, 0):
        yield True, partial(capped, saved, device)
    for tokens in (300, 1):
        yield True, partial(coded, tokens, device)
    for columns in (Columns(), Columns(*[True] * len(dataclasses.fields(Columns)))):
        plain, tokens = columns == Columns(), 300
        gathered = torch.ones(8, columns.count * tokens + TRAILER, device=device)
        yield plain, partial(partials.merge_ranks, gathered, columns, tokens, None if plain else 77)
    for tokens in (1, 5):
        for group in groups:
            for every_option in (False, True):
                yield False, partial(small, tokens, every_option, group, device)


def operands(tokens: int, entries: int, depth: int, dtype: torch.dtype, device: str) -> list[torch.Tensor]:
    """Hidden states and weight, of a call's random values."""
    return [torch.randn(rows, depth).to(device, dtype).requires_grad_() for rows in (tokens, entries)]


def of_sizes(tokens, entries, depth, saved, everything, dtype, device) -> Iterator[tuple[bool, Callable]]:
    """Losses, filtered and not, or all statistics; log-probabilities of selected entries and of sets; divergences."""
    given = operands(tokens, entries, depth, dtype, device)
    target, each = torch.zeros(tokens, dtype=torch.int64, device=device), torch.ones(tokens, device=device)
    ids = target[:, None].repeat(1, 3)
    sets = target.repeat(3), torch.arange(tokens + 1, device=device) * 3
    budget = None if saved == entries else 2 * tokens * (saved + 256) * (saved > 0)
    options = {}
    if everything:
        bias = torch.zeros(entries, dtype=dtype, device=device, requires_grad=True)
        options |= dict(linear_bias=bias, logit_softcap=5.0)
        options |= dict(temperature=each) if everything == "each" else dict(logit_scale=each)

    def statistics():
        asked = dict(mean_logit=True, entropy=True, argmax=True, sum_p_squared=True, selected=ids)
        found = parallel_lce.token_statistics(*given, target, logits_budget=budget, **asked, **options)
        total = found.entropy + found.mean_logit + found.sum_p_squared + found.target_logit
        (total + found.selected_log_prob.sum(1)).sum().backward()

    def losses():
        for gradient_filter in (None, 0.001):
            filtered = dict(reduction="none", logits_budget=budget, gradient_filter=gradient_filter)
            parallel_lce.linear_cross_entropy(*given, target, **filtered).sum().backward()

    def selections():
        for selected in (ids, sets):
            parallel_lce.selected_log_probs(*given, selected, **options).sum().backward()

    def others():
        parallel_lce.token_statistics(*given, None, logits_budget=budget, **options)
        scales = {name: value for name, value in options.items() if name != "linear_bias"}
        for beta in (0.0, 0.5, 1.0):
            divergence(*given, *(v.detach() for v in given), beta=beta, **scales).backward()

    for plain, call in ((not everything, statistics if everything else losses), (not everything, selections)):
        yield plain, _in_blocks(tokens, call)
    yield False, _in_blocks(tokens, others)


def capped(saved: int, device: str) -> None:
    """Losses of soft-capped logits, recomputed or all saved."""
    x, weight = operands(300, 1000, 64, torch.bfloat16, device)
    target, options = torch.zeros(300, dtype=torch.int64, device=device), dict(reduction="none", logit_softcap=5.0)
    parallel_lce.linear_cross_entropy(x, weight, target, logits_budget=saved * 600, **options).sum().backward()


def coded(tokens: int, device: str) -> None:
    """Losses whose exponentials are saved as codes, most or all, and statistics without a target."""
    x, weight = operands(tokens, 1000, 64, torch.bfloat16, device)
    target, scratch = torch.zeros(tokens, dtype=torch.int64, device=device), 2 * tokens * 256
    with shrunk(scratch):
        for entries in (768, 1000):
            budget = scratch + tokens * entries
            given = dict(reduction="none", logits_budget=budget)
            for scale in (torch.ones(tokens, device=device), 1.0):
                losses = parallel_lce.linear_cross_entropy(x, weight, target, logit_scale=scale, **given)
                losses.sum().backward()
            parallel_lce.token_statistics(x, weight, None, logits_budget=budget).lse.sum().backward()


def _in_blocks(tokens: int, call: Callable) -> Callable:
    def shrunken():
        with shrunk(2 * tokens * 256):
            call()

    return shrunken


def small(tokens: int, every_option: bool, group: dist.ProcessGroup | None, device: str) -> None:
    """A mean; results of ranks that are merged; losses of logits that exist; log-probabilities of sets."""
    target = torch.zeros(tokens, dtype=torch.int64, device=device)
    x, weight = operands(tokens, 304, 64, torch.bfloat16, device)
    parallel_lce.linear_cross_entropy(x, weight, target, process_group=group).backward()
    smoothing, everything = 0.1 * every_option, dict.fromkeys(("mean_logit", "entropy", "argmax"), every_option)
    for kind, options in ("loss", dict(label_smoothing=smoothing, z_loss=smoothing)), ("statistics", everything):
        wanted = Wanted(kind, Options("a call", **options), target)
        columns = wanted.options.columns
        packed = torch.ones(2, columns.count * tokens + TRAILER, device=device)
        partials.merge_ranks(packed, columns, tokens, 304, Results.new(wanted, packed, tokens))
    logits = torch.randn(tokens, 300).to(device, torch.bfloat16).requires_grad_()
    parallel_lce.vocab_parallel_cross_entropy(logits, target, 0.1 * every_option, tp_group=group).sum().backward()
    sets = target.repeat(3), torch.arange(tokens + 1, device=device) * 3
    parallel_lce.selected_log_probs(x, weight, sets, process_group=group).sum().backward()
