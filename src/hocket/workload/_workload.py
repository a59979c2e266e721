"""`Workload`: what one training step of a model asks for, layer by layer, on one device."""

import dataclasses
import functools
import itertools
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass

from ._share import DividedShare, Exchange, Operation, Share, WorkloadError, fields_text, word

HEAD = ("batch", "precision", "source", "unit", "optimizer_s", "update_passes", "update_values", "disturbed")
"""Fields with a line of their own at the head of a workload's text; the last two only where known, or not 0."""


@dataclass(frozen=True, slots=True)
class Layer:
    """A part of the model that is not cut by a pipeline; behind each there may be a cut.

    Attributes:
        name: Of the module.
        kind: What it is, as "Conv2d" or "transformer".
        parameters: How many.
        parameter_bytes: Of the parameters as they are computed with.
        gradient_bytes: Of their gradients.
        optimizer_bytes: Of the optimizer's state, with the parameters in full precision if those are kept beside.
        output_bytes: What passes the cut behind the layer in the forward pass, for the whole batch; as much comes back.
        operations: Of its forward pass.
        forward_s: Measured time of its forward pass over the batch; 0 if not measured.
        backward_s: Measured time of its backward pass; 0 if not measured.
        fixed_share: Part of the measured times that does not shrink with the batch.
        backward_share: Of a backward pass, which is twice a forward pass, the part that is done: half where the
            layer's own parameters are frozen, nothing where nothing before it is trained either.
        tensor_limit: Of a layer known by its shape alone: among how many ranks it can be divided at most. Degrees that
            divide this number can be used, and its operations say what of them is divided.
        reductions: All-reduces of its output that dividing it so takes in each of the forward and backward passes.
        reduced_bytes: What each of them reduces, for the whole batch.
        tensors: How many its parameters are, counted one by one; 0 if unknown.
        frozen_tensors: How many of these are not trained.
        shares: Of a captured layer: what one rank does of it, for each number of ranks that can divide it.
        block: Of a layer that is part of another one: that one's name. Parameters that are sharded are gathered for
            what of a block a stage holds.
        launch_s: Measured time of the host to launch both passes, on a device that works behind it: beside the device's
            own time, and a floor below which a small batch does not fall. 0 if the host computes, or it is unknown.
        peak_bytes: What memory holds at the fullest moment of the layer's two passes of what grows with the batch,
            besides what layers before it have saved: of what it has saved itself what is there then, gradients that
            pass, what the loss makes for a moment. 0 if unknown, and then the outputs tell it.
        peak_fixed_bytes: And of what does not grow with the batch, besides gradients of the parameters of layers behind
            it: gradients of its own, as far as they are there then, what is added to them, weights in another type.
        update_bytes: What the optimizer makes for a moment of the layer's largest tensor, where it goes from one tensor
            to the next; see `Workload.update_values`.
        tied_to: The first layer before it whose weights it computes with, too, by its name; "" if there is none, or it
            is unknown.
    """

    name: str
    kind: str
    parameters: int = 0
    parameter_bytes: int = 0
    gradient_bytes: int = 0
    optimizer_bytes: int = 0
    output_bytes: float = 0.0
    operations: tuple[Operation, ...] = ()
    forward_s: float = 0.0
    backward_s: float = 0.0
    fixed_share: float = 0.0
    backward_share: float = 1.0
    tensor_limit: int = 1
    reductions: int = 0
    reduced_bytes: float = 0.0
    tensors: int = 0
    shares: tuple[Share, ...] = ()
    block: str = ""
    launch_s: float = 0.0
    peak_bytes: float = 0.0
    peak_fixed_bytes: float = 0.0
    frozen_tensors: int = 0
    update_bytes: float = 0.0
    tied_to: str = ""

    def share(self, degree: int, *, sequence: bool = False, axis: str = "tensor") -> Share:
        """Return what one of `degree` ranks does of the layer; all of it, if so many cannot divide it.

        Args:
            degree: How many ranks.
            sequence: Whether they divide the sequence in what they do not divide otherwise.
            axis: Along which they stand.
        """
        for wanted in (sequence, False):  # where dividing the sequence changes nothing, no share says so
            for one in self.shares:
                if one.axis == axis and one.degree == degree and one.sequence == wanted:
                    return one
        divided = axis == "tensor" and degree > 1 and self.tensor_limit > 1 and self.tensor_limit % degree == 0
        each = degree if divided else 1
        parameters, gradients, state = (
            nbytes / each for nbytes in (self.parameter_bytes, self.gradient_bytes, self.optimizer_bytes)
        )
        operations = self.operations
        if divided:
            operations = _divided(operations, each, sequence)
        exchanges: tuple[Exchange, ...] = ()
        if divided and self.reductions:
            # With sequence parallelism each all-reduce is a reduce-scatter and an all-gather, of the same bytes.
            exchanges = tuple(
                Exchange(phase, "all_reduce", self.reduced_bytes, self.reductions) for phase in ("forward", "backward")
            )
        peak, fixed = (0.0, 0.0) if divided else (self.peak_bytes, self.peak_fixed_bytes)
        return Share(each, parameters, gradients, state, operations, exchanges, peak_bytes=peak, peak_fixed_bytes=fixed)

    @property
    def flops(self) -> float:
        """Floating-point operations of the forward pass over the batch."""
        return sum(one.flops for one in self.operations if one.phase != "backward")

    @property
    def saved_bytes(self) -> float:
        """Activations that the backward pass needs, for the whole batch."""
        return sum(one.saved_bytes for one in self.operations)

    @property
    def state_bytes(self) -> int:
        """Parameters, gradients and optimizer state together."""
        return self.parameter_bytes + self.gradient_bytes + self.optimizer_bytes


