"""transformers: in the default suite with a stand-in of its contract; with --all with the release. A patched model
beside the same model with its own loss, alone, compiled, sharded and in wrappers."""

import contextlib
import copy
import functools
import re
import tempfile
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch.distributed.fsdp import FullyShardedDataParallel, MixedPrecisionPolicy, fully_shard
from torch.nn import functional as F
from torch.nn.parallel import DistributedDataParallel

import parallel_lce.transformers as door
from blocks import counted_forwards
from measures import largest_error
from parallel_lce.backends import torch_backend
from parallel_lce.core.plan import BUDGET_VARIABLE
from parallel_lce.transformers import explain, patch, unpatch
from releases import ROOT
from tools import on_ranks, started
from transformers_models import (
    KINDS,
    ONLY_RELEASED,
    RELEASE_ALONE,
    RELEASED,
    RELEASES,
    TRAINED,
    V,
    batch,
    fused,
    model_of,
    near,
    on_releases,
    same,
    warned,
)  # fmt: skip
from transformers_standin import CausalLM, ModulesToSave, install_forward
from world import Member, mesh_of
from wrappers import gradients, parameters, wrapped
from zero_standin import StandIn, installed

# Ranks, the kind of the model, what is around it, and whether it is patched before that.
CASES = [
    *((1, kind, "alone", True) for kind in KINDS),
    *((2, kind, how, before) for kind in TRAINED for how in ("DDP", "FSDP1", "FSDP2") for before in (True, False)),
    *((2, kind, "plan", False) for kind in ("plain", "capped", "biased")),
    (1, "plain", "compiled", True),
]
# A stand-in's plan shards the output layer alone, so its weight is not tied.
MORE = [*((1, kind, "alone", True) for kind in ONLY_RELEASED), (2, "tied, biased", "plan", False)]
TRAININGS = [("stand-in", *case) for case in CASES]
TRAININGS += [pytest.param(*RELEASED.values, *case, marks=RELEASED.marks) for case in (*CASES, *MORE)]


def by_plan(release: str, model, member: Member):
    """``model`` under transformers' tensor parallelism."""
    if release == "stand-in":
        install_forward(model.lm_head, mesh_of("cpu", (member.ranks,)), 0)
        return model
    from transformers import AutoModelForCausalLM
    from transformers.distributed import DistributedConfig

    options = dict(distributed_config=DistributedConfig(tp_size=member.ranks, tp_plan="auto"), dtype=torch.float32)
    folder = [tempfile.mkdtemp()]
    if member.rank == 0:
        model.save_pretrained(folder[0])
    dist.broadcast_object_list(folder)
    return AutoModelForCausalLM.from_pretrained(folder[0], **options)


@pytest.mark.parametrize(("release", "ranks", "kind", "how", "before"), TRAININGS)
@on_releases(ranks=None)
def test_training(member, release, kind, how, before):
    """Losses, gradients, accuracies and logits."""
    own = model_of(release, kind).train()
    inner, replicas = copy.deepcopy(own), 1 if how == "plan" else member.ranks
    options = {"token_accuracy": how != "DDP"}
    inner = by_plan(release, inner, member) if how == "plan" else inner
    model = patch(inner, **options) if before else inner
    if how == "compiled":
        torch._dynamo.reset()
        model = torch.compile(model, backend="aot_eager")
    elif how not in ("alone", "plan"):
        model = wrapped(how, model, member)
    patch(inner, **options) if not before else None
    model.train()
    for step in range(3):
        given = batch(10 * step + (member.rank if replicas > 1 else 0))
        if step:
            given["num_items_in_batch"] = torch.tensor(40) if step == 1 else 7
        if step == 2:
            given["shift_labels"] = F.pad(given["labels"], (0, 1), value=-100)[:, 1:].contiguous()
        model.zero_grad(), own.zero_grad()
        found, expected = model(**given), own(**given)
        assert fused(found) and found.loss.dtype == torch.float32
        (3 * found.loss).backward(), (3 * expected.loss).backward()
        near(found.loss.detach(), expected.loss.detach())
        if how != "DDP":
            top, labels = expected.logits[:, :-1].argmax(-1), given["labels"][:, 1:]
            near(found["token_accuracy"], (top == labels)[labels != -100].float().mean())
        compared = gradients(inner, model)
        for name, p in own.named_parameters():
            if replicas > 1:
                dist.all_reduce(p.grad.div_(replicas))
            near(compared[name], p.grad)
        assert found.logits.shape == expected.logits.shape and found.logits.dtype == expected.logits.dtype
        if "FSDP" in how:
            with pytest.raises(RuntimeError, match="FSDP or ZeRO has taken back the output layer's weight"):
                found.logits.sum()
        elif how != "plan":
            near(found.logits.argmax(-1), expected.logits.argmax(-1))
    assert explain(inner) == "fused"  # nothing was said
    model.eval(), own.eval()
    with torch.no_grad():
        near(model(**batch(1)).logits, own(**batch(1)).logits)


