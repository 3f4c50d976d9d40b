"""Bodies of the tests of transformers and TRL: a patched model beside the same model with its own loss."""

import contextlib
import copy
import functools
import importlib
import itertools
import os
import re
import sys
import tempfile
import types
import warnings
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch.distributed.fsdp import FullyShardedDataParallel, fully_shard
from torch.distributed.fsdp.wrap import size_based_auto_wrap_policy
from torch.nn.parallel import DistributedDataParallel

import parallel_lce.transformers as door
import transformers_standin
from measures import largest_error
from parallel_lce import trl as trl_door
from parallel_lce.lazy_logits import LogitsTensor
from releases import ROOT
from transformers_standin import CausalLM, ColwiseGatherOutput, ModulesToSave, Unit, installed_trl
from world import Member, mesh_of
from wrappers import gradients, whole, wrapped

V, D = 97, 32
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
    torch.testing.assert_close(whole(found), expected, rtol=1e-5, atol=1e-5)


def fused(output) -> bool:
    """Its logits are a tensor, and not made."""
    return torch.is_tensor(output.logits) and unmade(output.logits)


def unmade(value) -> bool:
    return type(value) is LogitsTensor and value.lazy.made is None


def accuracy_of(logits, labels):
    top, labels = logits[:, :-1].argmax(-1), labels[:, 1:]
    return ((top == labels) & (labels != -100)).sum() / (labels != -100).sum()


@contextlib.contextmanager
def without_a_warning():
    with warnings.catch_warnings():
        warnings.simplefilter("error", door.LogitsWarning)
        yield


def saved(model, member: Member) -> str:
    """A folder that rank 0 has written and all ranks load from."""
    folder = [tempfile.mkdtemp()]
    if member.rank == 0:
        model.save_pretrained(folder[0])
    if member.ranks > 1:
        dist.broadcast_object_list(folder)
    return folder[0]


def by_plan(release: str, model, member: Member):
    """``model`` under transformers' tensor parallelism."""
    if release == "stand-in":
        ColwiseGatherOutput().install_forward(model.lm_head, mesh_of("cpu", (member.ranks,)))
        return model
    from transformers import AutoModelForCausalLM
    from transformers.distributed import DistributedConfig

    options = dict(distributed_config=DistributedConfig(tp_size=member.ranks, tp_plan="auto"), dtype=torch.float32)
    return AutoModelForCausalLM.from_pretrained(saved(model, member), **options)


def around(how: str, model, member: Member):
    """``model`` compiled, or in a wrapper, where its head may be a unit of FSDP's of its own, or with its norm."""
    if how == "compiled":
        torch._dynamo.reset()
        return torch.compile(model, backend="aot_eager")
    if "head" in how:
        norm = model.model["norm"] if isinstance(model, CausalLM) else model.model.norm
        unit = model.lm_head if "apart" in how else [norm, model.lm_head]
        fully_shard(unit, mesh=mesh_of("cpu", (member.ranks,)), reshard_after_forward="apart" in how)
    return model if how in ("alone", "plan") else wrapped(how, model, member)


@without_a_warning()
def check(member: Member, release: str, kind: str, how: str, before: bool, accuracy: bool) -> None:
    """A patched model gives the losses, gradients, accuracies and logits of the same model with its own loss."""
    own = model_of(release, kind).train()
    inner = copy.deepcopy(own)
    if how == "plan":
        inner = by_plan(release, inner, member)
    if before:
        door.patch(inner, token_accuracy=accuracy)
    model = around(how, inner, member)
    if not before:
        door.patch(inner, token_accuracy=accuracy)
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


def _unit1(module):
    return FullyShardedDataParallel(module, device_id=torch.device("cpu"), use_orig_params=True)


def _head1(model):
    model.lm_head = _unit1(model.lm_head)
    return _unit1(model)


def _by_size(model):
    policy = functools.partial(size_based_auto_wrap_policy, min_num_params=1500)
    return FullyShardedDataParallel(model, device_id=torch.device("cpu"), auto_wrap_policy=policy)


