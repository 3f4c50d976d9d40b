"""`python -m benchmarks.papers`: published figures, and the same measured here.

table2    Table 2 of the paper: forward without gradients; memory counts the inputs; figures 4 and 5 as pictures
gemma2    an article's example: 328 GB of logits

The paper's figures are of a GB200. Plain torch is measured here beside ours: logits in the dtype of the input,
cross-entropy in float32. On a CPU all sizes are tiny. Exit status: 1 if a loss of ours differs from plain torch's or
runs out of memory. A loss is not compared where torch's does not fit the GPU, as in gemma2.
"""

import sys
from pathlib import Path
from typing import Any, NamedTuple

import torch

from .engine import ways
from .engine.passes import calls_of
from .engine.peers import FORWARD, ONE, PASSES, named
from .engine.problem import Problem, Shape, make_problem
from .engine.report import MIB, NONE, RATIO, milliseconds, new_parser, new_table, parse, session, spread_text
from .engine.team import Team, release
from .engine.timing import ratios, spread

GB, GIB = 10**9, 2**30
TORCH, OURS = "torch", "ours"

# V, and by N: milliseconds of the canonical loss and of the paper's, MiB of either (the paper writes MB).
PAPER = "https://arxiv.org/abs/2511.17599"
TABLE_2 = {
    1024: [(0.73, 0.69, 1064, 280), (1.40, 0.97, 2088, 536), (2.76, 1.27, 4136, 1048), (5.46, 1.83, 8232, 2072)],
    4096: [(1.66, 1.16, 1904, 304), (3.34, 1.69, 3696, 561), (6.78, 2.86, 7280, 1073), (13.70, 5.22, 14448, 2099)],
    8192: [(2.93, 1.70, 3024, 337), (6.08, 2.90, 5840, 593), (13.25, 5.58, 11472, 1107), (27.77, 10.79, 22736, 2133)],
    16384: [
        (5.62, 3.43, 5264, 401),
        (12.41, 6.61, 10128, 659),
        (26.67, 13.20, 19856, 1173),
        (50.15, 25.43, 39312, 2203),
    ],
    32768: [
        (11.42, 7.00, 9744, 531),
        (25.64, 13.80, 18704, 790),
        (50.24, 27.06, 36624, 1307),
        (96.52, 53.61, 72464, 2342),
    ],
}
VOCABULARIES = (32768, 65536, 131072, 262144)


