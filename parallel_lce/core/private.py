"""What the package uses of PyTorch's private interfaces. tests/test_private.py tests the uses that no other test shows.

All were seen in torch 2.13; those marked 2.15 also in 2.14.1 and 2.15.0. Triton's launch of a compiled kernel is in
kernels/launch.py, what the doors use of their neighbours in neighbours.py.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensor  # 2.15
from torch.autograd import forward_ad
from torch.distributed import _functional_collectives, distributed_c10d
from torch.distributed._functional_collectives import AsyncCollectiveTensor  # 2.15
from torch.nn.modules import module as _modules
from torch.overrides import _get_current_function_mode_stack as function_modes
from torch.utils import _pytree as pytree
from torch.utils import checkpoint
from torch.utils._device import DeviceContext
from torch.utils._python_dispatch import _disable_current_modes, _get_current_dispatch_mode_stack

__all__ = ["AsyncCollectiveTensor", "DeviceContext", "FakeTensor", "function_modes", "pytree"]

F = TypeVar("F", bound=Callable)
# As Any, since type checkers do not know their private names.
_torch: Any = torch
_distributed: Any = distributed_c10d

# --- graphs of torch.compile; torch.compiler has public decorators, which import torch._dynamo, and that takes a second


def constant_in_graphs(function: F) -> F:
    """Decorates a function that torch.compile calls while it traces, and whose result it takes as a constant. 2.15."""
    function._dynamo_marked_constant = True  # pyright: ignore[reportFunctionMemberAccess]
    return function


def exporting() -> bool:
    """Whether torch.export runs. In graphs of torch 2.11 PyTorch's own function is always true."""
    return torch.compiler._is_exporting_flag  # pyright: ignore[reportAttributeAccessIssue]


def recording() -> bool:
    """Whether torch.export, torch.jit.trace or make_fx records PyTorch's operators, which kernels are not."""
    by_make_fx = _torch._C._get_dispatch_mode(_torch._C._TorchDispatchModeKey.PROXY) is not None
    return by_make_fx or exporting() or torch.jit.is_tracing()  # pyright: ignore[reportPrivateImportUsage]


_frames: Any = _torch._C._dynamo.eval_frame


def _without_graphs(function: Callable) -> None:
    """Lets torch.compile leave the code of a function as it is. It may compile the functions that this one calls."""
    actions = _frames._FrameAction
    strategy = _frames._FrameExecStrategy(actions.SKIP, actions.DEFAULT)
    _frames.set_code_exec_strategy(function.__code__, strategy)  # pyright: ignore[reportFunctionMemberAccess]


def outside_graphs(function: F, reason: str | None = None, calls_too: bool = True) -> F:
    """Decorates a function at which graphs of torch.compile break, and in which it makes none. ``calls_too``: nor does
    it in functions that this one calls. ``reason``: what torch.compile says where a graph that must be whole breaks
    there."""

    outside: list[Callable] = []

    @functools.wraps(function)
    def call(*given: Any, **named: Any) -> Any:
        if not calls_too or _frames.get_eval_frame_callback() is None:  # torch.compile does not run on this thread
            return function(*given, **named)
        if not outside:  # not at once, or Dynamo of 2.11 warns of it
            outside.append(torch.compiler.disable(function, reason=reason))
        return outside[0](*given, **named)

    _without_graphs(call)
    if not calls_too:
        _without_graphs(function)
    call._torchdynamo_disable = True  # pyright: ignore[reportAttributeAccessIssue]
    call._torchdynamo_disable_msg = reason  # pyright: ignore[reportAttributeAccessIssue]
    return call  # pyright: ignore[reportReturnType]


# The module of the tensor classes with which torch traces: FakeTensor, FunctionalTensor.
TRACING = "torch._subclasses."

# --- autograd and torch.func ---

# Whether a transform of torch.func is running.
transforming: Callable[[], bool] = _torch._C._are_functorch_transforms_active


def saving_without_hooks() -> AbstractContextManager:
    """A context in which autograd saves tensors themselves, not what hooks around it make of them, such as those of a
    checkpoint, which run its function again where a tensor is read. The tensors are detached: a node that saves its own
    output, as that of ``tanh``, would otherwise hold itself for ever. Reading one attaches it again."""
    # They may be disabled. Without hooks around it, a Function may read attributes of a parameter that it saved.
    autograd = _torch._C._autograd
    if not autograd._saved_tensors_hooks_is_enabled() or autograd._top_saved_tensors_default_hooks(False) is None:
        return nullcontext()
    return torch.autograd.graph.saved_tensors_hooks(Tensor.detach, lambda tensor: tensor)


_SELECTIVE_CHECKPOINTS = checkpoint._CachingTorchDispatchMode, checkpoint._CachedTorchDispatchMode


def outside_selective_checkpoints() -> AbstractContextManager:
    """A context for what a selective checkpoint runs again whole, such as an autograd.Function's ``forward``. It would
    keep results that are overwritten later, or views of memory that the next run does not fill. Other modes, such as a
    counter of FLOPs, then do not see it, either."""
    modes = _get_current_dispatch_mode_stack()
    selective = modes and any(isinstance(mode, _SELECTIVE_CHECKPOINTS) for mode in modes)
    return _disable_current_modes() if selective else nullcontext()


