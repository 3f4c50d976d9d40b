"""What sanitize.py makes of the output of compute-sanitizer. The checks themselves need a GPU: launch/sanitize.sh."""

from sanitize import EXCUSED_FILES, faults_of

[HOPPER] = [file for file in EXCUSED_FILES if "gl.warp_specialize(" in file.read_text()]


def place(text: str) -> str:
    line = 1 + next(i for i, line in enumerate(HOPPER.read_text().splitlines()) if text in line)
    return f"access at lce_forward_projection+0x1230 in {HOPPER.name}:{line}"


def races(*pairs: tuple[str, str]) -> str:
    """The output of racecheck with a race between each of these pairs of lines."""
    found = [
        f"= Error: Race reported between Write {place(a)}\n= and Read {place(b)} [512 hazards]\n" for a, b in pairs
    ]
    return (
        f"every kernel ran\n{''.join(found)}= RACECHECK SUMMARY: {len(pairs)} hazards displayed ({len(pairs)} errors)\n"
    )


def test_races_are_excused_where_partitions_start_and_nowhere_else():
    starts = "gl.warp_specialize(", "gl.warp_specialize("
    assert faults_of("racecheck", races(starts, starts)) == []
    (fault,) = faults_of("racecheck", races(starts, ("gl.warp_specialize(", ".wait(")))
    assert place(".wait(") in fault
    assert faults_of("memcheck", "every kernel ran\n= ERROR SUMMARY: 0 errors") == []
    for output in ("every kernel ran\n= ERROR SUMMARY: 1 error", "= ERROR SUMMARY: 0 errors", "every kernel ran"):
        assert faults_of("memcheck", output)
