"""One configuration on one rank: the package's results and gradients, of its part of the tokens and its shard."""

import inspect
import math
from contextlib import ExitStack, nullcontext
from functools import partial
from unittest import mock

import torch
from torch import Tensor
from torch.autograd.graph import saved_tensors_hooks
from torch.utils.checkpoint import checkpoint

import parallel_lce
from cases import DTYPES
from fuzz.draw import LAID, Configuration
from fuzz.values import Whole, laid, make, real_rows
from parallel_lce.call import prepare
from parallel_lce.core.partials import accumulation_dtype
from parallel_lce.distillation import divergence
from tools import chosen_backend, debug_mode, shrunk, unchecked
from world import Member


def require(condition: object, message: str) -> None:
    """Of what no number need be compared to see that it is wrong."""
    if not condition:
        raise AssertionError(message)


def execute(member: Member, c: Configuration, backend: str) -> dict[str, Tensor]:
    """Results by name, gradients as ``d<name>``; those of a second walk through the graph end in `` again``. And
    ``coded``: whether exponentials were saved in codes of one byte."""
    with ExitStack() as stack:
        stack.enter_context(chosen_backend(backend))
        stack.enter_context(shrunk(c.block_bytes, c.tile))
        if backend == "triton":
            from benchmarks.tune import forced
            from parallel_lce.features.filter import gradient
            from parallel_lce.kernels.tuning import Tile

            stack.enter_context(mock.patch.object(gradient, "SMALLEST_FILTERED", 0))
            # Filtered each time, though all tiles are active: equal runs are compared bit by bit.
            stack.enter_context(mock.patch.multiple(gradient, SEARCHED=0, MOST_ACTIVE=1.0))
            if c.bias == "low" and not c.filtered and member.device.type == "cpu":
                # An interpreter's vocabulary has few windows of any other width.
                stack.enter_context(forced(Tile(64, 64, 32, 4, 2), 16))
        # A target outside the vocabulary, and a wrong count, which a CPU would refuse.
        stack.enter_context(unchecked())
        if c.debug:
            stack.enter_context(debug_mode())
        found = _once(member, c)
        for _ in range(2 * c.repeat):
            again = _once(member, c)
            for name, value in found.items():
                require(same_bits(value, again[name]), f"bits: {name} differs from run to run")
        found["coded"] = torch.tensor(any(call.plan and call.plan.codes for call in prepare.KNOWN.values()))
    return found


def same_bits(a: Tensor, b: Tensor) -> bool:
    if a.shape != b.shape or a.dtype != b.dtype:
        return False
    bits = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}[a.dtype.itemsize]
    return torch.equal(a.resolve_neg().view(bits), b.resolve_neg().view(bits))


def _part(c: Configuration, rank: int, name: str, value: Tensor) -> Tensor:
    """A rank's part of a whole tensor."""
    (start, rows), real = c.shards[rank], real_rows(c, rank)
    teacher, name = name.startswith("teacher_"), name.removeprefix("teacher_")
    if name == "input" and c.kind == "logits":
        return value[..., start : start + rows]
    if name == "input" and c.sequence_parallel and c.ranks > 1:
        return value.chunk(c.ranks, c.sequence_dim)[rank]
    if name not in ("weight", "bias"):
        return value
    if teacher and c.ranks == 1 and c.size_given:
        rows = real + c.values % 9  # not as many as the student's
    # Padding must never matter.
    part = value.new_full((rows, *value.shape[1:]), torch.nan)
    part[:real] = value[start : start + real]
    return part


_FUNCTIONS = {
    "loss": parallel_lce.linear_cross_entropy,
    "statistics": parallel_lce.token_statistics,
    "logits": parallel_lce.vocab_parallel_cross_entropy,
    "selected": parallel_lce.selected_log_probs,
    "divergence": divergence,
}
_ARGUMENTS = {
    "input": ("input", "student_hidden", "vocab_parallel_logits"),
    "weight": ("linear_weight", "student_weight"),
    "bias": ("linear_bias", "student_bias"),
    "teacher_input": ("teacher_hidden",),
}
"""Names of the functions' arguments for tensors that have another name here."""


