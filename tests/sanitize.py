"""Runs every kernel under compute-sanitizer, on a GPU: memcheck, racecheck, initcheck and synccheck.

A report fails unless it is excused: one of racecheck of which :data:`EXCUSED_KERNELS` and :data:`EXCUSED_LINES` name
all places. Exit status: 1 if a report is not excused, a tool did not finish, or a kernel did not run. The whole output
is in outputs/sanitize.
"""

import argparse
import os
import re
import shutil
import signal
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).resolve().parent.parent
FOLDER = ROOT / "outputs" / "sanitize"
TIMEOUT = 900  # seconds of one run
LIMIT = 100_000  # reports of one run

# Triton starts and ends the partitions of gl.warp_specialize through a byte of shared memory, behind barriers that
# racecheck does not follow. It reports that for any kernel with partitions, also for Triton's tutorial of them.
EXCUSED_KERNELS = r"lce_(forward|backward)_projection|lce_backward_sparse_product"
EXCUSED_LINES = r"gl\.warp_specialize\(|^@Relaunched|^@gluon\.jit|^def (projection|lce_\w+)\("
# The files that have such lines, whatever their folder.
EXCUSED_FILES = [*(ROOT / "parallel_lce").rglob("*hopper*.py")]
# The tools, and what each runs.
TOOLS = {"memcheck": "calls", "racecheck": "calls", "synccheck": "calls", "initcheck": "plain"}


class Report(NamedTuple):
    text: str
    kernels: tuple[str, ...]  # of its places
    places: tuple[tuple[str, int], ...]  # file, line


def reports(output: str, tool: str) -> list[Report]:
    """The reports in a tool's output. ValueError if the tool did not finish, or did not print all."""
    if not re.search(r"^========= (ERROR|RACECHECK) SUMMARY: \d+ (errors?|hazards? displayed)\b", output, re.M):
        raise ValueError(f"{tool} did not finish: {output.strip()[-300:]}")
    if "were not printed" in output:
        raise ValueError(f"{tool} has more than {LIMIT} reports")
    found = []
    for block in re.split(r"^=========\s*$", output, flags=re.M):
        lines = [line.removeprefix("=========").strip() for line in block.splitlines() if line.startswith("=========")]
        lines = [line for line in lines if not re.match(r"COMPUTE-SANITIZER|(ERROR|RACECHECK) SUMMARY|LEAK|$", line)]
        # A report of races follows another without an empty line.
        starts = [i for i, line in enumerate(lines) if "Race reported between" in line] or [0]
        for start, stop in zip(starts, [*starts[1:], len(lines)]):
            text = "\n".join(lines[start:stop])
            places = re.findall(r"(?:^|access )at (.+?)\+0x[0-9a-f]+(?: in (\S+):(\d+))?", text, re.M)
            if text:
                kernels = tuple(name for name, _, _ in places)
                found.append(Report(text, kernels, tuple((Path(f).name, int(line or 0)) for _, f, line in places)))
    return found


def excused(report: Report, tool: str) -> bool:
    """Whether the excuse covers all places of a report."""
    sources = {file.name: file.read_text().splitlines() for file in EXCUSED_FILES}
    lines = [sources.get(file, [])[line - 1 : line] for file, line in report.places]
    return (
        tool == "racecheck"
        and bool(report.kernels)
        and all(re.fullmatch(EXCUSED_KERNELS, kernel) for kernel in report.kernels)
        and all(line and re.search(EXCUSED_LINES, line[0]) for line in lines)
    )


# --- programs that run under a tool --------------------------------------------------------------------


def run_calls() -> None:
    """All calls; prints the names of the kernels that they launch."""
    import torch
    from triton.runtime.jit import JITFunction

    import kernel_calls

    names, run = set(), JITFunction.run

    def noted(self, *arguments, **options):
        kernel = run(self, *arguments, **options)
        names.add(kernel.metadata.name)
        return kernel

    JITFunction.run = noted
    torch.manual_seed(0)
    os.environ["PARALLEL_LCE_BACKEND"] = "triton"
    kernel_calls.prepare()
    for _, call in kernel_calls.every_call(True, "cuda", [None]):
        call()
    torch.cuda.synchronize()
    print("kernels:", *sorted(names))


