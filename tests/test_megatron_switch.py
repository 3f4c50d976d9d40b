"""The switch beside training: other uses of the logits, what it refuses, what it says, and how it is undone."""

from __future__ import annotations

import sys
import warnings
from pathlib import Path

import pytest
import torch
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import fully_shard

pytest.importorskip("megatron.core", reason="needs megatron-core")

import parallel_lce.megatron
from megatron_models import BATCH, HIDDEN, SEQUENCE, VOCAB, Batch, Model, batch, build, losses_of
from megatron_training import switched
from parallel_lce.megatron.lazy_logits import LazyLogits
from world import Member


def _forward(model, data: Batch, labels: bool = True) -> torch.Tensor:
    return model(data.tokens, data.positions, data.mask, labels=data.labels if labels else None)


def _layers(member: Member, spec: Model) -> tuple:
    """Stock's and our model of the same weights, hidden states ``[s/P, b, h]``, and the shared weight."""
    stock = build(member, spec, {})
    ours = build(member, spec, switched(spec))
    parts = spec.tensor if spec.sequence_parallel else 1
    hidden = torch.randn(SEQUENCE // parts, BATCH, HIDDEN).to(member.device)
    return stock, ours, hidden, ours.shared_embedding_or_output_weight() if spec.tied else None


def _uses(member: Member, tied: bool, sequence_parallel: bool) -> None:
    """Without labels, in evaluation, indexed or scaled, lazy logits are the stock ones."""
    spec = Model(ranks=member.ranks, tied=tied, sequence_parallel=sequence_parallel)
    stock, ours, hidden, weight = _layers(member, spec)
    data = batch(0, spec, member.device)
    for model in (stock, ours):
        model.eval()
    with torch.no_grad(), warnings.catch_warnings():
        warnings.filterwarnings("error", message="parallel_lce")
        assert torch.equal(_forward(stock, data, False), _forward(ours, data, False))
        assert (_forward(stock, data) - _forward(ours, data)).abs().max() <= 1e-5
        gathered = [
            m(data.tokens, data.positions, data.mask, runtime_gather_output=True) for m in (stock, ours)
        ]
        assert gathered[0].shape[-1] == VOCAB and torch.equal(*gathered)
    real, _ = stock.output_layer(hidden, weight=weight)
    lazy, _ = ours.output_layer(hidden, weight=weight)
    assert torch.equal(lazy[2], real[2]) and all(map(torch.equal, lazy, real))
    assert torch.equal((2 * lazy).float(), 2 * real)
    assert torch.equal(torch.softmax(lazy, -1), torch.softmax(real, -1))
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
    # Stock models built while the switch is installed stay stock.
    assert type(build(member, spec, {}).output_layer) is type(stock.output_layer)
    assert type(ours.output_layer).__name__ == type(stock.output_layer).__name__
    parallel_lce.megatron.uninstall()


@pytest.mark.parametrize("tied", [False, True])
@pytest.mark.parametrize("sequence_parallel", [False, True])
def test_other_uses_of_the_logits(tied, sequence_parallel, worlds):
    worlds(2).run(_uses, tied, sequence_parallel)


def _known_without_logits(member: Member, sequence_parallel: bool, scale: float) -> None:
    """Sizes, and the largest logit of this rank's shard and its place, as Megatron's MTP acceptance asks."""
    spec = Model(ranks=member.ranks, sequence_parallel=sequence_parallel)
    stock, ours, hidden, _ = _layers(member, spec)
    real = stock.output_layer(hidden)[0].detach() * scale

    def refuse(*arguments, **options):
        raise AssertionError("the logits were made")

    lazy = ours.output_layer(hidden)[0] * scale
    lazy.stock_forward = refuse
    assert lazy.shape == real.shape and lazy.size() == real.size() and lazy.size(-1) == real.size(-1)
    assert (lazy.dim(), lazy.ndim, len(lazy)) == (real.dim(), real.ndim, len(real))
    assert (lazy.dtype, lazy.device, lazy.is_cuda) == (real.dtype, real.device, real.is_cuda)
    assert lazy.requires_grad and lazy.is_floating_point() and lazy.numel() == real.numel()
    assert repr(lazy) == f"LazyLogits({list(real.shape)}, {real.dtype}, {real.device})"
    values, places = real.max(dim=-1)
    with torch.no_grad():
        for found in (lazy.max(dim=-1), lazy.max(2), torch.max(lazy, -1)):
            assert (found.values - values).abs().max() <= 1e-5 and torch.equal(found.indices, places)
            assert found.values.dtype == values.dtype and found.indices.dtype == places.dtype
    for found in (lazy.argmax(-1), torch.argmax(lazy, dim=-1)):
        assert torch.equal(found, places)
    for use in (lambda: lazy.max(dim=-1), lambda: lazy.max(), lambda: lazy.argmax(0), lambda: lazy + 1):
        with pytest.raises(AssertionError, match="the logits were made"):
            use()
    parallel_lce.megatron.uninstall()


@pytest.mark.parametrize("sequence_parallel", [False, True])
@pytest.mark.parametrize("scale", [1.0, -0.25])
def test_known_without_logits(sequence_parallel, scale, worlds):
    worlds(2).run(_known_without_logits, sequence_parallel, scale)


def _scaled(member: Member, sequence_parallel: bool) -> None:
    """Logits that the model scales before the loss, as MuP does from 0.17 on: loss and gradients."""
    spec = Model(ranks=member.ranks, sequence_parallel=sequence_parallel)
    stock, ours, hidden, _ = _layers(member, spec)
    labels = batch(0, spec, member.device).labels
    found = []
    for model in (stock, ours):
        leaf = hidden.clone().requires_grad_()
        losses = model.compute_language_model_loss(labels, 2.0 * (model.output_layer(leaf)[0] * 0.25))
        losses.square().mean().backward()
        found.append((losses.detach(), leaf.grad, model.output_layer.weight.grad))
    parallel_lce.megatron.uninstall()
    for truth, mine in zip(*found):
        assert (mine - truth).norm() <= 1e-5 * truth.norm()


@pytest.mark.parametrize("sequence_parallel", [False, True])
def test_scaled_logits(sequence_parallel, worlds):
    worlds(2).run(_scaled, sequence_parallel)


def _said(model, data: Batch, **options) -> list[str]:
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        # As Megatron-LM's programs do on all ranks but the first, which may have no output layer.
        warnings.filterwarnings("ignore", category=UserWarning)
        warnings.filterwarnings("ignore", category=FutureWarning)
        model(data.tokens, data.positions, data.mask, labels=data.labels, **options)
    return [str(w.message) for w in caught if "parallel_lce" in str(w.message)]


def _says_once(member: Member, reason: str, message: str) -> None:
    """Whatever makes real logits in training is named once, and the loss is stock's."""
    spec = Model(ranks=member.ranks)
    stock = build(member, spec, {})
    if reason == "late":
        ours = build(member, spec, {"cross_entropy_loss_fusion": True, "cross_entropy_fusion_impl": "parallel_lce"})
        switched(spec)
    else:
        ours = build(member, spec, switched(spec))
    data, layer = batch(0, spec, member.device), ours.output_layer
    if reason == "sharded":
        layer.weight.__fsdp_param__ = True
    if reason == "bias":
        layer.skip_bias_add, layer.bias = True, torch.nn.Parameter(torch.zeros_like(layer.weight[:, 0]))
    if reason == "unreduced":
        layer.disable_grad_reduce = True
    if reason == "use":
        layer.register_forward_hook(lambda module, inputs, outputs: (outputs[0].float(), None)[1])
    options = {"runtime_gather_output": True} if reason == "gathered" else {}
    first, second = _said(ours, data, **options), _said(ours, data, **options)
    # One rank speaks for those that shard the vocabulary.
    assert len(first) == (member.rank == 0) and all(message in text for text in first), first
    assert second == []
    ours.eval()
    assert _said(ours, data) == []
    want = losses_of(stock, spec, data)
    assert (losses_of(ours.train(), spec, data) - want).abs().max() <= 1e-5
    parallel_lce.megatron.uninstall()


@pytest.mark.parametrize(
    ("reason", "message"),
    [
        ("late", "built before install()"),
        ("sharded", "fully sharded"),
        ("bias", "skip_bias_add=False"),
        ("unreduced", "disable_grad_reduce=False"),
        ("gathered", "parallel_output=True"),
        ("use", "attribute 'float'"),
    ],
)
def test_says_once_that_logits_are_made(reason, message, worlds):
    worlds(2).run(_says_once, reason, message)


def _gathers_nothing(member: Member) -> None:
    """Of one rank's vocabulary there is nothing to gather."""
    spec = Model(ranks=1)
    ours, data = build(member, spec, switched(spec)), batch(0, spec, member.device)
    assert _said(ours, data, runtime_gather_output=True) == []
    assert isinstance(ours.output_layer(torch.randn(SEQUENCE, BATCH, HIDDEN).to(member.device))[0], LazyLogits)
    parallel_lce.megatron.uninstall()


def test_one_rank_gathers_nothing(worlds):
    worlds(1).run(_gathers_nothing)


def _logged(member: Member, folder: str) -> None:
    """With config_logger_dir Megatron writes the logits of each forward to a file."""
    spec = Model(ranks=member.ranks)
    model, data = build(member, spec, switched(spec)), batch(0, spec, member.device)
    model.config.config_logger_dir = folder
    with pytest.warns(parallel_lce.megatron.LogitsWarning, match="pickling"):
        losses_of(model, spec, data).mean().backward()
    model.config.config_logger_dir = ""
    (path,) = Path(folder).rglob("*input_and_logits*.pth")
    written = torch.load(path, weights_only=True)["logits"]
    assert torch.equal(written.transpose(0, 1), _forward(model.eval(), data, False))
    parallel_lce.megatron.uninstall()


def test_config_logger(worlds, tmp_path):
    worlds(1).run(_logged, str(tmp_path))


class _Resharded:
    """Has a weight exist within its layer's forward alone, as fully sharded data parallelism does."""

    def __init__(self, layer: torch.nn.Module) -> None:
        self.whole = layer.weight.data.clone()
        layer.weight.__fsdp_param__ = True
        layer.register_forward_pre_hook(lambda module, inputs: self.fill(module))
        layer.register_forward_hook(lambda module, inputs, outputs: self.empty(module))
        layer.register_full_backward_pre_hook(lambda module, upstream: self.fill(module))
        self.empty(layer)

    def fill(self, layer) -> None:
        layer.weight.untyped_storage().resize_(self.whole.untyped_storage().nbytes())
        layer.weight.data.copy_(self.whole)  # unseen by version counters

    def empty(self, layer) -> None:
        layer.weight.untyped_storage().resize_(0)


def _fully_sharded(member: Member) -> None:
    """The loss of a weight that is gone when it is due."""
    spec = Model(ranks=member.ranks)
    gradients = []
    for options in ({}, switched(spec)):
        model = build(member, spec, options)
        if options:
            _Resharded(model.output_layer)
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", message="parallel_lce")
            losses_of(model, spec, batch(0, spec, member.device)).mean().backward()
        gradients.append({n: p.grad for n, p in model.named_parameters()})
    parallel_lce.megatron.uninstall()
    for name, truth in gradients[0].items():
        assert (gradients[1][name] - truth).norm() <= 1e-5 * truth.norm(), name


def test_fully_sharded_weights(worlds):
    worlds(2).run(_fully_sharded)


def _torch_fsdp(member: Member, output_layer_too: bool) -> None:
    spec = Model(ranks=member.ranks, data=member.ranks)
    gradients = []
    for options in ({}, switched(spec)):
        model = build(member, spec, options)
        mesh = DeviceMesh.from_group(member.group, member.device.type)
        for module in (model.output_layer, model) if output_layer_too else (model,):
            fully_shard(module, mesh=mesh)
        with warnings.catch_warnings():
            # Where the output layer is sharded alone its weight is gone when the loss is due.
            action = "ignore" if output_layer_too else "error"
            warnings.filterwarnings(action, message="parallel_lce")
            losses_of(model, spec, batch(0, spec, member.device)).mean().backward()
        gradients.append({n: p.grad.full_tensor() for n, p in model.named_parameters()})
    parallel_lce.megatron.uninstall()
    for name, truth in gradients[0].items():
        assert (gradients[1][name] - truth).norm() <= 1e-5 * truth.norm(), name


def _detached(member: Member, sharded: bool) -> None:
    """A detached weight, as of mtp_detach_heads from 0.18 on: no dW, and none in main_grad."""
    spec = Model(ranks=member.ranks)
    found = []
    for options in ({}, switched(spec)):
        model = build(member, spec, options)
        layer, labels = model.output_layer, batch(0, spec, member.device).labels
        layer.weight.main_grad = torch.zeros_like(layer.weight)
        layer.weight.grad_added_to_main_grad = False
        if options and sharded:
            _Resharded(layer)
        hidden = torch.randn(SEQUENCE, BATCH, HIDDEN, generator=torch.Generator().manual_seed(2))
        hidden = hidden.to(member.device).requires_grad_()
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", message="parallel_lce")
            logits, _ = layer(hidden, weight=layer.weight.detach())
            model.compute_language_model_loss(labels, logits).mean().backward()
        found.append((hidden.grad, layer.weight.main_grad, layer.weight.grad))
    parallel_lce.megatron.uninstall()
    assert (found[0][0] - found[1][0]).norm() <= 1e-5 * found[0][0].norm()
    for _, main_grad, gradient in found:
        assert not main_grad.any() and gradient is None


@pytest.mark.parametrize("sharded", [False, True])
def test_detached_weights(sharded, worlds):
    worlds(2).run(_detached, sharded)


@pytest.mark.parametrize("output_layer_too", [False, True])
def test_torchs_fully_sharded_data_parallel(output_layer_too, worlds):
    worlds(2).run(_torch_fsdp, output_layer_too)


def _protocol(member: Member, sequence_parallel: bool) -> None:
    """``output_layer(output_cross_entropy_loss=True, labels=[b, s])`` of Megatron's development branch."""
    spec = Model(ranks=member.ranks, sequence_parallel=sequence_parallel)
    stock, ours, hidden, _ = _layers(member, spec)
    labels = batch(0, spec, member.device).labels
    counts = labels != -100
    want = stock.compute_language_model_loss(labels, stock.output_layer(hidden)[0]).masked_fill(~counts, 0.0)
    ask = dict(input_=hidden, weight=None, runtime_gather_output=None, output_cross_entropy_loss=True)
    found = ours.output_layer(labels=labels, **ask)
    assert found.shape == labels.shape and (found - want).abs().max() <= 1e-5
    total = ours.output_layer(labels=labels, reduction="sum", **ask)
    mean = ours.output_layer(labels=labels, reduction="mean", **ask)
    assert (total - want.sum()).abs() <= 1e-5 * want.sum()
    assert (mean - want.sum() / counts.sum()).abs() <= 1e-5
    # With real logits, of a layer that gathers them and leaves its bias to others.
    layer = ours.output_layer
    layer.gather_output, layer.skip_bias_add = True, True
    layer.bias = torch.nn.Parameter(torch.full_like(layer.weight[:, 0], 0.5))
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="parallel_lce")
        again = layer(labels=labels, **ask)
    assert (again - want).abs().max() <= 1e-5
    parallel_lce.megatron.uninstall()


