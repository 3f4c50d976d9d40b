"""`python -m benchmarks.papers`: figures that a paper and three articles published, and the same measured here.

table2    the paper's Table 2: forward without gradients; memory counts the inputs; figures 4 and 5 as pictures
chunks    an article's table: forward + backward with two small budgets, relative to plain torch
peak      an article's figure: peak memory of forward + backward; inputs and gradients count
gemma2    an article's example: 328 GB of logits

The published figures are of the hardware that the table names. Plain torch is measured here beside ours: logits in the
dtype of the input, cross-entropy in float32. On a CPU all sizes are tiny, and the published figures are left out. Exit
status: 1 if a loss of ours differs from plain torch's, or a part runs out of memory. A loss is not compared where
torch's does not fit the GPU, as in gemma2.
"""

import sys
from collections.abc import Callable
from typing import Any, NamedTuple

import torch

from .doors import LOSS_LIMIT
from .measure import gradient_bytes, release
from .options import DEFAULT_DTYPE
from .passes import calls_of
from .peak_memory import peak_memory
from .peers import FORWARD, FORWARD_BACKWARD, ONE, named
from .plots import draw
from .problem import Problem, Shape, make_problem
from .report import (
    MIB,
    NONE,
    RATIO,
    machine,
    milliseconds,
    new_parser,
    new_table,
    parse,
    picture,
    speaker,
    spread_text,
    with_folder,
    write_json,
)
from .team import NotMeasured, Team
from .timing import clock, interleaved, ratios, spread

GB, GIB = 10**9, 2**30
TORCH, OURS = "torch", "ours"
LABELS = {TORCH: "torch", OURS: "parallel_lce"}  # of lines in pictures

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


class Row(NamedTuple):
    """One way to compute a loss, measured."""

    name: str
    seconds: list[float]  # of each round
    peak: int  # bytes above the inputs
    loss: float


