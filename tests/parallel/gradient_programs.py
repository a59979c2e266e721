"""Training steps that DDP on Gloo and hocket run side by side in the same processes; they return what must be equal."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.checkpoint import checkpoint

import hocket

from .programs import arrays

Wrap = Callable[..., Any]


def small(dtype: torch.dtype = torch.float32) -> nn.Module:
    torch.manual_seed(3)
    return nn.Sequential(nn.Linear(5, 7), nn.ReLU(), nn.Linear(7, 6), nn.Tanh(), nn.Linear(6, 2)).to(dtype)


def inputs(step: int, rows: int = 4, columns: int = 5, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    generator = torch.Generator().manual_seed(100 * step + dist.get_rank())
    return torch.randn(rows, columns, generator=generator).to(dtype)


def grads(model: Any) -> list[Any]:
    return arrays(p.grad for p in model.parameters())


def state(model: Any) -> list[Any]:
    return grads(model) + arrays(model.parameters()) + arrays(model.buffers())


# --- what DDP does too ----------------------------------------------------------------------------------------------


def steps(wrap: Wrap, **options: Any) -> list[Any]:
    model = wrap(small(), **options)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    found = []
    for step in range(4):
        optimizer.zero_grad()
        model(inputs(step)).square().mean().backward()
        optimizer.step()
        found += state(model)
    return found


def keeping_gradients(wrap: Wrap) -> list[Any]:
    model = wrap(small())
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    found = []
    for step in range(4):
        optimizer.zero_grad(set_to_none=False)
        model(inputs(step)).square().mean().backward()
        optimizer.step()
        found += state(model)
    return found


class Branches(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.stem = nn.Linear(5, 4)
        self.arms = nn.ModuleList(nn.Linear(4, 2) for _ in range(3))

    def forward(self, x: torch.Tensor, arm: int) -> torch.Tensor:
        return self.arms[arm](torch.relu(self.stem(x)))


def unused_parameters(wrap: Wrap) -> list[Any]:
    torch.manual_seed(3)
    model = wrap(Branches(), find_unused_parameters=True)
    found = []
    # Everyone's third arm, then arms by rank (the third is nobody's), then arms that rotate.
    for step, arm in enumerate([2, dist.get_rank() % 2, (dist.get_rank() + 1) % 3, 0]):
        model.zero_grad()
        model(inputs(step), arm).square().mean().backward()
        found += grads(model)
    return found


def unused_parameters_keep_older_gradients(wrap: Wrap) -> list[Any]:
    torch.manual_seed(3)
    model = wrap(Branches(), find_unused_parameters=True)
    found = []
    for step, arm in enumerate([0, 1, dist.get_rank() % 2, 1]):
        model(inputs(step), arm).square().mean().backward()
        found += grads(model)
    return found


class Tied(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.one = nn.Linear(5, 5)
        self.two = nn.Linear(5, 5)
        self.two.weight = self.one.weight

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.one(torch.tanh(self.two(torch.tanh(self.one(x)))))


def tied_parameters_used_twice(wrap: Wrap) -> list[Any]:
    torch.manual_seed(3)
    model = wrap(Tied())
    found = []
    for step in range(3):
        model.zero_grad()
        model(inputs(step)).square().mean().backward()
        found += grads(model)
    return found


def several_backwards(wrap: Wrap) -> list[Any]:
    model = wrap(small())
    found = []
    for step in range(4):
        if step == 2:
            model.zero_grad()
        model(inputs(step)).square().mean().backward()
        found += grads(model)
    return found


def two_forwards_one_backward(wrap: Wrap) -> list[Any]:
    model = wrap(small())
    found = []
    for step in range(3):
        model.zero_grad()
        (model(inputs(step)).square().mean() + model(inputs(step + 50)).abs().mean()).backward()
        found += grads(model)
    return found


def no_sync(wrap: Wrap, **options: Any) -> list[Any]:
    model = wrap(small(), **options)
    optimizer = torch.optim.Adam(model.parameters(), lr=0.01)
    found = []
    for step in range(3):
        optimizer.zero_grad()
        with model.no_sync():
            for part in range(2):
                model(inputs(10 * step + part)).square().mean().backward()
                found += grads(model)  # this rank's own
        model(inputs(10 * step + 2)).square().mean().backward()
        optimizer.step()
        found += state(model)
    return found


def forward_in_no_sync_decides(wrap: Wrap) -> list[Any]:
    model = wrap(small())
    with model.no_sync():
        loss = model(inputs(0)).square().mean()
    loss.backward()
    own = grads(model)
    model.zero_grad()
    loss = model(inputs(1)).square().mean()
    with model.no_sync():
        loss.backward()
    return own + grads(model)


def clipping(wrap: Wrap) -> list[Any]:
    model = wrap(small())
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    found = []
    for step in range(3):
        optimizer.zero_grad()
        (10 * model(inputs(step)).square().mean()).backward()
        norm = nn.utils.clip_grad_norm_(model.parameters(), 0.5)
        optimizer.step()
        found += [norm.item(), *state(model)]
    return found


def autocast_and_scaler(wrap: Wrap) -> list[Any]:
    model = wrap(small())
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0**10)
    found = []
    for step in range(4):
        optimizer.zero_grad()
        with torch.autocast("cpu", dtype=torch.bfloat16):
            loss = model(inputs(step)).float().square().mean()
        if step == 2 and dist.get_rank() == 0:
            loss = loss * float("inf")  # all ranks must skip the step
        scaler.scale(loss).backward()
        scaler.unscale_(optimizer)
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        scaler.step(optimizer)
        scaler.update()
        found += [scaler.get_scale(), *arrays(model.parameters())]
    return found


def typed(dtype: torch.dtype) -> Callable[[Wrap], list[Any]]:
    def run(wrap: Wrap) -> list[Any]:
        model = wrap(small(dtype))
        found = []
        for step in range(3):
            model.zero_grad()
            model(inputs(step, dtype=dtype)).square().mean().backward()
            found += grads(model)
        return found

    return run


def mixed_types(wrap: Wrap) -> list[Any]:
    class Mixed(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.a = nn.Linear(5, 5)
            self.b = nn.Linear(5, 5).to(torch.bfloat16)
            self.c = nn.Linear(5, 5).double()

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.c(self.b(self.a(x).bfloat16()).double())

    torch.manual_seed(3)
    model = wrap(Mixed())
    model(inputs(0)).square().mean().backward()
    return grads(model)


def frozen_from_the_start(wrap: Wrap) -> list[Any]:
    model = small()
    model[2].requires_grad_(False)
    model = wrap(model)
    model(inputs(0)).square().mean().backward()
    return grads(model)


def batch_norm(wrap: Wrap, **options: Any) -> list[Any]:
    torch.manual_seed(3)
    model = wrap(nn.Sequential(nn.Linear(5, 6), nn.BatchNorm1d(6), nn.Linear(6, 2)), **options)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    found = []
    for step in range(4):
        optimizer.zero_grad()
        if step == 2:
            with model.no_sync():
                model(inputs(90)).square().mean().backward()
        model(inputs(step)).square().mean().backward()
        optimizer.step()
        found += state(model)
    return found


def odd_layouts(wrap: Wrap) -> list[Any]:
    class Odd(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.conv = nn.Conv2d(3, 4, 3).to(memory_format=torch.channels_last)
            self.turned = nn.Parameter(torch.randn(4, 6).t())
            self.scalar = nn.Parameter(torch.tensor(1.5))
            self.empty = nn.Parameter(torch.empty(0, 3))
            self.gaps = nn.Parameter(torch.randn(6, 8)[::2, ::3])

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.conv(x).mean((2, 3)) @ self.turned.t() * self.scalar + self.empty.sum() + self.gaps.sin().sum()

    torch.manual_seed(3)
    model = wrap(Odd())
    found = []
    for step in range(2):
        model.zero_grad()
        model(inputs(step, 2, 75).view(2, 3, 5, 5)).square().mean().backward()
        found += grads(model)
        found += [
            p.grad.stride() == p.stride() for n, p in model.named_parameters() if not n.endswith(("empty", "gaps"))
        ]
    return found


def structured_output(wrap: Wrap) -> list[Any]:
    class Two(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.a, self.b = nn.Linear(5, 5), nn.Linear(5, 2)

        def forward(self, *, x: torch.Tensor) -> dict[str, Any]:
            hidden = self.a(x).relu()
            return {"hidden": hidden, "all": [self.b(hidden), ("text", None)]}

    torch.manual_seed(3)
    model = wrap(Two())
    out = model(x=inputs(0))
    (out["hidden"].mean() + out["all"][0].square().mean()).backward()
    return grads(model)


def checkpointed(wrap: Wrap) -> list[Any]:
    class Part(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first, self.rest = nn.Linear(5, 5), small()

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return checkpoint(self.rest, self.first(x), use_reentrant=False)

    torch.manual_seed(3)
    model = wrap(Part())
    found = []
    for step in range(3):
        model.zero_grad()
        model(inputs(step)).square().mean().backward()
        found += grads(model)
    return found


ALIKE: dict[str, Callable[[Wrap], list[Any]]] = {
    f.__name__: f
    for f in (
        steps,
        keeping_gradients,
        unused_parameters,
        unused_parameters_keep_older_gradients,
        tied_parameters_used_twice,
        several_backwards,
        two_forwards_one_backward,
        no_sync,
        forward_in_no_sync_decides,
        clipping,
        autocast_and_scaler,
        mixed_types,
        frozen_from_the_start,
        batch_norm,
        odd_layouts,
        structured_output,
        checkpointed,
    )
} | {
    "float64": typed(torch.float64),
    "bfloat16": typed(torch.bfloat16),
    "float16": typed(torch.float16),
    "one parameter a bucket": lambda wrap: steps(wrap, bucket_bytes=1),
    "small first bucket": lambda wrap: steps(wrap, bucket_bytes=300, first_bucket_bytes=1),
    "no_sync, small buckets": lambda wrap: no_sync(wrap, bucket_bytes=100),
    "batch norm left alone": lambda wrap: batch_norm(wrap, broadcast_buffers=False),
}


def side_by_side() -> dict[str, tuple[list[Any], list[Any]]]:
    """What DDP and hocket find on this rank, by program."""
    gloo = dist.new_group(backend="gloo")

    def ddp(model: nn.Module, *, find_unused_parameters: bool = False, broadcast_buffers: bool = True, **_: int) -> Any:
        return DistributedDataParallel(
            model,
            process_group=gloo,
            find_unused_parameters=find_unused_parameters,
            broadcast_buffers=broadcast_buffers,
        )

    def ours(model: nn.Module, *, find_unused_parameters: bool = False, **options: Any) -> Any:
        return hocket.distribute(model, **options)[0]

    return {name: (program(ddp), program(ours)) for name, program in ALIKE.items()}


# --- what DDP does not do, against averages made by hand ------------------------------------------------------------


def averaged(tensors: list[torch.Tensor | None]) -> list[Any]:
    found: list[Any] = []
    for tensor in tensors:
        if tensor is not None:
            tensor = tensor.clone()
            dist.all_reduce(tensor)
            tensor = tensor / dist.get_world_size()
        found.append(tensor)
    return arrays(found)


def by_hand(model: nn.Module, x: torch.Tensor) -> list[Any]:
    """The averaged gradients of the squared mean, computed on a copy of the model without hocket."""
    twin = copy.deepcopy(model)
    twin.zero_grad()
    twin(x).square().mean().backward()
    return averaged([p.grad for p in twin.parameters()])


Pairs = list[tuple[list[Any], list[Any]]]


def freeze_and_thaw() -> Pairs:
    inner = small()
    model = hocket.distribute(inner, bucket_bytes=100)[0]
    found: Pairs = []
    for step in range(5):
        inner[2].requires_grad_(step not in (1, 2))
        inner[0].requires_grad_(step >= 2)
        model.zero_grad()
        model(inputs(step)).square().mean().backward()
        found.append((grads(model), by_hand(inner, inputs(step))))
    return found


def rebuilt_with_gradients_alive() -> Pairs:
    inner = small()
    model = hocket.distribute(inner, bucket_bytes=100)[0]
    model(inputs(0)).square().mean().backward()
    first = by_hand(inner, inputs(0))
    inner[2].requires_grad_(False)  # buckets are laid out anew while gradients wait in the old ones
    model(inputs(1)).square().mean().backward()
    second = by_hand(inner, inputs(1))
    return [(grads(model), [a if b is None else a + b for a, b in zip(first, second, strict=True)])]


def converted_to_another_type() -> Pairs:
    inner = small()
    model = hocket.distribute(inner)[0]
    model(inputs(0)).square().mean().backward()
    model.zero_grad()
    model.double()
    model(inputs(1).double()).square().mean().backward()
    return [(grads(model), by_hand(inner, inputs(1).double()))]


def complex_parameters() -> Pairs:
    class Complex(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.w = nn.Parameter(torch.randn(5, 2, dtype=torch.complex64))

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return torch.view_as_real(x.to(torch.complex64) @ self.w)

    torch.manual_seed(3)
    inner = Complex()
    model = hocket.distribute(inner)[0]
    model(inputs(0)).square().mean().backward()
    want = copy.deepcopy(inner)
    want.zero_grad()
    want(inputs(0)).square().mean().backward()
    mean = want.w.grad
    assert mean is not None
    dist.all_reduce(mean)
    return [
        (
            arrays([torch.view_as_real(p.grad) for p in model.parameters()]),
            arrays([torch.view_as_real(mean / dist.get_world_size())]),
        )
    ]


class Checkpointed(nn.Module):
    """The last part runs in a back-propagation nested in the outer one, before the first part's."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.middle, self.last = nn.Linear(5, 5), nn.Linear(5, 5), nn.Linear(5, 5)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.first(x)
        x = checkpoint(self.middle, x, use_reentrant=True)
        return checkpoint(self.last, x, use_reentrant=True)