@pytest.mark.parametrize("sequence_parallel", [False, True])
def test_protocol_of_the_development_branch(sequence_parallel, worlds):
    worlds(2).run(_protocol, sequence_parallel)


def _mixed_uses(member: Member, use: str) -> None:
    """Other uses of the weight beside the fused loss lose no gradient of it under DDP."""

    def gradient(options: dict) -> torch.Tensor:
        from megatron.core.distributed import DistributedDataParallel, DistributedDataParallelConfig

        spec = Model(ranks=member.ranks)
        model = build(member, spec, options)
        ddp_config = DistributedDataParallelConfig(grad_reduce_in_fp32=True)
        ddp = DistributedDataParallel(model.config, ddp_config, model)
        ddp.zero_grad_buffer()
        hidden = torch.randn(SEQUENCE, BATCH, HIDDEN, generator=torch.Generator().manual_seed(1))
        weight = model.output_layer.weight
        # With fused accumulation, which stock has through Apex alone, only real logits mark the weight.
        model.config.gradient_accumulation_fusion = bool(options) and use == "logits"
        loss = losses_of(model, spec, batch(0, spec, member.device)).mean()
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
    ours = gradient(switched(Model()))
    parallel_lce.megatron.uninstall()
    assert (stock - ours).norm() <= 1e-5 * stock.norm()