@pytest.mark.parametrize("accuracy", [False, True])
@pytest.mark.parametrize("how", ["labels", "shift_labels", "no label", "another index"])
@RELEASES
@on_releases()
def test_labels_that_do_not_count_are_not_projected(member, release, how, accuracy):
    model = model_of(release, "capped").train()
    own, given = copy.deepcopy(model), batch(0)
    shifted = F.pad(given["labels"], (0, 1), value=-100)[:, 1:].contiguous()
    counted = int((shifted >= 0).sum())
    if how == "shift_labels":
        given["shift_labels"] = shifted
    elif how == "no label":
        given["labels"].fill_(-100)
        counted = 0
    elif how == "another index":
        given["ignore_index"], given["labels"], counted = 5, given["labels"].masked_fill(given["labels"] < 0, 5), 32
    with counted_forwards(torch_backend) as rows:
        found = patch(model, token_accuracy=accuracy)(**given)
    assert fused(found) and sum(rows) == counted
    same(found.loss, own(**given).loss)  # NaN of no label


class _Around(torch.nn.Sequential):
    """A module around an output layer."""

    weight = property(lambda self: self[0].weight)

    def forward(self, hidden):
        return 2.0 * self[0](hidden)


def _with_a_hook(layer):
    layer.register_forward_hook(lambda layer, given, logits: 2 * logits)
    return layer


def _of_fsdp1(model, wrap=lambda layer: layer, **options):
    unit = functools.partial(FullyShardedDataParallel, device_id=torch.device("cpu"), use_orig_params=True)
    if isinstance(model.lm_head, ModulesToSave):
        model.lm_head.modules_to_save["default"] = unit(model.lm_head.modules_to_save["default"])
    else:
        model.lm_head = unit(wrap(model.lm_head), **options)
    return unit(model, **options)


def _of_fsdp2(model, wrap=lambda layer: layer, norm=False, **options):
    mesh, model.lm_head = mesh_of("cpu", (2,)), wrap(model.lm_head)
    inner = model.model["norm"] if isinstance(model, CausalLM) else model.model.norm
    fully_shard([inner, model.lm_head] if norm else model.lm_head, mesh=mesh, **options)
    return fully_shard(model, mesh=mesh, **{n: v for n, v in options.items() if n != "reshard_after_forward"})


UNITS = {
    "FSDP1": _of_fsdp1,
    "FSDP1, flat": functools.partial(_of_fsdp1, use_orig_params=False),
    "FSDP1, a saved module": _of_fsdp1,
    "FSDP1, with more": functools.partial(_of_fsdp1, wrap=_Around),
    "FSDP2": _of_fsdp2,
    "FSDP2, with the norm, as accelerate": functools.partial(_of_fsdp2, norm=True, reshard_after_forward=False),
    "FSDP2, with more": functools.partial(_of_fsdp2, wrap=_Around),
    "FSDP2, with a hook and no more": functools.partial(_of_fsdp2, wrap=_with_a_hook),
    "DDP, unused parameters": functools.partial(DistributedDataParallel, find_unused_parameters=True),
}