def reentrant_checkpointing() -> Pairs:
    torch.manual_seed(3)
    inner = Checkpointed()
    model = hocket.distribute(inner, bucket_bytes=1)[0]
    found: Pairs = []
    for step in range(3):
        model.zero_grad()
        model(inputs(step)).square().mean().backward()
        found.append((grads(model), by_hand(inner, inputs(step))))
    return found


def gradient_penalty() -> Pairs:
    """`torch.autograd.grad` through the outputs is no back-propagation into parameters."""

    def loss_of(model: Any, x: torch.Tensor) -> torch.Tensor:
        x = x.requires_grad_()
        out = model(x).square().mean()
        (slope,) = torch.autograd.grad(out, x, create_graph=True)
        return out + (slope.norm() - 1).square()

    inner = small()
    twin = copy.deepcopy(inner)
    model = hocket.distribute(inner)[0]
    found: Pairs = []
    for step in range(3):
        model.zero_grad()
        twin.zero_grad()
        loss_of(model, inputs(step)).backward()
        loss_of(twin, inputs(step)).backward()
        found.append((grads(model), averaged([p.grad for p in twin.parameters()])))
    return found


def kept_gradients_keep_their_values() -> Pairs:
    inner = small()
    model = hocket.distribute(inner)[0]
    model(inputs(0)).square().mean().backward()
    kept = [p.grad for p in model.parameters()]
    first = by_hand(inner, inputs(0))
    model.zero_grad()
    model(inputs(1)).square().mean().backward()
    return [(arrays(kept), first), (grads(model), by_hand(inner, inputs(1)))]


