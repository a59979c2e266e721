"""What recording costs: the CPU time of each call, and steps with and without the record, by turns.

    python -m benchmarks.record_cost                  # 12 rounds, some 3 minutes; nothing else may run
    python -m benchmarks.record_cost --calls          # the first table only, which other programs hardly disturb

A step is a fixed number of small matrix products, ten all-reduces of 4 KB on two ranks, a batch of a DataLoader and an
optimizer's update. Every round starts both kinds of run anew, in an order that changes, so that the one without the
record has neither listeners nor the watching thread. What counts is the difference of the medians of a round; given are
its median over the rounds and its quartiles, and what the first table predicts for as many calls.
"""  # noqa: D400

import argparse
import statistics
import tempfile
import time
from collections.abc import Callable, Iterable
from pathlib import Path

import torch
import torch.distributed as dist

OPERATIONS = 10
STEPS_MS = (5, 50, 500)


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
    from hocket.profile import _watch, mark_step, phase, watch
    from hocket.profile._links import links_used

    with tempfile.TemporaryDirectory() as folder:
        watch(0, 2, folder)
        active = _watch._watch
        assert active is not None
        active._over.set()  # its thread is measured by calling what it calls
        record = active.record
        ops = [
            OperationRecord(
                "0", n, "all_reduce", 4096, "float32", 2, "shm-direct", False, 1.0, 1.0, 1.1, 1.2, None, 1.0
            )
            for n in range(1, 70_001)
        ]

        def in_phase(_: object) -> None:
            with phase("data"):
                pass

        def update(_: object) -> None:
            active._before_update()
            active._after_update()

        def look(_: object) -> None:
            active._sample()
            active._look()

        return {
            "operation begins": best_us(record.operation_started, ops),  # type: ignore[arg-type]
            "operation ends": best_us(record.operation_finished, ops),  # type: ignore[arg-type]
            "operation is waited for": best_us(lambda op: record.operation_waited(op, 1.0, 1.1), ops),  # type: ignore[arg-type]
            "step": best_us(lambda _: mark_step(1.0, 1.1), ops),
            "update of an optimizer": best_us(update, ops),
            "batch of a loader, or a phase": best_us(in_phase, ops),
            "look of the thread, four times a second": best_us(look, range(700)),
            "look at TCP connections, once a second": best_us(lambda _: links_used(), range(700)),
        }


def expected_us(cost_us: dict[str, float], step_s: float) -> float:
    """Return the microseconds that the record should cost in a step."""
    operation_us = sum(us for name, us in cost_us.items() if name.startswith("operation"))
    once_us = cost_us["step"] + cost_us["update of an optimizer"] + cost_us["batch of a loader, or a phase"]
    thread_us = 4 * cost_us["look of the thread, four times a second"]
    thread_us += cost_us["look at TCP connections, once a second"]
    return OPERATIONS * operation_us + once_us + thread_us * step_s


def work(products: int) -> None:
    """Do a fixed amount of computation."""
    value = torch.eye(64)
    for _ in range(products):
        value = value @ value


def train(products: int, steps: int) -> list[float]:
    """Return the seconds of each step."""
    values = [torch.ones(1000) for _ in range(OPERATIONS)]
    weight = torch.nn.Parameter(torch.ones(8))
    weight.grad = torch.ones(8)
    optimizer = torch.optim.SGD([weight], lr=0.1)
    loader = iter(torch.utils.data.DataLoader([torch.ones(4)] * (steps + 3), batch_size=1))  # type: ignore[arg-type]
    taken = []
    for step in range(steps + 3):
        begin_s = time.perf_counter()
        next(loader)
        work(products)
        for value in values:
            dist.all_reduce(value)
        optimizer.step()
        if step >= 3:
            taken.append(time.perf_counter() - begin_s)
    return taken


def interleaved(rounds: int, cost_us: dict[str, float]) -> None:
    """Print the table of steps with and without the record."""
    from hocket.testing import run_ranks

    torch.set_num_threads(1)
    work(2000)
    begin_s = time.process_time()
    work(20_000)
    product_s = (time.process_time() - begin_s) / 20_000
    print("\n| step | without | with | difference (quartiles) | by the calls |\n|---|---|---|---|---|")
    for step_ms in STEPS_MS:
        products, steps = int(step_ms * 1e-3 / product_s), max(4, min(400, 4000 // step_ms))
        taken: dict[bool, list[float]] = {False: [], True: []}
        for number in range(rounds):
            for recorded in (False, True) if number % 2 else (True, False):
                with tempfile.TemporaryDirectory() as folder:
                    env = {"HOCKET_RECORD": str(Path(folder, "record")) if recorded else "off"}
                    found = run_ranks(train, 2, products, steps, env=env, timeout_s=300)
                taken[recorded].append(statistics.median(found[0]))
        shares = sorted(b / a - 1 for a, b in zip(taken[False], taken[True], strict=True))
        low, middle, high = (shares[len(shares) * n // 4] for n in (1, 2, 3))
        without_s, with_s = statistics.median(taken[False]), statistics.median(taken[True])
        share = expected_us(cost_us, step_ms * 1e-3) / step_ms / 1e3
        print(
            f"| {step_ms} ms | {without_s * 1e3:.3f} ms | {with_s * 1e3:.3f} ms | "
            f"{middle:+.2%} ({low:+.2%} to {high:+.2%}) | {share:+.2%} |",
            flush=True,
        )


def main() -> None:
    """Read the command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=12)
    parser.add_argument("--calls", action="store_true", help="measure the calls only")
    given = parser.parse_args()
    from hocket.testing import preload

    preload("hocket.profile", "benchmarks.record_cost")
    cost_us = calls()
    print("| call | us of CPU time |\n|---|---|")
    for name, us in cost_us.items():
        print(f"| {name} | {us:.2f} |")
    for step_ms in STEPS_MS if given.calls else ():
        us = expected_us(cost_us, step_ms * 1e-3)
        print(f"a step of {step_ms} ms with {OPERATIONS} operations: {us:.0f} us, {us / step_ms / 1e3:.2%}")
    if not given.calls:
        interleaved(given.rounds, cost_us)


if __name__ == "__main__":
    main()
