"""`python -m parallel_lce.bench`: this machine, `parallel_lce` against its peers.

Exit status: 0 if ours was accurate and timed, 1 if ours was refused or failed on any shape, 2 for a command line
that cannot be run, which includes a named peer that does not exist or cannot run here.
"""

import argparse
import re
import sys

import torch
import torch.distributed as dist

from .inputs import Shape, make_inputs
from .measure import measure
from .peers import registry
from .report import Report, machine, write_json

DTYPES = {
    "float32": torch.float32, "fp32": torch.float32,
    "bfloat16": torch.bfloat16, "bf16": torch.bfloat16,
    "float16": torch.float16, "fp16": torch.float16,
}  # fmt: skip
DEFAULTS = {  # a minute or a few on a laptop; one training micro-batch of a large model on a GPU
    "cpu": {"shape": Shape(2048, 32768, 512), "dtype": "float32", "budgets": [0]},
    "cuda": {"shape": Shape(8192, 128256, 4096), "dtype": "bfloat16", "budgets": [0, None]},
}
UNITS = {"": 1, "b": 1, "kib": 2**10, "mib": 2**20, "gib": 2**30}


def parse_budget(text):
    """'512MiB', '0', '1048576' -> bytes; 'none' -> None, which is parallel_lce's default."""
    if text.lower() == "none":
        return None
    match = re.fullmatch(r"(\d+)\s*([a-z]*)", text.strip().lower())
    if match is None or match[2] not in UNITS:
        raise ValueError(f"expected bytes, a number with KiB, MiB or GiB, or none, got {text!r}")
    return int(match[1]) * UNITS[match[2]]


def argument(parse):
    """`parse` for argparse, with its own words in the message instead of 'invalid value'."""

    def convert(text):
        try:
            return parse(text)
        except ValueError as error:
            raise argparse.ArgumentTypeError(str(error)) from None

    return convert


def parse_arguments(arguments):
    parser = argparse.ArgumentParser(prog="python -m parallel_lce.bench", description="parallel_lce against its peers.")
    parser.add_argument("--shape", action="append", metavar="N,V,D", type=argument(Shape.parse),
                        help="tokens, vocabulary, hidden size; may be repeated")  # fmt: skip
    parser.add_argument("--dtype", choices=DTYPES, help="of input and weight (float32 on cpu, bfloat16 on cuda)")
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--rounds", type=int, default=5, help="how often each peer is timed (default 5)")
    parser.add_argument("--logits-budget", action="append", metavar="BYTES", type=argument(parse_budget),
                        help="of ours: bytes, 512MiB, or none for its default; may be repeated")  # fmt: skip
    parser.add_argument("--peers", nargs="+", metavar="NAME",
                        help="only these; the bare products are always measured. Known: "
                        + ", ".join(dict.fromkeys(p.name for p in registry([0]))))  # fmt: skip
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--json", metavar="PATH", help="write everything measured")
    parser.add_argument("--plot", metavar="PATH", help="write a picture; the suffix chooses the format")
    options = parser.parse_args(arguments)

    default = DEFAULTS[options.device]
    options.shape = options.shape or [default["shape"]]
    options.dtype = DTYPES[options.dtype or default["dtype"]]
    options.logits_budget = list(dict.fromkeys(options.logits_budget or default["budgets"]))
    if options.rounds < 1:
        parser.error(f"--rounds must be at least 1, got {options.rounds}")
    if options.device == "cuda" and not torch.cuda.is_available():
        parser.error("--device cuda: torch finds no CUDA device")
    known = {peer.name for peer in registry([])} | {"ours", "ours-per-token"}
    if options.peers is not None:
        options.peers = [name for text in options.peers for name in text.split(",") if name]
        unknown = [name for name in options.peers if name not in known]
        if unknown:
            parser.error(f"no such peer: {', '.join(unknown)}; known: {', '.join(sorted(known))}")
    return options


def need_extra(options):
    """rich, and matplotlib for a picture, before minutes of measuring rather than after."""
    try:
        import rich  # noqa: F401

        if options.plot:
            import matplotlib  # noqa: F401
    except ImportError as error:
        sys.exit(f"the benchmark needs {error.name}: pip install 'parallel-lce[bench]'")


def build_peers(options):
    """`([(Peer, loss function)], [(Peer, why it is not here)])`. Raises SystemExit if a peer that was asked for by
    name, or ours, is not here; the others may be missing by default."""
    here, missing = [], []
    for peer in registry(options.logits_budget):
        named = options.peers is not None and peer.name in options.peers
        wanted = named or options.peers is None and options.device in peer.devices
        if not wanted and peer.family != "bare":
            continue
        try:
            here.append((peer, peer.build and peer.build()))
        except Exception as error:  # importing another library may raise anything
            if named or peer.family == "ours":
                print(f"{peer} cannot run here: {type(error).__name__}: {error}", file=sys.stderr)
                raise SystemExit(2) from None
            missing.append((peer, error))
    return here, missing


def main(arguments=None):
    options = parse_arguments(arguments)
    need_extra(options)
    from rich.console import Console

    console = Console(highlight=False)
    if not console.is_terminal:
        console.width = 170  # a file or a pipe has no width, and wrapped numbers cannot be read
    status = Console(stderr=True, highlight=False)
    device = torch.device(options.device, torch.cuda.current_device() if options.device == "cuda" else None)
    facts = machine(device)
    settings = {"rounds": options.rounds, "seed": options.seed, "logits_budgets": options.logits_budget}
    console.print("; ".join(f"{name}: {text}" for name, text in facts.items()), soft_wrap=True)

    reports = []
    for shape in options.shape:
        peers, missing = build_peers(options)
        if missing and not reports:
            console.print("not here: " + "; ".join(f"{peer} ({error})" for peer, error in missing), soft_wrap=True)

        def progress(text):
            status.print(f"{shape}: {text}", style="dim", markup=False, soft_wrap=True)

        inputs = make_inputs(shape, options.dtype, device, options.seed)
        measured = measure(peers, inputs, options.rounds, device, say=progress)
        reports.append(Report(shape, options.dtype, *measured))
        del inputs, peers
        console.print(reports[-1].table())
        for result in reports[-1].results:
            if result.refused:
                console.print(f"{result.peer}: {result.refused}", markup=False, soft_wrap=True)
        if options.json:
            write_json(options.json, settings, facts, reports)  # after each shape: a later one may be too large
    if options.plot:
        from .plot import write_plot

        write_plot(options.plot, facts, reports)
    for report in reports:
        console.print(report.sentences(), soft_wrap=True)
    if dist.is_available() and dist.is_initialized():
        dist.destroy_process_group()
    ours_refused = [r for report in reports for r in report.results if r.peer.family == "ours" and r.refused]
    return 1 if ours_refused else 0


if __name__ == "__main__":
    sys.exit(main())
