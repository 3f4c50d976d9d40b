"""DTensors, and sequences that are sharded along the second dimension, as the plain tensors of a call.

A call takes plain tensors, and a sequence in equal parts along the first dimension. It does not depend on the order of
the tokens, so hidden states ``[b, S/P, D]`` are not transposed: only values per token are, ``[b, S]`` to
``[P * b, S/P]``, the order in which an all-gather returns the tokens. docs/pytorch.md has the placements of DTensors.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from typing import Any, cast

import torch
import torch.distributed as dist
from torch import Tensor

from parallel_lce.call import debug
from parallel_lce.call.checks import as_group, check_dtype, has_dtensor, is_dtensor
from parallel_lce.core.collectives import Layout
from parallel_lce.core.options import Options, Tensors, as_int64, check_option
from parallel_lce.run.results import TokenStatistics

_SHARDED_PARAMETER = (
    "If fully_shard (FSDP2) sharded it, call the loss inside the forward of the module that fully_shard wraps, where "
    "its parameters are whole, or call that module's unshard() before"
)


def adapted(
    options: Options, tensors: Tensors, group: Any, reduction: str | None = None
) -> tuple[Options, Tensors, dist.ProcessGroup | None, DTensorAdapter]:
    """The call's options, plain tensors and group; ids are int64. The adapter changes further tensors likewise, and
    restores order and placements of the results. ``reduction``: of the result, if it differs from that of the options.
    Raises ``ValueError`` for a group, placements or shapes that are not supported."""
    group = as_group(group)
    for name in ("target", "selected", "selected_offsets"):
        ids = getattr(tensors, name)
        if isinstance(ids, Tensor) and ids.dtype is not torch.int64:
            tensors = tensors._replace(**{name: as_int64(ids)})
    for name in ("logit_scale", "temperature"):
        if isinstance(value := getattr(options, name), Tensor):  # one number per token
            options, tensors = options._replace(**{name: 1.0}), tensors._replace(**{name: value})
    if type(options.sequence_dim) is int and options.sequence_dim == 0 and not has_dtensor(tensors):
        return options, tensors, group, _CHANGES_NOTHING
    check_option("sequence_dim", options.sequence_dim)
    adapter = DTensorAdapter(options, tensors, group, reduction or options.reduction)
    tensors = adapter.enter(tensors)
    return adapter.options, tensors, adapter.group, adapter


class DTensorAdapter:
    """How a call's tokens and results are placed, from the placements of its tensors; plain ones change nothing."""

    def __init__(self, options: Options, tensors: Tensors, group: Any, reduction: str | None) -> None:
        # After `enter` the options and the group of the call, from the placements.
        self.options, self.group, self._reduction = options, group, reduction
        self._input, self._weight = tensors.input, tensors.linear_weight
        # The DTensors' mesh, its tensor-parallel dimension, and the ranks of that. None: input and weight are plain.
        self.mesh: Any = None
        self._tp, self._ranks = cast(Any, None), 1
        # P if the sequence is sharded along the second dimension, else 1.
        self.parts = 1

    def enter(self, tensors: Tensors) -> Tensors:
        """The tensors of the call. Raises ``ValueError`` as :func:`adapted`."""
        sequence_parallel, sequence_dim = self.options.sequence_parallel, self.options.sequence_dim
        if is_dtensor(self._weight):
            if not is_dtensor(self._input):  # FSDP2 shards weights as tensor parallelism, over ranks with other tokens
                raise ValueError(
                    f"{_placed('linear_weight', self._weight)}, and input is not: pass input as a DTensor, or "
                    f"linear_weight.to_local() and the process_group that shards it. {_SHARDED_PARAMETER}"
                )
            self.mesh = self._weight.device_mesh
            self._place_weight()
            split = self._split()
            if sequence_parallel and split is None and self._ranks > 1:
                raise ValueError(f"sequence_parallel=True, and {_placed('input', self._input)}: shard it or omit it")
            sequence_parallel, sequence_dim = split is not None, split or 0
            self._place_tokens()
        self.options = self.options._replace(sequence_parallel=sequence_parallel, sequence_dim=0)
        hidden = self.hidden("input", self._input)
        if sequence_dim and sequence_parallel and self.group is not None and isinstance(hidden, Tensor):
            if hidden.dim() < 3:
                raise ValueError(f"input must be [b, S/P, ..., D] for sequence_dim=1, got {list(hidden.shape)}")
            self.parts, self._part = dist.get_world_size(self.group), hidden.shape[:-1]
        if tensors.selected_offsets is not None and (self.mesh is not None or self.parts > 1):
            raise ValueError("selected must be ids [..., K], without offsets, for DTensors and sequence_dim=1")
        others = dict(selected=self.per_token("selected", tensors.selected, trailing=True))
        for name in ("target", "token_weight", "logit_scale", "temperature"):
            others[name] = self.per_token(name, getattr(tensors, name))
        weight, bias = self.weight("linear_weight", self._weight), self.weight("linear_bias", tensors.linear_bias)
        return tensors._replace(input=hidden, linear_weight=weight, linear_bias=bias, **others)

    def _place_weight(self) -> None:
        """Find the mesh dimension that shards the weight, its group, and this rank's first id."""
        weight, mesh = self._weight, self.mesh
        sharded = [dim for dim, placement in enumerate(weight.placements) if not placement.is_replicate()]
        if len(sharded) > 1 or any([not _shards(weight.placements[dim], (0,)) for dim in sharded]):
            raise ValueError(
                f"{_placed('linear_weight', weight)}: it must be Shard(0), the vocabulary, on one mesh dimension and "
                f"Replicate on all others. {_SHARDED_PARAMETER}"
            )
        group = mesh.get_group(sharded[0]) if sharded else None
        for name, given, own in (("process_group", self.group, group), ("vocab_start", self.options.vocab_start, None)):
            if given not in (None, own):
                raise ValueError(f"{name}={given!r}, and {_placed('linear_weight', weight)}: leave it out")
        entries, size = weight.shape[0], self.options.vocab_size
        if type(size) is int and size > entries:
            raise ValueError(f"vocab_size={size} exceeds the {entries} rows of linear_weight")
        if sharded:
            self._tp = tp = sharded[0]
            self.group, self._ranks = group, mesh.size(tp)
            if entries % self._ranks:
                first = min(mesh.get_local_rank(tp) * -(-entries // self._ranks), entries)
                self.options = self.options._replace(vocab_start=first, vocab_size=entries if size is None else size)

    def _place_tokens(self) -> None:
        """Find the placements of tokens, gradients and sums over the tokens."""
        from torch.distributed.tensor import Partial, Replicate, Shard

        mesh, tp, x = self.mesh, self._tp, self._input
        self._tokens, self._input_gradient = list(x.placements), list(x.placements)
        if tp is not None:
            self._tokens[tp] = Replicate()
            if self.options.reduce_hidden_grad is False:
                self._input_gradient[tp] = Partial()
        splits = [dim for dim, placement in enumerate(self._tokens) if not placement.is_replicate()]
        self._sums = [Partial() if dim in splits else Replicate() for dim in range(mesh.ndim)]
        self._weight_gradient = [Shard(0) if dim == tp else placement for dim, placement in enumerate(self._sums)]
        if splits and self._reduction == "mean":
            raise ValueError(
                f"reduction='mean', and {_placed('input', x)}. Mesh dimension {splits[0]} splits its tokens and "
                "does not shard linear_weight: use reduction='sum', and divide by the number of tokens of all ranks"
            )

    def _split(self) -> int | None:
        """The dimension of a DTensor input that tensor parallelism splits; None: every rank has all tokens. Raises
        ``ValueError`` for placements that are not supported."""
        x = self._input
        self._check_mesh("input", x)
        for dim, placement in enumerate(x.placements):
            if not placement.is_replicate() and not _shards(placement, range(min(2, x.dim() - 1))):
                raise ValueError(
                    f"{_placed('input', x)}: on mesh dimension {dim} it must be Replicate, or Shard of the first or "
                    "second dimension of the tokens"
                )
        split = None
        if self._ranks > 1 and not x.placements[self._tp].is_replicate():
            split = 0 if _shards(x.placements[self._tp], (0,)) else 1
        dims = [dim for dim, placement in enumerate(x.placements) if split is not None and _shards(placement, (split,))]
        if dims and (dims[-1] != self._tp or x.shape[split] % math.prod([self.mesh.size(dim) for dim in dims])):
            raise ValueError(
                f"{_placed('input', x)}: mesh dimension {self._tp} must be the last that splits its {x.shape[split]} "
                "tokens, into equal parts; else redistribute it to Replicate there"
            )
        return split

    def _check_mesh(self, name: str, value: Any) -> None:
        if value.device_mesh != self.mesh:
            raise ValueError(f"{_placed(name, value)}, and linear_weight is on the mesh {self.mesh}: use one mesh")

    # --- from the user's tensors to the call's: global sizes are checked, since local ones may differ on one rank alone

    def hidden(self, name: str, value: Any) -> Any:
        """Hidden states ``[..., D]`` as this rank's plain tensor."""
        if self.mesh is None or not is_dtensor(value):
            return value
        self._check_shape(name, value, list(self._input.shape), trailing=True)
        return self._local(name, value, list(self._input.placements), self._input_gradient)

    def weight(self, name: str, value: Any) -> Any:
        """A weight ``[V, D]`` or a bias ``[V]`` as this rank's plain shard."""
        if self.mesh is None or value is None:
            return value
        if not is_dtensor(value):
            raise ValueError(f"{_placed('linear_weight', self._weight)}, and {name} is not: pass DTensors for both")
        rows = self._weight.shape
        if value.shape[:1] != rows[:1]:
            raise ValueError(f"{name} {[*value.shape]} must have one entry per row of linear_weight {[*rows]}")
        return self._local(name, value, list(self._weight.placements), self._weight_gradient)

    def per_token(self, name: str, value: Any, trailing: bool = False) -> Any:
        """Values ``[...]`` of the tokens, or ``[..., K]`` with ``trailing``, in the order of the call's tokens. A plain
        tensor holds the tokens of this rank's input, of the whole sequence."""
        if not isinstance(value, Tensor):
            return value
        if self.mesh is not None and is_dtensor(value):
            self._check_shape(name, value, list(self._input.shape), trailing)
            value = self._local(name, value, self._tokens, self._tokens)
        if self.parts == 1:
            return value
        batch, part, *rest = self._part
        self._check_shape(name, value, [batch, self.parts * part, *rest, self._input.shape[-1]], trailing)
        parts = value.unflatten(1, (self.parts, part)).transpose(0, 1)
        return parts.reshape(self.parts * batch, *parts.shape[2:])

    def _check_shape(self, name: str, value: Tensor, whole: list[int], trailing: bool) -> None:
        """``whole``: shape of the hidden states of all sequence-parallel ranks."""
        if list(value.shape[:-1] if trailing else value.shape) != whole[:-1]:
            expected = f"{whole[:-1]}{' and one dimension more' if trailing else ''} for the whole input {whole}"
            raise ValueError(f"{name} must have shape {expected}, got {list(value.shape)}")

    def _local(self, name: str, value: Any, placements: list, gradient: list) -> Tensor:
        """The local tensor of a DTensor with these placements."""
        self._check_mesh(name, value)
        if list(value.placements) != placements:
            check_dtype(name, value)
            layout = Layout.of(self.group, False)
            if debug.enabled() and layout.ranks > 1:  # before DTensor's collectives
                given = {name: (value.shape, value.dtype, value.placements)}
                debug.agree(layout, f"{self.options.function}, which redistributes {name}", given)
                debug.state.awaited = True
            value = value.redistribute(placements=placements)
        return value.to_local(grad_placements=gradient)

    def loss(self, value: Tensor) -> Any:
        """A call's loss, as the user expects it."""
        if self._reduction == "none":
            return self.of_tokens(value)
        return self._as_dtensor(value, self._sums) if self.mesh is not None else value

    def statistics(self, statistics: TokenStatistics) -> TokenStatistics:
        """A call's statistics, as the user expects them."""
        return statistics.changed(self.of_tokens) if self.mesh is not None or self.parts > 1 else statistics

    def of_tokens(self, value: Any) -> Any:
        """A call's values ``[...]`` or ``[..., K]`` of the tokens, in the user's order and placements."""
        if self.parts > 1:
            whole = value.unflatten(0, (self.parts, value.shape[0] // self.parts)).transpose(0, 1)
            value = whole.reshape(whole.shape[0], self.parts * whole.shape[2], *whole.shape[3:])
        if self.mesh is None:
            return value
        tokens = self._input.shape[:-1]
        return self._as_dtensor(value, self._tokens, (*tokens, *value.shape[len(tokens) :]))

    def _as_dtensor(self, value: Tensor, placements: list, shape: tuple[int, ...] = ()) -> Any:
        from torch.distributed.tensor import DTensor

        whole = torch.empty(shape, device="meta")
        of_whole: Any = dict(shape=whole.shape, stride=whole.stride())
        return DTensor.from_local(value.contiguous(), self.mesh, placements, run_check=False, **of_whole)


_CHANGES_NOTHING = DTensorAdapter(Options(""), Tensors(None, None), None, None)  # of calls on plain tensors


def _shards(placement: Any, dims: Iterable[int]) -> bool:
    """Whether the placement is a plain ``Shard`` of one of the ``dims``; not a strided one."""
    # By name: where torch 2.11 compiles a call, comparisons of a placement's type are wrong.
    # With dynamic=True torch.compile makes a symbol of the number, which it compares, and does not look up.
    return type(placement).__name__ == "Shard" and any([placement.dim == dim for dim in dims])


def _placed(name: str, value: Any) -> str:
    """The beginning of a refusal: a DTensor's name, placements and mesh. torch 2.11 cannot trace it."""
    mesh = value.device_mesh
    names = f" of dimensions {mesh.mesh_dim_names}" if mesh.mesh_dim_names else ""
    return f"{name} is a DTensor with the placements {tuple(value.placements)} on a mesh {tuple(mesh.shape)}{names}"
