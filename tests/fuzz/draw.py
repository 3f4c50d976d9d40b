"""A configuration is everything about a call of the public functions but the numbers in its tensors. It is drawn from a
``random.Random`` alone, so whoever seeds that gets the same configuration again."""

import math
from dataclasses import dataclass, fields
from random import Random

LAID = tuple(
    "input weight bias target token_weight logit_scale temperature selected offsets mask teacher_input teacher_weight "
    "teacher_bias".split()
)
"""The tensors of a call, in the order of ``Configuration.layouts``."""
_ITEMSIZE = {"fp64": 8, "fp32": 4, "bf16": 2, "fp16": 2}
_WALKS = (
    *("backward",) * 8,
    *("twice", "twice", "twice under hooks", "hooks", "hooks"),
    *("checkpoint", "reentrant checkpoint"),
)
_ASKED_BY = {
    "mean_logit": "mean_logit",
    "mean_log_prob": "mean_logit",
    "expected_logit": "entropy",
    "entropy": "entropy",
    "sum_p_squared": "sum_p_squared",
}
"""The option that asks for a statistic."""
_EDGES = {
    "loss": ("cap", "flat", "mean", "window", "cold"),
    "statistics": ("cap", "flat", "mean", "window", "cold", "nan"),
    "divergence": ("close", "", "", ""),
}
GROUPED = ("cap", "flat", "mean", "window")
"""Edges of which all tokens are judged as a group."""


@dataclass(frozen=True)
class Configuration:
    """A call of ``kind`` loss, statistics, logits (``vocab_parallel_cross_entropy``), selected
    (``selected_log_probs``) or divergence (``distillation.divergence``).

    ``shape``: of the target. ``shards``: (first id, rows) of each rank. ``bias``: '', plain, masked (some entries are
    -inf) or low (a finite number masks a range). ``layouts``: strides of the tensors :data:`LAID`. ``mixture``: the
    statistics that are differentiated. ``mode``: train, no_grad or inference. ``walk``: how the graph is made and
    walked. ``block_bytes`` and ``tile`` are those of ``tools.shrunk``. ``scale``: the logits', or the size of a tensor
    of ``scales``, one of each token, and ``temperature`` likewise. ``selected``: '', ids ``[..., K]`` or sets of up to
    K each. ``counted``: '', or whether the number of tokens that count is given right or wrong; ``ignored`` tells a
    statistics' mask, too.

    ``sure``: '', or whether some or all tokens are sure of an entry, whose 1 - p is about ``miss``, if hidden states
    along its row of the weight can make it so. ``upstream`` shares: of selected entries, their probabilities.

    ``edge``: '', or what numbers lie at: 'cap' (logits saturate a soft-cap), 'flat' (nearly equal logits), 'mean'
    (such, and rows of the weight that share a mean), 'window' (the same, where the bias excludes one entry of each
    window), 'nan' (beside an infinite logit, of every token), 'cold' (some temperatures are infinite) or 'close'
    (student and teacher, whose hidden size is ``E``)."""

    kind: str
    ranks: int
    shape: tuple[int, ...]
    D: int
    V: int
    shards: tuple[tuple[int, int], ...]
    values: int
    dtype: str = "fp32"
    autocast: str = ""
    starts_given: bool = False
    size_given: bool = False
    sequence_parallel: bool = False
    reduce_dtype: str = ""
    reduce_hidden_grad: bool = True
    budget: int | None = None
    block_bytes: int | None = None
    tile: tuple[int, int] | None = None
    sharpness: float = 1.0
    sure: str = ""
    miss: float = 0.0
    offset: float = 0.0
    bias: str = ""
    scale: float = 1.0
    scales: bool = False
    softcap: float | None = None
    target_dtype: str = "int64"
    targets: str = "inside"
    no_target: bool = False
    ignore_index: int | None = -100
    ignored: str = "some"
    reduction: str = "mean"
    label_smoothing: float = 0.0
    z_loss: float = 0.0
    token_weight: str = ""
    asked: tuple[str, ...] = ()
    filtered: bool = False
    selected: str = ""
    K: int = 0
    id_dtype: str = "int64"
    ids: str = "inside"
    top_k: int | None = None
    counted: str = ""
    beta: float = 0.0
    temperature: float = 1.0
    temperatures: bool = False
    E: int = 0
    teacher_dtype: str = "fp32"
    teacher_bias: str = ""
    mixture: tuple[str, ...] = ()
    upstream: str = "random"
    frozen: tuple[str, ...] = ()
    layouts: tuple[str, ...] = ("plain",) * len(LAID)
    edge: str = ""
    mode: str = "train"
    walk: str = "backward"
    debug: bool = False
    repeat: bool = False

    @property
    def sequence_dim(self) -> int:
        """1 for half of the calls that can split the sequence along the second dimension."""
        splits = self.sequence_parallel and self.ranks > 1 and len(self.shape) > 1 and self.selected != "sets"
        return int(splits and self.shape[1] % self.ranks == 0 and self.values % 2)

    @property
    def own(self) -> bool:
        """Whether the loss is written as a function for ``token_loss``: half of those that can be."""
        plain = self.reduction != "none" and not self.label_smoothing and not self.token_weight
        return self.kind == "loss" and plain and self.values % 2 == 0

    @property
    def own_teacher(self) -> bool:
        """Whether the teacher has half of the student's scale, and the other cap, 7 or none: half of those that can."""
        return self.kind == "divergence" and self.edge != "close" and not self.excluded and self.values // 3 % 2 == 1

    @property
    def N(self) -> int:
        return math.prod(self.shape)

    @property
    def computed(self) -> str:
        """The dtype of the projection."""
        return self.cast(self.dtype)

    def cast(self, dtype: str) -> str:
        return self.autocast if self.autocast and dtype != "fp64" else dtype

    def layout(self, name: str) -> str:
        return self.layouts[LAID.index(name)]

    @property
    def excluded(self) -> bool:
        """Whether a bias masks entries."""
        return bool({self.bias, self.teacher_bias} & {"masked", "low"})

    def __str__(self) -> str:
        """What differs from the defaults, as the arguments of a call."""
        some = [f for f in fields(self) if getattr(self, f.name) != f.default]
        return ", ".join(f"{f.name}={getattr(self, f.name)!r}" for f in some)


