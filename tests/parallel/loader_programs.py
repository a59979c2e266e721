"""Loaders as users make them; what each rank gets of them is put together by the tests."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import numpy as np
import torch
import torch.distributed as dist
from torch.utils.data import (
    DataLoader,
    Dataset,
    IterableDataset,
    RandomSampler,
    Sampler,
    Subset,
    TensorDataset,
    WeightedRandomSampler,
    get_worker_info,
)

import hocket
from hocket.parallel.batches import batch as _batch

Part = tuple[int, int, Any]
"""A rank's part of a batch: how many of its samples count, the batch's size (-1 unknown), its contents as lists."""


class Numbers(Dataset[Any]):
    """Samples that say which they are, with noise from every global generator."""

    def __init__(self, size: int, *, many: bool = False) -> None:
        self.size = size
        if many:
            self.__getitems__ = lambda indices: [self[i] for i in indices]

    def __len__(self) -> int:
        return self.size

    def __getitem__(self, index: int) -> tuple[int, float, float, float]:
        return index, torch.rand(()).item(), random.random(), float(np.random.random())


class Flow(IterableDataset[Any]):
    """A stream divided among worker processes, shuffled through a buffer."""

    def __iter__(self) -> Iterator[tuple[int, float]]:
        info = get_worker_info()
        own = range(17) if info is None else range(info.id, 17, info.num_workers)
        order = list(own)
        random.shuffle(order)
        for i in order:
            yield i, torch.rand(()).item()


class Shuffled(Sampler[int]):
    """A sampler of a user's own that shuffles with Python's and numpy's generators."""

    def __init__(self, size: int) -> None:
        self.size = size

    def __len__(self) -> int:
        return self.size

    def __iter__(self) -> Iterator[int]:
        order = list(range(self.size))
        random.shuffle(order)
        yield from np.random.permutation(order).tolist()


class Growing(Sampler[list[int]]):
    """Batches of 1, 2, 3, ... samples, the order drawn anew for each."""

    def __len__(self) -> int:
        return 6

    def __iter__(self) -> Iterator[list[int]]:
        for size in range(1, 7):
            yield torch.randperm(21)[:size].tolist()


class Buckets(Sampler[list[int]]):
    """Batches of neighbours, in an order that is drawn when an epoch begins, and not with its first batch."""

    def __len__(self) -> int:
        return 6

    def __iter__(self) -> Iterator[list[int]]:
        order = torch.randperm(6).tolist()
        return iter([list(range(4 * i, min(21, 4 * i + 4))) for i in order])


class Pair(NamedTuple):
    x: torch.Tensor
    y: list[str]


def batches() -> list[Any]:
    return [
        {"x": torch.arange(5), "names": list("abcde"), "temperature": torch.tensor(3.0), "table": torch.arange(9)},
        (np.arange(7), [torch.arange(7) * 2, torch.arange(7) * 3]),
        Pair(torch.arange(2), ["p", "q"]),
        torch.arange(1),
    ]


def generator(seed: int = 5) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


FORK: Any = {"multiprocessing_context": "fork"}  # as in a user's script; in a rank of the test kit it is forkserver

