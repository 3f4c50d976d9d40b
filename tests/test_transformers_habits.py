"""What programs do with a model of transformers beside training it: after ``patch`` the same, the same with a word, or
a refusal in words. A habit is a function of the model, of a batch with labels and of ``patch``, and gives what its
program looks at. Without words its last loss is fused. What programs do to logits anywhere is in test_deferred.py."""

import copy
import functools
import inspect
import pickle
import sys
import types
from unittest import mock

import pytest
import torch
from torch import nn
from torch.nn import functional as F

import parallel_lce.transformers as door
from parallel_lce import linear_cross_entropy
from parallel_lce.deferred import DeferredLogits
from transformers_models import RELEASES, V, batch, model_of, on_releases, same, warned
from transformers_standin import ModulesToSave

BEFORE, AFTER = "makes its logits before its loss, since ", "makes its logits beside its fused loss, since "


def trained(model, given, use=lambda out: None) -> list:
    model.zero_grad()
    out = model(**given)
    value, loss = use(out), out["loss"]
    if isinstance(value, torch.Tensor) and value.requires_grad and value.dim() == 0:
        loss = loss + value
    loss.backward()
    return [loss.detach(), value, *(p.grad for p in model.parameters())]


def after(change):
    return lambda model, given, patch: (change(patch(model)), trained(model, given))[1]


def around(model):
    own = model.loss_function
    model.loss_function = lambda logits, *rest, **named: own(logits, *rest, **named) + logits.float().mean()


def as_accelerate(model, given, patch):
    """It puts a forward on the instance, and takes it off by its ``__wrapped__``."""
    own = type(patch(model)).forward
    model.forward = types.MethodType(functools.wraps(own)(lambda *args, **named: own(*args, **named)), model)
    found = trained(model, given)
    copied = trained(copy.deepcopy(model), given)
    forward = model.forward
    while hasattr(forward, "__wrapped__"):
        forward = forward.__wrapped__
    model.forward = types.MethodType(forward, model)
    return found, copied, trained(model, given), [*inspect.signature(model.forward).parameters]


def after_accelerate(model, given, patch):
    """The forward on the instance is of the class before the patch."""
    own = type(model).forward
    model.forward = types.MethodType(functools.wraps(own)(lambda *args, **named: own(*args, **named)), model)
    return trained(patch(model), given)


def dispatched(model, given, patch):
    """As ``device_map`` does it: a forward on each module's instance, of its class before the patch."""
    for module in model.modules():
        module.forward = functools.wraps(module.forward)(functools.partial(module.forward))
    return trained(patch(model), given)


def copied(how):
    return lambda model, given, patch: (trained(how(patch(model)), given), trained(copy.deepcopy(how(model)), given))


def of_torch_func(model, given, patch):
    patch(model)
    state = {name: value.detach() for name, value in model.named_parameters()}
    loss = lambda s: torch.func.functional_call(model, s, (), given, tie_weights=False)["loss"]  # noqa: E731
    return [*torch.func.grad(loss)(state).values()]


def parametrized(model, given, patch):
    """Draws once in a call. In the end it is merged."""
    noise = nn.Identity()
    noise.forward = lambda weight: weight + torch.randn_like(weight)
    nn.utils.parametrize.register_parametrization(model.lm_head, "weight", noise)
    torch.manual_seed(3)
    found = trained(patch(model), given, lambda out: out["logits"] + 0)
    nn.utils.parametrize.remove_parametrizations(model.lm_head, "weight")
    return found, torch.rand(1)


def tripled(own):
    if isinstance(own, property):
        return property(lambda self: tripled(own.fget(self)), own.fset)
    return functools.wraps(own)(lambda *args, **named: 3 * own(*args, **named))


def replaced(home_of, name):
    """After the patch, what the output layer, the model or the loss finds there."""

    def habit(model, given, patch):
        home = home_of(model)
        patch(model)
        with mock.patch.object(home, name, tripled(getattr(home, name))):
            return trained(model, given)

    return habit


def in_a_mode(model, given, patch):
    """Of torch functions, which may replace any of them."""
    with torch.overrides.BaseTorchFunctionMode():
        return trained(patch(model), given)


