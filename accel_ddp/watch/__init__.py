"""Detects run-time faults: each rank publishes where it is, one monitor process per node watches its ranks and the other nodes.

Nothing here imports torch, and nothing travels over the process group of the training. The package may import `errors`,
`environment`, `net` and `records`.
"""
