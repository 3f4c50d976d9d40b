"""The switch on the installed megatron-core: the same losses and gradients as stock."""

from __future__ import annotations

import warnings
from dataclasses import dataclass

import pytest
import torch

pytest.importorskip("megatron.core", reason="needs megatron-core")

from world import Member

VOCAB, HIDDEN, SEQUENCE, BATCH = 96, 32, 12, 2


@dataclass(frozen=True)
class Model:
    """A small GPT and how it is trained."""

    ranks: int = 1
    sequence_parallel: bool = False
    tied: bool = False
    mtp: int | None = None
    ddp: str | None = None  # dtype of main_grad: fp32 or bf16
    overlap: bool = False
    dtype: torch.dtype = torch.float32
    frozen: bool = False
    budget: int | None = None

    def __str__(self) -> str:
        changed = [f"{k}={v}" for k, v in vars(self).items() if v != getattr(Model(), k)]
        return "-".join(changed) or "plain"


def _start(member: Member) -> None:
    from megatron.core import parallel_state
    from megatron.core.tensor_parallel.random import model_parallel_cuda_manual_seed
    from training.megatron_cpu import adapt_megatron_to_cpu

    warnings.filterwarnings("ignore", category=FutureWarning)
    if member.device.type == "cpu":
        adapt_megatron_to_cpu()
    parallel_state.destroy_model_parallel()
    parallel_state.initialize_model_parallel(
        tensor_model_parallel_size=member.ranks, distributed_timeout_minutes=2
    )
    torch.manual_seed(1)
    model_parallel_cuda_manual_seed(1)


def _build(member: Member, spec: Model, loss_options: dict):
    from megatron.core.models.gpt.gpt_layer_specs import (
        get_gpt_layer_local_spec,
        get_gpt_mtp_block_spec,
    )
    from megatron.core.models.gpt.gpt_model import GPTModel
    from megatron.core.transformer.transformer_block import TransformerBlockSubmodules
    from megatron.core.transformer.transformer_config import TransformerConfig
    from training.model import WITHOUT_EXTENSIONS, RMSNorm

    _start(member)
    config = TransformerConfig(
        num_layers=1,
        hidden_size=HIDDEN,
        num_attention_heads=4,
        normalization="RMSNorm",
        add_bias_linear=False,
        hidden_dropout=0.0,
        attention_dropout=0.0,
        tensor_model_parallel_size=member.ranks,
        sequence_parallel=spec.sequence_parallel,
        params_dtype=spec.dtype,
        bf16=spec.dtype == torch.bfloat16,
        use_cpu_initialization=True,
        **WITHOUT_EXTENSIONS,
        mtp_num_layers=spec.mtp,
        **loss_options,
    )
    layer = get_gpt_layer_local_spec(normalization="RMSNorm")
    layer.submodules.input_layernorm = layer.submodules.pre_mlp_layernorm = RMSNorm
    block = TransformerBlockSubmodules([layer], layer_norm=RMSNorm)
    mtp = None
    if spec.mtp:
        mtp = get_gpt_mtp_block_spec(config, block, use_transformer_engine=False)
        for depth in mtp.layer_specs:
            depth.submodules.enorm = depth.submodules.hnorm = RMSNorm
            depth.submodules.layer_norm = RMSNorm
    model = GPTModel(
        config=config,
        transformer_layer_spec=block,
        vocab_size=VOCAB,
        max_sequence_length=SEQUENCE,
        position_embedding_type="rope",
        share_embeddings_and_output_weights=spec.tied,
        mtp_block_spec=mtp,
    )
    if spec.frozen:
        model.output_layer.weight.requires_grad_(False)
    return model.to(member.device)


def _batch(step: int, device: torch.device) -> tuple[tuple[torch.Tensor, ...], torch.Tensor]:
    """(tokens, positions, causal mask), and the labels."""
    generator = torch.Generator().manual_seed(step)
    tokens = torch.randint(VOCAB, (BATCH, SEQUENCE + 1), generator=generator)
    labels = tokens[:, 1:].clone()
    labels[0, 3] = -100
    positions = torch.arange(SEQUENCE).expand(BATCH, -1)
    mask = torch.ones(SEQUENCE, SEQUENCE).triu(1).bool()[None, None]
    inputs = tokens[:, :-1], positions, mask
    return tuple(t.to(device) for t in inputs), labels.to(device)


