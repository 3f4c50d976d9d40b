"""Results and gradients beside float64: their errors are at most once to twice those of torch's path, in either backend
and by each strategy. test_fuzz.py draws options, layouts and shapes, and judges each row on its own."""

from dataclasses import replace
from unittest import mock

import pytest
import torch
import torch.nn.functional as F

import parallel_lce
from cases import DTYPES, normal
from fuzz.draw import Configuration
from fuzz.run import assemble, execute
from fuzz.truth import dense
from fuzz.values import make, operands
from measures import assert_no_worse, size, smallest_steps
from parallel_lce.core.partials import accumulation_dtype
from tools import everywhere, shrunk

BLOCK = 33_000  # bytes: 64 tokens of a window of 256 vocabulary rows


def of(N: int, V: int, D: int, dtype: str = "fp32", rows: tuple[int, ...] = (), **changes) -> Configuration:
    """A loss. ``rows``: of each rank, after each other."""
    rows = rows or (V,)
    shards = tuple((sum(rows[:rank]), n) for rank, n in enumerate(rows))
    options = dict(starts_given=len(rows) > 1, size_given=sum(rows) > V, reduction="none", block_bytes=BLOCK)
    return Configuration("loss", len(rows), (N,), D, V, shards, 1, dtype, **options | changes)


def assert_holds(c: Configuration, factor: float, backend: str, worlds, device: str) -> None:
    """Every error is at most ``factor`` times that of torch's path, 1.5 times for fp16."""
    factor = max(factor, 1.5) if c.dtype == "fp16" else factor
    found = assemble(c, everywhere(worlds, device, c.ranks, execute, c, backend))
    o, dtype, wide = operands(c, make(c)), DTYPES[c.dtype], accumulation_dtype(DTYPES[c.dtype])
    truth, yardstick = dense(c, o, torch.float64, torch.float64), dense(c, o, dtype, wide)
    for name, value in found.items():
        if name in ("vocab_size", "coded"):
            continue
        # Sums in another order. A sum relative to the largest logit, plus that, is rounded at the larger of the two.
        exact, larger = truth[name], "max_logit" if name in ("mean_logit", "expected_logit") else name
        floor = torch.finfo(wide).eps * max(size(exact), size(truth[larger])) + smallest_steps(value)
        if name == "dinput" and c.ranks > 1:
            # Each rank's part is rounded before it is added up, the yardstick has one part.
            floor = max(floor, torch.finfo(dtype).eps * size(exact))
        assert_no_worse(value.view(exact.shape), exact, yardstick[name], factor, floor, f"{c}: {name}")


EVERYTHING = dict(bias="plain", label_smoothing=0.1, z_loss=1e-2, scale=0.7, softcap=9.0, token_weight="zeros")
STRATEGIES = {
    "saved": of(64, 700, 24),
    "saved, a mean": of(64, 700, 24, reduction="mean", bias="plain"),
    "recomputed": of(64, 700, 24, budget=0),
    "some columns saved": of(64, 700, 24, budget=64 * 300 * 2),
    "some rows saved": of(250, 130, 48, budget=BLOCK),
    "accumulated": of(64, 700, 24, reduction="mean", budget=0),
}


@pytest.mark.parametrize("everything", [False, True], ids=["plain", "every option"])
@pytest.mark.parametrize("strategy", STRATEGIES)
@pytest.mark.parametrize("dtype", ["fp32", "bf16", "fp16"])
@pytest.mark.thinned
def test_every_strategy_keeps_the_errors(strategy, everything, dtype, worlds, backend, device):
    if device == "cuda" and (dtype == "fp32") != (backend == "torch"):
        pytest.skip("a GPU's are those of the backend that it takes by itself")
    c = replace(STRATEGIES[strategy], dtype=dtype, **(EVERYTHING if everything else {}))
    # What was accumulated is rounded again when the upstream gradient comes.
    assert_holds(c, 1.5 if strategy == "accumulated" else 1.1 if backend == "torch" else 1.0, backend, worlds, device)


# The target's entry of dlogits is a number of few bits here, and most of a gradient: torch's error is little more than
# the rounding of the result. Ours is where a token has a target of its own, as most of a few have.
FLAT = of(64, 700, 64, "bf16", ignored="none", upstream="ones")
SPLIT = dict(sequence_parallel=True, token_weight="zeros", block_bytes=1)
KERNELS = [
    # A block has one row of each rank, whose targets and weights lie N/P apart in those of the sequence.
    (of(10, 700, 4, rows=(350, 350), budget=0, ignored="none", **SPLIT), 1.5),
    (FLAT, 1.1),
    (replace(FLAT, budget=0), 1.1),
    (replace(FLAT, reduction="mean", budget=0), 1.1),
    # Three blocks and more, of which the larger shard saves a part alone. A block's consumed exponentials must not
    # serve a block whose buffer is already another's.
    (of(512, 1280, 64, "bf16", (1024, 256), budget=327680, ignored="none", sharpness=2.0, block_bytes=16_384), 1.5),
    (of(250, 130, 48, "bf16", budget=BLOCK), 1.1),
    # Pieces of the rows, in each of which an entry may be the target of several tokens.
    (of(600, 700, 72, "bf16", budget=0, bias="plain", block_bytes=1 << 19), 1.1),
]


