"""What programs do to Megatron's output layer and its loss: patches, wrappers, hooks, adapters. Each gives the stock
answer with the switch, too. What they do to logits anywhere is in test_deferred.py."""

import functools
from contextlib import nullcontext
from unittest import mock

import pytest
import torch

pytest.importorskip("megatron.core", reason="needs megatron-core")

import megatron.core
from megatron.core import parallel_state, tensor_parallel
from megatron.core.models.common.language_module.language_module import LanguageModule
from megatron.core.tensor_parallel import ColumnParallelLinear, cross_entropy, layers
from torch.utils.checkpoint import checkpoint

import parallel_lce.megatron
from measures import assert_close
from megatron_models import HIDDEN, Model, batch, build, losses_of
from megatron_training import side_by_side, switched
from parallel_lce.megatron import token_log_probs, unpatch
from parallel_lce.patching import unfuse
from tools import debug_mode, on_ranks
from transformers_models import warned


def _twice(function):
    """Under the same name, as functools.wraps gives it."""

    @functools.wraps(function)
    def doubled(*given, **named):
        found = function(*given, **named)
        return (2 * found[0], *found[1:]) if isinstance(found, tuple) else 2 * found

    return doubled


_of_logits = tensor_parallel.vocab_parallel_cross_entropy
LOSS = LanguageModule, "compute_language_model_loss"
# What is replaced on a class or in a module: the owner, the name, what makes the new of the old.
PATCHES = {
    "forward": (ColumnParallelLinear, "forward", _twice),
    "linear": (layers, "linear_with_grad_accumulation_and_async_allreduce", _twice),
    "its Function": (
        layers,
        "LinearWithGradAccumulationAndAsyncCommunication",
        lambda own: type("Own", (own,), {"forward": staticmethod(_twice(own.forward))}),
    ),
    "cross-entropy": (cross_entropy._VocabParallelCrossEntropy, "forward", _twice),
    "its function": (
        tensor_parallel,
        "vocab_parallel_cross_entropy",
        lambda own: functools.partial(own, label_smoothing=0.2),
    ),
    "a keyword": (*LOSS, lambda own: lambda self, labels, logits, weight=3.0: weight * own(self, labels, logits)),
    "views": (*LOSS, lambda own: lambda self, labels, logits: own(self, labels, logits.view(-1, *logits.shape[1:]))),
    "a loss": (*LOSS, lambda _: lambda self, labels, logits: _of_logits(logits, labels.t().contiguous()).t()),
    "a partialmethod": (*LOSS, lambda own: functools.partialmethod(lambda self, *given: 3 * own(self, *given))),
}


def patched(owner, name, make):
    new = make(getattr(owner, name))
    return mock.patch.object(owner, name, staticmethod(new) if isinstance(vars(owner).get(name), staticmethod) else new)


def _trained(model, spec, data) -> list[torch.Tensor]:
    model.zero_grad()
    came = []  # torch's DDP takes one gradient of a tied weight
    for parameter in model.parameters():
        parameter.register_post_accumulate_grad_hook(came.append)
    losses = losses_of(model, spec, data)
    losses.mean().backward()
    return [losses, torch.tensor(float(len(came))), *(p.grad for p in model.parameters() if p.grad is not None)]


# What is also replaced before the switch is installed and the model built. For the others that is the same.
BEFORE = "forward", "cross-entropy", "a keyword", "a partialmethod"
CASES = [(name, False) for name in PATCHES] + [(name, True) for name in BEFORE]


@pytest.mark.parametrize(("patch", "before"), CASES)
@on_ranks(2)
def test_what_others_patch_has_stocks_answer(member, patch, before):
    spec = Model(ranks=member.ranks, sequence_parallel=True, tied=True)
    around, within = [functools.partial(patched, *PATCHES[patch]), nullcontext][:: 1 if before else -1]

    def trained(model, data, ours):
        with within():
            return _trained(model, spec, data)

    with around():
        side_by_side(member, spec, trained)
        unpatch()


