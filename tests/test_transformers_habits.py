"""What programs do with a model of transformers beside training it: after ``patch`` the same, or the same with a word.

A habit is a function of the model, of a batch with labels and of ``patch``, and gives what its program looks at."""

import copy
import functools
import inspect
import io
import pickle
import types
import weakref
from unittest import mock

import numpy
import pytest
import torch
from torch import nn
from torch.nn import functional as F

import parallel_lce.transformers as door
from tools import on_ranks, uncollected
from transformers_models import (
    RELEASES,
    TRAINED,
    V,
    accuracy_of,
    batch,
    beside_stock,
    model_of,
    near,
    on_releases,
    same,
    warned,
)  # fmt: skip
from transformers_standin import ModulesToSave, RowwiseSplitInput
from world import mesh_of

AFTER, OWN = "makes the logits beside its fused loss", "computes its own loss, of all logits: "
PARAMETRIZED = OWN + "the weight or bias of its output layer is parametrized"


def trained(model, given, use=lambda out: None) -> list:
    """Loss, what ``use`` makes of the output, and the gradients."""
    model.zero_grad()
    out = model(**given)
    value = use(out)
    loss = out["loss"]
    if isinstance(value, torch.Tensor) and value.requires_grad and value.dim() == 0:
        loss = loss + value
    loss.backward()
    return [loss.detach(), value, *(p.grad for p in model.parameters())]


def kept(z):
    z.retain_grad()
    return z


def hooked(model, given, patch):
    found = []
    out = patch(model)(**given)
    out["logits"].register_hook(found.append)
    (3 * out["loss"]).backward()
    return found


def after(change):
    """A change of the patched model."""

    def habit(model, given, patch):
        change(patch(model))
        return trained(model, given)

    return habit


def assigned(name, value):
    return after(lambda model: setattr(model, name, value))


def overridden(forward):
    """A forward of the user's, in a subclass. ``base``: the model's own class."""

    def habit(model, given, patch):
        base = type(model)
        model.__class__ = type("Own", (base,), {"forward": functools.partialmethod(forward, base)})
        return trained(patch(model), given)

    return habit


def a_loss(logits, labels, vocab_size, **_):
    assert type(logits) is torch.Tensor
    return 2 * F.cross_entropy(logits.reshape(-1, vocab_size), labels.reshape(-1))


def ForCausalLMLoss(logits, labels, vocab_size, **_):
    """Of transformers' name, and another."""
    return a_loss(logits, labels, vocab_size)


class Twice(torch.autograd.Function):
    @staticmethod
    def forward(ctx, z):
        ctx.save_for_backward(z)
        return 2 * z * z

    @staticmethod
    def backward(ctx, gradient):
        return 4 * gradient * ctx.saved_tensors[0]


def hooks(see):
    """Forward hooks of the user's, before and after the patch."""

    def habit(model, given, patch):
        seen = []
        hook = lambda module, arguments, output: seen.append(see(output["logits"]))  # noqa: E731
        model.register_forward_hook(hook)
        patch(model).register_forward_hook(hook, prepend=True)
        return trained(model, given), trained(model, given), seen

    return habit


def hooks_without_labels(model, given, patch):
    seen = []
    model.register_forward_hook(lambda module, arguments, output: seen.append(type(output["logits"])))
    return patch(model)(given["input_ids"])["logits"], seen


def global_hook(model, given, patch):
    seen = []
    hook = nn.modules.module.register_module_forward_hook(lambda m, a, o: seen.append(type(o)))
    try:
        return trained(patch(model), given), seen
    finally:
        hook.remove()


def wrapped(forward):
    return functools.wraps(forward)(lambda *arguments, **named: forward(*arguments, **named))


def forward_replaced(model, given, patch, before=False):
    model = model if before else patch(model)
    model.forward = wrapped(model.forward)
    return trained(patch(model) if before else model, given)


def of_the_instance(model):
    """As accelerate leaves a model: with a forward of its own, which a copy binds to itself."""
    model.forward = types.MethodType(wrapped(type(model).forward), model)
    return model


def copied_after(model, given, patch):
    copied = copy.deepcopy(patch(of_the_instance(model)))
    with torch.no_grad():
        [p.mul_(0.5) for p in copied.parameters()]
    return trained(copied, given), [p.grad is None for p in model.parameters()]


