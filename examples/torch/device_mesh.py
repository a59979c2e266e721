"""Groups of a 2 x 2 mesh and every kind of collective: torchrun --nproc-per-node 4 device_mesh.py --backend hocket."""

import argparse
import json

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh

parser = argparse.ArgumentParser()
parser.add_argument("--backend", default="hocket")
dist.init_process_group(parser.parse_args().backend)
rank, world = dist.get_rank(), dist.get_world_size()

mesh = init_device_mesh("cpu", (2, world // 2), mesh_dim_names=("data", "tensor"))
found = {}
for axis in ("data", "tensor"):
    group = mesh[axis].get_group()
    tensor = torch.full((4,), 1.0 + rank)
    dist.all_reduce(tensor, group=group)
    gathered = [torch.zeros(2) for _ in range(group.size())]
    dist.all_gather(gathered, torch.full((2,), float(rank)), group=group)
    found[axis] = [tensor[0].item(), *(g[0].item() for g in gathered)]
sent = torch.arange(float(world)) + 10 * rank
received = torch.zeros(world)
dist.all_to_all_single(received, sent)
found["all_to_all"] = received.tolist()
odd = dist.new_group([1, world - 1])
if rank in (1, world - 1):
    value = torch.tensor([rank * 100.0])
    dist.broadcast(value, src=1, group=odd)
    found["odd"] = value.item()
everyone = [None] * world
dist.all_gather_object(everyone, found)
if rank == 0:
    print(json.dumps(everyone))
dist.destroy_process_group()
