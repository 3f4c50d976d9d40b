"""Random configurations of the public functions against float64, over one process and several ranks.

    python tests/fuzz.py [--ranks 1 2] [--count 10000] [--seed 0] [--first I] [--backend torch|triton]
                         [--device cpu|cuda] [--state FILE] [--timeout SECONDS]
    python tests/fuzz.py --only I [--ranks 2] ...

Configuration I of a seed and a number of ranks is the same whatever ran before it. A run that was interrupted
goes on where it stopped; ``--state`` holds one line of JSON for each configuration that is done. A finding (a
wrong number, an exception, ranks or runs that disagree in a bit, a hang) is written there, printed as the
command that shows it again, and the run goes on. Exit status 1 if there are findings.

``--only`` prints one configuration and the errors of its results. ``--backend triton`` on the CPU runs Triton's
interpreter, on small configurations.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import os
import sys
import time
from collections.abc import Callable, Iterable
from dataclasses import asdict, dataclass
from pathlib import Path
from random import Random

ROOT = Path(__file__).resolve().parent.parent
if __name__ == "__main__":
    sys.path[:0] = [str(ROOT / "tests"), str(ROOT)]

from fuzz_configuration import Configuration  # noqa: E402
from fuzz_draw import draw  # noqa: E402

# What the index of a configuration means depends on these.
_DRAWS = ("fuzz_configuration.py", "fuzz_draw.py", "fuzz_values.py")
_LINES = 6


@dataclass(frozen=True)
class Settings:
    """What the meaning of an index and of a result depends on."""

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
        return (
            f"python tests/fuzz.py --only {index} --ranks {ranks} --seed {self.seed} "
            f"--backend {self.backend} --device {self.device}"
        )


@dataclass(frozen=True)
class Finding:
    """``kind``: wrong, bits, exception or hang; ``detail``: the results that are, or a traceback's last lines."""

    kind: str
    detail: str

    @property
    def line(self) -> str:
        return f"{self.kind}: {self.detail.strip().splitlines()[-1].strip()}"


class State:
    """The configurations that are done and the findings among them, in a file of JSON lines that begins with the
    settings."""

    def __init__(self, path: Path, settings: Settings) -> None:
        self.done: set[tuple[int, int]] = set()
        self.findings: list[tuple[int, int, Finding]] = []
        digest = hashlib.sha256(b"".join((ROOT / "tests" / name).read_bytes() for name in _DRAWS))
        head = {**asdict(settings), "draws": digest.hexdigest()[:12]}
        path.parent.mkdir(parents=True, exist_ok=True)
        text = path.read_text() if path.exists() else ""
        whole = text[: text.rfind("\n") + 1]
        if whole:
            first, *lines = map(json.loads, whole.splitlines())
            if first != head:
                raise SystemExit(f"{path} is of {first}, and this run of {head}: remove it, or give another --state")
            for line in lines:
                self._take(line)
        self._file = path.open("r+" if path.exists() else "w")
        # A line that was being written when the run was killed.
        self._file.truncate(len(whole.encode()))
        self._file.seek(0, os.SEEK_END)
        if not whole:
            self._write(head)

    def _take(self, line: dict) -> None:
        self.done.add((line["ranks"], line["index"]))
        if "kind" in line:
            self.findings.append((line["ranks"], line["index"], Finding(line["kind"], line["detail"])))

    def _write(self, line: dict) -> None:
        self._file.write(json.dumps(line) + "\n")
        self._file.flush()

    def record(self, c: Configuration, index: int, finding: Finding | None, seconds: float) -> None:
        line: dict = {"ranks": c.ranks, "index": index, "seconds": round(seconds, 3)}
        if finding is not None:
            line |= {**asdict(finding), "configuration": str(c)}
        self._take(line)
        self._write(line)

    def close(self) -> None:
        self._file.close()


class Ranks:
    """Processes that run configurations; new ones after a hang, and where some may have left the others waiting."""

    def __init__(self, ranks: int, settings: Settings, timeout: float) -> None:
        self._ranks, self._settings, self._timeout = ranks, settings, timeout
        self._world = None

    def __call__(self, c: Configuration) -> list[dict]:
        from fuzz_run import execute
        from world import World

        timeout = self._timeout
        if self._world is None:
            self._world = World(self._ranks, self._settings.device)
            timeout += 120
        try:
            return self._world.run(execute, c, self._settings.backend, timeout=timeout)
        except AssertionError:
            if self._ranks > 1 or not self._world.alive:
                self.close(kill=True)
            raise

    def close(self, kill: bool = False) -> None:
        if self._world is not None and self._world.alive:
            self._world.close(kill)
        self._world = None


