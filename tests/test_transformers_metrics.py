"""Metrics of a patched model without its logits, and the labels that a Trainer smooths: with a stand-in, and with --all
with the release."""

import contextlib
import copy
import dataclasses
import pickle
import tempfile
import types
import warnings
from unittest import mock

import pytest
import torch

import parallel_lce.transformers as door
from parallel_lce.lazy_logits import LogitsTensor
from parallel_lce.output_metrics import with_fields
from parallel_lce.transformers import patch
from tools import with_modules
from transformers_models import (
    KINDS,
    RELEASE_ALONE,
    RELEASES,
    batch,
    model_of,
    near,
    on_releases,
    unmade,
    warned,
    without_a_warning,
)


def _shifted(labels):
    return torch.nn.functional.pad(labels, (0, 1), value=-100)[:, 1:]


@pytest.mark.parametrize("how", ["training", "evaluation", "own logits", "own loss"])
@pytest.mark.parametrize("kind", KINDS)
@RELEASES
@on_releases()
def test_metrics_of_each_token(member, release, kind, how):
    model, given = model_of(release, kind).train("training" in how), batch(0)
    own = copy.deepcopy(model)
    patch(model, token_metrics=True, token_accuracy=True, eval_logits=how == "own logits")
    if how == "own loss":
        model.train().get_output_embeddings().register_forward_hook(lambda *_: None)
    with warned() as said:
        found, expected = model(**given), own(**given)
    assert len(said) == (how == "own loss")
    assert unmade(found.logits) == (how in ("training", "evaluation"))
    near(found.loss.detach(), expected.loss.detach())
    target = _shifted(given["labels"])
    counted, log_p = target >= 0, torch.log_softmax(expected.logits.detach().double(), -1)
    near(found["predicted_ids"], log_p.argmax(-1).masked_fill(~counted, -1))
    near(found["log_probs"].double(), log_p.gather(-1, target.clamp(min=0)[..., None])[..., 0] * counted)
    near(found["entropies"].double(), -(log_p.exp() * log_p).sum(-1) * counted)
    assert not any(found[name].requires_grad for name in ("log_probs", "entropies"))
    near(found["token_accuracy"], (log_p.argmax(-1) == target)[counted].float().mean())
    if how == "training":
        found.loss.backward(), expected.loss.backward()
        for name, p in own.named_parameters():
            near(model.get_parameter(name).grad, p.grad)


# Uses of the logits of a forward with a loss, and whether they do without them.
IDS = {
    "argmax": (lambda z: z.argmax(-1), True),
    "torch.argmax": (lambda z: torch.argmax(z, dim=2), True),
    "as Trainer's": (lambda z: z.detach().argmax(dim=-1), True),
    "after a cast": (lambda z: z.float().detach().argmax(-1), True),
    "of a part": (lambda z: z[:, :-1].argmax(-1), False),
    "over tokens": (lambda z: z.argmax(1), False),
    "all dimensions": (lambda z: z.argmax(), False),
    "kept": (lambda z: z.argmax(-1, keepdim=True), False),
    "changed in place": (lambda z: (z.detach().neg_(), z.argmax(-1))[1], False),
    "changed, detached": (lambda z: [z.detach(), z.detach().neg_()][0].argmax(-1), False),
}


@pytest.mark.parametrize("training", [True, False])
@pytest.mark.parametrize("use", IDS)
@RELEASES
@on_releases()
def test_ids_of_the_logits(member, release, use, training):
    model = model_of(release, "capped").train(training)
    own, (take, lazily) = patch(copy.deepcopy(model)), IDS[use]
    door.unpatch(own)
    patch(model, eval_logits=False)
    with warned() as said, torch.set_grad_enabled(training):
        logits = model(**batch(0)).logits
        found, expected = take(logits), take(own(**batch(0)).logits)
    assert type(found) is torch.Tensor and torch.equal(found, expected)
    assert type(logits) is LogitsTensor and unmade(logits) == lazily == (not said)


def test_ids_of_logits_with_nan():
    model = patch(model_of("stand-in", "plain").eval(), eval_logits=False)
    with torch.no_grad():
        model.lm_head.weight[7, 0] = torch.nan
        logits = model(**batch(0)).logits
        with pytest.warns(door.LogitsWarning, match="since 'argmax' of output.logits wants them"):
            assert (logits.argmax(-1) == 7).all() and not unmade(logits)


# --- labels that a Trainer smooths ----------------------------------------------------------------------

