"""Test bodies of parallel_lce.torchtitan, each for the stand-in and for the release: loss, gradients and metrics equal
those of one process with whole logits in float64."""

from __future__ import annotations

import warnings
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from types import SimpleNamespace

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FSDPModule, fully_shard
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard, distribute_tensor

import torchtitan_standin
from measures import assert_close
from world import Member

B, S, D, V = 2, 5, 6, 11
COUNTED = 7


@contextmanager
def door(release: str, member: Member, plain: bool = False):
    """Yields parallel_lce.torchtitan; with ``plain`` under the plain backend's mesh, where tp has all ranks."""
    with ExitStack() as stack:
        if release == "stand-in":
            stack.enter_context(torchtitan_standin.installed())
        from torchtitan.distributed.spmd_types import set_current_spmd_mesh
        from torchtitan.distributed.utils import set_spmd_backend

        import parallel_lce.torchtitan

        set_spmd_backend("spmd_types" if plain else "full_dtensor")
        if plain:
            mesh = init_device_mesh("cpu", (1, 1, member.ranks), mesh_dim_names=("dp", "cp", "tp"))
            stack.enter_context(set_current_spmd_mesh(mesh))
        yield parallel_lce.torchtitan


@dataclass
class Problem:
    """fp32; ``truth`` has the float64 loss and gradients of hidden, weight and bias."""

    hidden: torch.Tensor
    weight: torch.Tensor
    bias: torch.Tensor | None
    labels: torch.Tensor
    truth: list[torch.Tensor]


def problem(loss=None, bias: bool = True) -> Problem:
    generator = torch.Generator().manual_seed(3)
    hidden, weight, vector = (torch.randn(*s, generator=generator) for s in ((B, S, D), (V, D), (V,)))
    labels = torch.randint(V, (B, S), generator=generator)
    labels[0, 2] = labels[1, 4] = labels[1, 0] = -100
    leaves = [t.double().requires_grad_() for t in (hidden, weight, vector)[: 2 + bias]]
    logits = F.linear(*leaves)
    if loss is None:
        value = F.cross_entropy(logits.flatten(0, 1), labels.flatten(), reduction="sum") / COUNTED
    else:
        value = loss(logits, labels)
    value.backward()
    return Problem(hidden, weight, vector if bias else None, labels, [value.detach(), *(t.grad for t in leaves)])


def layer(p: Problem, spmd_type=None, rank: int = 0, ranks: int = 1) -> nn.Linear:
    """lm_head with this rank's rows, and what torchtitan's layers know of their input."""
    module = nn.Linear(D, V, bias=p.bias is not None)
    with torch.no_grad():
        module.weight = nn.Parameter(p.weight.chunk(ranks)[rank].clone())
        if p.bias is not None:
            module.bias = nn.Parameter(p.bias.chunk(ranks)[rank].clone())
    types = SimpleNamespace(per_axis_spmd_types=lambda: {"tp": spmd_type})
    module._sharding_config = SimpleNamespace(in_src_shardings={"input": types})
    return module


def built(door, lm_head: nn.Module, inner=None, compile_config=None, **options):
    """The loss that the override makes of the default configuration, or of one of ``inner``."""
    from torchtitan.components.loss import ChunkedLossWrapper, CrossEntropyLoss

    cfg = ChunkedLossWrapper.Config(loss_fn=inner or CrossEntropyLoss.Config(global_vocab_size=V))
    loss = door.linear_cross_entropy(cfg, **options).build(compile_config=compile_config)
    assert isinstance(loss, ChunkedLossWrapper) and type(loss) is door.LinearCrossEntropyLoss
    loss.set_lm_head(lm_head)
    return loss


