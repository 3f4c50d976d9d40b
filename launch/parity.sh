#!/usr/bin/env bash
# Errors of log-probabilities. Trains a small GPT, unless its snapshots exist, and compares parallel_lce, bf16 logits and
# an fp32 head with float64: on the inputs and the weight of its output layer, and on random inputs.
#   ./launch/parity.sh [--random N,V,D ...] [--json PATH] [--device DEVICE] [FILE ...]
# The arguments of the training, those of snapshots.py, go in front of a --:
#   ./launch/parity.sh train.minutes=10 output=outputs/longer -- --json outputs/parity.json
set -euo pipefail
source "$(dirname -- "$(readlink -f -- "${BASH_SOURCE[0]}")")/env.sh" # a link to this script starts it too
exec "$python" "$root/launch/program.py" parity "$@"
