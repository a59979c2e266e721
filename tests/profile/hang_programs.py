"""Ranks of which one keeps the others, until somebody has said so."""

import ctypes
import os
import signal
import threading
import time
from pathlib import Path

import torch
import torch.distributed as dist

from hocket.testing import deadline


def told(folder: Path) -> bool:
    try:
        return (folder / "hangs.jsonl").stat().st_size > 0
    except FileNotFoundError:
        return False


def until_told(folder: Path) -> None:
    end_s = time.monotonic() + deadline(30)
    while not told(folder) and time.monotonic() < end_s:
        time.sleep(0.05)


def compute_until_told(folder: Path) -> None:
    end_s = time.monotonic() + deadline(30)
    while not told(folder) and time.monotonic() < end_s:
        sum(range(1000))


def read_in_compiled_code(folder: Path) -> None:
    pipe = os.open(folder / "pipe", os.O_RDWR)
    time.sleep(0.5)  # what is told is the last place that was seen before, and this program may be quicker than a look
    ctypes.PyDLL(None).read(pipe, ctypes.create_string_buffer(1), 1)  # a PyDLL keeps the interpreter's lock


def go_on_when_told(folder: Path, pid: int) -> None:
    until_told(folder)
    os.kill(pid, signal.SIGCONT)
    with open(folder / "pipe", "wb+", buffering=0) as pipe:
        pipe.write(b"x")


def ask_after(seconds: float) -> None:
    """Let this rank ask why it waits; before, ranks wait for others that take longer to start."""
    dist.barrier()
    os.environ["HOCKET_HANG_S"] = str(seconds)


def keep(how: str, path: str) -> None:
    """One after the other, so that rank 1 keeps the others as `how` says; then all go on to the end."""
    folder, rank = Path(path), dist.get_rank()
    value = torch.ones(10)
    pids: list[object] = [None] * dist.get_world_size()
    dist.all_gather_object(pids, os.getpid())
    if rank == 0:
        os.mkfifo(folder / "pipe")
        threading.Thread(target=go_on_when_told, args=(folder, pids[1]), daemon=True).start()
    for _ in range(3):
        dist.all_reduce(value)
    ask_after(3 if how == "native" else 1)
    if rank == 1:
        {
            "blocked": until_told,
            "busy": compute_until_told,
            "native": read_in_compiled_code,
            "stopped": lambda _: os.kill(os.getpid(), signal.SIGSTOP),
            "message": until_told,
        }[how](folder)
    if how == "message":
        if rank == 1:
            dist.send(value, 0)
        elif rank == 0:
            dist.recv(value, 1)
    dist.all_reduce(value)


def one_by_one(path: str) -> None:
    """Rank 2 keeps the others, of which rank 0 comes later than rank 1: so that it asks when that one has spoken."""
    rank, seconds = dist.get_rank(), min(deadline(1.0), 3.0)
    ask_after(seconds)
    if rank == 0:
        time.sleep(seconds / 2)
    if rank == 2:
        until_told(Path(path))
        time.sleep(1.5 * seconds)  # rank 0 asks meanwhile
    dist.barrier()


def circle(path: str) -> None:
    """Ranks 0 and 1 call two groups' operations in different orders, until somebody says so."""
    one, other = dist.new_group([0, 1], group_desc="one"), dist.new_group([0, 1], group_desc="other")
    ask_after(1)
    rank, value = dist.get_rank(), torch.ones(10)
    work = dist.all_reduce(value, group=one if rank else other, async_op=True)
    until_told(Path(path))
    dist.all_reduce(value, group=other if rank else one)
    work.wait()


def disagree(how: str, rank_at_fault: int) -> None:
    """Reduce the gradients of four layers a step; in the third, one rank leaves one out, swaps two, or has another."""
    mine = dist.get_rank() == rank_at_fault
    for step in range(4):
        sizes = [10, 20, 30, 40]
        if mine and step == 2:
            sizes = {"dropped": [10, 30, 40], "reordered": [20, 10, 30, 40], "shape": [10, 25, 30, 40]}[how]
        for size in sizes:
            dist.all_reduce(torch.ones(size))
