"""torchtitan's own trainer on CPUs, on random tokens, with its own chunked loss and with ours.

The trainer expects a GPU, data sets and TensorBoard. What it needs to run without them is put in their place here."""

import functools
import os
import re
import sys
from contextlib import nullcontext
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any
from unittest import mock

import torch
import torch.nn.functional as F
from torch import nn
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import debug

from measures import assert_close
from parallel_lce.run.token_count import count_of_labels
from releases import ROOT, folder_of
from world import Member

# Beside torch and what is replaced here: all that its trainer imports.
OTHERS = ("spmd_types==0.2.3", "tyro==1.0.17", "docstring_parser==0.18.0", "typeguard==4.6.1", "torchdata==0.11.0")
PAGE = (ROOT / "docs" / "torchtitan.md").read_text()
DOOR = "parallel_lce.torchtitan"
OURS = f"--override.imports {DOOR}.linear_cross_entropy"
COMMON = """--module llama3 --config llama3_debugmodel --checkpoint.no-enable --validator.enable --validator.steps 1
--validator.freq 1 --training.steps 2 --training.seq-len 16 --training.local-batch-size 2 --training.disable-cuda-graphs
--training.mixed-precision-param float32 --compile.components loss --compile.backend aot_eager --debug.seed 1"""
# Words of a case: what they are on the command line. Ranks that neither TP nor CP takes are FSDP's.
ARGUMENTS = {
    "tp2": "--parallelism.tensor-parallel-degree 2", "tp4": "--parallelism.tensor-parallel-degree 4",
    "cp2": "--parallelism.context-parallel-degree 2", "no-sp": "--parallelism.no-enable-sequence-parallel", "dp2": "",
    "partial": "--parallelism.spmd-backend partial_dtensor", "full": "--parallelism.spmd-backend full_dtensor",
    "resharded": "--parallelism.fsdp-reshard-after-forward always", "accumulated": "--training.global-batch-size 8",
    "bf16": "--training.mixed-precision-param bfloat16", "compiled": "--compile.enable",
}  # fmt: skip
POLICIES = {"DAPOLoss", "GRPOLoss"}
# What the page gives to a configuration, instead of the line.
BLOCKS = {f"block{i}": block for i, block in enumerate(re.findall(r"^```python\n(.*?)^```$", PAGE, re.M | re.S))}
# Words that are none of the command line's.
CHANGES = {"bias", "tied", "soft-cap", "uneven", "checked", *POLICIES, *BLOCKS}


@dataclass
class Tokens:
    # The configuration of a data loader.
    infinite: bool = True

    def build(self, *, dp_rank: int, seq_len: int, local_batch_size: int, **_):
        generator = torch.Generator().manual_seed(dp_rank)
        while True:
            tokens = torch.randint(2048, (local_batch_size, seq_len + 1), generator=generator)
            labels = tokens[:, 1:].masked_fill(tokens[:, 1:] < 400, -100)
            positions = torch.arange(seq_len).expand(labels.shape).contiguous()
            yield {"input": tokens[:, :-1].contiguous(), "positions": positions}, labels


def release() -> Path:
    """The folder to import the release from."""
    return folder_of("torchtitan", "0.3.0", others=OTHERS)


@functools.cache
def on_cpu() -> None:
    """Attention has no mask, of which a part of the queries needs no offset under context parallelism."""
    os.environ["LOCAL_RANK"] = "0"
    for name in ("datasets", "datasets.distributed", "torch.utils.tensorboard"):
        sys.modules[name] = mock.MagicMock(__spec__=None, __path__=[])
    from torchtitan.tools import utils as tools

    found = {"get_device_properties.return_value.total_memory": 2**34, "memory_stats.return_value": {}}
    found |= {"device_count.return_value": 1, "get_device_name.return_value": "cpu"}
    tools.device_type, tools.device_module = "cpu", mock.MagicMock(**found)
    tools.set_default_dtype = lambda _: torch.device("cpu")  # not meta, from which plain shards come without types
    from torchtitan.distributed import utils
    from torchtitan.models import llama3
    from torchtitan.models.common import attention
    from torchtitan.models.llama3 import parallelize, sharding

    def attend(self, q_BLNH, k_BLNH, v_BLNH, **_):
        q, k, v = (t.transpose(1, 2) for t in (q_BLNH, k_BLNH, v_BLNH))
        return F.scaled_dot_product_attention(q, k, v).transpose(1, 2).contiguous()

    def shardings(config, own=sharding.set_llama3_sharding_config, **given):
        own(config, **given)
        of_head = config.lm_head.sharding_config.state_shardings
        of_head.update({"bias": of_head["weight"]} if config.lm_head.bias else {})

    attention.FlexAttention.forward = attend
    llama3.Llama3Model.get_attention_masks = lambda *_, **__: None
    sharding.set_llama3_sharding_config = shardings
    # FSDP of torch 2.13 takes the plain shards without their types. It makes them DTensors, which the initialization of
    # a fused projection takes for whole.
    layers, whole, plain = llama3._build_llama3_layers, parallelize.resolve_fsdp_mesh, ("dp_shard", "loss")
    llama3._build_llama3_layers = lambda **given: layers(**given | {"fuse_qkv": False, "n_layers": 2})
    parallelize.resolve_fsdp_mesh = lambda dims: (
        whole(dims) if dims.spmd_backend == "full_dtensor" else (dims.get_mesh(plain[dims.cp_enabled]), None)
    )
    utils.set_pg_timeouts = lambda *_, **__: None  # torch 2.13 has no set_timeout
    utils.init_distributed = lambda *_, **__: torch.distributed.get_world_size()
    rl = sys.modules["torchtitan.experiments.rl"] = ModuleType("torchtitan.experiments.rl")  # its own imports vLLM
    rl.__path__ = [str(Path(tools.__file__).parents[1] / "experiments/rl")]