SMOOTHER = """
import torch
class LabelSmoother:
    def __init__(self, epsilon):
        self.epsilon, self.ignore_index = epsilon, -100
    def __call__(self, model_output, labels, shift_labels=False, num_items_in_batch=None):
        logits, labels = model_output["logits"][..., :-1, :], labels[..., 1:]
        log_probs, ignored = -torch.log_softmax(logits, -1), labels == self.ignore_index
        chosen = log_probs.gather(-1, labels.clamp(min=0).unsqueeze(-1)).squeeze(-1)
        losses = (1 - self.epsilon) * chosen + self.epsilon * log_probs.mean(-1)
        items = (~ignored).sum() if num_items_in_batch is None else num_items_in_batch
        return losses.masked_fill(ignored, 0.0).sum() / items
"""

TRAINER = """
class Trainer:
    def __init__(self, model, smoother, compute_loss_func=None):
        self.model, self.label_smoother, self.compute_loss_func = model, smoother, compute_loss_func
    def compute_loss(self, inputs, items=None):
        inputs = dict(inputs)
        labels = inputs.pop("labels")
        outputs = self.model(**inputs)
        if self.compute_loss_func is not None:
            return self.compute_loss_func(outputs, labels, num_items_in_batch=items)
        return self.label_smoother(outputs, labels, shift_labels=True, num_items_in_batch=items)
"""


@contextlib.contextmanager
def library_of(smoother, trainer):
    """transformers' Trainer and its label smoother, of these texts."""
    modules = {"transformers.trainer_pt_utils": smoother, "transformers.trainer": trainer}
    made = {name: types.ModuleType(name) for name in modules}
    for name, module in made.items():
        exec(modules[name], vars(module))
    with with_modules(made):
        yield types.SimpleNamespace(**{k: v for m in made.values() for k, v in vars(m).items()})


@pytest.fixture
def library():
    """Of the release's contract."""
    with library_of(SMOOTHER, TRAINER) as found:
        yield found


def test_a_smoother_of_older_releases():
    """Before transformers 5.15 it takes no number of items."""
    older = SMOOTHER.replace(", num_items_in_batch=None", "").replace("num_items_in_batch is None else", "True else")
    model, given = model_of("stand-in", "plain").train(), batch(0)
    with library_of(older, TRAINER.replace(", num_items_in_batch=items)", ")")) as library:
        smoother = library.LabelSmoother(0.1)
        trainer = library.Trainer(patch(model), smoother)
        loss = trainer.compute_loss(given)
        assert trainer.label_smoother is not smoother
        model.eval()  # whose logits are real
        near(trainer.compute_loss(given), loss)
        door.unpatch(model)
        near(trainer.compute_loss(given), loss)


@pytest.mark.parametrize("items", [None, 7, torch.tensor(30)], ids=str)
@pytest.mark.parametrize("kind", ["plain", "capped"])
def test_smoothed_labels_are_fused(library, kind, items):
    model, given = model_of("stand-in", kind).train(), batch(0)
    own = copy.deepcopy(model)
    trainers = [library.Trainer(each, library.LabelSmoother(0.1)) for each in (patch(model, eval_logits=False), own)]
    with (
        without_a_warning(),
        mock.patch.object(door, "linear_cross_entropy", wraps=door.linear_cross_entropy) as called,
    ):
        found, expected = (trainer.compute_loss(given, items) for trainer in trainers)
        assert called.call_count == 1 and called.call_args.kwargs["counted_tokens"].read() == 26
        near(found.detach(), expected.detach())
        found.backward(), expected.backward()
        for name, p in own.named_parameters():
            near(model.get_parameter(name).grad, p.grad)
        model.eval(), own.eval()
        with torch.no_grad():  # evaluation after a training step
            near(*(trainer.compute_loss(given, items) for trainer in trainers))
        assert called.call_count == 2 and trainers[0].label_smoother.epsilon == 0.1
        door.unpatch(model)
        near(*(trainer.compute_loss(given, items).detach() for trainer in trainers))
    assert called.call_count == 2


def test_smoothed_labels_of_real_logits(library):
    """Where something stands in the way of lazy ones."""
    model, given = patch(model_of("stand-in", "plain").train()), batch(0)
    model.lm_head.register_forward_hook(lambda *_: None)
    trainer = library.Trainer(model, library.LabelSmoother(0.1))
    with pytest.warns(door.LogitsWarning, match="its output layer has hooks"):
        found = trainer.compute_loss(given)
    near(found.detach(), library.Trainer(door.unpatch(model), library.LabelSmoother(0.1)).compute_loss(given).detach())


