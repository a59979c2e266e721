"""A column- and a row-wise linear layer: torchrun --nproc-per-node 2 tensor_parallel.py --backend hocket."""

import argparse
import json

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

parser = argparse.ArgumentParser()
parser.add_argument("--backend", default="hocket")
dist.init_process_group(parser.parse_args().backend)

torch.manual_seed(0)
mesh = init_device_mesh("cpu", (dist.get_world_size(),), mesh_dim_names=("tensor",))
model = nn.Sequential(nn.Linear(32, 128), nn.ReLU(), nn.Linear(128, 32))
parallelize_module(model, mesh["tensor"], {"0": ColwiseParallel(), "2": RowwiseParallel()})
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
data = torch.randn(16, 32)
losses = []
for _ in range(5):
    optimizer.zero_grad()
    loss = (model(data) - data).square().mean()
    loss.backward()
    optimizer.step()
    losses.append(loss.item())
weights = [parameter.full_tensor().double().sum().item() for parameter in model.parameters()]
if dist.get_rank() == 0:
    print(json.dumps({"losses": losses, "weights": weights}))
dist.destroy_process_group()
