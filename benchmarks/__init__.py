"""Measures `parallel_lce` against its peers: `python -m benchmarks` on one GPU, `./launch/bench.sh` on several.

A *peer* is a loss, or the GEMM-only baseline, that is measured. A *team* is the ranks that are measured together; one
GPU is a team of one rank. Each module uses only the modules above it:

team.py         the ranks of a team
problem.py      a shape and its tensors
timing.py       the time of one call;  energy.py  its joules, and time at the power limit
peak_memory.py  its peak memory;  profiles.py  its profile and its timeline
libraries.py    the losses of PyTorch and other libraries;  ours.py  the losses of parallel_lce
peers.py        the list of peers;  passes.py  a peer's two calls: forward, and forward + backward
accuracy.py     the check of a peer's errors before it is timed
measure.py      accuracy, memory and time of all peers, interleaved
report.py       functions of all commands: arguments, console, JSON;  tables.py, plots.py  tables and pictures
options.py      the suites and the command line;  __main__.py  the benchmark
snapshots.py    functions of the reports on a trained model
parity.py, gradient_filter.py, distillation.py, token_loss.py, same_bits.py, doors.py, papers.py, tune.py  reports, each
                with its own command
"""
