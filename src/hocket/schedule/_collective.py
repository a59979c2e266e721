"""A collective as its contract: what each rank holds before and what it must hold after."""

from dataclasses import dataclass
from typing import Final

import numpy as np
from numpy.typing import NDArray

Ints = NDArray[np.int64]
Bools = NDArray[np.bool_]

KINDS: Final = (
    "all_reduce", "reduce", "broadcast", "all_gather", "reduce_scatter", "all_to_all", "gather", "scatter", "barrier",
)  # fmt: skip
_REDUCING: Final = frozenset({"all_reduce", "reduce", "reduce_scatter", "barrier"})
_ROOTED: Final = frozenset({"reduce", "broadcast", "gather", "scatter"})
_ONE_BLOCK: Final = frozenset({"all_reduce", "reduce", "broadcast", "barrier"})


class ScheduleError(ValueError):
    """A collective, schedule or file of one is not well formed; the message says where and what to do."""


@dataclass(frozen=True, slots=True)
class Collective:
    """The contract of one collective operation.

    The data is a row of *blocks*; every rank has memory for all of them, and a block keeps its place wherever it goes.
    An all_reduce, reduce, broadcast or barrier has one block, the vector. all_gather, reduce_scatter, gather and
    scatter have one a rank. all_to_all has `world * world`: block `s * world + d` goes from rank s to rank d.
    The operator is not part of it: a schedule serves every associative and commutative one.

    Args:
        kind: One of `KINDS`.
        world: Number of ranks.
        root: The root of reduce, broadcast, gather and scatter; 0 for the others.

    Raises:
        ScheduleError: an unknown kind, an empty world, or a root that is not in it.
    """

    kind: str
    world: int
    root: int = 0

    def __post_init__(self) -> None:
        if self.kind not in KINDS:
            raise ScheduleError(f"collective {self.kind!r} is unknown; there are {', '.join(KINDS)}")
        if self.world < 1:
            raise ScheduleError(f"world {self.world} is empty; give 1 or more ranks")
        if not 0 <= self.root < self.world:
            raise ScheduleError(f"root {self.root} is not among the ranks 0 to {self.world - 1}")
        if self.root and not self.rooted:
            raise ScheduleError(f"{self.kind} has no root; leave root={self.root} out")

    def __str__(self) -> str:
        return f"{self.kind} world={self.world}" + (f" root={self.root}" if self.rooted else "")

    @property
    def reduces(self) -> bool:
        """Whether contributions of several ranks are combined."""
        return self.kind in _REDUCING

    @property
    def rooted(self) -> bool:
        """Whether one rank has a part of its own."""
        return self.kind in _ROOTED

    @property
    def blocks(self) -> int:
        """Number of blocks in the row."""
        if self.kind in _ONE_BLOCK:
            return 1
        return self.world**2 if self.kind == "all_to_all" else self.world

    @property
    def vector_blocks(self) -> int:
        """Blocks in the S bytes by which nccl-tests measure: all, but a rank's send buffer for all_to_all."""
        return self.world if self.kind == "all_to_all" else self.blocks

    @property
    def bus_factor(self) -> float:
        """Busbw / algbw as nccl-tests define them: what crosses a port of a ring, in units of S; 0 of a barrier."""
        known = {"all_reduce": 2 * (self.world - 1) / self.world, "broadcast": 1.0, "reduce": 1.0, "barrier": 0.0}
        return known.get(self.kind, (self.world - 1) / self.world)

    def before(self, rank: Ints, block: Ints) -> Bools:
        """Return whether `rank` contributes to `block` when the operation begins; the arguments broadcast."""
        if self.reduces:
            return np.broadcast_to(np.True_, np.broadcast_shapes(rank.shape, block.shape))
        if self.kind in ("broadcast", "scatter"):
            return np.broadcast_to(rank == self.root, np.broadcast_shapes(rank.shape, block.shape))
        if self.kind == "all_to_all":
            return np.asarray(rank == block // self.world)
        return np.asarray(rank == block)

    def after(self, rank: Ints, block: Ints) -> Bools:
        """Return whether `rank` must hold the final `block` when the operation ends; the arguments broadcast."""
        shape = np.broadcast_shapes(rank.shape, block.shape)
        if self.kind in ("all_reduce", "broadcast", "all_gather", "barrier"):
            return np.broadcast_to(np.True_, shape)
        if self.kind in ("reduce", "gather"):
            return np.broadcast_to(rank == self.root, shape)
        if self.kind == "all_to_all":
            return np.asarray(rank == block % self.world)
        return np.asarray(rank == block)
