"""What a run can be told: plain values, checked before anything starts. This module does not import torch."""

import dataclasses
import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, ClassVar, Self

DEVICES = ("auto", "cpu", "cuda")


class SettingsError(ValueError):
    """A value that a run cannot start with; the message names the option, the value and the remedy."""


@dataclass(frozen=True, kw_only=True)
class WorkloadSettings:
    """What every workload can be told.

    Attributes:
        samples: What the samples are called, in the plural.
        unit: What is counted in throughputs: the samples, or parts of them.
        samples_per_epoch: Samples in one epoch; what is left of them after whole batches is not used.
        workload: Its name.
        workers: Processes that train together.
        steps: Optimizer steps.
        batch_size: Samples in one step over all workers.
        lr: Highest learning rate.
        seed: Chooses the initial weights and the data.
        device: "auto" takes a GPU when there is one, else the CPU.
        autocast: Run the forward pass in bfloat16 where torch considers it safe.

    Raises:
        SettingsError: If a value is out of its range.
    """

    samples: ClassVar[str] = "images"
    unit: ClassVar[str] = "images"
    samples_per_epoch: ClassVar[int]

    workload: str
    workers: int
    steps: int
    batch_size: int
    lr: float
    seed: int = 0
    device: str = "auto"
    autocast: bool = False

    def __post_init__(self) -> None:
        if self.workers < 1:
            raise SettingsError(f"-n {self.workers}: there must be at least one worker")
        if self.batch_size < 1:
            raise SettingsError(f"--batch-size {self.batch_size}: there must be at least one sample in a batch")
        if self.batch_size < self.workers:
            raise SettingsError(
                f"--batch-size {self.batch_size} is smaller than -n {self.workers}: the batch is shared among all "
                f"workers, and each needs at least one sample; use --batch-size {self.workers} or more"
            )
        if self.batch_size > self.samples_per_epoch:
            raise SettingsError(
                f"--batch-size {self.batch_size}: an epoch has only {self.samples_per_epoch} {self.samples}"
            )
        if self.steps < 1:
            raise SettingsError(f"--steps {self.steps}: there must be at least one step")
        if not (math.isfinite(self.lr) and self.lr > 0.0):
            raise SettingsError(f"--lr {self.lr}: the learning rate must be a positive number")
        if self.seed < 0:
            raise SettingsError(f"--seed {self.seed}: the seed must not be negative")
        if self.device not in DEVICES:
            raise SettingsError(f"--device {self.device}: not one of {', '.join(DEVICES)}")

    @classmethod
    def from_options(cls, options: Mapping[str, Any]) -> Self:
        """Return settings from the options that a user gave, and defaults for the others.

        Args:
            options: Options by field name, and "epochs" as another way to say "steps"; with "workload" and "workers".

        Raises:
            SettingsError: If an option is none of this workload's, or a value is out of its range.
        """
        options = dict(options)
        own = {field.name for field in dataclasses.fields(cls)} - {"workload", "workers"}
        for name in options.keys() - own - {"workload", "workers", "epochs"}:
            raise SettingsError(
                f"{_flag(name)}: {options['workload']} takes no such option; it takes "
                + ", ".join(sorted(_flag(other) for other in own | {"epochs"}))
            )
        if "steps" in options and "epochs" in options:
            raise SettingsError(
                f"--steps {options['steps']} and --epochs {options['epochs']} both say how long; give one"
            )
        options = {**cls.defaults(options), **options}
        if (epochs := options.pop("epochs", None)) is not None:
            if epochs < 1:
                raise SettingsError(f"--epochs {epochs}: there must be at least one epoch")
            # A batch that is too small or too large is refused with the other values.
            options["steps"] = epochs * max(1, cls.samples_per_epoch // max(1, options["batch_size"]))
        return cls(**options)

    @classmethod
    def defaults(cls, options: Mapping[str, Any]) -> dict[str, Any]:
        """Return the values for what was not given; they may depend on what was."""
        raise NotImplementedError

    def check_data(self) -> None:
        """Read the data that the user has named, before ranks start that would each fail with it.

        Raises:
            SettingsError: It is not what this workload reads.
        """

    @property
    def units_per_sample(self) -> int:
        """How many of `unit` one sample has."""
        return 1


def check_batch_norm(settings: WorkloadSettings, image_size: int) -> None:
    """Refuse images and a batch that leave batch normalisation one value a channel in the last stage of a ResNet.

    Raises:
        SettingsError: A worker has one image, of which five halvings leave one pixel.
    """
    if settings.batch_size // settings.workers < 2 and image_size == 32:
        raise SettingsError(
            f"--image-size {image_size} leaves one pixel per image at the end, and one image per worker (--batch-size "
            f"{settings.batch_size}, -n {settings.workers}) is too little for batch normalisation; enlarge one of them"
        )


@dataclass(frozen=True, kw_only=True, slots=True)
class Recipe:
    """How a size of a workload is trained unless told otherwise."""

    batch_size: int  # samples in a step
    steps: int  # optimizer steps
    lr: float  # highest learning rate


@dataclass(frozen=True, kw_only=True)
class SizedSettings(WorkloadSettings):
    """`WorkloadSettings` of a workload that comes in sizes: "demo" by default, each with a recipe of its own."""

    recipes: ClassVar[Mapping[str, Recipe]]  # recipes by the size's name

    size: str  # one of them

    def __post_init__(self) -> None:
        super().__post_init__()
        self.recipe(self.size)

    @classmethod
    def recipe(cls, size: str) -> Recipe:
        """Return the recipe of a size. Raises SettingsError: there is no such size."""
        if size not in cls.recipes:
            raise SettingsError(f"--size {size}: not one of {', '.join(cls.recipes)}")
        return cls.recipes[size]

    @classmethod
    def defaults(cls, options: Mapping[str, Any]) -> dict[str, Any]:
        """Return the size's own values."""
        size = options.get("size", "demo")
        recipe = cls.recipe(size)
        return {"size": size, "batch_size": recipe.batch_size, "steps": recipe.steps, "lr": recipe.lr}


@dataclass(frozen=True, slots=True)
class ThroughputUnit:
    """A countable part of the data.

    Attributes:
        samples: What the samples are called, in the plural.
        name: What is counted, in the plural; the samples themselves where there is one in each.
        per_sample: How many one sample has.
    """

    samples: str
    name: str
    per_sample: int

    @classmethod
    def of(cls, settings: WorkloadSettings) -> Self:
        """Return the unit of a workload."""
        return cls(settings.samples, settings.unit, settings.units_per_sample)

    @classmethod
    def from_config(cls, config: dict[str, Any]) -> Self:
        """Return the unit that a run's config names."""
        return cls(**config["unit"])


def _flag(name: str) -> str:
    return "--" + name.replace("_", "-")
