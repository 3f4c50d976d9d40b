"""Bad input is refused before any kernel or collective, with both sizes named."""

from __future__ import annotations

import fractions
import re

import numpy as np
import pytest
import torch
import torch.distributed as dist
from torch.utils._pytree import tree_map

import parallel_lce
from blocks import counted_forwards
from parallel_lce.backends import backend_of
from parallel_lce.core.grad_buffers import MainGrad
from parallel_lce.distillation import divergence, top_k_divergence
from parallel_lce.run.fused_loss import fused_loss
from tools import D, N, V, call, everywhere, given, good, recorded
from world import Member


class _FakeDTensor(torch.Tensor):
    def to_local(self):
        return self


def _dtensor():
    return torch.zeros(V, D).as_subclass(_FakeDTensor)


def meta(*shape, dtype=torch.float32):
    return torch.zeros(shape, dtype=dtype, device="meta")


NAN, INF, HUGE = float("nan"), float("inf"), 10**400
MESH = type("DeviceMesh", (), {"get_group": None})()
# What is said of each of these changes.
BAD_OPTIONS = {
    "reduction must be 'none', 'mean' or 'sum', got ('average'|None)": [
        dict(reduction="average"),
        dict(reduction=None),
    ],
    "ignore_index must be an integer of 64 bits or None, got": [dict(ignore_index=i) for i in (2**70, True, 0.5)],
    r"label_smoothing must be a Python number in \[0, 1\], got": [dict(label_smoothing=e) for e in (1.5, -0.1, NAN)],
    "z_loss must be a finite Python number, got": [
        dict(z_loss=z) for z in (INF, np.float32("nan"), np.bool_(True), fractions.Fraction(HUGE), "0.1", [0.1])
    ],
    r"must be a finite Python number, got -?1000.*\(40[12] characters\)": [dict(z_loss=-HUGE), dict(logit_scale=HUGE)],
    "logit_scale must be a finite Python number, got": [dict(logit_scale=v) for v in (1e39, NAN, "x")],
    "logit_softcap must be None or a positive Python number, got": [
        dict(logit_softcap=cap) for cap in (1e-60, 1e300, 0.0, -3.0, INF)
    ],
    "temperature must be a number > 0, .* got": [dict(temperature=t) for t in (0.0, -1, NAN, None)],
    "logit_scale=.* and logit_softcap=.* divided by temperature=.* are beyond fp32": [
        dict(logit_scale=1e30, temperature=1e-30),
        dict(logit_softcap=1e-30, temperature=1e30),
    ],
    "logits_budget must be None or a number of bytes >= 0, got": [dict(logits_budget=b) for b in (-1, 1e9)],
    "vocab_start must be None or an id >= 0 and < 2.31, got": [dict(vocab_start=s) for s in (-1, 2**31)],
    "vocab_size must be None or a number of entries >= 1 and < 2.31, got": [dict(vocab_size=v) for v in (0, 2**31)],
    "process_group must be a torch.distributed.ProcessGroup or None, got str": [dict(process_group="tp")],
    r"process_group must be .* got DeviceMesh: pass its get_group\(\)": [dict(process_group=MESH)],
    "sequence_parallel must be True or False, got": [dict(sequence_parallel=yes) for yes in ("no", None, 2, 1.0)],
    "reduce_hidden_grad must be .* got 'no'": [dict(reduce_hidden_grad="no")],
    "reduce_hidden_grad=False cannot be combined with sequence_parallel=True: .* with sequence_parallel=False": [
        dict(reduce_hidden_grad=False, sequence_parallel=True)
    ],
    "reduce_dtype must be None, torch.float32 or the input's (dtype|torch.float32), got": [
        dict(reduce_dtype=dtype) for dtype in (torch.int32, "float32")
    ],
}
BAD_TENSORS = {
    "input must be a tensor, got list": [dict(input=[1.0])],
    r"input must be \[..., D\], got \[\]": [dict(input=torch.tensor(1.0))],
    "input must be bfloat16, float16, float32 or float64, got torch.int64": [dict(input=torch.ones(N, D).long())],
    r"input has 5 features and linear_weight \[10, 4\] has 4": [dict(input=torch.zeros(N, 5))],
    "input must be a dense tensor, got one of layout torch.sparse_coo": [dict(input=torch.zeros(N, D).to_sparse())],
    "linear_weight must be a tensor, got NoneType": [dict(linear_weight=None)],
    r"linear_weight must be \[V, D\] with two dimensions, got \[10, 1, 4\]": [dict(linear_weight=torch.zeros(V, 1, D))],
    "linear_weight is torch.bfloat16 and input is torch.float32": [dict(linear_weight=torch.zeros(V, D).bfloat16())],
    "linear_weight is on meta and input is on cpu": [dict(linear_weight=meta(V, D))],
    r"linear_weight is a DTensor; pass linear_weight.to_local\(\)": [dict(linear_weight=_dtensor())],
    r"linear_weight \[0, 4\] has no rows: the vocabulary is empty": [dict(linear_weight=torch.zeros(0, D))],
    "target must be a tensor.*, got (list|NoneType)": [dict(target=[1, 2]), dict(target=None)],
    r"target must have shape \[6\] for input \[6, 4\], got \[(7|6, 1)\]": [
        dict(target=torch.zeros(7).long()),
        dict(target=torch.zeros(N, 1).long()),
    ],
    "target must hold class indices of an integer dtype, got torch.(float32|bool) .*probabilities are not": [
        dict(target=torch.zeros(N)),
        dict(target=torch.zeros(N, V)),
        dict(target=torch.zeros(N).bool()),
    ],
    "target is on meta and input is on cpu": [dict(target=meta(N, dtype=torch.int64))],
    r"linear_bias must have shape \[10\].* linear_weight \[10, 4\], got \[(9|10, 1)\]": [
        dict(linear_bias=torch.zeros(9)),
        dict(linear_bias=torch.zeros(V, 1)),
    ],
    "linear_bias is torch.float64 and input is torch.float32": [dict(linear_bias=torch.zeros(V).double())],
    "linear_bias must be a tensor or None, got float": [dict(linear_bias=0.0)],
    "linear_bias is on meta and input is on cpu": [dict(linear_bias=meta(V))],
    r"token_weight must have target's shape \[6\], got \[5\]": [dict(token_weight=torch.zeros(5))],
    "token_weight must be a tensor or None, got list": [dict(token_weight=[1.0] * N)],
    "token_weight must be real, got torch.complex64": [dict(token_weight=torch.zeros(N, dtype=torch.complex64))],
    "token_weight is on meta and input is on cpu": [dict(token_weight=meta(N))],
    "logit_scale must be floating-point, got torch.int64": [dict(logit_scale=torch.ones(N).long())],
    r"logit_scale requires a gradient, and none flows to it: pass logit_scale.detach\(\)": [
        dict(logit_scale=torch.zeros(N, requires_grad=True))
    ],
    r"logit_scale must be .* a tensor of target's shape \[6\], got one of shape \[5?\]": [
        dict(logit_scale=torch.zeros(5)),
        dict(logit_scale=torch.ones(())),
    ],
    r"temperature must be .* target's shape \[6\], got one of shape \[7\]": [dict(temperature=torch.ones(N + 1))],
    "temperature must be floating-point": [dict(temperature=torch.ones(N).int())],
    "pass temperature.detach()": [dict(temperature=torch.ones(N).requires_grad_())],
    r"vocab_start=3 without a process group .* \[0, 3\)": [dict(vocab_start=3)],
    "vocab_size=11 exceeds the 10 rows of linear_weight on 1 rank": [
        dict(vocab_size=11),
        dict(vocab_size=11, vocab_start=0),
    ],
    "weight=.* is not supported: use token_weight": [dict(weight=torch.ones(V))],
    "options=.* is not supported: .*logits_budget": [dict(options=object())],
    "reduce_dtype must be .*the input's torch.float32, got torch": [
        dict(reduce_dtype=dtype) for dtype in (torch.bfloat16, torch.float16, torch.float64)
    ],
    "(sequence_parallel|z_loss) must be .*, got tensor": [
        dict(sequence_parallel=torch.tensor(False)),
        dict(z_loss=torch.tensor(1.0)),
    ],
}
_LOSS_ONLY = {"reduction", "ignore_index", "label_smoothing", "z_loss", "token_weight", "weight", "options"}


