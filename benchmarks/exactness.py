"""How exact log-probabilities, entropies and their gradients are: three ways to compute them, each compared with
float64.

ours           `token_statistics`
bf16 logits    the logits in the inputs' dtype, converted to fp32 for the softmax, as trainers do
fp32 head      hidden states and weight converted to fp32, products in full fp32 (no TF32)
"""

import json
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass

import torch
from torch import Tensor

from .accuracy import BLOCK_BYTES
from .problem import Shape

BAND = 0.01  # a ratio outside of 1 ± BAND counts
# fp32 roundings of the largest sum of magnitudes, of which ours may be off beside twice the fp32 head's error. Tensor
# cores cut off what they add to a sum, where an fp32 product rounds it.
ROUNDINGS = 4
OURS, FP32_HEAD = "ours", "fp32 head"
# 1 - p of a token's largest entry. Gradients are compared among tokens between two of these: they are as small as
# 1 - p, and those of tokens that are not sure would hide the errors of the others.
EDGES = (1.0, 1e-1, 1e-2, 1e-3, 1e-4, 1e-5, 0.0)
OUTPUTS = "log-probability", "entropy", "log-probability of the largest"
FEWEST = 8  # tokens of a group that is judged; with fewer of them a way may be right by luck


@dataclass(frozen=True)
class Inputs:
    """What an output layer and its loss see, on one device."""

    name: str
    hidden: Tensor  # [N, D]
    weight: Tensor  # [V, D], in the dtype of the hidden states
    target: Tensor  # [N] int64

    @property
    def shape(self) -> Shape:
        return Shape(len(self.hidden), *self.weight.shape)

    @property
    def dtype_name(self) -> str:
        return {torch.bfloat16: "bf16", torch.float16: "fp16"}[self.hidden.dtype]


@dataclass(frozen=True)
class Scores:
    """Of each token; fp32, or fp64."""

    log_prob: Tensor  # [N], of the target
    entropy: Tensor  # [N], in nats


@dataclass(frozen=True)
class Deviation:
    """How far scores are from the truth, over the tokens. Differences are absolute, in nats. NaN anywhere is NaN."""

    mean: float  # of the log-probabilities
    largest: float
    smallest_ratio: float  # of exp(log-probability - truth): the importance ratio that PPO would see
    largest_ratio: float
    outside: float  # share of the tokens whose ratio is not within 1 ± BAND
    entropy_mean: float
    entropy_largest: float

    @classmethod
    def of(cls, found: Scores, truth: Scores) -> "Deviation":
        off = found.log_prob.double() - truth.log_prob
        entropy_off = (found.entropy.double() - truth.entropy).abs()
        ratio = off.exp()
        within = (ratio >= 1 - BAND) & (ratio <= 1 + BAND)  # not where the ratio is NaN
        return cls(
            mean=off.abs().mean().item(),
            largest=off.abs().max().item(),
            smallest_ratio=ratio.min().item(),
            largest_ratio=ratio.max().item(),
            outside=1 - within.double().mean().item(),
            entropy_mean=entropy_off.mean().item(),
            entropy_largest=entropy_off.max().item(),
        )


@dataclass(frozen=True)
class Group:
    """Tokens whose largest entry has 1 - p from `low` to `high`, and how far their dX are from the truth."""

    low: float
    high: float
    tokens: int
    errors: dict[str, dict[str, float]]  # of each output and way: norm of the difference over that of the truth

    @property
    def holds(self) -> bool:
        """Whether the errors of ours are at most twice those of rounded logits, and a rounding of the result."""
        if self.tokens < FEWEST:
            return True
        (rounded,) = {name for ways in self.errors.values() for name in ways} - {OURS, FP32_HEAD}
        rounding = torch.finfo(torch.bfloat16 if rounded.startswith("bf16") else torch.float16).eps / 2
        return all(ways[OURS] <= 2 * ways[rounded] + rounding for ways in self.errors.values())  # not for NaN


