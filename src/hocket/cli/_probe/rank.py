"""One rank of a probe: measures itself, then takes part in messages between pairs; rank 0 gathers everything."""

import json
import os
import socket
import sys
import time
from itertools import combinations
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from hocket import _limits
from hocket.comm.torch_adapter import FileStore

_ALL_PAIRS = 16  # ranks up to which every pair is measured; beyond, each with its next and with the far half
_COPY = 1 << 26
_ORDER = 1024


def pairs_of(world: int) -> list[tuple[int, int]]:
    """Return the pairs to measure: all of a small world; of a large one a ring and its diagonals."""
    if world <= _ALL_PAIRS:
        return list(combinations(range(world), 2))
    chosen = {(rank, (rank + step) % world) for rank in range(world) for step in (1, world // 2)}
    return sorted({(min(pair), max(pair)) for pair in chosen})


def own_figures(rounds: int, device: torch.device) -> dict[str, Any]:
    """Return this rank's host, memory and arithmetic, the best of several rounds each."""
    source = torch.ones(_COPY, dtype=torch.uint8, device=device)
    target = torch.empty_like(source)
    square = torch.ones(_ORDER, _ORDER, device=device)
    copy_s = min(_timed(lambda: target.copy_(source), device) for _ in range(rounds))
    product_s = min(_timed(lambda: torch.mm(square, square), device) for _ in range(rounds))
    if device.type == "cuda":
        about = torch.cuda.get_device_properties(device)
        memory, nbytes = str(about.uuid), about.total_memory
    else:
        memory, nbytes = socket.gethostname(), _limits.memory()[0]
    return {
        "host": socket.gethostname(),
        "memory": memory,
        "memory_Bps": 2 * _COPY / copy_s,  # every byte is read and written
        "memory_nbytes": nbytes,
        "flops": 2 * _ORDER**3 / product_s,
    }


def _timed(work: Any, device: torch.device) -> float:
    begin = time.perf_counter()
    work()
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    return time.perf_counter() - begin


def ping(peer: int, first: bool, nbytes: int, rounds: int, device: torch.device) -> float:
    """One-way seconds to a peer: half of the median there-and-back."""
    buffer = torch.zeros(nbytes, dtype=torch.uint8, device=device)
    samples = []
    for _ in range(rounds + 2):  # two that do not count
        begin = time.perf_counter()
        if first:
            dist.send(buffer, peer)
            dist.recv(buffer, peer)
        else:
            dist.recv(buffer, peer)
            dist.send(buffer, peer)
        if device.type == "cuda":
            torch.cuda.synchronize(device)
        samples.append(time.perf_counter() - begin)
    kept = sorted(samples[2:])
    return kept[len(kept) // 2] / 2


def measure(sizes: list[int], rounds: int, device: torch.device) -> dict[str, Any] | None:
    """Measure everything, on every rank of the default group; return the result on rank 0, elsewhere None."""
    rank, world = dist.get_rank(), dist.get_world_size()
    everyone: list[Any] = [None] * world
    # One rank of a host after the other, so that each has the host to itself.
    mine: dict[str, Any] = {}
    for turn in range(world):
        if turn == rank:
            mine = own_figures(rounds, device)
        dist.barrier()
    dist.all_gather_object(everyone, mine)
    # The ranks of a host share its memory, and those of a GPU the GPU's.
    memories = [one.pop("memory") for one in everyone]
    for one, memory in zip(everyone, memories, strict=True):
        one["memory_nbytes"] //= memories.count(memory)
    found: list[dict[str, Any]] = []
    for a, b in pairs_of(world):
        times: dict[int, float] = {}
        if rank in (a, b):
            times = {size: ping(b if rank == a else a, rank == a, size, rounds, device) for size in sizes}
        dist.barrier()
        gathered: list[Any] = [None] * world
        dist.all_gather_object(gathered, times)
        found.append({"ranks": [a, b], "seconds": {str(size): gathered[a][size] for size in sizes}})
    return {"ranks": everyone, "pairs": found, "device": str(device)} if rank == 0 else None


def main() -> None:
    """Run a rank of `hocket cluster probe` on one host: the spec says where to meet and where to write."""
    spec = json.loads(Path(sys.argv[1]).read_text())
    rank = int(os.environ["RANK"])
    torch.set_num_threads(int(os.environ["OMP_NUM_THREADS"]))
    dist.init_process_group("hocket", store=FileStore(spec["store"], spec["n"]), rank=rank, world_size=spec["n"])
    result = measure(spec["sizes"], spec["rounds"], torch.device("cpu"))
    if result is not None:
        Path(spec["result"]).write_text(json.dumps(result))
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
