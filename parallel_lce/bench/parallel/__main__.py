"""`torchrun ... -m parallel_lce.bench.parallel`, or `./launch/bench.sh`: ours and its peers over tensor-parallel ranks.

Measures every TP size of `--tp` in one run, each on the first ranks, while the others wait. Exit status: 0 if ours was
accurate and measured, 1 if ours was refused or failed anywhere or a device broke, 2 for a command line that cannot be
run.
"""

import argparse
import contextlib
import gc
import importlib.util
import io
import math
import os
import sys
import time
import warnings
from dataclasses import fields

import torch
import torch.distributed as dist

from ..__main__ import DEFAULT_DTYPE, DTYPES, check_common, need_extra
from ..inputs import Shape
from ..libraries import forget_compiled
from ..measure import Broken, release
from ..report import machine
from .collectives import measure_collectives
from .measure import Window, measure
from .peers import NEEDS, names, registry
from .problem import Truth, make_problem
from .report import Cell, collectives_table, overview, write_json
from .team import Team, join
from .trace import communication, write_trace

TOKENS = {"cpu": [256, 512], "cuda": [8192, 32768]}
VOCABULARY, HIDDEN = {"cpu": 4096, "cuda": 131072}, {"cpu": 64, "cuda": 4096}
LONGEST_TIMEOUT = 10**7
SEQUENCE_PARALLEL = {"off": False, "on": True}


def parse_arguments(arguments, ranks, ranks_here):
    """The command line of a run of so many ranks, and so many of this host."""
    parser = argparse.ArgumentParser(prog="./launch/bench.sh", description="parallel_lce over tensor-parallel ranks.")
    parser.add_argument(
        "--tp",
        nargs="+",
        type=int,
        metavar="P",
        help="TP sizes (the powers of two up to the number of ranks, and that number)",
    )
    parser.add_argument("--tokens", nargs="+", type=int, metavar="N", help="8192 32768 on cuda, 256 512 on cpu")
    parser.add_argument("--vocabulary", type=int, metavar="V", help="of all ranks: 131072 on cuda, 4096 on cpu")
    parser.add_argument("--hidden", type=int, metavar="D", help="hidden size: 4096 on cuda, 64 on cpu")
    parser.add_argument("--sequence-parallel", nargs="+", choices=SEQUENCE_PARALLEL, default=["off", "on"])
    parser.add_argument("--dtype", choices=DTYPES, help="of input and weight (float32 on cpu, bfloat16 on cuda)")
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--peers", nargs="+", metavar="NAME", help="only these. Known: " + ", ".join(names()))
    parser.add_argument("--without", nargs="+", metavar="NAME", default=[], help="not these")
    parser.add_argument("--rounds", type=int, default=5, help="how often each peer is timed (default 5)")
    for window in fields(Window):
        name, default = window.name.replace("_", "-"), 1e3 * window.default
        parser.add_argument(f"--{name}-ms", type=float, default=default, help=f"of a reading (default {default:.0f})")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--timeout", type=float, default=180, help="seconds after which a collective ends the run")
    parser.add_argument("--json", metavar="PATH", help="write everything measured, after each configuration")
    parser.add_argument("--plot", metavar="PATH", help="write a picture of time against TP")
    parser.add_argument(
        "--trace", metavar="DIR", help="write the timeline of one forward + backward call of some peers"
    )
    options = parser.parse_args(arguments)

    powers = {2**k for k in range(ranks.bit_length()) if 2**k <= ranks}
    options.tp = sorted(set(options.tp or powers | {ranks}))
    options.tokens = list(dict.fromkeys(options.tokens or TOKENS[options.device]))
    options.vocabulary = VOCABULARY[options.device] if options.vocabulary is None else options.vocabulary
    options.hidden = HIDDEN[options.device] if options.hidden is None else options.hidden
    options.dtype = DTYPES[options.dtype or DEFAULT_DTYPE[options.device]]
    options.sequence_parallel = [SEQUENCE_PARALLEL[word] for word in dict.fromkeys(options.sequence_parallel)]
    options.window = Window(options.warm_up_ms / 1e3, options.measured_ms / 1e3)
    _check(parser, options, ranks, ranks_here)
    return options