def gradients_put_by_hand() -> Pairs:
    inner = small()
    model = hocket.distribute(inner)[0]
    for p in model.parameters():
        p.grad = torch.full_like(p, 2.0)
    model(inputs(0)).square().mean().backward()
    return [(grads(model), [g + 2.0 for g in by_hand(inner, inputs(0))])]


def gradients_given_other_memory() -> Pairs:
    inner = small()
    model = hocket.distribute(inner)[0]
    found: Pairs = []
    for step, keep in enumerate((True, False, True)):
        for p in model.parameters():
            if keep and p.grad is not None:
                p.grad.zero_()
            elif not keep:
                p.grad = None
        model(inputs(step)).square().mean().backward()
        found.append((grads(model), by_hand(inner, inputs(step))))
        for p in model.parameters():
            assert p.grad is not None
            p.grad.data = p.grad.data * 2
    return found


def gradients_changed_by_what_has_a_graph() -> Pairs:
    """By `grad += rate * parameter` where gradients are recorded; the next step's gradient has none of that graph."""
    inner = small()
    model = hocket.distribute(inner)[0]
    found: Pairs = []
    kept: list[torch.Tensor] = []
    expected: list[torch.Tensor] = []
    for step in range(3):
        model.zero_grad()
        model(inputs(step)).square().mean().backward()
        found += [(grads(model), by_hand(inner, inputs(step))), (arrays(kept), arrays(expected))]
        kept, expected = [], []
        for p in inner.parameters():
            assert p.grad is not None
            assert not p.grad.requires_grad
            expected += [p.grad.add(p.detach(), alpha=0.1)] * (step == 0)
            p.grad.add_(p, alpha=0.1)
            kept += [p.grad] * (step == 0)
    return found


