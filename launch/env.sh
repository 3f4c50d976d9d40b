# Sourced by the scripts beside it. Sets $root, the repository, and $python, an interpreter that has everything; exports
# PYTHONPATH.
#
#   PARALLEL_LCE_PYTHON=/path/to/python   use this interpreter as it is, install nothing
#   PYTHON=/path/to/python                make .venv with this interpreter (3.11 or newer)
#
# Either may be a path, relative to where the user is, or a command of PATH.
# pip's own settings hold. For a CPU build of PyTorch where the default index serves CUDA ones, for example:
#   PIP_EXTRA_INDEX_URL=https://download.pytorch.org/whl/cpu ./launch/demo.sh

# -P: launch may be reached through a link. CDPATH would have cd look elsewhere, and print what it finds.
root=$(CDPATH= cd -P -- "$(dirname -- "${BASH_SOURCE[0]}")/.." >/dev/null && pwd -P)

_is_new_enough() { # [and not newer than 3.$2]
    "$1" -c 'import sys; sys.exit(not (3, 11) <= sys.version_info[:2] <= (3, int(sys.argv[1])))' "${2:-99}" \
        >/dev/null 2>&1
}

_absolute() { # scripts may change directory: the result holds there too
    local found
    found=$(type -P -- "$1") || return 1
    [[ $found = /* ]] || found=$PWD/$found
    echo "$found"
}

_chosen() { # NAME VALUE
    local found
    found=$(_absolute "$2") && _is_new_enough "$found" && { echo "$found"; return; }
    echo "error: $1=$2 is not a Python 3.11 or newer" >&2
    return 2
}

_find_python() {
    [ -z "${PYTHON:-}" ] || { _chosen PYTHON "$PYTHON"; return; }
    local newest candidate
    for newest in 13 99; do # past 3.13 megatron-core has no wheels and has to be compiled: take an older one if there is
        for candidate in python3 python python3.13 python3.12 python3.11; do
            candidate=$(_absolute "$candidate") && _is_new_enough "$candidate" "$newest" && { echo "$candidate"; return; }
        done
    done
    candidate=$({ python3 --version 2>&1 || true; } | head -n 1)
    echo "error: Python 3.11 or newer is needed, found ${candidate:-none}; name one with PYTHON=/path/to/python" >&2
    return 2
}

if [ -n "${PARALLEL_LCE_PYTHON:-}" ]; then
    python=$(_chosen PARALLEL_LCE_PYTHON "$PARALLEL_LCE_PYTHON") || exit
else
    python=$(_find_python) || exit
    "$python" "$root/launch/make_venv.py" "$python" || exit
    python=$root/.venv/bin/python
fi
# The programs' own modules too: with PYTHONSAFEPATH Python does not look beside the program.
export PYTHONPATH="$root:$root/launch${PYTHONPATH:+:$PYTHONPATH}"
