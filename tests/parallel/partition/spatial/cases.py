"""Random layers and whole models for ranks to divide, and what one process makes of them."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from hocket import comm
from hocket.parallel.mesh import world as _world
from hocket.parallel.partition.spatial import LABEL, parallelize


@dataclass(frozen=True)
class Case:
    """A layer by name with its arguments, and the shape of its input."""

    kind: str
    kwargs: dict[str, Any]
    shape: tuple[int, ...]
    seed: int = 0

    def build(self) -> tuple[nn.Module, torch.Tensor]:
        torch.manual_seed(self.seed)
        model: nn.Module = getattr(nn, self.kind)(**self.kwargs).double()
        return model, torch.randn(self.shape, dtype=torch.float64, requires_grad=True)


class Counter:
    """Adds up the bytes of the halos that this rank is announced to send."""

    def __init__(self) -> None:
        self.sent: list[int] = []
        self.stop = comm.observe(self)

    def operation_finished(self, op: Any) -> None:
        if op.label == LABEL:
            self.sent.append(op.nbytes)

    def operation_waited(self, op: Any, begin_s: float, end_s: float) -> None:
        pass


def outcome(model: nn.Module, x: torch.Tensor, seed: int = 0) -> list[torch.Tensor]:
    """Output, and gradients of input and parameters, of a weighted sum."""
    y = model(x)
    generator = torch.Generator().manual_seed(seed)
    weights = torch.randn(y.shape, generator=generator, dtype=torch.float64)
    parameters = list(model.parameters())
    gradients = torch.autograd.grad((y * weights).sum(), [x, *parameters], allow_unused=True)
    buffers = [b.detach().clone() for b in model.buffers() if b.is_floating_point()]
    zeros = [torch.zeros_like(p) if g is None else g for p, g in zip([x, *parameters], gradients, strict=True)]
    return [y.detach(), *zeros, *buffers]


def divided(case: Case) -> dict[str, Any]:
    """The same by all ranks together, what they sent, and what was gathered."""
    import torch.distributed as dist

    model, x = case.build()
    form = parallelize(model, _world.current())
    counter = Counter()
    found = outcome(model, x)
    counter.stop()
    gradients = found[1 : 2 + len(list(model.parameters()))]
    for (
        gradient
    ) in gradients:  # whole tensors' add up; every rank's loss counts, so that they are as many times too large
        dist.all_reduce(gradient)
        gradient.div_(dist.get_world_size())
    return {"found": found, "sent": counter.sent, "refused": form.refused}


def run_all(cases: list[Case]) -> list[Any]:
    """All cases in one world: of each rank the largest error, the bytes sent, and what was gathered."""
    results = []
    for case in cases:
        expected = outcome(*case.build())
        try:
            got = divided(case)
        except Exception as error:
            raise AssertionError(f"{case}: {type(error).__name__}: {error}") from error
        for i, (a, b) in enumerate(zip(got["found"], expected, strict=True)):
            if a.shape != b.shape:
                raise AssertionError(f"{case}: tensor {i} is {list(a.shape)}, not {list(b.shape)}")
        apart = max(
            float((a - b).abs().max()) / max(1.0, float(b.abs().max()))
            for a, b in zip(got["found"], expected, strict=True)
            if b.numel()
        )
        results.append((apart, got["sent"], got["refused"]))
    return results


def halos(cases: list[Case]) -> list[tuple[list[int], list[int]]]:
    """Bytes that this rank sends in the forward pass of each layer, and in its back-propagation."""
    found = []
    for case in cases:
        model, x = case.build()
        form = parallelize(model, _world.current())
        counter = Counter()
        with form.running():
            loss = model(x).square().sum()
        forward = list(counter.sent)
        loss.backward()
        counter.stop()
        found.append((forward, counter.sent[len(forward) :]))
    return found
