"""What one rank does of a layer, and what it then exchanges with the ranks that do the rest."""

import dataclasses
import json
import shlex
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal, get_args

Part = Literal["shared", "divided", "core", "repeated"]
PARTS: tuple[str, ...] = get_args(Part)
PHASES = ("forward", "backward")
FORMATS = ("float8", "float16", "bfloat16", "tf32", "3xtf32", "float32", "float64")
"""Number formats in which products run; "3xtf32" is three products in TF32 that together are nearly one in float32."""
OPERATION_KINDS = ("", "strided", "batch norm", "depthwise", "recurrent")
KINDS = ("all_reduce", "all_gather", "reduce_scatter", "all_to_all")


class WorkloadError(ValueError):
    """A workload cannot be read or made; the message says where and what to do."""


@dataclass(frozen=True, slots=True)
class Operation:
    """One kernel, or several that belong together, of a layer over the whole batch.

    Attributes:
        name: What it is called.
        flops: Floating-point operations.
        moved_bytes: What it reads and writes in the device's memory, at the least.
        saved_bytes: What it leaves in memory for the backward pass.
        part: What tensor parallelism makes of it: "divided" among the group; "shared", every rank does all of it unless
            the sequence is divided; "core", divided, and done again in the backward pass by selective recomputation,
            which then keeps nothing of it; "repeated", as shared, and done again like a core.
        calls: Kernels that it launches.
        weight_bytes: Of a linear layer's product, the weights among the bytes that it moves, in 16 bits; such products
            can be in float8. 0 of all else.
        fixed_bytes: Of the bytes that it moves, those that do not grow with the batch: weights. A linear layer's
            product of known weights (`weight_bytes`) needs no other word of them.
        saved_fixed_bytes: Of the bytes that it leaves, likewise: weights in another type, as autocast makes them.
        phase: Of which pass it is: "both", the forward pass, and the backward pass takes twice as much; or "forward" or
            "backward" alone, where each is known.
        number_format: In which its products run, of `FORMATS`, or those for whose sake it reads and writes; "" for the
            workload's precision.
        kind: Of kernels that only read and write, what makes them slower than others: "strided", which go through
            tensors whose numbers lie in different orders; "batch norm", where channels are not last, by what it would
            move in 16 bits; "" for none. "depthwise": convolutions with one window a channel, whose bytes are four for
            each product. And "recurrent": the kernels of a recurrent layer's steps, each of which waits for the one
            before.
        performed_flops: Those that are computed, where they are known to be others than `flops`: attention leaves out
            what is masked, and fills blocks.
        inner_calls: Of its kernels, those that a library launches inside of an operator of PyTorch (cuDNN's for the
            steps of a recurrent layer): each takes its launch on the device, and the host one operator for all.
    """

    name: str
    flops: float = 0.0
    moved_bytes: float = 0.0
    saved_bytes: float = 0.0
    part: Part = "shared"
    calls: int = 1
    weight_bytes: float = 0.0
    fixed_bytes: float = 0.0
    saved_fixed_bytes: float = 0.0
    phase: str = "both"
    number_format: str = ""
    kind: str = ""
    performed_flops: float = 0.0
    inner_calls: int = 0

    def __post_init__(self) -> None:
        for what, known in (
            ("part", PARTS), ("phase", ("both", *PHASES)), ("number_format", ("", *FORMATS)), ("kind", OPERATION_KINDS),
        ):  # fmt: skip
            if (value := getattr(self, what)) not in known:
                raise WorkloadError(f"operation {self.name!r}: {what} {value!r} is not one of {', '.join(known)}")

    @property
    def again(self) -> bool:
        """Whether selective recomputation does it again."""
        return self.part in ("core", "repeated")

    def over(self, degree: float) -> "Operation":
        """Return what each of `degree` ranks does of it."""
        if degree == 1:
            return self
        names = (
            "flops", "moved_bytes", "saved_bytes", "weight_bytes", "fixed_bytes", "saved_fixed_bytes",
            "performed_flops",
        )  # fmt: skip
        return dataclasses.replace(self, **{name: getattr(self, name) / degree for name in names})


