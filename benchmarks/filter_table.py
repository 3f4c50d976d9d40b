"""The report of gradient_filter to look at: a table of each snapshot."""

from rich.markup import escape
from rich.table import Table

from .filtered import BUDGETS, Case, Errors, filter_name
from .results import spread
from .tables import NONE, milliseconds, new_table

CAPTION = (
    "active: share of the tiles of 128 tokens by 128 entries with a larger probability, or a target. of GEMM-only: "
    "speed of forward + backward relative to the three bare matrix products in the same round, medians (min–max). "
    "saved: with everything saved; budget 0: with logits_budget=0. Errors of dX and dW relative to float64 (Frobenius "
    "norm); of rows: the mean over the rows of dW of a row's own relative error."
)


def filter_table(case: Case) -> Table:
    """A row per order of the vocabulary and value of gradient_filter, then the errors of other gradients."""
    shape = f"TP {case.ranks}, {case.shape}" if case.ranks > 1 else str(case.shape)
    title = f"{case.name}: {shape}, {case.dtype_name}, loss {case.loss:.4f}"
    columns = ["active"]
    for name in BUDGETS:
        columns += [f"{name}, ms", "of GEMM-only", "dX error", "dW error", "of rows"]
    table = new_table(escape(title), CAPTION, ["vocabulary", "gradient_filter"], columns)
    for each in case.results:
        row = [each.order, filter_name(each.gradient_filter), f"{each.active:.1%}"]
        for name, way in each.ways.items():
            ratio = "{:.3f} ({:.3f}–{:.3f})".format(*each.of_gemm_only(name))
            row += [milliseconds(spread(way.seconds)[0]), ratio, *_texts(way.errors)]
        table.add_row(*row, style="bold" if each.gradient_filter is None else None)
    for name, errors in case.references.items():
        table.add_row(name, *[NONE] * 4, *_texts(errors), *[NONE] * 5)
    return table


def _texts(errors: Errors) -> list[str]:
    return [f"{errors[name]:.2e}" for name in ("dX", "dW", "dW rows")]
