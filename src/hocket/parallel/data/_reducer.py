"""Averages gradients over ranks while back-propagation goes on."""

import contextlib
import threading
import weakref
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch

from hocket import comm
from hocket.comm import torch_adapter
from hocket.planner import BucketSizes

from ..batches import batch as _batch
from ..mesh import World
from ._bucket import Bucket, Over, bucket_layout
from ._hooks import HookDeferrer, Ready, Scale, remove
from ._reduction import BucketReduction


class GradientReducer:
    """Gradients of a set of parameters, averaged over ranks.

    Each parameter's `.grad` becomes a view of a bucket. A hook notes when a gradient is complete; a bucket whose
    gradients all are is reduced at once, provided that those before it have been, so that every rank posts the same
    operations in the same order. When back-propagation ends, whatever is missing counts as zero, and `backward()`
    returns when all buckets are reduced.

    Parameters that no rank used keep `.grad` as it was, None at the first step.
    """

    def __init__(
        self,
        names: Sequence[str],  # names of the parameters, for messages
        # all parameters of the model, each once, in the same order on every rank
        parameters: Sequence[torch.nn.Parameter],
        world: World,  # the ranks
        bucket_bytes: int | None,  # most bytes of a bucket; None to choose by the size of the model
        first_bucket_bytes: int | None,  # most bytes of the bucket that is full first; None for no difference
        compression: str = "none",  # compression of the gradients; see `hocket.planner.Plan`
        *,
        reduction: BucketReduction | None = None,  # how buckets are reduced; None for all-reduce with `compression`
    ) -> None:
        self._reduction = reduction or BucketReduction(len(parameters), world, compression)
        self.compression = self._reduction.compression
        self.buckets: list[Bucket] = []
        self._names = list(names)
        self._parameters = list(parameters)
        self._world = world
        self._wanted_sizes = (bucket_bytes, first_bucket_bytes)
        self._order = list(reversed(range(len(self._parameters))))
        self._hooks: dict[int, Any] = {}
        self._kinds: list[tuple[bool, torch.dtype, torch.device]] = []
        self.weight = 1.0  # of this rank's gradients in the average
        self.averaged = 0  # how often gradients have been averaged
        self.due = False  # whether the back-propagation under way, or about to begin, is of its passes
        self._weight_hooks: list[Any] = []
        self._lock = threading.Lock()
        self._unsynchronised = 0  # how many no_sync blocks we are in
        self.holds_back = False  # gradients of such blocks are this rank's alone
        self._forward_synchronises: bool | None = None  # as the last forward said; None if backward came since
        self._running = False  # a gradient has arrived in a back-propagation that has not ended
        self._callback_queued = False
        self._synchronise = False
        self.ended: Callable[[], Callable[[], None] | None] = lambda: None  # what to call when gradients are averaged
        # Parameters as their gradients arrived; None once their order is known, or cannot be changed.
        self._seen: list[int] | None = [] if self._reduction.rebuilds else None
        self._order_observed = False
        self._program_hooks = HookDeferrer(self._names, self._parameters, self._averages, whole=self._reduction.whole)
        self._build()
        weakref.finalize(self, remove, self._hooks)

    # --- what the model says ----------------------------------------------------------------------------------------

    @contextlib.contextmanager
    def no_sync(self) -> Any:
        """Inside the block gradients add up on this rank alone."""
        self._unsynchronised += 1
        try:
            yield
        finally:
            self._unsynchronised -= 1

    @property
    def synchronises(self) -> bool:
        """Whether a forward pass at this point is one whose gradients are to be averaged."""
        return self._unsynchronised == 0

    @property
    def awaits_backward(self) -> bool:
        """Whether a forward pass has been made since the last back-propagation."""
        return self._forward_synchronises is not None

    def prepare(self) -> None:
        """Get ready for the back-propagation of a forward pass that is about to begin."""
        if torch_adapter.in_backward():  # activation checkpointing runs parts of forward again
            return
        if self._running or self._callback_queued:
            self._recover()
        self._forward_synchronises = self.synchronises
        self.find_hooks()
        if [_kind(p) for p in self._parameters] != self._kinds:
            self._build()  # parameters have been frozen, thawed or converted
        if self._order_observed:
            self._adopt_order()

    @contextlib.contextmanager
    def owning(self) -> Iterator[None]:
        """Open a block in which gradients are averaged by this reducer, and by no other of the same parameters."""
        self.due = True
        try:
            yield
        finally:
            self.due = False

    @contextlib.contextmanager
    def one_backward(self) -> Iterator[None]:
        """Open a block with one forward pass and its back-propagation, at whose end gradients are averaged.

        They would be at the end of the first back-propagation that is nested in it (`expect_backward`), and once more.
        """
        self.prepare()
        self._callback_queued = True
        yield
        self._finish()

    def find_hooks(self) -> None:
        """Have hooks that the program has registered on parameters wait for averaged gradients.

        Raises:
            RuntimeError: gradients will not be averaged at once, and a hook is not linear.
        """
        self._program_hooks.find(averaged=self._averages())

    def _averages(self) -> bool:
        """Return whether gradients that arrive now are averaged when back-propagation ends, they alone."""
        wanted = self._forward_synchronises
        return (self.synchronises if wanted is None else wanted) and not self.holds_back

    def resize(self, bucket_bytes: int) -> None:
        """Make buckets of at most so many bytes, from the next forward pass on."""
        self._wanted_sizes = (bucket_bytes, None)
        self._kinds.clear()

    def reduce_all(self) -> None:
        """Average the gradients that have added up so far, after the back-propagations that made them."""
        with self._lock:
            self._forward_synchronises = None
            self._rewind()
            self._reduce_rest()
            self._rewind()

    def set_weight(self, weight: float) -> None:
        """Make this rank's gradients count `weight` times in the average from the next back-propagation on."""
        if weight == self.weight:
            return
        self.weight = weight
        self._hook_weights()

    def expect_backward(self, _: torch.Tensor | None = None) -> None:
        """Have `_finish` called at the end of the back-propagation that has begun; a hook for outputs of the model.

        With re-entrant activation checkpointing gradients arrive in back-propagations nested in the one that matters,
        and only the outputs are sure to be met in the latter.
        """
        if not self._callback_queued:
            self._callback_queued = True
            torch_adapter.queue_callback(self._finish)

    # --- buckets ----------------------------------------------------------------------------------------------------

    def _build(self) -> None:
        """Lay out the buckets for the parameters that now require gradients.

        Gradients that exist move into the new buckets in the next back-propagation; where there are none, the memory of
        the old buckets is free to be used again. Buckets that stay as they are take what is frozen now for unused.
        """
        before, self._kinds = self._kinds, [_kind(p) for p in self._parameters]
        if self.buckets and not self._reduction.rebuilds:
            in_slots = all(i in self._slots for i, (trained, *_) in enumerate(self._kinds) if trained)
            if not in_slots or [kind[1:] for kind in before] != [kind[1:] for kind in self._kinds]:
                self._kinds = before
                raise RuntimeError(
                    "parameters were thawed or converted after their optimizer state had been divided among ranks; do "
                    "it before the Trainer is made, or make a new one"
                )
            self._hook_weights()
            return
        active = [i for i in self._order if self._parameters[i].requires_grad]
        nbytes = [p.numel() * p.element_size() for p in self._parameters]
        sizes = BucketSizes.choose(sum(nbytes[i] for i in active), *self._wanted_sizes)
        plans = bucket_layout(active, nbytes, self._kinds, sizes)
        self.buckets.clear()
        self._slots: dict[int, tuple[Bucket, int]] = {}
        for members in plans:
            parameters = [self._parameters[i] for i in members]
            bucket = self._reduction.make_bucket(members, parameters, last=members is plans[-1])
            self.buckets.append(bucket)
            self._slots.update({i: (bucket, slot) for slot, i in enumerate(members)})
        for i in active:
            parameter = self._parameters[i]
            if i not in self._hooks:
                self._hooks[i] = parameter.register_post_accumulate_grad_hook(Ready(self, i))  # type: ignore[no-untyped-call]
        self._reduction.laid_out(self.buckets)
        self._hook_weights()
        self._rewind()

    def _hook_weights(self) -> None:
        for handle in self._weight_hooks:
            handle.remove()
        self._weight_hooks.clear()
        if self.weight != 1.0:
            told = weakref.WeakMethod(self._is_told)
            for number, parameter in enumerate(self._parameters):
                if parameter.requires_grad:
                    scale = Scale(self.weight, told, number)
                    self._weight_hooks.append(parameter.register_hook(scale))  # type: ignore[no-untyped-call]

    def _is_told(self, number: int) -> bool:
        parameter = self._parameters[number]
        return torch_adapter.accumulates(parameter) and Ready.owner(parameter) is self

    def _adopt_order(self) -> None:
        """Lay out the buckets once more, by the order in which rank 0's first gradients arrived."""
        seen = self._world.from_root(self._seen) or []
        self._seen, self._order_observed = None, False
        met = set(seen)
        order = seen + [i for i in self._order if i not in met]
        if order != self._order:
            self._order = order
            self._build()

    def _rewind(self) -> None:
        self._running = self._callback_queued = False
        self._next = 0
        self._absent: list[int] = []  # parameters without a gradient on this rank
        self._arrived = [False] * len(self._parameters)
        for bucket in self.buckets:
            bucket.pending = len(bucket.members)
            bucket.work = None

    def _recover(self) -> None:
        """Recover from an exception in back-propagation: wait for what had been posted, and forget the rest."""
        for bucket in self.buckets:
            if bucket.work is not None:
                bucket.work.wait()
        if self._seen is not None:
            self._seen = []
        self._reduction.recover()
        self._program_hooks.recover()
        self._rewind()

    # --- back-propagation -------------------------------------------------------------------------------------------

    def ready(self, number: int, parameter: torch.Tensor) -> None:
        """Take notice that the gradient of parameter `number` is complete.

        Raises:
            TypeError: it is sparse.
            RuntimeError: it has been reduced already in this back-propagation, or which batch it is of is not known.
        """
        with self._lock:
            if not self._running:
                self._running = True
                wanted = self._forward_synchronises
                self._synchronise = self.synchronises if wanted is None else wanted
                if wanted is None and not self._callback_queued and self._synchronise and _batch.contested():
                    self._running = False
                    raise RuntimeError(
                        "a loss was computed without the model's forward while several loaders are open whose batches "
                        "weigh differently, so that its gradients' weight is not known: compute it in forward, whose "
                        "inputs tell the batch, or make all batches of a size that the ranks can share equally"
                    )
                self.expect_backward()
            if number not in self._slots:
                return
            if not self._synchronise:
                if self._reduction.attaches:  # else what adds up on this rank would be there twice
                    self._adopt(number, parameter)
                return
            bucket, _ = self._slots[number]
            if bucket.work is not None:
                raise RuntimeError(
                    f"the gradient of parameter {self._names[number]!r} arrived twice in one back-propagation, and the "
                    "first had been averaged over ranks already. Re-entrant activation checkpointing of a part that is "
                    "used twice does this; use torch.utils.checkpoint.checkpoint(..., use_reentrant=False)"
                )
            self._adopt(number, parameter)
            if self._arrived[number]:
                return
            self._arrived[number] = True
            if self._seen is not None and not self._order_observed:
                self._seen.append(number)
            bucket.pending -= 1
            if bucket.pending == 0:
                self._launch()

    def _adopt(self, number: int, parameter: torch.Tensor) -> None:
        """Make the parameter's gradient a view of its bucket, values kept."""
        bucket, slot = self._slots[number]
        gradient = parameter.grad
        assert gradient is not None
        self._reduction.open(bucket)
        if gradient is bucket.view(slot):
            return
        if gradient.layout is not torch.strided:
            raise TypeError(
                f"parameter {self._names[number]!r} has a gradient of layout {gradient.layout}; hocket averages dense "
                "gradients only. For an embedding, say sparse=False, or take hocket.Trainer(..., "
                'plan=hocket.Plan(embeddings="row")), which exchanges the rows looked up'
            )
        view, gradient = bucket.writable(slot), gradient.detach() if gradient.requires_grad else gradient
        if self._arrived[number] and not self._reduction.attaches:  # re-entrant checkpointing of a part used twice
            view.add_(gradient)
        else:
            view.copy_(gradient)
        parameter.grad = view if self._reduction.attaches else None

    def _launch(self) -> None:
        """Post the reductions of the buckets that are complete and whose turn it is."""
        while self._next < len(self.buckets) and self.buckets[self._next].pending == 0:
            bucket = self.buckets[self._next]
            with comm.label(f"bucket {self._next}"):
                bucket.work = self._reduction.post(bucket, self._next, self._absent) or Over()
            self._next += 1

    def _finish(self) -> None:
        """End back-propagation: reduce what is left and wait for all; then call the program's hooks."""
        used: set[int] = set()
        with self._lock:
            if not self._running:  # torch.autograd.grad has passed through the outputs: nothing was accumulated
                self._callback_queued = False
                return
            averaged = self._synchronise and self._averages()
            synchronised = self._synchronise
            self._forward_synchronises = None
            self.holds_back = not self._synchronise
            if self._synchronise:
                if averaged:
                    self._program_hooks.put_aside(i for i in self._slots if not self._arrived[i])
                used.update(self._reduce_rest(), (i for i in self._slots if self._arrived[i]))
                self._order_observed = self._seen is not None
            self._rewind()
        if averaged:
            self._program_hooks.call(used.__contains__)
        if synchronised and (ended := self.ended()) is not None:
            ended()

    def _reduce_rest(self) -> list[int]:
        """Reduce what is left and wait; return the parameters that have a gradient because other ranks used them."""
        self.averaged += 1
        for i, (bucket, slot) in self._slots.items():
            if self._arrived[i]:
                continue
            if self._parameters[i].grad is None or not self._is_told(i):
                self._reduction.open(bucket)
                bucket.writable(slot).zero_()
                self._absent.append(i)
            else:  # from an earlier back-propagation
                self._adopt(i, self._parameters[i])
            bucket.pending -= 1
        self._launch()
        elsewhere = list(self._reduction.settle(self._absent))
        for i in elsewhere:
            bucket, slot = self._slots[i]
            self._parameters[i].grad = bucket.view(slot)
        if self.compression is not None:
            self.compression.reduced()
        return elsewhere


def _kind(parameter: torch.Tensor) -> tuple[bool, torch.dtype, torch.device]:
    return parameter.requires_grad, parameter.dtype, parameter.device
