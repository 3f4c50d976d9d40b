"""The command line: what is measured, and where it is written."""

import os
import re
from argparse import ArgumentParser, ArgumentTypeError
from dataclasses import replace

import torch

from .peers import ALL, ONE, OURS, RANKS, named, registry
from .problem import Shape
from .suites import DEFAULTS, SUITES

DEFAULT_DTYPE = {"cpu": "float32", "cuda": "bfloat16"}
LAYOUTS = {"off": False, "on": True}
UNITS = {"": 1, "b": 1, "kib": 2**10, "mib": 2**20, "gib": 2**30}


def parse_shape(text):
    """'N,V,D' -> Shape."""
    try:
        numbers = [int(part) for part in text.split(",")]
    except ValueError:
        numbers = []
    if len(numbers) != 3 or not all(1 <= number < 2**31 for number in numbers):
        raise ArgumentTypeError(f"a shape is three positive numbers N,V,D below 2^31, got {text!r}")
    return Shape(*numbers)


def parse_budget(text):
    """'512MiB', '0', '1048576' -> bytes; 'all' -> more than anything needs; 'none' -> None, parallel_lce's default."""
    words = {"none": None, "all": ALL}
    if text.lower() in words:
        return words[text.lower()]
    match = re.fullmatch(r"(\d+)\s*([a-z]*)", text.strip().lower())
    if match is None or match[2] not in UNITS:
        raise ArgumentTypeError(f"expected bytes, a number with KiB, MiB or GiB, all, or none, got {text!r}")
    return int(match[1]) * UNITS[match[2]]


def picture(text):
    """A path whose suffix matplotlib knows. Without matplotlib __main__.py ends the program."""
    try:
        from matplotlib.backend_bases import FigureCanvasBase
    except ImportError:
        return text
    suffix, known = os.path.splitext(text)[1][1:].lower(), FigureCanvasBase.get_supported_filetypes()
    if suffix and suffix not in known:
        raise ArgumentTypeError(f"the suffix must be one of {', '.join(sorted(known))}, got {text}")
    return text


def parse_arguments(arguments, ranks=None, ranks_here=1):
    """The command line of one process, or of a run of so many ranks, and so many of this host.

    Of the result `plan` is the Suite to measure, `chosen` are the Peers, and `not_here` is {name: why it cannot run
    here}. Ends the program for what would fail after minutes of measuring.
    """
    layout = ONE if ranks is None else RANKS
    parser = _parser(layout)
    options = parser.parse_args(arguments)
    options.alone, options.dtype = layout == ONE, getattr(torch, options.dtype or DEFAULT_DTYPE[options.device])
    if options.rounds < 1:
        parser.error(f"--rounds must be at least 1, got {options.rounds}")
    if options.device == "cuda" and torch.cuda.device_count() < ranks_here:
        parser.error(f"one GPU per process is needed, this host has {torch.cuda.device_count()}")

    suite = SUITES[options.suite] if options.suite else DEFAULTS[layout, options.device]
    known = [peer.name for peer in registry(suite.ours, layout)]
    known = dict.fromkeys([*OURS, *known])
    for option in ("peers", "without"):
        given = getattr(options, option)
        given = given and [name for text in given for name in text.split(",") if name]
        setattr(options, option, given)
        unknown = [name for name in given or () if name not in known]
        if unknown:
            parser.error(f"no such peer: {', '.join(unknown)}; known: {', '.join(known)}")
    options.plan = _plan(suite, options, layout)
    _choose_peers(parser, options, layout)

    ranks = ranks or 1
    powers = {2**k for k in range(ranks.bit_length())}
    options.tp = sorted(set(options.tp or powers | {ranks}))
    if not 1 <= options.tp[0] <= options.tp[-1] <= ranks:
        parser.error(f"--tp must lie in 1 to {ranks}, the number of ranks, got {options.tp}")
    for tp in options.tp:
        for shape in options.plan.shapes:
            if shape.n % tp or shape.v % tp:
                parser.error(f"--shape: N and V must be multiples of the TP size, got {shape} for TP {tp}")
    options.sequence_parallel = [LAYOUTS[word] for word in dict.fromkeys(options.sequence_parallel)]
    return options


def _parser(layout):
    program = "python -m parallel_lce.bench" if layout == ONE else "./launch/bench.sh"
    parser = ArgumentParser(prog=program, description="parallel_lce against its peers.")
    add = parser.add_argument
    add("--suite", choices=SUITES, help="a set of shapes and strategies; other options override it")
    words = "tokens, vocabulary of all ranks, hidden size; may be repeated"
    add("--shape", action="append", metavar="N,V,D", type=parse_shape, help=words)
    words = "of ours: bytes, 512MiB, all, or none for its default; may be repeated"
    add("--logits-budget", action="append", metavar="BYTES", type=parse_budget, help=words)
    add("--dtype", choices=("float32", "bfloat16", "float16"), help="float32 on cpu, bfloat16 on cuda")
    add("--device", choices=("cpu", "cuda"), default="cuda" if torch.cuda.is_available() else "cpu")
    add("--rounds", type=int, default=5, help="how often each peer is timed (default 5)")
    add("--peers", nargs="+", metavar="NAME", help="only these, and the GEMM-only baseline")
    add("--without", nargs="+", metavar="NAME", default=[], help="not these")
    words = "TP sizes (the powers of two up to the number of ranks, and that number)"
    add("--tp", nargs="+", type=int, metavar="P", help=words)
    words = "off and on over several ranks"
    add("--sequence-parallel", nargs="+", choices=LAYOUTS, default=["off", "on"], help=words)
    add("--json", metavar="PATH", help="write everything measured, again after each table")
    add("--plot", metavar="PATH", type=picture, help="write a picture; the suffix chooses the format")
    words = "write the timeline of one forward + backward call of ours and of the baseline with collectives"
    add("--trace", metavar="DIR", help=words)
    return parser


def _plan(suite, options, layout):
    """The suite with what was said about it on the command line."""
    ours, others = suite.ours, suite.others
    if options.peers is not None:
        ours = [strategy for strategy in ours if named(strategy, layout)[0] in options.peers]
        ours += [(kind, None) for kind in options.peers if kind in OURS and kind not in dict(ours)]
        others = tuple(name for name in options.peers if not name.startswith("ours"))
    if options.logits_budget:
        kinds = dict.fromkeys(kind for kind, _ in ours)
        ours = [(kind, budget) for budget in dict.fromkeys(options.logits_budget) for kind in kinds]
    ours = tuple(strategy for strategy in ours if named(strategy, layout)[0] not in options.without)
    return replace(suite, shapes=tuple(options.shape or suite.shapes), ours=ours, others=others)


def _choose_peers(parser, options, layout):
    """Sets `options.chosen` and `options.not_here`. Only peers that were not asked for by name may be missing."""
    options.chosen, options.not_here = [], {}
    for peer in registry(options.plan.ours, layout):
        others = options.plan.others
        wanted = options.device in peer.devices if others is None else peer.name in others
        if (wanted or peer.family != "other") and peer.name not in options.without:
            if peer.missing:
                options.not_here[peer.name] = peer.missing
            else:
                options.chosen.append(peer)
    lacking = [f"{name} ({why})" for name, why in options.not_here.items() if name in (options.peers or ())]
    if lacking:
        parser.error(f"cannot run here: {', '.join(lacking)}")
