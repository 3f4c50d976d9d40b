#!/usr/bin/env bash
# Runs the tests; arguments go to pytest. --all runs the slow ones too, -n NUMBER in as many processes (0: in this one).
set -euo pipefail
source "$(dirname -- "$(readlink -f -- "${BASH_SOURCE[0]}")")/env.sh" # a link to this script starts it too
cd "$root"
"$python" -m training.packages test torch pytest xdist
exec "$python" -m pytest -n auto --dist worksteal "$@"
