"""Bodies of the tests of transformers and TRL: a patched model beside the same model with its own loss."""

from __future__ import annotations

import contextlib
import copy
import functools
import itertools
import os
import tempfile
import warnings
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch.distributed.fsdp import FullyShardedDataParallel, fully_shard
from torch.distributed.tensor import DTensor
from torch.nn.parallel import DistributedDataParallel

import parallel_lce.transformers as door
import transformers_standin
from parallel_lce import lazy_logits
from parallel_lce import trl as trl_door
from transformers_standin import CausalLM, ColwiseGatherOutput, installed_trl
from world import Member, mesh_of

V, D, STEPS = 97, 32, 2
STANDIN = {
    "plain": {},
    "capped": {"cap": 2.0, "scale": 1.5},
    "tied, biased": {"tied": True, "bias": True},
    "biased": {"bias": True},
}


def model_of(release: str, kind: str):
    torch.manual_seed(0)
    if release == "stand-in":
        return CausalLM(V, D, **STANDIN[kind])
    import transformers as hf

    sizes = dict(vocab_size=V, hidden_size=D, intermediate_size=48, num_hidden_layers=2, num_attention_heads=4)
    sizes |= dict(max_position_embeddings=64, bos_token_id=1, eos_token_id=2, pad_token_id=0)
    names, more = {
        "plain": ("Llama", {"num_key_value_heads": 2}),
        "capped": ("Gemma2", {"num_key_value_heads": 2, "head_dim": 8, "final_logit_softcapping": 2.0}),
        "tied, biased": ("Qwen2", {"num_key_value_heads": 2, "tie_word_embeddings": True}),
        "biased": ("Phi", {"resid_pdrop": 0.0}),
        "scaled": ("Cohere", {"logit_scale": 0.3}),
        "divided": ("Granite", {"logits_scaling": 3.0}),
        "experts": ("Mixtral", {"num_key_value_heads": 2, "num_local_experts": 4, "output_router_logits": True}),
    }[kind]
    model = getattr(hf, names + "ForCausalLM")(getattr(hf, names + "Config")(**sizes, **more))
    torch.nn.init.normal_(model.get_output_embeddings().weight, std=0.5)
    return model


def batch(seed: int) -> dict:
    ids = torch.randint(3, V, (2, 16), generator=torch.Generator().manual_seed(seed))
    labels = ids.clone()
    labels[0, :5] = -100
    return {"input_ids": ids, "labels": labels}


def near(found, expected) -> None:
    found = found.full_tensor() if isinstance(found, DTensor) else found
    torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-5)


def fused(output) -> bool:
    return isinstance(output.logits, door._LazyLogits) and output.logits.made is None


def accuracy_of(logits, labels):
    top, labels = logits[:, :-1].argmax(-1), labels[:, 1:]
    return ((top == labels) & (labels != -100)).sum() / (labels != -100).sum()


@contextlib.contextmanager
def without_a_warning():
    with warnings.catch_warnings():
        warnings.simplefilter("error", door.LogitsWarning)
        yield


@without_a_warning()
def alone(member: Member, release: str, kind: str, accuracy: bool) -> None:
    model = model_of(release, kind).train()
    own = copy.deepcopy(model)
    assert door.patch(door.patch(model), token_accuracy=accuracy) is model
    model = copy.deepcopy(model)
    given = batch(1)
    shifted = torch.nn.functional.pad(given["labels"], (0, 1), value=-100)[:, 1:].contiguous()
    for more in ({}, {"num_items_in_batch": torch.tensor(40)}, {"num_items_in_batch": 7, "shift_labels": shifted}):
        found, expected = model(**given, **more), own(**given, **more)
        for m, output in ((model, found), (own, expected)):
            m.zero_grad()
            (3 * output.loss).backward()
        assert fused(found) and found.loss.dtype == torch.float32
        near(found.loss, expected.loss)
        for p, q in zip(model.parameters(), own.parameters()):
            near(p.grad, q.grad)
        assert ("token_accuracy" in found) == accuracy
        if accuracy:
            near(found["token_accuracy"], accuracy_of(expected.logits, given["labels"]))
        assert found.logits.shape == expected.logits.shape and found.logits.dtype == expected.logits.dtype
        assert torch.equal(found.logits[..., 2:], expected.logits[..., 2:])
    ids = given["input_ids"]
    assert torch.is_tensor(model(ids).logits) and torch.equal(model(ids).logits, own(ids).logits)
    lazy = [door._LazyLogits in map(type, model(**g, return_dict=False)) for g in (given, {"input_ids": ids})]
    assert lazy == [True, False]
    if release != "stand-in":
        length = {"max_new_tokens": 5, "do_sample": False}
        assert torch.equal(model.generate(ids[:, :4], **length), own.generate(ids[:, :4], **length))
    model.eval(), own.eval()
    assert torch.equal(model(**given).loss, own(**given).loss) and torch.is_tensor(model(**given).logits)
    door.patch(model, eval_logits=False)
    assert fused(model(**given)) and torch.is_tensor(model(ids).logits)
    near(model(**given).loss, own(**given).loss)
    door.unpatch(model).train()
    assert torch.equal(model(**given).logits, own(**given).logits) and torch.is_tensor(model(**given).logits)


