"""Hooks of the program on parameters are called with the gradients that one device has."""

from __future__ import annotations

import functools
import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

import hocket
from hocket.parallel.mesh import join
from hocket.planner import Plan
from hocket.testing import run_ranks

LIMIT = 0.01  # many single elements of gradients are larger
Register = Callable[[nn.Module, torch.optim.Optimizer, list[Any]], None]


def network() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(6, 16), nn.Tanh(), nn.Linear(16, 3)).double()


def samples() -> TensorDataset:
    x = torch.randn(44, 6, generator=torch.Generator().manual_seed(1)).double()
    return TensorDataset(x, x[:, :3] * x[:, 3:] * torch.linspace(0, 3, 44)[:, None])


def clamped(model: nn.Module, optimizer: torch.optim.Optimizer, seen: list[Any]) -> None:
    for p in model.parameters():
        p.register_hook(lambda g: g.clamp(-LIMIT, LIMIT))


def clamped_in_place(model: nn.Module, optimizer: torch.optim.Optimizer, seen: list[Any]) -> None:
    def clamp(gradient: Tensor) -> None:
        gradient.clamp_(-LIMIT, LIMIT)

    model[2].weight.register_hook(clamp)


def normalised(model: nn.Module, optimizer: torch.optim.Optimizer, seen: list[Any]) -> None:
    model[2].weight.register_hook(lambda g: g / g.norm())
    model[2].weight.register_hook(lambda g: g * 0.5)


def masked(model: nn.Module, optimizer: torch.optim.Optimizer, seen: list[Any]) -> None:
    mask = torch.arange(96).reshape(16, 6) % 2
    model[0].weight.register_hook(lambda g: g * mask)


def observed(model: nn.Module, optimizer: torch.optim.Optimizer, seen: list[Any]) -> None:
    def note(gradient: Tensor) -> None:
        seen.append(float(gradient.norm()))

    model[0].weight.register_hook(note)


def updated(model: nn.Module, optimizer: torch.optim.Optimizer, seen: list[Any]) -> None:
    def update(parameter: Tensor) -> None:
        with torch.no_grad():
            parameter -= 0.1 * parameter.grad.sign()
        parameter.grad = None

    for p in model.parameters():
        p.register_post_accumulate_grad_hook(update)


def trained(register: Register, *, ours: bool, late: bool, keep: bool = False) -> tuple[list[Any], list[Tensor]]:
    """Train on batches of 8, the last of 4: what hooks saw, and the weights."""
    model, loader, seen = network(), DataLoader(samples(), batch_size=8), list[Any]()
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    if not late:
        register(model, optimizer, seen)
    wrapped: Any = model
    if ours:
        wrapped, optimizer, loader = hocket.distribute(model, optimizer, loader)
    for number, (x, y) in enumerate(loader):
        if late and number == 1:
            register(model, optimizer, seen)
        if not keep or number % 2 == 0:
            optimizer.zero_grad()
        nn.functional.mse_loss(wrapped(x), y).backward()
        optimizer.step()
    return seen, [p.detach().clone() for p in model.parameters()]


PROGRAMS = [(clamped, False, False), (clamped, True, False), (clamped, False, True), (normalised, False, False)]
PROGRAMS += [(normalised, True, True), (masked, False, True), (observed, False, True), (updated, False, False)]
PROGRAMS += [(clamped_in_place, False, False), (clamped_in_place, False, True)]


def side_by_side() -> list[Any]:
    return [trained(register, ours=True, late=late, keep=keep) for register, late, keep in PROGRAMS]


@pytest.mark.long
@pytest.mark.sampled(1)
@pytest.mark.parametrize("ranks", [2, 3])
def test_as_on_one_device(ranks: int) -> None:
    expected = [trained(register, ours=False, late=late, keep=keep) for register, late, keep in PROGRAMS]
    for results in run_ranks(side_by_side, ranks, timeout_s=90):
        for (seen, weights), (seen_alone, weights_alone) in zip(results, expected, strict=True):
            torch.testing.assert_close(seen, seen_alone, rtol=1e-10, atol=1e-12)
            torch.testing.assert_close(weights, weights_alone, rtol=1e-10, atol=1e-12)


