"""verl's fused kernel, replaced, behind Megatron-core's decoder or FSDP, against logits in float64: in the default
suite with a stand-in of verl's contract; with --all with the release, its engines included."""

import functools
import importlib
import importlib.abc
import importlib.machinery
import os
import re
import shutil
import sys
import tempfile
from pathlib import Path
from types import SimpleNamespace
from unittest import mock

import pytest
import torch
from torch import nn
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor

pytest.importorskip("megatron.core", reason="needs megatron-core")

from megatron.core.tensor_parallel import mappings

import megatron_models
import parallel_lce.verl as door
from cases import dense_statistics, normal
from measures import assert_near
from parallel_lce.backends import torch_backend
from releases import ROOT, folder_of
from tools import counted_forwards, debug_mode, on_ranks
from transformers_models import warned
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
    "models/transformers/dense_common", "models/mcore/model_forward_fused", "workers/engine/fsdp/transformer_impl",
    "utils/kernel/linear_cross_entropy", "__init__", "../tensordict",
)  # fmt: skip
LENGTHS = 5, 9, 3


@functools.cache
def standin() -> str:
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


RELEASED = pytest.param(RELEASE, marks=pytest.mark.slow)
RELEASES = pytest.mark.parametrize("verl", ["stand-in", RELEASED])
ON_CPU = pytest.mark.parametrize("device", ["cpu"])  # verl's engines are made to run on CPUs here


class _Placeholders(importlib.abc.MetaPathFinder, importlib.abc.Loader):
    """What verl imports and these tests do not call: packages of which every attribute is a mock."""

    def find_spec(self, name, path=None, target=None):
        if name.split(".")[0] in ("ray", "wandb", "datasets", "pandas"):
            return importlib.machinery.ModuleSpec(name, self, is_package=True)

    def exec_module(self, module) -> None:
        module.__getattr__ = lambda name: mock.MagicMock(name=name)


def verls(name: str):
    if not any(isinstance(finder, _Placeholders) for finder in sys.meta_path):
        sys.meta_path.append(_Placeholders())
    return importlib.import_module(f"verl.{name}")


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
        return verls("models.transformers.dense_common").forward_with_triton_backend(self, *given, **named)


def _engine(place: str, kind: str, **attributes):
    """An engine that was never built: its own methods, and these attributes."""
    module = verls(f"workers.engine.{place}.transformer_impl")
    module.get_device_id = lambda: "cpu"
    self = object.__new__(getattr(module, kind))
    vars(self).update(attributes)
    return self


def _megatron_engine(model, batch):
    config = dict(use_fused_kernels=True, use_remove_padding=True, pad_to_length=False, dynamic_context_parallel=False)
    of_model = dict(hf_config=SimpleNamespace(architectures=["Qwen2ForCausalLM"]), mtp=SimpleNamespace(enable=False))
    more = dict(enable_routing_replay=False, is_value_model=False, module=[model])
    more["model_config"] = SimpleNamespace(**of_model, tokenizer=SimpleNamespace(pad_token_id=0))
    engine = _engine("megatron", "MegatronEngineWithLMHead", engine_config=SimpleNamespace(**config), **more)
    engine._maybe_enable_fused_kernels()
    return engine.forward_step(iter([batch]), model, None, lambda output, data, **named: data)[0]


def _fsdp_engine(model, batch):
    more = dict(pad_to_length=True, pad_to_length_bucket=8, use_ulysses_sp=False, _autocast_dtype=torch.float32)
    more |= dict(model_config=SimpleNamespace(fused_kernel_options={"impl_backend": "triton"}), module=model)
    engine = _engine("fsdp", "FSDPEngineWithLMHead", get_data_parallel_group=lambda: None, **more)
    loss = mock.Mock(return_value=(torch.zeros(()), {}))
    engine.forward_step(batch, loss, False)
    return loss.call_args.kwargs["model_output"]


def _nested(rows) -> torch.Tensor:
    return torch.nested.as_nested_tensor([*rows], layout=torch.jagged)


