"""Compile, without a GPU, every kernel that calls of the triton backend launch on one: as a program,
``compile_kernels.py CAPABILITY [few]``, since Triton must not be in its interpreter's mode; ``few`` compiles
each kernel for some calls. Prints, in JSON, the version of Triton, which PYTHONPATH may choose, and what
each kernel takes: bytes of stack, which are registers spilled, and of shared memory. ``plain``: without
bias, soft-cap, logits that are stored, and statistics beside those of the loss. ``code``: a hash of its
machine code.

Triton makes a number of an argument that is 1, and a kernel of its own for it, which no interpreter
shows: hence one token, one window, one block.
"""

from __future__ import annotations

import dataclasses
import hashlib
import json
import os
import re
import subprocess
import sys
import tempfile
from types import SimpleNamespace

import torch
import triton
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

from blocks import block_backward, block_forward
from parallel_lce.backends import triton as backend
from parallel_lce.backends import triton_filter
from parallel_lce.backends.interface import (
    Coefficients,
    GradBuffers,
    Projection,
    Scratch,
    SelectedGradient,
    SelectedLogits,
    Selection,
)
from parallel_lce.core.grad_buffers import GradBuffer
from parallel_lce.core.options import Options
from parallel_lce.core.partials import Columns, packed_size
from parallel_lce.kernels import dense_logits, losses, partials, projection, selected, tuning
from parallel_lce.kernels.filter import windows

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


def call(rows, entries, depth, saved, everything, dtype):
    global plain
    plain = not everything
    x, weight = torch.randn(rows, depth).to(dtype), torch.randn(entries, depth).to(dtype)
    bias = torch.zeros(entries, dtype=dtype) if everything else None
    softcap, token_scale = (5.0, torch.ones(rows)) if everything else (None, None)
    softcap = token_scale if everything == "each" else softcap
    shape = Projection(weight, bias, 0, entries, 0.7 if everything else 1.0, softcap, token_scale)
    target = torch.zeros(rows, dtype=torch.int64)
    columns = Columns(*[bool(everything)] * len(dataclasses.fields(Columns)))
    ids, begin = torch.zeros(3 * rows, dtype=torch.int64), torch.arange(rows) * 3
    selection, logits = Selection(ids, begin, begin + 3), torch.ones(3 * rows)
    wanted = SelectedLogits(selection, logits) if everything else None
    given = shape, x, target, columns, saved
    partial, exponentials = block_forward(backend, *given, keep_windows=not everything, selected=wanted)
    ones = torch.ones(rows)
    more = ones if everything else None
    coefficients = Coefficients(ones, ones, more, more, more)
    backend.selected_logits(shape, x, selection, logits)
    plain = False
    backend.block_logits(shape, x)
    plain = not everything
    gradient = SelectedGradient(selection, logits, logits)
    backend.selected_hidden_gradient(weight, gradient, torch.empty_like(x))
    backend.selected_weight_gradient(x, begin.repeat_interleave(3) // 3, gradient, torch.empty_like(weight), bias)
    of_bias = None if bias is None else GradBuffer(bias, entries, 1)
    grads = GradBuffers(torch.empty_like(x), GradBuffer(weight, entries, 1), of_bias)
    others = shape, x, target, torch.ones_like(partial), coefficients
    for gradient_filter in (None,) if everything else (None, 0.001):
        selected = gradient if everything else None
        options = dict(selected=selected, gradient_filter=gradient_filter)
        block_backward(backend, *others, exponentials, grads, Scratch(1 << 20), **options)


for arguments in CALLS[2:4] if FEW else CALLS:
    call(*arguments, torch.bfloat16)
for arguments in () if FEW else CALLS[1:3]:
    call(*arguments, torch.float16)
for ranks, tokens in ((2, 1), (8, 300))[FEW:]:
    for columns in (Columns(), Columns(*[True] * len(dataclasses.fields(Columns)))):
        plain, size = columns == Columns(), packed_size(columns, tokens)
        partials.merge_ranks(torch.ones(ranks, size), columns, tokens, None if plain else 77)
for tokens in (1, 5)[FEW:]:
    packed, offsets = torch.ones(2, 3 * tokens), torch.arange(tokens + 1) * 3
    ids = torch.zeros(3 * tokens, dtype=torch.int64)
    log_probs, _ = selected.set_log_probs(packed, ids, offsets, None, 7)
    selected.set_log_probs(packed, ids, offsets, offsets[0] > 0, offsets[0])
    selected.set_gradient(log_probs, packed[0], offsets)
logits, target = torch.randn(5, 300).bfloat16(), torch.zeros(5, dtype=torch.int64)
ones = torch.ones(5)
for some in (1, 5)[FEW:]:
    for vocab_size in (ones[0].long(), 300):
        partial = ones[:some].expand(3, -1).contiguous()
        losses.token_losses(partial, vocab_size, target[:some], None, Options("", ignore_index=-100))
    losses.mean_loss(ones[:some], target[:some], None, -100)
    backend.logits_partial(logits[:some], target[:some], True, torch.ones(4, some))
    backend.logits_gradient(logits[:some], target[:some], torch.ones(3, some), torch.ones(3, some))
    for all_options in (False, True):
        options = Options("", reduction="none", ignore_index=-100, label_smoothing=0.1 * all_options)
        dense = backend.Dense(some, 304, options, 1.0, 5.0 if all_options else None, all_options, False)
        products, scales = torch.ones(some, 304), ones[:some] if all_options else None
        dense.partial(products, torch.ones(4, some), (target[:some], None, None, scales, None))
        _, found = dense.losses(products, (target[:some], scales, None, scales, None))
        for factor in (ones[0], ones[:some]):
            dense.gradient(
                products, found, factor, ones[0] if all_options else None, (target[:some], None, scales, None)
            )
    both = torch.ones(2, some, 300), torch.ones(2, 2, some)
    for beta in (0.0, 0.5, 1.0):
        found, wanted = torch.empty(2, some), (torch.empty(some, 300).bfloat16(), ones[:some], ones[:some])
        dense_logits.divergence(*both[0], *both[1], beta, found, *wanted)
        dense_logits.divergence(*both[0], *both[1], beta, found, None, None, None)
        dense_logits.divergence(*both[0], *both[1], beta, None, *wanted)
json.dump({"triton": triton.__version__, "kernels": compiled}, sys.stdout)