def _check(parser, options, ranks, ranks_here):
    check_common(parser, options)
    for option in ("warm-up-ms", "measured-ms"):
        value = getattr(options, option.replace("-", "_"))
        if not (math.isfinite(value) and value >= 0):
            parser.error(f"--{option} must be a number >= 0, got {value}")
    if not 1 <= options.timeout <= LONGEST_TIMEOUT:
        parser.error(f"--timeout must lie in 1 to {LONGEST_TIMEOUT} seconds, got {options.timeout}")
    for name, sizes in (("hidden", [options.hidden]), ("vocabulary", [options.vocabulary]), ("tokens", options.tokens)):
        for size in sizes:
            if not 1 <= size < 2**31:
                parser.error(f"--{name} must lie in 1 to {2**31 - 1}, got {size}")
    if not 1 <= options.tp[0] <= options.tp[-1] <= ranks:
        parser.error(f"--tp must lie in 1 to {ranks}, the number of ranks, got {options.tp}")
    for tp in options.tp:
        for name, size in [("--vocabulary", options.vocabulary), *(("--tokens", n) for n in options.tokens)]:
            if size % tp:
                parser.error(f"{name} must be a positive multiple of the TP size, got {size} for TP {tp}")
    known = names()
    for option in ("peers", "without"):
        given = [name for text in getattr(options, option) or [] for name in text.split(",") if name]
        unknown = [name for name in given if name not in known]
        if unknown:
            parser.error(f"no such peer: {', '.join(unknown)}; known: {', '.join(known)}")
        setattr(options, option, given if getattr(options, option) is not None else None)
    if options.device == "cuda" and torch.cuda.device_count() < ranks_here:
        parser.error(f"one GPU per process is needed, this host has {torch.cuda.device_count()}")


def choose_peers(options):
    """`([Peer], {name: why it is not here})`. Raises SystemExit if one that was asked for by name is not here."""
    chosen, missing = [], {}
    for peer in registry():
        wanted = options.device in peer.devices if options.peers is None else peer.name in options.peers
        if peer.family == "bare":
            wanted = True
        if not wanted or peer.name in options.without:
            continue
        if not _importable(NEEDS.get(peer.name)):
            missing[peer.name] = f"no module {NEEDS[peer.name]}"
            continue
        chosen.append(peer)
    named = [name for name in options.peers or [] if name in missing]
    if named:
        raise SystemExit(f"cannot run here: {', '.join(f'{name} ({missing[name]})' for name in named)}")
    return chosen, missing


def _importable(module):
    try:
        return module is None or importlib.util.find_spec(module) is not None
    except ImportError:
        return False


class Voice:
    """Says things on rank 0, results to stdout and progress with seconds to stderr."""

    def __init__(self, rank):
        from rich.console import Console

        self._quiet, self._begun = rank != 0, time.monotonic()
        self._results, self._status = Console(highlight=False), Console(stderr=True, highlight=False)
        if not self._results.is_terminal:
            self._results.width = 240  # a file or a pipe has no width, and wrapped numbers cannot be read

    def result(self, *texts):
        if not self._quiet:
            self._results.print(*texts, markup=False, soft_wrap=all(isinstance(text, str) for text in texts))

    def progress(self, text):
        if not self._quiet:
            seconds = time.monotonic() - self._begun
            self._status.print(f"{seconds:5.0f} s  {text}", style="dim", markup=False, soft_wrap=True)


def main(arguments=None):
    if "RANK" not in os.environ:
        sys.exit("not started by torchrun: use ./launch/bench.sh, or torchrun -m parallel_lce.bench.parallel")
    rank = int(os.environ["RANK"])
    with contextlib.ExitStack() as quiet:
        if rank != 0:  # what every rank would say in the same words
            warnings.filterwarnings("ignore")
            for redirect in (contextlib.redirect_stdout, contextlib.redirect_stderr):
                quiet.enter_context(redirect(io.StringIO()))
        ranks, here = int(os.environ["WORLD_SIZE"]), int(os.environ.get("LOCAL_WORLD_SIZE", "1"))
        options = parse_arguments(arguments, ranks, here)
    need_extra(options)
    return run(options, rank)


