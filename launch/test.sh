#!/usr/bin/env bash
# Runs the tests; arguments go to pytest.
set -euo pipefail
source "$(dirname -- "$(readlink -f -- "${BASH_SOURCE[0]}")")/env.sh" # a link to this script starts it too
cd "$root"
"$python" -m training.packages test torch pytest
exec "$python" -m pytest "$@"
