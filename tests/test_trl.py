"""TRL's functions, with stand-ins of their contract and with the release; and the trainers of transformers and of TRL,
patched and not."""

import contextlib
import copy
import importlib
import itertools
import os
import sys
import tempfile
import types
import warnings
from unittest import mock

import pytest
import torch
from torch.nn import functional as F

import parallel_lce.transformers as door
import transformers_standin
from measures import assert_near
from parallel_lce import trl as trl_door
from tools import with_modules
from transformers_models import (
    RELEASE_ALONE,
    RELEASES,
    TRAINED,
    D,
    V,
    accuracy_of,
    batch,
    model_of,
    on_releases,
    saved,
    warned,
)  # fmt: skip
from transformers_standin import installed_trl
from world import Member

OUTPUTS = ("log_probs", "entropy", "log_sum_sq_probs", "mean_logits", "is_top1")


@contextlib.contextmanager
def patched_trl(release: str):
    """TRL's two functions before and after ``patch()``, called twice; and the stand-ins, for float64."""
    with installed_trl() if release == "stand-in" else contextlib.nullcontext():
        import trl.trainer.distillation_trainer as trainer
        import trl.trainer.utils as utils

        truth = transformers_standin.ChunkedLogProbFunction, transformers_standin.ChunkedDivergenceFunction
        own = utils._ChunkedLogProbFunction, trainer.ChunkedDivergenceFunction
        trl_door.patch(), trl_door.patch(logits_budget=0)
        try:
            yield own, (utils._ChunkedLogProbFunction, trainer.ChunkedDivergenceFunction), truth
        finally:
            trl_door.unpatch()
        assert (utils._ChunkedLogProbFunction, trainer.ChunkedDivergenceFunction) == own


def agree(three, leaves, rest, upstream, differentiable: int) -> None:
    """The error of ours against float64 is at most twice TRL's; so are the gradients', dtypes and what is None."""
    found = []
    for function, dtype in zip(three, (None, None, torch.float64)):
        each = [v if v is None else v.to(dtype or v.dtype, copy=True).requires_grad_() for v in leaves]
        given = [v.to(dtype) if dtype and torch.is_tensor(v) and v.is_floating_point() else v for v in rest]
        values = function.apply(*each, *given)
        found.append([*values, *torch.autograd.grad(upstream(values), [v for v in each if v is not None])])
    for i, (theirs, mine, exact) in enumerate(zip(*found)):
        assert (mine is None) == (theirs is None) == (exact is None)
        if mine is not None:
            assert mine.dtype == theirs.dtype and mine.requires_grad == (i < differentiable)
            error, allowed = ((v.double() - exact.double()).norm() for v in (mine, theirs))
            assert error <= 2 * allowed + 2e-7 * exact.double().norm(), (i, error, allowed)


@RELEASES
@on_releases()
def test_log_probs(member, release):
    with patched_trl(release) as (own, ours, truth):
        three = own[0], ours[0], truth[0]
        generator = torch.Generator().manual_seed(1)
        h, w, b = (torch.randn(s, generator=generator) for s in ((23, D), (V, D), (V,)))
        targets = torch.randint(V, (23,), generator=generator)

        def upstream(values):
            return values[0].sum() + (0 if values[1] is None else (values[1] * torch.arange(23)).sum())

        for cap, scale, temperature, bias, names in itertools.product(
            (None, 2.0), (1.0, 0.3), (1.0, 0.7), (None, b), (OUTPUTS, OUTPUTS[:2], (*OUTPUTS[:1], "logits"))
        ):
            agree(three, (h, w, bias), (targets, temperature, 40, cap, scale, names), upstream, 2)
        empty = ours[0].apply(h[:0], w, None, targets[:0], 1.0, 40, None, 1.0, OUTPUTS)
        assert [value.shape for value in empty] == [(0,)] * 5
        # Outside of the vocabulary, as for -100, TRL's and ours are of a logit of 0.
        z = F.linear(h, w.requires_grad_(), b)
        inside, labels = torch.arange(23) > 4, torch.cat([torch.tensor([-100, V, V + 5, -1, -7]), targets[5:]])
        exact = z.gather(-1, labels.clamp(0, V - 1)[:, None])[:, 0].where(inside, 0.0) - z.logsumexp(-1)
        found, *_ = ours[0].apply(h, w, b, labels, 1.0, 40)
        for pair in ((found, exact), (torch.autograd.grad(v.square().sum(), w)[0] for v in (found, exact))):
            assert_near(*pair, 2e-6)


