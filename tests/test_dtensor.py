"""DTensors in all public functions: losses, gradients and placements as DTensor's own operators give them for all
logits. Placements that are refused, and what the refusal says. The loss under DDP, FSDP1 and FSDP2."""

import math
import re
from contextlib import nullcontext
from typing import Any
from unittest.mock import patch

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.fsdp import FullyShardedDataParallel, fully_shard
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard, distribute_tensor
from torch.distributed.tensor.parallel import ColwiseParallel, loss_parallel, parallelize_module
from torch.nn.parallel import DistributedDataParallel

import parallel_lce
from cases import normal
from parallel_lce.distillation import divergence, top_k_divergence
from releases import ROOT
from tools import debug_mode, fields, on_ranks, shrunk, upstream
from world import mesh_of

WHOLE, ROWS, SECOND = Replicate(), Shard(0), Shard(1)
V, D = 40, 16
TP = ("tp",)


def problem(b: int = 4, s: int = 8, v: int = V, device: Any = "cpu") -> dict[str, Tensor]:
    """Whole tensors, the same on every rank: fp64, some targets ignored, some in each shard."""
    target = torch.arange(b * s).mul(7).remainder(v).view(b, s)
    target[0, 0] = target[-1, -1] = -100
    drawn = dict(input=normal(b, s, D), linear_weight=normal(v, D, seed=1), linear_bias=normal(v, seed=2))
    return {name: t.to(device) for name, t in (drawn | dict(target=target)).items()}


def dense(whole: dict[str, Tensor], reduction: str) -> tuple[Tensor, ...]:
    """Loss, and gradients of input, weight and bias for an upstream gradient that differs from token to token."""
    leaves = [whole[name].clone().requires_grad_() for name in ("input", "linear_weight", "linear_bias")]
    logits = F.linear(*leaves)
    loss = F.cross_entropy(logits.flatten(0, -2), whole["target"].flatten(), reduction=reduction)
    if reduction == "none":
        loss = loss.view(whole["target"].shape)
    return loss.detach(), *torch.autograd.grad((loss * upstream(loss)).sum(), leaves)


def as_dtensors(whole: dict[str, Tensor], mesh, **placements) -> dict[str, Any]:
    """``placements``: by the argument's name. Gradients are wanted of all but the target."""
    given = {n: distribute_tensor(t, mesh, placements[n]) if n in placements else t.clone() for n, t in whole.items()}
    return {name: t.requires_grad_(name != "target") for name, t in given.items()}


def same(found: Any, want: Tensor, placements: Any = None) -> None:
    if placements is not None:
        assert list(found.placements) == list(placements), found.placements
    torch.testing.assert_close(found.full_tensor() if isinstance(found, DTensor) else found, want)


def loss_and_gradients(given: dict[str, Any], function=parallel_lce.linear_cross_entropy, **options) -> tuple[Any, ...]:
    loss = function(**given, **options)
    whole = torch.empty(loss.shape, dtype=loss.dtype, device=loss.device)
    factor = upstream(whole)
    if isinstance(loss, DTensor) and loss.dim():
        factor = distribute_tensor(factor, loss.device_mesh, loss.placements)
    (loss * factor).sum().backward()
    return loss.detach(), *[given[name].grad for name in ("input", "linear_weight", "linear_bias")]


# Shape of the mesh and names; placements of weight, input and target (None: a plain tensor); b, s and v; of the loss
# without reduction, and of the gradients of input and weight.
CASES: dict[str, tuple] = {
    "replicated": ((2,), TP, [ROWS], [WHOLE], [WHOLE], {}, [WHOLE], [ROWS]),
    "sharded target": ((2,), None, [ROWS], [SECOND], [SECOND], {}, [WHOLE], [ROWS]),
    "uneven vocabulary": ((2,), None, [ROWS], [SECOND], None, dict(v=41), [WHOLE], [ROWS]),
    "an empty shard": ((4,), TP, [ROWS], [ROWS], [WHOLE], dict(v=9), [WHOLE], [ROWS]),
    "data and tensor": ((2, 2), ("dp", "tp"), [WHOLE, ROWS], [ROWS, SECOND], [ROWS, WHOLE], {}, [ROWS, WHOLE],
                        [Partial(), ROWS]),
    "both split the sequence": ((2, 2), None, [WHOLE, ROWS], [SECOND, SECOND], [SECOND, WHOLE], {}, [SECOND, WHOLE],
                                [Partial(), ROWS]),
    "tensor before context": ((2, 2), None, [ROWS, WHOLE], [WHOLE, SECOND], [WHOLE, SECOND], {}, [WHOLE, SECOND],
                              [ROWS, Partial()]),
    "one shard": ((1, 2), None, [ROWS, WHOLE], [SECOND] * 2, [WHOLE, SECOND], {}, [WHOLE, SECOND], [ROWS, Partial()]),
    "no tensor parallelism": ((2,), ("dp",), [WHOLE], [ROWS], [ROWS], {}, [ROWS], [Partial()]),
}  # fmt: skip


