"""Measures `parallel_lce` against its peers on this machine: `python -m parallel_lce.bench`.

memory.py    peak memory of one call, also used by the tests
inputs.py    a shape and its random tensors
peers.py     who is measured, and how each is called
accuracy.py  what a peer must fulfil before it is timed
measure.py   time and memory of all peers, interleaved
report.py    the table, the JSON file and the closing sentences;  plot.py  the picture
"""
