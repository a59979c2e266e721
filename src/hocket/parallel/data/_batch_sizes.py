"""Follows what a loop computes from `len(batch)`, which is that of a rank's part: what it would be of the whole batch.

A loss may divide a sum by it. What else it does to a loss (a factor, a root of it, another branch) is not that of one
device.
"""

import builtins
import math
import operator
import sys
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch.overrides import TorchFunctionMode, enable_reentrant_dispatch
from torch.utils.weak import WeakTensorKeyDictionary

from hocket.comm import torch_adapter

from ..batches import (
    BatchShard,
    Numbers,
    TracedNumber,
    divisor_of_shares,
    is_one_by_one,
    is_plain,
    mapped,
    plain,
    tensors_in,
    terms,
    traced,
)
from ._hooks import watched

_SIZES = ("size", "__get__", "numel", "nelement")
_TAKEN = ("item", "__float__", "__gt__", "__ge__", "__lt__", "__le__", "gt", "ge", "lt", "le")
_len = len
_ARITHMETIC = {
    "mul", "mul_", "multiply", "div", "div_", "divide", "true_divide", "add", "add_", "sub", "sub_", "rsub", "pow",
    "__rdiv__", "__rtruediv__", "__rpow__", "__rsub__",
}  # fmt: skip
_DIVISIONS = {"div", "div_", "divide", "true_divide", "__truediv__", "__itruediv__"}
_ROUNDING = 1e-4


