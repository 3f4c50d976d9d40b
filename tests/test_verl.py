"""The plugin of verl, and what other RL trainers call, each after Megatron-core's decoder and mappings or after FSDP,
against logits in float64: in the default suite with a stand-in of verl's contract; with --all with the release, its
engines included."""

import functools
import importlib
import importlib.abc
import importlib.machinery
import inspect
import os
import re
import shutil
import sys
import tempfile
import tomllib
import warnings
from pathlib import Path
from types import SimpleNamespace
from unittest import mock

import pytest
import torch
from torch import nn
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor

pytest.importorskip("megatron.core", reason="needs megatron-core")

from megatron.core import parallel_state
from megatron.core.tensor_parallel import mappings

import megatron_models
import reference
from blocks import counted_forwards
from cases import normal
from measures import assert_close, assert_near
from parallel_lce import rl
from parallel_lce.backends import torch_backend
from releases import ROOT, folder_of
from tools import on_ranks
from world import forget, launched, mesh_of

RELEASE = "0.9.1"
# All that its engines import, beside torch, megatron-core and the placeholders below.
OTHERS = (
    "accelerate==1.15.0", "antlr4-python3-runtime==4.9.3", "certifi", "cloudpickle==3.1.3", "codetiming==1.4.0",
    "httpcore==1.0.9", "httpx==0.28.1", "huggingface_hub==1.33.0", "hydra-core==1.3.8", "omegaconf==2.4.0",
    "orjson==3.13.0", "peft==0.21.2", "psutil==7.2.2", "pyvers==0.2.3", "regex", "tensordict==0.10.0",
    "tokenizers==0.22.2", "torchdata==0.11.0", "transformers==5.9.0", "typer==0.29.2",
)  # fmt: skip
MODULES = (
    "models/transformers/dense_common", "models/mcore/model_forward_fused", "workers/engine/megatron/transformer_impl",
    "workers/engine/fsdp/transformer_impl", "utils/tensordict_utils", "utils/kernel/linear_cross_entropy",
    "utils/torch_functional", "__init__", "../tensordict",
)  # fmt: skip


@functools.cache
def standin() -> str:
    """A folder to import the stand-in from."""
    folder = tempfile.mkdtemp()
    for module in MODULES:
        path = Path(folder) / "verl" / f"{module}.py"
        path.parent.mkdir(parents=True, exist_ok=True)
        shutil.copy(ROOT / "tests" / "verl_standin.py", path)
    return folder


def _path_of(given: dict) -> str:
    if given["verl"] == "stand-in":
        return standin()
    path = str(folder_of("verl", RELEASE, others=OTHERS))
    hooked = given.get("calls") == "hooked engine"
    return os.pathsep.join([megatron_models.path_of("0.18.2"), path]) if hooked else path


RELEASES = pytest.mark.parametrize("verl", ["stand-in", pytest.param(RELEASE, marks=pytest.mark.slow)])
ON_CPU = pytest.mark.parametrize("device", ["cpu"])  # verl's engines are made to run on CPUs here


class _Placeholders(importlib.abc.MetaPathFinder, importlib.abc.Loader):
    """What verl imports and these tests do not call: packages of which every attribute is a mock."""

    def find_spec(self, name, path=None, target=None):
        if name.split(".")[0] in ("ray", "wandb", "datasets", "pandas"):
            return importlib.machinery.ModuleSpec(name, self, is_package=True)

    def exec_module(self, module) -> None:
        module.__getattr__ = lambda name: mock.MagicMock(name=name)


def installed():
    """The plugin, which verl has imported and which is installed."""
    if not any(isinstance(finder, _Placeholders) for finder in sys.meta_path):
        sys.meta_path.append(_Placeholders())
    os.environ["VERL_USE_EXTERNAL_MODULES"] = "parallel_lce.verl"
    importlib.import_module("verl")
    plugin = sys.modules["parallel_lce.verl"]
    plugin.patch()
    return plugin


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


def _nested(rows) -> torch.Tensor:
    return torch.nested.as_nested_tensor([*rows], layout=torch.jagged)


