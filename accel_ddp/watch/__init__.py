"""The detection of faults during a run: one monitor process per node watches its ranks and the other nodes.

`monitor` observes and prints, `diagnosis` and `slowness` decide what is wrong. Nothing here imports torch, and nothing travels over
the process group of the training. The package may import `errors`, `nodes`, `records` and `phases`.
"""