RUNS = [(name, reduction, "") for name in CASES for reduction in ("none", "sum", "mean")]
RUNS += [("uneven vocabulary", "sum", "compiled"), ("replicated", "mean", "dX is not summed")]
if not torch.__version__.startswith("2.11."):  # which cannot trace it
    RUNS += [("sharded target", "sum", "dynamic")]


@pytest.mark.parametrize(("ranks", "name", "reduction", "how"), [(math.prod(CASES[r[0]][0]), *r) for r in RUNS])
@pytest.mark.thinned("name", "reduction", "how")
@on_ranks()
def test_losses_and_gradients_are_placed_as_dtensors_own(member, name, reduction, how):
    shape, names, weight, x, target, sizes, tokens, of_weight = CASES[name]
    mesh, whole = (mesh_of(member.device.type, shape, names), problem(device=member.device, **sizes))
    want, *gradients = dense(whole, reduction)
    placements = dict(input=x, linear_weight=weight, linear_bias=weight, target=target)
    given = as_dtensors(whole, mesh, **{name: placement for name, placement in placements.items() if placement})
    splits = [Partial() if isinstance(p, Shard) and w != ROWS else WHOLE for p, w in zip(tokens, weight)]
    if reduction == "mean" and Partial() in splits:
        with pytest.raises(ValueError, match=r"reduction='mean', and input is a DTensor.*use reduction='sum'"):
            parallel_lce.linear_cross_entropy(**given, reduction=reduction)
        return
    function = lambda input, **given: parallel_lce.linear_cross_entropy(input * 1.0, **given) * 1.0  # noqa: E731
    if how == "dynamic":  # the placements of a graph's inputs are symbols
        function = torch.compile(parallel_lce.linear_cross_entropy, fullgraph=True, backend="aot_eager", dynamic=True)
    elif how == "compiled":
        function = torch.compile(function, fullgraph=True, backend="aot_eager")
    options = dict(reduction=reduction, reduce_hidden_grad=how != "dX is not summed")
    loss, dx, dweight, dbias = loss_and_gradients(given, function, **options)
    same(loss, want, tokens if reduction == "none" else splits)
    same(dx, gradients[0], x if options["reduce_hidden_grad"] else [Partial()])
    same(dweight, gradients[1], of_weight)
    same(dbias, gradients[2], of_weight)


FSDP = "call the loss inside the forward of the module that fully_shard wraps"
EARLY = slice(None), slice(7)  # all but the last tokens


