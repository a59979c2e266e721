"""Which batch is being trained on: what a loader yielded last, for whoever must know the batch's weight.

The user's loop hands tensors, not weights, from the loader to the model. So loaders leave a note here, and the model
reads it when it runs forward. Where several loaders are open at once with batches of different weights, the tensors
themselves show which batch is meant.
"""

from __future__ import annotations

import dis
import weakref
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any, Protocol

import torch

from hocket.comm import torch_adapter

from ..mesh import World
from ._batch_shard import BatchShard
from ._collated import Alone, alone_like, lengths_in, shortest_alone
from ._packed import Packed
from .trees import tensors_in


@dataclass(slots=True)
class Note:
    """What a loader says of the batch it has yielded."""

    # this rank's part of the global batch; None where ranks are not in step (evaluation shards)
    share: BatchShard | None
    storages: tuple[weakref.ref[torch.UntypedStorage], ...] = ()  # weak references to the memory of the batch's tensors
    nbytes: tuple[int, ...] = ()  # their sizes
    places: tuple[int, ...] = ()  # their addresses
    counted: float | None = None  # the weight, where the loss is a mean over something else than samples
    stated: bool = False  # whether the program has said so, and not the loss's graph
    # the weight of one thing to count, where the program has said how many there are; 0 if there are none
    unit: float = 0.0
    summed: torch.Tensor | None = None  # the latest loss, where ranks' losses add up to that of the batch
    tensors: tuple[weakref.ref[torch.Tensor], ...] = ()
    drawn: Sequence[Any] = ()  # what tells the whole batch from others, the same on every rank
    alone: Alone | None = None  # some of its samples as they are without the others; None where they are the same
    packed: Packed | None = None  # one of its samples by itself, where they are packed into one row
    lengths: tuple[int, ...] = ()  # of its samples, where they are in a list and differ
    marks: set[int] = field(default_factory=set)  # places in the graph of what models have made of it
    used: bool = False  # whether a model that trains was called with it
    number: int = 1  # of the batches of this pass of the loader

    @property
    def weight(self) -> float:
        """By what this rank's mean counts in the average over ranks."""
        if self.counted is not None:
            return self.counted
        return 1.0 if self.share is None else self.share.weight

    def alone_like(self, given: Any) -> Alone | None:
        """Return what was made of the batch for those samples that are padded otherwise alone; None if unknown."""
        known = alone_like(given, [one() for one in self.tensors], self.alone)
        return known if known is not None else shortest_alone(given, self.lengths)

    def packed_like(self, given: Any) -> Any:
        """Return what was made of the batch for its packed sample by itself; None if unknown."""
        found = self.packed and alone_like(given, [one() for one in self.tensors], Alone(self.packed.batch, 0, 0))
        return found.batch if found else None

    def part(self, inputs: Any) -> float:
        """Return what part of the batch a model is called with, by its inputs' memory; 0 where it is not known."""
        alive = ((one(), nbytes) for one, nbytes in zip(self.storages, self.nbytes, strict=True))
        places = {storage.data_ptr(): nbytes for storage, nbytes in alive if storage is not None}
        for tensor in tensors_in(inputs):
            if tensor.layout is torch.strided and (whole := places.get(tensor.untyped_storage().data_ptr())):
                if self.share is not None and tensor.shape[:1] == (self.share.samples,):
                    return 1.0  # all samples, of which this may be some steps in time
                return tensor.numel() * tensor.element_size() / whole
        return 0.0

    def holds(self, inputs: Any) -> bool:
        """Return whether one of these tensors begins in the memory of the batch's, and not beside it."""
        rows = zip(self.storages, self.places, self.nbytes, strict=True)
        places = [range(place, place + nbytes) for one, place, nbytes in rows if one() is not None]
        given = [tensor for tensor in tensors_in(inputs) if tensor.layout is torch.strided]
        return any(_place(tensor) in place for tensor in given for place in places)


