"""The fuzz program: its configurations hold, and planted faults are found."""

from __future__ import annotations

import time

import pytest
import torch

import fuzz
import fuzz_run
from fuzz_draw import LAID, Configuration
from fuzz_judge import judge
from fuzz_run import execute
from parallel_lce.core.collectives import HiddenReduction
from parallel_lce.core.grad_buffers import GradBuffer
from tools import alone

SETTINGS = fuzz.Settings(seed=7, backend="torch", device="cpu")


def _run(c):
    return [execute(alone(), c, "torch")]


def _configurations(count: int, ranks: int = 1, **wanted):
    """The first ``count`` that have these attributes."""
    found, index = [], 0
    while len(found) < count:
        c = SETTINGS.draw(ranks, index)
        index += 1
        if all(getattr(c, name) in values for name, values in wanted.items()):
            found.append(c)
    return found


@pytest.mark.parametrize("kind", ["loss", "statistics", "logits", "selected", "divergence"])
def test_configurations_of_one_process_hold(kind):
    for c in _configurations(24, kind=(kind,)):
        _, finding = fuzz.examine(c, _run)
        assert finding is None, f"{c}\n{finding}"


@pytest.mark.parametrize("ranks", [2, 3])
def test_configurations_over_ranks_hold(ranks, worlds):
    world = worlds(ranks)
    for index in range(40):
        c = SETTINGS.draw(ranks, index)
        _, finding = fuzz.examine(c, lambda c: world.run(execute, c, "torch", timeout=60))
        assert finding is None, f"{SETTINGS.command(ranks, index)}\n{finding}"


_PLAIN = ("plain",) * len(LAID)
# More than one rounding must be allowed for here, and PyTorch's own path has as many.
ALLOWED = {
    "a gradient that is cast twice": Configuration(
        *("selected", 1, (46,), 64, 100, ((0, 100),), 4),
        **dict(dtype="bf16", autocast="fp16", bias="plain", no_target=True),
        **dict(reduction="none", selected="sets", K=9),
    ),
    "a sum of equal terms in float64": Configuration(
        *("statistics", 2, (14,), 34, 801, ((0, 266), (266, 535)), 0),
        **dict(dtype="fp64", starts_given=True, size_given=True, layouts=("plain", "expanded", *_PLAIN[2:])),
        **dict(reduction="none", asked=("mean_logit",), mixture=("mean_logit",)),
    ),
    "groups whose gradient overflows": Configuration(
        *("loss", 1, (120,), 121, 210, ((0, 210),), 0),
        **dict(dtype="bf16", sharpness=0.3, sure="some", miss=0.007, bias="masked", softcap=1e6),
        **dict(reduction="sum", label_smoothing=1.0),
        **dict(token_weight="zero", weight_dtype="float16", weight_learns=True),
    ),
}


@pytest.mark.parametrize("name", ALLOWED)
def test_the_judge_allows(name, worlds):
    c = ALLOWED[name]
    _, finding = fuzz.examine(c, _run if c.ranks == 1 else lambda c: worlds(c.ranks).run(execute, c, "torch"))
    assert finding is None, finding


def _first_row_off(tensor: torch.Tensor, by: float) -> torch.Tensor:
    """One percent off in the row that is largest, in place."""
    if tensor.numel():
        # Tokens without a loss have NaN.
        rows = tensor.reshape(len(tensor), -1).double().norm(dim=1).nan_to_num(0.0)
        tensor[int(rows.argmax())] *= 1 + by
    return tensor


def _faults(monkeypatch, where: str, by: float) -> None:
    if where == "dinput":
        wait = HiddenReduction.wait
        monkeypatch.setattr(HiddenReduction, "wait", lambda self: _first_row_off(wait(self), by))
    else:
        deliver = GradBuffer.deliver
        dimensions = 2 if where == "dweight" else 1

        def faulty(self):
            found = deliver(self)
            return _first_row_off(found, by) if found.dim() == dimensions else found

        monkeypatch.setattr(GradBuffer, "deliver", faulty)


# Every entry of low-precision gradients may be rounded twice, 0.1 % in fp16 and 0.8 % in bf16 together, which in a
# row whose terms nearly cancel is more of their sum.
FAULTS = {"wide": (("fp64", "fp32"), 0.01, 0.95), "fp16": (("fp16",), 0.01, 0.8), "bf16": (("bf16",), 0.04, 0.8)}


