"""What the tests of the plugin run on each rank: verl's own functions, of the release or of the stand-in, on
Megatron-core's model and mappings, against logits in float64."""

from __future__ import annotations

import importlib
import importlib.machinery
import inspect
import os
import sys
import types
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from pathlib import Path
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
from measures import assert_near
from parallel_lce import rl
from world import Member, mesh_of

PLACEHOLDERS = ("ray", "wandb", "datasets", "pandas")
"""What verl imports and these tests do not call."""


class _Placeholders:
    """Finds packages of which every attribute is a mock."""

    def find_spec(self, name, path=None, target=None):
        return (
            importlib.machinery.ModuleSpec(name, self, is_package=True) if name.split(".")[0] in PLACEHOLDERS else None
        )

    def create_module(self, spec):
        module = types.ModuleType(spec.name)
        module.__getattr__ = lambda name: mock.MagicMock(name=name)
        return module

    def exec_module(self, module) -> None:
        pass


STANDIN = str(Path(__file__).parent / "verl_standin")


@contextmanager
def verl(release: str) -> Iterator[None]:
    """verl can be imported, and imports the plugin."""
    if release == "stand-in":
        sys.path.insert(0, STANDIN)
    elif not any(isinstance(finder, _Placeholders) for finder in sys.meta_path):
        sys.meta_path.append(_Placeholders())
    os.environ["VERL_USE_EXTERNAL_MODULES"] = "parallel_lce.verl"
    importlib.import_module("verl")
    plugin = sys.modules["parallel_lce.verl"]
    plugin.install()
    try:
        yield
    finally:
        plugin.uninstall()
        for name in ("utils.kernel.linear_cross_entropy", "models.mcore.model_forward_fused"):
            module = sys.modules.get(f"verl.{name}")
            assert module is None or not hasattr(module.linear_cross_entropy, "__wrapped__")  # verl's own again
        if release == "stand-in":  # of this process, which other tests use too
            sys.path.remove(STANDIN)
            for name in [*sys.modules]:
                if name.split(".")[0] in ("verl", "tensordict") or name == "parallel_lce.verl":
                    del sys.modules[name]


class _OwnValue(nn.Module):
    """A core attention without attention, for packed sequences too."""

    def __init__(self, *given, **named) -> None:
        super().__init__()

    def forward(self, query, key, value, *rest, **named):
        return value.flatten(2) if value.dim() == 4 else value.flatten(1)


def _model(member: Member, sequence_parallel: bool, tied: bool = False):
    layer = megatron_models._layer

    def packed(spec):
        made = layer(spec)
        made.submodules.self_attention.submodules.core_attention = _OwnValue
        return made

    with mock.patch.object(megatron_models, "_layer", packed):
        return megatron_models.build(
            member, megatron_models.Model(ranks=member.ranks, sequence_parallel=sequence_parallel, tied=tied), {}
        )


def _truth(exact, ids, labels, temperature, weights) -> tuple[list, dict]:
    """Log-probabilities, entropies and sums of squared probabilities ``[T]`` of Megatron's own logits in float64, and
    the gradients of their weighted sum."""
    logits = exact.double()(ids, torch.arange(ids.shape[1])[None], None)
    return _of_logits(mappings.gather_from_tensor_model_parallel_region(logits), exact, labels, temperature, weights)


def _of_logits(logits, model, labels, temperature, weights) -> tuple[list, dict]:
    truth = reference.statistics(logits[0] / temperature, labels.flatten())
    found = [truth[name] for name in ("target_log_prob", "entropy", "sum_p_squared")]
    sum((value * weight).sum() for value, weight in zip(found, weights)).backward()
    return found, {name: p.grad for name, p in model.named_parameters()}


def _compare(model, found, expected, gradients, tolerance=2e-5) -> None:
    for value, exact in zip(found, expected):
        assert_near(value.flatten(), exact, tolerance)
    for name, parameter in model.named_parameters():
        assert parameter.grad is not None, name
        grad = parameter.grad.full_tensor() if isinstance(parameter.grad, DTensor) else parameter.grad
        assert_near(grad, gradients[name], tolerance)


def ends(member: Member, release: str, trainer: str, sequence_parallel: bool) -> None:
    """What each trainer calls after Megatron's decoder, with its own mappings."""
    model, exact = (_model(member, sequence_parallel, tied="tied" in trainer) for _ in range(2))
    ids, labels = torch.randint(96, (2, 1, 16), generator=torch.Generator().manual_seed(5))
    weights = [normal(16, seed=i) for i in (1, 2)]
    with verl(release) if "verl" in trainer else nullcontext():
        found = _ENDS[trainer.split()[-1]](model, ids, labels, 0.7)
        sum((value.flatten() * weight).sum() for value, weight in zip(found, weights)).backward()
    _compare(model, found, *_truth(exact, ids, labels, 0.7, weights[: len(found)]))


def _with_end(model, ids, labels, end):
    """Megatron's forward, of which the ``end`` is another: a function of the decoder's output."""
    with mock.patch.object(model, "_postprocess", lambda hidden_states, **others: end(hidden_states)):
        return model(ids, torch.arange(ids.shape[1])[None], None, labels=labels)


