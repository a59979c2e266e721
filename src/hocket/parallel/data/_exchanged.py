"""Computes a loss besides for other choices of the same samples, which shows what no derivative does."""

import functools
import math
import warnings
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from typing import Any

import torch
from torch.overrides import enable_reentrant_dispatch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.weak import WeakTensorKeyDictionary

from hocket.comm import torch_adapter

from ..batches import addends, divisors, mapped, tensors_in, terms
from ._batch_sizes import BatchSizes
from ._cancelled import CancelledSums
from ._choice_sums import factors_off, in_proportion, sums_off
from ._choices import OTHERS, GivenRows, choices, has_rows, is_normalised, places, rows_off, sums, unlike
from ._counts import Counts
from ._decisions import decision
from ._kept import KeptTensors, owned, written
from ._listed_samples import ListedSamples
from ._one_sample import OneSample

_PLACES = range(1, 1 + OTHERS)
_MOST_BYTES = OTHERS * 80 * 2**20
"""What other choices of samples may take: nothing is known of a loss whose operands are larger."""

_TOLERANCES = {torch.float64: 1e-6, torch.float32: 3e-3}
_LOW = 5e-2
_TERM, _LEAST = 10.0, 1e-3
"""What a term of a loss may be off, relative to itself and to the loss, in units of what the loss may be."""
_ORDERS = (torch.ops.aten.flip, torch.ops.aten.roll, torch.ops.aten.index, torch.ops.aten.index_select)
_SELECTING = (torch.ops.aten.index, torch.ops.aten.index_select, torch.ops.aten.masked_select)
_OF_MODELS = "torch.distributed.fsdp", f"{__package__}._used_parameters"
"""What talks to other ranks of parameters, where they are sharded, and not of samples."""

_WRITTEN = 8  # characters: numbers of a program's text are short, and computed ones are not
_LOOKED_AT = 2**16  # numbers among which a count is looked for


