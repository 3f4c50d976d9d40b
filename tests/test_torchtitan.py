"""torchtitan's override: with a stand-in of the release's contract; with --all with the release, beside its loss."""

import copy
import importlib
import re
from contextlib import contextmanager, nullcontext
from dataclasses import field, make_dataclass
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.distributed import fsdp
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard, distribute_tensor
from torch.nn.utils import prune
from torch.overrides import BaseTorchFunctionMode

from cases import normal
from measures import assert_close
from parallel_lce import neighbours
from parallel_lce.backends import torch_backend
from parallel_lce.patching import is_own
from releases import ROOT, folder_of
from tools import counted_forwards, debug_mode, on_ranks, started
from torchtitan_standin import BaseLoss, ChunkedLossWrapper, installed
from transformers_models import warned
from world import mesh_of

# Beside torch: all that its trainer imports.
OTHERS = ("spmd_types==0.2.3", "tyro==1.0.17", "docstring_parser==0.18.0", "typeguard==4.6.1", "torchdata==0.11.0")
PAGE = (ROOT / "docs" / "torchtitan.md").read_text()
BLOCKS = "".join(re.findall(r"^```python\n(.*?)^```$", PAGE, re.M | re.S))
B, S, D, V, COUNT = 2, 5, 6, 11, 7
# Where torchtitan cannot be imported, in 2.11, FSDP frees the weight of the norm before the norm's backward.
NEWER = pytest.mark.skipif(not hasattr(fsdp, "DataParallelMeshDims"), reason="torchtitan needs a newer PyTorch")
KINDS = [("plain", 1), ("plain", 2), ("DTensor", 2), *(pytest.param(k, 2, marks=NEWER) for k in ("FSDP2", "FSDP2 own"))]


def release() -> Path:
    return folder_of("torchtitan", "0.3.0", others=OTHERS)


@contextmanager
def released(mesh=None, dtensors: bool = False):
    """Yields parallel_lce.torchtitan, with the release's losses. ``mesh``: that of plain tensors, with a "tp"."""
    regions = importlib.import_module("torchtitan.distributed.spmd_types")
    utils = importlib.import_module("torchtitan.distributed.utils")
    utils.set_spmd_backend("full_dtensor" if dtensors else "spmd_types")
    with regions.set_current_spmd_mesh(mesh) if mesh is not None else nullcontext():
        yield importlib.import_module("parallel_lce.torchtitan")


@pytest.fixture
def device():
    return "cpu"  # on GPUs the override runs in the benchmarks


def problem() -> tuple[nn.Linear, torch.Tensor, torch.Tensor]:
    torch.manual_seed(3)
    labels = torch.arange(B * S).mul(7).remainder(V).view(B, S)
    labels[0, 2] = labels[1, 4] = labels[1, 0] = -100
    return nn.Linear(D, V), normal(B, S, D).float().requires_grad_(), labels


def sharded_over_tp(lm_head: nn.Linear, rank: int, ranks: int) -> None:
    for name, parameter in [*lm_head.named_parameters()]:
        setattr(lm_head, name, nn.Parameter(parameter.detach().chunk(ranks)[rank].clone()))


def distributed(model, x, labels, kind: str, rank: int, ranks: int):
    x = x.detach()
    if kind == "plain":
        sharded_over_tp(model.lm_head, rank, ranks)
    elif kind == "DTensor":
        of_all = mesh_of("cpu", (1, ranks), ("dp", "tp"))
        for name, p in [*model.lm_head.named_parameters()]:
            setattr(model.lm_head, name, nn.Parameter(distribute_tensor(p, of_all, [Replicate(), Shard(0)])))
        x, labels = (distribute_tensor(t, of_all, [Shard(0), Replicate()]) for t in (x, labels))
    else:
        for unit in (*([model.norm, model.lm_head] if "own" in kind else [[model.norm, model.lm_head]]), model):
            fully_shard(unit, mesh=mesh_of("cpu", (ranks,), ("dp",)), reshard_after_forward=True)
        for module in (model, model.norm, model.lm_head):
            module.set_gradient_divide_factor(1.0)
            module.set_force_sum_reduction_for_comms(True)
        x, labels = x[[rank]], labels[[rank]]
    return x.requires_grad_(), labels


