"""`accel-ddp tune` and `accel-ddp scaling`: which settings are fastest on a cluster, and whether more GPUs are worth it.

The package may import `doctor`, `launch`, `report`, `records` and the layers below them. Only worker processes import torch.
"""