def state(model, given, patch):
    patch(model)(**given)
    kind, head = type(model), type(model.lm_head)
    return [*model.state_dict()], repr(model), kind.__name__, kind.__module__, head.__name__, isinstance(head, type)


def compiled(model, given, patch, training, **options):
    torch._dynamo.reset()
    run = torch.compile(patch(model).train(training), backend="aot_eager", **options)
    with torch._dynamo.config.patch(recompile_limit=2, fail_on_recompile_limit_hit=True):
        found = trained(run, given), trained(run, given)
    assert not torch._dynamo.eval_frame._debug_get_cache_entry_list(door._run.__wrapped__)  # in no graph
    with torch.compiler.set_stance("fail_on_recompile"):
        return *found, trained(run, given)


def learns_tokens(model, given, patch):
    """As PEFT's TrainableTokensWrapper: the product is of a weight that is made of the layer's."""

    class Wrapper(ModulesToSave):
        weight = property(lambda self: self.original_module.weight * 2)
        forward = lambda self, hidden: F.linear(hidden, self.weight, self.original_module.bias)  # noqa: E731

    model.lm_head = Wrapper(model.lm_head)
    return trained(patch(model), given)


def replace_head(model):
    torch.manual_seed(3)
    model.lm_head = nn.Linear(model.lm_head.in_features, V, bias=False)


def derive_head(model, given, patch):
    """A scaling head of the user's, before the patch."""
    forward = lambda self, hidden: 0.5 * super(Scaled, self).forward(hidden)  # noqa: E731
    model.lm_head.__class__ = Scaled = type("Scaled", (nn.Linear,), {"forward": forward})
    return copied(copy.deepcopy)(model, given, patch)


def of_its_own(model, given, patch):
    """A forward of the user's, in a subclass, with a loss of its own."""

    def forward(self, input_ids, labels):
        z = F.linear(self.get_input_embeddings()(input_ids), self.lm_head.weight, self.lm_head.bias)
        return {"loss": z.square().mean(), "logits": z}

    model.__class__ = type("Own", (type(model),), {"forward": forward})
    return trained(patch(model), given)


# name: (habit, what is said of it). The last loss is fused if nothing is said, or that its logits are made beside it.
HABITS = {
    "loss_function around": (after(around), AFTER),
    "loss_function": (replaced(type, "loss_function"), BEFORE),
    "fixed_cross_entropy": (replaced(lambda m: sys.modules[m.loss_function.__module__], "fixed_cross_entropy"), BEFORE),
    "a derived head": (derive_head, None),
    "head replaced": (after(replace_head), "its output layer was replaced after patch(model): call it"),
    "trainable tokens": (learns_tokens, "computes its own loss: its output layer was not called, or has a forward"),
    "head in eval": (after(lambda model: model.lm_head.eval()), "its output layer is in eval mode"),
    "as accelerate": (as_accelerate, None),
    "after accelerate.prepare": (after_accelerate, None),
    "dispatched": (dispatched, "computes its own loss: its output layer was not called, or has a forward"),
    "pickle": (copied(lambda model: pickle.loads(pickle.dumps(model))), None),
    "torch.func.grad": (of_torch_func, "makes its logits: torch.func"),
    "parametrized head": (parametrized, AFTER),
    "nn.Linear.forward": (replaced(lambda _: nn.Linear, "forward"), "makes its logits: nn.Linear.forward was replaced"),
    "F.linear": (replaced(lambda _: F, "linear"), "makes its logits: torch.nn.functional.linear was replaced"),
    "F.cross_entropy": (replaced(lambda _: F, "cross_entropy"), "torch.nn.functional.cross_entropy was replaced"),
    "a mode": (in_a_mode, "makes its logits: a mode of torch functions is active"),
    "without the loss_function": (of_its_own, "its forward does not call model.loss_function"),
    "state and names": (state, None),
    "compiled": (functools.partial(compiled, training=True), None),
    "compiled in eval": (functools.partial(compiled, training=False, fullgraph=True), None),
}  # fmt: skip


