"""Measures `parallel_lce` against its peers: `python -m benchmarks` on one GPU, `./launch/bench.sh` on several.

One GPU is a team of one rank. Each module uses only those above it:

team.py           the ranks that are measured together
problem.py        a shape and its random tensors
libraries.py      the losses of PyTorch and other libraries
peers.py          who is measured;  suites.py  at which shapes;  options.py  the command line
passes.py         the calls of a peer: forward, and forward + backward
accuracy.py       what a peer must fulfil before it is timed
peak_memory.py    peak memory of one call, also used by the tests;  timing.py  seconds of one call
breakdown.py      the GPU operations of a call, and where its host time goes
communication.py  collectives alone, timelines
results.py        what was measured, as numbers and JSON;  tables.py, plot.py  the same to look at
measure.py        accuracy, memory and time of all peers, interleaved
machine.py        the hardware and software;  run.py  one run of the benchmark;  __main__.py  starts it
scaling.py        a model of the time over ranks, fitted to JSON;  tune.py  times the kernels' tiles
exactness.py      log-probabilities against float64;  snapshots.py  what reports on snapshots share
parity_table.py, parity.py  the report on log-probabilities, a command of its own
sparsity.py       active tiles;  filtered.py  what gradient_filter gains and costs on a snapshot
filter_table.py, filter_plot.py, gradient_filter.py  the report on it, a command of its own
"""
