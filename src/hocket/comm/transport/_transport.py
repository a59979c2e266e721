"""The seam between the process group and whatever moves the bytes.

All tensors that cross it are flat, contiguous, without autograd and of one device; every method blocks until this rank
is done and returns the name of the path taken.
"""

from collections.abc import Sequence
from datetime import timedelta
from typing import Any, NamedTuple, Protocol

import torch

from ._reduce import ReduceOperator

Flats = Sequence[torch.Tensor]


class Membership(NamedTuple):
    """A rank's place in a group, or in a part of one, and where its ranks meet."""

    store: Any
    name: str
    rank: int
    size: int
    timeout: timedelta  # for all to come
    numbers: Sequence[int]  # in the world, of all its ranks


class Transport(Protocol):
    """Runs collectives among the ranks of one group, one at a time."""

    def all_reduce(self, flat: torch.Tensor, op: ReduceOperator, timeout_s: float) -> str:
        """Reduce `flat` over all ranks in place."""

    def reduce(self, flat: torch.Tensor, op: ReduceOperator, root: int, timeout_s: float) -> str:
        """Reduce `flat` over all ranks into the root's."""

    def broadcast(self, flat: torch.Tensor, root: int, timeout_s: float) -> str:
        """Copy the root's `flat` to all."""

    def all_gather(self, outputs: Flats, flat: torch.Tensor, timeout_s: float) -> str:
        """Copy rank r's `flat` to everyone's `outputs[r]`."""

    def reduce_scatter(self, output: torch.Tensor, inputs: Flats, op: ReduceOperator, timeout_s: float) -> str:
        """Reduce everyone's `inputs[r]` into rank r's `output`."""

    def all_to_all(self, outputs: Flats, inputs: Flats, timeout_s: float) -> str:
        """Copy rank r's `inputs[s]` to rank s's `outputs[r]`."""

    def gather(self, outputs: Flats | None, flat: torch.Tensor, root: int, timeout_s: float) -> str:
        """Copy rank r's `flat` to the root's `outputs[r]`; others give None."""

    def scatter(self, flat: torch.Tensor, inputs: Flats | None, root: int, timeout_s: float) -> str:
        """Copy the root's `inputs[r]` to rank r's `flat`; others give None."""

    def barrier(self, timeout_s: float) -> str:
        """Wait until all ranks have called it."""