WANTED = ["", "temperature", "sums", "temperature, sums"]
MASKED = ["mask", "responses, temperature, sums", "dense responses"]
CASES = [(calls, "") for calls in CALLS if "engine" not in calls] + [("engine", each) for each in WANTED + MASKED]
CASES = [(*case, *on) for case in CASES for on in ((2, False), (2, True), (1, False), (4, False), (4, True))]
CASES += [("fsdp engine", wanted, ranks, False) for wanted in WANTED + MASKED for ranks in (2, 1)]
CASES = [(verl, *case) for verl in ("stand-in", RELEASE) for case in CASES if verl == RELEASE or case[2] == 2]
CASES += [(RELEASE, "hooked engine", WANTED[-1], 2, parallel) for parallel in (True, False)]
CASES = [pytest.param(*case, marks=[pytest.mark.slow] * (case[0] == RELEASE)) for case in CASES]


@ON_CPU
@pytest.mark.parametrize(("verl", "calls", "wanted", "ranks", "sequence_parallel"), CASES)
@on_ranks(path_of=_path_of)
def test_what_trainers_call(member, verl, calls, wanted, sequence_parallel):
    """On three packed sequences, of one temperature or each of its own: log-probabilities, entropies, sums of squared
    probabilities, and every gradient."""
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

    plugin = installed()
    from tensordict import NonTensorData, TensorDict

    nested = _nested(sequences)
    batch = dict(input_ids=nested, position_ids=torch.zeros_like(nested), loss_mask=torch.ones_like(nested))
    scored = torch.ones(sum(LENGTHS), dtype=torch.bool)
    if "mask" in wanted or "responses" in wanted:
        # The first two tokens are the prompt's. Of each response a token, as of a tool, does not count either.
        masks = [torch.arange(n - 2) != 1 for n in LENGTHS]
        whole = [nn.functional.pad(mask, (2, 0)) for mask in masks]
        scored = torch.cat([nn.functional.pad(mask[1:], (0, 1)) for mask in whole])
        batch["loss_mask"] = _nested(whole if "mask" in wanted else masks)
        if "dense" in wanted:
            batch["loss_mask"] = batch["loss_mask"].float().to_padded_tensor(0)
            batch["attention_mask"] = nn.functional.pad(
                _nested([mask | True for mask in masks]).to_padded_tensor(0), (2, 0)
            )
            batch["attention_mask"][:, :2] = True
    more = dict(calculate_entropy=True, calculate_sum_pi_squared="sums" in wanted, use_fused_kernels=True)
    (batch if "temperature" in wanted else more)["temperature"] = temperature
    batch = TensorDict(batch | {name: NonTensorData(value) for name, value in more.items()}, batch_size=[len(LENGTHS)])
    if not scored.all():
        plugin.patch(skip_masked=True)
    with counted_forwards(torch_backend) as rows:
        found = CALLS[calls](model, batch, ids, labels)
    assert scored.all() or sum(rows) == scored.sum()
    plugin.unpatch()
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
    truth = [truth[name][counts].where(scored, 0.0) for name in ("target_log_prob", "entropy", "sum_p_squared")][
        : len(found)
    ]
    sum((value * weight).sum() for value, weight in zip(truth, weights)).backward()
    for value, expected in zip(found, truth):
        assert_near(value, expected, 2e-5)
    for (name, parameter), expected in zip(model.named_parameters(), exact.parameters()):
        assert parameter.grad is not None, name
        grad = parameter.grad.full_tensor() if isinstance(parameter.grad, DTensor) else parameter.grad
        assert_near(grad, expected.grad, 2e-5)


def _losses(hidden, weight, labels, kernel, group=None):
    log_probs, entropy = kernel(hidden, weight, labels, 0.7, "none", group)
    return ((log_probs + entropy) * torch.linspace(-1.0, 2.0, len(labels))).sum()


def _of_one_rank(hidden, weight, labels, temperature, *_):
    found = reference.statistics(hidden @ weight.t() / temperature, labels)
    return found["target_log_prob"], found["entropy"]


def _views(hidden):
    return hidden.transpose(0, 1).contiguous().reshape(-1, 32)[:, None].squeeze(1).double().float()