@dataclass(frozen=True)
class Case:
    """The deviations of all ways on one set of inputs."""

    name: str
    shape: Shape
    dtype_name: str
    largest_logit: float  # max |z|
    largest_sum: float  # max of sum |x_k w_k| over the targets' logits: what their roundings are relative to
    mean_log_prob: float  # of the targets, true
    deviations: dict[str, Deviation]
    groups: tuple[Group, ...] = ()

    @property
    def limit(self) -> float:
        """The largest difference that ours may have: twice the fp32 head's, plus a few roundings of the sums."""
        return self._limit(self.deviations[FP32_HEAD].largest)

    @property
    def entropy_limit(self) -> float:
        """The same of the entropies."""
        return self._limit(self.deviations[FP32_HEAD].entropy_largest)

    def _limit(self, of_head: float) -> float:
        return 2 * of_head + ROUNDINGS * torch.finfo(torch.float32).eps * max(1.0, self.largest_sum)

    @property
    def holds(self) -> bool:
        found = self.deviations[OURS]
        exact = found.largest <= self.limit and found.entropy_largest <= self.entropy_limit  # not for NaN
        return exact and all(group.holds for group in self.groups)

    def times(self, name: str) -> float:
        """The largest difference of a way relative to that of the fp32 head, or to one rounding if that has none."""
        smallest = torch.finfo(torch.float32).eps
        return self.deviations[name].largest / max(self.deviations[FP32_HEAD].largest, smallest)

    def as_dict(self) -> dict:
        """For JSON."""
        content = {
            "name": self.name,
            **vars(self.shape),
            "dtype": self.dtype_name,
            "max_abs_logit": self.largest_logit,
            "max_sum_of_magnitudes": self.largest_sum,
            "mean_log_prob": self.mean_log_prob,
            "allowed_largest": self.limit,
            "allowed_entropy_largest": self.entropy_limit,
            "holds": self.holds,
            "deviations": {name: asdict(deviation) for name, deviation in self.deviations.items()},
            "groups": [asdict(group) for group in self.groups],
        }
        return without_nan(content)


def without_nan(content: dict) -> dict:
    """For JSON, which has neither NaN nor infinities: null."""
    return json.loads(json.dumps(content), parse_constant=lambda _: None)


def measure(inputs: Inputs) -> Case:
    """All three ways against float64."""
    truth, largest_logit = head(inputs, torch.float64)
    rounded = f"{inputs.dtype_name} logits"
    ways: dict[str, Callable[[], Scores]] = {
        OURS: lambda: ours(inputs),
        rounded: lambda: head(inputs, inputs.hidden.dtype)[0],
        FP32_HEAD: lambda: head(inputs, torch.float32)[0],
    }
    deviations = {name: Deviation.of(way(), truth) for name, way in ways.items()}
    mean = truth.log_prob.mean().item()
    largest_sum = max(_sums_of_magnitudes(inputs))
    numbers = largest_logit, largest_sum, mean
    return Case(inputs.name, inputs.shape, inputs.dtype_name, *numbers, deviations, _groups(inputs))


def _groups(inputs: Inputs) -> tuple[Group, ...]:
    """The errors of dX, by how sure tokens are of their largest entries."""
    tops = [log_p.max(1) for _, log_p, _ in log_softmax(inputs, torch.float64)]
    entry = torch.cat([top.indices for top in tops])
    miss = torch.cat([top.values for top in tops]).expm1().neg_().clamp_(min=1e-300)
    truth = head_gradients(inputs, torch.float64, entry)
    ways = {
        OURS: lambda: our_gradients(inputs, entry),
        f"{inputs.dtype_name} logits": lambda: head_gradients(inputs, inputs.hidden.dtype, entry),
        FP32_HEAD: lambda: head_gradients(inputs, torch.float32, entry),
    }
    groups = [(low, high, (miss > low) & (miss <= high)) for high, low in zip(EDGES, EDGES[1:])]
    errors: list[dict[str, dict[str, float]]] = [{name: {} for name in truth} for _ in groups]
    for way, gradients in ways.items():
        for name, found in gradients().items():
            off, size = (rows.norm(dim=1) for rows in (found - truth[name], truth[name]))
            for (*_, tokens), its in zip(groups, errors):
                its[name][way] = (off[tokens].norm() / size[tokens].norm()).item()
    counts = [int(tokens.sum()) for *_, tokens in groups]
    return tuple(Group(*edges, n, its) for (*edges, _), n, its in zip(groups, counts, errors) if n)


def our_gradients(inputs: Inputs, entry: Tensor) -> dict[str, Tensor]:
    """dX `[N, D]` of each output. `entry [N]`: the selected ones."""
    from parallel_lce import token_statistics

    x = inputs.hidden.detach().requires_grad_()
    found = token_statistics(x, inputs.weight, inputs.target, expected_logit=True)
    values = [found.target_log_prob, found.entropy]
    gradients = [torch.autograd.grad(value.sum(), x, retain_graph=True)[0] for value in values if value is not None]
    selected = token_statistics(x, inputs.weight, None, selected=entry[:, None]).selected_log_prob
    assert selected is not None
    return dict(zip(OUTPUTS, [*gradients, *torch.autograd.grad(selected.sum(), x)]))


