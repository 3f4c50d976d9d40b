"""The tensors of a configuration: whole ones, the same on every rank, and strides that hold the same numbers."""

from dataclasses import dataclass
from functools import lru_cache

import torch
from torch import Tensor
from torch.nn.functional import normalize

from cases import DTYPES
from fuzz.draw import Configuration
from parallel_lce.core.options import NO_LABEL

OF_TARGET = {"target_logit", "target_log_prob"}

MASKED = -1e34
"""Stands for a bias of -inf where a product with 0 must be 0."""
LOW = -1e10
"""A bias that masks as well. Its roundings are hundreds, and losses of it are far from :data:`INFINITE`."""
INFINITE = 1e15
"""Truths beyond this stand for infinity (:data:`MASKED`)."""


@dataclass
class Whole:
    """``tensors``: by their names in ``LAID``. ``input [*shape, D]``, or the logits where these are given;
    ``weight [V, D]`` and ``bias [V]`` without padding; ``selected [*shape, K]``, or ``[E]`` with ``offsets [N + 1]``;
    ``mask [*shape]``: the tokens that count. ``masked [V]``: where the bias is -inf, of the student and of the teacher;
    ``counting`` tokens count, and their number is given as ``counted``; ``upstream``: of the loss, of the
    log-probabilities or of each field of the mixture."""

    tensors: dict[str, Tensor]
    masked: tuple[Tensor, Tensor]
    counting: int
    counted: int | None
    upstream: dict[str, Tensor]


def real_rows(c: Configuration, rank: int) -> int:
    """Rows of a rank's shard that are no padding."""
    start, rows = c.shards[rank]
    return max(0, min(rows, c.V - start))


def ignore_index(c: Configuration) -> int:
    return -100 if c.ignore_index is None else c.ignore_index


@dataclass
class Layer:
    """An output layer and its tokens, exact in the computed dtype: ``x [N, D]``, ``weight [V, D]``, ``bias [V]``;
    ``masked [V]``: where the bias is -inf; ``scale [N, 1]`` and ``softcap [N, 1]`` float64, divided by the
    temperature."""

    x: Tensor
    weight: Tensor
    bias: Tensor | None
    masked: Tensor
    scale: Tensor
    softcap: Tensor | None

    def capped(self, z: Tensor) -> Tensor:
        if self.softcap is None:
            return z
        softcap = self.softcap.to(z.dtype)
        return softcap * torch.tanh(z / softcap)


@dataclass
class Entries:
    """Selected entries ``[E]``: the token of each, its id, 0 where that is not ``inside`` the vocabulary, and its place
    among the token's entries; ``most``: of one token."""

    owner: Tensor
    ids: Tensor
    inside: Tensor
    places: Tensor
    most: int


def _entries(c: Configuration, ids: Tensor, offsets: Tensor | None) -> Entries:
    counts = torch.full((c.N,), c.K) if offsets is None else offsets.long().diff()
    ids, owner = ids.reshape(-1).long(), torch.repeat_interleave(torch.arange(c.N), counts)
    inside = (ids >= 0) & (ids < c.V)
    places = torch.arange(len(ids)) - (counts.cumsum(0) - counts)[owner]
    return Entries(owner, ids.where(inside, 0), inside, places, int(counts.max()) if c.N else 0)


@dataclass
class Operands:
    """Of N tokens: ``target``, ``token_weight``; ``outside [N]``: tokens whose loss is NaN, here with upstream
    gradient 0; ``nowhere [N]``: those whose statistics of the target are NaN; ``quiet [N]``: those that do not count;
    ``upstream``: flattened."""

    layer: Layer
    teacher: Layer | None
    target: Tensor | None
    token_weight: Tensor | None
    entries: Entries | None
    upstream: dict[str, Tensor]
    outside: Tensor
    nowhere: Tensor
    quiet: Tensor


