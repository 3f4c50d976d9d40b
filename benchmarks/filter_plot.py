"""A picture of the report of gradient_filter: speed and errors against the training step."""

from pathlib import Path

from .filtered import BUDGETS, BY_PROBABILITY, FILTERS, ROUNDED_LOGITS, filter_name
from .plot import MARKERS, plain
from .problem import Shape

EXACT, ROUNDED, EVEN = "#111827", "#c2410c", "#6b7280"  # colours: without a filter, of bf16 logits, of speed 1


def plot_over_steps(path, facts: dict[str, str], cases: list[dict]) -> bool:
    """Speed relative to the bare products, and errors of dX and dW, against the training step; the vocabulary is
    ordered by probability. A row of two panels per training (folder of snapshots), and a colour per gradient_filter.
    Returns whether any case has a step; else nothing is written."""
    import matplotlib

    matplotlib.use("Agg")  # a file is wanted, never a window
    from matplotlib import pyplot

    trainings = {}
    for case in sorted((case for case in cases if case["step"] is not None), key=lambda case: case["step"]):
        trainings.setdefault(Path(case["name"]).parent, []).append(case)
    if not trainings:
        return False
    size = 16, 4.5 * len(trainings) + 0.5
    figure, axes = pyplot.subplots(len(trainings), 2, figsize=size, squeeze=False, layout="constrained")
    for (speed, error), snapshots in zip(axes, trainings.values()):
        _draw_speed(speed, snapshots)
        _draw_errors(error, snapshots)
        first = snapshots[0]
        ranks = f"TP {first['tp']}, " if first["tp"] > 1 else ""
        shape = f"{ranks}{Shape(first['n'], first['v'], first['d'])}, {first['dtype']}"
        for axis, what in (speed, "speed of forward + backward"), (error, "relative errors"):
            axis.set_title(f"{shape}: {what}", fontsize=9, loc="left")
            axis.set_xscale("log")
            axis.set_xticks(steps := _of(snapshots, "step"), map(str, steps))
            axis.set_xticks([], minor=True)
            axis.set_xlabel("training step")
            plain(axis)
            # Beside the panel: there are too many lines for one that hides none.
            axis.legend(fontsize=7, frameon=False, handlelength=3, loc="center left", bbox_to_anchor=(1, 0.5))
    figure.suptitle(f"{facts['device']}, torch {facts['torch']}; vocabulary ordered by probability", fontsize=10)
    figure.savefig(path, dpi=100)
    pyplot.close(figure)
    return True


def _draw_speed(axis, snapshots: list[dict]) -> None:
    for name, style, results in _lines(snapshots):
        for way, dashes in zip(BUDGETS, ("-", "--")):
            ratios = [result[way]["of_gemm_only"] for result in results]
            middles = [ratio[0] for ratio in ratios]
            below, above = ([abs(ratio[i] - ratio[0]) for ratio in ratios] for i in (1, 2))
            label = f"gradient_filter {name}, {way}"
            axis.errorbar(_of(snapshots, "step"), middles, [below, above], label=label, linestyle=dashes, **style)
    axis.axhline(1, color=EVEN, linewidth=1)
    axis.set_ylabel("speed relative to the three bare products")


def _draw_errors(axis, snapshots: list[dict]) -> None:
    steps, references = _of(snapshots, "step"), _of(snapshots, "reference_errors")
    for gradient, dashes in zip(("dX", "dW"), ("-", "--")):
        for name, style, results in _lines(snapshots):
            errors = [result[next(iter(BUDGETS))]["errors"][gradient] for result in results]
            axis.errorbar(steps, errors, label=f"gradient_filter {name}, {gradient}", linestyle=dashes, **style)
        errors = [reference[ROUNDED_LOGITS][gradient] for reference in references]
        axis.plot(steps, errors, label=f"{ROUNDED_LOGITS}, {gradient}", linestyle=dashes, color=ROUNDED)
    axis.set_yscale("log")
    axis.set_ylabel("error relative to float64")


def _lines(snapshots: list[dict]):
    """Of each value of gradient_filter: its name, its style, and its result of each snapshot."""
    from matplotlib import colormaps

    for number, value in enumerate(FILTERS):
        results = [
            next(r for r in case["results"] if (r["order"], r["gradient_filter"]) == (BY_PROBABILITY, value))
            for case in snapshots
        ]
        colour = EXACT if value is None else colormaps["viridis"](number / len(FILTERS))
        yield filter_name(value), {"color": colour, "marker": MARKERS[number], "capsize": 2}, results


def _of(snapshots: list[dict], what: str) -> list:
    return [case[what] for case in snapshots]
