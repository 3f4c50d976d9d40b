"""Bad input is refused before any kernel or collective, with both sizes named."""

from __future__ import annotations

import re

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


# What is changed, and what the message must say.
BAD = {
    "input no tensor": (dict(input=[1.0]), "input must be a tensor, got list"),
    "input of no dimension": (dict(input=torch.tensor(1.0)), r"input must be \[..., D\], got \[\]"),
    "input of integers": (
        dict(input=torch.zeros(N, D, dtype=torch.int64)),
        "input must be bfloat16, float16, float32 or float64, got torch.int64",
    ),
    "input features": (dict(input=torch.zeros(N, 5)), r"input has 5 features and linear_weight \[10, 4\] has 4"),
    "weight no tensor": (dict(linear_weight=None), "linear_weight must be a tensor, got NoneType"),
    "weight of one dimension": (
        dict(linear_weight=torch.zeros(D)),
        r"linear_weight must be \[V, D\] with two dimensions, got \[4\]",
    ),
    "weight of three dimensions": (
        dict(linear_weight=torch.zeros(V, 1, D)),
        r"linear_weight must be .* got \[10, 1, 4\]",
    ),
    "weight dtype": (
        dict(linear_weight=torch.zeros(V, D, dtype=torch.bfloat16)),
        "linear_weight is torch.bfloat16 and input is torch.float32",
    ),
    "weight device": (
        dict(linear_weight=torch.zeros(V, D, device="meta")),
        "linear_weight is on meta and input is on cpu",
    ),
    "weight is a DTensor": (
        dict(linear_weight=_dtensor()),
        r"linear_weight is a DTensor; pass linear_weight.to_local\(\)",
    ),
    "target no tensor": (dict(target=[1, 2]), "target must be a tensor.*, got list"),
    "target None": (dict(target=None), "target must be a tensor.*, got NoneType"),
    "target length": (
        dict(target=torch.zeros(7, dtype=torch.int64)),
        r"target must have shape \[6\] for input \[6, 4\], got \[7\]",
    ),
    "target rank": (
        dict(target=torch.zeros(N, 1, dtype=torch.int64)),
        r"target must have shape \[6\] for input \[6, 4\], got \[6, 1\]",
    ),
    "target of probabilities": (
        dict(target=torch.zeros(N, V)),
        r"target must have shape \[6\].*got \[6, 10\]|integer dtype, got torch.float32",
    ),
    "target of floats": (
        dict(target=torch.zeros(N)),
        "target must hold class indices of an integer dtype, got torch.float32 .*probabilities are not supported",
    ),
    "target of booleans": (
        dict(target=torch.zeros(N, dtype=torch.bool)),
        "target must hold class indices .* got torch.bool",
    ),
    "target device": (
        dict(target=torch.zeros(N, dtype=torch.int64, device="meta")),
        "target is on meta and input is on cpu",
    ),
    "bias length": (
        dict(linear_bias=torch.zeros(9)),
        r"linear_bias must have shape \[10\].* linear_weight \[10, 4\], got \[9\]",
    ),
    "bias rank": (dict(linear_bias=torch.zeros(V, 1)), r"linear_bias must have shape \[10\].* got \[10, 1\]"),
    "bias dtype": (
        dict(linear_bias=torch.zeros(V, dtype=torch.float64)),
        "linear_bias is torch.float64 and input is torch.float32",
    ),
    "bias no tensor": (dict(linear_bias=0.0), "linear_bias must be a tensor or None, got float"),
    "bias device": (dict(linear_bias=torch.zeros(V, device="meta")), "linear_bias is on meta and input is on cpu"),
    "token_weight length": (
        dict(token_weight=torch.zeros(5)),
        r"token_weight must have target's shape \[6\], got \[5\]",
    ),
    "token_weight no tensor": (dict(token_weight=[1.0] * N), "token_weight must be a tensor or None, got list"),
    "token_weight complex": (
        dict(token_weight=torch.zeros(N, dtype=torch.complex64)),
        "token_weight must be real, got torch.complex64",
    ),
    "token_weight device": (
        dict(token_weight=torch.zeros(N, device="meta")),
        "token_weight is on meta and input is on cpu",
    ),
    "reduction": (dict(reduction="average"), "reduction must be 'none', 'mean' or 'sum', got 'average'"),
    "reduction None": (dict(reduction=None), "reduction must be .* got None"),
    "input is sparse": (
        dict(input=torch.zeros(N, D).to_sparse()),
        "input must be a dense tensor, got one of layout torch.sparse_coo",
    ),
    "weight of no rows": (
        dict(linear_weight=torch.zeros(0, D)),
        r"linear_weight \[0, 4\] has no rows: the vocabulary is empty",
    ),
    "ignore_index of 70 bits": (
        dict(ignore_index=2**70),
        "ignore_index must be an integer of 64 bits or None, got 1180591620717411303424",
    ),
    "ignore_index a bool": (dict(ignore_index=True), "ignore_index must be an integer of 64 bits or None, got True"),
    "scale of 400 digits": (
        dict(logit_scale=10**400),
        r"logit_scale must be a finite Python number, got 1000.*\(401 characters\)",
    ),
    "scale beyond fp32": (dict(logit_scale=1e39), "logit_scale must be a finite Python number, got 1e.39"),
    "softcap that fp32 cannot hold": (
        dict(logit_softcap=1e-60),
        "logit_softcap must be None or a positive Python number, got 1e-60",
    ),
    "softcap beyond fp32": (
        dict(logit_softcap=1e300),
        "logit_softcap must be None or a positive Python number, got 1e.300",
    ),
    "z_loss beyond fp32": (
        dict(z_loss=-(10**400)),
        r"z_loss must be a finite Python number, got -1000.*\(402 characters\)",
    ),
    "start beyond 32 bits": (
        dict(vocab_start=2**31),
        "vocab_start must be None or an id >= 0 and < 2.31, got 2147483648",
    ),
    "vocab_size beyond 32 bits": (
        dict(vocab_size=2**31),
        "vocab_size must be None or a number of entries >= 1 and < 2.31, got 2147483648",
    ),
    "ignore_index float": (dict(ignore_index=0.5), "ignore_index must be an integer of 64 bits or None, got 0.5"),
    "smoothing too large": (dict(label_smoothing=1.5), r"label_smoothing must be a Python number in \[0, 1\], got 1.5"),
    "smoothing negative": (dict(label_smoothing=-0.1), r"label_smoothing must be .* got -0.1"),
    "smoothing NaN": (dict(label_smoothing=float("nan")), "label_smoothing must be .* got nan"),
    "z_loss infinite": (dict(z_loss=float("inf")), "z_loss must be a finite Python number, got inf"),
    "z_loss a tensor": (dict(z_loss=torch.tensor(1.0)), r"z_loss must be a finite Python number, got tensor\(1.\)"),
    "scale NaN": (dict(logit_scale=float("nan")), "logit_scale must be a finite Python number, got nan"),
    "scale of integers": (
        dict(logit_scale=torch.zeros(N, dtype=torch.int64)),
        "logit_scale must be floating-point, got torch.int64",
    ),
    "scale that needs a gradient": (
        dict(logit_scale=torch.zeros(N, requires_grad=True)),
        r"logit_scale requires a gradient, and none flows to it: pass logit_scale.detach\(\)",
    ),
    "scale of another length": (
        dict(logit_scale=torch.zeros(5)),
        r"a tensor of target's shape \[6\], got one of shape \[5\]",
    ),
    "scale a tensor": (
        dict(logit_scale=torch.ones(())),
        r"logit_scale must be a finite Python number, or a tensor of target's shape \[\d+\], got one of shape \[\]",
    ),
    "softcap zero": (dict(logit_softcap=0.0), "logit_softcap must be None or a positive Python number, got 0.0"),
    "softcap negative": (dict(logit_softcap=-3.0), "logit_softcap must be .* got -3.0"),
    "softcap infinite": (dict(logit_softcap=float("inf")), "logit_softcap must be .* got inf"),
    "budget negative": (dict(logits_budget=-1), "logits_budget must be None or a number of bytes >= 0, got -1"),
    "budget float": (dict(logits_budget=1e9), "logits_budget must be .* got 1000000000.0"),
    "start negative": (dict(vocab_start=-1), "vocab_start must be None or an id >= 0 and < 2.31, got -1"),
    "start without a group": (dict(vocab_start=3), r"vocab_start=3 without a process group .* \[0, 3\)"),
    "vocab_size zero": (dict(vocab_size=0), "vocab_size must be None or a number of entries >= 1 and < 2.31, got 0"),
    "vocab_size beyond the rows": (dict(vocab_size=11), "vocab_size=11 exceeds the 10 rows of linear_weight on 1 rank"),
    "vocab_size beyond the rows from 0": (dict(vocab_size=11, vocab_start=0), "vocab_size=11 exceeds the 10 rows"),
    "no process group": (
        dict(process_group="tp"),
        "process_group must be a torch.distributed.ProcessGroup or None, got str",
    ),
    "sequence_parallel a text": (dict(sequence_parallel="no"), "sequence_parallel must be True or False, got 'no'"),
    "sequence_parallel None": (dict(sequence_parallel=None), "sequence_parallel must be True or False, got None"),
    "sequence_parallel a tensor": (
        dict(sequence_parallel=torch.tensor(False)),
        r"sequence_parallel must be True or False, got tensor\(False\)",
    ),
    "sequence_parallel a number of ranks": (
        dict(sequence_parallel=2),
        "sequence_parallel must be True or False, got 2",
    ),
    "sequence_parallel a float": (dict(sequence_parallel=1.0), "sequence_parallel must be True or False, got 1.0"),
    "reduce_hidden_grad no truth value": (dict(reduce_hidden_grad="no"), "reduce_hidden_grad must be .* got 'no'"),
    "an unreduced gradient of a part": (
        dict(reduce_hidden_grad=False, sequence_parallel=True),
        "reduce_hidden_grad=False cannot be combined with sequence_parallel=True: .* with sequence_parallel=False",
    ),
    "temperature zero": (dict(temperature=0.0), "temperature must be a number > 0, .* got 0.0"),
    "temperature negative": (dict(temperature=-1), "temperature must be a number > 0, .* got -1"),
    "temperature NaN": (dict(temperature=float("nan")), "temperature must be a number > 0, .* got nan"),
    "temperature None": (dict(temperature=None), "temperature must be a number > 0, .* got None"),
    "temperature of another shape": (
        dict(temperature=torch.ones(N + 1)),
        r"temperature must be .* target's shape \[6\], got one of shape \[7\]",
    ),
    "temperature of integers": (dict(temperature=torch.ones(N).int()), "temperature must be floating-point"),
    "temperature that learns": (dict(temperature=torch.ones(N).requires_grad_()), "pass temperature.detach()"),
    "scale over temperature": (
        dict(logit_scale=1e30, temperature=1e-30),
        "logit_scale=1e.30 and logit_softcap=None divided by temperature=1e-30 are beyond fp32",
    ),
    "softcap over temperature": (
        dict(logit_softcap=1e-30, temperature=1e30),
        "divided by temperature=1e.30 are beyond",
    ),
    "a mesh for a group": (
        dict(process_group=type("DeviceMesh", (), {"get_group": None})()),
        r"process_group must be .* got DeviceMesh: pass its get_group\(\)",
    ),
    "weight of PyTorch's function": (dict(weight=torch.ones(V)), "weight=.* is not supported: use token_weight"),
    "options of PyTorch's function": (dict(options=object()), "options=.* is not supported: .*logits_budget"),
}
_LOSS_ONLY = {"reduction", "ignore_index", "label_smoothing", "z_loss", "token_weight", "weight", "options"}


