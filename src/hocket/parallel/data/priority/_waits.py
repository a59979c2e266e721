"""Hooks by which modules, and whoever reads a state dict, wait for updates that are due; they keep nobody alive."""

from __future__ import annotations

import weakref
from collections.abc import Sequence
from typing import Any, Protocol

import torch


class Pending(Protocol):
    """Who has updates to make."""

    def settle(self, numbers: Sequence[int]) -> None:
        """Makes those of some parameters."""

    def finish(self) -> None:
        """Makes all."""

    def after_forward(self) -> None:
        """The model's forward is over."""


class BeforeModule:
    """A hook before a module's forward: what the module uses is updated first."""

    def __init__(self, form: Pending, numbers: Sequence[int]) -> None:
        self._form = weakref.ref(form)
        self._numbers = list(numbers)

    def __call__(self, module: torch.nn.Module, inputs: Any) -> None:
        form = self._form()
        if form is not None:
            form.settle(self._numbers)


class BeforeState:
    """A hook before a state dict is made of the model or of the optimizer."""

    def __init__(self, form: Pending) -> None:
        self._form = weakref.ref(form)

    def __call__(self, *_: Any) -> None:
        form = self._form()
        if form is not None:
            form.finish()


class AfterModel:
    """A hook after the model's forward."""

    def __init__(self, form: Pending) -> None:
        self._form = weakref.ref(form)

    def __call__(self, *_: Any) -> None:
        form = self._form()
        if form is not None:
            form.after_forward()