@ON_CPU
@RELEASES
@on_ranks(2, _path_of)
def test_the_gradient_is_summed_once(member, verl):
    """dX is summed once, whatever lies between a mapping and the kernel, and whoever has put a mapping into verl's
    functions."""
    model = megatron_models.build(member, megatron_models.Model(ranks=member.ranks), {})
    plugin, kernels = installed(), importlib.import_module("verl.utils.kernel.linear_cross_entropy")
    verls = importlib.import_module("verl.models.mcore.model_forward_fused")
    group = parallel_state.get_tensor_model_parallel_group()
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

    for kernel in (verls.linear_cross_entropy, kernels.linear_cross_entropy):
        for between in (lambda hidden: hidden, _views):
            for mapping in (copied, gathered):
                end = lambda x: _losses(between(mapping(x)), shard, labels, kernel, group)  # noqa: E731
                assert_once(end, mapping is gathered, True, f"{kernel} after {between}")

    given = dict(output_layer=SimpleNamespace(weight=shard), output_weight=None, labels=labels)
    given["context"] = verls.FusedOutputProcessorContext(temperature=0.7)

    def processed(hidden, parallel=False):
        config = SimpleNamespace(sequence_parallel=parallel)
        out = verls.fused_output_processor(hidden_states=hidden, config=config, **given)
        return ((out.log_probs + out.entropy) * torch.linspace(-1.0, 2.0, 12)).sum()

    for parallel in (True, False):
        assert_once(lambda x: processed(x, parallel), parallel, False, "verl's own")
    # Others' remedies of the missing mapping, around verl's functions after and before the plugin is installed.
    ours, kernel = verls.fused_output_processor, verls.linear_cross_entropy
    in_front = lambda function, *, hidden_states, **more: function(hidden_states=copied(hidden_states), **more)  # noqa: E731
    with mock.patch.object(verls, "fused_output_processor", functools.partial(in_front, ours)):
        assert_once(processed, False, True, "a mapping in front of its function")
    with mock.patch.object(verls, "linear_cross_entropy", lambda hidden, *more: kernel(copied(hidden)[...], *more)):
        assert_once(processed, False, True, "a mapping in front of its kernel")
    plugin.unpatch()
    own = verls.linear_cross_entropy
    with mock.patch.object(verls, "fused_output_processor", functools.partial(in_front, verls.fused_output_processor)):
        plugin.patch()
        assert_once(processed, False, True, "a mapping before patch")
        plugin.unpatch()
    with mock.patch.object(verls, "linear_cross_entropy", functools.wraps(own)(lambda *given: own(*given))):
        with pytest.warns(UserWarning, match="other code has replaced verl's function"):
            plugin.patch()
        assert not hasattr(verls.linear_cross_entropy.__wrapped__, "__wrapped__")  # still that of the other code
        plugin.unpatch()
    plugin.patch()

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
    plugin.unpatch()


def test_the_environment_skips_masked_tokens(monkeypatch):
    """Unless patch() says otherwise."""
    plugin = importlib.import_module("parallel_lce.verl")
    for value, skips in (("", False), ("0", False), ("1", True)):
        monkeypatch.setenv("PARALLEL_LCE_SKIP_MASKED", value)
        assert plugin._skips_masked() == skips
    plugin.patch(skip_masked=False)
    assert not plugin._skips_masked()
    plugin.unpatch()
    monkeypatch.setenv("PARALLEL_LCE_SKIP_MASKED", "yes")
    with pytest.raises(ValueError, match="PARALLEL_LCE_SKIP_MASKED must be 0 or 1, got 'yes'"):
        plugin._skips_masked()
    with pytest.raises(ValueError, match="skip_masked must be True or False, got 'yes'"):
        plugin.patch(skip_masked="yes")


PAGE = (ROOT / "docs" / "rl.md").read_text()
IMPORT = """
import importlib, sys
import verl
kernel = importlib.import_module("verl.utils.kernel.linear_cross_entropy")
plugin = sys.modules["parallel_lce.verl"]
assert "megatron" not in sys.modules
ours = kernel.linear_cross_entropy
plugin.patch()
assert kernel.linear_cross_entropy is ours
plugin.unpatch()
theirs = kernel.linear_cross_entropy
assert theirs is not ours and theirs is ours.__wrapped__
plugin.patch()
assert kernel.linear_cross_entropy is not theirs
"""


def _run(code: str, path: tuple[Path | str, ...], environment: dict[str, str]) -> None:
    forget("megatron", "parallel_lce")
    sys.path[:0] = map(str, path)
    os.environ.update(environment)
    exec(code, {})