@pytest.mark.parametrize("use", ["weight", "logits"])
def test_other_uses_of_the_weight(use, worlds):
    worlds(2).run(_mixed_uses, use)


def _unsupported(member: Member) -> None:
    from megatron.core.tensor_parallel import ColumnParallelLinear

    spec = Model(ranks=member.ranks)
    options = switched(spec)
    model = build(member, spec, options)
    model.config.defer_embedding_wgrad_compute = True
    with pytest.raises(ValueError, match="defer_embedding_wgrad_compute=True.*set it to False"):
        model.setup_embeddings_and_output_layer()
    model.config.defer_embedding_wgrad_compute = False

    class Quantized(ColumnParallelLinear):
        def forward(self, input_, weight=None, runtime_gather_output=None):
            return super().forward(input_, weight, runtime_gather_output)

    model.output_layer.__class__ = Quantized
    with pytest.raises(ValueError, match="does not know the forward of the output layer Quantized"):
        model.setup_embeddings_and_output_layer()
    with pytest.warns(RuntimeWarning, match="no effect with cross_entropy_loss_fusion=False"):
        build(member, spec, {"cross_entropy_fusion_impl": "parallel_lce"})
    tied = build(member, Model(ranks=member.ranks, tied=True), options)
    with pytest.raises(ValueError, match=r"needs a weight \[96, 32\], got no weight of its own and none"):
        tied.output_layer(torch.randn(SEQUENCE, BATCH, HIDDEN, device=member.device))
    with pytest.raises(ValueError, match=r"needs a weight \[96, 32\], got \[95, 32\]"):
        tied.output_layer(torch.randn(SEQUENCE, BATCH, HIDDEN), weight=torch.zeros(95, HIDDEN))
    parallel_lce.megatron.uninstall()
    # A forgotten install() fails loudly.
    model = build(member, spec, options)
    with pytest.raises(UnboundLocalError):
        losses_of(model, spec, batch(0, spec, member.device))


