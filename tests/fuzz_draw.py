"""A configuration is everything about a call of the public functions but the numbers in its tensors. It is drawn from a
``random.Random`` alone, so whoever seeds that gets the same configuration again."""

from __future__ import annotations

import math
from dataclasses import dataclass, fields
from random import Random

FIELDS = tuple(
    "lse target_logit target_log_prob mean_logit mean_log_prob expected_logit entropy sum_p_squared "
    "selected_log_prob".split()
)
"""The differentiable fields of ``TokenStatistics``."""
LAID = tuple(
    "input weight bias target token_weight logit_scale temperature selected offsets mask teacher_input teacher_weight "
    "teacher_bias".split()
)
"""The tensors of a call, in the order of ``Configuration.layouts``."""
_ITEMSIZE = {"fp64": 8, "fp32": 4, "bf16": 2, "fp16": 2}
_LAYOUTS = ("wide", "gaps", "rows", "transposed", "offset", "expanded")
_WALKS = ["backward"] * 8 + (
    "twice,twice,save_on_cpu,gapped hooks,transposed hooks,checkpoint,reentrant checkpoint,twice under hooks".split(",")
)
_FLOATS = ("float32", "float32", "float64", "bfloat16", "float16")


@dataclass(frozen=True)
class Configuration:
    """A call of ``kind`` loss, statistics, logits (``vocab_parallel_cross_entropy``), selected
    (``selected_log_probs``) or divergence (``distillation.divergence``).

    ``shape``: of the target. ``shards``: (first id, rows) of each rank. ``bias``: '', plain or masked, some
    entries of which are -inf, or low: a finite number masks a range of them. ``targets``: inside the vocabulary, or
    some outside. ``layouts``: strides of the tensors :data:`LAID`. ``fields`` of a statistics' mixture and those that
    were asked for. ``mode``: train, no_grad or inference. ``walk``: how the graph is made and walked. ``block_bytes``
    and ``tile`` are those of ``tools.shrunk``.

    ``scale``: the logits'; with a ``scale_dtype`` the size of a tensor of each token. ``temperature`` likewise.
    ``selected``: '', ids
    ``[..., K]`` or sets of up to K each. ``counted``: '', or whether the number of tokens that count is given right or
    wrong; of a loss they are those that it does not ignore, and ``ignored`` tells a statistics' mask, too.

    ``sure``: '', or whether some or all tokens are sure of an entry, whose 1 - p is about ``miss``, if hidden states
    along its row of the weight can make it so. ``upstream`` shares: of selected entries, their probabilities.

    A divergence has ``scale`` 1 / ``temperature``. The teacher's hidden size is ``E``; its last shard has
    ``teacher_padding`` rows behind the vocabulary, or, if that is None, as many as the student's.
    """

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
    group_given: bool = True
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
    scale_dtype: str = ""
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
    weight_dtype: str = "float32"
    weight_learns: bool = False
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
    temperature_dtype: str = ""
    E: int = 0
    teacher_dtype: str = "fp32"
    teacher_bias: str = ""
    teacher_padding: int | None = None
    teacher_equal: bool = False
    mixture: tuple[str, ...] = ()
    upstream: str = "random"
    frozen: tuple[str, ...] = ()
    layouts: tuple[str, ...] = ("plain",) * len(LAID)
    numpy: bool = False
    mode: str = "train"
    walk: str = "backward"
    debug: bool = False
    repeat: bool = False

    @property
    def N(self) -> int:
        return math.prod(self.shape)

    @property
    def computed(self) -> str:
        """The dtype of the projection."""
        return self._cast(self.dtype)

    @property
    def teacher_computed(self) -> str:
        """The dtype of the teacher's projection."""
        return self._cast(self.teacher_dtype)

    def _cast(self, dtype: str) -> str:
        return self.autocast if self.autocast and dtype != "fp64" else dtype

    def layout(self, name: str) -> str:
        """Of one of :data:`LAID`."""
        return self.layouts[LAID.index(name)]

    def __str__(self) -> str:
        """What differs from the defaults, as the arguments of a call."""
        some = [f for f in fields(self) if getattr(self, f.name) != f.default]
        return ", ".join(f"{f.name}={getattr(self, f.name)!r}" for f in some)