def _train(member: Member, spec: Model, loss_options: dict) -> dict:
    """Losses and gradients of two steps of two microbatches, and the state dict's keys."""
    from megatron.core.distributed import DistributedDataParallel, DistributedDataParallelConfig

    model = _build(member, spec, loss_options)
    trained = model
    if spec.ddp:
        ddp_config = DistributedDataParallelConfig(
            grad_reduce_in_fp32=spec.ddp == "fp32", overlap_grad_reduce=spec.overlap
        )
        trained = DistributedDataParallel(model.config, ddp_config, model)
    losses, gradients = [], []
    for step in range(2):
        if spec.ddp:
            trained.zero_grad_buffer()
        for microbatch in range(2):
            inputs, labels = _batch(2 * step + microbatch, member.device)
            loss = trained(*inputs, labels=labels)
            mask = (labels >= 0).float()
            losses.append(loss.detach().cpu())
            (loss * mask).sum().div(mask.sum()).backward()
        if spec.ddp:
            trained.finish_grad_sync()
        found = {}
        with torch.no_grad():
            for name, parameter in model.named_parameters():
                gradient = parameter.main_grad if spec.ddp else parameter.grad
                if gradient is None:
                    found[name] = None
                    continue
                found[name] = gradient.detach().float().cpu().clone()
                parameter -= 0.1 * gradient.to(parameter.dtype)
                parameter.grad = None
        gradients.append(found)
    return {"losses": losses, "gradients": gradients, "keys": list(model.state_dict())}


def _switched(spec: Model) -> dict:
    import parallel_lce.megatron

    parallel_lce.megatron.install(logits_budget=spec.budget)
    return {"cross_entropy_loss_fusion": True, "cross_entropy_fusion_impl": "parallel_lce"}


def _compare(member: Member, spec: Model) -> None:
    import parallel_lce.megatron

    stock = _train(member, spec, {})
    with warnings.catch_warnings():
        warnings.filterwarnings("error", message="parallel_lce")
        ours = _train(member, spec, _switched(spec))
    parallel_lce.megatron.uninstall()
    assert ours["keys"] == stock["keys"]
    tolerance = 1e-5 if spec.dtype == torch.float32 and spec.ddp != "bf16" else 2e-2
    for a, b in zip(ours["losses"], stock["losses"]):
        assert a.dtype == b.dtype == torch.float32
        assert (a - b).abs().max() <= tolerance, (a - b).abs().max()
    for found, truth in zip(ours["gradients"], stock["gradients"]):
        assert found.keys() == truth.keys()
        for name, gradient in found.items():
            if truth[name] is None:
                assert gradient is None, name
                continue
            difference = (gradient - truth[name]).norm() / truth[name].norm()
            assert difference <= tolerance, (name, difference)


SPECS = [
    Model(),
    Model(ranks=1, tied=True, mtp=1),
    Model(ranks=2),
    Model(ranks=2, sequence_parallel=True, budget=0),
    Model(ranks=2, sequence_parallel=True, tied=True),
    Model(ranks=2, mtp=2),
    Model(ranks=2, sequence_parallel=True, mtp=1, tied=True, budget=0),
    Model(ranks=4, sequence_parallel=True),
    Model(ranks=2, frozen=True),
    Model(ranks=2, ddp="fp32"),
    Model(ranks=2, ddp="fp32", tied=True, sequence_parallel=True),
    Model(ranks=2, ddp="fp32", tied=True, mtp=1, overlap=True),
    Model(ranks=2, ddp="fp32", mtp=1, overlap=True, budget=0),
    Model(ranks=2, ddp="bf16", dtype=torch.bfloat16, sequence_parallel=True),
    Model(ranks=2, ddp="fp32", dtype=torch.bfloat16),
]


@pytest.mark.parametrize("spec", SPECS, ids=str)
def test_training_equals_stock(spec, worlds):
    worlds(spec.ranks).run(_compare, spec)


