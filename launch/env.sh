# Sourced by the other scripts here. Sets $root, the repository, and $python, an interpreter with all packages. Exports
# PYTHONPATH.
#
#   PARALLEL_LCE_PYTHON=/path/to/python   use this interpreter as it is, install nothing
#
# It may be a path, relative to the current folder, or a command of PATH. pip's own settings apply.

root=$(dirname -- "$(dirname -- "${BASH_SOURCE[0]}")") # absolute, without links: the scripts source it so

_is_new_enough() { # PYTHON [MINOR]: 3.11 or newer, but not newer than 3.MINOR
    "$1" -c 'import sys; sys.exit(not (3, 11) <= sys.version_info[:2] <= (3, int(sys.argv[1])))' "${2:-99}" \
        >/dev/null 2>&1
}

_absolute() { # COMMAND: its absolute path, since the scripts may change directory
    local found
    found=$(type -P -- "$1") || return 1
    [[ $found = /* ]] || found=$PWD/$found
    echo "$found"
}

_find_python() {
    local newest candidate
    for newest in 13 99; do # megatron-core has no wheels for newer than 3.13: prefer an older one to compiling it
        for candidate in python3 python python3.13 python3.12 python3.11; do
            candidate=$(_absolute "$candidate") && _is_new_enough "$candidate" "$newest" && { echo "$candidate"; return; }
        done
    done
    candidate=$({ python3 --version 2>/dev/null || true; } | head -n 1)
    echo "error: Python 3.11 or newer is needed, PATH has ${candidate:-none}" >&2
    return 2
}

if [ -n "${PARALLEL_LCE_PYTHON:-}" ]; then
    if ! python=$(_absolute "$PARALLEL_LCE_PYTHON") || ! _is_new_enough "$python"; then
        echo "error: PARALLEL_LCE_PYTHON=$PARALLEL_LCE_PYTHON is not a Python 3.11 or newer" >&2
        exit 2
    fi
else
    python=$(_find_python) || exit
    "$python" "$root/launch/make_venv.py" "$python" || exit
    python=$root/.venv/bin/python
fi
# launch/ too: with PYTHONSAFEPATH Python does not import from the program's own folder.
export PYTHONPATH="$root:$root/launch${PYTHONPATH:+:$PYTHONPATH}"
