"""Two pipeline stages with 1F1B: torchrun --nproc-per-node 2 pipeline.py --backend hocket."""

import argparse
import json

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.pipelining import PipelineStage, Schedule1F1B

parser = argparse.ArgumentParser()
parser.add_argument("--backend", default="hocket")
dist.init_process_group(parser.parse_args().backend)
rank, world = dist.get_rank(), dist.get_world_size()

torch.manual_seed(0)
layers = [nn.Sequential(nn.Linear(32, 64), nn.Tanh(), nn.Linear(64, 32)) for _ in range(world)]
stage = PipelineStage(layers[rank], rank, world, torch.device("cpu"))
schedule = Schedule1F1B(stage, n_microbatches=4, loss_fn=nn.functional.mse_loss)
optimizer = torch.optim.SGD(layers[rank].parameters(), lr=0.1)
data, target = torch.randn(32, 32), torch.randn(32, 32)
means = []
for _ in range(4):
    optimizer.zero_grad()
    losses = []
    if rank == 0:
        schedule.step(data)
    elif rank == world - 1:
        schedule.step(target=target, losses=losses)
    else:
        schedule.step()
    optimizer.step()
    mean = torch.stack(losses).mean().detach() if losses else torch.zeros(())
    dist.all_reduce(mean)
    means.append(mean.item())
if rank == 0:
    print(json.dumps({"losses": means}))
dist.destroy_process_group()