def decorated(model, given, patch):
    """What is put around a patched model's forward stays after another patch."""
    patch(of_the_instance(model))
    own, calls = model.forward, []
    model.forward = functools.wraps(own)(lambda *arguments, **named: (calls.append(0), own(*arguments, **named))[1])
    return trained(patch(model), given), len(calls)


def in_a_checkpoint(model, given, patch, reentrant=True):
    patch(model)
    loss = torch.utils.checkpoint.checkpoint(
        lambda ids, one: one * model(ids, labels=given["labels"])["loss"],
        given["input_ids"],
        torch.ones((), requires_grad=True),
        use_reentrant=reentrant,
    )
    loss.backward()
    return loss, [p.grad for p in model.parameters()]


def copied(how):
    def habit(model, given, patch):
        return trained(how(patch(model)), given), trained(copy.deepcopy(how(model)), given)

    return habit


def saved(model):
    file = io.BytesIO()
    torch.save(model, file)
    file.seek(0)
    return torch.load(file, weights_only=False)


def of_another_weight(change):
    """``output.logits`` are those of the call's weight."""

    def habit(model, given, patch):
        out = patch(model)(**given)
        change(model)
        return out["loss"], out["logits"].detach().clone(), trained(model, given)

    return habit


def load(model):
    model.load_state_dict({n: 2 * v for n, v in model.state_dict().items()}, assign=True)


def double(model):
    model.lm_head.weight = nn.Parameter(2 * model.lm_head.weight.detach())


def functional_call(model, given, patch):
    patch(model)
    state = {name: 0.5 * value.detach() for name, value in model.named_parameters()}
    out = torch.func.functional_call(model, state, (), given, tie_weights=False)
    return out["loss"], out["logits"].detach().clone()


def of_torch_func(model, given, patch):
    patch(model)
    state = {name: value.detach() for name, value in model.named_parameters()}
    loss = lambda s: torch.func.functional_call(model, s, (), given, tie_weights=False)["loss"]  # noqa: E731
    return [*torch.func.grad(loss)(state).values()]


def of_a_function(model, base, input_ids, labels=None, **named):
    """Its loss is a torch.autograd.Function's."""
    out = base.forward(model, input_ids, **named)
    assert isinstance(out["logits"], torch.Tensor)
    out["loss"] = Twice.apply(out["logits"]).mean()
    return out


def function_in_forward(model, base, input_ids, labels=None, **named):
    """The output layer's result goes into a torch.autograd.Function."""
    z = model.lm_head(model.get_input_embeddings()(input_ids))
    assert isinstance(z, torch.Tensor)
    return {"loss": Twice.apply(z / 2.0).mean(), "logits": z}


def aligned(model, base, input_ids, labels, **named):
    """Its labels are those of the positions themselves, as a decoder's behind an encoder."""
    z = model.lm_head(model.get_input_embeddings()(input_ids))
    return {"loss": model.loss_function(z, labels, z.shape[-1], shift_labels=labels), "logits": z}


def by_the_weight(model, base, input_ids, labels=None, **named):
    """Does not call its output layer."""
    head = model.lm_head
    z = F.linear(model.get_input_embeddings()(input_ids), head.weight, head.bias)
    return {"loss": model.loss_function(z, labels, head.out_features), "logits": z}


def stepped(step):
    """A forward that makes its logits by these steps."""

    def forward(model, base, input_ids, labels, **named):
        z = step(model.lm_head(model.get_input_embeddings()(input_ids)))
        return {"loss": model.loss_function(z, labels, z.shape[-1]), "logits": z}

    return overridden(forward)


def replace_head(model):
    torch.manual_seed(3)
    model.lm_head = nn.Linear(model.lm_head.in_features, model.lm_head.out_features, bias=False)


def own_forward(model):
    head = model.lm_head
    head.forward = lambda hidden: 2 * F.linear(hidden, head.weight, head.bias)


def derive_head(model):
    model.lm_head.__class__ = type("Doubled", (nn.Linear,), {"forward": lambda self, x: 2 * nn.Linear.forward(self, x)})


head_hook = after(lambda model: model.lm_head.register_forward_hook(lambda layer, given, out: 2 * out))


class Noise(nn.Module):
    def forward(self, weight):
        return weight + torch.randn_like(weight)


