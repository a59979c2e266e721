"""One step of an optimizer, made parameter by parameter, with the settings of when it was called."""

from __future__ import annotations

from collections.abc import Collection
from typing import Any

import torch


class Updates:
    """The updates of one step, in parts.

    Args:
        optimizer: works element by element.
    """

    def __init__(self, optimizer: Any) -> None:
        self._optimizer = optimizer
        self._settings: list[dict[str, Any]] = []

    def begin(self) -> None:
        """Notes the settings of the step that is due: a schedule may change them before all parts are made."""
        self._settings = [
            {key: _copied(value) for key, value in group.items() if key != "params"}
            for group in self._optimizer.param_groups
        ]
        self._optimizer._opt_called = True  # what schedules look at to warn of steps in the wrong order

    def make(self, parameters: Collection[torch.nn.Parameter]) -> None:
        """Updates some parameters by their gradients."""
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