def _verl_forward(model, ids, labels, temperature):
    forward = importlib.import_module("verl.models.mcore.model_forward_fused")._fused_GPTModel_forward
    output = forward(model, ids, torch.arange(ids.shape[1])[None], None, labels=labels, temperature=temperature)
    return output.log_probs, output.entropy


def _verl_hook(model, ids, labels, temperature):
    forward = importlib.import_module("verl.models.mcore.model_forward_fused")
    given = dict(output_layer=model.output_layer, output_weight=None, labels=labels, config=model.config, input_ids=ids)
    given["context"] = forward.FusedOutputProcessorContext(temperature)
    end = lambda hidden: forward.fused_output_processor(hidden_states=hidden, **given)  # noqa: E731
    output = _with_end(model, ids, labels, end)
    return output.log_probs, output.entropy


def _slime(model, ids, labels, temperature):
    def end(hidden):
        mapping = mappings.copy_to_tensor_model_parallel_region
        if model.config.sequence_parallel:
            mapping = mappings.gather_from_sequence_parallel_region
        hidden = mapping(hidden).reshape(-1, hidden.shape[-1]).contiguous()
        group = parallel_state.get_tensor_model_parallel_group()
        found = rl.linear_cross_entropy(
            hidden, model.output_layer.weight, labels.reshape(-1), temperature, "none", group
        )
        return torch.stack(found, -1)[None]

    return _with_end(model, ids, labels, end).unbind(-1)


def _skyrl(model, ids, labels, temperature):
    def end(hidden):
        mapping = mappings.copy_to_tensor_model_parallel_region  # SkyRL has none: the page says to add it
        if model.config.sequence_parallel:
            mapping = mappings.gather_from_sequence_parallel_region
        return mapping(hidden).transpose(0, 1).contiguous()

    hidden = _with_end(model, ids, labels, end)
    weight, rank = model.output_layer.weight / temperature, parallel_state.get_tensor_model_parallel_rank()
    bounds = len(weight) * rank, len(weight) * (rank + 1)
    group = parallel_state.get_tensor_model_parallel_group()
    return (rl.FusedLinearLogprobTriton.apply(hidden, weight, labels, *bounds, 8, group, False),)


_ENDS = {"verl": _verl_forward, "hook": _verl_hook, "slime": _slime, "skyrl": _skyrl}


