"""The model, trained on several ranks at once: each with its part of the batch, all with the same gradients."""

import functools
import gc
import itertools
import weakref
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from contextvars import ContextVar
from typing import Any, Final, Literal, TypeVar, cast

import torch
from torch.autograd.graph import GradientEdge

from hocket.comm import torch_adapter

from ..batches import batch as _batch
from ..batches import tensors_in
from ..mesh import World, in_turn
from ..state import broadcast_tensors, check_model, is_excluded, keepers, named_parameters_of
from ._batch_norm import SynchronisedBatchNorm
from ._hooks import scale_gradients, watched_hooks
from ._loop_observer import LoopObserver, look_away
from ._model_buffers import ModelBuffers
from ._open_passes import ForwardPass, OpenPasses, hooked
from ._other_libraries import TWICE, refuse_others
from ._reducer import GradientReducer
from ._stands_for import StandsForModule

_serial = itertools.count()
_living: "weakref.WeakSet[DataParallel]" = weakref.WeakSet()
_aside = ContextVar("_aside", default=False)  # whether a Trainer's passes run

_M = TypeVar("_M", bound=Callable[..., Any])


def _looking_away(method: _M) -> _M:
    """Return a method of `DataParallel` that does not look at what it computes itself."""

    @functools.wraps(method)
    def run(self: "DataParallel", *args: Any) -> Any:
        with self._observer.looking_away():
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
        self._made: set[int] = set()  # places in the graph of what the last forward pass gave
        self._latest: _batch.Note | None = None  # of that pass, or of those that the latest loss is of
        self._passes = OpenPasses()
        self._weighs = loss_reduction == "mean" and not self._crosses_ranks  # else weights are known in forward
        self._share = 1.0  # the weight by samples of the latest batch
        self._runs = False  # whether the model's forward is running
        replicated = {name: parameter for name, parameter in named_parameters_of(module) if not is_excluded(parameter)}
        self._replicated = list(replicated.values())
        self._observer = LoopObserver(
            module,
            world,
            replicated,
            loss_reduction,
            crosses_ranks=self._crosses_ranks,
            all_observers=lambda: [one._observer for one in _living],
        )
        self.module = module
        if world.size > 1:
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
            self._observer.evaluation_begins()
            output = self.module(*args, **kwargs)
            if reducer is not None:
                self._observer.evaluated((args, kwargs), output)
            return output
        factor = self._before_forward(reducer, (args, kwargs))
        compiled = torch.compiler.is_compiling() or hasattr(self.module, "_orig_mod")
        watching = nullcontext() if compiled or self._observer.looked else watched_hooks(self.module)
        with nullcontext() if torch.compiler.is_compiling() else self._running(), watching:
            output = self.module(*args, **kwargs)
        output = self._after_forward(reducer, (args, kwargs), output, factor)
        if self._observer.looks and not torch.compiler.is_compiling():
            self._observer.forward_ended((args, kwargs), output, self._latest)
        return output

    @contextmanager
    def _running(self) -> Iterator[None]:
        """Open a block in which the model's forward runs."""
        self._runs = True
        try:
            with self._observer.numbers.drawing():
                yield
        finally:
            self._runs = False

    @torch_adapter.outside_compiler
    @_looking_away
    def _before_forward(self, reducer: GradientReducer, inputs: Any) -> float:
        """Get ready for the backward pass of this forward pass; return by what to scale its gradients besides."""
        in_turn("a model of hocket.distribute")
        note = _batch.current(inputs)
        self._observer.forward_begins(inputs, note)
        self._share = 1.0 if note is None or note.share is None else note.share.weight
        self._latest = note
        first = not reducer.awaits_backward  # back-propagation needs buffers as all of its passes had them
        if first and not torch_adapter.in_backward():
            self._passes.clear()
        factor = self._weigh(reducer, note)
        reducer.prepare()
        if self.training and self._buffers_differ and first:
            self.send_buffers()
        self._buffers_differ = self._broadcast_buffers and reducer.synchronises
        return factor

    @torch_adapter.outside_compiler
    @_looking_away
    def _after_forward(self, reducer: GradientReducer, inputs: Any, output: Any, factor: float) -> Any:
        if factor != 1.0:
            output = scale_gradients(output, factor)
        if not torch_adapter.in_backward():  # what a checkpoint computes again is no part of the program's graph
            expect = reducer.expect_backward if reducer.synchronises else None
            one = ForwardPass(self._latest, expect, weighs=self._weighs)
            output = self._passes.add(one, output, tensors_in)
            self._made = one.marks
            _batch.called(self._latest, inputs, self._made)
        elif reducer.synchronises:
            hooked(tensors_in(output), reducer.expect_backward)
        self._observer.forward_made(tensors_in(output), self._latest)
        return output

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
        mine = weakref.ref(self)

        def averaged() -> int | None:
            model = mine()
            return None if model is None or model._reducer is None else model._reducer.averaged

        self._observer.follow(optimizer, averaged)

    @property
    def holds_back(self) -> bool:
        """Whether gradients have added up in `no_sync` that are not averaged yet."""
        return self._reducer is not None and self._reducer.holds_back

    @property
    def draws_own(self) -> bool | None:
        """Whether each rank draws its own random numbers for its samples; None before the first backward pass.

        A run that goes on where another has ended sets what that one had, or its first pass would draw otherwise.
        """
        return self._observer.numbers.own

    @draws_own.setter
    def draws_own(self, own: bool) -> None:
        self._observer.numbers.go_on(own)

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
        self._observer.batch_began(note)
        if self._weighs and not self._reducer.awaits_backward:
            self._reducer.set_weight(note.weight)

    def batches_ended(self) -> None:
        """Look no more at what is computed: these are no batches of a loader."""
        self._observer.batches_ended()

    @_looking_away
    def backward_begins(self, roots: list[torch.Tensor]) -> None:
        """Weigh this rank's gradients by what its loss divides by, where its graph tells; a collective operation.

        A mean over samples comes out with the weight that it has anyway; one over tokens with the right one.
        """
        reducer = self._reducer
        if reducer is not None and any(isinstance(one, GradientEdge) for one in roots):
            raise RuntimeError(
                "torch.autograd.backward was given an edge of the graph, of which nothing tells by what a rank's loss "
                "is weighted: give it the loss itself, as loss.backward() does"
            )
        own = {id(one) for one in self._replicated} if self._runs else set()
        if self._runs and not any(id(leaf) in own for one in roots for leaf in torch_adapter.leaves(one)):
            return  # the model's forward asks for gradients of something else
        self._observer.back_propagation_begins(roots)
        if reducer is None:
            return
        if any(one.is_leaf and one.numel() == 1 and getattr(one, "_backward_hooks", None) for one in roots):
            raise RuntimeError(_BY_HOOKS)
        reducer.due = False
        if self._passes.several and not _aside.get():
            self._weigh_passes(reducer, roots)
        note = self._latest
        if len(roots) != 1:
            return
        again = not reducer.awaits_backward  # another loss of one forward pass, which may divide by something else
        if (again or _aside.get()) and not torch_adapter.reaches(roots[0], self._passes.marks):
            if reducer.synchronises and not _aside.get():
                self._observer.unseen_loss(roots[0])
            return
        reducer.find_hooks()
        if note is not None and note.share is not None:
            self._observer.numbers.backward_begins()
        waiting = [m for m in _living if m._reducer is not None and m._reducer.awaits_backward]
        if len(waiting) > 1 and not torch_adapter.reaches(roots[0], self._passes.marks):
            return  # another model's loss
        if note is not None and note.share is None and reducer.synchronises and self._world.size > 1:
            raise RuntimeError(_OF_AN_EVALUATION)
        reducer.due = True
        anew = reducer.synchronises and all(one.grad is None for one in self._replicated)
        looked = self._observer.looked
        weight = self._observer.loss_weight(roots[0], self._made, note, again=again, anew=anew)
        if self._observer.looked and not looked:
            self._model_buffers.find(self._observer.apart)
        if weight is not None:
            reducer.set_weight(weight)

    def backward_ended(self) -> None:
        """Look on at what the loop does with its loss next."""
        self._observer.back_propagation_ended()

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
        self._observer.gradients_asked(outputs, inputs, self._latest)

    def gradients_made(
        self, outputs: Sequence[torch.Tensor], inputs: Sequence[torch.Tensor], gradients: Any, again: Any
    ) -> None:
        """Follow what `torch.autograd.grad` has given into the loss."""
        if self._reducer is not None:
            self._observer.gradients_made(outputs, inputs, gradients, again)

    def _weigh(self, reducer: GradientReducer, note: _batch.Note | None) -> float:
        """Set the weight of the coming gradients; return by what to scale those of this forward pass besides.

        A mean over the samples is weighed where gradients arrive at parameters, whatever way they come: through outputs
        of any type, or terms of the loss that the model keeps as attributes; terms of the parameters alone come out
        right too, because the weights of all ranks average to one. Only if forward passes on batches of different
        weights meet in one back-propagation, or for sums, does the weight go to the outputs.
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
        return 1.0

    def _weigh_passes(self, reducer: GradientReducer, roots: Sequence[torch.Tensor]) -> None:
        """Find out of which passes of several batches a loss is, and weigh their gradients."""
        passes, weight = self._passes.weigh(roots)
        notes = {id(one.note): one.note for one in passes}
        self._latest = next(iter(notes.values())) if len(notes) == 1 else None
        if passes:
            self._made = passes[-1].marks
            if self._weighs:
                reducer.set_weight(weight)


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
    look_away()
    before = _aside.set(True)
    try:
        yield
    finally:
        _aside.reset(before)


_BY_HOOKS: Final = (
    "the loss is a tensor without a graph, whose hook runs the model and back-propagates (gradient caching, as the "
    "Cached... losses of sentence-transformers do it): gradients that come so can neither be weighed nor averaged, nor "
    "is it seen whether samples of several ranks should meet in the loss. Compute it without such a hook (there: the "
    "loss of that name without Cached, with gather_across_devices=True), and to save memory let the model "
    "recompute its activations"
)

_OF_AN_EVALUATION: Final = (
    "back-propagation through batches of hocket.shard(...), which is for evaluation: ranks may have other numbers of "
    "batches and of samples, and gradients would not be weighted by them. To train with several loaders, pass a list "
    "of them: model, optimizer, (a, b) = hocket.distribute(model, optimizer, [a, b]). For gradients of inputs in an "
    "evaluation call torch.autograd.grad, or back-propagate within model.no_sync()"
)
