"""Metrics of a patched model without its logits: with a stand-in, and with --all with the release and its Trainer."""

import copy
import tempfile

import pytest
import torch
from torch.nn import functional as F

import parallel_lce.transformers as door
from transformers_models import KINDS, RELEASE_ALONE, RELEASES, batch, fused, model_of, near, on_releases, warned


@pytest.mark.parametrize("training", [True, False])
@pytest.mark.parametrize("kind", KINDS)
@RELEASES
@on_releases()
def test_metrics_of_each_token(member, release, kind, training):
    model, given = model_of(release, kind).train(training), batch(0)
    own = copy.deepcopy(model)
    found, expected = door.patch(model, token_metrics=True, token_accuracy=True)(**given), own(**given)
    assert fused(found)
    near(found.loss.detach(), expected.loss.detach())
    target = F.pad(given["labels"], (0, 1), value=-100)[:, 1:]
    counted, log_p = target >= 0, torch.log_softmax(expected.logits.detach().double(), -1)
    near(found["predicted_ids"], log_p.argmax(-1).masked_fill(~counted, -1))
    near(found["log_probs"].double(), log_p.gather(-1, target.clamp(min=0)[..., None])[..., 0] * counted)
    near(found["entropies"].double(), -(log_p.exp() * log_p).sum(-1) * counted)
    assert not any(found[name].requires_grad for name in ("log_probs", "entropies"))
    near(found["token_accuracy"], (log_p.argmax(-1) == target)[counted].float().mean())
    found.loss.backward(), expected.loss.backward()
    for name, p in own.named_parameters():
        near(model.get_parameter(name).grad, p.grad)
    model.get_output_embeddings().register_forward_hook(lambda layer, given, z: z + 0)
    with warned() as said:
        assert "log_probs" not in model.train()(**given)
    assert len(said) == 1  # the model's own loss


@pytest.mark.parametrize("smoothing", [0.0, 0.1])
@RELEASE_ALONE
@on_releases()
def test_its_trainer(member, release, smoothing):
    """Its metrics by argmax make no logits, its smoothed labels do, said once."""
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


def test_the_metrics_are_those_of_the_output_layer():
    """Not of a second head, whose loss comes later."""
    model, given = model_of("stand-in", "plain").train(), batch(0)

    class Heads(type(model)):
        def forward(self, input_ids, labels=None):
            out = super().forward(input_ids, labels)
            other = -2 * self.model["embed"](input_ids) @ self.lm_head.weight.T
            out["loss"] = out["loss"] + self.loss_function(other, labels, self.vocabulary)
            return out

    expected = door.patch(model, token_metrics=True)(**given)
    model = door.unpatch(model)
    model.__class__ = Heads
    found = door.patch(model, token_metrics=True)(**given)
    assert torch.equal(found["predicted_ids"], expected["predicted_ids"]) and found["loss"] > expected["loss"]
