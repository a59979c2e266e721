"""Fully sharded data parallel (FSDP2): torchrun --nproc-per-node 2 fsdp2.py --backend hocket."""

import argparse
import json

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

parser = argparse.ArgumentParser()
parser.add_argument("--backend", default="hocket")
dist.init_process_group(parser.parse_args().backend)
rank, world = dist.get_rank(), dist.get_world_size()

torch.manual_seed(0)
mesh = init_device_mesh("cpu", (world,))
model = nn.Sequential(*(nn.Sequential(nn.Linear(64, 256), nn.GELU(), nn.Linear(256, 64)) for _ in range(3)))
for block in model:
    fully_shard(block, mesh=mesh)
fully_shard(model, mesh=mesh)
optimizer = torch.optim.Adam(model.parameters(), lr=1e-3)
data = torch.randn(world * 16, 64)[rank * 16 : rank * 16 + 16]
losses = []
for _ in range(5):
    loss = (model(data) - data).square().mean()
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
    total = loss.detach().clone()
    dist.all_reduce(total)
    losses.append(total.item() / world)
weights = [parameter.full_tensor().double().sum().item() for parameter in model.parameters()]
if rank == 0:
    print(json.dumps({"losses": losses, "weights": weights}))
dist.destroy_process_group()
