"""Which module of a model is the first to need which parameter: seen in a forward pass, not guessed from names."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch.overrides import TorchFunctionMode

from ...batches import trees as _trees


class _Watch(TorchFunctionMode):
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
    """Notes in a block what forward passes of `model` do.

    Yields:
        For each parameter that was used, by number and in the order of first uses, the innermost modules that used it.
    """
    watch = _Watch({id(parameter): number for number, parameter in enumerate(parameters)})
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