@on_ranks(2)
def test_placements_and_sizes_that_do_not_fit_are_refused(member):
    """Each row changes a call that is allowed. Some sizes are wrong on the last rank alone."""
    whole, kind = problem(device=member.device), member.device.type
    pair, square, context = [mesh_of(kind, *m) for m in (((2,), TP), ((1, 2), ("dp", "tp")), ((2, 1), ("tp", "cp")))]
    own = torch.distributed.new_group([member.rank], use_local_synchronization=True)
    w, x, y, b = "linear_weight", "input", "target", "linear_bias"

    def placed(name: str, *placements, mesh=pair, part: Any = ...) -> dict[str, Any]:
        return {name: distribute_tensor(whole[name][part].contiguous(), mesh, placements)}

    given = placed(w, ROWS) | placed(x, WHOLE) | {y: whole[y]}
    split, plain, last = placed(x, ROWS), {x: whole[x], w: whole[w]}, slice(V - 1)
    second = plain | dict(process_group=pair, sequence_parallel=True, sequence_dim=1)
    in_context = placed(x, SECOND, SECOND, mesh=context) | placed(w, ROWS, WHOLE, mesh=context)
    assert parallel_lce.linear_cross_entropy(**given, process_group=pair).isfinite()
    for changes, message in (
        (placed(w, SECOND), rf"linear_weight .*\(Shard\(dim=1\),\).*must be Shard\(0\).*{FSDP}"),
        (placed(w, ROWS, ROWS, mesh=square), rf"linear_weight .*\('dp', 'tp'\): it must be.*{FSDP}"),
        (placed(x, Shard(2)), r"input .*Shard\(dim=2\).*Replicate, or Shard of the first or second dim"),
        ({x: whole[x]}, rf"linear_weight is .*, and input is not: pass .*linear_weight.to_local\(\) and .*{FSDP}"),
        ({w: whole[w]}, r"input is a DTensor: pass input.to_local\(\)"),
        (dict(process_group=own), "process_group=.*, and linear_weight .*: leave it out"),
        (dict(vocab_start=0), "vocab_start=0, and linear_weight .*: leave it out"),  # on every rank
        (dict(sequence_parallel=True), "sequence_parallel=True, and input is .*: shard it or omit it"),
        (dict(vocab_size="V"), "vocab_size must be None or a number of entries"),
        (dict(vocab_size=V + 1), f"vocab_size={V + 1} exceeds the {V} rows of linear_weight"),
        (dict(reduce_hidden_grad=False) | split, "reduce_hidden_grad=False cannot be combined"),
        (in_context, r"dimensions \('tp', 'cp'\): mesh dimension 0 must be the last"),
        (placed(x, ROWS, part=slice(3)) | {y: whole[y][:3]}, "last that splits its 3 tokens, into equal parts"),
        (placed(x, WHOLE, WHOLE, mesh=square), "input .*use one mesh"),
        ({b: whole[b]}, "linear_weight is a DTensor .*, and linear_bias is not: pass DTensors for both"),
        (placed(b, ROWS, part=last), rf"linear_bias \[{V - 1}\] must have one entry per row of .* \[{V}, 16\]"),
        (placed(y, SECOND, part=EARLY), r"target must have shape \[4, 8\] for the whole input .*16\], got \[4, 7\]"),
        (plain | placed(y, WHOLE), r"target is a DTensor: pass target.to_local\(\)"),
        (second, r"target must have shape \[4, 16\] for the whole input \[4, 16, 16\], got \[4, 8\]"),
        (second | {x: whole[x][0]}, r"input must be \[b, S/P, ..., D\] for sequence_dim=1, got \[8, 16\]"),
        (plain | dict(process_group=square), "one-dimensional DeviceMesh or None, got DeviceMesh of 2 dimensions"),
    ):
        with pytest.raises(ValueError, match=message):
            parallel_lce.linear_cross_entropy(**given | changes)
    for name, words, value in ((y, "hold ids", whole[y].double()), ("temperature", "be floating", whole[y])):
        with patch.object(DTensor, "redistribute"), pytest.raises(ValueError, match=f"{name} must {words}"):
            parallel_lce.linear_cross_entropy(**given | {name: DTensor.from_local(value[:, :4], pair, [SECOND])})
    logits_loss, refused = parallel_lce.vocab_parallel_cross_entropy, r"^{0} is a DTensor: pass {0}.to_local".format
    sets = torch.zeros(0, dtype=torch.int64), torch.zeros(33, dtype=torch.int64)
    mask = distribute_tensor(whole[y] >= 0, pair, [WHOLE])
    student, (weight,), (short,) = (given[x], given[w]), placed(w, ROWS).values(), placed(w, ROWS, part=last).values()
    first, fewer = placed(x, SECOND)[x], placed(x, SECOND, part=EARLY)[x]
    rows = rf"teacher_weight \[{V - 1}, 16\] must have one entry per row of student_weight \[{V}, 16\]"
    for function, arguments, options, message in (
        (parallel_lce.token_statistics, (*student, None), dict(selected=sets), "without offsets, for DTensors"),
        (parallel_lce.token_statistics, (*plain.values(), None), dict(mask=mask), "mask is a DTensor: pass mask.to_l"),
        (divergence, (*student, given[x], short), dict(vocab_size=V), rows),
        (divergence, (first, weight, fewer, weight), {}, r"teacher_hidden must have shape \[4, 8\] .*, got \[4, 7"),
        (divergence, (first, weight, whole[x], weight), {}, r"teacher_hidden must have the tokens .* \[4, 8, 16\]"),
        (parallel_lce.rl.FusedLinearLogprobTriton.apply, (*student, whole[y], 0, V, None, pair), {}, "DTensor: pass w"),
        (logits_loss, (given[x], whole[y]), dict(tp_group=pair), refused("vocab_parallel_logits")),
        (logits_loss, (whole[x], mask), dict(tp_group=pair), refused("target")),
        (top_k_divergence, (*plain.values(), whole[y][..., None], first), {}, refused("teacher_log_probs")),
    ):
        with pytest.raises(ValueError, match=message):
            function(*arguments, **options)