def parametrized(model, given, patch, around=lambda layer: layer):
    """Draws once in a call, also in a wrapper."""
    patch(model)
    nn.utils.parametrize.register_parametrization(model.lm_head, "weight", Noise())
    model.lm_head = around(model.lm_head)
    torch.manual_seed(3)
    return trained(model, given, lambda out: out["logits"].detach().clone()), torch.rand(1)


def replaced(owner, name, make):
    """With another function in the place of one that the output layer or the loss calls."""

    def habit(model, given, patch):
        with mock.patch.object(owner, name, functools.wraps(own := getattr(owner, name))(make(own))):
            return trained(patch(model), given)

    return habit


def tripled(own):
    return lambda *arguments, **options: 3 * own(*arguments, **options)


def tripled_head(own):
    def call(self, *arguments, **options):
        out = own(self, *arguments, **options)
        return 3 * out if isinstance(self, nn.Linear) else out

    return call


def after_another(model, given, patch):
    """The loss that the logits are of has been replaced in the output, and its tensor is gone."""
    out = patch(model)(**given)
    out["loss"] = out["loss"] / 4
    z = kept(out["logits"])
    out["loss"].backward()
    return z.grad


def property_replaced(model, given, patch):
    patch(model)
    kind = next(kind for kind in type(model).__mro__[::-1] if "loss_function" in vars(kind))
    other = property(lambda self: a_loss, lambda self, value: vars(self).update(put=value))
    with mock.patch.object(kind, "loss_function", other):
        model.loss_function = 3
        return trained(model, given), model.put


def unwrapped(model, given, patch, before=True):
    """As accelerate takes its wrappers off a model: down to the last function."""
    patch(model) if before else None
    model.forward = wrapped(model.forward)
    patch(model)
    forward = model.forward
    while hasattr(forward, "__wrapped__"):
        forward = forward.__wrapped__
    model.forward = types.MethodType(getattr(forward, "__func__", forward), model)
    return trained(model, given), [*inspect.signature(model.forward).parameters]


class Linear2(torch.overrides.TorchFunctionMode):
    def __torch_function__(self, function, types, args=(), kwargs=None):
        out = function(*args, **(kwargs or {}))
        return 2 * out if function is F.linear else out


def in_a_mode(mode):
    def habit(model, given, patch):
        patch(model)
        with mode():
            out = model(**given)
        return out["loss"], out["logits"].detach().clone()

    return habit


def in_a_data_parallel(model, given, patch):
    replica = patch(model)._replicate_for_data_parallel()
    replica._is_replica = True
    for name, child in model.named_children():
        setattr(replica, name, child)
    return replica(**given)["loss"]


def no_labels_count(model, given, patch):
    given = {**given, "labels": torch.full_like(given["labels"], -100)}
    return trained(patch(model), given)


def state(model, given, patch):
    patch(model)
    model(**given)
    kind = type(model)
    return [*model.state_dict()], repr(model), kind.__name__, kind.__module__, type(model.lm_head)


def compiled_in_eval(model, given, patch):
    torch._dynamo.reset()
    patch(model).eval()
    out = torch.compile(model, backend="eager", fullgraph=True)(**given)
    return out["loss"], out["logits"], type(out["logits"])


def compiled_in_training(model, given, patch, fullgraph=True):
    torch._dynamo.reset()
    patch(model)
    compiled = torch.compile(model, backend="aot_eager", fullgraph=fullgraph)
    return trained(compiled, given), trained(compiled, given)


def exported(model, given, patch):
    patch(model).eval()

    class Call(nn.Module):
        def __init__(self):
            super().__init__()
            self.model = model

        def forward(self, ids, labels):
            return self.model(ids, labels=labels)["loss"]

    arguments = given["input_ids"], given["labels"]
    return [torch.export.export(Call(), arguments, strict=s).module()(*arguments) for s in (True, False)]


def no_grad_in_training(model, given, patch):
    with torch.no_grad():
        out = patch(model)(**given)
    return out["loss"], out["logits"].requires_grad, out["loss"].requires_grad


def labels_by_place(model, given, patch):
    place = [*inspect.signature(patch(model).forward).parameters].index("labels")
    out = model(given["input_ids"], *[None] * (place - 1), given["labels"])
    return out["loss"]


def uses(use):
    return lambda model, given, patch: trained(patch(model), given, use)


