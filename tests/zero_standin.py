"""A stand-in of what the hooks of DeepSpeed's ZeRO-3 do around a module's forward and backward."""

import contextlib
import sys
from collections import OrderedDict
from unittest import mock

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn import functional as F

from tools import with_modules


class Parameters(OrderedDict):
    """Of a module. Within a forward DeepSpeed gathers a parameter that is read before its module runs, and leaves it
    whole for longer; here that fails."""

    strict = False

    def __getitem__(self, name: str):
        parameter = super().__getitem__(name)
        assert parameter is None or parameter.numel() or not Parameters.strict, f"{name} is read and not whole"
        return parameter


def _gather(parameter) -> None:
    parts = [torch.empty_like(parameter.ds_tensor) for _ in range(dist.get_world_size())]
    dist.all_gather(parts, parameter.ds_tensor)
    parameter.data = torch.cat(parts)[: parameter.ds_shape.numel()].view(parameter.ds_shape)


def _release(parameter) -> None:
    parameter.data = torch.empty(0)


class _Linear(torch.autograd.Function):
    @staticmethod
    def forward(ctx, hidden, weight, bias=None):
        ctx.save_for_backward(hidden, weight, bias)
        return torch._C._nn.linear(hidden, weight, bias)

    @staticmethod
    def backward(ctx, gradient):
        hidden, weight, bias = ctx.saved_tensors
        rows = gradient.flatten(0, -2)
        return gradient @ weight, rows.T @ hidden.flatten(0, -2), None if bias is None else rows.sum(0)


def zero3_linear_wrap(hidden, weight, bias=None):
    return _Linear.apply(hidden, weight, bias)


def installed():
    """A context in which this module is DeepSpeed's one of this name, and its linear everybody's."""
    home = with_modules({"deepspeed.runtime.zero.linear": sys.modules[__name__]})
    linear = mock.patch.object(F, "linear", zero3_linear_wrap)
    return home, linear


def partition(parameter) -> None:
    """Leaves it empty, with this rank's part beside it, and lets a backward sum its gradient into ``total``."""
    flat = parameter.data.flatten()
    flat = F.pad(flat, (0, -len(flat) % dist.get_world_size()))
    # The whole parameter's place in the graph.
    node = parameter.expand_as(parameter).grad_fn.next_functions[0][0] if parameter.requires_grad else None
    vars(parameter).update(ds_id=id(parameter), ds_shape=parameter.shape, node=node)
    parameter.ds_tensor = flat.chunk(dist.get_world_size())[dist.get_rank()].clone()
    parameter.total = torch.zeros_like(parameter.ds_tensor)
    if node is not None:
        node.register_hook(_reducing(parameter))
    _release(parameter)


def _reducing(parameter):
    def reduce(*_) -> None:
        flat = parameter.grad.flatten()
        dist.all_reduce(flat)
        flat = F.pad(flat, (0, -len(flat) % dist.get_world_size())) / dist.get_world_size()
        parameter.total += flat.chunk(dist.get_world_size())[dist.get_rank()]
        parameter.grad = None

    return reduce


@contextlib.contextmanager
def gathered(*parameters):
    """A context in which they are whole."""
    for parameter in parameters:
        _gather(parameter)
    try:
        yield
    finally:
        for parameter in parameters:
            _release(parameter)


class StandIn:
    """``model`` trained by SGD."""

    def __init__(self, model: nn.Module, rate: float) -> None:
        self.model, self.rate, self.parameters = model, rate, [*model.parameters()]
        for parameter in self.parameters:
            partition(parameter)
        for module in model.modules():
            object.__setattr__(module, "_parameters", Parameters(module._parameters))
            self._hook(module)

    def _hook(self, module: nn.Module) -> None:
        own = [p for p in OrderedDict.values(module._parameters) if p is not None]

        def fetch() -> None:
            for parameter in own:
                _gather(parameter)

        def release() -> None:
            for parameter in own:
                _release(parameter)

        def identity(before_backward):
            class Around(torch.autograd.Function):
                @staticmethod
                def forward(ctx, value):
                    return value.detach()

                @staticmethod
                def backward(ctx, gradient):
                    before_backward()
                    return gradient

            return lambda values: _mapped(Around.apply, values)

        opened, closed = identity(fetch), identity(release)
        pre = [lambda module, given: fetch(), lambda module, given: closed(given)]
        post = [lambda module, given, output: release(), lambda module, given, output: opened(output)]
        for hook in (*pre, *post):
            hook.__module__ = "deepspeed.runtime.zero.parameter_offload"
        for hook in pre:
            module.register_forward_pre_hook(hook)
        for hook in post:
            module.register_forward_hook(hook)

    def __call__(self, **given):
        with mock.patch.object(Parameters, "strict", True):
            output = self.model(**given)
        hook = lambda gradient: None  # noqa: E731
        hook.__module__ = "deepspeed.runtime.utils"
        for value in filter(lambda value: torch.is_tensor(value) and value.requires_grad, output.values()):
            value.register_hook(hook)
        return output

    def backward(self, loss: Tensor) -> None:
        loss.backward()

    def step(self) -> None:
        for parameter in self.parameters:
            parameter.ds_tensor -= self.rate * parameter.total
            parameter.total.zero_()

    def whole(self) -> list[Tensor]:
        with gathered(*self.parameters):
            return [parameter.detach().clone() for parameter in self.parameters]


def _mapped(function, values):
    if isinstance(values, tuple):
        return tuple(_mapped(function, value) for value in values)
    if isinstance(values, dict):
        for name in values:
            values[name] = _mapped(function, values[name])
        return values
    return function(values) if isinstance(values, Tensor) else values