def _uses(member: Member, tied: bool, sequence_parallel: bool) -> None:
    """Without labels, in evaluation, indexed or scaled, lazy logits are the stock ones."""
    import parallel_lce.megatron

    spec = Model(ranks=member.ranks, tied=tied, sequence_parallel=sequence_parallel)
    stock = _build(member, spec, {})
    ours = _build(member, spec, _switched(spec))
    inputs, labels = _batch(0, member.device)
    for model in (stock, ours):
        model.eval()
    with torch.no_grad(), warnings.catch_warnings():
        warnings.filterwarnings("error", message="parallel_lce")
        assert torch.equal(stock(*inputs), ours(*inputs))
        want = stock(*inputs, labels=labels)
        found = ours(*inputs, labels=labels)
        assert (want - found).abs().max() <= 1e-5
    hidden = torch.randn(SEQUENCE // spec.ranks if sequence_parallel else SEQUENCE, BATCH, HIDDEN)
    hidden = hidden.to(member.device)
    weight = ours.shared_embedding_or_output_weight() if tied else None
    real, _ = stock.output_layer(hidden, weight=weight)
    lazy, _ = ours.output_layer(hidden, weight=weight)
    assert torch.equal(lazy[2], real[2])
    assert torch.equal((2 * lazy).float(), 2 * real)
    assert torch.equal(torch.softmax(lazy, -1), torch.softmax(real, -1))
    assert lazy.shape == real.shape and len(lazy) == len(real)
    assert torch.equal(1 - lazy / 2, 1 - real / 2) and torch.equal(-lazy, -real)
    assert torch.equal(lazy > 0, real > 0) and torch.equal(lazy == real, real == real)
    for change in (
        lambda z: z.div_(2.0),
        lambda z: torch.clamp_(z, 0),
        lambda z: torch.exp(torch.zeros(1), out=z),
        lambda z: z.__setitem__(0, 0.0),
    ):
        with pytest.raises(RuntimeError, match="in-place .* would be lost"):
            change(lazy)
    ours.train()
    with pytest.warns(UserWarning, match="makes the whole logits"):
        ours.output_layer(hidden, weight=weight)[0].max(-1)
    # Stock models built while the switch is installed stay stock.
    assert type(_build(member, spec, {}).output_layer) is type(stock.output_layer)
    assert type(ours.output_layer).__name__ == type(stock.output_layer).__name__
    parallel_lce.megatron.uninstall()


@pytest.mark.parametrize("tied", [False, True])
@pytest.mark.parametrize("sequence_parallel", [False, True])
def test_other_uses_of_the_logits(tied, sequence_parallel, worlds):
    worlds(2).run(_uses, tied, sequence_parallel)


def _mixed_uses(member: Member, use: str) -> None:
    """Other uses of the weight beside the fused loss lose no gradient of it under DDP."""
    import parallel_lce.megatron

    def gradient(options: dict) -> torch.Tensor:
        from megatron.core.distributed import DistributedDataParallel, DistributedDataParallelConfig

        model = _build(member, Model(ranks=member.ranks), options)
        ddp_config = DistributedDataParallelConfig(grad_reduce_in_fp32=True)
        ddp = DistributedDataParallel(model.config, ddp_config, model)
        ddp.zero_grad_buffer()
        inputs, labels = _batch(0, member.device)
        hidden = torch.randn(SEQUENCE, BATCH, HIDDEN, generator=torch.Generator().manual_seed(1))
        weight = model.output_layer.weight
        # With fused accumulation, which stock has through Apex alone, only real logits mark the weight.
        model.config.gradient_accumulation_fusion = bool(options) and use == "logits"
        loss = model(*inputs, labels=labels).mean()
        model.config.gradient_accumulation_fusion = False
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            if use == "weight":
                loss = loss + weight.square().sum()
            else:
                loss = loss + model.output_layer(hidden.to(member.device))[0][0].square().mean()
        loss.backward()
        ddp.finish_grad_sync()
        return model.output_layer.weight.main_grad.clone()

    stock = gradient({})
    ours = gradient(_switched(Model()))
    parallel_lce.megatron.uninstall()
    assert (stock - ours).norm() <= 1e-5 * stock.norm()


@pytest.mark.parametrize("use", ["weight", "logits"])
def test_other_uses_of_the_weight(use, worlds):
    worlds(2).run(_mixed_uses, use)


def _deferred(member: Member) -> None:
    import parallel_lce.megatron

    options = _switched(Model())
    model = _build(member, Model(ranks=member.ranks), options)
    model.config.defer_embedding_wgrad_compute = True
    with pytest.raises(ValueError, match="defer_embedding_wgrad_compute=True"):
        model.setup_embeddings_and_output_layer()
    parallel_lce.megatron.uninstall()
    # A forgotten install() fails loudly.
    inputs, labels = _batch(0, member.device)
    model = _build(member, Model(ranks=member.ranks), options)
    with pytest.raises(UnboundLocalError):
        model(*inputs, labels=labels)


def test_unsupported_settings(worlds):
    worlds(1).run(_deferred)


def test_install_is_idempotent_and_undone():
    import parallel_lce.megatron
    from megatron.core.models.common.language_module.language_module import LanguageModule

    before = LanguageModule.compute_language_model_loss, LanguageModule.setup_embeddings_and_output_layer
    parallel_lce.megatron.install()
    once = LanguageModule.compute_language_model_loss
    parallel_lce.megatron.install(logits_budget=5)
    assert LanguageModule.compute_language_model_loss is once
    parallel_lce.megatron.uninstall()
    parallel_lce.megatron.uninstall()
    after = LanguageModule.compute_language_model_loss, LanguageModule.setup_embeddings_and_output_layer
    assert before == after


def _late(member: Member) -> None:
    """A model built before install() trains on real logits, and says so."""
    import parallel_lce.megatron

    inputs, labels = _batch(0, member.device)
    options = {"cross_entropy_loss_fusion": True, "cross_entropy_fusion_impl": "parallel_lce"}
    early = _build(member, Model(ranks=member.ranks), options)
    parallel_lce.megatron.install()
    with pytest.warns(UserWarning, match="built before install"):
        late = early(*inputs, labels=labels)
    want = _build(member, Model(ranks=member.ranks), {})(*inputs, labels=labels)
    parallel_lce.megatron.uninstall()
    assert (late - want).abs().max() <= 1e-5


def test_model_built_before_install(worlds):
    worlds(2).run(_late)


@pytest.mark.parametrize("budget", [-1, 1.5, "1GiB", True])
def test_install_refuses_budgets(budget):
    import parallel_lce.megatron

    with pytest.raises(ValueError, match="logits_budget"):
        parallel_lce.megatron.install(logits_budget=budget)
