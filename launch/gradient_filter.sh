#!/usr/bin/env bash
# Speed and errors of gradient_filter at several steps of a training. Trains a small GPT, unless its snapshots exist, and
# measures on the inputs and the weight of its output layer, with the vocabulary in two orders.
#   ./launch/gradient_filter.sh [--rounds N] [--json PATH] [--device DEVICE] [FILE ...]
# The arguments of the training, those of snapshots.py, go in front of a --:
#   ./launch/gradient_filter.sh train.minutes=10 output=outputs/longer -- --json outputs/filter.json
set -euo pipefail
source "$(dirname -- "$(readlink -f -- "${BASH_SOURCE[0]}")")/env.sh" # a link to this script starts it too
exec "$python" "$root/launch/program.py" gradient_filter "$@"
