"""Measures `parallel_lce` over tensor-parallel ranks: `./launch/bench.sh`, which starts it under torchrun.

team.py      the ranks of one tensor-parallel size, and what they tell each other
problem.py   the tensors of each rank, their float64 truth and torch's answer in the same dtype
peers.py     who is measured, in the layouts with and without sequence parallelism
measure.py   accuracy, memory and time of all peers, interleaved
collectives.py  communication by itself
report.py    tables and JSON;  plot.py  time against TP;  trace.py  the timeline of one call
"""
