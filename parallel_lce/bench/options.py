"""What the command lines of one GPU and of several ranks have in common."""

import argparse
import os
import sys

import torch

DTYPES = {
    "float32": torch.float32,
    "fp32": torch.float32,
    "bfloat16": torch.bfloat16,
    "bf16": torch.bfloat16,
    "float16": torch.float16,
    "fp16": torch.float16,
}
DEFAULT_DTYPE = {"cpu": "float32", "cuda": "bfloat16"}


def common_options(program, description, names):
    """A parser of what both measure. `names` are those of the peers."""
    parser = argparse.ArgumentParser(prog=program, description=description)
    add = parser.add_argument
    known = ", ".join(names)
    add("--dtype", choices=DTYPES, help="of input and weight (float32 on cpu, bfloat16 on cuda)")
    add("--device", choices=("cpu", "cuda"), default="cuda" if torch.cuda.is_available() else "cpu")
    add("--rounds", type=int, default=5, help="how often each peer is timed (default 5)")
    add("--peers", nargs="+", metavar="NAME", help=f"only these, and the GEMM-only baseline. Known: {known}")
    add("--without", nargs="+", metavar="NAME", default=[], help="not these")
    add("--seed", type=int, default=0)
    add("--json", metavar="PATH", help="write everything measured, again after each table")
    add("--plot", metavar="PATH", help="write a picture; the suffix chooses the format")
    parser.set_defaults(trace=None, window=None)  # over ranks alone
    return parser


def argument(parse):
    """`parse` for argparse, with its own words in the message instead of 'invalid value'."""

    def convert(text):
        try:
            return parse(text)
        except ValueError as error:
            raise argparse.ArgumentTypeError(str(error)) from None

    return convert


def check_common(parser, options, names):
    """Completes the common options. Ends the program for what would fail after minutes of measuring."""
    if options.rounds < 1:
        parser.error(f"--rounds must be at least 1, got {options.rounds}")
    if not -(2**63) <= options.seed < 2**63:  # torch.manual_seed's, and as much again for the ranks
        parser.error(f"--seed must be a number of 64 bits, got {options.seed}")
    options.dtype = DTYPES[options.dtype or DEFAULT_DTYPE[options.device]]
    for option in ("peers", "without"):
        given = getattr(options, option)
        if given is not None:
            given = [name for text in given for name in text.split(",") if name]
            setattr(options, option, given)
            unknown = [name for name in given if name not in names]
            if unknown:
                parser.error(f"no such peer: {', '.join(unknown)}; known: {', '.join(names)}")
    if options.plot:
        try:
            from matplotlib.backend_bases import FigureCanvasBase
        except ImportError:  # need_extra says so
            return
        suffix, known = os.path.splitext(options.plot)[1][1:].lower(), FigureCanvasBase.get_supported_filetypes()
        if suffix and suffix not in known:
            parser.error(f"--plot {options.plot}: the suffix must be one of {', '.join(sorted(known))}")


def need_extra(options):
    """rich, and matplotlib for a picture, before minutes of measuring rather than after."""
    try:
        import rich  # noqa: F401

        if options.plot:
            import matplotlib  # noqa: F401
    except ImportError as error:
        sys.exit(f"the benchmark needs {error.name}: pip install 'parallel-lce[bench]'")


def choose(peers, options, only, why_not):
    """`([Peer], {name: why it is not here})` of the peers named `only`, by default of those that run on this device.
    The GEMM-only baselines are always wanted. `why_not(peer)` is empty if it can run here."""
    chosen, missing = [], {}
    for peer in peers:
        named = options.device in peer.devices if only is None else peer.name in only
        if (named or peer.family == "bare") and peer.name not in options.without:
            reason = why_not(peer)
            if reason:
                missing[peer.name] = reason
            else:
                chosen.append(peer)
    return chosen, missing