# name: (habit, what is said of it). The last call is fused if nothing is said or only its logits are made.
HABITS = {
    "training": (uses(lambda out: None), None),
    "z-loss on the logits, after": (uses(lambda out: out["logits"].float().logsumexp(-1).square().mean()), AFTER),
    "the logits' gradient": (lambda *given: uses(lambda out: kept(out["logits"]))(*given)[1].grad, AFTER),
    "a hook on the logits": (hooked, AFTER),
    "ids of the logits": (uses(lambda out: out["logits"].argmax(-1)), None),
    "metrics of the logits": (uses(lambda out: out["logits"].topk(2).indices), AFTER),
    "sizes": (uses(lambda out: (out["logits"].shape, len(out["logits"]), out["logits"].dtype)), None),
    "loss_function = f": (assigned("loss_function", a_loss), OWN + "its loss_function is a_loss"),
    "loss_function of the name": (
        assigned("loss_function", ForCausalLMLoss), OWN + "its loss_function is ForCausalLMLoss"
    ),
    "loss_function = partial": (
        assigned("loss_function", functools.partial(a_loss)), OWN + "its loss_function is functools"
    ),
    "loss_type": (assigned("loss_type", "ForMaskedLM"), OWN + "its loss_function is ForMaskedLMLoss"),
    "hooks of the model": (hooks(lambda z: (isinstance(z, torch.Tensor), z.shape)), None),
    "hooks that read": (hooks(lambda z: z.float().mean()), AFTER),
    "hooks without labels": (hooks_without_labels, None),
    "a hook of the head": (head_hook, OWN + "its output layer has hooks"),
    "the head's forward": (after(own_forward), OWN + "the forward of its output layer"),
    "a derived head": (after(derive_head), OWN + "its output layer is no nn.Linear"),
    "a global hook": (global_hook, OWN + "its output layer has hooks"),
    "forward replaced": (forward_replaced, None),
    "forward replaced before": (functools.partial(forward_replaced, before=True), None),
    "a copy of a replaced forward": (copied_after, None),
    "forward replaced after, patched again": (decorated, None),
    "aligned labels": (overridden(aligned), None),
    "reentrant checkpoint": (in_a_checkpoint, None),
    "checkpoint": (functools.partial(in_a_checkpoint, reentrant=False), None),
    "deepcopy": (copied(copy.deepcopy), None),
    "pickle": (copied(lambda model: pickle.loads(pickle.dumps(model))), None),
    "torch.save": (copied(saved), None),
    "load_state_dict(assign=True)": (of_another_weight(load), AFTER),
    "a new Parameter": (of_another_weight(double), AFTER),
    "functional_call": (functional_call, AFTER),
    "torch.func.grad": (of_torch_func, OWN + "a transform of torch.func"),
    "forward overridden": (overridden(of_a_function), OWN + "its forward makes them by 'mul'"),
    "an autograd.Function": (overridden(function_in_forward), OWN + "its forward makes them by 'mul'"),
    "head replaced": (after(replace_head), None),
    "parametrized head": (parametrized, PARAMETRIZED),
    "parametrized head in a wrapper": (functools.partial(parametrized, around=ModulesToSave), PARAMETRIZED),
    "nn.Linear.forward": (replaced(nn.Linear, "forward", tripled), OWN + "nn.Linear, or what that calls"),
    "nn.Module.__call__": (replaced(nn.Module, "__call__", tripled_head), OWN + "nn.Linear, or what that"),
    "F.linear": (replaced(F, "linear", tripled), OWN + "nn.Linear, or what that calls"),
    "F.cross_entropy": (replaced(F, "cross_entropy", tripled), OWN + "torch.nn.functional.cross_entropy, which"),
    "a mode": (in_a_mode(Linear2), OWN + "a mode of torch functions is active, Linear2"),
    "the logits' gradient of another loss": (after_another, AFTER),
    "a scale and a cap": (stepped(lambda z: torch.mul(torch.tanh(torch.div(2 * z, 4)), 8).to(torch.float32)), None),
    "a negative cap": (stepped(lambda z: z.tanh() * -1), OWN + "its forward computes ['tanh', 'mul']"),
    "two caps": (stepped(lambda z: z.tanh().tanh()), OWN + "its forward computes ['tanh', 'tanh']"),
    "a division by 0": (stepped(lambda z: z / 0.0), OWN + "its forward computes ['div']"),
    "a factor of each entry": (stepped(lambda z: z * torch.ones(V)), OWN + "its forward makes them by 'mul'"),
    "a sum": (stepped(lambda z: z + 1), OWN + "its forward makes them by 'add'"),
    "another division": (stepped(lambda z: z.div(3, rounding_mode="floor")), OWN + "its forward makes them by 'div'"),
    "without the head": (overridden(by_the_weight), OWN + "its forward does not call its output layer"),
    "the property loss_function": (property_replaced, OWN + "its loss_function is a_loss"),
    "unwrapped": (unwrapped, None),
    "unwrapped, patched after": (functools.partial(unwrapped, before=False), None),
    "a device's mode": (in_a_mode(lambda: torch.device("cpu")), AFTER),
    "weight norm": (after(lambda model: nn.utils.weight_norm(model.lm_head)), OWN + "its output layer has hooks"),
    "DataParallel": (in_a_data_parallel, "in a replica of DataParallel"),
    "no label counts": (no_labels_count, None),
    "state and names": (state, None),
    "compiled in eval": (compiled_in_eval, None),
    "compiled": (functools.partial(compiled_in_training, fullgraph=False), None),
    "compiled as one graph": (compiled_in_training, "fullgraph=True computes its own loss"),
    "exported in eval": (exported, None),
    "no_grad in training": (no_grad_in_training, None),
    "labels by place": (labels_by_place, None),
}  # fmt: skip
NO_LOSS_TO_FUSE = "hooks without labels", "compiled in eval", "exported in eval"


