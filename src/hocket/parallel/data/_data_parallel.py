"""The model, trained on several ranks at once: each with its part of the batch, all with the same gradients."""

import functools
import gc
import itertools
import weakref
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from contextvars import ContextVar
from typing import Any, Final, Literal, TypeVar, cast

import torch

from hocket._program import warn
from hocket.comm import torch_adapter

from ..batches import BatchShard, divided_by, tensors_in
from ..batches import batch as _batch
from ..mesh import World, in_turn
from ..state import broadcast_tensors, check_model, is_excluded, keepers
from ._apart import Apart, kept_in, look_apart
from ._batch_norm import SynchronisedBatchNorm
from ._exchanged import ExchangedSamples
from ._first_loss import first_loss
from ._hooks import scale_gradients, watched_hooks
from ._input_gradients import InputGradients
from ._later_padding import LaterPadding
from ._left_out import LeftOutBatches
from ._loss_weight import LossWeights
from ._model_buffers import ModelBuffers
from ._other_libraries import TWICE, refuse_others, tell_own_batches
from ._outside import OutsideModules
from ._reducer import GradientReducer
from ._replica_marks import ReplicaMarks
from ._sample_numbers import Draws, SampleNumbers, draws_apart
from ._stands_for import StandsForModule
from ._unseen_losses import UnseenLosses

_serial = itertools.count()
_living: "weakref.WeakSet[DataParallel]" = weakref.WeakSet()
_aside = ContextVar("_aside", default=False)  # whether a Trainer's passes run
_exchanged = ExchangedSamples()  # on while the first losses are computed, but for forward passes
_LOOKS, _BATCHES, _LOOKS_AGAIN = 2, 8, 3
"""Losses that are looked at, batches in which they are waited for, and how often that is done anew for new losses."""


_M = TypeVar("_M", bound=Callable[..., Any])


def _looking_away(method: _M) -> _M:
    """Return a method of `DataParallel` that does not look at what it computes itself."""

    @functools.wraps(method)
    def run(self: "DataParallel", *args: Any) -> Any:
        if self._looks:
            _exchanged.end()
        with _exchanged.paused(), _exchanged.hidden():  # another model may look
            return method(self, *args)

    return cast(_M, run)