class Halves(nn.Module):
    """Uses its second layer for some samples only, so that one rank may not."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(6, 3).double(), nn.Linear(6, 3).double()

    def forward(self, x: Tensor) -> Tensor:
        large = x[:, 0] > 0
        out = self.first(x)
        if large.any():
            out = out + self.second(x) * large[:, None]
        return out


def unused_here(ours: bool) -> tuple[list[float], list[Tensor]]:
    torch.manual_seed(0)
    model, seen = Halves(), list[float]()
    x = torch.cat([torch.full((4, 6), 0.5), torch.full((4, 6), -0.5)]).double()
    model.second.weight.register_hook(lambda g: seen.append(float(g.norm())) or g.clamp(-LIMIT, LIMIT))
    loader: Any = DataLoader(TensorDataset(torch.cat([x, -x]), torch.ones(16, 3).double()), batch_size=8)
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    wrapped: Any = model
    if ours:
        wrapped, optimizer, loader = hocket.distribute(model, optimizer, loader)
    for x, y in loader:
        nn.functional.mse_loss(wrapped(x), y).backward()
        optimizer.step()
    return seen, [p.detach().clone() for p in model.parameters()]


def test_of_a_parameter_that_other_ranks_used() -> None:
    expected = unused_here(ours=False)
    for result in run_ranks(unused_here, 2, True, timeout_s=60):
        torch.testing.assert_close(result, expected, rtol=1e-10, atol=1e-12)


def without_averaging() -> list[str]:
    """What comes of no_sync with hooks that are linear, that are not, and that come after accumulation."""
    errors = []
    for register in (masked, clamped, clamped_in_place, updated):
        model, seen = network(), list[Any]()
        optimizer = torch.optim.SGD(model.parameters(), 0.1)
        register(model, optimizer, seen)
        wrapped, optimizer, loader = hocket.distribute(model, optimizer, DataLoader(samples(), batch_size=8))
        try:
            (x, y), (z, t) = list(loader)[:2]
            with wrapped.no_sync():
                nn.functional.mse_loss(wrapped(x), y).backward()
            nn.functional.mse_loss(wrapped(z), t).backward()
            gradient = model[0].weight.grad
            assert gradient is not None
            errors.append("" if gradient.flatten()[::2].abs().max() == 0 else "unmasked")
        except RuntimeError as error:
            errors.append(str(error))
    return errors


def test_no_sync() -> None:
    for linear, *others in run_ranks(without_averaging, 2, timeout_s=60):
        assert linear == ""
        assert all("in no_sync" in one and "not linear" in one for one in others)


def told_of_activations(inside: bool) -> list[bool]:
    """Whether hooks on activations are told of: one that clips, and others."""

    class Hooked(nn.Module):
        def __init__(self, hook: Any) -> None:
            super().__init__()
            self.layer, self.hook = nn.Linear(6, 3).double(), hook

        def forward(self, x: Tensor) -> Tensor:
            out: Tensor = self.layer(x)
            if inside:
                out.register_hook(self.hook)
            return out * 1

    found = []
    for hook in (lambda g: g.clamp(-1e-3, 1e-3), lambda g: -g, lambda g: g.clamp(min=0), [].append):
        model, _, loader = hocket.distribute(Hooked(hook), None, DataLoader(samples(), batch_size=8))
        with warnings.catch_warnings(record=True) as told:
            warnings.simplefilter("always")
            for x, y in loader:
                out = model(x)
                if not inside:
                    out.register_hook(hook)
                nn.functional.mse_loss(out, y).backward()
        found.append(any("hook on an activation" in str(one.message) for one in told))
    return found


@pytest.mark.parametrize("inside", [False, True])
def test_hooks_on_activations_that_clip_are_told_of(*, inside: bool) -> None:
    assert run_ranks(told_of_activations, 2, inside)[0] == [True, False, False, False]


def _changed(hook: Callable[[Tensor], Any], _: Any, gradients: tuple[Tensor], *__: Any) -> Any:
    changed = hook(gradients[0])
    return None if changed is None else (changed,)


def told_of_layers(before: bool) -> list[str]:
    """What is told of hooks on a layer's gradients: one that normalises, one that mixes samples, and others."""
    hooks: list[Callable[[Tensor], Any]] = [
        lambda g: g / g.norm(), lambda g: g - g.mean(0), lambda g: g - g.mean(1, keepdim=True), lambda g: -g,
        lambda g: g.clamp(min=0), lambda _: None,
    ]  # fmt: skip
    found = []
    for hook in hooks:
        model = nn.Sequential(nn.Linear(6, 6), nn.Tanh(), nn.Linear(6, 3)).double()
        made = functools.partial(_changed, hook)
        layer = model[1]
        kept = layer.register_full_backward_pre_hook(made) if before else layer.register_full_backward_hook(made)
        distributed, _, loader = hocket.distribute(model, None, DataLoader(samples(), batch_size=8))
        with warnings.catch_warnings(record=True) as told:
            warnings.simplefilter("always")
            for x, y in loader:
                nn.functional.mse_loss(distributed(x), y).backward()
        found.append(" ".join(str(one.message) for one in told))
        kept.remove()
        assert not {**layer._backward_hooks, **layer._backward_pre_hooks}
    return found


