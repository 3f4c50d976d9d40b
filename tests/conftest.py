"""Fixtures: devices, and process groups that live as long as the session.

And what a run leaves out. By default tests marked ``slow``; and of the combinations of parameters of a test marked
``thinned`` all but a few, in which each value occurs. With ``--all`` each pair of values."""

import dataclasses
import gc
import os
from collections import Counter, defaultdict
from collections.abc import Iterator
from itertools import combinations

os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
# Test processes share the cores. PyTorch and NumPy read this when they are imported.
os.environ.setdefault("OMP_NUM_THREADS", "1")

import pytest
import torch

if not torch.cuda.is_available():
    # Kernels then run on the CPU; Triton reads this when they are imported.
    os.environ.setdefault("TRITON_INTERPRET", "1")

from tools import chosen_backend
from world import World, configure

configure()


def pytest_addoption(parser) -> None:
    parser.addoption(
        "--all", action="store_true", help="run the slow tests too, and of thinned tests each pair of parameter values"
    )


@pytest.hookimpl(trylast=True)  # -k and -m have selected by then
def pytest_collection_modifyitems(config, items: list[pytest.Item]) -> None:
    """Whoever selects GPU tests, slow or thinned tests or single tests gets all of them."""
    marks = config.option.markexpr
    on_gpu = {item for item in items if item.get_closest_marker("gpu")}
    asked_for = on_gpu if "gpu" in marks else set()
    without = set() if torch.cuda.is_available() else on_gpu - asked_for
    if not ("slow" in marks or "thinned" in marks or any("::" in argument for argument in config.args)):
        without |= _left_out([item for item in items if item not in without | asked_for], config.option.all)
    config.hook.pytest_deselected(items=[*without])
    # A world of another release imports it anew, and ends where a test wants another one.
    items[:] = sorted([item for item in items if item not in without], key=_other_release)


def _other_release(item: pytest.Item) -> str:
    return item.callspec.params["release"] if item.originalname.startswith("test_other_releases") else ""


def _left_out(items: list[pytest.Item], everything: bool) -> set[pytest.Item]:
    """Of these items those that a run, with ``--all`` or without, leaves out."""
    slow = {item for item in items if item.get_closest_marker("slow") and not everything}
    thinned = defaultdict(list)
    for item in items:
        if item.get_closest_marker("thinned") and item not in slow:
            test, _, _ = item.nodeid.partition("[")
            thinned[test, item.callspec.params.get("device")].append(item)
    return slow.union(*({*each} - {*_covering(each, 2 if everything else 1)} for each in thinned.values()))


def _covering(items: list[pytest.Item], size: int) -> list[pytest.Item]:
    """Few of a test's items with all sets of ``size`` values: of each parameter, or of those that its mark names."""
    names = items[0].get_closest_marker("thinned").args
    values = {item: sorted(_values(item.callspec.params, names)) for item in items}
    sets = {item: {*combinations(own, min(size, len(own)))} for item, own in values.items()}
    used: Counter[tuple] = Counter()
    kept = []
    while missing := {one for each in sets.values() for one in each if not used[one]}:
        # The item with the most missing sets. Of several, the one whose sets have been used least.
        best = max(sets, key=lambda item: (len(sets[item] & missing), -sum(used[one] for one in sets[item])))
        kept.append(best)
        used.update(sets[best])
    return kept


def _values(parameters: dict[str, object], names: tuple[str, ...] = ()) -> Iterator[tuple[str, str]]:
    """Names and values. Each field of a dataclass counts as a parameter."""
    for name, value in parameters.items():
        if dataclasses.is_dataclass(value) and not names:
            yield from _values(vars(value))
        elif not names or name in names:
            yield name, repr(value)


@pytest.fixture(autouse=True, scope="module")
def _nothing_old_is_collected() -> None:
    """PyTorch's modules are hundreds of thousands of objects. Tests collect garbage, of which none is theirs."""
    gc.collect()
    gc.freeze()


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_auto_num_workers(config) -> int:
    """Worker processes of ``-n auto``. On GPUs, whose memory tests measure, one test runs at a time."""
    files_are_named = config.args_source is config.ArgsSource.ARGS
    return 0 if files_are_named or torch.cuda.is_available() else 2


DEVICES = [pytest.param("cpu", id="cpu"), pytest.param("cuda", id="cuda", marks=pytest.mark.gpu)]


@pytest.fixture(params=DEVICES)
def device(request) -> str:
    """Each test body runs on the CPU and, with ``-m gpu``, on a GPU."""
    if request.param == "cuda" and not torch.cuda.is_available():
        pytest.skip("needs a CUDA device, and there is none")
    return request.param


@pytest.fixture
def kernels(device) -> None:
    """What runs kernels: a GPU, or Triton's interpreter on the CPU."""
    pytest.importorskip("triton", reason="needs triton")
    if device == "cpu" and os.environ.get("TRITON_INTERPRET") != "1":
        pytest.skip("kernels are compiled for this machine's GPU, not interpreted")


@pytest.fixture(params=["torch", "triton"])
def backend(request) -> str:
    """Each test body runs in either backend."""
    if request.param == "triton":
        request.getfixturevalue("kernels")
    with chosen_backend(request.param):
        yield request.param


@pytest.fixture(scope="session")
def _worlds():
    worlds: dict[tuple[int, str, str | None], World] = {}
    yield worlds
    for world in worlds.values():
        if world.alive:
            world.close()


@pytest.fixture
def worlds(_worlds, device):
    """``worlds(P)``: P processes of the test's device, started at first use. ``worlds(P, path)``: such that import from
    the folder ``path`` first. Those of another path end."""

    def get(ranks: int, path: str | None = None) -> World:
        shared = os.environ.get("PARALLEL_LCE_TEST_SHARED_GPU") == "1"
        if device == "cuda" and ranks > torch.cuda.device_count() and not shared:
            pytest.skip(f"needs {ranks} GPUs, and there are {torch.cuda.device_count()}")
        for key in list(_worlds):
            if key[2] not in (None, path):
                _worlds.pop(key).close()
        known = _worlds.get((ranks, device, path))
        if known is None or not known.alive:
            known = _worlds[ranks, device, path] = World(ranks, device, path)
        return known

    return get
