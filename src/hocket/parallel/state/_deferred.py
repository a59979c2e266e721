"""Models whose parameters have no memory yet: a ledger of what made each is kept, and done when and where it is wanted.

A constructor runs as it is, one tensor at a time in memory (`_ledger`). So the numbers of all tensors, and the random
numbers behind them, are those of a plain construction, and any tensor can be made again by itself.
"""

from __future__ import annotations

import hashlib
import pickle
from collections.abc import Callable, Iterable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any, Final, cast

import torch
from torch.utils._pytree import tree_leaves

from ..mesh import World
from ._deferred_parameter import DeferredValue, deferred_value
from ._ledger import Ledger, LedgerLine
from ._parameters import parameters_of
from .memory import give_back

_ATTRIBUTE: Final = "_hocket_deferred"
_STAND_IN_STD: Final = 0.02


def deferred(build: Callable[..., torch.nn.Module], *args: Any, **kwargs: Any) -> torch.nn.Module:
    """Build a model that no process need hold: its parameters are on the meta device until `Trainer` has divided it.

    Each rank then makes the numbers of its own part, those that a plain construction would have made from the same
    state of the random numbers; other random numbers that are drawn later are the same, too. While it is built, and
    while it is divided, only one tensor at a time is in memory besides.

    Args:
        build: Makes the model, on the CPU or this rank's GPU: its class, or any function.
        args: Given to `build`.
        kwargs: Likewise.

    Returns:
        The model. Make the optimizer of its parameters as always.

    Example::

        torch.manual_seed(0)
        model = hocket.deferred(GPT, config)
        trainer = hocket.Trainer(model, loss_fn, torch.optim.AdamW(model.parameters()), Plan(shard="parameters"))

    To train on GPUs, build there: `with torch.device("cuda"): model = hocket.deferred(GPT, config)`.
    """
    ledger = Ledger()
    with ledger, ledger.adopting():
        model = build(*args, **kwargs)
    if not isinstance(model, torch.nn.Module):
        raise TypeError(f"{build!r} must build a torch.nn.Module, not {type(model).__name__}")
    for tensor in _attributes(model):
        ledger.keep(tensor)
    for name, parameter in model.named_parameters():
        if ledger.of(parameter) is not None:
            other: Any = deferred_value(parameter, ledger)
            _swap(name, parameter, other)  # optimizers that hold it notice nothing
            cast(DeferredValue, parameter).hollow = other
            setattr(parameter, _ATTRIBUTE, ledger)
    return model


def _swap(name: str, parameter: torch.Tensor, other: torch.Tensor) -> None:
    try:
        torch.utils.swap_tensors(parameter, other)  # type: ignore[no-untyped-call]
    except RuntimeError as error:
        raise ValueError(
            f"parameter {name!r} cannot be deferred: a tensor that was computed from it with gradients is kept. "
            "Compute that in the forward pass, or under torch.no_grad(); torch.nn.utils.weight_norm keeps one, "
            "torch.nn.utils.parametrizations.weight_norm does not"
        ) from error


def _attributes(model: torch.nn.Module) -> Iterator[torch.Tensor]:
    """Return the model's tensors that are no parameters: buffers and plain attributes."""
    for module in model.modules():
        for leaf in tree_leaves(
            [dict(module._buffers), {k: v for k, v in vars(module).items() if not k.startswith("_")}]
        ):
            if isinstance(leaf, torch.Tensor) and not isinstance(leaf, torch.nn.Parameter):
                yield leaf


