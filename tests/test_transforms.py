"""The public functions under ``torch.func``, with batched gradients, exported, and without values. Second derivatives
and forward mode are refused in words."""

import functools
import io
import weakref

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.autograd import forward_ad, functional
from torch.distributed.tensor import DTensor, Replicate, Shard
from torch.func import functional_call, grad, hessian, jacfwd, jacrev, jvp, vjp, vmap

import parallel_lce
from cases import normal
from parallel_lce import rl
from parallel_lce.distillation import divergence, top_k_divergence
from parallel_lce.run import ops
from tools import arguments_to, on_ranks, shrunk, small, statistics, uncollected
from world import mesh_of

N, V, D = 6, 10, 8
TARGET = torch.tensor([3, -100, 9, 0, 3, 7])
IDS = torch.tensor([1, 3, 3, 8, -1])


def _statistics(x, w):
    found = statistics(x, w, TARGET.to(x.device), selected=TARGET[:, None].to(x.device), top_k=2)
    assert found.argmax.shape == x.shape[:-1] and found.top_ids.shape == (*x.shape[:-1], 2)
    return found.entropy + found.target_log_prob + found.selected_log_prob[:, 0]


def _selected(x, w):
    ids, offsets = torch.stack([TARGET, TARGET.flip(0)], 1).flatten(), torch.arange(0, 2 * N + 1, 2)
    return parallel_lce.selected_log_probs(x, w, (ids.to(x.device), offsets.to(x.device))).square()


def _top_k(x, w):
    ids = IDS.expand(N, 5).to(x.device)
    return top_k_divergence(x, w, ids, -1.0 - ids.to(w.dtype).abs(), reduction="none", temperature=2.0)


def _loss(**options):
    return lambda x, w: parallel_lce.linear_cross_entropy(x, w, TARGET.to(x.device), **options)


def _own(x, w):
    function = lambda s, weight: -weight * s.target_log_prob * s.entropy  # noqa: E731
    options = dict(entropy=True, reduction="mean", logits_budget=0)
    return parallel_lce.token_loss(x, w, TARGET.to(x.device), function, x.new_ones(N), **options)[0]


FUNCTIONS = {
    "none": _loss(reduction="none"),
    "mean": _loss(),
    "recomputed": _loss(reduction="none", logits_budget=0),
    "accumulated": _loss(logits_budget=0),
    "weighted": lambda x, w: _loss(token_weight=x.new_ones(N))(x, w),
    "statistics": _statistics,
    "own": _own,
    "selected": _selected,
    "divergence": lambda x, w: divergence(x, w, x.new_ones(x.shape), w.new_ones(w.shape).cumsum(0), beta=0.5),
    "top-k": _top_k,
    "verl": lambda x, w: torch.stack(rl.linear_cross_entropy(x, w, TARGET.to(x.device), sum_p_squared=True)),
    "nemo": lambda x, w: rl.from_parallel_hidden_states_to_logprobs(
        x[:, None], w, None, TARGET[None].to(x.device), 0, V, None
    ),
    "skyrl": lambda x, w: rl.FusedLinearLogprobTriton.apply(x[None], w, TARGET[None].to(x.device), 0, V, None, None),
    "logits": lambda x, w: parallel_lce.vocab_parallel_cross_entropy(x @ w.t(), TARGET.to(x.device), 0.1),
}
OPERATORS = ("selected", "divergence", "top-k", "logits")


@pytest.fixture(params=FUNCTIONS)
def problem(request, device):
    """A function of x and weight, and both; of blocks so small that strategies differ."""
    with shrunk(2 * V * 4, (4, 4)):
        yield FUNCTIONS[request.param], normal(N, D).float().to(device), normal(V, D, seed=1).float().to(device)


def autograds(function, x, w) -> tuple[torch.Tensor, ...]:
    """The sum of the values, and its gradients."""
    leaves = [t.detach().clone().requires_grad_() for t in (x, w)]
    total = function(*leaves).sum()
    return total.detach(), *torch.autograd.grad(total, leaves)