@pytest.mark.parametrize("message", [*BAD_OPTIONS, *BAD_TENSORS])
def test_refused(message):
    for changes in (BAD_OPTIONS | BAD_TENSORS)[message]:
        with pytest.raises(ValueError, match=message):
            call(good() | changes)
        if not _LOSS_ONLY & set(changes) and changes.get("target", 0) is not None:
            with pytest.raises(ValueError, match=message):
                call(good() | changes, parallel_lce.token_statistics)
        if message in BAD_OPTIONS:  # when it is made
            with pytest.raises(ValueError, match=message):
                parallel_lce.LinearCrossEntropy(**changes)


class _Wrapper(torch.Tensor):
    """As a quantized tensor it has no memory of its own: each operation asks it."""

    @staticmethod
    def __new__(cls, held):
        return torch.Tensor._make_wrapper_subclass(cls, held.shape, dtype=held.dtype, device=held.device)

    def __init__(self, held):
        self.held = held

    __torch_function__ = torch._C._disabled_torch_function_impl

    @classmethod
    def __torch_dispatch__(cls, function, types, args=(), kwargs=None):
        held = lambda t: t.held if isinstance(t, cls) else t  # noqa: E731
        result = function(*tree_map(held, args), **tree_map(held, kwargs or {}))
        return tree_map(lambda t: cls(t) if isinstance(t, torch.Tensor) else t, result)


