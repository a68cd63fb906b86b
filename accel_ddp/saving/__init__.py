"""Checkpoints: their format on disk, the background writer, and the decision which one to resume from.

`format` writes and verifies a checkpoint folder, `parts` lets each rank write its part of a sharded one, `pieces` reads both kinds,
`tensors` converts models and optimizers to named tensors, `checkpoints` saves in the background, `resume` alone decides which
checkpoint a run continues from, and `run_folder` claims the output folder. The package imports `sharding`, `ranks` and the lowest
layer.
"""