@pytest.mark.parametrize("split", [WHOLE, ROWS, SECOND])
@on_ranks(2)
def test_other_functions_give_what_they_give_of_plain_tensors(member, split):
    mesh, whole = mesh_of(member.device.type, (2,)), problem(v=41, device=member.device)
    ids = (whole["target"][..., None].clamp(min=0) + torch.arange(3, device=member.device)).remainder(41)
    drawn = normal(4, 8, 3, seed=7), normal(4, 8, 12, seed=5), normal(41, 12, seed=6), normal(4, 8, seed=8)
    stored, *teacher, scale = [value.to(member.device).abs() for value in drawn]
    given = as_dtensors(whole, mesh, input=[split], linear_weight=[ROWS], linear_bias=[ROWS], target=[WHOLE])
    plain = as_dtensors(whole, mesh)

    def results(t: dict, ids, teacher: list, scale) -> dict[str, Any]:
        student, bias = (t["input"], t["linear_weight"]), t["linear_bias"]
        asked = dict(entropy=True, argmax=True, top_k=2, selected=ids)
        found = fields(parallel_lce.token_statistics(*student, t["target"], linear_bias=bias, **asked))
        found["alone"] = parallel_lce.selected_log_probs(*student, ids, linear_bias=bias)
        counted = dict(counted_tokens=int((whole["target"] != -100).sum()), logits_budget=0)
        own = lambda each, scale: (scale * each.target_log_prob, {"metric": scale * each.lse.detach()})  # noqa: E731
        with shrunk(300):
            sum_, metrics = parallel_lce.token_loss(*student, t["target"], own, scale, linear_bias=bias, **counted)
        found |= dict(own=sum_, **metrics)
        more = dict(target=t["target"], student_bias=bias, temperature=scale + 0.5)
        for reduction in ("none", "mean"):
            more |= dict(reduction=reduction)
            its = divergence(*student, *teacher, beta=0.5, teacher_logit_scale=scale, **more)
            found[f"divergence, {reduction}"] = its
            found[f"top_k, {reduction}"] = top_k_divergence(*student, ids[..., :1], -stored[..., :1], **more)
        sum(value.sum() for value in found.values() if torch.is_tensor(value) and value.requires_grad).backward()
        return found

    placed = [distribute_tensor(value, mesh, [place]) for value, place in zip((*teacher, scale), (split, ROWS, WHOLE))]
    found = results(given, distribute_tensor(ids, mesh, [SECOND]), placed[:2], placed[2])
    for name, want in results(plain, ids, teacher, scale).items():
        same(found[name], want, None if name == "vocab_size" else [WHOLE])
    for name, placements in dict(input=[split], linear_weight=[ROWS], linear_bias=[ROWS]).items():
        same(given[name].grad, plain[name].grad, placements)


class Model(nn.Module):
    def __init__(self, device) -> None:
        super().__init__()
        self.body = nn.Linear(D, D, bias=False, dtype=torch.float64, device=device)
        self.head = nn.Linear(D, V, dtype=torch.float64, device=device)
        self.loss = parallel_lce.LinearCrossEntropy()
        with torch.no_grad():
            for seed, parameter in enumerate(self.parameters()):
                parameter.copy_(normal(*parameter.shape, seed=seed) / 4)

    def of(self, hidden, target):
        return self.loss(hidden, self.head.weight, target, linear_bias=self.head.bias)

    def forward(self, x, target=None):
        hidden = self.body(x)
        return hidden if target is None else self.of(hidden, target)