def draw(random: Random, ranks: int, small: bool = False) -> Configuration:
    """The next configuration over ``ranks``; ``small`` ones have few logits, for an interpreter."""
    sure = random.random() < 0.25
    kind = random.choices([*_OF_KIND], (20, 50, 5, 10, 15) if sure else (40, 28, 7, 10, 15))[0]
    d = _tensors(random, ranks, small, kind)
    edge = random.choice(_EDGES.get(kind, ("",))) if random.random() < 0.3 else ""
    if sure:
        d |= _sure(random, d, small)
    elif edge in GROUPED:
        d |= _grouped(random, d, edge)
    if kind != "logits":
        d |= _vocabulary(random, ranks, d["V"]) | _projection(random, d)
    for part in _OF_KIND[kind]:
        d |= part(random, d)
    d |= _walk(random, d)
    if sure:
        d |= _in_reach(random, d)
    elif edge and d["D"] and math.prod(d["shape"]):
        d |= _edge(random, d, edge)
    return Configuration(**d)


def _grouped(random: Random, d: dict, edge: str) -> dict:
    """So many tokens, in so many dimensions, that they are a group."""
    return {
        "D": max(32, d["D"]),
        "V": max(48, d["V"]),
        "shape": (d["ranks"] * random.randint(24, 39),),
        "dtype": random.choice(("bf16", "fp16")) if edge == "cap" else "bf16",
        "sharpness": random.choice((0.02, 0.1)),
    }


def _edge(random: Random, d: dict, edge: str) -> dict:
    """The changes that bring the numbers to an edge."""
    if edge == "close":
        like_student = dict(E=d["D"], teacher_dtype=d["dtype"])
        return dict(edge=edge, bias="", teacher_bias="", autocast="", softcap=None, **like_student)
    if edge == "cold":
        bias = "plain" if d["bias"] in ("masked", "low") else d["bias"]
        return dict(edge=edge, temperatures=True, softcap=None, bias=bias)
    plain = dict(edge=edge, scale=1.0, scales=False, autocast="", offset=0.0, upstream="random", filtered=False)
    plain |= dict(temperature=1.0, temperatures=False, softcap=None, bias="", token_weight="", targets="inside")
    plain |= dict(selected="")
    if edge == "nan":
        return plain | dict(mixture=("lse",), counted="", ignored="none", debug=False, bias="plain")
    plain |= dict(mixture=("target_log_prob",), no_target=False, label_smoothing=0.0, z_loss=0.0, top_k=None, K=0)
    if edge == "cap":
        cap = random.choice((1.0, 3.0, 30.0))
        return plain | dict(softcap=cap, sharpness=6 * cap)
    if edge == "flat":  # a gradient that is 0 where all logits are equal, alone
        name = random.choice(("entropy", "sum_p_squared", "mean_log_prob"))
        return plain | dict(mixture=(name,), asked=_asked_with(d, name), label_smoothing=1.0)
    return plain | dict(bias="masked" if edge == "window" else "")


