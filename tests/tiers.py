"""Which tests are slow: those marked ``slow``; and of those marked ``thinned``, most combinations of parameters."""

import dataclasses
from collections import Counter, defaultdict
from collections.abc import Iterator

import pytest


def slow_of(items: list[pytest.Item]) -> Iterator[pytest.Item]:
    thinned = defaultdict(list)
    for item in items:
        if item.get_closest_marker("slow"):
            yield item
        elif item.get_closest_marker("thinned"):
            test, _, _ = item.nodeid.partition("[")
            thinned[test, item.callspec.params.get("device")].append(item)
    for combinations in thinned.values():
        kept = _covering(combinations)
        yield from (item for item in combinations if item not in kept)


def _covering(combinations: list[pytest.Item]) -> list[pytest.Item]:
    """Few of a test's combinations, in which every value occurs: of each parameter, or of those that its mark names."""
    names = combinations[0].get_closest_marker("thinned").args
    values = {item: {*_values(item.callspec.params, names)} for item in combinations}
    used: Counter[tuple[str, str]] = Counter()
    kept = []
    while missing := {value for each in values.values() for value in each if not used[value]}:
        # The item with the most missing values. Of several, the one whose values have been used least.
        best = max(values, key=lambda item: (len(values[item] & missing), -sum(used[value] for value in values[item])))
        kept.append(best)
        used.update(values[best])
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