def test_func(problem):
    """By x, by both, of each of a batch, and the Jacobian. The numbers of plain autograd, to the bit where either is a
    graph's first backward, which alone reads what forward kept."""
    function, x, w = problem
    total = lambda x, w: function(x, w).sum()  # noqa: E731
    value, *expected = autograds(function, x, w)
    assert all(map(torch.equal, grad(total, argnums=(0, 1))(x, w), expected))
    result, pull = vjp(total, x, w)
    assert torch.equal(result, value) and all(map(torch.equal, pull(torch.ones_like(result)), expected))
    twice = torch.stack([x, 2 * x])
    each = [autograds(function, xs, w) for xs in twice]
    assert torch.equal(vmap(total, (0, None))(twice, w), torch.stack([e[0] for e in each]))
    of_weight = vmap(grad(total, argnums=1), (0, None))(twice, w)
    assert torch.equal(of_weight, torch.stack([e[2] for e in each]))
    rows = functional.jacobian(lambda x: function(x, w), x)
    torch.testing.assert_close(jacrev(function)(x, w), rows)


def test_a_call_leaves_nothing_behind(problem):
    """Its graph does not hold its own result, which the garbage collector would have to find."""
    function, x, w = problem
    hidden = 2 * x.clone().requires_grad_()[None]
    with uncollected():
        result, held = vmap(lambda x: function(x, w))(hidden), weakref.ref(hidden)
        del result, hidden
        assert held() is None


def test_a_count_is_not_read_for_each_example(device):
    x, w = normal(2, 8, D).to(device), normal(30, D, seed=1).to(device)
    target = torch.arange(16, device=device).view(2, 8)
    target[0, 3:], target[1, 2:] = -100, -100
    count = parallel_lce.count_tokens(target)
    loss = lambda x, y, **options: parallel_lce.linear_cross_entropy(x, w, y, **options)  # noqa: E731
    found = vmap(functools.partial(loss, counted_tokens=count))(x, target)
    assert torch.equal(found, vmap(loss)(x, target)) and found.isfinite().all()


def test_no_examples(problem):
    function, x, w = problem
    with pytest.raises(ValueError, match="vmap has 0 examples"):
        vmap(function, (0, None))(x.new_empty(0, N, D), w)


def test_a_batch_of_gradients(problem):
    function, x, w = problem
    x = x.clone().requires_grad_()
    values = function(x, w)
    upstream = normal(3, *values.shape, seed=2).to(values)
    expected = torch.stack([torch.autograd.grad(values, x, u, retain_graph=True)[0] for u in upstream])
    found = torch.autograd.grad(values, x, upstream, is_grads_batched=True, retain_graph=True)
    # Only a graph's first backward reads what forward kept.
    torch.testing.assert_close(found[0], expected)
    by_vmap = vmap(lambda u: torch.autograd.grad(values, x, u, retain_graph=True)[0])(upstream)
    torch.testing.assert_close(by_vmap, expected)
    rows = [functional.jacobian(lambda x: function(x, w), x, vectorize=each) for each in (False, True)]
    torch.testing.assert_close(*rows)


def _penalty(f, x, w, *leaves, after: bool = False):
    value = f(x, w)
    if after:
        torch.autograd.grad(value, x, retain_graph=True)
    (dx,) = torch.autograd.grad(value, x, create_graph=True)
    return (value + 10 * dx.square().sum()).backward(inputs=leaves)


def _with_leaves_of_another_graph(f, x, w):
    (dw,) = torch.autograd.grad(f(x * 2, w), w, create_graph=True)
    return torch.autograd.grad(dw.square().sum(), x)


def _by_the_upstream_gradient(f, x, w):
    scale = torch.ones((), device=x.device, requires_grad=True)
    (dx,) = torch.autograd.grad(f(x, w) * scale, x, create_graph=True)
    return torch.autograd.grad(dx.sum(), scale)


