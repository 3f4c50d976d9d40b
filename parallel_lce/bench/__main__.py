"""`python -m parallel_lce.bench`: this machine, `parallel_lce` against its peers.

Exit status: 0 if ours was accurate and measured, 1 if ours was refused or failed on any shape or the device broke,
2 for a command line that cannot be run, which includes a named peer that does not exist or cannot run here.
"""

import argparse
import itertools
import os
import re
import sys
import time
from dataclasses import replace

import torch
import torch.distributed as dist

from .inputs import Shape, make_inputs
from .measure import Broken, describe, measure
from .peers import ALL, names, registry
from .report import Report, machine, write_json
from .suites import DEFAULTS, SUITES

DTYPES = {
    "float32": torch.float32,
    "fp32": torch.float32,
    "bfloat16": torch.bfloat16,
    "bf16": torch.bfloat16,
    "float16": torch.float16,
    "fp16": torch.float16,
}
DEFAULT_DTYPE = {"cpu": "float32", "cuda": "bfloat16"}
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


def argument(parse):
    """`parse` for argparse, with its own words in the message instead of 'invalid value'."""

    def convert(text):
        try:
            return parse(text)
        except ValueError as error:
            raise argparse.ArgumentTypeError(str(error)) from None

    return convert


def parse_arguments(arguments):
    """The command line; `options.plan` is the Suite to measure, with what was said about it on the command line."""
    parser = argparse.ArgumentParser(prog="python -m parallel_lce.bench", description="parallel_lce against its peers.")
    parser.add_argument("--suite", choices=SUITES, help="a set of shapes and strategies; other options override it")
    parser.add_argument(
        "--shape",
        action="append",
        metavar="N,V,D",
        type=argument(Shape.parse),
        help="tokens, vocabulary, hidden size; may be repeated",
    )
    parser.add_argument("--dtype", choices=DTYPES, help="of input and weight (float32 on cpu, bfloat16 on cuda)")
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--rounds", type=int, default=5, help="how often each peer is timed (default 5)")
    parser.add_argument(
        "--logits-budget",
        action="append",
        metavar="BYTES",
        type=argument(parse_budget),
        help="of ours: bytes, 512MiB, all, or none for its default; may be repeated",
    )
    parser.add_argument(
        "--logit-std",
        action="append",
        metavar="S",
        type=argument(parse_deviation),
        help="standard deviation of the logits, 1 by default; may be repeated",
    )
    parser.add_argument(
        "--ignored",
        action="append",
        metavar="SHARE",
        type=argument(parse_share),
        help="of the targets, 0.05 by default; may be repeated",
    )
    parser.add_argument(
        "--peers",
        nargs="+",
        metavar="NAME",
        help="only these; the bare products are always measured. Known: " + ", ".join(names()),
    )
    parser.add_argument("--without", nargs="+", metavar="NAME", default=[], help="not these")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--json", metavar="PATH", help="write everything measured")
    parser.add_argument("--plot", metavar="PATH", help="write a picture; the suffix chooses the format")
    options = parser.parse_args(arguments)

    check_common(parser, options)
    if options.device == "cuda" and not torch.cuda.is_available():
        parser.error("--device cuda: torch finds no CUDA device")
    for option in ("peers", "without"):
        given = getattr(options, option)
        if given is not None:
            given = [name for text in given for name in text.split(",") if name]
            setattr(options, option, given)
            unknown = [name for name in given if name not in names()]
            if unknown:
                parser.error(f"no such peer: {', '.join(unknown)}; known: {', '.join(sorted(names()))}")
    options.dtype = DTYPES[options.dtype or DEFAULT_DTYPE[options.device]]
    options.plan = _plan(options)
    return options


def check_common(parser, options):
    """What both benchmarks take. It ends the program for what would fail after minutes of measuring."""
    if options.rounds < 1:
        parser.error(f"--rounds must be at least 1, got {options.rounds}")
    if not -(2**63) <= options.seed < 2**63:  # torch.manual_seed's, and as much again for the ranks
        parser.error(f"--seed must be a number of 64 bits, got {options.seed}")
    if options.plot:
        try:
            from matplotlib.backend_bases import FigureCanvasBase
        except ImportError:  # need_extra says so
            return
        suffix, known = os.path.splitext(options.plot)[1][1:].lower(), FigureCanvasBase.get_supported_filetypes()
        if suffix and suffix not in known:
            parser.error(f"--plot {options.plot}: the suffix must be one of {', '.join(sorted(known))}")


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