def _options(member: Member, c: Configuration, whole: Whole) -> dict:
    """Values of the functions' arguments but tensors."""
    wide = accumulation_dtype(DTYPES[c.computed])
    names = "ignore_index", "label_smoothing", "z_loss", "beta", "top_k"
    options = {name: getattr(c, name) for name in names}
    options |= {"temperature": c.temperature, "logit_scale": c.scale, "logit_softcap": c.softcap}
    options |= {"logits_budget": c.budget, "counted_tokens": whole.counted}
    options["vocab_start"] = c.shards[member.rank][0] if c.starts_given else None
    options["vocab_size"] = c.V if c.size_given else None
    # Below every probability but those that underflow: gradients are the same.
    filter = 1e-300 if c.computed == "fp64" else 1e-38
    options["gradient_filter"] = filter if c.filtered else None
    options |= {name: name in c.asked for name in ("mean_logit", "entropy", "argmax", "sum_p_squared")}
    options |= {"process_group": member.group, "tp_group": member.group, "reduction": c.reduction}
    options |= {"sequence_parallel": c.sequence_parallel, "reduce_hidden_grad": c.reduce_hidden_grad}
    options["sequence_dim"] = c.sequence_dim
    return options | {"reduce_dtype": {"": None, "wide": wide, "same": DTYPES[c.computed]}[c.reduce_dtype]}