def in_forward_mode() -> bool:
    """Whether forward-mode derivatives are computed."""
    return forward_ad._current_level >= 0


def after_backward(function: Callable[[], Any]) -> None:
    """Calls it at the end of the running backward."""
    torch.autograd.Variable._execution_engine.queue_callback(function)


def in_backward() -> bool:
    """Whether a backward runs on this thread."""
    return _torch._C._current_graph_task_id() >= 0


def accumulates(leaf_node: Any) -> bool:
    """Whether the running backward accumulates the gradient of the leaf of this node."""
    try:
        return _torch._C._will_engine_execute_node(leaf_node)
    except RuntimeError:  # torch.autograd.grad captures it
        return False


# --- launches ---

# Launches kernels that Triton has compiled, for torch.compile. None where torch has no CUDA.
torch_launcher: Any = getattr(_torch._C, "_StaticCudaLauncher", None)

# --- tensors ---

# A tensor of a subclass, without memory; and what makes C++ code that asks for its address raise, not read from 0.
wrapper_subclass: Callable[..., Any] = Tensor._make_wrapper_subclass
forbid_address: Callable[[Tensor], None] = _torch._C._set_throw_on_mutable_data_ptr
# A context in which subclasses' __torch_function__ does not run.
DisableTorchFunctionSubclass: Any = _torch._C.DisableTorchFunctionSubclass


@contextmanager
def counting_versions() -> Iterator[None]:
    """A context in which operators track views and count versions, also in inference mode and __torch_dispatch__."""
    with (
        torch.inference_mode(False),
        _torch._C._SetExcludeDispatchKeyGuard(_torch._C.DispatchKey.ADInplaceOrView, False),
    ):
        yield


def changes_arguments(operator: Any) -> bool:
    """Whether an operator that ``__torch_dispatch__`` gets writes into its arguments. One of higher order does not."""
    schema = getattr(operator, "_schema", None)
    return schema is not None and schema.is_mutable


linear: Callable[..., Tensor] = _torch._C._nn.linear

_KEPT = "_parallel_lce_kept"


def keep_with(tensor: Tensor, value: object) -> None:
    """Keep ``value`` as long as the memory of ``tensor``. Its storage is one Python object with attributes, as long as
    that memory lives; also those of the tensor's aliases, and of what autograd saves of it."""
    vars(tensor.untyped_storage())[_KEPT] = value


def kept_with(tensor: Tensor) -> Any:
    """The value that is kept with ``tensor``. None if there is none, as for a copy."""
    return vars(tensor.untyped_storage()).get(_KEPT)


def take_from(tensor: Tensor) -> Any:
    """The value that is kept with ``tensor``, and is not from now on."""
    return vars(tensor.untyped_storage()).pop(_KEPT, None)


def has_hooks(tensor: Tensor) -> bool:
    """Whether something waits for the gradient of a tensor, or for its accumulation."""
    return bool(tensor._backward_hooks or tensor._post_accumulate_grad_hooks)


def version(tensor: Tensor) -> int:
    """How often the tensor, or an alias, was changed in place. Tensors of inference mode do not count that. 2.15."""
    return 0 if tensor.is_inference() else tensor._version


# --- torch.distributed ---


# gather_rows(tensor, 0, group): those of all ranks, also in a graph. torch 2.13 renamed it.
gather_rows: Callable[..., Tensor] = (
    getattr(_functional_collectives, "all_gather_single", None) or _functional_collectives.all_gather_tensor
)
# 2.15. The type of the name differs between releases.
group_of_name: Callable[[Any], dist.ProcessGroup] = _distributed._resolve_process_group


# --- modules ---


def hooks(module: nn.Module, *kinds: str) -> list[Callable]:
    """Hooks of the module, and of all modules. ``kinds``: 'forward', 'forward_pre', 'backward' or 'backward_pre'."""
    found = [vars(module)[f"_{kind}_hooks"] for kind in kinds]
    found += [getattr(_modules, f"_global_{kind}_hooks") for kind in kinds]
    return [hook for each in found for hook in each.values()]


def comes_from(hook: Any, *beginnings: str) -> bool:
    """Whether a hook, or the function of a partial one, is of a module whose name begins with one of these."""
    return (getattr(getattr(hook, "func", hook), "__module__", None) or "").startswith(beginnings)


def parameters_of(module: nn.Module) -> dict[str, nn.Parameter | None]:
    """The module's own, without those of its submodules."""
    return module._parameters


def is_parametrized(kind: type[nn.Module]) -> bool:
    """Whether torch.nn.utils.parametrize has derived this class. It undoes that by the class and its first base."""
    return kind.__name__ == f"Parametrized{kind.__bases__[0].__name__}"


# Beginnings of the names of the modules whose functions are FSDP's hooks.
FSDP_MODULES = "torch.distributed.fsdp", "torch.distributed._composable"


def is_flattened(parameter: Tensor) -> bool:
    """Whether it is FSDP1's flat parameter, or a part of one."""
    return hasattr(parameter, "_fsdp_flattened")


def fsdp_output_dtype(module: nn.Module) -> torch.dtype | None:
    """The dtype to which a module under fully_shard casts its results."""
    state: Any = module
    return state._get_fsdp_state()._mp_policy.output_dtype
