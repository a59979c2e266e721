"""Training on an emulated cluster: DDP over Gloo, over hocket between the hosts, and over hocket's aggregator.

    python benchmarks/fabric_training.py star:hosts=8,bandwidth=100Mbit/s,latency=0us --model edsr --steps 6

The same processes train the same model from the same weights on the same batches three times, with torch's
DistributedDataParallel on three groups. A step's time is that of the slowest rank. What it has of exposed communication
is its time less that of a step in which no gradients are exchanged, measured in the same run. Losses are means over
ranks.
"""

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

from fabric_collectives import slowest

SYSTEMS = ("gloo", "hocket, host-based", "hocket, aggregator")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("cluster")
    parser.add_argument("--model", choices=("edsr", "resnet50"), default="edsr")
    parser.add_argument("--steps", type=int, default=6)
    asked = parser.parse_args()

    from hocket.cluster import load
    from hocket.fabric import Fabric, check

    with Fabric(load(asked.cluster)) as fabric, tempfile.TemporaryDirectory() as directory:
        print(check(fabric).describe(), flush=True)
        spec = json.dumps({"model": asked.model, "steps": asked.steps, "directory": directory})
        command = ["-m", "hocket", "run", "--fabric", fabric.name, "--aggregate", "-n", str(len(fabric.hosts))]
        subprocess.run([sys.executable, *command, __file__, "--rank", spec], check=True)
        told = json.loads(Path(directory, "told.json").read_text())
    print(f"{asked.model}: {told['parameters']} parameters; a step without communication takes {told['alone_s']:.2f} s")
    head = ("system", "step s", "exposed communication s", "step, x Gloo", "exposed, x Gloo", "losses")
    print(f"| {' | '.join(head)} |\n{'|---' * len(head)}|")
    exposed_s = {system: told["step_s"][system] - told["alone_s"] for system in SYSTEMS}
    for system in SYSTEMS:
        losses = " ".join(f"{loss:.6f}" for loss in told["losses"][system])
        print(
            f"| {system} | {told['step_s'][system]:.2f} | {exposed_s[system]:.2f} "
            f"| {told['step_s']['gloo'] / told['step_s'][system]:.2f} "
            f"| {exposed_s['gloo'] / exposed_s[system]:.2f} | {losses} |"
        )
    reference = told["losses"]["gloo"]
    apart = max(
        abs(loss / wanted - 1)
        for system in SYSTEMS
        for loss, wanted in zip(told["losses"][system], reference, strict=True)
    )
    print(f"\nlosses differ from Gloo's by {apart:.1e} at most; the aggregator {told['stats']}")


def work(spec: dict[str, Any]) -> None:
    """Everything that one rank does."""
    import torch
    import torch.distributed as dist

    from hocket import comm

    torch.set_num_threads(1)
    aggregator = os.environ.pop("HOCKET_AGGREGATOR")
    dist.init_process_group("hocket")
    groups = {"gloo": dist.new_group(backend="gloo"), "hocket, host-based": dist.group.WORLD}
    os.environ["HOCKET_AGGREGATOR"] = aggregator
    groups["hocket, aggregator"] = dist.new_group(backend="hocket")
    gloo = groups["gloo"]
    times_s: dict[str, list[float]] = {}
    losses: dict[str, list[float]] = {}
    alone_s: list[float] = []
    for system in SYSTEMS:
        own_alone_s, times_s[system], losses[system], parameters = train(spec, groups[system], gloo)
        alone_s += own_alone_s
    if dist.get_rank() == 0:
        told = {
            "parameters": parameters,
            "alone_s": statistics.median(alone_s),
            "step_s": {system: statistics.median(times_s[system]) for system in SYSTEMS},
            "losses": losses,
            "stats": str(next(iter(comm.aggregation_stats().values()))),
        }
        Path(spec["directory"], "told.json").write_text(json.dumps(told))
    dist.barrier(group=gloo)
    dist.destroy_process_group()


def train(spec: dict[str, Any], group: Any, gloo: Any) -> tuple[list[float], list[float], list[float], int]:
    """Seconds of steps without communication, of steps with it, losses, and how many parameters there are."""
    import torch
    import torch.distributed as dist

    torch.manual_seed(0)
    model, batches, criterion = stage(spec["model"], spec["steps"] + 1)
    data_parallel = torch.nn.parallel.DistributedDataParallel(model, process_group=group, forward_sync_buffers=False)
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
    losses: list[float] = []

    def step(number: int, told: bool) -> None:
        inputs, targets = batches[number]
        loss = criterion(data_parallel(inputs), targets)
        loss.backward()
        if told:
            optimizer.step()
            losses.append(float(loss.detach()))
        optimizer.zero_grad()

    with data_parallel.no_sync():
        alone_s = [slowest(lambda: step(0, False), gloo) for _ in range(3)][1:]
    times_s = [slowest(lambda number=number: step(number, True), gloo) for number in range(len(batches))][1:]
    means = torch.tensor(losses, dtype=torch.float64)
    dist.all_reduce(means, group=gloo)
    parameters = sum(parameter.numel() for parameter in model.parameters())
    return alone_s, times_s, (means / dist.get_world_size()).tolist(), parameters


def stage(name: str, steps: int) -> tuple[Any, list[tuple[Any, Any]], Any]:
    """The model, and this rank's batches: made-up images, as long as real ones."""
    import torch
    import torch.distributed as dist

    if name == "edsr":
        from hocket.workloads.edsr.model import EDSR

        model: Any = EDSR("baseline", 2)
        generator = torch.Generator().manual_seed(dist.get_rank() + 1)
        batches: list[tuple[Any, Any]] = [
            (torch.rand(1, 3, 24, 24, generator=generator), torch.rand(1, 3, 48, 48, generator=generator))
            for _ in range(steps)
        ]
        return model, batches, torch.nn.functional.l1_loss
    from hocket.workloads.resnet50.model import ResNet50

    generator = torch.Generator().manual_seed(dist.get_rank() + 1)
    batches = [
        (torch.rand(1, 3, 64, 64, generator=generator), torch.randint(10, (1,), generator=generator))
        for _ in range(steps)
    ]
    return ResNet50(10), batches, torch.nn.functional.cross_entropy


if __name__ == "__main__":
    if sys.argv[1:2] == ["--rank"]:
        work(json.loads(sys.argv[2]))
    else:
        main()
