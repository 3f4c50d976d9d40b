#!/usr/bin/env bash
# Trains a small GPT twice, with Megatron's stock loss and with parallel_lce, and compares. See configs/demo.yaml.
#   ./launch/demo.sh [--config FILE] [--text PATH] [key=value ...]
set -euo pipefail
source "$(dirname -- "${BASH_SOURCE[0]}")/env.sh"
export PYTHONPATH="$root${PYTHONPATH:+:$PYTHONPATH}"
exec "$python" "$root/launch/demo.py" "$@"
