"""Measures `parallel_lce` against its peers: `python -m benchmarks` on one GPU, `./launch/bench.sh` on several.

One GPU is a team of one rank. Each module uses only those above it:

team.py         the ranks that are measured together
problem.py      a shape and its tensors
timing.py       seconds of one call;  peak_memory.py  its peak memory;  profiles.py  its operations and its timeline
libraries.py    the losses of PyTorch and other libraries;  ours.py  those of parallel_lce
peers.py        who is measured;  passes.py  their calls: forward, and forward + backward
accuracy.py     what a peer must fulfil before it is timed
measure.py      accuracy, memory and time of all peers, interleaved
report.py       what all commands share: arguments, console, JSON;  tables.py, plots.py  what is printed and drawn
options.py      the suites and the command line;  __main__.py  the benchmark
snapshots.py    what reports on a trained model share
parity.py, gradient_filter.py, distillation.py, tune.py  reports, each a command of its own
"""
