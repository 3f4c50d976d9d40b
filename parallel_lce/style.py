"""The loss as a style of ``torch.distributed.tensor.parallel.parallelize_module``."""

from __future__ import annotations

from typing import Any

from torch import Tensor, compiler, is_grad_enabled, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Replicate
from torch.distributed.tensor.parallel import ParallelStyle
from torch.distributed.tensor.placement_types import Placement

from parallel_lce.call import debug
from parallel_lce.call.checks import described, public
from parallel_lce.modules import LinearCrossEntropy


class LinearCrossEntropyParallel(ParallelStyle):
    """Tensor parallelism of a :class:`parallel_lce.LinearCrossEntropy` in a plan of ``parallelize_module``.

    The module is called with the output layer's weight (and bias), DTensors that another style has sharded with
    ``Shard(0)`` (``ColwiseParallel``), and with the whole sequence's targets.

    Args:
        input_layouts: placement on the mesh of hidden states ``[b, S, D]`` that are a plain tensor: ``Replicate()``,
            the default; or ``Shard(1)`` or ``Shard(0)``, in equal parts (sequence parallelism).
        use_local_output: True: the loss is a plain tensor, the same on every rank. False: a DTensor.

    Raises:
        ValueError: another module, or no placement. In a call: another placement, or a weight that is not sharded; or
            ``reduce_hidden_grad=False`` and an input that is no DTensor.
    """

    def __init__(self, *, input_layouts: Placement | None = None, use_local_output: bool = True) -> None:
        super().__init__()
        self.input_layouts = Replicate() if input_layouts is None else input_layouts
        if not isinstance(self.input_layouts, Placement):
            raise ValueError(f"input_layouts must be one placement, as Shard(1), got {input_layouts!r}")
        self.use_local_output = use_local_output

    def _apply(self, module: nn.Module, device_mesh: DeviceMesh) -> nn.Module:
        if not isinstance(module, LinearCrossEntropy):
            given = f"{type(module).__name__}; if it wraps one, as torch.compile does, apply the plan before"
            raise ValueError(f"this style is for parallel_lce.LinearCrossEntropy, and this module is a {given}")
        if device_mesh.ndim != 1:
            raise ValueError(f"device_mesh must have one dimension, as mesh['tp'], got one of {device_mesh.ndim}")

        @public
        def with_placements(module: Any, args: tuple, kwargs: dict[str, Any]) -> tuple[tuple, dict[str, Any]]:
            if not compiler.is_compiling():
                debug.state.group = device_mesh.get_group()
            hidden = args[0] if args else kwargs.get("input")
            weight = args[1] if len(args) > 1 else kwargs.get("linear_weight")
            if not isinstance(weight, DTensor):
                raise ValueError(f"linear_weight must be a DTensor, got {described(weight)}: use ColwiseParallel()")
            if isinstance(hidden, Tensor) and not isinstance(hidden, DTensor):
                trained = is_grad_enabled() and hidden.requires_grad and device_mesh.size() > 1
                if trained and not module.options["reduce_hidden_grad"]:
                    raise ValueError("reduce_hidden_grad=False, and input is no DTensor: the style sums its gradient")
                hidden = DTensor.from_local(hidden, device_mesh, (self.input_layouts,), run_check=False)
                args, kwargs = ((hidden, *args[1:]), kwargs) if args else (args, kwargs | {"input": hidden})
            return args, kwargs

        def local(module: nn.Module, args: tuple, loss: Any) -> Any:
            # No view: FSDP2 loses its hook at the end of a module if the caller changes a view in place.
            return loss.to_local().clone() if isinstance(loss, DTensor) else loss

        module.register_forward_pre_hook(with_placements, with_kwargs=True)
        if self.use_local_output:
            module.register_forward_hook(local)
        return module