def _asked_with(d: dict, name: str) -> tuple[str, ...]:
    """What is asked for, and this statistic."""
    return tuple(sorted({*d.get("asked", ()), _ASKED_BY[name]}))


def _each(random: Random, **choices: tuple) -> dict:
    return {name: random.choice(values) for name, values in choices.items()}


def _upto(random: Random, largest: int) -> int:
    """Between 1 and ``largest``, as often below as above its root."""
    return min(largest, int(math.exp(random.uniform(0, math.log(largest + 1)))))


def _tensors(random: Random, ranks: int, small: bool, kind: str) -> dict:
    # Of 384 tokens a sample is less than all of them.
    tokens = _upto(random, 40 if small else 300) + random.choice((0,) * 24 + (384,))
    sequence_parallel = kind != "logits" and random.random() < (0.5 if ranks > 1 else 0.1)
    split = sequence_parallel and ranks > 1
    dimensions = random.choices((0, 1, 2, 3), (1 - split, 4, 4, 3))[0]
    shape = [_upto(random, round(tokens ** (1 / dimensions))) for _ in range(dimensions)]
    if dimensions:
        shape[0] *= random.random() > 0.04
    if split:
        shape[0] += -shape[0] % ranks
    dtypes = (1, 3, 3, 3) if small else (2, 3, 3, 2)
    return {
        "kind": kind,
        "ranks": ranks,
        "shape": (*shape,),
        "D": _upto(random, 32 if small else 72) * (random.random() > 0.02),
        "V": _upto(random, 300 if small else 2000),
        "values": random.getrandbits(48),
        "dtype": random.choices(("fp64", "fp32", "bf16", "fp16"), dtypes)[0],
        "sequence_parallel": sequence_parallel,
    } | _each(
        random,
        sharpness=(0.0, 0.01, 0.3, 1.0, 1.0, 1.0, 3.0, 10.0),
        offset=(0.0, 0.0, 0.0, 0.0, 100.0, -300.0),
        debug=(True,) + (False,) * 9,
        repeat=(True, True, False, False, False),
    )


def _sure(random: Random, d: dict, small: bool) -> dict:
    """So many tokens, in so many dimensions, that some can be sure of an entry and are a group."""
    tokens = random.randint(24, 40 if small else 100)
    return {
        # Products over few dimensions are nearly exact.
        "D": random.choice((max(16, d["D"]), random.randint(64, 128))),
        "V": max(random.randint(48, 200), d["V"]),
        "miss": 10 ** random.uniform(-6, -1),
    } | _each(
        random,
        sure=("some", "some", "all"),
        shape=((d["ranks"] * tokens,), (d["ranks"], tokens)),
        dtype=("fp32", "bf16", "bf16", "bf16", "fp16", "fp16"),
        sharpness=(0.3, 1.0, 1.0, 3.0),
    )


def _in_reach(random: Random, d: dict) -> dict:
    """Nothing that keeps sure tokens from being that, or their gradients from counting."""
    changes: dict = _each(random, upstream=("random", "random", "ones", "some zeros"))
    # One gradient that is as small as 1 - p. Those of others hide it.
    names = ("target_log_prob", "entropy", "sum_p_squared", "selected_log_prob", "selected_log_prob", "")
    name = random.choice(names) if d["kind"] == "statistics" else ""
    if name:
        changes |= {"mixture": (name,), "filtered": False, "no_target": d["no_target"] and name != "target_log_prob"}
    if name in _ASKED_BY:
        changes["asked"] = _asked_with(d, name)
    if name == "selected_log_prob":
        # Of the entry alone, or of all of its set's probability.
        sets = {"K": 1}, {"K": 2, "upstream": "some zeros"}, {"K": 8, "upstream": "shares"}
        changes |= {"selected": "ids", "ids": "inside"} | random.choice(sets)
    if random.random() < 0.8:
        changes["targets"] = "inside"
    if d["kind"] == "selected":
        changes["K"] = max(2, d["K"])
    if random.random() < 0.7:
        # All is saved or nothing is.
        changes["budget"] = random.choice((None, 0))
    if d.get("softcap") is not None:
        changes |= {"softcap": max(30.0, d["softcap"]), "offset": 0.0}
    if not 0.3 <= abs(d.get("scale", 1.0)) / d.get("temperature", 1.0) <= 3 or d.get("softcap") is not None:
        changes["scale"] = changes["temperature"] = 1.0
    if d["kind"] == "divergence":
        changes["E"] = max(16, d["E"])
    # Their roundings are hundreds, and those of a mean are a matter of luck.
    return changes | {name: "plain" for name in ("bias", "teacher_bias") if d.get(name) == "low"}