class Deferred:
    """The parameters of a model that have no memory yet, while it is divided among ranks.

    They are ordinary parameters of their device whose storage is empty; in a block of `streaming` they can be used.
    """

    def __init__(self, model: torch.nn.Module) -> None:
        self._ledgers: list[Ledger] = []
        self._parameters: list[torch.nn.Parameter] = []
        self.known = True  # whether it is known what their numbers are to be
        stand_ins = Ledger(known=False)
        for name, parameter in model.named_parameters():
            if isinstance(parameter, DeferredValue):
                hollow, ledger = parameter.hollow, parameter.ledger
                if not isinstance(hollow, torch.nn.Parameter):
                    hollow = torch.nn.Parameter(hollow, parameter.requires_grad)
            elif parameter.is_meta:
                hollow = torch.nn.Parameter(torch.empty_like(parameter, device="cpu"), parameter.requires_grad)
                ledger = stand_ins
                ledger.adopt(hollow, [_stand_in(hollow, len(self._parameters))])
                self.known = False
            else:
                continue
            hollow.requires_grad_(parameter.requires_grad)
            _swap(name, parameter, hollow)
            setattr(parameter, _ATTRIBUTE, ledger)
            self._parameters.append(parameter)
            if ledger not in self._ledgers:
                self._ledgers.append(ledger)
                ledger.taken = True

    @classmethod
    def of(cls, model: torch.nn.Module) -> Deferred | None:
        """None for a model that has all of its memory."""
        for tensor in _attributes(model):
            if isinstance(tensor, DeferredValue):  # made of parameters since
                hollow = tensor.hollow
                tensor.ledger.keep(hollow)
                torch.utils.swap_tensors(tensor, hollow)  # type: ignore[no-untyped-call]
        lost = next((n for n, b in model.named_buffers() if b.is_meta), None)
        if lost is not None:
            raise ValueError(
                f"buffer {lost!r} is on the meta device, and nothing says what its numbers are: build the model with "
                "hocket.deferred(build), which makes buffers at once, instead of under torch.device('meta')"
            )
        return cls(model) if any(p.is_meta for p in parameters_of(model)) else None

    def align(self, world: World) -> None:
        """Have all ranks make rank 0's numbers; a collective operation.

        Raises:
            ValueError: the ranks have built different models.
        """
        for ledger in self._ledgers:
            if len(set(map(tuple, world.from_all(ledger.operators(self._parameters))))) > 1:
                raise ValueError("ranks have built different models with hocket.deferred: build alike on every rank")
            values = ledger.values(self._parameters)
            if len(set(world.from_all(hashlib.sha256(pickle.dumps(values)).hexdigest()))) > 1:
                ledger.install(self._parameters, world.from_root(values))

    @contextmanager
    def streaming(self) -> Iterator[None]:
        """Open a block in which the parameters can be worked on, and are in memory while an operator does."""
        with ExitStack() as entered:
            for ledger in self._ledgers:
                entered.enter_context(ledger)
            yield

    def fill(self, parameters: Iterable[torch.Tensor]) -> None:
        """Give parameters their memory for good; those of others are left as they are."""
        give_back()
        for parameter in parameters:
            for ledger in self._ledgers:
                ledger.keep(parameter)
            if hasattr(parameter, _ATTRIBUTE):
                delattr(parameter, _ATTRIBUTE)

    def finish(self) -> None:
        """Fill what is left."""
        self.fill(self._parameters)

    def forget(self) -> None:
        """Leave the rest to other ranks."""
        for parameter in self._parameters:
            if hasattr(parameter, _ATTRIBUTE):
                delattr(parameter, _ATTRIBUTE)


def is_deferred(parameter: torch.Tensor) -> bool:
    """Return whether a parameter has no memory yet, but while an operator works on it."""
    return hasattr(parameter, _ATTRIBUTE)


def made_of(parameter: torch.Tensor, make: Callable[[torch.Tensor], torch.Tensor]) -> torch.Tensor:
    """Return what `make` makes of a parameter's data; it has no memory yet, either, where the parameter has none."""
    ledger: Ledger | None = getattr(parameter, _ATTRIBUTE, None)
    if ledger is None:
        return make(parameter.data)
    with ledger.adopting():
        return make(parameter.data)


def _stand_in(hollow: torch.nn.Parameter, number: int) -> LedgerLine:
    """Numbers for a tensor of which none are known: some that hide no error of a plan."""
    generator = torch.Generator().manual_seed(number)
    args = (hollow.data, 0.0, _STAND_IN_STD)
    operator = torch.ops.aten.normal_.default if hollow.is_floating_point() else torch.ops.aten.zero_.default
    if not hollow.is_floating_point():
        return LedgerLine(operator, args[:1], {}, [], [], None, True)
    return LedgerLine(operator, args, {"generator": generator}, [(generator, generator.get_state())], [], None, True)