def run_plain() -> None:
    """All calls, without the stores that initcheck does not see: without TMA, and with zeros in the memory to which
    cuBLAS stores a product. So initcheck does not see a sum that is added to memory which nobody wrote."""
    import torch

    from parallel_lce.kernels import launch, picked, product

    launch.hopper_or_later = picked.hopper_or_later = product._has_gluon = lambda *_: False
    for multiply in (torch.mm, torch.addmm, torch.mv):
        setattr(torch, multiply.__name__, partial(_over_zeros, multiply))
    run_calls()


def _over_zeros(product, *arguments, out=None, **options):
    if out is None:
        out = product(*arguments, **options)
    if not any(each is out for each in arguments):
        out.zero_()
    return product(*arguments, out=out, **options)


RUNS = {"calls": run_calls, "plain": run_plain}


# --- the command -----------------------------------------------------------------------------------------


def started(program: str, tool: str | None) -> str:
    """The output of a program of this file, run under a tool, or without one."""
    environment = os.environ | {"PYTORCH_NO_CUDA_MEMORY_CACHING": "1", "TRITON_CACHE_DIR": str(FOLDER / "cache")}
    environment["PYTHONPATH"] = os.pathsep.join([str(ROOT), str(ROOT / "tests")])
    command = [sys.executable, "-P", __file__, "--run", program]
    if tool:
        checker = ["compute-sanitizer", "--tool", tool, "--print-limit", str(LIMIT), "--show-backtrace", "no"]
        command = [*checker, *command]
    log = FOLDER / f"{tool or 'first'}.log"
    with log.open("w") as file:
        # A session of its own, all of which is killed: the checker starts Python as another process.
        options = dict(env=environment, stdout=file, stderr=subprocess.STDOUT, start_new_session=True)
        process = subprocess.Popen(command, **options)
        try:
            file.write(f"\nexit status {process.wait(TIMEOUT)}\n")
        except subprocess.TimeoutExpired:
            os.killpg(process.pid, signal.SIGKILL)
            file.write(f"\nno end within {TIMEOUT} s\n")
    return log.read_text(errors="replace")


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser("./launch/sanitize.sh", description=__doc__)
    parser.add_argument("--run", choices=RUNS, help=argparse.SUPPRESS)
    options = parser.parse_args(arguments)
    if options.run:
        RUNS[options.run]()
        return 0
    import torch

    if not torch.cuda.is_available() or not shutil.which("compute-sanitizer"):
        parser.error("needs a GPU, and compute-sanitizer of the CUDA toolkit in PATH")
    shutil.rmtree(FOLDER, ignore_errors=True)
    FOLDER.mkdir(parents=True)
    first = started("calls", None)  # compiles, and says which kernels there are
    with ThreadPoolExecutor(len(TOOLS)) as pool:
        outputs = pool.map(lambda tool: started(TOOLS[tool], tool), TOOLS)
        return judge(first, dict(zip(TOOLS, outputs)))


def judge(first: str, outputs: dict[str, str]) -> int:
    """Prints a line per tool, and all that is not excused. ``outputs``: by tool."""
    faults = _not_run("without a tool", first)
    for tool, output in outputs.items():
        try:
            found = reports(output, tool)
        except ValueError as refusal:
            faults.append(str(refusal))
            continue
        left = [report for report in found if not excused(report, tool)]
        print(f"{tool}: {len(found)} reports, {len(found) - len(left)} of them excused")
        faults += _not_run(tool, output)
        faults += [f"{tool}: {report.text}" for report in left]
    print(*faults, sep="\n\n")
    return int(bool(faults))


def _not_run(name: str, output: str) -> list[str]:
    """Why not all kernels ran, if they did not."""
    from kernel_calls import NAMES

    ran = re.search(r"^kernels: (.*)$", output, re.M)
    if not ran:
        return [f"{name}: the calls failed: {output[-2000:]}"]
    missing = sorted(NAMES - set(ran[1].split()))
    return [f"{name}: did not run: {' '.join(missing)}"] if missing else []


if __name__ == "__main__":
    sys.exit(main())