def _batch(masked: str):
    """Three sequences, the mask of the next tokens that count ``[17]``, and verl's batch of them. Of each response a
    token, as of a tool, does not count, nor do prompts of two tokens."""
    from tensordict import NonTensorData, TensorDict

    sequences = torch.randint(96, (sum(LENGTHS),), generator=torch.Generator().manual_seed(7)).split(LENGTHS)
    masks = [torch.arange(n - 2) != 1 for n in LENGTHS]
    whole = [nn.functional.pad(mask, (2, 0)) for mask in masks]
    batch = dict(input_ids=_nested(sequences), loss_mask=_nested(masks if masked == "responses" else whole))
    batch["position_ids"] = torch.zeros_like(batch["input_ids"])
    if masked == "dense responses":
        batch["loss_mask"] = _nested(masks).float().to_padded_tensor(0)
        batch["attention_mask"] = torch.arange(9) < torch.tensor(LENGTHS)[:, None]
    settings = dict(calculate_entropy=True, calculate_sum_pi_squared=False, use_fused_kernels=True, temperature=0.7)
    batch |= {name: NonTensorData(value) for name, value in settings.items()}
    scored = torch.cat([nn.functional.pad(mask[1:], (0, 1)) for mask in whole])
    return sequences, scored if masked else scored | True, TensorDict(batch, batch_size=[len(LENGTHS)])


OF_FSDP = [("fsdp engine", masked, 1) for masked in ("", "whole", "responses", "dense responses")]
OF_FSDP += [("fsdp engine", "responses", 2)]
OF_MEGATRON = [("megatron engine", "", 1), ("megatron engine", "", 2)]
OF_MEGATRON += [("tied megatron engine", "", 2), ("hooked engine", "", 2)]
CASES = [("stand-in", *case) for case in OF_FSDP]
CASES += [pytest.param(RELEASE, *case, marks=pytest.mark.slow) for case in (*OF_FSDP, *OF_MEGATRON)]


@ON_CPU
@pytest.mark.parametrize(("verl", "calls", "masked", "ranks"), CASES)
@on_ranks(path_of=_path_of)
def test_what_the_engines_return_and_every_gradient_are_those_of_logits(member, verl, calls, masked):
    torch.manual_seed(3)
    fsdp = "fsdp" in calls
    spec = megatron_models.Model(ranks=member.ranks, tied="tied" in calls, sequence_parallel=member.ranks > 1)
    model, exact = (_Dense() if fsdp else megatron_models.build(member, spec, {}) for _ in range(2))
    exact.load_state_dict(model.state_dict())
    if fsdp and member.ranks > 1:
        fully_shard(model, mesh=mesh_of("cpu", (member.ranks,)))
    for each in () if fsdp else (model, exact):
        each.decoder.layers[0].self_attention.core_attention = _OwnValue()

    verls("utils.kernel.linear_cross_entropy")
    sequences, scored, batch = _batch(masked)
    door.patch(skip_masked=bool(masked))
    engine = _fsdp_engine if fsdp else _megatron_engine
    if masked:  # the first batch finds the engine
        engine(model, batch)
    with counted_forwards(torch_backend) as rows:
        found = engine(model, batch)
    assert not masked or sum(rows) == scored.sum()
    door.unpatch()
    found = [found[name].values() for name in ("log_probs", "entropy")]
    weights = [normal(sum(LENGTHS), seed=i) for i, _ in enumerate(found)]
    sum((value * weight).sum() for value, weight in zip(found, weights)).backward()

    sizes = torch.tensor([length + -length % (1 if fsdp else member.ranks) for length in LENGTHS])
    ids = torch.cat([nn.functional.pad(row, (0, size - len(row))) for row, size in zip(sequences, sizes)])[None]
    counts = torch.cat([torch.arange(size) < length for size, length in zip(sizes, LENGTHS)])
    exact.double()
    if fsdp:
        logits = exact.lm_head(exact.model(ids)[0])
    else:
        logits = exact(ids, torch.arange(ids.shape[1])[None], None)
        logits = mappings.gather_from_tensor_model_parallel_region(logits)
    truth = dense_statistics(logits[0] / 0.7, ids.roll(-1, -1).flatten())
    truth = [truth[name][counts].where(scored, 0.0) for name in ("target_log_prob", "entropy")]
    sum((value * weight).sum() for value, weight in zip(truth, weights)).backward()
    for value, expected in zip(found, truth):
        assert_near(value, expected, 2e-5)
    for (name, parameter), expected in zip(model.named_parameters(), exact.parameters()):
        assert parameter.grad is not None, name
        grad = parameter.grad.full_tensor() if isinstance(parameter.grad, DTensor) else parameter.grad
        assert_near(grad, expected.grad, 2e-5)