@pytest.mark.thinned("name", "kind")
@pytest.mark.parametrize("kind", ["capped", "tied, biased"])
@pytest.mark.parametrize("name", HABITS)
@RELEASES
@on_releases()
def test_what_a_program_sees_is_the_same(member, release, name, kind):
    (habit, said), model, given = HABITS[name], model_of(release, kind).train(), batch(1)
    stock = habit(copy.deepcopy(model), given, lambda model: model)
    with warned() as found, mock.patch.object(door, "linear_cross_entropy", wraps=linear_cross_entropy) as called:
        same(stock, habit(model, given, door.patch))
    assert called.called == ((said is None or said.startswith(AFTER)) and name != "compiled in eval"), found
    assert name != "compiled" or called.call_args.kwargs["counted_tokens"] is not None
    assert bool(found) == (said is not None) and said in [None, *(said for text in found if said in text)], found


def patched(**options):
    return door.patch(model_of("stand-in", "plain").train(), **options)


def test_words_are_said_once_and_explain_says_them_again():
    model = patched()
    assert "no fused loss" in door.explain(model) and "not called" in door.explain(door.unpatch(copy.deepcopy(model)))
    model.lm_head = ModulesToSave(model.lm_head)
    adapter = model.lm_head.modules_to_save["default"]
    assert "no fused loss" in door.explain(model) and isinstance(adapter, door.Linear)
    assert isinstance(door.patch(model).lm_head.original_module, door.Linear)
    adapter.register_forward_hook(lambda layer, given, z: z + 1)
    with warned() as said:
        model(**batch(1)), model(**batch(2))
    assert len(said) == 1 and door.explain(model) in said[0] and "'add' wants them; if an ad" in said[0]
    model.__class__ = type("Sharded", (type(model),), {})  # as fully_shard derives one
    door.patch(model).lm_head.modules_to_save["default"] = nn.Linear(adapter.in_features, V)
    with pytest.warns(door.LogitsWarning, match=r"was replaced after patch\(model\): call it again"):
        vars(model)[door._DOOR].said["beside its fused loss"] = "was looked at"  # which is no reason
        model(**batch(1))


def test_ligers_forward_is_said():
    names = {"__name__": "liger_kernel.transformers.model.llama"}
    exec("def lce_forward(self, input_ids, labels):\n    return {'loss': self.lm_head.weight.sum()}", names)
    model = model_of("stand-in", "plain").train()
    model.forward = types.MethodType(names["lce_forward"], model)
    with pytest.warns(door.LogitsWarning, match="has Liger's forward"):
        door.patch(model)
    assert "Liger" in door.explain(model)


@pytest.mark.parametrize("head", [nn.Linear, type("Derived", (nn.Linear,), {})])
def test_a_second_patch_changes_the_options_and_unpatch_ends_them(head):
    model, own = model_of("stand-in", "plain").train(), model_of("stand-in", "plain").train()
    model.lm_head.__class__ = head
    assert "token_accuracy" in door.patch(model, token_accuracy=True)(**batch(1))
    loss_alone = door.patch(model.double())(**batch(1))
    assert "token_accuracy" not in loss_alone and loss_alone["loss"].dtype == torch.float32
    out = door.unpatch(model)(**batch(1))
    assert type(model) is type(own) and type(model.lm_head) is head and type(out["logits"]) is torch.Tensor
    assert vars(model).keys() == vars(own).keys() and vars(model.lm_head).keys() == vars(own.lm_head).keys()


def test_a_training_step_as_one_graph_is_refused():
    with pytest.raises(torch._dynamo.exc.Unsupported, match="leave fullgraph at False, or unpatch"):
        torch.compile(patched(), backend="eager", fullgraph=True)(**batch(1))


def test_a_training_model_is_exported_as_it_is():
    given, program = batch(1)["input_ids"], torch.export.export(patched(), (batch(0)["input_ids"],))
    same(program.module()(given)["logits"], model_of("stand-in", "plain")(given)["logits"])


def test_generation_in_training_mode_says_nothing():
    model = patched()
    with warned() as said, torch.no_grad():
        logits = model(batch(1)["input_ids"])["logits"]
        assert type(logits) is DeferredLogits and (logits[:, -1, :] + 0).shape == (2, V)
    assert not said
