"""Tables of the measurements, in Markdown. docs/benchmarks.md explains their columns."""

from collections.abc import Iterator

from .measure import ratio
from .peers import FORWARD, FORWARD_BACKWARD, GEMM_ONLY, OVERLAPPED, PASSES
from .report import NONE, RATIO, mebibytes, milliseconds, new_table, spread_ms, spread_text

ERRORS = ("loss", "dX", "dW")  # JSON also has the errors of the worst rows
SHORT = {FORWARD: "forward", FORWARD_BACKWARD: "fwd+bwd"}
STYLE = {"ours": "bold"}
CAPTION = (
    " Milliseconds of the slowest rank. of GEMM-only: speed relative to the bare products in the same round; of "
    "overlapped: relative to the products with collectives. MiB: peak above the inputs, largest of the ranks; beyond: "
    "peak above the inputs, dX and dW. ours ×: how often as fast ours, its first row, is in forward + backward."
)
HOST_CAPTION = (
    "host ms: from call to return, with the GPU idle before the call; medians (min–max over the rounds). GPU "
    "operations: kernels, copies and fills of one call; GPU ms: their time."
)


def cell_table(cell: dict):
    """The table of a cell: a row per peer."""
    about = f"{cell['dtype']}, {cell['counted_targets']} targets, max |z| {cell['max_abs_logit']:.1f}"
    title = f"{cell['problem']}, {about}: medians of {cell['rounds']} rounds (min–max)"
    unit = cell["torch_errors"]
    yardstick = ", ".join(f"{name} {unit[name]:.1e}" for name in ERRORS)
    caption = f"Errors relative to float64, in units of plain {cell['dtype']} torch's ({yardstick})." + CAPTION
    speeds = {"of GEMM-only": GEMM_ONLY} | ({"of overlapped": OVERLAPPED} if cell["tp"] > 1 else {})
    columns = [name for kind in PASSES for name in (f"{SHORT[kind]} ms", *speeds, "MiB", "beyond")]
    table = new_table(title, caption, ["peer", "upstream"], [*columns, "ours ×", *(f"{name} err" for name in ERRORS)])
    ours = next((entry for entry in cell["peers"] if entry["family"] == "ours"), {})
    for entry in cell["peers"]:
        row = [entry["name"], entry["upstream"]]
        if entry["refused"]:
            row[0] += ", " + entry["refused"].split(":")[0]  # the whole reason is printed below the table
        for kind in PASSES:
            if kind not in entry:
                row += [NONE] * (3 + len(speeds))
                continue
            row += [spread_ms(entry[kind]["seconds"])]
            row += [spread_text(ratio(cell, entry, other, kind)) for other in speeds.values()]
            row += [mebibytes(entry[kind][size]) for size in ("peak_bytes", "beyond_gradients_bytes")]
        row += [spread_text(ratio(cell, ours, entry["name"], FORWARD_BACKWARD), RATIO)]
        row += [f"{entry['errors'][e] / unit[e]:.2f}" if e in entry["errors"] and unit[e] else NONE for e in ERRORS]
        table.add_row(*row, style=STYLE.get(entry["family"]))
    return table


def host_output(cell: dict) -> Iterator:
    """The table of host times. Nothing if host times were not measured."""
    rows = [(entry, kind) for entry in cell["peers"] for kind in PASSES if "host_seconds" in entry.get(kind, ())]
    if rows:
        columns = ["host ms", "GPU operations", "GPU ms"]
        table = new_table(f"{cell['problem']}, {cell['dtype']}: the host", HOST_CAPTION, ["peer", "pass"], columns)
        for entry, kind in rows:
            profile, on_gpu = entry[kind].get("profile"), [NONE] * 2
            if profile:
                on_gpu = [f"{profile['operations']:.4g}", milliseconds(profile["gpu_seconds"])]
            row = entry["name"], SHORT[kind], spread_ms(entry[kind]["host_seconds"]), *on_gpu
            table.add_row(*row, style=STYLE.get(entry["family"]))
        yield table
