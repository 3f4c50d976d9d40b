"""What programs do with a model of transformers beside training it: after ``patch`` the same, or the same with a word.

A habit is a function of the model, of a batch with labels and of ``patch``, and gives what its program looks at."""

import copy
import functools
import inspect
import io
import pickle
import tempfile
import types
import warnings
from unittest import mock

import numpy
import pytest
import torch
from torch import nn
from torch.nn import functional as F

import parallel_lce.transformers as door
import transformers_bodies as bodies
from parallel_lce import linear_cross_entropy
from transformers_standin import ModulesToSave

AFTER, OWN = "makes the logits beside its fused loss", "computes its own loss, of all logits: "


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


def hooked(model, given, hook=lambda gradient: None):
    found = []
    out = model(**given)
    out["logits"].register_hook(lambda gradient: (found.append(gradient), hook(gradient))[1])
    (3 * out["loss"]).backward()
    return found


def with_f(loss):
    """``model.loss_function = loss`` after the patch."""

    def habit(model, given, patch):
        patch(model).loss_function = loss
        return trained(model, given)

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


def loss_type(model, given, patch):
    patch(model).loss_type = "ForMaskedLM"
    return trained(model, given)


def seen_by_hooks(model, given, patch):
    """Forward hooks of the user's, before and after, and global ones."""
    seen = []

    def hook(module, arguments, output):
        if module is model:
            seen.append((isinstance(output["logits"], torch.Tensor), output["logits"].shape))

    model.register_forward_hook(hook)
    patch(model).register_forward_hook(hook)
    model.register_forward_hook(hook, prepend=True)
    return seen, trained(model, given), trained(model, given), seen


def read_by_hooks(model, given, patch):
    found = []
    model.register_forward_hook(lambda module, arguments, output: found.append(output["logits"].float().mean()))
    patch(model)(**given)
    return found


def hooks_without_labels(model, given, patch):
    seen = []
    model.register_forward_hook(lambda module, arguments, output: seen.append(type(output["logits"])))
    return patch(model)(given["input_ids"])["logits"], seen


def head_hook(model, given, patch):
    patch(model).lm_head.register_forward_hook(lambda module, arguments, output: 2 * output)
    return trained(model, given)


def global_hook(model, given, patch):
    seen = []
    hook = nn.modules.module.register_module_forward_hook(lambda m, a, o: seen.append(type(o)))
    try:
        return trained(patch(model), given), seen
    finally:
        hook.remove()


def forward_replaced(model, given, patch, before=False):
    """As accelerate's mixed precision does."""
    own = model.forward if before else patch(model).forward

    def forward(*arguments, **named):
        out = own(*arguments, **named)
        for name, value in [*out.items()]:
            out[name] = value.float() if torch.is_tensor(value) and value.dtype == torch.bfloat16 else value
        return out

    model.forward = functools.wraps(own)(forward)
    if before:
        patch(model)
    return trained(model, given, lambda out: out["logits"].dtype)


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


def class_overridden(model, given, patch):
    """A subclass with a loss of its own in its forward, by a torch.autograd.Function."""
    base = type(model)

    class Own(base):
        def forward(self, input_ids, labels=None, **named):
            out = super().forward(input_ids, **named)
            assert isinstance(out["logits"], torch.Tensor)
            out["loss"] = Twice.apply(out["logits"]).mean()
            return out

    model.__class__ = Own
    return trained(patch(model), given)


def function_in_forward(model, given, patch):
    """The output layer's result in a torch.autograd.Function, within the forward."""
    base = type(model)

    class Own(base):
        def forward(self, input_ids, labels=None, **named):
            z = self.lm_head(self.get_input_embeddings()(input_ids))
            assert isinstance(z, torch.Tensor)
            return {"loss": Twice.apply(z / 2.0).mean(), "logits": z}

    model.__class__ = Own
    return trained(patch(model), given)


def replaced_head(model, given, patch):
    patch(model)
    torch.manual_seed(3)
    model.lm_head = nn.Linear(model.lm_head.in_features, model.lm_head.out_features, bias=False)
    return trained(model, given)


class Noise(nn.Module):
    def forward(self, weight):
        return weight + torch.randn_like(weight)