SECOND = {
    "grad of grad": lambda f, x, w: grad(lambda x: grad(f)(x, w).square().sum())(x),
    "jacrev of grad": lambda f, x, w: jacrev(grad(f))(x, w),
    "hessian by both": lambda f, x, w: functional.hessian(f, (x, w)),
    "hvp": lambda f, x, w: functional.hvp(lambda x: f(x, w), x, torch.ones_like(x)),
    "jvp": lambda f, x, w: functional.jvp(lambda x: f(x, w), x, torch.ones_like(x)),
    "gradgradcheck": lambda f, x, w: torch.autograd.gradgradcheck(f, (x, w), fast_mode=True),
    "penalty, by x": lambda f, x, w: _penalty(f, x, w, x),
    "penalty, by the weight": lambda f, x, w: _penalty(f, x, w, w),
    "penalty, frozen weight": lambda f, x, w: _penalty(f, x, w.detach(), x),
    "later backward": lambda f, x, w: _penalty(f, x, w, x, after=True),
    "another graph's leaf": _with_leaves_of_another_graph,
    "upstream gradient": _by_the_upstream_gradient,
}
FORWARD_MODE = {
    "jvp": lambda f, x: jvp(f, (x,), (x,)),
    "jacfwd": lambda f, x: jacfwd(f)(x),
    "hessian": lambda f, x: hessian(f)(x),
}


@pytest.mark.parametrize("asked", SECOND)
@pytest.mark.thinned
def test_second_derivatives_are_refused(asked, problem):
    function, x, w = problem
    x, w = (v.double().requires_grad_() for v in (x, w))
    with pytest.raises(RuntimeError, match="gradients of parallel_lce cannot be differentiated twice"):
        SECOND[asked](lambda x, w: function(x, w).square().sum(), x, w)


@pytest.mark.parametrize("compiler", ["eager", "aot_eager"])
@pytest.mark.parametrize("asked", ["penalty, by x", "penalty, by the weight", "upstream gradient"])
@pytest.mark.parametrize("name", ["none", "recomputed", "accumulated", "statistics"])
@pytest.mark.thinned
def test_second_derivatives_of_a_compiled_loss_are_refused(name, asked, compiler, device):
    """By AOTAutograd in its own words. It loses the second derivatives of any function by a view of an input."""
    torch._dynamo.reset()
    x, w = (normal(*size).to(device).requires_grad_() for size in ((N, D), (V, D)))
    loss = torch.compile(lambda x, w: FUNCTIONS[name](x, w).sum(), fullgraph=True, backend=compiler)
    with shrunk(2 * V * 8), pytest.raises(RuntimeError, match="twice|double backward"):
        SECOND[asked](loss, x, w)


def test_a_recorded_gradient_is_the_gradient_and_may_change_in_place(problem):
    """``create_graph=True`` alone changes nothing. A clipped gradient, or one of a hook, is changed in place."""
    function, x, w = problem
    x, w = (v.clone().requires_grad_() for v in (x, w))
    plain = torch.autograd.grad(function(x, w).sum(), [x, w])
    recorded = torch.autograd.grad(function(x * 1.0, w).sum(), [x, w], create_graph=True)
    for a, b in zip(plain, recorded):
        assert torch.equal(a, b) and b.requires_grad and not a.requires_grad
    x.grad, _ = recorded
    torch.nn.utils.clip_grad_norm_([x], 0.1)
    assert x.grad.norm() < 0.11
    hidden = x * 1.0
    hidden.register_hook(lambda g: g.mul_(2))
    twice, *_ = torch.autograd.grad(function(hidden, w).sum(), [x], create_graph=True)
    assert torch.allclose(twice, 2 * plain[0])


@pytest.mark.parametrize("asked", FORWARD_MODE)
def test_forward_mode_is_refused(asked, problem):
    function, x, w = problem
    with pytest.raises(NotImplementedError, match="forward-mode derivatives .*: use vjp, grad or jacrev"):
        FORWARD_MODE[asked](lambda x: function(x, w).sum(), x)


