"""Programs that train with compressed gradients, run by ranks."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import hocket
from hocket.planner import Plan
from hocket.profile import Recorder

METHODS = ("fp16", "bf16", "int8", "topk:0.1", "1bit", "terngrad", "powersgd:2")
WIDTH, CLASSES = 32, 4


def model() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(
        nn.Linear(WIDTH, 64), nn.Tanh(), nn.Linear(64, 64, bias=False), nn.Tanh(), nn.Linear(64, CLASSES)
    )


def data(count: int = 46) -> TensorDataset:
    """Points around the corners of a cube, a class for each."""
    generator = torch.Generator().manual_seed(1)
    kinds = torch.arange(count) % CLASSES
    corners = torch.randn(CLASSES, WIDTH, generator=generator)
    return TensorDataset(corners[kinds] + torch.randn(count, WIDTH, generator=generator), kinds)


def train(plan: Plan, epochs: int = 6) -> dict[str, Any]:
    """Losses, a report, and the weights in the end, as this rank has them."""
    net = model()
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1, momentum=0.9)
    trainer = hocket.Trainer(net, nn.functional.cross_entropy, optimizer, plan, sample=torch.zeros(8, WIDTH))
    loader = DataLoader(data(), batch_size=16, shuffle=True)  # the last batch has 14: ranks share it unequally
    losses = [float(trainer.step(batch)) for _ in range(epochs) for batch in trainer.batches(loader)]
    weights = [p.detach().clone() for p in trainer.model.parameters()]
    return {"losses": losses, "report": trainer.report(), "weights": weights, "plan": trainer.plan.describe()}


def train_all(plans: list[Plan], epochs: int = 6) -> list[dict[str, Any]]:
    return [train(plan, epochs) for plan in plans]


def own_loop(compression: str, dtype: torch.dtype) -> dict[str, Any]:
    """The same with a loop of one's own; and what a step announces."""
    net = model().to(dtype)
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
    net, optimizer, loader = hocket.distribute(
        net, optimizer, DataLoader(data(), batch_size=16), compression=compression, bucket_bytes=9000
    )
    events: list[tuple[str, int]] = []
    for _ in range(3):
        for x, y in loader:
            optimizer.zero_grad()
            with Recorder() as recorder:
                nn.functional.cross_entropy(net(x.to(dtype)), y).backward()
            operations = [event for event in recorder.events()[1:] if event["label"] != "loss weights"]
            events = [(event["kind"], event["nbytes"]) for event in operations]
            optimizer.step()
    reducer = net._reducer
    planned = []
    for number, bucket in enumerate(reducer.buckets):
        flat = bucket.flat[: bucket.numel - bucket.tail.numel()]
        exchanged = reducer.compression.method.takes(dtype) and flat.numel()
        if not exchanged:
            planned.append(("all_reduce", bucket.numel * bucket.flat.element_size()))
            continue
        job = reducer.compression._job(bucket, flat, None)
        planned += reducer.compression.method.announced(job)
        if number == len(reducer.buckets) - 1:
            planned.append(("all_reduce", bucket.tail.numel()))
    return {
        "events": sorted(events),
        "planned": sorted(planned),
        "weights": [p.detach().clone() for p in net.parameters()],
        "report": net.compression_report(),
    }


def own_loops(cases: list[tuple[str, torch.dtype]]) -> list[dict[str, Any]]:
    return [own_loop(*case) for case in cases]


class Partly(nn.Module):
    """Uses one of two layers, by turns, and has one without elements."""

    def __init__(self) -> None:
        super().__init__()
        self.one, self.two = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)
        self.empty = nn.Parameter(torch.empty(0))
        self.use = "one"

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y: torch.Tensor = self.one(x) if self.use == "one" else self.two(x)
        return y + self.empty.sum()


def odd_cases(compression: str) -> dict[str, Any]:
    """Layers unused by some ranks or by all, gradients that add up, an exception, and layers frozen in between."""
    torch.manual_seed(0)
    net, _, _ = hocket.distribute(Partly(), compression=compression, bucket_bytes=3000)
    rank = torch.distributed.get_rank()
    found: dict[str, Any] = {}
    net(torch.ones(2, WIDTH)).sum().backward()
    found["used by none"] = net.two.weight.grad is None
    net.zero_grad()
    net.use = "one" if rank else "two"
    net(torch.ones(2, WIDTH)).sum().backward()
    found["used by some"] = [p.grad.abs().sum().item() > 0 for p in (net.one.weight, net.two.weight)]
    with net.no_sync():
        net(torch.ones(2, WIDTH)).sum().backward()
    net(torch.ones(2, WIDTH)).sum().backward()
    try:
        net(torch.ones(2, WIDTH)).sum().register_hook(_fails).backward()
    except (ValueError, AttributeError):
        found["failed"] = True
    net.two.weight.requires_grad_(False)
    for _ in range(2):
        net.use = "one"
        net.zero_grad()
        net(torch.ones(2, WIDTH)).sum().backward()
    found["gradient"] = net.one.weight.grad.clone()
    return found


def _fails(gradient: torch.Tensor) -> torch.Tensor:
    raise ValueError("on purpose")


def all_odd_cases(methods: tuple[str, ...]) -> list[dict[str, Any]]:
    return [odd_cases(method) for method in methods]


def saved_and_loaded(path: str) -> dict[str, Any]:
    """A run with error feedback that goes back to its checkpoint, beside one that begins with it."""
    batch = torch.ones(8, WIDTH), torch.arange(8) % CLASSES

    def trainer() -> hocket.Trainer:
        net = model()
        optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
        return hocket.Trainer(net, nn.functional.cross_entropy, optimizer, Plan(compression="1bit"))

    first = trainer()
    for _ in range(3):
        first.step(batch)
    first.save(path)
    first.step(batch)
    first.load(path)
    second = trainer()
    second.load(path)
    return {"losses": [[float(each.step(batch)) for _ in range(3)] for each in (first, second)]}
