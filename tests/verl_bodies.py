"""What the tests of the plugin run on each rank: what trainers call, after Megatron-core's decoder and mappings or
after FSDP, against logits in float64. verl's functions are those of the folder to import from."""

import functools
import importlib
import importlib.abc
import importlib.machinery
import inspect
import itertools
import os
import sys
import warnings
from types import SimpleNamespace
from unittest import mock

import torch
from megatron.core import parallel_state
from megatron.core.tensor_parallel import mappings
from torch import nn
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor

import megatron_models
import reference
from cases import normal
from measures import assert_close, assert_near
from parallel_lce import rl
from world import Member, mesh_of


class _Placeholders(importlib.abc.MetaPathFinder, importlib.abc.Loader):
    """What verl imports and these tests do not call: packages of which every attribute is a mock."""

    def find_spec(self, name, path=None, target=None):
        if name.split(".")[0] in ("ray", "wandb", "datasets", "pandas"):
            return importlib.machinery.ModuleSpec(name, self, is_package=True)

    def exec_module(self, module) -> None:
        module.__getattr__ = lambda name: mock.MagicMock(name=name)


class _OwnValue(nn.Module):
    """A core attention without attention, for packed sequences too."""

    def forward(self, query, key, value, *rest, **named):
        return value.flatten(-2)


class _Dense(nn.Module):
    """A model as those of transformers, with verl's forward for ``impl_backend=triton``."""

    def __init__(self) -> None:
        super().__init__()
        self.config = SimpleNamespace(output_attentions=False, output_hidden_states=False)
        self.embedding, self.mixing, self.lm_head = nn.Embedding(96, 32), nn.Linear(32, 32), nn.Linear(32, 96, False)

    def model(self, input_ids, **others):
        outputs = mock.MagicMock()
        outputs.__getitem__.return_value = torch.tanh(self.mixing(self.embedding(input_ids)))
        return outputs

    def forward(self, *given, **named):
        verls = importlib.import_module("verl.models.transformers.dense_common")
        return verls.forward_with_triton_backend(self, *given, **named)


def _forward(model, ids, labels, end):
    """Megatron's forward of which the end is another: a function of the decoder's output."""
    with mock.patch.object(model, "_postprocess", lambda hidden_states, **others: end(hidden_states)):
        return model(ids, torch.arange(ids.shape[1])[None], None, labels=labels)


def _mapped(hidden, model, **options):
    """SkyRL has no mapping without sequence parallelism: the page says to add it."""
    if model.config.sequence_parallel:
        return mappings.gather_from_sequence_parallel_region(hidden, **options)
    return mappings.copy_to_tensor_model_parallel_region(hidden)


def _verl(model, batch, ids, labels):
    forward = importlib.import_module("verl.models.mcore.model_forward_fused")._fused_GPTModel_forward
    positions = torch.arange(ids.shape[1])[None]
    output = forward(model, ids, positions, None, labels=labels, temperature=batch["temperature"])
    return output.log_probs, output.entropy


def _processor(model, batch, ids, labels):
    verls = importlib.import_module("verl.models.mcore.model_forward_fused")
    given = dict(output_layer=model.output_layer, output_weight=None, labels=labels, config=model.config, input_ids=ids)
    given["context"] = verls.FusedOutputProcessorContext(temperature=batch["temperature"])
    output = _forward(model, ids, labels, lambda hidden: verls.fused_output_processor(hidden_states=hidden, **given))
    return output.log_probs, output.entropy


def _kernel(model, batch, ids, labels, kernel=None, summed=True):
    """Views and conversions between a mapping, which sums or does not, and the kernel: verl's, or this."""
    kernel = kernel or importlib.import_module("verl.models.mcore.model_forward_fused").linear_cross_entropy

    def end(hidden):
        mapped = _mapped(hidden, model, **{} if summed else dict(tensor_parallel_output_grad=False))
        hidden = mapped.transpose(0, 1).contiguous().permute(1, 0, 2).reshape(-1, 32)
        hidden = hidden[:, None].squeeze(1).unsqueeze(0).double().float()
        group = parallel_state.get_tensor_model_parallel_group()
        more = {} if summed else dict(reduce_hidden_grad=model.config.sequence_parallel)  # copy_to sums in any case
        return kernel(hidden, model.output_layer.weight, labels, batch["temperature"], "none", group, **more)

    return _forward(model, ids, labels, end)


