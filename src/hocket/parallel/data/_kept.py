"""Sees that what a loss depends on besides its batch, as the loop keeps it or makes it, is the same on all ranks."""

import math
from collections.abc import Container, Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch.utils.weak import WeakTensorKeyDictionary

from hocket.comm import torch_adapter

from ..batches import tensors_in

owned: Any = WeakTensorKeyDictionary()
"""What each rank keeps of its own on purpose."""


@dataclass(frozen=True, slots=True)
class Dependency:
    """Of what a loss depends on besides its batch."""

    shape: tuple[int, ...]
    total: float  # of its absolute values, the last of which counts twice as much as the first
    kept: bool  # whether it was computed from samples of a batch before; else nothing is known of where it is from


KEPT_APART = (
    "the loss depends on what the loop keeps from batch to batch and computes from samples (a center, a queue, a bank, "
    "a running mean), which is not the same on all ranks ({}): each has it from its own samples. Give it "
    "hocket.average of a statistic, or all ranks' samples (torch.distributed.all_gather), or take hocket.Trainer with "
    "a plan that does not cut batches; if each rank is to have its own (a replay buffer, say), keep hocket.own(...) of "
    "it"
)

_TOLERANCE = 1e-5  # of that sum: hosts of different processors round the last place differently
_COUNT = 1e-9  # how far the reciprocal of a quotient by a count is from the count; smaller numbers are guards against 0
_MOST = 2**22  # elements of what is compared
_REPLACING = {torch.ops.aten.copy_, torch.ops.aten.zero_, torch.ops.aten.fill_, torch.ops.aten.normal_}


class KeptTensors:
    """Follows what was computed from samples of one batch into the loss of the next: a center, a queue, a bank.

    One device computes it from all samples. What has a place for each sample (a recurrent state) is left alone, as is
    what has a gradient, which back-propagation comes to. So are followed numbers of Python, and tensors of which it is
    not known where they come from: the program may have computed them from samples by `item()` or by numpy.
    """

    def __init__(self) -> None:
        self._written: Any = WeakTensorKeyDictionary()  # what samples were written to, a part at a time
        self._sizes: list[Dependency] = []  # of what is kept, and of what comes from elsewhere
        self._from: Any = WeakTensorKeyDictionary()  # which of these a tensor is computed from
        self._samples = 0  # of this batch; 0 where nothing is followed

    def wrote(self, one: torch.Tensor, places: set[int]) -> None:
        """Take notice that what depends on samples was written to a tensor, with places for them in these dims."""
        whole = one if one._base is None else one._base
        self._written[whole] = places if whole.dim() == one.dim() else set()

    def keep(self, computed: Iterable[torch.Tensor], samples: int) -> None:
        """Begin a batch with what is left of those before.

        Args:
            computed: What depends on samples, and has no place for each.
            samples: How many this rank has now.
        """
        left = list(computed)
        left += [one for one, dims in self._written.items() if samples not in {one.shape[dim] for dim in dims}]
        self.forget()
        self._samples = samples
        for one in left:
            if one not in self._from:
                self._add(one, kept=True)

    def forget(self) -> None:
        """Forget all: ranks talk to each other, perhaps about it."""
        self._sizes, self._from, self._samples = [], WeakTensorKeyDictionary(), 0

    def _add(self, one: torch.Tensor, *, kept: bool) -> None:
        plain = one.layout is torch.strided and not (
            one.is_meta or one.is_complex() or one.requires_grad or one in owned
        )
        self._from[one] = frozenset[int]()
        if plain and (kept or (one.is_floating_point() and self._samples not in one.shape)):
            self._from[one] = frozenset([len(self._sizes)])
            self._sizes.append(Dependency(tuple(one.shape), _total(one), kept))

    def know(self, one: torch.Tensor) -> None:
        """Take notice of a tensor of this batch, or of what a model computes from it."""
        if self._samples:
            self._from.setdefault(one, frozenset[int]())

    def read(
        self,
        func: Any,
        given: Any,
        tensors: Sequence[torch.Tensor],
        results: Sequence[torch.Tensor],
        known: Sequence[torch.Tensor],
        items: Container[float],
    ) -> None:
        """Take notice of what an operator has computed from what is kept, or comes from elsewhere.

        Args:
            func: The operator.
            given: What it was given, by place and by name.
            tensors: Those among that.
            results: The tensors that it has computed.
            known: Those among `tensors` that are computed from this batch.
            items: Numbers that are.
        """
        if not self._samples:
            return
        new = written(func, given) if func.overloadpacket in _REPLACING else []
        for one in () if torch_adapter.in_backward() else tensors:  # there: what a model's forward has saved
            unknown = one not in self._from and all(one is not other for other in (*known, *new))
            if unknown and type(one) is torch.Tensor and one.numel() <= _MOST:
                self._add(one, kept=False)
        used = [self._from[one] for one in tensors if one in self._from and all(one is not other for other in new)]
        if any(one.dim() for one in results):  # numbers that a whole loss is multiplied by weigh it
            numbers = [Dependency((), abs(one), False) for one in _numbers(given) if one not in items]
            used.append(frozenset(range(len(self._sizes), len(self._sizes) + len(numbers))))
            self._sizes += numbers
        for one in results:
            self._from[one] = frozenset[int]().union(*used)

    def of(self, loss: torch.Tensor) -> list[Dependency]:
        """Return the sizes of what a loss depends on besides its batch."""
        return [self._sizes[i] for i in sorted(self._from.get(loss, ()))]


