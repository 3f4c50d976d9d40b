"""Tables of the measurements, in Markdown. docs/benchmarks.md explains their columns."""

from collections.abc import Iterator

from .measure import ratio
from .peers import ANY, FORWARD, FORWARD_BACKWARD, GEMM_ONLY, OVERLAPPED, PASSES
from .report import NONE, mebibytes, milliseconds, new_table, spread_text
from .timing import spread

ERRORS = ("loss", "dX", "dW")  # JSON also has the errors of the worst rows
SHORT = {FORWARD: "forward", FORWARD_BACKWARD: "fwd+bwd"}
CAPTION = (
    " Milliseconds of the slowest rank. of GEMM-only: speed relative to the bare products in the same round; of "
    "overlapped: relative to the products with collectives. MiB: peak above the inputs, largest of the ranks; beyond: "
    "peak above the inputs, dX and dW."
)
OVERVIEW_CAPTION = (
    "Speed of the first peer of ours (min–max over the rounds): forward + backward relative to the GEMM-only baseline "
    "with overlapped collectives and without collectives, and forward relative to the projection alone; ×: relative "
    "to another peer, in forward + backward; the fastest: of the other peers whose loss accepts a gradient per token. "
    "MiB: beyond inputs and gradients."
)
HOST_CAPTION = (
    "host ms: from call to return, with the GPU idle before the call; medians (min–max over the rounds). GPU "
    "operations: kernels, copies and fills of one call; GPU ms: their time."
)
ENERGY_CAPTION = (
    "Joules of the whole GPU and milliseconds per call, over two seconds of calls without a pause; those of the "
    "bare products, divided by the call's."
)


def cell_table(cell: dict):
    """The table of a cell: a row per peer."""
    about = f"{cell['dtype']}, {cell['counted_targets']} targets, max |z| {cell['max_abs_logit']:.1f}"
    title = f"{cell['problem']}, {about}: medians of {cell['rounds']} rounds (min–max)"
    unit = cell["torch_errors"]
    yardstick = ", ".join(f"{name} {unit[name]:.1e}" for name in ERRORS)
    caption = f"Errors relative to float64, in units of plain {cell['dtype']} torch's ({yardstick})." + CAPTION
    speeds = ["of_gemm_only"] + ["of_overlapped"] * (cell["tp"] > 1)
    columns = []
    for kind in PASSES:
        columns += [f"{SHORT[kind]} ms", "of GEMM-only", "of overlapped"][: 1 + len(speeds)] + ["MiB", "beyond"]
    columns += [f"{name} err" for name in ERRORS]
    table = new_table(title, caption, ["peer", "upstream"], columns)
    for entry in cell["peers"]:
        row = [entry["name"], entry["upstream"]]
        if entry["refused"]:
            row[0] += ", " + entry["refused"].split(":")[0]  # the whole reason is printed below the table
        for measured in (entry.get(kind) for kind in PASSES):
            if measured is None:
                row += [NONE] * (3 + len(speeds))
                continue
            row += [_spread_ms(measured["seconds"]), *(spread_text(measured[of], "{:.3f}") for of in speeds)]
            row += [mebibytes(measured[size]) for size in ("peak_bytes", "beyond_gradients_bytes")]
        row += [f"{entry['errors'][e] / unit[e]:.2f}" if e in entry["errors"] and unit[e] else NONE for e in ERRORS]
        table.add_row(*row, style=_style(entry))
    return table


def host_output(cell: dict) -> Iterator:
    """The table of host times, then a profile of each peer. Nothing if host times were not measured."""
    rows = [(entry, kind, entry[kind]) for entry in cell["peers"] for kind in PASSES if kind in entry]
    rows = [row for row in rows if "host_seconds" in row[-1]]
    if not rows:
        return
    title = f"{cell['problem']}, {cell['dtype']}: the host"
    table = new_table(title, HOST_CAPTION, ["peer", "pass"], ["host ms", "GPU operations", "GPU ms"])
    for entry, kind, measured in rows:
        on_gpu = [NONE] * 2
        if profile := measured.get("profile"):
            on_gpu = [f"{profile['operations']:.4g}", milliseconds(profile["gpu_seconds"])]
        row = entry["name"], SHORT[kind], _spread_ms(measured["host_seconds"]), *on_gpu
        table.add_row(*row, style=_style(entry))
    yield table
    for entry, kind, measured in rows:
        if profile := measured.get("profile"):
            yield f"{entry['name']}, {SHORT[kind]}:\n{profile['table']}"


def energy_output(cell: dict) -> Iterator:
    """The table of joules and of times at the power limit, if they were measured."""
    rows = [
        (entry, kind, (entry[kind]["joules"], entry[kind]["sustained_seconds"]))
        for entry in cell["peers"]
        for kind in PASSES
        if "joules" in entry.get(kind, ())
    ]
    if rows:
        bare = {kind: values for entry, kind, values in rows if entry["name"] == GEMM_ONLY}
        columns = ["joules", "GEMM-only / joules", "ms", "GEMM-only / ms"]
        table = new_table(f"{cell['problem']}, {cell['dtype']}: energy", ENERGY_CAPTION, ["peer", "pass"], columns)
        for entry, kind, (joules, seconds) in rows:
            of_bare = [f"{a / b:.3f}" for a, b in zip(bare[kind], (joules, seconds))] if kind in bare else [NONE] * 2
            row = f"{joules:.2f}", of_bare[0], milliseconds(seconds), of_bare[1]
            table.add_row(entry["name"], SHORT[kind], *row, style=_style(entry))
        yield table


def overview(cells: list[dict]):
    """A row per cell: the first peer of ours, relative to the baselines and to the other libraries."""
    others = dict.fromkeys(entry["name"] for cell in cells for entry in cell["peers"] if entry["family"] == "other")
    columns = ["of overlapped", "of GEMM-only", "forward of GEMM-only", *(f"{name} ×" for name in others)]
    table = new_table("Ours over all problems", OVERVIEW_CAPTION, ["problem"], [*columns, "the fastest ×", "MiB"])
    for cell in cells:
        ours = next((entry for entry in cell["peers"] if entry["family"] == "ours"), {})
        row = [cell["problem"]]
        for other, kind in ((OVERLAPPED, FORWARD_BACKWARD), (GEMM_ONLY, FORWARD_BACKWARD), (GEMM_ONLY, FORWARD)):
            row.append(spread_text(ratio(cell, ours, other, kind)))
        row += [spread_text(ratio(cell, ours, name, FORWARD_BACKWARD), "{:.2f}") for name in others]
        fastest = fastest_other(cell)
        row.append(spread_text(ratio(cell, ours, fastest, FORWARD_BACKWARD), f"{{:.2f}} ({fastest})"))
        both = ours.get(FORWARD_BACKWARD)
        table.add_row(*row, mebibytes(both["beyond_gradients_bytes"]) if both else NONE)
    return table


def fastest_other(cell: dict) -> str:
    """The name of the other library's peer that is fastest in forward + backward, among those whose loss accepts a
    gradient per token; '' if none was timed."""
    timed = [entry for entry in cell["peers"] if FORWARD_BACKWARD in entry]
    others = [entry for entry in timed if entry["family"] == "other" and entry["upstream"] == ANY]
    fastest = min(others, key=lambda entry: entry[FORWARD_BACKWARD]["seconds_median"], default={"name": ""})
    return fastest["name"]


def _style(entry: dict) -> str | None:
    return "bold" if entry["family"] == "ours" else None


def _spread_ms(seconds: list[float]) -> str:
    return "{} ({}–{})".format(*map(milliseconds, spread(seconds)))
