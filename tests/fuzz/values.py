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
    """Of N tokens: ``target``, ``token_weight``; ``nowhere [N]``: those whose statistics of the target are NaN;
    ``quiet [N]``: those that do not count; ``upstream``: flattened."""

    layer: Layer
    teacher: Layer | None
    target: Tensor | None
    token_weight: Tensor | None
    entries: Entries | None
    upstream: dict[str, Tensor]
    nowhere: Tensor
    quiet: Tensor


def operands(c: Configuration, whole: Whole) -> Operands:
    flat = {name: value.reshape(-1) for name, value in whole.tensors.items()}

    def per_token(name: str, number: float) -> Tensor:
        return (flat[name].double() if name in flat else torch.full((c.N,), number, dtype=torch.float64))[:, None]

    temperature = per_token("temperature", c.temperature)
    scale = per_token("logit_scale", c.scale) / temperature
    softcap = None if c.softcap is None else c.softcap / temperature

    def layer(prefix: str, masked: Tensor, dtype: torch.dtype, scale=scale, softcap=softcap) -> Layer:
        x = whole.tensors[f"{prefix}input"]
        weight, bias = whole.tensors.get(f"{prefix}weight", torch.eye(c.V)), flat.get(f"{prefix}bias")
        bias = None if bias is None else bias.to(dtype)
        return Layer(x.reshape(c.N, x.shape[-1]).to(dtype), weight.to(dtype), bias, masked, scale, softcap)

    its = (scale / 2, 7.0 / temperature if softcap is None else None) if c.own_teacher else (scale, softcap)
    cast = DTYPES[c.cast(c.teacher_dtype)]
    teacher = layer("teacher_", whole.masked[1], cast, *its) if c.kind == "divergence" else None
    target = flat["target"].long() if "target" in flat else None
    entries = _entries(c, flat["selected"], flat.get("offsets")) if c.selected else None
    each = c.reduction == "none"
    upstream = {name: value.reshape(-1) if each else value for name, value in whole.upstream.items()}
    nowhere = quiet = torch.zeros(c.N, dtype=torch.bool)
    if c.kind in ("loss", "divergence") and target is not None:
        quiet = target == ignore_index(c)
    if c.kind == "loss":  # any target that has a finite loss
        target = target.masked_fill(quiet, int(whole.masked[0].int().argmin()))
    if c.kind == "statistics" and target is not None:
        nowhere = ((target < 0) | (target >= c.V)) & (target != NO_LABEL)
    if "mask" in flat:
        quiet = ~flat["mask"]
        nowhere = nowhere & ~quiet
        for name, value in upstream.items() if c.kind == "statistics" else ():
            upstream[name] = value.masked_fill(per_result(name, quiet, entries), 0.0)
    mine = layer("", whole.masked[0], DTYPES[c.computed])
    return Operands(mine, teacher, target, flat.get("token_weight"), entries, upstream, nowhere, quiet)


def per_result(name: str, tokens: Tensor, entries: Entries | None) -> Tensor:
    """What is said of each of ``tokens [N]``, for each element of that result."""
    return tokens[entries.owner] if name in ("selected_log_prob", "log_probs") else tokens


def _normal(*shape: int) -> Tensor:
    return torch.randn(shape, dtype=torch.float64)


def _below(end: int, *shape: int) -> Tensor:
    return torch.randint(end, shape)


