"""Every bundled workload under every plan: does it lose, step by step, what one process loses? Prints a Markdown table.

    python -m benchmarks.equivalence [--workloads NAME,...] [--ranks 2,4,8] [--out FILE]

Each run makes 20 steps in float64 on the workload's "tiny" size with dropout off: five epochs of three whole batches
and one that lacks a sample, so that ranks have unequal parts. A cell is the largest relative difference of any step's
loss from one process without hocket; what is above TOLERANCE is printed in bold.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.utils.data import DataLoader, Subset, default_collate

import hocket
from hocket.parallel.pipeline import SplitError
from hocket.planner import Plan, PlanError
from hocket.testing import RankError, run_ranks
from hocket.workloads import example, names

TOLERANCE = 1e-9
STEPS = 20
OPTIMIZERS: dict[str, Callable[..., torch.optim.Optimizer]] = {
    "SGD": lambda p, rate: torch.optim.SGD(p, lr=rate, momentum=0.9),
    "Adam": lambda p, rate: torch.optim.Adam(p, lr=1e-3),
}
RATES = {"resnet50": 1e-5, "resnet101": 1e-5}
"""Of SGD, else 1e-3, with which these two, at their tiny size, double every difference in each step: one process whose
weights are changed by 1e-14 of themselves has other losses by 1e-2 after 20 steps."""
_T: dict[str, Any] = {"tensor_parallel_degree": 2}
_P: dict[str, Any] = {"pipeline_parallel_degree": 2, "micro_batches": 2}
PLANS: dict[int, dict[str, dict[str, Any]]] = {
    2: {
        "data": {},
        "optimizer": {"shard": "optimizer"},
        "gradients": {"shard": "gradients"},
        "parameters": {"shard": "parameters"},
        "tensor": _T,
        "pipeline": _P,
        "embeddings": {"embeddings": "hybrid"},
    },
    4: {
        "data": {},
        "gradients": {"shard": "gradients"},
        "parameters": {"shard": "parameters"},
        "tensor": {"tensor_parallel_degree": 4},
        "pipeline": {"pipeline_parallel_degree": 4, "micro_batches": 4},
        "data x tensor": {**_T, "shard": "parameters"},
        "data x pipeline": {**_P, "shard": "gradients"},
        "tensor x pipeline": {**_T, **_P},
        "embeddings": {"embeddings": "row", "shard": "optimizer"},
    },
    8: {"data x tensor x pipeline": {**_T, **_P, "shard": "optimizer"}},
}


def setting(name: str) -> tuple[nn.Module, Any, DataLoader[Any], bool]:
    """The model without dropout and the loss, the loader, and whether the model has batch norm."""
    torch.manual_seed(5)
    found = example(name)
    model = found.model.double()
    for module in model.modules():
        for attribute in ("p", "dropout"):
            if isinstance(getattr(module, attribute, None), float):
                setattr(module, attribute, 0.0)
    data = Subset(found.dataset, range(4 * found.batch_size - 1))
    loader = DataLoader(data, found.batch_size, shuffle=True, collate_fn=in_double)
    batch_norm = any(isinstance(m, nn.modules.batchnorm._BatchNorm) for m in model.modules())
    return model, Exact(found.loss_fn), loader, batch_norm


class Exact:
    """A loss in float64, though the workload says `.float()` for the sake of autocast: that would add noise of 1e-7."""

    def __init__(self, loss_fn: Callable[[Any, Any], torch.Tensor]) -> None:
        self._loss_fn = loss_fn

    def __call__(self, output: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
        """The loss."""
        plain: Any = torch.Tensor.float
        torch.Tensor.float = lambda t: t if t.dtype is torch.float64 else plain(t)  # type: ignore[method-assign]
        try:
            return self._loss_fn(output, target)
        finally:
            torch.Tensor.float = plain  # type: ignore[method-assign]


def in_double(items: list[Any]) -> Any:
    """A batch whose floating-point parts are float64."""
    return [t.double() if t.is_floating_point() else t for t in default_collate(items)]


def alone(name: str, optimizer_name: str) -> list[float]:
    """The losses of a plain program."""
    model, loss_fn, loader, _ = setting(name)
    optimizer = OPTIMIZERS[optimizer_name](model.parameters(), RATES.get(name, 1e-3))
    losses: list[float] = []
    while len(losses) < STEPS:
        for *inputs, target in loader:
            optimizer.zero_grad()
            loss = loss_fn(model(*inputs), target)
            loss.backward()
            optimizer.step()
            losses.append(loss.item())
    return losses


def by_plan(name: str, optimizer_name: str, fields: dict[str, Any]) -> list[float] | str:
    """The losses by a plan, or why it is refused."""
    model, loss_fn, loader, batch_norm = setting(name)
    optimizer = OPTIMIZERS[optimizer_name](model.parameters(), RATES.get(name, 1e-3))
    if batch_norm:
        fields = {**fields, "sync_batch_norm": True}
        if "micro_batches" in fields:  # each is normalised by itself
            fields = {**fields, "micro_batches": 1, "pipeline_schedule": "gpipe"}
    sample = tuple(next(iter(loader))[:-1])
    torch.manual_seed(5)
    setting(name)  # puts the random numbers where they were
    try:
        trainer = hocket.Trainer(model, loss_fn, optimizer, Plan(**fields), sample=sample)
    except (PlanError, SplitError) as error:
        return str(error)
    losses: list[float] = []
    while len(losses) < STEPS:
        losses.extend(float(trainer.step(batch)) for batch in trainer.batches(loader))
    return losses


def by_plans(name: str, plans: dict[str, dict[str, Any]]) -> dict[tuple[str, str], list[float] | str]:
    """What `by_plan` gives for every optimizer and plan."""
    return {(o, title): by_plan(name, o, plan) for title, plan in plans.items() for o in OPTIMIZERS}


def difference(losses: list[float] | str, reference: list[float]) -> float | str:
    """The largest relative difference of a step's loss."""
    if isinstance(losses, str):
        return losses
    assert len(losses) == len(reference) == STEPS
    return max(abs(a - b) / abs(b) for a, b in zip(losses, reference, strict=True))