def parametrized(model, given, patch, name="weight", around=lambda layer: layer):
    """Draws once in a call, also in a wrapper."""
    patch(model)
    nn.utils.parametrize.register_parametrization(model.lm_head, name, Noise())
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


def by_the_weight(model, given, patch):
    """A forward that does not call its output layer."""
    base = type(model)

    class Own(base):
        def forward(self, input_ids, labels=None, **named):
            head = self.lm_head
            z = F.linear(self.get_input_embeddings()(input_ids), head.weight, head.bias)
            return {"loss": self.loss_function(z, labels, head.out_features), "logits": z}

    model.__class__ = Own
    return trained(patch(model), given)


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
    own = model.forward
    model.forward = functools.wraps(own.__func__)(lambda *arguments, **named: own(*arguments, **named))
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


def weight_norm(model, given, patch):
    patch(model)
    nn.utils.weight_norm(model.lm_head)
    return trained(model, given)


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
    return (
        [*model.state_dict()],
        repr(model),
        kind.__name__,
        kind.__module__,
        type(model.lm_head),
        [*model.modules()][0:0],
    )


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


# name: (habit, what is said of it, whether its last call is fused).
HABITS = {
    "training": (lambda m, g, p: trained(p(m), g), None, True),
    "z-loss on the logits, after": (
        lambda m, g, p: trained(p(m), g, lambda o: o["logits"].float().logsumexp(-1).square().mean()),
        AFTER,
        True,
    ),
    "the logits' gradient": (lambda m, g, p: trained(p(m), g, lambda o: kept(o["logits"]))[1].grad, AFTER, True),
    "a hook on the logits": (lambda m, g, p: hooked(p(m), g), AFTER, True),
    "metrics of the logits": (lambda m, g, p: trained(p(m), g, lambda o: o["logits"].argmax(-1)), AFTER, True),
    "sizes": (
        lambda m, g, p: trained(p(m), g, lambda o: (o["logits"].shape, len(o["logits"]), o["logits"].dtype)),
        None,
        True,
    ),
    "loss_function = f": (with_f(a_loss), OWN + "its loss_function is a_loss", False),
    "loss_function of the name": (with_f(ForCausalLMLoss), OWN + "its loss_function is ForCausalLMLoss", False),
    "loss_function = partial": (with_f(functools.partial(a_loss)), OWN + "its loss_function is functools", False),
    "loss_type": (loss_type, OWN + "its loss_function is ForMaskedLMLoss", False),
    "hooks of the model": (seen_by_hooks, None, True),
    "hooks that read": (read_by_hooks, AFTER, True),
    "hooks without labels": (hooks_without_labels, None, False),
    "a hook of the head": (head_hook, OWN + "its output layer has hooks", False),
    "a global hook": (global_hook, OWN + "its output layer has hooks", False),
    "forward replaced": (forward_replaced, None, True),
    "forward replaced before": (functools.partial(forward_replaced, before=True), None, True),
    "reentrant checkpoint": (in_a_checkpoint, None, True),
    "checkpoint": (functools.partial(in_a_checkpoint, reentrant=False), None, True),
    "deepcopy": (copied(copy.deepcopy), None, True),
    "pickle": (copied(lambda m: pickle.loads(pickle.dumps(m))), None, True),
    "torch.save": (copied(saved), None, True),
    "load_state_dict(assign=True)": (of_another_weight(load), AFTER, True),
    "a new Parameter": (
        of_another_weight(lambda m: setattr(m.lm_head, "weight", nn.Parameter(2 * m.lm_head.weight.detach()))),
        AFTER,
        True,
    ),
    "functional_call": (functional_call, AFTER, True),
    "torch.func.grad": (of_torch_func, OWN + "a transform of torch.func", False),
    "forward overridden": (class_overridden, OWN + "its forward makes them by 'mul'", False),
    "an autograd.Function": (function_in_forward, OWN + "its forward makes them by 'mul'", False),
    "head replaced": (replaced_head, None, True),
    "parametrized head": (parametrized, OWN + "the weight or bias of its output layer is parametrized", False),
    "parametrized head in a wrapper": (
        functools.partial(parametrized, around=ModulesToSave),
        OWN + "the weight or bias of its output layer is parametrized",
        False,
    ),
    "nn.Linear.forward": (replaced(nn.Linear, "forward", tripled), OWN + "nn.Linear, or what that calls", False),
    "nn.Module.__call__": (replaced(nn.Module, "__call__", tripled_head), OWN + "nn.Linear, or what that", False),
    "F.linear": (replaced(F, "linear", tripled), OWN + "nn.Linear, or what that calls", False),
    "F.cross_entropy": (replaced(F, "cross_entropy", tripled), OWN + "torch.nn.functional.cross_entropy, which", False),
    "a mode": (in_a_mode(Linear2), OWN + "a mode of torch functions is active, Linear2", False),
    "the logits' gradient of another loss": (after_another, AFTER, True),
    "without the head": (by_the_weight, OWN + "its forward does not call its output layer", False),
    "the property loss_function": (property_replaced, OWN + "its loss_function is a_loss", False),
    "unwrapped": (unwrapped, None, True),
    "unwrapped, patched after": (functools.partial(unwrapped, before=False), None, True),
    "a device's mode": (in_a_mode(lambda: torch.device("cpu")), AFTER, True),
    "weight norm": (weight_norm, OWN + "its output layer has hooks", False),
    "DataParallel": (in_a_data_parallel, "in a replica of DataParallel", False),
    "no label counts": (no_labels_count, None, True),
    "state and names": (state, None, True),
    "compiled in eval": (compiled_in_eval, None, False),
    "compiled": (functools.partial(compiled_in_training, fullgraph=False), None, True),
    "compiled as one graph": (compiled_in_training, "fullgraph=True computes its own loss", False),
    "exported in eval": (exported, None, False),
    "no_grad in training": (no_grad_in_training, None, True),
    "labels by place": (labels_by_place, None, True),
}