@RELEASES
@on_releases()
def test_divergences(member, release):
    """The teacher is wider, and has more rows. Weights may be fp32 beside hidden states in bf16."""
    with patched_trl(release) as (own, ours, truth):
        three = own[1], ours[1], truth[1]
        generator = torch.Generator().manual_seed(1)
        sizes = (23, D), (V, D), (V,), (23, D + 3), (V + 5, D + 3), (V + 5,)
        x, w, b, y, u, c = (torch.randn(s, generator=generator) for s in sizes)

        def upstream(values):
            return (values[0] * torch.arange(23)).sum()

        for beta, cap, scale, temperature, biased in itertools.product(
            (0.0, 0.3, 1.0), (None, 2.0), (1.0, 0.3), (1.0, 0.7), (False, True)
        ):
            rest = (beta, temperature, scale, cap, 0.8, 3.0 if cap is None else None)
            agree(three, (x, w, b if biased else None), (y, u, c if biased else None, *rest), upstream, 1)
            if release != "stand-in" and not biased:
                states = [v.bfloat16() for v in (x, y)]
                weights = [v.bfloat16().float() for v in (w, u)]
                agree(three, (states[0], weights[0], None), (states[1], weights[1], None, *rest), upstream, 1)


@RELEASES
@on_releases()
def test_habits(member, release):
    """What else programs do with TRL's functions. What is not covered TRL's own computes, in words, once."""
    x, w, ids = torch.randn(5, D), torch.randn(V, D), torch.arange(5)

    def log_probs_of(f, weight=w, temperature=1.0, cap=None):
        return f.apply(x, weight, None, ids, temperature, 9, cap)[:1]

    def divergence_of(f, bias=None, beta=0.5):
        return f.apply(x, w, bias, x, -w, None, beta)

    with patched_trl(release) as (own, ours, _):
        for which, said, call in (
            (0, "temperature must be", lambda f: log_probs_of(f, w, torch.tensor(0.7))),
            (0, "logit_softcap must be", lambda f: log_probs_of(f, w, 1.0, 0)),
            (1, "beta must be", lambda f: divergence_of(f, None, 1e-9)),
            (1, "cast the bias", lambda f: divergence_of(f, w[:, 0].double())),
        ):
            with pytest.warns(trl_door.TRLWarning, match=said):
                found = call(ours[which])
            with warnings.catch_warnings():
                warnings.simplefilter("error", trl_door.TRLWarning)
                assert all(map(torch.equal, found, call(ours[which]))), said
            assert all(map(torch.equal, found, call(own[which]))), said

        if release != "stand-in":  # whose function is not autograd's
            compiled = torch.compile(lambda: log_probs_of(ours[0]), fullgraph=True, backend="eager")
            torch.testing.assert_close(compiled(), log_probs_of(own[0]))
        assert copy.copy(ours[0]).own is own[0]

        def twice(ctx, *arguments):
            first, *rest = stock(ctx, *arguments)
            return 2 * first, *rest

        stock, doubled = own[0].forward, 2 * log_probs_of(own[0])[0]

        class Derived(ours[0]):
            forward = staticmethod(twice)

        assert issubclass(Derived, own[0]) and torch.equal(log_probs_of(Derived)[0], doubled)
        with mock.patch.object(own[0], "forward", staticmethod(twice)):
            with pytest.warns(trl_door.TRLWarning, match="was replaced"):
                assert torch.equal(log_probs_of(ours[0])[0], doubled)
            trl_door.unpatch()
            with pytest.warns(trl_door.TRLWarning, match="as released: it stays"):
                trl_door.patch()
            assert torch.equal(log_probs_of(sys.modules["trl.trainer.utils"]._ChunkedLogProbFunction)[0], doubled)
        trl_door.unpatch()
        user = types.ModuleType("user")
        user.ChunkedLogProbFunction, user.kept = own[0], own[0]
        with with_modules({"user": user}):
            trl_door.patch()
            assert user.ChunkedLogProbFunction.own is user.kept is own[0]
            trl_door.unpatch()
            assert user.ChunkedLogProbFunction is own[0]
    with pytest.raises(ValueError, match="logits_budget must be"):
        trl_door.patch(logits_budget=-1)