def head_gradients(inputs: Inputs, dtype: torch.dtype, entry: Tensor) -> dict[str, Tensor]:
    """The same of logits in `dtype`."""
    weight = inputs.weight.to(dtype)
    found = {name: torch.empty_like(inputs.hidden, dtype=dtype) for name in OUTPUTS}
    for tokens in _blocks(inputs):
        x = inputs.hidden[tokens].to(dtype).requires_grad_()
        with _full_fp32():
            log_p = (x @ weight.T).to(torch.promote_types(dtype, torch.float32)).log_softmax(1)
            of_target, of_entry = (log_p.gather(1, ids[tokens, None]) for ids in (inputs.target, entry))
            for name, value in zip(OUTPUTS, (of_target, -(log_p.exp() * log_p), of_entry)):
                found[name][tokens] = torch.autograd.grad(value.sum(), x, retain_graph=True)[0]
    return found


def _sums_of_magnitudes(inputs: Inputs) -> Iterator[float]:
    """Of blocks of tokens the largest sum |x_k w_k| of a target's logit."""
    for tokens in _blocks(inputs):
        products = inputs.hidden[tokens].float() * inputs.weight[inputs.target[tokens]].float()
        yield products.abs().sum(1).max().item()


@torch.no_grad()
def ours(inputs: Inputs) -> Scores:
    from parallel_lce import token_statistics

    found = token_statistics(inputs.hidden, inputs.weight, inputs.target, expected_logit=True)
    assert found.target_log_prob is not None and found.entropy is not None
    return Scores(found.target_log_prob, found.entropy)


@torch.no_grad()
def head(inputs: Inputs, dtype: torch.dtype) -> tuple[Scores, float]:
    """The scores of logits `[N, V]` in `dtype` that plain torch makes, and max |z|."""
    parts, largest = [], 0.0
    for tokens, log_p, in_block in log_softmax(inputs, dtype):
        largest = max(largest, in_block)
        log_prob = log_p.gather(1, inputs.target[tokens, None]).squeeze(1)
        parts.append((log_prob, -log_p.exp().mul_(log_p).sum(1)))
    return Scores(*(torch.cat(values) for values in zip(*parts))), largest


@torch.no_grad()
def log_softmax(inputs: Inputs, dtype: torch.dtype) -> Iterator[tuple[slice, Tensor, float]]:
    """Of each block of R tokens: which they are, their log-probabilities `[R, V]`, and max |z|. The logits are in
    `dtype`, the softmax is at least in fp32."""
    weight = inputs.weight.to(dtype)
    for tokens in _blocks(inputs):
        with _full_fp32():
            z = inputs.hidden[tokens].to(dtype) @ weight.T
        largest = z.abs().max().item()
        log_p = z.to(torch.promote_types(dtype, torch.float32)).log_softmax(1)
        del z
        yield tokens, log_p, largest


def _blocks(inputs: Inputs) -> Iterator[slice]:
    rows = max(1, BLOCK_BYTES // (8 * len(inputs.weight)))
    return (slice(start, start + rows) for start in range(0, len(inputs.hidden), rows))


@contextmanager
def _full_fp32():
    """fp32 products without TF32, whatever this process has chosen."""
    before = torch.get_float32_matmul_precision()
    torch.set_float32_matmul_precision("highest")
    try:
        yield
    finally:
        torch.set_float32_matmul_precision(before)


@torch.no_grad()
def random_inputs(shape: Shape, deviation: float, device: torch.device, seed: int = 0) -> Inputs:
    """bf16 inputs with normal logits of this standard deviation: x ~ N(0, 1), W ~ N(0, deviation^2 / D). Targets are
    drawn from the softmax of the logits, as tokens are sampled from a policy."""
    generator = torch.Generator(device).manual_seed(seed)
    options = {"generator": generator, "device": device}
    hidden = torch.randn(shape.n, shape.d, **options).bfloat16()
    weight = torch.randn(shape.v, shape.d, **options).mul_(deviation * shape.d**-0.5).bfloat16()
    target = torch.empty(shape.n, dtype=torch.int64, device=device)
    inputs = Inputs(f"random, std {deviation:g}", hidden, weight, target)
    for tokens in _blocks(inputs):
        z = (hidden[tokens] @ weight.T).float()
        noise = torch.empty_like(z).exponential_(generator=generator)
        target[tokens] = (z - noise.log_()).argmax(1)  # the Gumbel-max trick
    return inputs