class Decoder(nn.Module):
    def __init__(self, norm: nn.Module, lm_head: nn.Linear) -> None:
        super().__init__()
        self.norm, self.lm_head = norm, lm_head

    def forward(self, x):
        return self.norm(x)


@pytest.mark.parametrize("source", ["stand-in", pytest.param("release", marks=pytest.mark.slow)])
@pytest.mark.parametrize(("kind", "ranks"), KINDS)
@on_ranks(path_of=lambda given: str(release()) if given["source"] == "release" else None)
def test_loss_and_gradients_equal_those_of_whole_logits(member, kind, source):
    """Of two microbatches, and after a step of SGD without gradients, in float64. So do those of the release's loss."""
    rank, ranks = member.rank, member.ranks
    lm_head, x, labels = problem()
    whole = Decoder(nn.RMSNorm(D) if "FSDP2" in kind else nn.Identity(), lm_head)
    truth, x64, ids = copy.deepcopy(whole).double(), x.detach().double().requires_grad_(), labels.flatten()
    exact = lambda: F.cross_entropy(truth.lm_head(truth(x64)).flatten(0, 1), ids, reduction="sum") / COUNT  # noqa: E731
    before = exact()
    before.backward()
    torch.optim.SGD(truth.parameters(), 0.2).step()
    after = exact().detach()
    mesh = mesh_of("cpu", (ranks,), ("tp",)) if kind == "plain" else None
    region = installed(mesh) if source == "stand-in" else released(mesh, kind == "DTensor")
    with region as ours:
        own = ours.ChunkedLossWrapper.Config(loss_fn=ours.CrossEntropyLoss.Config(global_vocab_size=V), num_chunks=S)
        for config in (ours.linear_cross_entropy(own, logits_budget=0), *[own] * (source == "release")):
            model, (_, x, labels) = copy.deepcopy(whole), problem()
            x, labels = distributed(model, x, labels, kind, rank, ranks)
            loss_fn = config.build()
            loss_fn.set_lm_head(model.lm_head)
            for training in (True, True, False):
                if not training:
                    torch.optim.SGD(model.parameters(), 0.1).step()
                if "FSDP2" in kind:  # as a pipeline's stage leaves it; the gradient is reduced nevertheless
                    model.lm_head.set_requires_gradient_sync(False)
                with torch.set_grad_enabled(training):
                    hidden = model(x) * 1.0
                    with started() as collectives:
                        loss, metrics = loss_fn(hidden, labels, COUNT)
                value = (loss.full_tensor() if kind == "DTensor" else loss).detach().clone()
                if "FSDP2" in kind:
                    assert sum(c.kind == "all_gather" and c.size > D for c in collectives) == 1  # of lm_head
                    assert model.lm_head.weight.placements == (Shard(0),)
                    dist.all_reduce(value)
                assert kind != "DTensor" or loss.placements == (Partial(), Replicate())
                assert value.dtype == torch.float32 and metrics == {}
                assert_close(value, before if training else after, 1e-5)
                if training:
                    loss.backward()
            assert not loss.requires_grad and not getattr(loss_fn, "_said", False)
            for name, p in {"x": x, **dict(model.named_parameters())}.items():
                found, want = p.grad, 2 * (x64 if name == "x" else truth.get_parameter(name)).grad
                if isinstance(found, DTensor):
                    found = found.full_tensor()
                elif name != "x":
                    want = want.chunk(ranks)[rank]
                elif "FSDP2" in kind:
                    want = want[[rank]]
                else:  # torchtitan sums the terms of dX
                    dist.all_reduce(found)
                assert_close(found, want, 1e-5, name=name)


