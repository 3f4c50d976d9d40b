"""transformers: in the default suite with a stand-in of its contract; with --all with the release. A patched model
beside the same model with its own loss, alone, compiled and in wrappers."""

import copy
import functools
import re
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch.distributed.fsdp import FullyShardedDataParallel, MixedPrecision, MixedPrecisionPolicy, fully_shard
from torch.distributed.fsdp.wrap import size_based_auto_wrap_policy
from torch.distributed.tensor import Shard
from torch.nn.parallel import DistributedDataParallel

import parallel_lce.transformers as door
from blocks import counted_forwards
from measures import largest_error
from parallel_lce import trl as trl_door
from parallel_lce.backends import torch_backend
from parallel_lce.core.budget import BUDGET_VARIABLE
from parallel_lce.transformers import patch, unpatch
from releases import ROOT
from transformers_models import (
    KINDS,
    ONLY_RELEASED,
    RELEASE_ALONE,
    RELEASED,
    RELEASES,
    TRAINED,
    accuracy_of,
    batch,
    fused,
    model_of,
    near,
    on_releases,
    saved,
    unmade,
    warned,
    without_a_warning,
)  # fmt: skip
from transformers_standin import CausalLM, ColwiseGatherOutput, ModulesToSave
from world import Member, mesh_of
from wrappers import gradients, parameters, wrapped

# Ranks, the kind of the model, what is around it, and whether it is patched before that.
CASES = [
    *((1, kind, "alone", True) for kind in KINDS),
    *((2, kind, how, before) for kind in TRAINED for how in ("DDP", "FSDP1", "FSDP2") for before in (True, False)),
    *((2, "plain", how, before) for how in ("FSDP2, head apart", "FSDP2, head with norm") for before in (True, False)),
    *((2, kind, "plan", False) for kind in ("plain", "capped", "biased")),
    (1, "plain", "compiled", True),
]
# A stand-in's plan shards the output layer alone, so its weight is not tied.
MORE = [*((1, kind, "alone", True) for kind in ONLY_RELEASED), (2, "tied, biased", "plan", False)]


def tiered(cases: list[tuple], of_release_alone: list[tuple]) -> list:
    """Each case with the stand-in and, in a slow test, with the release."""
    slow = [pytest.param(*RELEASED.values, *case, marks=RELEASED.marks) for case in (*cases, *of_release_alone)]
    return [*(("stand-in", *case) for case in cases), *slow]


