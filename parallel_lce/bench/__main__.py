"""`python -m parallel_lce.bench`: this machine, `parallel_lce` against its peers.

Exit status: 0 if ours was accurate and measured, 1 if ours was refused or failed on any shape or the device broke,
2 for a command line that cannot be run, which includes a named peer that does not exist or cannot run here.
"""

import itertools
import re
import sys
from dataclasses import replace

import torch
import torch.distributed as dist

from .machine import machine
from .options import argument, check_common, choose, common_options, need_extra
from .peers import ALL, names, registry
from .problem import Shape, make_problem
from .suites import DEFAULTS, SUITES
from .team import Team, describe

UNITS = {"": 1, "b": 1, "kib": 2**10, "mib": 2**20, "gib": 2**30}


def parse_budget(text):
    """'512MiB', '0', '1048576' -> bytes; 'all' -> more than anything needs; 'none' -> None, parallel_lce's default."""
    words = {"none": None, "all": ALL}
    if text.lower() in words:
        return words[text.lower()]
    match = re.fullmatch(r"(\d+)\s*([a-z]*)", text.strip().lower())
    if match is None or match[2] not in UNITS:
        raise ValueError(f"expected bytes, a number with KiB, MiB or GiB, all, or none, got {text!r}")
    return int(match[1]) * UNITS[match[2]]


def parse_deviation(text):
    if not re.fullmatch(r"\d+(\.\d*)?|\.\d+", text) or float(text) == 0:
        raise ValueError(f"expected a positive number, got {text!r}")
    return float(text)


def parse_share(text):
    if not re.fullmatch(r"0?\.\d+|0", text):
        raise ValueError(f"expected a share from 0 to less than 1, got {text!r}")
    return float(text)


def parse_arguments(arguments):
    """The command line; `options.plan` is the Suite to measure, with what was said about it on the command line."""
    parser = common_options("python -m parallel_lce.bench", "parallel_lce against its peers.", names())
    parser.add_argument("--suite", choices=SUITES, help="a set of shapes and strategies; other options override it")
    for name, metavar, parse, words in (
        ("--shape", "N,V,D", Shape.parse, "tokens, vocabulary, hidden size"),
        ("--logits-budget", "BYTES", parse_budget, "of ours: bytes, 512MiB, all, or none for its default"),
        ("--logit-std", "S", parse_deviation, "standard deviation of the logits, 1 by default"),
        ("--ignored", "SHARE", parse_share, "of the targets, 0.05 by default"),
    ):
        words += "; may be repeated"
        parser.add_argument(name, action="append", metavar=metavar, type=argument(parse), help=words)
    options = parser.parse_args(arguments)

    check_common(parser, options, names())
    if options.device == "cuda" and not torch.cuda.is_available():
        parser.error("--device cuda: torch finds no CUDA device")
    options.plan = _plan(options)
    options.rounds = options.rounds if options.plan.timed else 0
    return options


def _plan(options):
    plan = SUITES[options.suite] if options.suite else DEFAULTS[options.device]
    shapes = plan.shapes_beside(options.shape or plan.shapes)
    deviations, ignored = options.logit_std or plan.deviations, options.ignored or plan.ignored
    plan = replace(plan, shapes=shapes, deviations=tuple(deviations), ignored=tuple(ignored))
    kinds = dict.fromkeys(name for name, _ in plan.ours)
    if options.peers is not None:
        mine = [name for name in options.peers if name.startswith("ours")]
        kinds = dict.fromkeys(mine)
        known = [pair for pair in plan.ours if pair[0] in kinds]
        known += [(name, None) for name in kinds if name not in dict(plan.ours)]
        plan = replace(plan, ours=tuple(known), others=tuple(n for n in options.peers if n not in kinds))
    if options.logits_budget:
        budgets = dict.fromkeys(options.logits_budget)
        plan = replace(plan, ours=tuple((name, budget) for budget in budgets for name in kinds))
    return replace(plan, ours=tuple(pair for pair in plan.ours if pair[0] not in options.without))


def choose_peers(options):
    """`([Peer], {name: why it is not here})`. Exits with status 2 if a peer that was asked for by name, or ours, is not
    here; the others may be missing."""
    plan = options.plan
    only = None if plan.others is None else {*plan.others, *(name for name, _ in plan.ours)}
    chosen, missing = choose(registry(plan.ours), options, only, _why_not)
    needed = [name for name in missing if name in (options.peers or []) or name.startswith("ours")]
    if needed:
        print(f"{needed[0]} cannot run here: {missing[needed[0]]}", file=sys.stderr)
        raise SystemExit(2)
    return chosen, missing


def _why_not(peer):
    try:
        peer.loss()
    except Exception as error:  # importing another library may raise anything
        return describe(error)
    return ""


def main(arguments=None):
    options = parse_arguments(arguments)
    need_extra(options)
    from .plot import plot_shapes
    from .run import Run
    from .tables import overview

    device = torch.device(options.device, torch.cuda.current_device() if options.device == "cuda" else None)
    plan, (peers, missing) = options.plan, choose_peers(options)
    settings = {"suite": options.suite, "rounds": options.rounds, "seed": options.seed}
    settings["ours"] = [list(pair) for pair in plan.ours]
    run = Run(options, {"machine": machine(device), "settings": settings, "not_here": missing}, "shapes")

    def measure_shapes():
        for shape, deviation, ignored in itertools.product(plan.shapes, plan.deviations, plan.ignored):
            problem = (shape, options.dtype, Team(device), options.seed, deviation, ignored)
            run.measure(make_problem(*problem), peers, plan.passes)

    run.attempt(measure_shapes)
    run.conclude(overview(options.suite, run.cells), lambda path, facts: plot_shapes(path, facts, run.cells))
    for cell in run.cells:
        run.say(cell.summary())
    if dist.is_available() and dist.is_initialized() and not run.broken:
        dist.destroy_process_group()
    return run.status


if __name__ == "__main__":
    sys.exit(main())