@functools.lru_cache(maxsize=1024)  # like layers share operations
def _divided(operations: tuple[Operation, ...], degree: int, sequence: bool) -> tuple[Operation, ...]:
    """Return what each of `degree` ranks does of a layer that they divide, with its sequence or without."""
    whole = () if sequence else ("shared", "repeated")
    return tuple(one.over(1 if one.part in whole else degree) for one in operations)


@dataclass(frozen=True)
class Workload:
    """One training step on one device: a chain of layers.

    Attributes:
        name: Of the model.
        batch: Samples that activations, FLOPs and times refer to; they grow in proportion to it.
        layers: In the order of the forward pass.
        precision: Element type of the computation, as "float32" or "bfloat16"; "float8" where products of linear layers
            are in float8 and all else in bfloat16 (`in_float8`).
        source: Where the numbers are from: "analytic", "captured on cpu", ...; behind a comma what is not known of it.
        unit: What a sample is, as "image" or "sequence".
        optimizer_s: Measured time of the optimizer's step; 0 if not measured.
        update_passes: How many times as much as the gradients have the optimizer's kernels read and write; 0 where it
            is one kernel, whose state says it.
        update_values: How many times as much as the gradients are the values that the optimizer makes of all parameters
            at a time, which are there for a moment; None if unknown: 1 then if its state may be Adam's, and 0 if not.
        disturbed: Cores that others computed on while times were measured, which are far too long then; 0 if none.
        finer: What the layers consist of, in the same order: parts that no rank divides, between which pipelines can be
            cut, too; none if unknown.
    """

    name: str
    batch: int
    layers: tuple[Layer, ...]
    precision: str = "float32"
    source: str = ""
    unit: str = "sample"
    optimizer_s: float = 0.0
    update_passes: float = 0.0
    finer: tuple[Layer, ...] = ()
    disturbed: float = 0.0
    update_values: float | None = None

    def __post_init__(self) -> None:
        if self.batch < 1:
            raise WorkloadError(f"workload {self.name!r}: a batch of {self.batch} samples; give 1 or more")
        for layers in (self.layers, self.finer):
            twice = next((name for name, count in Counter(one.name for one in layers).items() if count > 1), None)
            if twice is not None:
                raise WorkloadError(f"workload {self.name!r}: two layers are called {twice!r}; give each its own name")
            before: set[str] = set()
            for one in layers:
                if one.tied_to and one.tied_to not in before:
                    rule = f"layer {one.name!r} is tied to {one.tied_to!r}, and no layer before it is called so"
                    raise WorkloadError(f"workload {self.name!r}: {rule}; name the first that has the weights")
                before.add(one.name)

    @property
    def parameters(self) -> int:
        """How many parameters all layers have."""
        return sum(layer.parameters for layer in self.layers)

    @property
    def parameter_bytes(self) -> int:
        """Bytes of all parameters as they are computed with."""
        return sum(layer.parameter_bytes for layer in self.layers)

    @property
    def gradient_bytes(self) -> int:
        """Bytes of all gradients."""
        return sum(layer.gradient_bytes for layer in self.layers)

    @property
    def optimizer_bytes(self) -> int:
        """Bytes of the optimizer's state."""
        return sum(layer.optimizer_bytes for layer in self.layers)

    @property
    def saved_bytes(self) -> float:
        """Activations that a backward pass over `batch` samples needs."""
        return sum(layer.saved_bytes for layer in self.layers)

    @property
    def flops(self) -> float:
        """Floating-point operations of a forward pass over `batch` samples."""
        return sum(layer.flops for layer in self.layers)

    def degrees(self, axis: str = "tensor") -> tuple[int, ...]:
        """Return the numbers of ranks along an axis that are known to divide captured layers, ascending."""
        return tuple(sorted({share.degree for layer in self.layers for share in layer.shares if share.axis == axis}))

    def divided(self, degree: int, *, sequence: bool = False, axis: str = "tensor") -> DividedShare:
        """Return how much of the layers `degree` ranks divide; see `Layer.share`."""
        shares = [layer.share(degree, sequence=sequence, axis=axis) for layer in self.layers]
        work = [one for share in shares for one in share.operations]
        flops = sum(one.flops for one in work if one.phase != "backward")
        mine = sum(one.parameter_bytes for one in shares), flops, sum(one.saved_bytes for one in work)
        return DividedShare.of(degree, (self.parameter_bytes, self.flops, self.saved_bytes), mine)

    @property
    def step_flops(self) -> float:
        """Floating-point operations of a forward and a backward pass over `batch` samples."""
        return sum(layer.flops * (1 + 2 * layer.backward_share) for layer in self.layers)

    def in_float8(self) -> "Workload":
        """Return the same with products of linear layers in float8; what is saved and held stays in 16 and 32 bits.

        Raises:
            WorkloadError: it is not in bfloat16, was measured, or does not say which products are linear layers'.
        """
        if self.precision == "float8":
            return self
        why = ""
        if self.precision != "bfloat16":
            why = f"it is in {self.precision}, and float8 is planned beside bfloat16"
        elif self.measured:
            why = "its times were measured in bfloat16"
        elif not any(one.weight_bytes for layer in self.layers for one in layer.operations):
            why = "nothing says which of its products are linear layers'"
        if why:
            remedy = "take a shape, as llama-3-8b, or leave float8 out"
            raise WorkloadError(f"workload {self.name!r} cannot be planned in float8: {why}; {remedy}")
        return dataclasses.replace(self, precision="float8")

    @functools.cached_property
    def number_formats(self) -> dict[str, float]:
        """Of the floating-point operations of a step, the part in each number format, the largest first."""
        found: dict[str, float] = {}
        for layer in self.layers:
            for one in layer.operations:
                times = 1 + 2 * layer.backward_share if one.phase == "both" else 1.0
                name = "bfloat16" if self.precision == "float8" and not one.weight_bytes else self.precision
                name = one.number_format or name
                found[name] = found.get(name, 0.0) + times * one.flops
        total = sum(found.values())
        rows = sorted(found.items(), key=lambda row: -row[1])
        return {name: flops / total for name, flops in rows if flops} if total else {}

    @functools.cached_property
    def in_steps(self) -> "Workload":
        """The same with the finer layers for its layers, if it has any."""
        return dataclasses.replace(self, layers=self.finer, finer=()) if self.finer else self

    @functools.cached_property
    def blocks(self) -> tuple[int, ...]:
        """Of every layer the number of its block, from 0 on; a layer that is part of no other is one by itself."""
        numbers: dict[str, int] = {}
        return tuple(numbers.setdefault(layer.block or layer.name, len(numbers)) for layer in self.layers)

    @functools.cached_property
    def kinds(self) -> tuple[tuple[Layer, ...], tuple[int, ...]]:
        """Layers that are unlike in more than their names, and of every layer the number of the one that it is like."""
        numbers: dict[Layer, int] = {}
        index = [numbers.setdefault(dataclasses.replace(layer, name=""), len(numbers)) for layer in self.layers]
        return tuple(numbers), tuple(index)

    def shares_of_kinds(self, degree: int, *, sequence: bool = False, axis: str = "tensor") -> tuple[Share, ...]:
        """Return what `Layer.share` does of each of `kinds`, which is worked out once."""
        key = axis, degree, sequence
        if key not in self._known_shares:
            self._known_shares[key] = tuple(one.share(degree, sequence=sequence, axis=axis) for one in self.kinds[0])
        return self._known_shares[key]

    @functools.cached_property
    def _known_shares(self) -> dict[tuple[str, int, bool], tuple[Share, ...]]:
        return {}

    @functools.cached_property
    def measured(self) -> bool:
        """Whether layers have measured times."""
        return any(layer.forward_s > 0 for layer in self.layers)

    @property
    def forward_s(self) -> float:
        """Measured time of the forward pass over `batch` samples; 0 if not measured."""
        return sum(layer.forward_s for layer in self.layers)

    @property
    def backward_s(self) -> float:
        """Measured time of the backward pass; 0 if not measured."""
        return sum(layer.backward_s for layer in self.layers)

    def stages(self, cuts: Sequence[int]) -> tuple[tuple[Layer, ...], ...]:
        """Return the layers between cuts.

        Args:
            cuts: Indices of the layers with which the second and later parts begin, ascending.
        """
        edges = [0, *cuts, len(self.layers)]
        return tuple(self.layers[a:b] for a, b in itertools.pairwise(edges))

    def with_times(self, forward_s: float, backward_s: float) -> "Workload":
        """Return the same with these times of the whole, dealt to layers by their FLOPs (evenly if none has any)."""
        total = self.flops
        count = max(1, len(self.layers))
        shares = [layer.flops / total if total else 1 / count for layer in self.layers]
        layers = tuple(
            dataclasses.replace(layer, forward_s=forward_s * share, backward_s=backward_s * share)
            for layer, share in zip(self.layers, shares, strict=True)
        )
        return dataclasses.replace(self, layers=layers, finer=())

    def __str__(self) -> str:
        """Return the text that `parse` reads. A layer like an earlier one is `layer NAME like EARLIER`."""
        lines = [f"workload {word(self.name)}"]
        left_out = {"update_values": self.update_values is None, "disturbed": not self.disturbed}
        lines += [f"{name} {word(str(getattr(self, name)))}" for name in HEAD if not left_out.get(name)]
        seen: dict[Layer, str] = {}
        for kind, layer in (*(("layer", one) for one in self.layers), *(("step", one) for one in self.finer)):
            nameless = dataclasses.replace(layer, name="")
            if kind == "layer" and nameless in seen:
                lines.append(f"layer {word(layer.name)} like {word(seen[nameless])}")
                continue
            seen[nameless] = layer.name
            lines.append(f"{kind} {word(layer.name)}{fields_text(layer)}")
            lines += [f"  {word(one.name)}{fields_text(one)}" for one in layer.operations]
            for share in layer.shares:
                lines.append(f"  over {share.degree}{fields_text(share)}")
                lines += [f"    {word(one.name)}{fields_text(one)}" for one in share.operations]
                lines += [f"    exchange {one.phase} {one.kind}{fields_text(one)}" for one in share.exchanges]
        return "\n".join(lines) + "\n"
