"""The tensors of a configuration: whole ones, the same on every rank, and strides that hold the same numbers."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn.functional import linear, normalize

from cases import DTYPES
from fuzz_draw import LARGEST_TARGET, Configuration

MASKED = -1e34
"""Stands for a bias of -inf where a product with 0 must be 0."""
LOW = -1e10
"""A bias that masks as well. Its roundings are hundreds, and losses of it are far from :data:`INFINITE`."""
INFINITE = 1e15
"""Truths beyond this stand for infinity (:data:`MASKED`)."""


@dataclass
class Whole:
    """``x [*shape, D]``, ``weight [V, D]`` and ``bias [V]`` without padding, ``masked [V]``: where the bias is -inf;
    ``target``, ``token_weight``, ``scale`` and ``temperature [*shape]``; ``ids`` that are selected, ``[*shape, K]`` or
    ``[E]`` with ``offsets [N + 1]``; ``mask [*shape]``: the tokens that count, if ``counted``, their number as it is
    given, is; ``upstream``: of the loss, of the log-probabilities or of each field of the mixture; ``teacher``: x,
    weight, bias and where that is -inf.

    Where logits are given, x has them, and the weight is the unit matrix."""

    x: Tensor
    weight: Tensor
    bias: Tensor | None
    masked: Tensor
    target: Tensor | None
    token_weight: Tensor | None
    scale: Tensor | None
    temperature: Tensor | None
    ids: Tensor | None
    offsets: Tensor | None
    mask: Tensor | None
    counted: int | None
    upstream: dict[str, Tensor]
    teacher: tuple[Tensor, Tensor, Tensor | None, Tensor] | None


def ignore_index(c: Configuration) -> int:
    return -100 if c.ignore_index is None else c.ignore_index


def outside(V: int) -> list[int]:
    """Ids outside the vocabulary."""
    return [V, V + 3, -1, -7, -(2**63), 2**62]


def _range(dtype: str) -> tuple[int, int]:
    """The smallest and the largest number of an integer dtype."""
    return 0 if dtype == "uint8" else -LARGEST_TARGET[dtype] - 1, LARGEST_TARGET[dtype]


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

    def leaves(self, dtype: torch.dtype) -> dict[str, Tensor]:
        found = {"input": self.x, "weight": self.weight}
        if self.bias is not None:
            found["bias"] = self.bias.double().masked_fill(self.masked, MASKED)
        return {name: value.to(dtype).detach().requires_grad_() for name, value in found.items()}

    def logits(self, leaves: dict[str, Tensor], wide: torch.dtype) -> tuple[Tensor, Tensor]:
        """The logits ``[N, V]``, and the product that they come from."""
        product = linear(leaves["input"], leaves["weight"], leaves.get("bias"))
        return self.capped(product.to(wide) * self.scale.to(wide)), product

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

    @classmethod
    def of(cls, c: Configuration, whole: Whole) -> Entries:
        offsets = whole.offsets
        counts = torch.full((c.N,), c.K) if offsets is None else offsets.long().diff()
        ids, owner = whole.ids.reshape(-1).long(), torch.repeat_interleave(torch.arange(c.N), counts)
        inside = (ids >= 0) & (ids < c.V)
        places = torch.arange(len(ids)) - (counts.cumsum(0) - counts)[owner]
        return cls(owner, ids.where(inside, 0), inside, places, int(counts.max()) if c.N else 0)

    def sums(self, values: Tensor, tokens: int) -> Tensor:
        """``[tokens]``, each the sum of its entries' ``values [E]``."""
        return values.new_zeros(tokens).index_add(0, self.owner, values)

    def spread(self, values: Tensor, shape: tuple[int, ...] | torch.Size) -> Tensor:
        """``[N, V]``: the sums of equal entries' ``values [E]``; of those inside."""
        place = self.owner[self.inside], self.ids[self.inside]
        return values.new_zeros(shape).index_put(place, values[self.inside], accumulate=True)


@dataclass
class Operands:
    """Of N tokens: ``target``, ``token_weight``; ``outside [N]``: tokens whose loss is NaN, here with upstream
    gradient 0; ``quiet [N]``: those that do not count; ``upstream``: flattened."""

    layer: Layer
    teacher: Layer | None
    target: Tensor | None
    token_weight: Tensor | None
    entries: Entries | None
    upstream: dict[str, Tensor]
    outside: Tensor
    quiet: Tensor


