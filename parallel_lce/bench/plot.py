"""Pictures of the benchmark's JSON: time of each peer on one GPU, and time against TP over ranks."""

from .peers import FORWARD_BACKWARD, OTHERS
from .problem import Shape
from .tables import SHORT, milliseconds

COLOURS = {"ours": "#c2410c", "bare": "#111827", "other": "#6b7280"}
MARKERS = "osD^v<>Pp*"


def plot_shapes(path, facts, cells):
    """A panel of bars per shape: the milliseconds of each peer with min-max over the rounds, and its speed relative to
    the GEMM-only baseline. Returns whether anything was timed; else nothing is written."""
    panels = []
    for cell in cells:
        kind = FORWARD_BACKWARD if any(FORWARD_BACKWARD in peer for peer in cell["peers"]) else "forward"
        timed = [peer for peer in cell["peers"] if kind in peer]
        if timed:
            panels.append((f"{_problem(cell)}, {SHORT[kind]}", timed, [peer[kind] for peer in timed]))
    if not panels:
        return False
    heights = [len(timed) + 1.5 for _, timed, _ in panels]
    size = 9, 0.3 * sum(heights) + 0.6
    pyplot, figure, axes = _figure(len(panels), 1, size, gridspec_kw={"height_ratios": heights})
    for (axis,), (title, timed, found) in zip(axes, panels):
        middles, errors = _error_bars([_spread(times) for times in found])
        labels = [f"  {milliseconds(times['seconds_median'])} ms" for times in found]
        labels = [t + (f", of bare {f['of_bare'][0]:.2f}" if f["of_bare"] else "") for t, f in zip(labels, found)]
        colours = [COLOURS[_family(peer["name"])] for peer in timed]
        bars = axis.barh([peer["label"] for peer in timed], middles, xerr=errors, color=colours, capsize=2)
        axis.bar_label(bars, labels, fontsize=8)
        axis.invert_yaxis()  # the first peer of the table on top
        axis.set_xlim(0, 1.4 * max(axis.get_xlim()))
        axis.set_title(title, fontsize=9, loc="left")
        axis.set_xlabel("ms", fontsize=8)
    _save(pyplot, figure, path, facts)
    return True


def _figure(rows, columns, size, **options):
    import matplotlib

    matplotlib.use("Agg")  # a file is wanted, never a window
    from matplotlib import pyplot

    return pyplot, *pyplot.subplots(rows, columns, figsize=size, squeeze=False, layout="constrained", **options)


def _save(pyplot, figure, path, facts):
    for axis in figure.axes:
        axis.spines[["top", "right"]].set_visible(False)
    figure.suptitle(f"{facts['device']}, torch {facts['torch']}", fontsize=10)
    figure.savefig(path, dpi=100)
    pyplot.close(figure)


def _problem(cell):
    return f"{Shape(cell['n'], cell['v'], cell['d'])}, {cell['dtype']}"


def _family(name):
    if name.startswith("ours"):
        return "ours"
    return next((peer.family for peer in OTHERS if peer.name == name), "other")


def _spread(times):
    return tuple(times[f"seconds_{of}"] for of in ("median", "min", "max"))


def _error_bars(spreads):
    """`(medians, [below, above])` in milliseconds of (median, min, max) of seconds."""
    middles, lows, highs = ([1e3 * spread[i] for spread in spreads] for i in range(3))
    return middles, [[m - low for m, low in zip(middles, lows)], [h - m for m, h in zip(middles, highs)]]


def plot_over_ranks(path, facts, cells):
    """Time of forward + backward against TP, a panel per problem and layout and a line per peer. Returns whether
    anything was timed; else nothing is written."""
    panels = panels_of(cells)
    if not panels:
        return False
    rows = sorted({problem for problem, _ in panels})
    layouts = sorted({sequence_parallel for _, sequence_parallel in panels})
    pyplot, figure, axes = _figure(len(rows), len(layouts), (6.5 * len(layouts), 4.5 * len(rows) + 0.5))
    names = list(dict.fromkeys(name for lines in panels.values() for name in lines))
    for (problem, sequence_parallel), lines in panels.items():
        axis = axes[rows.index(problem)][layouts.index(sequence_parallel)]
        for name, (family, label, points) in lines.items():
            sizes, spreads = zip(*points)
            style = {"color": COLOURS[family], "linestyle": "--" if family == "bare" else "-", "capsize": 2}
            style["marker"] = MARKERS[names.index(name) % len(MARKERS)]
            axis.errorbar(sizes, *_error_bars(spreads), label=label, **style)
        _style(axis, sorted({tp for _, _, points in lines.values() for tp, _ in points}))
        axis.set_title(f"{problem[1]}{', sequence parallel' if sequence_parallel else ''}", fontsize=9, loc="left")
    _save(pyplot, figure, path, facts)
    return True


def _style(axis, sizes):
    from matplotlib.ticker import NullFormatter, ScalarFormatter

    axis.set_xscale("log", base=2)
    axis.set_yscale("log", base=2)
    axis.set_xticks(sizes, [str(tp) for tp in sizes])
    axis.yaxis.set_major_formatter(ScalarFormatter())
    axis.yaxis.set_minor_formatter(NullFormatter())
    axis.set_xlabel("tensor-parallel ranks")
    axis.set_ylabel("forward + backward, ms")
    axis.grid(alpha=0.3)
    axis.legend(fontsize=7, frameon=False)


def panels_of(cells):
    """`{(problem, sequence parallel): {peer: (family, label, [(TP, (median, min, max) of seconds)])}}`. A problem is
    `(N, title)`. A single rank has one layout; its times are in the panels of both."""
    layouts = sorted({cell["sequence_parallel"] for cell in cells if cell["tp"] > 1}) or [False]
    panels = {}
    for cell in sorted(cells, key=lambda cell: (cell["n"], cell["tp"])):
        problem = cell["n"], _problem(cell)
        for sequence_parallel in layouts if cell["tp"] == 1 else [cell["sequence_parallel"]]:
            for peer in cell["peers"]:
                if FORWARD_BACKWARD in peer:
                    lines = panels.setdefault((problem, sequence_parallel), {})
                    line = _family(peer["name"]), peer["label"], []
                    _, _, points = lines.setdefault(peer["name"], line)
                    points.append((cell["tp"], _spread(peer[FORWARD_BACKWARD])))
    return panels
