"""transformers: in the default suite with a stand-in of its contract; with --all with the release. A patched model
beside the same model with its own loss, alone, compiled, sharded and in wrappers."""

import contextlib
import copy
import functools
import pickle
import re
import tempfile
from unittest import mock

import pytest
import torch
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper
from torch.distributed.fsdp import FullyShardedDataParallel, MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor
from torch.nn import functional as F
from torch.nn.parallel import DistributedDataParallel

import parallel_lce.transformers as door
from parallel_lce.backends import torch_backend
from parallel_lce.core.plan import BUDGET_VARIABLE
from parallel_lce.transformers import explain, patch, unpatch
from releases import ROOT
from tools import alone, counted_forwards
from transformers_models import (
    RELEASE_ALONE,
    RELEASES,
    TRAININGS,
    batch,
    fused,
    model_of,
    near,
    on_releases,
    same,
    warned,
)
from transformers_standin import CausalLM, ModulesToSave
from world import Member, mesh_of
from zero_standin import ZeRO3, installed


@pytest.mark.parametrize(("release", "kind"), TRAININGS)
@on_releases()
def test_training_equals_that_of_the_models_own_loss(member, release, kind):
    """Losses, gradients, metrics and logits."""
    own = model_of(release, kind).train()
    model = patch(copy.deepcopy(own), token_accuracy=True, token_metrics=kind != "plain")
    for step in range(3):
        given = batch(step)
        if step:
            given["num_items_in_batch"] = torch.tensor(40) if step == 1 else 7
        if step == 2:
            given["shift_labels"] = F.pad(given["labels"], (0, 1), value=-100)[:, 1:].contiguous()
        model.zero_grad(), own.zero_grad()
        found, expected = model(**given), own(**given)
        assert fused(found) and found.loss.dtype == torch.float32
        (3 * found.loss).backward(), (3 * expected.loss).backward()
        near(found.loss.detach(), expected.loss.detach())
        assert_metrics(found, expected, given["labels"])
        for name, p in own.named_parameters():
            same(model.get_parameter(name).grad, p.grad)  # relative to the largest element
        assert found.logits.shape == expected.logits.shape and found.logits.dtype == expected.logits.dtype
        near(found.logits.argmax(-1), expected.logits.argmax(-1))
    assert explain(model) == "fused"  # nothing was said
    model.eval(), own.eval()
    with torch.no_grad():
        found, expected = model(**batch(1)), own(**batch(1))
        assert fused(found)
        near(found.loss, expected.loss)
        assert_metrics(found, expected, batch(1)["labels"])
        near(found.logits[...], expected.logits)


def assert_metrics(found, expected, labels) -> None:
    target = F.pad(labels, (0, 1), value=-100)[:, 1:]
    counted, log_p = target >= 0, torch.log_softmax(expected.logits.detach().double(), -1)
    near(found["token_accuracy"], (log_p.argmax(-1) == target)[counted].float().mean())
    if "log_probs" in found:
        near(found["predicted_ids"], log_p.argmax(-1).masked_fill(~counted, -1))
        near(found["log_probs"].double(), log_p.gather(-1, target.clamp(min=0)[..., None])[..., 0] * counted)
        near(found["entropies"].double(), -(log_p.exp() * log_p).sum(-1) * counted)
        assert not (found["log_probs"].requires_grad or found["entropies"].requires_grad)


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
    same(pickle.loads(pickle.dumps(found)).loss, own(**given).loss)  # NaN of no label


class _Around(torch.nn.Sequential):
    weight = property(lambda self: self[0].weight)

    def forward(self, hidden):
        return 2.0 * self[0](hidden)


def _with_a_hook(layer):
    layer.register_forward_hook(lambda layer, given, logits: 2 * logits)
    return layer


def _fsdp1(model):
    return FullyShardedDataParallel(model, device_id=torch.device("cpu"), use_orig_params=True)


def _fsdp2(module, **options):
    return fully_shard(module, mesh=mesh_of("cpu", (2,)), **options)


def _of_fsdp1(model):
    model.lm_head = _fsdp1(model.lm_head)
    return _fsdp1(model)


def _of_fsdp2(model, wrap=lambda layer: layer):
    model.lm_head = _fsdp2(wrap(model.lm_head))
    return _fsdp2(model)


def _as_accelerate(model):
    inner = model.model["norm"] if isinstance(model, CausalLM) else model.model.norm
    _fsdp2([inner, model.lm_head], reshard_after_forward=False)
    return _fsdp2(model)


def _saved(model):
    model.lm_head = ModulesToSave(model.lm_head)
    return model


