"""The form of data parallelism in which the layers that the next forward pass needs first are updated first."""

import sys
import weakref
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import torch
import torch.distributed as dist

from ...mesh import World
from ...state import ParameterPlacement
from .. import _hooks
from .._strategy import ShardingStrategy, replicated
from ._chunks import Chunk, cut, order
from ._sender import Sender
from ._updates import Updates, watched
from ._waiting import WaitingParameters

_CHUNK_NBYTES = 2 * 2**20
"""Most bytes of a chunk: what must end before something more urgent can go (ByteScheduler finds 1 to 8 MB best)."""
_CREDIT_CHUNKS = 2
"""Chunks on their way at once: one that is sent, one behind it so that the link never waits."""

_DEADLINE_S = 3600.0
"""Operations have their group's deadline, whose error ends every wait: this is for what no operation tells."""


class Prioritised(ShardingStrategy):
    """Every rank holds all parameters, and averages their gradients in the order in which they are needed next.

    Gradients are cut into chunks (P3, Jayarajan et al. 2019), of which a bounded number of bytes is on its way at once
    (ByteScheduler, Peng et al. 2019). Back-propagation does not wait for them: a hook before each module's forward
    waits for the gradients of what the module uses, and updates that.

    The first step is made without all this and shows which module uses which parameter, in which order; the second
    sends chunks as back-propagation makes them and shows when they are ready and how fast they go. Of rank 0's times
    every rank then has the order in which a queue by priority would send them.
    """

    def __init__(
        self,
        model: torch.nn.Module,  # the model
        parameters: Mapping[str, torch.nn.Parameter],  # all trained parameters by the model's names
        frozen: Mapping[str, torch.nn.Parameter],  # parameters that are not trained
        places: Mapping[str, ParameterPlacement],  # where each parameter lies in the model's own
        world: World,  # the ranks, two or more
        chunk_nbytes: int | None,  # most bytes of a chunk; None for 2 MiB
        optimizer: Any,  # an optimizer that works element by element
    ) -> None:
        self._pending: set[int] = set()
        self._broken = False
        if not hasattr(optimizer, "register_state_dict_pre_hook"):
            raise ValueError(
                f"with priority updates are made as gradients arrive, and {type(optimizer).__name__} is no "
                "torch.optim.Optimizer, whose state_dict cannot be told to wait for them: derive it from that class, "
                "or say priority = False"
            )
        super().__init__(replicated(parameters, places, world), replicated(frozen, places, world))
        self._model = model
        self._names, self._parameters = list(parameters), list(parameters.values())
        self._world = world
        self._chunk_nbytes = chunk_nbytes or _CHUNK_NBYTES
        self._updates = Updates(optimizer)
        self._waiting = WaitingParameters(parameters, optimizer)
        ranks = [dist.get_global_rank(world.group, rank) for rank in range(world.size)]
        # The order of operations is agreed on for each group: nobody else may post on the sender's.
        self._own = World(world.rank, world.size, dist.new_group(ranks))
        self._sender = Sender(self._own, _DEADLINE_S)
        self._chunks: list[Chunk] = []
        self._flats: list[torch.Tensor] = []
        self._parts: list[list[tuple[int, int, int, int]]] = [[] for _ in self._parameters]  # chunk, at, begin, end
        self._flags: list[list[tuple[int, int]]] = [[] for _ in self._parameters]  # where a use is told: chunk, at
        self._left: list[int] = []  # of each chunk, gradients that have not arrived
        self._steps = 0
        self._last = self.due = False
        self._factor = 1.0
        self._arrived: set[int] = set()
        self._overdue: set[int] = set()  # updated after forward only, because no module had asked for them
        self._handles: dict[int, Any] = {}
        weakref.finalize(self, self._sender.close)
        weakref.finalize(self, _hooks.remove, self._handles)
        before: Any = _hooks.weak_hook(self.finish)
        for one in (*model.modules(), optimizer):
            for register in (one.register_state_dict_pre_hook, one.register_load_state_dict_pre_hook):
                self._handles[len(self._handles)] = register(before)

    # --- a form of data parallelism ---------------------------------------------------------------------------------

    @contextmanager
    def passing(self, last: bool) -> Iterator[None]:
        if self._broken:
            raise RuntimeError(
                "an earlier forward or backward pass was left by an exception while gradients were on their way, so "
                "that ranks differ: make a new Trainer, or say priority = False to go on after exceptions"
            )
        self._last, self.due, self._broken = last, True, True
        self._overdue.clear()
        if self._steps == 0:
            with watched(self._model, self._parameters) as users:
                yield
            if last:
                self._lay_out(users)
        else:
            yield
            if last:
                self._end()
        self.due = self._broken = False

    def scale(self, factor: float) -> None:
        """See ShardingStrategy. Gradients are on their way still, and are multiplied when they are there."""
        self._factor = factor

    # --- updates ----------------------------------------------------------------------------------------------------

    def update(self, optimizer: Any) -> None:
        """Have parameters updated when their gradients are there, by the optimizer's settings of now."""
        self._updates.begin()
        self._pending = set(range(len(self._parameters)))
        self._steps += 1
        if self._steps <= 2:  # the order of the steps to come is agreed on where all ranks are
            self.finish()
            self._sender.lay_out(self._flats, self._agreed(), _CREDIT_CHUNKS * self._chunk_nbytes)
        else:
            self._waiting.note()

    def finish(self) -> None:
        """Wait for the gradients that are on their way, and make the updates that are due."""
        self.settle(sorted(self._pending))

    def __del__(self) -> None:
        if self._pending and not self._broken and not sys.is_finalizing():
            self.finish()  # a program may go on to use the model without its trainer

    @torch.inference_mode(False)
    def settle(self, numbers: Sequence[int]) -> None:
        """Update those of some parameters that are pending."""
        due = [number for number in numbers if number in self._pending]
        if not due:
            return
        if self._steps > 2:
            for number in due:
                self._waiting.check(number)
        self._pending.difference_update(due)
        self._sender.wait(sorted({chunk for number in due for chunk, *_ in self._parts[number]}))
        used = []
        for number in due:
            parameter = self._parameters[number]
            if not any(float(self._flats[chunk][at]) for chunk, at in self._flags[number]):
                continue  # as on one device, what took no part in the loss stays as it is
            gradient = torch.empty(parameter.shape, dtype=parameter.dtype)
            values = gradient.view(-1)
            for chunk, at, begin, end in self._parts[number]:
                values[begin:end] = self._flats[chunk][at : at + end - begin]
            if self._factor != 1.0:
                gradient.mul_(self._factor)
            kept, parameter.grad = parameter.grad, gradient
            used.append((parameter, kept))
        if used:
            self._updates.make([parameter for parameter, _ in used])
        for parameter, kept in used:
            parameter.grad = kept

    # --- the first step ---------------------------------------------------------------------------------------------

    def _lay_out(self, users: dict[int, list[torch.nn.Module]]) -> None:
        """Cut the gradients as the first forward pass has shown them to be needed, and reduce the first step's."""
        seen = self._world.from_root(list(users))
        numbers = seen + [n for n in range(len(self._parameters)) if n not in set(seen)]
        kinds = [p.dtype for p in self._parameters]
        sizes = [p.numel() for p in self._parameters]
        self._chunks = cut(numbers, sizes, [p.element_size() for p in self._parameters], kinds, self._chunk_nbytes)
        for i, chunk in enumerate(self._chunks):
            at = 0
            for number, begin, end in chunk.stretches:
                self._parts[number].append((i, at, begin, end))
                at += end - begin
            for number, _, _ in chunk.stretches:
                self._flags[number].append((i, at))
                at += 1
            self._flats.append(torch.zeros(at, dtype=self._parameters[chunk.stretches[0].number].dtype))
        self._add_hooks(users)
        self._sender.lay_out(self._flats, range(len(self._flats)), _CREDIT_CHUNKS * self._chunk_nbytes)
        self._begin()
        self._end()

    def _add_hooks(self, users: dict[int, list[torch.nn.Module]]) -> None:
        """Add hooks: gradients tell when they are complete, modules wait for what they use."""
        numbers = {id(p): number for number, p in enumerate(self._parameters)}
        needs: dict[int, set[int]] = {}
        modules = {id(module): module for module in self._model.modules()}
        for module in modules.values():
            own = {numbers[id(p)] for p in module.parameters(recurse=False) if id(p) in numbers}
            needs.setdefault(id(module), set()).update(own)
        for number, some in users.items():
            for module in some:
                needs.setdefault(id(module), set()).add(number)
        unseen = set(range(len(self._parameters))).difference(users)
        needs[id(self._model)].update(unseen)  # compiled code, say, does not show what it uses
        for key, wanted in needs.items():
            if wanted:
                handle = modules[key].register_forward_pre_hook(
                    _hooks.weak_hook(self.settle, sorted(wanted)), prepend=True
                )
                self._handles[len(self._handles)] = handle
        self._handles[len(self._handles)] = self._model.register_forward_hook(_hooks.weak_hook(self.after_forward))
        for number, parameter in enumerate(self._parameters):
            ready: Any = _hooks.Ready(self, number)
            self._handles[len(self._handles)] = parameter.register_post_accumulate_grad_hook(ready)  # type: ignore[no-untyped-call]

    def _agreed(self) -> list[int]:
        """Return the order in which chunks go from the next step on; the same on every rank."""
        if self._steps == 1:
            return list(reversed(range(len(self._chunks))))
        ready_s, done_s = self._sender.ready_s, self._sender.done_s
        begin_s, busy_s, before_s = min(ready_s), 0.0, 0.0
        for chunk in reversed(range(len(self._chunks))):
            busy_s += done_s[chunk] - max(before_s, ready_s[chunk])
            before_s = done_s[chunk]
        nbytes = [chunk.nbytes for chunk in self._chunks]
        rate_Bps = sum(nbytes) / max(busy_s, 1e-9)
        mine = order([s - begin_s for s in ready_s], nbytes, rate_Bps, _CREDIT_CHUNKS * self._chunk_nbytes)
        return self._world.from_root(mine)

    # --- every other step -------------------------------------------------------------------------------------------

    def _begin(self) -> None:
        self._left = [len(chunk.stretches) for chunk in self._chunks]
        self._arrived = set()
        self._factor = 1.0  # all of the step before has been updated
        self._sender.begin()

    def ready(self, number: int, parameter: torch.Tensor) -> None:
        """Take notice that the gradient of a parameter is complete.

        Raises:
            RuntimeError: it arrives twice, or the parameter had been used before it was updated.
            TypeError: it is sparse.
        """
        name = self._names[number]
        if number in self._overdue:
            raise RuntimeError(
                f"parameter {name!r} was used by a module that had not used it in the first step, before its update: "
                "where which layers are computed changes from step to step, say priority = False"
            )
        if not (self._last and self.due):
            return
        if not self._left:
            self._begin()
        if number in self._arrived:
            raise RuntimeError(
                f"the gradient of parameter {name!r} arrived twice in one back-propagation, and the first was on its "
                "way already: say use_reentrant=False to torch.utils.checkpoint.checkpoint, or priority = False"
            )
        assert parameter.grad is not None
        self._put(number, parameter.grad)

    def _put(self, number: int, gradient: torch.Tensor | None) -> None:
        if gradient is not None and gradient.layout is not torch.strided:
            raise TypeError(
                f"parameter {self._names[number]!r} has a gradient of layout {gradient.layout}; hocket averages dense "
                "gradients only. For an embedding, say sparse=False"
            )
        self._arrived.add(number)
        values = None if gradient is None else gradient.detach().reshape(-1)
        for chunk, at, begin, end in self._parts[number]:
            part = self._flats[chunk][at : at + end - begin]
            if values is None:
                part.zero_()
            else:
                part.copy_(values[begin:end])
        for chunk, at in self._flags[number]:
            self._flats[chunk][at] = float(values is not None)
            self._left[chunk] -= 1
            if not self._left[chunk]:
                self._sender.ready(chunk)

    def _end(self) -> None:
        """End back-propagation: what has not arrived will not, on this rank."""
        if not self._left:
            self._begin()
        for number, parameter in enumerate(self._parameters):
            if number not in self._arrived:
                self._put(number, parameter.grad)
        self._left = []

    def after_forward(self) -> None:
        """Update what no module has asked for; that it was not used before shows when gradients come."""
        if self._pending and self._steps > 1:
            self._overdue = set(self._pending)
            self.finish()
