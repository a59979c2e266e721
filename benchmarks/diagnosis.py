"""Fault injection: does `hocket explain` name what is wrong, and the rank, host or link, first?

    python -m benchmarks.diagnosis --seed 1 --runs 60
    python -m benchmarks.diagnosis --seed 1 --minutes 15 --only healthy,leak --keep /tmp/kept

Faults, ranks, places and sizes are drawn from the seed; kinds take turns, a third of the runs are healthy. Those called
"... (fabric)" run under `hocket run --fabric` (as root), a rank on each host of a star of 100 Mbit/s.

A verdict is right if it is the first, of the right kind, and names the right rank or host (where one is the cause). A
hang is right if the sentence that the ranks print names kind and rank; a collective that one rank leaves out, swaps, or
calls with another shape, if the error names that rank alone. A healthy run is right if it has no verdict but that the
machine is busy, which is true where ranks outnumber cores.
"""  # noqa: D400

import argparse
import contextlib
import dataclasses
import json
import math
import os
import random
import re
import statistics
import subprocess
import sys
import tempfile
import time
from collections import defaultdict
from collections.abc import Iterator
from pathlib import Path

import torch.distributed as dist

sys.path.insert(0, str(Path(__file__).parents[1]))  # as a script of `hocket run`

from tests.explain import fault_programs
from tests.profile import hang_programs

STEPS = 60
LONGER = {"leak": 250, "leak all": 250, "core": 150}
FABRIC = " (fabric)"
FAULTS = {  # fault: kind of the verdict, whether it is of one rank, size (of a step's work) from and to
    "healthy": ("", False, 0.0, 0.0),
    "compute": ("straggler", True, 0.4, 4.0),
    "late compute": ("straggler", True, 0.6, 4.0),
    "core": ("straggler", True, 5.0, 8.0),
    "loader": ("slow loader", True, 0.4, 4.0),
    "checkpoint": ("checkpoints", False, 4.0, 10.0),
    "garbage": ("garbage collection", True, 1.0, 2.0),
    "leak": ("memory growth", True, 2.0, 4.0),
    "leak all": ("memory growth", False, 1.0, 2.0),
    "cut": ("unbalanced stages", True, 0.0, 0.0),
    "healthy (fabric)": ("", False, 0.0, 0.0),
    "compute (fabric)": ("straggler", True, 0.4, 4.0),
    "link (fabric)": ("slow link", True, 3.0, 8.0),
    "dead (fabric)": ("died", True, 0.0, 0.0),
}
HANGS = ("blocked", "busy", "stopped", "native", "message")
DISAGREEMENTS = ("dropped", "reordered", "shape")
KINDS = (*FAULTS, *HANGS, *DISAGREEMENTS)


def order(only: list[str]) -> Iterator[str]:
    """Yield kinds by turns for ever, healthy ones after every two others."""
    faulty = [kind for kind in only if not kind.startswith("healthy")]
    healthy = [kind for kind in only if kind.startswith("healthy")]
    at = 0
    while True:
        for place, kind in enumerate(faulty or healthy):
            yield kind
            if faulty and healthy and place % 2:
                yield healthy[at % len(healthy)]
                at += 1


def on_fabric(
    world: int, fault: str, rank: int, size: float, folder: str, numel: int, steps: int = STEPS, every: int = 0
) -> None:
    """Run the program with a rank on each of `world` hosts, the links of one of which may be slow."""
    from hocket.cluster import load
    from hocket.fabric import Fabric

    cluster = load(f"star:hosts={world},bandwidth=100Mbit/s")
    if fault == "link":
        node = cluster.node_names.index(f"host{rank}")
        mine = (cluster.link_tail == node) | (cluster.link_head == node)
        capacity_Bps = cluster.capacity_Bps.copy()
        capacity_Bps[mine] /= size
        cluster = dataclasses.replace(cluster, capacity_Bps=capacity_Bps)
    words = [__file__, "--program", fault, str(rank), str(steps), str(size), str(numel), str(every)]
    with Fabric(cluster) as fabric:
        done = subprocess.run(
            [sys.executable, "-m", "hocket", "run", "--fabric", fabric.name, "-n", str(world), "--no-run-dir", *words],
            env={**os.environ, "HOCKET_RECORD": folder}, capture_output=True, text=True, timeout=240, check=False,
        )  # fmt: skip
    if done.returncode and fault != "dead":
        raise RuntimeError(done.stderr[-300:])


def score_fault(fault: str, draw: random.Random, folder: str) -> tuple[bool, str]:
    """Run one fault; return whether the first verdict is right, and what was said."""
    from hocket.explain import explain
    from hocket.testing import run_ranks

    kind, of_one, low, high = FAULTS[fault]
    fabric, name = fault.endswith(FABRIC), fault.removesuffix(FABRIC)
    world = 2 if name in ("core", "cut") else draw.randint(3, 5) if fabric or name == "leak all" else draw.randint(2, 8)
    rank, size = draw.randrange(world), draw.uniform(low, high)
    if fabric:
        on_fabric(world, name, rank, size, folder, numel=60_000 if name == "link" else 1)
    else:
        program, words = fault_programs.train, (name, rank, LONGER.get(name, STEPS), size)
        if name == "cut":  # one layer against seven, and the other way round
            program, words = fault_programs.pipeline, ((("7", "1")[rank],), 30)  # type: ignore[assignment]
        run_ranks(program, world, *words, env={"HOCKET_RECORD": folder}, timeout_s=240)
    told = [one for one in explain(folder).verdicts if one.kind != "busy machine"]
    first = told[0] if told else None
    said = "nothing" if first is None else f"{first.kind} {first.ranks} ({first.confidence}): {first.sentence}"
    said = f"rank {rank} of {world}, size {size:.2f}, load {os.getloadavg()[0]:.0f}: {said}"
    if name == "healthy":
        return first is None, said
    if name == "core" and "take its core" not in said:
        return False, said
    return first is not None and first.kind == kind and first.ranks == ((rank,) if of_one else ()), said