def wrapped(model, how: str, member: Member):
    mesh = mesh_of("cpu", (member.ranks,), ("dp",))
    if how == "DDP":
        return DistributedDataParallel(model, find_unused_parameters=True)
    if how == "FSDP1":
        return FullyShardedDataParallel(model, use_orig_params=True, device_id=torch.device("cpu"))
    norm = model.model["norm"] if isinstance(model, CausalLM) else model.model.norm
    if how == "FSDP2, head apart":
        fully_shard(model.lm_head, mesh=mesh, reshard_after_forward=True)
    elif how == "FSDP2, head with norm":
        fully_shard([norm, model.lm_head], mesh=mesh, reshard_after_forward=False)
    return fully_shard(model, mesh=mesh)


def by_plan(release: str, model, member: Member):
    mesh = mesh_of("cpu", (member.ranks,))
    if release == "stand-in":
        ColwiseGatherOutput().install_forward(model.lm_head, mesh)
        return model
    from transformers import AutoModelForCausalLM
    from transformers.distributed import DistributedConfig

    folder = [tempfile.mkdtemp()]
    dist.broadcast_object_list(folder)
    if member.rank == 0:
        model.save_pretrained(folder[0])
    dist.barrier()
    config = DistributedConfig(tp_size=member.ranks, tp_plan="auto")
    return AutoModelForCausalLM.from_pretrained(folder[0], distributed_config=config, dtype=torch.float32)


@without_a_warning()
def sharded(member: Member, release: str, kind: str, how: str, before: bool, accuracy: bool = False) -> None:
    model = model_of(release, kind)
    own, inner = copy.deepcopy(model).train(), model
    if how == "plan":
        model = inner = by_plan(release, model, member)
    if before:
        door.patch(inner, token_accuracy=accuracy)
    if how != "plan":
        model = wrapped(model, how, member)
    if not before:
        door.patch(inner, token_accuracy=accuracy)
    model.train()
    for step in range(STEPS):
        given = batch(10 * step + (0 if how == "plan" else member.rank))
        model.zero_grad(), own.zero_grad()
        found, expected = model(**given), own(**given)
        assert fused(found)
        found.loss.backward(), expected.loss.backward()
        near(found.loss.detach(), expected.loss.detach())
        gradients = {name: p.grad for name, p in own.named_parameters()}
        if how != "plan":
            for gradient in gradients.values():
                dist.all_reduce(gradient.div_(member.ranks))
        if how == "FSDP1":
            with FullyShardedDataParallel.summon_full_params(model, with_grads=True):
                compared = [(p.grad.clone(), gradients[n]) for n, p in model.module.named_parameters()]
        else:
            compared = [(p.grad, gradients[n]) for n, p in inner.named_parameters()]
        for gradient, exact in compared:
            near(gradient, exact)
        if how != "plan" and how != "DDP":
            with pytest.raises(RuntimeError, match="FSDP has taken back the output layer's weight"):
                found.logits[0]
    model.eval(), own.eval()
    with torch.no_grad():
        near(model(**given).logits, own(**given).logits)


