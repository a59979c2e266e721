"""Every pair of different operations, one rank asking for the other: an error on all ranks, and a group that goes on.

    python -m benchmarks.mismatches                          # all pairs on all layouts, some minutes
    python -m benchmarks.mismatches --layout 0,0,1,1 --numel 10 --pairs 50 --seed 3

Operations differ in kind, operator, element type (of equal and of other width), shape and root, or in their order: of
two that follow each other one rank posts the second first. All ranks take turns as the odd one. What must hold on all
ranks: a CollectiveMismatchError that names the odd rank, no element of any input changed, and the next all_reduce and
all_gather are right. Layouts say on which host each rank is: ranks of this machine take names of hosts.
"""

import argparse
import itertools
import os
import random
import sys
import time
from collections.abc import Callable, Sequence

import torch
import torch.distributed as dist
from torch.distributed import ReduceOp

from hocket.comm import CollectiveMismatchError, torch_adapter
from hocket.testing import run_ranks

LAYOUTS = ("0,0", "0,0,0", "0,1", "0,1,2", "0,0,1,1", "0,1,0,1", "0,0,1", "0,0,0,1,1,1")
Operation = Callable[[int], Sequence[torch.Tensor]]
"""Does it with so many elements; returns what must not have changed, all ones."""


def _reduce(operator: ReduceOp, dtype: torch.dtype = torch.float32, more: int = 0, times: float = 1.0) -> Operation:
    def act(numel: int) -> Sequence[torch.Tensor]:
        data = torch.ones(int(numel * times) + more, dtype=dtype)
        attempt(lambda: dist.all_reduce(data, operator))
        return [data]

    return act


def _rooted(
    kind: str, root: int, dtype: torch.dtype = torch.float32, more: int = 0, op: ReduceOp = ReduceOp.SUM
) -> Operation:
    def act(numel: int) -> Sequence[torch.Tensor]:
        n, here = dist.get_world_size(), dist.get_rank() == root
        data, parts = torch.ones(numel + more, dtype=dtype), [torch.ones(numel + more, dtype=dtype) for _ in range(n)]
        if kind == "broadcast":
            attempt(lambda: dist.broadcast(data, root))
        elif kind == "reduce":
            attempt(lambda: dist.reduce(data, root, op))
        elif kind == "gather":
            attempt(lambda: dist.gather(data, parts if here else None, root))
        else:
            attempt(lambda: dist.scatter(data, parts if here else None, root))
        return [data, *parts]

    return act


def _spread(kind: str, dtype: torch.dtype = torch.float32, more: int = 0, op: ReduceOp = ReduceOp.SUM) -> Operation:
    def act(numel: int) -> Sequence[torch.Tensor]:
        n = dist.get_world_size()
        one, whole = torch.ones(numel + more, dtype=dtype), torch.ones((numel + more) * n, dtype=dtype)
        if kind == "all_gather":
            attempt(lambda: torch_adapter.all_gather_single(whole, one))
        elif kind == "reduce_scatter":
            attempt(lambda: torch_adapter.reduce_scatter_single(one, whole, op))
        else:
            other = torch.ones_like(whole)
            attempt(lambda: dist.all_to_all_single(other, whole))
            return [one, whole, other]
        return [one, whole]

    return act


def _barrier(numel: int) -> Sequence[torch.Tensor]:
    attempt(dist.barrier)
    return []


_errors: list[str] = []


def attempt(call: Callable[[], object]) -> None:
    """Call it, and keep the text of a mismatch."""
    try:
        call()
        _errors.append("")
    except CollectiveMismatchError as error:
        _errors.append(str(error))


OPERATIONS: dict[str, Operation] = {
    "all_reduce": _reduce(ReduceOp.SUM),
    "all_reduce of max": _reduce(ReduceOp.MAX),
    "all_reduce of mean": _reduce(ReduceOp.AVG),
    "all_reduce of product": _reduce(ReduceOp.PRODUCT),
    "all_reduce of float64": _reduce(ReduceOp.SUM, torch.float64),
    "all_reduce of int32": _reduce(ReduceOp.SUM, torch.int32),
    "all_reduce of half as many float64": _reduce(ReduceOp.SUM, torch.float64, times=0.5),
    "all_reduce of float16": _reduce(ReduceOp.SUM, torch.float16),
    "all_reduce of bfloat16": _reduce(ReduceOp.SUM, torch.bfloat16),
    "all_reduce of one more": _reduce(ReduceOp.SUM, more=1),
    "all_reduce of three times as many": _reduce(ReduceOp.SUM, times=3.0),
    "all_reduce of none": _reduce(ReduceOp.SUM, times=0.0),
    "broadcast": _rooted("broadcast", 0),
    "broadcast of 1": _rooted("broadcast", 1),
    "broadcast of one more": _rooted("broadcast", 0, more=1),
    "broadcast of int32": _rooted("broadcast", 0, torch.int32),
    "reduce": _rooted("reduce", 0),
    "reduce to 1": _rooted("reduce", 1),
    "reduce of max": _rooted("reduce", 0, op=ReduceOp.MAX),
    "reduce of int32": _rooted("reduce", 0, torch.int32),
    "reduce of one more": _rooted("reduce", 0, more=1),
    "gather": _rooted("gather", 0),
    "gather to 1": _rooted("gather", 1),
    "gather of int32": _rooted("gather", 0, torch.int32),
    "gather of one more": _rooted("gather", 0, more=1),
    "scatter": _rooted("scatter", 0),
    "scatter from 1": _rooted("scatter", 1),
    "scatter of int32": _rooted("scatter", 0, torch.int32),
    "scatter of one more": _rooted("scatter", 0, more=1),
    "all_gather": _spread("all_gather"),
    "all_gather of int32": _spread("all_gather", torch.int32),
    "all_gather of one more": _spread("all_gather", more=1),
    "reduce_scatter": _spread("reduce_scatter"),
    "reduce_scatter of max": _spread("reduce_scatter", op=ReduceOp.MAX),
    "reduce_scatter of int32": _spread("reduce_scatter", torch.int32),
    "reduce_scatter of one more": _spread("reduce_scatter", more=1),
    "all_to_all": _spread("all_to_all"),
    "all_to_all of int32": _spread("all_to_all", torch.int32),
    "all_to_all of one more": _spread("all_to_all", more=1),
    "barrier": _barrier,
}


