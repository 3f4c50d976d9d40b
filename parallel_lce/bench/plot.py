"""The picture: time and memory of each peer, one row of panels per shape."""

from .measure import spread
from .peers import FORWARD_BACKWARD
from .report import MIB, WORDS, mebibytes, milliseconds

OURS, OTHERS = "#c2410c", "#9ca3af"


def write_plot(path, facts, reports):
    """Horizontal bars per pass: milliseconds with min-max over the rounds and the efficiency beside them, and memory.
    Nothing is written where nothing was timed; returns whether something was."""
    import matplotlib

    matplotlib.use("Agg")  # a file is wanted, never a window
    from matplotlib import pyplot

    reports = [report for report in reports if any(result.seconds for result in report.results)]
    if not reports:
        return False
    kinds = reports[0].passes
    heights = [max(len(_timed(report, kind)) for kind in kinds) + 1.5 for report in reports]
    figure, axes = pyplot.subplots(
        len(reports),
        2 * len(kinds),
        figsize=(5.5 * 2 * len(kinds), 0.3 * sum(heights) + 0.6),
        squeeze=False,
        layout="constrained",
        gridspec_kw={"height_ratios": heights},
    )
    for row, report in zip(axes, reports):
        for column, kind in enumerate(kinds):
            _speed_panel(row[2 * column], report, kind)
            _memory_panel(row[2 * column + 1], report, kind)
    figure.suptitle(f"{facts['device']}, torch {facts['torch']}", fontsize=10)
    figure.savefig(path, dpi=100)
    pyplot.close(figure)
    return True


def _timed(report, kind):
    return [result for result in report.results if result.has(kind)]


def _speed_panel(axis, report, kind):
    results = _timed(report, kind)
    triples = [[1e3 * t for t in spread(result.seconds[kind])] for result in results]
    middles = [middle for middle, _, _ in triples]
    errors = [[m - low for m, low, _ in triples], [high - m for m, _, high in triples]]
    rows = range(len(results))
    axis.barh(rows, middles, xerr=errors, color=_colours(results), ecolor="#374151", capsize=2)
    for y, (result, (middle, _, high)) in enumerate(zip(results, triples)):
        efficiency = report.efficiency(result, kind)
        text = f"  {milliseconds(middle / 1e3)} ms" + (f", eff {efficiency[0]:.2f}" if efficiency else "")
        axis.text(high, y, text, va="center", fontsize=8)
    if report.bare.has(kind):
        axis.axvline(1e3 * spread(report.bare.seconds[kind])[0], color="#374151", linewidth=0.8, linestyle="--")
    axis.set_xlim(0, 1.4 * max([1e-3, *(high for _, _, high in triples)]))
    axis.set_yticks(rows, [str(result.peer) for result in results])
    axis.set_title(report.title, fontsize=9, loc="left")
    axis.set_xlabel(f"{WORDS[kind]}, ms; dashed: bare matrix products", fontsize=8)
    _plain(axis)


def _memory_panel(axis, report, kind):
    results = _timed(report, kind)
    sizes = [result.extra_bytes(kind) for result in results]
    axis.barh(range(len(results)), [size / MIB for size in sizes], color=_colours(results))
    for y, size in enumerate(sizes):
        axis.text(size / MIB, y, f"  {mebibytes(size)}", va="center", fontsize=8)
    axis.set_xscale("symlog", linthresh=1)  # from less than a MiB to tens of GiB
    axis.set_xlim(0, 8 * max([1, *(size / MIB for size in sizes)]))
    axis.set_yticks([])
    words = "peak above inputs" + (" and gradients" if kind == FORWARD_BACKWARD else "")
    axis.set_xlabel(f"{WORDS[kind]}, {words}, MiB", fontsize=8)
    _plain(axis)


def _colours(results):
    return [OURS if result.peer.family == "ours" else OTHERS for result in results]


def _plain(axis):
    axis.invert_yaxis()  # the first peer of the table on top
    axis.tick_params(labelsize=8)
    axis.spines[["top", "right"]].set_visible(False)