@pytest.mark.parametrize("name", ["input", "linear_weight", "linear_bias", "token_weight"])
def test_tensors_that_are_none_in_memory_are_refused(name, backend, device):
    tensors = good(device) | {n: torch.zeros(s, device=device) for n, s in (("linear_bias", V), ("token_weight", N))}
    said = f"{name} is a _Wrapper.*__torch_dispatch__.*plain tensor"
    with pytest.raises(ValueError, match=said):
        call(tensors | {name: _Wrapper(tensors[name])})
    if name == "input":
        logits = _Wrapper(torch.zeros(N, V, device=device))
        with pytest.raises(ValueError, match=said.replace(name, "vocab_parallel_logits")):
            parallel_lce.vocab_parallel_cross_entropy(logits, tensors["target"])


def test_an_upstream_gradient_that_is_none_in_memory(backend, device):
    """Its own operations compute with it, or words refuse it."""
    tensors = good(device)
    leaves = [tensors[name].requires_grad_() for name in ("input", "linear_weight")]
    losses, want = (call(tensors | dict(reduction="none")) for _ in range(2))
    upstream = torch.rand(N, device=device)
    try:
        found = torch.autograd.grad(losses, leaves, _Wrapper(upstream))
    except ValueError as refusal:
        assert backend == "triton" and "no kernel can read a _Wrapper" in str(refusal)
    else:
        for a, b in zip(found, torch.autograd.grad(want, leaves, upstream)):
            assert torch.equal(getattr(a, "held", a), b)


def test_a_typo_is_a_type_error():
    with pytest.raises(TypeError, match="unexpected keyword argument 'label_smothing'"):
        call(good() | dict(label_smothing=0.1))
    with pytest.raises(TypeError, match="label_smothing"):  # before anything is said of the tensors
        call(good() | dict(input=None, label_smothing=0.1))
    with pytest.raises(TypeError, match="unexpected keyword argument 'reduction'$"):
        call(good() | dict(reduction="mean"), parallel_lce.token_statistics)