def need_extra(options):
    """rich, and matplotlib for a picture, before minutes of measuring rather than after."""
    try:
        import rich  # noqa: F401

        if options.plot:
            import matplotlib  # noqa: F401
    except ImportError as error:
        sys.exit(f"the benchmark needs {error.name}: pip install 'parallel-lce[bench]'")


def build_peers(options):
    """`([(Peer, loss function)], {peer: why it is not here})`. Raises SystemExit if a peer that was asked for by name,
    or ours, is not here; the others may be missing."""
    here, missing, plan = [], {}, options.plan
    for peer in registry(plan.ours):
        named = options.peers is not None and peer.name in options.peers
        chosen = options.device in peer.devices if plan.others is None else peer.name in plan.others
        wanted = peer.family == "ours" or (chosen and peer.name not in options.without)
        if not wanted and peer.family != "bare":
            continue
        try:
            here.append((peer, peer.build and peer.build()))
        except Exception as error:  # importing another library may raise anything
            if named or peer.family == "ours":
                print(f"{peer} cannot run here: {describe(error)}", file=sys.stderr)
                raise SystemExit(2) from None
            missing[peer.name] = describe(error)
    return here, missing


def main(arguments=None):
    options = parse_arguments(arguments)
    need_extra(options)
    from rich.console import Console

    console = Console(highlight=False)
    if not console.is_terminal:
        console.width = 190  # a file or a pipe has no width, and wrapped numbers cannot be read
    status, begun = Console(stderr=True, highlight=False), time.monotonic()
    device = torch.device(options.device, torch.cuda.current_device() if options.device == "cuda" else None)
    plan, facts = options.plan, machine(device)
    rounds = options.rounds if plan.timed else 0
    settings = {
        "suite": options.suite,
        "rounds": rounds,
        "seed": options.seed,
        "ours": [list(pair) for pair in plan.ours],
    }
    console.print("; ".join(f"{name}: {text}" for name, text in facts.items()), soft_wrap=True)

    def one(shape, deviation, ignored):
        peers, missing = build_peers(options)
        if missing and not reports:
            text = "; ".join(f"{peer} ({why})" for peer, why in missing.items())
            console.print(f"not here: {text}", markup=False, soft_wrap=True)

        def progress(text):
            seconds = time.monotonic() - begun
            status.print(f"{seconds:5.0f} s  {shape}: {text}", style="dim", markup=False, soft_wrap=True)

        inputs = make_inputs(shape, options.dtype, device, options.seed, deviation, ignored)
        measured = measure(peers, inputs, plan.passes, rounds, device, say=progress)
        reports.append(Report(shape, options.dtype, inputs, plan.passes, *measured))
        console.print(reports[-1].table())
        for result in reports[-1].results:
            if result.refused:
                console.print(f"{result.peer}: {result.refused}", markup=False, soft_wrap=True)
        if options.json:  # after each shape: a later one may be too large
            write_json(options.json, settings, facts, missing, reports)

    reports, broken = [], False
    try:
        for case in itertools.product(plan.shapes, plan.deviations, plan.ignored):
            one(*case)
    except Broken as error:
        console.print(str(error), markup=False, soft_wrap=True)
        broken = True
    conclude(options, console, facts, reports)
    if dist.is_available() and dist.is_initialized() and not broken:
        dist.destroy_process_group()
    ours_refused = [r for report in reports for r in report.results if r.peer.family == "ours" and r.refused]
    return 1 if ours_refused or broken else 0


def conclude(options, console, facts, reports):
    """What is said of all shapes together."""
    from .overview import tables

    for table in tables(options.suite, reports):
        console.print(table)
    if options.plot:
        from .plot import write_plot

        if not write_plot(options.plot, facts, reports):
            console.print(f"nothing was timed: no {options.plot}", markup=False)
    for report in reports:
        console.print(report.sentences(), soft_wrap=True)


if __name__ == "__main__":
    sys.exit(main())