def draw(random: Random, ranks: int, small: bool = False) -> Configuration:
    """The next configuration over ``ranks``; ``small`` ones have few logits, for an interpreter."""
    sure = random.random() < 0.25
    kind = random.choices([*_OF_KIND], (20, 50, 5, 10, 15) if sure else (40, 28, 7, 10, 15))[0]
    d = _tensors(random, ranks, small, kind)
    if sure:
        d |= _sure(random, d, small)
    if kind != "logits":
        d |= _vocabulary(random, ranks, d["V"]) | _projection(random, d)
    for part in _OF_KIND[kind]:
        d |= part(random, d)
    d |= _walk(random, d)
    return Configuration(**(d | _in_reach(random, d) if "sure" in d else d))


def _upto(random: Random, largest: int) -> int:
    """Between 1 and ``largest``, as often below as above its root."""
    return min(largest, int(math.exp(random.uniform(0, math.log(largest + 1)))))


def _tensors(random: Random, ranks: int, small: bool, kind: str) -> dict:
    chance = random.random()
    tokens = 0 if chance < 0.04 else _upto(random, 40 if small else 300)
    if chance > 0.96:
        tokens += 384  # A sample of so many is less than all of them.
    dtypes = ("fp64", "fp32", "bf16", "fp16")
    dtype = random.choices(dtypes, (1, 3, 3, 3) if small else (2, 3, 3, 2))[0]
    sequence_parallel = kind != "logits" and random.random() < (0.5 if ranks > 1 else 0.1)
    dimensions = random.choices((0, 1, 2, 3), (1, 4, 4, 3))[0]
    if tokens == 0 or (sequence_parallel and ranks > 1):
        dimensions = max(1, dimensions)
    shape: list[int] = []
    left = tokens
    for place in range(dimensions):
        last = place == dimensions - 1
        size = left if last or left == 0 else _upto(random, left)
        shape.append(size)
        left = left // size if size else 0
    random.shuffle(shape)
    if sequence_parallel and ranks > 1:
        shape[0] += -shape[0] % ranks
    return {
        "kind": kind,
        "ranks": ranks,
        "shape": tuple(shape),
        "D": 0 if random.random() < 0.02 else _upto(random, 32 if small else 72),
        "V": _upto(random, 300 if small else 2000),
        "values": random.getrandbits(48),
        "dtype": dtype,
        "sequence_parallel": sequence_parallel,
        "group_given": random.random() < 0.5 or ranks > 1,
        "sharpness": random.choice((0.0, 0.01, 0.3, 1.0, 1.0, 1.0, 3.0, 10.0)),
        "offset": random.choice((0.0, 0.0, 0.0, 0.0, 100.0, -300.0)),
        "numpy": random.random() < 0.2,
        "debug": random.random() < 0.1,
        "repeat": random.random() < 0.4,
    }


