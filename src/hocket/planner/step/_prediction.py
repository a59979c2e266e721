"""What a plan does on a cluster: where a step's time goes, its memory, its rates, and how sure that is."""

import functools
from collections.abc import Mapping
from dataclasses import dataclass

from ..network import Constants, Cost
from ..plan import Plan
from ._interval import spread
from ._likeness import alike, untried
from ._memory import Memory


@dataclass(frozen=True, slots=True)
class StepParts:
    """Where a step's time goes on the rank that computes longest; the parts sum to the step.

    Attributes:
        compute: Forward and backward passes.
        recompute: Forward passes that are done again.
        tensor: Exchanges between the workers that share tensors or samples.
        messages: Between stages of the pipeline.
        bubble: Waiting for the pipeline to fill and to drain.
        gather: Collecting sharded parameters, as far as nothing hides it.
        gradients: Reducing gradients, as far as nothing hides it.
        optimizer: The update of the parameters.
        straggle: Waiting for the slowest rank.
        crowding: Waiting for processors on which other ranks compute, as far as pipelines are not to blame anyway.
        interference: What collectives take of the computation that they run beside.
        overhead: What no formula sees: the loop of a step, of a stage, of a block.
    """

    compute: float = 0.0
    recompute: float = 0.0
    tensor: float = 0.0
    messages: float = 0.0
    bubble: float = 0.0
    gather: float = 0.0
    gradients: float = 0.0
    optimizer: float = 0.0
    straggle: float = 0.0
    crowding: float = 0.0
    interference: float = 0.0
    overhead: float = 0.0

    @property
    def total(self) -> float:
        """The step."""
        return sum(seconds for _, seconds in self.rows())

    def scaled(self, times: float) -> "StepParts":
        """Return the parts of a step that takes so many times as long."""
        return StepParts(*(seconds * times for _, seconds in self.rows()))

    @property
    def exposed(self) -> float:
        """Communication that nothing hides."""
        return self.tensor + self.messages + self.gather + self.gradients

    @property
    def idle_share(self) -> float:
        """Of the step: what a rank waits for other stages and late ranks."""
        return (self.bubble + self.straggle) / self.total

    def rows(self) -> list[tuple[str, float]]:
        """Names with their seconds."""
        return [(name, getattr(self, name)) for name in self.__slots__]

    @property
    def blame(self) -> str:
        """The largest part that one device alone would not have; "" if there is none."""
        extra = ("tensor", "messages", "bubble", "gather", "gradients", "straggle", "recompute", "crowding")
        most = max((*extra, "interference", "overhead"), key=lambda name: getattr(self, name))
        return most if getattr(self, most) > 0 else ""


@dataclass(frozen=True)
class Prediction:
    """What a plan does on a cluster.

    Attributes:
        plan: With all degrees filled in.
        workload: Its name.
        cluster: Its name.
        workers: How many.
        batch: Samples of a global batch.
        parts: Of the step.
        memory: Of the worker that needs most.
        memory_limit: Of a worker, 0 if unknown.
        cuts: Layers with which the later stages of the pipeline begin, of those that `Profile.of` tells.
        gradient_cost: One reduction of all gradients of the busiest worker, hidden or not.
        flops: Of one sample's forward and backward pass.
        device_flops: FLOP/s of a device by its data sheet, in the format in which most products run; 0 if unknown.
        counted: Whether what layers take was counted from the operators of a captured model, which no fit knows.
        number_formats: In which products run there, with the part of the floating-point operations, the largest first.
        constants: What was taken to be reached.
        measured: Whether the layers' times were measured.
        spared_s: Seconds that fusion and float8 are assumed to take away from the computation of a step.
        recurrent_s: Seconds of a step that the steps of recurrent layers are counted to take.
        on_processors: Whether devices are processors, of whose caches nothing is known.
        disturbed: Cores that others computed on while the layers were measured.
    """

    plan: Plan
    workload: str
    cluster: str
    workers: int
    batch: int
    parts: StepParts
    memory: Memory
    memory_limit: int
    cuts: tuple[int, ...]
    gradient_cost: Cost
    flops: float
    device_flops: float = 0.0
    constants: Constants = Constants()
    measured: bool = False
    spared_s: float = 0.0
    number_formats: tuple[tuple[str, float], ...] = ()
    counted: bool = False
    recurrent_s: float = 0.0
    on_processors: bool = False
    disturbed: float = 0.0

    @functools.cached_property
    def step_s(self) -> float:
        """Seconds of a step."""
        return self.parts.total

    @property
    def throughput(self) -> float:
        """Samples per second, of all workers."""
        return self.batch / self.step_s

    @property
    def fits(self) -> bool:
        """Whether every worker has the memory."""
        return not self.memory_limit or self.memory.total <= self.memory_limit

    @property
    def flops_per_worker(self) -> float:
        """FLOP/s of each worker that forward and backward passes make, without what is computed again."""
        return self.throughput * self.flops / self.workers

    @property
    def mfu(self) -> float:
        """Model FLOPs utilisation: these FLOP/s by what the device's data sheet says of `mfu_format`; 0 if unknown.

        Where layers were measured to be faster than that, it is not this device's figure, and nobody knows it.
        """
        return 0.0 if self.beyond_peak or not self.device_flops else self.flops_per_worker / self.device_flops

    @property
    def beyond_peak(self) -> bool:
        """Whether layers that were measured elsewhere make more FLOP/s than the device is said to."""
        return self.flops_per_worker > self.device_flops > 0

    @property
    def mfu_format(self) -> str:
        """The number format of whose peak `mfu` is a part: that in which most products run; "" if unknown."""
        return peak_format(dict(self.number_formats))

    @property
    def interval_s(self) -> tuple[float, float]:
        """Seconds between which a step is with 80%; see `_interval.py`."""
        hidden_s = min(max(0.0, self.gradient_cost.seconds - self.parts.gradients), self.parts.compute)
        times = functools.partial(
            spread, dict(self.parts.rows()), self.constants, workers=self.workers, hidden_s=hidden_s,
            measured=self.measured, spared_s=self.spared_s, recurrent_s=self.recurrent_s, counted=self.counted,
            on_processors=self.on_processors, nbytes=self.memory.state + self.memory.activations,
            alike=alike(self.plan, self.constants, self.workers), untried=bool(untried(self.plan, self.constants)),
        )  # fmt: skip
        return self.step_s / times(disturbed=self.disturbed > 0), self.step_s * times()

    @property
    def throughput_interval(self) -> tuple[float, float]:
        """Samples per second of all workers, between which they are with 80%."""
        low, high = self.interval_s
        return self.batch / high, self.batch / low


def peak_format(formats: Mapping[str, float]) -> str:
    """Return of whose peak MFU is a part: bfloat16's where products are in float8, and TF32's where they are three."""
    told = {"float8": "bfloat16", "3xtf32": "tf32"}
    counted: dict[str, float] = {}
    for name, part in formats.items():
        counted[told.get(name, name)] = counted.get(told.get(name, name), 0.0) + part
    return max(counted, key=lambda name: counted[name], default="")