def examine(c: Configuration, run: Callable[[Configuration], list[dict]]) -> tuple[list, Finding | None]:
    """The verdicts on what ``run`` gives for a configuration, and what is wrong with it."""
    from fuzz_judge import judge
    from fuzz_run import Wrong

    try:
        verdicts = judge(c, run(c))
    except Exception as error:
        # A world's message is the first failed rank's traceback.
        text = str(error) if type(error) is AssertionError else f"{type(error).__name__}: {error}"
        lines = text.strip().splitlines() or ["AssertionError"]
        kind = "exception"
        if "no answer in" in lines[0]:
            kind = "hang"
        elif Wrong.__name__ in lines[-1]:
            kind = "bits" if "bits: " in lines[-1] else "wrong"
        return [], Finding(kind, "\n".join(lines[-_LINES:]))
    wrong = [str(v) for v in verdicts if not v.good]
    return verdicts, Finding("wrong", "\n".join(wrong)) if wrong else None


def fuzz(
    settings: Settings,
    ranks: int,
    indices: Iterable[int],
    state: State,
    run: Callable[[Configuration], list[dict]],
    report: Callable[[int, Finding | None], None],
) -> None:
    """Examine the configurations that are not done yet."""
    for index in indices:
        if (ranks, index) in state.done:
            report(index, None)
            continue
        c = settings.draw(ranks, index)
        start = time.perf_counter()
        _, finding = examine(c, run)
        state.record(c, index, finding, time.perf_counter() - start)
        report(index, finding)


def _show(settings: Settings, ranks: int, index: int, timeout: float) -> bool:
    """Print one configuration and its errors; whether it is as it should be."""
    c = settings.draw(ranks, index)
    print(f"{c}\n")
    run = Ranks(ranks, settings, timeout)
    verdicts, finding = examine(c, run)
    run.close()
    for verdict in sorted(verdicts, key=lambda v: -v.ratio):
        print(f"{'ok   ' if verdict.good else 'WRONG'} {verdict}")
    if finding is not None and not verdicts:
        print(f"{finding.kind}:\n{finding.detail}")
    return finding is None


def _run(settings: Settings, options: argparse.Namespace) -> int:
    from rich import progress as bars
    from rich.console import Console

    name = f"seed{settings.seed}-{settings.backend}-{settings.device}.jsonl"
    path = options.state or ROOT / "outputs" / "fuzz" / name
    state = State(path, settings)
    columns = (
        bars.TextColumn("{task.description}"),
        bars.BarColumn(),
        bars.MofNCompleteColumn(),
        bars.TimeElapsedColumn(),
        bars.TimeRemainingColumn(),
        bars.TextColumn("{task.fields[findings]} findings"),
    )
    asked = [(ranks, range(options.first, options.first + options.count)) for ranks in options.ranks]
    with bars.Progress(*columns, console=Console()) as progress:
        for ranks, indices in asked:
            known = [f for f in state.findings if f[0] == ranks]
            task = progress.add_task(f"{ranks} rank{'s' * (ranks > 1)}", total=len(indices), findings=len(known))

            def report(index: int, finding: Finding | None) -> None:
                if finding is not None:
                    known.append((ranks, index, finding))
                    line = f"{settings.command(ranks, index)}  # {finding.line}"
                    progress.console.print(line, markup=False, highlight=False, soft_wrap=True)
                progress.update(task, advance=1, findings=len(known))

            run = Ranks(ranks, settings, options.timeout)
            try:
                fuzz(settings, ranks, indices, state, run, report)
            finally:
                run.close()
    state.close()
    found = [f for f in state.findings for ranks, indices in asked if f[0] == ranks and f[1] in indices]
    print(f"{len(found)} findings in {sum(len(indices) for _, indices in asked)} configurations; {path}")
    return 1 if found else 0


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--ranks", type=int, nargs="+", default=[1, 2], help="numbers of ranks, one after another")
    parser.add_argument("--count", type=int, default=10000, help="configurations for each number of ranks")
    parser.add_argument("--first", type=int, default=0, help="index of the first")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--backend", choices=("torch", "triton"), default="torch")
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cpu")
    parser.add_argument("--only", type=int, help="show this configuration alone")
    parser.add_argument("--state", type=Path, help="default: outputs/fuzz/seed0-torch-cpu.jsonl and so on")
    parser.add_argument("--timeout", type=float, default=60.0, help="seconds after which a configuration hangs")
    options = parser.parse_args(arguments)
    settings = Settings(options.seed, options.backend, options.device)
    if settings.interpreted:
        os.environ["TRITON_INTERPRET"] = "1"

    import torch

    torch.set_num_threads(1)
    if options.only is not None:
        return 0 if all([_show(settings, r, options.only, options.timeout) for r in options.ranks]) else 1
    try:
        return _run(settings, options)
    except KeyboardInterrupt:
        print("interrupted; the same command goes on from here")
        return 130


if __name__ == "__main__":
    sys.exit(main())
