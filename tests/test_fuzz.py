"""The fuzz program: its configurations hold in both backends, and planted faults are found."""

import itertools

import pytest
import torch

import fuzz
import fuzz_run
from fuzz_run import execute
from fuzz_truth import bounds, dense
from fuzz_values import make, operands
from tools import alone, everywhere

SETTINGS = fuzz.Settings(seed=7, backend="torch", device="cpu")
KINDS = ["loss", "statistics", "logits", "selected", "divergence"]


def _run(c):
    return [execute(alone(), c, "torch")]


def _configurations(count: int, **wanted):
    """The first ``count`` of one process that have these attributes."""
    drawn = (SETTINGS.draw(1, index) for index in itertools.count())
    fits = (c for c in drawn if all(getattr(c, name) in values for name, values in wanted.items()))
    return [*itertools.islice(fits, count)]


@pytest.fixture
def draws(pytestconfig):
    """The number of configurations: half as many again with ``--all``."""
    return lambda count: count * 3 // 2 if pytestconfig.option.all else count


def _hold(settings, ranks, count, wanted, run) -> None:
    """The first ``count`` configurations over ``ranks`` that are wanted have no finding."""
    drawn = ((index, settings.draw(ranks, index)) for index in itertools.count())
    for index, c in itertools.islice(((index, c) for index, c in drawn if wanted(c)), count):
        _, finding = fuzz.examine(c, run)
        assert not finding, f"{settings.command(ranks, index)}\n{finding}"


@pytest.mark.parametrize("kind", KINDS)
def test_configurations_of_one_process_hold(kind):
    _hold(SETTINGS, 1, 24, lambda c: c.kind == kind, _run)


WANTED = {
    "any": lambda c: True,
    # Entries that -inf or a finite number excludes, windows of them.
    "masked": lambda c: {c.bias, c.teacher_bias} & {"masked", "low"} and c.N > 1,
    # Tokens that are sure of an entry: 1 - p must keep its digits.
    "sure": lambda c: c.sure and c.dtype in ("bf16", "fp16"),
    # Gradients that are differences of nearly equal logits.
    "flat": lambda c: c.sharpness in (0.01, 0.03, 0.1, 0.2) and c.dtype in ("bf16", "fp16") and len(c.mixture) == 1,
    "twice": lambda c: c.walk.startswith("twice") and c.mode == "train",
    # A sequence along the second dimension.
    "batch first": lambda c: c.sequence_dim == 1,
}


@pytest.mark.parametrize(
    ("wanted", "ranks", "count"), [("any", 2, 30), ("any", 3, 30), ("batch first", 2, 20), ("flat", 2, 6)]
)
def test_configurations_over_ranks_hold(wanted, ranks, count, worlds, draws):
    run = lambda c: worlds(ranks).run(execute, c, "torch", timeout=60)  # noqa: E731
    _hold(SETTINGS, ranks, draws(count), WANTED[wanted], run)


@pytest.mark.parametrize(("ranks", "count"), [(1, 6), (2, 3), pytest.param(4, 5, marks=pytest.mark.slow)])
@pytest.mark.parametrize("kind", ["loss", "statistics", "selected", "divergence"])
@pytest.mark.parametrize("wanted", ["any", "masked", "sure", "twice"])
def test_configurations_of_kernels_hold(wanted, kind, ranks, count, kernels, worlds, device, draws):
    """More of what few draws have."""
    settings = fuzz.Settings(seed=13, backend="triton", device=device)
    run = lambda c: everywhere(worlds, device, ranks, execute, c, "triton")  # noqa: E731
    _hold(settings, ranks, draws(count), lambda c: c.kind == kind and WANTED[wanted](c), run)


def _findings(monkeypatch, name: str, fault, configurations):
    """Verdicts and finding of each configuration where ``fault(c, value)`` moves what has this name, in place."""
    once, moved = fuzz_run._once, []

    def faulty(member, c):
        found = once(member, c)
        for each in {name, f"{name} again"} & {*found}:
            before = found[each].clone()
            fault(c, found[each])
            moved.append(not torch.equal(before.nan_to_num(), found[each].nan_to_num()))
        return found

    with monkeypatch.context() as patches:
        patches.setattr(fuzz_run, "_once", faulty)
        for c in configurations:
            moved.clear()
            verdicts, finding = fuzz.examine(c, _run)
            if any(moved):
                yield c, verdicts, finding


# Every entry of low-precision gradients may be rounded twice, 0.1 % in fp16 and 0.8 % in bf16 together, which in a
# row whose terms nearly cancel is more of their sum.
FAULTS = {"wide": (("fp64", "fp32"), 0.01, 0.95), "fp16": (("fp16",), 0.01, 0.8), "bf16": (("bf16",), 0.04, 0.8)}


