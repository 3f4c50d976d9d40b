"""Small Megatron-core models of every kind that the switch must serve, and the releases that they run on."""

from __future__ import annotations

import sys
import warnings
from dataclasses import dataclass, fields

import pytest
import torch
from megatron.core import parallel_state
from megatron.core.fusions.fused_bias_dropout import get_bias_dropout_add
from megatron.core.models.bert.bert_layer_specs import bert_layer_local_spec
from megatron.core.models.bert.bert_model import BertModel
from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec, get_gpt_mtp_block_spec
from megatron.core.models.gpt.gpt_model import GPTModel
from megatron.core.models.mamba.mamba_model import MambaModel
from megatron.core.models.T5 import t5_spec
from megatron.core.models.T5.t5_model import T5Model
from megatron.core.ssm import mamba_block
from megatron.core.ssm.mlp_layer import MLPLayer
from megatron.core.tensor_parallel import layers
from megatron.core.tensor_parallel.random import model_parallel_cuda_manual_seed
from megatron.core.transformer.multi_token_prediction import MTPLossLoggingHelper
from megatron.core.transformer.spec_utils import ModuleSpec
from megatron.core.transformer.torch_norm import WrappedTorchNorm
from megatron.core.transformer.transformer_block import TransformerBlockSubmodules
from megatron.core.transformer.transformer_config import TransformerConfig
from megatron.core.transformer.transformer_layer import TransformerLayer, TransformerLayerSubmodules
from torch.distributed import distributed_c10d

import releases
from examples.megatron_cpu import adapt_megatron_to_cpu
from training.model import CausalAttention, RMSNorm
from world import Member

VOCAB, HIDDEN, SEQUENCE, BATCH = 96, 32, 16, 2

SUPPORTED = ("0.14.0", "0.15.3", "0.16.1", "0.17.1", "0.18.2", "0.19.2")
OTHERS = [v for v in SUPPORTED if v != releases.installed("megatron-core")]


def of_other_releases(cases: list[tuple]) -> list:
    """A release and a case: the oldest and the newest have all cases, those between divide them."""
    between = [v for v in OTHERS if v in SUPPORTED[1:-1]]
    parts = {version: cases[i :: len(between)] for i, version in enumerate(between)}
    return [pytest.param(v, *case, marks=pytest.mark.slow) for v in OTHERS for case in parts.get(v, cases)]


def path_of(release: str) -> str:
    """A folder to import that release from, which pip installs. Those from 0.17 on are for Python 3.12 and newer; what
    the tests import of them also runs on 3.11."""
    python = (3, 12) if release in SUPPORTED[3:] else (3, 11)
    return str(releases.folder_of("megatron-core", release, python))


@dataclass(frozen=True)
class Model:
    """A small model and how it is trained. Ranks that no parallelism takes are data-parallel."""

    ranks: int = 1
    pipeline: int = 1
    chunks: int = 1  # of the model on each pipeline stage: the interleaved schedule
    context: int = 1
    data: int = 1
    sequence_parallel: bool = False
    family: str = "gpt"  # or mamba, bert, t5
    tied: bool = False
    mtp: int | None = None
    ddp: str | None = None  # dtype of main_grad, fp32 or bf16; None: a plain loop without Megatron's DDP
    overlap: bool = False
    distributed_optimizer: bool = False  # Megatron's; else plain steps downhill
    fusion: bool = False  # gradient_accumulation_fusion, by a stand-in for Apex
    per_token: bool = False  # calculate_per_token_loss
    frozen: bool = False
    masked: bool = False  # half of the tokens do not count, and skip_masked
    dtype: torch.dtype = torch.float32
    budget: int | None = None
    microbatches: int = 2

    @property
    def parallel(self) -> dict[str, int | None]:
        return {
            "tensor_model_parallel_size": self.ranks // (self.pipeline * self.context * self.data),
            "pipeline_model_parallel_size": self.pipeline,
            "virtual_pipeline_model_parallel_size": self.chunks if self.chunks > 1 else None,
            "context_parallel_size": self.context,
        }

    def __str__(self) -> str:
        changed = [f"{f.name}={getattr(self, f.name)}" for f in fields(self) if getattr(self, f.name) != f.default]
        return "-".join(changed) or "plain"


