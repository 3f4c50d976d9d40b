"""Compile, without a GPU, every kernel that calls of the triton backend launch on one: as a program,
``compile_kernels.py CAPABILITY [once]``, since Triton must not be in its interpreter's mode; ``once`` compiles each
kernel for the first of its calls, as all take minutes. Prints, in JSON, the version of Triton, which PYTHONPATH may
choose, and each kernel's bytes of stack (registers spilled) and of shared memory. ``plain``: as in kernel_calls.py."""

import functools
import json
import os
import re
import subprocess
import sys
import tempfile
from types import SimpleNamespace

import torch
import torch.distributed as dist
import triton
from torch.testing._internal.distributed.fake_pg import FakeStore
from triton.backends.compiler import GPUTarget
from triton.runtime import driver
from triton.runtime.jit import JITFunction

CAPABILITY, ONCE = int(sys.argv[1]), sys.argv[2:] == ["once"]

driver.set_active(
    SimpleNamespace(
        get_current_device=lambda: 0,
        get_current_stream=lambda device=None: 0,
        get_current_target=lambda: GPUTarget("cuda", CAPABILITY, 32),
        get_active_torch_device=lambda: torch.device("cpu"),
    )
)
compiled: list[dict] = []
met: set[str] = set()
plain = True
_run = JITFunction.run
_OBJDUMP = os.path.join(os.path.dirname(triton.__file__), "backends", "nvidia", "bin", "cuobjdump")


def _compile_alone(self, *arguments, grid, warmup, **options):
    assert options["enable_fp_fusion"]
    name = self.repr(SimpleNamespace(constants=options))
    if ONCE and name in met:
        return
    met.add(name)
    kernel = _run(self, *arguments, grid=grid, warmup=True, **options)
    shared, name, stack = kernel.metadata.shared, kernel.metadata.name, _stack(kernel.asm["cubin"])
    compiled.append(dict(name=name, hopper=self.is_gluon(), plain=plain, stack=stack, shared=shared))


@functools.cache
def _stack(code: bytes) -> int:
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(code)
        file.flush()
        usage = subprocess.check_output([_OBJDUMP, "--dump-resource-usage", file.name], text=True)
    return max(map(int, re.findall(r"STACK:(\d+)", usage)))


JITFunction.run = _compile_alone

import kernel_calls
from parallel_lce import backends
from parallel_lce.kernels import launch, product

backends._name = lambda *given: "triton"
launch._launch_of = lambda *given: lambda *given: None
launch.generation = product.generation = lambda device: CAPABILITY // 10
product.num_sms = lambda device: 132
dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=2)
for plain, call in kernel_calls.every_call("cpu", [dist.new_group([0]), dist.group.WORLD]):  # noqa: B007
    call()
json.dump({"triton": triton.__version__, "kernels": compiled}, sys.stdout)
