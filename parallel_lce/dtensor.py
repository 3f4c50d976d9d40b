"""DTensors, and sequences that are sharded along the second dimension, as the plain tensors of a call.

A call takes plain tensors, and a sequence in equal parts along the first dimension. A :class:`DTensorAdapter` makes
them from the user's tensors, and puts the results back. The call does not depend on the order of the tokens, so hidden
states ``[b, S/P, D]`` are not transposed: only values per token are, ``[b, S]`` to ``[P * b, S/P]``, the order in which
an all-gather returns the tokens.

DTensors follow the rules of PyTorch's ``loss_parallel``. One mesh dimension, here TP, shards the weight with
``Shard(0)``. The input is ``Replicate`` on it, or ``Shard`` of the first or second token dimension, which is sequence
parallelism. Other mesh dimensions may shard tokens; there the gradient of the weight is ``Partial``.
"""

from __future__ import annotations

import re
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from parallel_lce.call import debug
from parallel_lce.call.checks import as_group, has_dtensor, is_dtensor
from parallel_lce.core.collectives import Layout
from parallel_lce.core.options import SPOKEN, Options, Tensors, check_option, is_count
from parallel_lce.run.results import NAMES, TokenStatistics

# The ranks of a mesh dimension have the same tokens if its name has these words alone, among them tp or tensor.
_TENSOR_PARALLEL = {"tp", "tensor", "model", "parallel"}
_SHARDED_PARAMETER = (
    "If fully_shard (FSDP2) sharded it, call the loss inside the forward of the module that fully_shard wraps, where "
    "its parameters are whole, or call that module's unshard() before"
)


def adapted(
    options: Options, tensors: Tensors, group: Any, reduction: str | None = None, also: Any = None
) -> tuple[Options, Tensors, dist.ProcessGroup | None, DTensorAdapter | None]:
    """The call's options, plain tensors and group; ids are int64. The adapter restores order and placements of the
    results; None: there is nothing to restore. ``reduction``: of the result, if it differs from that of the options.
    ``also``: a further value per token, which the caller passes to :meth:`DTensorAdapter.per_token`. Raises
    ``ValueError`` for a group, placements or shapes that are not supported."""
    group, tensors = group and as_group(group), tensors.with_int64_ids()
    for name in ("logit_scale", "temperature"):
        if isinstance(value := getattr(options, name), Tensor):  # one number per token
            options, tensors = options._replace(**{name: 1.0}), tensors._replace(**{name: value})
    sequence_dim = options.sequence_dim
    if type(sequence_dim) is not int or sequence_dim != 0:
        check_option("sequence_dim", sequence_dim)
    if not sequence_dim and not has_dtensor((*tensors, also)):
        return options, tensors, group, None
    adapter = DTensorAdapter(options, group, reduction or options.reduction)
    plain = adapter.enter(tensors)
    return adapter.options, plain, adapter.group, adapter