@lru_cache(1)
def make(c: Configuration) -> Whole:
    """The whole tensors of ``c``, on the CPU. Nobody may write to them."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(c.values)
        return _made(c)


def _made(c: Configuration) -> Whole:
    masked = _masked(c)
    if c.kind == "logits":
        found = {"input": (_normal(*c.shape, c.V) * (3 * c.sharpness) + c.offset).to(DTYPES[c.dtype])}
    else:
        found = _layer(c, "", c.dtype, c.D, c.bias, masked)
    if c.edge == "close":
        distance = (0.0, 1e-1, 1e-2, 1e-3, 1e-4)[c.values % 5]
        x = (found["input"] + distance * _normal(*c.shape, c.D)).to(found["input"].dtype)
        found |= {"teacher_input": x, "teacher_weight": found["weight"]}
    elif c.kind == "divergence":
        found |= _layer(c, "teacher_", c.teacher_dtype, c.E, c.teacher_bias, masked)
    dtype = (torch.float32, torch.float64, torch.bfloat16)[c.values % 3]
    infinite = masked & (c.bias == "masked"), masked & (c.teacher_bias == "masked")
    if not c.no_target:
        found["target"] = _targets(c, infinite[0])
    if c.token_weight:
        weight = _token_weight(c, _normal(*c.shape))
        found["token_weight"] = weight if weight.dtype == torch.bool else weight.to(dtype)
    if c.scales:
        scale = (_normal(*c.shape).abs() + 0.1) * c.scale
        if c.excluded:
            # No product with -inf may be NaN.
            scale = scale.clamp(min=1e-3)
        else:
            scale *= _normal(*c.shape).sign()
            scale.view(-1)[3::7] = 0
        found["logit_scale"] = scale.to(dtype)
    if c.temperatures:
        temperature = (_normal(*c.shape).abs() + 0.1) * c.temperature
        if c.edge == "cold":
            temperature.view(-1)[5::7] = torch.inf
        found["temperature"] = temperature.to(dtype)
    if c.selected:
        found |= _selected(c, infinite[0], found.get("target"))
    if c.counted and c.kind == "statistics":
        found["mask"] = _normal(*c.shape) > -0.5 if c.ignored == "some" else torch.full(c.shape, c.ignored == "none")
    labelled = found["target"].long() != ignore_index(c) if c.kind == "loss" else None
    if c.kind == "loss" and not c.own and c.values % 2:  # some tokens are ignored by the mask alone
        found["mask"], some = labelled, torch.arange(c.N).view(c.shape) % 2 == 1
        found["target"] = found["target"].masked_fill(~labelled & some, int(infinite[0].int().argmin()))
    counting = int(found.get("mask", labelled).sum()) if c.counted else c.N
    counted = (counting + 1 + c.values % c.N) % (c.N + 1) if c.counted == "wrong" else counting
    whole = Whole(found, infinite, counting, counted if c.counted else None, _upstream(c, found))
    if c.sure:
        _make_sure(c, whole)
    if c.kind == "statistics" and (nowhere := operands(c, whole).nowhere).any():
        for name in OF_TARGET & {*whole.upstream}:
            whole.upstream[name].view(-1)[nowhere] = 0
    return whole


def _masked(c: Configuration) -> Tensor:
    """The entries that a bias excludes, any or a range; of a low one a range."""
    masked = torch.zeros(c.V, dtype=torch.bool)
    if c.edge == "window":
        masked[::256] = True
    elif c.excluded:
        first, last = _below(c.V, 2).sort().values
        masked[first : last + 1] = True
        if "low" not in (c.bias, c.teacher_bias) and c.values % 2:
            masked = torch.rand(c.V) < 0.3
        masked[_below(c.V)] = False
    return masked


def _layer(c: Configuration, prefix: str, dtype: str, D: int, bias: str, masked: Tensor) -> dict[str, Tensor]:
    x, weight = _normal(*c.shape, D), _normal(c.V, D) * (c.sharpness / max(1, D) ** 0.5)
    if c.edge in ("mean", "window"):
        mean = normalize(_normal(1, D))
        x, weight = x - (x @ mean.t()) * mean, weight + 4 * mean
    found = {"input": x, "weight": weight}
    if bias:
        found["bias"] = _normal(c.V) * (c.edge != "window") + c.offset
    if c.edge == "nan":
        found["bias"][c.values % c.V], found["bias"][c.values // 99 % c.V] = torch.inf, torch.nan
    if bias in ("masked", "low"):
        found["bias"][masked] = -torch.inf if bias == "masked" else -6e4 if "fp16" in (dtype, c.autocast) else LOW
    return {f"{prefix}{name}": value.to(DTYPES[dtype]) for name, value in found.items()}


def _outside(c: Configuration, dtype: str) -> list[int]:
    """Ids that are not in the vocabulary."""
    return [c.V, c.V + 3, -1, -7] + ([-(2**63), 2**62] if dtype == "int64" else [])


def _put(values: Tensor, where: slice, others: list[int]) -> None:
    """Some of the values are others."""
    values[where] = torch.tensor(others).repeat(len(values))[: len(values[where])]


def _selected(c: Configuration, masked: Tensor, target: Tensor | None) -> dict[str, Tensor]:
    """``[*shape, K]`` ids; or ``[E]`` and offsets, for sets of up to K. Some come twice, some are targets."""
    counts = _below(c.K + 1, c.N) if c.selected == "sets" else torch.full((c.N,), c.K)
    offsets = torch.cat([torch.zeros(1, dtype=torch.int64), counts.cumsum(0)])
    owner = torch.repeat_interleave(torch.arange(c.N), counts)
    ids = _below(c.V, len(owner))
    ids[4::11] = ids[3::11][: len(ids[4::11])]
    if target is not None and c.id_dtype == "int64":
        ids = torch.where(_below(5, len(owner)) == 0, target.reshape(-1)[owner].long(), ids)
    if c.ids == "outside":
        _put(ids, slice(1, None, 4), _outside(c, c.id_dtype))
    if c.kind == "selected" and masked.any():
        # A set of which nothing can be has no distribution.
        ids[offsets[:-1][counts > 0]] = int(masked.int().argmin())
    dtype = getattr(torch, c.id_dtype)
    if c.selected == "sets":
        return {"selected": ids.to(dtype), "offsets": offsets.to(dtype)}
    return {"selected": ids.to(dtype).view(*c.shape, c.K)}


def _make_sure(c: Configuration, whole: Whole) -> None:
    """Move hidden states, the teacher's too, so that tokens are sure of an entry: of the target, of the first that is
    selected, or of any. All are sure of the same kind of entry: gradients of those that are sure of another entry than
    the target would hide the others'."""
    o, found = operands(c, whole), whole.tensors
    chosen = torch.full((c.N,), True) if c.sure == "all" else _below(2, c.N) == 0
    entry, of_any = _below(c.V, c.N), _below(4) == 0 and c.mixture != ("target_log_prob",)
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

    def move(prefix: str, layer: Layer, chosen: Tensor, factor: float) -> Tensor:
        miss = c.miss * factor ** (torch.rand(c.N, 1, dtype=torch.float64) - 0.5)
        x, p = _along(layer, entry, chosen, among, miss)
        before = found[f"{prefix}input"]
        found[f"{prefix}input"] = x.view(before.shape).to(before.dtype)
        return p

    p = move("", o.layer, chosen, 2.0)
    if c.upstream == "shares":
        name, ids = "selected_log_prob", found["selected"]
        share = p.gather(1, ids.reshape(c.N, c.K).long().clamp(0, c.V - 1)).view(ids.shape)
        whole.upstream[name] = (share * _normal(*c.shape, 1)).to(whole.upstream[name].dtype)
    if o.teacher is not None:
        move("teacher_", o.teacher, chosen & (_below(2, c.N) == 0), 100.0)


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


