"""The same as `program.py snapshots`."""

from program import main

if __name__ == "__main__":
    main("snapshots")