class _Adapter(torch.nn.Module):
    def __init__(self, inner: torch.nn.Module) -> None:
        super().__init__()
        self.inner = inner

    def forward(self, hidden, weight=None, runtime_gather_output=None):
        factor = tensor_parallel.copy_to_tensor_model_parallel_region(hidden).mean(-1, keepdim=True)
        return self.inner(hidden, weight)[0] * (1 + factor), None


def _double_weight(model) -> None:
    doubled = torch.nn.Module()
    doubled.forward = lambda weight: 2 * weight
    torch.nn.utils.parametrize.register_parametrization(model.output_layer, "weight", doubled)


def _compute_weight(model) -> None:
    doubled = property(lambda layer: 2 * layer._parameters["weight"])
    model.output_layer.__class__ = type("Doubled", (type(model.output_layer),), {"weight": doubled})


def _replace_forward(model) -> None:
    model.output_layer.forward = _twice(functools.partial(ColumnParallelLinear.forward, model.output_layer))


def _double_projection(model) -> None:
    model.output_layer._forward_impl = _twice(model.output_layer._forward_impl)


def _looks_on_rank_0(module, inputs, output):
    if torch.distributed.get_rank() == 0:
        output[0].abs().max().item()


def _broadcast(module, inputs, output):
    torch.distributed.broadcast(output[0].detach(), 0)


def _resize(model) -> None:
    layer = model.output_layer
    layer.weight = torch.nn.Parameter(torch.cat([layer.weight.detach(), torch.zeros_like(layer.weight[:8])]))


def _with_a_bias(model) -> None:
    layer = model.output_layer
    layer.skip_bias_add, layer.bias = True, torch.nn.Parameter(torch.zeros_like(layer.weight[:, 0]))


def _detach(sharded):
    """As mtp_detach_heads from 0.18 on passes the weight: no dW."""

    def change(model) -> None:
        def detached(layer, given, named):
            return given, {**named, "weight": layer.weight.detach()}

        model.output_layer.register_forward_pre_hook(detached, with_kwargs=True)
        if sharded:  # the layer's weight is, whatever is passed
            model.output_layer.weight.__fsdp_param__ = True

    return change


def _shard_once_more(model) -> None:
    """As 0.19's generalized tensor parallelism, which gathers the weight for the layer alone."""
    model.output_layer.gtp_remat_size, model.output_layer.weight.is_gtp_weight_remat = 2, True


_compiled = functools.partial(torch.compile, backend="eager")
# What is done to a model, and what is said of it if that makes real logits in training.
CHANGES = {
    "adapter": (lambda model: setattr(model, "output_layer", _Adapter(model.output_layer)), "'mul' of the output"),
    "parametrization": (_double_weight, "no parameter named weight"),
    "computed weight": (_compute_weight, "weight is computed from its parameter"),
    "compiled": (lambda model: setattr(model, "output_layer", _compiled(model.output_layer)), None),
    "forward": (_replace_forward, "the loss gets real logits, or another layer's: leave the output layer's forward in"),
    "_forward_impl": (_double_projection, "_forward_impl is not Megatron's own"),
    "hook of rank 0": (lambda model: model.output_layer.register_forward_hook(_looks_on_rank_0), "'abs' of the output"),
    "pre-hook": (lambda model: model.output_layer.register_forward_pre_hook(lambda layer, x: (2 * x[0],)), None),
    "broadcast": (lambda model: model.output_layer.register_forward_hook(_broadcast), "broadcast"),
    "another shape": (_resize, "is a Parameter [56, 32]; use a plain one of [48, 32]"),
    "a bias": (_with_a_bias, None),
    "no sum": (lambda model: setattr(model.output_layer, "disable_grad_reduce", True), "disable_grad_reduce=False"),
    "stock": (lambda m: unfuse(m.output_layer) or vars(m.output_layer).pop("_parallel_lce", 0), "was replaced since"),
    "detached": (_detach(False), None),
    "detached and sharded": (_detach(True), "fully sharded"),
    "sharded once more": (_shard_once_more, "fully sharded"),
}