LOADERS: dict[str, Callable[[], Any]] = {
    "in order": lambda: DataLoader(Numbers(23), batch_size=8),
    "shuffled": lambda: DataLoader(Numbers(23), batch_size=8, shuffle=True),
    "shuffled, whole batches": lambda: DataLoader(Numbers(23), batch_size=8, shuffle=True, drop_last=True),
    "smaller than the world": lambda: DataLoader(Numbers(5), batch_size=2, shuffle=True),
    "own generator": lambda: DataLoader(
        Numbers(23), batch_size=8, shuffle=True, generator=generator(dist.get_rank() if dist.is_initialized() else 0)
    ),
    "weighted": lambda: DataLoader(Numbers(9), batch_size=4, sampler=WeightedRandomSampler(torch.arange(9.0), 13)),
    "with replacement": lambda: DataLoader(
        Numbers(9), batch_size=16, sampler=RandomSampler(range(9), replacement=True, num_samples=70)
    ),
    "own sampler": lambda: DataLoader(Numbers(23), batch_size=8, sampler=Shuffled(23)),
    "own batch sampler": lambda: DataLoader(Numbers(21), batch_sampler=Growing()),
    "buckets": lambda: DataLoader(Numbers(21), batch_sampler=Buckets()),
    "many at once": lambda: DataLoader(Numbers(23, many=True), batch_size=8, shuffle=True),
    "subset": lambda: DataLoader(Subset(Numbers(40), range(3, 26)), batch_size=8, shuffle=True),
    "tensors": lambda: DataLoader(TensorDataset(torch.arange(23), torch.arange(23) * 2), batch_size=8, shuffle=True),
    "worker processes": lambda: DataLoader(Numbers(23), batch_size=8, shuffle=True, num_workers=2, **FORK),
    "workers that stay": lambda: DataLoader(
        Numbers(23), batch_size=8, shuffle=True, num_workers=1, persistent_workers=True, **FORK
    ),
    "stream": lambda: DataLoader(Flow(), batch_size=4),
    "stream from worker processes": lambda: DataLoader(Flow(), batch_size=4, num_workers=2, **FORK),
    "no batching": lambda: DataLoader([torch.arange(5), torch.arange(3)], batch_size=None, shuffle=True),
    "list of batches": batches,
}
EPOCHS = 3


def plain(batch: Any) -> Any:
    """A batch as nested lists of its samples' values; what belongs to the batch as a whole under "all"."""
    if isinstance(batch, torch.Tensor | np.ndarray):
        return batch.tolist()
    if isinstance(batch, dict):
        return {key: plain(value) for key, value in batch.items()}
    if isinstance(batch, Pair):
        return {"x": plain(batch.x), "y": batch.y}
    if isinstance(batch, tuple | list):
        return [plain(value) for value in batch]
    return batch


def training_parts(names: list[str]) -> dict[str, list[list[Part]]]:
    """For each loader and epoch this rank's parts."""
    if dist.is_initialized():
        torch.manual_seed(dist.get_rank())
        random.seed(dist.get_rank())
        np.random.seed(dist.get_rank())
    found: dict[str, list[list[Part]]] = {}
    for name in names:
        loader = hocket.parallel.DistributedLoader(LOADERS[name]())
        found[name] = []
        for _ in range(EPOCHS):
            parts = []
            for batch in loader:
                note = _batch.current()
                assert note is not None
                assert note.share is not None
                torch.rand(dist.get_rank() + 1 if dist.is_initialized() else 1)  # as dropout does: ranks come apart
                random.random()
                parts.append((note.share.samples, note.share.total, plain(batch)))
            found[name].append(parts)
    return found


def evaluation_parts(names: list[str]) -> dict[str, list[Any]]:
    if dist.is_initialized():
        torch.manual_seed(dist.get_rank())
    found = {}
    for name in names:
        loader = hocket.shard(LOADERS[name]())
        found[name] = [plain(batch) for batch in loader]
        if name == "in order":
            assert len(found[name]) == len(loader)
    return found


def resumed(name: str) -> bool:
    """Whether epoch 2, and then epoch 0, come out as in an uninterrupted run, when asked for by number."""
    torch.manual_seed(3)
    loader = hocket.parallel.DistributedLoader(LOADERS[name]())
    whole = [[plain(b) for b in loader] for _ in range(3)]
    torch.manual_seed(3)
    again = hocket.parallel.DistributedLoader(LOADERS[name]())
    again.set_epoch(2)
    last = [plain(b) for b in again]
    assert again.epoch == 3
    again.set_epoch(0)
    return [[plain(b) for b in again], whole[1], last] == whole


def all_resumed(names: list[str]) -> dict[str, bool]:
    return {name: resumed(name) for name in names}


class Unseeded(Sampler[int]):
    def __len__(self) -> int:
        return 20

    def __iter__(self) -> Iterator[int]:
        return iter(np.random.default_rng().permutation(20).tolist())


def unseeded_sampler() -> None:
    for _ in hocket.parallel.DistributedLoader(DataLoader(Numbers(20), batch_size=4, sampler=Unseeded())):
        pass


def divided_stream() -> None:
    own = [torch.arange(6) + 100 * dist.get_rank()]
    for _ in hocket.parallel.DistributedLoader(own):
        pass
