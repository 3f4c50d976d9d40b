"""torchtitan's override: in the default suite with a stand-in of the release's contract; with --all with the release,
whose trainer trains its debug model beside its own chunked loss."""

import copy
import functools
import math
import warnings
from types import SimpleNamespace

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed import fsdp
from torch.distributed.fsdp import FSDPModule, fully_shard
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard, distribute_tensor

import torchtitan_standin
import torchtitan_training
from blocks import counted_forwards
from cases import normal
from measures import assert_close
from parallel_lce.backends import torch_backend
from tools import on_ranks, with_modules
from torchtitan_standin import BaseLoss, ChunkedLossWrapper, CrossEntropyLoss, PolicyLoss, compute_logprobs, installed
from world import mesh_of

B, S, D, V, COUNT = 2, 5, 6, 11, 7
# Without DataParallelMeshDims torchtitan cannot be imported. FSDP of such a PyTorch, 2.11, crashes if norm and lm_head
# share a parameter group: it frees the weight of the norm before the norm's backward.
NEWER = pytest.mark.skipif(not hasattr(fsdp, "DataParallelMeshDims"), reason="torchtitan needs a newer PyTorch")
KINDS = {"plain": [], "vocabulary": [], "tokens": [], "fsdp one": [NEWER], "fsdp resharded": []}


class Decoder(nn.Module):
    """As torchtitan's: the forward ends before lm_head."""

    def __init__(self) -> None:
        super().__init__()
        self.norm, self.lm_head = nn.RMSNorm(D), nn.Linear(D, V)

    def forward(self, x):
        return self.norm(x)


def plain(lm_head: nn.Linear, rank: int, ranks: int) -> nn.Linear:
    """``lm_head`` with this rank's rows, and what torchtitan's layers know of their input."""
    for name, parameter in [*lm_head.named_parameters()]:
        setattr(lm_head, name, nn.Parameter(parameter.detach().chunk(ranks)[rank].clone()))
    layout = SimpleNamespace(per_axis_spmd_types=lambda: {"tp": "R"})
    lm_head._sharding_config = SimpleNamespace(in_src_shardings={"input": layout})
    return lm_head


@pytest.mark.parametrize("inner", ["CrossEntropyLoss", "PolicyLoss"])
@pytest.mark.parametrize(
    ("kind", "ranks"), [("plain", 1), *(pytest.param(kind, 2, marks=marks) for kind, marks in KINDS.items())]
)
@on_ranks()
def test_equals_whole_logits(member, kind, inner):
    """Of two microbatches, and without gradients: all equals that of one process with whole logits in float64."""
    rank, ranks = member.rank, member.ranks
    torch.manual_seed(3)
    model, mesh = Decoder(), None
    x, labels = normal(B, S, D).float(), torch.arange(B * S).mul(7).remainder(V).view(B, S)
    labels[0, 2] = labels[1, 4] = labels[1, 0] = -100
    advantages, config = torch.linspace(-1.0, 1.5, B * S).view(B, S), getattr(torchtitan_standin, inner).Config()
    truth, x64 = copy.deepcopy(model).double(), x.double().requires_grad_()
    expected, metrics = config.build()(truth.lm_head(truth(x64)), labels, COUNT, advantages=advantages)
    expected.backward()
    expected, wanted = {"loss itself": expected, **metrics}, {"x": x64, **dict(truth.named_parameters())}

    if kind == "plain":
        mesh = mesh_of("cpu", (ranks,), ("tp",))
        plain(model.lm_head, rank, ranks)
    elif "fsdp" in kind:
        for unit in ([model.norm, model.lm_head], model) if "one" in kind else (model.norm, model.lm_head, model):
            fully_shard(unit, mesh=mesh_of("cpu", (ranks,), ("dp",)), reshard_after_forward="resharded" in kind)
        for module in model.modules():
            if isinstance(module, FSDPModule):
                module.set_gradient_divide_factor(1.0)
                module.set_force_sum_reduction_for_comms(True)
        x, labels, advantages = (t[[rank]] for t in (x, labels, advantages))
    else:
        of_all = mesh_of("cpu", (1, ranks) if kind == "vocabulary" else (ranks, 1), ("dp", "tp"))
        for module, placement in ((model.norm, Replicate()), (model.lm_head, Shard(0))):
            for name, p in [*module.named_parameters()]:
                setattr(module, name, nn.Parameter(distribute_tensor(p.detach(), of_all, [Replicate(), placement])))
        tokens = [Shard(0), Replicate()]
        x, labels, advantages = (distribute_tensor(t, of_all, tokens) for t in (x, labels, advantages))
    x.requires_grad_()

    with installed(mesh) as ours:
        loss_fn = ours.linear_cross_entropy(ChunkedLossWrapper.Config(loss_fn=config), logits_budget=0).build()
        loss_fn.lm_head = model.lm_head
        for training in (True, True, False):
            if kind == "fsdp resharded":  # as a pipeline's stage leaves it; what it gathers is reduced nevertheless
                model.lm_head.set_requires_gradient_sync(False)
            with torch.set_grad_enabled(training):
                loss, metrics = loss_fn(model(x), labels, COUNT, advantages=advantages)
            assert "fsdp" not in kind or model.lm_head.weight.placements == (Shard(0),)
            assert kind != "fsdp resharded" or isinstance(model.lm_head.weight.grad, DTensor)
            assert not isinstance(loss, DTensor) or loss.placements == (Partial(), Replicate())
            for name, value in {"loss itself": loss, **metrics}.items():
                value = (value.to_local() if isinstance(value, DTensor) else value).detach().clone()
                if kind not in ("plain", "vocabulary"):
                    dist.all_reduce(value)
                assert value.dtype == torch.float32
                assert_close(value, expected.pop(name) if not training else expected[name], 1e-5, name=name)
            if training:
                loss.backward()
    assert not expected and not loss.requires_grad and not loss_fn._said
    for name, p in {"x": x, **dict(model.named_parameters())}.items():
        found, want = p.grad, 2 * wanted[name].grad
        if isinstance(found, DTensor):
            found = found.full_tensor()
        elif "fsdp" in kind:
            want = want[[rank]]
        elif "lm_head" in name:
            want = want.chunk(ranks)[rank]
        else:  # torchtitan sums the terms of dX
            dist.all_reduce(found)
        assert_close(found, want, 1e-5, name=name)


