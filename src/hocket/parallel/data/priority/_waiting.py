"""Notices that the program writes to what an update is still due for."""

import ctypes
from collections.abc import Mapping
from typing import Any

import torch

_NBYTES = 64  # of a parameter's middle: what is written by way of `.data` moves no version


class WaitingParameters:
    """What parameters and their optimizer's states are from the end of a step until they are updated.

    On one device they have been updated by then: what is written to them before would come after the update there, and
    comes before it here.
    """

    def __init__(self, parameters: Mapping[str, torch.nn.Parameter], optimizer: Any) -> None:
        self._parameters = list(parameters.items())
        self._optimizer = optimizer
        self._left: list[tuple[Any, ...]] = []

    def note(self) -> None:
        """Take them as the step has left them."""
        self._left = [self._now(parameter) for _, parameter in self._parameters]

    def check(self, number: int) -> None:
        """Raise a RuntimeError if a parameter, by number, or the optimizer's state of it, is other than it was left."""
        name, parameter = self._parameters[number]
        now, left = self._now(parameter), self._left[number]
        if now != left:
            what = "parameter" if now[:-1] != left[:-1] else "the optimizer's state of parameter"
            raise RuntimeError(
                f"the program has written to {what} {name!r} before the update of its last step, which with priority "
                "is made in the next one: call trainer.finish() before it writes or reads, or say priority = False"
            )

    def _now(self, parameter: torch.nn.Parameter) -> tuple[Any, ...]:
        state = self._optimizer.state.get(parameter, {})
        kept = tuple(
            (key, id(one), one._version) if isinstance(one, torch.Tensor) else one for key, one in state.items()
        )
        begin, middle = parameter.data_ptr(), b""
        if parameter.is_contiguous():
            nbytes = parameter.numel() * parameter.element_size()
            middle = ctypes.string_at(begin + nbytes // 2, min(_NBYTES, nbytes - nbytes // 2))
        return parameter._version, begin, middle, kept