def _skyrl(model, batch, ids, labels):
    hidden = _forward(model, ids, labels, lambda hidden: _mapped(hidden, model).transpose(0, 1).contiguous())
    weight, rank = model.output_layer.weight / batch["temperature"], parallel_state.get_tensor_model_parallel_rank()
    bounds = len(weight) * rank, len(weight) * (rank + 1)
    group = parallel_state.get_tensor_model_parallel_group()
    return (rl.FusedLinearLogprobTriton.apply(hidden, weight, labels, *bounds, 8, group, False),)


def _engine(place: str, kind: str, **attributes):
    """An engine that was never built: its own methods, and these attributes."""
    module = importlib.import_module(f"verl.workers.engine.{place}.transformer_impl")
    module.get_device_id = lambda: "cpu"
    self = object.__new__(getattr(module, kind))
    vars(self).update(attributes)
    return self


def _megatron_engine(model, batch, ids, labels):
    config = dict(use_fused_kernels=True, use_remove_padding=True, pad_to_length=False, dynamic_context_parallel=False)
    of_model = dict(hf_config=SimpleNamespace(architectures=["Qwen2ForCausalLM"]), mtp=SimpleNamespace(enable=False))
    more = dict(enable_routing_replay=False, is_value_model=False, module=[model])
    more["model_config"] = SimpleNamespace(**of_model, tokenizer=SimpleNamespace(pad_token_id=0))
    engine = _engine("megatron", "MegatronEngineWithLMHead", engine_config=SimpleNamespace(**config), **more)
    engine._maybe_enable_fused_kernels()
    found, finish = engine.forward_step(iter([batch]), model, None, lambda output, data, **named: data)
    return found, finish(found)


def _fsdp_engine(model, batch, ids, labels):
    more = dict(pad_to_length=True, pad_to_length_bucket=8, use_ulysses_sp=False, _autocast_dtype=torch.float32)
    more |= dict(model_config=SimpleNamespace(fused_kernel_options={"impl_backend": "triton"}), module=model)
    engine = _engine("fsdp", "FSDPEngineWithLMHead", get_data_parallel_group=lambda: None, **more)
    loss = mock.Mock(return_value=(torch.zeros(()), {}))
    engine.forward_step(batch, loss, False)
    return loss.call_args.kwargs["model_output"], loss.call_args.kwargs["data"]


CALLS = {
    "verl": _verl,
    "tied verl": _verl,
    "processor": _processor,
    "kernel": _kernel,
    "kernel, not summed": functools.partial(_kernel, summed=False),
    "slime": functools.partial(_kernel, kernel=rl.linear_cross_entropy),
    "skyrl": _skyrl,
    "engine": _megatron_engine,
    "hooked engine": _megatron_engine,
    "fsdp engine": _fsdp_engine,
}
LENGTHS = 5, 9, 3


BETWEEN = {  # a mapping and the kernel, [S, b, D]
    "nothing": lambda x: x,
    "x[0]": lambda x: x.transpose(0, 1)[0],
    "x[:, :S]": lambda x: x.transpose(0, 1)[:, : len(x)],
    "x[...]": lambda x: x[...],
    "x[mask]": lambda x: x[torch.ones(len(x), dtype=torch.bool)],
    "squeeze()": lambda x: x.squeeze(),
    "narrow": lambda x: x.narrow(0, 0, len(x)),
    "split": lambda x: x.split(len(x))[0],
    "chunk": lambda x: x.chunk(1)[0],
    "unbind": lambda x: x.unbind(1)[0],
    "t().t()": lambda x: x.flatten(0, 1).t().t(),
    "expand_as": lambda x: x.expand_as(x.detach()),
    "cat": lambda x: torch.cat([x]),
    "index_select": lambda x: x.index_select(0, torch.arange(len(x))),
    "times 1": lambda x: x * 1.0,
    "views": lambda x: x.transpose(0, 1).contiguous().reshape(-1, 32)[:, None].squeeze(1),
    "conversions": lambda x: x.double().float(),
}


def _losses(hidden, weight, labels, kernel, group=None):
    log_probs, entropy = kernel(hidden, weight, labels, 0.7, "none", group)
    return ((log_probs + entropy) * torch.linspace(-1.0, 2.0, len(labels))).sum()


def _of_one_rank(hidden, weight, labels, temperature, *_):
    found = reference.statistics(hidden @ weight.t() / temperature, labels)
    return found["target_log_prob"], found["entropy"]


