"""What measures. Each module uses only the modules above it.

team.py         the ranks of a team
problem.py      a shape and its tensors
timing.py       the time and the profile of one call;  peak_memory.py  its peak memory
libraries.py    the losses of PyTorch and other libraries;  ours.py  the losses of parallel_lce
peers.py        the list of peers, and a peer's two calls: forward, and forward + backward
accuracy.py     the check of a peer's errors before it is timed
measure.py      accuracy, memory and time of all peers, interleaved
report.py       functions of all commands: arguments, console, JSON;  tables.py  tables of measure.py
ways.py         a report's ways to compute the same, side by side;  snapshots.py  reading a trained model
options.py      the suites and the command line of `python -m benchmarks`
"""
