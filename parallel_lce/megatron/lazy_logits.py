"""Logits that Megatron's model passes from its output layer to its loss without making them."""

from __future__ import annotations

import numbers
import operator
import warnings
from collections.abc import Callable, Iterator

import torch
from torch import Tensor

from parallel_lce.functional import token_statistics
from parallel_lce.parallel import Layout, gather_hidden
from parallel_lce.plan import Block
from parallel_lce.statistics import TokenStatistics


def keep_autograd_gradient(weight: Tensor) -> None:
    """Have Megatron's DDP add what autograd delivers for ``weight`` to its main_grad.

    The fused loss adds its dW to main_grad itself and says so in ``grad_added_to_main_grad``, after
    which DDP drops autograd's gradient, that of real logits of the same weight included, unless the
    weight has Megatron's ``zero_out_wgrad``.
    """
    if torch.is_grad_enabled() and weight.requires_grad:
        weight.zero_out_wgrad = True


class LogitsWarning(RuntimeWarning):
    """Training makes the whole logits. No UserWarning: Megatron-LM's programs silence those on all ranks
    but the first, which has no output layer under pipeline parallelism."""


def warn_of_logits(module: torch.nn.Module, reason: str) -> None:
    """Say once per module and reason, on one of the ranks that have it, that training makes the logits."""
    said = vars(module).setdefault("_parallel_lce_said", set())
    if reason in said:
        return
    said.add(reason)
    from megatron.core import parallel_state

    if parallel_state.is_initialized():
        replica = parallel_state.get_data_parallel_rank(with_context_parallel=True)
        if replica or parallel_state.get_tensor_model_parallel_rank():
            return
    message = f"parallel_lce: training makes the whole logits, which need not exist: {reason}"
    warnings.warn(message, LogitsWarning, stacklevel=3)


def _refuse_in_place(name: str) -> None:
    raise RuntimeError(
        f"parallel_lce: in-place {name} on the output layer's result would be lost, since the loss "
        "does not read the logits: change the hidden states or the loss instead, or train without "
        "cross_entropy_fusion_impl='parallel_lce'"
    )


