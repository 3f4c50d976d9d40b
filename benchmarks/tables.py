"""Tables of what was measured, in Markdown."""

from collections.abc import Callable, Iterator

from rich import box
from rich.console import Console
from rich.table import Table

from .breakdown import Operation
from .peers import FORWARD, FORWARD_BACKWARD, GEMM_ONLY, OVERLAPPED
from .results import Cell, Measured, Result, spread

NAME_LENGTH = 100  # characters of a kernel's name that are shown
ERRORS = ("loss", "dX", "dW")  # in JSON the worst rows too
SHORT = {FORWARD: "forward", FORWARD_BACKWARD: "fwd+bwd"}
NONE = "–"
MIB = 2**20
PIPE_WIDTH = 300  # a file or a pipe has no width, and wrapped numbers cannot be read
CELL_CAPTION = (
    " Milliseconds of the slowest rank. of GEMM-only: speed relative to that baseline in the same round. MiB: peak "
    "above the inputs on the rank that needs most; beyond: without dX and dW too."
)
RANKS_CAPTION = (
    " of GEMM-only: relative to the local products without communication; of overlapped: to the same with collectives."
)
OVERVIEW_CAPTION = (
    "Speed of the first strategy of ours (min–max over the rounds) relative to the GEMM-only baseline with overlapped "
    "collectives and without any, and of forward alone to the projection alone; ×: times the speed of another. MiB: "
    "beyond inputs and gradients."
)
HOST_CAPTION = (
    "host ms: from call to return with the GPU idle before; medians (min–max over the rounds). GPU operations: "
    "kernels, copies and fills of one call; GPU ms: their time. The other columns are of calls under the profiler, "
    "which slows the host: its ms, and the shares inside functions of CUDA (mostly launches), in torch's own "
    "operations without those functions, and in the rest (Python, autograd's engine, Triton's launcher)."
)
GRID_CAPTION = (
    "Speed of ours relative to the fastest other whose loss accepts a gradient per token / to the GEMM-only baseline."
)


def new_console() -> Console:
    console = Console(highlight=False)
    if not console.is_terminal:
        console.width = PIPE_WIDTH
    return console


def say(console: Console, what: str | Table) -> None:
    """Prints a table, or text that is not wrapped."""
    console.print(what, markup=False, soft_wrap=isinstance(what, str))


def new_table(title: str | None, caption: str | None, left: list[str], right: list[str]) -> Table:
    """A table with columns aligned left and right."""
    table = Table(title=title, caption=caption, box=box.MARKDOWN)
    for name in left:
        table.add_column(name)
    for name in right:
        table.add_column(name, justify="right")
    return table


def cell_table(cell: Cell) -> Table:
    """A row per peer."""
    about = f"{cell.dtype_name}, {cell.counted} targets, max |z| {cell.largest_logit:.1f}"
    title = f"{cell.where}, {about}: medians of {cell.rounds} rounds (min–max)"
    errors = [name for name in ERRORS if name in cell.yardstick]
    yardstick = ", ".join(f"{name} {cell.yardstick[name]:.1e}" for name in errors)
    caption = f"Errors relative to float64, in units of plain {cell.dtype_name} torch's ({yardstick})." + CELL_CAPTION
    timed = [(kind, name, text) for kind in cell.passes for name, text in _columns(cell, kind)]
    columns = [name for _, name, _ in timed] + [f"{name} err" for name in errors]
    table = new_table(title, caption + RANKS_CAPTION * (cell.tp > 1), ["peer", "upstream"], columns)
    for result in cell.results:
        row = [str(result.peer), result.peer.upstream]
        row += [text(result) if result.has(kind) else NONE for kind, _, text in timed]
        row += [_error(result.errors.get(name), cell.yardstick[name]) for name in errors]
        if result.refused:
            row[0] += ", " + result.refused.split(":")[0]  # all of it is printed below the table
        table.add_row(*row, style="bold" if result.peer.family == "ours" else None)
    return table


def _columns(cell: Cell, kind: str) -> Iterator[tuple[str, Callable[[Result], str]]]:
    """(title, text of a result) of each column of one pass."""
    both = kind == FORWARD_BACKWARD
    yield f"{SHORT[kind]} ms", lambda r: _spread_text(r.passes[kind].seconds)
    yield "of GEMM-only", lambda r: _ratio_text(cell.ratio(r, GEMM_ONLY, kind))
    if both and cell.tp > 1:
        yield "of overlapped", lambda r: _ratio_text(cell.ratio(r, OVERLAPPED, kind))
    yield "MiB", lambda r: mebibytes(r.passes[kind].peak_bytes)
    if both:
        yield "beyond", lambda r: mebibytes(r.passes[kind].extra_bytes)


def verdict(cell: Cell) -> str:
    """Who is the fastest of those with a gradient per token, and where ours stands; '' without any other."""
    (ours, other), kind = cell.rivals(), cell.passes[-1]
    beside = cell.ratio(ours, other.peer.name, kind) if other else None
    if not ours or not other or not beside:
        return ""
    first = ours if beside[0] >= 1 else other
    return (
        f"{cell.where}, {SHORT[kind]}: {first.peer} is the fastest of those with a gradient per token; {ours.peer} has "
        f"{beside[0]:.2f} of the speed of {other.peer} and {_ratio_text(cell.ratio(ours, GEMM_ONLY, kind), '{:.2f}')} "
        "of that of the GEMM-only baseline."
    )


