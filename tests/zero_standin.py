"""A stand-in of what the hooks of DeepSpeed's ZeRO-3 do around a module's forward and backward, on one rank."""

import sys
from collections import OrderedDict
from contextlib import contextmanager
from unittest import mock

import torch
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


def zero3_linear_wrap(hidden, weight, bias=None):
    return torch._C._nn.linear(hidden, weight, bias)


@contextmanager
def installed():
    """This module is DeepSpeed's one of this name, and its linear everybody's."""
    with with_modules({"deepspeed.runtime.zero.linear": sys.modules[__name__]}):
        with mock.patch.object(F, "linear", zero3_linear_wrap):
            yield


class ZeRO3:
    """``model``, and its SGD. A parameter is empty but within its module's forward and backward."""

    def __init__(self, model: nn.Module) -> None:
        self.model, self.gathered = model, 0
        self.whole = {parameter: parameter.data for parameter in model.parameters()}
        for parameter in self.whole:
            parameter.ds_id = id(parameter)
        self._release(*self.whole)
        for module in model.modules():
            object.__setattr__(module, "_parameters", Parameters(module._parameters))
            self._hook(module)

    def _release(self, *parameters: Tensor) -> None:
        for parameter in parameters:
            parameter.data = torch.empty(0)

    def _hook(self, module: nn.Module) -> None:
        own = [p for p in OrderedDict.values(module._parameters) if p is not None]

        def fetch() -> None:
            for parameter in own:
                parameter.data = self.whole[parameter]
            self.gathered += len(own)

        class Around(torch.autograd.Function):
            @staticmethod
            def forward(ctx, before_backward, value):
                ctx.before_backward = before_backward
                return value.detach()

            @staticmethod
            def backward(ctx, gradient):
                ctx.before_backward()
                return None, gradient

        def before(module, given):
            fetch()
            return tree_map_only(Tensor, lambda value: Around.apply(lambda: None, value), given)

        def after(module, given, output):
            self._release(*own)
            return tree_map_only(Tensor, lambda value: Around.apply(fetch, value), output)

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
        for parameter, whole in self.whole.items():
            if parameter.grad is not None:
                whole -= parameter.grad
            parameter.grad = None
        self._release(*self.whole)
