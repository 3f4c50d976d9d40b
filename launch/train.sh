#!/usr/bin/env bash
# One training run through torchrun, with either loss (loss.impl=stock or loss.impl=parallel_lce).
#   ./launch/train.sh [--config FILE] [--text PATH] [key=value ...]
# torchrun's own arguments, for several hosts, go in front of a --, the same on each host but for the node's rank:
#   ./launch/train.sh --nnodes=2 --node-rank=0 --rdzv-backend=c10d --rdzv-endpoint=host0:29500 --nproc-per-node=8 -- ...
set -euo pipefail
source "$(dirname -- "$(readlink -f -- "${BASH_SOURCE[0]}")")/env.sh" # a link to this script starts it too
exec "$python" "$root/launch/train.py" "$@"
