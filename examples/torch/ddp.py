"""DistributedDataParallel on the CPU: torchrun --nproc-per-node 2 ddp.py --backend hocket."""

import argparse
import json

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

parser = argparse.ArgumentParser()
parser.add_argument("--backend", default="hocket")
dist.init_process_group(parser.parse_args().backend)
rank, world = dist.get_rank(), dist.get_world_size()

torch.manual_seed(0)
model = DistributedDataParallel(
    nn.Sequential(nn.Conv2d(1, 8, 3), nn.ReLU(), nn.Flatten(), nn.Linear(8 * 26 * 26, 32), nn.ReLU(), nn.Linear(32, 10))
)
optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
images, labels = torch.randn(64, 1, 28, 28), torch.randint(10, (64,))
losses = []
for step in range(5):
    mine = slice(rank * 8 + step, rank * 8 + step + 8)
    optimizer.zero_grad()
    loss = nn.functional.cross_entropy(model(images[mine]), labels[mine])
    loss.backward()
    nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    optimizer.step()
    dist.all_reduce(loss.detach())
    losses.append(loss.item() / world)
if rank == 0:
    print(json.dumps({"losses": losses, "weights": [p.double().sum().item() for p in model.parameters()]}))
dist.destroy_process_group()
