"""`accel-ddp tune` measures which NCCL settings, DDP bucket size and communication hook are fastest on a cluster for a model.
`command` and `options` are the command line. `tuner` runs the measurements from the main node: `settings` tunes environment
variables and `ddp` tunes bucket sizes and hooks, and both choose candidates and winners with the pure functions in `search`.
`trial_runner` runs one trial on all nodes. `coordinator` on the main node and an `agent` on every node exchange the messages that
`protocol` describes. The agent starts the `worker` of each rank through `processes`. `results` has the types, tables and files,
and `shapes` describes the gradients of a model. Only `worker` imports torch, and it is always a process of its own. The package
may import `doctor` and the lowest layer (`errors`, `environment`, `config`, `net`); other modules are started by name."""
