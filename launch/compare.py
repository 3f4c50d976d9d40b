"""The same as `program.py compare`."""

import sys

from program import main

if __name__ == "__main__":
    main("compare", sys.argv[1:])