UNITS = {  # the kind of the model, and what is around it or its output layer
    "DDP": ("capped", functools.partial(DistributedDataParallel, find_unused_parameters=True)),
    "FSDP1, the model": ("tied, biased", _fsdp1),
    "FSDP2, the model": ("tied, biased", _fsdp2),
    "FSDP1, compiled": ("capped", lambda model: (outer := _fsdp1(model)).compile(backend="eager") or outer),
    "FSDP1, and more": ("plain", _of_fsdp1),
    "FSDP2, with more": ("plain", functools.partial(_of_fsdp2, wrap=_Around)),
    "FSDP2": ("plain", _of_fsdp2),
    "FSDP2, with the norm, as accelerate": ("plain", _as_accelerate),
    "FSDP2, with a hook and no more": ("plain", functools.partial(_of_fsdp2, wrap=_with_a_hook)),
    "FSDP2, derived and no more": ("plain", _of_fsdp2),
    "FSDP2, with more, a checkpoint": ("plain", functools.partial(_of_fsdp2, wrap=checkpoint_wrapper)),
}


def two_steps(member: Member, model, wrap, patched: str, use: str = "none") -> tuple[list, bool]:
    """Losses of two steps of SGD, the dtype of the logits, and the weights; and whether the losses were fused.
    ``patched``: before or after the model is wrapped, or not at all, ""."""
    inner = copy.deepcopy(model)
    if patched == "before":
        patch(inner)
    outer = wrap(inner)
    if patched == "after":
        patch(inner)
    optimizer = None if isinstance(outer, ZeRO3) else torch.optim.SGD(outer.parameters(), lr=0.1)
    found, before = [], None
    for step in range(2):
        given = batch(10 * step + member.rank)
        labels = given["labels"] if use != "loss outside" else given.pop("labels").clamp(min=0)
        out = outer(**given)
        was_fused = fused(out)
        if before is not None and was_fused and use == "none":
            with pytest.raises(RuntimeError, match="wanted after .*(changed in place|an optimizer's step|backward of)"):
                before.sum()  # of the weight before its step
        before = out.logits
        if use == "loss outside":
            loss = F.cross_entropy(out.logits[:, :-1].flatten(0, 1).float(), labels[:, 1:].flatten())
        else:
            loss = out.loss if use == "none" else out.loss + out.logits.float().logsumexp(-1).square().mean()
        loss.backward()
        if was_fused and use == "none" and not isinstance(outer, DistributedDataParallel):
            with pytest.raises(RuntimeError, match="the backward of their loss|has taken back the output layer"):
                out.logits.sum()
        outer.step() if optimizer is None else (optimizer.step(), optimizer.zero_grad())
        found.append(loss.detach())
    if optimizer is None:
        return [*found, out.logits.dtype, *outer.whole.values(), outer.gathered], was_fused
    fsdp1 = isinstance(outer, FullyShardedDataParallel)
    with FullyShardedDataParallel.summon_full_params(outer) if fsdp1 else contextlib.nullcontext():
        weights = [p.detach() for p in inner.parameters()]
        weights = [w.full_tensor() if isinstance(w, DTensor) else w.clone() for w in weights]
    return [*found, out.logits.dtype, *weights], was_fused


@pytest.mark.parametrize("use", ["none", "logits", "loss outside"])
@pytest.mark.parametrize("how", UNITS)
@RELEASES
@on_releases(2)
def test_units_of_the_output_layer(member, release, how, use):
    """Where the output layer's weight is whole in its own forward alone, the loss is computed there, and logits can be
    used until the backward. For another unit, and without labels, the model's own code runs, said once."""
    kind, wrap = UNITS[how]
    model = model_of(release, kind).train()
    if "derived" in how:
        half = lambda self, hidden: super(Half, self).forward(hidden) / 2  # noqa: E731
        model.lm_head.__class__ = Half = type("Half", (torch.nn.Linear,), {"forward": half})
    stock, _ = two_steps(member, model, wrap, "", use)
    for patched in ("before", "after"):
        with warned() as said:
            found, was_fused = two_steps(member, model, wrap, patched, use)
        same(found, stock)
        assert use == "loss outside" or was_fused == ("more" not in how)
        assert len(said) == (member.rank == 0 and (use != "none" or "more" in how)), said
        own_call = "hook" in how or "derived" in how
        words = "gathers its weight for itself, and has hooks" if own_call else "in a unit of FSDP"
        assert "more" not in how or member.rank or words in said[0]


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


