#!/usr/bin/env bash
# One training run through torchrun, with either loss (loss.impl=stock or loss.impl=parallel_lce).
#   ./launch/train.sh [--config FILE] [--text PATH] [key=value ...]
# On several hosts torchrun's own arguments come first, ended by --, on each host with its own --node-rank:
#   ./launch/train.sh --nnodes=2 --node-rank=0 --rdzv-backend=c10d --rdzv-endpoint=host0:29500 --nproc-per-node=8 -- ...
set -euo pipefail
source "$(dirname -- "$(readlink -f -- "${BASH_SOURCE[0]}")")/env.sh" # a link to this script starts it too
exec "$python" "$root/launch/program.py" train "$@"