def _unit2(model):
    model.lm_head = Unit(model.lm_head)
    fully_shard(model.lm_head, mesh=mesh_of("cpu", (2,)))
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
    "FSDP(m.lm_head)": (_head1, False),
    "size-based policy": (_by_size, False),
    "a saved module": (_saved1, False),
    "FSDP2, a module around": (_unit2, False),
    "DDP, unused parameters": (_ddp, True),
}


def units(member: Member, release: str, how: str) -> None:
    """Where the output layer's weight is whole in its own forward alone, the model's own loss runs, said once."""
    wrap, is_fused = UNITS[how]
    model = model_of(release, "plain").train()

    def losses(patch_first, patch_last):
        wrapped = wrap(inner := patch_first(copy.deepcopy(model)))
        patch_last(inner)
        optimizer, found = torch.optim.SGD(wrapped.parameters(), lr=1.0), []
        for step in range(3):
            out = wrapped(**batch(10 * step + member.rank))
            out.loss.backward()
            assert fused(out) == (is_fused and door._DOOR in vars(inner))
            optimizer.step(), optimizer.zero_grad()
            found.append(out.loss.item())
        return found

    stock = losses(lambda m: m, lambda m: m)
    for order in ((door.patch, lambda m: m), (lambda m: m, door.patch)):
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            assert losses(*order) == pytest.approx(stock, rel=1e-4)
        said = [str(w.message) for w in caught if w.category is door.LogitsWarning]
        assert len(said) == (not is_fused) and all("in a unit of FSDP of its own" in text for text in said), said


def kept_whole(member: Member, release: str, apart: bool) -> None:
    """FSDP2 keeps the output layer's weight whole until the backward, as accelerate lays it out: so are the logits."""
    model, mesh = model_of(release, "plain").train(), mesh_of("cpu", (2,))

    def trained(patch):
        wrapped = patch(copy.deepcopy(model))
        norm = wrapped.model["norm"] if isinstance(wrapped, CausalLM) else wrapped.model.norm
        unit = wrapped.lm_head if apart else [norm, wrapped.lm_head]
        fully_shard(unit, mesh=mesh, reshard_after_forward=False)
        fully_shard(wrapped, mesh=mesh)
        out = wrapped(**batch(member.rank))
        assert fused(out) == (door._DOOR in vars(wrapped))
        logits = out.logits[...]
        (out.loss + 0.01 * logits.float().logsumexp(-1).square().mean()).backward()
        found = [out.loss.detach(), logits.detach(), *(p.grad.full_tensor() for p in wrapped.parameters())]
        with (
            pytest.raises(RuntimeError, match=r"FSDP has taken back .*unpatch\(model\)")
            if patch is door.patch
            else (contextlib.nullcontext())
        ):
            out = wrapped(**batch(member.rank))
            out.loss.backward()
            out.logits.sum()
        return found

    for stock, ours in zip(trained(lambda m: m), trained(door.patch)):
        torch.testing.assert_close(ours, stock, rtol=1e-5, atol=1e-5 * max(1.0, stock.abs().max().item()))


@without_a_warning()
def modes(member: Member, release: str, kind: str) -> None:
    """Without labels, in generation, in tuples and in eval mode a patched model, and a copy of it, is as before."""
    model = model_of(release, kind).train()
    own = copy.deepcopy(model)
    assert door.patch(door.patch(model)) is model
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
    door.patch(model, eval_logits=False)
    assert fused(model(**given)) and torch.is_tensor(model(ids).logits)
    near(model(**given).loss, own(**given).loss)
    door.unpatch(model).train()
    assert torch.equal(model(**given).logits, own(**given).logits) and torch.is_tensor(model(**given).logits)


def rounded(member: Member, release: str) -> None:
    """In bf16 the errors of the gradients are at most those of the model's own loss."""
    for kind in ("plain", "capped", "tied, biased"):
        model = model_of(release, kind).bfloat16().train()
        own, exact = copy.deepcopy(model), copy.deepcopy(model).double()
        for each in (door.patch(model), own, exact):
            each(**batch(1)).loss.backward()
        pairs = [[*zip(m.parameters(), exact.parameters())] for m in (model, own)]
        errors = [max(largest_error(p.grad, q.grad) / q.grad.abs().max() for p, q in each) for each in pairs]
        assert model.get_output_embeddings().weight.grad.dtype == torch.bfloat16 and errors[0] <= errors[1], errors


