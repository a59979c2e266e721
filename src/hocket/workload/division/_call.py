"""What a rule of `_rules` is given and what it answers: one call of a torch function, some of whose tensors are cut."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

from ._record import leaves
from ._split import CannotSplit, Split


@dataclass(eq=False, slots=True)
class Operand:
    """A tensor among the arguments.

    Attributes:
        shape: of the full tensor.
        split: how it is cut; None where every rank has all of it.
        grad: whether a gradient flows to it.
        computed: whether a layer made it that might be cut too, so that it is better cut there than here.
        tensor: this rank's tensor, while the model runs; what stands for it, while it is examined.
    """

    shape: tuple[int, ...]
    split: Split | None
    grad: bool
    computed: bool
    tensor: Any


@dataclass(frozen=True, slots=True)
class Part:
    """In the place of an operand that every rank has: this rank's part of it."""

    operand: Operand
    split: Split


class NeedsSplit(Exception):
    """An operand should be cut where it is made.

    Args:
        operand: which.
    """

    def __init__(self, operand: Operand) -> None:
        super().__init__()
        self.operand = operand


NO_ANSWER = object()


@dataclass(slots=True)
class Site:
    """One call.

    Attributes:
        name: of the function, as `_record.function_name` gives it.
        args, kwargs: with operands for tensors. A rule changes them into what a rank is to call with its parts.
        ranks: how many share what is cut.
        aware: whether the call must be changed at all, or would come out right by itself.
        random: whether it draws random numbers, for its part alone.
        answer: what the call returns, where it need not be made.
    """

    name: str
    args: list[Any]
    kwargs: dict[str, Any]
    ranks: int
    aware: bool = False
    random: bool = False
    answer: Any = NO_ANSWER
    hints: list[tuple[int, ...]] = field(default_factory=list)

    def operands(self) -> Iterator[Operand]:
        """All tensors among the arguments."""
        for leaf in leaves((self.args, self.kwargs)):
            if isinstance(leaf, Operand):
                yield leaf
            elif isinstance(leaf, Part):
                yield leaf.operand

    def first(self) -> Operand:
        """The tensor that the function is about, which must be cut."""
        operand = self.args[0] if self.args else self.kwargs.get("input")
        if not isinstance(operand, Operand) or operand.split is None:
            raise self.impossible("uses parts in another place than its first argument")
        return operand

    def argument(self, place: int, name: str, default: Any = None) -> Any:
        """An argument by place or by name."""
        if place < len(self.args):
            return self.args[place]
        return self.kwargs.get(name, default)

    def set_argument(self, place: int, name: str, value: Any) -> None:
        """Changes an argument: the call is not what it was."""
        if place < len(self.args):
            self.args[place] = value
        else:
            self.kwargs[name] = value
        self.aware = True

    def split_of(self, operand: Operand) -> Split:
        """How it is cut."""
        assert operand.split is not None
        return operand.split

    def impossible(self, why: str) -> CannotSplit:
        """The error for a call that cannot be made on parts."""
        return CannotSplit(f"{self.name} {why}")


def cut_operand(operand: Operand, split: Split) -> Part:
    """A full operand, cut at its use.

    Raises:
        NeedsSplit: a layer made it, and may be able to make the part alone.
    """
    if operand.computed and operand.grad:
        raise NeedsSplit(operand)
    return Part(operand, split)