def tokenizer():
    from tokenizers import Tokenizer, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    words = ["<pad>", "<s>", "</s>", "<unk>", *(f"w{i}" for i in range(V - 4))]
    made = Tokenizer(models.WordLevel({word: i for i, word in enumerate(words)}, unk_token="<unk>"))
    made.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    return PreTrainedTokenizerFast(
        tokenizer_object=made, pad_token="<pad>", bos_token="<s>", eos_token="</s>", unk_token="<unk>"
    )


@contextlib.contextmanager
def launched(member: Member):
    """The variables of torchrun, from which accelerate learns of the ranks."""
    rank, ranks = str(member.rank), str(member.ranks)
    variables = dict(RANK=rank, LOCAL_RANK=rank, WORLD_SIZE=ranks, LOCAL_WORLD_SIZE=ranks)
    variables |= dict(MASTER_ADDR="localhost", MASTER_PORT="29511", ACCELERATE_USE_CPU="true")
    with mock.patch.dict(os.environ, variables if member.ranks > 1 else {}):
        yield


SHARED = dict(max_steps=4, gradient_accumulation_steps=2, learning_rate=0.1, optim="sgd", seed=1, use_cpu=True)
SHARED |= dict(bf16=False, logging_steps=1, report_to="none", save_strategy="no", disable_tqdm=True)
LOGGED = {"loss", "grad_norm", "eval_loss", "eval_right", "entropy", "mean_token_accuracy", "rewards/margins"}


def _right(found) -> dict:
    top = torch.as_tensor(found.predictions[0] if type(found.predictions) is tuple else found.predictions)
    return {"right": accuracy_of(top, torch.as_tensor(found.label_ids)).item()}


def _loss_of(out, labels, num_items_in_batch=None):
    return F.cross_entropy(out["logits"][:, :-1].flatten(0, 1).float(), labels[:, 1:].flatten())


def _overridden(self, model, inputs, return_outputs=False, num_items_in_batch=None):
    labels = inputs.pop("labels")
    out = model(**inputs)
    loss = _loss_of(out, labels)
    return (loss, out) if return_outputs else loss


def _with_z_loss(self, model, inputs, return_outputs=False, num_items_in_batch=None):
    out = model(**inputs)
    loss = out["loss"] + 0.01 * out["logits"].float().logsumexp(-1).square().mean()
    return (loss, out) if return_outputs else loss


AFTER, LABELS = "makes the logits beside its fused loss", "called without the labels that its caller has"
EVALUATED, METRICS = dict(eval_strategy="steps", eval_steps=2), {"compute_metrics": _right}
# By transformers' Trainer: arguments of its configuration, others of its own, options of the patch, its compute_loss,
# what is said.
OF_TRANSFORMERS = {
    "": (EVALUATED, METRICS, {}, None, None),
    "label smoothing": ({"label_smoothing_factor": 0.1}, {}, {}, None, None),
    "compute_loss_func": ({}, {"compute_loss_func": _loss_of}, {}, None, LABELS),
    "compute_loss": ({}, {}, {}, _overridden, LABELS),
    "compute_loss with a z-loss": ({}, {}, {}, _with_z_loss, AFTER),
    "metrics": (EVALUATED, METRICS, {"eval_logits": False}, None, AFTER),
    "losses": (EVALUATED, {}, {"eval_logits": False}, None, None),
}


