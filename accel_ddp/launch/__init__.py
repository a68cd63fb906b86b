"""Starts a job on all nodes of a cluster with one command, and stops it everywhere. This package does not import torch.

`description` reads cluster.yaml, `job_commands` builds the command of each node, and `launch_command` has the subcommands of
`accel-ddp`. For ssh hosts and this machine, `session` runs a job and finds it again: `code_files` copies and compares the code,
`connection` talks to the `guard` of each node, `node_checks` checks the nodes before the start, `job_record` stores the state and
the log of a node, and `node_output` receives and prints the output. `slurm` with `slurm_script`, and `kubernetes`, submit jobs to a
scheduler. `conversion` is `accel-ddp convert`. The package may import `errors`, `nodes`, `config`, `records`, `watch` and `doctor`.
"""