class Twice(torch.nn.Linear):
    def forward(self, hidden):
        return 2 * super().forward(hidden)


def fallbacks(member: Member, release: str) -> None:
    """The model's own loss, with one warning, where the fused one might be another."""
    changes = {
        "the forward of its output layer": lambda m: setattr(
            m.lm_head, "forward", lambda h: 2 * h @ m.lm_head.weight.T
        ),
        "its output layer has hooks": lambda m: m.lm_head.register_forward_hook(lambda layer, given, out: 3 * out),
        "its output layer is no nn.Linear": lambda m: setattr(m.lm_head, "__class__", Twice),
    }
    if release == "stand-in":
        changes["makes them by 'add'"] = lambda m: setattr(m, "plus", 1.0)
        changes["makes them by 'view'"] = lambda m: setattr(m, "own_loss", True)
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


def log_probs(member: Member, release: str) -> None:
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
        outside = ours[0].apply(h, w, b, targets.index_fill(0, torch.tensor([3, 5]), -100), 1.0, 40)
        torch.testing.assert_close(outside[0][[3, 5]], -torch.nn.functional.linear(h, w, b).logsumexp(-1)[[3, 5]])


def divergences(member: Member, release: str) -> None:
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


def habits_with_trl(member: Member, release: str) -> None:
    """What else programs do with TRL's functions. What is not covered TRL's own computes, in words, once."""
    x, w, ids, gathered = torch.randn(5, D), torch.randn(V, D), torch.arange(5), torch.randn(V, D)
    gathered.ds_id = 0  # as DeepSpeed's ZeRO-3 marks a parameter

    def log_probs_of(f, weight=w, temperature=1.0, cap=None):
        return f.apply(x, weight, None, ids, temperature, 9, cap)[:1]

    def divergence_of(f, bias=None, beta=0.5):
        return f.apply(x, w, bias, x, -w, None, beta)

    with patched_trl(release) as (own, ours, _):
        for which, said, call in (
            (0, "parameter of ZeRO-3", lambda f: log_probs_of(f, gathered)),
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
        with mock.patch.dict(sys.modules, user=user):
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


def _of_trainer(name: str) -> tuple[dict, dict]:
    """What a trainer is given beside the model and what all have: as configuration, and otherwise."""
    if name == "":
        data = [{name: value[i] for name, value in batch(s).items()} for s in range(10) for i in range(2)]

        def right(found) -> dict:
            top = torch.as_tensor(found.predictions[0] if type(found.predictions) is tuple else found.predictions)
            return {"right": accuracy_of(top, torch.as_tensor(found.label_ids)).item()}

        evaluated = dict(eval_strategy="steps", eval_steps=2)
        return evaluated, dict(train_dataset=data[4:], eval_dataset=data[:4], compute_metrics=right)
    from datasets import Dataset

    texts = [[f" w{(7 * i + 3 * j + i * j) % (V - 4)}" for j in range(12)] for i in range(16)]
    rows = [{"prompt": "".join(t[:4]), "chosen": "".join(t[4:]), "rejected": "".join(t[:3:-1])} for t in texts]
    configured, more = {}, {}
    if name == "SFT":
        rows = [{"text": row["prompt"] + row["chosen"]} for row in rows]
    elif name == "KTO":
        rows = [{"prompt": r["prompt"], "completion": r["chosen"], "label": i % 2 == 0} for i, r in enumerate(rows)]
    elif name in ("GRPO", "RLOO"):
        rows = [{"prompt": row["prompt"]} for row in rows]
        configured |= dict(per_device_train_batch_size=4, num_generations=4, max_completion_length=6, temperature=0.7)
        configured |= dict(beta=0.1, num_iterations=2)
        configured |= dict(learning_rate=1e-3) if name == "RLOO" else {}  # its losses are sums over a completion
        more["reward_funcs"] = lambda completions, **_: [float(c.count("w1")) for c in completions]
    elif name == "Distillation":
        rows = [{"prompt": row["prompt"]} for row in rows]
        configured |= dict(max_completion_length=6, temperature=0.7, beta=0.3)
    return configured, dict(processing_class=tokenizer(), train_dataset=Dataset.from_list(rows), **more)


def trained(member: Member, name: str, kind: str) -> None:
    """By ``<name>Trainer``, transformers' or TRL's: with the patches a training logs what it logs without, and nothing
    warns."""
    import transformers as hf

    path, logs = saved(model_of("release", kind), member), []
    configured, given = _of_trainer(name)
    library, configuration = (importlib.import_module("trl"), name + "Config") if name else (hf, "TrainingArguments")
    patched, function = (trl_door, "token_statistics") if name else (door, "linear_cross_entropy")
    function = "divergences" if name == "Distillation" else function
    with launched(member):
        for ours in (False, True):
            options = dict(output_dir=tempfile.mkdtemp(), per_device_train_batch_size=2) | SHARED | configured
            model = hf.AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32)  # DPO loads its reference, too
            if name == "Distillation":
                torch.manual_seed(5)
                given["teacher_model"] = teacher = hf.AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32)
                torch.nn.init.normal_(teacher.get_output_embeddings().weight, std=0.5)
            spied = mock.patch.object(patched, function, wraps=getattr(patched, function))
            with spied as called, warnings.catch_warnings():
                for kind_of_warning in (door.LogitsWarning, trl_door.TRLWarning):
                    warnings.simplefilter("error", kind_of_warning)
                if ours:
                    trl_door.patch(), door.patch(model)  # of which TRL's head notices the first alone
                try:
                    arguments = getattr(library, configuration)(**options)
                    made = getattr(library, name + "Trainer")(model, args=arguments, **given)
                    made.train()
                finally:
                    trl_door.unpatch()
            assert bool(called.call_count) == ours
            logs.append(made.state.log_history)
    own, mine = ([{n: v for n, v in each.items() if n in LOGGED} for each in log] for log in logs)
    assert sum(each.get("grad_norm", 0) > 0 for each in own) == 4
    for theirs, found in zip(own, mine, strict=True):
        assert found == pytest.approx(theirs, rel=1e-4 if name else 2e-5, abs=1e-6)