@pytest.mark.parametrize("use", ["none", "logits", "loss outside"])
@pytest.mark.parametrize("how", UNITS)
@RELEASES
@on_releases(2)
def test_units_of_the_output_layer(member, release, how, use):
    """Where the output layer's weight is whole in its own forward alone, the loss is computed there, and logits can be
    used until the backward. For a unit with more modules, and without labels, the model's own code runs, said once."""
    model = model_of(release, "plain").train()

    def results(patched: str):
        inner = copy.deepcopy(model)
        if patched == "before":
            patch(inner)
        inner.lm_head = ModulesToSave(inner.lm_head) if "saved" in how else inner.lm_head
        outer = UNITS[how](inner)
        if patched == "after":
            patch(inner)
        optimizer, found = torch.optim.SGD(outer.parameters(), lr=1.0), []
        for step in range(2):
            given = batch(10 * step + member.rank)
            labels = given["labels"] if use != "loss outside" else given.pop("labels").clamp(min=0)
            out = outer(**given)
            assert fused(out) == (patched != "" and "more" not in how and use != "loss outside") or "DDP" in how
            if use == "loss outside":
                loss = F.cross_entropy(out.logits[:, :-1].reshape(-1, V).float(), labels[:, 1:].reshape(-1))
            else:
                loss = out.loss if use == "none" else out.loss + out.logits.float().logsumexp(-1).square().mean()
            loss.backward()
            if patched and use == "none" and "more" not in how and "DDP" not in how:
                with pytest.raises(RuntimeError, match="the backward of their loss|has taken back the output layer"):
                    out.logits.sum()
            optimizer.step(), optimizer.zero_grad()
            found.append(loss.detach())
        return [*found, out.logits.dtype, *parameters(inner, outer)]

    stock = results("")
    for patched in ("before", "after"):
        with warned() as said:
            same(results(patched), stock)
        assert len(said) == (use != "none" or "more" in how), said
        words = "gathers its weight for itself, and has hooks" if "hook" in how else "in a unit of FSDP with more"
        assert "more" not in how or words in said[0]


@RELEASES
@on_releases(2)
def test_the_loss_is_not_rounded_as_the_results_of_a_unit_are(member, release):
    model = patch(model_of(release, "plain").train())
    exact = copy.deepcopy(model)(**batch(member.rank)).loss.item()
    policy = MixedPrecisionPolicy(output_dtype=torch.bfloat16)
    fully_shard(model.lm_head, mesh=mesh_of("cpu", (2,)), mp_policy=policy)
    out = fully_shard(model, mesh=mesh_of("cpu", (2,)))(**batch(member.rank))
    assert fused(out) and out.loss.item() == pytest.approx(exact, rel=1e-6)
    assert out.logits.dtype == (out.logits + 0).dtype == torch.bfloat16


def _hooked(parameter, seen: list) -> None:
    parameter.register_hook(lambda gradient: 0.6 * gradient)
    parameter.register_post_accumulate_grad_hook(lambda p: seen.append(p.grad.abs().sum()))


@pytest.mark.parametrize("how", ["", "frozen body", "a saved module", "loss outside"])
@pytest.mark.parametrize("kind", ["plain", "capped", "tied, biased"])
@pytest.mark.parametrize("device", ["cpu"])
@on_ranks(2)
def test_zero3(member, device, kind, how):
    """Losses and weights after two steps, and as many collectives: the output layer is gathered in the loss."""

    def results(patched: str):
        model, seen = model_of("stand-in", kind).train(), []
        model = patch(model) if patched == "before" else model
        if how == "a saved module":
            model.lm_head = ModulesToSave(model.lm_head)
        if how == "frozen body":
            model.model["norm"].requires_grad_(False)
        for each in filter(lambda p: p.requires_grad, model.parameters()):
            _hooked(each, seen)
        engine, found = StandIn(model, rate=1.0), []
        model = patch(model) if patched == "after" else model
        with started() as collectives:
            for step in range(2):
                given = batch(10 * step + member.rank)
                labels = given["labels"] if how != "loss outside" else given.pop("labels").clamp(min=0)
                out = engine(**given)
                if how == "loss outside":
                    loss = F.cross_entropy(out["logits"][:, :-1].reshape(-1, V), labels[:, 1:].reshape(-1))
                else:
                    loss = out["loss"]
                    assert fused(out) == (patched != "" and how != "a saved module")
                loss.backward(), engine.step()
                found.append(loss.detach())
        return [*found, *seen, *engine.whole()], sorted((c.kind, c.size) for c in collectives)

    with contextlib.ExitStack() as contexts:
        for context in installed():
            contexts.enter_context(context)
        stock, theirs = results("")
        for patched in ("before", "after"):
            with warned() as said:
                ours, own = results(patched)
            same(ours, stock)
            assert (own == theirs or "saved" in how) and len(said) == (how in ("a saved module", "loss outside")), said