class Trainer:
    """As torchtitan's, whose labels reach the device before the model's forward."""

    def __init__(self, config, graphs=False) -> None:
        self.loss_fn = config.build()
        self.config = SimpleNamespace(training=SimpleNamespace(disable_cuda_graphs=not graphs))

    def post_dataloading_process(self, input_dict, labels):
        return input_dict["input"], labels.clone(), {}


@pytest.mark.parametrize("labels", ["some", "none", "changed", "captured"])
def test_labels_that_do_not_count_are_not_projected(labels):
    config, lm_head = ChunkedLossWrapper.Config(), nn.Linear(D, V)
    x, ids = normal(B, S, D).float(), torch.arange(B * S).remainder(V).view(B, S)
    ids[:, : S if labels == "none" else 2] = -100
    found, own = [], Trainer.post_dataloading_process
    with installed() as ours, with_modules({"torchtitan.trainer": SimpleNamespace(Trainer=Trainer)}):
        for each in (config, ours.linear_cross_entropy(config)):
            trainer, hidden = Trainer(each, graphs=labels == "captured"), x.clone().requires_grad_()
            trainer.loss_fn.lm_head = lm_head
            _, given, _ = trainer.post_dataloading_process({"input": None}, ids)
            if labels == "changed":
                given[0, 0] = 3
            with counted_forwards(torch_backend) as rows:
                loss, _ = trainer.loss_fn(hidden, given, COUNT)
            loss.backward()
            found.append([loss.detach(), hidden.grad, lm_head.weight.grad])
            lm_head.weight.grad = None
        ours._replacements.restore()
    assert sum(rows) == {"some": B * (S - 2), "none": 0}.get(labels, B * S)
    assert Trainer.post_dataloading_process is own
    for value, expected in zip(*found[::-1], strict=True):
        assert_close(value, expected, 1e-5, 1e-9)


