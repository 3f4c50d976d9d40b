# Sourced by the other scripts here. Sets $root, the repository, and $python, an interpreter with all packages. Exports
# PYTHONPATH. Makes the repository's .venv, unless it is up to date.
#
#   PARALLEL_LCE_PYTHON=/path/to/python   use this interpreter as it is, install nothing
#
# It may be a path, relative to the current folder, or a command of PATH. pip's own settings apply.

root=$(dirname -- "$(dirname -- "${BASH_SOURCE[0]}")") # absolute, without links: the scripts source it so

_new_enough() { # COMMAND: its absolute path, since the scripts may change directory, if it is Python 3.11 or newer
    local found
    found=$(type -P -- "$1") || return 1
    [[ $found = /* ]] || found=$PWD/$found
    "$found" -c 'import sys; sys.exit(sys.version_info < (3, 11))' >/dev/null 2>&1 && echo "$found"
}

_make_venv() ( # PYTHON: makes .venv with it. A function in a process of its own: the lock ends with it
    cd "$root" || exit
    # Two first starts at the same time, perhaps on two hosts, would clear each other's .venv.
    exec 9>.venv.lock
    flock 9 2>/dev/null || true # not everywhere
    stamp=$("$1" -V; cat pyproject.toml constraints.txt) # when either changes, .venv is made again
    [ "$stamp" = "$(cat .venv/stamp 2>/dev/null)" ] && exit
    echo "parallel_lce: installing into $root/.venv with $1, once; this takes a minute or more" >&2
    "$1" -m venv --clear .venv || exit 2
    .venv/bin/python -m pip install -qq --disable-pip-version-check -c constraints.txt -e '.[test]' || exit 1
    echo "$stamp" >.venv/stamp # last: an interrupted installation has no stamp
)

if [ -n "${PARALLEL_LCE_PYTHON:-}" ]; then
    if ! python=$(_new_enough "$PARALLEL_LCE_PYTHON"); then
        echo "error: PARALLEL_LCE_PYTHON=$PARALLEL_LCE_PYTHON is not a Python 3.11 or newer" >&2
        exit 2
    fi
else
    # megatron-core has no wheels for newer than 3.13: prefer an older one to compiling it.
    for candidate in python3.13 python3.12 python3.11 python3; do
        python=$(_new_enough "$candidate") && break
    done
    [ -n "$python" ] || { echo "error: Python 3.11 or newer is needed, PATH has none" >&2; exit 2; }
    _make_venv "$python" || exit
    python=$root/.venv/bin/python
fi
# launch/ too: with PYTHONSAFEPATH Python does not import from the program's own folder.
export PYTHONPATH="$root:$root/launch${PYTHONPATH:+:$PYTHONPATH}"