class BatchSizes(TorchFunctionMode, Numbers):
    """Gives a loop numbers of samples that know what is computed from them, while it is on.

    Args:
        has_rows: Whether a tensor has a row for each sample of the batch.
        note: Is called with what each function of torch has given.
        taken: Is called with each tensor whose number the program has taken, or compared.

    Attributes:
        covers: Whether the model was called with all of the rank's samples at once.
    """

    hashable = True

    def __init__(
        self,
        has_rows: Callable[[torch.Tensor], bool],
        note: Callable[[Any], None],
        taken: Callable[[torch.Tensor], None],
    ) -> None:
        super().__init__()
        self._has_rows, self._note, self._taken = has_rows, note, taken
        self._total = 0  # samples of the whole batch
        self._given: dict[float, Any] = {}  # numbers of the running function, and what they would be of all of it
        self._entered = self.recording = False
        self.forget()

    def forget(self) -> None:
        """Begin anew."""
        self._decisions: dict[str, Callable[[int], Any]] = {}
        self._share: BatchShard | None = None
        self._told = False
        self.begin_batch(None)

    def begin_batch(self, share: BatchShard | None) -> str:
        """Begin a batch of which this rank has a part; None for no batch.

        Returns:
            What the loop has compared that would come out otherwise for the whole batch; once.
        """
        self.end()
        shares = [one for one in (self._share, share) if one is not None]
        said = next(filter(None, map(self._decided, shares)), "")
        if said:
            self._told, self._decisions = True, {}
        self._share, self.covers, self._by_one = share, False, False
        self._total = 0 if share is None or share.samples == share.total else share.total
        self._others: Any = WeakTensorKeyDictionary()  # what tensors would be if the whole batch's size were meant
        return said

    def begin(self) -> None:
        """Begin to follow."""
        if self._total:
            if not self._entered:
                self.__enter__()  # type: ignore[no-untyped-call]
            self._entered = self.recording = True
            builtins.len = self._length  # its result is an ordinary number, whatever is asked

    def end(self) -> None:
        """Pause; inside of a function or a mode of the program's this mode stays where it is until a later end."""
        self.recording = False
        builtins.len = _len
        if self._entered and torch_adapter.function_mode() is self:
            self.__exit__(None, None, None)
            self._entered = False

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Run a function, with ordinary numbers."""
        kwargs = kwargs or {}
        if not self.recording:
            return func(*plain(args), **plain(kwargs))
        numbers = [one for one in (*args, *kwargs.values()) if isinstance(one, TracedNumber)]
        name = getattr(func, "__name__", "")
        if numbers and name in _ARITHMETIC:
            self._given = {plain(one): self._of_all(one) for one in numbers}
        try:
            result = func(*watched(func, plain(args)), **plain(kwargs))
        finally:
            self._given = {}
        self._note(result)
        if name in _TAKEN and isinstance(one := args[0] if args else kwargs.get("input"), torch.Tensor):
            self._taken(one)
        by = args[1] if name in _DIVISIONS and _len(args) > 1 else None
        self._by_one |= type(by) in (int, float) and by == 1
        sizes = name in _SIZES and isinstance(args[0], torch.Tensor) and _asked_by_program()
        if sizes and self._has_rows(args[0]):
            return self._sizes(args[0], result)
        if func in (torch.tensor, torch.as_tensor) and numbers and args[0] is numbers[0]:
            self._others[result] = torch.full_like(result, self._of_all(numbers[0]))
        return result

    def _length(self, one: Any) -> Any:
        """Return a length as `len` does; this is that while a loop is followed, but for other threads."""
        number = _len(one)
        program = isinstance(one, torch.Tensor) and torch_adapter.function_mode() is self and _asked_by_program()
        return traced(number, lambda size: size, self) if program and self._has_rows(one) else number

    def _sizes(self, tensor: torch.Tensor, result: Any) -> Any:
        """Return sizes of which that of the first dimension, or of all of them, is followed."""
        if isinstance(result, torch.Size):
            return torch.Size((traced(result[0], lambda size: size, self), *result[1:]))
        whole = type(result) is int and result in (len(tensor), tensor.numel())
        return traced(result, lambda size: result // len(tensor) * size, self) if whole else result

    def _of_all(self, number: TracedNumber) -> Any:
        return number.node(self._total)

    def computed(self, how: Callable[..., Any], values: tuple[Any, ...]) -> Any:
        """Return a number that is computed from others."""
        value = how(*plain(values))
        if not self.recording:
            return value
        return traced(value, _function(how, values), self)

    def settled(self, how: Callable[..., Any], values: tuple[Any, ...], answer: Any) -> Any:
        """Return the answer, and note what was asked: it may be another one of a batch of another size."""
        if self.recording and not self._told and len(values) == 2:
            first, second = plain(values)
            # What is as large as this rank's part may have been made for it.
            if first != second or how not in (operator.eq, operator.ne):
                self._decisions[f"{first:g}, compared with {second:g}"] = _function(how, values)
        return answer

    def _decided(self, share: BatchShard) -> str:
        """Return what a loop has asked of sizes that the whole batch would answer otherwise than some rank's part."""
        sizes = {BatchShard.of(share.total, share.world, one).samples for one in (0, share.world - 1)} - {0}
        answers = self._decisions.items()
        return next((what for what, of in answers if any(of(one) != of(share.total) for one in sizes)), "")

    def setting(self, optimizer: Any) -> str:
        """Return the setting of an optimizer that is computed from a size that is not the whole batch's."""
        settings = (pair for group in optimizer.param_groups for pair in group.items())
        numbers = ((name, one) for name, one in settings if isinstance(one, TracedNumber) and self._total)
        return next((name for name, one in numbers if not _near(plain(one), self._of_all(one))), "")

    def run(self, func: Any, given: Any, tensors: Sequence[torch.Tensor]) -> list[torch.Tensor]:
        """Run an operator as if the sizes that a loop takes were those of the whole batch; nothing where they are none.

        Args:
            func: The operator.
            given: What it is given, by place and by name.
            tensors: Those among that.
        """
        numbers = self._given
        if not numbers and not any(one in self._others for one in tensors):
            return []
        changes = func._schema.is_mutable

        def other(one: torch.Tensor) -> torch.Tensor:
            return self._others[one] if one in self._others else one.clone() if changes else one

        try:
            args, kwargs = mapped(given, other)
            args = [numbers.get(one, one) if isinstance(one, int | float) else one for one in args]
            with enable_reentrant_dispatch(), torch_adapter.unsaved():
                return tensors_in(func(*args, **kwargs))
        except (RuntimeError, ArithmeticError, LookupError, ValueError):  # other sizes need not fit
            return []

    def keep(self, results: Sequence[torch.Tensor], others: Sequence[torch.Tensor]) -> None:
        """Keep what an operator has given as if sizes were those of the whole batch."""
        for one, other in zip(results, others, strict=False):
            if one.shape == other.shape:
                self._others[one] = other

    def off(self, loss: torch.Tensor, samples: int) -> float:
        """Return by what a loss would be multiplied if sizes were those of the whole batch; 0 if that is no matter."""
        if (other := self._others.get(loss)) is None or loss.numel() != 1 or not self.covers:
            return 0.0
        share = samples / self._total
        mine, theirs = _factors(loss, samples), _factors(other, samples)
        if is_one_by_one(loss, samples) or divisor_of_shares(loss, samples):  # a sum, though each term is a mean
            mine = [(factor, True) for factor, _ in mine]
        ratio = float(other.detach()) / (float(loss.detach()) or 1.0)
        pairs = list(zip(mine, theirs, strict=True)) if len(mine) == len(theirs) else []
        if all(_near(a, b) for (a, _), (b, _) in pairs):  # or nothing is known of terms
            right = _near(ratio, 1.0) or _near(ratio, share)
        else:
            right = all(_near(a, b) or (is_sum and _near(a * share, b)) for (a, is_sum), (b, _) in pairs)
        return 0.0 if right else ratio

    def besides(self, loss: torch.Tensor, samples: int) -> tuple[float, ...]:
        """Return by what else sums are divided that a loss divides by `len(batch)`: constants, or a second count."""
        if (other := self._others.get(loss)) is None or loss.numel() != 1 or is_one_by_one(loss, samples):
            return ()
        mine, theirs = _factors(loss, samples), _factors(other, samples)
        if len(mine) != len(theirs) or not all(a and math.isfinite(a) for a, _ in mine):
            return ()
        share = samples / self._total
        by_size = (a for (a, is_sum), (b, _) in zip(mine, theirs, strict=True) if is_sum and _near(a * share, b))
        return tuple(1 / (a * samples) for a in by_size)

    def by_one(self, loss: torch.Tensor, samples: int) -> bool:
        """Return whether a loop divides a sum of one sample by 1, a number that is not computed from `len(batch)`."""
        if samples != 1 or not self.covers or not self._by_one or loss.grad_fn is None or loss in self._others:
            return False
        by = (one.divisor for one in terms(loss, samples) if one.is_sum)
        return any(one is not None and is_plain(one) and abs(float(one)) == 1 for one in by)


def _asked_by_program() -> bool:
    """Return whether the function that calls this one was called by the program, and not in this package."""
    return not str(sys._getframe(2).f_globals.get("__name__")).startswith("hocket.")


def _factors(loss: torch.Tensor, samples: int) -> list[tuple[float, bool]]:
    """Return by what each term of a loss is multiplied, and whether it is a sum."""
    parts = terms(loss, samples) if loss.grad_fn is not None else []
    if any(one.node is None for one in parts):
        return []
    return [(one.scale, one.is_sum) for one in parts]


def _near(one: float, other: float) -> bool:
    return math.isclose(one, other, rel_tol=_ROUNDING)


def _function(how: Callable[..., Any], values: tuple[Any, ...]) -> Callable[[int], Any]:
    nodes = [one.node if isinstance(one, TracedNumber) else None for one in values]

    def of(size: int) -> Any:
        try:
            return how(*(one if node is None else node(size) for node, one in zip(nodes, values, strict=True)))
        except ArithmeticError:
            return math.nan

    return of