def mapped(member: Member) -> None:
    """The kernel sums dX where no mapping in front does, also behind views and conversions."""
    megatron_models.start(member, megatron_models.Model(ranks=member.ranks))
    x, weight, upstream = normal(16, 32), normal(96, 32, seed=1) / 4, normal(16, seed=2)
    labels = torch.arange(16)
    exact = x.clone().requires_grad_()
    log_p = (exact @ weight.t()).log_softmax(-1).gather(-1, labels[:, None])[:, 0]
    (expected,) = torch.autograd.grad(log_p, exact, upstream)
    rows = slice(96 // member.ranks * member.rank, 96 // member.ranks * (member.rank + 1))
    part = slice(16 // member.ranks * member.rank, 16 // member.ranks * (member.rank + 1))
    gather, copied = mappings.gather_from_sequence_parallel_region, mappings.copy_to_tensor_model_parallel_region
    with verl("stand-in"):
        kernel = importlib.import_module("verl.models.mcore.model_forward_fused").linear_cross_entropy
        for own, mapping in (
            (part, gather),
            (part, lambda states: gather(states, tensor_parallel_output_grad=False)),
            (slice(None), copied),
            (slice(None), lambda states: states * 1),
        ):
            leaf = x[own].clone().requires_grad_()
            hidden = mapping(leaf).view(2, 8, 32).transpose(0, 1).contiguous().permute(1, 0, 2).reshape(16, 32)
            hidden = hidden[:, None].squeeze(1).unsqueeze(0).float()
            log_probs, _ = kernel(hidden, weight[rows].float(), labels, 1.0, "none", member.group)
            (found,) = torch.autograd.grad(log_probs, leaf, upstream.float())
            assert_near(found, expected[own], 2e-6)


LENGTHS = 5, 9, 3


def _batch(wanted: str, **more: object):
    """Three sequences as verl's engines get them, of one temperature or each of its own."""
    from tensordict import NonTensorData, TensorDict

    generator = torch.Generator().manual_seed(7)
    ids = [torch.randint(96, (length,), generator=generator) for length in LENGTHS]
    ids = torch.nested.as_nested_tensor(ids, layout=torch.jagged)
    tensors = dict(input_ids=ids, position_ids=torch.zeros_like(ids), loss_mask=torch.ones_like(ids))
    if "temperature" in wanted:
        tensors["temperature"] = torch.tensor([0.6, 1.0, 1.7])
    more = dict(temperature=0.7, calculate_entropy=True, calculate_sum_pi_squared="sums" in wanted) | more
    return TensorDict({name: NonTensorData(value) for name, value in more.items()} | tensors, batch_size=[len(LENGTHS)])


def _packed(batch, multiple: int) -> tuple:
    """Ids and labels of the packed sequences, each padded, ``[1, T]``; temperatures ``[T, 1]``; which tokens count."""
    padded = [length + -length % multiple for length in LENGTHS]
    sequences = zip(batch["input_ids"].unbind(), padded)
    ids = torch.cat([nn.functional.pad(row, (0, size - len(row))) for row, size in sequences])[None]
    counts = torch.cat([torch.arange(size) < length for size, length in zip(padded, LENGTHS)])
    temperatures = torch.as_tensor(batch["temperature"]).double().expand(len(LENGTHS))
    return ids, ids.roll(-1, -1), temperatures.repeat_interleave(torch.tensor(padded))[:, None], counts


def _judge(model, found: dict, wanted: str, truth, counts) -> None:
    """Compares what an engine found, of the tokens that count, with ``truth(weights)``."""
    names = ["log_probs", "entropy", *["sum_pi_squared"] * ("sums" in wanted)]
    assert {name for name, value in found.items() if value is not None} == {*names}
    weights = [normal(len(counts), seed=i) * counts for i, _ in enumerate(names)]
    values = [found[name].values() for name in names]
    sum((value * weight[counts]).sum() for value, weight in zip(values, weights)).backward()
    expected, gradients = truth(weights)
    _compare(model, values, [value[counts] for value in expected], gradients)


def _engine(kind, **attributes):
    """An engine of this class that was never built: its own methods, and these attributes."""
    self = object.__new__(kind)
    vars(self).update(attributes)
    return self


def megatron_engine(member: Member, release: str, sequence_parallel: bool, wanted: str) -> None:
    """A step of verl's Megatron engine, from the batch on."""
    model, exact = (_model(member, sequence_parallel) for _ in range(2))
    config = dict(use_fused_kernels=True, use_remove_padding=True, pad_to_length=False, dynamic_context_parallel=False)
    of_model = dict(
        hf_config=SimpleNamespace(architectures=["Qwen2ForCausalLM"]),
        mtp=SimpleNamespace(enable=False),
        tokenizer=SimpleNamespace(pad_token_id=0),
    )
    with verl(release):
        transformer_impl = importlib.import_module("verl.workers.engine.megatron.transformer_impl")
        engine = _engine(
            transformer_impl.MegatronEngineWithLMHead,
            engine_config=SimpleNamespace(**config),
            model_config=SimpleNamespace(**of_model),
            enable_routing_replay=False,
            is_value_model=False,
            module=[model],
        )
        engine._maybe_enable_fused_kernels()
        batch = _batch(wanted)
        with mock.patch.object(transformer_impl, "get_device_id", lambda: "cpu"):
            found, finish = engine.forward_step(iter([batch]), model, None, lambda output, data, **named: data)
    data = finish(found)
    assert data["calculate_sum_pi_squared"] == ("sums" in wanted)
    assert torch.equal(*(torch.as_tensor(each["temperature"]) for each in (data, batch)))
    ids, labels, temperatures, counts = _packed(batch, member.ranks)
    _judge(model, found, wanted, lambda weights: _truth(exact, ids, labels, temperatures, weights), counts)


def hooked_engine(member: Member, *given) -> None:
    """The same with a release of Megatron-core that has the hook, which verl uses then."""
    assert "output_processor" in inspect.signature(megatron_models.GPTModel.forward).parameters
    megatron_engine(member, *given)


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


def fsdp_engine(member: Member, release: str, wanted: str) -> None:
    """A step of verl's FSDP engine, of several ranks on the same batch."""
    torch.manual_seed(3)
    model, exact, outputs = _Dense(), _Dense(), []
    exact.load_state_dict(model.state_dict())
    if member.ranks > 1:
        fully_shard(model, mesh=mesh_of("cpu", (member.ranks,)))

    def loss_function(model_output, data, dp_group):
        assert data is batch
        outputs.append(model_output)
        return torch.zeros(()), {}

    with verl(release):
        transformer_impl = importlib.import_module("verl.workers.engine.fsdp.transformer_impl")
        engine = _engine(
            transformer_impl.FSDPEngineWithLMHead,
            model_config=SimpleNamespace(fused_kernel_options={"impl_backend": "triton"}),
            pad_to_length=True,
            pad_to_length_bucket=8,
            use_ulysses_sp=False,
            _autocast_dtype=torch.float32,
            get_data_parallel_group=lambda: None,
            module=model,
        )
        batch = _batch(wanted, use_fused_kernels=True)
        batch.to = lambda _: batch
        with mock.patch.object(transformer_impl, "get_device_id", lambda: "cpu"):
            engine.forward_step(batch, loss_function, False)
    ids, labels, temperatures, counts = _packed(batch, 1)

    def truth(weights):
        logits = exact.double().lm_head(exact.model(ids)[0])
        return _of_logits(logits, exact, labels, temperatures, weights)

    _judge(model, outputs[0], wanted, truth, counts)
