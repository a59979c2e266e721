"""How full memory is while a step's passes go on: every storage from when it is made until nothing holds it."""

import weakref
from collections.abc import Collection, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_flatten

from hocket.sharding import as_local, leaves

from ._autocast import autocast_behind, autocast_on_meta
from ._trace import CAST, fused_on_meta
from ._units import Loss, Unit, followed, hooked


@dataclass(frozen=True, slots=True)
class Peak:
    """What is alive at the fullest moment of a unit's two passes, besides weights, buffers and the batch."""

    passing: int = 0  # bytes that grow with the batch
    # bytes of parameters' gradients, of what else has a parameter's shape in the backward pass, and of weights in
    # another type
    fixed: int = 0
    in_loss: bool = False  # whether that is while the loss is computed or derived, after the model's end


class _Alive(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Notes storages as they are made, and as they are freed."""

    def __init__(self, ignored: Collection[int], shapes: Collection[tuple[int, ...]]) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.unit, self.in_loss, self.backward = 0, False, False
        self.nbytes: list[int] = []  # of every storage, by its number
        self.fixed: set[int] = set()  # numbers of storages that do not grow with the batch
        self.events: list[tuple[int, int, bool]] = []  # a storage made (its complement: freed), the unit, in the loss
        self._shapes = shapes
        # A storage's object is the same while it lives. The weak reference tells its end.
        self._numbers: dict[int, tuple[int, Any]] = dict.fromkeys(ignored, (-1, None))

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        of_weights = func.overloadpacket is CAST and tuple(args[0].shape) in self._shapes and self.number(args[0]) < 0
        for one in leaves(out):
            if isinstance(one, Tensor):
                self._note(one, fixed=of_weights)
        return out

    def number(self, tensor: Tensor) -> int:
        """Return the number of a tensor's storage; -1 if it is ignored or unknown."""
        return self._numbers.get(id(_storage(tensor)), (-1, None))[0]

    def _note(self, tensor: Tensor, *, fixed: bool) -> None:
        storage = _storage(tensor)
        key = id(storage)
        if storage is None or key in self._numbers:
            return
        number = len(self.nbytes)

        def freed(_: Any) -> None:
            self._numbers.pop(key, None)
            self._event(~number)

        self._numbers[key] = (number, weakref.ref(storage, freed))
        self.nbytes.append(storage.nbytes())
        like_weights = tuple(tensor.shape) in self._shapes or tuple(tensor.shape[::-1]) in self._shapes
        if fixed or (self.backward and like_weights):
            self.fixed.add(number)
        self._event(number)

    def _event(self, number: int) -> None:
        self.events.append((number, self.unit, self.in_loss))


def _storage(tensor: Tensor) -> Any:
    try:
        return tensor.untyped_storage()
    except NotImplementedError:  # it has none
        return None


def peaks_of(model: nn.Module, units: Sequence[Unit], batch: Any, run: Loss) -> dict[int, Peak]:
    """Run a step's passes, and return the fullest moment of each unit's; nothing for what the meta device cannot run.

    There must be no gradients before.
    """
    try:
        return _followed(model, units, batch, run)
    except (RuntimeError, NotImplementedError):  # an operator without a backward kernel for the meta device
        if any(one.device.type != "meta" for one in model.parameters()):
            raise
        model.zero_grad(set_to_none=True)
        return {}


def _followed(model: nn.Module, units: Sequence[Unit], batch: Any, run: Loss) -> dict[int, Peak]:
    given = [one for one in tree_flatten(batch)[0] if isinstance(one, Tensor)]
    kept = [_storage(one) for one in (*model.parameters(), *model.buffers(), *given)]
    parameters = [one for one in model.parameters() if one.requires_grad]
    alive = _Alive({id(one) for one in kept}, {tuple(one.shape) for one in parameters})

    def enter(index: int) -> None:
        alive.unit, alive.in_loss = index, False

    def returned(*_: Any) -> None:
        alive.in_loss = True

    with ExitStack() as stack:
        stack.enter_context(followed(units, enter, enter))
        stack.enter_context(hooked(model.register_forward_hook(returned)))
        stack.enter_context(fused_on_meta())
        stack.enter_context(alive)
        with autocast_on_meta(model):
            result = run(model, batch)
        alive.backward = True
        with as_local(), autocast_behind():
            torch.autograd.backward(result)
    gradients = {alive.number(one.grad) for one in parameters if one.grad is not None}
    model.zero_grad(set_to_none=True)
    del result
    alive.fixed |= gradients - {-1}
    return _peaks(alive.nbytes, alive.fixed, alive.events)


def _peaks(nbytes: Sequence[int], fixed: Collection[int], events: Sequence[tuple[int, int, bool]]) -> dict[int, Peak]:
    """Return the fullest moment of each unit, of storages made and freed one after the other."""
    found: dict[int, Peak] = {}
    now = [0, 0]
    for event, unit, in_loss in events:
        number = event if event >= 0 else ~event
        now[number in fixed] += nbytes[number] if event >= 0 else -nbytes[number]
        before = found.get(unit, Peak())
        if event >= 0 and sum(now) > before.passing + before.fixed:
            found[unit] = Peak(now[0], now[1], in_loss)
    return found
