"""DTensors, and sequences that are sharded along the second dimension, as the plain tensors of a call.

A call takes plain tensors, and a sequence in equal parts along the first dimension. It does not depend on the order of
the tokens, so hidden states ``[b, S/P, D]`` are not transposed: only values per token are, ``[b, S]`` to
``[P * b, S/P]``, the order in which an all-gather returns the tokens. docs/pytorch.md has the placements of DTensors.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from parallel_lce.call import debug
from parallel_lce.call.checks import as_group, has_dtensor, is_dtensor
from parallel_lce.core.collectives import Layout
from parallel_lce.core.options import Options, Tensors, as_int64, check_option, is_count
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
    group = group and as_group(group)
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

    def __init__(
        self, options: Options, tensors: Tensors, group: dist.ProcessGroup | None, reduction: str | None
    ) -> None:
        # After `enter` the options and the group of the call, from the placements.
        self.options, self.group, self._reduction = options, group, reduction
        self._input, self._weight = tensors.input, tensors.linear_weight
        self._gives_dtensors = is_dtensor(tensors.input)
        # The DTensors' mesh, and its dimension of tensor parallelism.
        self.mesh: Any = None
        self._tp: int | None = None
        self._input_gradient: list = []
        # P if the sequence is sharded along the second dimension, else 1.
        self.parts = 1

    def enter(self, tensors: Tensors) -> Tensors:
        """The tensors of the call. Raises ``ValueError`` as :func:`adapted`."""
        sequence_parallel, sequence_dim = self.options.sequence_parallel, self.options.sequence_dim
        check_option("sequence_parallel", sequence_parallel)
        if is_dtensor(self._weight):
            self.mesh, group_given = self._weight.device_mesh, self.group is not None
            self._place_weight()
            if self._gives_dtensors:
                split = self._split()
                sequence_parallel, sequence_dim = split is not None, split or 0
            self._place_tokens(group_given)
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
        weight = self.weight("linear_weight", self._weight)
        bias = self.weight("linear_bias", tensors.linear_bias, self._weight)
        return tensors._replace(input=hidden, linear_weight=weight, linear_bias=bias, **others)

    # --- the placements ---

    def _place_weight(self) -> None:
        """Find the mesh dimension that shards the weight, its group, and this rank's first id."""
        weight, mesh = self._weight, self.mesh
        sharded = [dim for dim, placement in enumerate(weight.placements) if not placement.is_replicate()]
        if len(sharded) > 1 or any([not _shards(weight.placements[dim], (0,)) for dim in sharded]):
            raise ValueError(
                f"{_placed('linear_weight', weight)}: it must be Shard(0), the vocabulary, on one mesh dimension and "
                f"Replicate on all others. {_SHARDED_PARAMETER}"
            )
        self._shards = list(weight.placements)
        entries, size, start = weight.shape[0], self.options.vocab_size, self.options.vocab_start
        if is_count(size) and size > entries:
            raise ValueError(f"vocab_size={size} exceeds the {entries} rows of linear_weight")
        self._tp = tp = sharded[0] if sharded else None
        group = None if tp is None else mesh.get_group(tp)
        own = [dist.get_rank()] if group is None else dist.get_process_group_ranks(group)
        if self.group is None:
            self.group = group
        elif (ranks := dist.get_process_group_ranks(self.group)) != own:
            raise ValueError(
                f"process_group has the ranks {ranks}, and {_placed('linear_weight', weight)}, with all its rows on "
                f"the ranks {own}. {_SHARDED_PARAMETER}"
            )
        if tp is not None:
            ranks = mesh.size(tp)
            first = min(mesh.get_local_rank(tp) * -(-entries // ranks), entries)
            if start not in (None, first):
                raise ValueError(f"vocab_start={start!r}, and {_placed('linear_weight', weight)} starts at {first}")
            if entries % ranks or size is not None:
                self.options = self.options._replace(vocab_start=first, vocab_size=entries if size is None else size)

    def _place_tokens(self, group_given: bool) -> None:
        """Find the placements of tokens, gradients and sums over the tokens."""
        from torch.distributed.tensor import Partial, Replicate, Shard

        mesh, tp, x = self.mesh, self._tp, self._input
        others = [dim for dim in range(mesh.ndim) if dim != tp]
        if not self._gives_dtensors and (tp is None or not group_given or any([mesh.size(dim) > 1 for dim in others])):
            # FSDP2 shards weights in the same way, over ranks with different tokens.
            raise ValueError(
                f"{_placed('linear_weight', self._weight)}, and input is a plain tensor: pass input as a DTensor, or "
                "linear_weight.to_local(); or process_group, the mesh's only one, if its ranks have the same tokens "
                f"(tensor parallelism). {_SHARDED_PARAMETER}"
            )
        self._tokens = list(x.placements) if self._gives_dtensors else [Replicate()] * mesh.ndim
        self._input_gradient = list(self._tokens)
        if tp is not None:
            self._tokens[tp] = Replicate()
            if self.options.reduce_hidden_grad is False:
                self._input_gradient[tp] = Partial()
        splits = [dim for dim in others if not self._tokens[dim].is_replicate()]
        self._sums = [Partial() if dim in splits else Replicate() for dim in range(mesh.ndim)]
        self._weight_gradient = [Shard(0) if dim == tp else placement for dim, placement in enumerate(self._sums)]
        if splits and self._reduction == "mean":
            raise ValueError(
                f"reduction='mean', and {_placed('input', x)}. Mesh dimension {splits[0]} splits its tokens and "
                "does not shard linear_weight: use reduction='sum', and divide by the number of tokens of all ranks"
            )

    def _split(self) -> int | None:
        """The dimension of a DTensor input that tensor parallelism splits; None: every rank has all tokens. Raises
        ``ValueError`` for placements that are not supported, or contradict the options."""
        x, sequence_parallel, sequence_dim = self._input, self.options.sequence_parallel, self.options.sequence_dim
        self._check_mesh("input", x)
        for dim, placement in enumerate(x.placements):
            if not placement.is_replicate() and not _shards(placement, range(min(2, x.dim() - 1))):
                raise ValueError(
                    f"{_placed('input', x)}: on mesh dimension {dim} it must be Replicate, or Shard of the first or "
                    "second dimension of the tokens"
                )
        split = None if self._tp is None or x.placements[self._tp].is_replicate() else x.placements[self._tp].dim
        if (split is None and sequence_parallel) or (split == 0 and sequence_dim == 1):
            raise ValueError(f"{sequence_parallel=} and {sequence_dim=} contradict this: {_placed('input', x)}")
        dims = [dim for dim, placement in enumerate(x.placements) if _shards(placement, (split,))]
        if dims and (dims[-1] != self._tp or x.shape[split] % math.prod([self.mesh.size(dim) for dim in dims])):
            raise ValueError(
                f"{_placed('input', x)}: mesh dimension {self._tp} must be the last that splits its {x.shape[split]} "
                "tokens, into equal parts; else redistribute it to Replicate there"
            )
        return split

    def _check_mesh(self, name: str, value: Any) -> None:
        if self.mesh is None:
            raise ValueError(f"{_placed(name, value)}, and linear_weight is a plain tensor: pass {name}.to_local()")
        if value.device_mesh != self.mesh:
            raise ValueError(f"{_placed(name, value)}, and linear_weight is on the mesh {self.mesh}: use one mesh")

    # --- from the user's tensors to the call's: global sizes are checked, since local ones may differ on one rank alone

    def hidden(self, name: str, value: Any) -> Any:
        """Hidden states ``[..., D]`` as this rank's plain tensor."""
        if not _alike(name, value, "input", self._input):
            return value
        if value.shape[:-1] != self._input.shape[:-1]:
            given, expected = list(value.shape), list(self._input.shape)
            raise ValueError(f"{name} {given} must have the tokens of input {expected}")
        return self._local(name, value, list(self._input.placements), self._input_gradient)

    def weight(self, name: str, value: Any, of: Any = None) -> Any:
        """A weight ``[V, D]``, or the bias ``[V]`` ``of`` a weight, as this rank's plain shard."""
        if value is None or not _alike(name, value, "linear_weight", self._weight):
            return value
        entries, rows, size = value.shape[0], (self._weight if of is None else of).shape[0], self.options.vocab_size
        ranks = 1 if self._tp is None else self.mesh.size(self._tp)
        # With vocab_size the rows of padding may differ.
        padded = of is None and size is not None and size <= entries and -(-entries // ranks) == -(-rows // ranks)
        if entries != rows and not padded:
            raise ValueError(f"{name} {list(value.shape)} has {entries} entries, and linear_weight has {rows} rows")
        return self._local(name, value, self._shards, self._weight_gradient)

    def per_token(self, name: str, value: Any, trailing: bool = False) -> Any:
        """Values ``[...]`` of the tokens, or ``[..., K]`` with ``trailing``, in the order of the call's tokens. A plain
        tensor holds the tokens of this rank's input, of the whole sequence."""
        if not isinstance(value, Tensor):
            return value
        if is_dtensor(value):
            self._check_mesh(name, value)
            if self._gives_dtensors:
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
            more = " and one dimension more" if trailing else ""
            raise ValueError(f"{name} must have shape {whole[:-1]}{more} for input {whole}, got {list(value.shape)}")

    def _local(self, name: str, value: Any, placements: list, gradient: list) -> Tensor:
        """The local tensor of a DTensor with these placements. DTensor's redistribution comes before the call's
        exchange, so in debug mode it has an exchange of its own."""
        self._check_mesh(name, value)
        if list(value.placements) != placements:
            layout = Layout.of(self.group, False)
            if debug.enabled() and layout.ranks > 1:
                given = dict(shape=[*value.shape], dtype=value.dtype, placements=value.placements, to=placements)
                function = f"{self.options.function}, which redistributes {name}"
                debug.agree(layout, function, {f"{what} of {name}": of_name for what, of_name in given.items()})
                debug.state.awaited = True
            value = value.redistribute(placements=placements)
        return value.to_local(grad_placements=gradient)

    # --- results ---

    def loss(self, value: Tensor) -> Any:
        """A call's loss, as the user expects it."""
        if self._reduction == "none":
            return self.of_tokens(value)
        return self._as_dtensor(value, self._sums) if self._gives_dtensors else value

    def statistics(self, statistics: TokenStatistics) -> TokenStatistics:
        """A call's statistics, as the user expects them."""
        return statistics.changed(self.of_tokens) if self._gives_dtensors or self.parts > 1 else statistics

    def of_tokens(self, value: Any) -> Any:
        """A call's values ``[...]`` or ``[..., K]`` of the tokens, in the user's order and placements."""
        if self.parts > 1:
            whole = value.unflatten(0, (self.parts, value.shape[0] // self.parts)).transpose(0, 1)
            value = whole.reshape(whole.shape[0], self.parts * whole.shape[2], *whole.shape[3:])
        if not self._gives_dtensors:
            return value
        tokens = self._input.shape[:-1]
        return self._as_dtensor(value, self._tokens, (*tokens, *value.shape[len(tokens) :]))

    def _as_dtensor(self, value: Tensor, placements: list, shape: tuple[int, ...] = ()) -> Any:
        from torch.distributed.tensor import DTensor

        stride = torch.empty(shape, device="meta").stride()
        return DTensor.from_local(
            value.contiguous(), self.mesh, placements, run_check=False, shape=torch.Size(shape), stride=stride
        )


_CHANGES_NOTHING = DTensorAdapter(Options(""), Tensors(None, None), None, None)
"""Of calls on plain tensors."""


def _alike(name: str, value: Any, other_name: str, other: Any) -> bool:
    """Whether ``value`` is a DTensor. Raises ``ValueError`` unless both tensors are, or none."""
    if isinstance(value, Tensor) and is_dtensor(value) != is_dtensor(other):
        both = f"{_placed(name, value)}, and {_placed(other_name, other)}"
        raise ValueError(f"{both}: pass DTensors for both, or neither")
    return is_dtensor(value)


def _shards(placement: Any, dims: Iterable[int | None]) -> bool:
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
