"""The tests that a run leaves out. By default those marked ``slow``; and of the combinations of parameters of a test
marked ``thinned`` all but a few, in which each value occurs. With ``--all`` as many combinations of a thinned test run
as are needed for each pair of values to occur."""

import dataclasses
from collections import Counter, defaultdict
from collections.abc import Iterator
from itertools import combinations

import pytest


def slow_of(items: list[pytest.Item]) -> Iterator[pytest.Item]:
    yield from (item for item in items if item.get_closest_marker("slow"))
    yield from _beyond([item for item in items if not item.get_closest_marker("slow")], 1)


def repeated_pairs_of(items: list[pytest.Item]) -> Iterator[pytest.Item]:
    yield from _beyond(items, 2)


def _beyond(items: list[pytest.Item], size: int) -> Iterator[pytest.Item]:
    """The items of thinned tests that are not needed for every ``size`` values to occur together."""
    thinned = defaultdict(list)
    for item in items:
        if item.get_closest_marker("thinned"):
            test, _, _ = item.nodeid.partition("[")
            thinned[test, item.callspec.params.get("device")].append(item)
    for of_test in thinned.values():
        kept = _covering(of_test, size)
        yield from (item for item in of_test if item not in kept)


def _covering(items: list[pytest.Item], size: int) -> list[pytest.Item]:
    """Few of a test's items in which all sets of ``size`` values occur: of each parameter, or of those that its mark
    names."""
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
        if names and name not in names:
            continue
        if dataclasses.is_dataclass(value):
            yield from _values(vars(value))
        else:
            yield name, repr(value)
