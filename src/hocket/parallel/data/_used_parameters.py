"""Which sharded parameters ranks have used in a step: FSDP2 adds gradients rightly only where all use the same."""

import math
from collections.abc import Sequence
from typing import Any

import torch

from hocket import comm

from ..mesh import World
from ._replica_marks import alike, marks_of


class UsedParameters:
    """Knows which parameters some rank has used in a step, and that all ranks have reduced blocks in the same order.

    Where a rank has not used a parameter, as an expert to which none of its samples goes, FSDP2 leaves it out, and adds
    gradients of other parameters that are as long to those of other ranks. That is refused.
    """

    def __init__(self, worlds: Sequence[World]) -> None:
        self._worlds = [world for world in worlds if world.size > 1]
        self._numbers: dict[int, int] = {}  # by a sharded parameter's identity
        self._groups = 0
        self.forget()

    def forget(self) -> None:
        """Begin anew."""
        self._mine = set[int]()  # numbers of parameters
        self._order: list[int] = []  # numbers of blocks whose gradients were reduced

    def follow(self, group: Any) -> None:
        """Take notice of what FSDP2 holds together."""
        block, self._groups, plain = self._groups, self._groups + 1, group.post_backward
        numbers = [self._numbers.setdefault(id(one.sharded_param), len(self._numbers)) for one in group.fsdp_params]

        def post_backward(*unused: Any) -> None:
            gathered = [
                pair for pair in zip(group.fsdp_params, numbers, strict=True) if hasattr(pair[0], "_unsharded_param")
            ]
            for one, number in gathered:
                if one.unsharded_accumulated_grad is not None or one.unsharded_param.grad is not None:
                    self._mine.add(number)
            if gathered:
                self._order.append(block)
            plain(*unused)

        group.post_backward = post_backward

    def anywhere(self) -> set[int]:
        """Return the identities of the sharded parameters that some rank has used; a collective operation.

        Raises:
            RuntimeError: ranks have reduced gradients of blocks in different orders, or of different parameters.
        """
        marks = marks_of(self._order)
        sums = torch.tensor([float(number in self._mine) for number in self._numbers.values()] + marks)
        for world in self._worlds:
            sums = sums.to(world.device)
            with comm.label("parameters used"):
                world.all_reduce(sums)
        used, marks = sums[: -len(marks)].tolist(), sums[-len(marks) :].tolist()
        self.forget()
        ranks = math.prod(world.size for world in self._worlds)
        if not alike(marks, ranks):
            raise RuntimeError(
                "back-propagation went through blocks of the model in another order, or through others, on some ranks "
                "(layers left out at random, branches on data), so that sharded gradients were added up wrongly: say "
                "shard = 'gradients'"
            )
        if any(0 < count < ranks for count in used):
            raise RuntimeError(
                "some ranks use parameters in this step that others do not (experts to which none of a rank's samples "
                "goes), so that sharded gradients were added up wrongly: say shard = 'gradients'"
            )
        return {key for key, ranks_that_used in zip(self._numbers, used, strict=True) if ranks_that_used}