def score_hang(how: str, draw: random.Random, folder: str) -> tuple[bool, str, float]:
    """Run one hang; return whether the sentence is right, what was said, and after how many seconds of waiting."""
    from hocket.testing import run_ranks

    world = draw.randint(2, 8)
    env = {"HOCKET_RECORD": folder, "HOCKET_HANG_S": "6"}
    run_ranks(hang_programs.keep, world, how, folder, env=env, timeout_s=240)
    file = Path(folder) / "hangs.jsonl"
    told = [json.loads(line) for line in file.read_text().splitlines()] if file.exists() else []
    if not told:
        return False, "nothing", math.inf
    kind = "blocked" if how == "message" else how
    return told[0]["kind"] == kind and told[0]["ranks"] == [1], told[0]["sentence"], told[0]["waited_s"]


def score_disagreement(how: str, draw: random.Random, folder: str) -> tuple[bool, str]:
    """Run one; return whether the error names the operation and, of more than two ranks, the one that is wrong."""
    from hocket.testing import RankError, run_ranks

    world = draw.randint(3, 8)
    rank = draw.randrange(world)
    try:
        run_ranks(hang_programs.disagree, world, how, rank, env={"HOCKET_RECORD": folder}, timeout_s=120)
    except RankError as error:
        said = str(error).rpartition("MismatchError: ")[2]
        number = 9 if how == "reordered" else 10
        return bool(re.search(rf"\brank {rank}: all_reduce #{number}\b", said)), f"rank {rank} of {world}: {said}"
    return False, "no error"


def scores(seed: int, runs: int, minutes: float, only: list[str], keep: str | None) -> None:
    """Print a table of how many runs were told right."""
    draw = random.Random(seed)
    right: defaultdict[str, list[bool]] = defaultdict(list)
    waited_s: list[float] = []
    begin_s, loads = time.monotonic(), []
    for number, fault in zip(range(runs), order(only), strict=False):
        if time.monotonic() - begin_s > 60 * minutes:
            break
        place = draw.randrange(2**32)
        its = random.Random(place)
        with contextlib.ExitStack() as stack:
            if keep:
                folder = f"{keep}/{seed}-{number}-{fault.replace(' ', '_')}"
                Path(folder).mkdir(parents=True, exist_ok=True)
            else:
                folder = stack.enter_context(tempfile.TemporaryDirectory())
            try:
                if fault in HANGS:
                    good, said, after_s = score_hang(fault, its, folder)
                    waited_s.append(after_s)
                elif fault in DISAGREEMENTS:
                    good, said = score_disagreement(fault, its, folder)
                else:
                    good, said = score_fault(fault, its, folder)
            except Exception as error:
                good, said = False, repr(error)[-400:]
        right[fault].append(good)
        loads.append(os.getloadavg()[0])
        print(f"{number} {'right' if good else 'WRONG'}: {fault}: {said}", file=sys.stderr, flush=True)
    print(f"seed {seed}, {time.monotonic() - begin_s:.0f} s, load {min(loads):.0f} to {max(loads):.0f}\n")
    print("| fault | runs | right |\n|---|---|---|")
    for fault in only:
        if right[fault]:
            print(f"| {fault} | {len(right[fault])} | {sum(right[fault])} |")
    for name, some in (
        ("healthy, both", [good for fault in right if fault.startswith("healthy") for good in right[fault]]),
        ("faults, all", [good for fault in right if not fault.startswith("healthy") for good in right[fault]]),
    ):
        if some:
            print(f"| {name} | {len(some)} | {sum(some)} ({sum(some) / len(some):.1%}) |")
    if waited_s:
        middle_s = statistics.median(waited_s)
        print(f"\nSeconds of waiting until a hang's sentence: median {middle_s:.1f}, worst {max(waited_s):.1f}.")


def main() -> None:
    """Read the command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--runs", type=int, default=60)
    parser.add_argument("--minutes", type=float, default=math.inf, help="begin no run after so many")
    parser.add_argument("--only", default=",".join(KINDS), help="kinds, with commas between them")
    parser.add_argument("--keep", help="folder for the records of all runs (6 MiB a rank)")
    parser.add_argument("--program", nargs=6, help=argparse.SUPPRESS)
    given = parser.parse_args()
    if given.program:
        dist.init_process_group("hocket")
        fault, rank, steps, size, numel, every = given.program
        fault_programs.train(fault, int(rank), int(steps), float(size), int(numel), int(every))
        dist.destroy_process_group()
        return
    from hocket.testing import preload

    preload("hocket.profile", "tests.explain.fault_programs", "tests.profile.hang_programs")
    only = given.only.split(",")
    if unknown := [kind for kind in only if kind not in KINDS]:
        parser.error(f"no such kinds: {unknown}; there are {', '.join(KINDS)}")
    with contextlib.suppress(KeyboardInterrupt):
        scores(given.seed, given.runs, given.minutes, only, given.keep)


if __name__ == "__main__":
    main()
