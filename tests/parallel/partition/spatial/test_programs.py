"""What a user's program may do with shards, and what is refused."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.nn.functional import l1_loss  # a name that was taken before training begins

from hocket.parallel.mesh import world as _world
from hocket.parallel.partition.spatial import parallelize
from hocket.sharding import ShardingError, as_local
from hocket.testing import run_ranks


class Centred(torch.autograd.Function):
    """Takes the mean of all rows away, in its backward too."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        return x - x.mean(2, keepdim=True)

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> torch.Tensor:
        return gradients[0] - gradients[0].sum(2, keepdim=True) / gradients[0].shape[2]


class Odd(nn.Module):
    """Does with shards what models do: shapes, views, indices, broadcasts, joins, and things that no rule knows."""

    def __init__(self, what: str) -> None:
        super().__init__()
        self.what = what
        self.conv = nn.Conv2d(2, 4, 3, padding=1)
        self.gain = nn.Parameter(torch.ones(1, 4, 1, 1))

    def forward(self, x: torch.Tensor) -> Any:
        y = self.conv(x)
        n, c, h, w = y.shape
        match self.what:
            case "shuffle":
                return y.view(n, 2, c // 2, h, w).transpose(1, 2).reshape(-1, c, h, w)
            case "last":
                return F.layer_norm(y.permute(0, 2, 3, 1), (c,)).permute(0, 3, 1, 2) * y.new_ones(h, 1)
            case "crop":
                return F.relu(y[:, 1:, 2:-1, ::2]) + y[:, :3, 1:-2, : (w + 1) // 2]
            case "halves":
                first, second = y.chunk(2, 1)
                return torch.stack([first, second.sigmoid()], 1).flatten(1, 2)
            case "rows":
                return y.cumsum(2) - y.mean(2, keepdim=True) + y.amax((1, 3), keepdim=True)
            case "places":
                place = torch.linspace(0, 1, h, dtype=y.dtype).view(h, 1).expand(h, w)
                return torch.where(place > 0.5, y, -y) * place + torch.zeros_like(y)
            case "other shards":
                up = F.interpolate(F.max_pool2d(y, 3, 2, 1), scale_factor=2)
                return torch.cat([y, up[:, :, :h, :w]], 1)
            case "attention":
                seen = y.flatten(2).transpose(1, 2)
                return (seen @ seen.transpose(1, 2)).softmax(-1) @ seen
            case "many":
                return {
                    "full": y,
                    "mean": y.mean(),
                    "max": y.max(1).values,
                    "chosen": y.argmax(1),
                    "sum": y.sum((2, 3)),
                }
            case "autograd":
                made: torch.Tensor = Centred.apply(y)
                return made
            case "vmap":
                return torch.func.vmap(lambda one: one - one.mean(1, keepdim=True))(y)
            case "gradient":
                return y + torch.func.grad(lambda one: one.logsumexp(2).square().sum())(y)
            case "forwards":
                return torch.func.jvp(lambda one: one.softmax(2), (y,), (y.detach(),))[1]
            case "copy":
                return y * torch.asarray(y.detach(), copy=True).logsumexp(2, keepdim=True)
            case "copy by name":
                return y * torch.as_tensor(data=y.detach(), dtype=torch.float64).logsumexp(2, keepdim=True)
            case "weights":
                weights = torch.arange(float(y.shape[2]), dtype=y.dtype)[:, None].expand(y.shape)
                return l1_loss(y, torch.zeros(y.shape, dtype=y.dtype), weight=weights)
            case "copy by another":
                return y * torch.zeros(1, dtype=y.dtype).new_tensor(y.detach()).logsumexp(2, keepdim=True)
            case "new":
                return y * torch.zeros(1, dtype=y.dtype).new(y.detach()).logsumexp(2, keepdim=True)
            case "constructor":
                return y * torch.Tensor(y.detach()).logsumexp(2, keepdim=True)
            case "another's type":
                gain = self.gain.type_as(y)
                return y * gain + gain.sum() + torch.ones(2, 9, 9).to(y).mean()
            case "pictures":
                pictures = (y.detach().sigmoid() * 255).to(torch.uint8)
                return y * F.interpolate(pictures, scale_factor=2, mode="bilinear").double()[:, :, ::2, ::2]
            case "size":
                return y.sum() / (y.numel() * len(y) * y.size(-2))
        raise ValueError(self.what)


WHATS = ("shuffle", "last", "crop", "halves", "rows", "places", "attention", "many", "size", "other shards", "autograd",
         "vmap", "gradient", "forwards", "copy", "copy by name", "weights",
         "constructor", "copy by another", "new", "another's type", "pictures")  # fmt: skip


def outcomes(whats: tuple[str, ...], divide: bool) -> list[Any]:
    found = []
    for what in whats:
        torch.manual_seed(1)
        model = Odd(what).double()
        x = torch.randn(2, 2, 9, 7, dtype=torch.float64)
        if divide:
            parallelize(model, _world.current())
        output = model(x)
        tensors = list(output.values()) if isinstance(output, dict) else [output]
        sum(t.double().square().mean() for t in tensors).backward()
        weight = model.conv.weight.grad
        if divide:
            torch.distributed.all_reduce(weight)
            weight /= torch.distributed.get_world_size()
        found.append([*(t.detach() for t in tensors), weight])
    return found


@pytest.mark.long
@pytest.mark.parametrize("ranks", [2, 3])
def test_users_code_sees_whole_tensors(ranks: int) -> None:
    expected = outcomes(WHATS, divide=False)
    for rank in run_ranks(outcomes, ranks, WHATS, True):
        for what, got, wanted in zip(WHATS, rank, expected, strict=True):
            assert len(got) == len(wanted)
            for a, b in zip(got, wanted, strict=True):
                torch.testing.assert_close(a, b, rtol=1e-12, atol=1e-12, msg=what)


LOSSES = {
    "weighted": lambda o, t: F.cross_entropy(o, t, weight=torch.tensor([1.0, 2.0, 0.5], dtype=o.dtype)),
    "ignored": lambda o, t: F.cross_entropy(o, t.where(t > 0, -100), label_smoothing=0.1),
    "summed": lambda o, t: F.cross_entropy(o, t, reduction="sum"),
    "shares": lambda o, t: F.cross_entropy(o, F.one_hot(t, 3).movedim(3, 1).to(o.dtype)),
    "likelihood": lambda o, t: F.nll_loss(o.log_softmax(1), t),
    "flattened": lambda o, t: F.cross_entropy(o.permute(0, 2, 3, 1).reshape(-1, 3), t.reshape(-1)),
    "squared": lambda o, t: F.mse_loss(o, F.one_hot(t, 3).movedim(3, 1).to(o.dtype)),
    "logits": lambda o, t: F.binary_cross_entropy_with_logits(o[:, 0], (t > 0).to(o.dtype)),
    "another's type": lambda o, t: F.binary_cross_entropy_with_logits(o[:, 0], (t > 0).type_as(o)),
    "of its own": lambda o, t: o.mean() * (t > 0).type_as(o).mean(),
    "dice": lambda o, t: 1 - 2 * (o.softmax(1)[:, 1] * (t == 1)).sum() / (o.softmax(1)[:, 1].sum() + (t == 1).sum()),
}


def losses(divide: bool) -> list[tuple[float, torch.Tensor]]:
    found = []
    for name in LOSSES:
        torch.manual_seed(2)
        model = nn.Sequential(nn.Conv2d(2, 3, 3, padding=1), nn.Tanh()).double()
        x, t = torch.randn(2, 2, 8, 5, dtype=torch.float64), torch.randint(3, (2, 8, 5))
        if divide:
            form = parallelize(model, _world.current())
            with form.running():
                loss = LOSSES[name](model(x), t)
        else:
            loss = LOSSES[name](model(x), t)
        loss.backward()
        weight = model[0].weight.grad
        if divide:
            torch.distributed.all_reduce(weight)
            weight /= torch.distributed.get_world_size()
        found.append((loss.item(), weight))
    return found


def test_losses_of_shards_are_those_of_the_whole() -> None:
    expected = losses(divide=False)
    for rank in run_ranks(losses, 3, True):
        for name, (loss, weight), (wanted, wanted_weight) in zip(LOSSES, rank, expected, strict=True):
            assert loss == pytest.approx(wanted, rel=1e-12), name
            torch.testing.assert_close(weight, wanted_weight, rtol=1e-11, atol=1e-12, msg=name)


class Closed(nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.func.vmap(lambda one: one + x)(torch.ones(3, 1, 1, 1, 1))


class InPlace(nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = x + 1
        x[:, :, 0] = 0.0
        return x


class InPlaceOfView(nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = x + 1
        x.flatten().zero_()
        return x


class Forces(nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = x.detach().requires_grad_()
        slopes = torch.func.grad(lambda given: given.pow(3).sum())(x)
        return x + slopes + torch.autograd.grad(x.pow(3).sum(), x)[0]


def refused() -> list[Any]:
    torch.manual_seed(0)
    found: list[Any] = []
    for model, x in (
        (nn.Linear(3, 2), torch.randn(4, 3)),
        (Closed(), torch.randn(2, 1, 4, 4)),
        (InPlaceOfView(), torch.randn(2, 1, 4, 4)),
        (Forces(), torch.randn(2, 1, 4, 4)),
        (InPlace(), torch.randn(1, 1, 4, 4)),
    ):
        expected = model(x)
        parallelize(model, _world.current())
        try:
            found.append(torch.equal(model(x), expected))
        except (ValueError, ShardingError) as error:
            found.append(str(error))
    return found


def test_what_cannot_be_done_is_said_with_the_remedy() -> None:
    first, closed, second, forces, third = run_ranks(refused, 2)[1]
    assert "makes of a divided tensor that is none of the arguments" in closed
    assert "no input of the model can be divided among 2 ranks" in first
    assert "spatial_parallel_degree = 1" in first
    assert "may be a view of another or a copy" in second
    assert "autograd.grad takes derivatives while samples are divided among 2 ranks" in forces
    assert third is True  # a write to the divided tensor itself is one to the rows that each rank has


def drop(p: float) -> list[Any]:
    torch.manual_seed(4)
    model = nn.Sequential(nn.Conv2d(1, 4, 1), nn.Dropout(p), nn.Dropout2d(0.5), nn.AdaptiveAvgPool2d(1), nn.Dropout(p))
    with torch.no_grad():
        model[0].bias.fill_(5.0)
    form = parallelize(model, _world.current())
    with form.running():
        shard = model[1](form.shard(torch.ones(2, 1, 8, 8)))
        channels = model[2](form.shard(torch.ones(2, 16, 8, 8)))
    whole = model(torch.ones(2, 1, 8, 8))
    with as_local():
        return [whole, *(torch.empty(part.shape).copy_(part) for part in (shard.detach(), channels.detach()))]


def test_dropout_differs_on_shards_and_agrees_on_what_is_whole() -> None:
    (one, left, channels), (other, right, same) = run_ranks(drop, 2, 0.5)
    assert torch.equal(one, other)
    assert not torch.equal(left, right)
    assert torch.equal(channels, same)
    assert 0 < int((channels[:, :, 0, 0] == 0).sum()) < 32
