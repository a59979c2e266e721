"""Saves sharded state and loads it again (DCP): torchrun --nproc-per-node 2 dcp_checkpoint.py --backend hocket."""

import argparse
import json
import shutil
import tempfile

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

parser = argparse.ArgumentParser()
parser.add_argument("--backend", default="hocket")
dist.init_process_group(parser.parse_args().backend)
rank, world = dist.get_rank(), dist.get_world_size()


def build(seed: int) -> tuple[nn.Module, torch.optim.Optimizer]:
    torch.manual_seed(seed)
    model = nn.Sequential(nn.Linear(16, 64), nn.ReLU(), nn.Linear(64, 16))
    fully_shard(model, mesh=init_device_mesh("cpu", (world,)))
    return model, torch.optim.Adam(model.parameters(), lr=1e-2)


def train(model: nn.Module, optimizer: torch.optim.Optimizer, steps: int) -> list[float]:
    torch.manual_seed(rank)
    losses = []
    for _ in range(steps):
        data = torch.randn(8, 16)
        loss = (model(data) - data).square().mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        total = loss.detach().clone()
        dist.all_reduce(total)
        losses.append(total.item() / world)
    return losses


paths = [tempfile.mkdtemp() if rank == 0 else None]
dist.broadcast_object_list(paths, src=0)
model, optimizer = build(0)
before = train(model, optimizer, 3)
weights, state = get_state_dict(model, optimizer)
dcp.save({"model": weights, "optimizer": state}, checkpoint_id=paths[0])
went_on = train(model, optimizer, 3)

model, optimizer = build(1)
weights, state = get_state_dict(model, optimizer)
loaded = {"model": weights, "optimizer": state}
dcp.load(loaded, checkpoint_id=paths[0])
set_state_dict(model, optimizer, model_state_dict=loaded["model"], optim_state_dict=loaded["optimizer"])
resumed = train(model, optimizer, 3)
assert resumed == went_on, "a resumed run must go on as if it had never stopped"
if rank == 0:
    shutil.rmtree(paths[0])  # all ranks have loaded it: they have trained together since
    print(json.dumps({"before": before, "after": resumed}))
dist.destroy_process_group()
