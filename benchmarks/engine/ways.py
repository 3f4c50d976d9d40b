"""Several ways to compute the same: a row for each, with its time, its memory, and why it is refused if it is."""

from collections.abc import Callable
from functools import partial
from typing import Any

from torch import Tensor

from .peak_memory import peak_memory
from .report import NONE, RATIO, new_table, spread_ms, spread_text
from .team import NotMeasured, Team, release
from .timing import interleaved, ratios, timer

LOSS_LIMIT = 1e-3  # difference from the first way's loss, relative to the larger of it and 1


def measure(calls: dict[str, Callable], team: Team, rounds: int, judge: Callable[..., dict]) -> list[dict]:
    """A row for each way: `seconds` of each round; `peak`, bytes during the call, and `kept`, those of them that its
    result holds; and what `judge(way, result, the first way's result)` returns. Or the reason why it is `refused`.

    First each way is checked and its memory measured. Then all ways are timed round by round."""
    rows: dict[str, dict[str, Any]] = {way: {"way": way, "refused": None} for way in calls}
    found = first = None
    for way, call in calls.items():
        try:
            found = team.agree(call)
            first = found if first is None else first
            rows[way] |= team.agree(partial(judge, way, found, first))
            found = None  # not held while memory is measured
            rows[way]["peak"], rows[way]["kept"] = team.agree(partial(peak_memory, call, team.device))
        except NotMeasured as refusal:
            rows[way]["refused"], found = str(refusal), None
        release(team.device)
    readers = {way: timer(call, team) for way, call in calls.items() if not rows[way]["refused"]}
    for way, seconds in interleaved(readers, team, rounds).items():
        rows[way]["seconds"] = seconds
    return [*rows.values()]


def same_loss(way: str, loss: Tensor, right: Tensor) -> dict[str, float]:
    """Raises NotMeasured for a loss that is not the first way's, to the rounding of bf16 logits."""
    if not (loss - right).abs() <= LOSS_LIMIT * right.abs().clamp(min=1):  # NaN is wrong too
        raise NotMeasured(f"refused: loss {loss.item():.6g}, not {right.item():.6g}")
    return {"loss": loss.item()}


def table(title: str, caption: str, rows: list[dict], speed: str, columns: dict[str, Callable[[dict], str]]):
    """Time, and speed relative to the first way in the same round, under the name `speed`; then the columns, each a
    function of the row."""
    made = new_table(title, f"Medians (min–max over the rounds). {caption}", ["way"], ["ms", speed, *columns])
    first = rows[0].get("seconds")
    for row in rows:
        if row["refused"]:
            made.add_row(f"{row['way']}, {row['refused']}", *[NONE] * (2 + len(columns)))
            continue
        speeds = spread_text(ratios(first, row["seconds"]) if first else None, RATIO)
        made.add_row(row["way"], spread_ms(row["seconds"]), speeds, *(text(row) for text in columns.values()))
    return made