def run(options, rank):
    peers, missing = choose_peers(options)
    voice, device = Voice(rank), join(options.device)
    facts = machine(device) | {"ranks": str(dist.get_world_size())} if rank == 0 else {}
    voice.result("; ".join(f"{name}: {text}" for name, text in facts.items()))
    if missing:
        voice.result("not here: " + "; ".join(f"{name} ({why})" for name, why in missing.items()))
    settings = {"rounds": options.rounds, "seed": options.seed, "tp": options.tp, **vars(options.window)}
    cells, broken = [], False
    for path in (options.json, options.plot):
        if path and rank == 0:
            os.makedirs(os.path.dirname(path) or ".", exist_ok=True)

    def finished(cell):
        cells.append(cell)
        voice.result(cell.table())
        for name, (whole, hidden) in cell.hidden.items():
            voice.result(f"{name}, timeline of a call: {whole:.3f} ms of communication, {hidden:.3f} beside other work")
        for result in cell.results:
            if result.refused:
                voice.result(f"{result.peer}: {result.refused}")
        if options.json and rank == 0:  # after each: a later one may fail
            write_json(options.json, facts, settings, missing, cells)

    try:
        for tp in options.tp:
            team = Team.of(tp, device, options.timeout)
            if team is not None:
                for tokens in options.tokens:
                    shape = Shape(tokens, options.vocabulary, options.hidden)
                    measure_shape(options, team, shape, peers, voice.progress, finished)
            dist.barrier()  # the ranks that are not in it wait here
    except Broken as error:
        voice.result(str(error))
        broken = True
    if rank == 0:
        conclude(options, voice, facts, cells)
    if not broken:
        dist.barrier()
        dist.destroy_process_group()
    refused = [r for cell in cells for r in cell.results if r.peer.family == "ours" and r.refused]
    return 1 if refused or broken else 0


def conclude(options, voice, facts, cells):
    """What is said of all cells together."""
    if any(cell.collectives for cell in cells):
        voice.result(collectives_table(cells))
    voice.result(overview(cells))
    if options.plot:
        from .plot import write_plot

        if not write_plot(options.plot, facts, [cell.as_dict() for cell in cells]):
            voice.result(f"nothing was timed: no {options.plot}")


def measure_shape(options, team, shape, peers, say, finished):
    """One TP size and shape, with and without sequence parallelism: a single rank has but one layout."""
    title = f"TP {team.ranks}, N={shape.n}"
    if team.ranks == 1:
        peers = [peer for peer in peers if peer.name != "bare-overlapped"]
    if any(peer.name == "megatron-fused" for peer in peers):
        forget_compiled()
    gc.collect()
    gc.freeze()  # the libraries' own objects, which every collection would visit again
    say(f"{title}: float64 truth")
    problem = make_problem(shape, options.dtype, team, options.seed)
    truth = Truth(problem, team)
    release(team.device)
    collectives = measure_collectives(problem, team, options.rounds, options.window)
    layouts = options.sequence_parallel if team.ranks > 1 else [False]
    for number, sequence_parallel in enumerate(layouts):
        judge = truth.judge(sequence_parallel)
        cell = Cell(
            team.ranks,
            shape,
            sequence_parallel,
            options.dtype,
            [],
            judge.largest_logit,
            judge.yardstick,
            judge.limits,
            collectives,
        )

        def after(result, call, cell=cell):
            path = write_trace(options.trace, cell, result.peer.name, call, team) if options.trace else None
            if path and team.device.type == "cuda":
                cell.hidden[result.peer.name] = communication(path)

        def progress(text, cell=cell):
            say(f"{title}{', SP' if cell.sequence_parallel else ''}: {text}")

        if number == len(layouts) - 1:
            truth.forget()
        cell.results = measure(
            peers, problem, judge, sequence_parallel, team, options.rounds, options.window, progress, after
        )
        finished(cell)
    release(team.device)


if __name__ == "__main__":
    sys.exit(main())