DUALS = {
    parallel_lce.linear_cross_entropy: ("input", "linear_weight", "linear_bias", "token_weight"),
    parallel_lce.token_statistics: ("input", "linear_weight", "linear_bias"),
    parallel_lce.vocab_parallel_cross_entropy: ("vocab_parallel_logits",),
}


@pytest.mark.parametrize("needs_gradient", [False, True])
@pytest.mark.parametrize(("function", "name"), [(f, name) for f, names in DUALS.items() for name in names])
def test_a_tangent_is_refused(function, name, needs_gradient, device):
    """Kernels do not see tangents: the derivative would be 0."""
    t = small(device, N=12, V=40, D=8, bias=True, token_weight=True)
    given = dict(input=t.x, linear_weight=t.weight, linear_bias=t.bias, token_weight=t.token_weight)
    given["vocab_parallel_logits"] = t.x @ t.weight.t()
    given = {each: given[each].detach() for each in DUALS[function]}
    with forward_ad.dual_level():
        dual = forward_ad.make_dual(given[name], torch.ones_like(given[name])).requires_grad_(needs_gradient)
        with pytest.raises(NotImplementedError, match=f"{name} has a tangent"):
            function(**given | {name: dual}, target=t.target)


def test_a_backward_outside_of_autocast(device):
    """It runs again as forward ran."""
    x, w = normal(N, D).float().to(device), normal(V, D, seed=1).float().to(device)
    function = lambda x, w: FUNCTIONS["selected"](x, w).sum()  # noqa: E731
    exported = torch.export.export(_Module(function, w), (x,)).module()
    with torch.autocast(device, torch.bfloat16):
        leaf = x.clone().requires_grad_()
        loss = function(leaf, w)
        _, pull = vjp(function, x, w)
        of_exported = x.clone().requires_grad_()
        other = exported(of_exported)
    expected, found = torch.autograd.grad(loss, leaf)[0], torch.autograd.grad(other, of_exported)[0]
    assert torch.equal(pull(torch.ones_like(loss))[0], expected) and torch.equal(found, expected)
    assert torch.equal(expected, expected.bfloat16().float())


def test_a_statistic_without_a_gradient(device):
    x, w = normal(N, D).to(device), normal(V, D, seed=1).to(device)
    assert not grad(lambda x: parallel_lce.token_statistics(x, w, None).max_logit.sum())(x).any()


@pytest.mark.parametrize("split", [False, True])
@on_ranks(2)
def test_a_functional_call_over_ranks(member, split):
    """A module's loss under sequence parallelism, or with the hidden states of all tokens on each rank."""

    class Head(torch.nn.Module):
        def __init__(self):
            super().__init__()
            shard = normal(V, D, seed=1).float().chunk(2)[member.rank].to(member.device)
            self.weight = torch.nn.Parameter(shard)
            self.loss = parallel_lce.LinearCrossEntropy(process_group=member.group, sequence_parallel=split)

        def forward(self, x):
            return self.loss(x, self.weight, TARGET.to(member.device))

    head, x = Head(), normal(N, D).float().to(member.device)
    x = x.chunk(2)[member.rank] if split else x
    found = grad(lambda p: functional_call(head, p, (x,)))(dict(head.named_parameters()))
    head(x).backward()
    assert torch.equal(found["weight"], head.weight.grad)


# --- exported, and without values ----------------------------------------------------------------------


class _Module(torch.nn.Module):
    def __init__(self, function, w):
        super().__init__()
        self.function, self.w = function, torch.nn.Parameter(w)

    def forward(self, x):
        return self.function(x, self.w)


@pytest.mark.parametrize("name", OPERATORS)
def test_exported(name, device):
    """Saved and loaded. The values and gradients are those of the function."""
    x, w = normal(N, D).float().to(device), normal(V, D, seed=1).float().to(device)
    file = io.BytesIO()
    torch.export.save(torch.export.export(_Module(FUNCTIONS[name], w), (x,)), file)
    file.seek(0)
    module = torch.export.load(file).module()
    found = autograds(lambda x, w: functional_call(module, {"w": w}, (x,)), x, w)
    assert all(map(torch.equal, found, autograds(FUNCTIONS[name], x, w)))
    with pytest.raises(RuntimeError, match="backward of an exported .* cannot be compiled"):
        torch.compile(module, backend="aot_eager")(x)


