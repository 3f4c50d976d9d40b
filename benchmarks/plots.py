"""Pictures of the measurements."""

from pathlib import Path

from .peers import FORWARD_BACKWARD

MARKERS = "osD^v<>Pp*"


def plot_over_ranks(path: Path, facts: dict[str, str], cells: list[dict]) -> bool:
    """Draws the time of forward + backward against the TP size: a panel per problem and layout, a line per peer. The
    times of a single rank are in the panels of both layouts. Returns as `draw`."""
    layouts = sorted({cell["sequence_parallel"] for cell in cells if cell["tp"] > 1}) or [False]
    panels = {}
    for cell in sorted(cells, key=lambda cell: (cell["n"], cell["tp"])):
        for sequence_parallel in layouts if cell["tp"] == 1 else [cell["sequence_parallel"]]:
            title = "N={n}, V={v}, D={d}, {dtype}".format_map(cell) + ", sequence parallel" * sequence_parallel
            for peer in cell["peers"]:
                if timed := peer.get(FORWARD_BACKWARD):
                    milliseconds = [1e3 * timed[f"seconds_{of}"] for of in ("median", "min", "max")]
                    lines = panels.setdefault((title, "forward + backward, ms"), {})
                    lines.setdefault(peer["name"], []).append((cell["tp"], milliseconds))
    return draw(path, f"{facts['device']}, torch {facts['torch']}", "tensor-parallel ranks", panels, len(layouts))


def draw(path: Path, title: str, x_label: str, panels: dict, columns: int) -> bool:
    """Draws lines on logarithmic axes. `panels`: `{(title, label of y): {name: [(x, (y, smallest, largest))]}}`;
    `columns`: panels per row. Without panels, returns False and writes nothing."""
    import matplotlib

    matplotlib.use("Agg")  # draws to files, opens no window
    from matplotlib import pyplot
    from matplotlib.ticker import NullFormatter, ScalarFormatter

    if not panels:
        return False
    rows = -(-len(panels) // columns)
    size = 8 * columns, 4.5 * rows + 0.5
    figure, axes = pyplot.subplots(rows, columns, figsize=size, squeeze=False, layout="constrained")
    names = list(dict.fromkeys(name for lines in panels.values() for name in lines))
    for axis, ((panel, y_label), lines) in zip(axes.flat, panels.items()):
        for name, points in lines.items():
            (xs, spreads), number = zip(*points), names.index(name)
            ys = [y for y, _, _ in spreads]
            bars = [[y - low for y, low, _ in spreads], [high - y for y, _, high in spreads]]
            style = {"marker": MARKERS[number % len(MARKERS)], "color": f"C{number % 10}", "capsize": 2}
            axis.errorbar(xs, ys, bars, label=name, linestyle="-" if number < 10 else "--", **style)
        axis.set_xscale("log")
        axis.set_yscale("log")
        axis.set_xticks(steps := sorted({x for points in lines.values() for x, _ in points}), map(str, steps))
        axis.set_xticks([], minor=True)
        axis.yaxis.set_major_formatter(ScalarFormatter())
        axis.yaxis.set_minor_formatter(NullFormatter())
        axis.set_xlabel(x_label)
        axis.set_ylabel(y_label)
        axis.set_title(panel, fontsize=9, loc="left")
        axis.grid(alpha=0.3)
        axis.spines[["top", "right"]].set_visible(False)
        # Beside the panel: inside it the legend would hide lines.
        axis.legend(fontsize=7, frameon=False, handlelength=3, loc="center left", bbox_to_anchor=(1, 0.5))
    for axis in axes.flat[len(panels) :]:
        axis.remove()
    figure.suptitle(title, fontsize=10)
    figure.savefig(path, dpi=100)
    pyplot.close(figure)
    return True