@pytest.mark.parametrize("change", CHANGES)
@on_ranks(2)
def test_changed_models_have_stocks_answer(member, change):
    """Whatever makes real logits in training is named once, and by explain(). A call without labels asks for logits."""
    spec, (make, reason) = Model(ranks=member.ranks), CHANGES[change]

    def changed(model, data, ours):
        make(model)

        def said(labels: torch.Tensor | None = data.labels, **options) -> list[str]:
            with warned((RuntimeWarning,)) as words:
                model(data.tokens, data.positions, data.mask, labels=labels, **options)
            return words

        if ours:
            assert said(None, runtime_gather_output=True) == torch.no_grad()(said)(None) == []
            first, second = said(), said()
            # One rank speaks for those that shard the vocabulary.
            assert bool(first) == (member.rank == 0 and reason is not None), (change, first)
            assert not first or reason in first[0], first
            said_here = reason is not None and (member.rank == 0 or "rank 0" not in change)
            assert said_here == (parallel_lce.megatron.explain(model) != ["fused"])
            model.eval()
            assert second == said() == []
        found = _trained(model.train(), spec, data)
        assert change != "sharded once more" or not hasattr(model.output_layer.weight, "zero_out_wgrad")
        return found

    side_by_side(member, spec, changed)


@on_ranks(2)
def test_the_output_layer_of_the_development_branch_is_fused(member):
    more = lambda self, x, weight=None, gather=None, labels=None, **_: super(kind, self).forward(x, weight, gather)  # noqa: E731
    kind = type("LinearCrossEntropyModule", (ColumnParallelLinear,), {"forward": more})
    with mock.patch.object(tensor_parallel, "ColumnParallelLinear", kind):
        side_by_side(member, Model(ranks=2), lambda model, data, ours: _trained(model, Model(ranks=2), data))
        assert parallel_lce.megatron.explain(build(member, Model(ranks=2), switched(Model(ranks=2)))) == ["fused"]


@on_ranks(2)
def test_debug_mode_finds_a_change_of_one_rank(member):
    spec = Model(ranks=member.ranks)
    model, data = build(member, spec, switched(spec)), batch(0, spec, member.device)

    def without_padding(layer, inputs, output):
        if member.rank == 1:
            output[0][..., -8:] = -1e4

    model.output_layer.register_forward_hook(without_padding)
    said = """function: rank 0 has "Megatron's output layer", rank 1 has "Megatron's own loss, of real logits"$"""
    for z_loss, words in (0.0, said), (0.1, "z_loss=0.1 needs a fused loss, and this one is not: an in-place change"):
        parallel_lce.megatron.patch(z_loss=z_loss)
        with debug_mode(), pytest.raises((ValueError, RuntimeError), match=words):
            losses_of(model, spec, data)
    with debug_mode(), pytest.raises((ValueError, RuntimeError), match="token_log_probs makes no logits: '__set"):
        token_log_probs(model, data.tokens, data.positions, data.mask, data.labels)


@on_ranks(2)
def test_gathered_logits_have_the_loss_of_shards(member):
    """Stock's own is off by log(2): it takes the gathered logits for a shard."""

    def gathered(model, data, ours):
        model.output_layer.gather_output = ours
        hidden = torch.zeros(3, 2, HIDDEN, device=member.device)
        logits, _ = model.output_layer(hidden)
        assert logits.shape == (3, 2, 96 if ours else 48)
        with torch.no_grad():  # as to sample a draft from, which may be on one rank
            assert type(model.output_layer(hidden, None, True)[0]) is torch.Tensor
        return _trained(model, Model(ranks=member.ranks), data)

    side_by_side(member, Model(ranks=member.ranks), gathered)