def plain(member: Member, release: str, compiled: bool = False, spoiled=None) -> None:
    """Plain tensors and a group. The term of dX is this rank's own: torchtitan sums them."""
    p = problem()
    with door(release, member, plain=True) as ours:
        import spmd_types as spmd
        from torchtitan.config import CompileConfig

        lm_head = layer(p, spmd.R, member.rank, member.ranks)
        config = CompileConfig(enable=compiled, components=["loss"], backend="aot_eager")
        loss = built(ours, lm_head, compile_config=config)
        assert not compiled or loss.fn is not ours.parallel_lce.linear_cross_entropy
        if spoiled:
            spoiled(loss)
        hidden = p.hidden.clone().requires_grad_()
        value, metrics = loss(hidden * 1.0, p.labels, torch.tensor(COUNTED), positions=p.labels)
        assert metrics == {} and value.dtype == torch.float32
        value.backward()
        dist.all_reduce(hidden.grad)
        found = [value, hidden.grad, lm_head.weight.grad, lm_head.bias.grad]
        _assert_all_close(found, p.truth, member)
        with torch.no_grad():
            lm_head.weight.grad = None
            value, _ = loss(p.hidden, p.labels)
        assert_close(value, p.truth[0] * COUNTED, 1e-5)
        assert not value.requires_grad and lm_head.weight.grad is None


def _assert_all_close(found: list, truth: list, member: Member) -> None:
    for name, a, b in zip(("loss", "dX", "dW", "db"), found, truth, strict=True):
        b = b.chunk(member.ranks)[member.rank] if name in ("dW", "db") else b
        assert_close(a, b, 1e-5, name=name)


def dtensors(member: Member, release: str) -> None:
    """Tokens over "dp", the vocabulary over "tp": as many of each as there are ranks, in turn."""
    p = problem()
    for shape in ((1, member.ranks), (member.ranks, 1)):
        mesh = init_device_mesh("cpu", shape, mesh_dim_names=("dp", "tp"))
        data = mesh.get_local_rank("dp")
        with door(release, member) as ours:
            lm_head = layer(p)
            for name in ("weight", "bias"):
                parameter = distribute_tensor(getattr(lm_head, name).detach(), mesh, [Replicate(), Shard(0)])
                setattr(lm_head, name, nn.Parameter(parameter))
            hidden, labels = (
                DTensor.from_local(t.chunk(shape[0])[data].clone(), mesh, [Shard(0), Replicate()])
                for t in (p.hidden, p.labels)
            )
            hidden.requires_grad_()
            value, _ = built(ours, lm_head)(hidden * 1.0, labels, COUNTED)
            assert value.placements == (Partial(), Replicate())
            value.backward()
            found = [value, hidden.grad, lm_head.weight.grad, lm_head.bias.grad]
            for name, a, b in zip(("loss", "dX", "dW", "db"), found, p.truth, strict=True):
                assert_close(a.full_tensor(), b, 1e-5, name=name)


class Decoder(nn.Module):
    """As torchtitan's: the last norm and lm_head share an FSDP unit, and the forward ends before lm_head."""

    def __init__(self, lm_head: nn.Module) -> None:
        super().__init__()
        self.norm, self.lm_head = nn.RMSNorm(D), lm_head

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        return self.norm(hidden)


