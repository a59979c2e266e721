"""What a user's loader is made of: its samplers and generators, how it loads, and what it draws at an epoch's start."""

from __future__ import annotations

from itertools import chain
from typing import Any

import torch
from torch.utils.data import DataLoader, DistributedSampler, IterableDataset, default_collate, default_convert

from ._samples import RankSampler, SeededCollate, SeededDataset


def samplers(loader: Any) -> list[Any]:
    """Return the samplers of a DataLoader; of other loaders what they have under the same names."""
    batch_sampler = getattr(loader, "batch_sampler", None)
    found = (batch_sampler, getattr(batch_sampler, "sampler", None), getattr(loader, "sampler", None))
    return list({id(s): s for s in found if s is not None}.values())


def generators(loader: Any) -> list[torch.Generator]:
    """Return the generators that it and its samplers draw from, but for torch's global one."""
    found = (getattr(owner, "generator", None) for owner in chain([loader], samplers(loader)))
    return list({id(g): g for g in found if isinstance(g, torch.Generator)}.values())


def divides_itself(loader: Any) -> str:
    """Return what each rank gets of a loader that divides for itself, as torch's and Accelerate's parts do.

    "samples" of each batch, or whole "batches"; "" where it does not divide, as far as it says.
    """
    for part in (*samplers(loader), getattr(loader, "dataset", None), loader):
        if isinstance(part, DistributedSampler) and part.num_replicas > 1:
            return "batches"
        split = getattr(part, "split_batches", None)
        replicas = getattr(part, "num_processes", getattr(getattr(part, "state", None), "num_processes", 1))
        if isinstance(split, bool) and isinstance(replicas, int) and replicas > 1:
            return "samples" if split else "batches"
    return ""


def refuse_divided_sampler(loader: Any) -> None:
    """Raise ValueError for a loader that gives each rank a part of the data set already."""
    if divides_itself(loader):
        found = (s for s in samplers(loader) if isinstance(s, DistributedSampler))
        what = "the loader's DistributedSampler" if any(found) else f"the loader ({type(loader).__name__})"
        raise ValueError(
            f"{what} already divides the data set among ranks, and hocket would divide "
            "it again. Pass a plain loader, such as DataLoader(dataset, batch_size=GLOBAL, shuffle=True)"
        )


def draw_worker_seed(loader: Any, epoch: int) -> int:
    """Draw as torch's DataLoader does when it starts its workers, before the sampler draws."""
    if epoch > 0 and loader.persistent_workers:
        return 0
    return int(torch.empty((), dtype=torch.int64).random_(generator=loader.generator))


def loads_by_index(loader: Any) -> bool:
    """Return whether a rank can load its samples alone: a DataLoader that works as torch's, on a map-style data set."""
    return (
        isinstance(loader, DataLoader)
        and type(loader).__iter__ is DataLoader.__iter__
        and loader.batch_sampler is not None
        and not isinstance(loader.dataset, IterableDataset)
    )


def expected_size(loader: Any) -> int | None:
    """Return how many samples the first batch has; None if that is not known or not needed."""
    if isinstance(loader, DataLoader) and loader.collate_fn is default_collate:
        return None  # which stacks samples, so that no list has an entry for each
    size = getattr(loader, "batch_size", None)
    return size if isinstance(size, int) else None


def inner_loader(
    loader: DataLoader[Any], seed: int | None, sampler: RankSampler, generator: torch.Generator
) -> DataLoader[Any]:
    """Return the user's loader with another sampler and generator, and seeded by `seed` if there is one."""
    dataset, collate = SeededDataset(loader.dataset, seed), loader.collate_fn
    if seed is not None and collate not in (default_collate, default_convert):
        collate = SeededCollate(collate, dataset, seed, parts=sampler.gives_parts)
    return DataLoader(
        dataset,
        batch_sampler=sampler,
        num_workers=loader.num_workers,
        collate_fn=collate,
        pin_memory=loader.pin_memory,
        timeout=loader.timeout,
        worker_init_fn=loader.worker_init_fn,
        multiprocessing_context=loader.multiprocessing_context,
        generator=generator,
        prefetch_factor=loader.prefetch_factor,
        persistent_workers=loader.persistent_workers,
        in_order=True,  # parts of one batch must meet
    )