@pytest.mark.thinned("name", "kind")
@pytest.mark.parametrize("kind", TRAINED)
@pytest.mark.parametrize("name", HABITS)
@RELEASES
@on_releases()
def test_habits(member, release, name, kind):
    habit, said = HABITS[name]
    found, was_fused = beside_stock(habit, model_of(release, kind).train(), batch(1))
    assert was_fused == (said in (None, AFTER) and name not in NO_LOSS_TO_FUSE), found
    assert len(found) == (said is not None) and all(said in text for text in found), found


@pytest.mark.parametrize("used", [False, True])
def test_nothing_waits_for_the_garbage_collector(used):
    """Neither the hidden states nor logits that were made."""
    model, refs = door.patch(model_of("stand-in", "capped").train()), []
    with warned(), uncollected():
        out = model(**batch(1))
        refs.append(weakref.ref(out["logits"].lazy.hidden))
        if used:
            refs.append(weakref.ref(kept(out["logits"].float())))
        out["loss"].backward()
        del out
        assert [ref() for ref in refs] == [None] * (1 + used)


def test_a_model_without_values_computes_its_own_loss():
    model = door.patch(model_of("stand-in", "plain").train().to("meta"))
    given = {name: value.to("meta") for name, value in batch(1).items()}
    with pytest.warns(door.LogitsWarning, match="its output layer is on the meta device"):
        assert model(**given)["loss"].is_meta


def test_a_forward_without_labels_keeps_nothing_of_its_callers():
    """Python before 3.13 keeps the variables of a function whose frame is asked for them."""
    model, ids, refs = door.patch(model_of("stand-in", "plain").train()), batch(1)["input_ids"], []
    with uncollected():
        for _ in range(2):
            out = model(ids)
            refs.append(weakref.ref(out["logits"]))
            out["logits"].sum().backward()
        assert refs[0]() is None


@on_ranks(2)
def test_a_weight_that_a_plan_shards_by_hidden_features(member):
    model = model_of("stand-in", "plain").to(member.device).train()
    given = {name: tensor.to(member.device) for name, tensor in batch(1).items()}
    own = copy.deepcopy(model)
    RowwiseSplitInput().install_forward(model.lm_head, mesh_of(member.device.type, (member.ranks,)))
    with pytest.warns(door.LogitsWarning, match=r"is sharded as .*Shard\(dim=1\)"):
        near(door.patch(model)(**given)["loss"].detach(), own(**given)["loss"].detach())