@pytest.mark.parametrize("how", ["", "frozen body", "a saved module", "loss outside"])
@pytest.mark.parametrize("kind", ["plain", "capped", "tied, biased"])
def test_zero3_gathers_the_output_layer_in_the_loss(kind, how):
    """Losses and weights are those of the model's own loss, and the weights are gathered as often."""
    model = model_of("stand-in", kind).train()
    model.model["norm"].requires_grad_(how != "frozen body")
    wrap = lambda inner: ZeRO3(_saved(inner) if how == "a saved module" else inner)  # noqa: E731
    use, own_logits = how if how == "loss outside" else "none", how in ("a saved module", "loss outside")
    with installed():
        stock, _ = two_steps(alone(), model, wrap, "", use)
        for patched in ("before", "after"):
            with warned() as said:
                found, was_fused = two_steps(alone(), model, wrap, patched, use)
            same(found[:-1], stock[:-1])
            assert found[-1] == stock[-1] or how == "a saved module"
            assert len(said) == own_logits == (not was_fused), said


@pytest.mark.parametrize("eval_logits", [True, False])
@RELEASES
@on_releases()
def test_evaluation_is_as_before_patch(member, release, eval_logits):
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
    assert explain(model) == ("no fused loss has run yet" if eval_logits else "fused")


@RELEASE_ALONE
@on_releases()
def test_the_lines_of_the_page_give_one_loss(member, release):
    blocks = re.findall(r"^```python\n(.*?)^```$", (ROOT / "docs" / "transformers.md").read_text(), re.M | re.S)
    names = {"model": model_of(release, "plain").train(), "batch": batch(1), "torch": torch}
    with tempfile.TemporaryDirectory() as folder, contextlib.chdir(folder):  # Trainer makes a folder
        losses = [exec(block, names) or names["loss"].item() for block in blocks]
    assert len(losses) == 3 and max(losses) - min(losses) < 1e-5, losses


@pytest.mark.parametrize(("given", "environment", "budget"), [(None, "", 128 << 20), (None, "4096", None), (0, "9", 0)])
def test_the_budget_is_the_arguments_or_the_environments(given, environment, budget, monkeypatch):
    monkeypatch.setenv(BUDGET_VARIABLE, environment)
    model, ids = patch(CausalLM(9, 4).train(), logits_budget=given), torch.ones(1, 3).long()
    with mock.patch.object(door, "linear_cross_entropy", wraps=door.linear_cross_entropy) as called:
        model(ids, labels=ids)
    assert called.call_args.kwargs["logits_budget"] == budget


def test_other_models_and_options_are_refused():
    def refuses(model, words, **options):
        with pytest.raises(ValueError, match=words):
            patch(model, **options)

    model = CausalLM(9, 4)
    refuses(torch.nn.Linear(3, 3), "must be a causal language model of transformers, got a Linear")
    assert unpatch(model) is model
    refuses(model, "gradient_filter", gradient_filter=2.0)
    refuses(model, "cannot be combined with token_metrics", gradient_filter=2**-13, token_metrics=True)
    model.forward = patch(model).forward
    refuses(model, "metrics need CausalLM.forward, which was replaced", token_accuracy=True)
    model.loss_function = F.cross_entropy
    refuses(model, "loss_function of CausalLM must be transformers' ForCausalLMLoss, got cross_entropy")
    assert "no fused loss" in door.explain(model), "a refused call changes nothing"
    model = CausalLM(9, 4)
    model.lm_head = torch.nn.Sequential(torch.nn.Linear(2, 2))
    refuses(model, "layer of CausalLM must be an nn.Linear, or hold one .*, got a Sequential")


@pytest.mark.parametrize("smoothing", [0.0, 0.1])
@RELEASE_ALONE
@on_releases()
def test_its_trainer_makes_logits_for_smoothed_labels_alone(member, release, smoothing):
    from transformers import Trainer, TrainingArguments

    model, results = model_of(release, "plain"), []
    rows = [{name: value[0] for name, value in batch(seed).items()} for seed in range(6)]
    options = dict(use_cpu=True, report_to="none", save_strategy="no", max_steps=2, per_device_train_batch_size=2)
    for ours in (False, True):
        with tempfile.TemporaryDirectory() as folder, warned() as said:
            trainer = Trainer(
                door.patch(copy.deepcopy(model), eval_logits=False) if ours else copy.deepcopy(model),
                TrainingArguments(folder, label_smoothing_factor=smoothing, **options),
                train_dataset=rows,
                eval_dataset=rows,
                preprocess_logits_for_metrics=lambda logits, labels: logits.argmax(dim=-1),
                compute_metrics=lambda p: {"accuracy": float((p.predictions[:, :-1] == p.label_ids[:, 1:]).mean())},
            )
            trained = trainer.train()
            metrics = trainer.evaluate()
        assert len(said) == (ours and smoothing > 0), said
        results.append([trained.training_loss, metrics["eval_loss"], metrics["eval_accuracy"]])
    assert results[1] == pytest.approx(results[0], rel=1e-4)