def same(a, b) -> None:
    if isinstance(a, torch.Tensor) and isinstance(b, torch.Tensor):
        a, b = a[...].detach(), b[...].detach()
        size = a.float().nan_to_num().abs().max().item() if a.numel() else 0.0
        torch.testing.assert_close(a, b, rtol=1e-5, atol=1e-5 * max(size, 1.0), equal_nan=True)
    elif isinstance(a, numpy.ndarray):
        assert numpy.allclose(a, b, rtol=1e-5, atol=1e-5)
    elif isinstance(a, float):
        assert a == pytest.approx(b, rel=1e-4, abs=1e-5)
    elif isinstance(a, (list, tuple)):
        assert type(a) is type(b) and len(a) == len(b), (a, b)
        for x, y in zip(a, b):
            same(x, y)
    elif isinstance(a, dict) and all(isinstance(value, float) for value in a.values()):
        assert a == pytest.approx(b, rel=1e-4, abs=1e-5)
    else:
        assert a == b, (a, b)


def beside_stock(habit, model, given, **options) -> tuple[list[str], bool]:
    """What was said, and whether the last loss was fused, of a habit that gives what it gives without the patch."""
    stock = habit(copy.deepcopy(model), given, lambda m: m)
    calls = mock.patch.object(door, "linear_cross_entropy", wraps=linear_cross_entropy)
    with warnings.catch_warnings(record=True) as caught, calls as called:
        warnings.simplefilter("always")
        ours = habit(model, given, functools.partial(door.patch, **options))
    same(stock, ours)
    return [str(w.message) for w in caught if w.category is door.LogitsWarning], called.called


def check(member, release, name, kind):
    habit, said, fused = HABITS[name]
    found, was_fused = beside_stock(habit, bodies.model_of(release, kind).train(), bodies.batch(1))
    assert was_fused == fused, found
    assert len(found) == (said is not None) and all(said in text for text in found), found


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
    names = {**globals(), "checkpoint": torch.utils.checkpoint.checkpoint}
    if release == "release":
        import accelerate
        from accelerate.utils import operations
        from transformers import trainer_pt_utils

        names = {**vars(operations), **vars(trainer_pt_utils), **names}
        names["accelerator"] = accelerate.Accelerator(cpu=True)
    return names


def uses(member, release, kind):
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

            said, fused = beside_stock(habit, bodies.model_of(release, kind), bodies.batch(1), eval_logits=False)
            assert fused and len(said) == 1 and AFTER in said[0], (use, said)


def after_a_cast():
    model = door.patch(bodies.model_of("stand-in", "plain").train())
    out = model(**bodies.batch(1))
    model.to(torch.bfloat16)
    with pytest.raises(RuntimeError, match=r"after the output layer's weight became torch.bfloat16 on cpu.*unpatch"):
        out["logits"].sum()