def _sure(random: Random, d: dict, small: bool) -> dict:
    """So many tokens, in so many dimensions, that some can be sure of an entry and are a group."""
    tokens = d["ranks"] * random.randint(24, 40 if small else 100)
    return {
        "sure": random.choice(("some", "some", "all")),
        "miss": 10 ** random.uniform(-6, -1),
        "shape": random.choice(((tokens,), (d["ranks"], tokens // d["ranks"]))),
        # Products over few dimensions are nearly exact.
        "D": random.choice((max(16, d["D"]), random.randint(64, 128))),
        "V": max(random.randint(48, 200), d["V"]),
        "dtype": random.choice(("fp32", "bf16", "bf16", "bf16", "fp16", "fp16")),
        "sharpness": random.choice((0.3, 1.0, 1.0, 3.0)),
    }


def _in_reach(random: Random, d: dict) -> dict:
    """Nothing that keeps sure tokens from being that, or their gradients from counting."""
    changes: dict = {"upstream": random.choice(("random", "random", "ones", "some zeros"))}
    # One gradient that is as small as 1 - p. Those of others hide it.
    names = ("target_log_prob", "entropy", "sum_p_squared", "selected_log_prob", "selected_log_prob", "")
    name = random.choice(names) if d["kind"] == "statistics" else ""
    if name:
        asked = {"entropy": "expected_logit"}.get(name, name)
        changes |= {"mixture": (name,), "asked": (*d["asked"], *[asked] * (asked not in d["asked"])), "filtered": False}
    if name == "target_log_prob":
        changes |= {"no_target": False, "asked": d["asked"]}
    if name == "selected_log_prob":
        # Of the entry alone, or of all of its set's probability.
        sets = {"K": 1}, {"K": 2, "upstream": "some zeros"}, {"K": 8, "upstream": "shares"}
        changes |= {"selected": "ids", "id_dtype": "int64", "ids": "inside", "asked": d["asked"]} | random.choice(sets)
    if random.random() < 0.8:
        changes["targets"] = "inside"
    if d["kind"] == "selected":
        changes["K"] = max(2, d["K"])
    changes["layouts"] = tuple("plain" if layout == "expanded" else layout for layout in d["layouts"])
    if random.random() < 0.7:
        # All is saved or nothing is.
        changes["budget"] = random.choice((None, 0))
    if d.get("softcap") is not None:
        changes |= {"softcap": max(30.0, d["softcap"]), "offset": 0.0}
    divided = 1.0 if d["kind"] == "divergence" else d.get("temperature", 1.0)
    if not 0.3 <= abs(d.get("scale", 1.0)) / divided <= 3 or d.get("softcap") is not None:
        changes["scale"] = changes["temperature"] = 1.0
    if d["kind"] == "divergence":
        changes["E"] = max(16, d["E"])
    # Their roundings are hundreds, and those of a mean are a matter of luck.
    return changes | {name: "plain" for name in ("bias", "teacher_bias") if d.get(name) == "low"}


def _vocabulary(random: Random, ranks: int, V: int) -> dict:
    padding = random.choice((0, 0, 0, 1, _upto(random, 50)))
    if ranks == 1 or random.random() < 0.5:
        rows = -(-V // ranks) + padding // ranks
        if ranks == 1:
            rows = V + padding
        shards = [(rank * rows, rows) for rank in range(ranks)]
        starts_given = random.random() < 0.3
        padding = rows * ranks - V
    else:
        cuts = sorted(random.choice((0, V, random.randint(0, V), random.randint(0, V))) for _ in range(ranks - 1))
        ends = [*cuts, V + padding]
        shards = [(a, b - a) for a, b in zip([0, *cuts], ends)]
        # An empty shard may start anywhere.
        shards = [(a if n else random.randint(0, 2 * V), n) for a, n in shards]
        random.shuffle(shards)
        starts_given = True
    size_given = padding > 0 or random.random() < 0.4
    return {"shards": tuple(shards), "starts_given": starts_given, "size_given": size_given}


def _projection(random: Random, d: dict) -> dict:
    tokens, V, dtype = math.prod(d["shape"]), d["V"], d["dtype"]
    whole = max(1, tokens * V * _ITEMSIZE[dtype] // d["ranks"])
    scale = random.choice((1.0,) * 8 + (0.5, -1.5, 0.0, 1e-3, 1e-8, 30.0, -20.0, 1e3))
    autocast = random.choice(("bf16", "bf16", "fp16")) if random.random() < 0.08 else ""
    block_bytes = tile = None
    if random.random() < 0.7:
        block_bytes = max(1, whole // random.choice((1, 2, 3, 5, 9)) + random.randint(-20, 20))
        # A few hundred tiles at most.
        rows, columns = random.randint(1, 64), random.randint(1, 200)
        while -(-tokens // rows) * -(-V // columns) > 150:
            rows, columns = 2 * rows, 2 * columns
        tile = rows, columns
    # Where whole windows can be masked; losses of such entries are less than what stands for infinity.
    biases = ("", "", "plain", "plain", "masked") + ("low", "low") * (V > 128 and scale <= 1)
    return {
        "autocast": autocast,
        "reduce_hidden_grad": d["sequence_parallel"] or random.random() < 0.8,
        "reduce_dtype": random.choice(("", "", "wide", "same")),
        "budget": random.choice((None, None, 0, 0, random.randint(0, whole), random.randint(0, 2 * whole))),
        "block_bytes": block_bytes,
        "tile": tile,
        "scale": scale,
        "softcap": random.choice((None,) * 8 + (0.05, 0.5, 2.0, 5.0, 30.0, 50.0, 1e3, 1e6)),
        "bias": random.choice(biases if scale > 0 and V > 1 else ("", "plain")),
    }


def _logits(random: Random, d: dict) -> dict:
    entries = max(1, d["V"] // d["ranks"])
    shards = tuple((rank * entries, entries) for rank in range(d["ranks"]))
    smoothing = random.choice((0.0, 0.0, 0.1, 0.9)) if entries > 1 else 0.0
    return {
        "V": entries * d["ranks"],
        "shards": shards,
        "label_smoothing": smoothing,
        "reduction": "none",
        # Without one it asks Megatron-core for its own.
        "group_given": True,
    }


def _targets(random: Random, d: dict) -> dict:
    kind = d["kind"]
    outside = random.random() < (0.5 if kind == "statistics" else 0.1)
    return {
        "target_dtype": random.choice(("int64",) * 5 + ("int32", "int16", "int8", "uint8")),
        "targets": "outside" if outside else "inside",
        "no_target": kind in ("statistics", "divergence") and random.random() < 0.15,
        "ignored": random.choice(("none", "some", "some", "all" if random.random() < 0.3 else "some")),
        "ignore_index": random.choice((None, -100, -100, -100, 0, d["V"] // 2, d["V"] + 3, -1, 255, 2**40, -(2**63))),
    }


def _loss(random: Random, d: dict) -> dict:
    weights = ("", "", "", "positive", "positive", "zeros", "zero", "mask", "negative")
    reduction = random.choice(("none", "mean", "sum"))
    token_weight = random.choice(weights)
    smoothing = random.choice((0.0, 0.0, 0.0, 0.1, 0.5, 1.0))
    changes = {}
    if d["bias"] == "masked" and d["softcap"] is None and smoothing and token_weight:
        # Infinite losses times 0 mean nothing.
        changes["bias"] = "plain"
    if d["targets"] == "outside" and (reduction != "none" or d["debug"]):
        # All is NaN then, or refused.
        changes["targets"] = "inside"
    weight_dtype = random.choice(("int64", "bool", "uint8") if token_weight == "mask" else _FLOATS)
    return changes | {
        "reduction": reduction,
        "label_smoothing": smoothing,
        "z_loss": random.choice((0.0, 0.0, 0.0, 1e-4, 1e-2, -0.05)),
        "token_weight": token_weight,
        "weight_dtype": weight_dtype,
        "weight_learns": token_weight not in ("", "mask") and d["bias"] != "low" and random.random() < 0.3,
        "counted": _counted(random, d),
        "filtered": not smoothing and random.random() < 0.3,
    }


def _counted(random: Random, d: dict) -> str:
    """Whether the number of tokens that count is given, and whether it is the right one."""
    wrong = "wrong" if random.random() < 0.1 and math.prod(d["shape"]) else "right"
    return wrong if random.random() < 0.25 else ""


def _per_token(random: Random, d: dict) -> dict:
    return {
        "scale_dtype": random.choice(_FLOATS) if random.random() < 0.25 else "",
        "temperature": random.choice((1.0,) * 4 + (0.3, 1.7, 30.0)),
        "temperature_dtype": random.choice(_FLOATS) if random.random() < 0.25 else "",
    }


def _selected(random: Random, d: dict) -> dict:
    tokens, masked = math.prod(d["shape"]), d["bias"] == "masked"
    K = random.choice((0, 1, 2, _upto(random, 9), _upto(random, 9), _upto(random, 80)))
    return {
        "selected": random.choice(("ids", "sets")),
        "K": min(K, 4000 // max(1, tokens)),
        # What a masked bias leaves may lie beyond 8 bits.
        "id_dtype": random.choice(("int64", "int64", "int32", "int16", "int8", "uint8")[: -2 if masked else None]),
        "ids": random.choice(("inside", "outside")),
        "reduction": "none",
    }


def _statistics(random: Random, d: dict) -> dict:
    asked = ("mean_logit", "expected_logit", "argmax", "sum_p_squared")
    asked = tuple(name for name in asked if random.random() < 0.5)
    found = _selected(random, d) if random.random() < 0.5 else {"selected": ""}
    found["counted"] = "" if found["selected"] == "sets" else _counted(random, d)
    there = ["lse"]
    there += [] if d["no_target"] else ["target_logit", "target_log_prob"]
    there += ["mean_logit", "mean_log_prob"] if "mean_logit" in asked else []
    there += ["expected_logit", "entropy"] if "expected_logit" in asked else []
    there += ["sum_p_squared"] if "sum_p_squared" in asked else []
    there += ["selected_log_prob"] if found["selected"] else []
    mixture = random.sample(there, random.randint(1, len(there)))
    top_k = random.choice((1, _upto(random, d["V"]), d["V"])) if random.random() < 0.25 else None
    return found | {
        "asked": asked,
        "mixture": tuple(sorted(mixture, key=FIELDS.index)),
        "top_k": top_k,
        "reduction": "none",
        "filtered": not found["selected"] and {*asked} <= {"argmax"} and random.random() < 0.6,
    }


def _divergence(random: Random, d: dict) -> dict:
    beta = random.choice((0.0, 0.0, 1.0, 1.0, 0.5, 0.1, 0.9, 1e-3, random.random()))
    temperature = random.choice((1.0, 1.0, 1.0, 0.7, 3.0, 0.05, 30.0, 1e4))
    dtypes = ("fp64",) if d["dtype"] == "fp64" else (d["dtype"], d["dtype"], "fp32", "bf16", "fp16")
    bias, teacher_bias = (
        random.choice(("", "plain", "masked", "low") if d["V"] > 1 else ("", "plain")) for _ in range(2)
    )
    # Else infinite, or beyond fp16: an entry that only the other excludes.
    if beta == 0 and bias == "masked":
        teacher_bias = bias
    if beta == 1 and teacher_bias in ("masked", "low"):
        bias = teacher_bias
    equal = random.random() < 0.1
    padded = d["size_given"] and (d["ranks"] == 1 or d["starts_given"]) and random.random() < 0.3
    return {
        "beta": beta,
        "temperature": temperature,
        "scale": 1 / temperature,
        "softcap": None,
        "reduction": random.choice(("none", "mean", "sum")),
        "bias": bias,
        "E": d["D"] if equal else 0 if random.random() < 0.02 else _upto(random, 48),
        "teacher_dtype": d["dtype"] if equal else random.choice(dtypes),
        "teacher_bias": bias if equal else teacher_bias,
        "teacher_padding": _upto(random, 9) if padded else None,
        "teacher_equal": equal,
    }


_OF_KIND = {
    "loss": (_per_token, _targets, _loss),
    "statistics": (_per_token, _targets, _statistics),
    "logits": (_logits, _targets),
    "selected": (_per_token, _selected, lambda random, d: {"no_target": True}),
    "divergence": (_targets, _divergence),
}


def _walk(random: Random, d: dict) -> dict:
    kind, projected = d["kind"], d["kind"] != "logits"
    layouts = {name: random.choice(_LAYOUTS) if random.random() < 0.2 else "plain" for name in LAID}
    walks = [*_WALKS, *(["input alone", "weight alone", "bias alone"] if projected else [])]
    frozen: tuple[str, ...] = ()
    if projected and random.random() < 0.25:
        frozen = tuple(name for name in ("input", "weight", "bias") if random.random() < 0.5)
    repeats = {"offsets"}
    if sum(n for _, n in d["shards"]) != d["V"]:
        # What is behind the vocabulary differs from what is in it.
        repeats |= {"weight", "bias"}
    if d.get("teacher_padding") is not None:
        repeats |= {"teacher_weight", "teacher_bias"}
    repeats |= {name for name in ("bias", "teacher_bias") if d.get(name) in ("masked", "low")}
    if d.get("teacher_equal"):
        repeats |= {"input", "weight", "bias", "teacher_input", "teacher_weight", "teacher_bias"}
    for name in repeats:
        layouts[name] = "gaps" if layouts[name] == "expanded" else layouts[name]
    upstreams = ("random",) * 4 + ("ones", "some zeros", "zero", "large", "tiny")
    if kind == "logits":
        upstreams = ("random", "random", "ones", "some zeros", "zero", "large", "tiny")
    return {
        "upstream": random.choice(upstreams),
        "frozen": frozen,
        "layouts": tuple(layouts.values()),
        "mode": random.choices(("train", "no_grad", "inference"), (88, 6, 6))[0],
        "walk": random.choice(walks),
    }
