"""Random configurations of the public functions against float64. Each module uses only the modules above it.

draw.py      a configuration: its kind, sizes, options, layouts
values.py    its tensors
run.py       one configuration on one rank
truth.py     the same in plain torch, in float64, and how far roundings may move it
judge.py     the verdict on each result
program.py   the command, `python tests/fuzz`"""