@pytest.mark.parametrize("precision", FAULTS)
@pytest.mark.parametrize("where", ["dinput", "dweight", "dbias"])
@pytest.mark.thinned
def test_one_wrong_row_of_a_gradient_is_found(where, precision, monkeypatch):
    dtypes, by, share = FAULTS[precision]
    several = _configurations(
        24,
        kind=("loss", "statistics", "divergence"),
        dtype=dtypes,
        autocast=("",),
        mode=("train",),
        frozen=((),),
        bias=("plain", "masked") if where == "dbias" else ("", "plain"),
        scale=(1.0, 0.5, -1.5),
        # Logits that are alike are rounded alike, and their gradient's terms cancel.
        sharpness=(0.3, 1.0, 3.0, 10.0),
        offset=(0.0,),
        softcap=(None, 5.0, 30.0, 50.0),
        upstream=("random", "ones"),
        walk=("backward", "twice", "save_on_cpu", "gapped hooks"),
    )

    def largest_row_off(c, gradient):
        # Tokens without a loss have NaN.
        rows = gradient.reshape(len(gradient), -1).double().norm(dim=1).nan_to_num(0.0)
        gradient[int(rows.argmax())] *= 1 + by

    said = []
    for _, verdicts, finding in _findings(monkeypatch, where, largest_row_off, several):
        assert not finding or where in finding
        # What is 0, lies beneath fp16's numbers or sums to nearly nothing has no percent.
        if max([v.truth for v in verdicts if v.name.removesuffix(" again") == where], default=0.0) >= 1e-3:
            said.append(where in finding)
    assert len(said) >= 12
    assert sum(said) >= share * len(said), said


FAULTY_RESULTS = {
    "sum_p_squared": dict(kind=("statistics",)),
    "selected_log_prob": dict(kind=("statistics",), selected=("ids", "sets")),
    "top_logits": dict(kind=("statistics",), top_k=range(2, 2000)),
    "top_ids": dict(kind=("statistics",), top_k=range(2, 2000)),
    "log_probs": dict(kind=("selected",)),
    # Of flatter ones less than a thousandth is left beneath the roundings.
    "loss": dict(kind=("divergence",), temperature=(0.7, 1.0, 3.0), beta=(0.0, 0.5, 1.0), scale=(1.0, -1.5))
    | dict(softcap=(None, 30.0, 50.0), scale_dtype=("",), temperature_dtype=("",)),
}


@pytest.mark.parametrize("name", FAULTY_RESULTS)
@pytest.mark.thinned
def test_one_wrong_result_is_found(name, monkeypatch):
    def largest_off(c, value):
        """The finite element that is largest in magnitude, a thousandth off; ids in another order."""
        if c.counted == "wrong":
            return
        if not value.is_floating_point():
            value[:] = value.flip(-1)
        elif value.numel():
            value.view(-1)[int(value.abs().reshape(-1).nan_to_num(0.0, 0.0, 0.0).argmax())] *= 1.001

    # A divergence of masked entries is huge, and so are its roundings.
    modest = dict.fromkeys(("bias", "teacher_bias"), ("", "plain", "masked"))
    modest |= dict(dtype=("fp64", "fp32"), autocast=("",), sharpness=(0.3, 1.0, 3.0), offset=(0.0,))
    several = _configurations(20, repeat=(False,), walk=("backward",), **modest, **FAULTY_RESULTS[name])
    found = [(c, name in finding) for c, _, finding in _findings(monkeypatch, name, largest_off, several)]
    assert len(found) >= 4
    assert all(right for _, right in found), [c for c, right in found if not right][0]


@pytest.mark.parametrize("mixture", ["target_log_prob", "entropy", "selected_log_prob"])
@pytest.mark.thinned
def test_a_p_that_is_rounded_beside_1_is_found(mixture, monkeypatch):
    """The gradients of tokens that are not sure hide it."""

    def rounded(c, gradient):
        weight, x = (make(c).tensors[name].double() for name in ("weight", "input"))
        gradient += c.scale * torch.finfo(gradient.dtype).eps / 8 * weight[(x @ weight.t()).argmax(-1)]

    # So sure that a low-precision p would say nothing of 1 - p.
    sure = dict(kind=("statistics",), mixture=((mixture,),), sure=("some", "all"), dtype=("bf16", "fp16"))
    sure |= dict(mode=("train",), frozen=((),), walk=("backward",), counted=("",), autocast=("",))
    several = _configurations(12, scale_dtype=("",), upstream=("random", "ones"), **sure)
    several = [c for c in several if c.miss < 1e-3]
    said = [finding for *_, finding in _findings(monkeypatch, "dinput", rounded, several)]
    assert len(said) == len(several) >= 4
    assert all("dinput row" in each for each in said), said
    # Some have too few of these tokens for a group.
    assert sum("dinput of sure tokens" in each for each in said) >= 0.6 * len(said), said