def of_model(device, x, target) -> tuple[Tensor, dict[str, Tensor]]:
    model = Model(device)
    loss = sum(model(x[i], target[i]) for i in range(len(x))) / len(x)
    loss.backward()
    return loss.detach(), {name: p.grad for name, p in model.named_parameters()}


@pytest.mark.parametrize(("head", "layout"), [("sharded", None), ("compiled", SECOND), ("whole", None)])
@on_ranks(2)
def test_a_parallel_style_gives_the_body_the_sum_over_ranks_of_dx(member, layout, head):
    mesh, whole = mesh_of(member.device.type, (2,), TP), problem(device=member.device)
    x, target, model = whole["input"], whole["target"], Model(member.device)
    want, gradients = of_model(member.device, x[None], target[None])
    plan = {"head": ColwiseParallel(), "loss": parallel_lce.LinearCrossEntropyParallel(input_layouts=layout)}
    if head == "whole":  # no plan shards it
        del plan["head"]
        for name, parameter in list(model.head.named_parameters()):
            setattr(model.head, name, nn.Parameter(distribute_tensor(parameter.data, mesh, [WHOLE])))
    parallelize_module(model, mesh, plan)
    call = torch.compile(model, fullgraph=True, backend="aot_eager") if head == "compiled" else model
    loss = call(x if layout is None else x.chunk(2, 1)[member.rank], target)
    assert type(loss) is Tensor and not loss._is_view()
    loss.backward()
    same(loss.detach(), want)
    if layout is not None:
        torch.distributed.all_reduce(model.body.weight.grad, group=member.group)  # each rank's own tokens
    for name, parameter in model.named_parameters():
        same(parameter.grad, gradients[name], [ROWS] if name.startswith("head") and head != "whole" else None)


@on_ranks(2)
def test_a_style_refuses(member):
    style, mesh = parallel_lce.LinearCrossEntropyParallel(use_local_output=False), mesh_of(member.device.type, (2,), TP)
    with pytest.raises(ValueError, match=r"one placement, as Shard\(1\), got \(Shard"):
        parallel_lce.LinearCrossEntropyParallel(input_layouts=(Shard(1),))
    with pytest.raises(ValueError, match=r"is for parallel_lce.LinearCrossEntropy, and this module is a Linear"):
        parallelize_module(nn.Linear(2, 2), mesh, style)
    with pytest.raises(ValueError, match="must have one dimension, as .*, got one of 2"):
        parallelize_module(parallel_lce.LinearCrossEntropy(), mesh_of(member.device.type, (1, 2), ("dp", "tp")), style)
    model, whole = Model(member.device), problem(device=member.device)
    parallelize_module(model, mesh, {"head": ColwiseParallel(), "loss": style})
    assert model(whole["input"], whole["target"]).placements == (WHOLE,)
    weights = model.head.weight, model.head.weight.to_local()
    with debug_mode(), pytest.raises(ValueError, match="linear_weight must be a DTensor, got .*: use Colw"):
        model.loss(whole["input"], weights[member.rank], whole["target"])
    model.loss.options["reduce_hidden_grad"] = False
    with pytest.raises(ValueError, match="^reduce_hidden_grad=False, and input is no DTensor"):
        model(whole["input"], whole["target"])
    assert torch.no_grad()(model)(whole["input"], whole["target"]).isfinite()


