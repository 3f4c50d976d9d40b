"""The picture: time of forward + backward against TP, one panel per number of tokens and layout."""

from ..inputs import Shape
from ..peers import FORWARD_BACKWARD
from .peers import registry

STYLES = {"ours": ("#c2410c", "-"), "bare": ("#111827", "--"), "other": ("#6b7280", "-")}
MARKERS = "osD^v<>Pp*"


def write_plot(path, facts, cells):
    """A line per peer of the `cells` of the benchmark's JSON, median with min-max over the rounds; nothing is written
    where nothing was timed. Returns whether something was."""
    import matplotlib

    matplotlib.use("Agg")  # a file is wanted, never a window
    from matplotlib import pyplot
    from matplotlib.ticker import NullFormatter, ScalarFormatter

    panels = panels_of(cells)
    if not panels:
        return False
    rows = sorted({problem for problem, _ in panels})
    layouts = sorted({sequence_parallel for _, sequence_parallel in panels})
    size = 6.5 * len(layouts), 4.5 * len(rows) + 0.5
    figure, axes = pyplot.subplots(len(rows), len(layouts), figsize=size, squeeze=False, layout="constrained")
    names = list(dict.fromkeys(name for lines in panels.values() for name in lines))
    for (problem, sequence_parallel), lines in panels.items():
        axis = axes[rows.index(problem)][layouts.index(sequence_parallel)]
        for name, (family, label, points) in lines.items():
            sizes, spreads = zip(*points)
            middles = [1e3 * middle for middle, _, _ in spreads]
            errors = [[1e3 * (m - low) for m, low, _ in spreads], [1e3 * (high - m) for m, _, high in spreads]]
            colour, line = STYLES[family]
            marker = MARKERS[names.index(name) % len(MARKERS)]
            axis.errorbar(sizes, middles, errors, color=colour, linestyle=line, marker=marker, capsize=2, label=label)
        every = sorted({tp for _, _, points in lines.values() for tp, _ in points})
        axis.set_xscale("log", base=2)
        axis.set_yscale("log", base=2)
        axis.set_xticks(every, [str(tp) for tp in every])
        axis.yaxis.set_major_formatter(ScalarFormatter())
        axis.yaxis.set_minor_formatter(NullFormatter())
        axis.set_xlabel("tensor-parallel ranks")
        axis.set_ylabel("forward + backward, ms")
        axis.set_title(f"{problem[1]}{', sequence parallel' if sequence_parallel else ''}", fontsize=9, loc="left")
        axis.grid(alpha=0.3)
        axis.spines[["top", "right"]].set_visible(False)
        axis.legend(fontsize=7, frameon=False)
    figure.suptitle(f"{facts['device']}, torch {facts['torch']}", fontsize=10)
    figure.savefig(path, dpi=100)
    pyplot.close(figure)
    return True


def panels_of(cells):
    """`{(problem, sequence parallel): {peer: (family, label, [(TP, (median, min, max) of seconds)])}}`, a problem being
    its N and words for all of it. A single rank has one layout, and stands in both; its bare products have no
    collectives to overlap."""
    layouts = sorted({cell["sequence_parallel"] for cell in cells if cell["tp"] > 1}) or [False]
    families = {peer.name: peer.family for peer in registry()}
    panels = {}
    for cell in sorted(cells, key=lambda cell: (cell["n"], cell["tp"])):
        problem = cell["n"], f"{Shape(cell['n'], cell['v'], cell['d'])}, {cell['dtype']}"
        for sequence_parallel in layouts if cell["tp"] == 1 else [cell["sequence_parallel"]]:
            for peer in cell["peers"]:
                times = peer.get(FORWARD_BACKWARD)
                if times:
                    lines = panels.setdefault((problem, sequence_parallel), {})
                    family = families.get(peer["name"], "other")
                    _, _, points = lines.setdefault(peer["name"], (family, peer["label"], []))
                    points.append((cell["tp"], tuple(times[f"seconds_{of}"] for of in ("median", "min", "max"))))
    return panels
