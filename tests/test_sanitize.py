"""What sanitize.py makes of the output of compute-sanitizer. The checks themselves need a GPU: launch/sanitize.sh."""

import pytest

pytest.importorskip("triton", reason="needs triton")

import kernel_calls
import sanitize

RACED, WITH_A_RACE = sanitize.changed("race")
READ_FROM, WITH_A_READ = sanitize.changed("read")
CONTROL = "sanitizer_controls.py"
CONTROL_TEXT = (sanitize.ROOT / "tests" / CONTROL).read_text()
KERNELS = "kernels: " + " ".join(sorted(kernel_calls.NAMES))


def line_of(text: str, source: str = RACED.read_text()) -> int:
    return 1 + next(i for i, line in enumerate(source.splitlines()) if text in line)


HANDED, RING = line_of("gl.warp_specialize("), line_of(".wait(")
START, THERE = line_of("gl.warp_specialize(", CONTROL_TEXT), line_of("gl.warp_specialize(", WITH_A_RACE)
READS = line_of("(1 << 40)", WITH_A_READ)
CLEAN = "========= COMPUTE-SANITIZER\n" + KERNELS + "\n========= ERROR SUMMARY: 0 errors\n"


def races(*lines: int, kernel="lce_forward_projection", handed=HANDED, file=RACED.name) -> str:
    found = "".join(
        f"========= Error: Race reported between Write access at {kernel}+0x1230 in {file}:{line}\n"
        f"=========     and Read access at {kernel}+0x2340 in {file}:{handed} [512 hazards]\n"
        for line in lines
    )
    summary = f"========= RACECHECK SUMMARY: {len(lines)} hazards displayed ({len(lines)} errors, 0 warnings)\n"
    return f"========= COMPUTE-SANITIZER\n{KERNELS}\n{found}=========\n{summary}"


READ = (
    f"========= COMPUTE-SANITIZER\n{KERNELS}\n========= Invalid __global__ read of size 2 bytes\n"
    f"=========     at lce_backward_rewrite+0x90 in {READ_FROM.name}:{READS}\n"
    "=========     by thread (0,0,0) in block (1,0,0)\n=========\n========= ERROR SUMMARY: 1 errors\n"
)
GOOD = {
    "calls-memcheck": ("memcheck", CLEAN),
    "calls-racecheck": ("racecheck", races(HANDED, HANDED)),
    "calls-initcheck": ("initcheck", CLEAN),
    "control": ("racecheck", races(START, kernel="lce_control_two_partitions", file=CONTROL, handed=START)),
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
        ("calls-racecheck", races(HANDED, RING), f"{RACED.name}:{RING}"),
        ("calls-racecheck", races(HANDED).replace("lce_forward_mean ", ""), "calls-racecheck: did not run"),
        ("control", races(), "control: reports nothing, but its excuse was used"),
        ("planted-race", races(THERE, handed=THERE), "planted-race: racecheck does not report it"),
    ],
    ids=range(5),
)
def test_what_is_not_excused_fails(name, output, said, capsys):
    assert sanitize.judge(KERNELS, GOOD | {name: (GOOD[name][0], output)}) == 1
    assert said in capsys.readouterr().out