def test_unsupported_settings(worlds):
    worlds(1).run(_unsupported)


def _methods() -> tuple:
    from megatron.core import tensor_parallel
    from megatron.core.models.common.language_module.language_module import LanguageModule
    from megatron.core.tensor_parallel import cross_entropy

    return (
        LanguageModule.compute_language_model_loss,
        LanguageModule.setup_embeddings_and_output_layer,
        tensor_parallel.vocab_parallel_cross_entropy,
        cross_entropy.vocab_parallel_cross_entropy,
    )


def test_install_is_idempotent_and_undone():
    before = _methods()
    parallel_lce.megatron.install()
    once = _methods()
    assert once[0] is not before[0] and once[2:] == before[2:]
    parallel_lce.megatron.install(logits_budget=5)
    assert _methods() == once
    parallel_lce.megatron.install(cross_entropy="logits")
    assert _methods()[2] is _methods()[3] is parallel_lce.vocab_parallel_cross_entropy
    parallel_lce.megatron.install()  # keeps what was chosen
    assert _methods()[2] is parallel_lce.vocab_parallel_cross_entropy
    assert sys.modules["parallel_lce.megatron.install"]._installed.logits_budget == 5
    parallel_lce.megatron.install(cross_entropy="output_layer")
    assert _methods() == once
    parallel_lce.megatron.uninstall()
    parallel_lce.megatron.uninstall()
    assert _methods() == before


