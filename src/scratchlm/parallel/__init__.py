"""Training on several devices, by `torch.distributed`, applied to the plain model from outside.

ranks.py        the processes, and how they agree
rows.py         how weights are cut into rows
zero1.py        all weights on every rank, each updates its own: the default
fsdp.py         a part of everything on every rank: for what does not fit
tensor.py       a part of every layer on every rank: the table, and the borders
context.py      a part of every sequence on every rank
collectives.py  collectives that a backward pass goes through
layout.py       the three as one thing that a training step talks to
launch.py       `--gpus N`: start the processes
"""