class BatchListener(Protocol):
    """Who wants to hear of every batch as it is yielded."""

    def batch_began(self, note: Note) -> None:
        """Take notice of a batch that a loader is about to yield, or that is current again after an inner loop."""

    def batches_ended(self) -> None:
        """Take notice that a loader has yielded its last."""


before_evaluation: list[Callable[[World], None]] = []
"""Collective operations that all ranks run together before a loader for evaluation begins."""

listeners: weakref.WeakSet[BatchListener] = weakref.WeakSet()

_AHEAD = 4  # batches that are kept: a program may read ahead


@dataclass
class _InUse:
    """What loaders have yielded, and what the program has done with it since."""

    # By the address of a tensor that was yielded.
    kept: dict[int, tuple[weakref.ref[torch.UntypedStorage], Note]] = field(default_factory=dict)
    open: dict[int, Note] = field(default_factory=dict)  # by loader, the one that yielded last at the end
    last: Note | None = None
    trained: Note | None = None  # the last whose ranks are in step
    left: Note | None = None  # of the batch at which a loop has ended early, until a model or a loader is used again
    counting: bool | None = None
    recent: list[BatchShard] = field(default_factory=list)  # those of batches that differ, the latest first
    # Those of batches that models were called with since an optimizer's latest step.
    used: deque[Note] = field(default_factory=lambda: deque(maxlen=_AHEAD))
    unused: deque[Note] = field(default_factory=lambda: deque(maxlen=_AHEAD))  # yielded since a model was called
    stepped: bool = False  # whether an optimizer has made a step since a model was called
    called: Note | None = None  # that of which a model was called last
    called_since: bool = False  # whether one was called since a loader's latest batch
    propagated_since: bool = False  # whether gradients were computed since a loader's latest batch


_now = _InUse()


def enter(
    owner: object,
    share: BatchShard | None,
    batch: Any,
    counted: float | None = None,
    unit: float = 0.0,
    drawn: Sequence[Any] = (),
    alone: Alone | None = None,
    packed: Packed | None = None,
) -> None:
    """Note that `owner` is about to yield `batch`, whose weight is `counted`, of `unit` each, if that is known.

    It is the part of the batch that `drawn` tells; some samples of it are padded otherwise `alone`, or one
    is by itself what `packed` says.
    """
    _now.left, _now.called_since, _now.propagated_since = None, False, False
    tensors = [tensor for tensor in tensors_in(batch) if tensor.layout is torch.strided and tensor.numel()]
    storages = tuple(weakref.ref(tensor.untyped_storage()) for tensor in tensors)
    before = _now.open.pop(id(owner), None)
    nbytes = tuple(tensor.numel() * tensor.element_size() for tensor in tensors)
    places = tuple(_place(tensor) for tensor in tensors)
    note = Note(share, storages, nbytes, places, counted, counted is not None, unit)
    _now.last = _now.open[id(owner)] = note
    note.tensors, note.drawn, note.alone = tuple(map(weakref.ref, tensors)), drawn, alone
    note.packed, note.number = packed, 1 if before is None else before.number + 1
    note.lengths = () if share is None else lengths_in(batch, share.samples)
    if share is not None:
        _now.unused.append(note)
        _now.trained = note
        _now.recent[:] = [share, *(one for one in _now.recent if one != share)][:_AHEAD]
    for tensor in tensors:
        _remember(tensor, note)
    _tell(note)


def _place(tensor: torch.Tensor) -> int:
    return 0 if tensor.is_meta else tensor.data_ptr()


def _remember(tensor: torch.Tensor, note: Note) -> None:
    """Keep a note for as long as a tensor's memory is there: programs may keep batches, and use them later."""
    key, kept = _place(tensor), _now.kept

    def forget(reference: weakref.ref[torch.UntypedStorage]) -> None:
        if key in kept and kept[key][0] is reference:
            del kept[key]

    kept[key] = weakref.ref(tensor.untyped_storage(), forget), note


