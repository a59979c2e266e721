"""Fault injection: does `hocket explain` name what is wrong, and the rank, first? And what does recording cost?

    python -m benchmarks.diagnosis --seed 1 --runs 60
    python -m benchmarks.diagnosis --cost

Faults, ranks, places and sizes are drawn from the seed. A verdict is right if it is the first, of the right kind, and
names the right rank (where one rank is the cause). A hang is right if the sentence that the ranks print names kind and
rank. A healthy run is right if it has no verdict but that the machine is busy, which is true where ranks outnumber
cores.
"""  # noqa: D400

import argparse
import contextlib
import json
import random
import statistics
import sys
import tempfile
import time
from collections import defaultdict
from pathlib import Path

import torch
import torch.distributed as dist

from hocket.explain import explain
from hocket.testing import preload, run_ranks
from tests.explain import fault_programs
from tests.profile import hang_programs

STEPS = 60
FAULTS = {  # fault: kind of the verdict, whether it is of one rank, size (of a step's work) from and to
    "healthy": ("", False, 0.0, 0.0),
    "compute": ("straggler", True, 0.4, 4.0),
    "late compute": ("straggler", True, 0.6, 4.0),
    "loader": ("slow loader", True, 0.4, 4.0),
    "checkpoint": ("checkpoints", False, 4.0, 10.0),
    "garbage": ("garbage collection", True, 1.0, 2.0),
    "leak": ("memory growth", True, 2.0, 4.0),
}
HANGS = ("blocked", "busy", "stopped", "native", "message")


def score_fault(fault: str, draw: random.Random) -> tuple[bool, str]:
    """Run one fault; return whether the first verdict is right, and what was said."""
    kind, of_one, low, high = FAULTS[fault]
    world = draw.randint(2, 5)
    rank, size = draw.randrange(world), draw.uniform(low, high)
    steps = 250 if fault == "leak" else STEPS
    with tempfile.TemporaryDirectory() as folder:
        run_ranks(
            fault_programs.train, world, fault, rank, steps, size, env={"HOCKET_RECORD": folder}, timeout_s=240
        )  # fmt: skip
        found = explain(folder)
    told = [one for one in found.verdicts if one.kind != "busy machine"]
    first = told[0] if told else None
    said = "nothing" if first is None else f"{first.kind} {first.ranks}"
    if fault == "healthy":
        return first is None, said
    right = first is not None and first.kind == kind and first.ranks == ((rank,) if of_one else ())
    return right, f"rank {rank} of {world}, size {size:.2f}: {said}"


def score_hang(how: str, draw: random.Random) -> tuple[bool, str, float]:
    """Run one hang; return whether the sentence is right, what was said, and after how many seconds of waiting."""
    world = draw.randint(2, 5)
    with tempfile.TemporaryDirectory() as folder:
        run_ranks(
            hang_programs.keep, world, how, folder, env={"HOCKET_RECORD": folder, "HOCKET_HANG_S": "6"}, timeout_s=240
        )  # fmt: skip
        file = Path(folder) / "hangs.jsonl"
        told = [json.loads(line) for line in file.read_text().splitlines()] if file.exists() else []
    if not told:
        return False, "nothing", float("inf")
    kind = "blocked" if how == "message" else how
    return told[0]["kind"] == kind and told[0]["ranks"] == [1], told[0]["sentence"], told[0]["waited_s"]


def scores(seed: int, runs: int) -> None:
    """Print a table of how many runs were told right."""
    draw = random.Random(seed)
    kinds = [*FAULTS, *HANGS]
    right: defaultdict[str, list[bool]] = defaultdict(list)
    waited_s: list[float] = []
    for number in range(runs):
        fault = kinds[number % len(kinds)]
        try:
            if fault in HANGS:
                good, said, after_s = score_hang(fault, draw)
                waited_s.append(after_s)
            else:
                good, said = score_fault(fault, draw)
        except Exception as error:
            good, said = False, repr(error)[:200]
        right[fault].append(good)
        if not good:
            print(f"  wrong: {fault}: {said}", file=sys.stderr, flush=True)
    print("| fault | runs | right |\n|---|---|---|")
    for fault in kinds:
        if right[fault]:
            print(f"| {fault} | {len(right[fault])} | {sum(right[fault])} |")
    whole = [good for some in right.values() for good in some]
    print(f"| all | {len(whole)} | {sum(whole)} ({sum(whole) / len(whole):.1%}) |")
    if waited_s:
        middle_s = statistics.median(waited_s)
        print(f"\nseconds of waiting until the sentence: median {middle_s:.1f}, worst {max(waited_s):.1f}")


def cost_of(step_s: float, blocks: int, steps: int) -> tuple[float, float]:
    """Return on a rank the median step without and with the record, in blocks that take turns."""
    from hocket import comm
    from hocket.profile import _watch

    watch = _watch._watch
    assert watch is not None
    values = [torch.ones(1000) for _ in range(10)]
    taken: dict[bool, list[float]] = {False: [], True: []}
    for block in range(2 * blocks):
        recorded = block % 2 == 1
        stop = comm.observe(watch.record) if recorded else None
        comm.follow(watch.record if recorded else None)
        if block == 0:
            watch._undo[0]()
        dist.barrier()
        for _ in range(steps):
            begin_s = time.perf_counter()
            while time.perf_counter() - begin_s < step_s:
                pass
            for value in values:
                dist.all_reduce(value)
            if recorded:
                watch.step(begin_s, time.perf_counter())
            taken[recorded].append(time.perf_counter() - begin_s)
        if stop is not None:
            stop()
    return statistics.median(taken[False]), statistics.median(taken[True])


def cost() -> None:
    """Print what recording costs for steps of 5, 50 and 500 ms with ten operations each."""
    print("| step | without | with | difference |\n|---|---|---|---|")
    for step_s, blocks, steps in ((0.005, 10, 100), (0.05, 6, 20), (0.5, 4, 5)):
        with tempfile.TemporaryDirectory() as folder:
            (without, with_), *_ = run_ranks(
                cost_of, 2, step_s, blocks, steps, env={"HOCKET_RECORD": folder}, timeout_s=300
            )  # fmt: skip
        print(f"| {step_s * 1e3:g} ms | {without * 1e3:.3f} ms | {with_ * 1e3:.3f} ms | {with_ / without - 1:+.2%} |")


def main() -> None:
    """Read the command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--runs", type=int, default=60)
    parser.add_argument("--cost", action="store_true")
    given = parser.parse_args()
    preload("hocket.profile", "tests.explain.fault_programs", "tests.profile.hang_programs")
    with contextlib.suppress(KeyboardInterrupt):
        if given.cost:
            cost()
        else:
            scores(given.seed, given.runs)


if __name__ == "__main__":
    main()