@pytest.mark.parametrize("before", [False, True])
def test_hooks_on_layers_that_clip_or_mix_samples_are_told_of(*, before: bool) -> None:
    normalises, mixes, *others = run_ranks(told_of_layers, 2, before)[0]
    assert "does not scale with its gradient" in normalises
    assert "something of other samples'" in mixes
    assert others == [""] * 4


def refused(shard: str, accumulate: int, after: bool) -> str:
    model = network()
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    if not after:
        clamped(model, optimizer, [])
    try:
        trainer = hocket.Trainer(model, nn.functional.mse_loss, optimizer, Plan(shard=shard, accumulate=accumulate))
        if after:
            clamped(model, optimizer, [])
        trainer.step(next(iter(trainer.batches(DataLoader(samples(), batch_size=8)))))
    except (RuntimeError, ValueError) as error:
        return str(error)
    return ""


@pytest.mark.parametrize(("shard", "accumulate", "after"), [("optimizer", 1, False), ("none", 2, False),
                                                           ("gradients", 1, True)])  # fmt: skip
def test_refused_where_gradients_are_not_whole(shard: str, accumulate: int, after: bool) -> None:
    for error in run_ranks(refused, 2, shard, accumulate, after, timeout_s=60):
        assert "hook on the gradient of parameter '0.weight'" in error


def clamp_gradient(limit: float, parameter: Tensor) -> None:
    assert parameter.grad is not None
    parameter.grad.clamp_(-limit, limit)


def on_one_rank(ours: bool, after: bool, limit: float) -> list[float | str]:
    """Return losses of training with a hook on rank 1 that comes late, and the error."""
    model, found = network(), list[float | str]()
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    loader = DataLoader(samples(), batch_size=8)
    if ours:
        trainer = hocket.Trainer(model, nn.functional.mse_loss, optimizer, Plan())
        batches = trainer.batches(loader)
    else:
        trained, optimizer, batches = hocket.distribute(model, optimizer, loader)
    if join().rank == 1 and after:
        model[0].weight.register_post_accumulate_grad_hook(functools.partial(clamp_gradient, limit))
    elif join().rank == 1:
        model[0].weight.register_hook(lambda gradient: gradient.clamp(-limit, limit))
    try:
        for x, y in batches:
            if ours:
                found.append(float(trainer.step((x, y))))
                continue
            optimizer.zero_grad()
            loss = nn.functional.mse_loss(trained(x), y)
            loss.backward()
            optimizer.step()
            found.append(float(hocket.average(loss)))
    except RuntimeError as error:
        found.append(str(error))
    return found


@pytest.mark.sampled(2)
@pytest.mark.parametrize("ours", [True, False])
@pytest.mark.parametrize("after", [True, False])
def test_one_on_one_rank_alone_is_refused_once_it_changes_the_gradient(ours: bool, after: bool) -> None:
    for *losses, error in run_ranks(on_one_rank, 2, ours, after, LIMIT, timeout_s=60):
        assert len(losses) < 4
        assert "a hook of the program on rank 1 has changed the gradient of '0.weight', and other ranks'" in str(error)
    assert len({tuple(losses) for losses in run_ranks(on_one_rank, 2, ours, after, 1e9, timeout_s=60)}) == 1


def test_trainer_calls_them_with_averages() -> None:
    expected = trained(clamped, ours=False, late=False)[1]

    for weights in run_ranks(by_trainer, 2, timeout_s=60):
        torch.testing.assert_close(weights, expected, rtol=1e-10, atol=1e-12)


def by_trainer() -> list[Tensor]:
    model = network()
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    clamped(model, optimizer, [])
    trainer = hocket.Trainer(model, nn.functional.mse_loss, optimizer, Plan())
    for batch in trainer.batches(DataLoader(samples(), batch_size=8)):
        trainer.step(batch)
    return [p.detach().clone() for p in model.parameters()]