def measure(name: str, ranks: int, timeout_s: float) -> dict[tuple[str, str], float | str]:
    """The largest difference for each optimizer and plan on so many ranks, or why there is none."""
    reference = {o: alone(name, o) for o in OPTIMIZERS}
    found: dict[tuple[str, str], float | str] = {}
    for group in (PLANS[ranks], *({title: plan} for title, plan in PLANS[ranks].items())):
        if all((o, title) in found for o in OPTIMIZERS for title in group):
            continue
        try:
            results = run_ranks(by_plans, ranks, name, group, timeout_s=timeout_s, group_timeout_s=timeout_s)
        except RankError as error:
            if len(group) == 1:
                found.update({(o, title): f"failed: {error.traceback[-600:]}" for o in OPTIMIZERS for title in group})
            continue  # one by one
        for key in results[0]:
            apart = [difference(rank[key], reference[key[0]]) for rank in results]
            reasons = [a for a in apart if isinstance(a, str)]
            found[key] = reasons[0] if reasons else max(a for a in apart if isinstance(a, float))
    return found


def table(ranks: int, results: dict[str, dict[tuple[str, str], float | str]]) -> str:
    """The results as Markdown; reasons below."""
    titles = list(PLANS[ranks])
    lines = [f"| {ranks} processes | " + " | ".join(titles) + " |", "|---" * (len(titles) + 1) + "|"]
    reasons: list[str] = []
    for name, found in results.items():
        for optimizer in OPTIMIZERS:
            cells = []
            for title in titles:
                value = found[optimizer, title]
                if isinstance(value, str):
                    reasons.append(f"{name}, {optimizer}, {title}: {value}")
                    cells.append("failed" if value.startswith("failed") else "refused")
                else:
                    cells.append(f"{value:.0e}" if value <= TOLERANCE else f"**{value:.0e}**")
            lines.append(f"| {name}, {optimizer} | " + " | ".join(cells) + " |")
    return "\n".join([*lines, "", *reasons]) + "\n"


def main() -> int:
    """Runs all, prints tables as they come."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--workloads", default=",".join(names()))
    parser.add_argument("--ranks", default="2,4,8")
    parser.add_argument("--timeout", type=float, default=600.0)
    parser.add_argument("--out", type=Path)
    arguments = parser.parse_args()
    texts = []
    for ranks in map(int, arguments.ranks.split(",")):
        results: dict[str, dict[tuple[str, str], float | str]] = {}
        for name in arguments.workloads.split(","):
            results[name] = measure(name, ranks, arguments.timeout)
            print(ranks, name, results[name], file=sys.stderr, flush=True)
        texts.append(table(ranks, results))
        print(texts[-1], flush=True)
    if arguments.out is not None:
        arguments.out.write_text("\n".join(texts))
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