class DTensorAdapter:
    """How a call's tokens and results are placed, from the placements of its tensors.

    Attributes, complete after :meth:`enter`:
        options: the call's, with ``sequence_parallel`` and, for uneven shards, ``vocab_start`` and ``vocab_size`` of
            the placements.
        group: the given process group, or the one of the mesh dimension that shards the weight.
        mesh: of the DTensors; None for plain tensors.
        parts: P if the sequence is sharded along the second dimension, else 1.
    """

    def __init__(self, options: Options, group: dist.ProcessGroup | None, reduction: str | None) -> None:
        self.options, self.group, self._given_group, self.parts = options, group, group, 1
        self.mesh: Any = None
        self._reduction, self._gives_dtensors = reduction, False
        # The mesh dimension of tensor parallelism.
        self._tp: int | None = None
        self._result: list | None = None

    def enter(self, tensors: Tensors) -> Tensors:
        """The tensors of the call. Raises ``ValueError`` as :func:`adapted`."""
        input, weight, target, bias, *_ = tensors
        self._input, self._weight, self._gives_dtensors = input, weight, is_dtensor(input)
        sequence_parallel, sequence_dim = self.options.sequence_parallel, self.options.sequence_dim
        check_option("sequence_parallel", sequence_parallel)
        if is_dtensor(weight):
            self.mesh = weight.device_mesh
            self._find_group(weight)
            for name, value in tensors.named().items():
                self._check_mesh(name, value)
            split = self._find_tokens(input)
            if self._gives_dtensors:
                self._check_split(split, sequence_parallel, sequence_dim)
                sequence_parallel, sequence_dim = split is not None and not self._gathers, split or 0
        elif self._gives_dtensors:
            raise ValueError(f"{_placed('input', input)}, and linear_weight is a plain tensor: pass input.to_local()")
        self.options = self.options._replace(sequence_parallel=sequence_parallel, sequence_dim=0)
        hidden = self.hidden("input", input)
        if sequence_dim and sequence_parallel and self.group is not None and isinstance(hidden, Tensor):
            if hidden.dim() < 3:
                raise ValueError(f"input must be [b, S/P, ..., D] for sequence_dim=1, got {list(hidden.shape)}")
            self.parts, self._part = dist.get_world_size(self.group), hidden.shape[:-1]
        if tensors.picked_offsets is not None and (self.mesh is not None or self.parts > 1):
            raise ValueError(
                f"{SPOKEN['picked']} must be ids [..., K], without offsets, for DTensors and sequence_dim=1"
            )
        for ids in (target, tensors.picked):
            if is_dtensor(ids) and self._result is None:
                self._result = list(ids.placements)
        others = {
            name: self.per_token(SPOKEN.get(name, name), getattr(tensors, name), name == "picked")
            for name in ("target", "token_weight", "logit_scale", "temperature", "picked")
        }
        weight, bias = self.weight("linear_weight", weight), self.weight("linear_bias", bias, weight)
        return tensors._replace(input=hidden, linear_weight=weight, linear_bias=bias, **others)

    # --- the placements ---

    def _find_group(self, weight: Any) -> None:
        """Find the mesh dimension that shards the weight, its group, and this rank's first id."""
        sharded = [dim for dim, placement in enumerate(weight.placements) if not placement.is_replicate()]
        if len(sharded) > 1 or any([not _shards(weight.placements[dim], (0,)) for dim in sharded]):
            raise ValueError(
                f"{_placed('linear_weight', weight)}: it must be Shard(0), the vocabulary, on one mesh dimension and "
                f"Replicate on all others. {_SHARDED_PARAMETER}"
            )
        self._shards = list(weight.placements)
        given, entries, size = self.group, weight.shape[0], self.options.vocab_size
        if is_count(size) and size > entries:
            raise ValueError(f"vocab_size={size} exceeds the {entries} rows of linear_weight")
        if not sharded:
            if given is not None and dist.get_world_size(given) > 1:
                ranks = dist.get_process_group_ranks(given)
                raise ValueError(f"process_group has the ranks {ranks}, and {_placed('linear_weight', weight)}")
            return
        (tp,) = sharded
        self._tp, group = tp, self.mesh.get_group(tp)
        if given is None:
            self.group = group
        elif (ranks := dist.get_process_group_ranks(given)) != (own := dist.get_process_group_ranks(group)):
            raise ValueError(
                f"process_group has the ranks {ranks}, and {_placed('linear_weight', weight)} is sharded over the "
                f"ranks {own}. {_SHARDED_PARAMETER}"
            )
        ranks, given = self.mesh.size(tp), self.options.vocab_start
        start = min(self.mesh.get_local_rank(tp) * -(-entries // ranks), entries)
        if given not in (None, start):
            raise ValueError(f"vocab_start={given!r}, and {_placed('linear_weight', weight)} starts at {start}")
        if entries % ranks or size is not None:
            self.options = self.options._replace(vocab_start=start, vocab_size=entries if size is None else size)

    def _find_tokens(self, input: Any) -> int | None:
        """Find the placements of tokens and gradients. Returns the dimension of the input that tensor parallelism
        splits; None: every rank has all tokens."""
        from torch.distributed.tensor import Partial, Replicate, Shard

        mesh, tp = self.mesh, self._tp
        if not self._gives_dtensors:
            self._check_plain_input()
        placements = list(input.placements) if self._gives_dtensors else [Replicate()] * mesh.ndim
        token_dims = tuple(range(input.dim() - 1)) if isinstance(input, Tensor) else ()
        for dim, placement in enumerate(placements):
            wanted = token_dims[:2] if dim == tp else token_dims
            if not placement.is_replicate() and not _shards(placement, wanted):
                first = "the first or second dimension" if dim == tp else "a dimension of the tokens"
                raise ValueError(
                    f"{_placed('input', input)}: on mesh dimension {dim} it must be Replicate, or Shard of {first}"
                )
        split = None
        self._input_placements, self._tokens = placements, list(placements)
        if tp is not None:
            self._tokens[tp] = Replicate()
            split = None if placements[tp].is_replicate() else placements[tp].dim
        # Hidden states in unequal parts, or interleaved with those of another mesh dimension, are gathered by DTensor.
        self._gathers = split is not None and not self._equal_parts(input, split)
        self._splits = [dim for dim, placement in enumerate(self._tokens) if not placement.is_replicate()]
        self._weight_gradient = [Partial() if dim in self._splits else Replicate() for dim in range(mesh.ndim)]
        self._input_gradient = list(self._tokens if self._gathers else placements)
        if tp is not None:
            self._weight_gradient[tp] = Shard(0)
            if self._is_partial():
                self._input_gradient[tp] = Partial()
        return split

    def _check_plain_input(self) -> None:
        """Raise ``ValueError`` unless a plain input beside a DTensor weight can only be meant for tensor
        parallelism. FSDP2 shards weights in the same way, over ranks with different tokens."""
        mesh, tp, weight = self.mesh, self._tp, self._weight
        if tp is None or any([dim != tp and mesh.size(dim) > 1 for dim in range(mesh.ndim)]):
            raise ValueError(
                f"{_placed('linear_weight', weight)}, and input is a plain tensor: pass linear_weight.to_local(), or "
                "input as a DTensor"
            )
        words = {*re.findall("[a-z]+", mesh.mesh_dim_names[tp].lower())} if mesh.mesh_dim_names else set()
        if self._given_group is None and not (words & {"tp", "tensor"} and words <= _TENSOR_PARALLEL):
            raise ValueError(
                f"{_placed('linear_weight', weight)}, and input is a plain tensor. If these ranks have the same tokens "
                f"(tensor parallelism), pass process_group=linear_weight.device_mesh.get_group({tp}). "
                f"{_SHARDED_PARAMETER}"
            )

    def _check_split(self, split: int | None, sequence_parallel: bool, sequence_dim: int) -> None:
        """Raise ``ValueError`` for options that contradict the placements of a DTensor input."""
        x = self._input
        if split is None and sequence_parallel:
            raise ValueError(
                f"sequence_parallel=True, and {_placed('input', x)}, whose tokens tensor parallelism does not split"
            )
        if split == 0 and sequence_dim == 1:
            raise ValueError(f"sequence_dim=1, and {_placed('input', x)}, which is split along dimension 0")
        if split is not None and self._is_partial():
            raise ValueError(f"reduce_hidden_grad=False, and {_placed('input', x)}: there it must be Replicate")
        if self._splits and self._reduction == "mean":
            raise ValueError(
                f"reduction='mean', and {_placed('input', x)}. Mesh dimension {self._splits[0]} splits its tokens and "
                "does not shard linear_weight: use reduction='sum', and divide by the number of tokens of all ranks"
            )

    def _is_partial(self) -> bool:
        """Whether dX stays this rank's part of the sum."""
        reduced = self.options.reduce_hidden_grad
        return reduced is not None and not reduced

    def _check_mesh(self, name: str, value: Any) -> None:
        if is_dtensor(value) and value.device_mesh != self.mesh:
            raise ValueError(f"{_placed(name, value)}, and linear_weight is on the mesh {self.mesh}: use one mesh")

    def _equal_parts(self, input: Any, split: int) -> bool:
        """Whether all ranks of TP have equal parts of the sequence, each of consecutive tokens."""
        parts = 1
        for dim, placement in enumerate(self._input_placements):
            if _shards(placement, (split,)):
                if self._tp is not None and dim > self._tp:
                    return False
                parts *= self.mesh.size(dim)
        return input.shape[split] % parts == 0

    # --- from the user's tensors to the call's ---

    def hidden(self, name: str, value: Any) -> Any:
        """Hidden states ``[..., D]`` as this rank's plain tensor."""
        if not _alike(name, value, "input", self._input):
            return value
        self._check_mesh(name, value)
        if list(value.placements) != self._input_placements:
            raise ValueError(f"{_placed(name, value)}, and {_placed('input', self._input)}: use the same placements")
        if value.shape[:-1] != self._input.shape[:-1]:  # local sizes may differ on some ranks alone
            given, expected = list(value.shape), list(self._input.shape)
            raise ValueError(f"{name} {given} must have the tokens of input {expected}")
        if self._gathers:
            value = self._redistributed(name, value, self._tokens)
        return value.to_local(grad_placements=self._input_gradient)

    def weight(self, name: str, value: Any, of: Any = None) -> Any:
        """A weight ``[V, D]``, or the bias ``[V]`` ``of`` a weight, as this rank's plain shard."""
        if value is None or not _alike(name, value, "linear_weight", self._weight):
            return value
        self._check_mesh(name, value)
        # Checked here, since local sizes may differ on some ranks alone. With vocab_size rows of padding may differ.
        like, ranks = self._weight if of is None else of, 1 if self._tp is None else self.mesh.size(self._tp)
        entries, rows, size = value.shape[0], like.shape[0], self.options.vocab_size
        padded = of is None and size is not None and size <= entries and -(-entries // ranks) == -(-rows // ranks)
        if entries != rows and not padded:
            raise ValueError(f"{name} {list(value.shape)} has {entries} entries, and linear_weight has {rows} rows")
        value = self._redistributed(name, value, self._shards)
        return value.to_local(grad_placements=self._weight_gradient)

    def per_token(self, name: str, value: Any, trailing: bool = False) -> Any:
        """Values ``[...]`` of the tokens, or ``[..., K]`` with ``trailing``, in the order of the call's tokens. A plain
        tensor holds the tokens of this rank's input, of the whole sequence."""
        if not isinstance(value, Tensor):
            return value
        shape = list(value.shape[:-1] if trailing else value.shape)
        more = " and one dimension more" if trailing else ""
        if is_dtensor(value):
            if self.mesh is None:
                raise ValueError(f"{_placed(name, value)}, and linear_weight is a plain tensor: pass {name}.to_local()")
            self._check_mesh(name, value)
            if self._gives_dtensors and shape != list(self._input.shape[:-1]):
                expected, given = [*self._input.shape[:-1]], list(self._input.shape)
                raise ValueError(f"{name} must have shape {expected}{more} for input {given}, got {list(value.shape)}")
            value = self._redistributed(name, value, self._tokens)
            value = value.to_local(grad_placements=self._tokens)
        if self.parts == 1:
            return value
        shape = list(value.shape[:-1] if trailing else value.shape)
        batch, part, *rest = self._part
        expected = [batch, self.parts * part, *rest]
        if shape != expected:
            raise ValueError(
                f"{name} must have shape {expected}{more} for input {[*self._part, self._input.shape[-1]]} of each of "
                f"{self.parts} sequence-parallel ranks, got {list(value.shape)}"
            )
        parts = value.unflatten(1, (self.parts, part)).transpose(0, 1)
        return parts.reshape(self.parts * batch, *parts.shape[2:])

    def _redistributed(self, name: str, value: Any, placements: list) -> Any:
        """A DTensor with these placements. In debug mode it begins with an exchange, since DTensor's collectives come
        before the call's exchange."""
        if list(value.placements) == placements:
            return value
        layout = Layout.of(self.group, False)
        if debug.enabled() and layout.ranks > 1:
            given = {"shape": [*value.shape], "dtype": value.dtype, "placements": value.placements, "to": placements}
            function = f"{self.options.function}, which redistributes {name}"
            debug.agree(layout, function, {f"{what} of {name}": of_name for what, of_name in given.items()})
            debug.state.awaited = True
        return value.redistribute(placements=placements)

    # --- results ---

    def loss(self, value: Tensor) -> Any:
        """A call's loss, as the user expects it."""
        if self._reduction == "none":
            return self.of_tokens(value)
        if not self._gives_dtensors:
            return value
        from torch.distributed.tensor import Partial, Replicate

        return self._placed(value, [Partial() if dim in self._splits else Replicate() for dim in range(self.mesh.ndim)])

    def statistics(self, statistics: TokenStatistics) -> TokenStatistics:
        """A call's statistics, as the user expects them."""
        values: dict[str, Any] = {name: getattr(statistics, name) for name in NAMES}
        of_tokens = {n: self.of_tokens(v) for n, v in values.items() if v is not None and n != "vocab_size"}
        return TokenStatistics(**(values | of_tokens))

    def of_tokens(self, value: Any) -> Any:
        """A call's values ``[...]`` or ``[..., K]`` of the tokens, in the user's order and placements."""
        if self.parts > 1:
            whole = value.unflatten(0, (self.parts, value.shape[0] // self.parts)).transpose(0, 1)
            value = whole.reshape(whole.shape[0], self.parts * whole.shape[2], *whole.shape[3:])
        if not self._gives_dtensors:
            return value
        tokens = self._input.shape[:-1]
        value = self._placed(value, self._tokens, (*tokens, *value.shape[len(tokens) :]))
        if self._result is not None and self._result != self._tokens:
            value = value.redistribute(placements=self._result)
        return value

    def _placed(self, value: Tensor, placements: list, shape: tuple[int, ...] = ()) -> Any:
        from torch.distributed.tensor import DTensor

        stride = torch.empty(shape, device="meta").stride()
        return DTensor.from_local(
            value.contiguous(), self.mesh, placements, run_check=False, shape=torch.Size(shape), stride=stride
        )


def _alike(name: str, value: Any, other_name: str, other: Any) -> bool:
    """Whether ``value`` is a DTensor. Raises ``ValueError`` unless both tensors are, or none."""
    if isinstance(value, Tensor) and is_dtensor(value) != is_dtensor(other):
        raise ValueError(
            f"{_placed(name, value)}, and {_placed(other_name, other)}: pass DTensors for both, or neither"
        )
    return is_dtensor(value)


def _shards(placement: Any, dims: tuple[int, ...]) -> bool:
    """Whether the placement is a plain ``Shard`` of one of the ``dims``; not a strided one."""
    # By name: where torch 2.11 compiles a call, comparisons of a placement's type are wrong.
    return type(placement).__name__ == "Shard" and placement.dim in dims


def _placed(name: str, value: Any) -> str:
    """The beginning of a refusal: a tensor's name, placements and mesh. torch 2.11 cannot trace it."""
    if not is_dtensor(value):
        return f"{name} is a plain tensor"
    mesh = value.device_mesh
    names = f" of dimensions {mesh.mesh_dim_names}" if mesh.mesh_dim_names else ""
    return f"{name} is a DTensor with the placements {tuple(value.placements)} on a mesh {tuple(mesh.shape)}{names}"
