"""Programs of relaxed training, run by ranks."""

from __future__ import annotations

import os
import signal
import time
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from hocket.comm import CommError, PeerDiedError
from hocket.parallel.data.relaxed import (
    BoundedStaleness,
    Hogwild,
    LocalSGD,
)
from hocket.testing import deadline

WIDTH = 6
SAMPLES = 48


def problem() -> tuple[nn.Linear, torch.Tensor, torch.Tensor, torch.Tensor]:
    """Least squares with an exact solution: a model at zero, inputs, targets, and the optimum."""
    generator = torch.Generator().manual_seed(5)
    inputs = torch.randn(SAMPLES, WIDTH, generator=generator, dtype=torch.float64)
    optimum = torch.randn(WIDTH, generator=generator, dtype=torch.float64)
    model = nn.Linear(WIDTH, 1, bias=False, dtype=torch.float64)
    nn.init.zeros_(model.weight)
    return model, inputs, inputs @ optimum[:, None], optimum


def gradient(model: nn.Module, optimizer: Any, inputs: torch.Tensor, targets: torch.Tensor) -> None:
    optimizer.zero_grad()
    nn.functional.mse_loss(model(inputs), targets).backward()


def mine(tensor: torch.Tensor) -> torch.Tensor:
    return tensor[dist.get_rank() :: dist.get_world_size()]


def asynchronous(rule: str, bound: int, steps: int, delays_s: list[list[float]] | None = None) -> dict[str, Any]:
    """Least squares by a bounded form; each rank sleeps its own `delays_s` at its steps, over and over."""
    model, inputs, targets, optimum = problem()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    rank, size = dist.get_rank(), dist.get_world_size()
    with BoundedStaleness(model, optimizer, bound, rule, timeout_s=deadline(20.0)) as training:  # type: ignore[arg-type]
        for step in range(steps):
            training.begin()
            gradient(model, optimizer, mine(inputs), mine(targets))
            if delays_s:
                time.sleep(delays_s[rank][step % len(delays_s[rank])])
            training.step(weight=1 / size, samples=len(mine(inputs)))
    return {
        "distance": float((model.weight[0].detach() - optimum).norm()),
        "weights": model.weight[0].tolist(),
        **training.report(),
    }


def asynchronous_cases(cases: list[tuple[Any, ...]]) -> list[dict[str, Any]]:
    return [asynchronous(*case) for case in cases]


def for_a_while(rule: str, bound: int, step_s: float, slower: float, seconds: float) -> dict[str, Any]:
    """Updates within some seconds, where rank 0 takes `slower` times as long for a step as the others."""
    model, inputs, targets, _ = problem()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.02)
    pause_s = step_s * (slower if dist.get_rank() == 0 else 1.0)
    with BoundedStaleness(model, optimizer, bound, rule, timeout_s=deadline(20.0)) as training:  # type: ignore[arg-type]
        dist.barrier()
        end_s = time.perf_counter() + seconds
        while time.perf_counter() < end_s:
            training.begin()
            gradient(model, optimizer, mine(inputs), mine(targets))
            time.sleep(pause_s)
            training.step(weight=1 / dist.get_world_size())
    return training.report()


def for_a_while_cases(cases: list[tuple[Any, ...]]) -> list[dict[str, Any]]:
    return [for_a_while(*case) for case in cases]


def killed(kind: str, victim: int) -> tuple[str, float, str]:
    """One rank kills itself in the middle; what error the others get, how long after, and what it says."""
    model, inputs, targets, _ = problem()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    training: Any = BoundedStaleness(model, optimizer, 3, timeout_s=deadline(15.0)) if kind == "stale" else None
    training = training or Hogwild(model, optimizer, timeout_s=deadline(15.0))
    began_s = time.perf_counter()
    try:
        with training:
            for step in range(400):
                training.begin()
                gradient(model, optimizer, mine(inputs), mine(targets))
                time.sleep(0.005)
                training.step(weight=0.1)
                if dist.get_rank() == victim and step == 20:
                    os.kill(os.getpid(), signal.SIGKILL)
    except CommError as error:
        return type(error).__name__, time.perf_counter() - began_s, str(error)
    return "none", time.perf_counter() - began_s, ""