@dataclass(frozen=True, slots=True)
class Exchange:
    """Collectives that are alike, among the ranks that divide a layer; all of them wait for each.

    Attributes:
        phase: "forward" or "backward".
        kind: "all_reduce", "all_gather", "reduce_scatter" or "all_to_all".
        nbytes: Bytes of each one's full tensor, for the whole batch.
        count: How many.
        with_batch: Whether the bytes grow with the batch; those of parameters' gradients do not.
    """

    phase: str
    kind: str
    nbytes: float
    count: int = 1
    with_batch: bool = True

    def __post_init__(self) -> None:
        for name, known in (("phase", PHASES), ("kind", KINDS)):
            if getattr(self, name) not in known:
                raise WorkloadError(f"an exchange's {name} {getattr(self, name)!r} is not one of {', '.join(known)}")


@dataclass(frozen=True, slots=True)
class Share:
    """One rank's share of a layer that so many divide.

    Attributes:
        degree: Among how many; 1 where every rank has all of it.
        parameter_bytes: Of the parameters that the rank holds.
        gradient_bytes: Of their gradients.
        optimizer_bytes: Of the optimizer's state.
        operations: What the rank does of the layer's, over the whole batch.
        exchanges: What it exchanges with the others.
        sequence: Whether what is not divided otherwise is divided along the sequence.
        axis: The axis of parallelism whose ranks divide the layer, by its name.
        forward_s: Measured time of the rank's part of the forward pass over the batch; 0 if not measured, and then that
            of the layer tells it.
        backward_s: Measured time of its part of the backward pass.
        fixed_share: Part of these times that does not shrink with the batch.
        peak_bytes: As `Layer.peak_bytes`, of the rank.
        peak_fixed_bytes: As `Layer.peak_fixed_bytes`, of the rank.
    """

    degree: int
    parameter_bytes: float = 0
    gradient_bytes: float = 0
    optimizer_bytes: float = 0
    operations: tuple[Operation, ...] = ()
    exchanges: tuple[Exchange, ...] = ()
    sequence: bool = False
    axis: str = "tensor"
    forward_s: float = 0.0
    backward_s: float = 0.0
    fixed_share: float = 0.0
    peak_bytes: float = 0.0
    peak_fixed_bytes: float = 0.0

    @property
    def state_bytes(self) -> float:
        """Parameters, gradients and optimizer state together."""
        return self.parameter_bytes + self.gradient_bytes + self.optimizer_bytes


@dataclass(frozen=True, slots=True)
class DividedShare:
    """How much of a model ranks divide, from 0 (every rank has all of it) to 1 (every rank has its part alone).

    Attributes:
        parameters: Of the bytes of parameters.
        flops: Of the floating-point operations.
        activations: Of the bytes that the backward pass needs.
    """

    parameters: float
    flops: float
    activations: float

    @classmethod
    def of(cls, degree: int, whole: Sequence[float], mine: Sequence[float]) -> "DividedShare":
        """Return it by what one device and one of `degree` ranks have: parameter bytes, FLOPs, activation bytes."""
        pairs = zip(whole, mine, strict=True)
        found = (round((1 - b / a) / (1 - 1 / degree), 4) if a and degree > 1 else 0.0 for a, b in pairs)
        return cls(*(min(1.0, max(0.0, one)) for one in found))  # a divided layer may keep less, or more, than a whole

    def __str__(self) -> str:
        """Return it as "divides 52% of parameters, 97% of FLOPs, 60% of activations"."""
        parts = zip(
            (self.parameters, self.flops, self.activations), ("parameters", "FLOPs", "activations"), strict=True
        )
        return "divides " + ", ".join(f"{share:.0%} of {name}" for share, name in parts)


def word(text: str) -> str:
    """Return one word of a workload's text, quoted where it must be."""
    return shlex.quote(text)


# What has a place of its own in the text.
_PLACED = ("name", "operations", "shares", "degree", "exchanges")


def placed(kind: type[Any]) -> tuple[str, ...]:
    """Return the fields that have a place of their own in the text, not a name."""
    return (*_PLACED, "phase", "kind") if kind is Exchange else _PLACED


def fields_text(value: Any) -> str:
    """Return every field that is not as it is by default, as " name=value"."""
    words = []
    for one in dataclasses.fields(value):
        entry = getattr(value, one.name)
        if one.name in placed(type(value)) or entry == one.default:
            continue
        words.append(f" {one.name}={word(entry) if isinstance(entry, str) else json.dumps(entry)}")
    return "".join(words)
