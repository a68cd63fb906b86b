"""Check that DDP with a static graph still synchronises gradients after a rehearsal. Each rank prints the result."""

import base
import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

from accel_ddp.engine.rehearsal import rehearse
from accel_ddp.engine.terms import Terms

dist.init_process_group("gloo")
torch.manual_seed(0)
model = torch.nn.Sequential(torch.nn.Linear(4, 4), torch.nn.Linear(4, 1))
terms = Terms(model, base.Task())
ddp = DistributedDataParallel(terms, static_graph=True, gradient_as_bucket_view=True)
rehearse(terms, torch.ones(3, 4))
assert all(p.grad is None for p in model.parameters())
for _ in range(4):
    ddp(torch.full((3, 4), 1.0 + dist.get_rank()))["loss"].sum().backward()
    mine = torch.cat([p.grad.flatten() for p in model.parameters()])
    others = [torch.empty_like(mine) for _ in range(2)]
    dist.all_gather(others, mine)
    assert torch.equal(*others), "the gradients of the ranks differ"
    for p in model.parameters():
        p.grad = None
print("the gradients are equal")
dist.destroy_process_group()
