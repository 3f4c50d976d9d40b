"""Measures `parallel_lce` against its peers: `python -m benchmarks` on one GPU, `./launch/bench.sh` on several.

A *peer* is a loss, or the GEMM-only baseline, that is measured. A *team* is the ranks that are measured together; one
GPU is a team of one rank. `python -m benchmarks.NAME`: gradient_filter, same_bits, doors, tune, which share engine/.
"""
