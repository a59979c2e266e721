"""Which sharded parameters ranks have used in a step, and whether all went through blocks in the same order."""

import math
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch

from hocket import comm

from ..mesh import World
from ._replica_marks import alike, marks_of

_ORDER = (
    "ranks go through blocks of the model in different orders, or through different blocks (layers left out at random, "
    "an early exit, branches on data, experts that are blocks of their own), and shard = 'parameters' gathers each "
    "block on all ranks at once: say shard = 'gradients'"
)


class UsedParameters:
    """Knows which parameters some rank has used in a step, and that all ranks have gone through the same blocks.

    A rank that does not use a parameter of a block that it runs, as an expert to which none of its samples goes, has
    zeros of it reduced: FSDP2 would leave it out, and add gradients of other parameters that are as long to those of
    other ranks. Blocks that no back-propagation comes to have none, so that a look at a loss costs no memory. What
    ranks gather or reduce in different orders is refused, after each pass that evaluates and before each update.
    """

    def __init__(self, worlds: Sequence[World]) -> None:
        self._worlds = [world for world in worlds if world.size > 1]
        self._numbers: dict[int, int] = {}  # by a sharded parameter's identity
        self._groups = 0
        self._evaluated: int | None = None  # where in the order a pass that evaluates has begun
        self.forget()

    def forget(self) -> None:
        """Begin anew."""
        self._mine = set[int]()  # numbers of parameters
        self._order: list[int] = []  # blocks that were gathered, by their numbers, and reduced, by those below 0

    def follow(self, group: Any) -> None:
        """Take notice of what FSDP2 holds together."""
        block, self._groups = self._groups, self._groups + 1
        post_backward, unshard = group.post_backward, in_order()(group.unshard)
        numbers = [self._numbers.setdefault(id(one.sharded_param), len(self._numbers)) for one in group.fsdp_params]

        def reduce(*unused: Any) -> None:
            used = [
                number
                for one, number in zip(group.fsdp_params, numbers, strict=True)
                if hasattr(one, "_unsharded_param")
                and (one.unsharded_accumulated_grad is not None or one.unsharded_param.grad is not None)
            ]
            self._mine.update(used)
            # This is called at the end for blocks that no back-propagation has come to, too.
            reduced = bool(used) or group._training_state.name == "PRE_BACKWARD"
            if reduced:
                self._order.append(~block)
            group.reduce_scatter_unused_params = reduced
            post_backward(*unused)

        def gather(async_op: bool = False) -> None:
            before = group._all_gather_result
            unshard(async_op)
            if group._all_gather_result is not before:
                self._order.append(block)

        group.post_backward, group.unshard = reduce, gather
        group.wait_for_unshard = in_order()(group.wait_for_unshard)

    def compare_passes(self, module: Any) -> None:
        """Compare what ranks have gathered at the end of each pass of a module that evaluates."""

        def begin(*_: Any) -> None:
            if self._evaluated is not None:  # that pass has ended in an error
                del self._order[self._evaluated :]
                start_over(module)
            trains = module.training and torch.is_grad_enabled()
            self._evaluated = None if trains else len(self._order)

        def end(*_: Any) -> None:
            if self._evaluated is not None and len(self._order) > self._evaluated:
                self._sums(self._order[self._evaluated :], ())
                del self._order[self._evaluated :]
            self._evaluated = None
            if not torch.is_grad_enabled():
                module.reshard()  # what FSDP2 keeps for a backward pass programs would write to in vain

        module.register_forward_pre_hook(begin, prepend=True)  # before FSDP2's own
        module.register_forward_hook(end)

    def anywhere(self) -> set[int]:
        """Return the identities of the sharded parameters that some rank has used; a collective operation.

        Raises:
            CollectiveMismatchError: ranks have gathered blocks, or reduced their gradients, in different orders.
        """
        used = self._sums(self._order, [float(number in self._mine) for number in self._numbers.values()])
        self.forget()
        return {key for key, ranks_that_used in zip(self._numbers, used, strict=True) if ranks_that_used}

    def _sums(self, order: list[int], numbers: Sequence[float]) -> list[float]:
        """Return numbers summed over ranks, if all have this order."""
        marks = marks_of(order)
        sums = torch.tensor([*marks, *numbers])
        for world in self._worlds:
            sums = sums.to(world.device)
            with comm.label("parameters used"), in_order():
                world.all_reduce(sums)
        found = sums.tolist()
        if not alike(found[: len(marks)], math.prod(world.size for world in self._worlds)):
            self.forget()
            raise comm.CollectiveMismatchError(_ORDER)
        return found[len(marks) :]


def start_over(module: Any) -> None:
    """Have FSDP2 let go of what it holds of a pass that has ended in an error: it would go on with that."""
    if module._get_fsdp_state()._is_root:  # it has run
        module.reset_iter_state()


@contextmanager
def in_order() -> Iterator[None]:
    """Say what it means if ranks do not come to the same operation."""
    try:
        yield
    except comm.CollectiveMismatchError as error:
        if _ORDER in str(error):
            raise
        raise comm.CollectiveMismatchError(f"{error}. Perhaps {_ORDER}") from error