@on_ranks(2)
def test_sequence_parallelism_is_that_of_the_layers_call(member):
    """Megatron turns it off around a call on gathered hidden states, and on again before the loss."""
    spec = Model(ranks=member.ranks, sequence_parallel=True)

    def of_gathered(model, data, ours):
        def gather(layer, given):
            layer.sequence_parallel = False
            return tensor_parallel.gather_from_sequence_parallel_region(given[0])

        model.output_layer.register_forward_pre_hook(gather)
        model.output_layer.register_forward_hook(lambda layer, *given: setattr(layer, "sequence_parallel", True))
        return _trained(model, spec, data)

    side_by_side(member, spec, of_gathered)


@on_ranks(2)
def test_the_group_is_the_models(member):
    """Not Megatron's global one, also if the output layer names none."""
    spec = Model(ranks=member.ranks)
    alone = torch.distributed.new_subgroups(1)[0]

    def values(model, data, ours):
        if not ours:
            return [losses_of(model, spec, data)]
        with mock.patch.object(parallel_state, "_TENSOR_MODEL_PARALLEL_GROUP", alone):
            found = losses_of(model, spec, data)
            wrapped = model.output_layer
            model.output_layer = torch.nn.Module()
            model.output_layer.forward = lambda *given, **named: (wrapped(*given, **named)[0] + 0, None)
            assert_close(losses_of(model, spec, data), found, 1e-5)
        return [found]

    side_by_side(member, spec, values)


@on_ranks(2)
def test_real_logits_of_inference_mode(member):
    """Megatron's forward gathers hidden states into memory that an earlier layer allocated in that mode."""
    spec = Model(ranks=2, sequence_parallel=True)

    def looked_at(model, data, ours):
        memory = parallel_state.get_global_memory_buffer().buffer
        model.output_layer.register_forward_hook(lambda layer, inputs, output: (output[0].norm(), None)[1])
        memory.clear()
        with torch.inference_mode():
            losses = losses_of(model, spec, data)
        memory.clear()
        return [losses.clone()]

    side_by_side(member, spec, looked_at)


@pytest.mark.parametrize("reentrant", [False, True])
@on_ranks(1)
def test_a_checkpoint_does_not_run_megatrons_loss_of_the_same_logits_again(member, reentrant):
    """Where it has written into them: of logits that a hook has changed, or in a second backward. Stock raises, too."""
    model, data = build(member, Model(), switched(Model())), batch(0, Model(), member.device)
    own = model.compute_language_model_loss
    model.compute_language_model_loss = lambda *given: checkpoint(own, *given, use_reentrant=reentrant)
    if not reentrant:
        model.output_layer.register_forward_hook(lambda layer, inputs, output: (output[0].mul_(0.5), None))
    losses = losses_of(model, Model(), data)
    if reentrant:
        losses.sum().backward(retain_graph=True)
    with pytest.raises(RuntimeError, match="Megatron's loss has written into these logits, and is to be computed of"):
        losses.sum().backward()


@on_ranks(1)
def test_labels_may_change_before_backward(member):
    """Those of a single sequence, too, which transposed are the same memory."""

    def trained(model, data, ours):
        losses = model(data.tokens[:1], data.positions[:1], data.mask, labels=data.labels[:1])
        data.labels.zero_()
        return [losses, *torch.autograd.grad(losses.mean(), [*model.parameters()])]

    side_by_side(member, Model(), trained)


@on_ranks(1)
def test_old_releases_are_refused(member):
    model = build(member, Model(), {})
    with mock.patch.object(megatron.core, "__version__", "0.13.1"):
        for call in (parallel_lce.megatron.patch, lambda: token_log_probs(model, None, None, None, None)):
            with pytest.raises(ImportError, match="needs megatron-core 0.14 or newer, found 0.13.1"):
                call()
