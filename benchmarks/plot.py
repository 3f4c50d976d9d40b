"""A picture of the benchmark's JSON: time against the TP size."""

from .peers import FORWARD_BACKWARD
from .problem import Shape

COLOURS = {"ours": "#c2410c", "gemm-only": "#111827", "": "#6b7280"}  # by how a peer's name begins
MARKERS = "osD^v<>Pp*"


def plot_over_ranks(path, facts: dict[str, str], cells: list[dict]) -> bool:
    """Time of forward + backward against TP, a panel per problem and layout and a line per peer. Returns whether
    anything was timed; else nothing is written."""
    import matplotlib

    matplotlib.use("Agg")  # a file is wanted, never a window
    from matplotlib import pyplot

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
        for name, points in lines.items():
            sizes, spreads = zip(*points)
            style = {"color": next(COLOURS[start] for start in COLOURS if name.startswith(start)), "capsize": 2}
            style["linestyle"] = "--" if name.startswith("gemm-only") else "-"
            style["marker"] = MARKERS[names.index(name) % len(MARKERS)]
            axis.errorbar(sizes, *_error_bars(spreads), label=name, **style)
        _style(axis, sorted({tp for points in lines.values() for tp, _ in points}))
        axis.set_title(f"{problem[1]}{', sequence parallel' if sequence_parallel else ''}", fontsize=9, loc="left")
    figure.suptitle(f"{facts['device']}, torch {facts['torch']}", fontsize=10)
    figure.savefig(path, dpi=100)
    pyplot.close(figure)
    return True


def panels_of(cells: list[dict]) -> dict:
    """`{(problem, sequence parallel): {peer: [(TP, (median, min, max) of seconds)]}}`. A problem is `(N, title)`. A
    single rank has one layout; its times are in the panels of both."""
    layouts = sorted({cell["sequence_parallel"] for cell in cells if cell["tp"] > 1}) or [False]
    panels = {}
    for cell in sorted(cells, key=lambda cell: (cell["n"], cell["tp"])):
        problem = cell["n"], f"{Shape(cell['n'], cell['v'], cell['d'])}, {cell['dtype']}"
        for sequence_parallel in layouts if cell["tp"] == 1 else [cell["sequence_parallel"]]:
            for peer in cell["peers"]:
                if FORWARD_BACKWARD in peer:
                    spread = tuple(peer[FORWARD_BACKWARD][f"seconds_{of}"] for of in ("median", "min", "max"))
                    lines = panels.setdefault((problem, sequence_parallel), {})
                    lines.setdefault(peer["name"], []).append((cell["tp"], spread))
    return panels


def _error_bars(spreads):
    """`(medians, [below, above])` in milliseconds of (median, min, max) of seconds."""
    middles, lows, highs = ([1e3 * value for value in values] for values in zip(*spreads))
    return middles, [[m - low for m, low in zip(middles, lows)], [h - m for m, h in zip(middles, highs)]]


def _style(axis, sizes: list[int]) -> None:
    from matplotlib.ticker import NullFormatter, ScalarFormatter

    axis.set_xscale("log", base=2)
    axis.set_yscale("log", base=2)
    axis.set_xticks(sizes, [str(tp) for tp in sizes])
    axis.yaxis.set_major_formatter(ScalarFormatter())
    axis.yaxis.set_minor_formatter(NullFormatter())
    axis.set_xlabel("tensor-parallel ranks")
    axis.set_ylabel("forward + backward, ms")
    plain(axis)


def plain(axis) -> None:
    """What all pictures look like."""
    axis.grid(alpha=0.3)
    axis.legend(fontsize=7, frameon=False, handlelength=3)
    axis.spines[["top", "right"]].set_visible(False)
