"""torchtitan's own trainer on CPUs, on random tokens: ``torchtitan_trainer.py ARGUMENTS``, where the arguments are
those of ``torchtitan.train``. Prints the losses, the gradients' norms and the validation losses as JSON.

The trainer expects a GPU, data sets and TensorBoard. What it needs to run without them is put in their place here."""

from __future__ import annotations

import json
import os
import sys
from dataclasses import dataclass
from types import SimpleNamespace
from unittest import mock

import torch
import torch.distributed as dist
from torch.distributed.fsdp import FSDPModule


def _stand_ins() -> None:
    for name in ("datasets", "datasets.distributed", "torch.utils.tensorboard"):
        sys.modules[name] = mock.MagicMock(__spec__=None, __path__=[])
    missing = dict(
        get_device_name=lambda *_: "cpu",
        get_device_properties=lambda *_: SimpleNamespace(total_memory=2**34),
        memory_stats=lambda *_: {},
        reset_peak_memory_stats=lambda *_: None,
        empty_cache=lambda: None,
        set_device=lambda *_: None,
        current_device=lambda: 0,
        device_count=lambda: 1,
    )
    for name, value in missing.items():
        setattr(torch.cpu, name, value)


def main() -> None:
    _stand_ins()
    import torchtitan_training

    torchtitan_training.on_cpu()
    from torchtitan.components.dataloader import BaseDataLoader
    from torchtitan.components.tokenizer import BaseTokenizer
    from torchtitan.config import ConfigManager
    from torchtitan.distributed import utils
    from torchtitan.models import llama3
    from torchtitan.models.llama3 import parallelize

    class Tokens(BaseDataLoader):
        @dataclass(kw_only=True, slots=True)
        class Config(BaseDataLoader.Config):
            infinite: bool = True

        def __init__(self, config, *, dp_rank, seq_len, local_batch_size, **_):
            self.generator, self.shape = torch.Generator().manual_seed(dp_rank), (local_batch_size, seq_len + 1)

        def __iter__(self):
            while True:
                tokens = torch.randint(256, self.shape, generator=self.generator)
                labels = tokens[:, 1:].masked_fill(tokens[:, 1:] < 20, -100)
                positions = torch.arange(labels.shape[1]).expand(labels.shape).contiguous()
                yield {"input": tokens[:, :-1].contiguous(), "positions": positions}, labels

        def state_dict(self):
            return {}

        def load_state_dict(self, state_dict):
            pass

    class Tokenizer(BaseTokenizer):
        @dataclass(kw_only=True, slots=True)
        class Config(BaseTokenizer.Config):
            pass

        def __init__(self, config, *, tokenizer_path):
            super().__init__()

        encode = decode = get_vocab_size = lambda *_, **__: 0

    # FSDP of torch 2.13 takes the plain shards without their types. It makes them DTensors, which the initialization of
    # a fused projection takes for whole.
    layers = llama3._build_llama3_layers
    llama3._build_llama3_layers = lambda **given: layers(**given | {"fuse_qkv": False, "n_layers": 2})
    whole = parallelize.resolve_fsdp_mesh
    parallelize.resolve_fsdp_mesh = lambda dims: (
        (dims.get_mesh("dp_shard"), None) if dims.spmd_backend == "spmd_types" else whole(dims)
    )
    utils.set_pg_timeouts = lambda *_, **__: None  # torch 2.13 has no set_timeout
    utils.init_distributed = lambda *_, **__: dist.get_world_size()
    dist.init_process_group("gloo")
    config = ConfigManager().parse_args(sys.argv[1:])
    config.dataloader, config.validator.dataloader, config.tokenizer = (
        Tokens.Config(),
        Tokens.Config(),
        Tokenizer.Config(),
    )
    config.activation_checkpoint = None
    trainer = config.build()
    for module in trainer.model_parts[0].modules():
        if isinstance(module, FSDPModule):
            module.set_force_sum_reduction_for_comms(True)  # gloo has no other
    found = {"loss": type(trainer.loss_fn).__name__, "losses": [], "norms": [], "validation": []}

    def log(step, average, largest, norm, **_):
        found["losses"].append(average)
        found["norms"].append(norm)

    trainer.metrics_processor.log = log
    trainer.metrics_processor.log_validation = lambda loss, step: found["validation"].append(loss)
    trainer.train()
    trainer.close()
    if os.environ["RANK"] == "0":
        print(json.dumps(found), flush=True)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