def test_exported_for_any_number_of_tokens(device):
    class Loss(torch.nn.Module):
        def forward(self, x, w, y):
            return parallel_lce.selected_log_probs(x, w, y[:, None])

    x, w, y = normal(N, D).to(device), normal(V, D, seed=1).to(device), TARGET.clamp(min=0).to(device)
    dynamic = {"x": {0: torch.export.Dim.DYNAMIC}, "w": None, "y": {0: torch.export.Dim.DYNAMIC}}
    module = torch.export.export(Loss(), (x, w, y), dynamic_shapes=dynamic).module()
    assert torch.equal(module(x[:4], w, y[:4]), Loss()(x[:4], w, y[:4]))


@on_ranks(2)
def test_exported_over_ranks(member):
    """The operator finds the group by its name."""

    def among(x, w):
        ids = TARGET[:, None].to(member.device)
        return parallel_lce.selected_log_probs(x, w, ids, process_group=member.group, reduce_dtype=torch.float32)

    x, w = normal(N, D).float().to(member.device), normal(V, D, seed=1).float().to(member.device)
    w = w.chunk(2)[member.rank]
    module = torch.export.export(_Module(among, w), (x,)).module()
    found = autograds(lambda x, w: functional_call(module, {"w": w}, (x,)), x, w)
    assert all(map(torch.equal, found, autograds(among, x, w)))


@pytest.mark.parametrize("kind", ["meta", "fake"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.thinned("dtype", "kind")
def test_tensors_without_values(kind, dtype, problem, device):
    """The shapes, dtypes and devices of results and gradients are those of a call with values."""
    function, x, w = problem
    x, w = (v.to(dtype).requires_grad_() for v in (x, w))

    def results(x, w) -> list[torch.Tensor]:
        with torch.no_grad():
            evaluated = function(x, w)
        value = function(x, w)
        return [evaluated, value, *torch.autograd.grad(value.sum(), (x, w))]

    with arguments_to(ops, "call") as by_operators:
        real = results(x, w)
    assert not by_operators, "values need no operator"
    if kind == "meta":
        found = results(*(v.detach().to("meta").requires_grad_() for v in (x, w)))
    else:
        with FakeTensorMode(allow_non_fake_inputs=True) as mode:
            found = results(*(mode.from_tensor(v) for v in (x, w)))
    for one, other in zip(found, real, strict=True):
        assert (one.shape, one.dtype, one.requires_grad) == (other.shape, other.dtype, other.requires_grad)
        assert one.device.type == ("meta" if kind == "meta" else other.device.type)


@on_ranks(2)
def test_meta_dtensors_have_gradients(member):
    mesh = mesh_of(member.device.type, (2,), ("tp",))

    def placed(tensor, placement):
        return DTensor.from_local(tensor.to("meta"), mesh, [placement], run_check=False)

    x, w = placed(normal(N, D), Replicate()).requires_grad_(), placed(normal(V // 2, D), Shard(0)).requires_grad_()
    ids = placed(TARGET[:, None], Replicate())
    for result in (parallel_lce.selected_log_probs(x, w, ids), divergence(x, w, x, w)):
        assert [g.shape for g in torch.autograd.grad(result.sum(), (x, w))] == [(N, D), (V, D)]


def test_bad_input_without_values_is_refused():
    x, w, y = (torch.zeros(s, device="meta") for s in ((N, D), (V, D), (N,)))
    with pytest.raises(ValueError, match="input has 8 features and linear_weight"):
        parallel_lce.selected_log_probs(x, w[:, 1:], y[:, None].long())
    with pytest.raises(ValueError, match="logit_scale must be a finite Python number, got <object"):
        parallel_lce.selected_log_probs(x, w, y[:, None].long(), logit_scale=object())
