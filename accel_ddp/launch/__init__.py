"""Starts a job on all nodes of a cluster with one command, and stops it everywhere. This package does not import torch.

`description` reads cluster.yaml. `commands` builds the command of each node. `command` has the subcommands of `accel-ddp`. Each
backend has a folder. The package may import `errors`, `environment`, `net`, `records`, `watch`, `doctor` and `recipe_files`.
"""
