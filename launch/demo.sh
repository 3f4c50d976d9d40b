#!/usr/bin/env bash
# Trains a small GPT twice, with Megatron's unfused loss and with parallel_lce, and compares. See configs/demo.yaml.
#   ./launch/demo.sh [--config FILE] [key=value ...]
set -euo pipefail
source "$(dirname -- "$(readlink -f -- "${BASH_SOURCE[0]}")")/env.sh" # a link to this script starts it too
exec "$python" "$root/launch/program.py" demo "$@"
