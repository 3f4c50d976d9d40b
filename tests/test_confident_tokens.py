"""Gradients of tokens that are sure of their target, beside ordinary ones: for every output, judged by themselves.

Truth is float64 on dense logits, the yardstick torch on logits in the inputs' dtype. 1 - p of the sure entry is given.
"""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F

import parallel_lce
from cases import DTYPES, normal
from measures import relative_error
from parallel_lce.backends import torch_backend
from parallel_lce.distillation import divergence, top_k_divergence
from tools import alone, chosen_backend
from world import Member

V, D, SURE, ORDINARY = 768, 96, 14, 6
MISSES = (1e-1, 1e-2, 1e-3, 2e-4, 2e-5, 1e-6)
TEACHER = (0.5, 0.2, 0.1, 0.05)


def problem(miss: float, dtype: torch.dtype, seed: int = 0, twins: bool = False):
    """Hidden states, weight, targets, selected ids. The first ``SURE`` tokens have 1 - p = ``miss`` at the targets.

    ``twins``: p is that of the target and of another entry, which has the same logit in another window.
    """
    weight = (normal(V, D, seed=seed) * (2 / D**0.5)).to(dtype)
    hidden = normal(SURE + ORDINARY, D, seed=seed + 1)
    target = torch.randint(V // 2, (len(hidden),), generator=torch.Generator().manual_seed(seed))
    sure = torch.stack([target, target + V // 2], 1) if twins else target[:, None]
    weight[sure] = weight[target][:, None]
    wide, along = weight.double(), F.normalize(weight.double()[target], dim=1)

    def missing(length: torch.Tensor) -> torch.Tensor:
        z = (hidden + length * along).to(dtype).double() @ wide.t()
        others = z.scatter(1, sure, -torch.inf).logsumexp(1, keepdim=True)
        return torch.sigmoid(others - z.gather(1, sure).logsumexp(1, keepdim=True))

    high = lengths(missing, miss, len(hidden), "cpu")
    high[SURE:] = 0
    hidden = (hidden + high * along).to(dtype)
    # The sure entries, the largest others, and one more.
    z = (hidden.double() @ wide.t()).scatter(1, sure, -torch.inf)
    others = z.topk(9, 1).indices[:, [0, 8] if twins else [0, 1, 8]]
    return hidden, weight, target, torch.cat([sure, others], 1)


def lengths(missing: Callable[[torch.Tensor], torch.Tensor], miss: float, tokens: int, device: str) -> torch.Tensor:
    """``[N, 1]``: with what length along its target ``missing`` is ``miss`` of each token."""
    low, high = (torch.full((tokens, 1), end, dtype=torch.float64, device=device) for end in (0.0, 200.0))
    for _ in range(30):
        middle = (low + high) / 2
        far = missing(middle) > miss
        low, high = torch.where(far, middle, low), torch.where(far, high, middle)
    return high


def teacher_of(hidden: torch.Tensor) -> torch.Tensor:
    return (hidden.double() * 0.7 + 0.3 * normal(*hidden.shape, seed=9).to(hidden.device)).to(hidden.dtype)


def dense(output: str, dtype: torch.dtype, given, softcap: float | None):
    """Values, dX and dW from logits in ``dtype``."""
    hidden, weight, target, ids = given
    leaves = hidden.to(dtype).requires_grad_(), weight.to(dtype).requires_grad_()
    teacher = F.linear(teacher_of(hidden).to(dtype), leaves[1].detach())
    z = F.linear(*leaves)
    z, teacher = (t if dtype == torch.float64 else t.float() for t in (z, teacher))
    if softcap is not None:
        z = softcap * torch.tanh(z / softcap)
    log_p, log_q = z.log_softmax(1), teacher.log_softmax(1)
    of_ids = log_p.gather(1, ids)
    half = z.new_tensor(0.5).log()
    log_m = torch.logaddexp(log_p + half, log_q + half)
    share = z.new_tensor(TEACHER)
    tail = (1 - of_ids.exp().sum(1)).clamp(min=torch.finfo(z.dtype).eps)
    rest = 1 - share.sum()
    values = {
        "loss": lambda: F.nll_loss(log_p, target, reduction="none"),
        "smoothed": lambda: F.cross_entropy(z, target, reduction="none", label_smoothing=0.1),
        "z_loss": lambda: F.nll_loss(log_p, target, reduction="none") + 1e-3 * z.logsumexp(1).square(),
        "lse": lambda: z.logsumexp(1),
        "mean_log_prob": lambda: log_p.mean(1),
        "expected_logit": lambda: (log_p.exp() * z).sum(1),
        "target": lambda: of_ids[:, 0],
        "selected": lambda: of_ids[:, 0],
        "selected_others": lambda: of_ids.sum(1),
        "entropy": lambda: -(log_p.exp() * log_p).sum(1),
        "sum_p_squared": lambda: log_p.exp().square().sum(1),
        "policy": lambda: 0.7 * of_ids[:, 0] - 0.3 * (log_p.exp() * log_p).sum(1) + 0.1 * of_ids.sum(1),
        "class": lambda: (share * (share.log() - of_ids)).sum(1) + rest * (rest.log() - tail.log()),
        "set": lambda: of_ids.log_softmax(1)[:, 0],
        "forward_kl": lambda: (log_q.exp() * (log_q - log_p)).sum(1),
        "reverse_kl": lambda: (log_p.exp() * (log_p - log_q)).sum(1),
        "jensen_shannon": lambda: (log_q.exp() * (log_q - log_m) + log_p.exp() * (log_p - log_m)).sum(1) / 2,
    }[output]()
    return [values.detach(), *torch.autograd.grad(values.sum(), leaves)]


OUTPUTS = (
    *("loss", "smoothed", "z_loss", "lse", "mean_log_prob", "expected_logit", "target", "selected", "selected_others"),
    *("entropy", "sum_p_squared", "policy", "class", "set", "forward_kl", "reverse_kl", "jensen_shannon"),
)


def values_of(output: str, hidden, weight, target, ids, whole_weight, options: dict, parallel: dict) -> torch.Tensor:
    given = hidden, weight, target
    both = options | parallel
    if output in ("loss", "smoothed", "z_loss"):
        extra = {"smoothed": {"label_smoothing": 0.1}, "z_loss": {"z_loss": 1e-3}}.get(output, {})
        return parallel_lce.linear_cross_entropy(*given, reduction="none", **extra, **both)
    if output == "set":
        return parallel_lce.selected_log_probs(hidden, weight, ids, **parallel)[:, 0]
    budget = {"logits_budget": options["logits_budget"]} | parallel
    if output == "class":
        stored = torch.tensor(TEACHER, device=ids.device).log().expand(ids.shape)
        return top_k_divergence(hidden, weight, ids, stored, reduction="none", **budget)
    betas = {"forward_kl": 0.0, "reverse_kl": 1.0, "jensen_shannon": 0.5}
    if output in betas:
        teacher = teacher_of(hidden.detach()), weight.detach()
        return divergence(hidden, weight, *teacher, beta=betas[output], reduction="none", **budget)
    selected = {"selected": ids[:, :1], "selected_others": ids, "policy": ids}.get(output)
    found = parallel_lce.token_statistics(
        *given,
        mean_logit=output == "mean_log_prob",
        expected_logit=output in ("expected_logit", "entropy", "policy"),
        sum_p_squared=output == "sum_p_squared",
        selected=selected,
        **both,
    )
    if output == "policy":
        return 0.7 * found.target_log_prob + 0.3 * found.entropy + 0.1 * found.selected_log_prob.sum(1)
    if output in ("selected", "selected_others"):
        return found.selected_log_prob.sum(1)
    return getattr(found, "target_log_prob" if output == "target" else output)


def ours(member: Member, output: str, given, options: dict, backend: str):
    """Values, dX and this rank's rows of dW."""
    hidden, weight, target, ids = (t.to(member.device) for t in given)
    leaves = hidden.clone().requires_grad_(), weight.chunk(member.ranks)[member.rank].clone().requires_grad_()
    parallel = {} if member.group is None else {"process_group": member.group}
    with chosen_backend(backend):
        values = values_of(output, *leaves, target, ids, weight, options, parallel)
        return [t.detach().cpu() for t in (values, *torch.autograd.grad(values.sum(), leaves))]


def judge(run, output: str, name: str, budget: int | None, softcap: float | None = None, twins: bool = False) -> None:
    """At most twice torch's error: of the values and of dX over the sure tokens among ordinary ones, and of dW of sure
    tokens alone. ``run(output, given, options)``: of all ranks."""
    dtype, misses = DTYPES[name], MISSES if softcap is None else MISSES[1:3]
    options = {"logits_budget": budget} | ({} if softcap is None else {"logit_softcap": softcap})
    for miss in misses:
        hidden, weight, target, ids = problem(miss, dtype, twins=twins)
        for tokens in (slice(None), slice(SURE)):
            given = hidden[tokens], weight, target[tokens], ids[tokens]
            ranks = run(output, given, options)
            found = [*ranks[0][:2], torch.cat([of_rank[2] for of_rank in ranks])]
            truth, yardstick = (dense(output, wide, given, softcap) for wide in (torch.float64, dtype))
            for what, value, exact, other in zip(("value", "dX", "dW"), found, truth, yardstick):
                part = slice(SURE) if what != "dW" else slice(None)
                if what == "dW" and tokens == slice(None):
                    continue  # dominated by ordinary tokens
                off, its = (relative_error(v[part], exact[part]) for v in (value, other))
                # The rounding of the result itself.
                floor = torch.finfo(dtype if what != "value" else torch.float32).eps / 2
                assert off <= 2 * its + floor, f"{output} at 1 - p = {miss}: {what} error {off:.2g}, torch's {its:.2g}"


@pytest.mark.thinned
@pytest.mark.parametrize("budget", [None, 0])
@pytest.mark.parametrize("name", ["bf16", "fp16"])
@pytest.mark.parametrize("output", OUTPUTS)
def test_sure_tokens_are_as_exact_as_torchs(output, name, budget, backend, device):
    def run(*arguments):
        return [ours(alone(device), *arguments, backend)]

    judge(run, output, name, budget)


@pytest.mark.parametrize("output", ["loss", "policy"])
def test_sure_tokens_under_a_softcap(output, backend, device):
    def run(*arguments):
        return [ours(alone(device), *arguments, backend)]

    judge(run, output, "bf16", None, softcap=30.0)


@pytest.mark.parametrize("output", ["class", "policy"])
def test_tokens_that_are_sure_of_two_entries(output, backend, device):
    def run(*arguments):
        return [ours(alone(device), *arguments, backend)]

    judge(run, output, "bf16", None, twins=True)


@pytest.mark.thinned
@pytest.mark.parametrize("budget", [None, 0])
@pytest.mark.parametrize("output", ["loss", "policy", "class", "sum_p_squared", "set"])
def test_sure_tokens_of_two_ranks(output, budget, backend, worlds, device):
    def run(*arguments):
        return worlds(2).run(ours, *arguments, backend)

    judge(run, output, "bf16", budget)


@pytest.mark.parametrize("output", ["target", "entropy"])
def test_sure_tokens_whose_logits_are_recomputed_in_another_order(output, monkeypatch, device):
    logits, recomputed = torch_backend.logits, torch_backend.BlockBackward._recomputed

    def in_another_order(*given):
        with monkeypatch.context() as patches:
            patches.setattr(torch_backend, "logits", lambda *operands: logits(*operands).mul_(1 - 2**-21))
            return recomputed(*given)

    monkeypatch.setattr(torch_backend.BlockBackward, "_recomputed", in_another_order)

    def run(*arguments):
        return [ours(alone(device), *arguments, "torch")]

    judge(run, output, "fp16", 0)


def test_no_log_probability_is_above_zero(backend, device):
    """Logits of targets and of selected entries are those of the log-sum-exp."""
    for name in ("bf16", "fp16"):
        hidden, weight, target, ids = (t.to(device) for t in problem(1e-6, DTYPES[name], seed=3))
        found = parallel_lce.token_statistics(hidden, weight, target, selected=ids)
        assert (found.target_log_prob <= 0).all() and (found.selected_log_prob <= 0).all()
        # A GPU sums both in one order, NumPy in Triton's interpreter does not.
        equal = slice(None) if device == "cuda" or backend == "torch" else slice(SURE)
        assert torch.equal(found.target_log_prob[equal], found.selected_log_prob[equal, 0])


@pytest.mark.parametrize("device", [pytest.param("cuda", marks=pytest.mark.gpu)], indirect=True)
@pytest.mark.parametrize("budget", [None, 0])
def test_a_sum_near_one_keeps_the_other_entries(budget, device):
    """The largest exponential is summed apart: beside its approximation on a GPU the others' 1e-5 would lose three
    times as much. Measured .07 of torch's error, and .28 where all are summed together."""
    V, D, N = 131072, 1024, 64
    generator = torch.Generator(device).manual_seed(0)
    weight = (torch.randn(V, D, generator=generator, device=device) * 2 / D**0.5).bfloat16()
    hidden = torch.randn(N, D, generator=generator, device=device)
    target = torch.randint(V, (N,), generator=generator, device=device)
    along, wide = F.normalize(weight.float()[target], dim=1), weight.double()

    def missing(length: torch.Tensor) -> torch.Tensor:
        log_p = ((hidden + length * along).bfloat16().double() @ wide.t()).log_softmax(1)
        return -log_p.gather(1, target[:, None])

    high = lengths(missing, 1e-5, N, device)
    hidden = (hidden + high * along).bfloat16()
    truth = F.cross_entropy(hidden.double() @ wide.t(), target, reduction="none")
    torchs = F.cross_entropy(F.linear(hidden, weight).float(), target, reduction="none")
    leaf = hidden.requires_grad_()
    found = parallel_lce.linear_cross_entropy(leaf, weight, target, reduction="none", logits_budget=budget)
    assert relative_error(found.detach(), truth) < 0.15 * relative_error(torchs.detach(), truth)