@pytest.mark.parametrize(("sequence_parallel", "reshard"), [(False, True), (True, False)])
@on_ranks(4)
def test_fsdp2_over_tensor_parallelism_accumulates_gradients(member, sequence_parallel, reshard):
    mesh = mesh_of(member.device.type, (2, 2), ("dp", "tp"))
    t, half = problem(device=member.device), mesh["dp"].get_local_rank()
    xs, targets = torch.cat([t["input"], -2 * t["input"]]).unflatten(0, (4, 2)), t["target"].repeat(2, 1).view(4, 2, -1)
    want, gradients = of_model(member.device, xs, targets)
    model, layout = Model(member.device), SECOND if sequence_parallel else None
    style = parallel_lce.LinearCrossEntropyParallel(input_layouts=layout)
    parallelize_module(model, mesh["tp"], {"head": ColwiseParallel(), "loss": style})
    fully_shard(model.body, mesh=mesh["dp"], reshard_after_forward=reshard)
    fully_shard(model, mesh=mesh["dp"], reshard_after_forward=reshard)
    total = torch.zeros((), dtype=torch.float64, device=member.device)
    for step in range(2):
        model.set_requires_gradient_sync(step == 1)
        x, target = xs[2 * step + half], targets[2 * step + half]
        if sequence_parallel:
            x = x.chunk(2, 1)[mesh["tp"].get_local_rank()]
        loss = model(x, target)
        loss /= 2  # of a view FSDP2 would lose its hook
        loss.backward()
        total += loss.detach()
    torch.distributed.all_reduce(total, group=mesh["dp"].get_group())
    same(total / 2, want)
    for name, parameter in model.named_parameters():
        gradient = parameter.grad.full_tensor()
        if sequence_parallel and name == "body.weight":
            torch.distributed.all_reduce(gradient, group=mesh["tp"].get_group())
        same(gradient, gradients[name])


def _fsdp1(model, mesh):
    where = dict(process_group=mesh.get_group(), device_id=model.head.weight.device)
    return FullyShardedDataParallel(model, use_orig_params=True, **where)


# What makes one, and what is said of a loss outside of its forward. The root module of FSDP2 keeps its parameters whole
# from forward to backward.
WRAPPERS = {
    "DDP": (lambda model, mesh: DistributedDataParallel(model, process_group=mesh.get_group()), None),
    "FSDP1": (_fsdp1, "FSDP1 has flattened"),
    "FSDP2": (lambda model, mesh: fully_shard(model, mesh=mesh), None),
    "FSDP2, resharded": (lambda model, mesh: fully_shard(model, mesh=mesh, reshard_after_forward=True), r"unshard\(\)"),
}


@pytest.mark.parametrize("how", WRAPPERS)
@on_ranks(2)
def test_a_loss_inside_and_outside_the_forward_of_a_data_parallel_wrapper(member, how):
    """Where the weight is not whole it is refused, before any collective. The message's advice, unshard, helps."""
    (make, refused), t, inner = WRAPPERS[how], problem(device=member.device), Model(member.device)
    x, target = t["input"], t["target"]
    want, gradients = of_model(member.device, x[None], target[None])
    model, steps = make(inner, mesh_of(member.device.type, (2,))), 1
    loss = model(x, target)
    loss.backward()
    hidden = model(x)
    if refused:
        with pytest.raises(ValueError, match=refused):
            inner.of(hidden, target)
    if how != "FSDP1":
        if refused:
            model.unshard()
        inner.of(hidden, target).backward()
        steps = 2
    same(loss.detach(), want)
    fsdp1 = isinstance(model, FullyShardedDataParallel)
    with FullyShardedDataParallel.summon_full_params(model, with_grads=True) if fsdp1 else nullcontext():
        for name, parameter in inner.named_parameters():
            same(parameter.grad, steps * gradients[name])


@on_ranks(4)
def test_the_lines_of_the_page_run(member):
    """On two replicas of two tensor-parallel ranks. A block that computes a loss gives the one of all logits."""
    mesh, whole = mesh_of(member.device.type, (2, 2), ("dp", "tp")), problem(device=member.device)
    hidden, weight, target = (whole[n] for n in ("input", "linear_weight", "target"))
    want = F.cross_entropy((hidden @ weight.t()).flatten(0, 1), target.flatten())

    blocks = re.findall(r"```python\n(.*?)```", (ROOT / "docs" / "pytorch.md").read_text(), re.DOTALL)
    assert len(blocks) == 5
    names = dict(globals()) | dict(mesh=mesh, target=target, loss_parallel=loss_parallel)
    torch.set_default_dtype(torch.float64)
    try:
        for index, block in enumerate(blocks):
            model = nn.ModuleDict({"head": nn.Linear(D, V, bias=False, device=member.device)})
            model.head.weight.data.copy_(weight)
            names |= dict(model=model, hidden=hidden.clone().requires_grad_(), weight=weight.clone(), loss=None)
            with torch.device(member.device):
                exec(block, names)
            if index < 3:
                same(names["loss"].detach(), want)
            else:
                assert names["loss"].isfinite() and names["model"].head.weight.grad is not None
    finally:
        torch.set_default_dtype(torch.float32)
