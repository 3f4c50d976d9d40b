"""Numbers of other libraries, and what users do with the module: copies and pickles."""

from __future__ import annotations

import copy
import fractions
import io
import pickle

import numpy as np
import pytest
import torch

import parallel_lce
from parallel_lce.core import options
from tools import call, everywhere, good
from world import Member

NUMBERS = {
    "ignore_index": (np.int64(3), 3),
    "label_smoothing": (np.float32(0.125), 0.125),
    "z_loss": (fractions.Fraction(1, 8), 0.125),
    "logit_scale": (np.float16(0.5), 0.5),
    "logit_softcap": (np.float64(5.0), 5.0),
    "temperature": (np.int32(2), 2.0),
    "reduce_hidden_grad": (np.bool_(False), False),
    "logits_budget": (np.int32(0), 0),
    "vocab_size": (np.uint8(9), 9),
    "vocab_start": (np.int16(0), 0),
}
# Of more digits than a number of 64 bits.
LONG = [(name, (10**20, 1e20)) for name in ("z_loss", "logit_scale", "logit_softcap", "temperature")]


def problem(device) -> dict:
    arguments = good(device)
    arguments["target"] %= 9
    arguments["linear_weight"] *= 1e-20
    return arguments


@pytest.mark.parametrize(("name", "numbers"), [*NUMBERS.items(), *LONG], ids=str)
def test_numbers_of_other_libraries(name, numbers, backend, device):
    arguments = problem(device)
    theirs, plain = numbers
    want = call(arguments | {name: plain})
    assert torch.equal(call(arguments | {name: theirs}), want)
    assert torch.equal(parallel_lce.LinearCrossEntropy(**{name: theirs})(*arguments.values()), want)
    if isinstance(plain, float):  # one that is a float, and compares to no bool
        assert torch.equal(call(arguments | {name: np.float64(plain)}), want)


@pytest.mark.parametrize(
    "value", [1.5, np.float64(1.5), np.float32(1.5), fractions.Fraction(3, 2), 2, np.int8(2)], ids=repr
)
def test_a_number_is_of_a_plain_type(value):
    """Triton's kernels have a case for numbers of Python alone."""
    assert options.as_number(value) == value and type(options.as_number(value)) in (int, float)


def test_a_module_with_numbers_of_other_libraries_compiles(device):
    arguments = problem(device)
    module = parallel_lce.LinearCrossEntropy(
        **{name: np.float64(v) if isinstance(v, float) else n for name, (n, v) in NUMBERS.items()}
    )
    graph = torch.compile(module, backend="aot_eager", fullgraph=True)
    assert torch.equal(graph(*arguments.values()), module(*arguments.values()))


def _by_other_truth_values(member: Member) -> list[bool]:
    arguments = good(member.device) | dict(process_group=member.group)
    whole = arguments | dict(target=arguments["target"].repeat(member.ranks))
    split, same = (call(whole | dict(sequence_parallel=True)), call(arguments))
    return [
        *(torch.equal(call(whole | dict(sequence_parallel=yes)), split) for yes in (np.bool_(True), 1, np.int8(1))),
        *(torch.equal(call(arguments | dict(sequence_parallel=no)), same) for no in (np.bool_(False), 0, np.uint8(0))),
    ]


def test_truth_values_of_other_libraries(worlds, device):
    for found in everywhere(worlds, device, 2, _by_other_truth_values):
        assert found == [True] * 6


def _copies(member: Member):
    positional = good(member.device).values()
    module = torch.nn.Sequential(parallel_lce.LinearCrossEntropy(process_group=member.group, z_loss=0.1))[0]
    want = module(*positional)
    duplicate = copy.deepcopy(torch.nn.ModuleList([module, module]))
    assert duplicate[0] is duplicate[1] and duplicate[0] is not module
    shallow = copy.copy(module)
    assert duplicate[0].options is not module.options and shallow.options is module.options
    for other in (duplicate[0], shallow):
        assert other is not module and other.process_group is member.group and torch.equal(other(*positional), want)
    file = io.BytesIO()
    torch.save(module, file)
    file.seek(0)
    for restored in (pickle.loads(pickle.dumps(module)), torch.load(file, weights_only=False)):
        again = pickle.loads(pickle.dumps(copy.deepcopy(restored)))
        for lost in (restored, again):
            with pytest.raises(ValueError, match=rf"pickled with a process_group of {member.ranks} rank"):
                lost(*positional)
            lost.process_group = member.group
            assert torch.equal(lost(*positional), want)
    assert module.process_group is member.group
    with pytest.raises(ValueError, match="process_group must be a torch.distributed.ProcessGroup"):
        module.process_group = "tp"
    return True


def test_a_module_with_a_group_can_be_copied_and_pickled(worlds, device):
    assert all(worlds(2).run(_copies))


def test_a_module_without_a_group(device):
    """It is pickled whole, owns no parameters, and shows its options."""
    positional = good(device).values()
    module = parallel_lce.LinearCrossEntropy(label_smoothing=0.1, reduce_dtype=torch.float32)
    restored = pickle.loads(pickle.dumps(module))
    assert torch.equal(restored(*positional), module(*positional))
    assert not list(module.parameters())
    assert "label_smoothing=0.1" in repr(module) and "reduce_dtype=torch.float32" in repr(module)
