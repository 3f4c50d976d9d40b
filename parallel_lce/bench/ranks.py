"""`torchrun ... -m parallel_lce.bench.ranks`, or `./launch/bench.sh`: ours and its peers over tensor-parallel ranks.

Measures every TP size of `--tp` in one run, each on the first ranks, while the others wait. Exit status: 0 if ours was
accurate and measured, 1 if ours was refused or failed anywhere or a device broke, 2 for a command line that cannot be
run.
"""

import contextlib
import importlib.util
import io
import math
import os
import sys
import warnings
from dataclasses import fields

import torch
import torch.distributed as dist

from .machine import machine
from .options import check_common, choose, common_options, need_extra
from .peers import OVERLAPPED, registry_over_ranks
from .problem import Shape, make_problem
from .team import Team, join
from .timing import Window

TOKENS = {"cpu": [256, 512], "cuda": [8192, 32768]}
VOCABULARY, HIDDEN = {"cpu": 4096, "cuda": 131072}, {"cpu": 64, "cuda": 4096}
LONGEST_TIMEOUT = 10**7
SEQUENCE_PARALLEL = {"off": False, "on": True}


def names():
    return [peer.name for peer in registry_over_ranks()]


def parse_arguments(arguments, ranks, ranks_here):
    """The command line of a run of so many ranks, and so many of this host."""
    parser = common_options("./launch/bench.sh", "parallel_lce over tensor-parallel ranks.", names())
    add = parser.add_argument
    sizes = "TP sizes (the powers of two up to the number of ranks, and that number)"
    add("--tp", nargs="+", type=int, metavar="P", help=sizes)
    add("--tokens", nargs="+", type=int, metavar="N", help="8192 32768 on cuda, 256 512 on cpu")
    add("--vocabulary", type=int, metavar="V", help="of all ranks: 131072 on cuda, 4096 on cpu")
    add("--hidden", type=int, metavar="D", help="hidden size: 4096 on cuda, 64 on cpu")
    add("--sequence-parallel", nargs="+", choices=SEQUENCE_PARALLEL, default=["off", "on"])
    for window in fields(Window):
        name, default = window.name.replace("_", "-"), 1e3 * window.default
        add(f"--{name}-ms", type=float, default=default, help=f"of a reading (default {default:.0f})")
    add("--timeout", type=float, default=180, help="seconds after which a collective ends the run")
    add("--trace", metavar="DIR", help="write the timeline of one forward + backward call of some peers")
    options = parser.parse_args(arguments)

    powers = {2**k for k in range(ranks.bit_length()) if 2**k <= ranks}
    options.tp = sorted(set(options.tp or powers | {ranks}))
    options.tokens = list(dict.fromkeys(options.tokens or TOKENS[options.device]))
    options.vocabulary = VOCABULARY[options.device] if options.vocabulary is None else options.vocabulary
    options.hidden = HIDDEN[options.device] if options.hidden is None else options.hidden
    options.sequence_parallel = [SEQUENCE_PARALLEL[word] for word in dict.fromkeys(options.sequence_parallel)]
    options.window = Window(options.warm_up_ms / 1e3, options.measured_ms / 1e3)
    check_common(parser, options, names())
    _check(parser, options, ranks)
    if options.device == "cuda" and torch.cuda.device_count() < ranks_here:
        parser.error(f"one GPU per process is needed, this host has {torch.cuda.device_count()}")
    return options


def _check(parser, options, ranks):
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


def choose_peers(options):
    """`([Peer], {name: why it is not here})`. Raises SystemExit if one that was asked for by name is not here."""
    chosen, missing = choose(registry_over_ranks(), options, options.peers, _no_module)
    named = [name for name in options.peers or [] if name in missing]
    if named:
        raise SystemExit(f"cannot run here: {', '.join(f'{name} ({missing[name]})' for name in named)}")
    return chosen, missing


def _no_module(peer):
    try:
        found = not peer.needs or importlib.util.find_spec(peer.needs) is not None
    except ImportError:  # of the package that it is a part of
        found = False
    return "" if found else f"no module {peer.needs}"


def main(arguments=None):
    if "RANK" not in os.environ:
        sys.exit("not started by torchrun: use ./launch/bench.sh, or torchrun -m parallel_lce.bench.ranks")
    rank = int(os.environ["RANK"])
    with contextlib.ExitStack() as quiet:
        if rank != 0:  # what every rank would say in the same words
            warnings.filterwarnings("ignore")
            for redirect in (contextlib.redirect_stdout, contextlib.redirect_stderr):
                quiet.enter_context(redirect(io.StringIO()))
        ranks, here = int(os.environ["WORLD_SIZE"]), int(os.environ.get("LOCAL_WORLD_SIZE", "1"))
        options = parse_arguments(arguments, ranks, here)
    need_extra(options)
    return measure_all(options, rank)


def measure_all(options, rank):
    from .plot import plot_over_ranks
    from .run import Run
    from .tables import overview_over_ranks

    peers, missing = choose_peers(options)
    device = join(options.device)
    facts = machine(device) | {"ranks": str(dist.get_world_size())} if rank == 0 else {}
    settings = {"rounds": options.rounds, "seed": options.seed, "tp": options.tp, **vars(options.window)}
    run = Run(options, {"machine": facts, "settings": settings, "not_here": missing}, "cells", speaks=rank == 0)
    run.attempt(lambda: _measure_sizes(options, peers, device, run))
    cells = [cell.as_dict() for cell in run.cells]
    run.conclude(overview_over_ranks(run.cells), lambda path, facts: plot_over_ranks(path, facts, cells))
    if not run.broken:
        dist.barrier()
        dist.destroy_process_group()
    return run.status


def _measure_sizes(options, peers, device, run):
    for tp in options.tp:
        team = Team.of(tp, device, options.timeout)
        if team is not None:
            # A single rank has one layout, and nothing to overlap.
            here = [peer for peer in peers if tp > 1 or peer.name != OVERLAPPED]
            layouts = options.sequence_parallel if tp > 1 else [False]
            for tokens in options.tokens:
                shape = Shape(tokens, options.vocabulary, options.hidden)
                run.measure(make_problem(shape, options.dtype, team, options.seed), here, layouts=layouts)
        dist.barrier()  # the ranks outside the team wait here


if __name__ == "__main__":
    sys.exit(main())