def check_who_sums(member: Member) -> None:
    """dX is summed once, whatever lies between a mapping and the kernel, and whoever has put a mapping into verl's
    functions."""
    model = megatron_models.build(member, megatron_models.Model(ranks=member.ranks), {})
    os.environ["VERL_USE_EXTERNAL_MODULES"] = "parallel_lce.verl"
    if not any(isinstance(finder, _Placeholders) for finder in sys.meta_path):
        sys.meta_path.append(_Placeholders())
    importlib.import_module("verl")
    plugin, fused = sys.modules["parallel_lce.verl"], "verl.models.mcore.model_forward_fused"
    plugin.install()
    verls, group = importlib.import_module(fused), parallel_state.get_tensor_model_parallel_group()
    whole, weight, labels = normal(12, 32).float(), normal(96, 32, seed=1).float(), torch.arange(12) * 7
    truth = whole.double().requires_grad_()
    _losses(truth, weight.double(), labels, _of_one_rank).backward()
    shard = weight.chunk(member.ranks)[member.rank].clone().requires_grad_()
    copied, gathered = mappings.copy_to_tensor_model_parallel_region, mappings.gather_from_sequence_parallel_region

    def assert_once(end, parallel: bool, warns: bool, name: str) -> None:
        mine = (whole.chunk(member.ranks)[member.rank] if parallel else whole)[:, None].clone().requires_grad_()
        with warnings.catch_warnings(record=True) as said:
            warnings.simplefilter("always")
            end(mine).backward()
        assert any("reduce_hidden_grad" in str(each.message) for each in said) == warns, name
        expected = truth.grad.chunk(member.ranks)[member.rank] if parallel else truth.grad
        assert_close(mine.grad[:, 0], expected, 2e-5, name=name)

    kernels = verls.linear_cross_entropy, importlib.import_module("verl.utils.kernel.linear_cross_entropy")
    for kernel in (kernels[0], kernels[1].linear_cross_entropy):
        for (name, between), mapping in itertools.product(BETWEEN.items(), (copied, gathered)):
            end = lambda x: _losses(between(mapping(x)), shard, labels, kernel, group)  # noqa: E731
            assert_once(end, mapping is gathered, True, name)

    given = dict(output_layer=SimpleNamespace(weight=shard), output_weight=None, labels=labels)
    given["context"] = verls.FusedOutputProcessorContext(temperature=0.7)

    def processed(hidden, parallel):
        config = SimpleNamespace(sequence_parallel=parallel)
        out = verls.fused_output_processor(hidden_states=hidden, config=config, **given)
        return ((out.log_probs + out.entropy) * torch.linspace(-1.0, 2.0, 12)).sum()

    ours = verls.fused_output_processor, verls.linear_cross_entropy
    for parallel in (True, False):
        assert_once(lambda x: processed(x, parallel), parallel, False, "verl's own")
    # Others' remedies of the missing mapping, in place of verl's functions.
    verls.fused_output_processor = lambda *, hidden_states, **more: ours[0](hidden_states=copied(hidden_states), **more)
    assert_once(lambda x: processed(x, False), False, True, "a mapping in front of its function")
    verls.fused_output_processor = ours[0]
    verls.linear_cross_entropy = lambda hidden, *more: ours[1](copied(hidden)[...], *more)
    assert_once(lambda x: processed(x, False), False, True, "a mapping in front of its kernel")
    verls.linear_cross_entropy = ours[1]
    plugin.uninstall()
    verls.fused_output_processor = functools.partial(_with_mapping, verls.fused_output_processor, copied)
    plugin.install()
    assert_once(lambda x: processed(x, False), False, True, "a mapping before install")
    plugin.uninstall()
    verls.fused_output_processor = verls.fused_output_processor.args[0]

    own = verls.linear_cross_entropy
    verls.linear_cross_entropy = functools.wraps(own)(lambda *given: own(*given))
    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always")
        plugin.install()
    assert [each for each in said if "other code has replaced verl's function" in str(each.message)]
    assert not hasattr(verls.linear_cross_entropy.__wrapped__, "__wrapped__")  # still that of the other code
    plugin.uninstall()
    verls.linear_cross_entropy = own
    plugin.install()

    model.decoder.layers[0].self_attention.core_attention, ids = _OwnValue(), torch.arange(12)[None]
    gradients = []
    for hook in (None, lambda decoder, inputs, states: copied(states)):
        if hook is not None:
            model.decoder.register_forward_hook(hook)
        model.zero_grad()
        log_probs, _ = _verl(model, dict(temperature=0.7), ids, ids)
        log_probs.sum().backward()
        gradients.append(model.embedding.word_embeddings.weight.grad)
    assert_close(gradients[1], gradients[0], 2e-5, name="a mapping at the end of the decoder")
    plugin.uninstall()


def _with_mapping(original, mapping, *, hidden_states, **more):
    return original(hidden_states=mapping(hidden_states), **more)


