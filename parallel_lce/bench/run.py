"""One run of the benchmark: measures problems, prints tables, writes JSON and a picture."""

import os
import time
from dataclasses import replace

from rich.console import Console

from .accuracy import Judge, exact, torch_in_same_dtype
from .communication import measure_collectives, write_trace
from .measure import measure, release
from .peers import FORWARD_BACKWARD
from .plot import plot_over_ranks, plot_shapes
from .results import Cell, write_json
from .tables import cell_table, new_console, overview, say


class Run:
    """Of several ranks one `speaks`: it prints and writes. Results go to stdout, progress with seconds to stderr."""

    def __init__(self, options, facts, speaks):
        settings = {"suite": options.suite, "rounds": options.rounds, "tp": options.tp, "ours": options.plan.ours}
        self.content = {"machine": facts, "settings": settings, "not_here": options.not_here}
        self.options, self.speaks, self.cells = options, speaks, []
        self._begun = time.monotonic()
        self._results, self._status = new_console(), Console(stderr=True, highlight=False)
        self.say("; ".join(f"{name}: {text}" for name, text in facts.items()))
        if options.not_here:
            self.say("not here: " + "; ".join(f"{peer} ({why})" for peer, why in options.not_here.items()))

    def say(self, what):
        if self.speaks:
            say(self._results, what)

    def _progress(self, problem, text):
        if self.speaks:
            words = f"{time.monotonic() - self._begun:5.0f} s  {problem}: {text}"
            self._status.print(words, style="dim", markup=False, soft_wrap=True)

    def measure(self, problem, peers):
        """A cell for each layout of the problem, without or with sequence parallelism."""
        team, passes = problem.team, self.options.plan.passes
        self._progress(problem, "float64 truth")
        gradients = FORWARD_BACKWARD in passes
        answers = exact(problem, gradients), torch_in_same_dtype(problem, gradients)
        release(team.device)
        collectives = measure_collectives(problem, self.options.rounds)
        layouts = self.options.sequence_parallel if team.ranks > 1 else [False]
        for layout in layouts:
            judge = Judge(replace(problem, sequence_parallel=layout), *answers)
            if layout == layouts[-1]:
                answers = None  # the judge frees what it still needs of them
            cell = Cell.of(judge, passes)
            cell.collectives = collectives
            cell.results = self._measure(judge, peers, passes)
            self._finished(cell)
        release(team.device)

    def _measure(self, judge, peers, passes):
        def progress(text):
            self._progress(judge.problem, text)

        def after(result, call):
            if self.options.trace:
                write_trace(self.options.trace, judge.problem, result.peer, call)

        return measure(peers, judge, self.options.rounds, passes, progress, after)

    def _finished(self, cell):
        self.cells.append(cell)
        self.say(cell_table(cell))
        for result in cell.results:
            if result.refused:
                self.say(f"{result.peer}: {result.refused}")
        if self.options.json and self.speaks:  # after each: a later one may fail
            write_json(
                self.options.json, self.content | {"shapes" if self.options.alone else "cells": self._as_dicts()}
            )

    def _as_dicts(self):
        return [cell.as_dict() for cell in self.cells]

    def conclude(self):
        """The table and the picture of all cells together."""
        if self.cells:
            self.say(overview(self.cells))
        path = self.options.plot
        if path and self.speaks:
            os.makedirs(os.path.dirname(path) or ".", exist_ok=True)
            plot = plot_shapes if self.options.alone else plot_over_ranks
            if not plot(path, self.content["machine"], self._as_dicts()):
                self.say(f"nothing was timed: no {path}")

    @property
    def refused(self):
        """Whether ours was refused or failed anywhere."""
        return any(r.refused for cell in self.cells for r in cell.results if r.peer.family == "ours")