class LazyLogits:
    """The logits ``[s, b, V/P]`` that ``layer`` would make of ``hidden``.

    The loss takes the parts; sizes, and each token's largest logit and its place, are known without
    logits. Any other use (a method, an operator, an index, a torch function) makes the real ones as the
    stock layer does, and one that would change them in place is refused: the loss would not see the
    change. ``sequence_parallel`` is the layer's at the time of the call. ``weight`` is the shared one
    that was passed to the layer, or None for the layer's own. The logits are multiplied by ``scale``.
    """

    def __init__(
        self,
        layer: torch.nn.Module,
        hidden: Tensor,
        weight: Tensor | None,
        sequence_parallel: bool,
        stock_forward: Callable[..., tuple[Tensor, Tensor | None]],
        scale: float = 1.0,
    ) -> None:
        self.layer, self.hidden, self.weight = layer, hidden, weight
        self.sequence_parallel, self.stock_forward = sequence_parallel, stock_forward
        self.scale = scale

    def __reduce_ex__(self, protocol):
        """Pickled, as Megatron's config logger does, they are the real logits."""
        return self.materialize("pickling").detach().__reduce_ex__(protocol)

    def __repr__(self) -> str:
        return f"LazyLogits({list(self.shape)}, {self.dtype}, {self.device})"

    def materialize(self, use: str) -> Tensor:
        """The real logits; in training one warning names the ``use`` that wants them."""
        if self.layer.training:
            warn_of_logits(self.layer, f"{use} of the output layer's result wants them")
        keep_autograd_gradient(self.used_weight)
        before, self.layer.sequence_parallel = self.layer.sequence_parallel, self.sequence_parallel
        try:
            logits, _ = self.stock_forward(self.hidden, weight=self.weight)
        finally:
            self.layer.sequence_parallel = before
        return logits if self.scale == 1.0 else logits * self.scale

    @property
    def used_weight(self) -> Tensor:
        return self.layer.weight if self.weight is None else self.weight

    @property
    def shape(self) -> torch.Size:
        sequence, *others = self.hidden.shape[:-1]
        parts = self.layer.tp_group.size() if self.sequence_parallel else 1
        return torch.Size((parts * sequence, *others, self.layer.output_size_per_partition))

    @property
    def device(self) -> torch.device:
        return self.hidden.device

    @property
    def dtype(self) -> torch.dtype:
        kind, asked = self.device.type, getattr(self.layer, "output_dtype", None)  # from 0.20 on
        if asked is not None:
            return asked
        return torch.get_autocast_dtype(kind) if torch.is_autocast_enabled(kind) else self.hidden.dtype

    @property
    def requires_grad(self) -> bool:
        tensors = self.hidden, self.used_weight, self.layer.bias
        return torch.is_grad_enabled() and any(t is not None and t.requires_grad for t in tensors)

    @property
    def is_cuda(self) -> bool:
        return self.hidden.is_cuda

    def is_floating_point(self) -> bool:
        return True

    def numel(self) -> int:
        return self.shape.numel()

    @property
    def ndim(self) -> int:
        return self.hidden.ndim

    def dim(self) -> int:
        return self.ndim

    def size(self, dim: int | None = None) -> torch.Size | int:
        return self.shape if dim is None else self.shape[dim]

    def __len__(self) -> int:
        return self.shape[0]

    def __iter__(self) -> Iterator[Tensor]:
        return iter(self.materialize("iteration"))

    def max(self, *arguments, **options):
        """Over the vocabulary, without a gradient, by statistics; else as of the real logits."""
        if _over_vocabulary(self, *arguments, **options) and not torch.is_grad_enabled():
            found = self._statistics()
            return torch.return_types.max((found.max_logit.to(self.dtype), found.argmax))
        return self.materialize("'max'").max(*arguments, **options)

    def argmax(self, *arguments, **options) -> Tensor:
        """Over the vocabulary by statistics; else as of the real logits."""
        if _over_vocabulary(self, *arguments, **options):
            return self._statistics().argmax
        return self.materialize("'argmax'").argmax(*arguments, **options)

    @torch.no_grad()
    def _statistics(self) -> TokenStatistics:
        """Maximum and its place in this rank's shard, of each token ``[s, b]``.

        One more projection, but no logits. Under sequence parallelism the hidden states are gathered
        first, as the stock layer does.
        """
        hidden = self.hidden
        if self.sequence_parallel:
            layout = Layout.of(self.layer.tp_group, True)
            flat = hidden.reshape(-1, hidden.shape[-1]).contiguous()
            whole = Block(0, flat.shape[0], 0)
            hidden = gather_hidden(flat, whole, layout).wait().view(*self.shape[:-1], -1)
        return token_statistics(
            hidden,
            self.used_weight,
            None,
            linear_bias=self.layer.bias,
            logit_scale=self.scale,
            argmax=True,
        )

    def __mul__(self, factor: object) -> LazyLogits | Tensor:
        if isinstance(factor, numbers.Real):
            parts = self.layer, self.hidden, self.weight, self.sequence_parallel, self.stock_forward
            return LazyLogits(*parts, self.scale * float(factor))
        return self.materialize("multiplication") * factor

    __rmul__ = __mul__

    def __getattr__(self, name: str):
        if name.startswith("__") or not hasattr(Tensor, name):
            raise AttributeError(f"{type(self).__name__!r} object has no attribute {name!r}")
        if name.endswith("_"):
            _refuse_in_place(name)
        return getattr(self.materialize(f"attribute {name!r}"), name)

    def __getitem__(self, index):
        return self.materialize("indexing")[index]

    def __setitem__(self, index, value):
        _refuse_in_place("assignment")

    @classmethod
    def __torch_function__(cls, function, types, args=(), kwargs=None):
        name = getattr(function, "__name__", str(function))
        if isinstance((kwargs or {}).get("out"), cls) or (
            name.endswith("_") and not name.startswith("__") and isinstance(args[0], cls)
        ):
            _refuse_in_place(name)
        if function in (torch.max, torch.argmax):
            logits, *others = args
            if isinstance(logits, cls):
                return getattr(logits, name)(*others, **(kwargs or {}))
        use = f"torch function {name!r}"

        def real(value):
            if isinstance(value, cls):
                return value.materialize(use)
            return type(value)(map(real, value)) if isinstance(value, (list, tuple)) else value

        return function(*map(real, args), **{k: real(v) for k, v in (kwargs or {}).items()})


def _over_vocabulary(logits: LazyLogits, dim: object = None, keepdim: bool = False) -> bool:
    return isinstance(dim, int) and dim in (-1, logits.ndim - 1) and not keepdim


def _add_operators() -> None:
    """Python looks operators up on the class, past ``__getattr__``."""
    comparisons = ("lt", "le", "gt", "ge", "eq", "ne")
    arithmetic = ("add", "sub", "truediv", "floordiv", "mod", "pow")

    def add(name: str, function: Callable) -> None:
        def call(self, *others):
            return function(self.materialize(f"operator {name!r}"), *others)

        setattr(LazyLogits, name, call)

    for name in (*comparisons, *arithmetic, "neg", "abs"):
        add(f"__{name}__", getattr(operator, name))
    for name in arithmetic:
        add(f"__r{name}__", lambda z, other, of=getattr(operator, name): of(other, z))


_add_operators()