def backward_left_by_an_exception() -> Pairs:
    class Trap(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
            return x.clone()

        @staticmethod
        def backward(ctx: Any, g: torch.Tensor) -> torch.Tensor:
            raise MemoryError("no memory left")

    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.a, self.b, self.trap = nn.Linear(5, 5), nn.Linear(5, 2), False

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            x = self.a(x)
            return self.b(Trap.apply(x) if self.trap else x)

    torch.manual_seed(3)
    inner = Model()
    model = hocket.distribute(inner, bucket_bytes=1)[0]
    found: Pairs = []
    for step, trap in enumerate([False, True, False, True, True, False]):
        model.zero_grad()
        model.trap = trap
        loss = model(inputs(step)).square().mean()
        try:
            loss.backward()
        except MemoryError:
            assert trap
        else:
            assert not trap
            found.append((grads(model), by_hand(inner, inputs(step))))
    return found


def backward_twice_through_one_graph() -> Pairs:
    inner = small()
    model = hocket.distribute(inner)[0]
    loss = model(inputs(0)).square().mean()
    loss.backward(retain_graph=True)
    loss.backward()
    return [(grads(model), [2 * g for g in by_hand(inner, inputs(0))])]


def forwards_then_backwards() -> Pairs:
    inner = small()
    model = hocket.distribute(inner)[0]
    losses = [model(inputs(step)).square().mean() for step in range(2)]
    for loss in losses:
        loss.backward()
    return [(grads(model), [a + b for a, b in zip(*(by_hand(inner, inputs(s)) for s in range(2)), strict=True)])]


def method_instead_of_forward() -> Pairs:
    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.net = small()

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.net(x)

        def loss(self, x: torch.Tensor) -> torch.Tensor:
            return self.net(x).square().mean()

    inner = Model()
    model = hocket.distribute(inner)[0]
    found: Pairs = []
    for step in range(3):
        model.zero_grad()
        model.loss(inputs(step)).backward()
        found.append((grads(model), by_hand(inner, inputs(step))))
    with model.no_sync():
        model.zero_grad()
        model.loss(inputs(3)).backward()
    model.loss(inputs(4)).backward()
    found.append((grads(model), [a + b for a, b in zip(*(by_hand(inner, inputs(s)) for s in (3, 4)), strict=True)]))
    model.zero_grad()
    with model.no_sync():
        model(inputs(5)).square().mean().backward()
    model.loss(inputs(6)).backward()  # what the last forward said holds for one backward only
    found.append((grads(model), [a + b for a, b in zip(*(by_hand(inner, inputs(s)) for s in (5, 6)), strict=True)]))
    return found


def batch_norm_in_two_forwards() -> Pairs:
    torch.manual_seed(3)
    inner = nn.Sequential(nn.Linear(5, 4), nn.BatchNorm1d(4))
    twin = copy.deepcopy(inner)
    model = hocket.distribute(inner)[0]
    for m in (model, twin):
        (m(inputs(0)).pow(3).mean() + m(inputs(1)).pow(3).mean()).backward()
    return [(grads(model), averaged([p.grad for p in twin.parameters()]))]


AGAINST_HAND: dict[str, Callable[[], Pairs]] = {
    f.__name__: f
    for f in (
        freeze_and_thaw,
        rebuilt_with_gradients_alive,
        converted_to_another_type,
        complex_parameters,
        reentrant_checkpointing,
        gradient_penalty,
        kept_gradients_keep_their_values,
        gradients_put_by_hand,
        gradients_given_other_memory,
        gradients_changed_by_what_has_a_graph,
        backward_left_by_an_exception,
        backward_twice_through_one_graph,
        forwards_then_backwards,
        method_instead_of_forward,
        batch_norm_in_two_forwards,
    )
}


def against_hand() -> dict[str, Pairs]:
    return {name: program() for name, program in AGAINST_HAND.items()}
