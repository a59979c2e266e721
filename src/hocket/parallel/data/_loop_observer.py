"""Looks on at a program's own loop: what it computes of a distributed model, from which batches, and in which order.

Nobody knows a loop's loss before it is computed. So the first batches, forward passes and losses are looked at: by what
a loss divides, whether samples meet in it, which numbers differ from rank to rank. From that come the weight by which a
rank's gradients make those of one device, a refusal, or a warning. What a loop does later is looked at now and then.
"""

import threading
import weakref
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, Literal

import torch

from hocket._program import warn
from hocket.comm import torch_adapter

from ..batches import BatchShard, divided_by, tensors_in
from ..batches import batch as _batch
from ..mesh import World
from ._apart import Apart, kept_in, look_apart
from ._batch_parts import PartUpdates
from ._carried import CarriedState
from ._choices import has_rows
from ._exchanged import ExchangedSamples
from ._first_loss import first_loss
from ._input_gradients import CachedGradients, InputGradients
from ._later_padding import LaterPadding
from ._left_out import LeftOutBatches
from ._loss_weight import LossWeights
from ._model_changes import ModelChanges
from ._other_libraries import OwnMetrics, tell_own_batches
from ._outside import OutsideModules, OutsideTensors
from ._own_gathers import OwnGathers
from ._replica_marks import ReplicaMarks
from ._sample_numbers import ModelNumbers
from ._unseen_losses import UnseenLosses

_exchanged = ExchangedSamples()  # on while the first losses are computed, but for forward passes
_own_gathers = OwnGathers()
_own_metrics = OwnMetrics()
_LOOKS, _BATCHES, _LOOKS_AGAIN = 2, 8, 3
"""Losses that are looked at, batches in which they are waited for, and how often that is done anew for new losses."""


