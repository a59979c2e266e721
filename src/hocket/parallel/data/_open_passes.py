"""Forward passes whose back-propagation may be to come: which of them a loss is of is known when that begins.

A program makes passes of which it computes no loss (for a log, say), or whose gradients go through the model to another
one. So what passes were made of before says nothing of the next loss. Its graph does; and where it is of batches that
weigh differently, each pass gets its own weight where gradients arrive at its outputs.
"""

import weakref
from collections.abc import Callable, Sequence
from typing import Any

import torch

from hocket.comm import torch_adapter

from ..batches import batch as _batch
from ._hooks import scale_gradients_by


class ForwardPass:
    """A pass that was made of a batch; a hook of its outputs, by which their graph holds it."""

    def __init__(self, note: _batch.Note | None, expect: Callable[[], None] | None, *, weighs: bool) -> None:
        self.note = note
        self.weight = note.weight if note is not None and weighs else 1.0  # by which its gradients count
        self.factor = 1.0  # of the gradients that arrive at its outputs
        self.marks: set[int] = set()  # places in the graph of what it gave
        self._expect = expect  # what to call as gradients arrive

    def __call__(self, _: torch.Tensor) -> None:
        """Take notice of a gradient of an output."""
        if self._expect is not None:
            self._expect()


class OpenPasses:
    """The passes of one model that were made since its gradients were last averaged, as long as their graphs live.

    Attributes:
        several: Whether they are of several batches; all ranks come to the same answer.
    """

    def __init__(self) -> None:
        self.several = False
        self._first: ForwardPass | None = None
        self._blind: ForwardPass | None = None  # without an output that shows of what a loss is, unlike the first one
        self._alive: list[weakref.ref[ForwardPass]] = []

    def clear(self) -> None:
        """Forget them: their back-propagation is over."""
        for one in self._known():
            one.factor = 1.0
        self._alive.clear()
        self.several, self._first, self._blind = False, None, None

    def add(self, one: ForwardPass, output: Any, tensors_in: Callable[[Any], list[torch.Tensor]]) -> Any:
        """Take notice of a pass that has given this; return it so that its gradients can be weighed if need be."""
        first = self._first = self._first or one
        self.several |= first.note is not one.note
        if one.weight != first.weight:
            output = scale_gradients_by(output, lambda: one.factor)
        made = tensors_in(output)
        one.marks = torch_adapter.graph_marks(made)
        self._alive = [known for known in self._alive if known() is not None]
        if hooked(made, one):
            self._alive.append(weakref.ref(one))
        elif one.weight != first.weight:
            self._blind = one
        return output

    def weigh(self, roots: Sequence[torch.Tensor]) -> tuple[list[ForwardPass], float]:
        """Weigh the passes that roots of a back-propagation are computed of.

        Returns:
            Those passes, and the weight of gradients as they arrive at parameters.

        Raises:
            TypeError: they are of batches that weigh differently, and it cannot be seen which.
            RuntimeError: they are, and this rank or another has no samples of the first.
        """
        known, first = self._known(), self._first
        for one in known:
            one.factor = 1.0
        found = torch_adapter.met(roots, self.marks)
        passes = [one for one in known if one.marks & found]
        if not passes and self._blind is not None:
            raise TypeError(
                "found no tensor that requires a gradient in the model's output, and forward passes on batches of "
                "different sizes may meet in one backward pass: return tensors in tuples, lists, mappings or "
                "dataclasses, so that hocket can weigh their gradients"
            )
        if len({id(one.note) for one in passes}) < 2 or first is None:
            return passes, passes[0].weight if passes else 1.0
        share = None if first.note is None else first.note.share
        if not first.weight or (share is not None and share.total < share.world):
            raise RuntimeError(
                "forward passes on batches of different sizes meet in one backward pass, and the first batch had no "
                "samples for a rank; call backward() in between, make the batches larger, or drop the last ones"
            )
        for one in passes:
            one.factor = one.weight / first.weight
        return passes, first.weight

    @property
    def marks(self) -> set[int]:
        """Places in the graph of what they gave."""
        return set[int]().union(*(one.marks for one in self._known()))

    def _known(self) -> list[ForwardPass]:
        return [one for known in self._alive if (one := known()) is not None]


def hooked(tensors: Sequence[torch.Tensor], hook: Callable[[Any], Any]) -> bool:
    """Have a hook called as gradients arrive at tensors; return whether there are such."""
    found = [one for one in tensors if one.requires_grad and not one.is_leaf]
    for one in found:
        one.register_hook(hook)  # type: ignore[no-untyped-call]
    return bool(found)
