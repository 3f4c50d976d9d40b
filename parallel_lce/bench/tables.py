"""Tables of what was measured, in Markdown."""

from collections.abc import Callable, Iterator

from rich import box
from rich.console import Console
from rich.table import Table

from .peers import FORWARD, FORWARD_BACKWARD, GEMM_ONLY, OVERLAPPED
from .results import Cell, Result, spread

ERRORS = ("loss", "dX", "dW")  # in JSON the worst rows too
SHORT = {FORWARD: "forward", FORWARD_BACKWARD: "fwd+bwd"}
NONE = "–"
MIB = 2**20
PIPE_WIDTH = 240  # a file or a pipe has no width, and wrapped numbers cannot be read
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
    yield f"{SHORT[kind]} ms", lambda r: "{} ({}–{})".format(*map(milliseconds, spread(r.passes[kind].seconds)))
    yield "of GEMM-only", lambda r: _ratio_text(cell.ratio(r, GEMM_ONLY, kind))
    if both and cell.tp > 1:
        yield "of overlapped", lambda r: _ratio_text(cell.ratio(r, OVERLAPPED, kind))
    yield "MiB", lambda r: mebibytes(r.passes[kind].peak_bytes)
    if both:
        yield "beyond", lambda r: mebibytes(r.passes[kind].extra_bytes)


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


def _ratio_text(ratio, form="{:.3f}"):
    return form.format(*ratio) if ratio else NONE


def _error(error, unit):
    return f"{error / unit:.2f}" if error is not None and unit > 0 else NONE


def milliseconds(seconds: float) -> str:
    return f"{1e3 * seconds:.0f}" if seconds >= 0.1 else f"{1e3 * seconds:.3g}"


def mebibytes(size: int) -> str:
    return f"{size / MIB:.0f}" if size >= 100 * MIB else f"{size / MIB:.1f}"
