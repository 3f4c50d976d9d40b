# Sourced by the scripts beside it. Sets $root, the repository, and $python, an interpreter that has everything.
#
#   PARALLEL_LCE_PYTHON=/path/to/python   use this interpreter as it is, install nothing
#   PYTHON=/path/to/python                make .venv with this interpreter (3.11 or newer)
#
# pip's own settings hold. For a CPU build of PyTorch where the default index serves CUDA ones, for example:
#   PIP_EXTRA_INDEX_URL=https://download.pytorch.org/whl/cpu ./launch/demo.sh

root=$(cd -- "$(dirname -- "${BASH_SOURCE[0]}")/.." && pwd)

_is_new_enough() { # [and not newer than 3.$2]
    "$1" -c 'import sys; sys.exit(not (3, 11) <= sys.version_info[:2] <= (3, int(sys.argv[1])))' "${2:-99}" 2>/dev/null
}

_find_python() {
    if [ -n "${PYTHON:-}" ]; then
        _is_new_enough "$PYTHON" && { echo "$PYTHON"; return; }
        echo "error: PYTHON=$PYTHON is not a Python 3.11 or newer" >&2
        return 1
    fi
    local newest candidate
    for newest in 13 99; do # past 3.13 megatron-core has no wheels and has to be compiled: take an older one if there is
        for candidate in python3 python python3.13 python3.12 python3.11; do
            _is_new_enough "$candidate" "$newest" && { echo "$candidate"; return; }
        done
    done
    echo "error: Python 3.11 or newer is needed, found $(python3 --version 2>&1 || true); name one with PYTHON=/path/to/python" >&2
    return 1
}

# One stamp for what was asked for and with which Python: when either changes, .venv is made anew.
_stamp_of() {
    "$1" - "$root/pyproject.toml" "$root/constraints.txt" <<'PYTHON'
import hashlib, pathlib, sys
files = b"\0".join(pathlib.Path(name).read_bytes() for name in sys.argv[1:])
print(hashlib.sha256(files).hexdigest(), "%d.%d" % sys.version_info[:2])
PYTHON
}

_make_venv() {
    local base venv=$root/.venv stamp
    base=$(_find_python) || return 1
    stamp=$(_stamp_of "$base") || return 1
    python=$venv/bin/python
    [ -x "$python" ] && [ "$(cat "$venv/stamp" 2>/dev/null)" = "$stamp" ] && return
    echo "parallel_lce: installing into $venv with $("$base" --version), once; this takes a minute or more" >&2
    rm -f "$venv/stamp"
    if ! "$base" -m venv --clear "$venv" >/dev/null 2>&1; then
        # Some systems ship Python and pip without ensurepip: their pip then installs one.
        "$base" -m venv --clear --without-pip "$venv" || return 1
        "$base" -m pip --python "$python" install -qq pip || return 1
    fi
    (cd "$root" && "$python" -m pip install -qq --disable-pip-version-check -c constraints.txt -e '.[test]') || {
        echo "error: the installation into $venv failed; the next start tries again" >&2
        return 1
    }
    echo "$stamp" >"$venv/stamp" # last, so that an interrupted installation leaves none
}

if [ -n "${PARALLEL_LCE_PYTHON:-}" ]; then
    python=$PARALLEL_LCE_PYTHON
    _is_new_enough "$python" || { echo "error: PARALLEL_LCE_PYTHON=$python is not a Python 3.11 or newer" >&2; exit 1; }
else
    _make_venv || exit 1
fi