def own(tensors: Any) -> Any:
    """Say that each rank keeps its own of some tensors on purpose, of its own samples: a replay buffer, say.

    Under `hocket.distribute` what a loop computes from samples of one batch for the loss of the next must be the same
    on all ranks, as for a center or a queue of keys; this is for what one device could as well have several of. What
    is computed from it anew has to be said again: `buffer = hocket.own(torch.cat([buffer, found])[-1000:])`.

    Args:
        tensors: A tensor, or a structure of tuples, lists and mappings that holds some.

    Returns:
        The same.
    """
    for one in tensors_in(tensors):
        owned[one] = owned[one if one._base is None else one._base] = True
    return tensors


def unlike(everyone: Sequence[Sequence[Dependency]], *, kept: bool) -> str:
    """Return how ranks differ in what losses depend on; nothing where they do not, or cannot be compared.

    Args:
        everyone: What each rank's loss depends on besides its batch.
        kept: Whether what samples of a batch before gave is meant, or what is from elsewhere.
    """
    alike = [[one for one in sizes if one.kept is kept] for sizes in everyone]
    for sizes in zip(*alike, strict=False) if len(set(map(len, alike))) == 1 else ():
        shapes, sums = {one.shape for one in sizes}, [one.total for one in sizes]
        if any(map(math.isnan, sums)):
            continue
        if len(shapes) > 1 or max(sums) - min(sums) > _TOLERANCE * max(sums):
            values = ", ".join(f"{one:.6g}" for one in sums)
            return f"shape {list(sizes[0].shape)}, weighted sums {values}" if sizes[0].shape else f"here {values}"
    return ""


def _total(one: torch.Tensor) -> float:
    """Return a sum in which places weigh from 1 to 2, in parts: a queue may be large."""
    found, begin = torch.zeros((), dtype=torch.float64, device=one.device), 0
    for part in torch.split(one.detach().flatten(), _MOST):
        places = torch.arange(begin, begin + len(part), dtype=torch.float64, device=one.device)
        found, begin = found + part.double().abs() @ (1.0 + places / one.numel()), begin + len(part)
    return float(found)


def _numbers(value: Any) -> list[float]:
    """Return the numbers in what an operator was given, but for counts and what divides by a count."""
    if isinstance(value, float):
        if not math.isfinite(value) or value == round(value):
            return []
        return [] if abs(value) < _COUNT or abs(1 / value - round(1 / value)) < _COUNT else [value]
    parts = list(value.values()) if isinstance(value, dict) else value
    return [found for one in parts for found in _numbers(one)] if isinstance(parts, tuple | list) else []


def written(func: Any, given: Any) -> list[torch.Tensor]:
    """Return to what an operator writes, of what it was given, by place and by name."""
    args, kwargs = given
    found = []
    for i, said in enumerate(func._schema.arguments):
        one = kwargs.get(said.name, args[i] if i < len(args) else None)
        if said.is_write and isinstance(one, torch.Tensor):
            found.append(one)
    return found
