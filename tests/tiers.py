"""The tests that a run leaves out. By default those marked ``slow``; and of the combinations of parameters of a test
marked ``thinned`` all but a few, in which each value occurs. With ``--all`` as many combinations of a thinned test run
as are needed for each pair of values to occur."""

import dataclasses
from collections import Counter, defaultdict
from collections.abc import Iterator
from itertools import combinations

import pytest


def left_out(items: list[pytest.Item], everything: bool) -> set[pytest.Item]:
    """Of these items those that a run, with ``--all`` or without, leaves out."""
    slow = {item for item in items if item.get_closest_marker("slow") and not everything}
    thinned = defaultdict(list)
    for item in items:
        if item.get_closest_marker("thinned") and item not in slow:
            test, _, _ = item.nodeid.partition("[")
            thinned[test, item.callspec.params.get("device")].append(item)
    return slow.union(*({*each} - {*_covering(each, 2 if everything else 1)} for each in thinned.values()))


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
        if dataclasses.is_dataclass(value) and not names:
            yield from _values(vars(value))
        elif not names or name in names:
            yield name, repr(value)
