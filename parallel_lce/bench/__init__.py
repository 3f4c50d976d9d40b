"""Measures `parallel_lce` against its peers on this machine: `python -m parallel_lce.bench`.

suites.py     what `--suite` measures
inputs.py     a shape and its random tensors
peers.py      who is measured, and how each is called;  libraries.py  the calls of other libraries
accuracy.py   what a peer must fulfil before it is timed
memory.py     peak memory of one call, also used by the tests
measure.py    time and memory of all peers, interleaved
report.py     one shape as table, JSON and sentences;  overview.py  all shapes of a run;  plot.py  the picture
parallel/    the same over tensor-parallel ranks, for `./launch/bench.sh`
scaling.py   a model of the time over ranks, fitted to what that measured
"""
