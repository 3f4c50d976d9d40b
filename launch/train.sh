#!/usr/bin/env bash
# One training run through torchrun, with either loss (loss.impl=stock or loss.impl=parallel_lce).
#   ./launch/train.sh [--config FILE] [--text PATH] [key=value ...]
set -euo pipefail
source "$(dirname -- "${BASH_SOURCE[0]}")/env.sh"
export PYTHONPATH="$root${PYTHONPATH:+:$PYTHONPATH}"
exec "$python" "$root/launch/train.py" "$@"