class Setting(NamedTuple):
    """How all parts are measured."""

    team: Team
    dtype: torch.dtype
    rounds: int
    tiny: bool
    measured: list[dict[str, Any]]  # of each row: the problem, the pass, and the row's fields

    def problem(self, n: int, v: int, d: int) -> Problem:
        return make_problem(Shape(n // 256, v // 256, 32) if self.tiny else Shape(n, v, d), self.dtype, self.team)

    def rows(self, problem: Problem, kind: str, names: list[str]) -> list[Row]:
        """A row for each peer that fits this GPU, `torch` first if it is among them. The loss of each must be torch's,
        to the rounding of bf16 logits."""
        calls, rows = {}, {}
        for name in names:
            peer = named(name, ONE)
            assert peer.build is not None
            call = calls_of(peer, problem, peer.build(None, False))[kind]
            try:
                found = call()
                peak, _ = peak_memory(call, self.team.device)
            except torch.OutOfMemoryError:
                release(self.team.device)
                continue
            calls[name] = call
            rows[name] = Row(name, [], peak, (found if kind == FORWARD else found[0]).item())
            del found
            first = next(iter(rows.values()))
            if not abs(rows[name].loss - first.loss) <= LOSS_LIMIT * max(1.0, abs(first.loss)):
                raise NotMeasured(f"{name}: loss {rows[name].loss:.6g}, not {first.loss:.6g}")
            release(self.team.device)
        for name, seconds in interleaved(calls, self.team, self.rounds).items():
            rows[name].seconds.extend(seconds)
        about = {"problem": str(problem), "pass": kind}
        self.measured.extend(about | row._asdict() for row in rows.values())
        return [*rows.values()]

    def published(self, *figures: object) -> list[str]:
        return [NONE if self.tiny else str(figure) for figure in figures]


def bytes_of(problem: Problem) -> int:
    """Bytes of the inputs: hidden states, weight and target."""
    return sum(tensor.numel() * tensor.element_size() for tensor in (problem.x, problem.weight, problem.target))


def table_2(setting: Setting, plot: Callable[[str, dict], None]) -> Any:
    """A row for each of 20 sizes, D = 4096."""
    left, right = ["N", "V"], ["torch, ms", "ours, ms", "ours / torch", "torch, MiB", "ours, MiB", "less memory"]
    right += ["paper: canonical, ms", "proposed, ms", "canonical, MiB", "proposed, MiB"]
    caption = "Forward without gradients; the paper's figures are of a GB200. ours / torch: median (min–max) of rounds."
    table, latencies, memories = new_table(f"Table 2 of {PAPER}", caption, left, right), {}, {}
    for n, published in TABLE_2.items():
        for v, of_paper in zip(VOCABULARIES, published):
            problem = setting.problem(n, v, 4096)
            rows = {row.name: row for row in setting.rows(problem, FORWARD, [TORCH, OURS])}
            held = bytes_of(problem)
            for name, row in rows.items():
                ms, mb = [[1e3 * t for t in spread(row.seconds)], [(held + row.peak) / MIB] * 3]
                for figure, panels, value in (("latency, ms", latencies, ms), ("memory, MiB", memories, mb)):
                    lines = panels.setdefault((f"N={problem.shape.n}", figure), {})
                    lines.setdefault(LABELS[name], []).append((problem.shape.v, value))
            of_either = ("canonical", of_paper[::2]), ("proposed", of_paper[1::2])
            for name, values in () if setting.tiny else of_either:
                for figure, panels, value in zip(("latency, ms", "memory, MiB"), (latencies, memories), values):
                    panels[f"N={n}", figure].setdefault(f"paper, {name} (GB200)", []).append((v, [value] * 3))
            size = str(problem.shape.n), str(problem.shape.v)
            table.add_row(*size, *_compared(rows, held), *setting.published(*of_paper))
            del problem
            release(setting.team.device)
    plot("latency", latencies)
    plot("memory", memories)
    return table


def _compared(rows: dict[str, Row], held: int) -> list[str]:
    ours, torch_row = rows[OURS], rows.get(TORCH)
    own = milliseconds(spread(ours.seconds)[0])
    if torch_row is None:
        return ["out of memory", own, NONE, NONE, f"{(held + ours.peak) / MIB:.0f}", NONE]
    ratio = spread_text(ratios(ours.seconds, torch_row.seconds), RATIO)
    sizes = [held + row.peak for row in (torch_row, ours)]
    less = f"{100 * (1 - sizes[1] / sizes[0]):.1f} %"
    return [milliseconds(spread(torch_row.seconds)[0]), own, ratio, *(f"{size / MIB:.0f}" for size in sizes), less]


def chunks(setting: Setting, plot) -> Any:
    """The blog post *Fused Linear Cross-Entropy*: N = 8192, D = 4096, V = 128000. A chunk of C tokens holds C * V fp32
    logits."""
    problem = setting.problem(8192, 128000, 4096)
    caption = "Forward + backward. GiB beyond dX and dW. Published: one H100, chunks of 1024 and of 256 tokens."
    table = new_table(str(problem), caption, ["loss"], ["GiB", "time", "published GiB", "published time"])
    published = {TORCH: (8.4, 1.00), "ours@512MiB": (0.50, 1.04), "ours@128MiB": (0.13, 1.11), "ours": (NONE, NONE)}
    gradients = gradient_bytes(named(TORCH, ONE), problem)
    rows = setting.rows(problem, FORWARD_BACKWARD, [*published])
    torch_row = next((row for row in rows if row.name == TORCH), None)
    for row in rows:
        time = spread_text(ratios(row.seconds, torch_row.seconds) if torch_row else None, RATIO)
        figures = setting.published(*published[row.name])
        table.add_row(row.name, f"{(row.peak - gradients) / GIB:.2f}", time, *figures)
    return table


def peak(setting: Setting, plot) -> Any:
    """The article on a fused linear cross-entropy kernel in Triton, part of a series on Triton: N = 16384, D = 4096,
    V = 128256."""
    problem = setting.problem(16384, 128256, 4096)
    caption = "Forward + backward; inputs and gradients count. Published: one A100."
    table = new_table(str(problem), caption, ["loss"], ["GB", "ms", "published GB"])
    for row in setting.rows(problem, FORWARD_BACKWARD, [TORCH, "ours@0", "ours"]):
        total, ms = (bytes_of(problem) + row.peak) / GB, milliseconds(spread(row.seconds)[0])
        published = {TORCH: "36.02", "ours@0": "5.04"}.get(row.name, NONE)
        table.add_row(row.name, f"{total:.2f}", ms, *setting.published(published))
    return table


def gemma2(setting: Setting, plot) -> Any:
    """The article *Cut Cross Entropy: 20x Memory reduction in LLM Pre-training*: eight sequences of 80,000 tokens,
    V = 256128; Gemma 2 9B's D = 3584. A call takes seconds, one is timed."""
    problem = setting.problem(640_000, 256_128, 3584)
    logits = problem.shape.n * problem.shape.v * 2 / GB
    caption = f"All logits in bf16: {logits:.0f} GB. GB beyond the inputs; gradients count."
    table = new_table(str(problem), caption, ["pass"], ["GB", "ms"])
    peer, device = named("ours@0", ONE), setting.team.device
    assert peer.build is not None
    for kind, call in calls_of(peer, problem, peer.build(None, False)).items():
        peak, _ = peak_memory(call, device)
        table.add_row(kind, f"{peak / GB:.2f}", milliseconds(clock(call, 0, 1, device)))
    return table


PARTS = {"table2": table_2, "chunks": chunks, "peak": peak, "gemma2": gemma2}


def main(arguments: list[str] | None = None) -> int:
    parser = new_parser("python -m benchmarks.papers", __doc__)
    parser.add_argument("--parts", choices=PARTS, nargs="+", default=[*PARTS])
    parser.add_argument("--rounds", type=int, default=5)
    words = "pictures of table2: latency-PATH and memory-PATH; the suffix chooses the format"
    parser.add_argument("--plot", metavar="PATH", type=picture, help=words)
    options = parse(parser, arguments)
    team, say, facts = Team.here(options.device), speaker(), machine(torch.device(options.device))
    say(", ".join(f"{name} {value}" for name, value in facts.items()))
    setting = Setting(team, getattr(torch, DEFAULT_DTYPE[options.device]), options.rounds, options.device == "cpu", [])
    content: dict[str, Any] = {"machine": facts, "rounds": options.rounds, "parts": {}, "calls": setting.measured}

    def plot(what: str, panels: dict) -> None:
        if options.plot:
            path = with_folder(options.plot)
            draw(path.with_name(f"{what}-{path.name}"), facts["device"], "vocabulary entries", panels, 3)

    failed = False
    for name in options.parts:
        try:
            table = PARTS[name](setting, plot)
        except (NotMeasured, torch.OutOfMemoryError) as refusal:
            failed = True
            say(f"{name}: {refusal}")
            continue
        say(table)
        columns = [[str(cell) for cell in column.cells] for column in table.columns]
        assert len({column.header for column in table.columns}) == len(columns)
        content["parts"][name] = [dict(zip([c.header for c in table.columns], row)) for row in zip(*columns)]
        if options.json:
            write_json(options.json, content)
        release(team.device)
    return int(failed)


if __name__ == "__main__":
    sys.exit(main())