@pytest.mark.parametrize(("c", "factor"), KERNELS, ids=str)
@pytest.mark.parametrize("backend", ["triton"], indirect=True)
def test_blocks_pieces_and_shards_keep_the_errors(c, factor, worlds, backend, device):
    assert_holds(c, factor, backend, worlds, device)


@pytest.mark.parametrize(("limit", "budget"), [("triton_backward.PRODUCT_BYTES", 1 << 20), ("triton.PARTIAL_BYTES", 0)])
def test_products_of_some_rows_keep_the_errors(limit, budget, worlds, device, kernels):
    with mock.patch(f"parallel_lce.backends.{limit}", 1):
        assert_holds(of(1100, 300, 8, "bf16", budget=budget), 1.1, "triton", worlds, device)


@pytest.mark.parametrize("budget", [None, 0])
@pytest.mark.parametrize("dtype", [torch.int64, torch.uint8])
@pytest.mark.parametrize("options", [{}, dict(reduction="none", ignore_index=7), dict(label_smoothing=0.3)], ids=str)
@pytest.mark.thinned
def test_losses_and_gradients_are_torchs(options, dtype, budget, device):
    """In float64, where both are exact: the definitions that the float64 reference of all tests shares."""
    x, weight, bias = (normal(*shape, seed=7).to(device) for shape in ((80, 17), (63, 17), (63,)))
    leaves = [v.requires_grad_() for v in (x, weight, bias)]
    target = torch.randint(63, (80,), generator=torch.Generator().manual_seed(0))
    target[::4] = options.get("ignore_index", -100 if dtype == torch.int64 else 5)
    expected = F.cross_entropy(F.linear(*leaves), target.to(device), **options)
    # What torch's functions have and this does not may be given as None.
    given = dict(linear_bias=bias, logits_budget=budget, weight=None, options=None, **options)
    with shrunk(2048, (16, 32)):
        with torch.no_grad():  # has another plan
            parallel_lce.linear_cross_entropy(x, weight, target.to(dtype).to(device), **given)
        loss = parallel_lce.linear_cross_entropy(x, weight, target.to(dtype).to(device), **given)
        found = [loss, *torch.autograd.grad(loss.sum(), leaves)]
    for value, its in zip(found, (expected, *torch.autograd.grad(expected.sum(), leaves))):
        torch.testing.assert_close(value, its, rtol=1e-11, atol=1e-13)


def _of_head(x, weight, target, dtype) -> tuple[torch.Tensor, torch.Tensor]:
    """Log-probabilities and entropies of plain torch: logits in the dtype, a softmax at least in fp32."""
    log_p = (x.to(dtype) @ weight.to(dtype).T).to(torch.promote_types(dtype, torch.float32)).log_softmax(1)
    return log_p.gather(1, target[:, None])[:, 0], -(log_p.exp() * log_p).sum(1)


@pytest.mark.parametrize("deviation", [0.01, 5.0, 20.0])
def test_log_probabilities_and_entropies_err_no_more_than_an_fp32_heads(deviation, device):
    """Normal logits of this standard deviation; targets drawn from the softmax, as from a policy."""
    x, weight = normal(200, 256, seed=1).bfloat16(), (normal(3000, 256, seed=2) * deviation / 16).bfloat16()
    p = (x.float() @ weight.float().T).softmax(1)
    target = p.multinomial(1, generator=torch.Generator().manual_seed(0))[:, 0]
    x, weight, target = (tensor.to(device) for tensor in (x, weight, target))
    found = parallel_lce.token_statistics(x, weight, target, entropy=True)
    heads = [_of_head(x, weight, target, dtype) for dtype in (torch.float64, torch.bfloat16, torch.float32)]
    # Roundings of a logit are relative to the sum of |x_k w_k|; tensor cores truncate where fp32 rounds.
    sums = (x.float() * weight[target].float()).abs().sum(1).max().item()
    slack = 4 * torch.finfo(torch.float32).eps * max(1.0, sums)
    for ours, true, *others in zip((found.target_log_prob, found.entropy), *heads):
        off, of_rounded, of_head = ((value - true).abs().max().item() for value in (ours, *others))
        assert off <= 2 * of_head + slack and off < 1e-3
        assert deviation < 1 or 10 * off < of_rounded