@pytest.mark.parametrize("options", [{"gradient_filter": 2**-13}, {}], ids=str)
def test_smoothed_labels_that_are_not_fused_are_said(library, options):
    """Fused gradients of a filter take none; and DDP may have used the logits."""
    model, given = patch(model_of("stand-in", "plain").train(), **options), batch(0)
    trainer = library.Trainer(model, library.LabelSmoother(0.1))
    if not options:
        trainer.model = lambda **inputs: (out := model(**inputs), out["logits"].sum())[0]
    with pytest.warns(
        door.LogitsWarning, match="a smoothed loss of all logits: " + ("a grad" if options else "'sum' ")
    ):
        found = trainer.compute_loss(given)
    near(found.detach(), library.Trainer(door.unpatch(model), library.LabelSmoother(0.1)).compute_loss(given).detach())


@pytest.mark.parametrize("change", ["compute_loss_func", "smoother", "is_fsdp_enabled"])
def test_other_losses_of_a_trainer_get_logits(library, change):
    model, given = model_of("stand-in", "plain").train(), batch(0)
    found = []
    for each in (patch(copy.deepcopy(model)), model):
        trainer = library.Trainer(each, library.LabelSmoother(0.1))
        if change == "compute_loss_func":
            trainer.compute_loss_func = lambda outputs, labels, **_: outputs["logits"].square().mean()
        elif change == "smoother":
            trainer.label_smoother = type(
                "Other", (), {"__call__": lambda self, out, labels, **_: out["logits"].sum()}
            )()
        else:
            trainer.is_fsdp_enabled = True
        with warnings.catch_warnings(record=True) as said:
            warnings.simplefilter("always")
            found.append(trainer.compute_loss(given).detach())
        words = [str(w.message) for w in said if issubclass(w.category, door.LogitsWarning)]
        assert len(words) == (each is not model) and all("without the labels" in each for each in words)
    assert torch.equal(*found)


@pytest.mark.parametrize("smoothing", [0.0, 0.1])
@RELEASE_ALONE
@on_releases()
def test_its_trainer_evaluates_without_logits(member, release, smoothing):
    """By argmax, and with smoothed labels."""
    from transformers import Trainer, TrainingArguments

    model, results = model_of(release, "plain"), []
    rows = [{name: value[0] for name, value in batch(seed).items()} for seed in range(6)]
    for ours in (False, True):
        with tempfile.TemporaryDirectory() as folder:
            options = dict(
                use_cpu=True, report_to="none", save_strategy="no", max_steps=2, per_device_train_batch_size=2
            )
            trainer = Trainer(
                patch(copy.deepcopy(model), eval_logits=False) if ours else copy.deepcopy(model),
                TrainingArguments(folder, label_smoothing_factor=smoothing, **options),
                train_dataset=rows,
                eval_dataset=rows,
                preprocess_logits_for_metrics=lambda logits, labels: logits.argmax(dim=-1),
                compute_metrics=lambda p: {"accuracy": float((p.predictions[:, :-1] == p.label_ids[:, 1:]).mean())},
            )
            with without_a_warning():
                trained = trainer.train()
                metrics = trainer.evaluate()
        results.append([trained.training_loss, metrics["eval_loss"], metrics["eval_accuracy"]])
    assert results[1] == pytest.approx(results[0], rel=1e-4)


@dataclasses.dataclass
class Output:
    loss: float
    logits: list


def test_an_output_with_metrics_can_be_pickled():
    output = with_fields(Output, ("token_accuracy",))(1.0, [2], token_accuracy=0.5)
    for copied in (pickle.loads(pickle.dumps(output)), copy.deepcopy(output)):
        assert type(copied) is type(output) and copied == output and copied.token_accuracy == 0.5


def test_the_metrics_are_those_of_the_output_layer():
    """Not of a second head, whose loss comes later."""
    model, given = model_of("stand-in", "plain").train(), batch(0)

    class Heads(type(model)):
        def forward(self, input_ids, labels=None, **kwargs):
            out = super().forward(input_ids, labels, **kwargs)
            other = -2 * self.model["embed"](input_ids) @ self.lm_head.weight.T
            out["loss"] = out["loss"] + self.loss_function(other, labels, self.vocabulary)
            return out

    expected = patch(model, token_metrics=True)(**given)
    model = door.unpatch(model)
    model.__class__ = Heads
    found = patch(model, token_metrics=True)(**given)
    assert torch.equal(found["predicted_ids"], expected["predicted_ids"]) and found["loss"] > expected["loss"]
