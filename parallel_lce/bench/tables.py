"""Tables of what was measured, in Markdown."""

from statistics import median

from rich import box
from rich.console import Console
from rich.table import Table

from .peers import BARE, FORWARD, FORWARD_BACKWARD, LEAN, MIB, OVERLAPPED, SAVED
from .results import WORDS, mebibytes, milliseconds, spread
from .suites import PUBLISHED, round_neighbour

ERRORS = ("loss", "dX", "dW")  # with times; without them and in JSON the worst rows too
RIVALS = ("megatron-fused", "megatron", "loss-parallel", "verl")
SHORT = {FORWARD: "forward", FORWARD_BACKWARD: "fwd+bwd"}
NONE = "–"
PIPE_WIDTH = 240  # a file or a pipe has no width, and wrapped numbers cannot be read
TIMED_CAPTION = (
    " Milliseconds of the slowest rank. of bare: speed relative to the GEMM-only baseline in the same round. MiB: peak "
    "above the inputs on the rank that needs most; beyond: without dX and dW too."
)
RANKS_CAPTION = (
    " bare: the three local products without communication; bare-overlapped, of overlapped: with their collectives. "
    "work: memory without the whole dX and the gathered hidden states of sequence parallelism either."
)


def new_console():
    console = Console(highlight=False)
    if not console.is_terminal:
        console.width = PIPE_WIDTH
    return console


def say(console, what):
    """Prints a table, or text that is not wrapped."""
    console.print(what, markup=False, soft_wrap=isinstance(what, str))


def new_table(title, caption, left, right):
    """A table with columns aligned left and right."""
    table = Table(title=title, caption=caption, box=box.MARKDOWN)
    for name in left:
        table.add_column(name)
    for name in right:
        table.add_column(name, justify="right")
    return table


def cell_table(cell):
    """A row per peer."""
    rounds = cell.rounds
    title = f"{cell.title}: " + (f"medians of {rounds} rounds (min–max)" if rounds else "accuracy")
    yardstick = ", ".join(f"{name} {cell.yardstick[name]:.1e}" for name in ERRORS if name in cell.yardstick)
    caption = f"Errors relative to float64, in units of plain {cell.dtype_name} torch's ({yardstick})."
    caption += (TIMED_CAPTION if rounds else "") + (RANKS_CAPTION if rounds and cell.tp > 1 else "")
    timed = [(kind, *column) for kind in cell.passes if rounds for column in _columns(cell, kind)]
    errors = [name for name in cell.yardstick if name in ERRORS or not rounds]
    columns = [title for _, title, _ in timed] + [f"{name} err" for name in errors]
    table = new_table(title, caption, ["peer", "upstream"], columns)
    for result in cell.results:
        if rounds or result.peer.family != "bare":
            row = [str(result.peer), result.peer.upstream]
            row += [text(result) if result.has(kind) else NONE for kind, _, text in timed]
            row += [_error(result.errors.get(name), cell.yardstick[name]) for name in errors]
            if result.refused:
                row[0] += ", " + result.refused.split(":")[0]  # all of it is printed below the table
            table.add_row(*row, style="bold" if result.peer.family == "ours" else None)
    return table


def _columns(cell, kind):
    """[(title, text of a result)] of one pass."""
    both, over_ranks = kind == FORWARD_BACKWARD, cell.tp > 1
    yield f"{SHORT[kind]} ms", lambda r: _spread_text(r.seconds[kind])
    yield "of bare", lambda r: _ratio_text(cell.ratio(r, BARE, kind))
    if both and over_ranks:
        yield "of overlapped", lambda r: _ratio_text(cell.ratio(r, OVERLAPPED, kind))
    yield "MiB", lambda r: mebibytes(r.peak[kind])
    if both:
        yield "beyond", lambda r: mebibytes(r.extra_bytes(kind))
    if both and over_ranks:
        yield "work", lambda r: mebibytes(cell.work_bytes(r))


def _spread_text(seconds):
    middle, low, high = (milliseconds(t) for t in spread(seconds))
    return f"{middle} ({low}–{high})"


def _ratio_text(ratio, wide=False, digits=3):
    if ratio is None:
        return NONE
    middle, low, high = (f"{value:.{digits}f}" for value in ratio)
    return f"{middle} ({low}–{high})" if wide else middle


def _error(error, unit):
    return f"{error / unit:.2f}" if error is not None and unit > 0 else NONE


# --- all shapes of a run on one GPU ------------------------------------------------------------------


def overview(suite, cells):
    """Tables of a finished run; none where the tables of the cells say it all."""
    if suite == "table2" and cells:
        return [_against_published(cells)]
    if suite == "ragged" and cells:
        return [_against_neighbours(cells)]
    timed = [cell for cell in cells if cell.rounds]
    return _over_shapes(timed) if len(timed) > 1 else []


def _over_shapes(cells):
    """Speed and memory, a row per peer and a column per shape."""
    words = " / ".join(WORDS[kind] for kind in cells[0].passes)
    shapes = [f"{c.shape.n},{c.shape.v},{c.shape.d}" for c in cells]
    texts = {
        "of the GEMM-only baseline's speed": lambda cell, result, kind: _ratio_text(cell.ratio(result, BARE, kind)),
        "MiB above inputs and gradients": lambda cell, result, kind: mebibytes(result.extra_bytes(kind)),
    }
    for what, text in texts.items():
        table = new_table(f"{what}: {words}", "columns: N,V,D", ["peer"], shapes)
        for label in dict.fromkeys(str(result.peer) for cell in cells for result in cell.results):
            found = [(cell, _labelled(cell, label)) for cell in cells]
            table.add_row(label, *(_of_passes(cell, result, text) if result else NONE for cell, result in found))
        yield table


