"""Ranks are killed at random instants of `Trainer.save`, and bytes of checkpoints damaged: what `load` finds then.

    python -m benchmarks.checkpoint_kills --kills 500 --damages 64 --seed 1

In each round a world of ranks loads a checkpoint in which every number of weights and optimizer state is the
round's, and saves it over that of the round before. The world has timed such a save just before, and a timer of the
kernel ends one rank, or all, at an instant drawn evenly from its length: as with SIGKILL no code of the process runs
any more. Another process loads what is there. It must be the checkpoint of the round before or of this one, whole; this
one, if `save` returned on any rank. Every tenth round begins in an empty folder. The worlds, with their plans, take
turns. Rounds go on until in so many of them ranks were killed.

Then one byte, or 64 in a row, or the end of a file of each plan's checkpoint is damaged, and all its ranks load it:
they must raise the same CheckpointError and overwrite nothing, or have the numbers that were saved.
"""

from __future__ import annotations

import argparse
import os
import random
import signal
import sys
import tempfile
import time
from collections import Counter
from pathlib import Path
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import nn

import hocket
from hocket.parallel import CheckpointError
from hocket.planner import Plan
from hocket.testing import preload, run_ranks

WIDTH, LAYERS = 96, 8
PLANS = {
    "2 data": (2, Plan()),
    "2 data, optimizer": (2, Plan(shard="optimizer")),
    "2 data, parameters": (2, Plan(shard="parameters")),
    "2 tensor": (2, Plan(tensor_parallel_degree=2)),
    "2 pipeline": (2, Plan(pipeline_parallel_degree=2, micro_batches=2, split=(str(LAYERS // 2),))),
    "2 data, optimizer x 2 tensor": (4, Plan(shard="optimizer", tensor_parallel_degree=2)),
}


class Numbered:
    """A model and its optimizer, all numbers of which are one: a mixture of two checkpoints shows."""

    def __init__(self, plan: Plan | None = None) -> None:
        torch.manual_seed(0)
        self.model = nn.Sequential(*(nn.Linear(WIDTH, WIDTH) for _ in range(LAYERS)))
        self.optimizer = torch.optim.AdamW(self.model.parameters())
        rows = torch.ones(4, WIDTH)
        self.trainer = hocket.Trainer(self.model, nn.functional.mse_loss, self.optimizer, plan, sample=rows)
        self.trainer.step((rows, rows))

    def tensors(self) -> list[torch.Tensor]:
        """All that this rank holds."""
        state = [tensor for entry in self.optimizer.state.values() for tensor in entry.values()]
        held = [*self.trainer.model.parameters(), *state]
        return [(t.to_local() if hasattr(t, "to_local") else t).detach() for t in held]

    @torch.no_grad()
    def fill(self, number: int) -> None:
        """Set every number."""
        for tensor in self.tensors():
            tensor.fill_(number)
        self.trainer.steps = number

    def numbers(self) -> set[float]:
        """Return the numbers that it consists of."""
        return {self.trainer.steps, *(float(x) for tensor in self.tensors() for x in tensor.unique())}

    def loaded(self, path: Path) -> int:
        """Load a checkpoint and return its number; 0 if there is none.

        Raises:
            CheckpointError: It is damaged; nothing has been overwritten.
        """
        self.fill(-1)
        try:
            self.trainer.load(path)
        except CheckpointError as error:
            if self.numbers() != {-1}:
                raise AssertionError(f"a load that raised {error} has overwritten the model") from error
            if "there is no checkpoint" not in str(error):
                raise
            return 0
        found = self.numbers()
        assert len(found) == 1, f"the checkpoint is a mixture of {sorted(found)}"
        return int(found.pop())


class Ended(NamedTuple):
    """How `save` ended on a rank that lives."""

    error: str  # what it raised; "" for nothing
    after_s: float
    save_s: float  # of the same save, a moment before


def save_and_die(name: str, source: str, path: str, at: float, victims: list[int]) -> Ended:
    """Save what a checkpoint holds to a path, on every rank; victims die when that part of a save's time is over."""
    numbered = Numbered(PLANS[name][1])
    numbered.trainer.load(source)
    signal.signal(signal.SIGALRM, signal.SIG_DFL)
    times_s = []
    for _ in range(4):  # the first makes the folder, and imports
        dist.barrier()
        begun_s = time.perf_counter()
        numbered.trainer.save(f"{source}-timed")
        times_s.append(time.perf_counter() - begun_s)
    dist.barrier()
    save_s, begun_s, error = sorted(times_s[1:])[1], time.perf_counter(), ""
    if int(os.environ["RANK"]) in victims:
        signal.setitimer(signal.ITIMER_REAL, max(at * save_s, 1e-6))
    try:
        numbered.trainer.save(path)
    except Exception as raised:
        error = f"{type(raised).__name__}: {raised}"
    ended = Ended(error, time.perf_counter() - begun_s, save_s)
    signal.setitimer(signal.ITIMER_REAL, 0)
    return ended


def load_damaged(name: str, path: str, damages: int, seed: int) -> Counter[str]:
    """Damage a checkpoint and load it, so many times, on every rank; counts what was found."""
    numbered, rank, found = Numbered(PLANS[name][1]), int(os.environ["RANK"]), Counter[str]()
    (right,), draw = numbered.numbers() if numbered.loaded(Path(path)) else {0}, random.Random(seed)
    files = sorted(Path(path).iterdir())
    for i in range(damages):
        file = files[i % len(files)]
        content = file.read_bytes()
        at, length = draw.randrange(len(content)), 1 if i % 2 else 64
        flips = bytes(draw.randrange(1, 256) for _ in content[at : at + length])
        damaged = (
            content[:at] + bytes(a ^ b for a, b in zip(content[at:], flips, strict=False)) + content[at + length :]
        )
        if i % 16 == 15:
            damaged = content[:at]
        dist.barrier()
        if rank == 0:
            file.write_bytes(damaged)
        dist.barrier()
        try:
            heard = f"number {numbered.loaded(Path(path))}"
        except CheckpointError as error:
            heard = str(error)
        all_heard: list[Any] = [None] * dist.get_world_size()
        dist.all_gather_object(all_heard, heard)
        dist.barrier()
        if rank == 0:
            file.write_bytes(content)
        assert len(set(all_heard)) == 1, f"{file.name} at {at}: ranks hear {all_heard}"
        assert not heard.startswith("number") or heard == f"number {right}", f"{file.name} at {at}: {heard} for {right}"
        found["right" if heard.startswith("number") else "refused"] += 1
    return found


class Kills:
    """The rounds in which ranks are killed.

    Args:
        folder: Where checkpoints lie.
        seed: Of all that is drawn.
        plans: Their names; they take turns.
    """

    def __init__(self, folder: Path, seed: int, plans: list[str]) -> None:
        self.plans, self.folder, self.reader, self.draw = plans, folder, Numbered(), random.Random(seed)
        self.killed, self.rounds = 0, 0
        self.found = {name: Counter[str]() for name in plans}
        self.wrong: list[str] = []
        self.late_s = 0.0  # from the instant of a death to the error of a rank that lives, at most

    def run(self, kills: int) -> None:
        """Go on until so many saves have ended by a kill."""
        last, names, source = 0, self.plans, self.folder / "source"
        while self.killed < kills:
            self.rounds = number = self.rounds + 1
            path, name = self.folder / f"ck{number // 10}", names[number % len(names)]
            if number % 10 == 0:
                last = 0
            elif last == 0:
                last = number + 1_000_000
                self.reader.fill(last)
                self.reader.trainer.save(path)
            kind, results, at = self._world(name, source, number, path)
            self.killed += None in results
            saved = any(ended and not ended.error for ended in results)
            late = (one.after_s - at * one.save_s for one in results if one and one.error)
            self.late_s = max([self.late_s, *late])
            try:
                found = self.reader.loaded(path)
                right = found == number or (found == last and not saved)
                said = "" if right else f"found {found}, wanted {number}{'' if saved else f' or {last}'}"
            except (CheckpointError, AssertionError) as error:
                found, said = 0, str(error)
            if said:
                self.wrong.append(f"round {number}, {name}, {kind}, at {at:.0%} of a save: {said}")
                print(self.wrong[-1], flush=True)
            which = "this" if found == number else "before" if found else "none yet"
            self.found[name].update([kind, f"fifth {int(5 * at)}"] if None in results else ["ended first"])
            self.found[name][which] += 1
            last = found

    def _world(self, name: str, source: Path, number: int, path: Path) -> tuple[str, list[Any], float]:
        """Return who was to die, what each rank says, and after which part of the time of `save` it was to die."""
        self.reader.fill(number)
        self.reader.trainer.save(source)
        ranks, at = PLANS[name][0], self.draw.random()
        victims = list(range(ranks)) if self.draw.random() < 0.5 else [self.draw.randrange(ranks)]
        results = run_ranks(
            save_and_die, ranks, name, str(source), str(path), at, victims, timeout_s=120, expect_death=range(ranks)
        )
        return "all" if len(victims) == ranks else "one", results, at


def damage(folder: Path, each: int, seed: int, plans: list[str]) -> Counter[str]:
    """Damage a checkpoint of each plan."""
    found, numbered = Counter[str](), Numbered()
    for number, name in enumerate(plans, 1):
        ranks = PLANS[name][0]
        numbered.fill(number)
        numbered.trainer.save(folder / "numbered")
        path = folder / f"damaged{number}"
        run_ranks(save_and_die, ranks, name, str(folder / "numbered"), str(path), 1.0, [], timeout_s=120)
        found += run_ranks(load_damaged, ranks, name, str(path), each, seed + number, timeout_s=600)[0]
    return found


def main() -> int:
    """Runs and prints."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--kills", type=int, default=500)
    parser.add_argument("--damages", type=int, default=64, help="for each plan")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--plans", default=";".join(PLANS), help="some of them, with ; between")
    parser.add_argument("--folder", help="where checkpoints are written; a temporary folder if not given")
    a = parser.parse_args()
    torch.set_num_threads(1)
    preload("hocket.parallel", "hocket.parallel.state._dcp", "torch.distributed.tensor", "torch.distributed.fsdp")
    begun_s = time.perf_counter()
    with tempfile.TemporaryDirectory(dir=a.folder) as folder:
        kills = Kills(Path(folder), a.seed, a.plans.split(";"))
        kills.run(a.kills)
        damaged = damage(Path(folder), a.damages, a.seed, a.plans.split(";")) if a.damages else Counter[str]()
    fifths = [f"fifth {n}" for n in range(5)]
    print(
        "| plan | one killed | all killed | in each fifth of a save | ended first | found: before | this | none yet |"
    )
    print("|---|---|---|---|---|---|---|---|")
    for name, counts in kills.found.items():
        one, many, first, before, this, none = (
            counts[key] for key in ("one", "all", "ended first", "before", "this", "none yet")
        )
        spread = ", ".join(str(counts[key]) for key in fifths)
        print(f"| {name} | {one} | {many} | {spread} | {first} | {before} | {this} | {none} |")
    print(f"\n{kills.killed} kills in {kills.rounds} rounds, seed {a.seed}: {len(kills.wrong)} lost or wrong.", end=" ")
    print(f"Ranks that live raise an error {kills.late_s:.2f} s after a death at most.")
    refused, right = damaged["refused"], damaged["right"]
    print(f"{damaged.total()} damages: {refused} refused, {right} with the right numbers, none wrong.")
    print(f"{time.perf_counter() - begun_s:.0f} s", file=sys.stderr)
    return 1 if kills.wrong else 0


if __name__ == "__main__":
    raise SystemExit(main())
