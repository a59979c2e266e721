"""Who takes part: rank, size and group, and the few collectives on Python objects that setting up needs."""

import atexit
import os
import pickle
import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from datetime import timedelta
from typing import Any, Final, TypeVar

import torch
import torch.distributed as dist

from hocket import _tasks
from hocket.comm import timeout_setting

from ._failed_group import joined, leave_failed
from ._turns import in_turn

T = TypeVar("T")
_LENGTH_NBYTES: Final = 8
_HEAD_NBYTES: Final = 248  # of a value, sent with its length: more needs a second collective, and few values are more

TIMEOUT_S: Final = 300.0
"""Time-out of a world that is joined here: long enough for rank 0 to save or evaluate something alone meanwhile."""

_joining = threading.Lock()


class DryGroup:
    """A group in a process that runs one rank's part alone, to see what it takes: collectives bring nothing."""

    def __init__(self, heard: Callable[[str, int], None]) -> None:
        self.heard = heard  # hears of each collective: its kind, and bytes of its full tensor


@dataclass(frozen=True, slots=True)
class World:
    """The ranks that train together."""

    rank: int  # this process's number in the group, from 0
    size: int  # how many ranks the group has
    group: Any  # torch's process group; None where one process trains alone

    @property
    def root(self) -> int:
        """Global rank of the group's rank 0."""
        return 0 if self.group is None else dist.get_global_rank(self.group, 0)

    @property
    def device(self) -> torch.device:
        """Where tensors must live that the group is to move and that belong to nobody: the CPU where it can."""
        if self.group is not None and dist.get_backend(self.group) == "nccl":
            return torch.device("cuda", torch.cuda.current_device())
        return torch.device("cpu")

    def all_reduce(self, tensor: torch.Tensor) -> None:
        """Add up a tensor over the ranks, in place."""
        if isinstance(self.group, DryGroup):
            self.group.heard("all_reduce", tensor.nbytes)
        else:
            dist.all_reduce(tensor, group=self.group)

    def summed(self, tensor: torch.Tensor) -> torch.Tensor:
        """Return the sum of a tensor over the ranks, in memory of its own."""
        total = tensor.clone() if tensor.is_contiguous() else tensor.contiguous()
        self.all_reduce(total)
        return total

    def all_to_all(
        self, received: torch.Tensor, sent: torch.Tensor, counts: Sequence[int], counts_sent: Sequence[int]
    ) -> None:
        """Send each rank its part of a flat tensor, and receive one part from each.

        In `received` and `sent` parts lie in the order of the ranks; `counts` and `counts_sent` are their elements.
        """
        if isinstance(self.group, DryGroup):
            # Of the vector of an all_to_all a rank keeps its own part.
            self.group.heard("all_to_all", received.zero_().nbytes * self.size // (self.size - 1))
        else:
            dist.all_to_all_single(received, sent, list(counts), list(counts_sent), group=self.group)

    def from_root(self, value: T) -> T:
        """Return the picklable `value` of the group's rank 0, on every rank."""
        if self.size == 1:
            return value
        in_turn("a collective operation")
        box = [value]
        dist.broadcast_object_list(box, src=self.root, group=self.group)
        return box[0]

    def from_all(self, value: T) -> list[T]:
        """Return the picklable `value` of every rank, by rank, on every rank."""
        if self.size == 1:
            return [value]
        mine = pickle.dumps(value)
        length = len(mine).to_bytes(_LENGTH_NBYTES, "little")
        heads = self._gathered(length + mine[:_HEAD_NBYTES], _LENGTH_NBYTES + _HEAD_NBYTES)
        sizes = [int.from_bytes(head[:_LENGTH_NBYTES], "little") for head in heads]
        rest = max(sizes) - _HEAD_NBYTES
        tails = self._gathered(mine[_HEAD_NBYTES:], rest) if rest > 0 else [b""] * self.size
        values = (head[_LENGTH_NBYTES:] + tail for head, tail in zip(heads, tails, strict=True))
        return [pickle.loads(one[:size]) for one, size in zip(values, sizes, strict=True)]

    def first(self, value: T) -> T | None:
        """Return, on every rank, the value of the first rank that has one (no None, no empty text); None if none has.

        By it ranks come to one error where some have failed.
        """
        return next(filter(None, self.from_all(value)), None)

    def _gathered(self, mine: bytes, nbytes: int) -> list[bytes]:
        """Return the bytes of every rank, by rank, filled up with zeros to so many."""
        in_turn("a collective operation")
        filled = bytearray(mine.ljust(nbytes, b"\0"))
        sent = torch.frombuffer(filled, dtype=torch.uint8).to(self.device)
        box = [torch.empty_like(sent) for _ in range(self.size)]
        dist.all_gather(box, sent, group=self.group)
        return [one.cpu().numpy().tobytes() for one in box]


def current(group: Any = None) -> World:
    """Return the world of `group`, or of torch's default group, or this process alone where there is none.

    Raises:
        ValueError: this process is no member of `group`.
    """
    if not (dist.is_available() and dist.is_initialized()):
        return World(0, 1, None)
    group = group or dist.group.WORLD
    rank = dist.get_rank(group)
    if rank < 0:
        raise ValueError(f"rank {dist.get_rank()} is not a member of the group that was given to hocket")
    return World(rank, dist.get_world_size(group), group)


def join(group: Any = None, timeout_s: float | None = None) -> World:
    """Like `current`, after joining the world that a launcher's environment variables describe, if they do.

    The launchers are torchrun, `hocket run` and what sets their variables, Slurm's srun, and mpirun. Who joined here
    also leaves here, when the interpreter exits.

    Args:
        group: The ranks; None for torch's default group.
        timeout_s: Seconds that an operation may take. None: HOCKET_TIMEOUT, else `TIMEOUT_S`; a group that exists
            already keeps its own. To join, ranks have `TIMEOUT_S` at least: one may import longer than another.

    Raises:
        ValueError: a time-out that is not above 0; variables that say that this is one process of several, and not
            which; or as for `current`.
        CommError: a step in this group has failed, and it cannot be joined anew.
    """
    if timeout_s is not None and not 0 < timeout_s < 1e9:
        raise ValueError(f"timeout_s={timeout_s}: give the seconds that an operation may take, a number above 0")
    with _joining:  # two threads at once: both would make the group, and wait for each other's ranks
        leave_failed(group)
        if group is None and dist.is_available() and not dist.is_initialized() and _tasks.launched():
            timeout_s = timeout_s or timeout_setting() or TIMEOUT_S
            dist.init_process_group("hocket", timeout=timedelta(seconds=max(timeout_s, TIMEOUT_S)))
            joined(dist.group.WORLD)
            atexit.register(_leave)
    found = current(group)
    if timeout_s is not None and found.group is not None:
        found.group.set_timeout(timedelta(seconds=timeout_s))
    return found


def own_gpu() -> torch.device:
    """Return this rank's GPU, which becomes the current one: ranks go round those of a host, and share few."""
    own = torch.device("cuda", int(os.environ.get("LOCAL_RANK", "0")) % torch.cuda.device_count())
    torch.cuda.set_device(own)
    return own


def _leave() -> None:
    if dist.is_initialized():
        dist.destroy_process_group()
