"""The same as `program.py compare`."""

from program import main

if __name__ == "__main__":
    main("compare")