# With accuracies and without; of the release one of the two.
TRAININGS = [("stand-in", *case, accuracy) for case in CASES for accuracy in (False, True)]
TRAININGS += tiered([], [(*case, (i + i // 2) % 2 == 0) for i, case in enumerate([*CASES, *MORE])])


def by_plan(release: str, model, member: Member):
    """``model`` under transformers' tensor parallelism."""
    if release == "stand-in":
        ColwiseGatherOutput().install_forward(model.lm_head, mesh_of("cpu", (member.ranks,)))
        return model
    from transformers import AutoModelForCausalLM
    from transformers.distributed import DistributedConfig

    options = dict(distributed_config=DistributedConfig(tp_size=member.ranks, tp_plan="auto"), dtype=torch.float32)
    return AutoModelForCausalLM.from_pretrained(saved(model, member), **options)


def unit_of_head(model, apart: bool):
    norm = model.model["norm"] if isinstance(model, CausalLM) else model.model.norm
    return model.lm_head if apart else [norm, model.lm_head]


def around(how: str, model, member: Member):
    """``model`` compiled, or in a wrapper, where its head may be a unit of FSDP's of its own, or with its norm."""
    if how == "compiled":
        torch._dynamo.reset()
        return torch.compile(model, backend="aot_eager")
    if "head" in how:
        apart, mesh = "apart" in how, mesh_of("cpu", (member.ranks,))
        fully_shard(unit_of_head(model, apart), mesh=mesh, reshard_after_forward=apart)
    return model if how in ("alone", "plan") else wrapped(how, model, member)


@pytest.mark.parametrize(("release", "ranks", "kind", "how", "before", "accuracy"), TRAININGS)
@on_releases(ranks=None)
@without_a_warning()
def test_training(member, release, kind, how, before, accuracy):
    """Losses, gradients, accuracies and logits."""
    own = model_of(release, kind).train()
    inner = copy.deepcopy(own)
    if how == "plan":
        inner = by_plan(release, inner, member)
    if before:
        patch(inner, token_accuracy=accuracy)
    model = around(how, inner, member)
    if not before:
        patch(inner, token_accuracy=accuracy)
    model.train()
    replicas = 1 if how == "plan" else member.ranks
    for step in range(3):
        given = batch(10 * step + (member.rank if replicas > 1 else 0))
        if step:
            given["num_items_in_batch"] = torch.tensor(40) if step == 1 else 7
        if step == 2:
            padded = torch.nn.functional.pad(given["labels"], (0, 1), value=-100)
            given["shift_labels"] = padded[:, 1:].contiguous()
        model.zero_grad(), own.zero_grad()
        found, expected = model(**given), own(**given)
        assert fused(found) and found.loss.dtype == torch.float32
        assert ("token_accuracy" in found) == accuracy
        (3 * found.loss).backward(), (3 * expected.loss).backward()
        near(found.loss.detach(), expected.loss.detach())
        if accuracy:
            near(found["token_accuracy"], accuracy_of(expected.logits, given["labels"]))
        compared = gradients(inner, model)
        for name, p in own.named_parameters():
            if replicas > 1:
                dist.all_reduce(p.grad.div_(replicas))
            near(compared[name], p.grad)
        assert found.logits.shape == expected.logits.shape and found.logits.dtype == expected.logits.dtype
        if "FSDP" in how:
            with pytest.raises(RuntimeError, match="FSDP has taken back the output layer's weight"):
                found.logits[0]
        else:
            if not step:
                with pytest.warns(door.LogitsWarning, match="makes the logits beside its fused loss"):
                    found.logits[0]
            near(found.logits[..., 2:], expected.logits[..., 2:])
    model.eval(), own.eval()
    with torch.no_grad():
        near(model(**batch(1)).logits, own(**batch(1)).logits)


@pytest.mark.parametrize("accuracy", [False, True])
@pytest.mark.parametrize("how", ["labels", "shift_labels", "no label", "changed", "another index"])
@RELEASES
@on_releases()
def test_labels_that_do_not_count_are_not_projected(member, release, how, accuracy):
    model = model_of(release, "capped").train()
    own, given = copy.deepcopy(model), batch(0)
    shifted = torch.nn.functional.pad(given["labels"], (0, 1), value=-100)[:, 1:].contiguous()
    counted = int((shifted >= 0).sum())
    if how == "shift_labels":
        given["shift_labels"] = shifted
    elif how == "no label":
        given["labels"].fill_(-100)
        given["num_items_in_batch"], counted = 7, 0
    elif how == "another index":
        given["ignore_index"], given["labels"], counted = 5, given["labels"].masked_fill(given["labels"] < 0, 5), 32
    patch(model, token_accuracy=accuracy)
    if how == "changed":  # by the forward: nobody knows how many these are
        lazily, counted = door._lazy, 32
        change = lambda *a: (given["labels"].fill_(4), lazily(*a))[1]  # noqa: E731
    else:
        change = door._lazy
    with mock.patch.object(door, "_lazy", change), counted_forwards(torch_backend) as rows:
        found = model(**given)
    assert fused(found) and sum(rows) == counted
    expected = own(**given)
    near(found.loss.detach(), expected.loss.detach())
    found.loss.backward(), expected.loss.backward()
    for name, p in own.named_parameters():
        near(model.get_parameter(name).grad, p.grad)
    if accuracy and how != "another index":
        near(found["token_accuracy"], accuracy_of(expected.logits, given["labels"]).nan_to_num(0.0))


def _unit1(module, whole=True):
    return FullyShardedDataParallel(module, device_id=torch.device("cpu"), use_orig_params=whole)


class _Around(torch.nn.Sequential):
    """A module around an output layer, which calls it and does nothing else."""

    weight = property(lambda self: self[0].weight)


class _Doubling(_Around):
    def forward(self, hidden):
        return 2.0 * self[0](hidden)


def _head1(model, whole=True, around=lambda layer: layer):
    model.lm_head = _unit1(around(model.lm_head), whole)
    return _unit1(model, whole)


def _by_size(model):
    policy = functools.partial(size_based_auto_wrap_policy, min_num_params=1500)
    return FullyShardedDataParallel(model, device_id=torch.device("cpu"), auto_wrap_policy=policy)


def _head2(model, around, dim=0):
    model.lm_head = around(model.lm_head)
    fully_shard(model.lm_head, mesh=mesh_of("cpu", (2,)), shard_placement_fn=lambda p: Shard(dim))
    return fully_shard(model, mesh=mesh_of("cpu", (2,)))


def _saved1(model):
    """As PEFT's policy wraps the module to save."""
    model.lm_head = ModulesToSave(model.lm_head)
    saved = model.lm_head.modules_to_save
    saved["default"] = _unit1(saved["default"])
    return _unit1(model)


def _ddp(model):
    return DistributedDataParallel(model, find_unused_parameters=True)


# What is around the output layer or the model, and whether the loss is fused.
UNITS = {
    "FSDP(m.lm_head)": (_head1, True),
    "size-based policy": (_by_size, True),
    "FSDP, a module around": (functools.partial(_head1, whole=False, around=_Around), True),
    "FSDP, a unit around": (functools.partial(_head1, around=_unit1), True),
    "a saved module": (_saved1, True),
    "FSDP2, a module around": (functools.partial(_head2, around=_Around), True),
    "FSDP2, by hidden features": (functools.partial(_head2, around=lambda layer: layer, dim=1), True),
    "FSDP, twice": (functools.partial(_head1, around=_Doubling), False),
    "FSDP2, twice": (functools.partial(_head2, around=_Doubling), False),
    "DDP, unused parameters": (_ddp, True),
}


@pytest.mark.parametrize("how", UNITS)
@RELEASES
@on_releases(2)
def test_units_of_the_output_layer(member, release, how):
    """Where the output layer's weight is whole in its own forward alone, the loss is computed there. Where the unit
    does more than to call the layer the model's own runs, said once."""
    wrap, is_fused = UNITS[how]
    model = model_of(release, "plain").train()

    def results(patched: str):
        inner = copy.deepcopy(model)
        wrapped = wrap(patch(inner) if patched == "before" else inner)
        if patched == "after":
            patch(inner)
        optimizer, found = torch.optim.SGD(wrapped.parameters(), lr=1.0), []
        for step in range(3):
            out = wrapped(**batch(10 * step + member.rank))
            assert fused(out) == (is_fused and patched != "")
            if fused(out) and "FSDP" in how:
                with pytest.raises(RuntimeError, match="FSDP has taken back the output layer's weight"):
                    out.logits[0]
            out.loss.backward()
            optimizer.step(), optimizer.zero_grad()
            found.append(out.loss.detach())
        inner.eval()
        with torch.no_grad():
            out = wrapped(**batch(1))
        return [*found, out.logits, out.loss, *parameters(inner, wrapped)]

    stock = results("")
    for patched in ("before", "after"):
        with warned() as said:
            for found, expected in zip(results(patched), stock):
                torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-4)
        assert len(said) == (not is_fused) and all("in a unit of FSDP with more" in text for text in said), said


@pytest.mark.parametrize("how", ["FSDP1", "FSDP2"])
@RELEASES
@on_releases(2)
def test_mixed_precision_of_a_unit(member, release, how):
    """The loss is fp32, and is not rounded as the results of the unit are."""
    exact, losses = model_of(release, "plain").train(), []
    for patched in (False, True):
        model = copy.deepcopy(exact)
        model = patch(model) if patched else model
        if how == "FSDP1":
            policy = MixedPrecision(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
            model.lm_head = FullyShardedDataParallel(model.lm_head, device_id=member.device, mixed_precision=policy)
            wrapped = FullyShardedDataParallel(model, device_id=member.device, mixed_precision=policy)
        else:
            policy = MixedPrecisionPolicy(reduce_dtype=torch.float32, output_dtype=torch.bfloat16)
            fully_shard(model.lm_head, mesh=mesh_of("cpu", (2,)), mp_policy=policy)
            wrapped = fully_shard(model, mesh=mesh_of("cpu", (2,)))
        out = wrapped(**batch(member.rank))
        out.loss.backward()
        assert fused(out) == patched and out.loss.dtype == torch.float32
        assert out.logits.dtype == torch.bfloat16
        losses.append(out.loss.item())
    truth = exact(**batch(member.rank)).loss.item()
    error, allowed = (abs(loss - truth) for loss in reversed(losses))
    assert error <= (1.5 * allowed + 1e-3 if how == "FSDP1" else 1e-5), (error, allowed)


@pytest.mark.parametrize("apart", [True, False])
@RELEASES
@on_releases(2)
def test_logits_of_a_weight_that_is_kept_whole(member, release, apart):
    """FSDP2 keeps the output layer's weight whole until the backward, as accelerate lays it out: so are the logits."""
    model, mesh = model_of(release, "plain").train(), mesh_of("cpu", (2,))

    def trained(patched: bool):
        wrapped = copy.deepcopy(model)
        wrapped = patch(wrapped) if patched else wrapped
        fully_shard(unit_of_head(wrapped, apart), mesh=mesh, reshard_after_forward=False)
        fully_shard(wrapped, mesh=mesh)
        out = wrapped(**batch(member.rank))
        assert fused(out) == patched
        logits = out.logits[...]
        (out.loss + 0.01 * logits.float().logsumexp(-1).square().mean()).backward()
        return [out.loss.detach(), logits.detach(), *(p.grad.full_tensor() for p in wrapped.parameters())]

    for stock, ours in zip(trained(False), trained(True)):
        torch.testing.assert_close(ours, stock, rtol=1e-5, atol=1e-5 * max(1.0, stock.abs().max().item()))


@pytest.mark.parametrize(("release", "kind"), tiered([(k,) for k in KINDS], [(k,) for k in ONLY_RELEASED]))
@on_releases()
@without_a_warning()
def test_modes(member, release, kind):
    """Without labels, in generation, in tuples and in eval mode a patched model, and a copy of it, is as before."""
    model = model_of(release, kind).train()
    own = copy.deepcopy(model)
    assert patch(patch(model)) is model
    model, given = copy.deepcopy(model), batch(1)
    ids = given["input_ids"]
    assert torch.is_tensor(model(ids).logits) and torch.equal(model(ids).logits, own(ids).logits)
    lazy = [any(map(unmade, model(**g, return_dict=False))) for g in (given, {"input_ids": ids})]
    assert lazy == [True, False]
    if release != "stand-in":
        length = {"max_new_tokens": 5, "do_sample": False}
        assert torch.equal(model.generate(ids[:, :4], **length), own.generate(ids[:, :4], **length))
    model.eval(), own.eval()
    assert torch.equal(model(**given).loss, own(**given).loss) and torch.is_tensor(model(**given).logits)
    patch(model, eval_logits=False)
    assert fused(model(**given)) and torch.is_tensor(model(ids).logits)
    near(model(**given).loss, own(**given).loss)
    unpatch(model).train()
    assert torch.equal(model(**given).logits, own(**given).logits) and torch.is_tensor(model(**given).logits)


@RELEASES
@on_releases()
def test_bf16(member, release):
    """In bf16 the errors of the gradients are at most those of the model's own loss."""
    for kind in TRAINED:
        model = model_of(release, kind).bfloat16().train()
        own, exact = copy.deepcopy(model), copy.deepcopy(model).double()
        for each in (patch(model), own, exact):
            each(**batch(1)).loss.backward()
        pairs = [[*zip(m.parameters(), exact.parameters())] for m in (model, own)]
        errors = [max(largest_error(p.grad, q.grad) / q.grad.abs().max() for p, q in each) for each in pairs]
        assert model.get_output_embeddings().weight.grad.dtype == torch.bfloat16 and errors[0] <= errors[1], errors


@RELEASE_ALONE
@on_releases()
def test_the_lines_of_the_page(member, release):
    """Each block gives one loss."""
    text = (ROOT / "docs" / "transformers.md").read_text()
    names = {"model": model_of(release, "plain"), "batch": batch(1), "torch": torch}
    blocks = re.findall(r"^```python\n(.*?)^```$", text, re.M | re.S)
    losses = [exec(block, names) or names["loss"].item() for block in blocks]
    trl_door.unpatch()
    assert len(losses) == 6 and max(losses) - min(losses) < 1e-5, losses


@pytest.mark.parametrize("accuracy", [False, True])
def test_labels_outside_the_vocabulary(accuracy):
    """As in the library: refused, unless they are ignore_index."""
    own, ids = CausalLM(9, 4).train(), torch.tensor([[1, 2, 3, 4, 5]])
    labels = ids.clone()
    labels[0, 3] = -1
    expected = own(ids, labels=labels, ignore_index=-1).loss.item()
    model = patch(own, token_accuracy=accuracy)
    assert model(ids, labels=labels, ignore_index=-1).loss.item() == pytest.approx(expected)
    with pytest.raises(IndexError, match=r"target -1 at position 2 is outside \[0, 9\)"):
        model(ids, labels=labels)


@pytest.mark.parametrize(("given", "environment", "budget"), [(None, "", 128 << 20), (None, "4096", None), (0, "9", 0)])
def test_the_budget(given, environment, budget, monkeypatch):
    """Without an argument it is the environment's, else 128 MiB."""
    monkeypatch.setenv(BUDGET_VARIABLE, environment)
    model, ids, hidden = patch(CausalLM(9, 4).train(), logits_budget=given), torch.ones(1, 3).long(), torch.ones(3, 4)
    monkeypatch.setitem(trl_door._settings, "logits_budget", given)
    for module, name, use in (
        (door, "linear_cross_entropy", lambda: model(ids, labels=ids)),
        (trl_door, "token_statistics", lambda: trl_door._log_probs(hidden, hidden, None, ids[0], 1.0, 9)),
    ):
        with mock.patch.object(module, name, wraps=getattr(module, name)) as called:
            use()
        assert called.call_args.kwargs["logits_budget"] == budget


def test_refusals():
    layer, model = torch.nn.Linear(3, 3), CausalLM(9, 4)
    with pytest.raises(ValueError, match="must be a causal language model of transformers, got a Linear"):
        patch(layer)
    assert unpatch(model) is model
    with pytest.raises(ValueError, match="gradient_filter"):
        patch(model, gradient_filter=2.0)
    model.loss_function = torch.nn.functional.cross_entropy
    with pytest.raises(ValueError, match="loss_function of CausalLM must be transformers' ForCausalLMLoss, got <fun"):
        patch(model)
    model = CausalLM(9, 4)
    model.lm_head = torch.nn.Bilinear(2, 2, 2)
    with pytest.raises(ValueError, match="the output layer of CausalLM must be an nn.Linear, got .*Bilinear"):
        patch(model)
    model = patch(CausalLM(9, 4))
    given = torch.ones(1, 3, dtype=torch.int64)
    logits = model(given, labels=given).logits
    with torch.no_grad():
        model.lm_head.weight.add_(1.0)
    with pytest.raises(RuntimeError, match="weight changed in place"):
        logits + 1