def after_a_step(name):
    """Never those of other weights: those of the forward, or a word."""
    make, is_refused = bodies.STEPS[name]
    model = door.patch(bodies.model_of("stand-in", "plain").train())
    with torch.no_grad():
        truth = door.unpatch(copy.deepcopy(model))(**bodies.batch(1))["logits"]
    kept, read = model(**bodies.batch(1)), model(**bodies.batch(1))
    assert read["logits"].sum().isfinite()
    (kept["loss"] + read["loss"]).backward()
    make(model)()
    if is_refused:
        with pytest.raises(RuntimeError, match="optimizer's step may have|weight changed in place"):
            kept["logits"].sum()
    else:
        same(kept["logits"], truth)
    same(read["logits"], truth)
    assert model(**bodies.batch(1))["logits"].sum().isfinite()


def saved_modules(member, release, before):
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

    model, given = bodies.model_of(release, "plain").train(), bodies.batch(1)
    said, fused = beside_stock(habit, copy.deepcopy(model), given)
    assert fused and not said
    outer = adapted(door.patch(model)) if before else door.patch(adapted(model))
    assert "token_accuracy" not in outer(**given)
    assert "token_accuracy" in door.patch(outer, token_accuracy=True)(**given)
    out = door.unpatch(outer)(**given)
    assert type(out["logits"]) is torch.Tensor and "token_accuracy" not in out
    assert not any(type(module).__module__.startswith("parallel_lce") for module in outer.modules())


def _loss_of(out, labels, num_items_in_batch=None):
    return F.cross_entropy(out["logits"][:, :-1].flatten(0, 1).float(), labels[:, 1:].flatten())


def _right(found) -> dict:
    top = found.predictions[0] if type(found.predictions) is tuple else found.predictions
    return {"right": bodies.accuracy_of(torch.as_tensor(top), torch.as_tensor(found.label_ids)).item()}


def _overridden(self, model, inputs, return_outputs=False, num_items_in_batch=None):
    labels = inputs.pop("labels")
    out = model(**inputs)
    loss = _loss_of(out, labels)
    return (loss, out) if return_outputs else loss


def _with_z_loss(self, model, inputs, return_outputs=False, num_items_in_batch=None):
    out = model(**inputs)
    loss = out["loss"] + 0.01 * out["logits"].float().logsumexp(-1).square().mean()
    return (loss, out) if return_outputs else loss


LABELS = "called without the labels that its caller has"
EVALUATED = dict(eval_strategy="steps", eval_steps=2)
# Arguments of transformers' Trainer, others of its own, options of the patch, the Trainer's compute_loss, what is said.
TRAINERS = {
    "label smoothing": ({"label_smoothing_factor": 0.1}, {}, {}, None, LABELS),
    "compute_loss_func": ({}, {"compute_loss_func": _loss_of}, {}, None, LABELS),
    "compute_loss": ({}, {}, {}, _overridden, LABELS),
    "compute_loss with a z-loss": ({}, {}, {}, _with_z_loss, AFTER),
    "metrics": (EVALUATED, {"compute_metrics": _right}, {"eval_logits": False}, None, AFTER),
    "losses": (EVALUATED, {}, {"eval_logits": False}, None, None),
}


def by_trainer(member, name):
    import transformers

    configured, more, options, compute_loss, said = TRAINERS[name]
    data = [{key: value[i] for key, value in bodies.batch(s).items()} for s in range(6) for i in range(2)]
    changes = {} if compute_loss is None else {"compute_loss": compute_loss}
    kind = type("Trainer", (transformers.Trainer,), changes)

    def habit(model, given, patch):
        arguments = dict(output_dir=tempfile.mkdtemp(), per_device_train_batch_size=2) | bodies.SHARED | configured
        arguments = transformers.TrainingArguments(**arguments)
        trainer = kind(patch(model), args=arguments, train_dataset=data[4:], eval_dataset=data[:4], **more)
        trainer.train()
        return [{n: v for n, v in each.items() if n in bodies.LOGGED} for each in trainer.state.log_history]

    found, _ = beside_stock(habit, bodies.model_of("release", "plain"), None, **options)
    assert len(found) == (said is not None) and all(said in text for text in found), found