def _of_trl(name: str) -> tuple[dict, dict]:
    """What TRL's trainer of this name is given beside the model and what all have: as configuration, and otherwise."""
    from datasets import Dataset

    texts = [[f" w{(7 * i + 3 * j + i * j) % (V - 4)}" for j in range(12)] for i in range(16)]
    rows = [{"prompt": "".join(t[:4]), "chosen": "".join(t[4:]), "rejected": "".join(t[:3:-1])} for t in texts]
    configured, more = {}, {}
    if name == "SFT":
        rows = [{"text": row["prompt"] + row["chosen"]} for row in rows]
    elif name == "KTO":
        rows = [{"prompt": r["prompt"], "completion": r["chosen"], "label": i % 2 == 0} for i, r in enumerate(rows)]
    elif name != "DPO":
        rows = [{"prompt": row["prompt"]} for row in rows]
    if name in ("GRPO", "RLOO"):
        configured |= dict(per_device_train_batch_size=4, num_generations=4, max_completion_length=6, temperature=0.7)
        configured |= dict(beta=0.1, num_iterations=2)
        configured |= dict(learning_rate=1e-3) if name == "RLOO" else {}  # its losses are sums over a completion
        more["reward_funcs"] = lambda completions, **_: [float(c.count("w1")) for c in completions]
    if name == "Distillation":
        configured |= dict(max_completion_length=6, temperature=0.7, beta=0.3)
    return configured, dict(processing_class=tokenizer(), train_dataset=Dataset.from_list(rows), **more)


TRAINERS = "SFT", "DPO", "GRPO", "RLOO", "KTO", "Distillation"
TRAININGS = [("", ranks, kind) for ranks in (1, 2) for kind in TRAINED]
TRAININGS += [(name, 1, "plain") for name in OF_TRANSFORMERS if name]
TRAININGS += [(name, 1, kind) for name in TRAINERS for kind in ("plain", "capped")]


@pytest.mark.parametrize(("name", "ranks", "kind"), TRAININGS)
@RELEASE_ALONE
@on_releases(ranks=None)
def test_trainers(member, release, name, kind):
    """With the patches a training logs what it logs without. TRL's and transformers' own say nothing."""
    import transformers as hf

    path, logs = saved(model_of(release, kind), member), []
    options, compute_loss, said, of_trl = {}, None, None, name not in OF_TRANSFORMERS
    if of_trl:
        library, called, (configured, given) = (
            importlib.import_module("trl"),
            (trl_door, "token_statistics"),
            _of_trl(name),
        )
        configuration, trainer = getattr(library, name + "Config"), getattr(library, name + "Trainer")
    else:
        configured, given, options, compute_loss, said = OF_TRANSFORMERS[name]
        data = [{key: value[i] for key, value in batch(s).items()} for s in range(10) for i in range(2)]
        given = dict(train_dataset=data[4:], eval_dataset=data[:4], **given)
        configuration, trainer, called = hf.TrainingArguments, hf.Trainer, (door, "linear_cross_entropy")
    if compute_loss is not None:
        trainer = type("Own", (trainer,), {"compute_loss": compute_loss})
    if name == "Distillation":
        called = trl_door, "divergences"
    for ours in (False, True):
        model = hf.AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32)  # DPO loads its reference, too
        if name == "Distillation":
            torch.manual_seed(5)
            given["teacher_model"] = teacher = hf.AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32)
            torch.nn.init.normal_(teacher.get_output_embeddings().weight, std=0.5)
        spied = mock.patch.object(*called, wraps=getattr(*called))
        with launched(member), spied as calls, warned((door.LogitsWarning, trl_door.TRLWarning)) as found:
            if ours:
                trl_door.patch(), door.patch(model, **options)  # of which TRL's head notices the first alone
            try:
                arguments = dict(output_dir=tempfile.mkdtemp(), per_device_train_batch_size=2) | SHARED | configured
                made = trainer(model, args=configuration(**arguments), **given)
                made.train()
            finally:
                trl_door.unpatch()
        assert len(found) == (ours and said is not None) and all(said in text for text in found), found
        assert bool(calls.call_count) == (ours and said != LABELS)
        logs.append([{n: v for n, v in each.items() if n in LOGGED} for each in made.state.log_history])
    assert sum(each.get("grad_norm", 0) > 0 for each in logs[0]) == 4
    for theirs, mine in zip(*logs, strict=True):
        assert mine == pytest.approx(theirs, rel=1e-4 if of_trl else 2e-5, abs=1e-6)
