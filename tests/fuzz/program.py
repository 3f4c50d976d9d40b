"""Random configurations of the public functions against float64, over one process and several ranks.

Configuration I of a seed and a number of ranks is the same whatever ran before it. A finding (a wrong number, an
exception, ranks or runs that disagree in a bit, a hang) is printed as the command that shows it again, and the run goes
on. Exit status 1 if there are findings."""

import argparse
import os
from collections.abc import Callable
from dataclasses import dataclass
from random import Random

from fuzz.draw import Configuration, draw

_TIMEOUT = 60.0
"""Seconds after which a configuration hangs."""


@dataclass(frozen=True)
class Settings:
    """The settings that decide which configuration an index stands for."""

    seed: int
    backend: str
    device: str

    def draw(self, ranks: int, index: int) -> Configuration:
        return draw(Random(f"{self.seed}:{ranks}:{index}"), ranks, small=self.interpreted)

    @property
    def interpreted(self) -> bool:
        return self.backend == "triton" and self.device == "cpu"

    def command(self, ranks: int, index: int) -> str:
        """What shows one configuration again."""
        where = f"--ranks {ranks} --seed {self.seed} --backend {self.backend} --device {self.device}"
        return f"python tests/fuzz --only {index} {where}"


def examine(c: Configuration, run: Callable[[Configuration], list[dict]]) -> str:
    """What is wrong with what ``run`` gives for a configuration: bad verdicts, the last lines of an error, or ''."""
    from fuzz.judge import judge

    try:
        return "\n".join(str(verdict) for verdict in judge(c, run(c)) if not verdict.good)
    except Exception as error:
        # A world's message is the first failed rank's traceback.
        text = f"{error}" if type(error) is AssertionError else f"{type(error).__name__}: {error}"
        return "\n".join(text.strip().splitlines()[-6:]) or "AssertionError"


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        prog="python tests/fuzz", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--ranks", type=int, nargs="+", default=[1, 2], help="numbers of ranks, one after another")
    parser.add_argument("--count", type=int, default=10000, help="configurations for each number of ranks")
    parser.add_argument("--first", type=int, default=0, help="index of the first")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--backend", choices=("torch", "triton"), default="torch")
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cpu")
    parser.add_argument("--only", type=int, help="show this configuration and what is wrong with it")
    options = parser.parse_args(arguments)
    settings = Settings(options.seed, options.backend, options.device)
    if settings.interpreted:
        os.environ["TRITON_INTERPRET"] = "1"

    import torch

    torch.set_num_threads(1)
    if options.only is not None:
        options.first, options.count = options.only, 1
    return int(any([_findings(settings, ranks, options) for ranks in options.ranks]))


def _findings(settings: Settings, ranks: int, options: argparse.Namespace) -> int:
    """The number of findings over so many ranks, each of which is printed."""
    from fuzz.run import execute
    from world import World

    findings, worlds = 0, []

    def run(c: Configuration) -> list[dict]:
        """On new processes after a hang or an error on some ranks."""
        if not worlds:
            worlds.append(World(ranks, settings.device))
        try:
            return worlds[0].run(execute, c, settings.backend, timeout=_TIMEOUT)
        except AssertionError:
            worlds.pop().close(kill=True)
            raise

    for done in range(1, options.count + 1):
        index = options.first + done - 1
        c = settings.draw(ranks, index)
        finding = examine(c, run)
        findings += bool(finding)
        if options.only is not None:
            print(f"{c}\n\n{finding}")
        elif finding:
            print(f"{settings.command(ranks, index)}  # {finding.splitlines()[-1].strip()}", flush=True)
        if done % 20 == 0 or done == options.count:
            print(f"{ranks} ranks, configuration {index}: {findings} findings in {done}", flush=True)
    for world in worlds:
        world.close()
    return findings