def host_tables(cell: Cell) -> Iterator[Table]:
    """The host's time of all peers, then a table of the GPU operations of each. None where it was not measured."""
    rows = [(r, kind, r.passes[kind]) for r in cell.results for kind in cell.passes if r.has(kind)]
    rows = [(result, kind, measured) for result, kind, measured in rows if measured.host_seconds]
    if not rows:
        return
    columns = ["host ms", "GPU operations", "GPU ms", "profiled host ms", "CUDA", "torch", "rest"]
    table = new_table(f"{cell.where}, {cell.dtype_name}: the host", HOST_CAPTION, ["peer", "pass"], columns)
    for result, kind, measured in rows:
        row = [str(result.peer), SHORT[kind], _spread_text(measured.host_seconds), *_breakdown_texts(measured)]
        table.add_row(*row, style="bold" if result.peer.family == "ours" else None)
    yield table
    for result in cell.results:
        of_pass = {kind: m.breakdown.operations for r, kind, m in rows if r is result and m.breakdown}
        if any(of_pass.values()):
            yield _operations_table(result, of_pass)


def _breakdown_texts(measured: Measured) -> list[str]:
    its = measured.breakdown
    if its is None:
        return [NONE] * 6
    count, seconds = sum(o.count for o in its.operations), sum(o.seconds for o in its.operations)
    launched = [f"{count:.4g}", milliseconds(seconds)] if count else [NONE] * 2
    return launched + [milliseconds(its.host_seconds)] + [f"{share:.0%}" for share in (its.cuda, its.torch, its.rest)]


def _operations_table(result: Result, of_pass: dict[str, list[Operation]]) -> Table:
    """A row per operation, in the order of the last pass."""
    columns = [f"{SHORT[kind]} {figure}" for kind in of_pass for figure in ("µs", "share", "count")]
    table = new_table(f"{result.peer}: GPU operations of one call", None, ["operation"], columns)
    for name in dict.fromkeys(o.name for operations in reversed(of_pass.values()) for o in operations):
        row = [name.removeprefix("void ")[:NAME_LENGTH]]
        for operations in of_pass.values():
            found, total = next((o for o in operations if o.name == name), None), sum(o.seconds for o in operations)
            if found is None:
                row += [NONE] * 3
            else:
                row += [f"{1e6 * found.seconds:.1f}", f"{found.seconds / total:.1%}", f"{found.count:.4g}"]
        table.add_row(*row)
    return table


def grid(cells: list[Cell]) -> Table | None:
    """A row per N and a column per (D, V), if the cells are all of them."""
    placed = {(cell.shape.n, cell.shape.d, cell.shape.v): cell for cell in cells}
    rows = list(dict.fromkeys(n for n, _, _ in placed))
    columns = list(dict.fromkeys((d, v) for _, d, v in placed))
    if min(len(rows), len(columns)) < 2 or not len(cells) == len(placed) == len(rows) * len(columns):
        return None
    titles = [f"D={d}, V={v}" for d, v in columns]
    table = new_table(f"Ours, {SHORT[cells[0].passes[-1]]}", GRID_CAPTION, ["N"], titles)
    for n in rows:
        table.add_row(str(n), *(_beside_both(placed[n, d, v]) for d, v in columns))
    return table


def _beside_both(cell: Cell) -> str:
    """'speed relative to the fastest other / to the GEMM-only baseline'."""
    ours, other = cell.rivals()
    names = other.peer.name if other else "", GEMM_ONLY
    return " / ".join(_ratio_text(cell.ratio(ours, name, cell.passes[-1]), "{:.2f}") for name in names)


def overview(cells: list[Cell]) -> Table:
    """A row per cell: ours against the baselines and everybody else."""
    others = dict.fromkeys(r.peer.name for cell in cells for r in cell.results if r.peer.family == "other")
    columns = ["of overlapped", "of GEMM-only", "forward of GEMM-only", *(f"{name} ×" for name in others), "MiB"]
    table = new_table("Ours over all problems", OVERVIEW_CAPTION, ["problem"], columns)
    for cell in cells:
        ours = next((result for result in cell.results if result.peer.family == "ours"), None)
        row = [cell.where]
        for other, kind in ((OVERLAPPED, FORWARD_BACKWARD), (GEMM_ONLY, FORWARD_BACKWARD), (GEMM_ONLY, FORWARD)):
            row.append(_ratio_text(cell.ratio(ours, other, kind), "{:.3f} ({:.3f}–{:.3f})"))
        row += [_ratio_text(cell.ratio(ours, name, cell.passes[-1]), "{:.2f}") for name in others]
        measured = ours.passes[FORWARD_BACKWARD] if ours and ours.has(FORWARD_BACKWARD) else None
        table.add_row(*row, mebibytes(measured.extra_bytes) if measured else NONE)
    return table


def _spread_text(seconds: list[float]) -> str:
    return "{} ({}–{})".format(*map(milliseconds, spread(seconds)))


def _ratio_text(ratio, form="{:.3f}"):
    return form.format(*ratio) if ratio else NONE


def _error(error, unit):
    return f"{error / unit:.2f}" if error is not None and unit > 0 else NONE


def milliseconds(seconds: float) -> str:
    return f"{1e3 * seconds:.0f}" if seconds >= 0.1 else f"{1e3 * seconds:.3g}"


def mebibytes(size: int) -> str:
    return f"{size / MIB:.0f}" if size >= 100 * MIB else f"{size / MIB:.1f}"
