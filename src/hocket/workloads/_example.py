"""A workload in the parts that any training loop can use: for tests, and for whoever compares ways to train."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from hocket.workloads._workload import build, settings_from_options

if TYPE_CHECKING:
    import torch
    from torch import Tensor, nn
    from torch.utils.data import Dataset

    from hocket.workloads._workload import Batch

# What makes each of them run anywhere, and always on the same data.
_OPTIONS: Mapping[str, Mapping[str, Any]] = {"resnet50": {"synthetic": True}, "recommender": {"synthetic": True}}


@dataclass(frozen=True, slots=True)
class Example:
    """A model and what it learns from: ``loss_fn(model(*batch[:-1]), batch[-1])``, a mean over the samples.

    Attributes:
        name: The workload's.
        model: Freshly initialised, on the CPU; the same for the same seed.
        loss_fn: Loss of the model's output and the target.
        dataset: Items are tuples: the model's positional inputs, and last the target.
        batch_size: Samples in a batch.
        optimizer: Makes the workload's own optimizer of a model.
    """

    name: str
    model: nn.Module
    loss_fn: Callable[[Tensor, Tensor], Tensor]
    dataset: Dataset[Batch]
    batch_size: int
    optimizer: Callable[[nn.Module], torch.optim.Optimizer]

    def batches(self, count: int) -> list[Batch]:
        """Return the first ``count`` batches of the data set, all of them whole."""
        from torch.utils.data import DataLoader, Subset

        some = Subset(self.dataset, range(count * self.batch_size))
        return [tuple(batch) for batch in DataLoader(some, batch_size=self.batch_size)]


def example(name: str, size: str = "tiny", **options: Any) -> Example:
    """Return a bundled workload, ready to be trained by other means than `hocket train`. Imports torch.

    The data is what comes with Python, with the workloads' packages, or made up; nothing is fetched.

    Args:
        name: One of `names`.
        size: One of the workload's; all of them have "tiny", which makes a step in milliseconds, and "full".
        options: Options as `hocket train` has them, with underscores: "batch_size", "seed" and so on.

    Raises:
        SettingsError: There is no such workload, or it has no such option.
    """
    import torch

    settings = settings_from_options(name, {"workers": 1, "size": size, **_OPTIONS.get(name, {}), **options})
    workload = build(settings)
    with torch.random.fork_rng(devices=()):
        torch.manual_seed(settings.seed)
        model = workload.model()
    return Example(name, model, workload.loss_fn, workload.dataset(), settings.batch_size, workload.optimizer)
