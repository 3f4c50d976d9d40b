"""The parity report to look at: a table of all inputs, and a line about each."""

from rich.table import Table

from .exactness import BAND, FP32_HEAD, OURS, OUTPUTS, Case
from .tables import new_table

CAPTION = (
    "Differences from float64 of the same inputs, in nats: of the target's log-probability and of the entropy. ratio: "
    "exp(difference), the importance ratio that PPO would see of an unchanged policy; outside: share of the tokens "
    f"whose ratio is not within 1 ± {BAND:g}."
)

GRADIENT_CAPTION = (
    "Relative errors of dX over the tokens whose largest entry has this 1 - p: ours / logits in the inputs' dtype / "
    "fp32 head."
)


def parity_table(cases: list[Case]) -> Table:
    """A row per inputs and way."""
    columns = ["mean", "largest", "ratio, smallest–largest", "outside", "entropy mean", "entropy largest"]
    table = new_table("Log-probabilities against float64", CAPTION, ["inputs", "max |z|", "computed by"], columns)
    for case in cases:
        about = [f"{case.name}: {case.shape}", f"{case.largest_logit:.1f}"]
        for name, its in case.deviations.items():
            ratio = f"{its.smallest_ratio:.6f}–{its.largest_ratio:.6f}"
            row = [f"{its.mean:.1e}", f"{its.largest:.1e}", ratio, f"{its.outside:.2%}"]
            row += [f"{its.entropy_mean:.1e}", f"{its.entropy_largest:.1e}"]
            table.add_row(*about, name, *row, style="bold" if name == OURS else None)
            about = ["", ""]
    return table


def gradient_table(cases: list[Case]) -> Table:
    """A row per inputs and group of tokens."""
    table = new_table("dX against float64", GRADIENT_CAPTION, ["inputs", "1 - p", "tokens"], list(OUTPUTS))
    for case in cases:
        about = f"{case.name}: {case.shape}"
        for group in case.groups:
            errors = (" / ".join(f"{off:.1e}" for off in ways.values()) for ways in group.errors.values())
            edges = f"{group.low:.0e} to {group.high:.0e}" if group.low else f"at most {group.high:.0e}"
            table.add_row(about, edges, str(group.tokens), *errors)
            about = ""
    return table


def verdict(case: Case) -> str:
    """How the largest differences compare, and whether ours is what it should be."""
    (rounded,) = set(case.deviations) - {OURS, FP32_HEAD}
    words = f"{case.name}: the largest difference of ours is {case.times(OURS):.2g} times the fp32 head's, "
    words += f"that of {rounded} {case.times(rounded):.2g} times"
    if not case.holds:
        found = case.deviations[OURS]
        words += f". FAILED: ours is off by {found.largest:.1e}, allowed {case.limit:.1e}; its entropies by "
        words += f"{found.entropy_largest:.1e}, allowed {case.entropy_limit:.1e}"
        if wrong := [f"{group.high:.0e}" for group in case.groups if not group.holds]:
            words += f"; its dX by more than twice those of {rounded}, where 1 - p is at most {', '.join(wrong)}"
    return words
