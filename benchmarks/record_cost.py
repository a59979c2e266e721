"""What recording costs: the CPU time of each call, and steps with and without the record, by turns.

    python -m benchmarks.record_cost                  # some 5 minutes; nothing else may run
    python -m benchmarks.record_cost --calls          # the first table only, which other programs hardly disturb

A step is a fixed number of small matrix products, two or ten all-reduces of 4 KB on two ranks, a batch of a DataLoader
and an optimizer's update. In one world of two ranks, blocks of steps with the record and without it take turns, in an
order that changes; those without have neither listeners nor the watching thread. A pair's difference is that of the
medians of its two blocks; given are the median over the pairs, where it lies with 95% (by order statistics), and what
the first table predicts for as many calls.
"""  # noqa: D400

import argparse
import math
import statistics
import tempfile
import time
from collections.abc import Callable, Iterable
from pathlib import Path

import torch
import torch.distributed as dist

STEPS = ((5, 2, 200), (5, 10, 200), (50, 10, 60), (500, 10, 16))  # milliseconds, operations, pairs of blocks
BLOCK_S = 0.2


def best_us(call: Callable[[object], object], things: Iterable[object]) -> float:
    """Return the microseconds of CPU time of one call, the least of seven rounds with a seventh of the things each."""
    things = list(things)
    size, found = len(things) // 7, []
    for number in range(7):
        part = things[number * size : (number + 1) * size]
        begin_ns = time.process_time_ns()
        for thing in part:
            call(thing)
        found.append((time.process_time_ns() - begin_ns) / size / 1e3)
    return min(found)


def calls() -> dict[str, float]:
    """Return the microseconds of CPU time of each call that records, by its name."""
    from hocket.comm import OperationRecord
    from hocket.profile import _watch, mark_step, watch
    from hocket.profile._links import links_used

    with tempfile.TemporaryDirectory() as folder:
        watch(0, 2, folder)
        active = _watch._watch
        assert active is not None
        active._over.set()  # its thread is measured by calling what it calls
        record = active.record
        ops = [
            OperationRecord(
                "0", n, "all_reduce", 4096, "float32", 2, "shm-direct", False, 1.0, 1.0, 1.1, 1.2, None, 1.0, True
            )
            for n in range(1, 70_001)
        ]

        loaded = _watch.loading_of(lambda _: None)

        def update(_: object) -> None:
            active._before_update()
            active._after_update()

        def look(_: object) -> None:
            active._sample()
            active._look()

        return {
            "operation begins": best_us(record.operation_started, ops),  # type: ignore[arg-type]
            "operation ends": best_us(record.operation_finished, ops),  # type: ignore[arg-type]
            "step": best_us(lambda _: mark_step(1.0, 1.1), ops),
            "update of an optimizer": best_us(update, ops),
            "batch of a loader": best_us(loaded, ops),
            "look of the thread, four times a second": best_us(look, range(700)),
            "look at TCP connections, once a second": best_us(lambda _: links_used(), range(700)),
        }


def expected_us(cost_us: dict[str, float], step_s: float, operations: int) -> float:
    """Return the microseconds that the record should cost in a step."""
    operation_us = sum(us for name, us in cost_us.items() if name.startswith("operation"))
    once_us = cost_us["step"] + cost_us["update of an optimizer"] + cost_us["batch of a loader"]
    thread_us = 4 * cost_us["look of the thread, four times a second"]
    thread_us += cost_us["look at TCP connections, once a second"]
    return operations * operation_us + once_us + thread_us * step_s


def work(products: int) -> None:
    """Do a fixed amount of computation."""
    value = torch.eye(64)
    for _ in range(products):
        value = value @ value


def train(products: int, operations: int, steps: int, blocks: int, folder: str) -> list[tuple[float, float]]:
    """Return the median step, in seconds, of blocks of steps without and with the record, in pairs."""
    from hocket.profile import _watch
    from hocket.profile._record import RankRecord

    values = [torch.ones(1000) for _ in range(operations)]
    weight = torch.nn.Parameter(torch.ones(8))
    weight.grad = torch.ones(8)
    optimizer = torch.optim.SGD([weight], lr=0.1)
    warm = 3 if steps > 9 else 1
    data: list[torch.Tensor] = [torch.ones(4)] * (2 * blocks * (steps + warm))
    loader = iter(torch.utils.data.DataLoader(data, batch_size=1))  # type: ignore[arg-type]
    record = RankRecord(Path(folder), dist.get_rank(), dist.get_world_size())

    def block() -> float:
        taken = []
        for step in range(steps + warm):
            begin_s = time.perf_counter()
            next(loader)
            work(products)
            for value in values:
                dist.all_reduce(value)
            optimizer.step()
            if step >= warm:
                taken.append(time.perf_counter() - begin_s)
        return statistics.median(taken)

    found = []
    for number in range(blocks):
        took = {}
        for recorded in (False, True) if number % 2 else (True, False):
            active = _watch._watch = _watch.Watch(record, Path(folder)) if recorded else None
            took[recorded] = block()
            if active is not None:
                active._over.set()  # its thread ends
                active._forget()
        found.append((took[False], took[True]))
    return found


def interleaved(times: float, cost_us: dict[str, float]) -> None:
    """Print the table of steps with and without the record."""
    from hocket.testing import run_ranks

    torch.set_num_threads(1)
    work(2000)
    begin_s = time.process_time()
    work(20_000)
    product_s = (time.process_time() - begin_s) / 20_000
    print("\n| step, operations | without | with | difference (95% within) | by the calls |\n|---|---|---|---|---|")
    for step_ms, operations, usual in STEPS:
        products, steps = int(step_ms * 1e-3 / product_s), max(2, int(BLOCK_S * 1e3 / step_ms))
        with tempfile.TemporaryDirectory() as folder:
            found = run_ranks(
                train, 2, products, operations, steps, max(2, int(times * usual)), folder,
                env={"HOCKET_RECORD": "off"}, timeout_s=600,
            )  # fmt: skip
        pairs = found[0]
        shares = sorted(b / a - 1 for a, b in pairs)
        half = 0.98 * math.sqrt(len(shares))
        low, high = (
            shares[max(0, int(len(shares) / 2 - half))],
            shares[min(len(shares) - 1, int(len(shares) / 2 + half))],
        )
        middle = statistics.median(shares)
        without_s, with_s = (statistics.median(column) for column in zip(*pairs, strict=True))
        share = expected_us(cost_us, step_ms * 1e-3, operations) / step_ms / 1e3
        print(
            f"| {step_ms} ms, {operations} | {without_s * 1e3:.3f} ms | {with_s * 1e3:.3f} ms | "
            f"{middle:+.2%} ({low:+.2%} to {high:+.2%}) | {share:+.2%} |",
            flush=True,
        )


def main() -> None:
    """Read the command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--times", type=float, default=1.0, help="so many times as many blocks")
    parser.add_argument("--calls", action="store_true", help="measure the calls only")
    given = parser.parse_args()
    from hocket.testing import preload

    preload("hocket.profile")
    cost_us = calls()
    print("| call | us of CPU time |\n|---|---|")
    for name, us in cost_us.items():
        print(f"| {name} | {us:.2f} |")
    for step_ms, operations, _ in STEPS if given.calls else ():
        us = expected_us(cost_us, step_ms * 1e-3, operations)
        print(f"a step of {step_ms} ms with {operations} operations: {us:.0f} us, {us / step_ms / 1e3:.2%}")
    if not given.calls:
        interleaved(given.times, cost_us)


if __name__ == "__main__":
    main()
