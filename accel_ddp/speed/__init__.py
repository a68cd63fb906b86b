"""Faster training steps with the same result.

`attach` is the only entry point. It removes padding inside the layers (`padding_free`, `padding_free_model`), captures layers as
CUDA graphs (`cuda_graphs`), compiles them where that saves time, chooses `--micro_batch_size auto` (`autobatch`), and counts tokens
and FLOPs. `linear_cross_entropy` computes the loss over a large vocabulary in chunks. Training runs without this package too. The
package imports `training` and the packages below it.
"""
