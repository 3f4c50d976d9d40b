#!/usr/bin/env bash
# Runs the tests; arguments go to pytest. --all also runs the slow tests. -n NUMBER starts that many worker processes. By
# default the whole suite starts two workers on a host without a GPU; on a GPU host, and for named files, none.
set -euo pipefail
source "$(dirname -- "$(readlink -f -- "${BASH_SOURCE[0]}")")/env.sh" # a link to this script starts it too
exec "$python" "$root/launch/program.py" test "$@"
