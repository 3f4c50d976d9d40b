"""What sanitize.py makes of the output of compute-sanitizer. The checks themselves need a GPU: launch/sanitize.sh."""

import pytest

pytest.importorskip("triton", reason="needs triton")

import kernel_calls
import sanitize
from releases import ROOT
from tools import ran

HOPPER = (ROOT / "parallel_lce" / "kernels" / "mainloops" / "hopper.py").read_text().splitlines()
WITH_A_RACE = sanitize.changed("race")[1].splitlines()
KERNELS = "kernels: " + " ".join(sorted(kernel_calls.NAMES))


def line_of(text: str, lines: list[str] = HOPPER) -> int:
    return 1 + next(i for i, line in enumerate(lines) if text in line)


HANDED, RING = line_of("gl.warp_specialize("), line_of(".wait(")
THERE = line_of("gl.warp_specialize(", WITH_A_RACE)
READS = line_of("(1 << 40)", sanitize.changed("read")[1].splitlines())
START = line_of("gl.warp_specialize(", (ROOT / "tests" / "sanitizer_controls.py").read_text().splitlines())
CONTROL = dict(kernel="lce_control_two_partitions", file="sanitizer_controls.py", handed=START)
CLEAN = "========= COMPUTE-SANITIZER\n" + KERNELS + "\n========= ERROR SUMMARY: 0 errors\n"


def races(*lines: int, kernel: str = "lce_forward_projection", handed: int = HANDED, file="hopper.py") -> str:
    found = "".join(
        f"========= Error: Race reported between Write access at {kernel}+0x1230 in {file}:{line}\n"
        f"=========     and Read access at {kernel}+0x2340 in {file}:{handed} [512 hazards]\n"
        for line in lines
    )
    summary = f"========= RACECHECK SUMMARY: {len(lines)} hazards displayed ({len(lines)} errors, 0 warnings)\n"
    return f"========= COMPUTE-SANITIZER\n{KERNELS}\n{found}=========\n{summary}"


def accesses(text: str, *kernels: str) -> str:
    found = "".join(
        f"========= {text} of size 2 bytes\n=========     at {kernel}+0x90 in token_gradients.py:{READS}\n"
        "=========     by thread (0,0,0) in block (1,0,0)\n=========         Host Frame: PyEval [0x1] in python3\n"
        "=========\n"
        for kernel in kernels
    )
    return f"========= COMPUTE-SANITIZER\n{KERNELS}\n{found}========= ERROR SUMMARY: {len(kernels)} errors\n"


READ = accesses("Invalid __global__ read", "lce_backward_rewrite")
UNWRITTEN = accesses("Uninitialized __global__ memory read", *["lce_forward_dense"] * 30)
GOOD = {
    "calls-memcheck": ("memcheck", CLEAN),
    "calls-racecheck": ("racecheck", races(HANDED, HANDED)),
    "calls-initcheck": ("initcheck", CLEAN),
    "control-warps": ("racecheck", races(START, **CONTROL)),
    "planted-read": ("memcheck", READ),
    "planted-race": ("racecheck", races(line_of("1, ring[0].dtype", WITH_A_RACE))),
}


def test_what_is_excused_passes(capsys):
    assert sanitize.judge(KERNELS, GOOD) == 0
    assert "calls-racecheck: racecheck, 2 reports, 2 of them excused" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("name", "output", "said"),
    [
        ("calls-memcheck", READ, "Invalid __global__ read of size 2 bytes"),
        ("calls-memcheck", "no CUDA device", "did not finish: no CUDA device"),
        ("calls-memcheck", CLEAN.replace("kernels:", "error:"), "the calls failed"),
        ("calls-memcheck", CLEAN + "========= ERROR SUMMARY: 7 errors were not printed\n", "has more than"),
        ("calls-racecheck", races(HANDED, RING), f"hopper.py:{RING}"),
        ("calls-racecheck", races(HANDED, kernel="lce_backward_scan"), "lce_backward_scan"),
        ("calls-initcheck", UNWRITTEN, "lce_forward_dense"),
        ("calls-initcheck", UNWRITTEN, "calls-initcheck: 10 more"),
        ("calls-racecheck", races(HANDED).replace("lce_forward_mean ", ""), "calls-racecheck: did not run"),
        ("control-warps", races(), "control-warps: reports nothing, but its excuse was used"),
        ("control-warps", races(RING), "control-warps: Error: Race reported"),
        ("planted-read", CLEAN, "planted-read: memcheck does not report it"),
        ("planted-read", READ.replace(f":{READS}", ":7"), "planted-read: memcheck does not report it"),
        ("planted-race", races(THERE, handed=THERE), "planted-race: racecheck does not report it"),
    ],
    ids=range(14),
)
def test_what_is_not_excused_fails(name, output, said, capsys):
    assert sanitize.judge(KERNELS, GOOD | {name: (GOOD[name][0], output)}) == 1
    assert said in capsys.readouterr().out


def test_a_kernel_that_did_not_run_fails(capsys):
    assert sanitize.judge(KERNELS.replace("lce_forward_mean", ""), GOOD) == 1
    assert "did not run: lce_forward_mean" in capsys.readouterr().out


def test_errors_are_planted_in_a_copy(tmp_path):
    for name, (_, file, changes) in sanitize.PLANTED.items():
        tree = sanitize.planted(name, tmp_path)
        assert all(text in (tree / file).read_text() for text in changes.values())
        assert (tree / "parallel_lce" / "kernels" / "mainloops" / "hopper.py").exists()


@pytest.mark.slow
def test_without_a_gpu_it_says_so():
    done = ran(ROOT / "launch" / "sanitize.sh", env={"PATH": "/usr/bin:/bin", "CUDA_VISIBLE_DEVICES": ""})
    assert done.returncode == 2
    assert "needs a GPU, and compute-sanitizer" in done.stderr
