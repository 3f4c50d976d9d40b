#!/usr/bin/env bash
# Runs every kernel under compute-sanitizer, on a GPU host with the CUDA toolkit.
set -euo pipefail
source "$(dirname -- "$(readlink -f -- "${BASH_SOURCE[0]}")")/env.sh" # a link to this script starts it too
exec "$python" "$root/tests/sanitize.py" "$@"
