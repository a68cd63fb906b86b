"""Checkpoints: their format on disk, the background writer, and the decision which one to resume from.

`checkpoint_format` writes and verifies a checkpoint folder. `pieces` lets each rank write its part of a sharded checkpoint, and reads
both kinds. `state_tensors` converts models and optimizers to named tensors. `checkpoints` saves in the background. `resume` alone
decides which checkpoint a run continues from. `run_folder` claims the output folder, and `restart_record` stores automatic restarts.
The package imports `ranks` and the packages below it.
"""
