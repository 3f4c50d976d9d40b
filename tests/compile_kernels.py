"""Compile, without a GPU, every kernel that calls of the triton backend launch on one: as a program,
``compile_kernels.py CAPABILITY [few]``, since Triton must not be in its interpreter's mode; ``few`` compiles
each kernel for some calls. Prints, in JSON, the version of Triton, which PYTHONPATH may choose, and what
each kernel takes: bytes of stack, which are registers spilled, and of shared memory. ``plain``: without
bias, soft-cap, logits that are stored, and statistics beside those of the loss. ``code``: a hash of its
machine code.

Triton makes a number of an argument that is 1, and a kernel of its own for it, which no interpreter
shows: hence one token, one window, one block.
"""

import dataclasses
import hashlib
import json
import os
import re
import subprocess
import sys
import tempfile
from types import SimpleNamespace
from unittest import mock

import torch
import torch.distributed as dist
import triton
from torch.testing._internal.distributed.fake_pg import FakeStore
from triton.backends.compiler import GPUTarget
from triton.runtime import driver
from triton.runtime.jit import JITFunction

CAPABILITY, FEW = int(sys.argv[1]), sys.argv[2:] == ["few"]

driver.set_active(
    SimpleNamespace(
        get_current_device=lambda: 0,
        get_current_stream=lambda device=None: 0,
        get_current_target=lambda: GPUTarget("cuda", CAPABILITY, 32),
        get_active_torch_device=lambda: torch.device("cpu"),
    )
)
compiled: list[dict] = []
plain = True
_run = JITFunction.run
_OBJDUMP = os.path.join(os.path.dirname(triton.__file__), "backends", "nvidia", "bin", "cuobjdump")


def _compile_alone(self, *arguments, grid, warmup, **options):
    kernel = _run(self, *arguments, grid=grid, warmup=True, **options)
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(kernel.asm["cubin"])
        file.flush()
        usage = subprocess.check_output([_OBJDUMP, "--dump-resource-usage", file.name], text=True)
    stack = max(map(int, re.findall(r"STACK:(\d+)", usage)))
    shared = kernel.metadata.shared
    code = hashlib.sha256(kernel.asm["cubin"]).hexdigest()
    compiled.append(
        dict(name=kernel.metadata.name, hopper=self.is_gluon(), plain=plain, stack=stack, shared=shared, code=code)
    )


JITFunction.run = _compile_alone

import parallel_lce
from parallel_lce import backends
from parallel_lce.backends import triton as backend
from parallel_lce.backends import triton_filter
from parallel_lce.core.partials import Columns
from parallel_lce.distillation import divergence
from parallel_lce.kernels import partials, projection, tuning
from parallel_lce.kernels.filter import windows
from tools import shrunk

backends._name = lambda *given: "triton"
tuning._capability = lambda device: CAPABILITY
projection.num_sms = lambda device: 132
triton_filter.SMALLEST_FILTERED = 0
# Of three row blocks one is a sample.
windows.FEWEST_SAMPLED = 1

# Tokens, vocabulary rows, hidden size; saved vocabulary rows; everything asked for, or nothing; the last with soft-caps
# of each token, of which nothing is saved.
CALLS = [
    (1, 7, 8, 0, False),
    (1, 7, 8, 7, False),
    (80, 125, 64, 125, True),
    (400, 1000, 64, 256, False),
    (300, 1000, 64, 1000, False),
    (300, 1000, 64, 0, True),
    (33, 300, 15, 300, False),
    (300, 1000, 64, 0, "each"),
]


def operands(tokens: int, entries: int, depth: int, dtype: torch.dtype) -> list[torch.Tensor]:
    """Hidden states and weight, of a call's random values."""
    return [torch.randn(rows, depth).to(dtype).requires_grad_() for rows in (tokens, entries)]


def call(tokens, entries, depth, saved, everything, dtype):
    """Losses, filtered and not, or all statistics; log-probabilities of selected entries and of sets; divergences."""
    global plain
    plain, given = not everything, operands(tokens, entries, depth, dtype)
    target, each = torch.zeros(tokens, dtype=torch.int64), torch.ones(tokens)
    ids, sets = target[:, None].repeat(1, 3), (target.repeat(3), torch.arange(tokens + 1) * 3)
    budget = None if saved == entries else 2 * tokens * (saved + 256) * (saved > 0)
    options = {}
    if everything:
        options |= dict(linear_bias=torch.zeros(entries, dtype=dtype, requires_grad=True), logit_softcap=5.0)
        options |= dict(temperature=each) if everything == "each" else dict(logit_scale=each)
        asked = dict(mean_logit=True, expected_logit=True, argmax=True, sum_p_squared=True, selected=ids)
        found = parallel_lce.token_statistics(*given, target, logits_budget=budget, **asked, **options)
        total = found.entropy + found.mean_logit + found.sum_p_squared + found.target_logit
        (total + found.selected_log_prob.sum(1)).sum().backward()
    else:
        for gradient_filter in (None, 0.001):
            filtered = dict(reduction="none", logits_budget=budget, gradient_filter=gradient_filter)
            parallel_lce.linear_cross_entropy(*given, target, **filtered).sum().backward()
    for selected in (ids, sets):
        parallel_lce.selected_log_probs(*given, selected, **options).sum().backward()
    plain = False
    parallel_lce.token_statistics(*given, None, logits_budget=budget, sample_seed=0, **options)
    for beta in (0.0, 0.5, 1.0):
        divergence(*given, *(v.detach() for v in given), beta=beta).backward()


def small(tokens: int, every_option: bool, group: dist.ProcessGroup | None) -> None:
    """Losses of dense logits, and of logits that exist; log-probabilities of sets."""
    target, options = torch.zeros(tokens, dtype=torch.int64), {}
    x, weight = operands(tokens, 304, 64, torch.bfloat16)
    if every_option:
        options |= dict(label_smoothing=0.1, logit_softcap=5.0, logit_scale=torch.ones(tokens))
    with mock.patch.object(backend, "DENSE_FLOPS", 1e30):
        for reduction in ("none", "mean"):
            options |= dict(reduction=reduction, process_group=group)
            parallel_lce.linear_cross_entropy(x, weight, target, **options).sum().backward()
    logits = torch.randn(tokens, 300).bfloat16().requires_grad_()
    parallel_lce.vocab_parallel_cross_entropy(logits, target, 0.1 * every_option, tp_group=group).sum().backward()
    sets = target.repeat(3), torch.arange(tokens + 1) * 3
    parallel_lce.selected_log_probs(x, weight, sets, process_group=group).sum().backward()
    parallel_lce.token_statistics(x, weight, None, sample_seed=0, process_group=group)


for arguments in CALLS[2:4] if FEW else CALLS:
    with shrunk(2 * arguments[0] * 256):
        call(*arguments, torch.bfloat16)
for arguments in () if FEW else CALLS[1:3]:
    call(*arguments, torch.float16)
for ranks, tokens in ((2, 1), (8, 300))[FEW:]:
    for columns in (Columns(), Columns(*[True] * len(dataclasses.fields(Columns)))):
        plain, size = columns == Columns(), columns.count * tokens + 2
        partials.merge_ranks(torch.ones(ranks, size), columns, tokens, None if plain else 77)
plain = False
dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=2)
for tokens in (1, 5)[FEW:]:
    for group in (dist.new_group([0]), dist.group.WORLD):
        for every_option in (False, True):
            small(tokens, every_option, group)
json.dump({"triton": triton.__version__, "kernels": compiled}, sys.stdout)