@ON_CPU
@RELEASES
@on_ranks(2, _path_of)
def test_where_nothing_sums_the_gradient_training_is_refused(member, verl):
    """Scores without a gradient are right, and so are training with sequence parallelism and one's own mapping."""
    kernel = verls("utils.kernel.linear_cross_entropy")
    door.patch()
    megatron_models.build(member, megatron_models.Model(ranks=member.ranks), {})
    whole, weight, labels = normal(12, 32).float(), normal(96, 32, seed=1).float(), torch.arange(12) * 7
    truth = whole.double().requires_grad_()
    expected = dense_statistics(truth @ weight.double().t() / 0.7, labels)["target_log_prob"]
    expected.sum().backward()
    rest = weight.chunk(member.ranks)[member.rank], labels, 0.7, "none", member.group

    hidden = whole.clone().requires_grad_()
    with pytest.raises(RuntimeError, match="not come straight from a mapping that sums their gradient"):
        kernel.linear_cross_entropy(hidden, *rest)
    with torch.no_grad():
        assert_near(kernel.linear_cross_entropy(hidden, *rest)[0], expected, 2e-5)
    copied = mappings.copy_to_tensor_model_parallel_region(hidden)
    kernel.linear_cross_entropy(copied, *rest)[0].sum().backward()
    assert_near(hidden.grad, truth.grad, 2e-5)
    part = whole.chunk(member.ranks)[member.rank].clone().requires_grad_()
    gathered = mappings.gather_from_sequence_parallel_region(part)
    kernel.linear_cross_entropy(gathered, *rest)[0].sum().backward()
    assert_near(part.grad, truth.grad.chunk(member.ranks)[member.rank], 2e-5)
    door.patch(skip_masked=member.rank == 1)
    with (
        debug_mode(),
        pytest.raises((RuntimeError, ValueError), match="for verl's FSDP engine: on Megatron leave them"),
    ):
        kernel.linear_cross_entropy(hidden.detach(), *rest)
    door.unpatch()


@ON_CPU
@RELEASES
@on_ranks(1, _path_of)
def test_a_function_of_other_code_stays(member, verl):
    kernel = verls("utils.kernel.linear_cross_entropy")
    stock = kernel.linear_cross_entropy
    door.patch()
    ours = kernel.linear_cross_entropy
    assert ours is not stock
    module = verls("models.mcore.model_forward_fused")  # imports ours
    assert module.linear_cross_entropy is ours
    kernel.linear_cross_entropy = kernel.LinearCrossEntropy.apply  # put back by hand
    door.patch()
    assert kernel.linear_cross_entropy is ours
    door.unpatch()
    assert kernel.linear_cross_entropy == stock
    other = object()
    for place in (module, kernel):
        with mock.patch.object(place, "linear_cross_entropy", other), warned((UserWarning,)) as said:
            door.patch()
            assert place.linear_cross_entropy is other and (place is kernel or kernel.linear_cross_entropy is ours)
            door.unpatch()
            assert place.linear_cross_entropy is other
        assert len(said) == 1 and f"{place.__name__}.linear_cross_entropy is other code's" in said[0], said


def test_patch_skips_masked_tokens_as_it_or_the_environment_says_and_names_verl_if_that_is_missing(monkeypatch):
    monkeypatch.syspath_prepend(standin())
    for value, given, skips in (("", None, False), ("0", None, False), ("1", None, True), ("1", False, False)):
        monkeypatch.setenv("PARALLEL_LCE_SKIP_MASKED", value)
        door.patch(skip_masked=given)
        assert door._settings["skip_masked"] == skips
    door.unpatch()
    monkeypatch.setenv("PARALLEL_LCE_SKIP_MASKED", "yes")
    with pytest.raises(ValueError, match="PARALLEL_LCE_SKIP_MASKED must be 0 or 1, got 'yes'"):
        door.patch()
    monkeypatch.setitem(sys.modules, "verl.utils.kernel.linear_cross_entropy", None)  # its import fails
    with pytest.raises(ImportError, match="needs verl 0.9 or later .pip install verl."):
        door.patch(skip_masked=False)


PAGE = (ROOT / "docs" / "rl.md").read_text()
IMPORT = """
import importlib, sys
import verl
kernel = importlib.import_module("verl.utils.kernel.linear_cross_entropy")
assert "megatron" not in sys.modules
import parallel_lce.verl
assert kernel.linear_cross_entropy != kernel.LinearCrossEntropy.apply
"""


def _python(code: str, environment: dict[str, str]) -> None:
    forget("megatron", "parallel_lce")
    sys.path.insert(0, standin())
    os.environ.update(environment)
    exec(code, {})


def test_the_line_of_the_page_patches():
    (line,) = re.findall(r"^```bash\n(.*?)^```$", PAGE, re.M | re.S)
    name, value = re.match(r"(\w+)=(\S+) python3 -m verl", line).groups()
    launched(1, _python, IMPORT, {name: value})


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
    launched(1, _python, "\n".join([given, before, after, same, *others, none]), {})