@on_ranks(2)
def test_refused(member):
    """Each on every rank, before any collective. The layer keeps its own forward."""
    MSELoss, Other = type("MSELoss", (BaseLoss,), {}), type("Other", (ChunkedLossWrapper,), {})
    with installed(mesh_of("cpu", (2,), ("tp",))) as ours:

        def refused(match: str, lm_head, loss_fn=None, **options):
            own = {*vars(lm_head)} if lm_head is not None else None
            with pytest.raises(ValueError, match=match):
                loss = ours.LinearCrossEntropyLoss.Config(
                    loss_fn=loss_fn or CrossEntropyLoss.Config(), **options
                ).build()
                loss.lm_head = lm_head
                loss(torch.ones(B, S, D, requires_grad=True), torch.zeros(B, S, dtype=torch.long))
            assert lm_head is None or {*vars(lm_head)} == own

        refused("call set_lm_head before the loss", None)
        refused(f"must have {(6, 5)[member.rank]} rows, got 11", plain(nn.Linear(D, V), 0, 1))
        refused("must be CrossEntropyLoss or call compute_logprobs, got MSELoss", None, MSELoss.Config())
        refused("gradient_filter needs CrossEntropyLoss, got Policy", None, PolicyLoss.Config(), gradient_filter=0.1)
        config = Other.Config()
        with pytest.warns(UserWarning, match="leaves .*Other"):
            assert ours.linear_cross_entropy(config) is config


class ScaledLogits(PolicyLoss):
    def __call__(self, logits, labels, count, *, advantages):
        return -(compute_logprobs(logits / 0.5, labels) * advantages).sum() / count, {}


class RegularizedLogits(PolicyLoss):
    def __call__(self, logits, labels, count, *, advantages):
        return (logits.logsumexp(-1) - compute_logprobs(logits, labels) * advantages).sum() / count, {}


def _doubled(function):
    @functools.wraps(function)
    def replacement(*given, **named):
        return tuple(2 * part if part != {} else part for part in function(*given, **named))

    return replacement


def _own_forward(lm_head, loss_fn):
    lm_head.forward = lambda x: 2 * nn.functional.linear(x, lm_head.weight, lm_head.bias)


def _scaled_class(lm_head, loss_fn):
    lm_head.__class__ = type("Scaled", (nn.Linear,), {"forward": lambda self, x: 3 * nn.Linear.forward(self, x)})


def _parametrized(lm_head, loss_fn):
    class Doubled(nn.Module):
        def forward(self, weight):
            return 2 * weight

    nn.utils.parametrize.register_parametrization(lm_head, "weight", Doubled())


HABITS = {  # what else programs do to lm_head or to the loss: an expected word, if the logits are made
    "a hook of its input": (lambda lm_head, _: lm_head.register_forward_pre_hook(lambda m, x: (2 * x[0],)), None),
    "a hook of its weight": (lambda lm_head, _: lm_head.weight.register_hook(lambda dw: 2 * dw), None),
    "a parametrization": (_parametrized, None),
    "compiled in place": (lambda lm_head, _: lm_head.compile(backend="eager"), None),
    "a forward of its instance": (_own_forward, "a Linear, has a forward of its own"),
    "a derived class": (_scaled_class, "a Scaled, has a forward of its own"),
    "a hook": (lambda lm_head, _: lm_head.register_forward_hook(lambda m, x, y: y.tanh()), "hook on its logits"),
    "a backward hook": (
        lambda lm_head, _: lm_head.register_full_backward_hook(lambda m, dx, dy: (2 * dx[0],)), "hook on its logits",
    ),
    "a padded vocabulary": (lambda _, loss_fn: setattr(loss_fn, "global_vocab_size", V - 1), "global_vocab_size is 10"),
    "another function": (
        lambda _, loss_fn: setattr(loss_fn, "fn", lambda y, ids, **_: y.square().sum()), "replaced CrossEntropyLoss",
    ),
}  # fmt: skip


def _compare(ours, ours_config, own_config, habit=lambda lm_head, loss_fn: None, words=None) -> None:
    """The loss, its gradients and its words: torchtitan's own, or the override's."""
    x, labels = normal(B, S, D).float(), torch.arange(B * S).mul(7).remainder(V).view(B, S)
    found = []
    for config in (own_config, ours_config):
        torch.manual_seed(3)
        lm_head, hidden, loss_fn = nn.Linear(D, V), x.clone().requires_grad_(), config.build()
        habit(lm_head, loss_fn.loss_fn)
        loss_fn.lm_head = lm_head
        with warnings.catch_warnings(record=True) as said:
            warnings.simplefilter("always")
            for _ in range(2):
                loss, _ = loss_fn(hidden, labels, COUNT, advantages=torch.linspace(-1.0, 1.5, B * S).view(B, S))
                loss.backward()
        found.append([loss.detach(), hidden.grad, *(parameter.grad for parameter in lm_head.parameters())])
    assert [words in str(each.message) for each in said] == ([True] if words else [])
    for value, expected in zip(*found[::-1], strict=True):
        assert_close(value, expected, 1e-5)


