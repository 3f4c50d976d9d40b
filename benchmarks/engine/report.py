"""Functions of all commands: arguments, facts about the machine, console output and JSON."""

import importlib.metadata
import json
import os
import platform
from argparse import ArgumentParser, Namespace, RawTextHelpFormatter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from rich import box
from rich.console import Console
from rich.table import Table

from .problem import Shape
from .team import Team
from .timing import spread

PEERS = ("megatron-core", "liger-kernel", "quack-kernels", "cut-cross-entropy", "verl", "transformers", "torchtitan")
NONE = "–"
MIB = 2**20
PIPE_WIDTH = 300  # columns of output to a file or a pipe: wide enough that no table wraps


def shape(text: str) -> Shape:
    return Shape(*map(int, text.split(",")))


OPTIONS: dict[str, dict[str, Any]] = {  # of several commands
    "--json": dict(metavar="PATH", help="write everything measured, again after each table"),
    "--rounds": dict(type=int, default=5, help="how often each call is timed (%(default)s)"),
    "--shape": dict(action="append", metavar="N,V,D", type=shape, help="tokens, vocabulary, hidden size; repeatable"),
}


def new_parser(program: str, description: str | None, *names: str) -> ArgumentParser:
    """A parser with `--device` and the named options of OPTIONS. Parse with `parse`."""
    parser = ArgumentParser(prog=program, description=description, formatter_class=RawTextHelpFormatter)
    default = "cuda" if torch.cuda.is_available() else "cpu"
    parser.add_argument("--device", choices=("cpu", "cuda"), default=default)
    for name in names:
        parser.add_argument(name, **OPTIONS[name])
    return parser


def parse(parser: ArgumentParser, arguments: list[str] | None, processes: int | None = None) -> Namespace:
    """Parses and checks the command line. A wrong one ends the program with status 2. `processes`: of this host; None:
    the number that torchrun started. Adds `dtype`: bfloat16 on a GPU, float32 on a CPU."""
    options = parser.parse_args(arguments)
    processes = processes or int(os.environ.get("LOCAL_WORLD_SIZE", "1"))
    if options.device == "cuda" and torch.cuda.device_count() < processes:
        parser.error(f"one GPU per process is needed, this host has {torch.cuda.device_count()}")
    if getattr(options, "rounds", 1) < 1:
        parser.error(f"--rounds must be at least 1, got {options.rounds}")
    options.dtype = torch.bfloat16 if options.device == "cuda" else torch.float32
    return options


class Session(NamedTuple):
    """A run of a report."""

    team: Team  # the ranks that torchrun started, or this process alone
    say: Callable[..., None]  # prints tables, and texts without wrapping them, on rank 0
    content: dict[str, Any]  # of the JSON
    path: str | None  # of the JSON

    def save(self) -> None:
        if self.path and self.team.rank == 0:
            Path(self.path).parent.mkdir(parents=True, exist_ok=True)
            Path(self.path).write_text(json.dumps(self.content, indent=1) + "\n", encoding="utf-8")


@contextmanager
def session(options: Namespace) -> Iterator[Session]:
    """Joins the ranks, and prints the facts about the machine."""
    team = Team.here(options.device)
    console = Console(highlight=False, markup=False, emoji=False, quiet=team.rank != 0)
    if not console.is_terminal:
        console.width = PIPE_WIDTH

    def say(*parts: Any) -> None:
        for part in parts:
            console.print(part, soft_wrap=isinstance(part, str))

    facts = {"ranks": str(team.ranks), **machine(team.device)}
    say("; ".join(f"{name} {text}" for name, text in facts.items()))
    run = Session(team, say, {"machine": facts}, getattr(options, "json", None))
    run.save()  # a path that cannot be written ends the program before it measures anything
    yield run
    if "RANK" in os.environ:  # torchrun has started this process; another group is a library's
        dist.destroy_process_group()


def machine(device: torch.device) -> dict[str, str]:
    """{name: text} for the hardware and the software on which the figures depend."""
    facts = {"CPU": f"{platform.machine()}, {torch.get_num_threads()} threads", "Python": platform.python_version()}
    if device.type == "cuda":
        facts |= {"GPU": torch.cuda.get_device_name(device), "CUDA": str(torch.version.cuda)}
    for name in ("torch", "triton", *PEERS):
        try:
            facts[name] = importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            continue
    return facts


def new_table(title: str, caption: str | None, left: list[str], right: list[str]) -> Table:
    """A Markdown table. `left`, `right`: names of the columns aligned left, then right."""
    table = Table(*left, title=title, caption=caption, box=box.MARKDOWN)
    for name in right:
        table.add_column(name, justify="right")
    return table


def milliseconds(seconds: float) -> str:
    return f"{1e3 * seconds:.0f}" if seconds >= 0.1 else f"{1e3 * seconds:.3g}"


def spread_ms(seconds: list[float]) -> str:
    return "{} ({}–{})".format(*map(milliseconds, spread(seconds)))


def mebibytes(size: float) -> str:
    return f"{size / MIB:.0f}" if size >= 100 * MIB else f"{size / MIB:.1f}"


def spread_text(values: tuple[float, float, float] | None) -> str:
    """'median (min–max)'"""
    return "{:.3f} ({:.3f}–{:.3f})".format(*values) if values else NONE