def failed() -> str:
    """Rank 1 raises an error of its own; what the others get."""
    model, inputs, targets, _ = problem()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    try:
        with BoundedStaleness(model, optimizer, 2, timeout_s=deadline(15.0)) as training:
            for step in range(400):
                training.begin()
                gradient(model, optimizer, mine(inputs), mine(targets))
                training.step(weight=0.1)
                if dist.get_rank() == 1 and step == 5:
                    raise ArithmeticError("of the user's own")
    except ArithmeticError:
        time.sleep(1.0)
        return "ArithmeticError"
    except (CommError, PeerDiedError) as error:
        return f"{type(error).__name__}: {error}"
    return "none"


def local(every: int, steps: int, batch: int = 7, momentum: float = 0.0, **settings: Any) -> dict[str, Any]:
    """Least squares by local SGD, batches of uneven parts; all ranks' weights after each step."""
    model, inputs, targets, optimum = problem()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=momentum)
    averaging = LocalSGD(model, optimizer, every, **settings)
    rank, size = dist.get_rank(), dist.get_world_size()
    path = []
    for step in range(steps):
        chosen = torch.arange(step * batch, (step + 1) * batch) % SAMPLES
        part = torch.tensor_split(chosen, size)[rank]
        gradient(model, optimizer, inputs[part], targets[part])
        optimizer.step()
        averaging.step(samples=len(part))
        path.append(model.weight[0].tolist())
    averaging.settle()
    return {"path": path, "distance": float((model.weight[0].detach() - optimum).norm()), **averaging.report()}


def local_cases(cases: list[dict[str, Any]]) -> list[dict[str, Any]]:
    return [local(**case) for case in cases]


def synchronous(steps: int, batch: int = 7, momentum: float = 0.0) -> list[list[float]]:
    """The weights after each step of one process."""
    model, inputs, targets, _ = problem()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=momentum)
    path = []
    for step in range(steps):
        chosen = torch.arange(step * batch, (step + 1) * batch) % SAMPLES
        gradient(model, optimizer, inputs[chosen], targets[chosen])
        optimizer.step()
        path.append(model.weight[0].tolist())
    return path


def hogwild(steps: int) -> dict[str, Any]:
    """Least squares without locks."""
    model, inputs, targets, optimum = problem()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    with Hogwild(model, optimizer, timeout_s=deadline(20.0)) as training:
        for _ in range(steps):
            training.begin()
            gradient(model, optimizer, mine(inputs), mine(targets))
            training.step(weight=1 / dist.get_world_size())
    return {
        "distance": float((model.weight[0].detach() - optimum).norm()),
        "weights": model.weight[0].tolist(),
        **training.report(),
    }


def hogwild_sparse(steps: int) -> dict[str, Any]:
    """Rows of a table pulled to targets by sparse gradients."""
    table = nn.Embedding(40, 3, sparse=True, dtype=torch.float64)
    targets = torch.randn(40, 3, generator=torch.Generator().manual_seed(2), dtype=torch.float64)
    optimizer = torch.optim.SGD(table.parameters(), lr=0.3)
    generator = torch.Generator().manual_seed(dist.get_rank())
    with Hogwild(table, optimizer, timeout_s=deadline(20.0)) as training:
        for _ in range(steps):
            training.begin()
            rows = torch.randint(0, 40, (5,), generator=generator)
            optimizer.zero_grad()
            ((table(rows) - targets[rows]) ** 2).sum().mul(0.5).backward()
            assert table.weight.grad is not None
            assert table.weight.grad.is_sparse
            training.step(weight=1 / dist.get_world_size())
    return {"distance": float((table.weight.detach() - targets).abs().max()), **training.report()}


def hogwild_cases() -> list[dict[str, Any]]:
    return [hogwild(500), hogwild_sparse(1000)]


def late() -> tuple[str, float, str]:
    """Rank 1 makes no step for longer than rank 0 waits; what rank 0 gets."""
    model, inputs, targets, _ = problem()
    training = BoundedStaleness(model, torch.optim.SGD(model.parameters(), lr=0.01), 1, timeout_s=deadline(1.0))
    dist.barrier()
    began_s = time.perf_counter()
    if dist.get_rank() == 1:
        time.sleep(deadline(3.0))
        return "", 0.0, ""
    try:
        for _ in range(5):
            training.begin()
            gradient(model, training._optimizer, inputs, targets)
            training.step()
    except CommError as error:
        return type(error).__name__, time.perf_counter() - began_s, str(error)
    return "none", 0.0, ""
