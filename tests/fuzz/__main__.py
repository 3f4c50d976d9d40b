"""`python tests/fuzz --help`."""

import sys
from pathlib import Path

if __name__ == "__main__":
    TESTS = Path(__file__).resolve().parents[1]
    sys.path[:1] = [str(TESTS), str(TESTS.parent)]  # in place of this folder, whose modules have common names

    from fuzz.program import main

    sys.exit(main())