def operands(c: Configuration, whole: Whole) -> Operands:
    def per_token(given: Tensor | None, number: float) -> Tensor:
        return torch.full((c.N, 1), number, dtype=torch.float64) if given is None else given.reshape(c.N, 1).double()

    temperature = per_token(whole.temperature, 1.0 if c.kind == "divergence" else c.temperature)
    scale = per_token(whole.scale, c.scale) / temperature
    softcap = None if c.softcap is None else c.softcap / temperature

    def layer(x: Tensor, weight: Tensor, bias: Tensor | None, masked: Tensor, dtype: torch.dtype) -> Layer:
        flat, bias = x.reshape(c.N, x.shape[-1]).to(dtype), None if bias is None else bias.to(dtype)
        return Layer(flat, weight.to(dtype), bias, masked, scale, softcap)

    mine = layer(whole.x, whole.weight, whole.bias, whole.masked, DTYPES[c.computed])
    teacher = None if whole.teacher is None else layer(*whole.teacher, DTYPES[c.teacher_computed])
    target = None if whole.target is None else whole.target.reshape(-1).long()
    entries = None if whole.ids is None else Entries.of(c, whole)
    each = c.reduction == "none"
    upstream = {name: value.reshape(-1) if each else value for name, value in whole.upstream.items()}
    outside = quiet = torch.zeros(c.N, dtype=torch.bool)
    if c.kind in ("loss", "divergence") and target is not None:
        quiet = target == ignore_index(c)
    if c.kind == "loss":
        outside = ((target < 0) | (target >= c.V)) & ~quiet
        # Any other with a finite loss.
        target = target.masked_fill(outside, int(whole.masked.int().argmin()))
        if each:
            upstream["loss"] = upstream["loss"].masked_fill(outside, 0.0)
    if c.kind == "statistics" and whole.mask is not None:
        quiet = ~whole.mask.reshape(-1)
        for name, value in upstream.items():
            upstream[name] = value.masked_fill(per_result(name, quiet, entries), 0.0)
    token_weight = None if whole.token_weight is None else whole.token_weight.reshape(-1)
    return Operands(mine, teacher, target, token_weight, entries, upstream, outside, quiet)


def per_result(name: str, tokens: Tensor, entries: Entries | None) -> Tensor:
    """What is said of each of ``tokens [N]``, for each element of that result."""
    return tokens[entries.owner] if name in ("selected_log_prob", "log_probs") else tokens


class _Maker:
    """Draws the tensors of a configuration one after another."""

    def __init__(self, c: Configuration) -> None:
        self.c, self.generator = c, torch.Generator().manual_seed(c.values)

    def normal(self, *shape: int) -> Tensor:
        return torch.randn(shape, generator=self.generator, dtype=torch.float64)

    def below(self, end: int, *shape: int) -> Tensor:
        return torch.randint(end, shape, generator=self.generator)

    def rand(self, *shape: int) -> Tensor:
        return torch.rand(shape, generator=self.generator, dtype=torch.float64)

    def repeated(self, value: Tensor, name: str) -> Tensor:
        """All along the first dimension the same, if this is to be laid out in one place."""
        if self.c.layout(name) != "expanded" or value.dim() == 0 or len(value) == 0:
            return value
        return value[:1].expand_as(value).clone()

    def layer(self, dtype: str, D: int, bias: str, masked: Tensor, prefix: str = "") -> tuple[Tensor, ...]:
        """``x [*shape, D]``, ``weight [V, D]``, ``bias [V]``, None for '', and where that is -inf."""
        c = self.c
        x = self.repeated(self.normal(*c.shape, D), f"{prefix}input")
        weight = self.repeated(self.normal(c.V, D) * (c.sharpness / max(1, D) ** 0.5), f"{prefix}weight")
        made = None
        if bias:
            made = self.repeated(self.normal(c.V) + c.offset, f"{prefix}bias").to(DTYPES[dtype])
        if bias in ("masked", "low"):
            made[masked] = -torch.inf if bias == "masked" else -6e4 if "fp16" in (dtype, c.autocast) else LOW
        return x.to(DTYPES[dtype]), weight.to(DTYPES[dtype]), made, masked & (bias == "masked")

    def per_token(self, name: str, number: float, dtype: str, any_sign: bool = False) -> Tensor | None:
        """About ``number`` for each token; of ``any_sign``, and 0 now and then, if that is allowed."""
        if not dtype:
            return None
        value = (self.normal(*self.c.shape).abs() + 0.1) * number
        if any_sign and self.c.bias in ("masked", "low"):
            # No product with -inf may be NaN.
            value = value.clamp(min=1e-3)
        elif any_sign:
            value *= self.normal(*self.c.shape).sign()
            value.view(-1)[3::7] = 0
        return self.repeated(value.to(getattr(torch, dtype)), name)


