"""`--profile` and `accel-ddp profile`: records steps with torch.profiler, and explains where their time went.

`recorder`, `ranges`, `clocks` and `collection` run inside of a training. They may import torch, ranks, watch and training. The other
modules read the files afterwards. They import numpy and the standard library only, so that the command starts without torch.
"""