class LoopObserver:
    """Looks on at the loop of one distributed model.

    Args:
        module: The model.
        world: Its ranks.
        replicated: Parameters whose gradients are averaged, by name.
        loss_reduction: What the program says of its loss.
        crosses_ranks: Whether gradients cross ranks within the model, weighted by samples before the loss is known.
        all_observers: Gives those of all distributed models of this process.

    Attributes:
        module: The model.
        numbers: The random numbers that each rank draws for its samples.
        apart: What the model computes for a sample from others; None until that was looked at.
        looked: Whether the model itself and the first loss were looked at.
    """

    def __init__(
        self,
        module: torch.nn.Module,
        world: World,
        replicated: dict[str, torch.nn.Parameter],
        loss_reduction: Literal["mean", "sum"],
        *,
        crosses_ranks: bool,
        all_observers: Callable[[], Sequence["LoopObserver"]],
    ) -> None:
        self.module, self.numbers = module, ModelNumbers(world)
        self._world, self._crosses_ranks, self._summed = world, crosses_ranks, loss_reduction == "sum"
        self.apart: Apart | None = None
        self.looked = False
        # Of the first forward passes; None once their loss was looked at.
        self._outputs: deque[list[torch.Tensor]] | None = deque(maxlen=4)
        self._kept: list[torch.Tensor] = []  # what the model has in attributes after the last of them
        self._part = 0.0  # of the batch which the model was called with; 0 where it is not known
        self._rows = 0  # which it was called with
        self._part_updates = PartUpdates(world.rank)
        self._batches = 0  # that have come
        self._thread = threading.get_ident()  # in which the model is called
        self._unknown = _LOOKS  # losses of batches that have come another way, after which no loader is asked for
        self._open = False  # whether more may come of a loader
        self._looks = _LOOKS  # at losses that are to come
        self._looks_again = _LOOKS_AGAIN
        self._anew = False  # whether a loss has had another form since, as of what a loop keeps for later
        self._all_observers = all_observers
        self._parameters = list(replicated.values())
        self._changes = ModelChanges(module, world, self._parameters)
        self._left_out = LeftOutBatches()
        self._input_gradients = InputGradients(world.rank)
        self._cached_gradients = CachedGradients(world.rank, world.size)
        self._carried = CarriedState(world.rank)
        self._unseen = UnseenLosses(world)
        self._outside = OutsideModules(lambda: [one.module for one in all_observers()])
        self._tensors = OutsideTensors(lambda: [one.module for one in all_observers()])
        self._marks = ReplicaMarks(replicated)
        self._padding = LaterPadding(module)
        self._losses = LossWeights(world, self._marks, self._padding)
        _exchanged.reduces = _exchanged.reduces_counts = False
        _exchanged.sizes.forget()
        self._decided = False  # whether what the loop decides by numbers of its samples was told
        _exchanged.decided = weakref.WeakMethod(self._tell_decided)  # it would keep the model otherwise
        if world.size > 1:
            self._changes.tell_batch_norms()

    @property
    def looks(self) -> bool:
        """Whether more losses are to be looked at."""
        return self._looks > 0

    @property
    def _waits(self) -> bool:
        """Whether the coming loss is to be looked at."""
        return self._looks > 0 and not self._summed and self._batches <= _BATCHES

    @contextmanager
    def looking_away(self) -> Iterator[None]:
        """Open a block that computes what is not the program's."""
        if self._looks:
            _exchanged.end()
        with _exchanged.paused(), _exchanged.hidden():  # another model may look
            yield

    def batch_began(self, note: _batch.Note) -> None:
        """Get ready for a batch of a loader, which has a share."""
        assert note.share is not None
        self._left_out.next(note)
        _own_gathers.next(note)
        _own_metrics.next(note)
        self._unseen.next()
        self._cached_gradients.next()
        self._outside.watch()
        self._open = True
        self._batches += 1
        if self._anew and self._looks_again:
            self._looks, self._batches, self._outputs = _LOOKS, 1, deque(maxlen=4)
            self._looks_again -= 1
            self._anew = False
        if _exchanged.next(note, note.share.samples):
            self._losses.exchange.tell_places()
        self._tell_sizes(note.share)
        self._carried.next(note.share)
        if note.share.uneven and _exchanged.reduces and not _exchanged.reduces_counts:
            _exchanged.reduces = False
            self._tell_reduced(note.share)
        if self._waits:
            _exchanged.follow_batch([t for one in note.tensors if (t := one()) is not None], note.share.samples)
            if threading.get_ident() == self._thread:  # torch's modes are a thread's own
                _exchanged.begin()
        self.numbers.batch_began(note.share.samples)

    def batches_ended(self) -> None:
        """Look no more at what is computed: these are no batches of a loader."""
        self._left_out.next(None)
        _own_gathers.next(None)
        _own_metrics.next(None)
        self._open = False
        _exchanged.end()
        self._tell_sizes(None)

    def evaluation_begins(self) -> None:
        """Look away from a forward pass without gradients."""
        self._left_out.evaluated()
        self._pass_begins()
        _exchanged.end()

    def evaluated(self, inputs: Any, output: Any) -> None:
        """Look on at what is computed of its output, by which the loop may choose samples."""
        self._pass_ended()
        self._cached_gradients.made(tensors_in(output))
        if self._looks and self._open:
            self._follow(tensors_in(inputs), tensors_in(output), _batch.current(inputs))

    def forward_begins(self, inputs: Any, note: _batch.Note | None) -> None:
        """Look at the model and at the inputs of a forward pass, before it.

        Raises:
            RuntimeError: the model is none whose gradients ranks can average.
        """
        self._left_out.used()
        self._thread = threading.get_ident()
        self._pass_begins()
        self._rows = next((len(one) for one in tensors_in(inputs) if one.dim()), 0)
        self._part = 0.0 if note is None or not self._losses.looks_at_parts else note.part(inputs)
        share = None if note is None else note.share
        if note is not None and share is not None and self._outputs is not None and not self.looked:
            summed = None if note.stated else self._summed
            samples = share.samples if share.total > 1 else 0
            alone, drawn = note.alone_like(inputs), set[int]()
            self.apart = look_apart(self.module, inputs, samples, summed=summed, alone=alone, drawn=drawn)
            self._changes.refuse_changing(self.apart.changing if self.apart is not None else [])
            self.numbers.forward_begins(self.module, inputs, share.samples, drawn)
        if note is not None and share is not None and self._padding.looks and share.total > 1:
            judged = not self._summed and not self.looked  # by the look at the first batch
            self._padding.look(inputs, note.alone_like(inputs), share.samples, model=not judged)
        if note is not None and share is not None and note.packed is not None and share.total > 1:
            other = note.packed_like(inputs)
            if other is not None:
                self._padding.look_packed(inputs, other, note.packed)
            note.packed = None
        self._padding.given(inputs)
        if self._batches <= _BATCHES:
            self._input_gradients.given(inputs)
            self._carried.given(tensors_in(inputs), note)
        self._changes.forward_begins()

    def forward_made(self, made: list[torch.Tensor], note: _batch.Note | None) -> None:
        """Note the outputs of a forward pass."""
        self._pass_ended()
        self._cached_gradients.made(made)
        self._padding.note(made)
        if self._batches <= _BATCHES:
            self._carried.made(made, note)
        if self._outputs is not None:
            self._outputs.append(made)
            self._kept = kept_in(self.module)

    def _pass_begins(self) -> None:
        for one in self._all_observers():
            one.numbers.pass_begins()

    def _pass_ended(self) -> None:
        for one in self._all_observers():
            one.numbers.pass_ended()

    def forward_ended(self, inputs: Any, output: Any, note: _batch.Note | None) -> None:
        """Look on at what is computed of a batch, and now of outputs of the model."""
        if self._looks:
            self._follow(tensors_in(inputs), tensors_in(output), note)

    def _follow(
        self, inputs: Sequence[torch.Tensor], outputs: Sequence[torch.Tensor], note: _batch.Note | None
    ) -> None:
        apart = self.apart
        if note is not None and note.share is not None and self._waits:
            rows = [one for i, one in enumerate(outputs) if apart is None or i in apart.rows]
            covers = any(one.shape[:1] == (note.share.samples,) for one in (*inputs, *outputs))
            _exchanged.sizes.covers |= covers
            if covers or torch.is_grad_enabled():  # else some are shown
                _exchanged.given(inputs, note.share.samples)
                own = [row for row in rows if has_rows(row, note.share.samples)]
                _exchanged.linked |= any(one.dim() and all(one is not row for row in own) for one in outputs)
            for one in outputs:
                _exchanged.kept.know(one)
            if apart is not None and torch.is_grad_enabled():
                rows += [one for i, one in enumerate(kept_in(self.module), apart.outputs) if i in apart.rows]
            _exchanged.follow(rows, note.share.samples)
            _exchanged.begin()

    def back_propagation_begins(self, roots: Sequence[torch.Tensor]) -> None:
        """Note that the latest batch is used, and for what."""
        self._left_out.used()
        for one in roots if self._open else ():
            if isinstance(one, torch.Tensor):
                self._tensors.note(one)
                self._look_cached(one)
        _batch.propagated()

    def back_propagation_ended(self) -> None:
        """Look on at what the loop decides by its loss before it updates."""
        if self._waits and self._open:
            _exchanged.sizes.begin()

    def _look_cached(self, root: torch.Tensor) -> None:
        """Look at a loss of outputs that were cut off; a contested batch is of several loaders."""
        if (note := _batch.trained()) is not None and not _batch.contested():
            with _exchanged.paused():
                self._cached_gradients.look(root, note.share)

    def unseen_loss(self, root: torch.Tensor) -> None:
        """Look at a loss that is computed by another way than a forward pass; see `UnseenLosses`."""
        if self._open and not self._summed:
            self._unseen.backward(root, self._parameters, self.module, _exchanged, self._losses)

    def loss_weight(
        self, root: torch.Tensor, made: set[int], note: _batch.Note | None, *, again: bool, anew: bool
    ) -> float | None:
        """Look at a loss, and return by what this rank's gradients are weighted; a collective operation.

        Args:
            root: Of a back-propagation.
            made: Places in the graph of what the latest forward pass gave.
            note: Of the batches of the forward passes.
            again: Whether this is another loss of one forward pass.
            anew: Whether there is no gradient before this one.

        Returns:
            None to leave it as the batch says.

        Raises:
            RuntimeError: no weight makes it that of one device; on every rank alike.
        """
        if note is None and self._unknown:
            self._unknown = 0 if tell_own_batches(self._world) else self._unknown - 1
        if note is not None and note.share is not None and note.share.total > note.share.samples:
            self._part_updates.add(note, self._part, self._rows, note.share.samples, self._marks.updates)
        if note is None or note.share is None or self._summed:
            if note is not None and root.numel() == 1:
                note.summed = root.detach() if self._summed else None
            self._losses.summed(root, made, None if note is None else note.share)
            if note is not None and note.share is not None:
                self._tensors.compare(note.share.samples, self._world)
            return None
        if self._outputs is not None and (self._outputs or not self.looked):
            first = first_loss(root, self._outputs, self._kept, made, note.share, self.apart)
            empty = self._losses.check_first(first, note.share)
            self._outputs, self._kept, self.looked = deque(maxlen=4) if empty else None, [], True
        if self._looks:
            self._looks -= 1
            self._losses.check_exchanged(root, _exchanged, note.share, stated=note.stated)
            if not any(one._waits for one in self._all_observers()):
                _exchanged.forget()
        self._outside.compare(root, self._world)
        self._tensors.compare(note.share.samples, self._world)
        self._input_gradients.backward(root, note.share)
        if note.stated:
            self._losses.stated(root, made, note.weight, note.share)
            self._anew |= self._losses.is_new and not self._looks
            return self._weight_of_uncounted(note, root)
        before = note.counted
        counts = self.apart is not None and self.apart.counts
        note.counted = self._losses.of(root, made, note, self._part, note.share.samples, anew, counts)
        weight = note.weight
        self._losses.check_alike(weight)
        self._anew |= self._losses.is_new and not self._looks
        if again:
            note.counted = before  # hocket.average is that of the first
        if self._crosses_ranks:
            self._check_crossing(weight, note.share)
            return None
        return weight

    def _check_crossing(self, weight: float, share: BatchShard) -> None:
        """Refuse another weight than that by samples, where gradients cross ranks and have had that in forward."""
        off = torch.tensor(float(abs(weight - share.weight) > 1e-6), device=self._world.device)
        self._world.all_reduce(off)
        if off:
            raise RuntimeError(
                "with synchronised batch norm the weight of a loss must be known before the model is run, and this "
                "loss is a mean over something else than samples: pass hocket.distribute(..., loss_weight=)"
            )

    def _weight_of_uncounted(self, note: _batch.Note, root: torch.Tensor) -> float | None:
        """Weigh a sum of which `loss_weight` counts nothing: it is divided by a guard (`count.clamp(min=1)`).

        One device divides it by what all ranks count, or by that guard if there is nothing.
        """
        assert note.share is not None
        if (note.unit and note.weight) or not note.share.samples or root.numel() != 1:
            return None
        if not (by := divided_by(root, note.share.samples)):
            return None
        if self._crosses_ranks:
            raise RuntimeError(
                "loss_weight counts nothing of this rank's samples, and the loss is a sum all the same, whose gradient "
                "synchronised batch norm sends to other ranks without their weight: take hocket.Trainer, or say "
                'loss_reduction="sum" and divide by hocket.total(count).clamp(min=1)'
            )
        note.counted = by * note.unit if note.unit else float(self._world.size)
        return note.weight

    def gradients_asked(
        self, outputs: Sequence[torch.Tensor], inputs: Sequence[torch.Tensor], note: _batch.Note | None
    ) -> None:
        """Tell of `torch.autograd.grad` that gives those of samples by a mean over a rank's samples."""
        with _exchanged.paused():
            self._input_gradients.asked(outputs, inputs, None if note is None else note.share)
        if len(outputs) == 1:
            self._look_cached(outputs[0])

    def gradients_made(
        self, outputs: Sequence[torch.Tensor], inputs: Sequence[torch.Tensor], gradients: Any, again: Any
    ) -> None:
        """Follow what `torch.autograd.grad` has given into the loss."""
        _exchanged.differentiated(outputs, inputs, gradients, again)

    def follow(self, optimizer: Any, averaged: Callable[[], int | None]) -> None:
        """Have the optimizer's settings compared between ranks, and gradients that it takes and nobody has averaged.

        Args:
            optimizer: Trains the model.
            averaged: How often gradients were averaged; None once nobody averages them.
        """
        self._marks.follow(optimizer)
        steps = torch_adapter.steps_of(optimizer)
        if (latest := averaged()) is None or steps is None:
            return
        mine = weakref.ref(self)

        @torch_adapter.outside_compiler  # of torch.compile(optimizer.step), or of a compiled step of training
        def compare(_: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
            nonlocal latest
            if (observer := mine()) is None or (now := averaged()) is None:
                return
            if (name := _exchanged.sizes.setting(optimizer)) and not observer._world.rank:
                warn(
                    f"the optimizer's {name} is computed from how many samples this rank has, and not from those of "
                    "the whole batch, as on one device: compute it from hocket.total(len(batch))",
                )
            before, latest = latest, now
            if now == before and kwargs.get("closure", args[1:]) in (None, ()):  # a closure makes its own
                observer._marks.compare_gradients(observer._world)

        @torch_adapter.outside_compiler
        def look_on(*_: Any) -> None:  # what the loop keeps may be computed after the update
            _batch.stepped()
            if (observer := mine()) is not None and observer._waits and observer._open:
                _exchanged.begin()

        steps.register_step_pre_hook(compare)
        steps.register_step_post_hook(look_on)

    def _tell_reduced(self, share: BatchShard) -> None:
        """Warn, on one rank, of statistics that the program sums over ranks without a count of samples."""
        if self._world.rank == 0:
            warn(
                "the program sums over ranks by all_reduce, without a count beside it, and ranks have unlike numbers "
                f"of samples (of a batch of {share.total} this one {share.samples}): a mean of their means is not that "
                "of the batch. Take hocket.average of it, or sum it and a count, or choose a batch size that "
                f"{share.world} divides and drop_last=True; a sum of which nothing is divided is right",
            )

    def _tell_decided(self, what: str) -> None:
        """Warn, once and on one rank, of what the loop decides by a number of this rank's samples."""
        if not self._decided and not self._world.rank:
            warn(
                f"the loop decides how it trains by the loss, or another number, of this rank's samples ({what}), and "
                "one device by that of the whole batch: decide by hocket.average of it, called on every rank",
            )
        self._decided = True

    def _tell_sizes(self, share: BatchShard | None) -> None:
        """Begin a batch, or none; warn, on one rank, of what the loop has decided by how many samples a rank has."""
        if (said := _exchanged.sizes.begin_batch(share)) and self._world.rank == 0:
            warn(
                f"the loop decides by how many samples this rank has ({said}), and would decide otherwise by those of "
                "the whole batch, as one device does: decide by hocket.total(len(batch))",
            )


def look_away() -> None:
    """Look no more at what is computed, until the next batch of a loop."""
    _exchanged.end()
