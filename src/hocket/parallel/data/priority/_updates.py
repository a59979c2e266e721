"""Which module is the first to need which parameter, and a step of the optimizer made parameter by parameter."""

from collections.abc import Collection, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch.overrides import TorchFunctionMode

from ...batches import trees as _trees


class Updates:
    """The updates of one step, in parts. The optimizer works element by element."""

    def __init__(self, optimizer: Any) -> None:
        self._optimizer = optimizer
        self._settings: list[dict[str, Any]] = []

    def begin(self) -> None:
        """Note the settings of the step that is due: a schedule may change them before all parts are made."""
        self._settings = [
            {key: _copied(value) for key, value in group.items() if key != "params"}
            for group in self._optimizer.param_groups
        ]
        self._optimizer._opt_called = True  # what schedules look at to warn of steps in the wrong order

    def make(self, parameters: Collection[torch.nn.Parameter]) -> None:
        """Update some parameters by their gradients."""
        groups = self._optimizer.param_groups
        wanted = {id(parameter) for parameter in parameters}
        kept = [dict(group) for group in groups]
        try:
            for group, settings in zip(groups, self._settings, strict=False):
                group.update(settings)
                group["params"] = [p for p in group["params"] if id(p) in wanted]
            with torch.no_grad():
                self._optimizer.step()
        finally:
            for group, before in zip(groups, kept, strict=True):
                group.update(before)


def _copied(value: Any) -> Any:
    return value.clone() if isinstance(value, torch.Tensor) else value


class _ParameterUses(TorchFunctionMode):
    def __init__(self, numbers: dict[int, int]) -> None:
        super().__init__()
        self._numbers = numbers
        self.inside: list[torch.nn.Module] = []
        self.users: dict[int, list[torch.nn.Module]] = {}  # by parameter, in the order of first use

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        named = kwargs or {}
        for tensor in _trees.tensors_in((args, named)):
            number = self._numbers.get(id(tensor))
            if number is not None and self.inside:
                users = self.users.setdefault(number, [])
                if not any(user is self.inside[-1] for user in users):
                    users.append(self.inside[-1])
        return func(*args, **named)


@contextmanager
def watched(
    model: torch.nn.Module, parameters: Sequence[torch.nn.Parameter]
) -> Iterator[dict[int, list[torch.nn.Module]]]:
    """Note in a block what forward passes of `model` do.

    What it yields has for each parameter that was used, by number, in the order of first uses, the innermost modules
    that did.
    """
    watch = _ParameterUses({id(parameter): number for number, parameter in enumerate(parameters)})
    handles = []
    for module in model.modules():
        handles.append(module.register_forward_pre_hook(lambda inner, _: watch.inside.append(inner)))
        handles.append(module.register_forward_hook(lambda inner, *_: _leave(watch.inside, inner), always_call=True))
    try:
        with watch:
            yield watch.users
    finally:
        for handle in handles:
            handle.remove()


def _leave(inside: list[torch.nn.Module], module: torch.nn.Module) -> None:
    while inside and inside.pop() is not module:
        pass
