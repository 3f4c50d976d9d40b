"""Models under DeepSpeed's ZeRO-3: the released package, and a stand-in of what its hooks do around a module's forward
and backward."""

import contextlib
import importlib
import os
import sys
from collections import OrderedDict
from unittest import mock

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn import functional as F

from tools import with_modules

RELEASE = "0.19.8"
OTHERS = "hjson==3.1.0 py-cpuinfo==9.0.0 msgpack==1.2.4 ninja==1.13.2 psutil==7.2.2 einops==0.8.1 tqdm pydantic==2.12.5"
OTHERS += " pydantic-core==2.41.5 annotated-types typing-inspection typing-extensions packaging numpy"


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
            return self.model(**given)

    def backward(self, loss: Tensor) -> None:
        loss.backward()

    def step(self) -> None:
        for parameter in self.parameters:
            parameter.ds_tensor -= self.rate * parameter.total
            parameter.total.zero_()

    def whole(self) -> list[Tensor]:
        with gathered(*self.parameters):
            return [parameter.detach().clone() for parameter in self.parameters]

    def end(self) -> None:
        pass


def _mapped(function, values):
    if isinstance(values, tuple):
        return tuple(_mapped(function, value) for value in values)
    if isinstance(values, dict):
        for name in values:
            values[name] = _mapped(function, values[name])
        return values
    return function(values) if isinstance(values, Tensor) else values


class Released:
    """The same by DeepSpeed."""

    def __init__(self, model: nn.Module, rate: float) -> None:
        os.environ.update(DS_ACCELERATOR="cpu", LOCAL_RANK=str(dist.get_rank()))
        import deepspeed

        self.parameters, self.context = [*model.parameters()], deepspeed.zero.GatheredParameters
        # Every weight is released after its layer's forward.
        names = "param_persistence_threshold", "max_live_parameters", "max_reuse_distance", "prefetch_bucket_size"
        zero = {"stage": 3, "reduce_bucket_size": 10_000, **{f"stage3_{name}": 0 for name in names}}
        self.config = config = {
            "train_micro_batch_size_per_gpu": 2,
            "zero_optimization": zero,
            "zero_allow_untested_optimizer": True,
        }
        optimizer = torch.optim.SGD([p for p in self.parameters if p.requires_grad], lr=rate)
        backend = importlib.import_module("deepspeed.comm.torch")
        with mock.patch.object(backend, "build_shm_op", lambda: None):  # it compiles for a minute
            self.engine, *_ = deepspeed.initialize(model=model, config=config, optimizer=optimizer)

    def __call__(self, **given):
        return self.engine(**given)

    def backward(self, loss: Tensor) -> None:
        self.engine.backward(loss)

    def step(self) -> None:
        self.engine.step()

    def whole(self) -> list[Tensor]:
        with self.context(self.parameters):
            return [parameter.detach().clone() for parameter in self.parameters]

    def end(self) -> None:
        self.engine.destroy()
