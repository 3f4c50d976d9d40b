#!/usr/bin/env bash
# Runs the tests; arguments go to pytest. --all runs the slow ones too. -n NUMBER takes that many processes beside this
# one; without it the whole suite takes two, and files that are named take none.
set -euo pipefail
source "$(dirname -- "$(readlink -f -- "${BASH_SOURCE[0]}")")/env.sh" # a link to this script starts it too
exec "$python" "$root/launch/program.py" test "$@"
