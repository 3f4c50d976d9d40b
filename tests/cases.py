"""One call of the package, its float64 truth and its same-dtype yardstick, for any layout.

The truth is :mod:`reference` in float64 on one process. The yardstick is what a user
has without the package: torch's projection in the inputs' dtype, its logits in fp32 and autograd.
Errors are those of :mod:`measures`.
"""

from dataclasses import dataclass, field, replace

import torch
from torch import Tensor

import parallel_lce
import reference
from measures import assert_no_worse, size, smallest_steps
from measures import error as error
from parallel_lce.core.partials import accumulation_dtype
from world import Member

DTYPES = {"fp64": torch.float64, "fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}


def normal(*shape: int, seed: int = 0) -> Tensor:
    """Normally distributed fp64 numbers, on the CPU."""
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


@dataclass(frozen=True)
class Case:
    """A call. ``shards``: rows per rank, None for equal shards of ``V`` padded up to a multiple of P.

    ``ignored``: none, some or all; ``sharpness``: standard deviation of the logits; ``upstream``: of every
    loss, None for random ones.
    """

    N: int
    V: int
    D: int
    dtype: str = "fp32"
    ranks: int = 1
    sequence_parallel: bool = False
    reduction: str = "mean"
    budget: int | None = None
    bias: bool = False
    ignored: str = "some"
    label_smoothing: float = 0.0
    z_loss: float = 0.0
    logit_scale: float = 1.0
    logit_softcap: float | None = None
    token_weight: bool = False
    shards: tuple[int, ...] | None = None
    give_vocab_size: bool = True
    sharpness: float = 1.0
    offset: float = 0.0
    frozen: str = ""
    seed: int = 0
    upstream: float | None = None
    options: dict = field(default_factory=dict, hash=False, compare=False)

    def __str__(self) -> str:
        changed = [
            f"{name}={value}"
            for name, value in vars(self).items()
            if value != type(self).__dataclass_fields__[name].default and name not in "NVD options"
        ]
        return "-".join([f"{self.N}x{self.V}x{self.D}", *changed])


@dataclass
class Tensors:
    """Whole tensors of a case: ``x [N, D]``, ``weight [V, D]``, ``bias [V]``, ``target [N]``,
    ``token_weight [N]`` and the upstream gradient, of the loss's shape."""

    x: Tensor
    weight: Tensor
    bias: Tensor | None
    target: Tensor
    token_weight: Tensor | None
    upstream: Tensor


def make(case: Case, device: torch.device | str = "cpu") -> Tensors:
    """The case's tensors, the same on every rank and device."""
    generator = torch.Generator().manual_seed(case.seed)
    dtype = DTYPES[case.dtype]

    def drawn(*shape: int) -> Tensor:
        return torch.randn(shape, generator=generator, dtype=torch.float64)

    x = drawn(case.N, case.D)
    weight = drawn(case.V, case.D) * (case.sharpness / case.D**0.5)
    bias = drawn(case.V) + case.offset if case.bias or case.offset else None
    target = torch.randint(case.V, (case.N,), generator=generator)
    if case.ignored != "none":
        target[slice(None) if case.ignored == "all" else slice(0, None, 3)] = -100
    token_weight = None
    if case.token_weight:
        token_weight = torch.rand(case.N, generator=generator, dtype=torch.float64).to(
            torch.float64 if dtype == torch.float64 else torch.float32
        )
        token_weight[1::5] = 0
    shape = (case.N,) if case.reduction == "none" else ()
    upstream = drawn(*shape)
    if case.reduction == "none":
        upstream[::4] = 0
    if case.upstream is not None:
        upstream.fill_(case.upstream)
    put = lambda t: None if t is None else t.to(device)  # noqa: E731
    return Tensors(
        x.to(dtype).to(device),
        weight.to(dtype).to(device),
        put(None if bias is None else bias.to(dtype)),
        put(target),
        put(token_weight),
        put(upstream.to(torch.float64 if dtype == torch.float64 else torch.float32)),
    )


def loss_options(case: Case) -> dict:
    return {"reduction": case.reduction, "label_smoothing": case.label_smoothing, "z_loss": case.z_loss}


def dense(case: Case, t: Tensors, dtype: torch.dtype = torch.float64) -> dict[str, Tensor]:
    """Loss and gradients of the dense path with a projection in ``dtype``."""
    options = dict(scale=case.logit_scale, softcap=case.logit_softcap, token_weight=t.token_weight)
    return dense_loss(t, dtype, upstream=t.upstream, **options, **loss_options(case))


def dense_loss(
    t: Tensors,
    dtype: torch.dtype = torch.float64,
    *,
    scale: float = 1.0,
    softcap: float | None = None,
    upstream: Tensor | None = None,
    **options,
) -> dict[str, Tensor]:
    """Loss and gradients of all logits: projected in ``dtype``, and from there on in fp32, or in fp64 for fp64.

    ``upstream``: of the loss, None for ones. ``options``: of :func:`reference.loss`.
    """
    leaves = {
        name: value.detach().to(dtype).requires_grad_()
        for name, value in (("x", t.x), ("weight", t.weight), ("bias", t.bias))
        if value is not None
    }
    z = torch.nn.functional.linear(*leaves.values()).to(accumulation_dtype(dtype)) * scale
    if softcap is not None:
        z = softcap * torch.tanh(z / softcap)
    loss = reference.loss(z, t.target, **options)
    upstream = torch.ones_like(loss) if upstream is None else upstream.to(loss.dtype)
    gradients = torch.autograd.grad(loss, [*leaves.values()], upstream)
    return {"loss": loss.detach()} | {f"d{name}": g for name, g in zip(leaves, gradients)}


def part(t: Tensors, member: Member, sequence_parallel: bool = False, shards: tuple[int, ...] | None = None) -> Tensors:
    """A rank's part of the tensors. Its operands are leaves in memory of their own.

    ``shards``: the ranks' rows of the weight and the bias, None for equal ones.
    """
    rows = len(t.weight) // member.ranks
    start = rows * member.rank if shards is None else sum(shards[: member.rank])
    stop = start + (rows if shards is None else shards[member.rank])

    def leaf(value: Tensor) -> Tensor:
        return value.detach().clone().requires_grad_()

    x = t.x.chunk(member.ranks)[member.rank] if sequence_parallel else t.x
    bias = None if t.bias is None else leaf(t.bias[start:stop])
    return replace(t, x=leaf(x), weight=leaf(t.weight[start:stop]), bias=bias)


def operands(member: Member, case: Case, t: Tensors, padding: float = 3.0) -> tuple[dict[str, Tensor], dict, int]:
    """A rank's leaves by name: its rows of x, of the weight and of the bias; the options that tell which they are; and
    the number of vocabulary rows that are not padding. Rows of padding hold what must never matter."""
    rows, start = -(-case.V // case.ranks), -(-case.V // case.ranks) * member.rank
    if case.shards is not None:
        rows, start = case.shards[member.rank], sum(case.shards[: member.rank])
    real = max(0, min(rows, case.V - start))

    def shard(value: Tensor) -> Tensor:
        mine = value.new_full((rows, *value.shape[1:]), padding)
        mine[:real] = value[start : start + real]
        return mine

    x = t.x.chunk(case.ranks)[member.rank] if case.sequence_parallel else t.x
    leaves = {"x": x.clone(), "weight": shard(t.weight)}
    if t.bias is not None:
        leaves["bias"] = shard(t.bias)
    for name, leaf in leaves.items():
        leaf.requires_grad_(name not in case.frozen.split())
    given = case.shards is not None
    where = dict(
        process_group=member.group if case.ranks > 1 else None,
        sequence_parallel=case.sequence_parallel,
        vocab_start=start if given else None,
        vocab_size=case.V if (case.give_vocab_size if given else rows * case.ranks != case.V) else None,
    )
    return leaves, where, real


def unpadded(name: str, gradient: Tensor, real: int) -> Tensor:
    """A leaf's gradient, on the CPU: of a shard the rows that are not padding."""
    if name == "x":
        return gradient.cpu()
    assert torch.count_nonzero(gradient[real:]) == 0, f"d{name} of padding rows"
    return gradient[:real].cpu()


def ours(member: Member, case: Case) -> dict[str, Tensor]:
    """The package's loss and gradients on one rank: of its part of x and its shard."""
    t = make(case, member.device)
    leaves, where, real = operands(member, case, t)
    loss = parallel_lce.linear_cross_entropy(
        leaves["x"],
        leaves["weight"],
        t.target,
        linear_bias=leaves.get("bias"),
        token_weight=t.token_weight,
        logit_scale=case.logit_scale,
        logit_softcap=case.logit_softcap,
        logits_budget=case.budget,
        **where,
        **loss_options(case),
        **case.options,
    )
    found = {"loss": loss.detach().cpu()}
    if loss.requires_grad:
        loss.backward(t.upstream.to(loss.dtype))
    for name, leaf in leaves.items():
        assert (leaf.grad is None) == (name in case.frozen.split()), name
        if leaf.grad is not None:
            found[f"d{name}"] = unpadded(name, leaf.grad, real)
    return found


def assemble(case: Case, parts: list[dict[str, Tensor]]) -> dict[str, Tensor]:
    """Whole tensors from what each rank returned; what must agree bit for bit is checked. A gradient's name begins
    with that of its leaf."""
    whole = {}
    for name, first in parts[0].items():
        everyone = [part[name] for part in parts]
        if name.startswith(("dweight", "dbias")) or (name.startswith("dx") and case.sequence_parallel):
            whole[name] = torch.cat(everyone)
        else:
            same = all(torch.equal(first, other) or other.isnan().any() for other in everyone)
            assert same, f"{name} differs between ranks"
            whole[name] = first
    return whole


def check(case: Case, found: dict[str, Tensor], factor: float, device: str = "cpu") -> None:
    """Every error is at most ``factor`` times the yardstick's, 1.5 times for fp16."""
    factor = max(factor, 1.5) if case.dtype == "fp16" else factor
    t, dtype = make(case, device), DTYPES[case.dtype]
    truth, yardstick = dense(case, t), dense(case, t, dtype)
    for name, value in found.items():
        assert value.shape == truth[name].shape, name
        assert value.dtype == (accumulation_dtype(dtype) if name == "loss" else dtype), name
        # Sums in another order. In float64 truth and yardstick are one: there that is all.
        floor = torch.finfo(accumulation_dtype(dtype)).eps * size(truth[name])
        floor *= 32 if dtype == torch.float64 else 1
        if name == "dx" and case.ranks > 1:
            # Each rank's part is rounded before it is added up, the yardstick has one part.
            floor = max(floor, torch.finfo(dtype).eps * size(truth[name]))
        floor += smallest_steps(value)
        assert_no_worse(value, truth[name], yardstick[name], factor, floor, f"{case}: {name}")
