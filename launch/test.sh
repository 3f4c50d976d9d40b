#!/usr/bin/env bash
# Runs the tests; arguments go to pytest.
set -euo pipefail
script=${BASH_SOURCE[0]}
while target=$(readlink -- "$script"); do # a link to this script starts it too; not every readlink has -f
    [[ $target = /* ]] || target=$(dirname -- "$script")/$target
    script=$target
done
source "$(dirname -- "$script")/env.sh"
cd "$root"
"$python" -m training.packages test torch pytest
exec "$python" -m pytest "$@"
