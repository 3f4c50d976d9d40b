"""All shapes of a run in one table."""

from statistics import median

from .peers import FORWARD
from .report import MIB, WORDS, mebibytes, milliseconds, new_table
from .suites import PUBLISHED, round_neighbour


def tables(suite, reports):
    """Tables of a finished run; none where the tables of the shapes say it all."""
    if suite == "table2" and reports:
        return [_against_canonical(reports)]
    if suite == "ragged" and reports:
        return [_against_neighbours(reports)]
    timed = [report for report in reports if any(result.seconds for result in report.results)]
    return _over_shapes(timed) if len(timed) > 1 else []


def _over_shapes(reports):
    """Efficiency and memory, a row per peer and a column per shape."""
    words = " / ".join(WORDS[kind] for kind in reports[0].passes)
    shapes = [f"{r.shape.n},{r.shape.v},{r.shape.d}" for r in reports]
    labels = dict.fromkeys(str(result.peer) for report in reports for result in report.results)

    def efficiency(report, result, kind):
        found = report.efficiency(result, kind)
        return f"{found[0]:.3f}" if found else "–"

    def memory(report, result, kind):
        return mebibytes(result.extra_bytes(kind)) if result.has(kind) else "–"

    made = []
    for cell, what in ((efficiency, "eff"), (memory, "MiB above inputs and gradients")):
        table = new_table(f"{what}: {words}", "columns: N,V,D", ["peer"], shapes)
        for label in labels:
            cells = []
            for report in reports:
                result = next((r for r in report.results if str(r.peer) == label), None)
                passes = report.passes if result is not None else ()
                cells.append(" / ".join(cell(report, result, kind) for kind in passes) or "–")
            table.add_row(label, *cells)
        made.append(table)
    return made


def _against_canonical(reports):
    """Forward time and memory with the inputs, ours against plain torch, and what seed 000 published for the cell."""
    columns = ["N", "V", "torch ms", "ours ms", "faster", "published", "torch MiB", "ours MiB", "smaller", "published"]
    table = new_table(
        "forward, ours against torch with float32 logits",
        "faster, smaller: torch's / ours; published: the same of Table 2 (GB200). Memory includes the inputs.",
        [],
        columns,
    )
    for report in reports:
        ours, canonical = (_named(report, family) for family in ("ours", "torch"))
        cells = [str(report.shape.n), str(report.shape.v)]
        theirs = PUBLISHED.get((report.shape.n, report.shape.v))
        speed, size = (f"{theirs[0] / theirs[1]:.2f}", f"{theirs[2] / theirs[3]:.1f}") if theirs else ("–", "–")
        if ours is None or canonical is None:
            table.add_row(*cells, *["–"] * (len(columns) - 2))
            continue
        mine, its = (report.input_bytes + r.peak[FORWARD] for r in (ours, canonical))
        cells += [milliseconds(median(r.seconds[FORWARD])) for r in (canonical, ours)]
        cells += [f"{median(ours.speed_against(canonical, FORWARD)):.2f}", speed]
        cells += [f"{its / MIB:.0f}", f"{mine / MIB:.0f}", f"{its / mine:.1f}", size]
        table.add_row(*cells)
    return table


def _named(report, family):
    return next((r for r in report.results if r.peer.family == family and r.has(FORWARD)), None)


def _against_neighbours(reports):
    """Cost per token and vocabulary entry of ragged sizes, relative to the round size beside each."""
    kinds = reports[0].passes
    table = new_table(
        "ragged sizes against their neighbours",
        "cost: time / (N V), relative to that of the round size.",
        ["shape", "beside", "peer"],
        [title for kind in kinds for title in (f"{WORDS[kind]} ms", "cost")],
    )
    by_shape = {report.shape: report for report in reports}
    for report in reports:
        beside = by_shape.get(round_neighbour(report.shape))
        if beside is None or beside is report:
            continue
        for result in report.results:
            its = next((r for r in beside.results if str(r.peer) == str(result.peer)), None)
            cells = []
            for kind in kinds:
                timed = result.has(kind) and its is not None and its.has(kind)
                cells += [milliseconds(median(result.seconds[kind])) if result.has(kind) else "–"]
                cells += [f"{_cost(report, result, kind) / _cost(beside, its, kind):.3f}" if timed else "–"]
            table.add_row(str(report.shape), f"N={beside.shape.n}, V={beside.shape.v}", str(result.peer), *cells)
    return table


def _cost(report, result, kind):
    return median(result.seconds[kind]) / (report.shape.n * report.shape.v)