def test_others_may_wrap_it_too():
    """What somebody put around the switch is not taken away with it."""
    from megatron.core.models.common.language_module.language_module import LanguageModule

    before = _methods()
    parallel_lce.megatron.install()
    ours = LanguageModule.compute_language_model_loss
    around = lambda self, labels, logits: ours(self, labels, logits)  # noqa: E731
    LanguageModule.compute_language_model_loss = around
    try:
        parallel_lce.megatron.install(cross_entropy="logits")
        assert LanguageModule.compute_language_model_loss is around
        with pytest.warns(RuntimeWarning, match="compute_language_model_loss has been replaced"):
            parallel_lce.megatron.uninstall()
        assert LanguageModule.compute_language_model_loss is around
    finally:
        LanguageModule.compute_language_model_loss = before[0]
    assert _methods() == before


@pytest.mark.parametrize("budget", [-1, 1.5, "1GiB", True])
def test_install_refuses_budgets(budget):
    with pytest.raises(ValueError, match="logits_budget"):
        parallel_lce.megatron.install(logits_budget=budget)


@pytest.mark.parametrize(
    ("variable", "value"),
    [("PARALLEL_LCE_LOGITS_BUDGET", "1GiB"), ("PARALLEL_LCE_CROSS_ENTROPY", "fused")],
)
def test_install_refuses_environments(variable, value, monkeypatch):
    monkeypatch.setenv(variable, value)
    with pytest.raises(ValueError, match=value):
        parallel_lce.megatron.install()