def test_a_loss_of_the_name_in_a_package_of_its_own():
    def ForCausalLMLoss(logits, labels, vocab_size, **kwargs):
        return logits.square().mean()

    model = model_of("stand-in", "plain")

    class Own(type(model)):
        loss_function = property(lambda self: ForCausalLMLoss)

    model.__class__ = Own
    with pytest.raises(ValueError, match="loss_function of Own must be transformers' ForCausalLMLoss, got <func"):
        door.patch(model)


def test_copies_keep_a_class_that_is_derived_later():
    model = door.patch(model_of("stand-in", "plain").train())

    class Own(type(model)):
        def forward(self, *given, **named):
            return 3 * super().forward(*given, **named)["loss"]

    model.__class__ = Own
    copied = copy.deepcopy(model)
    assert type(copied) is Own and torch.equal(copied(**batch(1)), model(**batch(1)))


def test_a_loaded_model_learns_of_steps_in_its_process():
    pickled = pickle.dumps(door.patch(model_of("stand-in", "plain")))
    with mock.patch.object(door, "watch_optimizers") as called:
        pickle.loads(pickled)
    assert called.call_count == 1


def test_accuracy_of_its_own_loss():
    """And its reason is said once."""
    model = door.patch(model_of("stand-in", "plain").train(), token_accuracy=True)
    model.lm_head.register_forward_hook(lambda layer, given, out: 3 * out)
    with warned() as said:
        first, again = model(**batch(1)), model(**batch(1))
    own = door.unpatch(model)(**batch(1))
    assert torch.equal(first.loss, own.loss) and torch.equal(again.loss, own.loss)
    near(again["token_accuracy"], accuracy_of(own.logits, batch(1)["labels"]))
    assert len(said) == 1 and "its output layer has hooks" in said[0], said


# What is done with the logits ``z`` of a loss without them.
USES = """
isinstance(z, torch.Tensor), torch.is_tensor(z), z.is_cuda, z.layout, z.stride(), z.is_contiguous(), z.nbytes
torch.utils.data.default_collate([z, z]), torch.stack([z, z]), torch.cat([z, torch.zeros_like(z)])
torch.testing.assert_close(z, z.clone()), torch.testing.assert_close(z[...], z), torch.equal(z, z), z == z
z.detach().numpy(), numpy.asarray(z.detach()), numpy.argmax(z.detach(), -1), z.tolist(), z.sum().item(), list(z)
pickle.loads(pickle.dumps(z)), copy.deepcopy(z.detach()), saved(z.detach()), len({z, z}), {z: 1}[z], f"{z.mean():.3f}"
z.cpu(), z.detach().half(), z.detach().to(torch.bfloat16), z.to(torch.zeros(1)), z.type(torch.float64), z.data
z.mT, z.new_ones(3), z.element_size()
torch.zeros(z.shape).copy_(z), torch.where(z > 0, z, 0.0), torch.einsum("abc->c", z), z.topk(3).values, z.max(-1)
torch.vmap(torch.sum)(z), torch.func.grad(lambda x: x.square().sum())(z.detach()), torch.jit.script(nn.Softmax(-1))(z)
torch.compile(lambda x: x * 2 + 1, backend="eager")(z), torch.ops.aten._softmax.default(z, -1, False)
z.untyped_storage().nbytes(), z.data_ptr() != 0, torch.from_dlpack(z.detach()), nn.Parameter(z.detach())
torch.no_grad()(z.mul_)(2.0), z
checkpoint(torch.square, z, use_reentrant=False), checkpoint(torch.square, z, use_reentrant=True), Twice.apply(z)
"""
# accelerate's, transformers' and safetensors'.
RELEASED = """
accelerator.gather(z), accelerator.gather_for_metrics(z), accelerator.reduce(z), accelerator.pad_across_processes(z)
nested_concat(z, z), nested_concat((z,), (z,)), nested_numpify(nested_detach(z)), find_batch_size(z)
send_to_device(z, "cpu"), convert_to_fp32(z), concatenate([z, z]), pad_across_processes(z, dim=1)
as_safe_file(z.detach())
"""


def as_safe_file(z):
    from safetensors.torch import load, save

    return load(save({"z": z}))["z"]


def _names(release) -> dict:
    names = {**globals(), "numpy": numpy, "checkpoint": torch.utils.checkpoint.checkpoint}
    if release == "release":
        import accelerate
        from accelerate.utils import operations
        from transformers import trainer_pt_utils

        names = {**vars(operations), **vars(trainer_pt_utils), **names}
        names["accelerator"] = accelerate.Accelerator(cpu=True)
    return names