def leave(owner: object, *, early: bool = False) -> None:
    """Note that `owner` yields no more, `early` if it has more: an outer loader's batch is the current one again."""
    _now.called_since = False
    for listener in listeners:
        listener.batches_ended()
    mine = _now.open.pop(id(owner), None)
    _now.left = mine if early else None
    if _now.open and mine is _now.last:
        _now.last = next(reversed(_now.open.values()))
        _tell(_now.last)


@contextmanager
def put_back() -> Iterator[None]:
    """Open a block after which the batch in use is that of before: an evaluation between two steps, say."""
    before = _now.last
    try:
        yield
    finally:
        if not _now.open:
            _now.last = before


def _tell(note: Note) -> None:
    for listener in listeners:
        listener.batch_began(note)


def explain(error: BaseException) -> None:
    """Add to an error that has ended a loop over a loader that this rank had a part of the batch.

    Shapes in the program may go by the whole. An error of Hocket's own says what it has to.
    """
    share = None if _now.left is None else _now.left.share
    if share is None or not 0 < share.samples < share.total or not isinstance(error, _OF_SHAPES):
        return
    trace = error.__traceback__
    while trace is not None and trace.tb_next is not None:
        trace = trace.tb_next
    if trace is None or (owner := str(trace.tb_frame.f_globals.get("__name__"))).startswith("hocket."):
        return
    raised = trace.tb_frame.f_code.co_code[trace.tb_lasti] == dis.opmap["RAISE_VARARGS"]
    if raised and not owner.startswith("torch.") and not isinstance(error, AssertionError):
        return  # the program knows why
    error.add_note(
        f"this rank had {share.samples} of the {share.total} samples of its batch, as hocket divides the first "
        "axis of what the loader gives: a number that stands for the size of the whole batch does not fit (take "
        "len(batch)), nor does what has another axis for samples, or is one whole, as a graph is"
    )


_OF_SHAPES = (RuntimeError, ValueError, IndexError, TypeError, AssertionError)


def contested() -> bool:
    """Return whether several loaders are open whose batches weigh differently, so that it matters which one is meant.

    All ranks come to the same answer: the size of the batch says whether parts are unequal, not this rank's weight.
    """
    return _differ(_now.open.values())


def _differ(notes: Iterable[Note]) -> bool:
    uneven = {id(note) if note.stated else note.share and note.share.uneven for note in notes}
    uneven.discard(None)
    return len(uneven) > 1


def called(note: Note | None, inputs: Any, marks: set[int]) -> None:
    """Take notice of a model that trains: what it was called with, and the marks of what it has made of that."""
    if _now.stepped:
        _now.used.clear()
        _now.stepped = False
    if note is None:
        return
    note.used = _now.called_since = True
    _now.called = note
    while any(one is note for one in _now.unused):
        _now.unused.popleft()
    samples = None if note.share is None or note.holds(inputs) else note.share.samples
    joined = samples is not None and all(one.shape[:1] != (samples,) for one in tensors_in(inputs))
    for one in list(_now.open.values()) if joined and len(_now.open) > 1 else [note]:
        one.marks |= marks
        if not any(one is other for other in _now.used):
            _now.used.append(one)


def propagated() -> None:
    """Take notice of a back-propagation."""
    _now.propagated_since = True


def averaged() -> Note | None:
    """Return the note of the batch that a number is a loss of: the one in use, unless the program reads ahead.

    That one it has not called a model with, but with another batch since, or not computed gradients since. A program
    may also go on with batches of a loader that yields no more.
    """
    note = current()
    if note is None or _now.called is None or note.share is None or _now.called.share is None:
        return note
    ahead = not note.used and (_now.called_since or not _now.propagated_since) if _now.open else _now.called_since
    return _now.called if ahead else note


def stepped() -> None:
    """Take notice of an optimizer's step: the next batch that a model is called with is of another one."""
    _now.stepped = True