def _targets(c: Configuration, masked: Tensor) -> Tensor:
    candidates = torch.arange(c.V)
    # A target of -inf has an infinite loss: no other can be added to it, and no 0 be a factor of it.
    plain = c.kind != "loss" or (c.reduction == "none" and not c.token_weight and c.label_smoothing < 1)
    if not plain:
        candidates = candidates[~masked]
    target = candidates[_below(len(candidates), c.N)]
    if c.targets == "outside":
        _put(target, slice(1, None, 3), _outside(c, c.target_dtype) + [NO_LABEL] * (c.kind == "statistics"))
    if c.kind in ("loss", "divergence") and c.ignored != "none":
        target[slice(None) if c.ignored == "all" else slice(0, None, 3)] = ignore_index(c)
    return target.to(getattr(torch, c.target_dtype)).view(c.shape)


def _token_weight(c: Configuration, normal: Tensor) -> Tensor:
    return {
        "positive": normal.abs(),
        "mask": normal > 0,
        "zero": torch.zeros_like(normal),
        "zeros": normal.clamp(min=0.0),
        # Their sum stays away from 0, where a mean means nothing.
        "negative": normal + 0.7 * normal.sum().sign(),
    }[c.token_weight]


def _upstream(c: Configuration, tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    names = {"statistics": c.mixture, "selected": ("log_probs",)}.get(c.kind, ("loss",))
    large, tiny = (100.0, 1e-3) if c.computed == "fp16" else (1e5, 1e-25)
    factor = {"zero": 0.0, "large": large, "tiny": tiny}.get(c.upstream, 1.0)
    found = {}
    for name in names:
        of_entries = name in ("selected_log_prob", "log_probs")
        value = _normal(*(tensors["selected"].shape if of_entries else c.shape if c.reduction == "none" else ()))
        if c.upstream == "ones":
            value.fill_(1)
        elif c.upstream == "some zeros":
            value.view(-1)[1::2] = 0
        found[name] = (factor * value).to(torch.float64 if c.dtype == "fp64" else torch.float32)
    return found


def laid(value: Tensor, layout: str) -> Tensor:
    """The same numbers at other strides or another offset, where what lies between them is NaN; or a negative view."""
    if layout == "negative" and value.is_floating_point():
        return torch._neg_view(-value)
    if layout == "offset":
        view = value.new_empty(value.numel() + 1)[1:].view(value.shape)
    elif layout == "gaps" and value.dim():
        view = value.new_full((*value.shape, 2), torch.nan if value.is_floating_point() else 1)[..., 0]
    elif layout == "transposed" and value.dim() > 1:
        view = torch.empty_like(value.transpose(0, -1), memory_format=torch.contiguous_format).transpose(0, -1)
    else:
        return value.clone(memory_format=torch.contiguous_format)
    return view.copy_(value)