def operands(c: Configuration, whole: Whole) -> Operands:
    flat = {name: value.reshape(-1) for name, value in whole.tensors.items()}

    def per_token(name: str, number: float) -> Tensor:
        return (flat[name].double() if name in flat else torch.full((c.N,), number, dtype=torch.float64))[:, None]

    temperature = per_token("temperature", c.temperature)
    scale = per_token("logit_scale", c.scale) / temperature
    softcap = None if c.softcap is None else c.softcap / temperature

    def layer(prefix: str, masked: Tensor, dtype: torch.dtype) -> Layer:
        x = whole.tensors[f"{prefix}input"]
        weight, bias = whole.tensors.get(f"{prefix}weight", torch.eye(c.V)), flat.get(f"{prefix}bias")
        bias = None if bias is None else bias.to(dtype)
        return Layer(x.reshape(c.N, x.shape[-1]).to(dtype), weight.to(dtype), bias, masked, scale, softcap)

    teacher = layer("teacher_", whole.masked[1], DTYPES[c.cast(c.teacher_dtype)]) if c.kind == "divergence" else None
    target = flat["target"].long() if "target" in flat else None
    entries = _entries(c, flat["selected"], flat.get("offsets")) if c.selected else None
    each = c.reduction == "none"
    upstream = {name: value.reshape(-1) if each else value for name, value in whole.upstream.items()}
    outside = nowhere = quiet = torch.zeros(c.N, dtype=torch.bool)
    if c.kind in ("loss", "divergence") and target is not None:
        quiet = target == ignore_index(c)
    if c.kind == "loss":
        outside = ((target < 0) | (target >= c.V)) & ~quiet
        # Any other with a finite loss.
        target = target.masked_fill(outside, int(whole.masked[0].int().argmin()))
        if each:
            upstream["loss"] = upstream["loss"].masked_fill(outside, 0.0)
    if c.kind == "statistics" and target is not None:
        nowhere = ((target < 0) | (target >= c.V)) & (target != NO_LABEL)
    if "mask" in flat:
        quiet = ~flat["mask"]
        nowhere = nowhere & ~quiet
        for name, value in upstream.items():
            upstream[name] = value.masked_fill(per_result(name, quiet, entries), 0.0)
    mine = layer("", whole.masked[0], DTYPES[c.computed])
    return Operands(mine, teacher, target, flat.get("token_weight"), entries, upstream, outside, nowhere, quiet)


def per_result(name: str, tokens: Tensor, entries: Entries | None) -> Tensor:
    """What is said of each of ``tokens [N]``, for each element of that result."""
    return tokens[entries.owner] if name in ("selected_log_prob", "log_probs") else tokens


class _Random:
    """Draws the tensors of a configuration one after another."""

    def __init__(self, seed: int) -> None:
        self.generator = torch.Generator().manual_seed(seed)

    def normal(self, *shape: int) -> Tensor:
        return torch.randn(shape, generator=self.generator, dtype=torch.float64)

    def below(self, end: int, *shape: int) -> Tensor:
        return torch.randint(end, shape, generator=self.generator)

    def rand(self, *shape: int) -> Tensor:
        return torch.rand(shape, generator=self.generator, dtype=torch.float64)