@pytest.mark.parametrize("device", ["cpu"])
@on_ranks(2)
def test_a_weight_that_a_plan_shards_by_hidden_features(member, device):
    model = model_of("stand-in", "plain").train()
    own, given = copy.deepcopy(model), batch(1)
    install_forward(model.lm_head, mesh_of("cpu", (member.ranks,)), 1)
    with pytest.warns(door.LogitsWarning, match="logits that its output layer did not defer"):
        near(patch(model)(**given)["loss"].detach(), own(**given)["loss"].detach())


@pytest.mark.parametrize("eval_logits", [True, False])
@RELEASES
@on_releases()
def test_evaluation_and_unpatch(member, release, eval_logits):
    """In eval mode, in tuples and in generation a patched model is as before."""
    model = model_of(release, "capped").eval()
    own, given, ids = copy.deepcopy(model), batch(1), batch(1)["input_ids"]
    patch(model, eval_logits=eval_logits)
    with torch.no_grad():
        out = model(**given)
        assert fused(out) == (not eval_logits)
        near(out.loss, own(**given).loss)
        near(model(**given, return_dict=False)[1] + 0, own(**given).logits)
        if release != "stand-in":
            length = {"max_new_tokens": 5, "do_sample": False}
            assert torch.equal(model.train().generate(ids[:, :4], **length), own.generate(ids[:, :4], **length))
    assert explain(model) == "fused"
    unpatch(model).train()
    assert torch.equal(model(**given).logits, own.train()(**given).logits)


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
    names = {"model": model_of(release, "plain").train(), "batch": batch(1), "torch": torch}
    blocks = re.findall(r"^```python\n(.*?)^```$", text, re.M | re.S)
    losses = [exec(block, names) or names["loss"].item() for block in blocks]
    assert len(losses) == 3 and max(losses) - min(losses) < 1e-5, losses


@pytest.mark.parametrize(("given", "environment", "budget"), [(None, "", 128 << 20), (None, "4096", None), (0, "9", 0)])
def test_the_budget(given, environment, budget, monkeypatch):
    """Without an argument it is the environment's, else 128 MiB."""
    monkeypatch.setenv(BUDGET_VARIABLE, environment)
    model, ids = patch(CausalLM(9, 4).train(), logits_budget=given), torch.ones(1, 3).long()
    with mock.patch.object(door, "linear_cross_entropy", wraps=door.linear_cross_entropy) as called:
        model(ids, labels=ids)
    assert called.call_args.kwargs["logits_budget"] == budget


def test_refusals():
    layer, model = torch.nn.Linear(3, 3), CausalLM(9, 4)
    with pytest.raises(ValueError, match="must be a causal language model of transformers, got a Linear"):
        patch(layer)
    assert unpatch(model) is model
    with pytest.raises(ValueError, match="gradient_filter"):
        patch(model, gradient_filter=2.0)
    with pytest.raises(ValueError, match="cannot be combined with token_metrics"):
        patch(model, gradient_filter=2**-13, token_metrics=True)
    model.forward = model.forward
    with pytest.raises(ValueError, match=r"metrics need CausalLM.forward, which was replaced"):
        patch(model, token_accuracy=True)
    model.loss_function = F.cross_entropy
    with pytest.raises(ValueError, match="loss_function of CausalLM must be transformers' ForCausalLMLoss, got <fun"):
        patch(model)
    model = CausalLM(9, 4)
    model.lm_head = torch.nn.Bilinear(2, 2, 2)
    with pytest.raises(ValueError, match="the output layer of CausalLM has no nn.Linear: Bilinear"):
        patch(model)