@pytest.mark.parametrize("kind", ["plain", "capped"])
@RELEASES
@on_releases()
def test_uses_of_the_logits(member, release, kind):
    """In training with the gradients of their sum beside the loss, and in evaluation without logits."""
    names = _names(release)
    for use in filter(None, (USES + RELEASED * (release == "release")).splitlines()):
        for training in (True, False):
            torch._dynamo.reset()

            def habit(model, given, patch):
                patch(model).train(training)

                def used(out):
                    names["z"] = out["logits"]
                    found = eval(use, names)
                    parts = [v for v in (found if type(found) is tuple else [found]) if torch.is_tensor(v)]
                    sums = [v.float().square().mean() for v in parts if v.requires_grad]
                    return sum(sums) if sums and training else found

                if training:
                    return trained(model, given, used)
                with torch.no_grad():
                    out = model(**given)
                    return used(out), out["loss"]

            said, fused = beside_stock(habit, model_of(release, kind), batch(1), eval_logits=False)
            assert fused and len(said) == 1 and AFTER in said[0], (use, said)


def test_logits_after_a_cast():
    model = door.patch(model_of("stand-in", "plain").train())
    out = model(**batch(1))
    model.to(torch.bfloat16)
    with pytest.raises(RuntimeError, match=r"after the output layer's weight became torch.bfloat16 on cpu.*unpatch"):
        out["logits"].sum()


# Of what a step is, and whether it may have changed the output layer's weight.
STEPS = {
    "the weight": (lambda model: model.lm_head.weight, True),
    "a view of it": (lambda model: nn.Parameter(model.lm_head.weight.data.view(-1)), True),
    "a copy, such as one in fp32": (lambda model: model.lm_head.weight.detach().clone().requires_grad_(), True),
    "another of the model": (lambda model: model.model["norm"].weight, False),
    "another model's": (lambda model: nn.Parameter(torch.ones(3)), False),
}


@pytest.mark.parametrize("name", STEPS)
def test_logits_after_an_optimizers_step(name):
    """Never those of other weights: those of the forward, or a word."""
    parameter_of, is_refused = STEPS[name]
    model = door.patch(model_of("stand-in", "plain").train())
    with torch.no_grad():
        truth = door.unpatch(copy.deepcopy(model))(**batch(1))["logits"]
    kept, read = model(**batch(1)), model(**batch(1))
    assert read["logits"].sum().isfinite()
    parameter = parameter_of(model)
    parameter.grad = torch.ones_like(parameter)
    torch.optim.AdamW([parameter], fused=True).step()  # without a new version
    if is_refused:
        with pytest.raises(RuntimeError, match="optimizer's step may have"):
            kept["logits"].sum()
    else:
        same(kept["logits"], truth)
    same(read["logits"], truth)
    assert model(**batch(1))["logits"].sum().isfinite()


@pytest.mark.parametrize("before", [True, False])
@RELEASES
@on_releases()
def test_saved_modules(member, release, before):
    """PEFT's ``modules_to_save`` around the output layer: fused, patched again, and after unpatch as without."""

    def adapted(model):
        torch.manual_seed(3)
        if release == "stand-in":
            model.lm_head = ModulesToSave(model.lm_head)
            return model
        import peft

        return peft.get_peft_model(model, peft.LoraConfig(target_modules=["q_proj"], modules_to_save=["lm_head"]))

    def habit(model, given, patch):
        outer = adapted(patch(model)) if before else patch(adapted(model))
        found = outer(**given)
        found["loss"].backward()
        return [found["loss"], *(p.grad for p in outer.parameters() if p.requires_grad), *outer.state_dict()]

    model, given = model_of(release, "plain").train(), batch(1)
    said, fused = beside_stock(habit, copy.deepcopy(model), given)
    assert fused and not said
    outer = adapted(door.patch(model)) if before else door.patch(adapted(model))
    assert "token_accuracy" not in outer(**given)
    assert "token_accuracy" in door.patch(outer, token_accuracy=True)(**given)
    out = door.unpatch(outer)(**given)
    assert type(out["logits"]) is torch.Tensor and "token_accuracy" not in out
    assert not any(type(module).__module__.startswith("parallel_lce") for module in outer.modules())