@on_ranks(2)
def test_a_wrong_head_or_loss_is_refused_on_every_rank(member):
    with installed(mesh_of("cpu", (2,), ("tp",))) as ours:
        config, (lm_head, x, labels) = ours.linear_cross_entropy(ChunkedLossWrapper.Config()), problem()
        wrong = nn.Linear(D, V, bias=False)
        wrong.weight = nn.Parameter(wrong.weight[:6])  # of V = 11: right on one rank
        for head, match in ((None, "call set_lm_head"), (wrong, "must have 5 rows, got 6")):
            loss_fn = config.build()
            loss_fn.set_lm_head(head)
            with debug_mode(), pytest.raises(ValueError, match=match):
                loss_fn(x, labels)
        loss_fn.set_lm_head(lm_head)
        sharded_over_tp(lm_head, member.rank, 2)
        with pytest.raises(ValueError, match="target"):  # a part of the sequence
            loss_fn(x[:, :2], labels)
        with pytest.raises(ValueError, match="must be CrossEntropyLoss, got GRPOLoss"):
            ours.LinearCrossEntropyLoss.Config(loss_fn=type("GRPOLoss", (BaseLoss,), {}).Config()).build()


def test_other_losses_and_wrappers_are_left_alone_in_words():
    other, wrapper = type("GRPOLoss", (BaseLoss,), {}), type("Other", (ChunkedLossWrapper,), {})
    with installed() as ours:
        for config in (ChunkedLossWrapper.Config(loss_fn=other.Config()), wrapper.Config()):
            with pytest.warns(UserWarning, match="own code runs .*(GRPOLoss|Other)"):
                assert ours.linear_cross_entropy(config) is config
        named = ours.linear_cross_entropy(ours.LinearCrossEntropyLoss.Config(logits_budget=5), skip_masked=True)
        assert (named.logits_budget, named.skip_masked) == (5, True)


def trained(loss_fn, lm_head, x, labels, change=lambda lm_head, loss_fn: None) -> tuple[list, list[str]]:
    change(lm_head, loss_fn.loss_fn)
    loss_fn.set_lm_head(lm_head)
    with warned((UserWarning,)) as said:
        for _ in range(2):
            loss, _ = loss_fn(x, labels, COUNT)
            loss.backward()
    return [loss.detach(), x.grad, *(p.grad for p in lm_head.parameters())], said


@pytest.mark.parametrize(("masked", "ignored"), [("some", -100), ("all", -100), ("some", 4)])
def test_skip_masked_does_not_project_labels_that_torchtitan_ignores(masked, ignored, monkeypatch):
    monkeypatch.setattr("torchtitan_standin.IGNORE_INDEX", ignored)  # as a fork may
    with installed() as ours:
        found = []
        for config in (ChunkedLossWrapper.Config(), ours.LinearCrossEntropyLoss.Config(skip_masked=True)):
            lm_head, x, labels = problem()
            labels[:, : S if masked == "all" else 2] = -100
            labels.masked_fill_(labels == -100, ignored)
            with counted_forwards(torch_backend) as rows:
                found.append(trained(config.build(), lm_head, x, labels)[0])
    assert sum(rows) == 2 * (labels != ignored).sum()
    for value, expected in zip(*found[::-1], strict=True):
        assert_close(value, expected, 1e-5, 1e-9)


class Twice(torch.Tensor):
    """As of a quantized weight, its product is its own."""

    @classmethod
    def __torch_function__(cls, function, types, args=(), kwargs=None):
        result = super().__torch_function__(function, types, args, kwargs)
        return 2 * result.as_subclass(torch.Tensor) if function is F.linear else result