@pytest.mark.parametrize("name", HABITS)
def test_another_projection_or_loss_runs_as_without_the_override(name):
    with installed() as ours:
        config = ChunkedLossWrapper.Config()
        _compare(ours, ours.linear_cross_entropy(config), config, *HABITS[name])


@pytest.mark.parametrize("place", ["ChunkedLossWrapper.__call__", "CrossEntropyLoss.__call__", "cross_entropy_loss"])
@pytest.mark.parametrize("when", ["before the import", "before the override", "after it"])
def test_what_other_code_has_replaced_is_never_left_out(place, when, monkeypatch):
    owner, name = (torchtitan_standin, place) if "." not in place else (eval(place.split(".")[0]), "__call__")
    double = _doubled if name == "__call__" else lambda own: functools.wraps(own)(lambda *a, **n: 2 * own(*a, **n))
    replace = lambda: monkeypatch.setattr(owner, name, double(getattr(owner, name)))  # noqa: E731
    if "import" in when:
        replace()
    with installed() as ours:
        config = ChunkedLossWrapper.Config()
        if "override" in when:
            replace()
        if "after" not in when:
            with pytest.warns(UserWarning, match=r"leaves ChunkedLossWrapper\.Config"):
                assert ours.linear_cross_entropy(config) is config
            return
        ours_config = ours.linear_cross_entropy(config)
        replace()
        _compare(ours, ours_config, config, words="other code has replaced")


@pytest.mark.parametrize("loss", [ScaledLogits, RegularizedLogits, type("MSELoss", (BaseLoss,), {})])
def test_a_loss_that_computes_with_logits_is_left_alone(loss):
    with installed() as ours, pytest.warns(UserWarning, match=f"leaves .*{loss.__name__}"):
        config = ChunkedLossWrapper.Config(loss_fn=loss.Config())
        assert ours.linear_cross_entropy(config) is config


def test_globals_of_a_loss_are_those_of_the_call(monkeypatch):
    with installed() as ours:
        config = ChunkedLossWrapper.Config(loss_fn=PolicyLoss.Config())
        ours_config = ours.linear_cross_entropy(config)
        assert ours_config is not config
        _compare(ours, ours_config, config)
        loss_fn = ours_config.build()
        monkeypatch.setattr(torchtitan_standin, "CLIP", 0.4)
        again = SimpleNamespace(build=lambda: loss_fn)
        _compare(ours, again, config)


CASES = [
    *(f"{backend}tp2 dp2 accumulated" for backend in ("", "partial ", "full ")),
    "tp4 no-sp", "partial tp2 no-sp", "full tp2 no-sp uneven", "tp2 dp2 no-sp bias",
    "dp2 resharded accumulated", "cp2", "tp2 cp2", "bf16", "partial tp2 compiled",
    "checked", "tp2 checked", "tp2 no-sp checked", "tied", "partial dp2 tied resharded", "bias accumulated",
    "soft-cap", "tp2 soft-cap", "partial tp2 soft-cap bias", "tp2 uneven",
    "accumulated DAPOLoss", "tp2 GRPOLoss", "partial tp2 DAPOLoss",
    "block0 tp2", "block1", "block2 GRPOLoss",
]  # fmt: skip


@pytest.fixture
def device():
    """The release is made to run on CPUs here. It is trained on GPUs by hand."""
    return "cpu"


@pytest.mark.slow
@pytest.mark.parametrize("case", CASES)
def test_its_trainer_with_the_lines_of_the_page(case, worlds):
    assert torchtitan_training.OURS in torchtitan_training.PAGE
    ranks = math.prod(int(word[-1]) for word in case.split() if word[:2] in ("tp", "cp", "dp"))
    worlds(ranks, str(torchtitan_training.release())).run(torchtitan_training.compare, case)