@pytest.mark.parametrize("name", BAD)
def test_refused(name):
    changes, message = BAD[name]
    with pytest.raises(ValueError, match=message):
        call(good() | changes)
    shared = not _LOSS_ONLY & set(changes) and changes.get("target", 0) is not None
    if shared:
        with pytest.raises(ValueError, match=message):
            call(good() | changes, parallel_lce.token_statistics)


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


def _refused_over_ranks(member: Member):
    """Arguments that are wrong on every rank; nobody reaches a collective."""
    device = member.device
    group = dict(process_group=member.group)
    cases = {
        "sequence parallel target": (
            dict(sequence_parallel=True),
            rf"target must have shape \[{N * member.ranks}\] for input \[6, 4\] of each of "
            rf"{member.ranks} sequence-parallel ranks, got \[6\]",
        ),
        "sequence parallel token_weight": (
            dict(
                sequence_parallel=True,
                target=torch.zeros(N * member.ranks, dtype=torch.int64, device=device),
                token_weight=torch.zeros(N, device=device),
            ),
            rf"token_weight must have target's shape \[{N * member.ranks}\], got \[6\]",
        ),
        "sequence_parallel": (dict(sequence_parallel="no"), "sequence_parallel must be True or False, got 'no'"),
        "vocab_size": (
            dict(vocab_size=10 * member.ranks + 1),
            rf"vocab_size={10 * member.ranks + 1} exceeds the {10 * member.ranks} rows .* {member.ranks} rank",
        ),
        "sequence parallel scalar": (
            dict(sequence_parallel=True, input=torch.zeros(D, device=device), target=torch.tensor(0, device=device)),
            r"sequence_parallel.*\[4\]|input.*\[4\]",
        ),
    }
    found = {}
    for name, (changes, message) in cases.items():
        try:
            call(good(device) | group | changes)
            found[name] = "not refused"
        except ValueError as refusal:
            said = str(refusal)
            good_message = re.search(message, said) and "PARALLEL_LCE_DEBUG=1" in said
            found[name] = "" if good_message else said
        except Exception as other:
            found[name] = f"{type(other).__name__}: {other}"
    # Not a member: a group of rank 0 alone.
    subgroup = dist.new_group([0])
    if member.rank == 1:
        try:
            call(good(device) | dict(process_group=subgroup))
            found["not a member"] = "not refused"
        except ValueError as refusal:
            found["not a member"] = "" if re.search("process_group", str(refusal)) else str(refusal)
        except Exception as other:
            found["not a member"] = f"{type(other).__name__}: {other}"
    return found


def test_refused_over_ranks(worlds, device):
    for rank, found in enumerate(worlds(2).run(_refused_over_ranks)):
        wrong = {name: said for name, said in found.items() if said}
        assert not wrong, f"rank {rank}: {wrong}"


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
