"""Losses of many shapes over batches that ranks cannot share equally; each gives curve and parameters."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.checkpoint import checkpoint
from torch.utils.data import DataLoader, TensorDataset

import hocket

from .programs import arrays

Result = tuple[list[float], list[Any]]
Step = Callable[[Any, torch.Tensor, torch.Tensor], torch.Tensor]


def data(size: int = 11) -> TensorDataset:
    generator = torch.Generator().manual_seed(1)
    return TensorDataset(
        torch.randn(size, 4, generator=generator, dtype=torch.float64),
        torch.randn(size, 2, generator=generator, dtype=torch.float64),
    )


def net() -> nn.Module:
    torch.manual_seed(2)
    return nn.Sequential(nn.Linear(4, 6), nn.Tanh(), nn.Linear(6, 2)).double()


def fit(model: nn.Module, step: Step, *, batch_size: int = 4, **options: Any) -> Result:
    """Two epochs; `step` gives the loss."""
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    loader = DataLoader(data(), batch_size=batch_size, shuffle=True)
    model, optimizer, loader = hocket.distribute(model, optimizer, loader, **options)
    losses = []
    for _ in range(2):
        for x, y in loader:
            optimizer.zero_grad()
            loss = step(model, x, y)
            loss.backward()
            optimizer.step()
            summed = options.get("loss_reduction") == "sum"
            losses.append(hocket.total(loss).item() if summed else hocket.average(loss).item())
    return losses, arrays(model.parameters())


def mean(model: Any, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    return F.mse_loss(model(x), y)


def penalty(model: Any) -> torch.Tensor:
    return sum(p.square().sum() for p in model.parameters())


def mean_with_parameter_term() -> Result:
    return fit(net(), lambda m, x, y: mean(m, x, y) + 0.1 * penalty(m))


def fewer_samples_than_ranks() -> Result:
    return fit(net(), mean, batch_size=2)


def sum_over_a_batch_of_fewer_samples_than_ranks() -> Result:
    """A rank without samples is given one, and divides by their number: 1 is no guard there."""
    return fit(
        net(),
        lambda m, x, y: F.kl_div(m(x).log_softmax(1), y.softmax(1), reduction="batchmean"),
        batch_size=2,
    )


def one_sample_each_step() -> Result:
    return fit(net(), mean, batch_size=1)


def frozen_statistics_in_two_passes() -> Result:
    """Back-propagation needs the statistics as both passes had them."""
    model = nn.Sequential(net(), nn.BatchNorm1d(2).double().eval())
    return fit(model, lambda m, x, y: mean(m, x, y) + F.mse_loss(m(x * 0.5), y))


def output_changed_in_place() -> Result:
    return fit(net(), lambda m, x, y: F.mse_loss(m(x).clamp_(-1, 1).div_(2), y))


def gradient_penalty() -> Result:
    def step(model: Any, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        x = x.detach().requires_grad_()
        out = model(x)
        (slope,) = torch.autograd.grad(out.sum(), x, create_graph=True)
        return F.mse_loss(out, y) + (slope.norm(dim=1) - 1).square().mean()

    return fit(net(), step)


def loss_kept_as_attribute() -> Result:
    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.net = net()
            self.extra = torch.zeros(())

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            out = self.net(x)
            self.extra = out.abs().mean()
            return out

    return fit(Model(), lambda m, x, y: mean(m, x, y) + m.extra)


def output_of_own_type() -> Result:
    class Answer:
        def __init__(self, value: torch.Tensor) -> None:
            self.value = value

    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.net = net()

        def forward(self, x: torch.Tensor) -> Answer:
            return Answer(self.net(x))

    return fit(Model(), lambda m, x, y: F.mse_loss(m(x).value, y))


def hidden_output_that_leads_to_another() -> Result:
    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.net = net()

        def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
            hidden = self.net[0](x)
            return hidden, self.net[2](hidden.tanh())

    def step(model: Any, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        hidden, out = model(x)
        return F.mse_loss(out, y) + hidden.square().mean()

    return fit(Model(), step)


def loss_without_forward() -> Result:
    return fit(Losing(), lambda m, x, y: m.loss(x, y))


class Losing(nn.Module):
    """A model that computes its loss itself, in another method than forward."""

    def __init__(self) -> None:
        super().__init__()
        self.net = net()

    def loss(self, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        return F.mse_loss(self.net(x), y)


def evaluated_before_loss_without_forward() -> Result:
    def step(model: Any, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        for u, v in hocket.shard(DataLoader(data(5), batch_size=4)):
            with torch.no_grad():
                model.loss(u, v)
        return model.loss(x, y)

    return fit(Losing(), step)


def inner_loop_before_loss_without_forward() -> Result:
    """The inner loop's last batch weighs something else than the outer's."""
    inner = hocket.parallel.DistributedLoader(DataLoader(data(7), batch_size=6))

    def step(model: Any, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        for u, v in inner:
            with torch.no_grad():
                model.loss(u, v)
        return model.loss(x, y)

    return fit(Losing(), step)


def two_batches_at_once_without_forward() -> None:
    """Which of the two is meant cannot be seen."""
    model, _, one = hocket.distribute(Losing(), None, DataLoader(data(), batch_size=4))
    two = hocket.parallel.DistributedLoader(DataLoader(data(13), batch_size=7))
    for (x, y), _ in zip(one, two, strict=False):
        model.loss(x, y).backward()


def accumulated() -> Result:
    """Three batches of unequal parts make one step; the last of an epoch is short."""
    model = net()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    model, optimizer, loader = hocket.distribute(model, optimizer, DataLoader(data(), batch_size=4, shuffle=True))
    losses = []
    for _ in range(3):
        optimizer.zero_grad()
        for i, (x, y) in enumerate(loader):
            if i < len(loader) - 1:
                with model.no_sync():
                    loss = mean(model, x, y)
                    loss.backward()
            else:
                loss = mean(model, x, y)
                loss.backward()
            losses.append(hocket.average(loss).item())
        optimizer.step()
    return losses, arrays(model.parameters())


def two_loaders(batch_sizes: tuple[int, int], together: bool) -> Callable[[], Result]:
    """Two loaders at once whose batches weigh differently."""

    def run() -> Result:
        model = net()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        model, optimizer, one = hocket.distribute(model, optimizer, DataLoader(data(), batch_size=batch_sizes[0]))
        two = hocket.parallel.DistributedLoader(DataLoader(data(13), batch_size=batch_sizes[1]))
        for _ in range(2):
            for (x, y), (u, _) in zip(one, two, strict=False):
                optimizer.zero_grad()
                if together:
                    (mean(model, x, y) + model(u).square().mean()).backward()
                else:
                    model(u).square().mean().backward()
                    mean(model, x, y).backward()
                optimizer.step()
        return [], arrays(model.parameters())

    return run


def two_models() -> Result:
    """Each model has its own loader; forward passes of both come before the backward passes of both."""
    one, two = net(), net()
    optimizer = torch.optim.SGD([*one.parameters(), *two.parameters()], lr=0.1)
    first, _, loader = hocket.distribute(one, None, DataLoader(data(), batch_size=4))
    second, _, other = hocket.distribute(two, None, DataLoader(data(13), batch_size=6))
    for _ in range(2):
        for (x, y), (u, v) in zip(loader, other, strict=False):
            optimizer.zero_grad()
            losses = [mean(second, u, v), mean(first, x, y)]
            for loss in losses:
                loss.backward()
            optimizer.step()
    return [], arrays([*one.parameters(), *two.parameters()])


def sums(model: Any, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    return F.mse_loss(model(x), y, reduction="sum") if hocket_share() else 0 * model(x).sum()


def hocket_share() -> bool:
    """Whether this rank has samples in the batch: what a rank has to step along weighs nothing."""
    from hocket.parallel.batches import batch as _batch

    note = _batch.current()
    return note is None or note.weight > 0


def sum_of_losses() -> Result:
    return fit(net(), lambda m, x, y: 0.1 * sums(m, x, y), loss_reduction="sum")


def sum_with_parameter_term() -> Result:
    model = net()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    loader = DataLoader(data(), batch_size=2, shuffle=True)
    model, optimizer, loader = hocket.distribute(model, optimizer, loader, loss_reduction="sum")
    for x, y in loader:
        optimizer.zero_grad()
        (F.mse_loss(model(x), y, reduction="sum") + 0.1 * penalty(model)).backward()
        optimizer.step()
    return [], arrays(model.parameters())


@dataclass(frozen=True)
class Answers:
    value: torch.Tensor
    note: str = ""


def sum_through_a_dataclass() -> Result:
    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.net = net()

        def forward(self, x: torch.Tensor) -> dict[str, Any]:
            return {"answers": [Answers(self.net(x), "kept")]}

    def step(model: Any, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        (answer,) = model(x)["answers"]
        assert answer.note == "kept"
        return 0.1 * F.mse_loss(answer.value.mul_(1), y, reduction="sum")

    return fit(Model(), step, loss_reduction="sum")


def mean_over_tokens() -> Result:
    """A mean over something else than samples, as the documentation says to write it."""

    def step(model: Any, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        counted = (y > 0).double()
        return (F.mse_loss(model(x), y, reduction="none") * counted).sum() / hocket.total(counted.sum())

    return fit(net(), step, loss_reduction="sum")


def sample_by_sample() -> Result:
    """The last sample is one rank's only one."""

    def step(model: Any, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        times = torch.tensor([[1.0], [2.0], [3.0]], dtype=x.dtype)
        return torch.stack([F.l1_loss(model(times * a), b.expand(3, 2)) for a, b in zip(x, y, strict=True)]).mean()

    return fit(net(), step)


def batches_in_a_list() -> Result:
    """As `sample_by_sample`, if there is one sample; but that of a batch is a mean over what counts."""

    def step(model: Any, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        tokens = torch.stack([y[:, 0] > 0, torch.ones(len(y), dtype=torch.bool), y[:, 1] > 0], 1)
        labels = torch.where(tokens, (x[:, :3] > 0).long(), -100)
        scores = model(x[:, None] + torch.linspace(0, 1, 3, dtype=x.dtype)[:, None])
        return torch.stack([F.cross_entropy(scores.reshape(-1, 2), labels.reshape(-1))]).mean()

    return fit(net(), step)


def samples_of_which_some_count() -> Result:
    """Each has as many elements as a rank has samples."""

    def step(model: Any, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        output = model(x)
        each = [F.mse_loss(output[i], y[i]) if y[i, 0] > 0 else output[i].sum() * 0 for i in range(len(y))]
        return torch.stack(each).mean()

    return fit(net(), step)


def classes_that_are_there() -> Result:
    """Each rank has some."""

    def step(model: Any, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        output, classes = model(x), (x[:, 0] * 2).floor().clamp(-1, 1)
        found: Any = 0
        for one in (-1, 0, 1):
            if (here := classes == one).any():
                found = found + (1 + 0.1 * one) * (output[here] - y[here]).square().sum()
        return found / len(x)

    return fit(net(), step, batch_size=8)


def means_of_classes_times_their_shares() -> Result:
    """Each rank has some, and other shares."""

    def step(model: Any, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        output, classes = model(x), (x[:, 0] * 2).floor().clamp(-1, 1)
        found: Any = 0
        for one in (-1, 0, 1):
            if (here := classes == one).any():
                found = found + F.mse_loss(output[here], y[here]) * here.double().mean()
        return found

    return fit(net(), step, batch_size=8)


def two_losses_of_one_pass() -> Result:
    """The first divides by what is not masked, the other by samples; the pass is computed again for each."""

    def step(model: Any, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        output, counted = checkpoint(model, x, use_reentrant=False), (y > 0).double()
        ((output - y).square() * counted).sum().div(counted.sum()).backward(retain_graph=True)
        return 0.5 * output.square().mean()

    return [], fit(net(), step)[1]


EQUAL: dict[str, Callable[[], Result]] = {
    f.__name__: f
    for f in (
        mean_with_parameter_term,
        fewer_samples_than_ranks,
        sum_over_a_batch_of_fewer_samples_than_ranks,
        one_sample_each_step,
        frozen_statistics_in_two_passes,
        output_changed_in_place,
        gradient_penalty,
        loss_kept_as_attribute,
        output_of_own_type,
        hidden_output_that_leads_to_another,
        loss_without_forward,
        evaluated_before_loss_without_forward,
        inner_loop_before_loss_without_forward,
        accumulated,
        two_models,
        sum_of_losses,
        sum_with_parameter_term,
        sum_through_a_dataclass,
        mean_over_tokens,
        sample_by_sample,
        batches_in_a_list,
        samples_of_which_some_count,
        classes_that_are_there,
        means_of_classes_times_their_shares,
        two_losses_of_one_pass,
    )
} | {
    "two loaders, one backward": two_loaders((4, 6), together=True),
    "two loaders, two backwards": two_loaders((4, 6), together=False),
}


def equal(names: Iterable[str]) -> dict[str, Result]:
    return {name: EQUAL[name]() for name in names}


def not_finite_where_nothing_counts() -> Result:
    """A rank without samples computes something infinite; nobody must hear of it."""

    def step(model: Any, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        loss = mean(model, x, y)
        return loss if hocket_share() else loss * float("inf")

    return fit(net(), step, batch_size=2)


def weight_of_nothing_meets_another() -> None:
    """Not all can be had: rank 2 has no sample in the first batch, and both meet in one backward pass."""
    two_loaders((2, 3), together=True)()


class Tagger(nn.Module):
    """Classes of tokens; with labels, of which those of -100 do not count, their loss."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding, self.head = nn.Embedding(9, 4), nn.Linear(4, 3)

    def forward(self, tokens: torch.Tensor, labels: torch.Tensor | None = None) -> torch.Tensor:
        scores = self.head(torch.tanh(self.embedding(tokens)))
        return scores if labels is None else of_tokens(scores, labels)


def of_tokens(scores: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
    return F.cross_entropy(scores.transpose(1, 2), labels)


def compiled(inside: str, *, padded: bool = True, **options: Any) -> Result:
    """A loss over tokens of which some count, computed inside of what torch.compile has compiled."""
    torch.manual_seed(2)
    tokens, counts = torch.randint(9, (24, 5)), torch.randint(1, 6, (24, 1))
    labels = torch.randint(3, (24, 5)).masked_fill(torch.arange(5) >= counts if padded else torch.tensor(False), -100)
    loader = DataLoader(TensorDataset(tokens, labels), batch_size=6)
    model: Any = Tagger().double()
    compile_ = torch.compile(backend="aot_eager")
    loss_of = compile_(of_tokens) if inside == "loss" else of_tokens
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
    model = compile_(model) if inside in ("model", "outputs") else model
    model, optimizer, loader = hocket.distribute(model, optimizer, loader, **options)
    losses = []
    for x, y in loader:
        optimizer.zero_grad()
        loss = model(x, y) if inside == "model" else loss_of(model(x), y)
        loss.backward()
        optimizer.step()
        losses.append(hocket.average(loss).item())
    return losses, arrays(model.parameters())


def compiled_and_right() -> list[Result]:
    return [
        compiled("outputs"),
        compiled("model", padded=False),
        compiled("loss", padded=False),
        compiled("model", loss_weight=lambda batch: (batch[1] != -100).sum()),
        compiled("loss", loss_weight=lambda batch: (batch[1] != -100).sum()),
    ]
