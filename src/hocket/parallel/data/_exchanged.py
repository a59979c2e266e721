"""Computes a loss besides for other choices of the same samples, which shows what no derivative does.

Ranks' losses make that of one device only if a loss, times what it divides by, is a sum of one term for each sample.
Such a sum does not mind which samples meet: with halves a and b of a rank's samples, `f(a, b) + f(b', a') = f(a, a') +
f(b', b)`, where a' is the first of a as often as b has samples, and b' the other way. A statistic of the batch without
a gradient, weights of classes by how often the batch has them, or samples combined with others break it.
"""

import functools
import math
import warnings
from collections.abc import Iterable, Sequence
from contextlib import ExitStack
from typing import Any

import torch
from torch.overrides import enable_reentrant_dispatch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.weak import WeakTensorKeyDictionary

from hocket.comm import torch_adapter

from ..batches import divisors, mapped, tensors_in, terms
from ._batch_sizes import BatchSizes
from ._kept import KeptTensors, owned, written
from ._listed_samples import ListedSamples

_MOST_BYTES = 2**28
"""What other choices of samples may take: nothing is known of a loss whose operands are larger."""

_TOLERANCES = {torch.float64: 1e-6, torch.float32: 3e-3}
_LOW = 5e-2
_ORDERS = (torch.ops.aten.flip, torch.ops.aten.roll, torch.ops.aten.index, torch.ops.aten.index_select)
_MANY = 4096.0
_WRITTEN = 8  # characters: numbers of a program's text are short, and computed ones are not
_LOOKED_AT = 2**16  # numbers among which a count is looked for
_COUNT = 1e-5  # relative: `count + 1e-8` is a count