def fully_sharded(member: Member, release: str, units: str) -> None:
    """Different tokens on the ranks. Two microbatches add up; lm_head is sharded again after each call."""
    p = problem(bias=False)
    decoder = Decoder(layer(p))
    mesh = init_device_mesh("cpu", (member.ranks,), mesh_dim_names=("dp",))
    for unit in [[decoder.norm, decoder.lm_head]] if units == "one" else [decoder.norm, decoder.lm_head]:
        fully_shard(unit, mesh=mesh, reshard_after_forward="resharded" in units)
    fully_shard(decoder, mesh=mesh)
    for module in decoder.modules():
        if isinstance(module, FSDPModule):
            module.set_gradient_divide_factor(1.0)
            module.set_force_sum_reduction_for_comms(True)
    norm = nn.RMSNorm(D).double()
    weight = p.weight.double().requires_grad_()
    logits = F.linear(norm(p.hidden.double()), weight)
    truth = F.cross_entropy(logits.flatten(0, 1), p.labels.flatten(), reduction="sum") / COUNTED
    truth.backward()
    with door(release, member) as ours:
        loss = built(ours, decoder.lm_head)
        for _ in range(2):
            mine = slice(member.rank * B // member.ranks, (member.rank + 1) * B // member.ranks)
            value, _ = loss(decoder(p.hidden[mine]), p.labels[mine], COUNTED)
            assert isinstance(decoder.lm_head.weight, DTensor) and decoder.lm_head.weight.placements == (Shard(0),)
            value.backward()
        total = value.detach().clone()
        dist.all_reduce(total)
        assert_close(total, truth, 1e-5, name="loss")
        assert_close(decoder.lm_head.weight.grad.full_tensor(), 2 * weight.grad, 1e-5, name="dW")
        assert_close(decoder.norm.weight.grad.full_tensor(), 2 * norm.weight.grad, 1e-5, name="norm")
        with torch.no_grad():
            loss(decoder(p.hidden[mine]), p.labels[mine])
        assert isinstance(decoder.lm_head.weight, DTensor)


def _surrogate(log_probs, entropy, labels, count, advantages):
    ratio = torch.exp(log_probs + 2.0)
    loss = -(torch.min(ratio, ratio.clamp(0.8, 1.2)) * advantages * (labels != -100)).sum() / count
    return loss, {"loss/mean": loss.detach(), "entropy/mean": (entropy * (labels != -100)).sum() / count}


def policy_loss():
    """A loss class of the kind that torchtitan's RL has. Its module is this one, whose name is compute_logprobs."""
    from torchtitan.components import loss as losses

    globals()["compute_logprobs"] = losses.compute_logprobs

    class PolicyLoss(losses.BaseLoss):
        @dataclass(kw_only=True, slots=True)
        class Config(losses.BaseLoss.Config):
            pass

        def __init__(self, config, *, compile_config=None):
            pass

        def __call__(self, logits, labels, global_valid_tokens=None, *, advantages):
            log_probs, entropy = compute_logprobs(logits, labels, return_entropy=True)  # noqa: F821
            return _surrogate(log_probs, entropy, labels, global_valid_tokens, advantages)

    return PolicyLoss


def log_probs(member: Member, release: str) -> None:
    advantages = torch.linspace(-1.0, 1.5, B * S).reshape(B, S)
    expected = {}

    def whole(logits, labels):
        found = torchtitan_standin.compute_logprobs(logits, labels, return_entropy=True)
        loss, metrics = _surrogate(*found, labels, COUNTED, advantages)
        expected.update(metrics)
        return loss

    p = problem(whole)
    with door(release, member, plain=True) as ours:
        import spmd_types as spmd

        lm_head = layer(p, spmd.R, member.rank, member.ranks)
        loss = built(ours, lm_head, policy_loss().Config(), logits_budget=0)
        hidden = p.hidden.clone().requires_grad_()
        value, metrics = loss(hidden * 1.0, p.labels, COUNTED, advantages=advantages)
        value.backward()
        dist.all_reduce(hidden.grad)
        _assert_all_close([value, hidden.grad, lm_head.weight.grad, lm_head.bias.grad], p.truth, member)
        assert metrics.keys() == expected.keys()
        for name, metric in metrics.items():
            assert_close(metric, expected[name], 1e-5, name=name)
        assert ours.compute_logprobs is globals()["compute_logprobs"], "what the loss's module has stays"


def left_alone(member: Member, release: str) -> None:
    with door(release, member) as ours:
        from torchtitan.components.loss import ChunkedLossWrapper, MSELoss

        class Other(ChunkedLossWrapper):
            @dataclass(kw_only=True, slots=True)
            class Config(ChunkedLossWrapper.Config):
                pass

        for cfg in (ChunkedLossWrapper.Config(loss_fn=MSELoss.Config()), Other.Config()):
            with pytest.warns(UserWarning, match=f"leaves .*{'MSE' if type(cfg) is not Other.Config else 'Other'}.*"):
                assert ours.linear_cross_entropy(cfg) is cfg
        cfg = ours.linear_cross_entropy(ChunkedLossWrapper.Config(num_chunks=3), logits_budget=5, gradient_filter=0.1)
        assert (cfg.num_chunks, cfg.logits_budget, cfg.gradient_filter) == (3, 5, 0.1)
        with pytest.raises(ValueError, match="must be CrossEntropyLoss or call compute_logprobs, got MSELoss"):
            ours.LinearCrossEntropyLoss.Config(loss_fn=MSELoss.Config()).build()
        with pytest.raises(ValueError, match="gradient_filter needs CrossEntropyLoss, got PolicyLoss"):
            ours.LinearCrossEntropyLoss.Config(loss_fn=policy_loss().Config(), gradient_filter=0.1).build()


class _Scaled(nn.Linear):
    def forward(self, input):
        return super().forward(input) * 2


def refusals(member: Member, release: str) -> None:
    """Each on every rank, before any collective."""
    p = problem()
    hidden = p.hidden.clone().requires_grad_()
    with door(release, member, plain=True) as ours:
        import spmd_types as spmd
        from torchtitan.components.loss import CrossEntropyLoss

        def refused(match: str, lm_head, given=hidden, **options):
            own = dict(vars(lm_head)) if lm_head is not None else {}
            with pytest.raises(ValueError, match=match):
                built(ours, lm_head, **options)(given * 1.0, p.labels)
            assert lm_head is None or vars(lm_head).keys() == own.keys(), "the layer keeps its own forward"

        def sharded(spmd_type=spmd.R):
            return layer(p, spmd_type, member.rank, member.ranks)

        refused("call set_lm_head before the loss", None)
        size = CrossEntropyLoss.Config(global_vocab_size=V + 1)
        refused("global_vocab_size is 12, but lm_head has 11 entries", sharded(), inner=size)
        refused("its input is R on 'tp', got .*I", sharded(spmd.I))
        refused(r"its input is R on 'tp', got S\(1\)", sharded(spmd.S(1)))
        without = sharded()
        del without._sharding_config
        refused("its input is R on 'tp', got None", without)
        whole = layer(p, spmd.R)
        refused(f"must have {(6, 5)[member.rank]} rows, got 11", whole)
        scaled = _Scaled(D, V)
        refused("must be a plain linear layer or a SoftCappedLinear, got _Scaled", scaled)
    mesh = init_device_mesh("cpu", (member.ranks,), mesh_dim_names=("tp",))
    with door(release, member) as ours:
        given = {
            "hidden states must be replicated on 'tp'": ([Shard(1)], [Shard(0)]),
            "only 'tp' may shard lm_head.weight, by Shard": ([Replicate()], [Shard(1)]),
            "must be a DTensor on the hidden states' mesh": ([Replicate()], None),
        }
        for match, (of_hidden, of_weight) in given.items():
            lm_head = layer(p, None, member.rank, member.ranks)
            if of_weight is not None:
                lm_head.weight = nn.Parameter(DTensor.from_local(lm_head.weight.detach(), mesh, of_weight))
            refused(match, lm_head, DTensor.from_local(p.hidden, mesh, of_hidden).requires_grad_())


def sums_dx(loss) -> None:
    loss.fn = _changed(loss.fn, reduce_hidden_grad=True)


def forgets_bias(loss) -> None:
    loss.fn = _changed(loss.fn, linear_bias=None)


def counts_ignored(loss) -> None:
    loss.fn = _changed(loss.fn, ignore_index=-7)


def scores_this_shard(loss) -> None:
    loss.fn = _changed(loss.fn, process_group=None, vocab_start=None)


def _changed(function, **others):
    def changed(*args, **options):
        known = {n: v for n, v in others.items() if n in options or n == "ignore_index"}
        return function(*args, **{**options, **known})

    return changed


SPOILED = {
    "sums_dx": (sums_dx, "dX|norm"),
    "forgets_bias": (forgets_bias, "loss"),
    "counts_ignored": (counts_ignored, "loss|nan"),
    "scores_this_shard": (scores_this_shard, "loss|nan"),
}


def broken(member: Member, release: str, name: str) -> None:
    """These tests see the mistake."""
    spoil, seen = SPOILED[name]
    warnings.simplefilter("ignore")
    with pytest.raises(AssertionError, match=seen):
        plain(member, release, spoiled=spoil)
