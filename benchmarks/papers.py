"""`python -m benchmarks.papers`: Table 2 of a paper, and the same measured here.

Forward without gradients, D = 4096. Memory counts the inputs. `--plot` draws figures 4 and 5.

The paper's figures are of a GB200. Plain torch is measured here beside ours: logits in the dtype of the input,
cross-entropy in float32. On a CPU all sizes are tiny. Exit status: 1 if a loss of ours differs from plain torch's or
runs out of memory.
"""

import sys
from pathlib import Path

from .engine import ways
from .engine.peers import FORWARD, ONE, calls_of, named
from .engine.problem import Shape, make_problem
from .engine.report import MIB, NONE, RATIO, milliseconds, new_parser, new_table, parse, session, spread_text
from .engine.team import release
from .engine.timing import ratios, spread

TORCH, OURS = "torch", "ours"
PAPER = "https://arxiv.org/abs/2511.17599"
TOKENS, VOCABULARIES = (1024, 4096, 8192, 16384, 32768), (32768, 65536, 131072, 262144)
# A row for each N. For each V: milliseconds of the canonical loss and of the paper's, MiB of either.
TABLE_2 = [
    [(0.73, 0.69, 1064, 280), (1.40, 0.97, 2088, 536), (2.76, 1.27, 4136, 1048), (5.46, 1.83, 8232, 2072)],
    [(1.66, 1.16, 1904, 304), (3.34, 1.69, 3696, 561), (6.78, 2.86, 7280, 1073), (13.70, 5.22, 14448, 2099)],
    [(2.93, 1.70, 3024, 337), (6.08, 2.90, 5840, 593), (13.25, 5.58, 11472, 1107), (27.77, 10.79, 22736, 2133)],
    [(5.62, 3.43, 5264, 401), (12.41, 6.61, 10128, 659), (26.67, 13.20, 19856, 1173), (50.15, 25.43, 39312, 2203)],
    [(11.42, 7.0, 9744, 531), (25.64, 13.8, 18704, 790), (50.24, 27.06, 36624, 1307), (96.52, 53.61, 72464, 2342)],
]
COLUMNS = ["torch, ms", "ours, ms", "ours / torch", "less memory", "torch, MiB", "ours, MiB"]
COLUMNS += ["paper: canonical, ms", "proposed, ms", "canonical, MiB", "proposed, MiB"]
CAPTION = "Forward without gradients; the paper's figures are of a GB200. ours / torch: median (min–max) of rounds."

PICTURES = {  # of table2: the label, a row's value, and which published figures, canonical and proposed
    "latency": ("ms", lambda row: 1e3 * spread(row["seconds"])[0], slice(0, 2)),
    "memory": ("MiB", lambda row: row["peak"] / MIB, slice(2, 4)),
}


def draw(folder: Path, title: str, rows: list[dict]) -> None:
    """A picture of latency and of memory: a panel for each N, lines over V, on logarithmic axes."""
    from matplotlib.figure import Figure

    folder.mkdir(parents=True, exist_ok=True)
    for picture, (label, value, of_paper) in PICTURES.items():
        figure = Figure(figsize=(24, 9.5), layout="constrained")
        for number, (n, published) in enumerate(zip(TOKENS, TABLE_2), 1):
            axes = figure.add_subplot(2, 3, number)
            for way in (TORCH, OURS):
                mine = [row for row in rows if (row["way"], row["n"], row["refused"]) == (way, n, None)]
                axes.plot([row["v"] for row in mine], [*map(value, mine)], label=way, marker="o")
            for name, values in zip(("canonical", "proposed"), zip(*(figures[of_paper] for figures in published))):
                axes.plot(VOCABULARIES, values, label=f"paper, {name} (GB200)", marker="s")
            axes.set(xscale="log", yscale="log", xlabel="vocabulary entries", ylabel=label, title=f"N={n}")
            axes.set_xticks(VOCABULARIES, map(str, VOCABULARIES))
            axes.set_xticks([], minor=True)
            axes.legend(frameon=False)
        figure.suptitle(title)
        figure.savefig(folder / f"{picture}.png", dpi=100)


def texts(rows: list[dict]) -> list[str]:
    """Columns of torch's row and of ours: their times and the ratio of these, the memory saved, and their memory."""
    ms = [NONE if row["refused"] else milliseconds(spread(row["seconds"])[0]) for row in rows]
    mib = [NONE if row["refused"] else f"{row['peak'] / MIB:.0f}" for row in rows]
    if NONE in ms:
        return [*ms, NONE, NONE, *mib]
    of_torch, ours = rows
    ratio = spread_text(ratios(ours["seconds"], of_torch["seconds"]), RATIO)
    return [*ms, ratio, f"{100 * (1 - ours['peak'] / of_torch['peak']):.1f} %", *mib]


def main(arguments: list[str] | None = None) -> int:
    parser = new_parser("python -m benchmarks.papers", __doc__, "--json", "--rounds")
    parser.add_argument("--plot", metavar="FOLDER", help="of the pictures latency.png and memory.png")
    options = parse(parser, arguments)
    with session(options) as run:
        team, found = run.team, run.content.setdefault("rows", [])
        table = new_table(f"Table 2 of {PAPER}", CAPTION, ["N", "V"], COLUMNS)
        for n, published in zip(TOKENS, TABLE_2):
            for v, of_paper in zip(VOCABULARIES, published):
                shape = Shape(n // 256, v // 256, 32) if options.device == "cpu" else Shape(n, v, 4096)
                problem = make_problem(shape, options.dtype, team)
                calls = {name: calls_of(named(name, ONE), problem)[FORWARD] for name in (TORCH, OURS)}
                rows = ways.measure(calls, team, options.rounds, ways.same_loss)
                inputs = problem.x.nbytes + problem.weight.nbytes + problem.target.nbytes
                for row in rows:
                    row |= {"n": n, "v": v, "peak": row.get("peak", 0) + inputs}
                table.add_row(str(n), str(v), *texts(rows), *map(str, of_paper))
                found += rows
                del problem, calls
                release(team.device)
        run.say(table)
        run.save()
        if options.plot:
            draw(Path(options.plot), run.content["machine"]["device"], found)
    return int(any(row["refused"] for row in found if row["way"] == OURS))


if __name__ == "__main__":
    sys.exit(main())