def _configured(words: set[str], ours: bool):
    """The configuration of a case, with the override if that is ``ours``."""
    from torchtitan.config import ConfigManager
    from torchtitan.config.override import derive
    from torchtitan.experiments.rl import losses
    from torchtitan.models.muse_glimmer.model import SoftCappedLinear

    names, given = {}, words & {*BLOCKS}
    line = [COMMON, *[ARGUMENTS[word] for word in words - CHANGES], OURS if ours and not given else ""]
    config = ConfigManager().parse_args(" ".join(line).split())
    for block in given if ours else ():
        exec(BLOCKS[block], names)
        config.override, config.loss = names.get("override", config.override), names.get("loss", config.loss)
    config.dataloader = config.validator.dataloader = Tokens()
    config.tokenizer, config.activation_checkpoint = SimpleNamespace(build=lambda **_: None), None
    model, config.loss.num_chunks = config.model_spec.model, 4
    model.enable_weight_tying, model.lm_head.bias = "tied" in words, "bias" in words
    model.vocab_size = model.tok_embeddings.num_embeddings = model.lm_head.out_features = 2048 + ("uneven" in words)
    if "soft-cap" in words:
        model.lm_head = derive(model.lm_head, SoftCappedLinear.Config, output_multiplier=0.7, output_soft_cap_temp=3.0)
    for name in words & POLICIES:
        config.loss.loss_fn = getattr(losses, name).Config()
    if not words & POLICIES:
        config.loss.loss_fn.global_vocab_size = model.vocab_size
    # The parser refuses it beside activation checkpointing, which is off here. Tokens of validation have no types, and
    # a policy's loss has no inputs there.
    config.debug.spmd_typechecking, config.validator.enable = "checked" in words, not words & {"checked", *POLICIES}
    return config


def _trained(member: Member, words: set[str], ours: bool) -> dict[str, list]:
    """What a training logs, and every gradient of every step."""
    debug._clear_sharding_prop_cache()  # it keeps meshes
    from torchtitan.models.llama3 import parallelize

    # FSDP of torch 2.13 keeps no types.
    with mock.patch.object(parallelize, "apply_fsdp_to_decoder") if "checked" in words else nullcontext():
        trainer = _configured(words, ours).build()
    (model,), loss_fn = trainer.model_parts, trainer.loss_fn
    assert type(loss_fn).__name__ == ("LinearCrossEntropyLoss" if ours else "ChunkedLossWrapper")
    for module in model.modules():
        if isinstance(module, FSDPModule):
            module.set_force_sum_reduction_for_comms(True)  # gloo has no other
    for parameter in model.lm_head.parameters():  # otherwise a bias is 0, and plain shards are alike
        local, generator = getattr(parameter, "_local_tensor", parameter), torch.Generator().manual_seed(member.rank)
        nn.init.normal_(local.detach(), std=0.06, generator=generator)
    found = {"logged": [], "validation": [], "metrics": [], "gradients": []}

    def of_policy(hidden, labels, count, **_):
        advantages = torch.linspace(-1.0, 1.5, labels.numel()).view(labels.shape)
        given = {"generator_logprobs": torch.full(labels.shape, -7.7), "loss_mask": labels != -100}
        loss, metrics = loss_fn(hidden, labels, count, advantages=advantages, **given)
        found["metrics"].append({name: float(value) for name, value in metrics.items()})
        return loss, metrics

    def step(own=trainer.optimizers.step):
        gradients = [(name, p.grad) for name, p in model.named_parameters()]
        found["gradients"].append({name: getattr(g, "full_tensor", g.clone)() for name, g in gradients})
        own()

    trainer.loss_fn = of_policy if words & POLICIES else loss_fn
    trainer.optimizers.step = step
    trainer.metrics_processor.log = lambda step, *values, **_: found["logged"].append(values)
    trainer.metrics_processor.log_validation = lambda loss, step: found["validation"].append(loss)
    counts: list[Any] = []
    count = mock.patch(f"{DOOR}.count_of_labels", lambda labels: counts.append(count_of_labels(labels)) or counts[-1])
    with count, mock.patch("time.sleep"):  # the trainer sleeps at its end
        trainer.train()
    trainer.close()
    assert not ours or not loss_fn._said  # never torchtitan's own loss
    assert not ours or words & {*POLICIES, "compiled"} or (counts and all(counts))
    return found


def compare(member: Member, case: str) -> None:
    """Nothing but the override differs."""
    on_cpu()
    words = {*case.split()}
    own, ours = _trained(member, words, False), _trained(member, words, True)
    tolerance = 3e-2 if "bf16" in words else 1e-4 if words & POLICIES else 2e-5  # a policy's loss clips most tokens
    for found, expected in zip(ours.pop("gradients"), own.pop("gradients"), strict=True):
        assert found.keys() == expected.keys() and len(found) > 15
        for name, gradient in expected.items():
            assert gradient.abs().max() > 0, name
            assert_close(found[name], gradient, tolerance, name=name)
    torch.testing.assert_close(ours, own, rtol=tolerance, atol=tolerance)
    assert all(len({*map(str, own[name])}) > 1 for name in own if own[name] or name == "logged")