def _python(code: str, *path: Path | str, **environment: str) -> None:
    launched(1, _run, code, path, environment)


def test_the_line_of_the_page():
    (line,) = re.findall(r"^```bash\n(.*?)^```$", PAGE, re.M | re.S)
    name, value = re.match(r"(\w+)=(\S+) python3 -m verl", line).groups()
    _python(IMPORT, standin(), **{name: value})


def test_the_entry_point(tmp_path):
    groups = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["entry-points"]
    information = tmp_path / "a_plugin-0.dist-info"
    information.mkdir()
    (information / "METADATA").write_text("Metadata-Version: 2.1\nName: a-plugin\nVersion: 0\n")
    lines = [f"{name} = {value}" for name, value in groups["verl.plugins"].items()]
    (information / "entry_points.txt").write_text("\n".join(["[verl.plugins]", *lines]))
    _python(IMPORT, tmp_path, standin())


FSDP_ALONE = """
import sys
from types import SimpleNamespace
import verl
from tensordict import NonTensorData, TensorDict
from verl.utils import tensordict_utils
kernel, plugin = "verl.utils.kernel.linear_cross_entropy", sys.modules["parallel_lce.verl"]
assert kernel not in sys.modules
class Engine:
    model_config = SimpleNamespace(fused_kernel_options={"impl_backend": "triton"})
    def prepare_model_inputs(engine, batch):
        seen.append(batch["use_fused_kernels"])
class Other(Engine):  # as VeOmni's, which does not run the kernel
    def prepare_model_inputs(engine, batch):
        return super().prepare_model_inputs(batch)
asked = dict(temperature=1.0, use_fused_kernels=True, calculate_sum_pi_squared=True)
batch = TensorDict({name: NonTensorData(value) for name, value in asked.items()}, batch_size=[1])
seen = []
for engine in (Other(), Engine()):
    try:
        plugin._fsdp_inputs(Engine.prepare_model_inputs, engine, batch)
    except TypeError:  # what verl's function gives is missing
        pass
    assert (kernel in sys.modules) == (type(engine) is Engine)
assert seen == [True, False]
"""


def test_the_first_batch_of_fsdp_alone():
    """Without megatron-core the model's forward imports verl's kernel first."""
    _python(FSDP_ALONE, standin(), VERL_USE_EXTERNAL_MODULES="parallel_lce.verl")


MASK_ELSEWHERE = """
import sys, torch, verl
plugin, moved = sys.modules["parallel_lce.verl"], []
ids = torch.nested.nested_tensor_from_jagged(torch.arange(5), torch.tensor([0, 2, 5]))
class Mask:  # on another device than the ids
    def to(self, *where):
        moved.append(where)
        return torch.tensor([True, False, True, True, False]).to(*where)
call = plugin._Call(1.0, mask=Mask())
with plugin._set(plugin._current, call):
    plugin._pack(lambda packed, *rest, **named: (packed.values(),), ids, need_roll=True)
assert moved == [(ids.device, ids.dtype)] and call.mask.tolist() == [True, False, True, True, False]
"""


def test_a_mask_goes_to_the_device_of_the_ids():
    """verl's Megatron engine moves a micro-batch to the GPU after its mask was read."""
    _python(MASK_ELSEWHERE, standin(), VERL_USE_EXTERNAL_MODULES="parallel_lce.verl")


def test_the_python_of_the_page_and_nothing_else_imports_a_trainer():
    blocks = re.findall(r"^```python\n(.*?)^```$", PAGE, re.M | re.S)
    before, after = [block for block in blocks if "loss.backward()" in block]
    others = [block for block in blocks if block not in (before, after)]
    assert others
    given = "import torch\nhidden, weight = (torch.randn(n, 4, requires_grad=True) for n in (6, 9))\n"
    given += "tokens, tp_group, (old, advantage, mask) = torch.arange(6), None, torch.rand(3, 6)\n"
    same = "torch.testing.assert_close((loss, hidden.grad), before)\n"  # of the losses before and after
    before += "before = loss, hidden.grad\nhidden.grad = None\n"
    none = "import sys\nassert not {'verl', 'megatron', 'skyrl', 'slime', 'nemo_rl'} & {*sys.modules}\n"
    _python("\n".join([given, before, after, same, *others, none]))