def _checkpointed(member: Member, folder: str, tied: bool) -> None:
    """Stock saves, ours loads and saves, stock loads; sharded state dicts are compared in every training."""
    spec = Model(ranks=member.ranks, sequence_parallel=True, tied=tied)
    stock = build(member, spec, {})
    with torch.no_grad():
        for parameter in stock.parameters():
            parameter.add_(torch.randn_like(parameter))
    ours = build(member, spec, switched(spec))
    path = f"{folder}/{member.rank}.pt"

    def copy(source, destination) -> None:
        torch.save(source.state_dict(), path)
        destination.load_state_dict(torch.load(path, weights_only=True))

    copy(stock, ours)
    data = batch(0, spec, member.device)
    assert (losses_of(ours, spec, data) - losses_of(stock, spec, data)).abs().max() <= 1e-5
    with torch.no_grad():
        for parameter in ours.parameters():
            parameter.mul_(0.5)
    copy(ours, stock)
    parallel_lce.megatron.uninstall()
    for (name, a), (other, b) in zip(ours.named_parameters(), stock.named_parameters(), strict=True):
        assert name == other and torch.equal(a, b), name


@pytest.mark.parametrize("tied", [False, True])
def test_checkpoints_go_both_ways(tied, worlds, tmp_path):
    worlds(2).run(_checkpointed, str(tmp_path), tied)
