#!/usr/bin/env bash
# One training run through torchrun, with either loss (loss.impl=stock or loss.impl=parallel_lce).
#   ./launch/train.sh [--config FILE] [key=value ...]
set -euo pipefail
source "$(dirname -- "$(readlink -f -- "${BASH_SOURCE[0]}")")/env.sh" # a link to this script starts it too
exec "$python" "$root/launch/program.py" train "$@"