def make(c: Configuration) -> Whole:
    """The whole tensors of ``c``, on the CPU."""
    m = _Maker(c)
    masked = torch.zeros(c.V, dtype=torch.bool)
    kinds = {c.bias, c.teacher_bias} & {"masked", "low"}
    if kinds:
        masked = torch.rand(c.V, generator=m.generator) < 0.3
        if "low" in kinds:
            first, last = m.below(c.V, 2).sort().values
            masked[:] = False
            masked[first : last + 1] = True
        masked[m.below(c.V)] = False
    teacher = None
    if c.kind == "logits":
        x = m.repeated(m.normal(*c.shape, c.V) * (3 * c.sharpness) + c.offset, "input").to(DTYPES[c.dtype])
        layer = x, torch.eye(c.V, dtype=DTYPES[c.dtype]), None, masked
    else:
        layer = m.layer(c.dtype, c.D, c.bias, masked)
    if c.kind == "divergence":
        teacher = layer if c.teacher_equal else m.layer(c.teacher_dtype, c.E, c.teacher_bias, masked, "teacher_")
    target = None if c.no_target else m.repeated(_targets(m, layer[3]), "target")
    token_weight = m.repeated(_token_weight(c, m.normal(*c.shape)), "token_weight") if c.token_weight else None
    scale = m.per_token("logit_scale", c.scale, c.scale_dtype, any_sign=True)
    temperature = m.per_token("temperature", c.temperature, c.temperature_dtype)
    ids, offsets = _selected(m, layer[3], target) if c.selected else (None, None)
    mask = counted = None
    if c.counted:
        mask = m.repeated(_mask(m), "mask") if c.kind == "statistics" else target.long() != ignore_index(c)
        counted = int(mask.sum())
        if c.counted == "wrong":
            counted = (counted + 1 + c.values % c.N) % (c.N + 1)
    upstream = _upstream(c, m.normal, ids)
    given = target, token_weight, scale, temperature, ids, offsets, mask, counted, upstream
    whole = Whole(*layer, *given, teacher)
    if c.sure:
        _make_sure(m, whole)
    return whole


def _selected(m: _Maker, masked: Tensor, target: Tensor | None) -> tuple[Tensor, Tensor | None]:
    """``[*shape, K]`` ids; or ``[E]`` and offsets, for sets of up to K. Some come twice, some are targets."""
    c = m.c
    counts = m.below(c.K + 1, c.N) if c.selected == "sets" else torch.full((c.N,), c.K)
    offsets = torch.cat([torch.zeros(1, dtype=torch.int64), counts.cumsum(0)])
    owner = torch.repeat_interleave(torch.arange(c.N), counts)
    smallest, largest = _range(c.id_dtype)
    ids = m.below(min(c.V, largest + 1), len(owner))
    ids[4::11] = ids[3::11][: len(ids[4::11])]
    if target is not None:
        wanted = target.reshape(-1)[owner].long()
        here = (m.below(5, len(owner)) == 0) & (wanted >= smallest) & (wanted <= largest)
        ids = torch.where(here, wanted, ids)
    if c.ids == "outside":
        others = torch.tensor([o for o in outside(c.V) if smallest <= o <= largest] or [0])
        ids[1::4] = others.repeat(len(ids))[: len(ids[1::4])]
    if c.kind == "selected" and masked.any():
        # A set of which nothing can be has no distribution.
        firsts = offsets[:-1][counts > 0]
        ids[firsts] = int(masked.int().argmin())
    ids = ids.to(getattr(torch, c.id_dtype))
    if c.selected == "sets":
        return m.repeated(ids, "selected"), offsets.to(torch.int32 if c.id_dtype == "int32" else torch.int64)
    return m.repeated(ids.view(*c.shape, c.K), "selected"), None


def _make_sure(m: _Maker, whole: Whole) -> None:
    """Move hidden states, the teacher's too, so that tokens are sure of an entry: of the target, of the first that is
    selected, or of any. All are sure of the same kind of entry: gradients of those that are sure of another entry than
    the target would hide the others'."""
    c, o = m.c, operands(m.c, whole)
    chosen = torch.full((c.N,), True) if c.sure == "all" else m.below(2, c.N) == 0
    entry, of_any = m.below(c.V, c.N), m.below(4) == 0 and c.mixture != ("target_log_prob",)
    among = torch.full((c.N, c.V), True)
    if whole.target is not None and not of_any:
        wanted = whole.target.reshape(-1).long()
        entry = torch.where((wanted >= 0) & (wanted < c.V), wanted, entry)
    if (e := o.entries) is not None:
        first = e.inside & (e.places == 0)
        if whole.target is None or c.mixture == ("selected_log_prob",):
            entry = entry.index_put((e.owner[first],), e.ids[first])
        if c.kind == "selected":
            among = torch.zeros_like(among).index_put((e.owner[e.inside], e.ids[e.inside]), torch.tensor(True))
    miss = c.miss * 2 ** (m.rand(c.N, 1) - 0.5)
    x, p = _along(o.layer, entry, chosen, among, miss)
    whole.x = x.view(whole.x.shape).to(whole.x.dtype)
    if c.upstream == "shares":
        name, ids = "selected_log_prob", whole.ids
        share = p.gather(1, ids.reshape(c.N, c.K).long().clamp(0, c.V - 1)).view(ids.shape)
        whole.upstream[name] = (share * m.normal(*c.shape, 1)).to(whole.upstream[name].dtype)
    if c.teacher_equal:
        whole.teacher = whole.x, *whole.teacher[1:]
    elif whole.teacher is not None:
        both, of_teacher = chosen & (m.below(2, c.N) == 0), c.miss * 100 ** (m.rand(c.N, 1) - 0.5)
        x, _ = _along(o.teacher, entry, both, among, of_teacher)
        y = whole.teacher[0]
        whole.teacher = x.view(y.shape).to(y.dtype), *whole.teacher[1:]


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