def _labelled(cell, label):
    return next((result for result in cell.results if str(result.peer) == label), None)


def _of_passes(cell, result, text):
    return " / ".join(text(cell, result, kind) if result.has(kind) else NONE for kind in cell.passes)


def _against_published(cells):
    """Forward time and memory with the inputs, ours against plain torch, and what seed 000 published for the cell."""
    columns = ["N", "V", "torch ms", "ours ms", "faster", "published", "torch MiB", "ours MiB", "smaller", "published"]
    caption = "faster, smaller: torch's / ours; published: the same of Table 2 (GB200). Memory includes the inputs."
    table = new_table("forward, ours against torch with float32 logits", caption, [], columns)
    for cell in cells:
        row = [str(cell.shape.n), str(cell.shape.v)]
        ours, torchs = cell.fastest("ours", FORWARD), cell.get("torch", FORWARD)
        published = PUBLISHED.get((cell.shape.n, cell.shape.v))
        if ours is None or torchs is None:
            table.add_row(*row, *[NONE] * (len(columns) - 2))
            continue
        mine, its = (cell.input_bytes + result.peak[FORWARD] for result in (ours, torchs))
        row += [milliseconds(median(result.seconds[FORWARD])) for result in (torchs, ours)]
        row += [f"{median(ours.speed_against(torchs, FORWARD)):.2f}"]
        row += [f"{published[0] / published[1]:.2f}" if published else NONE]
        row += [f"{its / MIB:.0f}", f"{mine / MIB:.0f}", f"{its / mine:.1f}"]
        row += [f"{published[2] / published[3]:.1f}" if published else NONE]
        table.add_row(*row)
    return table


def _against_neighbours(cells):
    """Cost per token and vocabulary entry of ragged sizes, relative to the round size beside each."""
    kinds = cells[0].passes
    columns = [title for kind in kinds for title in (f"{WORDS[kind]} ms", "cost")]
    caption = "cost: time / (N V), relative to that of the round size."
    table = new_table("ragged sizes against their neighbours", caption, ["shape", "beside", "peer"], columns)
    by_shape = {cell.shape: cell for cell in cells}
    for cell in cells:
        beside = by_shape.get(round_neighbour(cell.shape))
        if beside is None or beside is cell:
            continue
        for result in cell.results:
            its, row = _labelled(beside, str(result.peer)), []
            for kind in kinds:
                row += [milliseconds(median(result.seconds[kind])) if result.has(kind) else NONE]
                timed = result.has(kind) and its is not None and its.has(kind)
                row += [f"{_cost(cell, result, kind) / _cost(beside, its, kind):.3f}" if timed else NONE]
            table.add_row(str(cell.shape), f"N={beside.shape.n}, V={beside.shape.v}", str(result.peer), *row)
    return table


def _cost(cell, result, kind):
    return median(result.seconds[kind]) / (cell.shape.n * cell.shape.v)


# --- all cells of a run over ranks -------------------------------------------------------------------


def overview_over_ranks(cells):
    """A row per TP size and number of tokens of what communication takes by itself; then a row per cell of ours."""
    return [*_collectives_table(cells), _rivals_table(cells)]


def _collectives_table(cells):
    rows = {(cell.tp, cell.shape): cell.collectives for cell in cells if cell.collectives}
    names = list(dict.fromkeys(name for found in rows.values() for name in found))
    caption = "Of [N, D] hidden states, and of the partials, 3 N + 2 fp32 numbers per rank; nothing else was running."
    table = new_table("Collectives alone, ms", caption, [], ["TP", "N", *(name.replace("_", " ") for name in names)])
    for (tp, shape), found in rows.items():
        table.add_row(str(tp), str(shape.n), *(milliseconds(found[name]["seconds_median"]) for name in names))
    return [table] if rows else []


def _rivals_table(cells):
    columns = ["TP", "N", "SP", "of overlapped", "of bare", "forward of bare", *(f"{n} ×" for n in RIVALS)]
    columns += ["lean of overlapped", "lean MiB"]
    caption = (
        "Speed of ours with everything saved (min–max over the rounds) relative to the GEMM-only baseline with "
        "overlapped collectives and without any, and of forward alone to the projection alone; ×: times the speed of "
        "another. lean: fp32 main_grad and a budget of 64 MiB, with its memory beyond gradients, the whole dX and "
        "gathered hidden states."
    )
    table = new_table("Ours over the ranks", caption, [], columns)
    for cell in cells:
        saved, lean = cell.get(SAVED), cell.get(LEAN)
        row = [str(cell.tp), str(cell.shape.n), "on" if cell.sequence_parallel else "off"]
        for other, kind in ((OVERLAPPED, FORWARD_BACKWARD), (BARE, FORWARD_BACKWARD), (BARE, FORWARD)):
            row.append(_ratio_text(cell.ratio(saved, other, kind), wide=True))
        row += [_ratio_text(cell.ratio(saved, rival), digits=2) for rival in RIVALS]
        row += [_ratio_text(cell.ratio(lean, OVERLAPPED)), mebibytes(cell.work_bytes(lean)) if lean else NONE]
        table.add_row(*row)
    return table