OfAStyle = type(
    "OfAStyle", (), {"__module__": "torch.distributed.tensor._api", "__call__": lambda *given: 2 * given[-1]}
)
Doubled = type("Doubled", (nn.Linear,), {"forward": lambda self, x: 2 * nn.Linear.forward(self, x)})
HABITS = {  # what else programs do to lm_head or to the loss: an expected word, if the logits are made
    "a hook of its input": (lambda head, _: head.register_forward_pre_hook(lambda m, x: setattr(m, "x", x[0])), "hook"),
    "a hook of its weight": (lambda head, _: head.weight.register_hook(lambda dw: 2 * dw), None),
    "its forward": (lambda head, _: setattr(head, "forward", lambda x: Doubled.forward(head, x)), "a Linear, has"),
    "a derived class": (lambda head, _: setattr(head, "__class__", Doubled), "a Doubled, has a forward of its own"),
    "a hook": (lambda head, _: head.register_forward_hook(lambda m, x, y: y.tanh()), "has a hook"),
    "a backward hook": (lambda head, _: head.register_full_backward_pre_hook(lambda m, g: (g[0] / 2,)), "has a hook"),
    "a style": (lambda head, _: head.register_forward_hook(OfAStyle()), "has a hook"),
    "pruning": (lambda head, _: prune.l1_unstructured(head, "weight", 0.3), "as of pruning"),
    "its weight": (lambda head, _: setattr(head, "weight", nn.Parameter(head.weight.detach().as_subclass(Twice))),
                   "the weight of its output layer is a Twice"),
    "a function": (lambda _, loss: setattr(loss, "fn", lambda y, *_, **__: y.square().sum()), "other code"),
}  # fmt: skip


@pytest.mark.parametrize("name", HABITS)
def test_another_projection_or_loss_runs_as_without_the_override(name, monkeypatch):
    change, words = HABITS[name]
    with installed() as ours:
        expected, _ = trained(ChunkedLossWrapper.Config().build(), *problem(), change)
        last_stage = type("", (), dict(is_initialized=lambda: True, get_rank=lambda: 1))
        monkeypatch.setattr("parallel_lce.patching.dist", last_stage)
        found, said = trained(ours.LinearCrossEntropyLoss.Config().build(), *problem(), change)
    assert [words in text for text in said] == ([True] if words else [])
    for value, other in zip(found, expected, strict=True):
        assert_close(value, other, 1e-5)


@pytest.mark.parametrize("name", ["ChunkedLossWrapper", "CrossEntropyLoss", "cross_entropy", "linear"])
def test_replaced_functions_and_modes_run_torchtitans_own_loss(name, monkeypatch):
    with installed() as ours:
        loss_fn = ours.linear_cross_entropy(ChunkedLossWrapper.Config()).build()
        owner, attribute = (F, name) if hasattr(F, name) else (getattr(ours, name), "__call__")
        own = getattr(owner, attribute)
        monkeypatch.setattr(owner, attribute, lambda *given, **named: own(*given, **named))
        assert "replaced" in trained(loss_fn, *problem())[1][0]
        monkeypatch.undo()
        loss_fn = ours.linear_cross_entropy(ChunkedLossWrapper.Config()).build()
        with BaseTorchFunctionMode():  # as of its type checker
            assert "a mode of torch functions" in trained(loss_fn, *problem())[1][0]


@pytest.mark.slow
@on_ranks(1, path_of=lambda given: str(release()))
def test_the_lines_of_the_page_name_the_override_and_the_loss(member):
    with released() as ours:
        from torchtitan.config import Configurable
        from torchtitan.config.override import OverrideConfig, apply_overrides, parse_cli_imports

        names = {}
        exec(BLOCKS, names)
        (line,) = re.findall(r"--override.imports (\S+)", PAGE)
        loss = "loss", object, field(default_factory=ours.ChunkedLossWrapper.Config)
        Root = make_dataclass("Root", [loss], bases=(Configurable.Config,), kw_only=True, slots=True)
        for override in (names["override"], OverrideConfig(imports=parse_cli_imports([line]))):
            root = Root()
            apply_overrides(override, root)
            assert type(root.loss) is type(names["loss"]) is ours.LinearCrossEntropyLoss.Config


@pytest.mark.slow
@on_ranks(2, path_of=lambda given: str(release()))
def test_torchtitans_forward_that_distributes_an_output_layer_is_known(member):
    from torchtitan.distributed import parallel_dims
    from torchtitan.models.common.decoder_sharding import colwise_config
    from torchtitan.models.common.linear import Linear

    lm_head = Linear.Config(in_features=4, out_features=6, sharding_config=colwise_config()).build()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(parallel_dims, "device_type", "cpu")
        lm_head.parallelize(parallel_dims.ParallelDims(1, 1, 1, 2, 1, 1, 2))  # sets a forward of the instance
    assert is_own(vars(lm_head)["forward"], neighbours.TORCHTITAN_DISTRIBUTED)