def check(member: Member, calls: str, sequence_parallel: bool, wanted: str) -> None:
    """These calls on three packed sequences, of one temperature or each of its own: log-probabilities, entropies, sums
    of squared probabilities, and every gradient."""
    torch.manual_seed(3)
    fsdp, engine, options = "fsdp" in calls, "engine" in calls, dict(sequence_parallel=sequence_parallel)
    spec = megatron_models.Model(ranks=member.ranks, tied="tied" in calls, **options)
    model, exact = (_Dense() if fsdp else megatron_models.build(member, spec, {}) for _ in range(2))
    exact.load_state_dict(model.state_dict())
    if fsdp and member.ranks > 1:
        fully_shard(model, mesh=mesh_of("cpu", (member.ranks,)))
    for each in () if fsdp else (model, exact):
        each.decoder.layers[0].self_attention.core_attention = _OwnValue()
    hook = "output_processor" in inspect.signature(megatron_models.GPTModel.forward).parameters
    assert fsdp or hook == ("hooked" in calls)

    sequences = torch.randint(96, (sum(LENGTHS),), generator=torch.Generator().manual_seed(7)).split(LENGTHS)
    padded = torch.tensor([length + -length % (1 if fsdp else member.ranks) for length in LENGTHS])
    ids = torch.cat([nn.functional.pad(row, (0, size - len(row))) for row, size in zip(sequences, padded)])[None]
    labels = ids.roll(-1, -1)
    counts = torch.cat([torch.arange(size) < length for size, length in zip(padded, LENGTHS)])
    temperature = torch.tensor([0.6, 1.0, 1.7]) if "temperature" in wanted else 0.7

    if not any(isinstance(finder, _Placeholders) for finder in sys.meta_path):
        sys.meta_path.append(_Placeholders())
    os.environ["VERL_USE_EXTERNAL_MODULES"] = "parallel_lce.verl"
    importlib.import_module("verl")
    plugin = sys.modules["parallel_lce.verl"]
    plugin.install()
    from tensordict import NonTensorData, TensorDict

    nested = torch.nested.as_nested_tensor([*sequences], layout=torch.jagged)
    batch = dict(input_ids=nested, position_ids=torch.zeros_like(nested), loss_mask=torch.ones_like(nested))
    more = dict(calculate_entropy=True, calculate_sum_pi_squared="sums" in wanted, use_fused_kernels=True)
    (batch if "temperature" in wanted else more)["temperature"] = temperature
    batch = TensorDict(batch | {name: NonTensorData(value) for name, value in more.items()}, batch_size=[len(LENGTHS)])
    found = CALLS[calls](model, batch, ids, labels)
    plugin.uninstall()
    for name in ("utils.kernel.linear_cross_entropy", "models.mcore.model_forward_fused"):
        module = sys.modules.get(f"verl.{name}")
        assert module is None or not hasattr(module.linear_cross_entropy, "__wrapped__")  # verl's own again

    names = ["log_probs", "entropy", *["sum_pi_squared"] * ("sums" in wanted)]
    if engine:
        found, data = found
        assert {name for name, value in found.items() if value is not None} == {*names}
        assert data["calculate_sum_pi_squared"] == ("sums" in wanted)
        assert torch.equal(*(torch.as_tensor(each) for each in (data["temperature"], temperature)))
        found = [found[name].values() for name in names]
    else:
        found = [value.flatten()[counts] for value in found]
    weights = [normal(sum(LENGTHS), seed=i) for i, _ in enumerate(found)]
    sum((value * weight).sum() for value, weight in zip(found, weights)).backward()

    exact.double()
    if fsdp:
        logits = exact.lm_head(exact.model(ids)[0])
    else:
        logits = exact(ids, torch.arange(ids.shape[1])[None], None)
        logits = mappings.gather_from_tensor_model_parallel_region(logits)
    of_tokens = torch.as_tensor(temperature).double().expand(len(LENGTHS)).repeat_interleave(padded)[:, None]
    truth = reference.statistics(logits[0] / of_tokens, labels.flatten())
    truth = [truth[name][counts] for name in ("target_log_prob", "entropy", "sum_p_squared")][: len(found)]
    sum((value * weight).sum() for value, weight in zip(truth, weights)).backward()
    for value, expected in zip(found, truth):
        assert_near(value, expected, 2e-5)
    for (name, parameter), expected in zip(model.named_parameters(), exact.parameters()):
        assert parameter.grad is not None, name
        grad = parameter.grad.full_tensor() if isinstance(parameter.grad, DTensor) else parameter.grad
        assert_near(grad, expected.grad, 2e-5)
