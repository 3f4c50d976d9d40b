"""One run of the benchmark: measures problems, prints tables, writes JSON and a picture."""

import json
import time
from argparse import Namespace
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path

import torch
from rich.console import Console
from rich.table import Table

from .accuracy import Judge, answers
from .communication import measure_collectives, write_trace
from .measure import measure, release
from .peers import FORWARD_BACKWARD, Peer
from .plot import plot_over_ranks
from .problem import Problem
from .results import Cell, Result
from .tables import cell_table, grid, host_tables, new_console, overview, say, verdict


class Run:
    """Of several ranks one `speaks`: it prints and writes. Results go to stdout, progress with seconds to stderr."""

    def __init__(self, options: Namespace, facts: dict[str, str], speaks: bool):
        settings = {"suite": options.suite, "rounds": options.plan.rounds, "tp": options.tp}
        self.about = {"machine": facts, "settings": settings, "not_here": options.not_here}
        self.options, self.speaks, self.cells = options, speaks, []
        self._begun = time.monotonic()
        self._results, self._status = new_console(), Console(stderr=True, highlight=False)
        self._results.quiet = self._status.quiet = not speaks
        self.say("; ".join(f"{name}: {text}" for name, text in facts.items()))
        if options.not_here:
            self.say("not here: " + "; ".join(f"{peer} ({why})" for peer, why in options.not_here.items()))

    def say(self, what: str | Table) -> None:
        say(self._results, what)

    def _progress(self, problem: Problem, text: str) -> None:
        words = f"{time.monotonic() - self._begun:5.0f} s  {problem}: {text}"
        self._status.print(words, style="dim", markup=False, soft_wrap=True)

    def measure(self, problem: Problem, peers: list[Peer]) -> None:
        """A cell for each layout of the problem, without or with sequence parallelism."""
        team, plan = problem.team, self.options.plan
        self._progress(problem, "float64 truth")
        gradients = FORWARD_BACKWARD in plan.passes
        truth, torchs = (answers(problem, dtype, gradients) for dtype in (torch.float64, problem.hidden.dtype))
        release(team.device)
        collectives = measure_collectives(problem, plan.rounds)
        layouts = self.options.sequence_parallel if team.ranks > 1 else [False]
        problems = [replace(problem, sequence_parallel=sequence_parallel) for sequence_parallel in layouts]
        judges = [Judge(each, truth, torchs) for each in problems]
        del truth, torchs  # the judges alone hold the truth now
        for judge in judges:
            progress, after = partial(self._progress, judge.problem), partial(self._trace, judge.problem)
            cell = Cell.of(judge, plan.passes)
            cell.collectives = collectives
            cell.results = measure(peers, judge, plan, progress, after)
            self._finished(cell)
        release(team.device)

    def _trace(self, problem: Problem, result: Result, call: Callable) -> None:
        if self.options.trace:
            write_trace(self.options.trace, problem, result.peer, call)

    def _finished(self, cell: Cell) -> None:
        self.cells.append(cell)
        for table in (cell_table(cell), *host_tables(cell)):
            self.say(table)
        if text := verdict(cell):
            self.say(text)
        for result in cell.results:
            if result.refused:
                self.say(f"{result.peer}: {result.refused}")
        if self.options.json and self.speaks:  # after each: a later one may fail
            self._file(self.options.json).write_text(json.dumps(self._content(), indent=1) + "\n", encoding="utf-8")

    def _content(self) -> dict:
        return self.about | {"cells": [cell.as_dict() for cell in self.cells]}

    def _file(self, path: str) -> Path:
        Path(path).parent.mkdir(parents=True, exist_ok=True)
        return Path(path)

    def conclude(self) -> None:
        """The table and the picture of all cells together."""
        if self.cells:
            self.say(overview(self.cells))
        if table := grid(self.cells):
            self.say(table)
        path = self.options.plot
        if path and self.speaks:
            if not plot_over_ranks(self._file(path), self.about["machine"], self._content()["cells"]):
                self.say(f"nothing was timed: no {path}")

    @property
    def refused(self):
        """Whether ours was refused or failed anywhere."""
        return any(r.refused for cell in self.cells for r in cell.results if r.peer.family == "ours")