def specs(tp: int, tp_of_pairs: int | None = None) -> list[Model]:
    """What is tested with ``tp`` tensor-parallel ranks, sequence-parallel where there are several; with
    ``tp_of_pairs`` where data, pipeline or context parallelism doubles them."""
    pairs = tp if tp_of_pairs is None else tp_of_pairs
    one = dict(ranks=tp, sequence_parallel=tp > 1)
    two = dict(ranks=2 * pairs, sequence_parallel=pairs > 1)
    return [
        Model(ranks=tp),
        Model(**one, tied=True, mtp=1, budget=0),
        Model(**one, ddp="fp32", tied=True, per_token=True),
        Model(**one, ddp="fp32", mtp=1, overlap=True, fusion=True, budget=0),
        Model(**one, ddp="fp32", mtp=1, fusion=True, masked=True),
        Model(ranks=tp, ddp="fp32", frozen=True),
        Model(**one, ddp="bf16", dtype=torch.bfloat16),
        Model(**two, data=2, ddp="fp32", overlap=True, distributed_optimizer=True),
        Model(**two, pipeline=2, ddp="fp32", overlap=True, microbatches=3),
        Model(**two, pipeline=2, ddp="fp32", chunks=2, overlap=True),
        Model(**two, pipeline=2, ddp="fp32", tied=True, mtp=1, fusion=True),
        Model(**two, pipeline=2, ddp="fp32", tied=True, masked=True),
        Model(**two, context=2, ddp="fp32", mtp=2, per_token=True, masked=True),
        Model(**one, family="mamba", ddp="fp32", tied=True),
        Model(ranks=tp, family="bert", tied=True, masked=True),
        Model(ranks=tp, family="t5", tied=True, masked=True),
    ]


_started: list[dict] = []


def start(member: Member, spec: Model) -> None:
    """Megatron's process groups and random numbers, as a training script sets them up."""
    warnings.filterwarnings("ignore", category=FutureWarning)
    if member.device.type == "cpu":
        adapt_megatron_to_cpu()
    group = parallel_state.get_tensor_model_parallel_group(check_initialized=False)
    # The groups of an earlier model in the same test may stand.
    if group not in distributed_c10d._world.pg_map or _started != [spec.parallel]:
        parallel_state.destroy_model_parallel()
        parallel_state.initialize_model_parallel(**spec.parallel, distributed_timeout_minutes=2)
        _started[:] = [spec.parallel]
    torch.manual_seed(1)
    model_parallel_cuda_manual_seed(1)
    MTPLossLoggingHelper.tracker = {}  # of the process, and as long as one model has depths


def build(member: Member, spec: Model, loss_options: dict) -> torch.nn.Module:
    (model,) = build_chunks(member, spec, loss_options)
    return model


def build_chunks(member: Member, spec: Model, loss_options: dict) -> list[torch.nn.Module]:
    """This rank's parts of the model, one unless the schedule is interleaved."""
    start(member, spec)
    options = {"gradient_accumulation_fusion": spec.fusion, **loss_options, **spec.parallel}
    if spec.fusion:
        layers._grad_accum_fusion_available = True
        layers.fused_weight_gradient_mlp_cuda = _Apex
    config = TransformerConfig(
        num_layers=2 if spec.family == "mamba" else spec.pipeline * spec.chunks,
        hidden_size=HIDDEN,
        num_attention_heads=4,
        normalization="RMSNorm",
        add_bias_linear=False,
        hidden_dropout=0.0,
        attention_dropout=0.0,
        pipeline_dtype=spec.dtype,
        batch_p2p_sync=member.device.type == "cuda",
        sequence_parallel=spec.sequence_parallel,
        params_dtype=spec.dtype,
        bf16=spec.dtype == torch.bfloat16,
        use_cpu_initialization=True,
        calculate_per_token_loss=spec.per_token,
        mtp_num_layers=spec.mtp,
        mtp_loss_scaling_factor=0.3,
        **options,
    )
    first = parallel_state.is_pipeline_first_stage(ignore_virtual=True)
    last = parallel_state.is_pipeline_last_stage(ignore_virtual=True)
    models = []
    for chunk in range(spec.chunks):
        common = dict(vocab_size=VOCAB, max_sequence_length=SEQUENCE, share_embeddings_and_output_weights=spec.tied)
        common |= dict(pre_process=first and chunk == 0, post_process=last and chunk == spec.chunks - 1)
        if spec.chunks > 1:
            common["vp_stage"] = chunk
        model = _FAMILIES[spec.family](config, spec, common)
        layer = getattr(model, "output_layer", None)
        if layer is not None and layer.bias is not None:
            torch.nn.init.uniform_(layer.bias, -1, 1)  # not zero
        if spec.frozen and layer is not None:
            layer.weight.requires_grad_(False)
        models.append(model.to(member.device))
    return models


class _Apex:
    """What Megatron calls of Apex to add dW to main_grad."""

    @staticmethod
    def wgrad_gemm_accum_fp32(hidden, upstream, main_grad) -> None:
        main_grad.add_(upstream.t() @ hidden)


def _layer(spec: Model):
    layer = get_gpt_layer_local_spec(normalization="RMSNorm")
    layer.submodules.input_layernorm = layer.submodules.pre_mlp_layernorm = RMSNorm
    if spec.context > 1:  # over this rank's part of the sequence, since Megatron's own refuses the rest
        layer.submodules.self_attention.submodules.core_attention = CausalAttention
    return layer


def _gpt(config, spec: Model, common: dict) -> torch.nn.Module:
    block = TransformerBlockSubmodules([_layer(spec)], layer_norm=RMSNorm)
    mtp = None
    if spec.mtp and common["post_process"]:
        mtp = get_gpt_mtp_block_spec(config, block, use_transformer_engine=False, vp_stage=common.get("vp_stage"))
        for depth in mtp.layer_specs:
            depth.submodules.enorm = depth.submodules.hnorm = RMSNorm
            depth.submodules.layer_norm = RMSNorm
    blocks = dict(transformer_layer_spec=block, mtp_block_spec=mtp, position_embedding_type="rope")
    return GPTModel(config=config, **blocks, **common)