def pairs(count: int | None, seed: int) -> list[tuple[str, str]]:
    """Return pairs of names: what most ranks post and what the odd one does; all of them, or some that are drawn."""
    found = list(itertools.permutations(OPERATIONS, 2))
    return found if count is None else random.Random(seed).sample(found, count)


def _disagree(usual: str, odd: str, odd_rank: int, numel: int, ordered: bool) -> str:
    """Play one pair; return what is wrong with it on this rank, or nothing."""
    me, n = dist.get_rank(), dist.get_world_size()
    _errors.clear()
    mine = [odd, usual] if me == odd_rank else [usual, odd]
    inputs = [tensor for name in (mine if ordered else mine[:1]) for tensor in OPERATIONS[name](numel)]
    for text in _errors:
        if not text:
            return "no error"
        if f"rank {odd_rank}" not in text:
            return f"the odd rank is not named: {text}"
    if not all(bool((tensor == 1).all()) for tensor in inputs):
        return "a tensor has changed"
    dist.all_reduce(after := torch.ones(numel))
    dist.all_gather(parts := [torch.empty(numel) for _ in range(n)], torch.full((numel,), float(me)))
    if not ((after == n).all() and all(bool((part == r).all()) for r, part in enumerate(parts))):
        return "the next operations are wrong"
    return ""


def play(layout: Sequence[int], chosen: Sequence[tuple[str, str]], numels: Sequence[int]) -> list[str]:
    """On one rank: play pairs; return those that are wrong, with the reason."""
    me = int(os.environ["RANK"])
    os.environ["HOCKET_HOST"] = f"host{layout[me]}"
    dist.init_process_group("hocket")
    wrong = []
    for number, (numel, (usual, odd)) in enumerate(itertools.product(numels, chosen)):
        odd_rank = number % len(layout)
        for ordered in (False, True):
            if why := _disagree(usual, odd, odd_rank, numel, ordered):
                which = "in the other order" if ordered else "instead"
                wrong.append(f"rank {me}: {usual} of {numel}, {odd} {which} on rank {odd_rank}: {why}")
        if len(wrong) > 20:
            break
    dist.destroy_process_group()
    return wrong


def matrix(
    layout: Sequence[int], chosen: Sequence[tuple[str, str]], numels: Sequence[int], limit_s: float
) -> list[str]:
    """Play pairs on as many ranks as the layout names; return what is wrong."""
    env = {"HOCKET_TIMEOUT": "30"}
    found = run_ranks(play, len(layout), layout, chosen, numels, backend=None, timeout_s=limit_s, env=env)
    return [line for lines in found for line in lines]


def main() -> int:
    """Play the matrix and print a table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--layout", action="append", help="hosts of the ranks, as 0,0,1,1; may be given again")
    parser.add_argument("--numel", type=int, action="append", help="elements; may be given again (10 and 70001)")
    parser.add_argument("--pairs", type=int, help="so many of the pairs, drawn")
    parser.add_argument("--seed", type=int, default=1)
    asked = parser.parse_args()
    chosen, numels = pairs(asked.pairs, asked.seed), asked.numel or [10, 70_001]
    print("| hosts of the ranks | pairs | wrong | seconds |\n|---|---:|---:|---:|")
    failed = False
    for text in asked.layout or LAYOUTS:
        begin_s = time.monotonic()
        wrong = matrix([int(host) for host in text.split(",")], chosen, numels, 3600.0)
        took_s = time.monotonic() - begin_s
        print(f"| {text} | {2 * len(chosen) * len(numels)} | {len(wrong)} | {took_s:.0f} |", flush=True)
        for line in wrong[:20]:
            print(f"    {line}", file=sys.stderr, flush=True)
        failed |= bool(wrong)
    return int(failed)


if __name__ == "__main__":
    sys.exit(main())
