"""Everything about a call of the public functions but the numbers in its tensors."""

from __future__ import annotations

import math
from dataclasses import dataclass, fields

FIELDS = (
    "lse",
    "target_logit",
    "target_log_prob",
    "mean_logit",
    "mean_log_prob",
    "expected_logit",
    "entropy",
    "sum_p_squared",
    "selected_log_prob",
)
"""The differentiable fields of ``TokenStatistics``."""

LARGEST_TARGET = {"uint8": 255, "int8": 127, "int16": 2**15 - 1, "int32": 2**31 - 1, "int64": 2**63 - 1}
LAID = (
    "input",
    "weight",
    "bias",
    "target",
    "token_weight",
    "logit_scale",
    "temperature",
    "selected",
    "offsets",
    "mask",
    "teacher_input",
    "teacher_weight",
    "teacher_bias",
)
"""The tensors of a call, in the order of ``Configuration.layouts``."""


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
