#!/usr/bin/env bash
# Runs the tests; arguments go to pytest.
set -euo pipefail
source "$(dirname -- "${BASH_SOURCE[0]}")/env.sh"
cd "$root"
exec "$python" -m pytest "$@"