class DataParallel(StandsForModule):
    """Wraps a model so that `backward()` leaves in every parameter's `.grad` the average over all ranks.

    The average is that over the global batch: where a `DistributedLoader` gave this rank a smaller or larger part than
    others, its gradients are weighted by it. Parameters and buffers start as rank 0's. Attributes, parameter names and
    the state dict are those of the model itself, which `module` holds; a deep copy or a pickle of this is one of the
    model alone.

    As in torch's DistributedDataParallel: buffers (running statistics of batch norm, say) are rank 0's before each
    forward pass in training; gradients add up over several backward passes; `no_sync` puts off the averaging. Other
    than there, parameters that took no part in the loss need no option, and may be frozen and thawed between steps.

    A gradient is a view of a bucket, so it must not be resized; sparse gradients are refused.

    Args:
        module: The model.
        world: The ranks.
        bucket_bytes: Most bytes of gradients that are reduced together. None: as many that there are about eight
            buckets, since what the last one holds cannot be hidden behind back-propagation, but 4 MiB at least and
            64 MiB at most.
        first_bucket_bytes: Most bytes of the bucket that is full first, to get communication going early; None for no
            difference.
        loss_reduction: Whether the loss is a "mean" over the samples of the batch or a "sum".
        broadcast_buffers: Whether buffers are kept as rank 0's.
        compression: Compression of gradients on their way; see `hocket.planner.Plan`.

    Raises:
        ValueError: the ranks' models have different parameters or buffers, or the arguments make no sense.
    """

    def __init__(
        self,
        module: torch.nn.Module,
        world: World,
        *,
        bucket_bytes: int | None = None,
        first_bucket_bytes: int | None = None,
        loss_reduction: Literal["mean", "sum"] = "mean",
        broadcast_buffers: bool = True,
        compression: str = "none",
    ) -> None:
        super().__init__()
        if loss_reduction not in ("mean", "sum"):
            raise ValueError(f'loss_reduction must be "mean" or "sum", not {loss_reduction!r}')
        if _is_distributed(module):
            gc.collect()  # who held it may be gone but for a reference cycle
        if _is_distributed(module):
            raise ValueError("this model is distributed already; use what hocket.distribute returned the first time")
        self._loss_reduction = loss_reduction
        self._broadcast_buffers = broadcast_buffers
        self._world = world
        self._reducer: GradientReducer | None = None
        self._buffers_differ = broadcast_buffers
        # Gradients that other ranks' losses send through batch norm have those ranks' weights.
        self._crosses_ranks = any(isinstance(m, SynchronisedBatchNorm) for m in module.modules())
        self._model_buffers = ModelBuffers(module, world, broadcast_buffers)
        self._number = next(_serial)
        # Of the first forward passes; None once their loss was looked at.
        self._outputs: deque[list[torch.Tensor]] | None = deque(maxlen=4)
        self._kept: list[torch.Tensor] = []  # what the model has in attributes after the last of them
        self._made: set[int] = set()  # places in the graph of what the last forward pass gave
        self._latest: _batch.Note | None = None  # of the forward passes since the last back-propagation
        self._part = 0.0  # of that batch which the model was called with; 0 where it is not known
        self._looked = False  # whether the model itself and the first loss were looked at
        self._apart: Apart | None = None  # what the model computes for a sample from others, once that was looked at
        self._batches = 0  # that have come
        self._unknown = _LOOKS  # losses of batches that have come another way, after which no loader is asked for
        self._open = False  # whether more may come of a loader
        self._left_out = LeftOutBatches()
        self._looks = _LOOKS  # at losses that are to come
        self._looks_again = _LOOKS_AGAIN
        self._anew = False  # whether a loss has had another form since, as of what a loop keeps for later
        self._input_gradients = InputGradients(world.rank)
        self._unseen = UnseenLosses(world)
        self._share = 1.0  # the weight by samples of the latest batch
        self._outside = OutsideModules(lambda: [one.module for one in _living])
        self._forwards = 0
        replicated = {name: parameter for name, parameter in module.named_parameters() if not is_excluded(parameter)}
        self._marks = ReplicaMarks(replicated)
        self._padding = LaterPadding(module)
        self._losses = LossWeights(world, self._marks, self._padding)
        _exchanged.reduces = _exchanged.reduces_counts = False
        _exchanged.sizes.forget()
        self._numbers = SampleNumbers(world)
        self._draws: Draws | None = Draws((), 0)  # of the first forward pass; None once they were looked at
        self._replicated = list(replicated.values())
        self.module = module
        if world.size > 1:
            self._told_norms = _tell_batch_norms(module, world)
            check_model(module, world)
            refuse_others(module, self)
            broadcast_tensors([*replicated.values(), *module.buffers()], world)
            reducer = GradientReducer(
                list(replicated), list(replicated.values()), world, bucket_bytes, first_bucket_bytes, compression
            )
            self._reducer = reducer
            reducer.ended = weakref.WeakMethod(self._average_buffers)
            for keeper in keepers(module):
                keeper.weigh_by(_weight_of(weakref.ref(reducer)))
        _living.add(self)
        _batch.listeners.add(self)
        torch_adapter.before_backward(self)

    @property
    def _ddp_params_and_buffers_to_ignore(self) -> Any:
        """What torch's DistributedDataParallel asks a model for, first of all."""
        raise ValueError(TWICE)

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """Run the model."""
        reducer = self._reducer
        if not torch.compiler.is_compiling() and torch_adapter.in_transform():
            return self.module(*args, **kwargs)  # a loss of it is one of another way than this
        if reducer is None or not torch.is_grad_enabled():
            if torch.compiler.is_compiling():
                return self.module(*args, **kwargs)
            self._left_out.evaluated()
            _exchanged.end()
            output = self.module(*args, **kwargs)
            if reducer is not None and self._looks and self._open:  # by which the loop may choose samples
                self._look(tensors_in((args, kwargs)), tensors_in(output), _batch.current((args, kwargs)))
            return output
        factor = self._before_forward(reducer, (args, kwargs))
        compiled = torch.compiler.is_compiling() or hasattr(self.module, "_orig_mod")
        watching = nullcontext() if compiled or self._looked else watched_hooks(self.module)
        with nullcontext() if torch.compiler.is_compiling() else self._numbers.drawing(), watching:
            output = self.module(*args, **kwargs)
        output = self._after_forward(reducer, (args, kwargs), output, factor)
        if self._looks and not torch.compiler.is_compiling():
            self._look(tensors_in((args, kwargs)), tensors_in(output), self._latest)
        return output

    @torch_adapter.outside_compiler
    @_looking_away
    def _before_forward(self, reducer: GradientReducer, inputs: Any) -> float:
        """Get ready for the backward pass of this forward pass; return by what to scale its gradients besides."""
        in_turn("a model of hocket.distribute")
        note = _batch.current(inputs)
        self._left_out.used()
        self._part = 0.0 if note is None or not self._losses.looks_at_parts else note.part(inputs)
        share = None if note is None else note.share
        if share is not None and self._outputs is not None and not self._looked:
            summed = None if note is not None and note.stated else self._loss_reduction == "sum"
            alone = None if note is None else note.alone_like(inputs)
            samples = share.samples if share.total > 1 else 0
            self._apart = look_apart(self.module, inputs, samples, summed=summed, alone=alone)
            self._refuse_parameters(self._apart.changing if self._apart is not None else [])
            if self._draws is not None:
                self._numbers.look()
                self._draws = draws_apart(self.module, inputs, share.samples)
        if note is not None and share is not None and self._padding.looks and share.total > 1:
            judged = self._loss_reduction == "mean" and not self._looked  # by the look at the first batch
            self._padding.look(inputs, note.alone_like(inputs), share.samples, model=not judged)
        if note is not None and share is not None and note.packed is not None and share.total > 1:
            other = note.packed_like(inputs)
            if other is not None:
                self._padding.look_packed(inputs, other, note.packed)
            note.packed = None
        self._padding.given(inputs)
        self._share = 1.0 if share is None else share.weight
        if self._batches <= _BATCHES:
            self._input_gradients.given(inputs)
        self._check_parameters()
        # Where passes on several batches meet in one back-propagation, each has its samples' weight.
        self._latest = note if not reducer.awaits_backward or self._latest is note else None
        factor = self._weigh(reducer, note)
        first = not reducer.awaits_backward  # back-propagation needs buffers as all of its passes had them
        reducer.prepare()
        if self.training and self._buffers_differ and first:
            self.send_buffers()
        self._buffers_differ = self._broadcast_buffers and reducer.synchronises
        return factor

    def _refuse_parameters(self, changing: list[str]) -> None:
        """Refuse those that each forward pass changes, since more are made than the loop's, and what counts lookups."""
        if changing:
            raise RuntimeError(
                f"each forward pass changes parameter {changing[0]!r}, and more are made than those of your loop (a "
                "look at the model, before the first): change it after optimizer.step(), or keep what is not trained "
                "in buffers (a teacher that follows its student, say)"
            )
        for name, one in self.module.named_modules():
            counting = isinstance(one, torch.nn.Embedding | torch.nn.EmbeddingBag) and one.scale_grad_by_freq
            if counting and not hasattr(one, "exchange") and one.weight.requires_grad:
                raise RuntimeError(
                    f"{name} has scale_grad_by_freq, which goes by how often the whole batch looks up a row, and a "
                    "rank has a part of it: leave it out, or take hocket.Trainer and a plan that does not cut batches"
                )

    def _check_parameters(self) -> None:
        """Refuse parameters that the model had not when it was distributed, in some of the forward passes.

        Look there, too, whether batch norm that evaluated then trains now.
        """
        self._forwards += 1
        if self._forwards % 32 and self._forwards & (self._forwards - 1):
            return
        self._told_norms = self._told_norms or _tell_batch_norms(self.module, self._world)
        known = {id(one) for one in self._replicated}
        for name, parameter in self.module.named_parameters():
            if id(parameter) not in known and not is_excluded(parameter):
                raise RuntimeError(
                    f"the model had no parameter {name!r} when it was distributed, or another one, so that nobody "
                    "would average its gradient: change the model first, then make the optimizer and distribute"
                )

    @torch_adapter.outside_compiler
    @_looking_away
    def _after_forward(self, reducer: GradientReducer, inputs: Any, output: Any, factor: float) -> Any:
        if factor != 1.0:
            output = scale_gradients(output, factor)
        made = tensors_in(output)
        if not torch_adapter.in_backward():  # what a checkpoint computes again is no part of the program's graph
            self._made = torch_adapter.graph_marks(made)
            _batch.called(_batch.current(inputs), inputs, self._made)
        self._padding.note(made)
        if self._outputs is not None:
            self._outputs.append(made)
            self._kept = kept_in(self.module)
        if reducer.synchronises:
            for tensor in tensors_in(output):
                if tensor.requires_grad and not tensor.is_leaf:
                    tensor.register_hook(reducer.expect_backward)  # type: ignore[no-untyped-call]
        return output

    def _look(self, inputs: Sequence[torch.Tensor], outputs: Sequence[torch.Tensor], note: _batch.Note | None) -> None:
        """Look on at what is computed from a batch, and now from outputs of the model."""
        apart = self._apart
        if note is not None and note.share is not None and self._waits:
            rows = [one for i, one in enumerate(outputs) if apart is None or i in apart.rows]
            covers = any(one.shape[:1] == (note.share.samples,) for one in (*inputs, *outputs))
            _exchanged.sizes.covers |= covers
            if covers or torch.is_grad_enabled():  # else some are shown
                _exchanged.given(inputs, note.share.samples)
                _exchanged.linked |= any(one.dim() and all(one is not row for row in rows) for one in outputs)
            for one in outputs:
                _exchanged.kept.know(one)
            if apart is not None and torch.is_grad_enabled():
                rows += [one for i, one in enumerate(kept_in(self.module), apart.outputs) if i in apart.rows]
            _exchanged.follow(rows, note.share.samples)
            _exchanged.begin()

    @property
    def _waits(self) -> bool:
        """Whether the coming loss is to be looked at."""
        return self._looks > 0 and self._loss_reduction == "mean" and self._batches <= _BATCHES

    def no_sync(self) -> AbstractContextManager[None]:
        """Open a block whose passes add up gradients on this rank alone, to be averaged by the next backward pass.

        Example::

            with model.no_sync():
                loss_fn(model(first), target).backward()
            loss_fn(model(second), target).backward()  # averages the sum of both
            optimizer.step()
        """
        return nullcontext() if self._reducer is None else self._reducer.no_sync()

    def _follow(self, optimizer: Any) -> None:
        """Have the optimizer's settings compared between ranks, and gradients that it takes and nobody has averaged."""
        self._marks.follow(optimizer)
        steps = torch_adapter.steps_of(optimizer)
        if self._reducer is None or steps is None:
            return
        mine, averaged = weakref.ref(self), self._reducer.averaged

        @torch_adapter.outside_compiler  # of torch.compile(optimizer.step), or of a compiled step of training
        def compare(_: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
            nonlocal averaged
            if (model := mine()) is None or model._reducer is None:
                return
            if (name := _exchanged.sizes.setting(optimizer)) and not model._world.rank:
                warn(
                    f"the optimizer's {name} is computed from how many samples this rank has, and not from those of "
                    "the whole batch, as on one device: compute it from hocket.total(len(batch))",
                )
            before, averaged = averaged, model._reducer.averaged
            if averaged == before and kwargs.get("closure", args[1:]) in (None, ()):  # a closure makes its own
                model._marks.compare_gradients(model._world)

        @torch_adapter.outside_compiler
        def look_on(*_: Any) -> None:  # what the loop keeps may be computed after the update
            _batch.stepped()
            if (model := mine()) is not None and model._waits and model._open:
                _exchanged.begin()

        steps.register_step_pre_hook(compare)
        steps.register_step_post_hook(look_on)

    @property
    def holds_back(self) -> bool:
        """Whether gradients have added up in `no_sync` that are not averaged yet."""
        return self._reducer is not None and self._reducer.holds_back

    @property
    def draws_own(self) -> bool | None:
        """Whether each rank draws its own random numbers for its samples; None before the first backward pass.

        A run that goes on where another has ended sets what that one had, or its first pass would draw otherwise.
        """
        return None if self._draws is not None else self._numbers.own

    @draws_own.setter
    def draws_own(self, own: bool) -> None:
        self._numbers.go_on(own)
        self._draws = None

    def compression_report(self) -> dict[str, Any] | None:
        """Return what compression has saved and cost; None where gradients go as they are. See docs/compression.md."""
        compression = None if self._reducer is None else self._reducer.compression
        return None if compression is None else compression.report()

    def send_buffers(self) -> None:
        """Broadcast rank 0's buffers to all ranks; a collective operation."""
        self._model_buffers.send()

    def _average_buffers(self) -> None:
        self._model_buffers.average(self._share)

    def batch_began(self, note: _batch.Note) -> None:
        """Take the batch's weight, for losses that are computed by other methods of the model than forward.

        What these are given cannot be seen, so that the latest batch must be meant; where other loaders are open with
        batches of another weight, the reducer refuses. Batches to evaluate have no part in it.
        """
        if self._reducer is None or note.share is None:
            return
        self._left_out.next(note)
        self._unseen.next()
        self._outside.watch()
        self._open = True
        self._batches += 1
        if self._anew and self._looks_again:
            self._looks, self._batches, self._outputs = _LOOKS, 1, deque(maxlen=4)
            self._looks_again -= 1
            self._anew = False
        if _exchanged.next(note, note.share.samples):
            self._losses.tell_places()
        self._tell_sizes(note.share)
        if note.share.uneven and _exchanged.reduces and not _exchanged.reduces_counts:
            _exchanged.reduces = False
            self._tell_reduced(note.share)
        if self._waits:
            _exchanged.follow_batch([t for one in note.tensors if (t := one()) is not None], note.share.samples)
            _exchanged.begin()
        if self._draws is not None:
            self._numbers.look()
        if self._loss_reduction == "mean" and not self._crosses_ranks and not self._reducer.awaits_backward:
            self._reducer.set_weight(note.weight)

    def _tell_reduced(self, share: BatchShard) -> None:
        """Warn, on one rank, of statistics that the program sums over ranks without a count of samples."""
        if self._world.rank == 0:
            warn(
                "the program sums over ranks by all_reduce, without a count beside it, and ranks have unlike numbers "
                f"of samples (of a batch of {share.total} this one {share.samples}): a mean of their means is not that "
                "of the batch. Take hocket.average of it, or sum it and a count, or choose a batch size that "
                f"{share.world} divides and drop_last=True; a sum of which nothing is divided is right",
            )

    def _tell_sizes(self, share: BatchShard | None) -> None:
        """Begin a batch, or none; warn, on one rank, of what the loop has decided by how many samples a rank has."""
        if (said := _exchanged.sizes.begin_batch(share)) and self._world.rank == 0:
            warn(
                f"the loop decides by how many samples this rank has ({said}), and would decide otherwise by those of "
                "the whole batch, as one device does: decide by hocket.total(len(batch))",
            )

    def batches_ended(self) -> None:
        """Look no more at what is computed: these are no batches of a loader."""
        self._left_out.next(None)
        self._open = False
        _exchanged.end()
        self._tell_sizes(None)

    @_looking_away
    def backward_begins(self, roots: list[torch.Tensor]) -> None:
        """Weigh this rank's gradients by what its loss divides by, where its graph tells; a collective operation.

        A mean over samples comes out with the weight that it has anyway; one over tokens with the right one.
        """
        note, reducer = self._latest, self._reducer
        self._left_out.used()
        if reducer is None:
            return
        reducer.due = False
        if len(roots) != 1:
            return
        again = not reducer.awaits_backward  # another loss of one forward pass, which may divide by something else
        if (again or _aside.get()) and not torch_adapter.reaches(roots[0], self._made):
            if self._open and not _aside.get() and reducer.synchronises and self._loss_reduction == "mean":
                self._unseen.backward(roots[0], self._replicated, self.module, _exchanged, self._losses)
            return
        reducer.find_hooks()
        if self._draws is not None and note is not None and note.share is not None:
            self._numbers.decide(self._draws)
            self._draws = None
        waiting = [m for m in _living if m._reducer is not None and m._reducer.awaits_backward]
        if len(waiting) > 1 and not torch_adapter.reaches(roots[0], self._made):
            return  # another model's loss
        if note is not None and note.share is None and reducer.synchronises and self._world.size > 1:
            raise RuntimeError(_OF_AN_EVALUATION)
        reducer.due = True
        if note is None and self._unknown:
            self._unknown = 0 if tell_own_batches(self._world) else self._unknown - 1
        if note is None or note.share is None or self._loss_reduction == "sum":
            if note is not None and roots[0].numel() == 1:
                note.summed = roots[0].detach() if self._loss_reduction == "sum" else None
            self._losses.summed(roots[0], self._made, None if note is None else note.share)
            return
        if self._outputs is not None and (self._outputs or not self._looked):
            first = first_loss(roots[0], self._outputs, self._kept, self._made, note.share, self._apart)
            self._losses.check_first(first, note.share)
            if not self._looked:
                self._model_buffers.find(self._apart)
            self._outputs, self._kept, self._looked = None, [], True
        if self._looks:
            self._looks -= 1
            self._losses.check_exchanged(roots[0], _exchanged, note.share, stated=note.stated)
            if not any(one._waits for one in _living):
                _exchanged.forget()
        self._outside.compare(roots[0], self._world)
        self._input_gradients.backward(roots[0], note.share)
        if note.stated:
            self._losses.stated(roots[0], self._made, note.weight, note.share)
            self._anew |= self._losses.is_new and not self._looks
            self._weigh_uncounted(note, reducer, roots[0])
            return
        before = note.counted
        anew = reducer.synchronises and all(one.grad is None for one in self._replicated)
        counts = self._apart is not None and self._apart.counts
        note.counted = self._losses.of(roots[0], self._made, note, self._part, note.share.samples, anew, counts)
        weight = note.weight
        self._losses.check_alike(weight)
        self._anew |= self._losses.is_new and not self._looks
        if again:
            note.counted = before  # hocket.average is that of the first
        if not self._crosses_ranks:
            reducer.set_weight(weight)
            return
        # Gradients that cross ranks have been weighted in forward, by samples.
        off = torch.tensor(float(abs(weight - note.share.weight) > 1e-6), device=self._world.device)
        self._world.all_reduce(off)
        if off:
            raise RuntimeError(
                "with synchronised batch norm the weight of a loss must be known before the model is run, and this "
                "loss is a mean over something else than samples: pass hocket.distribute(..., loss_weight=)"
            )

    def _weigh_uncounted(self, note: _batch.Note, reducer: GradientReducer, root: torch.Tensor) -> None:
        """Weigh a sum of which `loss_weight` counts nothing: it is divided by a guard (`count.clamp(min=1)`).

        One device divides it by what all ranks count, or by that guard if there is nothing.
        """
        assert note.share is not None
        if (note.unit and note.weight) or not note.share.samples or root.numel() != 1:
            return
        if not (by := divided_by(root, note.share.samples)):
            return
        if self._crosses_ranks:
            raise RuntimeError(
                "loss_weight counts nothing of this rank's samples, and the loss is a sum all the same, whose gradient "
                "synchronised batch norm sends to other ranks without their weight: take hocket.Trainer, or say "
                'loss_reduction="sum" and divide by hocket.total(count).clamp(min=1)'
            )
        note.counted = by * note.unit if note.unit else float(self._world.size)
        reducer.set_weight(note.weight)

    def gradients_of(self, outputs: Sequence[torch.Tensor], inputs: Sequence[torch.Tensor]) -> None:
        """Refuse `torch.autograd.grad` for parameters, which gives the gradients of this rank's samples alone.

        Tell of one that gives those of samples by a mean over a rank's samples.
        """
        if self._reducer is None or not self._reducer.synchronises or torch_adapter.in_transform():
            return
        mine = {id(parameter) for parameter in self._replicated}
        if any(id(one) in mine for one in inputs):
            raise RuntimeError(
                "torch.autograd.grad gives parameters' gradients without averaging them over ranks: call "
                "loss.backward() and read parameter.grad; or, if gradients by this rank's own samples are meant (one "
                "task of meta-learning, say), do it inside `with model.no_sync():`"
            )
        with _exchanged.paused():
            self._input_gradients.asked(outputs, inputs, None if self._latest is None else self._latest.share)

    def gradients_made(
        self, outputs: Sequence[torch.Tensor], inputs: Sequence[torch.Tensor], gradients: Any, again: Any
    ) -> None:
        """Follow what `torch.autograd.grad` has given into the loss."""
        if self._reducer is not None:
            _exchanged.differentiated(outputs, inputs, gradients, again)

    def _weigh(self, reducer: GradientReducer, note: _batch.Note | None) -> float:
        """Set the weight of the coming gradients; return by what to scale those of this forward pass besides.

        A mean over the samples is weighed where gradients arrive at parameters, whatever way they come: through outputs
        of any type, or terms of the loss that the model keeps as attributes; terms of the parameters alone come out
        right too, because the weights of all ranks average to one. Only if forward passes on batches of different
        weights meet in one back-propagation, or for sums, does the weight go to the outputs. Raises RuntimeError: such
        batches meet, and the first of them had no samples for this rank.
        """
        if self._loss_reduction == "sum":
            return 0.0 if note is not None and note.weight == 0.0 else float(self._world.size)
        weight = 1.0 if note is None else note.weight
        if self._crosses_ranks:
            return weight
        if torch_adapter.in_backward():  # a checkpoint computes again what has its weight
            return 1.0
        if not reducer.awaits_backward:
            reducer.set_weight(weight)
        if weight == reducer.weight:
            return 1.0
        if reducer.weight == 0.0:
            raise RuntimeError(
                "forward passes on batches of different sizes meet in one backward pass, and the first batch had no "
                "samples for this rank; call backward() in between, make the batches larger, or drop the last ones"
            )
        return weight / reducer.weight


def living() -> list[DataParallel]:
    """Return the distributed models of this process, in the order of their making."""
    return sorted(_living, key=lambda model: model._number)


def send_stale_buffers(world: World) -> None:
    """Broadcast rank 0's buffers to all ranks for every model whose ranks may differ by now; a collective operation."""
    if world.size == 1:
        return
    stale = {m._number: m for m in _living if m._buffers_differ and m._reducer is not None}
    # A model that nobody uses any more may not have been collected on every rank yet.
    for number in sorted(set.intersection(*map(set, world.from_all(list(stale))))):
        stale[number].send_buffers()
        stale[number]._buffers_differ = False


_batch.before_evaluation.append(send_stale_buffers)


def _tell_batch_norms(module: torch.nn.Module, world: World) -> bool:
    """Warn of batch norm whose statistics will be those of a rank's own samples; return whether there is any."""
    plain = torch.nn.modules.batchnorm._BatchNorm
    alone = [
        name
        for name, one in module.named_modules()
        if isinstance(one, plain)
        and one.training
        and not isinstance(one, SynchronisedBatchNorm | torch.nn.SyncBatchNorm)
    ]
    if alone and world.rank == 0:
        more = f" and {len(alone) - 1} more" if len(alone) > 1 else ""
        warn(
            f"batch norm ({alone[0] or 'the model'}{more}) normalises by the statistics of a rank's own samples, so "
            "that losses are not those of one device: pass sync_batch_norm=True for those of the whole batch",
        )
    return bool(alone)


def _is_distributed(module: torch.nn.Module) -> bool:
    return any(model.module is module for model in _living)


def _weight_of(reference: weakref.ref[GradientReducer]) -> Callable[[], float]:
    """Ask a reducer, while there is one, for the weight of this rank's gradients."""

    def weight() -> float:
        reducer = reference()
        return 1.0 if reducer is None else reducer.weight

    return weight


@contextmanager
def loops_set_aside() -> Iterator[None]:
    """Open a block for passes that are of no loop under `hocket.distribute`, of which one may have been broken off."""
    _exchanged.end()
    before = _aside.set(True)
    try:
        yield
    finally:
        _aside.reset(before)


_OF_AN_EVALUATION: Final = (
    "back-propagation through batches of hocket.shard(...), which is for evaluation: ranks may have other numbers of "
    "batches and of samples, and gradients would not be weighted by them. To train with several loaders, pass a list "
    "of them: model, optimizer, (a, b) = hocket.distribute(model, optimizer, [a, b]). For gradients of inputs in an "
    "evaluation call torch.autograd.grad, or back-propagate within model.no_sync()"
)
