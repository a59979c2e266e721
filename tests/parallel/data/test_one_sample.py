"""Losses of ranks with one sample each, which that of the batch before shows to compare samples, or not to."""

import warnings
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.utils.data import DataLoader, TensorDataset

import hocket
from hocket.testing import run_ranks

TOKENS, CLASSES = 6, 3


def _each(out: Tensor, target: Tensor) -> Tensor:
    """Return the loss of each token."""
    flat = functional.cross_entropy(out.flatten(0, 1), target.flatten(), reduction="none")
    return flat.view(target.shape)


def _by_class(out: Tensor, target: Tensor, _: Tensor) -> Tensor:
    count = torch.bincount(target.flatten(), minlength=CLASSES).clamp(min=1).to(out)
    return functional.cross_entropy(out.flatten(0, 1), target.flatten(), weight=target.numel() / (CLASSES * count))


def _by_its_own(out: Tensor, target: Tensor, _: Tensor) -> Tensor:
    own = _each(out, target).mean(1)
    return (own * own.detach() / own.detach().mean()).mean()


def _advantages(out: Tensor, target: Tensor, weight: Tensor) -> Tensor:
    chosen = out.log_softmax(-1).gather(-1, target[..., None])[..., 0]
    gain = weight[:, None] * (target - 1)
    return -(chosen * (gain - gain.mean()) / (gain.std() + 1e-8)).mean()


COMPARING: dict[str, Callable[[Tensor, Tensor, Tensor], Tensor]] = {
    "weights over their mean": lambda o, y, w: (_each(o, y).mean(1) * w / w.mean()).mean(),
    "weights over their largest": lambda o, y, w: (_each(o, y).mean(1) * w / w.max()).mean(),
    "weights that add up to one": lambda o, y, w: (_each(o, y).mean(1) * w.softmax(0)).sum(),
    "classes by how often": _by_class,
    "its own, over their mean": _by_its_own,
    "above the mean": lambda o, y, w: (_each(o, y).mean(1) * (w >= w.mean())).mean(),
    "advantages of all tokens": _advantages,
    "the worst tokens": lambda o, y, _: _each(o, y).flatten().topk(2 * len(o)).values.mean(),
    "root": lambda o, _, __: (o - 0.3).square().mean().sqrt(),
}
APART: dict[str, Callable[[Tensor, Tensor, Tensor], Tensor]] = {
    "mean": lambda o, y, _: _each(o, y).mean(),
    "weighted mean": lambda o, y, w: (_each(o, y).mean(1) * w).sum() / w.sum(),
    "a view of each": lambda o, y, _: o.view(len(o), -1).log_softmax(1).square().mean(),
    "a norm of each": lambda o, _, __: functional.normalize(o.reshape(o.shape[0], -1), dim=1).pow(3).mean(),
    "by places": lambda o, y, _: -o.log_softmax(-1)[torch.arange(len(o)), 0, y[:, 0]].mean(),
    "a root of each": lambda o, _, __: (o - 0.3).square().mean((1, 2)).sqrt().mean(),
    "by a factor of its own": lambda o, y, _: (_each(o, y).mean(1) * (-_each(o, y).mean(1).detach()).exp()).mean(),
    "one after the other": lambda o, y, _: (
        sum(_each(o[i : i + 1], y[i : i + 1]).mean() for i in range(len(o))) / len(o)
    ),
    "the worst tokens of each": lambda o, y, _: _each(o, y).topk(2, 1).values.mean(),
    "smoothed": lambda o, y, _: functional.cross_entropy(o.flatten(0, 1), y.flatten(), label_smoothing=0.1),
    "targets in zeros": lambda o, y, _: functional.mse_loss(o, torch.zeros_like(o).scatter_(2, y[..., None], 1.0)),
    "squeezed": lambda o, _, w: functional.mse_loss(o.mean((1, 2)).squeeze(), w.squeeze()),
    "by len": lambda o, y, _: _each(o, y).mean(1).sum() / len(o),
}


def _trained(name: str, *, ranks: bool) -> tuple[Tensor, list[str]]:
    """Return the weights after five batches of two samples, and what was told."""
    torch.manual_seed(0)
    model: Any = nn.Sequential(nn.Linear(8, 16), nn.Tanh(), nn.Linear(16, CLASSES)).double()
    whole, draw = model, torch.Generator().manual_seed(3)
    data = torch.randn(10, TOKENS, 8, generator=draw).double(), torch.randint(0, CLASSES, (10, TOKENS), generator=draw)
    optimizer: Any = torch.optim.SGD(model.parameters(), lr=0.3)
    loader: Any = DataLoader(TensorDataset(*data, torch.rand(10, generator=draw).double() + 0.5), batch_size=2)
    if ranks:
        model, optimizer, loader = hocket.distribute(model, optimizer, loader)
    with warnings.catch_warnings(record=True) as told:
        warnings.simplefilter("always")
        for x, y, w in loader:
            optimizer.zero_grad()
            (COMPARING | APART)[name](model(x), y, w).backward()
            optimizer.step()
    return torch.cat([one.detach().flatten() for one in whole.parameters()]), [str(one.message) for one in told]


def _train_each(names: list[str]) -> list[tuple[Tensor, list[str]]]:
    return [_trained(name, ranks=True) for name in names]


def test_a_loss_that_depends_on_other_samples_is_told_of_by_the_sample_of_the_batch_before() -> None:
    """Up to 3e-1 off, and all but the root were silent."""
    (first, second) = run_ranks(_train_each, 2, list(COMPARING))
    for name, (weights, told), (_, others) in zip(COMPARING, first, second, strict=True):
        expected, _ = _trained(name, ranks=False)
        assert float((weights - expected).abs().max()) > 1e-4, name
        assert ["a rank has one sample of the batch, and its loss seems" in one for one in told] == [True], name
        assert others == []


def test_a_loss_of_each_sample_is_not_told_of() -> None:
    """Weights are those of one process, to rounding of float64; no other warning says that nothing is known."""
    for name, (weights, told) in zip(APART, run_ranks(_train_each, 2, list(APART))[0], strict=True):
        expected, _ = _trained(name, ranks=False)
        torch.testing.assert_close(weights, expected, rtol=1e-9, atol=1e-12)
        assert told == [], name
