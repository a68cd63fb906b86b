"""Checkpoints: their format on disk, the background writer, and the decision which one to resume from.

`format` writes and verifies a checkpoint folder, `tensors` converts models and optimizers to named tensors, `checkpoints` saves in
the background, `resume` alone decides which checkpoint a run continues from, and `run_folder` claims the output folder.
The package imports `ranks` and the lowest layer.
"""
