"""Runs every kernel under compute-sanitizer, on a GPU: memcheck, racecheck, initcheck and synccheck.

A report fails unless it is excused: one of racecheck of which :data:`EXCUSED_KERNELS` and :data:`EXCUSED_LINES` name
all places. The excuse has a control: a program without an error, of which the tool must give the same report. Two
planted errors, in copies of this tree, show that the tools see errors in these kernels and that nothing excuses them.
Exit status: 1 if a report is not excused, a planted error is not reported, the control is silent although the excuse
was used, a tool did not finish, or a kernel did not run. The whole output is in the folder.
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
MOST_SHOWN = 20  # of one run


# Triton starts and ends the partitions of gl.warp_specialize through a byte of shared memory, behind barriers that
# racecheck does not follow.
EXCUSED_KERNELS = r"lce_(forward|backward)_projection|lce_backward_sparse_product|lce_control_two_partitions"
EXCUSED_LINES = r"gl\.warp_specialize\(|^@Relaunched|^@gluon\.jit|^def (projection|lce_\w+|two_partitions)\("
# The files that have such lines, whatever their folder.
EXCUSED_FILES = [*(ROOT / "parallel_lce").rglob("*hopper*.py"), ROOT / "tests" / "sanitizer_controls.py"]
PLANTED = {  # {name: (tool, {text of one file of the kernels: another})}
    "read": ("memcheck", {"tl.load(saved + c, mask=inside, other=0.0)": "tl.load(saved + c + (1 << 40))"}),
    "race": (
        "racecheck",
        {
            "    BLOCK_N: gl.constexpr = weight.block_type.shape[0]\n    count = 0\n": (
                "    BLOCK_N: gl.constexpr = weight.block_type.shape[0]\n    count = 0\n"
                "    mine: gl.constexpr = gl.BlockedLayout([1, 8], [4, 8], [1, 1], [1, 0])\n"
                "    x_slots.index(0).store(gl.full([BLOCK_M, BLOCK_K], 0, x.dtype, mine))\n"
            ),
            "    steps = gl.cdiv(k_size, BLOCK_K)\n    count = 0\n": (
                "    steps = gl.cdiv(k_size, BLOCK_K)\n    count = 0\n"
                "    mine: gl.constexpr = gl.BlockedLayout([1, 8], [4, 8], [4, 1], [1, 0])\n"
                "    ring[0].index(0).store(gl.full([BLOCK_M, BLOCK_K], 1, ring[0].dtype, mine))\n"
            ),
        },
    ),
}


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


def excused(report: Report, tool: str, changed_file: Path | None = None, text: str = "") -> bool:
    """Whether the excuse covers all places of a report. ``text``: what a file of the tree is changed to."""
    sources = {file.name: file.read_text() for file in EXCUSED_FILES}
    if changed_file in EXCUSED_FILES:
        sources[changed_file.name] = text
    lines = [sources.get(file, "").splitlines()[line - 1 : line] for file, line in report.places]
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

    from parallel_lce.kernels import tuning

    tuning.hopper_or_later = tuning._has_gluon = lambda *_: False
    for product in (torch.mm, torch.addmm, torch.mv):
        setattr(torch, product.__name__, partial(_over_zeros, product))
    run_calls()


def _over_zeros(product, *arguments, out=None, **options):
    if out is None:
        out = product(*arguments, **options)
    if not any(each is out for each in arguments):
        out.zero_()
    return product(*arguments, out=out, **options)


def run_warps() -> None:
    """One warp hands tiles to eight: no race."""
    import torch
    from triton.experimental.gluon import language as gl
    from triton.experimental.gluon.nvidia.hopper import TensorDescriptor

    from sanitizer_controls import DEPTH, ROWS, SLOTS, two_partitions

    programs, steps = 512, 16
    source = torch.ones(programs * ROWS, steps * DEPTH, device="cuda", dtype=torch.bfloat16)
    layout = gl.NVMMASharedLayout.get_default_for([ROWS, DEPTH], gl.bfloat16)
    out = torch.zeros(programs * ROWS, device="cuda")
    given = TensorDescriptor.from_tensor(source, [ROWS, DEPTH], layout)
    two_partitions[(programs,)](given, out, steps, SLOTS, num_warps=8)
    torch.cuda.synchronize()
    assert out.eq(steps * DEPTH).all()


RUNS = {"calls": run_calls, "plain": run_plain, "warps": run_warps}


# --- the command -----------------------------------------------------------------------------------------


def started(program: str, tool: str | None, tree: Path, folder: Path, name: str) -> str:
    """The output of a program of this file, run in that tree under a tool, or without one."""
    environment = os.environ | {"PYTORCH_NO_CUDA_MEMORY_CACHING": "1", "TRITON_CACHE_DIR": str(folder / "cache")}
    environment["PYTHONPATH"] = os.pathsep.join([str(tree), str(tree / "tests")])
    command = (
        ["compute-sanitizer", "--tool", tool, "--print-limit", str(LIMIT), "--show-backtrace", "no"] if tool else []
    )
    command += [sys.executable, "-P", str(tree / "tests" / "sanitize.py"), "--run", program]
    log = folder / f"{name}.log"
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


def changed(name: str) -> tuple[Path, str]:
    """The file that has this planted error, and its text."""
    _, changes = PLANTED[name]
    kernels = (ROOT / "parallel_lce" / "kernels").rglob("*.py")
    (file,) = (each for each in kernels if all(each.read_text().count(old) == 1 for old in changes))
    text = file.read_text()
    for old, new in changes.items():
        text = text.replace(old, new)
    return file, text


def planted(name: str, folder: Path) -> Path:
    """A copy of this tree with an error."""
    tree, (file, text) = folder / f"with-{name}", changed(name)
    for part in ("parallel_lce", "tests"):
        shutil.copytree(ROOT / part, tree / part, symlinks=True, ignore=shutil.ignore_patterns("__pycache__"))
    (tree / file.relative_to(ROOT)).write_text(text)
    return tree


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser("./launch/sanitize.sh", description=__doc__)
    parser.add_argument("--folder", type=Path, default=FOLDER, help="of the tools' output; empty, or new")
    parser.add_argument("--run", choices=RUNS, help=argparse.SUPPRESS)
    options = parser.parse_args(arguments)
    if options.run:
        RUNS[options.run]()
        return 0
    import torch

    if not torch.cuda.is_available() or not shutil.which("compute-sanitizer"):
        parser.error("needs a GPU, and compute-sanitizer of the CUDA toolkit in PATH")
    if options.folder != FOLDER and options.folder.exists() and any(options.folder.iterdir()):
        parser.error(f"--folder: {options.folder} is not empty")
    shutil.rmtree(options.folder, ignore_errors=True)
    options.folder.mkdir(parents=True)
    runs = {f"calls-{tool}": ("calls", tool, ROOT) for tool in ("memcheck", "racecheck", "synccheck")}
    runs["calls-initcheck"] = ("plain", "initcheck", ROOT)
    runs["control"] = ("warps", "racecheck", ROOT)
    runs |= {f"planted-{name}": ("calls", tool, planted(name, options.folder)) for name, (tool, _) in PLANTED.items()}
    first = started("calls", None, ROOT, options.folder, "calls")  # compiles, and says which kernels there are
    with ThreadPoolExecutor(len(runs)) as pool:
        outputs = dict(zip(runs, pool.map(lambda name: started(*runs[name], options.folder, name), runs)))
    return judge(first, {name: (runs[name][1], output) for name, output in outputs.items()})


def judge(first: str, outputs: dict[str, tuple[str, str]]) -> int:
    """Prints a line per run, and all that is not excused. `outputs`: `{name: (tool, output)}`."""
    faults, used, spoke = [*_not_run("calls", first)], False, False
    for name, (tool, output) in outputs.items():
        what, _, error = name.partition("-")
        try:
            found = reports(output, tool)
        except ValueError as refusal:
            faults.append(f"{name}: {refusal}")
            continue
        change = changed(error) if what == "planted" else ()
        open_ = [report for report in found if not excused(report, tool, *change)]
        print(f"{name}: {tool}, {len(found)} reports, {len(found) - len(open_)} of them excused")
        if what == "planted":
            places = {place for report in open_ for place in report.places}
            if not places & {(change[0].name, line) for line in _planted_lines(error)}:
                faults.append(f"{name}: {tool} does not report it")
            continue
        if what == "calls":
            faults += _not_run(name, output)
            used |= len(open_) < len(found)
        else:
            spoke |= len(open_) < len(found)
        faults += [f"{name}: {report.text}" for report in open_[:MOST_SHOWN]]
        faults += [f"{name}: {len(open_) - MOST_SHOWN} more"] * (len(open_) > MOST_SHOWN)
    if used and not spoke:
        faults.append("control: reports nothing, but its excuse was used")
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


def _planted_lines(name: str) -> list[int]:
    """The lines of the changed file that the error is in."""
    _, changes = PLANTED[name]
    added = {line for old, new in changes.items() for line in new.splitlines() if line not in old.splitlines()}
    return [number for number, line in enumerate(changed(name)[1].splitlines(), 1) if any(a in line for a in added)]


if __name__ == "__main__":
    sys.exit(main())
