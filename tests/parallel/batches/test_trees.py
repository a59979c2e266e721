"""Structures that hold tensors: those whose iteration gives something else than keys."""

from __future__ import annotations

from collections.abc import Iterator, MutableMapping
from typing import Any

import torch
from torch import nn
from torch.utils.data import DataLoader

import hocket
from hocket.parallel.batches import trees
from hocket.testing import run_ranks


class Rows(MutableMapping[str, Any]):
    """As TensorDict of tensordict: iterates over its rows, and demands as many of each entry as it says."""

    def __init__(self, entries: dict[str, Any], batch_size: tuple[int, ...]) -> None:
        self.entries, self.batch_size, self.batch_dims = dict(entries), batch_size, 1

    def keys(self) -> Any:
        return self.entries.keys()

    def items(self) -> Any:
        return self.entries.items()

    def __getitem__(self, key: Any) -> Any:
        if isinstance(key, str):
            return self.entries[key]
        return Rows({name: one[key] for name, one in self.entries.items()}, self.batch_size[1:])

    def __setitem__(self, key: str, value: Any) -> None:
        assert tuple(value.shape[: len(self.batch_size)]) == tuple(self.batch_size)
        self.entries[key] = value

    def __delitem__(self, key: str) -> None:
        del self.entries[key]

    def __iter__(self) -> Iterator[Any]:
        return (self[i] for i in range(self.batch_size[0]))

    def __len__(self) -> int:
        return self.batch_size[0]

    def empty(self) -> Rows:
        return Rows({}, self.batch_size)

    def auto_batch_size_(self, dims: int) -> None:
        self.batch_size = tuple(next(iter(self.entries.values())).shape[:dims])


class Writes(nn.Module):
    """Writes what it gives beside what it is given, as TensorDictModule does."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(4, 3)

    def forward(self, rows: Rows) -> Rows:
        rows["y"] = self.layer(rows["x"])
        return rows


def collated(samples: list[tuple[torch.Tensor, torch.Tensor]]) -> Rows:
    x, t = (torch.stack(list(one)) for one in zip(*samples, strict=True))
    return Rows({"x": x, "t": t}, (len(samples),))


def trained(distributed: bool) -> list[torch.Tensor]:
    torch.manual_seed(0)
    model: nn.Module = Writes().double()
    optimizer: Any = torch.optim.SGD(model.parameters(), 0.1)
    x = torch.randn(11, 4, generator=torch.Generator().manual_seed(1)).double()
    loader: Any = DataLoader([(one, one[:3].square()) for one in x], batch_size=4, collate_fn=collated)
    if distributed:
        model, optimizer, loader = hocket.distribute(model, optimizer, loader)
    for batch in loader:
        optimizer.zero_grad()
        nn.functional.mse_loss(model(batch)["y"], batch["t"]).backward()
        optimizer.step()
    return [one.detach().clone() for one in model.parameters()]


def test_a_mapping_that_iterates_over_rows_is_made_with_fewer_rows() -> None:
    rows = Rows({"x": torch.arange(6.0).reshape(3, 2), "t": torch.arange(3)}, (3,))
    assert [one.shape for one in trees.tensors_in(rows)] == [(3, 2), (3,)]
    fewer = trees.mapped(rows, lambda one: one[:2])
    assert type(fewer) is Rows
    assert fewer.batch_size == (2,)
    assert rows.batch_size == (3,)


def test_models_are_given_such_mappings() -> None:
    wanted = trained(False)
    for found in run_ranks(trained, 2, True):
        torch.testing.assert_close(found, wanted, rtol=1e-12, atol=1e-12)
