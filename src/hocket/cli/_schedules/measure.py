"""Measures every algorithm that serves a collective, by size, on real ranks. Run by `hocket tune`.

All take turns in every round, the engine's own collective too, and an operation's time is that of the slowest rank.
What is executed is what the backend executes: the same transport, with a table of one row.
"""

import statistics
from collections.abc import Callable
from datetime import timedelta
from typing import Any, Final

import torch
import torch.distributed as dist

from hocket.algorithms import Choices, algorithms
from hocket.comm import EnginePointToPoint, EngineTransport, PointToPoint, ScheduledTransport, open_streams, reducer
from hocket.comm.torch_adapter import PrefixStore
from hocket.schedule import Collective
from hocket.units import format_bytes

from .._bench.collective import samples_a_turn
from .._bench.rank import Rank, p90
from . import ENGINE

_SLOW: Final = 4.0
"""What was this much slower than the best in the first round takes part no more; its time is kept."""

Operation = Callable[[], Any]


def work() -> None:
    """Do everything that one rank does."""
    rank = Rank()
    spec = rank.spec
    engine = EngineTransport(rank.gloo._get_backend(torch.device("cpu")), "gloo")
    chosen: list[Choices] = [Choices()]
    transport = ScheduledTransport(_points(rank, spec["transport"]), rank.rank, rank.n, engine, lambda _: chosen[0])
    rows: list[dict[str, Any]] = []
    for kind in spec["collectives"]:
        for nbytes in spec["sizes"]:
            rank.say(f"{kind}, {format_bytes(nbytes, 3)}")
            turns = _turns(kind, nbytes, rank, transport, engine, chosen)
            for label, times in _measure(rank, turns, nbytes, spec["rounds"]).items():
                times.sort()
                rows.append(
                    {
                        "collective": kind,
                        "nbytes": nbytes,
                        "algorithm": label,
                        "n": rank.n,
                        "median_s": statistics.median(times),
                        "p90_s": p90(times),
                        "samples": len(times),
                    }
                )
    rank.report({"rows": rows})


def _points(rank: Rank, transport: str) -> PointToPoint:
    if transport == "shm":
        store = PrefixStore("tune", dist.distributed_c10d._get_default_store())
        return open_streams(store, rank.rank, rank.n, timedelta(seconds=60))
    return EnginePointToPoint(rank.gloo._get_backend(torch.device("cpu")), "gloo")


def labels(kind: str, world: int) -> list[str]:
    """Return every algorithm with its variants that serves a collective without switches and hosts."""
    found = []
    collective = Collective(kind, world)
    for one in algorithms():
        if one.in_network or "local" in one.parameters:
            continue
        for variant in one.variants:
            if one.serves(collective, **variant) is None:
                found.append(" ".join([one.name, *(f"{key}={value}" for key, value in variant.items())]))
    return found


def _turns(
    kind: str, nbytes: int, rank: Rank, transport: ScheduledTransport, engine: EngineTransport, chosen: list[Choices]
) -> dict[str, Operation]:
    numel = max(rank.n, nbytes // 4 // rank.n * rank.n)
    own = _operation(kind, numel, rank, engine)
    turns: dict[str, Operation] = {ENGINE: own}
    ours = _operation(kind, numel, rank, transport)
    for label in labels(kind, rank.n):
        table = Choices.parse(f"{kind} * {label}")

        def turn(table: Choices = table) -> None:
            chosen[0] = table
            ours()

        turns[label] = turn
    return turns


def _operation(kind: str, numel: int, rank: Rank, transport: ScheduledTransport | EngineTransport) -> Operation:
    """Return the collective on its own buffers; `numel` counts the full vector."""
    whole, n, wait_s = torch.zeros(numel), rank.n, 60.0
    part, parts = whole[: numel // n], list(whole.view(n, -1))
    op = reducer(dist.ReduceOp.SUM, whole.dtype)
    alone = torch.zeros(numel // n)
    operations: dict[str, Operation] = {
        "all_reduce": lambda: transport.all_reduce(whole, op, wait_s),
        "reduce": lambda: transport.reduce(whole, op, 0, wait_s),
        "broadcast": lambda: transport.broadcast(whole, 0, wait_s),
        "all_gather": lambda: transport.all_gather(parts, alone, wait_s),
        "reduce_scatter": lambda: transport.reduce_scatter(alone, parts, op, wait_s),
        "gather": lambda: transport.gather(parts if rank.rank == 0 else None, alone, 0, wait_s),
        "scatter": lambda: transport.scatter(part, parts if rank.rank == 0 else None, 0, wait_s),
        "barrier": lambda: transport.barrier(wait_s),
    }
    return operations[kind]


def _measure(rank: Rank, turns: dict[str, Operation], nbytes: int, rounds: int) -> dict[str, list[float]]:
    """Return the times of the slowest rank, of everything that takes turns."""
    samples: dict[str, list[float]] = {label: [] for label in turns}
    running = list(turns)
    for number in range(rounds):
        for label in running:
            operation = turns[label]
            operation()
            own = [rank.measure(operation) for _ in range(max(1, samples_a_turn(nbytes) // 4))]
            samples[label] += rank.slowest(own)
        if number == 0:
            medians = {label: statistics.median(samples[label]) for label in turns}
            bar_s = _SLOW * min(medians[label] for label in turns)
            running = [label for label in turns if medians[label] <= bar_s or label == ENGINE]
    return samples


if __name__ == "__main__":
    work()