def _mask(m: _Maker) -> Tensor:
    """The tokens that count."""
    if m.c.ignored == "some":
        return m.normal(*m.c.shape) > -0.5
    return torch.full(m.c.shape, m.c.ignored == "none")


def _targets(m: _Maker, masked: Tensor) -> Tensor:
    c, (smallest, largest) = m.c, _range(m.c.target_dtype)
    candidates = torch.arange(min(c.V, largest + 1))
    # A target of -inf has an infinite loss: no other can be added to it, and no 0 be a factor of it.
    plain = c.kind != "loss" or (c.reduction == "none" and not c.token_weight and c.label_smoothing < 1)
    allowed = candidates[~masked[: len(candidates)]]
    if not plain and len(allowed):
        candidates = allowed
    target = candidates[m.below(len(candidates), *c.shape)]
    flat, index = target.view(-1), ignore_index(c)
    others = [o for o in outside(c.V) if smallest <= o <= largest]
    if c.targets == "outside" and others:
        flat[1::3] = torch.tensor(others).repeat(len(flat))[: len(flat[1::3])]
    if c.kind in ("loss", "divergence") and smallest <= index <= largest and c.ignored != "none":
        flat[slice(None) if c.ignored == "all" else slice(0, None, 3)] = index
    return target.to(getattr(torch, c.target_dtype))


def _token_weight(c: Configuration, normal: Tensor) -> Tensor:
    weight = normal.abs()
    if c.token_weight == "mask":
        weight = (normal > 0).double()
    elif c.token_weight == "zero":
        weight = torch.zeros_like(normal)
    elif c.token_weight == "zeros":
        weight = weight * (normal > 0)
    elif c.token_weight == "negative":
        # Their sum stays away from 0, where a mean means nothing.
        weight = normal + 0.7 * normal.sum().sign()
    return weight.to(getattr(torch, c.weight_dtype))


def _upstream(c: Configuration, normal, ids: Tensor | None) -> dict[str, Tensor]:
    names = {"statistics": c.mixture, "selected": ("log_probs",)}.get(c.kind, ("loss",))
    shape = c.shape if c.reduction == "none" else ()
    wide = torch.float64 if c.dtype == "fp64" else torch.float32
    found = {}
    for name in names:
        value = normal(*(ids.shape if name in ("selected_log_prob", "log_probs") else shape))
        if c.upstream == "ones":
            value = torch.ones_like(value)
        elif c.upstream == "some zeros":
            value.view(-1)[1::2] = 0
        elif c.upstream == "zero":
            value.zero_()
        elif c.upstream == "large":
            value *= 100.0 if c.computed == "fp16" else 1e5
        elif c.upstream == "tiny":
            value *= 1e-3 if c.computed == "fp16" else 1e-9
        found[name] = value.to(wide)
    return found


def laid(value: Tensor, layout: str) -> Tensor:
    """The same numbers at other strides or another offset; what lies between them is NaN."""
    if layout == "expanded" and value.dim() and len(value):
        return value[:1].clone().expand(value.shape)
    if layout == "offset":
        flat = value.new_empty(value.numel() + 1)
        view = flat[1:].view(value.shape)
    elif layout in ("wide", "gaps", "rows") and value.dim():
        between = torch.nan if value.is_floating_point() else 1
        sizes, slices = list(value.shape), [slice(None)] * value.dim()
        if layout == "wide":
            sizes, slices = [n + 3 for n in sizes], [slice(2, 2 + n) for n in sizes]
        else:
            place = 0 if layout == "rows" else -1
            sizes[place] *= 2
            slices[place] = slice(0, None, 2)
        view = value.new_full(sizes, between)[tuple(slices)]
    elif layout == "transposed" and value.dim() > 1:
        view = torch.empty_like(value.transpose(0, -1), memory_format=torch.contiguous_format).transpose(0, -1)
    else:
        return value.clone(memory_format=torch.contiguous_format)
    return view.copy_(value)
