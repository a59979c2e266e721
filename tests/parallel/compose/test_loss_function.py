"""A loss function that keeps something from call to call trains as a loop of one's own, or is refused."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import hocket
from hocket.parallel.compose._loss_function import as_before
from hocket.planner import Plan, PlanError

Loss = Callable[[Tensor, Tensor], Tensor]
begins = torch.zeros(3).double()
center = begins


def centred(out: Tensor, target: Tensor, kept: Tensor) -> Tensor:
    return ((out - kept).softmax(1) * target).sum(1).square().mean()


def of_a_name() -> Loss:
    global center
    center = begins

    def loss(out: Tensor, target: Tensor) -> Tensor:
        global center
        value = centred(out, target, center)
        center = 0.5 * center + 0.5 * out.detach().mean(0)
        return value

    return loss


def of_a_closure() -> Loss:
    kept = begins

    def loss(out: Tensor, target: Tensor) -> Tensor:
        nonlocal kept
        value = centred(out, target, kept)
        kept = 0.5 * kept + 0.5 * out.detach().mean(0)
        return value

    return loss


def of_a_dict() -> Loss:
    kept = {"center": begins}

    def loss(out: Tensor, target: Tensor) -> Tensor:
        value = centred(out, target, kept["center"])
        kept["center"] = 0.5 * kept["center"] + 0.5 * out.detach().mean(0)
        return value

    return loss


def in_place() -> Loss:
    kept = begins.clone()

    def loss(out: Tensor, target: Tensor) -> Tensor:
        value = centred(out, target, kept.clone())
        kept.mul_(0.5).add_(out.detach().mean(0), alpha=0.5)
        return value

    return loss


def of_a_list() -> Loss:
    queue = [torch.ones(1, 3).double()]

    def loss(out: Tensor, target: Tensor) -> Tensor:
        value = F.mse_loss(out @ torch.cat(queue).mean(0), target[:, 0])
        queue.append(out.detach()[:1].tanh())
        return value

    return loss


def by_its_mean() -> Loss:
    """Divided by the mean of all losses until now: of the same twice it is 1 twice."""
    losses: list[float] = []

    def loss(out: Tensor, target: Tensor) -> Tensor:
        value = F.mse_loss(out, target)
        losses.append(value.item())
        return value / (sum(losses) / len(losses))

    return loss


class Object:
    def __init__(self) -> None:
        self.center = begins

    def __call__(self, out: Tensor, target: Tensor) -> Tensor:
        return self.forward(out, target)

    def forward(self, out: Tensor, target: Tensor) -> Tensor:
        value = centred(out, target, self.center)
        self.center = 0.5 * self.center + 0.5 * out.detach().mean(0)
        return value


def of_a_method() -> Loss:
    return Object().forward


def with_a_generator() -> Loss:
    generator = torch.Generator().manual_seed(3)
    return lambda out, target: F.mse_loss(out, target + torch.randn(3, generator=generator).double())


KINDS = (of_a_name, of_a_closure, of_a_dict, in_place, of_a_list, by_its_mean, Object, of_a_method, with_a_generator)


class Module(nn.Module):
    """A statistic in a buffer is put together of parts."""

    center: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("center", begins)

    def forward(self, out: Tensor, target: Tensor) -> Tensor:
        value = centred(out, target, self.center)
        self.center = self.center + out.detach().mean(0)
        return value


def trained(make: Callable[[], Any], plan: Plan | None) -> list[float]:
    """Return the losses by a plan, or by a loop without Hocket."""
    torch.manual_seed(0)
    model, loss = nn.Linear(5, 3).double(), make()
    optimizer = torch.optim.SGD(model.parameters(), 0.5)
    trainer = None if plan is None else hocket.Trainer(model, loss, optimizer, plan)
    losses = []
    for x in torch.randn(4, 8, 5, generator=torch.Generator().manual_seed(1)).double():
        if trainer is not None:
            losses.append(float(trainer.step((x, x[:, :3].sin()))))
            continue
        optimizer.zero_grad()
        value = loss(model(x), x[:, :3].sin())
        value.backward()
        optimizer.step()
        losses.append(float(value.detach()))
    return losses


@pytest.mark.parametrize("make", KINDS)
def test_the_check_of_a_loss_leaves_nothing_in_it(make: Callable[[], Any]) -> None:
    """The first batch was in the center already when the first step began."""
    assert trained(make, Plan()) == pytest.approx(trained(make, None), rel=1e-12)


@pytest.mark.parametrize("make", KINDS)
def test_what_is_kept_from_part_to_part_is_refused(make: Callable[[], Any]) -> None:
    with pytest.raises(PlanError, match="called twice with the same it gives"):
        trained(make, Plan(accumulate=2))


class Follows(nn.Module):
    """A model that keeps a running mean in a number, or counts its passes, as it trains."""

    def __init__(self, *, counts: bool) -> None:
        super().__init__()
        self.counts, self.kept, self.fc = counts, 0.0, nn.Linear(5, 3).double()

    def forward(self, x: Tensor) -> Tensor:
        out = self.fc(x)
        if self.training:
            self.kept += 1.0 if self.counts else out.detach().mean().item()
        return out - self.kept


@pytest.mark.parametrize("counts", [False, True])
def test_what_a_model_keeps_in_a_number_is_refused(*, counts: bool) -> None:
    """As it evaluates nothing shows it, and so nothing was said."""
    model = Follows(counts=counts)
    trainer = hocket.Trainer(model, F.mse_loss, torch.optim.SGD(model.parameters(), 0.1), Plan(accumulate=2))
    x = torch.randn(8, 5, generator=torch.Generator().manual_seed(1)).double()
    with pytest.raises(PlanError, match="after a pass" if counts else "after 8 samples"):
        trainer.step((x, x[:, :3].sin()))


def test_a_log_has_an_entry_for_each_part() -> None:
    seen: list[float] = []

    def logged(out: Tensor, target: Tensor) -> Tensor:
        seen.append(float(F.mse_loss(out.detach(), target)))
        return F.mse_loss(out, target)

    assert trained(lambda: logged, Plan(accumulate=2)) == pytest.approx(trained(lambda: F.mse_loss, None), rel=1e-12)
    assert len(seen) == 8


def test_a_loss_may_change_outputs_and_targets_in_place() -> None:
    def loss(out: Tensor, target: Tensor) -> Tensor:
        return out.mul_(2).sub_(target.add_(1)).square().mean()

    assert trained(lambda: loss, Plan(accumulate=2)) == pytest.approx(trained(lambda: loss, None), rel=1e-12)


def test_what_a_library_keeps_is_left_alone() -> None:
    library: dict[str, Any] = {"__name__": "library", "loaded": None, "cache": {}}
    exec("def load():\n    global loaded\n    loaded = True\n    cache['key'] = 1\n", library)
    load = library["load"]

    def loss(out: Tensor, target: Tensor) -> Tensor:
        load()
        return F.mse_loss(out, target)

    with as_before(loss):
        loss(torch.zeros(2), torch.zeros(2))
    assert library["loaded"]
    assert library["cache"] == {"key": 1}


def test_a_buffer_of_a_loss_module_is_kept() -> None:
    assert trained(Module, Plan()) == pytest.approx(trained(Module, None), rel=1e-12)
