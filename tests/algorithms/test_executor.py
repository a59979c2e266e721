"""Every algorithm through the executor that real groups use, on vectors that its chunks do not divide."""

from __future__ import annotations

import pytest
import torch

from hocket.algorithms import Algorithm, algorithms
from hocket.schedule import Collective
from hocket.testing import run_schedule

from .test_thesis import VARIANTS

WORLDS = (1, 2, 3, 4, 5, 6, 8, 12)  # test_thesis.py has more: what a schedule says is checked there


def outcome(collective: Collective, given: list[torch.Tensor]) -> list[torch.Tensor | None]:
    """What the contract says that sums must be; `given` has the whole row of blocks of every rank."""
    rows = torch.stack(given).view(collective.world, collective.blocks, -1)
    p, root, kind = collective.world, collective.root, collective.kind
    if kind in ("all_reduce", "barrier", "reduce"):
        return [rows.sum(0).flatten() if rank == root or kind != "reduce" else None for rank in range(p)]
    if kind == "reduce_scatter":
        return list(rows.sum(0))
    if kind == "broadcast":
        return [rows[root].flatten()] * p
    if kind == "scatter":
        return list(rows[root])
    if kind == "all_to_all":
        return [torch.cat([rows[source, source * p + rank] for source in range(p)]) for rank in range(p)]
    whole = torch.cat([rows[rank, rank] for rank in range(p)])
    return [whole if rank == root or kind == "all_gather" else None for rank in range(p)]


def contribution(collective: Collective, rank: int, whole: torch.Tensor) -> torch.Tensor | None:
    rows = whole.view(collective.blocks, -1)
    p, kind = collective.world, collective.kind
    if kind in ("broadcast", "scatter"):
        return whole if rank == collective.root else None
    if kind in ("all_gather", "gather"):
        return rows[rank].clone()
    if kind == "all_to_all":
        return rows[rank * p : (rank + 1) * p].flatten()
    return whole


@pytest.mark.parametrize("numel", [1, 37])
@pytest.mark.parametrize("algorithm", algorithms(), ids=lambda one: one.name)
def test_executes_to_the_contract(algorithm: Algorithm, numel: int) -> None:
    generator = torch.Generator().manual_seed(1)
    for world in WORLDS if numel > 1 else WORLDS[:6]:
        for kind in algorithm.kinds:
            collective = Collective(kind, world, world // 2 if Collective(kind, world).rooted else 0)
            for parameters in ({}, *VARIANTS.get(algorithm.name, ())):
                if algorithm.serves(collective, **parameters) is not None:
                    continue
                given = [
                    torch.randint(0, 1000, (collective.blocks * numel,), generator=generator) for _ in range(world)
                ]
                inputs = [contribution(collective, rank, whole) for rank, whole in enumerate(given)]
                got = run_schedule(algorithm.build(collective, **parameters), inputs)
                for mine, must in zip(got, outcome(collective, given), strict=True):
                    assert (mine is None) == (must is None)
                    assert mine is None or torch.equal(mine, must), f"{collective} {parameters}"
