#!/usr/bin/env bash
# Trains a small GPT twice, with Megatron's unfused loss and with parallel_lce, and compares. See configs/demo.yaml.
#   ./launch/demo.sh [--config FILE] [--text PATH] [key=value ...]
# On several hosts torchrun's own arguments come first, ended by --, on each host with its own --node-rank:
#   ./launch/demo.sh --nnodes=2 --node-rank=0 --rdzv-backend=c10d --rdzv-endpoint=host0:29500 --nproc-per-node=8 -- ...
set -euo pipefail
source "$(dirname -- "$(readlink -f -- "${BASH_SOURCE[0]}")")/env.sh" # a link to this script starts it too
exec "$python" "$root/launch/program.py" demo "$@"
