"""Detects run-time faults: each rank publishes where it is, one monitor process per node watches its ranks and the other nodes.

Nothing here imports torch, only `environment` and `net`, and nothing travels over the process group of the training.
"""
