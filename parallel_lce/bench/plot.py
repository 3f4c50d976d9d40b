"""Pictures: time and memory of each peer on one GPU, and time against TP over ranks."""

from .peers import BARE, FORWARD_BACKWARD, MIB, registry_over_ranks
from .problem import Shape
from .results import WORDS, mebibytes, milliseconds, spread

COLOURS = {"ours": "#c2410c", "bare": "#111827", "other": "#6b7280"}
MARKERS = "osD^v<>Pp*"


def plot_shapes(path, facts, cells):
    """Horizontal bars, a row of panels per shape: milliseconds of each pass with min-max over the rounds and the speed
    relative to the GEMM-only baseline, and memory. Returns whether anything was timed; else nothing is written."""
    cells = [cell for cell in cells if cell.rounds]
    if not cells:
        return False
    kinds = cells[0].passes
    heights = [max(len(_timed(cell, kind)) for kind in kinds) + 1.5 for cell in cells]
    size = 5.5 * 2 * len(kinds), 0.3 * sum(heights) + 0.6
    pyplot, figure, axes = _figure(len(cells), 2 * len(kinds), size, gridspec_kw={"height_ratios": heights})
    for row, cell in zip(axes, cells):
        for column, kind in enumerate(kinds):
            _speed_panel(row[2 * column], cell, kind)
            _memory_panel(row[2 * column + 1], cell, kind)
    _save(pyplot, figure, path, facts)
    return True


def _figure(rows, columns, size, **options):
    import matplotlib

    matplotlib.use("Agg")  # a file is wanted, never a window
    from matplotlib import pyplot

    return pyplot, *pyplot.subplots(rows, columns, figsize=size, squeeze=False, layout="constrained", **options)


def _save(pyplot, figure, path, facts):
    figure.suptitle(f"{facts['device']}, torch {facts['torch']}", fontsize=10)
    figure.savefig(path, dpi=100)
    pyplot.close(figure)


def _timed(cell, kind):
    return [result for result in cell.results if result.has(kind)]


def _speed_panel(axis, cell, kind):
    results, bare = _timed(cell, kind), cell.get(BARE, kind)
    middles, errors, highs = _error_bars([spread(result.seconds[kind]) for result in results])
    texts = [f"{milliseconds(middle / 1e3)} ms" for middle in middles]
    for row, result in enumerate(results if bare else ()):
        texts[row] += f", of bare {cell.ratio(result, BARE, kind)[0]:.2f}"
    _bars(axis, results, middles, texts, errors)
    if bare:
        axis.axvline(1e3 * spread(bare.seconds[kind])[0], color="#374151", linewidth=0.8, linestyle="--")
    axis.set_xlim(0, 1.4 * max([1e-3, *highs]))
    axis.set_yticks(range(len(results)), [str(result.peer) for result in results])
    axis.set_title(cell.title, fontsize=9, loc="left")
    axis.set_xlabel(f"{WORDS[kind]}, ms; dashed: GEMM-only baseline", fontsize=8)


def _memory_panel(axis, cell, kind):
    sizes = [result.extra_bytes(kind) / MIB for result in _timed(cell, kind)]
    _bars(axis, _timed(cell, kind), sizes, [mebibytes(size * MIB) for size in sizes])
    axis.set_xscale("symlog", linthresh=1)  # from less than a MiB to tens of GiB
    axis.set_xlim(0, 8 * max([1, *sizes]))
    axis.set_yticks([])
    words = "peak above inputs" + (" and gradients" if kind == FORWARD_BACKWARD else "")
    axis.set_xlabel(f"{WORDS[kind]}, {words}, MiB", fontsize=8)


def _bars(axis, results, lengths, texts, errors=None):
    colours = [COLOURS["ours" if result.peer.family == "ours" else "other"] for result in results]
    axis.barh(range(len(results)), lengths, xerr=errors, color=colours, ecolor="#374151", capsize=2)
    ends = [length + above for length, above in zip(lengths, errors[1])] if errors else lengths
    for row, (end, text) in enumerate(zip(ends, texts)):
        axis.text(end, row, f"  {text}", va="center", fontsize=8)
    axis.invert_yaxis()  # the first peer of the table on top
    axis.tick_params(labelsize=8)
    axis.spines[["top", "right"]].set_visible(False)


def _error_bars(spreads):
    """`(medians, [below, above], largest)` in milliseconds of (median, min, max) of seconds."""
    middles, lows, highs = ([1e3 * spread[i] for spread in spreads] for i in range(3))
    return middles, [[m - low for m, low in zip(middles, lows)], [h - m for m, h in zip(middles, highs)]], highs


def plot_over_ranks(path, facts, cells):
    """Time of forward + backward against TP, a panel per problem and layout and a line per peer, of the `cells` of the
    benchmark's JSON. Returns whether anything was timed; else nothing is written."""
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
            middles, errors, _ = _error_bars(spreads)
            style = {"color": COLOURS[family], "linestyle": "--" if family == "bare" else "-", "capsize": 2}
            axis.errorbar(
                sizes, middles, errors, marker=MARKERS[names.index(name) % len(MARKERS)], label=label, **style
            )
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
    axis.spines[["top", "right"]].set_visible(False)
    axis.legend(fontsize=7, frameon=False)


def panels_of(cells):
    """`{(problem, sequence parallel): {peer: (family, label, [(TP, (median, min, max) of seconds)])}}`. A problem is
    its N and words for all of it. A single rank has one layout, and stands in the panels of both; its GEMM-only
    baseline has no collectives to overlap."""
    layouts = sorted({cell["sequence_parallel"] for cell in cells if cell["tp"] > 1}) or [False]
    families = {peer.name: peer.family for peer in registry_over_ranks()}
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
