"""The same as `program.py snapshots`."""

import sys

from program import main

if __name__ == "__main__":
    main("snapshots", sys.argv[1:])