def spoiled(member: Member, mistake: str) -> None:
    """:func:`alone` with a mistake."""
    if mistake == "no shift":
        loss = door._Loss.__call__

        def unshifted(self, logits, labels, size, *rest, shift_labels=None, **more):
            return loss(self, logits, labels, size, *rest, shift_labels=labels, **more)

        change = mock.patch.object(door._Loss, "__call__", unshifted)
    else:
        epilogue = lazy_logits.RecordedLogits.epilogue
        name = {"doubled scale": "logit_scale", "doubled cap": "logit_softcap"}[mistake]

        def doubled(self):
            arguments = epilogue(self)
            return {**arguments, name: 2 * arguments[name]}

        change = mock.patch.object(lazy_logits.RecordedLogits, "epilogue", doubled)
    with change:
        alone(member, "stand-in", "capped", False)


def unsummed(member: Member) -> None:
    """:func:`sharded` by a plan, with the gradient of the hidden states of this rank's shard alone."""
    spoiled = functools.partial(door.linear_cross_entropy, reduce_hidden_grad=False)
    with mock.patch.object(door, "linear_cross_entropy", spoiled):
        sharded(member, "stand-in", "plain", "plan", False)


def rounded(member: Member, release: str) -> None:
    """In bf16 the errors of the gradients are at most those of the model's own loss."""
    for kind in ("plain", "capped", "tied, biased"):
        model = model_of(release, kind).bfloat16().train()
        own, exact = copy.deepcopy(model), copy.deepcopy(model).double()
        for each in (door.patch(model), own, exact):
            each(**batch(1)).loss.backward()
        errors = [
            max((p.grad - q.grad).abs().max() / q.grad.abs().max() for p, q in zip(m.parameters(), exact.parameters()))
            for m in (model, own)
        ]
        assert model.get_output_embeddings().weight.grad.dtype == torch.bfloat16 and errors[0] <= errors[1], errors


@without_a_warning()
def compiled(member: Member, release: str) -> None:
    for kind in ("plain", "capped"):
        torch._dynamo.reset()
        model = model_of(release, kind).train()
        own = copy.deepcopy(model)
        run = torch.compile(door.patch(model, token_accuracy=True), backend="aot_eager")
        found, expected = run(**batch(1)), own(**batch(1))
        assert fused(found)
        found.loss.backward(), expected.loss.backward()
        for p, q in zip(model.parameters(), own.parameters()):
            near(p.grad, q.grad)
        near(found.loss, expected.loss), near(run(batch(1)["input_ids"]).logits, expected.logits)


def fallbacks(member: Member, release: str) -> None:
    """The model's own loss, with one warning, where the fused one might be another."""
    changes = {
        "the forward of its output layer": lambda m: setattr(
            m.lm_head, "forward", lambda h: 2 * h @ m.lm_head.weight.T
        ),
        "its output layer has hooks": lambda m: m.lm_head.register_forward_hook(lambda layer, given, out: 3 * out),
        "was replaced after patch": lambda m: setattr(m, "lm_head", torch.nn.Linear(D, V)),
    }
    if release == "stand-in":
        changes["by operator '__add__'"] = lambda m: setattr(m, "plus", 1.0)
        changes["by attribute 'view'"] = lambda m: setattr(m, "own_loss", True)
    for said, change in changes.items():
        model = door.patch(model_of(release, "plain").train(), token_accuracy=True)
        change(model)
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            loss, again = model(**batch(1)).loss, model(**batch(1))
        own = door.unpatch(model)(**batch(1))
        assert torch.equal(loss, own.loss) and torch.equal(again.loss, loss)
        if "'view'" not in said:
            near(again["token_accuracy"], accuracy_of(own.logits, batch(1)["labels"]))
        (warning,) = [w for w in caught if w.category is door.LogitsWarning]
        assert said in str(warning.message), warning.message


def _arguments(member: Member, kind: type, **more):
    shared = dict(max_steps=4, per_device_train_batch_size=2, gradient_accumulation_steps=2, learning_rate=0.1)
    shared |= dict(
        optim="sgd", logging_steps=1, report_to="none", save_strategy="no", use_cpu=True, disable_tqdm=True, seed=1
    )
    return kind(output_dir=tempfile.mkdtemp(), **{**shared, **more})