def call(c: Configuration, options: dict, tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    """What is returned, by name."""
    given = dict.fromkeys(LAID) | options | tensors
    if "offsets" in tensors:
        given["selected"] = tensors["selected"], tensors["offsets"]
    for name, others in _ARGUMENTS.items():
        given |= dict.fromkeys(others, given[name])
    function = parallel_lce.token_loss if c.own else _FUNCTIONS[c.kind]
    parameters = inspect.signature(function).parameters.values()
    given |= {"teacher_logit_scale": None, "teacher_logit_softcap": None}  # the student's
    if c.own_teacher:
        softcap = 7.0 if c.softcap is None else math.inf
        given |= {"teacher_logit_scale": given["logit_scale"] / 2, "teacher_logit_softcap": softcap}
    given |= {"weight": None, "options": None}  # torch's
    given["loss"] = partial(_written_out, c.z_loss)
    found = function(**{p.name: given[p.name] for p in parameters if p.kind not in (p.VAR_KEYWORD, p.VAR_POSITIONAL)})
    if c.own:
        found, metrics = found
        require(metrics == {}, f"metrics {metrics}")
    if isinstance(found, Tensor):
        return {"log_probs" if c.kind == "selected" else "loss": found}
    return {name: value for name, value in vars(found).items() if value is not None}


def _written_out(z_loss: float, statistics: parallel_lce.TokenStatistics) -> Tensor:
    """The cross-entropy of each token, as a function for ``token_loss``."""
    losses = -statistics.target_log_prob
    return losses + z_loss * statistics.lse.square() if z_loss else losses


def _once(member: Member, c: Configuration) -> dict[str, Tensor]:
    whole = make(c)
    tensors = {name: _part(c, member.rank, name, value) for name, value in whole.tensors.items()}
    tensors = {name: laid(value.to(member.device), c.layout(name)).detach() for name, value in tensors.items()}
    before = {name: value.clone() for name, value in tensors.items()}
    leaves = ("input", "weight", "bias") if c.mode == "train" else ()
    wanted = {name: tensors[name].requires_grad_() for name in leaves if name in tensors and name not in c.frozen}
    modes = {"train": nullcontext, "no_grad": torch.no_grad, "inference": torch.inference_mode}
    casting = torch.autocast(member.device.type, dtype=DTYPES[c.autocast]) if c.autocast else nullcontext()
    # Hooks for saved tensors, which return other strides.
    hooks = saved_tensors_hooks(lambda tensor: tensor.detach().clone(), partial(laid, layout="gaps"))
    with modes[c.mode](), casting, hooks if wanted and c.walk.endswith("hooks") else nullcontext():
        results = _forward(c, _options(member, c, whole), tensors, wanted)
    found = {name: value.detach().cpu() for name, value in results.items()}
    if wanted:
        upstream = {name: value.to(member.device) for name, value in whole.upstream.items()}
        found |= _gradients(c, member.rank, wanted, results, upstream)
    for name, value in before.items():
        require(same_bits(value, tensors[name].detach()), f"{name} was written to")
    return found


def _forward(c: Configuration, options: dict, tensors: dict[str, Tensor], wanted: dict[str, Tensor]) -> dict:
    if "checkpoint" not in c.walk or not wanted:
        return call(c, options, tensors)
    names: list[str] = []

    def body(*values: Tensor) -> tuple[Tensor, ...]:
        results = call(c, options, tensors | dict(zip(wanted, values)))
        names[:] = results
        return tuple(results.values())

    values = checkpoint(body, *wanted.values(), use_reentrant="reentrant" in c.walk)
    return dict(zip(names, values))


def _gradients(
    c: Configuration, rank: int, wanted: dict[str, Tensor], results: dict[str, Tensor], upstream: dict[str, Tensor]
) -> dict[str, Tensor]:
    sources = [name for name in upstream if results[name].requires_grad]
    require(sources, "nothing requires a gradient")

    def expand(value: Tensor) -> Tensor:
        """Gradients of sums come expanded."""
        return value.new_ones(()).expand(value.shape) if (value == 1).all() else value

    sums, own = [results[name] for name in sources], [expand(upstream[name]) for name in sources]
    alone, twice = c.walk.removesuffix(" alone"), c.walk.startswith("twice")
    wanted = {alone: wanted[alone]} if alone in wanted else wanted
    found = {}
    for suffix in ("", " again") if twice else ("",):
        if c.walk in ("backward", "reentrant checkpoint"):
            torch.autograd.backward(sums, own)
            gradients = [leaf.grad for leaf in wanted.values()]
        else:
            retain = twice and not suffix
            gradients = torch.autograd.grad(sums, [*wanted.values()], own, retain_graph=retain, allow_unused=True)
        for (name, leaf), gradient in zip(wanted.items(), gradients):
            require(gradient is not None, f"no gradient of {name}")
            form = gradient.dtype, gradient.shape
            require(form == (leaf.dtype, leaf.shape), f"d{name} is {form}")
            gradient = gradient.detach().cpu()
            if name in ("weight", "bias"):
                real = real_rows(c, rank)
                require(c.counted == "wrong" or not gradient[real:].count_nonzero(), f"d{name} of padding is not 0")
                gradient = gradient[:real]
            found[f"d{name}{suffix}"] = gradient.contiguous()
    return found


def assemble(c: Configuration, parts: list[dict[str, Tensor]]) -> dict[str, Tensor]:
    """Whole tensors from what each rank returned, and AssertionError for what should agree to the bit."""
    whole = {}
    order = sorted(range(c.ranks), key=lambda rank: c.shards[rank][0])
    for name, value in parts[0].items():
        base, everyone = name.removesuffix(" again"), [part[name] for part in parts]
        if base in ("dweight", "dbias"):
            whole[name] = torch.cat([everyone[rank] for rank in order if real_rows(c, rank)])
        elif base == "dinput" and not c.reduce_hidden_grad:
            whole[name] = sum(part.double() for part in everyone)
        elif base == "dinput" and (c.kind == "logits" or c.sequence_parallel and c.ranks > 1):
            whole[name] = torch.cat(everyone, -1 if c.kind == "logits" else c.sequence_dim)
        elif base == "loss" and c.kind == "logits" and c.label_smoothing:
            whole[name] = torch.stack(everyone)
        else:
            for rank, part in enumerate(everyone):
                require(same_bits(value, part), f"bits: {name} of rank {rank} differs from rank 0's")
            whole[name] = value
    return whole
