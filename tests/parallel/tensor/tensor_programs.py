"""What ranks run to compare tensor-parallel models with plain ones; they return plain Python values."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import torch
from torch import nn

from hocket.parallel._world import current
from hocket.parallel.tensor import TensorParallel, parallelize
from hocket.profile import Recorder

from ..user_models import CASES, Case
from .small_models import MODELS

STEPS = 20


def counted(recorder: Recorder) -> dict[str, tuple[int, int]]:
    """What was communicated: by kind, how many operations and bytes."""
    found: dict[str, tuple[int, int]] = {}
    for row in recorder.histogram():
        count, nbytes = found.get(row.kind, (0, 0))
        found[row.kind] = count + row.count, nbytes + row.nbytes
    return found


def expected(result: TensorParallel) -> dict[str, tuple[int, int]]:
    """What was foretold, in the same form."""
    found: dict[str, tuple[int, int]] = {}
    for c in result.collectives:
        count, nbytes = found.get(c.kind, (0, 0))
        found[c.kind] = count + c.count, nbytes + c.nbytes
    return found


def difference(
    result: TensorParallel, model: nn.Module, plain: nn.Module, value: Callable[[Any], Any], relative: bool = True
) -> float:
    """The largest difference between parameters (or their gradients), relative to the largest number of the tensor."""
    worst = 0.0
    for (name, mine), (_, full) in zip(model.named_parameters(), plain.named_parameters(), strict=True):
        a, b = value(mine), value(full)
        assert (a is None) == (b is None), name
        if a is not None:
            b = result.part(name, b)
            assert a.shape == b.shape, name
            worst = max(worst, float((a - b).abs().max()) / max(float(b.abs().max()), 1e-2))
    return worst


def train(name: str, **options: Any) -> dict[str, Any]:
    """Trains a user's model plainly and tensor-parallel; what differs, and what was decided and communicated."""
    case: Case = CASES[name]
    world = current()
    torch.manual_seed(5 + world.rank)  # rank 0's weights count
    model = case.model().double()
    rank_0 = world.from_root(model.state_dict())
    plain = case.model().double()
    plain.load_state_dict(rank_0)
    generator = torch.Generator().manual_seed(1)
    batches = [as_double(case.batch(4, generator)) for _ in range(STEPS)]
    result = parallelize(model, world, batches[0][:-1], **options)
    found: dict[str, Any] = {"forms": {d.name: d.form for d in result.decisions}, "refused": dict(result.refused)}
    found["share"] = sum(p.numel() for p in model.parameters()) / sum(p.numel() for p in plain.parameters())
    optimizers = [torch.optim.SGD(m.parameters(), lr=0.05, momentum=0.9) for m in (model, plain)]
    losses: list[tuple[float, float]] = []
    for i, batch in enumerate(batches):
        pair = []
        for m, optimizer in zip((model, plain), optimizers, strict=True):
            optimizer.zero_grad()
            with Recorder() as recorder:
                loss = case.loss_fn(m(*batch[:-1]), batch[-1])
                loss.backward()
            if i == 0 and m is model:
                found["counted"], found["expected"] = counted(recorder), expected(result)
            pair.append(loss.item())
        losses.append((pair[0], pair[1]))
        if i == 0:
            found["gradients"] = difference(result, model, plain, lambda p: p.grad)
        for optimizer in optimizers:
            optimizer.step()
    found["losses"] = losses
    found["weights"] = difference(result, model, plain, lambda p: p.data)
    model.eval(), plain.eval()
    with torch.no_grad():
        found["evaluation"] = float((model(*batches[0][:-1]) - plain(*batches[0][:-1])).abs().max())
    return found


def as_double(batch: tuple[torch.Tensor, ...]) -> tuple[torch.Tensor, ...]:
    return tuple(t.double() if t.is_floating_point() else t for t in batch)


def all_user_models() -> dict[str, dict[str, Any]]:
    return {name: train(name) for name in CASES}


def step(
    make: Callable[[], nn.Module], inputs: Callable[[], tuple[torch.Tensor, ...]], **options: Any
) -> dict[str, Any]:
    """One forward and backward pass, plain and tensor-parallel: forms, counts, and what differs."""
    torch.manual_seed(3)
    model, sample = make().double(), as_double(inputs())
    sample = tuple(t.requires_grad_(t.is_floating_point()) for t in sample)
    plain = copy.deepcopy(model)
    result = parallelize(model, current(), sample, **options)
    found: dict[str, Any] = {"forms": {d.name: d.form for d in result.decisions}, "refused": dict(result.refused)}
    found["text"] = str(result)
    found["cut"] = sum(result.part(n, p).numel() for n, p in plain.named_parameters())
    found["parameters"] = sum(p.numel() for p in plain.parameters())
    outputs = []
    torch.manual_seed(4)
    batch = as_double(inputs())  # not the sample
    for m in (model, plain):
        mine = [t.clone().requires_grad_(t.is_floating_point()) for t in batch]
        with Recorder() as recorder:
            out = m(*mine)
            out = list(out) if isinstance(out, tuple) else [out]
            torch.stack([t.sin().sum() for t in out]).sum().backward()
        if m is model:
            found["counted"], found["expected"] = counted(recorder), expected(result)
        outputs.append([*(t.detach() for t in out), *(t.grad for t in mine if t.grad is not None)])
    found["outputs"] = max(float((a - b).abs().max()) for a, b in zip(*outputs, strict=True))
    found["gradients"] = difference(result, model, plain, lambda p: p.grad)
    model.eval(), plain.eval()
    with torch.no_grad():
        evaluated = [m(*batch) for m in (model, plain)]
    a, b = (e[0] if isinstance(e, tuple) else e for e in evaluated)
    found["evaluation"] = float((a - b).abs().max())
    return found


def all_small_models() -> dict[str, dict[str, Any]]:
    return {name: step(*pair) for name, pair in MODELS.items()}
