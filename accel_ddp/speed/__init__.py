"""Faster training steps with the same result.

`attach` is the only entry point. It lets a model compute rows of texts without padding (`row_model`) or, for encoder-decoders and
models with an attention of their own, their layers (`packed_layers`), compares both with padding (`comparison`), captures layers as
CUDA graphs (`cuda_graphs`), compiles them where that saves time, chooses `--micro_batch_size auto` (`autobatch`), and counts tokens
and FLOPs. `linear_cross_entropy` computes the loss over a large vocabulary in chunks. Training runs without this package too. The
package imports `training` and the packages below it.
"""
