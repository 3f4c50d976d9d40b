"""The picture: speed and memory of each peer, one row of panels per shape."""

from .measure import FORWARD_BACKWARD
from .report import MIB

OURS, OTHERS = "#c2410c", "#9ca3af"


def write_plot(path, facts, reports):
    """Horizontal bars of training (forward + backward): efficiency with min-max over the rounds, and memory."""
    import matplotlib

    matplotlib.use("Agg")  # a file is wanted, never a window
    from matplotlib import pyplot

    rows = [[r for r in report.results if not r.refused] for report in reports]
    height = sum(0.36 * len(row) + 1.1 for row in rows) + 0.4
    figure, axes = pyplot.subplots(
        len(reports),
        2,
        figsize=(11, height),
        squeeze=False,
        layout="constrained",
        gridspec_kw={"height_ratios": [len(row) + 1 for row in rows]},
    )
    for (speed, memory), report, row in zip(axes, reports, rows):
        _speed_panel(speed, report, row)
        _memory_panel(memory, row)
    figure.suptitle(f"{facts['device']}, torch {facts['torch']}", fontsize=10)
    figure.savefig(path, dpi=150)
    pyplot.close(figure)


def _speed_panel(axis, report, results):
    triples = [report.efficiency(result, FORWARD_BACKWARD) or (0, 0, 0) for result in results]
    middles = [middle for middle, _, _ in triples]
    errors = [[m - low for m, low, _ in triples], [high - m for m, _, high in triples]]
    names = [str(result.peer) for result in results]
    axis.barh(names, middles, xerr=errors, color=_colours(results), ecolor="#374151", capsize=2)
    for y, (middle, _, high) in enumerate(triples):
        axis.text(high, y, f"  {middle:.2f}", va="center", fontsize=8)
    axis.axvline(1, color="#374151", linewidth=0.8, linestyle="--")
    axis.set_xlim(0, 1.15 * max([1, *(high for _, _, high in triples)]))
    axis.set_title(f"{report.shape}, {report.dtype}", fontsize=9, loc="left")
    axis.set_xlabel("forward + backward: bare matrix products' time / peer's time", fontsize=8)
    _plain(axis)


def _memory_panel(axis, results):
    sizes = [result.extra_bytes(FORWARD_BACKWARD) / MIB for result in results]
    axis.barh(range(len(results)), sizes, color=_colours(results))
    for y, size in enumerate(sizes):
        axis.text(size, y, f"  {size:.0f}" if size >= 100 else f"  {size:.3g}", va="center", fontsize=8)
    axis.set_xlim(0, 1.15 * max([1, *sizes]))
    axis.set_yticks([])
    axis.set_xlabel("peak memory above inputs and gradients, MiB", fontsize=8)
    _plain(axis)


def _colours(results):
    return [OURS if result.peer.family == "ours" else OTHERS for result in results]


def _plain(axis):
    axis.invert_yaxis()  # the first peer of the table on top
    axis.tick_params(labelsize=8)
    axis.spines[["top", "right"]].set_visible(False)
