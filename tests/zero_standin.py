"""A stand-in of what the hooks of DeepSpeed's ZeRO-3 do around a module's forward and backward."""

import sys
from collections import OrderedDict
from unittest import mock

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils._pytree import tree_map_only

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


def zero3_linear_wrap(hidden, weight, bias=None):
    return torch._C._nn.linear(hidden, weight, bias)


def installed():
    """A context in which this module is DeepSpeed's one of this name, and its linear everybody's."""
    home = with_modules({"deepspeed.runtime.zero.linear": sys.modules[__name__]})
    linear = mock.patch.object(F, "linear", zero3_linear_wrap)
    return home, linear


def partition(parameter) -> None:
    """Leaves it empty, with this rank's part beside it, and lets a backward sum its gradient into ``total``."""
    flat = parameter.data.flatten()
    flat = F.pad(flat, (0, -len(flat) % dist.get_world_size()))
    vars(parameter).update(ds_id=id(parameter), ds_shape=parameter.shape)
    parameter.ds_tensor = flat.chunk(dist.get_world_size())[dist.get_rank()].clone()
    parameter.total = torch.zeros_like(parameter.ds_tensor)

    def reduce(*_) -> None:
        flat = parameter.grad.flatten()
        dist.all_reduce(flat)
        flat = F.pad(flat, (0, -len(flat) % dist.get_world_size())) / dist.get_world_size()
        parameter.total += flat.chunk(dist.get_world_size())[dist.get_rank()]
        parameter.grad = None

    if parameter.requires_grad:  # the whole parameter's place in the graph
        parameter.node = parameter.expand_as(parameter).grad_fn.next_functions[0][0]
        parameter.node.register_hook(reduce)
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
        fetch, release = (lambda: [*map(_gather, own)]), (lambda: [*map(_release, own)])

        def identity(before_backward):
            class Around(torch.autograd.Function):
                @staticmethod
                def forward(ctx, value):
                    return value.detach()

                @staticmethod
                def backward(ctx, gradient):
                    before_backward()
                    return gradient

            return lambda values: tree_map_only(Tensor, Around.apply, values)

        opened, closed = identity(fetch), identity(release)

        def before(module, given):
            fetch()
            return closed(given)

        def after(module, given, output):
            release()
            return opened(output)

        before.__module__ = after.__module__ = "deepspeed.runtime.zero.parameter_offload"
        module.register_forward_pre_hook(before), module.register_forward_hook(after)

    def __call__(self, **given):
        with mock.patch.object(Parameters, "strict", True):
            output = self.model(**given)
        hook = lambda gradient: None  # noqa: E731
        hook.__module__ = "deepspeed.runtime.utils"
        for value in filter(lambda value: torch.is_tensor(value) and value.requires_grad, output.values()):
            value.register_hook(hook)
        return output

    def step(self) -> None:
        for parameter in self.parameters:
            parameter.ds_tensor -= self.rate * parameter.total
            parameter.total.zero_()

    def whole(self) -> list[Tensor]:
        for parameter in self.parameters:
            _gather(parameter)
        return [parameter.detach().clone() for parameter in self.parameters]