def _mamba(config, spec: Model, common: dict) -> torch.nn.Module:
    """Megatron's Mamba model of an attention and an MLP layer: its mixers need packages that compile kernels."""
    parts, bda = _layer(spec).submodules, get_bias_dropout_add
    attention = TransformerLayerSubmodules(
        input_layernorm=RMSNorm, self_attention=parts.self_attention, self_attn_bda=bda
    )
    mlp = TransformerLayerSubmodules(pre_mlp_layernorm=RMSNorm, mlp=parts.mlp, mlp_bda=bda)
    submodules = mamba_block.MambaStackSubmodules(
        attention_layer=ModuleSpec(TransformerLayer, submodules=attention),
        mlp_layer=ModuleSpec(MLPLayer, submodules=mlp),
    )
    stack = ModuleSpec(mamba_block.MambaStack, submodules=submodules)
    sys.modules[mamba_block.MambaStack.__module__].TENorm = RMSNorm  # from 0.18 on mamba_block names another module's
    blocks = dict(mamba_stack_spec=stack, hybrid_override_pattern="*-", position_embedding_type="rope")
    return MambaModel(config=config, **blocks, **common)


def _bert(config, spec: Model, common: dict) -> torch.nn.Module:
    config.normalization = "LayerNorm"
    layers = dict(num_tokentypes=0, transformer_layer_spec=bert_layer_local_spec)
    return BertModel(config=config, add_binary_head=False, **layers, **common)


def _t5(config, spec: Model, common: dict) -> torch.nn.Module:
    config.normalization = "LayerNorm"
    if not hasattr(t5_spec, "TENorm"):  # 0.14's local spec names it
        t5_spec.TENorm = WrappedTorchNorm
    blocks = dict(
        transformer_encoder_layer_spec=t5_spec.get_t5_encoder_with_local_block_spec(1),
        transformer_decoder_layer_spec=t5_spec.get_t5_decoder_with_local_block_spec(1),
    )
    return T5Model(config=config, encoder_config=config, **blocks, **common)


_FAMILIES = {"gpt": _gpt, "mamba": _mamba, "bert": _bert, "t5": _t5}


def losses_of(model: torch.nn.Module, spec: Model, batch: Batch) -> torch.Tensor:
    """Per-token losses ``[b, s]`` of the last pipeline stage, what the next one receives of another."""
    everything = torch.zeros(BATCH, 1, SEQUENCE, SEQUENCE, dtype=torch.bool, device=batch.tokens.device)
    if spec.family == "bert":
        seen = torch.ones_like(batch.tokens)
        return model(batch.tokens, seen, lm_labels=batch.labels)[0]
    if spec.family == "t5":
        masks = everything, everything | batch.mask, everything
        return model(batch.tokens, batch.tokens, *masks, lm_labels=batch.labels)
    masks = {"loss_mask": batch.counted} if spec.masked and spec.family == "gpt" else {}
    return model(batch.tokens, batch.positions, batch.mask, labels=batch.labels, **masks)


@dataclass
class Batch:
    tokens: torch.Tensor  # [b, s], of this rank
    labels: torch.Tensor  # [b, s]
    positions: torch.Tensor  # [b, s]
    mask: torch.Tensor  # [1, 1, s, s]
    counted: torch.Tensor  # [b, s], 0 or 1


def batch(number: int, spec: Model, device: torch.device) -> Batch:
    """One microbatch: another on each data-parallel rank, under context parallelism its part."""
    replica = parallel_state.get_data_parallel_rank(with_context_parallel=False)
    generator = torch.Generator().manual_seed(1000 * replica + number)
    text = torch.randint(VOCAB, (BATCH, SEQUENCE + 1), generator=generator)
    labels = text[:, 1:].clone()
    labels[0, 3] = -100
    part = slice(None)
    if spec.context > 1:  # the pieces r and 2c - 1 - r of 2c, as Megatron balances causal attention
        rank = parallel_state.get_context_parallel_rank()
        pieces = torch.arange(SEQUENCE).chunk(2 * spec.context)
        part = torch.cat([pieces[rank], pieces[2 * spec.context - 1 - rank]])
    positions = torch.arange(SEQUENCE).expand(BATCH, -1)[:, part]
    mask = (positions[0][:, None] < positions[0])[None, None]
    labels = labels[:, part]
    counted = (labels >= 0).float()
    if spec.masked:
        counted[:, : labels.shape[1] // 2] = 0
        if spec.family != "gpt":  # whose forwards take no mask
            labels = labels.masked_fill(counted == 0, -100)
    tensors = text[:, :-1][:, part], labels, positions, mask, counted
    return Batch(*(t.contiguous().to(device) for t in tensors))