class ExchangedSamples(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Runs what is computed from a batch and the model's outputs also with halves of the samples exchanged.

    Attributes:
        communicates: Whether ranks have talked to each other; nothing is said of a loss then, until the next batch.
        mixes: Whether samples were put in another order, as mixup does to combine each with another.
        placed: Whether a loss of this batch depends on where samples are in it.
        normalised: Whether it depends on numbers that the program, and not torch, may have normalised over samples.
        linked: Whether something else may have a place for each sample, so that nothing is said of that.
        kept: What the program keeps from batch to batch.
        sizes: What it computes from how many samples a rank has.
        counts: What it counts of the batch.
        decided: Gives what is called with what the program decides by a number of its samples, and where.
        reduces: Whether the program itself sums or averages a statistic over ranks.
        reduces_counts: Whether it does so with a whole number, which may be how many samples a sum is of.
    """

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._on = ExitStack()
        self._blocks, self._rests = 0, False  # that end by themselves, in which this has begun; whether it looks away
        self._batch, self._samples = object(), 0
        self.kept, self._listed = KeptTensors(), ListedSamples()
        self.sizes = BatchSizes(
            lambda one: has_rows(one, self._samples) and self._of(one) is not None, self._note, self._taken
        )
        self.decided: Callable[[], Callable[[str], None] | None] = lambda: None
        self.reduces = self.reduces_counts = False
        self.forget()

    def forget(self) -> None:
        """Begin anew."""
        self.communicates = self.mixes = self.linked = self.placed = self.normalised = False
        self._given = GivenRows()
        self._one = OneSample()
        self._others: Any = WeakTensorKeyDictionary()  # versions and others of what depends on samples
        self._made: Any = WeakTensorKeyDictionary()  # tensors that are computed of numbers of the program alone
        self._terms: dict[int, torch.Tensor] = {}  # numbers that have others, by their places in the graph
        self.counts = Counts()
        self._items: dict[float, list[float]] = {}  # numbers that the program has taken, and their others
        self._bytes, self._lowest = 0, torch.float64
        self._given_off = 0.0  # how far what models were given is from samples by themselves
        self._own: dict[int, torch.Tensor] = {}  # what had rows of samples when ranks began to talk, by its identity
        self._cancelled = CancelledSums()
        self._singles = dict[Any, set[int]]()  # where samples are that the program has taken alone, by what from

    def begin(self) -> None:
        """Begin to look, unless another such mode is on, which may end before this one."""
        mode, blocks = torch_adapter.dispatch_mode(), torch_adapter.restoring_blocks()
        if mode is self and blocks < self._blocks:  # what it has begun in is over, so that torch calls it no more
            self._on.close()
            mode = None
        if mode is None:
            self._blocks = blocks
            self._on.enter_context(torch_adapter.uncompiled())  # torch compiles nothing while such a mode is on
            self._on.enter_context(self)
            self._on.enter_context(torch_adapter.hearing_collectives(self._hear))
        if mode is None or mode is self:
            self._rests = False
            self.sizes.begin()

    def end(self) -> None:
        """Pause, unless the program has begun such a mode since; in its compiled code and inference mode look away."""
        self.sizes.end()
        if torch_adapter.dispatch_mode() is self:
            self._rests = torch_adapter.restoring_blocks() > self._blocks
            if not self._rests:
                self._on.close()

    def hidden(self) -> AbstractContextManager[Any]:
        """Open a block of which this mode is not told, where it looks away; torch gives modes a number for a tensor."""
        return torch_adapter.unseen() if self._rests and torch_adapter.dispatch_mode() is self else nullcontext()

    @contextmanager
    def paused(self) -> Iterator[None]:
        """Open a block in which nothing is looked at: what this package computes of a loop's loss is not the loop's."""
        on = torch_adapter.dispatch_mode() is self and not self._rests
        if on:
            self.end()
        try:
            yield
        finally:
            if on:
                self.begin()

    def _hear(self) -> None:
        if self._rests or torch_adapter.called_by(*_OF_MODELS):
            return
        if not self.communicates:  # what follows may have other ranks' samples, and so may what is changed then
            self._own = {key: one.detach().clone() for key, one in _named(self._others) if has_rows(one, self._samples)}
        self.communicates = True
        self.kept.forget()
        if (one := torch_adapter.reduced()) is not None:
            counts = one.detach().flatten()[:_LOOKED_AT].double().abs()
            self.reduces |= one.is_floating_point()
            self.reduces_counts |= bool(((counts > 0) & (counts == counts.round())).any())

    def next(self, batch: object, samples: int) -> bool:
        """Pause for a new batch, and take what is left of those before for what the program keeps.

        Returns:
            Whether models were given samples of the batch before by where they are in it, and not all of them.
        """
        if batch is self._batch:
            return False  # another model has told of it
        self.end()
        placed, self._given = self._given.placed and not self.communicates, GivenRows()
        for one in list(owned):
            self._others.pop(one, None)
        computed = ((one, others) for one, (versions, *others) in self._others.items() if len(versions) == 2)
        depends = ((one, others) for one, others in computed if any(unlike(one, other) for other in others))
        left = (one for one, others in depends if not places(one, others, self._samples))
        self.kept.keep(() if self._samples == 1 else left, samples)
        self._one.next(follows=self._samples == samples == 1)
        self._batch, self._samples, self._items, self._given_off = batch, samples, {}, 0.0
        self.counts.next()
        self._terms, self._singles, self._cancelled = {}, {}, CancelledSums()
        self.linked = self.placed = self.normalised = False
        if self.communicates:
            others, own = self._others, self._own
            self.forget()
            for key, one in _named(others):
                if key in own and not one.requires_grad and torch.equal(one, own[key]) and self._affords(one):
                    self._others[one] = others[one]
        return placed

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
            if has_rows(one, samples) and one not in self._others and self._affords(one):
                rows = self._one.choices(one.detach()) if samples == 1 else choices(one.detach(), samples)
                versions = (torch_adapter.version_of(one) + changes,)
                self._others[one] = [versions, *(row.requires_grad_(one.requires_grad) for row in rows)]

    def _some(self, one: torch.Tensor) -> list[torch.Tensor]:
        """Return a tensor and its others, in the order of `choices`; of one sample those of two."""
        others: list[torch.Tensor] = self._of(one)[1:]
        return self._one.ordered(others) if self._samples == 1 else [one, *others]

    def given(self, tensors: Iterable[torch.Tensor], samples: int) -> None:
        """Take notice of what a model is given, whose outputs are followed next, as rows in that order.

        If the program has put samples into another order (by their lengths, say), or it is not known where they come
        from, what it has of the batch besides may have another order, and is followed no more.
        """
        every = [(one, found[1:] if (found := self._of(one)) else None) for one in tensors]
        self._given_off = max([self._given_off, *(rows_off([one, *found[:3]]) for one, found in every if found)])
        if torch.is_grad_enabled() and not torch_adapter.in_backward():
            moved = [found[-1] if found and samples > 1 else None for _, found in every]
            self._given.add([one for one, _ in every], moved)
        known = [(one, found) for one, found in every if found and has_rows(one, samples)]
        if samples == 1 or known and all(all(map(torch.equal, found, choices(one, samples))) for one, found in known):
            return
        if not self.mixes or all(torch.isin(sums(other), sums(one)).all() for one, found in known for other in found):
            self.mixes, self._others = False, WeakTensorKeyDictionary()

    def differentiated(
        self, outputs: Sequence[Any], inputs: Sequence[Any], gradients: Sequence[Any], again: Any
    ) -> None:
        """Follow gradients that the program has taken of what is followed, which samples may share.

        `again(outputs, inputs, other)` gives those of others of the tensors. Outputs of models, of which others are
        rows alone, have those of inputs with a row for each sample in the same order.
        """
        if self._rests or torch_adapter.dispatch_mode() is not self or torch_adapter.in_transform():
            return
        known = [one for one in gradients if isinstance(one, torch.Tensor) and one not in self._others]
        if not known or any(not isinstance(one, torch.Tensor) or self._of(one) is None for one in outputs):
            return

        def other(place: int, one: torch.Tensor) -> torch.Tensor:
            found = self._of(one)
            return one if found is None else found[place]

        try:
            with torch_adapter.unseen(), torch_adapter.unsaved(), warnings.catch_warnings(action="ignore"):
                others = [again(outputs, inputs, functools.partial(other, place)) for place in _PLACES]
        except Exception:  # a graph that the other choices of samples have not
            others = [[None] * len(gradients)] * OTHERS
        for one, source, *some in zip(gradients, inputs, *others, strict=True):
            if one is None or one in self._others:
                continue
            if all(each is not None for each in some) and self._affords(one):
                self._others[one] = [(torch_adapter.version_of(one),), *some]
            elif isinstance(source, torch.Tensor) and self._of(source) is not None and has_rows(source, self._samples):
                self.follow([one], self._samples)

    @property
    def given_off(self) -> float:
        """How far what models were given is from samples by themselves, relative; 0 where it is so, or not known."""
        least = _TOLERANCES.get(self._lowest, _LOW)
        return self._given_off if self._given_off > least and not self.communicates else 0.0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Run an operator, and run it with other samples, and with the whole batch's size, besides."""
        given = (args, kwargs or {})
        if self._rests:
            return func(*args, **given[1])
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
            if _is_exact(func) and not func._schema.is_mutable and all(one in self._made for one in tensors):
                self._made.update(dict.fromkeys(found))
            for one in written(func, given):
                self._made.pop(one if one._base is None else one._base, None)
            rows = self._listed.read(func, given, tensors, found)
            self.follow(rows, self._samples, int(func._schema.is_mutable))
            return result
        aten = func.namespace == "aten"
        others = [self._run(func, given, place) for place in _PLACES] if aten and _is_exact(func) else []
        result = func(*args, **given[1])
        self.mixes |= func.overloadpacket in _ORDERS and followed[0] is args[0] and len(followed) == 1
        for one in () if aten else followed:
            self._others.pop(one, None)
        if isinstance(result, float) and len(repr(result)) > _WRITTEN:
            known = self._of(followed[0])[1:]
            if all(one.numel() == 1 for one in known):
                self._items[result] = [one.item() for one in known]
        elif isinstance(result, int | float) and not isinstance(result, bool) and float(result).is_integer():
            self.counts.add(float(result))
        found = tensors_in(result)
        self.linked |= self._links(func, tensors, found)
        self.kept.read(func, given, tensors, found, followed, self._items)
        same = bool(others) and all(len(one) == len(found) for one in others)
        for one, *some in zip(found, *others, strict=True) if same else ():
            if len(followed) == 1:
                self._cancelled.note(func, self._some(followed[0]), one, some[0] if self._samples == 1 else one)
            if self._affords(one):
                # torch counts a change in place, and has a view share its count, when this has returned.
                now = torch_adapter.version_of(followed[0] if func.is_view else one)
                self._others[one] = [(now, now + func._schema.is_mutable), *some]
                if len(followed) == 1 and one.dim() == followed[0].dim() == 0 and one is not followed[0]:
                    self.counts.computed(one, followed[0], func, given)
        for one in written(func, given):
            if same and one._base is not None:
                self._written_through(one, one._base)
            known = [one] * OTHERS if self._samples == 1 else self._others.get(one, ())[1:]
            self.kept.wrote(one, places(one, known, self._samples))
        return result

    def _written_through(self, view: torch.Tensor, base: torch.Tensor) -> None:
        """Follow a tensor of which a part was written (`x[:, :, a:b] = other`), as its others were through theirs."""
        known, parts, now = self._others.get(base), self._others.get(view), torch_adapter.version_of(view)
        if known is None or parts is None or now not in known[0]:
            return
        pairs = zip(parts[1:], known[1:], strict=True)
        if all(part.untyped_storage().data_ptr() == whole.untyped_storage().data_ptr() for part, whole in pairs):
            self._others[base] = [(now, now + 1), *known[1:]]

    def _links(self, func: Any, tensors: Sequence[torch.Tensor], results: Sequence[torch.Tensor]) -> bool:
        """Return whether an operator takes a second sample, or what has a place for each and may not come from them.

        Who takes one sample alone does not go through them. What selects samples is taken to come from them, by numpy
        or a list.
        """
        rows = [one for one in tensors if self._samples in one.shape]
        if func.is_view and rows:
            taken = self._singles.setdefault((tensors[0].shape, tensors[0].stride()), set())
            singles = [one for one in results if one.numel() * self._samples == tensors[0].numel()]
            taken.update(int(one.storage_offset() - tensors[0].storage_offset()) for one in singles)
            if max(len(taken), len(singles)) > 1:
                return True
        numbers = (one for one in tensors if one.dtype == torch.int64 and one.dim() and one.numel())  # of classes, say
        rows += [one for one in numbers if self._samples and len(one) % self._samples == 0]  # with several for each
        others = [one for one in rows if one not in self._made and type(one) is torch.Tensor and self._of(one) is None]
        self.normalised |= any(is_normalised(one, self._samples) for one in others)
        return bool(others) and not (func.overloadpacket in _SELECTING and others[0] is not tensors[0])

    def _note(self, result: Any) -> None:
        single = isinstance(result, torch.Tensor) and result.numel() == 1 and result.grad_fn is not None
        if single and self._of(result) is not None:
            self._terms[result.grad_fn._sequence_nr()] = result

    def _taken(self, one: torch.Tensor) -> None:
        """Look what the program decides by a number of its samples."""
        if one.numel() != 1 or not one.is_floating_point() or self.communicates or self._of(one) is None:
            return
        if (tell := self.decided()) and (what := decision()):
            tell(what)

    def _of(self, one: torch.Tensor) -> Any:
        """Return what is known of a tensor; None if nothing is, or something has changed it unseen."""
        known = self._others.get(one)
        return known if known is not None and torch_adapter.version_of(one) in known[0] else None

    def _affords(self, one: torch.Tensor) -> bool:
        nbytes = OTHERS * one.numel() * one.element_size() * (1 + (self._samples == 1))
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
            if known is None:
                return one.detach().clone() if changes else one
            if one.requires_grad and not known[place].requires_grad:  # no operator tells of requires_grad_()
                known[place].requires_grad_()
            return known[place]  # type: ignore[no-any-return]

        def number(one: Any) -> Any:
            return self._items[one][place - 1] if isinstance(one, float) and one in self._items else one

        try:
            args, kwargs = mapped(given, other)
            args, kwargs = [number(one) for one in args], {key: number(one) for key, one in kwargs.items()}
            if func is torch.ops.aten.gather.default and args[2] is given[0][2]:
                args[2] = _as_far(args[2], given[0][0], args[0])
            elif func is torch.ops.aten.view.default and given[0][0].shape == (*given[0][1],):
                args[1] = args[0].shape  # by which torch.quantile makes sure of what it has sorted
            elif self._samples == 1:
                args = self._one.fitted(func, args, given[0])
            with enable_reentrant_dispatch(), torch_adapter.unsaved(), warnings.catch_warnings(action="ignore"):
                return tensors_in(func(*args, **kwargs))
        except Exception:  # sizes that one choice of samples has need not fit another
            return []

    def meet(self, loss: torch.Tensor, samples: int, *, stated: bool = False, times: bool = True) -> float:
        """Return how far a loss is from a sum of one term for each sample, relative; 0 where it is one, or not known.

        What it divides by is looked at, too: a count is such a sum. `stated` says whether the program has told by what
        losses are weighted where their graph does not tell; `times` whether it is the loss times what it divides by.
        """
        if self.given_off:
            return self.given_off
        if not samples or not self._shows(loss):
            return 0.0
        least = _TOLERANCES.get(self._lowest, _LOW)
        some, alone, samples = self._some(loss), samples == 1, max(2, samples)
        counts = [divisors(one, samples, inverse=True) if times else () for one in some]
        if len({len(one) for one in counts}) > 1 or (stated and not counts[0]):
            return 0.0
        if not in_proportion(counts):
            far = factors_off([[term.factor for term in terms(one, samples)] for one in some], counts)
            return far if far > least else 0.0
        known_by = not self.linked and all(one and all(one) for one in counts)  # or a branch is of other samples
        if known_by and loss.isfinite() and not all(one.isfinite() for one in some):
            return 1.0  # no sum of what is finite, but divided by a deviation that other choices have not
        far, by_place, size = sums_off(some, counts)
        if max(abs(float(one.detach())) for one in some) > self._cancelled.rounding:
            self.placed |= not self.linked and not alone and by_place > least
            if far <= least:
                far = max((self._term_off(one, samples, size, least) for one in addends(loss)), default=0.0)
            if far:
                return far
        far = self._cancelled.off(loss)
        return far if far > least else 0.0

    def is_mean(self, loss: torch.Tensor) -> bool:
        """Return whether the loss of a rank's only sample is known to be that of the same sample twice."""
        same = float(self._of(loss)[2].detach()) if self._shows(loss) else math.nan
        return math.isclose(float(loss.detach()), same, rel_tol=_TOLERANCES.get(self._lowest, _LOW))

    def _shows(self, loss: torch.Tensor) -> bool:
        """Return whether a loss is known for other choices of samples."""
        known = None if self.communicates or not self._one.joined else self._of(loss)
        return known is not None and all(one.numel() == 1 for one in known[1:])

    def guards(self, loss: torch.Tensor, samples: int, ranks: int) -> tuple[bool, bool]:
        """Return whether a loss divides by more than it counts, and whether it may; see `Counts.guards`."""
        return (False, False) if self.communicates else self.counts.guards(loss, samples, ranks)

    def _term_off(self, node: Any, samples: int, size: float, least: float) -> float:
        """Return how far a term of a loss of this size is from a sum of one for each sample, relative to the loss."""
        term = None if node is None else self._terms.get(node._sequence_nr())
        known = None if term is None else self._of(term)
        if term is None or known is None or any(one.numel() != 1 for one in known[1:]) or not size:
            return 0.0
        some = self._some(term)
        counts = [divisors(one, samples, inverse=True) for one in some]
        if len({len(one) for one in counts}) > 1 or not in_proportion(counts):
            return 0.0
        far, by_place, mine = sums_off(some, counts)
        share = mine / size

        def matters(one: float) -> bool:
            return one > _TERM * least and one * share > _LEAST * least

        self.placed |= not self.linked and self._samples != 1 and matters(by_place)
        return far * share if matters(far) else 0.0


def _named(tensors: Iterable[torch.Tensor]) -> list[tuple[int, torch.Tensor]]:
    return [(id(one), one) for one in tensors]


def _as_far(place: torch.Tensor, source: torch.Tensor, other: torch.Tensor) -> torch.Tensor:
    """Return what is as far in another row as a place in one: by this `torch.quantile` takes what it has sorted.

    It computes the place from the row's length, which other choices of samples need not have (`losses[mask]`).
    """
    if source.dim() != 1 or place.numel() != 1 or len(source) == len(other):
        return place
    return (place * (len(other) - 1) / max(1, len(source) - 1)).round().long()


def _is_exact(func: Any) -> bool:
    return torch.Tag.nondeterministic_seeded not in func.tags