@contextlib.contextmanager
def launched(member: Member):
    """The variables of torchrun, from which accelerate learns of the ranks."""
    rank, ranks = str(member.rank), str(member.ranks)
    variables = dict(RANK=rank, LOCAL_RANK=rank, WORLD_SIZE=ranks, LOCAL_WORLD_SIZE=ranks)
    variables |= dict(MASTER_ADDR="localhost", MASTER_PORT="29511", ACCELERATE_USE_CPU="true")
    with mock.patch.dict(os.environ, variables if member.ranks > 1 else {}):
        yield


def same_logs(own: list[dict], ours: list[dict], steps: int = 4, rel: float = 2e-5) -> None:
    names = ("loss", "grad_norm", "eval_loss", "eval_right", "entropy", "mean_token_accuracy", "rewards/margins")
    compared = 0
    for mine, theirs in zip(ours, own, strict=True):
        for name in {*names} & {*theirs}:
            assert mine[name] == pytest.approx(theirs[name], rel=rel, abs=1e-6), (name, own, ours)
            compared += name == "grad_norm" and theirs["grad_norm"] > 0
    assert compared == steps


def trainer(member: Member, kind: str) -> None:
    from transformers import Trainer, TrainingArguments

    data = [{name: value[i] for name, value in batch(s).items()} for s in range(10) for i in range(2)]
    logs = []
    with launched(member):
        for patched in (False, True):
            model = model_of("release", kind)
            if patched:
                door.patch(model)
            arguments = _arguments(member, TrainingArguments, eval_strategy="steps", eval_steps=2)

            def right(found) -> dict:
                top = torch.as_tensor(found.predictions[0] if type(found.predictions) is tuple else found.predictions)
                return {"right": accuracy_of(top, torch.as_tensor(found.label_ids)).item()}

            made = Trainer(model, arguments, train_dataset=data[4:], eval_dataset=data[:4], compute_metrics=right)
            made.train()
            logs.append(made.state.log_history)
    same_logs(*logs)


def accelerated(member: Member, kind: str) -> None:
    from accelerate import Accelerator

    losses = []
    with launched(member):
        for patched in (False, True):
            model = model_of("release", kind)
            accelerator = Accelerator(cpu=True)
            model, optimizer = accelerator.prepare(model, torch.optim.SGD(model.parameters(), 0.1))
            if patched:
                door.patch(accelerator.unwrap_model(model))
            model.train()
            losses.append([])
            for step in range(3):
                output = model(**batch(10 * step + member.rank))
                assert fused(output) == patched
                accelerator.backward(output.loss)
                norm = accelerator.clip_grad_norm_(model.parameters(), 1.0)
                optimizer.step(), optimizer.zero_grad()
                losses[-1] += [output.loss.item(), norm.item()]
    assert losses[1] == pytest.approx(losses[0], rel=2e-5)


OUTPUTS = ("log_probs", "entropy", "log_sum_sq_probs", "mean_logits", "is_top1")