def page(member: Member) -> None:
    """Its lines give one loss."""
    text = (ROOT / "docs" / "transformers.md").read_text()
    names = {"model": model_of("release", "plain"), "batch": batch(1), "torch": torch}
    blocks = re.findall(r"^```python\n(.*?)^```$", text, re.M | re.S)
    losses = [exec(block, names) or names["loss"].item() for block in blocks]
    trl_door.unpatch()
    assert len(losses) == 5 and max(losses) - min(losses) < 1e-5, losses


class DataSGD(torch.optim.Optimizer):
    """Writes as 8-bit optimizers do."""

    def __init__(self, parameters):
        super().__init__(parameters, {})

    def step(self, closure=None):
        for parameter in self.param_groups[0]["params"]:
            parameter.data.sub_(parameter.grad)


def _of_copies(model):
    """Steps copies in fp32, and writes them back."""
    copies = [p.detach().clone().requires_grad_() for p in model.parameters()]
    optimizer = torch.optim.AdamW(copies, fused=True)

    def step():
        for mine, own in zip(copies, model.parameters()):
            mine.grad = own.grad
        optimizer.step()
        for mine, own in zip(copies, model.parameters()):
            own.data.copy_(mine)

    return step


def _of_another(model):
    other = torch.nn.Parameter(torch.ones(3))
    other.grad = torch.ones(3)
    return torch.optim.AdamW([other], fused=True).step


STEPS = {
    "fused": (lambda m: torch.optim.AdamW(m.parameters(), fused=True).step, True),
    "foreach": (lambda m: torch.optim.SGD(m.parameters(), foreach=True).step, True),
    "through .data": (lambda m: DataSGD(m.parameters()).step, True),
    "a view": (lambda m: torch.optim.SGD([_gradient_of(m.lm_head.weight.data.view(-1))], fused=True).step, True),
    "copies": (_of_copies, True),
    "another model's": (_of_another, False),
    "all but the head": (
        lambda m: torch.optim.AdamW([p for p in m.parameters() if p is not m.lm_head.weight], fused=True).step,
        False,
    ),
}


def _gradient_of(value):
    parameter = torch.nn.Parameter(value)
    parameter.grad = torch.ones_like(value)
    return parameter