@lru_cache(1)
def make(c: Configuration) -> Whole:
    """The whole tensors of ``c``, on the CPU. Nobody may write to them."""
    r, found = _Random(c.values), {}
    masked = _masked(c, r)
    if c.kind == "logits":
        found["input"] = (r.normal(*c.shape, c.V) * (3 * c.sharpness) + c.offset).to(DTYPES[c.dtype])
    else:
        found |= _layer(c, r, "", c.dtype, c.D, c.bias, masked)
    if c.teacher_equal:
        found |= {f"teacher_{name}": value for name, value in found.items()}
        if c.edge == "close":
            distance = 10.0 ** -(1 + c.values % 4)
            found["teacher_input"] = (found["input"] + distance * r.normal(*c.shape, c.D)).to(found["input"].dtype)
    elif c.kind == "divergence":
        found |= _layer(c, r, "teacher_", c.teacher_dtype, c.E, c.teacher_bias, masked)
    infinite = masked & (c.bias == "masked"), masked & (c.teacher_bias == "masked")
    if not c.no_target:
        found["target"] = _targets(c, r, infinite[0])
    if c.token_weight:
        found["token_weight"] = _token_weight(c, r.normal(*c.shape))
    if c.scale_dtype:
        scale = (r.normal(*c.shape).abs() + 0.1) * c.scale
        if {c.bias, c.teacher_bias} & {"masked", "low"}:
            # No product with -inf may be NaN.
            scale = scale.clamp(min=1e-3)
        else:
            scale *= r.normal(*c.shape).sign()
            scale.view(-1)[3::7] = 0
        found["logit_scale"] = scale.to(getattr(torch, c.scale_dtype))
    if c.temperature_dtype:
        temperature = (r.normal(*c.shape).abs() + 0.1) * c.temperature
        if c.edge == "cold":
            temperature.view(-1)[5::7] = torch.inf
        found["temperature"] = temperature.to(getattr(torch, c.temperature_dtype))
    if c.selected:
        found |= _selected(c, r, infinite[0], found.get("target"))
    if c.counted and c.kind == "statistics":
        found["mask"] = r.normal(*c.shape) > -0.5 if c.ignored == "some" else torch.full(c.shape, c.ignored == "none")
    for name, value in found.items():
        if c.layout(name) == "expanded" and value.dim() and len(value):
            found[name] = value[:1].expand_as(value).clone()
    counting = c.N
    if c.counted:
        counting = int((found["mask"] if c.kind == "statistics" else found["target"].long() != ignore_index(c)).sum())
    counted = (counting + 1 + c.values % c.N) % (c.N + 1) if c.counted == "wrong" else counting
    whole = Whole(found, infinite, counting, counted if c.counted else None, _upstream(c, r, found))
    if c.sure:
        _make_sure(c, r, whole)
    if c.kind == "statistics" and (nowhere := operands(c, whole).nowhere).any():
        for name in OF_TARGET & {*whole.upstream}:
            whole.upstream[name].view(-1)[nowhere] = 0
    return whole


def _masked(c: Configuration, r: _Random) -> Tensor:
    """The entries that a bias excludes: of -inf any, of a low one a range."""
    masked = torch.zeros(c.V, dtype=torch.bool)
    if c.edge == "window":
        masked[::256] = True
        return masked
    kinds = {c.bias, c.teacher_bias} & {"masked", "low"}
    if kinds:
        masked = torch.rand(c.V, generator=r.generator) < 0.3
        if "low" in kinds:
            first, last = r.below(c.V, 2).sort().values
            masked[:] = False
            masked[first : last + 1] = True
        masked[r.below(c.V)] = False
    return masked


