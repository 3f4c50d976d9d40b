"""What sanitize.py makes of the output of compute-sanitizer. The checks themselves need a GPU: launch/sanitize.sh."""

import pytest

pytest.importorskip("triton", reason="needs triton")

import kernel_calls
import sanitize

[HOPPER] = [file for file in sanitize.EXCUSED_FILES if "gl.warp_specialize(" in file.read_text()]
KERNELS = "kernels: " + " ".join(sorted(kernel_calls.NAMES))
CLEAN = f"========= COMPUTE-SANITIZER\n{KERNELS}\n========= ERROR SUMMARY: 0 errors\n"


def line_of(text: str) -> int:
    return 1 + next(i for i, line in enumerate(HOPPER.read_text().splitlines()) if text in line)


def races(*lines: int) -> str:
    """A race of each of these lines with the one that starts partitions."""
    kernel, started = "lce_forward_projection", line_of("gl.warp_specialize(")
    found = "".join(
        f"========= Error: Race reported between Write access at {kernel}+0x1230 in {HOPPER.name}:{line}\n"
        f"=========     and Read access at {kernel}+0x2340 in {HOPPER.name}:{started} [512 hazards]\n"
        for line in lines
    )
    summary = f"========= RACECHECK SUMMARY: {len(lines)} hazards displayed ({len(lines)} errors, 0 warnings)\n"
    return f"========= COMPUTE-SANITIZER\n{KERNELS}\n{found}=========\n{summary}"


STARTS, WAITS = line_of("gl.warp_specialize("), line_of(".wait(")
READ = (
    f"========= COMPUTE-SANITIZER\n{KERNELS}\n========= Invalid __global__ read of size 2 bytes\n"
    "=========     at lce_backward_rewrite+0x90 in token_gradients.py:12\n"
    "=========     by thread (0,0,0) in block (1,0,0)\n=========\n========= ERROR SUMMARY: 1 errors\n"
)
GOOD = dict.fromkeys(sanitize.TOOLS, CLEAN) | {"racecheck": races(STARTS, STARTS)}


def test_what_is_excused_passes(capsys):
    assert sanitize.judge(KERNELS, GOOD) == 0
    assert "racecheck: 2 reports, 2 of them excused" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("tool", "output", "said"),
    [
        ("memcheck", READ, "Invalid __global__ read of size 2 bytes"),
        ("memcheck", KERNELS, "memcheck did not finish"),
        ("racecheck", races(STARTS, WAITS), f"{HOPPER.name}:{WAITS}"),
        ("racecheck", races(STARTS).replace("lce_forward_mean ", ""), "racecheck: did not run: lce_forward_mean"),
    ],
    ids=range(4),
)
def test_what_is_not_excused_fails(tool, output, said, capsys):
    assert sanitize.judge(KERNELS, GOOD | {tool: output}) == 1
    assert said in capsys.readouterr().out
