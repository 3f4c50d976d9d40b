"""Measures `parallel_lce` against its peers: `python -m parallel_lce.bench` on one GPU, `./launch/bench.sh` on several.

One GPU is a team of one rank. Each module uses only those above it:

team.py           the ranks that are measured together
problem.py        a shape and its random tensors
libraries.py      the losses of PyTorch and other libraries
peers.py          who is measured;  passes.py  the calls of each;  suites.py  what `--suite` measures
accuracy.py       what a peer must fulfil before it is timed
peak_memory.py    peak memory of one call, also used by the tests;  timing.py  seconds of one call
results.py        what was measured, as numbers and JSON;  tables.py, plot.py  the same to look at
measure.py        accuracy, memory and time of all peers, interleaved;  communication.py  collectives, timelines
machine.py        the hardware and software;  run.py  one run of the benchmark
options.py        the common command line, of one GPU (__main__.py) and of several (ranks.py)
scaling.py        a model of the time over ranks, fitted to JSON;  tune.py  times the kernels' tiles
"""