def _layer(
    c: Configuration, r: _Random, prefix: str, dtype: str, D: int, bias: str, masked: Tensor
) -> dict[str, Tensor]:
    x, weight = r.normal(*c.shape, D), r.normal(c.V, D) * (c.sharpness / max(1, D) ** 0.5)
    if c.edge in ("mean", "window"):
        mean = normalize(r.normal(1, D))
        x, weight = x - (x @ mean.t()) * mean, weight + 4 * mean
    found = {"input": x, "weight": weight}
    if bias:
        found["bias"] = r.normal(c.V) * (c.edge != "window") + c.offset
    if c.edge == "nan":
        found["bias"][c.values % c.V], found["bias"][c.values // 99 % c.V] = torch.inf, torch.nan
    if bias in ("masked", "low"):
        found["bias"][masked] = -torch.inf if bias == "masked" else -6e4 if "fp16" in (dtype, c.autocast) else LOW
    return {f"{prefix}{name}": value.to(DTYPES[dtype]) for name, value in found.items()}


def _ids(c: Configuration, dtype: str) -> tuple[int, list[int]]:
    """How many ids a dtype can hold of the vocabulary, and those outside it that it can hold."""
    held = torch.iinfo(getattr(torch, dtype))
    outside = c.V, c.V + 3, -1, -7, -(2**63), 2**62
    return min(c.V, held.max + 1), [id for id in outside if held.min <= id <= held.max]


def _put(values: Tensor, where: slice, others: list[int]) -> None:
    """Some of the values are others."""
    values[where] = torch.tensor(others).repeat(len(values))[: len(values[where])]


def _selected(c: Configuration, r: _Random, masked: Tensor, target: Tensor | None) -> dict[str, Tensor]:
    """``[*shape, K]`` ids; or ``[E]`` and offsets, for sets of up to K. Some come twice, some are targets."""
    counts = r.below(c.K + 1, c.N) if c.selected == "sets" else torch.full((c.N,), c.K)
    offsets = torch.cat([torch.zeros(1, dtype=torch.int64), counts.cumsum(0)])
    owner = torch.repeat_interleave(torch.arange(c.N), counts)
    held, others = _ids(c, c.id_dtype)
    ids = r.below(held, len(owner))
    ids[4::11] = ids[3::11][: len(ids[4::11])]
    if target is not None:
        wanted = target.reshape(-1)[owner].long()
        here = (r.below(5, len(owner)) == 0) & (wanted.to(getattr(torch, c.id_dtype)) == wanted)
        ids = torch.where(here, wanted, ids)
    if c.ids == "outside":
        _put(ids, slice(1, None, 4), others or [0])
    if c.kind == "selected" and masked.any():
        # A set of which nothing can be has no distribution.
        ids[offsets[:-1][counts > 0]] = int(masked.int().argmin())
    ids = ids.to(getattr(torch, c.id_dtype))
    if c.selected == "sets":
        return {"selected": ids, "offsets": offsets.to(torch.int32 if c.id_dtype == "int32" else torch.int64)}
    return {"selected": ids.view(*c.shape, c.K)}


def _make_sure(c: Configuration, r: _Random, whole: Whole) -> None:
    """Move hidden states, the teacher's too, so that tokens are sure of an entry: of the target, of the first that is
    selected, or of any. All are sure of the same kind of entry: gradients of those that are sure of another entry than
    the target would hide the others'."""
    o, found = operands(c, whole), whole.tensors
    chosen = torch.full((c.N,), True) if c.sure == "all" else r.below(2, c.N) == 0
    entry, of_any = r.below(c.V, c.N), r.below(4) == 0 and c.mixture != ("target_log_prob",)
    among = torch.full((c.N, c.V), True)
    if "target" in found and not of_any:
        wanted = found["target"].reshape(-1).long()
        entry = torch.where((wanted >= 0) & (wanted < c.V), wanted, entry)
    if (e := o.entries) is not None:
        first = e.inside & (e.places == 0)
        if c.no_target or c.mixture == ("selected_log_prob",):
            entry = entry.index_put((e.owner[first],), e.ids[first])
        if c.kind == "selected":
            among = torch.zeros_like(among).index_put((e.owner[e.inside], e.ids[e.inside]), torch.tensor(True))

    def move(prefix: str, layer: Layer, chosen: Tensor, miss: Tensor) -> Tensor:
        x, p = _along(layer, entry, chosen, among, miss)
        before = found[f"{prefix}input"]
        found[f"{prefix}input"] = x.view(before.shape).to(before.dtype)
        return p

    p = move("", o.layer, chosen, c.miss * 2 ** (r.rand(c.N, 1) - 0.5))
    if c.upstream == "shares":
        name, ids = "selected_log_prob", found["selected"]
        share = p.gather(1, ids.reshape(c.N, c.K).long().clamp(0, c.V - 1)).view(ids.shape)
        whole.upstream[name] = (share * r.normal(*c.shape, 1)).to(whole.upstream[name].dtype)
    if c.teacher_equal:
        found["teacher_input"] = found["input"]
    elif o.teacher is not None:
        both = chosen & (r.below(2, c.N) == 0)
        move("teacher_", o.teacher, both, c.miss * 100 ** (r.rand(c.N, 1) - 0.5))


def _along(layer: Layer, entry: Tensor, chosen: Tensor, among: Tensor, miss: Tensor) -> tuple[Tensor, Tensor]:
    """x of the layer ``[N, D]``, of the ``chosen`` tokens moved along the weight's row of ``entry [N]`` until 1 - p
    there, ``among [N, V]``, is ``miss [N, 1]``; and p. Tokens that cannot be so sure stay."""
    x, weight, factor = layer.x.double(), layer.weight.double(), layer.scale
    unit = normalize(weight[entry], dim=1) * factor.sign()
    start, step = x @ weight.t(), unit @ weight.t()
    if layer.bias is not None:
        start = start + layer.bias.double().masked_fill(layer.masked, MASKED)

    def log_p(length: Tensor) -> Tensor:
        z = layer.capped(factor * (start + length * step))
        return z.masked_fill(~among, -torch.inf).log_softmax(1)

    def missing(length: Tensor) -> Tensor:
        return log_p(length).scatter(1, entry[:, None], -torch.inf).exp().sum(1, keepdim=True)

    low = torch.zeros_like(miss)
    high = 60 / (factor.abs() * weight[entry].norm(dim=1, keepdim=True)).clamp(min=1e-3)
    for _ in range(30):
        middle = (low + high) / 2
        far = missing(middle) > miss
        low, high = torch.where(far, middle, low), torch.where(far, high, middle)
    reached = chosen[:, None] & ((missing(high) / miss - 1).abs() < 0.1) & (high < 1e3)
    length = torch.where(reached, high, 0.0)
    return x + length * unit, log_p(length).exp()


def _targets(c: Configuration, r: _Random, masked: Tensor) -> Tensor:
    held, others = _ids(c, c.target_dtype)
    candidates = torch.arange(held)
    # A target of -inf has an infinite loss: no other can be added to it, and no 0 be a factor of it.
    plain = c.kind != "loss" or (c.reduction == "none" and not c.token_weight and c.label_smoothing < 1)
    if not plain and not masked[:held].all():
        candidates = candidates[~masked[:held]]
    target = candidates[r.below(len(candidates), *c.shape)]
    if c.kind == "statistics":
        others += [NO_LABEL] * (c.target_dtype != "uint8")
    flat, index, dtype = target.view(-1), ignore_index(c), getattr(torch, c.target_dtype)
    if c.targets == "outside" and others:
        _put(flat, slice(1, None, 3), others)
    held_too = torch.iinfo(dtype).min <= index <= torch.iinfo(dtype).max
    if c.kind in ("loss", "divergence") and held_too and c.ignored != "none":
        flat[slice(None) if c.ignored == "all" else slice(0, None, 3)] = index
    return target.to(dtype)


def _token_weight(c: Configuration, normal: Tensor) -> Tensor:
    weight = {
        "positive": normal.abs(),
        "mask": normal > 0,
        "zero": torch.zeros_like(normal),
        "zeros": normal.clamp(min=0.0),
        # Their sum stays away from 0, where a mean means nothing.
        "negative": normal + 0.7 * normal.sum().sign(),
    }
    return weight[c.token_weight].to(getattr(torch, c.weight_dtype))


def _upstream(c: Configuration, r: _Random, tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    names = {"statistics": c.mixture, "selected": ("log_probs",)}.get(c.kind, ("loss",))
    large, tiny = (100.0, 1e-3) if c.computed == "fp16" else (1e5, 1e-25)
    factor = {"zero": 0.0, "large": large, "tiny": tiny}.get(c.upstream, 1.0)
    found = {}
    for name in names:
        of_entries = name in ("selected_log_prob", "log_probs")
        value = r.normal(*(tensors["selected"].shape if of_entries else c.shape if c.reduction == "none" else ()))
        if c.upstream == "ones":
            value.fill_(1)
        elif c.upstream == "some zeros":
            value.view(-1)[1::2] = 0
        found[name] = (factor * value).to(torch.float64 if c.dtype == "fp64" else torch.float32)
    return found


def laid(value: Tensor, layout: str) -> Tensor:
    """The same numbers at other strides or another offset; what lies between them is NaN."""
    if layout == "expanded" and value.dim() and len(value):
        return value[:1].clone().expand(value.shape)
    if layout == "offset":
        view = value.new_empty(value.numel() + 1)[1:].view(value.shape)
    elif layout in ("wide", "gaps", "rows") and value.dim():
        sizes, slices = list(value.shape), [slice(None)] * value.dim()
        if layout == "wide":
            sizes, slices = [n + 3 for n in sizes], [slice(2, 2 + n) for n in sizes]
        else:
            place = 0 if layout == "rows" else -1
            sizes[place] *= 2
            slices[place] = slice(0, None, 2)
        view = value.new_full(sizes, torch.nan if value.is_floating_point() else 1)[tuple(slices)]
    elif layout == "transposed" and value.dim() > 1:
        view = torch.empty_like(value.transpose(0, -1), memory_format=torch.contiguous_format).transpose(0, -1)
    else:
        return value.clone(memory_format=torch.contiguous_format)
    return view.copy_(value)