class ExchangedSamples(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Runs what is computed from a batch and the model's outputs also with halves of the samples exchanged.

    Attributes:
        communicates: Whether ranks have talked to each other; nothing is said of a loss then, until the next batch.
        mixes: Whether samples were put in another order, as mixup does to combine each with another.
        kept: What the program keeps from batch to batch.
        sizes: What it computes from how many samples a rank has.
        reduces: Whether the program itself sums or averages a statistic over ranks.
        reduces_counts: Whether it does so with a whole number, which may be how many samples a sum is of.
    """

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._on = ExitStack()
        self._batch, self._samples = object(), 0
        self.kept, self._listed = KeptTensors(), ListedSamples()
        self.sizes = BatchSizes(lambda one: _has_rows(one, self._samples) and self._of(one) is not None)
        self.reduces = self.reduces_counts = False
        self.forget()

    def forget(self) -> None:
        """Begin anew."""
        self.communicates = self.mixes = False
        self._others: Any = WeakTensorKeyDictionary()  # versions and three others of what depends on samples
        self._numbers: Any = WeakTensorKeyDictionary()  # numbers that are computed of one other number, and how
        self._items: dict[float, list[float]] = {}  # numbers that the program has taken, and their three others
        self._counts = set[float]()  # whole numbers that it has taken
        self._bytes, self._lowest = 0, torch.float64
        self._given_off = 0.0  # how far what models were given is from samples by themselves
        self._own: dict[int, torch.Tensor] = {}  # what had rows of samples when ranks began to talk, by its identity

    def begin(self) -> None:
        """Begin to look, unless another such mode is on, which may end before this one."""
        if torch_adapter.dispatch_mode() is None:
            self._on.enter_context(torch_adapter.uncompiled())  # torch compiles nothing while such a mode is on
            self._on.enter_context(self)
            self._on.enter_context(torch_adapter.hearing_collectives(self._hear))
            self.sizes.begin()

    def end(self) -> None:
        """Pause, unless the program has begun such a mode since."""
        self.sizes.end()
        if torch_adapter.dispatch_mode() is self:
            self._on.close()

    def _hear(self) -> None:
        if not self.communicates:  # what follows may have other ranks' samples, and so may what is changed then
            self._own = {
                key: one.detach().clone() for key, one in _named(self._others) if _has_rows(one, self._samples)
            }
        self.communicates = True
        self.kept.forget()
        if (one := torch_adapter.reduced()) is not None:
            counts = one.detach().flatten()[:_LOOKED_AT].double().abs()
            self.reduces |= one.is_floating_point()
            self.reduces_counts |= bool(((counts > 0) & (counts == counts.round())).any())

    def next(self, batch: object, samples: int) -> None:
        """Pause for a new batch, and take what is left of those before for what the program keeps."""
        if batch is self._batch:
            return  # another model has told of it
        self.end()
        for one in list(owned):
            self._others.pop(one, None)
        computed = ((one, three) for one, (versions, *three) in self._others.items() if len(versions) == 2)
        depends = ((one, three) for one, three in computed if any(_unlike(one, other) for other in three))
        self.kept.keep((one for one, three in depends if not _places(one, three, self._samples)), samples)
        self._batch, self._samples, self._items, self._counts, self._given_off = batch, samples, {}, set(), 0.0
        if self.communicates:
            others, own = self._others, self._own
            self.forget()
            for key, one in _named(others):
                if key in own and not one.requires_grad and torch.equal(one, own[key]) and self._affords(one):
                    self._others[one] = others[one]

    def follow_batch(self, tensors: Sequence[torch.Tensor], samples: int) -> None:
        """Follow what a loader has yielded: tensors with a row for each sample, or those of a list of samples."""
        self.follow(tensors, samples)
        self._listed.begin(tensors, samples)

    def follow(self, tensors: Iterable[torch.Tensor], samples: int, changes: int = 0) -> None:
        """Take notice of tensors of the batch, and follow those that have a row for each sample.

        `changes` says how many in place torch will count of what the operator that is running has done.
        """
        for one in tensors:
            self.kept.know(one)
            if _has_rows(one, samples) and one not in self._others and self._affords(one):
                rows = _choices(one.detach(), samples)
                versions = (_version(one) + changes,)
                self._others[one] = [versions, *(row.requires_grad_(one.requires_grad) for row in rows)]

    def given(self, tensors: Iterable[torch.Tensor], samples: int) -> None:
        """Take notice of what a model is given, whose outputs are followed next, as rows in that order.

        If the program has put samples into another order (by their lengths, say), or it is not known where they come
        from, what it has of the batch besides may have another order, and is followed no more.
        """
        tensors = list(tensors)
        fours = ([one, *found[1:]] for one in tensors if (found := self._of(one)) is not None)
        self._given_off = max([self._given_off, *map(_rows_off, fours)])
        known = [(one, self._of(one)) for one in tensors if _has_rows(one, samples)]
        known = [(one, found[1:]) for one, found in known if found is not None]
        if known and all(all(map(torch.equal, found, _choices(one, samples))) for one, found in known):
            return
        if not self.mixes or all(torch.isin(_sums(other), _sums(one)).all() for one, found in known for other in found):
            self.mixes, self._others = False, WeakTensorKeyDictionary()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Run an operator, and run it with other samples, and with the whole batch's size, besides."""
        given = (args, kwargs or {})
        tensors = tensors_in(given)
        others = [] if torch_adapter.in_backward() else self.sizes.run(func, given, tensors)
        result = self._run_exchanged(func, given, tensors)
        self.sizes.keep(tensors_in(result), others)
        return result

    def _run_exchanged(self, func: Any, given: Any, tensors: Sequence[torch.Tensor]) -> Any:
        args = given[0]
        followed = [one for one in tensors if self._of(one) is not None]
        if not followed or torch_adapter.in_backward():
            result = func(*args, **given[1])
            self.kept.read(func, given, tensors, found := tensors_in(result), followed, self._items)
            rows = self._listed.read(func, given, tensors, found)
            self.follow(rows, self._samples, int(func._schema.is_mutable))
            return result
        aten = func.namespace == "aten"
        ours = aten and torch.Tag.nondeterministic_seeded not in func.tags
        others = [self._run(func, given, place) for place in (1, 2, 3)] if ours else []
        result = func(*args, **given[1])
        self.mixes |= func.overloadpacket in _ORDERS and followed[0] is args[0] and len(followed) == 1
        for one in () if aten else followed:
            self._others.pop(one, None)
        if isinstance(result, float) and len(repr(result)) > _WRITTEN:
            self._items[result] = [other.item() for other in self._of(followed[0])[1:]]
        elif isinstance(result, int | float) and not isinstance(result, bool) and float(result).is_integer():
            self._counts.add(float(result))
        found = tensors_in(result)
        self.kept.read(func, given, tensors, found, followed, self._items)
        same = bool(others) and all(len(one) == len(found) for one in others)
        for one, *three in zip(found, *others, strict=True) if same else ():
            if self._affords(one):
                # torch counts a change in place, and has a view share its count, when this has returned.
                now = _version(followed[0] if func.is_view else one)
                self._others[one] = [(now, now + func._schema.is_mutable), *three]
                if len(followed) == 1 and one.dim() == followed[0].dim() == 0 and one is not followed[0]:
                    self._numbers[one] = followed[0], func, given
        for one in written(func, given):
            self.kept.wrote(one, _places(one, self._others.get(one, ())[1:], self._samples))
        return result

    def _of(self, one: torch.Tensor) -> Any:
        """Return what is known of a tensor; None if nothing is, or something has changed it unseen."""
        known = self._others.get(one)
        return known if known is not None and _version(one) in known[0] else None

    def _affords(self, one: torch.Tensor) -> bool:
        nbytes = 3 * one.numel() * one.element_size()
        if self._bytes + nbytes > _MOST_BYTES:
            return False
        self._bytes += nbytes
        if one.is_floating_point() and one.dtype.itemsize < self._lowest.itemsize:
            self._lowest = one.dtype if one.is_cpu else torch.float16  # GPUs round float32 to TF32
        return True

    def _run(self, func: Any, given: Any, place: int) -> list[torch.Tensor]:
        """Return what an operator gives with other samples; nothing where it fails."""
        changes = func._schema.is_mutable or "batch_norm" in func._schema.name  # whose statistics torch leaves out

        def other(one: torch.Tensor) -> torch.Tensor:
            known = self._of(one)
            return (one.detach().clone() if changes else one) if known is None else known[place]

        def number(one: Any) -> Any:
            return self._items[one][place - 1] if isinstance(one, float) and one in self._items else one

        try:
            args, kwargs = mapped(given, other)
            args, kwargs = [number(one) for one in args], {key: number(one) for key, one in kwargs.items()}
            with enable_reentrant_dispatch(), torch_adapter.unsaved(), warnings.catch_warnings(action="ignore"):
                return tensors_in(func(*args, **kwargs))
        except Exception:  # sizes that one choice of samples has need not fit another
            return []

    def meet(self, loss: torch.Tensor, samples: int, *, stated: bool = False, times: bool = True) -> float:
        """Return how far a loss is from a sum of one term for each sample, relative; 0 where it is one, or not known.

        What it divides by is looked at, too: a count is such a sum. `stated` says whether the program has told by what
        losses are weighted where their graph does not tell; `times` whether it is the loss times what it divides by.
        """
        known = self._of(loss)
        if self.communicates or samples < 2:
            return 0.0
        if self._given_off > _TOLERANCES.get(self._lowest, _LOW):
            return self._given_off
        if known is None or any(one.numel() != 1 for one in known[1:]):
            return 0.0
        four = [loss, *known[1:]]
        counts = [divisors(one, samples) if times else () for one in four]
        if len({len(one) for one in counts}) > 1 or (stated and not counts[0]):
            return 0.0
        least = _TOLERANCES.get(self._lowest, _LOW)
        if not all(map(_alike, zip(*map(_shares, counts), strict=True))):
            off = _factors_off([[term.factor for term in terms(one, samples)] for one in four], counts)
            return off if off > least else 0.0
        by = [one[0] if one else 1.0 for one in counts]
        values = [float(one.detach()) for one in four]  # 0 / 0 adds nothing, 1 / 0 what is not known
        off = _off([v * n if n or v == v else 0.0 for v, n in zip(values, by, strict=True)])
        off = max(off, _off(by) if min(by) > 1 else 0.0)
        return off if off > least else 0.0

    def guards(self, loss: torch.Tensor, samples: int, ranks: int) -> tuple[bool, bool]:
        """Return whether a loss divides by more than it counts (`count + 1`), and whether it may where less counts."""
        now = later = False
        if self.communicates:
            return now, later
        for by in (one.divisor for one in terms(loss, samples) if one.divisor is not None):
            for one in [one for one in self._numbers if one.data_ptr() == by.data_ptr()]:
                count = one
                while count in self._numbers:
                    count = self._numbers[count][0]
                n = float(count.detach())
                values = (n or _MANY, n * ranks or _MANY, 2.0, _MANY)
                each = [self._computed(one, torch.full_like(count, v)) / v for v in values]
                now |= abs(each[0] - each[1]) > _COUNT * abs(each[1])
                later |= abs(each[2] - each[3]) > _COUNT * abs(each[3])
        return now, later and not now

    def taken(self, divisors: Iterable[float]) -> tuple[bool, bool]:
        """Return whether a loss divides by a count that the program has taken, and whether by a larger number instead.

        Args:
            divisors: Numbers of the program, by some of which the loss divides sums.
        """
        least = min((one for one in self._counts if one > 0), default=math.inf)
        known = {one for one in divisors for n in self._counts if n > 0 and _is_times(one, n)}
        return bool(known), any(one > least and one not in known for one in divisors)

    def _computed(self, number: torch.Tensor, count: torch.Tensor) -> float:
        """Return what a number would be if what it was computed of were another count."""
        steps = [number]
        while steps[-1] in self._numbers:
            steps.append(self._numbers[steps[-1]][0])
        for one in reversed(steps[:-1]):
            source, func, given = self._numbers[one]
            args, kwargs = mapped(given, functools.partial(_put, source, count))
            count = func(*args, **kwargs)
        return float(count.detach())


def _named(tensors: Iterable[torch.Tensor]) -> list[tuple[int, torch.Tensor]]:
    return [(id(one), one) for one in tensors]


def _has_rows(one: torch.Tensor, samples: int) -> bool:
    return bool(one.dim()) and len(one) == samples and one.layout is torch.strided


def _choices(rows: torch.Tensor, samples: int) -> list[torch.Tensor]:
    """Return what stands for the rows of samples: halves a and b as b' and a', a and a', b' and b (see above)."""
    a, b = list(range(samples // 2)), list(range(samples // 2, samples))
    like_a, like_b = b[:1] * len(a), (a or b)[:1] * len(b)
    return [rows[choice] for choice in (like_a + like_b, a + like_b, like_a + b)]


def _unlike(one: torch.Tensor, other: torch.Tensor) -> bool:
    with torch_adapter.unsaved():
        return one.shape != other.shape or not torch.equal(one.detach(), other.detach())


def _places(one: torch.Tensor, three: Sequence[torch.Tensor], samples: int) -> set[int]:
    """Return the dims in which a tensor has a place for each sample, as shows in what it is with other choices."""
    found = set[int]()
    with torch_adapter.unsaved():
        for dim in (dim for dim, size in enumerate(one.shape) if size == samples):
            choices = _choices(one.detach().movedim(dim, 0), samples)
            others = [other.detach().movedim(dim, 0) for other in three if other.shape == one.shape]
            if len(others) == 3 and all(map(_near, others, choices)):
                found.add(dim)
    return found


def _near(one: torch.Tensor, other: torch.Tensor) -> bool:
    if not one.is_floating_point():
        return torch.equal(one, other)
    return bool((one - other).norm() <= _LOW * other.norm())


def _sums(rows: torch.Tensor) -> torch.Tensor:
    return _real(rows).double().reshape(len(rows), -1).sum(1)


def _put(source: torch.Tensor, instead: torch.Tensor, one: torch.Tensor) -> torch.Tensor:
    return instead if one is source else one


def _version(one: torch.Tensor) -> int:
    return 0 if one.is_inference() else one._version


def _is_times(one: float, count: float) -> bool:
    return round(one / count) > 0 and abs(one / count - round(one / count)) < _COUNT


def _factors_off(factors: Sequence[Sequence[float]], counts: Sequence[Sequence[float]]) -> float:
    """Return how far factors of a loss's means depend on which samples meet, relative.

    A factor may be constant, a count, or a share of what all means count: their product is a sum over samples then.
    """
    worst = 0.0
    for i in range(min(map(len, (*factors, *counts)))):
        known = [(f[i], n[i], sum(n)) for f, n in zip(factors, counts, strict=True) if n[i] and math.isfinite(f[i])]
        ways = [[f for f, _, _ in known], [f / n for f, n, _ in known], [f * all_ / n for f, n, all_ in known]]
        worst = max(worst, min((max(one) - min(one)) / (max(one) or 1.0) if one else 0.0 for one in ways))
    return worst


def _shares(counts: Sequence[float]) -> list[float]:
    return [one / (counts[0] or 1.0) for one in counts]


def _alike(shares: Sequence[float]) -> bool:
    return all(math.isclose(one, shares[0]) for one in shares)


def _rows_off(four: Sequence[torch.Tensor]) -> float:
    """Return how far rows that a model is given are from a selection that goes by each sample alone, relative.

    The sums of such rows, and of their cubes, are sums of one term for each sample (those of squares are so where rows
    are normalised over a batch). Where not even the numbers of rows are, nothing is said: repeated rows may have been
    left out.
    """
    sizes = [len(one) if one.dim() else 0 for one in four]
    if len({one.shape[1:] for one in four}) > 1 or sizes[0] + sizes[1] != sizes[2] + sizes[3] or not min(sizes):
        return 0.0
    with torch_adapter.unsaved():
        flat = [_real(one).double().reshape(len(one), -1) for one in four]
        a, b, c, d = (torch.cat([one.sum(0), one.pow(3).sum(0)]) for one in flat)
        size = max(float(one.abs().max()) for one in (a, b, c, d)) if a.numel() else 0.0
        off = float((a + b - c - d).abs().max()) / size if size else 0.0
    return off if math.isfinite(off) else 0.0


def _real(one: torch.Tensor) -> torch.Tensor:
    return torch.view_as_real(one.detach()) if one.is_complex() else one.detach()


def _off(four: Sequence[float]) -> float:
    """Return how far the sum of the first two is from that of the others, relative; 0 where one is no number."""
    a, b, c, d = four
    size = max(map(abs, four))
    return abs(a + b - c - d) / size if all(map(math.isfinite, four)) and size else 0.0
