"""Makes a training step faster without changing its result.

`attach` is the only entry point: it removes padding inside of the layers, captures layers as CUDA graphs, compiles them where that
saves time, chooses `--micro_batch_size auto`, and counts tokens and FLOPs. `linear_cross_entropy` computes the loss over a large
vocabulary in chunks. Training runs without this package too. The package imports `training` and the layers below it.
"""
