"""The command line: what is measured, and where it is written."""

import os
from argparse import ArgumentParser, ArgumentTypeError, Namespace
from dataclasses import replace
from functools import partial

import torch

from .peers import FORWARD_BACKWARD, LOSSES, ONE, RANKS, Peer, named, others
from .problem import Shape
from .suites import DEFAULTS, SUITES, Suite

DEFAULT_DTYPE = {"cpu": "float32", "cuda": "bfloat16"}
ON_OFF = {"off": False, "on": True}


def parse_shape(text: str) -> Shape:
    """'N,V,D' -> Shape."""
    try:
        numbers = [int(part) for part in text.split(",")]
    except ValueError:
        numbers = []
    if len(numbers) != 3 or not all(1 <= number < 2**31 for number in numbers):
        raise ArgumentTypeError(f"a shape is three positive numbers N,V,D below 2^31, got {text!r}")
    return Shape(*numbers)


def parse_peer(setting: str, text: str) -> Peer:
    try:
        return named(text, setting)
    except ValueError as error:
        raise ArgumentTypeError(str(error)) from None


def picture(text: str) -> str:
    """A path whose suffix matplotlib knows."""
    try:
        from matplotlib.backend_bases import FigureCanvasBase
    except ImportError:
        raise ArgumentTypeError("a picture needs matplotlib: pip install 'parallel-lce[bench]'") from None
    suffix, known = os.path.splitext(text)[1][1:].lower(), FigureCanvasBase.get_supported_filetypes()
    if suffix and suffix not in known:
        raise ArgumentTypeError(f"the suffix must be one of {', '.join(sorted(known))}, got {text}")
    return text


def parse_arguments(arguments: list[str] | None, ranks: int | None = None, ranks_here: int = 1) -> Namespace:
    """The command line of one process, or of a run of so many ranks, and so many of this host.

    Of the result `plan` is the Suite to measure, `chosen` are the Peers, and `not_here` is {name: why it cannot run
    here}. Ends the program for what would fail after minutes of measuring.
    """
    setting = ONE if ranks is None else RANKS
    parser = _parser(setting)
    options = parser.parse_args(arguments)
    options.alone, options.dtype = ranks is None, getattr(torch, options.dtype or DEFAULT_DTYPE[options.device])
    if options.device == "cuda" and torch.cuda.device_count() < ranks_here:
        parser.error(f"one GPU per process is needed, this host has {torch.cuda.device_count()}")

    suite = SUITES[options.suite] if options.suite else DEFAULTS[setting, options.device]
    rounds = suite.rounds if options.rounds is None else options.rounds
    if rounds < 1:
        parser.error(f"--rounds must be at least 1, got {rounds}")
    options.plan = replace(suite, shapes=tuple(options.shape or suite.shapes), rounds=rounds)
    peers = _peers(suite, options, setting)
    options.chosen = [peer for peer in peers if not peer.missing]
    options.not_here = {peer.name: peer.missing for peer in peers if peer.missing}
    lacking = [f"{peer.name} ({peer.missing})" for peer in options.peers or () if peer.missing]
    if lacking:
        parser.error(f"cannot run here: {', '.join(lacking)}")

    ranks = ranks or 1
    powers = {2**k for k in range(ranks.bit_length())}
    options.tp = sorted(set(options.tp or powers | {ranks}))
    if not 1 <= options.tp[0] <= options.tp[-1] <= ranks:
        parser.error(f"--tp must lie in 1 to {ranks}, the number of ranks, got {options.tp}")
    for tp in options.tp:
        for shape in options.plan.shapes:
            if shape.n % tp or shape.v % tp:
                parser.error(f"--shape: N and V must be multiples of the TP size, got {shape} for TP {tp}")
    options.sequence_parallel = [ON_OFF[word] for word in dict.fromkeys(options.sequence_parallel)]
    return options


def _parser(setting: str) -> ArgumentParser:
    program = "python -m benchmarks" if setting == ONE else "./launch/bench.sh"
    parser = ArgumentParser(prog=program, description="parallel_lce against its peers.")
    add, peer = parser.add_argument, partial(parse_peer, setting)
    add("--suite", choices=SUITES, help="a set of shapes and peers; other options override it")
    words = "tokens, vocabulary of all ranks, hidden size; may be repeated"
    add("--shape", action="append", metavar="N,V,D", type=parse_shape, help=words)
    add("--dtype", choices=("float32", "bfloat16", "float16"), help="float32 on cpu, bfloat16 on cuda")
    add("--device", choices=("cpu", "cuda"), default="cuda" if torch.cuda.is_available() else "cpu")
    add("--rounds", type=int, help="how often each peer is timed (default 5, in the suite small 3)")
    words = "only these, and the GEMM-only baseline; ours may have a logits_budget, as in ours@512MiB or ours@all"
    add("--peers", nargs="+", metavar="NAME", type=peer, help=words)
    words = "not these; the name of a strategy of ours without @ stands for all its budgets"
    add("--without", nargs="+", metavar="NAME", type=peer, default=[], help=words)
    words = "TP sizes (the powers of two up to the number of ranks, and that number)"
    add("--tp", nargs="+", type=int, metavar="P", help=words)
    words = "off and on over several ranks"
    add("--sequence-parallel", nargs="+", choices=ON_OFF, default=["off", "on"], help=words)
    add("--json", metavar="PATH", help="write everything measured, again after each table")
    words = "write a picture of the time against the TP size; the suffix chooses the format"
    add("--plot", metavar="PATH", type=picture, help=words)
    words = "write the timeline of one forward + backward call of ours and of the baseline with collectives"
    add("--trace", metavar="DIR", help=words)
    return parser


def _peers(suite: Suite, options: Namespace, setting: str) -> list[Peer]:
    """The peers to measure, in the order of the table: ours, the GEMM-only baselines, others."""
    ours = [named(name, setting) for name in suite.ours]
    names = suite.others
    if options.peers:
        ours = [peer for peer in options.peers if peer.family == "ours"]
        names = [peer.name for peer in options.peers]
    peers = ours
    for peer in others(setting):
        if peer.family == "gemm-only" or (options.device in peer.devices if names is None else peer.name in names):
            peers.append(peer)
    left_out = {peer.name for peer in options.without}
    peers = [peer for peer in peers if left_out.isdisjoint({peer.name, peer.name.partition("@")[0]})]
    # Without gradients all losses of ours run the same kernels, which the first of them measures. Around the kernels
    # the host does something else for each.
    first: dict[str, Peer] = {}
    for peer in peers:
        if peer.family == "ours" and not suite.host:
            kind = peer.name.partition("@")[0]
            first.setdefault("a loss" if kind in LOSSES else kind, peer)
    alone = [peer for peer in peers if peer.family != "ours" or suite.host or peer in first.values()]
    return [peer if peer in alone else replace(peer, passes=(FORWARD_BACKWARD,)) for peer in peers]
