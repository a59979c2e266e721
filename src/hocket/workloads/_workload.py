"""The seam between a workload and the loop that trains it, and the register of the bundled ones.

This module does not import torch before a workload is built.
"""

from __future__ import annotations

import importlib
import math
from abc import ABC, abstractmethod
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar, Generic, TypeVar, cast

from hocket._extras import require
from hocket.workloads._settings import SettingsError, WorkloadSettings

if TYPE_CHECKING:
    import torch
    from torch import Tensor, nn
    from torch.utils.data import Dataset

SettingsT = TypeVar("SettingsT", bound=WorkloadSettings)
Batch = tuple["Tensor", ...]
"""What a step gets: the model's inputs, and last the target; dimension 0 counts samples."""


_LAST = 0.01  # of the highest learning rate, at the last step


def warm_up_and_cosine(step: int, *, steps: int, warm_up_steps: int) -> float:
    """Return the part of the highest learning rate that step ``step`` has: linear rise, times half a cosine to 0.01."""
    rise = min(1.0, (step + 1) / warm_up_steps)
    cosine = 0.5 * (1.0 + math.cos(math.pi * min(1.0, step / steps)))
    return rise * (_LAST + (1.0 - _LAST) * cosine)


class BundledWorkload(ABC, Generic[SettingsT]):
    """A model, its data, and how it is trained. Nothing in it knows how many workers there are.

    Attributes:
        evaluates: Whether `evaluate` has something to say.
        warm_up_steps: Steps over which the learning rate rises.
        settings: What the run was told.
    """

    evaluates: ClassVar[bool] = True
    warm_up_steps: ClassVar[int]

    def __init__(self, settings: SettingsT) -> None:
        self.settings = settings

    @abstractmethod
    def model(self) -> nn.Module:
        """Return a freshly initialised model, on the CPU; the same on every worker."""

    def optimizer(self, model: nn.Module) -> torch.optim.Optimizer:
        """Return the optimizer of the model's parameters: Adam with torch's constants, unless told otherwise."""
        import torch

        return torch.optim.Adam(model.parameters(), lr=self.settings.lr)

    def learning_rate(self, step: int) -> float:
        """Return the learning rate of step ``step``, from 0: linear warm-up, then half a cosine."""
        return self.settings.lr * warm_up_and_cosine(step, steps=self.settings.steps, warm_up_steps=self.warm_up_steps)

    @abstractmethod
    def dataset(self) -> Dataset[Batch]:
        """Return one epoch of training data."""

    def start_epoch(self, dataset: Dataset[Batch], epoch: int) -> None:
        """Make ``dataset`` give epoch ``epoch``, whose items are others than those of the one before."""
        cast(Any, dataset).set_epoch(epoch)

    @abstractmethod
    def loss_fn(self, output: Tensor, target: Tensor) -> Tensor:
        """Mean loss over the samples of a batch; a scalar.

        Args:
            output: What the model makes of all parts of a batch but the last; perhaps in bfloat16.
            target: The last part.
        """

    def evaluate(self, model: nn.Module, picture: Path | None) -> dict[str, Any]:
        """Judge the trained model, if there is a way; every worker calls it and gets the same answer.

        Args:
            model: The trained module itself; it is in training mode afterwards.
            picture: Where to write a picture of the outcome; given to one worker only.

        Returns:
            JSON values that make a table: "title", "columns" (key to heading), "rows" (by key; the first column is
            text, the others numbers), "mean" (one more row, where a mean makes sense), and "summary", one sentence.
        """
        import torch

        with torch.no_grad():
            found = self._judge(model.eval(), next(model.parameters()).device, picture)
        model.train()
        return found

    @abstractmethod
    def _judge(self, model: nn.Module, device: torch.device, picture: Path | None) -> dict[str, Any]:
        """Return what `evaluate` does, of a model in evaluation mode on ``device``, without gradients."""


_HOMES: Mapping[str, tuple[str, str]] = {
    "edsr": ("hocket.workloads.edsr", "Edsr"),
    "resnet50": ("hocket.workloads.resnet50", "ResNet50"),
    "resnet101": ("hocket.workloads.resnet101", "ResNet101"),
    "language_model": ("hocket.workloads.language_model", "LanguageModel"),
    "translation": ("hocket.workloads.translation", "Translation"),
    "recommender": ("hocket.workloads.recommender", "Recommender"),
    "cosmoflow": ("hocket.workloads.cosmoflow", "CosmoFlow"),
    "climate": ("hocket.workloads.climate", "Climate"),
}


_NEEDS: Mapping[str, tuple[str, ...]] = {"edsr": ("PIL", "skimage", "sklearn"), "resnet101": ("sklearn",)}
"""Optional packages that hold a workload's data."""


def names() -> tuple[str, ...]:
    """Return the bundled workloads."""
    return tuple(_HOMES)


def _settings_class(name: str) -> type[WorkloadSettings]:
    if name not in _HOMES:
        script = f"; `hocket run -n 2 {name}` starts a script" if name.endswith(".py") else ""
        raise SettingsError(f"there is no workload {name!r}; there are {', '.join(_HOMES)}{script}")
    require(f"the workload {name}", *_NEEDS.get(name, ()))
    package, prefix = _HOMES[name]
    found: type[WorkloadSettings] = getattr(importlib.import_module(f"{package}.settings"), f"{prefix}Settings")
    return found


def settings_from_options(name: str, options: Mapping[str, Any]) -> WorkloadSettings:
    """Return checked settings of workload ``name`` from a user's options; see `WorkloadSettings.from_options`.

    Raises:
        SettingsError: If there is no such workload, or it cannot start with these options.
        MissingExtraError: A package that holds its data is not installed.
    """
    return _settings_class(name).from_options({**options, "workload": name})


def build(settings: WorkloadSettings) -> BundledWorkload[Any]:
    """Return the workload that ``settings`` describe. Imports torch."""
    package, prefix = _HOMES[settings.workload]
    workload: BundledWorkload[Any] = getattr(importlib.import_module(f"{package}.workload"), f"{prefix}Workload")(
        settings
    )
    return workload