def _vocabulary(random: Random, ranks: int, V: int) -> dict:
    padding = random.choice((0, 0, 0, 1, _upto(random, 50)))
    if ranks == 1 or random.random() < 0.5:
        rows = -(-(V + padding) // ranks)
        shards, padding = [(rank * rows, rows) for rank in range(ranks)], rows * ranks - V
        starts_given = random.random() < 0.3
    else:
        cuts = sorted(random.choice((0, V, random.randint(0, V), random.randint(0, V))) for _ in range(ranks - 1))
        shards = [(a, b - a) for a, b in zip([0, *cuts], [*cuts, V + padding])]
        # An empty shard may start anywhere.
        shards = [(a if n else random.randint(0, 2 * V), n) for a, n in shards]
        random.shuffle(shards)
        starts_given = True
    size_given = padding > 0 or random.random() < 0.4
    return {"shards": tuple(shards), "starts_given": starts_given, "size_given": size_given}


def _projection(random: Random, d: dict) -> dict:
    tokens, V = math.prod(d["shape"]), d["V"]
    whole = max(1, tokens * V * _ITEMSIZE[d["dtype"]] // d["ranks"])
    block_bytes = tile = None
    if random.random() < 0.7:
        block_bytes = max(1, whole // random.choice((1, 2, 3, 5, 9)) + random.randint(-20, 20))
        # A few hundred tiles at most.
        rows, columns = random.randint(1, 64), random.randint(1, 200)
        while -(-tokens // rows) * -(-V // columns) > 150:
            rows, columns = 2 * rows, 2 * columns
        tile = rows, columns
    scale = random.choice((1.0,) * 8 + (0.5, -1.5, 0.0, 1e-3, 1e-8, 30.0, -20.0, 1e3))
    # Where whole windows can be masked; losses of such entries are less than what stands for infinity.
    biases = ("", "", "plain", "plain", "masked") + ("low", "low") * (V > 128 and scale <= 1)
    return {"block_bytes": block_bytes, "tile": tile, "scale": scale} | _each(
        random,
        autocast=("",) * 34 + ("bf16", "bf16", "fp16"),
        reduce_hidden_grad=(True, True, True, True, d["sequence_parallel"]),
        reduce_dtype=("", "", "wide", "same"),
        budget=(None, None, 0, 0, random.randint(0, whole), random.randint(0, 2 * whole)),
        softcap=(None,) * 8 + (0.05, 0.5, 2.0, 5.0, 30.0, 50.0, 1e3, 1e6),
        bias=biases if scale > 0 and V > 1 else ("", "plain"),
    )


def _logits(random: Random, d: dict) -> dict:
    entries = max(1, d["V"] // d["ranks"])
    return {
        "V": entries * d["ranks"],
        "shards": tuple((rank * entries, entries) for rank in range(d["ranks"])),
        "tile": (7, entries),  # some rows at a time
        "label_smoothing": random.choice((0.0, 0.0, 0.1, 0.9)) * (entries > 1),
        "reduction": "none",
    }


def _targets(random: Random, d: dict) -> dict:
    statistics, without = d["kind"] == "statistics", d["kind"] in ("statistics", "divergence")
    return _each(
        random,
        target_dtype=("int64", "int64", "int32"),
        # A loss of a target outside is NaN.
        targets=("inside", "outside") if statistics else ("inside",) * 9 + ("outside",) * (d["kind"] != "loss"),
        no_target=(False,) * 6 + (without,),
        ignored=("none",) * 3 + ("some",) * 8 + ("all",),
        ignore_index=(None, -100, -100, -100, 0, d["V"] // 2, d["V"] + 3, -1),
    )


def _loss(random: Random, d: dict) -> dict:
    found = _each(
        random,
        reduction=("none", "mean", "sum"),
        label_smoothing=(0.0, 0.0, 0.0, 0.1, 0.5, 1.0),
        z_loss=(0.0, 0.0, 0.0, 1e-4, 1e-2, 0.05),
        token_weight=("", "", "", "positive", "positive", "zeros", "zero", "mask", "negative"),
        counted=_counted(d),
    )
    weight, smoothing = found["token_weight"], found["label_smoothing"]
    if d["bias"] == "masked" and d["softcap"] is None and smoothing and weight:
        # Infinite losses times 0 mean nothing.
        found["bias"] = "plain"
    return found | {"filtered": not smoothing and random.random() < 0.3}


def _counted(d: dict) -> tuple[str, ...]:
    return ("",) * 30 + ("right",) * 9 + ("wrong" if math.prod(d["shape"]) else "right",)


def _per_token(random: Random, d: dict) -> dict:
    given = (False, False, False, True)
    return _each(random, scales=given, temperature=(1.0,) * 4 + (0.3, 1.7, 30.0), temperatures=given)


def _selected(random: Random, d: dict) -> dict:
    K = random.choice((0, 1, 2, _upto(random, 9), _upto(random, 9), _upto(random, 80)))
    found = _each(random, selected=("ids", "sets"), id_dtype=("int64", "int32"), ids=("inside", "outside"))
    return found | {"K": min(K, 4000 // max(1, math.prod(d["shape"]))), "reduction": "none"}


def _statistics(random: Random, d: dict) -> dict:
    asked = tuple(name for name in ("mean_logit", "entropy", "argmax", "sum_p_squared") if random.random() < 0.5)
    found = _selected(random, d) if random.random() < 0.5 else {"selected": ""}
    found["counted"] = "" if found["selected"] == "sets" else random.choice(_counted(d))
    there = ["lse"] if d["no_target"] else ["lse", "target_logit", "target_log_prob"]
    there += [name for name, by in _ASKED_BY.items() if by in asked]
    there += ["selected_log_prob"] if found["selected"] else []
    few = {*asked} <= {"argmax"} and not found["selected"]
    return found | {
        "asked": asked,
        "mixture": tuple(random.sample(there, random.randint(1, len(there)))),
        "top_k": random.choice((None,) * 9 + (1, _upto(random, d["V"]), d["V"])),
        "reduction": "none",
        "filtered": few and random.random() < 0.6,
    }


def _divergence(random: Random, d: dict) -> dict:
    # As for the student's bias.
    biases = ("", "plain", "masked") + ("low",) * (d["scale"] <= 1) if d["scale"] > 0 and d["V"] > 1 else ("", "plain")
    found = _each(
        random,
        beta=(0.0, 0.0, 1.0, 1.0, 0.5, 0.1, 0.9, 1e-3, random.random()),
        temperature=(1.0, 1.0, 1.0, 0.7, 3.0, 0.05, 30.0, 1e4),
        reduction=("none", "mean", "sum"),
        bias=biases,
        teacher_bias=biases,
        teacher_dtype=("fp64",) if d["dtype"] == "fp64" else (d["dtype"], d["dtype"], "fp32", "bf16", "fp16"),
        E=(*[_upto(random, 48)] * 49, 0),
    )
    # Else infinite, or beyond fp16: an entry that only the other excludes.
    if found["beta"] == 0 and found["bias"] == "masked":
        found["teacher_bias"] = found["bias"]
    if found["beta"] == 1 and found["teacher_bias"] in ("masked", "low"):
        found["bias"] = found["teacher_bias"]
    return found


_OF_KIND = {
    "loss": (_per_token, _targets, _loss),
    "statistics": (_per_token, _targets, _statistics),
    "logits": (_logits, _targets),
    "selected": (_per_token, _selected, lambda random, d: {"no_target": True}),
    "divergence": (_per_token, _targets, _divergence),
}


def _walk(random: Random, d: dict) -> dict:
    projected = d["kind"] != "logits"
    freezes = projected and random.random() < 0.25
    return {
        "frozen": tuple(name for name in ("input", "weight", "bias") if freezes and random.random() < 0.5),
        "layouts": tuple(random.choice(("plain",) * 12 + ("gaps", "transposed", "offset", "negative")) for _ in LAID),
    } | _each(
        random,
        upstream=("random",) * (4 if projected else 2) + ("ones", "some zeros", "zero", "large", "tiny"),
        mode=("train",) * 15 + ("no_grad", "inference"),
        walk=_WALKS + ("input alone", "weight alone", "bias alone") * projected,
    )