@pytest.mark.parametrize(
    ("function", "given", "meant"),
    [
        (parallel_lce.linear_cross_entropy, "bias", "linear_bias"),
        (parallel_lce.linear_cross_entropy, "label_smothing", "label_smoothing"),
        (parallel_lce.token_statistics, "softcap", "logit_softcap"),
        (parallel_lce.token_statistics, "weight", "linear_weight"),
        (parallel_lce.selected_log_probs, "group", "process_group"),
        (parallel_lce.LinearCrossEntropy, "tp_group", "process_group"),
        (divergence, "bias", "student_bias or teacher_bias"),
        (top_k_divergence, "temprature", "temperature"),
    ],
)
def test_a_keyword_that_may_be_meant(function, given, meant):
    positional = [] if function is parallel_lce.LinearCrossEntropy else [*good().values()]
    positional += [None] * ("divergence" in function.__name__)
    words = rf"^{function.__name__}\(\) got an unexpected keyword argument '{given}': did you mean {meant}\?$"
    with pytest.raises(TypeError, match=words):
        function(*positional, **{given: None})


def _said(arguments: dict) -> str:
    try:
        call(arguments)
    except Exception as refusal:
        return f"{type(refusal).__name__}: {refusal}"
    return "not refused"


def _refused_over_ranks(member: Member):
    """What is said of arguments that are wrong on every rank; nobody reaches a collective."""
    P = member.ranks
    whole = torch.zeros(N * P, dtype=torch.int64, device=member.device)
    scalar = torch.zeros(D, device=member.device), whole[0]
    arguments = good(member.device) | dict(process_group=member.group)
    cases = {
        rf"target must have shape \[{N * P}\] for input \[6, 4\] of each of {P} sequence-parallel ranks, got \[6\]": {},
        rf"token_weight must have target's shape \[{N * P}\], got \[6\]": dict(target=whole, token_weight=whole[:N]),
        "sequence_parallel must be True or False, got 'no'": dict(sequence_parallel="no"),
        rf"vocab_size={10 * P + 1} exceeds the {10 * P} rows .* {P} rank": dict(target=whole, vocab_size=10 * P + 1),
        r"sequence_parallel.*\[4\]|input.*\[4\]": dict(zip(("input", "target"), scalar)),
    }
    found = {message: _said(arguments | dict(sequence_parallel=True) | changes) for message, changes in cases.items()}
    outside = dist.new_group([0])
    return found, _said(arguments | dict(process_group=outside)) if member.rank else "ValueError: process_group"


def test_refused_over_ranks(worlds, device):
    for found, of_no_member in worlds(2).run(_refused_over_ranks):
        for message, said in found.items():
            assert re.search(f"^ValueError: .*{message}.*PARALLEL_LCE_DEBUG=1", said, re.DOTALL), said
        assert re.search("^ValueError: .*process_group", of_no_member), of_no_member


def _main_grad_of_another_shape(member: Member, shape: tuple[int, ...]):
    """What is said, and what has been started by then."""
    tensors = good(member.device)
    tensors["linear_weight"].requires_grad_()
    options, inputs = given(**tensors, reduction="none")
    main_grad = MainGrad(torch.zeros(shape, device=member.device), lambda: None)
    said = ""
    with recorded(member.group) as events, counted_forwards(backend_of(tensors["linear_weight"])) as blocks:
        try:
            fused_loss(options, inputs, member.group, main_grad=main_grad)
        except ValueError as refusal:
            said = str(refusal)
    return said, events, blocks


@pytest.mark.parametrize("ranks", [1, 2])
@pytest.mark.parametrize("shape", [(V, D + 1), (V + 1, D), (D, V), (V * D,)], ids=str)
def test_a_main_grad_of_another_shape_is_refused(shape, ranks, worlds, device):
    """Of the weight that it is the gradient of: before any kernel and any collective."""
    message = f"main_grad must have linear_weight's shape {[V, D]}, got {[*shape]}"
    for said, events, blocks in everywhere(worlds, device, ranks, _main_grad_of_another_shape, shape):
        assert said.startswith(message)
        assert events == [] and blocks == []