def test_exponentials_that_are_rounded_where_logits_are_nearly_equal_are_found(monkeypatch):
    """Roundings of p, of which a hundredth is the gradient. Row by row they are within what roundings may do."""

    def rounded(c, gradient):
        weight, x = (make(c).tensors[name].double() for name in ("weight", "input"))
        p = (x @ weight.t()).softmax(-1)
        gradient += make(c).upstream["entropy"].double()[..., None] * ((p.to(gradient.dtype) - p) @ weight)

    flat = dict(kind=("statistics",), mixture=(("entropy",),), sharpness=(0.01, 0.03), dtype=("bf16",))
    flat |= dict(mode=("train",), frozen=((),), walk=("backward",), counted=("",), autocast=("",), softcap=(None,))
    several = _configurations(3, **flat, D=range(16, 99), upstream=("random", "ones"), scale_dtype=("",))
    said = [finding for *_, finding in _findings(monkeypatch, "dinput", rounded, several)]
    assert len(said) == 3 and all("dinput of flat tokens" in each for each in said), said


def test_rounded_exponentials_are_allowed():
    """The gradient of the sum of squares is p (p - sum) of saved exponentials. Here one rounding of p, in both factors,
    and one of the gradient move an entry of dbias further than they usually do."""
    c = fuzz.Settings(43, "triton", "cuda").draw(2, 329)
    assert c.asked == ("sum_p_squared",) and c.dtype == "bf16"
    o = operands(c, make(c))
    truth = dense(c, o, torch.float64, torch.float64)
    upstream, z = o.upstream["sum_p_squared"].double()[:, None] * o.layer.scale.double(), truth["z"]
    e = (z - z.amax(1, keepdim=True)).exp()

    def gradient(e, total):
        p, exact = e / total, truth["log_p"].exp()
        return 2 * upstream * p * (p - exact.square().sum(1, keepdim=True)) * ~o.quiet[:, None]

    total = e.sum(1, keepdim=True)
    torch.testing.assert_close(gradient(e, total), truth["G"])
    rounded = gradient(e.bfloat16().double(), total).bfloat16().double()
    error = (rounded.sum(0) - truth["dbias"]).abs()
    assert error[25] > 0.015 * truth["dbias"][25].abs()
    allowed = bounds(c, o, truth)["dbias"]
    # Where only one factor moves the bound is as large as the error.
    assert (error <= allowed).all() and 2 * error[25] <= allowed[25]


def test_a_probability_that_underflows_is_allowed():
    """Of one token, times an upstream gradient and a scale of thousands. On a GPU fp32 has no numbers below 2^-126."""
    c = fuzz.Settings(905, "triton", "cuda").draw(4, 819)
    assert c.upstream == "large" and c.scale == 30
    o = operands(c, make(c))
    truth = dense(c, o, torch.float64, torch.float64)
    underflows = truth["log_p"].exp() < torch.finfo(torch.float32).tiny
    underflows[torch.arange(c.N), o.target] = False
    error = (truth["G"] * underflows).sum(0).abs()
    assert error[156] > 1.7e-34
    allowed = bounds(c, o, truth)["dbias"]
    assert (error <= allowed).all() and error[156] > 1e-4 * allowed[156]


def test_a_run_prints_findings_as_commands_that_show_them(capsys, monkeypatch):
    drawn = []

    def run(self, c):
        drawn.append(c)
        if len(drawn) == 5:
            raise ValueError("planted")
        return _run(c)

    monkeypatch.setattr(fuzz.Ranks, "__call__", run)
    assert fuzz.main("--first 4 --count 8 --ranks 1 --seed 7".split()) == 1
    said = capsys.readouterr().out.splitlines()
    assert said == [f"{SETTINGS.command(1, 8)}  # ValueError: planted", said[-1]]
    assert said[-1].endswith("configuration 11: 1 findings in 8")
    assert drawn == [SETTINGS.draw(1, index) for index in range(4, 12)] and drawn[0] != SETTINGS.draw(2, 4)
    index = next(index for index, c in enumerate(drawn, 4) if c.kind == "loss" and c.counted != "wrong")
    assert fuzz.main(f"--only {index} --ranks 1 --seed 7".split()) == 0
    shown = capsys.readouterr().out
    assert str(drawn[index - 4]) in shown and "\nok    loss" in shown


def test_ranks_that_differ_and_results_that_are_off_are_found():
    c = next(c for c in (SETTINGS.draw(2, index) for index in itertools.count()) if c.kind == "loss" and not c.N == 0)
    part = {"loss": torch.zeros(c.shape if c.reduction == "none" else (), dtype=torch.float32)}
    assert "bits: loss of rank 1 differs" in fuzz.examine(c, lambda c: [part, {"loss": part["loss"] + 1}])[1]
    assert "loss" in fuzz.examine(c, lambda c: [part, part])[1]