def log_probs(member: Member, release: str) -> None:
    """Against TRL's own function, in float64 where it has no rounding of its own."""
    with installed_trl() if release == "stand-in" else contextlib.nullcontext():
        import trl.trainer.utils as utils

        own = utils._ChunkedLogProbFunction
        trl_door.patch(), trl_door.patch(logits_budget=0)
        ours, truth = utils._ChunkedLogProbFunction, transformers_standin._ChunkedLogProbFunction
        generator = torch.Generator().manual_seed(1)
        h, w, b = (torch.randn(s, generator=generator) for s in ((23, D), (V, D), (V,)))
        targets = torch.randint(V, (23,), generator=generator)
        for cap, scale, temperature, bias, names in itertools.product(
            (None, 2.0), (1.0, 0.3), (1.0, 0.7), (None, b), (OUTPUTS, OUTPUTS[:2], OUTPUTS[:1])
        ):
            found = []
            for function, dtype in ((ours, h.dtype), (own, h.dtype), (truth, torch.float64)):
                leaves = [v.to(dtype, copy=True).requires_grad_() for v in (h, w, bias) if v is not None]
                rest = [None] * (3 - len(leaves)) + [targets, temperature, 40, cap, scale, names]
                values = function.apply(*leaves, *rest)
                upstream = values[0].sum() + (0 if values[1] is None else (values[1] * torch.arange(23)).sum())
                found.append([*values, *torch.autograd.grad(upstream, leaves)])
            for i, (mine, theirs, exact) in enumerate(zip(*found)):
                asked = i >= len(OUTPUTS) or OUTPUTS[i] in (*names, "log_probs")
                assert (mine is None) == (theirs is None) == (not asked)
                if asked:
                    assert mine.dtype == theirs.dtype and mine.requires_grad == (i < 2)
                    error, theirs_error = ((v.double() - exact.double()).abs().max() for v in (mine, theirs))
                    assert error <= 2 * theirs_error + 2e-7 * exact.double().abs().max(), (i, error, theirs_error)
        empty = ours.apply(h[:0], w, None, targets[:0], 1.0, 40, None, 1.0, OUTPUTS)
        assert [value.shape for value in empty] == [(0,)] * 5
        with pytest.raises(ValueError, match="outputs must be among .*'logits'"):
            ours.apply(h, w, None, targets, 1.0, 40, None, 1.0, ("logits",))
        gathered = w.clone()
        gathered.ds_id = 0  # as DeepSpeed's ZeRO-3 marks a parameter
        with mock.patch.object(trl_door._LogProbs, "own") as called:
            ours.apply(h, gathered, None, targets, 1.0, 40)
        called.apply.assert_called_once_with(h, gathered, None, targets, 1.0, 40, None, 1.0, OUTPUTS)
        trl_door.unpatch()
        assert utils._ChunkedLogProbFunction is own


def tokenizer():
    from tokenizers import Tokenizer, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    words = ["<pad>", "<s>", "</s>", "<unk>", *(f"w{i}" for i in range(V - 4))]
    made = Tokenizer(models.WordLevel({word: i for i, word in enumerate(words)}, unk_token="<unk>"))
    made.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    return PreTrainedTokenizerFast(
        tokenizer_object=made, pad_token="<pad>", bos_token="<s>", eos_token="</s>", unk_token="<unk>"
    )


def policies(member: Member, algorithm: str, kind: str) -> None:
    """TRL's trainers, with and without :func:`parallel_lce.trl.patch`."""
    import trl
    from datasets import Dataset
    from transformers import AutoModelForCausalLM

    path = tempfile.mkdtemp()
    model_of("release", kind).save_pretrained(path)
    texts = [[f" w{(7 * i + 3 * j + i * j) % (V - 4)}" for j in range(12)] for i in range(16)]
    rows = [{"prompt": "".join(t[:4]), "chosen": "".join(t[4:]), "rejected": "".join(t[:3:-1])} for t in texts]
    more: dict = {"bf16": False}
    if algorithm == "SFT":
        rows = [{"text": row["prompt"] + row["chosen"]} for row in rows]
    elif algorithm == "GRPO":
        rows = [{"prompt": row["prompt"]} for row in rows]
        more |= dict(per_device_train_batch_size=4, num_generations=4, max_completion_length=6, temperature=0.7)
        more |= dict(beta=0.1, num_iterations=2)
    logs = []
    for patched in (False, True):
        arguments = _arguments(member, getattr(trl, algorithm + "Config"), **more)
        extra: dict = {"processing_class": tokenizer(), "train_dataset": Dataset.from_list(rows)}
        if algorithm == "GRPO":
            extra["reward_funcs"] = lambda completions, **_: [float(c.count("w1")) for c in completions]
        with mock.patch.object(trl_door, "token_statistics", wraps=trl_door.token_statistics) as called:
            model = AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32)  # whose reference is loaded, too
            if patched:
                trl_door.patch()
                door.patch(model)  # which TRL's head does not notice
            try:
                made = getattr(trl, algorithm + "Trainer")(model, args=arguments, **extra)
                made.train()
            finally:
                if patched:
                    trl_door.unpatch()
            assert bool(called.call_count) == patched
        logs.append(made.state.log_history)
    same_logs(*logs, rel=1e-4)