@pytest.mark.parametrize("precision", FAULTS)
@pytest.mark.parametrize("where", ["dinput", "dweight", "dbias"])
@pytest.mark.thinned
def test_one_wrong_row_of_a_gradient_is_found(where, precision, monkeypatch):
    dtypes, by, share = FAULTS[precision]
    wanted = dict(
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
    found = judged = 0
    with monkeypatch.context() as patches:
        _faults(patches, where, by)
        for c in _configurations(40, **wanted):
            verdicts, finding = fuzz.examine(c, _run)
            mine = [v for v in verdicts if v.name.removesuffix(" again") == where]
            # What is 0, lies beneath fp16's numbers or sums to nearly nothing has no percent.
            if not mine or max(v.truth for v in mine) < 1e-3:
                continue
            judged += 1
            found += finding is not None and where in finding.detail
            assert finding is None or where in finding.detail
    assert judged >= 12
    assert found >= share * judged, f"{found} of {judged}"


def _largest_off(value: torch.Tensor) -> torch.Tensor:
    """The finite element that is largest in magnitude, a thousandth off; ids in another order."""
    if not value.is_floating_point():
        return value.flip(-1)
    size = value.detach().abs().reshape(-1).nan_to_num(0.0, 0.0, 0.0)
    factor = torch.ones_like(size)
    factor[int(size.argmax())] = 1.001
    return value * factor.view(value.shape)


MODEST = ("", "plain", "masked")
FAULTY_RESULTS = {
    "sum_p_squared": "statistics",
    "selected_log_prob": "statistics",
    "top_logits": "statistics",
    "top_ids": "statistics",
    "log_probs": "selected",
    "loss": "divergence",
}


@pytest.mark.parametrize("name", FAULTY_RESULTS)
@pytest.mark.thinned
def test_one_wrong_result_is_found(name, monkeypatch):
    call, judged = fuzz_run.call, []

    def faulty(c, options, tensors):
        results = call(c, options, tensors)
        if name in results and c.counted != "wrong":
            before, results[name] = results[name], _largest_off(results[name])
            judged.append(not torch.equal(before.nan_to_num(), results[name].nan_to_num()))
        return results

    monkeypatch.setattr(fuzz_run, "call", faulty)
    missed, faults = [], 0
    kinds = dict(kind=(FAULTY_RESULTS[name],), dtype=("fp64", "fp32"), autocast=("",), sharpness=(0.3, 1.0, 3.0))
    if name.startswith("top"):
        kinds["top_k"] = range(2, 2000)
    if name == "selected_log_prob":
        kinds["selected"] = ("ids", "sets")
    # A divergence of masked entries is huge, and so are its roundings.
    kinds |= dict(repeat=(False,), offset=(0.0,), walk=("backward",), bias=MODEST, teacher_bias=MODEST)
    for c in _configurations(20, **kinds):
        judged.clear()
        _, finding = fuzz.examine(c, _run)
        faults += any(judged)
        if any(judged) and (finding is None or name not in finding.detail):
            missed.append(c)
    assert faults >= 4
    assert not missed, f"{len(missed)}, {missed[0]}"


def _sure(**wanted):
    """Configurations whose tokens are so sure that a low-precision p would say nothing of 1 - p."""
    wanted |= dict(mode=("train",), frozen=((),), walk=("backward",), sure=("some", "all"), counted=("",))
    return [c for c in _configurations(12, dtype=("bf16", "fp16"), autocast=("",), **wanted) if c.miss < 1e-3]


@pytest.mark.parametrize("mixture", ["target_log_prob", "entropy", "selected_log_prob"])
@pytest.mark.thinned
def test_a_p_that_is_rounded_beside_1_is_found(mixture, monkeypatch):
    """The gradients of tokens that are not sure hide it."""
    gradients, moved = fuzz_run._gradients, []

    def faulty(c, rank, wanted, results, upstream):
        found = gradients(c, rank, wanted, results, upstream)
        weight, x = (wanted[name].detach().double() for name in ("weight", "input"))
        weight = weight[: c.V]  # without padding
        off = c.scale * torch.finfo(found["dinput"].dtype).eps / 8 * weight[(x @ weight.t()).argmax(-1)]
        moved.append(bool(off.any()))
        found["dinput"] = (found["dinput"].double() + off).to(found["dinput"].dtype)
        return found

    monkeypatch.setattr(fuzz_run, "_gradients", faulty)
    several = _sure(kind=("statistics",), mixture=((mixture,),), scale_dtype=("",), upstream=("random", "ones"))
    said = [finding.detail if finding else "" for _, finding in (fuzz.examine(c, _run) for c in several)]
    assert len(said) >= 4 and all(moved)
    assert all("dinput row" in each for each in said), said
    # Some have too few of these tokens for a group.
    assert sum("dinput of sure tokens" in each for each in said) >= 0.6 * len(said), said


def test_a_configuration_is_the_same_alone_and_within_a_run(capsys):
    drawn = []

    def run(c):
        drawn.append(c)
        if len(drawn) == 5:
            raise ValueError("planted")
        return _run(c)

    assert fuzz.fuzz(SETTINGS, 1, range(4, 12), run) == 1
    said = capsys.readouterr().out.splitlines()
    assert said == [f"{SETTINGS.command(1, 8)}  # exception: ValueError: planted", said[-1]]
    assert said[-1].endswith("configuration 11: 1 findings in 8")
    assert drawn[3] == SETTINGS.draw(1, 7) and drawn[3] != SETTINGS.draw(2, 7)
    assert fuzz.main(["--only", "7", "--ranks", "1", "--seed", "7"]) == 0
    said = capsys.readouterr().out
    assert str(drawn[3]) in said
    assert sum(line.startswith("ok ") for line in said.splitlines()) == len(judge(drawn[3], _run(drawn[3])))


def test_what_kind_of_finding():
    c = _configurations(1, ranks=2, kind=("loss",), reduction=("none",), mode=("no_grad",))[0]
    exact = _run(_configurations(1, kind=("loss",), mode=("no_grad",))[0])[0]
    part = {"loss": torch.zeros(c.shape, dtype=torch.float64 if c.computed == "fp64" else torch.float32)}
    other = {"loss": part["loss"] + 1}
    assert exact.keys() == part.keys()
    kinds = {"bits": lambda c: [part, other], "wrong": lambda c: [other, other], "exception": lambda c: 1 / 0}
    for kind, run in kinds.items():
        assert fuzz.examine(c, run)[1].kind == kind


def _sleeps(member, c, backend):
    time.sleep(600)


def test_after_a_hang_there_are_new_processes(monkeypatch):
    run = fuzz.Ranks(1, SETTINGS, timeout=60)
    try:
        c = SETTINGS.draw(1, 0)
        assert fuzz.examine(c, run)[1] is None
        with monkeypatch.context() as patches:
            patches.setattr(fuzz_run, "execute", _sleeps)
            patches.setattr(run, "_timeout", 0.5)
            assert fuzz.examine(c, run)[1].kind == "hang"
        assert fuzz.examine(c, run)[1] is None
    finally:
        run.close()
