#!/usr/bin/env bash
# Compares parallel_lce with a GEMM-only baseline and other libraries: on all GPUs of this host, or as two gloo processes
# where there is none.
#   ./launch/bench.sh [--tp 1 2 4 8] [--peers NAME ...] [--json PATH] [--help] ...
# torchrun's own arguments, for several hosts, go in front of a --, the same on each host but for the node's rank:
#   ./launch/bench.sh --nnodes=2 --node-rank=0 --rdzv-backend=c10d --rdzv-endpoint=host0:29500 --nproc-per-node=8 -- ...
set -euo pipefail
source "$(dirname -- "$(readlink -f -- "${BASH_SOURCE[0]}")")/env.sh" # a link to this script starts it too
export CUDA_DEVICE_MAX_CONNECTIONS=${CUDA_DEVICE_MAX_CONNECTIONS-1} # Megatron's order of collectives and GEMMs
export OMP_NUM_THREADS=${OMP_NUM_THREADS-1}                         # ranks on one CPU share its cores
export TORCHINDUCTOR_COMPILE_THREADS=${TORCHINDUCTOR_COMPILE_THREADS-4} # of each rank; by default up to 32
exec "$python" "$root/launch/program.py" bench "$@"
