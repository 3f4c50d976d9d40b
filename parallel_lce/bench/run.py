"""One run of the benchmark: measures problems, prints tables, writes JSON and a picture."""

import gc
import os
import time
from dataclasses import replace

from rich.console import Console

from .accuracy import Judge, exact, torch_in_same_dtype
from .communication import hidden_communication, measure_collectives, write_trace
from .measure import measure, release
from .peers import FORWARD_BACKWARD, PASSES
from .results import Cell, write_json
from .tables import cell_table, new_console, say
from .team import Broken
from .timing import timer


class Run:
    """`content` is what the JSON says beside the cells, which stand there under `key`. Of several ranks one `speaks`:
    it prints and writes. Results go to stdout, progress with seconds to stderr."""

    def __init__(self, options, content, key, speaks=True):
        self.options, self.content, self.key, self.speaks = options, content, key, speaks
        self.cells, self.broken = [], False
        self._begun = time.monotonic()
        self._results, self._status = new_console(), Console(stderr=True, highlight=False)
        self.say("; ".join(f"{name}: {text}" for name, text in content["machine"].items()))
        if content["not_here"]:
            self.say("not here: " + "; ".join(f"{peer} ({why})" for peer, why in content["not_here"].items()))

    def say(self, what):
        if self.speaks:
            say(self._results, what)

    def _progress(self, text):
        if self.speaks:
            seconds = time.monotonic() - self._begun
            self._status.print(f"{seconds:5.0f} s  {text}", style="dim", markup=False, soft_wrap=True)

    def measure(self, problem, peers, passes=PASSES, layouts=(False,)):
        """A cell for each layout, without or with sequence parallelism."""
        options, team, gradients = self.options, problem.team, FORWARD_BACKWARD in passes
        if not team.alone:
            gc.collect()
            gc.freeze()  # the libraries' own objects, which every collection would look at again
        self._progress(f"{problem}: float64 truth")
        answers = exact(problem, gradients), torch_in_same_dtype(problem, gradients)
        release(team.device)
        collectives = measure_collectives(problem, options.rounds, options.window)
        for number, layout in enumerate(layouts, 1):
            judge = Judge(replace(problem, sequence_parallel=layout), *answers)
            if number == len(layouts):
                answers = None  # the judge frees what it still needs of them
            cell = Cell.of(judge, passes)
            cell.collectives = collectives

            def progress(text, problem=judge.problem):
                self._progress(f"{problem}: {text}")

            def after(result, call, problem=judge.problem, cell=cell):
                path = write_trace(options.trace, problem, result.peer.name, call) if options.trace else None
                if path and team.device.type == "cuda":
                    cell.hidden[result.peer.name] = hidden_communication(path)

            cell.results = measure(peers, judge, timer(team, options.window), options.rounds, passes, progress, after)
            self._finished(cell)
        release(team.device)

    def _finished(self, cell):
        self.cells.append(cell)
        self.say(cell_table(cell))
        for name, (whole, hidden) in cell.hidden.items():
            self.say(f"{name}, timeline of a call: {whole:.3f} ms of communication, {hidden:.3f} beside other work")
        for result in cell.results:
            if result.refused:
                self.say(f"{result.peer}: {result.refused}")
        if self.options.json and self.speaks:  # after each: a later one may fail
            write_json(self.options.json, self.content | {self.key: [cell.as_dict() for cell in self.cells]})

    def attempt(self, measure_all):
        """Calls `measure_all()`, which a broken device ends."""
        try:
            measure_all()
        except Broken as error:
            self.say(str(error))
            self.broken = True

    def conclude(self, tables, plot):
        """What is said of all cells together. `plot(path, facts)` returns whether there was anything to draw."""
        if not self.speaks:
            return
        for table in tables:
            self.say(table)
        path = self.options.plot
        if path:
            os.makedirs(os.path.dirname(path) or ".", exist_ok=True)
            if not plot(path, self.content["machine"]):
                self.say(f"nothing was timed: no {path}")

    @property
    def status(self):
        """The exit status: 1 if ours was refused or failed anywhere, or a device broke."""
        refused = [r for cell in self.cells for r in cell.results if r.peer.family == "ours" and r.refused]
        return 1 if refused or self.broken else 0