class Setting(NamedTuple):
    """How all parts are measured."""

    team: Team
    dtype: torch.dtype
    rounds: int

    def problem(self, n: int, v: int, d: int) -> Problem:
        tiny = self.team.device.type == "cpu"
        return make_problem(Shape(n // 256, v // 256, 32) if tiny else Shape(n, v, d), self.dtype, self.team)


def call_of(name: str, problem: Problem, kind: str):
    peer = named(name, ONE)
    assert peer.build is not None
    return calls_of(peer, problem, peer.build(None, False))[kind]


def bytes_of(problem: Problem) -> int:
    """Bytes of the inputs: hidden states, weight and target."""
    return sum(tensor.numel() * tensor.element_size() for tensor in (problem.x, problem.weight, problem.target))


def table_2(setting: Setting) -> tuple[Any, list[dict]]:
    """A row for each of 20 sizes, D = 4096."""
    left, right = ["N", "V"], ["torch, ms", "ours, ms", "ours / torch", "less memory", "torch, MiB", "ours, MiB"]
    right += ["paper: canonical, ms", "proposed, ms", "canonical, MiB", "proposed, MiB"]
    caption = "Forward without gradients; the paper's figures are of a GB200. ours / torch: median (min–max) of rounds."
    table, found = new_table(f"Table 2 of {PAPER}", caption, left, right), []
    for n, published in TABLE_2.items():
        for v, of_paper in zip(VOCABULARIES, published):
            problem = setting.problem(n, v, 4096)
            calls = {name: call_of(name, problem, FORWARD) for name in (TORCH, OURS)}
            rows = ways.measure(calls, setting.team, setting.rounds, ways.like_first())
            held = bytes_of(problem)
            for row in rows:
                row |= dict(n=n, v=v, peak=held + row["peak"]) if not row["refused"] else dict(n=n, v=v)
            ms, mib = ([text(row) for row in rows] for text in (_ms, _mib))
            table.add_row(str(n), str(v), *ms, *_compared(*rows), *mib, *map(str, of_paper))
            found += rows
            del problem, calls
            release(setting.team.device)
    return table, found


def _ms(row: dict) -> str:
    return NONE if row["refused"] else milliseconds(spread(row["seconds"])[0])


def _mib(row: dict) -> str:
    return NONE if row["refused"] else f"{row['peak'] / MIB:.0f}"


def _compared(of_torch: dict, ours: dict) -> list[str]:
    """The ratio of times, and of memory."""
    if of_torch["refused"] or ours["refused"]:
        return [NONE] * 2
    ratio = spread_text(ratios(ours["seconds"], of_torch["seconds"]), RATIO)
    return [ratio, f"{100 * (1 - ours['peak'] / of_torch['peak']):.1f} %"]


def gemma2(setting: Setting) -> tuple[Any, list[dict]]:
    """The article *Cut Cross Entropy: 20x Memory reduction in LLM Pre-training*: eight sequences of 80,000 tokens,
    V = 256128; Gemma 2 9B's D = 3584. A call takes seconds: there is one round."""
    problem = setting.problem(640_000, 256_128, 3584)
    logits = problem.shape.n * problem.shape.v * 2 / GB
    calls = {kind: call_of("ours@0", problem, kind) for kind in PASSES}
    rows = ways.measure(calls, setting.team, 1, lambda way, found: {})
    caption = f"All logits in bf16: {logits:.0f} GB. GB beyond the inputs; gradients count."
    columns = {"GB": lambda row: f"{row['peak'] / GB:.2f}"}
    return ways.table(f"{problem}, logits_budget=0", caption, rows, "×", columns), rows


PARTS = {"table2": table_2, "gemma2": gemma2}


PICTURES = {  # of table2: the label, a row's value, and which published figures, canonical and proposed
    "latency": ("ms", lambda row: 1e3 * spread(row["seconds"])[0], slice(0, 2)),
    "memory": ("MiB", lambda row: row["peak"] / MIB, slice(2, 4)),
}


def draw(folder: Path, title: str, rows: list[dict]) -> None:
    """A picture of latency and of memory: a panel for each N, lines over V, on logarithmic axes."""
    from matplotlib.figure import Figure
    from matplotlib.ticker import NullFormatter, ScalarFormatter

    folder.mkdir(parents=True, exist_ok=True)
    for picture, (label, value, of_paper) in PICTURES.items():
        figure = Figure(figsize=(24, 9.5), layout="constrained")
        for number, (n, published) in enumerate(TABLE_2.items(), 1):
            axes = figure.add_subplot(2, 3, number)
            for way in (TORCH, OURS):
                mine = [row for row in rows if (row["way"], row["n"], row["refused"]) == (way, n, None)]
                axes.plot([row["v"] for row in mine], [*map(value, mine)], label=way, marker="o")
            for name, values in zip(("canonical", "proposed"), zip(*(figures[of_paper] for figures in published))):
                axes.plot(VOCABULARIES, values, label=f"paper, {name} (GB200)", marker="s")
            axes.set(xscale="log", yscale="log", xlabel="vocabulary entries", ylabel=label, title=f"N={n}")
            axes.set_xticks(VOCABULARIES, map(str, VOCABULARIES))
            axes.set_xticks([], minor=True)
            axes.yaxis.set_major_formatter(ScalarFormatter())
            axes.yaxis.set_minor_formatter(NullFormatter())
            axes.legend(frameon=False)
        figure.suptitle(title)
        figure.savefig(folder / f"{picture}.png", dpi=100)


def main(arguments: list[str] | None = None) -> int:
    parser = new_parser("python -m benchmarks.papers", __doc__, "--json", "--rounds")
    parser.add_argument("--parts", choices=PARTS, nargs="+", default=[*PARTS])
    parser.add_argument("--plot", metavar="FOLDER", help="of the pictures of table2: latency.png and memory.png")
    options = parse(parser, arguments)
    with session(options) as run:
        setting, parts = Setting(run.team, options.dtype, options.rounds), run.content.setdefault("parts", {})
        for name in options.parts:
            table, parts[name] = PARTS[name](setting)
            run.say(table)
            run.save()
            if name == "table2" and options.plot:
                draw(Path(options.plot), run.content["machine"]["device"], parts[name])
            release(run.team.device)
    return int(any(row["refused"] for rows in parts.values() for row in rows if row["way"] != TORCH))


if __name__ == "__main__":
    sys.exit(main())