def meant(value: Any) -> Note | None:
    """Return the note of the batch that a loss is of, where several loaders are open whose batches weigh differently.

    Its graph tells; without one, it is that of the batch that was used since the optimizer's latest step.

    Raises:
        RuntimeError: It is of several, or may be.
    """
    notes = list(_now.used)
    if isinstance(value, torch.Tensor) and value.grad_fn is not None:
        notes = [one for one in (*_now.open.values(), *_now.used) if torch_adapter.reaches(value, one.marks)]
    if _differ(notes):
        raise RuntimeError(
            "hocket.average of a number that is, or may be, of batches of several loaders, of which ranks have other "
            "parts: no one weight is right. Average the loss of each batch, as a tensor of which backward() can be "
            "called; or take hocket.total(loss.item() * len(batch), len(batch)) of each; or make all batches of a size "
            "that the ranks can share equally"
        )
    return notes[-1] if notes else _now.last


def current(inputs: Any = None) -> Note | None:
    """Return the note of the batch in use; None if no loader has yielded any.

    Tensors of a batch among the model's `inputs` say which one, even if others were yielded since.
    """
    _now.left = None
    for tensor in tensors_in(inputs):
        plain = type(tensor) is torch.Tensor and tensor.layout is torch.strided and not tensor.is_meta
        if plain and (kept := _now.kept.get(tensor.data_ptr())) is not None and kept[0]() is not None:
            return kept[1]
    if len(_now.open) > 1 and inputs is not None and len({note.weight for note in _now.open.values()}) > 1:
        pointers = {t.untyped_storage().data_ptr() for t in tensors_in(inputs) if t.layout is torch.strided}
        for note in reversed(_now.open.values()):
            for reference in note.storages:
                storage = reference()
                if storage is not None and storage.data_ptr() in pointers:
                    return note
    return _now.last if inputs is None else _of_as_many(inputs)


def _of_as_many(inputs: Any) -> Note | None:
    """Return the note of inputs that the program has made: of the first batch not used yet, if it reads ahead.

    Where batches not used yet have unlike parts, that of as many samples; the latest one if it may be that.
    """
    waiting = [one for one in _now.unused if one.share is not None]
    if _now.last is None or len(waiting) < 2 or waiting[-1] is not _now.last:
        return _now.last
    rows = {tensor.shape[0] for tensor in tensors_in(inputs) if tensor.dim()}
    found = [one for one in waiting if one.share is not None and max(1, one.share.samples) in rows]
    unlike = any(one.share != _now.last.share for one in found)
    return _now.last if not found or (unlike and found[-1] is _now.last) else found[0]


def together() -> bool:
    """Return whether several loaders for training are under way, so that a step may use a batch of each."""
    return sum(note.share is not None for note in _now.open.values()) > 1


def is_open(note: Note) -> bool:
    """Return whether the loader has yielded nothing since, and may yield more."""
    return any(one is note for one in _now.open.values())


def recent(world: int) -> list[BatchShard]:
    """Return what parts of a batch loaders have given lately to one of so many ranks, the latest first."""
    return [one for one in _now.recent if one.world == world]


def trained() -> Note | None:
    """Return the note of the last batch that was not for evaluation; None if there was none."""
    return _now.trained


def evaluating() -> bool:
    """Return whether a loop over an evaluation's batches is under way."""
    return any(note.share is None for note in _now.open.values())


@contextmanager
def counting(samples: int) -> Iterator[None]:
    """Open a block in which `samples` of what goes through the model count; none if it is there only to keep step."""
    before, _now.counting = _now.counting, samples > 0
    try:
        yield
    finally:
        _now.counting = before


def counts() -> bool:
    """Return whether what goes through the model now counts in statistics over ranks."""
    if _now.counting is not None:
        return _now.counting
    note = current()
    return note is None or note.share is None or note.share.samples > 0
